//! The fork tree: which snapshot or sandbox came from which.
//!
//! Each request builds the tree anew, from two inputs: the snapshots, each of which names the sandbox it was
//! branched from and the snapshots below it, and the live sandboxes. Nothing is stored for the tree. It has a
//! node for each removed snapshot or sandbox that another one still names, under its parent if that is known.
//!
//! Manifests come from outside: they may be wrong, and may name each other in circles. From any input comes a
//! tree: every node has at most one parent, and no node is above itself. This module uses no store and no process.

use std::collections::HashMap;

use forkd_api::{Tree, TreeHow, TreeKind, TreeNode};
use forkd_protocol::names::is_valid_sandbox_id;

/// The prefix of `branched_from` in a snapshot made by compacting another one.
pub(crate) const COMPACTED: &str = "compact:";
/// Stands for a hidden tag. No tag can have this name.
const NAMELESS: &str = "?";
/// How many digits of a snapshot's id a node id has, to tell two snapshots with the same tag apart.
const SHORT_ID: usize = 12;

/// A snapshot, as a snapshot or sandbox that came from it names it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Named {
    pub(crate) tag: String,
    /// The id of its content, if known: a later snapshot may have the same tag.
    pub(crate) id: Option<String>,
}

/// The facts of a snapshot that exists.
#[derive(Debug, Clone)]
pub(crate) struct SnapshotFact {
    pub(crate) name: Named,
    pub(crate) state: String,
    pub(crate) created_at_unix: Option<u64>,
    /// A sandbox's id, or `compact:` and a tag.
    pub(crate) branched_from: Option<String>,
    /// Whether the client asked for a difference to the parent.
    pub(crate) diff: bool,
    /// The snapshots that it is built on or came from, root first.
    pub(crate) ancestors: Vec<Named>,
}

impl SnapshotFact {
    /// Hides the names for which `told` is false. The nodes of those snapshots stay in the tree.
    pub(crate) fn hide(&mut self, is_visible: impl Fn(&str) -> bool) {
        self.ancestors.retain_mut(|ancestor| {
            if is_visible(&ancestor.tag) {
                return true;
            }
            ancestor.tag = NAMELESS.into();
            // Without an id, all hidden snapshots would become the same node.
            ancestor.id.is_some()
        });
        let compacted = self.branched_from.as_deref().and_then(|source| source.strip_prefix(COMPACTED));
        if compacted.is_some_and(|tag| !is_visible(tag)) {
            self.branched_from = Some(format!("{COMPACTED}{NAMELESS}"));
        }
    }
}

/// The facts of a listed sandbox.
#[derive(Debug, Clone)]
pub(crate) struct SandboxFact {
    pub(crate) id: String,
    pub(crate) state: String,
    pub(crate) created_at_unix: u64,
    /// None for a booted sandbox, and for one that was forked from another.
    pub(crate) spawned_from: Option<Named>,
    /// The running sandbox that it was forked from.
    pub(crate) forked_from: Option<String>,
    pub(crate) rolled_back_to: Option<Named>,
}

/// The tree of all snapshots and sandboxes and of what they came from.
pub(crate) fn grow(mut snapshots: Vec<SnapshotFact>, mut sandboxes: Vec<SandboxFact>) -> Tree {
    // Earlier facts win over later ones, so the order must not depend on the caller.
    snapshots.sort_by(|a, b| (a.created_at_unix, &a.name.tag).cmp(&(b.created_at_unix, &b.name.tag)));
    sandboxes.sort_by(|a, b| (a.created_at_unix, &a.id).cmp(&(b.created_at_unix, &b.id)));
    let mut grower = Grower::default();
    for fact in &snapshots {
        grower.add_snapshot(fact);
    }
    for fact in &sandboxes {
        let node = node(TreeKind::Sandbox, &fact.id, fact.state.clone(), Some(fact.created_at_unix));
        grower.add(format!("sandbox:{}", fact.id), node);
    }
    // First what the daemon saw itself, then what manifests claim.
    for fact in &sandboxes {
        grower.spawned(fact);
    }
    for fact in &snapshots {
        grower.branched(fact);
    }
    for fact in &sandboxes {
        grower.rolled_back(fact);
    }
    grower.finish()
}

fn node(kind: TreeKind, name: &str, state: String, created_at_unix: Option<u64>) -> TreeNode {
    TreeNode {
        id: String::new(),
        kind,
        name: name.to_owned(),
        parent: None,
        state,
        gone: false,
        created_at_unix,
        how: None,
        rolled_back_to: None,
    }
}

#[derive(Debug, Default)]
struct Grower {
    nodes: Vec<TreeNode>,
    /// For each node, the node it came from.
    parents: Vec<Option<usize>>,
    by_id: HashMap<String, usize>,
    /// For each tag, the content id of the snapshot whose node id is `snapshot:TAG` without a suffix.
    plain: HashMap<String, Option<String>>,
}

