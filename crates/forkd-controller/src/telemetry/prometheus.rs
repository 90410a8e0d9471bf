//! The text that Prometheus reads, version 0.0.4: families of samples, each with its help and its type.

use std::fmt::Write;

/// What goes with the text.
pub(crate) const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// A text under way.
#[derive(Debug, Default)]
pub(crate) struct Page(String);

impl Page {
    /// Begins a family: all its samples come next.
    pub(crate) fn family(&mut self, name: &str, kind: &str, help: &str) {
        let help = help.replace('\\', r"\\").replace('\n', r"\n");
        // Writing to a string does not fail.
        let _ = write!(self.0, "# HELP {name} {help}\n# TYPE {name} {kind}\n");
    }

    /// One sample.
    pub(crate) fn sample(&mut self, name: &str, labels: &[(&str, &str)], value: impl std::fmt::Display) {
        self.0.push_str(name);
        for (index, (label, text)) in labels.iter().enumerate() {
            let before = if index == 0 { '{' } else { ',' };
            let _ = write!(self.0, "{before}{label}=\"{}\"", escaped(text));
        }
        let after = if labels.is_empty() { "" } else { "}" };
        let _ = writeln!(self.0, "{after} {value}");
    }

    /// A family of one sample without labels.
    pub(crate) fn single(&mut self, name: &str, kind: &str, help: &str, value: impl std::fmt::Display) {
        self.family(name, kind, help);
        self.sample(name, &[], value);
    }

    pub(crate) fn finish(self) -> String {
        self.0
    }
}

fn escaped(text: &str) -> String {
    text.replace('\\', r"\\").replace('"', r#"\""#).replace('\n', r"\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_in_a_label_ends_it() {
        let mut page = Page::default();
        page.family("a_total", "counter", "of\nlines");
        page.sample("a_total", &[("x", "say \"no\"\\\n"), ("y", "1")], 7);
        page.single("b", "gauge", "B.", 1.5);
        let expected = "# HELP a_total of\\nlines\n# TYPE a_total counter\n\
                        a_total{x=\"say \\\"no\\\"\\\\\\n\",y=\"1\"} 7\n\
                        # HELP b B.\n# TYPE b gauge\nb 1.5\n";
        assert_eq!(page.finish(), expected);
    }
}
