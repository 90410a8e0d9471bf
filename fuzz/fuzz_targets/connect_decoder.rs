//! The Connect stream decoder.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| forkd_protocol::connect::fuzz_decoder(data));
