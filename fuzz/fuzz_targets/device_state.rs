//! Devices restored from changed registers.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| forkd_vmm::fuzz::fuzz_device_state(data));
