//! The agent's HTTP parser.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| forkd_guest::fuzz_request(data));
