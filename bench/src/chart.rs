//! Pictures of results: SVG, made from the lines alone, the same bytes for the same lines.

use std::fmt::Write as _;

use crate::bare::Kind;
use crate::branch::{self, Record, Subject};
use crate::report::Line;

const WIDTH: f64 = 780.0;
const HEIGHT: f64 = 400.0;
/// The plot, inside the picture: left, top, right, bottom.
const PLOT: (f64, f64, f64, f64) = (70.0, 60.0, 590.0, 340.0);

/// Cases in the order they are drawn, with their colours, which differ also for people with red blindness.
const CASES: [(&str, &str); 4] =
    [("floor", "#7f7f7f"), ("tiny", "#0072b2"), ("linux", "#d55e00"), ("firecracker", "#009e73")];

/// How long until all children had answered, over their number, on two logarithmic axes.
pub fn times(lines: &[Line]) -> String {
    let point = |line: &Line| Some((line.n as f64, line.all_ms?));
    let series = CASES.map(|(case, colour)| {
        let of_case = || lines.iter().filter(move |line| line.case == case);
        Series {
            name: case.to_owned(),
            colour,
            dashed: false,
            emulated: of_case().any(|line| line.conditions.emulated),
            points: of_case().filter_map(point).collect(),
        }
    });
    plot("Time until all children have answered", "n", "children asked for in one call", false, series.into())
}

/// How much of the memory is dirty, with its colour.
const DIRTY: [(u64, &str); 3] = [(0, "#009e73"), (10, "#0072b2"), (100, "#d55e00")];

/// How long branches of the tiny guest stood still, over its memory, for each part of it that is dirty;
/// beside it, dashed, a bare fork of the same memory and, grey, a copy of it.
pub fn pauses(records: &[Record], memory: Kind) -> String {
    let of = |case: &'static str, dirty: u64| {
        let fits = move |line: &&branch::Line| {
            let Subject { guest, memory: kind, dirty_pct, .. } = &line.subject;
            line.case == case && guest == "tiny" && *kind == memory && *dirty_pct == dirty
        };
        let point = |line: &branch::Line| Some((line.subject.mem_mib as f64, line.p50_ms?));
        branch::lines(records).filter(fits).filter_map(point).collect::<Vec<_>>()
    };
    let mut series = Vec::new();
    for (dirty, colour) in DIRTY {
        for (case, dashed) in [("forkd", false), ("fork", true)] {
            let name = format!("{case}, {dirty} % dirty");
            series.push(Series { name, colour, dashed, emulated: false, points: of(case, dirty) });
        }
    }
    let copies = of("copy", 10);
    series.push(Series {
        name: "copy".into(),
        colour: "#7f7f7f",
        dashed: true,
        emulated: false,
        points: copies,
    });
    let title = match memory {
        Kind::Layer => "Pause of a branch, memory from a layer",
        Kind::Huge => "Pause of a branch, anonymous memory in huge pages",
    };
    plot(title, "MiB", "guest memory in MiB", true, series)
}

/// How long each of several branches in a row stood still.
pub fn rows(records: &[Record]) -> String {
    let colours = DIRTY.iter().map(|(_, colour)| *colour).cycle();
    let series = branch::rows(records).into_iter().zip(colours).map(|((subject, row), colour)| Series {
        name: format!("{}, {} MiB", subject.memory.name(), subject.mem_mib),
        colour,
        dashed: false,
        emulated: row.iter().any(|one| one.conditions.emulated),
        points: row.iter().map(|one| ((one.index + 1) as f64, one.pause_ms)).collect(),
    });
    plot("Pauses of branches in a row of one sandbox", "branch", "branch", true, series.collect())
}

/// A line of a picture.
struct Series {
    name: String,
    colour: &'static str,
    dashed: bool,
    /// Times under other conditions: drawn, but marked.
    emulated: bool,
    points: Vec<(f64, f64)>,
}

