use std::fs::File;
use std::os::unix::fs::FileExt;

use super::*;
use crate::devices::virtio::test_driver::{BUFFERS, Driver};

const IN: u32 = 0;
const OUT: u32 = 1;
const FLUSH: u32 = 4;
const GET_ID: u32 = 8;
const OK: u8 = 0;
const IOERR: u8 = 1;
const UNSUPP: u8 = 2;

const HEADER: u64 = BUFFERS;
const STATUS: u64 = BUFFERS + 0x20;
const DATA: u64 = BUFFERS + 0x1000;

/// A file in which every sector says which one it is.
fn base(sectors: u64) -> File {
    let file = tempfile::tempfile().unwrap();
    for sector in 0..sectors {
        file.write_all_at(&pattern(sector), sector * SECTOR).unwrap();
    }
    file
}

fn pattern(sector: u64) -> Vec<u8> {
    (0..SECTOR).map(|byte| (sector * 7 + byte % 251 + 1) as u8).collect()
}

fn contents(file: &File) -> Vec<u8> {
    let mut bytes = vec![0; file.metadata().unwrap().len() as usize];
    file.read_exact_at(&mut bytes, 0).unwrap();
    bytes
}

struct BlockMachine {
    driver: Driver,
    base: File,
    layer: File,
    original: Vec<u8>,
}

fn machine(sectors: u64) -> BlockMachine {
    let (base, layer) = (base(sectors), tempfile::tempfile().unwrap());
    let disk = Disk::new(base.try_clone().unwrap(), Some(layer.try_clone().unwrap())).unwrap();
    let driver = Driver::started(Box::new(Block::new(disk, "a-name"))).unwrap();
    let original = contents(&base);
    BlockMachine { driver, base, layer, original }
}

impl BlockMachine {
    /// Runs a request whose data is `pieces` (address, length) and returns status and length.
    fn request(&mut self, kind: u32, sector: u64, pieces: &[(u64, u32)]) -> (u8, u32) {
        let mut header = kind.to_le_bytes().to_vec();
        header.extend([0; 4]);
        header.extend(sector.to_le_bytes());
        self.driver.poke(HEADER, &header);
        self.driver.poke(STATUS, &[0xee]);
        let mut chain = vec![(HEADER, 16, false)];
        chain.extend(pieces.iter().map(|(address, len)| (*address, *len, kind != OUT)));
        chain.push((STATUS, 1, true));
        self.driver.add(0, &chain);
        self.driver.kick(0);
        let finished = self.driver.finished(0);
        assert_eq!(finished.len(), 1, "one answer");
        (self.driver.peek(STATUS, 1)[0], finished[0].1)
    }

    fn read(&mut self, sector: u64, count: u64) -> Vec<u8> {
        let len = (count * SECTOR) as u32;
        self.driver.poke(DATA, &vec![0; len as usize]);
        assert_eq!(self.request(IN, sector, &[(DATA, len)]), (OK, len + 1));
        self.driver.peek(DATA, len as usize)
    }

    /// Has `layer` take what is written; what did so far.
    fn set_layer(&mut self, layer: File) -> File {
        std::mem::replace(self.driver.lock().disk().unwrap().files.last_mut().unwrap(), layer)
    }

    fn write(&mut self, sector: u64, bytes: &[u8]) {
        self.driver.poke(DATA, bytes);
        assert_eq!(self.request(OUT, sector, &[(DATA, bytes.len() as u32)]), (OK, 1));
    }
}

#[test]
fn what_was_never_written_comes_from_the_base() {
    let mut machine = machine(24);
    let expected = machine.original.clone();
    assert_eq!(machine.read(0, 24), expected);
    assert_eq!(machine.read(5, 3), expected[5 * 512..8 * 512]);
}

#[test]
fn a_write_never_reaches_the_base() {
    let mut machine = machine(64);
    for sector in 0..64 {
        machine.write(sector, &[0xab; 512]);
    }
    machine.write(0, &[0xcd; 64 * 512]);
    assert_eq!(contents(&machine.base), machine.original);
    assert_eq!(machine.read(0, 64), [0xcd; 64 * 512]);
}

#[test]
fn part_of_a_block_written_keeps_the_rest_of_the_block() {
    // The last block is half a block: 20 sectors are two and a half.
    for (sector, count) in
        [(0, 1), (3, 1), (7, 1), (7, 2), (1, 14), (8, 8), (16, 4), (17, 1), (19, 1), (5, 15)]
    {
        let mut machine = machine(20);
        let mut expected = machine.original.clone();
        let (start, end) = (sector as usize * 512, (sector + count) as usize * 512);
        let written: Vec<u8> = (start..end).map(|at| (at / 512 + 200) as u8).collect();
        machine.write(sector, &written);
        expected[start..end].copy_from_slice(&written);
        assert_eq!(machine.read(0, 20), expected, "{count} sectors at {sector}");
        assert_eq!(contents(&machine.base), machine.original);
    }
}

