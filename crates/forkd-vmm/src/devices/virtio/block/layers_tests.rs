//! Frozen layers: whatever becomes of them, a disk reads the same.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;

use vm_memory::VolatileSlice;

use super::disk::{BLOCK, Disk, SECTOR};
use crate::devices::virtio::buffers::Buffers;
use crate::state::BlockState;

/// Twenty-seven and a half blocks.
const SECTORS: u64 = 220;

fn buffers(bytes: &mut [u8]) -> Buffers<'_> {
    let mut buffers = Buffers::default();
    buffers.push(VolatileSlice::from(bytes));
    buffers
}

fn read(disk: &Disk) -> Vec<u8> {
    let mut bytes = vec![0; disk.size() as usize];
    disk.read(0, buffers(&mut bytes)).unwrap();
    bytes
}

fn write(disk: &mut Disk, offset: u64, mut bytes: Vec<u8>) {
    disk.write(offset, buffers(&mut bytes)).unwrap();
}

fn temporary() -> File {
    tempfile::tempfile().unwrap()
}

/// The same file, opened for reading only.
fn read_only(file: &File) -> File {
    File::open(format!("/proc/self/fd/{}", file.as_raw_fd())).unwrap()
}

fn base() -> (File, Vec<u8>) {
    let file = temporary();
    let bytes: Vec<u8> = (0..SECTORS * SECTOR).map(|at| (at % 251) as u8).collect();
    file.write_all_at(&bytes, 0).unwrap();
    (file, bytes)
}

/// The disk as it would come back from files and a state.
fn reloaded(disk: &Disk) -> Disk {
    let state = BlockState {
        id: [0; 20],
        size: disk.size(),
        writable: !disk.is_read_only(),
        files: disk.files().len() as u8,
        runs: disk.runs(),
    };
    let files: Vec<File> = disk.files().iter().map(|file| file.try_clone().unwrap()).collect();
    let mut files = files.into_iter();
    Disk::frozen(files.next().unwrap(), files.collect(), &state).unwrap()
}

fn merged(disk: &Disk, count: usize) -> File {
    let target = temporary();
    let mut told = 0;
    let tell = |bytes| {
        told += bytes;
        Ok(())
    };
    disk.merge_into(count, &target, tell).unwrap();
    let held = disk.map.iter().filter(|holder| (1..=count).contains(&usize::from(**holder))).count() as u64;
    assert!(told <= held * BLOCK && told + BLOCK > held * BLOCK, "{told} bytes for {held} blocks");
    read_only(&target)
}

#[test]
fn merging_at_any_time_changes_nothing_a_guest_reads() {
    let mut state = 1u64;
    let mut random = move |below: u64| {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 33) % below
    };
    let (mut merges, mut most) = (0, 0);
    for round in 0..40 {
        let (file, mut expected) = base();
        let mut disk = Disk::new(file, Some(temporary())).unwrap();
        for step in 0..60 {
            let frozen = disk.frozen_layers().len();
            match random(6) {
                0..3 => {
                    let sector = random(SECTORS);
                    let count = 1 + random((SECTORS - sector).min(24));
                    let byte = if random(4) == 0 { 0 } else { (round + step) as u8 };
                    let bytes = vec![byte; (count * SECTOR) as usize];
                    let start = (sector * SECTOR) as usize;
                    expected[start..start + bytes.len()].copy_from_slice(&bytes);
                    write(&mut disk, sector * SECTOR, bytes);
                }
                3 | 4 if disk.files().len() < super::disk::MAX_FILES => {
                    disk.add_layer(Some(temporary())).unwrap();
                }
                _ if frozen > 0 => {
                    let count = 1 + random(frozen as u64) as usize;
                    let layer = merged(&disk, count);
                    disk.check_replace(count, &layer).unwrap();
                    disk.replace(count, layer);
                    assert_eq!(disk.frozen_layers().len(), frozen - count + 1);
                    merges += 1;
                }
                _ => {}
            }
            most = most.max(disk.files().len());
            assert_eq!(read(&disk), expected, "round {round}, step {step}");
        }
        assert_eq!(read(&reloaded(&disk)), expected);
    }
    assert!(merges > 100 && most > 8, "{merges} merges of at most {most} files show little");
}

#[test]
fn written_zeros_stay_zeros_when_layers_are_merged() {
    let (file, expected) = base();
    let mut disk = Disk::new(file, Some(temporary())).unwrap();
    write(&mut disk, 0, vec![0; BLOCK as usize]);
    disk.freeze();
    let layer = merged(&disk, 1);
    disk.replace(1, layer);
    assert_eq!(read(&disk)[..BLOCK as usize], [0; BLOCK as usize]);
    assert_eq!(read(&disk)[BLOCK as usize..], expected[BLOCK as usize..]);
}

#[test]
fn what_cannot_take_the_place_of_layers_is_refused() {
    let mut disk = Disk::new(base().0, Some(temporary())).unwrap();
    write(&mut disk, 5 * BLOCK, vec![1; BLOCK as usize]);
    let refusal = |disk: &Disk, count, file: &File| disk.check_replace(count, file).unwrap_err().to_string();
    let whole = temporary();
    whole.set_len(6 * BLOCK).unwrap();
    assert!(refusal(&disk, 1, &read_only(&whole)).contains("0 frozen layers"), "it is being written to");
    disk.add_layer(Some(temporary())).unwrap();
    disk.check_replace(1, &read_only(&whole)).unwrap();
    assert!(refusal(&disk, 0, &read_only(&whole)).contains("1 frozen layers: 0"));
    assert!(refusal(&disk, 2, &read_only(&whole)).contains("1 frozen layers: 2"));
    assert!(refusal(&disk, usize::MAX, &read_only(&whole)).contains("frozen layers"));
    assert!(refusal(&disk, 1, &whole).contains("open for writing"));
    whole.set_len(6 * BLOCK - 1).unwrap();
    assert!(refusal(&disk, 1, &read_only(&whole)).contains("it has 24575 bytes of 24576"));
    assert!(refusal(&disk, 1, &File::open("/dev/null").unwrap()).contains("not a regular file"));
    assert!(disk.merge_into(2, &temporary(), |_| Ok(())).is_err());
}

#[test]
fn the_topmost_frozen_layer_is_the_one_that_is_sealed() {
    let (first, second) = (temporary(), temporary());
    let mut disk = Disk::new(base().0, Some(first.try_clone().unwrap())).unwrap();
    disk.check_seal(None).unwrap();
    assert!(disk.check_seal(Some(&read_only(&first))).is_err(), "it is being written to");
    disk.add_layer(Some(second.try_clone().unwrap())).unwrap();
    assert!(disk.check_seal(None).is_err());
    assert!(disk.check_seal(Some(&first)).is_err(), "open for writing");
    assert!(disk.check_seal(Some(&read_only(&second))).is_err());
    let sealed = read_only(&first);
    disk.check_seal(Some(&sealed)).unwrap();
    disk.seal(Some(sealed));
    assert!(disk.frozen_layers()[0].write_at(&[1], 0).is_err());
    write(&mut disk, 0, vec![9; 512]);
    assert_eq!(second.metadata().unwrap().len(), BLOCK);
    disk.freeze();
    disk.check_seal(Some(&read_only(&second))).unwrap();
}
