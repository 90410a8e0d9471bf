//! Register accesses to the virtio transport.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| forkd_vmm::fuzz::fuzz_mmio_registers(data));
