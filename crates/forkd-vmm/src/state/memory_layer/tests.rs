//! Chains of layers, saved from memory and mapped again.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt;

use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryRegion};

use super::chain::{Extent, LayerChain};
use super::restore::{Cover, MAX_MAPPINGS, map, plan};
use super::{CHUNK, PAGE_BYTES, Progress, save};
use crate::layout::PAGE;
use crate::{GuestMemory, memory};

/// As in the design: more than this, and every fork is dearer.
const MAX_VMAS: usize = 256;

fn random(state: &mut u64, below: u64) -> u64 {
    *state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
    (*state >> 33) % below
}

/// The guest's address of a page.
fn address(memory: &GuestMemory, page: u64) -> GuestAddress {
    let mut offset = page * PAGE;
    for region in memory.iter() {
        if offset < region.len() {
            return GuestAddress(region.start_addr().0 + offset);
        }
        offset -= region.len();
    }
    panic!("there is no page {page}");
}

fn write(memory: &GuestMemory, page: u64, bytes: &[u8; PAGE_BYTES]) {
    memory.write_slice(bytes, address(memory, page)).unwrap();
}

fn read(memory: &GuestMemory, page: u64) -> [u8; PAGE_BYTES] {
    let mut bytes = [0; PAGE_BYTES];
    memory.read_slice(&mut bytes, address(memory, page)).unwrap();
    bytes
}

/// Unique bytes.
fn bytes(number: u64) -> [u8; PAGE_BYTES] {
    let mut bytes = [number as u8 | 1; PAGE_BYTES];
    bytes[..8].copy_from_slice(&number.to_le_bytes());
    bytes
}

fn chain(layers: &[File], mib: u64) -> LayerChain {
    try_chain(layers, mib).unwrap()
}

fn try_chain(layers: &[File], mib: u64) -> crate::Result<LayerChain> {
    LayerChain::open(layers.iter().map(|file| file.try_clone().unwrap()).collect(), mib << 20)
}

fn pagemap() -> File {
    File::open("/proc/self/pagemap").unwrap()
}

fn save_over(memory: &GuestMemory, parent: &[File], mib: u64, pagemap: Option<&File>) -> File {
    let file = tempfile::tempfile().unwrap();
    let parent = (!parent.is_empty()).then(|| chain(parent, mib));
    save(memory, &file, parent.as_ref(), pagemap, &mut Progress::new(None, mib << 20)).unwrap();
    file
}

fn contents(file: &File) -> Vec<u8> {
    let mut bytes = vec![0; file.metadata().unwrap().len() as usize];
    file.read_exact_at(&mut bytes, 0).unwrap();
    bytes
}

/// How many pages the topmost layer holds.
fn held(layers: &[File], mib: u64) -> u64 {
    let top = layers.len() as u32 - 1;
    let chain = chain(layers, mib);
    chain.extents().iter().filter(|extent| extent.layer == top).map(|extent| u64::from(extent.count)).sum()
}

/// How many mappings of this process are in `memory`.
fn mappings(memory: &GuestMemory) -> usize {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let starts = maps.lines().map(|line| u64::from_str_radix(line.split('-').next().unwrap(), 16).unwrap());
    let inside = |start: &u64| {
        memory.iter().any(|region| {
            let first = region.as_ptr() as u64;
            (first..first + region.len()).contains(start)
        })
    };
    starts.filter(inside).count()
}

