//! Random numbers from the kernel, and ids made of them.

use std::sync::atomic::{AtomicU64, Ordering};

use rustix::rand::{GetRandomFlags, getrandom};

use crate::error::{Error, Result};

/// Fills `bytes` with random numbers from the kernel.
pub(crate) fn fill_random(bytes: &mut [u8]) -> Result<()> {
    let mut filled = 0;
    while filled < bytes.len() {
        match getrandom(&mut bytes[filled..], GetRandomFlags::empty()) {
            Ok(count) => filled += count,
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(Error::host("no random numbers", error)),
        }
    }
    Ok(())
}

/// The random digits of an id.
const RANDOM: usize = 16;
/// The length of an id with a prefix of two letters.
pub(crate) const ID_LENGTH: usize = 2 + RANDOM;

/// `prefix` and 16 random letters and digits.
pub(crate) fn new_id(prefix: &str) -> Result<String> {
    let mut random = [0u8; RANDOM];
    crate::util::random::fill_random(&mut random)?;
    let digit = |byte: &u8| char::from_digit(u32::from(*byte) % 36, 36).unwrap_or('0');
    Ok(prefix.chars().chain(random.iter().map(digit)).collect())
}

pub(crate) fn request_id() -> String {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    format!("{:x}-{:x}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed))
}

#[cfg(test)]
mod tests {
    use super::*;
    use forkd_protocol::names::is_valid_sandbox_id;
    use std::collections::BTreeSet;

    #[test]
    fn ids_follow_the_rule_and_differ() {
        let ids: BTreeSet<String> = (0..100).map(|_| new_id("sb").unwrap()).collect();
        assert_eq!(ids.len(), 100);
        assert!(ids.iter().all(|id| is_valid_sandbox_id(id)));
    }
}
