//! The tree in the language of Graphviz.

use std::fmt::Write;

use crate::Node;
use crate::forest::{Forest, is_snapshot, label, words};

/// A graph with a box for each node. Nodes are numbered: names appear in labels only.
pub fn dot(forest: &Forest) -> String {
    let mut graph = String::from(
        "digraph forkd {\n  rankdir=LR;\n  node [shape=box, style=\"rounded,filled\", fontname=\"monospace\"];\n",
    );
    for (number, place) in forest.places.iter().enumerate() {
        let Node { gone, .. } = place.node;
        let look = match (gone, is_snapshot(&place.node)) {
            (true, _) => "style=\"rounded,dashed\", color=gray, fontcolor=gray",
            (false, true) => "fillcolor=\"#e8f0fe\"",
            (false, false) => "fillcolor=\"#e9f7ec\"",
        };
        let (name, words) = (quoted(&label(&place.node.name)), quoted(&words(&place.node)));
        // Writing to a string does not fail.
        let _ = writeln!(graph, "  n{number} [label=\"{name}\\n{words}\", {look}];");
        if let Some(parent) = place.parent {
            let _ = writeln!(graph, "  n{parent} -> n{number};");
        }
    }
    graph.push('}');
    graph
}

/// Text in quotes, with quotes and backslashes escaped for Graphviz.
fn quoted(text: &str) -> String {
    text.replace('\\', "\\\\").replace('"', "\\\"")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::forest::tests::{chain, family, forest};
    use serde_json::json;

    #[test]
    fn each_node_is_a_box_and_each_descent_an_arrow() {
        let graph = dot(&family());
        assert!(graph.starts_with("digraph forkd {") && graph.ends_with('}'), "{graph}");
        assert!(graph.contains("n0 [label=\"numpy\\nsnapshot, ready\", fillcolor=\"#e8f0fe\"];"), "{graph}");
        assert!(graph.contains("n1 [label=\"sb1\\ngone\", style=\"rounded,dashed\""), "{graph}");
        assert_eq!(graph.matches(" -> ").count(), 4);
        assert!(graph.contains("  n1 -> n2;"), "{graph}");
    }

    #[test]
    fn a_hostile_name_does_not_leave_its_quotes() {
        let graph = dot(&forest(
            json!([{ "id": "x", "kind": "snapshot", "name": "\"]; n0 -> n0 [label=\"\\N\\\n" }]),
        ));
        assert!(graph.contains(r#"label="\"]; n0 -> n0 [label=\"\\N\\\nsnapshot""#), "{graph}");
    }

    #[test]
    fn the_deepest_chain_is_drawn() {
        assert_eq!(dot(&chain(20_000)).matches(" -> ").count(), 19_999);
    }
}
