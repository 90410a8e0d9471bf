//! State files.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| forkd_vmm::fuzz::fuzz_state_file(data));