#[test]
fn written_zeros_are_not_a_hole() {
    let mut machine = machine(16);
    machine.write(0, &[0; 4096]);
    assert_eq!(machine.read(0, 8), [0; 4096]);
    assert_eq!(machine.read(8, 8), machine.original[4096..]);
    assert_eq!(machine.layer.metadata().unwrap().len(), 4096);
}

#[test]
fn many_writes_at_random_places_read_back_as_written() {
    let mut machine = machine(100);
    let mut expected = machine.original.clone();
    let mut state = 1u64;
    let mut random = |below: u64| {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 33) % below
    };
    for round in 0..500 {
        let sector = random(100);
        let count = 1 + random((100 - sector).min(30));
        let bytes = vec![round as u8; (count * SECTOR) as usize];
        machine.write(sector, &bytes);
        expected[(sector * SECTOR) as usize..][..bytes.len()].copy_from_slice(&bytes);
        let from = random(100);
        let len = 1 + random((100 - from).min(40));
        assert_eq!(machine.read(from, len), expected[(from * SECTOR) as usize..][..(len * SECTOR) as usize]);
    }
    assert_eq!(contents(&machine.base), machine.original);
}

#[test]
fn a_request_in_many_odd_pieces_is_one_run_of_bytes() {
    let mut machine = machine(16);
    let pieces: Vec<(u64, u32)> =
        vec![(DATA, 1), (DATA + 0x100, 511), (DATA + 0x800, 1000), (DATA + 0x2000, 24)];
    assert_eq!(machine.request(IN, 2, &pieces), (OK, 1537));
    let mut seen = Vec::new();
    for (address, len) in &pieces {
        seen.extend(machine.driver.peek(*address, *len as usize));
    }
    assert_eq!(seen, machine.original[1024..1024 + 1536]);
    assert_eq!(machine.request(OUT, 9, &pieces), (OK, 1));
    assert_eq!(machine.read(9, 3), seen);
}

#[test]
fn what_is_not_on_the_disk_is_an_error_and_changes_nothing() {
    let mut machine = machine(16);
    for (kind, sector, len) in [
        (IN, 16, 512),
        (IN, 15, 1024),
        (IN, u64::MAX, 512),
        (IN, u64::MAX / 512, 512),
        (IN, 0, 100),
        (OUT, 16, 512),
        (OUT, 15, 1024),
        (OUT, u64::MAX / 512 + 1, 512),
        (OUT, 0, 513),
    ] {
        machine.driver.poke(DATA, &[0x77; 1024]);
        assert_eq!(machine.request(kind, sector, &[(DATA, len)]).0, IOERR, "{kind} {sector} {len}");
        assert_eq!(machine.driver.peek(DATA, 1024), [0x77; 1024]);
    }
    assert_eq!(machine.layer.metadata().unwrap().len(), 0);
    let expected = machine.original.clone();
    assert_eq!(machine.read(0, 16), expected);
}

#[test]
fn a_request_larger_than_announced_is_an_error() {
    let mut machine = machine(16);
    // More than 254 pieces of 64 KiB, all in the same place.
    let table = DATA;
    let count = 255 + 2;
    let piece = |address: u64, len: u32, flags: u16, next: u16| {
        crate::devices::virtio::test_driver::Descriptor { address, len, flags, next }.to_bytes()
    };
    machine.driver.poke(HEADER, &[0; 16]);
    machine.driver.poke(table, &piece(HEADER, 16, 1, 1));
    for index in 1..count - 1 {
        machine.driver.poke(table + u64::from(index) * 16, &piece(BUFFERS + 0x8000, 0x1_0000, 3, index + 1));
    }
    machine.driver.poke(table + u64::from(count - 1) * 16, &piece(STATUS, 1, 2, 0));
    let indirect = crate::devices::virtio::test_driver::Descriptor {
        address: table,
        len: u32::from(count) * 16,
        flags: 4,
        next: 0,
    };
    machine.driver.set_descriptor(0, 0, indirect);
    machine.driver.publish(0, 0);
    machine.driver.kick(0);
    assert_eq!(machine.driver.peek(STATUS, 1), [IOERR]);
}

#[test]
fn a_disk_without_layer_says_that_it_is_read_only_and_means_it() {
    let file = base(8);
    let disk = Disk::new(file.try_clone().unwrap(), None).unwrap();
    let block = Block::new(disk, "x");
    assert_ne!(block.features() & 1 << virtio_blk::VIRTIO_BLK_F_RO, 0);
    let layer = tempfile::tempfile().unwrap();
    let driver = Driver::started(Box::new(block)).unwrap();
    let original = contents(&file);
    let mut machine = BlockMachine { driver, base: file, layer, original };
    assert_eq!(machine.request(OUT, 0, &[(DATA, 512)]).0, IOERR);
    assert_eq!(contents(&machine.base), machine.original);
    let expected = machine.original.clone();
    assert_eq!(machine.read(0, 8), expected);
}

