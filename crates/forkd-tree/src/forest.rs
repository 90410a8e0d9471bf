//! Orders the nodes of the tree, and makes their labels.
//!
//! The nodes need not form a tree: a missing parent, a duplicate node, a cycle
//! or a huge number of nodes must not hang or crash this. No name can write outside of its label.

use std::collections::HashMap;

use crate::Node;

/// The limit of drawn nodes.
const MAX_NODES: usize = 20_000;
/// The limit of a label's length: tags have at most 64 characters.
const MAX_LABEL: usize = 64;

/// Whether a node is a snapshot.
pub(crate) fn is_snapshot(node: &Node) -> bool {
    node.kind == "snapshot"
}

/// The kind and state of a node in a few words: `branch, ready`.
pub(crate) fn words(node: &Node) -> String {
    let back = node.rolled_back_to.as_deref().map(|id| {
        let tag = id.strip_prefix("snapshot:").unwrap_or(id);
        format!("back at {tag}")
    });
    let what = match (is_snapshot(node), node.how.as_deref()) {
        // A sandbox shows by its id what it is, and most were spawned.
        (false, _) if back.is_some() => back.as_deref(),
        (false, None | Some("spawn")) => None,
        (true, None) => Some("snapshot"),
        (_, Some(how)) => Some(how),
    };
    let state = if node.gone { "gone" } else { &node.state };
    let words = what.into_iter().chain([state]).filter(|word| !word.is_empty());
    words.map(label).collect::<Vec<_>>().join(", ")
}

/// A node in its place: after its parent, and after its elder siblings and their descendants.
#[derive(Debug)]
pub(crate) struct Placed {
    pub(crate) node: Node,
    /// The index of its parent.
    pub(crate) parent: Option<usize>,
    /// The number of its ancestors.
    pub(crate) depth: usize,
    /// Whether it is the last of its siblings.
    pub(crate) last: bool,
}

/// Nodes in order.
#[derive(Debug)]
pub struct Forest {
    pub(crate) places: Vec<Placed>,
    /// The number of nodes over the limit.
    pub left_out: usize,
}

impl Forest {
    /// Orders nodes, elder siblings first. Of two nodes with one id the first counts. A node whose parent is
    /// missing, or is its own descendant, becomes a root.
    pub fn new(mut nodes: Vec<Node>) -> Self {
        let left_out = nodes.len().saturating_sub(MAX_NODES);
        nodes.truncate(MAX_NODES);
        nodes.sort_by_key(|node| node.created_at_unix);
        let mut known = HashMap::new();
        for (index, node) in nodes.iter().enumerate() {
            known.entry(node.id.as_str()).or_insert(index);
        }
        let parents: Vec<Option<usize>> =
            nodes.iter().map(|node| known.get(node.parent.as_deref()?).copied()).collect();
        let first: Vec<bool> = nodes
            .iter()
            .enumerate()
            .map(|(index, node)| known.get(node.id.as_str()) == Some(&index))
            .collect();
        let mut children = vec![Vec::new(); nodes.len()];
        for (index, parent) in parents.iter().enumerate().filter(|(index, _)| first[*index]) {
            if let Some(parent) = parent {
                children[*parent].push(index);
            }
        }
        let order = order(&parents, &first, &children);
        let mut nodes: Vec<Option<Node>> = nodes.into_iter().map(Some).collect();
        let place = |(index, parent, depth, last): (usize, _, _, _)| {
            Some(Placed { node: nodes[index].take()?, parent, depth, last })
        };
        Forest { places: order.into_iter().filter_map(place).collect(), left_out }
    }
}

/// The order of nodes: index, index of the parent in the order, depth, whether it is the last of its siblings.
fn order(
    parents: &[Option<usize>],
    first: &[bool],
    children: &[Vec<usize>],
) -> Vec<(usize, Option<usize>, usize, bool)> {
    let mut order = Vec::with_capacity(parents.len());
    let mut placed: Vec<bool> = first.iter().map(|first| !first).collect();
    let roots = (0..parents.len()).filter(|index| parents[*index].is_none());
    // The remaining nodes are in cycles or descend from one: each cycle is cut at its first node.
    for root in roots.chain(0..parents.len()) {
        let mut waiting = vec![(root, None, 0, true)];
        while let Some((index, parent, depth, last)) = waiting.pop() {
            if std::mem::replace(&mut placed[index], true) {
                continue;
            }
            let place = order.len();
            order.push((index, parent, depth, last));
            let youngest_first = children[index].iter().rev().filter(|child| !placed[**child]);
            for (number, child) in youngest_first.enumerate() {
                waiting.push((*child, Some(place), depth + 1, number == 0));
            }
        }
    }
    order
}

