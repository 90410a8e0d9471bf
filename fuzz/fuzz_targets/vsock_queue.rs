//! The socket device.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| forkd_vmm::fuzz::fuzz_vsock_queue(data));
