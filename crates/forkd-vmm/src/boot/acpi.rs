//! ACPI tables: how a stock kernel learns of its CPUs and devices without a PCI bus.
//!
//! The machine is "hardware-reduced": no legacy timer, no legacy interrupt controller, no power
//! management block; two sleep registers to power off by. Disks get their names in the order of their
//! devices here.

use acpi_tables::gas::{AccessSize, AddressSpace, GAS};
use acpi_tables::{Aml, aml, fadt, madt, rsdp::Rsdp, sdt::Sdt, xsdt::XSDT};

use super::params::write_bytes;
use crate::devices::power::S5_SLEEP_TYPE;
use crate::layout::{
    ACPI_END, ACPI_START, GENERATION_GSI, GENERATION_ID, IOAPIC, LAPIC, SERIAL_GSI, SERIAL_PORT,
    SLEEP_CONTROL_PORT, SLEEP_STATUS_PORT, VIRTIO_SIZE, virtio_base, virtio_gsi,
};
use crate::{Error, GuestMemory, Result};

const OEM: [u8; 6] = *b"FORKD ";
const OEM_TABLE: [u8; 8] = *b"FORKDVMM";
/// Legacy devices this machine does not have, as the FADT lists them. Those it would have to claim
/// (a keyboard controller, for one) it does not claim.
const NO_VGA: u16 = 1 << 2;
const NO_CMOS_RTC: u16 = 1 << 5;

/// Writes all tables, the RSDP at [`ACPI_START`].
pub fn write(memory: &GuestMemory, vcpus: u8, virtio_devices: usize) -> Result<()> {
    let mut tables = Tables { memory, next: ACPI_START + 0x40 };
    let dsdt = tables.add(&dsdt(virtio_devices))?;
    let fadt = tables.add(&fadt(dsdt))?;
    let madt = tables.add(&madt(vcpus))?;
    let mut xsdt = XSDT::new(OEM, OEM_TABLE, 1);
    xsdt.add_entry(fadt);
    xsdt.add_entry(madt);
    let xsdt = tables.add(&xsdt)?;
    write_bytes(memory, ACPI_START, &bytes(&Rsdp::new(OEM, xsdt)))
}

/// Places tables one after the other.
struct Tables<'a> {
    memory: &'a GuestMemory,
    next: u64,
}

impl Tables<'_> {
    fn add(&mut self, table: &dyn Aml) -> Result<u64> {
        let bytes = bytes(table);
        let address = self.next;
        self.next = (address + bytes.len() as u64).next_multiple_of(16);
        if self.next > ACPI_END {
            return Err(Error::Config("too many devices for the room kept for ACPI tables".into()));
        }
        write_bytes(self.memory, address, &bytes)?;
        Ok(address)
    }
}

fn bytes(table: &dyn Aml) -> Vec<u8> {
    let mut bytes = Vec::new();
    table.to_aml_bytes(&mut bytes);
    bytes
}

fn fadt(dsdt: u64) -> fadt::FADT {
    let port = |port: u16| GAS::new(AddressSpace::SystemIo, 8, 0, AccessSize::ByteAccess, port.into());
    let mut fadt = fadt::FADTBuilder::new(OEM, OEM_TABLE, 1)
        .dsdt_64(dsdt)
        .flag(fadt::Flags::HwReducedAcpi)
        // "No fixed power and sleep buttons."
        .flag(fadt::Flags::PwrButton)
        .flag(fadt::Flags::SlpButton);
    // Without this the kernel waits five seconds for an answer of a clock that is not there.
    fadt.iapc_boot_arch = (NO_CMOS_RTC | NO_VGA).into();
    fadt.sleep_control_reg = port(SLEEP_CONTROL_PORT);
    fadt.sleep_status_reg = port(SLEEP_STATUS_PORT);
    fadt.finalize()
}

fn madt(vcpus: u8) -> madt::MADT {
    let mut madt = madt::MADT::new(OEM, OEM_TABLE, 1, madt::LocalInterruptController::Address(LAPIC));
    for id in 0..vcpus {
        madt.add_structure(madt::ProcessorLocalApic::new(id, id, madt::EnabledStatus::Enabled));
    }
    madt.add_structure(madt::IoApic::new(0, IOAPIC, 0));
    madt
}