/// Foreign text as a label: one line of limited length, without characters that move the cursor, change the
/// direction of writing, or are not allowed in XML.
pub(crate) fn label(text: &str) -> String {
    let harmless = |c: &char| {
        let turns = matches!(c, '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
        !c.is_control() && !turns && !matches!(c, '\u{feff}' | '\u{fffe}' | '\u{ffff}')
    };
    let mut letters = text.chars().filter(harmless);
    let mut label: String = letters.by_ref().take(MAX_LABEL).collect();
    if letters.next().is_some() {
        label.push('…');
    }
    label
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use forkd_api::Tree;
    use serde_json::{Value, json};

    pub(crate) fn forest(nodes: Value) -> Forest {
        let answer: Tree<Node> = serde_json::from_value(json!({ "nodes": nodes })).unwrap();
        Forest::new(answer.nodes)
    }

    /// A snapshot, two children of it, a branch of the first, a child of that; and one more snapshot.
    pub(crate) fn family() -> Forest {
        forest(json!([
            { "id": "snapshot:other", "kind": "snapshot", "name": "other", "state": "ready", "created_at_unix": 9 },
            { "id": "sandbox:sb3", "kind": "sandbox", "name": "sb3", "parent": "snapshot:fix", "state": "paused",
              "created_at_unix": 5, "how": "spawn" },
            { "id": "snapshot:fix", "kind": "snapshot", "name": "fix", "parent": "sandbox:sb1", "state": "writing",
              "created_at_unix": 4, "how": "branch" },
            { "id": "sandbox:sb2", "kind": "sandbox", "name": "sb2", "parent": "snapshot:numpy",
              "state": "running", "created_at_unix": 3, "how": "rollback", "rolled_back_to": "snapshot:numpy" },
            { "id": "sandbox:sb1", "kind": "sandbox", "name": "sb1", "parent": "snapshot:numpy", "state": "",
              "created_at_unix": 2, "gone": true, "how": "spawn" },
            { "id": "snapshot:numpy", "kind": "snapshot", "name": "numpy", "state": "ready", "created_at_unix": 1 },
        ]))
    }

    /// Nodes that came from each other in turn, `n` of them.
    pub(crate) fn chain(n: usize) -> Forest {
        forest((0..n).map(|index| {
            let parent = index.checked_sub(1).map(|parent| parent.to_string());
            json!({ "id": index.to_string(), "kind": "snapshot", "name": format!("s{index}"), "parent": parent })
        }).collect())
    }

    fn placed(forest: &Forest) -> Vec<(&str, usize)> {
        forest.places.iter().map(|place| (place.node.name.as_str(), place.depth)).collect()
    }

    #[test]
    fn each_stands_under_whom_it_came_from_elder_ones_first() {
        let expected = [("numpy", 0), ("sb1", 1), ("fix", 2), ("sb3", 3), ("sb2", 1), ("other", 0)];
        assert_eq!(placed(&family()), expected);
        let last: Vec<bool> = family().places.iter().map(|place| place.last).collect();
        assert_eq!(last, [true, false, true, true, true, true]);
    }

    #[test]
    fn what_is_not_a_tree_is_cut_into_one() {
        let node =
            |id: &str, parent: &str| json!({ "id": id, "kind": "snapshot", "name": id, "parent": parent });
        let forest = forest(json!([
            node("a", "c"),
            node("b", "a"),
            node("c", "b"),
            node("d", "c"),
            node("self", "self"),
            node("orphan", "nobody"),
            node("a", "orphan"),
        ]));
        assert_eq!(placed(&forest), [("orphan", 0), ("a", 0), ("b", 1), ("c", 2), ("d", 3), ("self", 0)]);
        for place in &forest.places {
            assert_eq!(place.depth == 0, place.parent.is_none());
        }
    }

    #[test]
    fn more_than_anybody_could_look_at_is_left_out_and_counted() {
        let forest = chain(MAX_NODES + 5);
        assert_eq!((forest.places.len(), forest.left_out), (MAX_NODES, 5));
        assert_eq!(forest.places.last().unwrap().depth, MAX_NODES - 1);
    }

    #[test]
    fn a_name_is_one_harmless_line_of_bounded_length() {
        assert_eq!(label("a\x1b[2J\nb\u{202e}c\u{2028}"), "a[2Jbc");
        assert_eq!(label(&"ä".repeat(1000)).chars().count(), MAX_LABEL + 1);
    }

    #[test]
    fn a_few_words_say_what_it_is_and_how_it_is() {
        let words: Vec<String> = family().places.iter().map(|place| words(&place.node)).collect();
        assert_eq!(
            words,
            [
                "snapshot, ready",
                "gone",
                "branch, writing",
                "paused",
                "back at numpy, running",
                "snapshot, ready"
            ]
        );
    }
}
