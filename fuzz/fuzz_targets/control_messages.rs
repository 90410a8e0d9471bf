//! The control socket's messages.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| forkd_protocol::control::fuzz_messages(data));
