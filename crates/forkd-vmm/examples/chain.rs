//! Measures what a fork costs through a template loaded from a chain of memory layers, beside one loaded
//! from a single layer: `chain [DEPTH] [SCATTERED] [MIB] [ROUNDS]`. Half of memory holds data; SCATTERED
//! single pages, and two long runs per layer, differ over all layers. Forks take turns. Next to a built
//! `forkd-vmm`.

#[path = "../tests/support/mod.rs"]
mod support;

use std::fs::File;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use forkd_protocol::control::{Event, FdRef, Reply, Request, SaveConfig};
use forkd_vmm::state::{Frozen, SaveFiles, file};
use forkd_vmm::{asm_guest, vm};
use support::{Boot, Controller, Fork, Monitor, sleeps_once_forked};
use vm_memory::{Bytes, GuestAddress};

const PAGE: u64 = 4096;

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let number = |index: usize, otherwise: u64| {
        arguments.get(index).map_or(otherwise, |text| text.parse().expect("a number"))
    };
    let (depth, scattered, mib, rounds) = (number(0, 8), number(1, 2000), number(2, 512), number(3, 300));
    let binary = std::env::current_exe().expect("a path").with_file_name("../forkd-vmm");
    let (state, layers) = make_chain(&Monitor::start(&binary, &[]), depth, scattered, mib);

    let depths = [0, depth];
    let monitors = [(); 2].map(|()| Monitor::start(&binary, &[]));
    let mut templates = [0, 1].map(|index| {
        let start = Instant::now();
        let template = load(&monitors[index], &state, &layers[..=depths[index] as usize]);
        let maps =
            std::fs::read_to_string(format!("/proc/{}/maps", monitors[index].pid())).expect("its maps");
        let loaded = start.elapsed();
        println!("depth {}: loaded in {loaded:?}, {} mappings", depths[index], maps.lines().count());
        template
    });
    let mut times = [Vec::new(), Vec::new()];
    for round in 0..rounds {
        for index in [0, 1] {
            times[index].push(spawn(&mut templates[index], &format!("child{round}")));
        }
    }
    let medians = [0, 1].map(|index| {
        let times: &mut Vec<(Duration, Duration)> = &mut times[index];
        times.sort();
        let forked = times[times.len() / 2].0;
        times.sort_by_key(|(_, ready)| *ready);
        let (half, most) = (times[times.len() / 2].1, times[times.len() * 9 / 10].1);
        println!("depth {}: forked {forked:?}, ready p50 {half:?} p90 {most:?}", depths[index]);
        half.as_secs_f64()
    });
    println!("ready at depth {depth} takes {:.2} x depth 0", medians[1] / medians[0]);
}

fn kvm() -> File {
    support::open_kvm("chain").expect("/dev/kvm opens")
}

/// The state and the layers of a guest that sleeps.
fn make_chain(monitor: &Monitor, depth: u64, scattered: u64, mib: u64) -> (File, Vec<File>) {
    let mut template = monitor.attach();
    let mut boot = Boot::new(kvm(), support::file_with(&asm_guest::elf_kernel(sleeps_once_forked())));
    boot.config.mem_mib = mib;
    assert_eq!(boot.send(&mut template), Reply::Booted);
    assert_eq!(template.event().0, Event::Ready);
    assert_eq!(template.request(&Request::Freeze, &[]), Reply::Frozen);
    let files = [(); 2].map(|()| tempfile::tempfile().expect("a file"));
    let save = SaveConfig {
        child: "saver".into(),
        state: FdRef(0),
        memory: Some(FdRef(1)),
        parent: Vec::new(),
        pagemap: None,
        disks: Vec::new(),
        progress: None,
    };
    template.request(&Request::Save(save), &[files[0].as_fd(), files[1].as_fd()]);
    assert!(matches!(template.event().0, Event::ChildEnded { .. }));
    let [state, memory] = files;

    let pages = mib << 8;
    let frozen = load_here(&state, std::slice::from_ref(&memory));
    // Above what the guest uses, every other page.
    for page in (0x800..pages).step_by(2) {
        write(&frozen, page, 1);
    }
    let mut layers = vec![save_here(frozen, &[])];
    let mut seed = 1u64;
    let mut random = |below: u64| {
        seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (seed >> 33) % below
    };
    for layer in 0..depth {
        let frozen = load_here(&state, &layers);
        for _ in 0..scattered / depth {
            write(&frozen, 0x800 + random(pages - 0x800), layer + 2);
        }
        for _ in 0..2 {
            let first = 0x800 + random(pages - 0x800 - 300);
            (first..first + 300).for_each(|page| write(&frozen, page, layer + 2));
        }
        layers.push(save_here(frozen, &layers));
    }
    (state, layers)
}

fn write(frozen: &Frozen, page: u64, number: u64) {
    frozen.memory().write_obj(number << 32 | page, GuestAddress(page * PAGE)).expect("memory");
}

fn clones(files: &[File]) -> Vec<File> {
    files.iter().map(|file| file.try_clone().expect("a descriptor")).collect()
}

fn load_here(state: &File, layers: &[File]) -> Frozen {
    let kvm = vm::open_kvm(kvm()).expect("KVM");
    Frozen::load(kvm, file::read(state).expect("a state"), clones(layers), Vec::new()).expect("a snapshot")
}

fn save_here(mut frozen: Frozen, parent: &[File]) -> File {
    let [state, memory] = [(); 2].map(|()| tempfile::tempfile().expect("a file"));
    let files = SaveFiles {
        state,
        memory: Some(memory.try_clone().expect("a descriptor")),
        parent: clones(parent),
        pagemap: Some(File::open("/proc/self/pagemap").expect("a pagemap")),
        disks: Vec::new(),
        progress: None,
    };
    let saving = frozen.prepare_save(files).expect("a save");
    frozen.save(saving).expect("saved");
    memory
}

fn load(monitor: &Monitor, state: &File, layers: &[File]) -> Controller {
    let mut template = monitor.attach();
    let memory = (2..2 + layers.len()).map(FdRef).collect();
    let config = support::load_config(memory, Vec::new());
    let kvm = kvm();
    let fds: Vec<_> = [&kvm, state].into_iter().chain(layers).map(AsFd::as_fd).collect();
    assert_eq!(template.request(&Request::Load(config), &fds), Reply::Loaded);
    template
}

/// How long until there is a process, and until its guest runs.
fn spawn(template: &mut Controller, name: &str) -> (Duration, Duration) {
    let mut fork = Fork::new(name);
    let start = Instant::now();
    fork.send(template);
    let mut child = fork.finish(template).expect("a child");
    let forked = start.elapsed();
    child.ready();
    let ready = start.elapsed();
    drop(child);
    assert!(matches!(template.event().0, Event::ChildEnded { .. }));
    (forked, ready)
}
