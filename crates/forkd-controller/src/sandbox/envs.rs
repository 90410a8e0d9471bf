//! Checks of the environment variables that a request gives to new children.

use std::collections::BTreeMap;

use crate::error::{Error, Result};

/// The most bytes of all variables, as an agent counts them: each with its `=` and its NUL, `FORKD_SANDBOX_ID`
/// included.
const MAX_ENVS: usize = 64 << 10;
const OWN_ENV: usize = "FORKD_SANDBOX_ID=sb0123456789abcdef\0".len();

/// Fails for variables that an agent would refuse, before a child is created. The limit is small because every child
/// keeps a copy, and there may be a thousand children.
pub(crate) fn check_envs(envs: &BTreeMap<String, String>) -> Result<()> {
    let length = envs.iter().map(|(name, value)| name.len() + value.len() + 2).sum::<usize>() + OWN_ENV;
    if length > MAX_ENVS {
        let text = format!(
            "env takes {length} bytes, and {MAX_ENVS} is the limit; pass larger values in a file (`forkd cp`)"
        );
        return Err(Error::invalid(text));
    }
    for (name, value) in envs {
        if name.is_empty() || name.contains(['=', '\0']) || value.contains('\0') {
            let text = format!("env: {name:?} is not a valid variable: use no `=` in the name and no NUL");
            return Err(Error::invalid(text));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables_are_what_an_agent_takes_and_no_more() {
        let one = |name: &str, value: &str| BTreeMap::from([(name.to_owned(), value.to_owned())]);
        check_envs(&BTreeMap::new()).unwrap();
        check_envs(&one("A", "b=c \n")).unwrap();
        for (name, value) in [("", "x"), ("a=b", "x"), ("a\0", "x"), ("a", "\0")] {
            assert!(check_envs(&one(name, value)).is_err(), "{name:?} {value:?}");
        }
        let most = MAX_ENVS - OWN_ENV - "A=\0".len();
        check_envs(&one("A", &"x".repeat(most))).unwrap();
        let error = check_envs(&one("A", &"x".repeat(most + 1))).unwrap_err();
        assert_eq!(error.code(), crate::error::Code::InvalidRequest, "{error}");
        assert!(error.public().contains("65536"), "{error}");
        // The limit also counts many small variables.
        let many = |n: usize| (0..n).map(|n| (format!("V{n:05}"), String::new())).collect();
        check_envs(&many(8000)).unwrap();
        assert!(check_envs(&many(8200)).is_err());
    }
}