impl Grower {
    fn add(&mut self, id: String, node: TreeNode) -> usize {
        let place = self.nodes.len();
        self.by_id.insert(id.clone(), place);
        self.nodes.push(TreeNode { id, ..node });
        self.parents.push(None);
        place
    }

    fn add_snapshot(&mut self, fact: &SnapshotFact) {
        let Named { tag, id } = &fact.name;
        self.plain.insert(tag.clone(), id.clone());
        let node = node(TreeKind::Snapshot, tag, fact.state.clone(), fact.created_at_unix);
        self.add(format!("snapshot:{tag}"), node);
    }

    /// The node of a named snapshot; a new node with `gone` if there is none.
    fn snapshot(&mut self, named: &Named) -> usize {
        let holder = self.plain.entry(named.tag.clone()).or_insert_with(|| named.id.clone());
        let differs = matches!((holder, &named.id), (Some(one), Some(other)) if one != other);
        let id = match &named.id {
            Some(id) if differs => {
                let short: String = id.chars().take(SHORT_ID).collect();
                format!("snapshot:{}@{short}", named.tag)
            }
            _ => format!("snapshot:{}", named.tag),
        };
        self.find_or_gone(id, TreeKind::Snapshot, &named.tag)
    }

    fn find_or_gone(&mut self, id: String, kind: TreeKind, name: &str) -> usize {
        match self.by_id.get(&id) {
            Some(place) => *place,
            None => {
                let node = TreeNode { gone: true, ..node(kind, name, "gone".into(), None) };
                self.add(id, node)
            }
        }
    }

    /// Makes `parent` the parent of `child`, unless that would put `child` above itself.
    fn link(&mut self, child: usize, parent: usize, how: Option<TreeHow>) -> bool {
        let mut above = Some(parent);
        while let Some(place) = above {
            if place == child {
                return false;
            }
            above = self.parents[place];
        }
        self.parents[child] = Some(parent);
        self.nodes[child].how = how;
        true
    }

    fn is_orphan(&self, place: usize) -> bool {
        self.nodes[place].gone && self.parents[place].is_none()
    }

    fn spawned(&mut self, fact: &SandboxFact) {
        if let Some(source) = &fact.forked_from {
            let child = self.by_id[&format!("sandbox:{}", fact.id)];
            let parent = self.find_or_gone(format!("sandbox:{source}"), TreeKind::Sandbox, source);
            self.link(child, parent, Some(TreeHow::Fork));
            return;
        }
        let Some(from) = &fact.spawned_from else { return };
        let (child, parent) = (self.by_id[&format!("sandbox:{}", fact.id)], self.snapshot(from));
        self.link(child, parent, Some(TreeHow::Spawn));
    }

    fn branched(&mut self, fact: &SnapshotFact) {
        let child = self.by_id[&format!("snapshot:{}", fact.name.tag)];
        let below = fact.ancestors.last();
        let source = fact.branched_from.as_deref().unwrap_or_default();
        if let Some(tag) = source.strip_prefix(COMPACTED).filter(|tag| !tag.is_empty()) {
            let known = below.filter(|below| below.tag == tag).cloned();
            let parent = self.snapshot(&known.unwrap_or_else(|| Named { tag: tag.into(), id: None }));
            self.link(child, parent, Some(TreeHow::Compact));
        } else if is_valid_sandbox_id(source) {
            let parent = self.find_or_gone(format!("sandbox:{source}"), TreeKind::Sandbox, source);
            let how = if fact.diff { TreeHow::Diff } else { TreeHow::Branch };
            self.link(child, parent, Some(how));
            // A removed sandbox is known only by its branches: their ancestors name the snapshot it was forked from.
            if let Some(below) = below.filter(|_| self.is_orphan(parent)) {
                let origin = self.snapshot(below);
                self.link(parent, origin, Some(TreeHow::Spawn));
            }
        } else if let Some(below) = below {
            let parent = self.snapshot(below);
            self.link(child, parent, Some(TreeHow::Diff));
        }
        for pair in fact.ancestors.windows(2) {
            let (parent, child) = (self.snapshot(&pair[0]), self.snapshot(&pair[1]));
            // How the removed snapshot came from its parent is not known.
            if self.is_orphan(child) {
                self.link(child, parent, None);
            }
        }
    }

    /// Moves a sandbox under the snapshot it was rolled back to. A sandbox that was rolled back to its own branch
    /// stays where it was spawned: it cannot be both above and below the branch.
    fn rolled_back(&mut self, fact: &SandboxFact) {
        let Some(to) = &fact.rolled_back_to else { return };
        let (child, parent) = (self.by_id[&format!("sandbox:{}", fact.id)], self.snapshot(to));
        self.link(child, parent, Some(TreeHow::Rollback));
        self.nodes[child].rolled_back_to = Some(self.nodes[parent].id.clone());
    }

