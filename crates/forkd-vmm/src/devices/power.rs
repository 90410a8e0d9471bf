//! How a guest ends: the registers with which it powers off or asks for a reset.
//!
//! Powering off is ACPI's: a guest with reduced hardware writes a sleep type and an enable bit to
//! the sleep control register that the FADT announces. Resetting is the keyboard controller's, which
//! every x86 kernel knows how to misuse for it.

use crate::layout::{RESET_PORT, SLEEP_CONTROL_PORT, SLEEP_STATUS_PORT};

/// The sleep type that `_S5` (powered off) names.
pub const S5_SLEEP_TYPE: u8 = 5;
/// The keyboard controller's command that resets the machine.
pub const RESET_COMMAND: u8 = 0xfe;

const SLEEP_ENABLE: u8 = 1 << 5;
const SLEEP_TYPE_SHIFT: u8 = 2;
const SLEEP_TYPE_MASK: u8 = 7;

/// The guest's request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PowerEvent {
    /// To be powered off.
    PoweredOff,
    /// To be reset.
    Reset,
}

/// The request in a write of `value` to `port`; `None` for every other port and value.
pub fn port_write(port: u16, value: u8) -> Option<PowerEvent> {
    let sleep_type = value >> SLEEP_TYPE_SHIFT & SLEEP_TYPE_MASK;
    match port {
        SLEEP_CONTROL_PORT if value & SLEEP_ENABLE != 0 && sleep_type == S5_SLEEP_TYPE => {
            Some(PowerEvent::PoweredOff)
        }
        RESET_PORT if value == RESET_COMMAND => Some(PowerEvent::Reset),
        _ => None,
    }
}

/// The result of a read of `port`; `None` if the port is not one of these.
pub fn port_read(port: u16) -> Option<u8> {
    match port {
        // Awake, with nothing to report; a keyboard controller that is never busy, so that a guest
        // does not wait before it resets.
        SLEEP_CONTROL_PORT | SLEEP_STATUS_PORT | RESET_PORT => Some(0),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_two_real_requests_end_a_guest() {
        let power_off = SLEEP_ENABLE | S5_SLEEP_TYPE << SLEEP_TYPE_SHIFT;
        for port in 0..=u16::MAX {
            for value in 0..=u8::MAX {
                let request = port_write(port, value);
                match (port, value) {
                    // Bits without a meaning do not matter.
                    (SLEEP_CONTROL_PORT, value) if value & 0b0011_1100 == power_off => {
                        assert_eq!(request, Some(PowerEvent::PoweredOff));
                    }
                    (RESET_PORT, 0xfe) => assert_eq!(request, Some(PowerEvent::Reset)),
                    _ => assert_eq!(request, None, "{port:#x} {value:#x}"),
                }
            }
        }
    }
}
