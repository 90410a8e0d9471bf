//! Limits of outputs: a long text fills a model's context. It is cut, with a sentence that says how to get the rest.

use serde_json::Value;

/// The longest text of a result in bytes, unless the operator sets another limit.
pub const DEFAULT_OUTPUT_LIMIT: usize = 50 << 10;
/// The smallest limit that makes sense: the sentences have to fit.
pub(crate) const MIN_OUTPUT_LIMIT: usize = 2 << 10;
/// A string is not cut below this.
const MIN_STRING: usize = 200;

/// Cuts the strings in a value, from the middle, until the value as JSON has at most `limit` bytes. The longest strings
/// are cut first. `how` is how to get the rest.
pub(crate) fn fit(value: &mut Value, limit: usize, how: &str) {
    if length(value) <= limit {
        return;
    }
    // The largest cap with which the value fits.
    let (mut fits, mut too_long) = (MIN_STRING, limit);
    while too_long - fits > MIN_STRING / 4 {
        let middle = fits + (too_long - fits) / 2;
        if capped_length(value, middle, how) <= limit { fits = middle } else { too_long = middle }
    }
    cap(value, fits, how);
    if length(value) > limit {
        // Not the strings are long, but the number of values.
        let text = value.to_string();
        *value = serde_json::json!({ "cut": cut_end(&text, limit / 2, how) });
    }
}

/// The beginning of a list that has at most `limit` bytes as JSON, and a sentence if that is not the whole list.
pub(crate) fn fit_list(items: Vec<Value>, offset: usize, limit: usize) -> (Vec<Value>, Option<String>) {
    let all = items.len();
    let mut room = limit;
    let mut shown = Vec::new();
    for mut item in items.into_iter().skip(offset) {
        fit(&mut item, limit / 2, "get this entry alone");
        let Some(left) = room.checked_sub(length(&item)) else { break };
        room = left;
        shown.push(item);
    }
    let end = offset.saturating_add(shown.len());
    let cut = (end < all).then(|| {
        format!(
            "[cut: entries {offset} to {end} of {all} are shown; for the rest, call again with offset={end}]"
        )
    });
    (shown, cut)
}

/// The beginning of a text, and a sentence if that is not the whole text.
pub(crate) fn cut_end(text: &str, limit: usize, how: &str) -> String {
    if text.len() <= limit {
        return text.to_owned();
    }
    let head = &text[..before(text, limit)];
    format!("{head}\n[cut: the first {} of {} bytes are shown; {how}]", head.len(), text.len())
}

/// The beginning and the end of a text, and a sentence between them if that is not the whole text.
pub(crate) fn cut_middle(text: &str, limit: usize, how: &str) -> String {
    if text.len() <= limit {
        return text.to_owned();
    }
    let head = before(text, limit / 2);
    let tail = after(text, text.len() - limit / 2);
    let cut = tail - head;
    let all = text.len();
    format!("{}\n[cut: {cut} of {all} bytes are left out here; {how}]\n{}", &text[..head], &text[tail..])
}

/// The last place at which a text may be cut, up to `at`.
pub(crate) fn before(text: &str, at: usize) -> usize {
    (0..=at.min(text.len())).rev().find(|at| text.is_char_boundary(*at)).unwrap_or(0)
}

/// The first place at which a text may be cut, from `at` on.
pub(crate) fn after(text: &str, at: usize) -> usize {
    (at..text.len()).find(|at| text.is_char_boundary(*at)).unwrap_or(text.len())
}

fn length(value: &Value) -> usize {
    match value {
        Value::String(text) => json_length(text),
        Value::Array(items) => 2 + items.iter().map(|item| length(item) + 1).sum::<usize>(),
        Value::Object(fields) => {
            2 + fields.iter().map(|(name, value)| json_length(name) + length(value) + 2).sum::<usize>()
        }
        other => other.to_string().len(),
    }
}