    fn finish(mut self) -> Tree {
        for place in 0..self.nodes.len() {
            self.nodes[place].parent = self.parents[place].map(|parent| self.nodes[parent].id.clone());
        }
        self.nodes.sort_by(|a, b| (a.created_at_unix, &a.id).cmp(&(b.created_at_unix, &b.id)));
        Tree { nodes: self.nodes }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named(text: &str) -> Named {
        match text.split_once('@') {
            Some((tag, id)) => Named { tag: tag.into(), id: Some(id.into()) },
            None => Named { tag: text.into(), id: None },
        }
    }

    fn snapshot(name: &str, at: u64, from: &str, ancestors: &[&str]) -> SnapshotFact {
        SnapshotFact {
            name: named(name),
            state: "ready".into(),
            created_at_unix: Some(at),
            branched_from: (!from.is_empty()).then(|| from.into()),
            diff: false,
            ancestors: ancestors.iter().map(|it| named(it)).collect(),
        }
    }

    fn sandbox(id: &str, at: u64, from: &str, back_to: &str) -> SandboxFact {
        let some = |text: &str| (!text.is_empty()).then(|| named(text));
        SandboxFact {
            id: id.into(),
            state: "running".into(),
            created_at_unix: at,
            spawned_from: some(from).filter(|from| !from.tag.starts_with("sb")),
            forked_from: from.starts_with("sb").then(|| from.into()),
            rolled_back_to: some(back_to),
        }
    }

    /// One line per node: its id, whether it is gone, and how it came from which node.
    fn drawn(snapshots: Vec<SnapshotFact>, sandboxes: Vec<SandboxFact>) -> Vec<String> {
        let tree = grow(snapshots, sandboxes);
        let line = |node: &TreeNode| {
            let how = match (&node.how, &node.parent) {
                (Some(how), Some(parent)) => format!(" {how:?} {parent}"),
                (None, Some(parent)) => format!(" ? {parent}"),
                (_, None) => String::new(),
            };
            let back = node.rolled_back_to.as_ref().map_or(String::new(), |to| format!(" back {to}"));
            format!("{}{}{how}{back}", node.id, if node.gone { " gone" } else { "" })
        };
        tree.nodes.iter().map(line).collect()
    }

    #[test]
    fn children_hang_under_their_snapshot_and_branches_under_their_sandbox() {
        let lines = drawn(
            vec![snapshot("py", 1, "", &[]), snapshot("b1", 3, "sb1", &["py"])],
            vec![
                sandbox("sb1", 2, "py", ""),
                sandbox("sb2", 4, "b1", ""),
                sandbox("sbboot", 5, "", ""),
                sandbox("sbfork", 6, "sb1", ""),
                sandbox("sblast", 7, "sbgone", "b1"),
            ],
        );
        assert_eq!(
            lines,
            [
                "sandbox:sbgone gone",
                "snapshot:py",
                "sandbox:sb1 Spawn snapshot:py",
                "snapshot:b1 Branch sandbox:sb1",
                "sandbox:sb2 Spawn snapshot:b1",
                "sandbox:sbboot",
                "sandbox:sbfork Fork sandbox:sb1",
                "sandbox:sblast Rollback snapshot:b1 back snapshot:b1",
            ]
        );
    }

    #[test]
    fn a_removed_ancestor_is_shown_with_its_known_facts() {
        let lines =
            drawn(vec![snapshot("c", 9, "sb2", &["a@1", "b@2"])], vec![sandbox("sb9", 10, "old", "")]);
        assert_eq!(
            lines,
            [
                "sandbox:sb2 gone Spawn snapshot:b",
                "snapshot:a gone",
                "snapshot:b gone ? snapshot:a",
                "snapshot:old gone",
                "snapshot:c Branch sandbox:sb2",
                "sandbox:sb9 Spawn snapshot:old",
            ]
        );
        let tree = grow(vec![snapshot("c", 9, "sb2", &[])], vec![]);
        assert_eq!((tree.nodes[0].state.as_str(), tree.nodes[0].created_at_unix), ("gone", None));
    }

    #[test]
    fn a_snapshot_that_is_gone_is_not_mistaken_for_a_later_one_of_the_same_tag() {
        let lines = drawn(
            vec![snapshot("py@new", 5, "", &[]), snapshot("b", 6, "sb1", &["py@0123456789abcdef"])],
            vec![sandbox("sb1", 2, "py@0123456789abcdef", ""), sandbox("sb2", 7, "py@new", "")],
        );
        assert_eq!(
            lines,
            [
                "snapshot:py@0123456789ab gone",
                "sandbox:sb1 Spawn snapshot:py@0123456789ab",
                "snapshot:py",
                "snapshot:b Branch sandbox:sb1",
                "sandbox:sb2 Spawn snapshot:py",
            ]
        );
    }

    #[test]
    fn layers_and_compacted_snapshots_say_what_they_are() {
        let mut layer = snapshot("b", 3, "sb1", &["a"]);
        layer.diff = true;
        let facts = vec![
            snapshot("a", 1, "", &[]),
            layer,
            snapshot("flat", 4, "compact:b", &["a", "b"]),
            snapshot("flat2", 5, "compact:gone", &[]),
            snapshot("imported", 6, "", &["a"]),
        ];
        assert_eq!(
            drawn(facts, vec![]),
            [
                "sandbox:sb1 gone Spawn snapshot:a",
                "snapshot:gone gone",
                "snapshot:a",
                "snapshot:b Diff sandbox:sb1",
                "snapshot:flat Compact snapshot:b",
                "snapshot:flat2 Compact snapshot:gone",
                "snapshot:imported Diff snapshot:a",
            ]
        );
    }

    #[test]
    fn a_sandbox_taken_back_hangs_under_where_it_continued_unless_that_came_from_itself() {
        let lines = drawn(
            vec![
                snapshot("py", 1, "", &[]),
                snapshot("own", 3, "sb1", &["py"]),
                snapshot("other", 4, "", &[]),
            ],
            vec![
                sandbox("sb1", 2, "py", "own"),
                sandbox("sb2", 5, "py", "other"),
                sandbox("sb3", 6, "py", "own"),
                sandbox("sb4", 7, "", "lost"),
            ],
        );
        assert_eq!(
            lines,
            [
                "snapshot:lost gone",
                "snapshot:py",
                "sandbox:sb1 Spawn snapshot:py back snapshot:own",
                "snapshot:own Branch sandbox:sb1",
                "snapshot:other",
                "sandbox:sb2 Rollback snapshot:other back snapshot:other",
                "sandbox:sb3 Rollback snapshot:own back snapshot:own",
                "sandbox:sb4 Rollback snapshot:lost back snapshot:lost",
            ]
        );
    }

    #[test]
    fn circles_in_manifests_are_cut_and_no_node_is_above_itself() {
        let hostile = vec![
            snapshot("a", 1, "compact:b", &["c", "b"]),
            snapshot("b", 2, "compact:a", &["a"]),
            snapshot("c", 3, "compact:c", &["c", "c"]),
            snapshot("d", 4, "sb1", &["d"]),
            snapshot("e", 5, "compact:", &["e"]),
            snapshot("f", 6, "../../x", &["x", "y", "x"]),
            snapshot("py", 7, "sblive", &[]),
        ];
        let tree = grow(hostile, vec![sandbox("sblive", 8, "py", "py")]);
        let parents: HashMap<&str, Option<&str>> =
            tree.nodes.iter().map(|node| (node.id.as_str(), node.parent.as_deref())).collect();
        assert_eq!(parents.len(), tree.nodes.len(), "every node is there once");
        for node in &tree.nodes {
            let (mut above, mut steps) = (node.parent.as_deref(), 0);
            while let Some(id) = above {
                assert!(id != node.id && steps < tree.nodes.len(), "{} is above itself", node.id);
                (above, steps) = (parents[id], steps + 1);
            }
        }
        assert_eq!(parents["sandbox:sblive"], Some("snapshot:py"), "what we saw counts more");
        assert_eq!(parents["snapshot:py"], None);
    }

    #[test]
    fn a_hidden_ancestor_has_its_place_and_no_name() {
        let mut facts = vec![
            snapshot("mine", 2, "sb1", &["secret@1", "other@2"]),
            snapshot("flat", 3, "compact:secret", &["secret@1"]),
            snapshot("writing", 4, "sb1", &["secret"]),
        ];
        for fact in &mut facts {
            fact.hide(|tag| tag == "mine");
        }
        let lines = drawn(facts, vec![]);
        assert_eq!(
            lines,
            [
                "sandbox:sb1 gone Spawn snapshot:?",
                "snapshot:? gone ? snapshot:?@1",
                "snapshot:?@1 gone",
                "snapshot:mine Branch sandbox:sb1",
                "snapshot:flat Compact snapshot:?@1",
                "snapshot:writing Branch sandbox:sb1",
            ]
        );
    }

    #[test]
    fn the_tree_does_not_depend_on_the_order_of_the_facts() {
        let facts = || {
            vec![
                snapshot("a", 1, "", &[]),
                snapshot("b", 1, "sb7", &["a"]),
                snapshot("c", 2, "sb7", &["b"]),
                snapshot("d", 2, "compact:a", &["a"]),
            ]
        };
        let there = grow(facts(), vec![]);
        let back = grow(facts().into_iter().rev().collect(), vec![]);
        assert_eq!(there, back);
    }
}
