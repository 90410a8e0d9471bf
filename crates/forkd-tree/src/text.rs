//! The tree for a terminal.

use crate::forest::{Forest, Placed, label, words};

/// The number of indented levels; deeper nodes are not indented further.
const MAX_LEVELS: usize = 40;

/// The characters that the terminal can print.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Letters {
    /// With lines of boxes.
    Unicode,
    /// With ASCII alone.
    Ascii,
}

impl Letters {
    /// The characters of the terminal, according to the first set variable of `LC_ALL`, `LC_CTYPE` and `LANG`.
    pub fn of_locale(variable: impl Fn(&str) -> Option<String>) -> Self {
        let said =
            ["LC_ALL", "LC_CTYPE", "LANG"].into_iter().filter_map(variable).find(|said| !said.is_empty());
        let said = said.unwrap_or_default().to_ascii_lowercase();
        if said.ends_with("utf-8") || said.ends_with("utf8") { Letters::Unicode } else { Letters::Ascii }
    }

    /// A line past younger siblings, no line, a turn with younger siblings below, the last turn.
    fn lines(self) -> [&'static str; 4] {
        match self {
            Letters::Unicode => ["│   ", "    ", "├── ", "└── "],
            Letters::Ascii => ["|   ", "    ", "|-- ", "`-- "],
        }
    }

    fn spell(self, text: String) -> String {
        match self {
            Letters::Unicode => text,
            Letters::Ascii => text.replace('…', "...").replace(|c: char| !c.is_ascii(), "?"),
        }
    }
}

/// A line for each node, below its parent.
pub fn text(forest: &Forest, letters: Letters) -> String {
    // For each level from the root to this node, whether the ancestor is the last of its siblings.
    let mut way: Vec<bool> = Vec::new();
    let line = |place: &Placed| {
        way.truncate(place.depth);
        way.push(place.last);
        let (name, words) = (label(&place.node.name), words(&place.node));
        format!("{}{}", indentation(&way, letters), letters.spell(format!("{name}  [{words}]")))
    };
    forest.places.iter().map(line).collect::<Vec<_>>().join("\n")
}

/// The text before a node. `way` begins with the level of its root, which is not indented, and ends with its
/// own level.
fn indentation(way: &[bool], letters: Letters) -> String {
    let [past, none, turn, last_turn] = letters.lines();
    let Some((last, above)) = way.get(1..).unwrap_or_default().split_last() else { return String::new() };
    let hidden = above.len().saturating_sub(MAX_LEVELS);
    let mut text = if hidden > 0 { letters.spell("…".into()) } else { String::new() };
    text.extend(above[hidden..].iter().map(|last| if *last { none } else { past }));
    text.push_str(if *last { last_turn } else { turn });
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::forest::tests::{chain, family, forest};
    use serde_json::json;

    #[test]
    fn the_tree_reads_from_the_first_snapshot_to_the_youngest_child() {
        let expected = "\
numpy  [snapshot, ready]
├── sb1  [gone]
│   └── fix  [branch, writing]
│       └── sb3  [paused]
└── sb2  [back at numpy, running]
other  [snapshot, ready]";
        assert_eq!(text(&family(), Letters::Unicode), expected);
        let ascii = text(&family(), Letters::Ascii);
        assert_eq!(ascii.lines().nth(2), Some("|   `-- fix  [branch, writing]"));
        assert!(ascii.is_ascii(), "{ascii}");
    }

    #[test]
    fn a_hostile_name_stays_on_its_line_and_in_its_letters() {
        let hostile =
            forest(json!([{ "id": "x", "kind": "\n", "name": "a\r\n\x1b[2Jä", "how": "\n└── fake" }]));
        assert_eq!(text(&hostile, Letters::Unicode), "a[2Jä  [└── fake]");
        assert_eq!(text(&hostile, Letters::Ascii), "a[2J?  [??? fake]");
    }

    #[test]
    fn the_deepest_chain_takes_lines_of_bounded_length() {
        let deep = text(&chain(20_000), Letters::Unicode);
        assert_eq!(deep.lines().count(), 20_000);
        assert!(deep.lines().all(|line| line.chars().count() < 4 * MAX_LEVELS + 100));
        assert!(deep.ends_with("└── s19999  [snapshot]"));
    }

    #[test]
    fn the_first_variable_that_says_anything_decides_on_the_letters() {
        let letters = |set: &[(&str, &str)]| {
            Letters::of_locale(|name| set.iter().find(|(n, _)| *n == name).map(|(_, v)| (*v).to_owned()))
        };
        assert_eq!(letters(&[]), Letters::Ascii);
        assert_eq!(letters(&[("LANG", "de_DE.UTF-8")]), Letters::Unicode);
        assert_eq!(letters(&[("LANG", "C.utf8"), ("LC_ALL", "")]), Letters::Unicode);
        assert_eq!(letters(&[("LANG", "C.UTF-8"), ("LC_ALL", "C")]), Letters::Ascii);
    }
}
