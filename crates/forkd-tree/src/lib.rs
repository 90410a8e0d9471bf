//! Draws the fork tree: as lines of text, in the language of Graphviz, and as SVG.
//!
//! It owns the order of the nodes and every character of a drawing. It is pure: nodes of the API in, strings out. It
//! knows no daemon and no terminal, and it trusts no node: `forest` says how.

mod dot;
mod forest;
mod svg;
mod text;

/// A node of `GET /v1/tree`. Kinds are read as text: those of a newer daemon are drawn, too.
pub type Node = forkd_api::TreeNode<String, String>;

pub use dot::dot;
pub use forest::Forest;
pub use svg::svg;
pub use text::{Letters, text};
