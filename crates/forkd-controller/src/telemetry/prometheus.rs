//! The text that Prometheus reads, version 0.0.4: families of samples, each with its help and its type.

use prometheus::TextEncoder;
use prometheus::core::Collector;
use prometheus::proto::{Counter, Gauge, LabelPair, Metric, MetricFamily, MetricType};

/// What goes with the text.
pub(crate) const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// A text under way. Its families come in the order in which they are added: a registry would sort them.
#[derive(Debug, Default)]
pub(crate) struct Page(Vec<MetricFamily>);

impl Page {
    /// Adds what `collector` has, in the order of its labels.
    pub(crate) fn add(&mut self, collector: &impl Collector) {
        for mut family in collector.collect() {
            let values = |sample: &Metric| -> Vec<String> {
                sample.get_label().iter().map(|label| label.value().to_owned()).collect()
            };
            family.mut_metric().sort_by_cached_key(values);
            self.0.push(family);
        }
    }

    /// Adds what `collector` has, and the same again under its older name, for dashboards that read that one.
    pub(crate) fn add_renamed(&mut self, collector: &impl Collector, older: &str) {
        self.add(collector);
        let Some(mut family) = self.0.last().cloned() else { return };
        let help = format!("Deprecated name of {}; a later release removes it.", family.name());
        family.set_name(older.to_owned());
        family.set_help(help);
        self.0.push(family);
    }

    /// Begins a family: all its samples come next.
    pub(crate) fn family(&mut self, name: &str, kind: MetricType, help: &str) {
        let mut family = MetricFamily::default();
        family.set_name(name.to_owned());
        family.set_help(help.to_owned());
        family.set_field_type(kind);
        self.0.push(family);
    }

    /// One sample of a counter or a gauge.
    pub(crate) fn sample(&mut self, labels: &[(&str, &str)], value: f64) {
        let Some(family) = self.0.last_mut() else { return };
        let pair = |(name, text): &(&str, &str)| {
            let mut pair = LabelPair::default();
            pair.set_name((*name).to_owned());
            pair.set_value((*text).to_owned());
            pair
        };
        let mut sample = Metric::from_label(labels.iter().map(pair).collect());
        if family.get_field_type() == MetricType::COUNTER {
            let mut counter = Counter::default();
            counter.set_value(value);
            sample.set_counter(counter);
        } else {
            let mut gauge = Gauge::default();
            gauge.set_value(value);
            sample.set_gauge(gauge);
        }
        family.mut_metric().push(sample);
    }

    /// A gauge without labels.
    pub(crate) fn gauge(&mut self, name: &str, help: &str, value: f64) {
        self.family(name, MetricType::GAUGE, help);
        self.sample(&[], value);
    }

    /// The text. A family without samples is not in it.
    pub(crate) fn finish(mut self) -> prometheus::Result<String> {
        self.0.retain(|family| !family.get_metric().is_empty());
        TextEncoder::new().encode_to_string(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_in_a_label_ends_it() {
        let mut page = Page::default();
        page.family("a_total", MetricType::COUNTER, "of\nlines");
        page.sample(&[("x", "say \"no\"\\\n"), ("y", "1")], 7.0);
        page.gauge("b", "B.", 1.5);
        let expected = "# HELP a_total of\\nlines\n# TYPE a_total counter\n\
                        a_total{x=\"say \\\"no\\\"\\\\\\n\",y=\"1\"} 7\n\
                        # HELP b B.\n# TYPE b gauge\nb 1.5\n";
        assert_eq!(page.finish().unwrap(), expected);
    }
}