#[test]
fn every_memory_of_a_chain_comes_back_and_every_layer_holds_what_differs_and_no_more() {
    const MIB: u64 = 8;
    const PAGES: u64 = MIB << 8;
    let mut seed = 3;
    for _ in 0..6 {
        // The warmed guest itself: anonymous.
        let mut memory = memory::allocate(MIB).unwrap();
        let mut expected = vec![0u64; PAGES as usize];
        for _ in 0..500 {
            let page = random(&mut seed, PAGES);
            expected[page as usize] = page;
            write(&memory, page, &bytes(page));
        }
        let mut layers = vec![save_over(&memory, &[], MIB, None)];
        for depth in 1..5 {
            let mut changed = BTreeMap::new();
            let mut change = |page: u64, number: u64| {
                let data = if number == 0 { [0; PAGE_BYTES] } else { bytes(number) };
                write(&memory, page, &data);
                changed.insert(page, number);
            };
            for index in 0..random(&mut seed, 300) {
                change(random(&mut seed, PAGES), depth * 100_000 + index);
            }
            // Long runs, also at both ends; pages zeroed; pages written with what they held.
            for start in [0, PAGES - 100, random(&mut seed, PAGES - 100)] {
                (start..start + 100).for_each(|page| change(page, depth * 1_000_000 + page));
            }
            for _ in 0..50 {
                change(random(&mut seed, PAGES), 0);
            }
            for _ in 0..50 {
                let page = random(&mut seed, PAGES);
                write(&memory, page, &read(&memory, page));
            }
            let before = expected.clone();
            changed.into_iter().for_each(|(page, number)| expected[page as usize] = number);
            let differing = before.iter().zip(&expected).filter(|(before, now)| before != now).count() as u64;

            let layer = save_over(&memory, &layers, MIB, Some(&pagemap()));
            let slow = save_over(&memory, &layers, MIB, None);
            assert!(contents(&layer) == contents(&slow), "the pagemap misses pages");
            layers.push(layer);
            assert_eq!(held(&layers, MIB), differing, "at depth {depth}");
            let length = layers.last().unwrap().metadata().unwrap().len();
            assert!(length < differing * PAGE * 11 / 10, "{length} bytes for {differing} pages");

            // The next one is saved from what was mapped, or from what runs on in between.
            let mapped = map(&chain(&layers, MIB)).unwrap();
            for (page, number) in expected.iter().enumerate() {
                let data = if *number == 0 { [0; PAGE_BYTES] } else { bytes(*number) };
                assert!(read(&mapped, page as u64) == data, "page {page} at depth {depth}");
            }
            let mut unchanged = cloned(&layers);
            unchanged.push(save_over(&mapped, &layers, MIB, Some(&pagemap())));
            assert_eq!(held(&unchanged, MIB), 0);
            if depth % 2 == 0 {
                memory = mapped;
            }
        }
        // All of it as one layer again.
        let flat = save_over(&memory, &[], MIB, Some(&pagemap()));
        let mapped = map(&chain(&[flat], MIB)).unwrap();
        for (page, number) in expected.iter().enumerate() {
            let data = if *number == 0 { [0; PAGE_BYTES] } else { bytes(*number) };
            assert!(read(&mapped, page as u64) == data, "page {page} of the flat one");
        }
    }
}

fn cloned(files: &[File]) -> Vec<File> {
    files.iter().map(|file| file.try_clone().unwrap()).collect()
}

#[test]
fn a_run_over_the_border_of_two_memory_slots_comes_back_on_both_sides() {
    // Two MiB more than fit below the hole.
    const MIB: u64 = 3074;
    const BORDER: u64 = 3 << 18;
    let base = tempfile::tempfile().unwrap();
    base.set_len(MIB << 20).unwrap();
    let mut layers = vec![base];
    let memory = map(&chain(&layers, MIB)).unwrap();
    assert_eq!(memory.num_regions(), 2);
    let pages: Vec<u64> = (BORDER - 200..BORDER + 150).chain([0, 7, (MIB << 8) - 1]).collect();
    pages.iter().for_each(|page| write(&memory, *page, &bytes(*page)));
    layers.push(save_over(&memory, &layers, MIB, Some(&pagemap())));
    assert_eq!(held(&layers, MIB), pages.len() as u64);
    // And scattered over it, so that it is assembled.
    let memory = map(&chain(&layers, MIB)).unwrap();
    let scattered: Vec<u64> = (BORDER - 160..BORDER + 160).step_by(2).collect();
    scattered.iter().for_each(|page| write(&memory, *page, &bytes(page + 1_000_000_000)));
    layers.push(save_over(&memory, &layers, MIB, Some(&pagemap())));
    assert_eq!(held(&layers, MIB), scattered.len() as u64);
    let memory = map(&chain(&layers, MIB)).unwrap();
    for page in pages {
        let number = if scattered.contains(&page) { page + 1_000_000_000 } else { page };
        assert!(read(&memory, page) == bytes(number), "page {page}");
    }
    assert_eq!(read(&memory, BORDER + 151), [0; PAGE_BYTES]);
    assert!(mappings(&memory) < MAX_VMAS);
}

#[test]
fn twenty_thousand_scattered_pages_and_many_long_runs_take_few_mappings() {
    const MIB: u64 = 512;
    const PAGES: u64 = MIB << 8;
    let base = tempfile::tempfile().unwrap();
    base.set_len(MIB << 20).unwrap();
    let mut layers = vec![base];
    let mut expected = BTreeMap::new();
    let mut seed = 11;
    for depth in 0..4 {
        let memory = map(&chain(&layers, MIB)).unwrap();
        let mut change = |page: u64| {
            let number = depth << 32 | page;
            write(&memory, page, &bytes(number));
            expected.insert(page, number);
        };
        for _ in 0..5000 {
            change(random(&mut seed, PAGES));
        }
        for _ in 0..20 {
            let first = random(&mut seed, PAGES - 200);
            (first..first + 64 + random(&mut seed, 100)).for_each(&mut change);
        }
        layers.push(save_over(&memory, &layers, MIB, Some(&pagemap())));
    }
    let memory = map(&chain(&layers, MIB)).unwrap();
    let count = mappings(&memory);
    assert!(count <= 2 * MAX_MAPPINGS + 1 && count + 60 < MAX_VMAS, "{count} mappings");
    assert!(expected.len() > 20_000);
    for (page, number) in &expected {
        assert!(read(&memory, *page) == bytes(*number), "page {page}");
    }
    let others = (0..PAGES).filter(|page| !expected.contains_key(page)).step_by(50);
    others.for_each(|page| assert!(read(&memory, page) == [0; PAGE_BYTES], "page {page}"));
}