/// Milliseconds over `x`, which is called `name` at a point and `label` at its axis, on two logarithmic
/// axes. With `exact` there is a tick for each `x` there is.
fn plot(title: &str, name: &str, label: &str, exact: bool, mut series: Vec<Series>) -> String {
    for one in &mut series {
        one.points.retain(|(x, ms)| x.is_finite() && *x > 0.0 && ms.is_finite() && *ms > 0.0);
        one.points.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.total_cmp(&b.1)));
    }
    let all = || series.iter().flat_map(|one| one.points.iter().copied());
    let mut svg = open(title);
    let xs = || all().map(|point| point.0);
    let (x, y) =
        (if exact { Axis::exact(xs()) } else { Axis::over(xs()) }, Axis::over(all().map(|point| point.1)));
    let (left, top, right, bottom) = PLOT;
    let across = |n: f64| left + x.place(n) * (right - left);
    let down = |ms: f64| bottom - y.place(ms) * (bottom - top);
    for tick in &x.ticks {
        let at = across(*tick);
        let _ =
            writeln!(svg, r##"<line x1="{at:.1}" y1="{top}" x2="{at:.1}" y2="{bottom}" stroke="#e5e5e5"/>"##);
        let _ =
            writeln!(svg, r#"<text x="{at:.1}" y="{:.1}" text-anchor="middle">{tick}</text>"#, bottom + 20.0);
    }
    for tick in &y.ticks {
        let at = down(*tick);
        let _ =
            writeln!(svg, r##"<line x1="{left}" y1="{at:.1}" x2="{right}" y2="{at:.1}" stroke="#e5e5e5"/>"##);
        let text = milliseconds(*tick);
        let _ = writeln!(
            svg,
            r#"<text x="{:.1}" y="{:.1}" text-anchor="end">{text}</text>"#,
            left - 8.0,
            at + 4.0
        );
    }
    let (middle, below) = ((left + right) / 2.0, bottom + 42.0);
    let _ = writeln!(svg, r#"<text x="{middle:.1}" y="{below:.1}" text-anchor="middle">{label}</text>"#);
    // Names stand at the ends of their lines, moved apart where lines end close to each other; from the
    // top, so that they keep the order of the lines.
    let mut taken: Vec<f64> = Vec::new();
    let mut ends: Vec<_> = series.iter().filter_map(|one| Some((one, *one.points.last()?))).collect();
    ends.sort_by(|(_, a), (_, b)| b.1.total_cmp(&a.1));
    for (Series { name: series, colour, dashed, emulated, points }, last) in ends {
        let path: Vec<String> =
            points.iter().map(|(n, ms)| format!("{:.1},{:.1}", across(*n), down(*ms))).collect();
        let path = path.join(" ");
        let dashes = if *dashed { r#" stroke-dasharray="6 4""# } else { "" };
        let _ = writeln!(
            svg,
            r#"<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2.5"{dashes}/>"#
        );
        for (n, ms) in points {
            let _ = writeln!(
                svg,
                r#"<circle cx="{:.1}" cy="{:.1}" r="4" fill="{colour}"><title>{series}, {name} = {n}: {ms} ms</title></circle>"#,
                across(*n),
                down(*ms),
            );
        }
        let at = free_line(&taken, down(last.1) + 4.0);
        taken.push(at);
        let text = format!("{series} {}{}", milliseconds(last.1), if *emulated { ", emulated" } else { "" });
        let _ = writeln!(
            svg,
            r#"<text x="{:.1}" y="{at:.1}" fill="{colour}">{text}</text>"#,
            across(last.0) + 10.0
        );
    }
    close(svg)
}

/// What one child takes of its own, and with its part of what it shares, at the largest number.
pub fn memory(lines: &[Line]) -> String {
    let largest = |case: &str| {
        let known = lines.iter().filter(|line| line.case == case && line.private_kib.is_some());
        known.max_by_key(|line| line.n)
    };
    let rows: Vec<(&Line, &str)> =
        CASES.iter().filter_map(|(case, colour)| Some((largest(case)?, *colour))).collect();
    let rows = rows.into_iter().map(|(line, colour)| Row {
        label: format!("{}, n = {}", line.case, line.n),
        colour,
        bars: [(line.private_kib, "private"), (line.pss_kib, "PSS")]
            .into_iter()
            .filter_map(|(kib, name)| kib.map(|kib| (kib as f64, format!("{name} {kib} KiB"))))
            .collect(),
    });
    bars("Memory per child, right after its first answer", &rows.collect::<Vec<_>>())
}

/// How long a guest stood still for a branch and, with another monitor, for a snapshot: for each subject that was
/// measured with both. None if none was.
pub fn standstills(records: &[Record]) -> Option<String> {
    const SHOWN: [(&str, &str); 4] = [
        ("forkd", "#0072b2"),
        ("firecracker_diff", "#009e73"),
        ("firecracker_full", "#009e73"),
        ("copy", "#7f7f7f"),
    ];
    let others = branch::lines(records).filter(|line| line.case == "firecracker_full");
    let mut rows = Vec::new();
    for Subject { guest, memory, mem_mib, dirty_pct } in others.map(|line| &line.subject) {
        for (case, colour) in SHOWN {
            let of_case = branch::lines(records).find(|line| {
                let of = &line.subject;
                line.case == case
                    && (&of.guest, &of.memory, of.mem_mib, of.dirty_pct)
                        == (guest, memory, *mem_mib, *dirty_pct)
            });
            let Some(ms) = of_case.and_then(|line| line.p50_ms).filter(|ms| ms.is_finite() && *ms >= 0.0)
            else {
                continue;
            };
            let text = format!("{}, {mem_mib} MiB, {dirty_pct} % written", milliseconds(ms));
            rows.push(Row { label: case.into(), colour, bars: vec![(ms, text)] });
        }
    }
    (!rows.is_empty()).then(|| bars("How long the guest stood still", &rows))
}

/// Bars with one label.
struct Row {
    label: String,
    colour: &'static str,
    /// How long each is, and what stands beside it.
    bars: Vec<(f64, String)>,
}

/// Rows of horizontal bars, all to one scale; those of a row are of one colour, and paler from bar to bar.
fn bars(title: &str, rows: &[Row]) -> String {
    const HEIGHT: f64 = 20.0;
    const STEP: f64 = 24.0;
    const GAP: f64 = 22.0;
    let most = rows.iter().flat_map(|row| &row.bars).map(|(value, _)| *value).fold(1.0, f64::max);
    let (left, top, right, _) = PLOT;
    // Room for the longest label on one side, and for the longest text on the other.
    let (left, right) = (left + 100.0, right - 60.0);
    let mut svg = open(title);
    let mut y = top;
    for Row { label, colour, bars } in rows {
        let middle = y + (bars.len() as f64 * STEP - (STEP - HEIGHT)) / 2.0;
        let _ = writeln!(
            svg,
            r#"<text x="{:.1}" y="{:.1}" text-anchor="end">{label}</text>"#,
            left - 10.0,
            middle + 5.0
        );
        for ((value, text), opacity) in bars.iter().zip([1.0, 0.45]) {
            let wide = value / most * (right - left);
            let _ = writeln!(
                svg,
                r#"<rect x="{left}" y="{y:.1}" width="{wide:.1}" height="{HEIGHT}" fill="{colour}" fill-opacity="{opacity}"/>"#
            );
            let _ = writeln!(svg, r#"<text x="{:.1}" y="{:.1}">{text}</text>"#, left + wide + 8.0, y + 15.0);
            y += STEP;
        }
        y += GAP;
    }
    close(svg)
}

fn open(title: &str) -> String {
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" width=\"{WIDTH}\" \
         height=\"{HEIGHT}\" font-family=\"system-ui, sans-serif\" font-size=\"13\" fill=\"#333\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"#fff\"/>\n\
         <text x=\"24\" y=\"32\" font-size=\"17\" font-weight=\"600\">{title}</text>\n"
    )
}

fn close(mut svg: String) -> String {
    svg.push_str("</svg>\n");
    svg
}

/// As people write it: `0.1 ms`, `30 ms`, `2 s`.
fn milliseconds(ms: f64) -> String {
    let (value, unit) = if ms >= 1000.0 { (ms / 1000.0, "s") } else { (ms, "ms") };
    let digits = if value >= 10.0 { 0 } else { 1 };
    let text = format!("{value:.digits$}");
    format!("{} {unit}", text.strip_suffix(".0").unwrap_or(&text))
}

/// A logarithmic axis.
struct Axis {
    /// Powers of ten.
    low: f64,
    high: f64,
    ticks: Vec<f64>,
}

impl Axis {
    /// Over whole powers of ten.
    fn over(values: impl Iterator<Item = f64>) -> Axis {
        let (low, high) = Axis::ends(values).unwrap_or((0.0, 1.0));
        // Hours and nanoseconds bound what is drawn: lines come from files.
        let (low, high) = (low.floor().max(-6.0) as i32, high.ceil().min(9.0) as i32);
        let high = high.max(low + 1);
        let ticks = (low..=high).map(|power| 10f64.powi(power)).collect();
        Axis { low: low.into(), high: high.into(), ticks }
    }

    /// From the least to the largest of them, with a tick for each, but not for very many.
    fn exact(values: impl Iterator<Item = f64>) -> Axis {
        let mut ticks: Vec<f64> = values.collect();
        ticks.sort_by(f64::total_cmp);
        ticks.dedup();
        match Axis::ends(ticks.iter().copied()) {
            Some((low, high)) if ticks.len() <= 20 => Axis { low, high: high.max(low + 0.1), ticks },
            _ => Axis::over(ticks.into_iter()),
        }
    }

    /// The least and the largest, as powers of ten.
    fn ends(values: impl Iterator<Item = f64>) -> Option<(f64, f64)> {
        let (mut low, mut high) = (f64::INFINITY, f64::NEG_INFINITY);
        for value in values.filter(|value| value.is_finite() && *value > 0.0) {
            (low, high) = (low.min(value), high.max(value));
        }
        (low <= high).then(|| (low.log10(), high.log10()))
    }

    /// Where a value is, from 0 to 1.
    fn place(&self, value: f64) -> f64 {
        ((value.log10() - self.low) / (self.high - self.low)).clamp(0.0, 1.0)
    }
}

/// Where a line of text goes that is to be at `at`: there, or below the lines that are `taken`.
fn free_line(taken: &[f64], mut at: f64) -> f64 {
    const HEIGHT: f64 = 16.0;
    // A little less than a line, as sums are not exact: every step leads on.
    while let Some(other) = taken.iter().copied().find(|other| (other - at).abs() < HEIGHT - 0.5) {
        at = other + HEIGHT;
    }
    at
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(case: &str, n: usize, all_ms: f64) -> Line {
        let case = case.into();
        Line {
            case,
            n,
            ok: n,
            all_ms: Some(all_ms),
            private_kib: Some(300),
            pss_kib: Some(400),
            ..Line::default()
        }
    }

    #[test]
    fn the_same_lines_give_the_same_picture_in_any_order() {
        let lines = [line("floor", 1, 0.5), line("floor", 1000, 500.0), line("tiny", 1, 1.0)];
        let mut turned = lines.clone();
        turned.reverse();
        assert_eq!(times(&lines), times(&turned));
        assert_eq!(memory(&lines), memory(&turned));
    }

    #[test]
    fn lines_of_text_find_a_place_wherever_the_others_are() {
        for start in (0..5000).map(|n| f64::from(n) * 0.1) {
            let mut taken = vec![start + 33.3];
            for _ in 0..10 {
                let at = free_line(&taken, start);
                assert!(at >= start && taken.iter().all(|other| (other - at).abs() > 15.0), "{taken:?} {at}");
                taken.push(at);
            }
        }
    }

    #[test]
    fn a_point_twice_as_far_up_is_ten_times_as_slow() {
        let axis = Axis::over([1.0, 100.0].into_iter());
        assert_eq!(axis.ticks, [1.0, 10.0, 100.0]);
        assert_eq!((axis.place(1.0), axis.place(10.0), axis.place(100.0)), (0.0, 0.5, 1.0));
    }

    #[test]
    fn pictures_of_nothing_and_of_nonsense_are_still_pictures() {
        let hostile = [line("floor", 0, -1.0), line("tiny", usize::MAX, f64::INFINITY), line("<x>", 1, 1.0)];
        for lines in [&[][..], &hostile] {
            for svg in [times(lines), memory(lines)] {
                assert!(svg.starts_with("<svg ") && svg.ends_with("</svg>\n"));
                assert!(!svg.contains("NaN") && !svg.contains("inf") && !svg.contains("<x>"), "{svg}");
            }
        }
    }

    fn branched(case: &str, mem_mib: u64, ms: f64) -> Record {
        let subject = Subject { guest: "tiny".into(), memory: Kind::Layer, mem_mib, dirty_pct: 10 };
        let attempts = branch::Attempts { times_ms: vec![ms], errors: Vec::new() };
        Record::Line(branch::Line::of(case, &subject, &attempts, &Default::default()))
    }

    #[test]
    fn a_branch_is_drawn_beside_the_snapshot_of_another_monitor_of_the_same_guest() {
        let mut records = vec![branched("forkd", 1536, 5.9), branched("forkd", 512, 2.0)];
        assert!(standstills(&records).is_none());
        records
            .extend([branched("firecracker_full", 1536, 823.0), branched("firecracker_diff", 1536, 530.0)]);
        let svg = standstills(&records).unwrap();
        assert_eq!(svg.matches("fill-opacity").count(), 3, "{svg}");
        assert!(svg.contains(">5.9 ms, 1536 MiB, 10 % written<"), "{svg}");
        records.push(branched("copy", 1536, f64::INFINITY));
        assert!(!standstills(&records).unwrap().contains("inf"));
    }

    #[test]
    fn labels_and_texts_of_bars_stay_inside_the_picture() {
        let row = |label: &str, value, text: &str| Row {
            label: label.into(),
            colour: "#000",
            bars: vec![(value, text.into())],
        };
        let svg = bars(
            "x",
            &[row("firecracker, n = 1000", 1.0, "a"), row("b", 9000.0, "1.5 s, 1536 MiB, 100 % written")],
        );
        let number = |text: &str| text.split('"').nth(1).unwrap().parse::<f64>().unwrap();
        // A generous width for a character of this size.
        const CHARACTER: f64 = 7.5;
        for line in svg.lines().filter(|line| line.starts_with("<text") && !line.contains("font-weight")) {
            let width = line.split(['>', '<']).nth(2).unwrap().chars().count() as f64 * CHARACTER;
            let x = number(line.split(" x=").nth(1).unwrap());
            let (begin, end) = if line.contains("anchor") { (x - width, x) } else { (x, x + width) };
            assert!(begin >= 0.0 && end <= WIDTH, "{line}");
        }
    }

    #[test]
    fn pauses_are_drawn_beside_the_bare_fork_of_the_same_kind_of_memory() {
        let records =
            [branched("forkd", 512, 2.0), branched("forkd", 4096, 20.0), branched("fork", 4096, 19.0)];
        let svg = pauses(&records, Kind::Layer);
        assert!(svg.contains("forkd, 10 % dirty, MiB = 4096: 20 ms") && svg.contains(">512<"), "{svg}");
        assert_eq!(svg.matches("stroke-dasharray").count(), 1, "{svg}");
        assert!(!pauses(&records, Kind::Huge).contains("polyline"));
        let hostile = [branched("forkd", 0, -1.0), branched("fork", u64::MAX, f64::INFINITY)];
        for svg in [pauses(&hostile, Kind::Layer), pauses(&[], Kind::Huge), rows(&[])] {
            assert!(svg.ends_with("</svg>\n") && !svg.contains("NaN") && !svg.contains("inf"), "{svg}");
        }
    }

    #[test]
    fn names_at_the_ends_of_lines_do_not_cover_each_other() {
        let svg = times(&[line("floor", 100, 50.0), line("tiny", 100, 50.0), line("linux", 100, 50.0)]);
        let mut heights: Vec<f64> = Vec::new();
        for (case, _) in CASES {
            let Some(label) = svg.lines().find(|line| line.contains(&format!(">{case} 50 ms<"))) else {
                continue;
            };
            let y = label.split("y=\"").nth(1).unwrap().split('"').next().unwrap();
            heights.push(y.parse().unwrap());
        }
        assert_eq!(heights.len(), 3);
        assert!(heights.windows(2).all(|pair| (pair[0] - pair[1]).abs() >= 16.0), "{heights:?}");
    }

    #[test]
    fn times_read_well() {
        assert_eq!(milliseconds(0.1), "0.1 ms");
        assert_eq!(milliseconds(1.0), "1 ms");
        assert_eq!(milliseconds(123.4), "123 ms");
        assert_eq!(milliseconds(2500.0), "2.5 s");
    }
}
