//! Random numbers for tests that kill at any moment. The seed is printed at the start, so that a run can be
//! repeated.

use std::io::Write;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// A source of pseudo-random numbers; they need not be secret.
pub struct Random(u64);

impl Random {
    /// Starts with `FORKD_TEST_SEED`, or with the time.
    pub fn start(test: &str) -> Random {
        let given = std::env::var("FORKD_TEST_SEED").ok().map(|seed| seed.parse().expect("a number"));
        let seed: u64 = given.unwrap_or_else(|| {
            SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_nanos() as u64
                ^ u64::from(std::process::id())
        });
        // Past the harness, which swallows what passing tests print.
        let _ = writeln!(std::io::stderr(), "{test}: FORKD_TEST_SEED={seed}");
        Random(seed | 1)
    }

    /// Another source, for another user.
    pub fn another(&mut self) -> Random {
        Random(self.below(u64::MAX) | 1)
    }

    /// A number below `end`.
    pub fn below(&mut self, end: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % end
    }

    /// A time shorter than `longest`, more often a short one.
    pub fn time(&mut self, longest: Duration) -> Duration {
        let longest = self.below(longest.as_micros() as u64).max(1);
        Duration::from_micros(self.below(longest))
    }
}

/// How often a campaign goes round: `FORKD_BRANCH_ROUNDS`, or `usual`.
pub fn rounds(usual: usize) -> usize {
    match std::env::var("FORKD_BRANCH_ROUNDS") {
        Ok(rounds) if !rounds.is_empty() => rounds.parse().expect("FORKD_BRANCH_ROUNDS is a number"),
        _ => usual,
    }
}