#[test]
fn any_plan_covers_all_extents_with_few_mappings() {
    let mut seed = 5;
    for round in 0..500u32 {
        let (mut extents, mut at) = (Vec::new(), 0);
        let most = [3, 30, 300, 3000][round as usize % 4];
        for _ in 0..1 + random(&mut seed, most) {
            let first = at + random(&mut seed, 500) as u32;
            let longest = if random(&mut seed, 8) == 0 { 300 } else { 3 };
            let count = 1 + random(&mut seed, longest) as u32;
            extents.push(Extent { first, count, layer: 1, place: at });
            at = first + count;
        }
        let covers = plan(&extents);
        assert!(covers.len() <= MAX_MAPPINGS, "{} mappings", covers.len());
        let mut extents = extents.into_iter().peekable();
        let mut end = 0;
        for cover in covers {
            let range = match &cover {
                Cover::Mapped(extent) => extent.first..extent.end(),
                Cover::Assembled(range) => range.clone(),
            };
            assert!(range.start >= end && !range.is_empty(), "{range:?} after {end}");
            end = range.end;
            let mut inside = 0;
            while let Some(extent) = extents.next_if(|extent| extent.first < range.end) {
                assert!(extent.first >= range.start && extent.end() <= range.end);
                assert!(inside > 0 || extent.first == range.start, "nothing is copied for nobody");
                inside += 1;
            }
            assert!(inside > 0 && (inside == 1 || matches!(cover, Cover::Assembled(_))));
        }
        assert_eq!(extents.next(), None);
    }
}

/// A chain of three layers.
fn three_layers(mib: u64) -> Vec<File> {
    let memory = memory::allocate(mib).unwrap();
    let mut layers = vec![save_over(&memory, &[], mib, None)];
    for depth in 1..3 {
        for page in [0, 5, 6, 9, u64::from(CHUNK)] {
            write(&memory, page, &bytes(depth * 1000 + page));
        }
        layers.push(save_over(&memory, &layers, mib, Some(&pagemap())));
    }
    layers
}

#[test]
fn layers_that_do_not_belong_together_are_refused_with_a_sentence() {
    let refusal = |layers: &[File], mib| match try_chain(layers, mib) {
        Ok(_) => panic!("it is refused"),
        Err(error) => error.to_string(),
    };
    let layers = three_layers(2);
    let [base, first, second] = &cloned(&layers)[..] else { panic!() };
    let pick = |files: &[&File]| files.iter().map(|file| file.try_clone().unwrap()).collect::<Vec<_>>();
    assert!(try_chain(&layers, 2).is_ok());
    assert!(try_chain(&layers[..2], 2).is_ok());
    for (layers, mib, text) in [
        (pick(&[]), 2, "at least one is needed"),
        (pick(&[base, second, first]), 2, "layer 1 cannot be used: it was made to lie on another layer"),
        (pick(&[base, second]), 2, "to lie on another layer"),
        (pick(&[base, first, first]), 2, "layer 2 cannot be used: it was made to lie on another layer"),
        (pick(&[first, second]), 2, "layer 0 cannot be used: it is truncated"),
        (pick(&[base, base]), 2, "does not end like a layer"),
        (pick(&layers.iter().collect::<Vec<_>>()), 3, "layer 0 cannot be used: it is truncated"),
    ] {
        let found = refusal(&layers, mib);
        assert!(found.contains(text), "{found}");
    }
    // A sibling with the same pages, but other bytes in them, is another layer.
    let memory = map(&chain(&layers[..1], 2)).unwrap();
    for page in [0, 5, 6, 9, u64::from(CHUNK)] {
        write(&memory, page, &bytes(page + 77));
    }
    let sibling = save_over(&memory, &layers[..1], 2, None);
    let found = refusal(&pick(&[base, &sibling, second]), 2);
    assert!(found.contains("layer 2 cannot be used: it was made to lie on another layer"), "{found}");

    // Every byte of the index and of what follows it matters, and so does the length.
    let length = second.metadata().unwrap().len();
    for at in 5 * PAGE..length {
        let mut byte = [0];
        second.read_exact_at(&mut byte, at).unwrap();
        second.write_all_at(&[byte[0] ^ 0x10], at).unwrap();
        assert!(try_chain(&layers, 2).is_err(), "byte {at} of {length} does not matter");
        second.write_all_at(&byte, at).unwrap();
    }
    assert!(try_chain(&layers, 2).is_ok());
    for length in [0, 1, 135, 136, 5 * PAGE, length - 1, length + 1] {
        second.set_len(length).unwrap();
        let found = refusal(&layers, 2);
        assert!(found.contains("memory layer 2 cannot be used"), "{found}");
    }
}