fn capped_length(value: &Value, cap: usize, how: &str) -> usize {
    match value {
        Value::String(text) if text.len() > cap => json_length(&cut_middle(text, cap, how)),
        Value::Array(items) => 2 + items.iter().map(|item| capped_length(item, cap, how) + 1).sum::<usize>(),
        Value::Object(fields) => {
            let field =
                |(name, value): (&String, &Value)| json_length(name) + capped_length(value, cap, how) + 2;
            2 + fields.iter().map(field).sum::<usize>()
        }
        other => length(other),
    }
}

fn cap(value: &mut Value, limit: usize, how: &str) {
    match value {
        Value::String(text) if text.len() > limit => *text = cut_middle(text, limit, how),
        Value::Array(items) => items.iter_mut().for_each(|item| cap(item, limit, how)),
        Value::Object(fields) => fields.values_mut().for_each(|value| cap(value, limit, how)),
        _ => {}
    }
}

/// The length of a string in JSON, at most: with its quotes and escapes.
fn json_length(text: &str) -> usize {
    let escaped = |byte: u8| match byte {
        b'"' | b'\\' | b'\n' | b'\r' | b'\t' => 2,
        0..=0x1f => 6,
        _ => 1,
    };
    2 + text.bytes().map(escaped).sum::<usize>()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn what_fits_is_left_alone() {
        let value = json!({ "stdout": "hello", "exit_code": 0 });
        let mut fitted = value.clone();
        fit(&mut fitted, MIN_OUTPUT_LIMIT, "x");
        assert_eq!(fitted, value);
        assert_eq!(cut_end("ab", 2, "x"), "ab");
        assert_eq!(fit_list(vec![json!(1)], 0, 100), (vec![json!(1)], None));
    }

    #[test]
    fn long_strings_keep_their_ends_and_short_ones_everything() {
        let long: String = (0..100_000).map(|n| char::from(b'a' + (n % 26) as u8)).collect();
        for hostile in [long, "\u{0}\"\\".repeat(50_000), "€".repeat(40_000)] {
            let mut value = json!({ "stdout": hostile, "stderr": "short", "exit_code": 1 });
            fit(&mut value, DEFAULT_OUTPUT_LIMIT, "read the file");
            let text = value.to_string();
            assert!(text.len() <= DEFAULT_OUTPUT_LIMIT, "{}", text.len());
            assert!(text.len() > DEFAULT_OUTPUT_LIMIT / 2, "{}", text.len());
            assert_eq!((&value["stderr"], &value["exit_code"]), (&json!("short"), &json!(1)));
            let stdout = value["stdout"].as_str().unwrap();
            assert!(stdout.contains("read the file"));
            assert!(stdout.starts_with(&hostile[..3]) && stdout.ends_with(&hostile[hostile.len() - 3..]));
        }
    }

    #[test]
    fn a_value_of_many_parts_is_cut_as_well() {
        let mut value = json!({ "result_json": (0..100_000).collect::<Vec<_>>() });
        fit(&mut value, DEFAULT_OUTPUT_LIMIT, "print less");
        assert!(value.to_string().len() <= DEFAULT_OUTPUT_LIMIT);
        assert!(value["cut"].as_str().unwrap().contains("print less"));
    }

    #[test]
    fn a_list_goes_on_where_it_was_cut() {
        let items: Vec<Value> = (0..1000).map(|n| json!({ "id": format!("sb{n:050}") })).collect();
        let (mut offset, mut seen) = (0, Vec::new());
        for _ in 0..100 {
            let (shown, cut) = fit_list(items.clone(), offset, MIN_OUTPUT_LIMIT);
            assert!(!shown.is_empty());
            offset += shown.len();
            seen.extend(shown);
            let Some(cut) = cut else { break };
            assert!(cut.contains(&format!("offset={offset}]")), "{cut}");
        }
        assert_eq!(seen, items);
    }
}