#[test]
fn flush_and_name_and_the_unknown_are_answered() {
    let mut machine = machine(8);
    assert_eq!(machine.request(FLUSH, 0, &[]), (OK, 1));
    assert_eq!(machine.request(GET_ID, 0, &[(DATA, 20)]), (OK, 21));
    assert_eq!(machine.driver.peek(DATA, 20), b"a-name\0\0\0\0\0\0\0\0\0\0\0\0\0\0");
    assert_eq!(machine.request(GET_ID, 0, &[(DATA, 5)]), (OK, 6));
    assert_eq!(machine.request(GET_ID, 0, &[]), (OK, 1));
    assert_eq!(machine.request(0xdead, 0, &[(DATA, 512)]).0, UNSUPP);
}

#[test]
fn a_base_that_shrank_under_us_is_an_error_to_the_guest() {
    let mut machine = machine(16);
    machine.base.set_len(512).unwrap();
    assert_eq!(machine.request(IN, 8, &[(DATA, 512)]).0, IOERR);
    assert_eq!(machine.request(OUT, 9, &[(DATA, 512)]).0, IOERR, "the rest of the block is gone");
    assert!(!machine.driver.needs_reset());
}

#[test]
fn requests_without_header_or_status_stop_the_device() {
    for chain in [
        &[(HEADER, 15, false), (STATUS, 1, true)][..],
        &[(HEADER, 16, false)][..],
        &[(STATUS, 1, true)][..],
        &[(HEADER, 16, false), (STATUS, 0, true)][..],
    ] {
        let mut machine = machine(8);
        machine.driver.add(0, chain);
        machine.driver.kick(0);
        assert!(machine.driver.needs_reset());
        assert!(machine.driver.finished(0).is_empty());
    }
}

#[test]
fn a_file_that_cannot_be_a_disk_is_refused_with_its_size() {
    for size in [0, 1, 511, 513, (2 << 40) + 512] {
        let file = tempfile::tempfile().unwrap();
        file.set_len(size).unwrap();
        let error = Disk::new(file, None).unwrap_err();
        assert!(error.to_string().contains(&format!("{size} bytes")), "{error}");
    }
}

#[test]
fn the_configuration_tells_size_and_limits() {
    let machine = machine(24);
    assert_eq!(machine.driver.read(0x100), 24);
    assert_eq!(machine.driver.read(0x104), 0);
    assert_eq!(machine.driver.read(0x108), 64 << 10);
    assert_eq!(machine.driver.read(0x10c), 254);
    assert_eq!(machine.driver.read(0x114), 512);
}

#[test]
fn a_write_for_which_the_host_has_no_room_waits_and_is_done_when_there_is() {
    let mut machine = machine(32);
    let mut expected = machine.original.clone();
    machine.write(0, &[0xaa; 512]);
    expected[..512].fill(0xaa);
    // All that is written to this file finds its disk full.
    let full = File::options().read(true).write(true).open("/dev/full").unwrap();
    let layer = machine.set_layer(full);

    let writes =
        [(HEADER, STATUS, DATA, 9u64, 0xbb), (HEADER + 0x40, STATUS + 0x40, DATA + 0x1000, 16, 0xcc)];
    for (header, status, data, sector, byte) in writes {
        let mut request = OUT.to_le_bytes().to_vec();
        request.extend([0; 4]);
        request.extend(sector.to_le_bytes());
        machine.driver.poke(header, &request);
        machine.driver.poke(status, &[0xee]);
        machine.driver.poke(data, &[byte; 1024]);
        machine.driver.add(0, &[(header, 16, false), (data, 1024, false), (status, 1, true)]);
        expected[(sector * SECTOR) as usize..][..1024].fill(byte);
    }
    // As often as it is tried.
    for _ in 0..2 {
        machine.driver.kick(0);
        assert!(machine.driver.lock().take_disk_full() && !machine.driver.lock().take_disk_full());
        assert!(machine.driver.finished(0).is_empty() && !machine.driver.needs_reset());
        assert_eq!(machine.driver.peek(STATUS, 1), [0xee], "the guest is told nothing");
    }

    machine.set_layer(layer);
    machine.driver.kick(0);
    assert_eq!(machine.driver.finished(0).len(), 2, "each once");
    assert_eq!((machine.driver.peek(STATUS, 1), machine.driver.peek(STATUS + 0x40, 1)), (vec![OK], vec![OK]));
    assert!(!machine.driver.lock().take_disk_full());
    assert_eq!(machine.read(0, 32), expected);
    assert_eq!(contents(&machine.base), machine.original);
}

#[test]
fn a_disk_saved_while_a_write_waits_for_room_has_the_write_in_its_queue() {
    let mut machine = machine(16);
    let full = File::options().read(true).write(true).open("/dev/full").unwrap();
    machine.set_layer(full);
    let request: Vec<u8> = OUT.to_le_bytes().into_iter().chain([0; 12]).collect();
    machine.driver.poke(HEADER, &request);
    machine.driver.add(0, &[(HEADER, 16, false), (DATA, 512, false), (STATUS, 1, true)]);
    machine.driver.kick(0);
    let (state, _) = machine.driver.lock().freeze();
    let position = state.transport.queues[0].position.unwrap();
    assert_eq!((position.next_available, position.next_used), (0, 0), "a copy takes it from the queue again");
}
