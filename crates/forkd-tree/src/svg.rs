//! The tree as SVG: parents are to the left of their children and at the middle of their height.

use std::fmt::Write;

use crate::Node;
use crate::forest::{Forest, is_snapshot, label, words};

/// Sizes in pixels. The first is the approximate width of a letter.
const LETTER: f64 = 7.3;
const PADDING: f64 = 10.0;
const MARGIN: f64 = 16.0;
const BOX_HEIGHT: f64 = 40.0;
const ROW: f64 = 54.0;
const GAP: f64 = 48.0;

/// The box of a node: its left edge, the height of its middle, and its width.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Spot {
    x: f64,
    y: f64,
    width: f64,
}

/// An SVG document.
pub fn svg(forest: &Forest) -> String {
    let spots = layout(forest);
    let width = spots.iter().map(|spot| spot.x + spot.width).fold(0.0, f64::max) + MARGIN;
    let height = spots.iter().map(|spot| spot.y).fold(0.0, f64::max) + BOX_HEIGHT / 2.0 + MARGIN;
    let mut picture = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width:.0}\" height=\"{height:.0}\" \
         font-family=\"monospace\" font-size=\"12\">\n<title>forkd tree</title>\n\
         <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n"
    );
    for (place, spot) in forest.places.iter().zip(&spots) {
        if let Some(from) = place.parent.and_then(|parent| spots.get(parent)) {
            line(&mut picture, from, spot);
        }
        boxed(&mut picture, &place.node, spot);
    }
    picture.push_str("</svg>");
    picture
}

/// Columns are as wide as their widest box. Each node without children has a row; every other node is half
/// way between its first and its last child.
fn layout(forest: &Forest) -> Vec<Spot> {
    let widths: Vec<f64> = forest.places.iter().map(|place| box_width(&place.node)).collect();
    let mut columns: Vec<f64> = Vec::new();
    for (place, width) in forest.places.iter().zip(&widths) {
        // A node comes after its parent: columns grow by one.
        match columns.get_mut(place.depth) {
            Some(column) => *column = column.max(*width),
            None => columns.push(*width),
        }
    }
    let mut edge = MARGIN;
    let mut left = Vec::with_capacity(columns.len());
    for width in columns {
        left.push(edge);
        edge += width + GAP;
    }
    let heights = heights(forest);
    let spot = |((place, width), y): ((&crate::forest::Placed, &f64), f64)| Spot {
        x: left.get(place.depth).copied().unwrap_or(MARGIN),
        y,
        width: *width,
    };
    forest.places.iter().zip(&widths).zip(heights).map(spot).collect()
}

fn box_width(node: &Node) -> f64 {
    let letters = label(&node.name).chars().count().max(words(node).chars().count());
    letters as f64 * LETTER + 2.0 * PADDING
}

/// The height of each node's middle.
fn heights(forest: &Forest) -> Vec<f64> {
    let mut has_children = vec![false; forest.places.len()];
    for parent in forest.places.iter().filter_map(|place| place.parent) {
        has_children[parent] = true;
    }
    let mut next = MARGIN + BOX_HEIGHT / 2.0;
    let mut heights = vec![0.0; forest.places.len()];
    for (height, _) in heights.iter_mut().zip(&has_children).filter(|(_, parent)| !**parent) {
        *height = next;
        next += ROW;
    }
    // From last to first: all children of a node are visited before it.
    let mut spans: Vec<Option<(f64, f64)>> = vec![None; forest.places.len()];
    for (index, place) in forest.places.iter().enumerate().rev() {
        if let Some((first, last)) = spans[index] {
            heights[index] = (first + last) / 2.0;
        }
        if let Some(parent) = place.parent {
            let last = spans[parent].map_or(heights[index], |(_, last)| last);
            spans[parent] = Some((heights[index], last));
        }
    }
    heights
}

