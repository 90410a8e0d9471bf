//! Requests of the line protocol.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| forkd_protocol::json_lines::fuzz_line(data));
