//! Rules for names that users choose and names that forkd makes.

/// The one rule for tags, image names and other names a user chooses.
pub const NAME_RULE: &str = "1 to 64 letters, digits, '_', '.' or '-', the first not '.' or '-'";

/// Whether `name` follows [`NAME_RULE`]. Such a name is safe as a file name: it cannot be `..`,
/// hold a `/` or start an option.
pub fn is_valid_name(name: &str) -> bool {
    let first_ok = name.bytes().next().is_some_and(|b| b.is_ascii_alphanumeric() || b == b'_');
    first_ok
        && name.len() <= 64
        && name.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'.' | b'-'))
}

/// Whether `id` looks like a sandbox id: `sb` followed by lower-case letters and digits, no hyphen
/// (E2B clients put ids into host names).
pub fn is_valid_sandbox_id(id: &str) -> bool {
    id.len() <= 32
        && id.strip_prefix("sb").is_some_and(|rest| {
            !rest.is_empty() && rest.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit())
        })
}

/// `text` as part of a URL's query: everything but unreserved characters as `%XX`.
pub fn percent(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for byte in text.bytes() {
        match byte {
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => out.push(char::from(byte)),
            _ => out.push_str(&format!("%{byte:02X}")),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_safe_as_file_names() {
        for good in ["python", "a", "_x", "py3.12-slim", &"a".repeat(64)] {
            assert!(is_valid_name(good), "{good}");
        }
        for bad in ["", ".", "..", "-x", ".hidden", "a/b", "a b", "ä", "a\0", &"a".repeat(65)] {
            assert!(!is_valid_name(bad), "{bad}");
        }
    }

    #[test]
    fn sandbox_ids_fit_into_host_names() {
        assert!(is_valid_sandbox_id("sb0123abc"));
        for bad in ["", "sb", "sb-1", "sbA", "xx1", "sb/..", "sb1 "] {
            assert!(!is_valid_sandbox_id(bad), "{bad}");
        }
    }
}