fn dsdt(virtio_devices: usize) -> Sdt {
    let mut code = Vec::new();
    for index in 0..virtio_devices {
        virtio_device(index, &mut code);
    }
    serial_console(&mut code);
    generation_id(&mut code);
    let off = aml::Package::new(vec![&S5_SLEEP_TYPE, &aml::ZERO, &aml::ZERO, &aml::ZERO]);
    aml::Name::new("_S5_".into(), &off).to_aml_bytes(&mut code);
    let mut dsdt = Sdt::new(*b"DSDT", 36, 6, OEM, OEM_TABLE, 1);
    dsdt.append_slice(&code);
    dsdt
}

/// An edge-triggered interrupt, as an eventfd gives them.
fn interrupt(gsi: u32) -> aml::Interrupt {
    aml::Interrupt::new(true, true, false, false, gsi)
}

fn virtio_device(index: usize, code: &mut Vec<u8>) {
    let registers = aml::Memory32Fixed::new(true, virtio_base(index) as u32, VIRTIO_SIZE as u32);
    let interrupt = interrupt(virtio_gsi(index));
    aml::Device::new(
        format!("_SB_.V{index:03}").as_str().into(),
        vec![
            &aml::Name::new("_HID".into(), &"LNRO0005"),
            &aml::Name::new("_UID".into(), &(index as u32)),
            &aml::Name::new("_CCA".into(), &aml::ONE),
            &aml::Name::new("_CRS".into(), &aml::ResourceTemplate::new(vec![&registers, &interrupt])),
        ],
    )
    .to_aml_bytes(code);
}

fn serial_console(code: &mut Vec<u8>) {
    let (ports, interrupt) = (aml::IO::new(SERIAL_PORT, SERIAL_PORT, 0, 8), interrupt(SERIAL_GSI));
    aml::Device::new(
        "_SB_.COM1".into(),
        vec![
            &aml::Name::new("_HID".into(), &aml::EISAName::new("PNP0501")),
            &aml::Name::new("_UID".into(), &aml::ZERO),
            &aml::Name::new("_CRS".into(), &aml::ResourceTemplate::new(vec![&interrupt, &ports])),
        ],
    )
    .to_aml_bytes(code);
}

/// The VM generation id, and the generic event device that signals its change.
fn generation_id(code: &mut Vec<u8>) {
    let address = aml::Package::new(vec![&(GENERATION_ID as u32), &aml::ZERO]);
    aml::Device::new(
        "_SB_.VGEN".into(),
        vec![
            // The name older drivers know, then the one the specification gives.
            &aml::Name::new("_HID".into(), &"VMGENCTR"),
            &aml::Name::new("_CID".into(), &"VM_Gen_Counter"),
            &aml::Name::new("_DDN".into(), &"VM_Gen_Counter"),
            &aml::Name::new("ADDR".into(), &address),
        ],
    )
    .to_aml_bytes(code);

    let device = aml::Path::new("\\_SB_.VGEN");
    let changed = aml::Notify::new(&device, &0x80u8);
    let event = GENERATION_GSI as u8;
    let is_ours = aml::Equal::new(&aml::Arg(0), &event);
    aml::Device::new(
        "_SB_.GED_".into(),
        vec![
            &aml::Name::new("_HID".into(), &"ACPI0013"),
            &aml::Name::new("_CRS".into(), &aml::ResourceTemplate::new(vec![&interrupt(GENERATION_GSI)])),
            &aml::Method::new("_EVT".into(), 1, true, vec![&aml::If::new(&is_ours, vec![&changed])]),
        ],
    )
    .to_aml_bytes(code);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::MAX_VIRTIO;
    use vm_memory::{Bytes, GuestAddress};

    #[test]
    fn the_largest_vm_fits_and_every_table_sums_to_zero() {
        let memory = crate::memory::allocate(64).unwrap();
        write(&memory, forkd_protocol::control::MAX_VCPUS, MAX_VIRTIO).unwrap();
        let table = |address: u64| {
            let length: u32 = memory.read_obj(GuestAddress(address + 4)).unwrap();
            let mut bytes = vec![0; length as usize];
            memory.read_slice(&mut bytes, GuestAddress(address)).unwrap();
            assert_eq!(bytes.iter().fold(0u8, |sum, byte| sum.wrapping_add(*byte)), 0);
            bytes
        };
        let xsdt = table(memory.read_obj(GuestAddress(ACPI_START + 24)).unwrap());
        let entry = |at: usize| u64::from_le_bytes(xsdt[at..at + 8].try_into().unwrap());
        let fadt = table(entry(36));
        assert_eq!(&fadt[..4], b"FACP");
        assert_eq!(&table(u64::from_le_bytes(fadt[140..148].try_into().unwrap()))[..4], b"DSDT");
        assert_eq!(&table(entry(44))[..4], b"APIC");
    }
}
