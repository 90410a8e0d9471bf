//! The controller's expectations of a state. It counts limits and quotas by them, so a state that differs is
//! refused.

use super::{DevicePart, MachineState};
use crate::{Error, Result};

/// The required properties of a state.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Expected {
    /// Number of vCPUs; none if the controller does not know.
    pub vcpus: Option<u8>,
    /// Guest memory in MiB; none if the controller does not know.
    pub mem_mib: Option<u64>,
    /// Ports of the host the guest may call.
    pub guest_ports: Vec<u32>,
}

impl Expected {
    /// Refuses a `state` that is of anything else.
    pub fn check(&self, state: &MachineState) -> Result<()> {
        let vcpus = state.vcpus.len();
        if let Some(expected) = self.vcpus.filter(|expected| usize::from(*expected) != vcpus) {
            return Err(differs(&format!("{vcpus} vCPUs, its manifest {expected}")));
        }
        // Every length is that of some VM only if it is a number of MiB: the code that maps it looks at that.
        let bytes = state.memory.iter().fold(0u64, |sum, range| sum.saturating_add(range.length));
        if let Some(expected) = self.mem_mib.filter(|expected| expected.checked_mul(1 << 20) != Some(bytes)) {
            let found = bytes >> 20;
            return Err(differs(&format!("{found} MiB of memory, its manifest {expected}")));
        }
        for device in &state.devices {
            let DevicePart::Vsock(vsock) = &device.part else { continue };
            match &vsock.guest_ports {
                Some(ports) if *ports == self.guest_ports => {}
                Some(ports) => {
                    let expected = &self.guest_ports;
                    return Err(differs(&format!(
                        "calls to the host's ports {ports:?}, allowed are {expected:?}"
                    )));
                }
                None => return Err(differs("calls to all ports of the host, which no guest is allowed")),
            }
        }
        Ok(())
    }
}

fn differs(how: &str) -> Error {
    Error::Config(format!(
        "the state file is not of the snapshot it lies in: it has {how}; make the snapshot again"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::{DeviceState, MemoryRange, TransportState, VsockState, file};

    fn state(guest_ports: Option<Vec<u32>>) -> MachineState {
        let mut state = file::parse(include_bytes!("../../../../fuzz/corpus/state_file/file")).unwrap();
        state.vcpus.truncate(1);
        state.memory = vec![MemoryRange { start: 0, length: 64 << 20 }];
        let vsock = VsockState { cid: 3, guest_ports, next_host_port: 1 << 30 };
        state.devices =
            vec![DeviceState { transport: TransportState::default(), part: DevicePart::Vsock(vsock) }];
        state
    }

    #[test]
    fn a_state_of_another_vm_than_the_controller_says_is_refused() {
        let expected = Expected { vcpus: Some(1), mem_mib: Some(64), guest_ports: Vec::new() };
        let refusal = |expected: &Expected, ports| expected.check(&state(ports)).unwrap_err().to_string();
        let none = || Some(Vec::new());
        expected.check(&state(none())).unwrap();
        let other = Expected { vcpus: Some(2), ..expected.clone() };
        assert!(refusal(&other, none()).contains("1 vCPUs, its manifest 2"));
        for mem_mib in [63, 65, 1 << 60] {
            let other = Expected { mem_mib: Some(mem_mib), ..expected.clone() };
            assert!(refusal(&other, none()).contains("64 MiB of memory"));
        }
        assert!(refusal(&expected, None).contains("all ports of the host"));
        assert!(refusal(&expected, Some(vec![7])).contains("ports [7], allowed are []"));
        Expected { guest_ports: vec![7], ..expected }.check(&state(Some(vec![7]))).unwrap();
    }
}
