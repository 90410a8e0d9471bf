//! Forms that are uploaded to the agent.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| forkd_guest::fuzz_multipart(data));
