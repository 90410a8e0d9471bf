//! Memory layers.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| forkd_vmm::fuzz::fuzz_memory_layer(data));