fn line(picture: &mut String, from: &Spot, to: &Spot) {
    let (start, end) = (from.x + from.width, to.x);
    let middle = (start + end) / 2.0;
    // Writing to a string does not fail.
    let _ = writeln!(
        picture,
        "<path d=\"M{start:.1} {:.1}C{middle:.1} {:.1} {middle:.1} {:.1} {end:.1} {:.1}\" fill=\"none\" stroke=\"#888\"/>",
        from.y, from.y, to.y, to.y
    );
}

fn boxed(picture: &mut String, node: &Node, spot: &Spot) {
    let (look, ink) = match (node.gone, is_snapshot(node)) {
        (true, _) => ("fill=\"white\" stroke=\"#999\" stroke-dasharray=\"4 3\"", "#777"),
        (false, true) => ("fill=\"#e8f0fe\" stroke=\"#4a6fa5\"", "#111"),
        (false, false) => ("fill=\"#e9f7ec\" stroke=\"#4c9a63\"", "#111"),
    };
    let (top, middle) = (spot.y - BOX_HEIGHT / 2.0, spot.x + spot.width / 2.0);
    let (name, words) = (escaped(&label(&node.name)), escaped(&words(node)));
    let _ = writeln!(
        picture,
        "<g><rect x=\"{:.1}\" y=\"{top:.1}\" width=\"{:.1}\" height=\"{BOX_HEIGHT}\" rx=\"7\" {look}/>\
         <text x=\"{middle:.1}\" y=\"{:.1}\" text-anchor=\"middle\" font-weight=\"bold\" fill=\"{ink}\">{name}</text>\
         <text x=\"{middle:.1}\" y=\"{:.1}\" text-anchor=\"middle\" fill=\"#555\">{words}</text></g>",
        spot.x,
        spot.width,
        spot.y - 3.0,
        spot.y + 12.0
    );
}

/// Text in XML.
fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for letter in text.chars() {
        match letter {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            _ => out.push(letter),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::forest::tests::{chain, family, forest};
    use serde_json::json;

    #[test]
    fn parents_stand_to_the_left_of_their_children_and_half_way_between_them() {
        let spots = layout(&family());
        let [numpy, sb1, fix, sb3, sb2, other] = spots[..] else { panic!("{spots:?}") };
        assert!(numpy.x + numpy.width < sb1.x && sb1.x + sb1.width < fix.x && fix.x + fix.width < sb3.x);
        assert_eq!((sb1.x, sb1.y, fix.y), (sb2.x, sb3.y, sb3.y));
        assert_eq!(numpy.y, (sb1.y + sb2.y) / 2.0);
        assert_eq!(other.x, numpy.x);
    }

    #[test]
    fn no_two_boxes_overlap() {
        let spots = layout(&family());
        for (index, one) in spots.iter().enumerate() {
            for other in &spots[..index] {
                let apart = one.x >= other.x + other.width || other.x >= one.x + one.width;
                assert!(apart || (one.y - other.y).abs() >= BOX_HEIGHT, "{one:?} {other:?}");
            }
        }
    }

    #[test]
    fn every_node_has_a_box_and_every_descent_a_line() {
        let picture = svg(&family());
        assert!(picture.starts_with("<svg ") && picture.ends_with("</svg>"));
        assert_eq!((picture.matches("<g>").count(), picture.matches("<path ").count()), (6, 4));
        assert_eq!(picture.matches("stroke-dasharray").count(), 1);
        assert!(svg(&forest(json!([]))).ends_with("</svg>"));
    }

    #[test]
    fn a_hostile_name_stays_text() {
        let name = "</text><script>alert('1')</script>\u{0}\u{ffff}&\"";
        let picture = svg(&forest(json!([{ "id": "x", "kind": "snapshot", "name": name }])));
        assert!(!picture.contains("<script") && !picture.contains(['\u{0}', '\u{ffff}']), "{picture}");
        assert!(picture.contains("&lt;/text&gt;&lt;script&gt;alert(&#39;1&#39;)"), "{picture}");
    }

    #[test]
    fn the_deepest_chain_is_drawn() {
        assert_eq!(svg(&chain(20_000)).matches("<g>").count(), 20_000);
    }
}
