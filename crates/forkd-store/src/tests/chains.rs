//! Snapshots over snapshots: what they share, what they are called, how large they are.

use super::*;

/// A chain of `count` snapshots: `s0`, `s1`, …
fn chain(store: &Store, count: u8) -> Vec<Snapshot> {
    let mut chain = vec![made(store, "s0", 0)];
    for index in 1..count {
        chain.push(over(store, chain.last().unwrap(), &format!("s{index}"), index));
    }
    chain
}

#[test]
fn a_child_has_its_parents_layers_and_one_more() {
    let (_folder, store) = store();
    let chain = chain(&store, 3);
    for (index, snapshot) in chain.iter().enumerate() {
        let manifest = snapshot.manifest();
        assert_eq!(
            (snapshot.depth(), manifest.memory.len(), manifest.disks[0].len()),
            (index, index + 1, index + 1)
        );
        let ancestors: Vec<Parent> =
            chain[..index].iter().map(|it| Parent { tag: it.tag().into(), id: it.id().into() }).collect();
        assert_eq!(manifest.ancestors, ancestors);
        assert_eq!(manifest.parent.as_ref(), ancestors.last());
        // Each has its own seed at one place: read through the chain, oldest first.
        for (seed, layer) in snapshot.open().unwrap().memory.iter().enumerate() {
            let mut byte = [0];
            layer.read_exact_at(&mut byte, 3 << 20).unwrap();
            assert_eq!(usize::from(byte[0]), seed);
        }
    }
    assert_eq!(layers(&store).len(), 6, "shared layers are stored once");
    assert_eq!(store.get("s2").unwrap().manifest().branched_from.as_deref(), Some("sb1"));
}

#[test]
fn an_id_is_of_the_manifest_and_differs_for_another_snapshot_of_the_same_tag() {
    let (_folder, store) = store();
    let first = made(&store, "warm", 1);
    let bytes = fs::read(first.folder().join(MANIFEST)).unwrap();
    assert_eq!(first.id(), blake3::hash(&bytes).to_hex().as_str());
    let child = over(&store, &first, "child", 2);
    assert_eq!(store.dependents("warm").unwrap(), ["child"]);
    store.remove("warm").unwrap();
    let second = made(&store, "warm", 3);
    assert_ne!(first.id(), second.id());
    assert_eq!(child.manifest().parent.as_ref().unwrap().id, first.id());
    assert!(store.dependents("warm").unwrap().is_empty());
}

#[test]
fn dependents_are_those_whose_memory_is_built_on_it() {
    let (_folder, store) = store();
    let chain = chain(&store, 3);
    // It came from s1, and has all of its memory itself.
    let full = Contents { origin: Some(chain[1].clone()), ..contents(&store, 7) };
    let full = draft(&store, "full", 7).publish(full).unwrap();
    assert_eq!(full.depth(), 0);
    assert_eq!(full.manifest().parent, None);
    let tags: Vec<&str> = full.manifest().ancestors.iter().map(|it| it.tag.as_str()).collect();
    assert_eq!(tags, ["s0", "s1"]);
    let below = over(&store, &full, "below", 8);
    let tags: Vec<&str> = below.manifest().ancestors.iter().map(|it| it.tag.as_str()).collect();
    assert_eq!(tags, ["s0", "s1", "full"]);

    assert_eq!(store.dependents("s0").unwrap(), ["s1", "s2"]);
    assert_eq!(store.dependents("s1").unwrap(), ["s2"]);
    assert!(store.dependents("s2").unwrap().is_empty());
    assert_eq!(store.dependents("full").unwrap(), ["below"]);
}

#[test]
fn dependents_are_known_whatever_is_damaged() {
    let (_folder, store) = store();
    let chain = chain(&store, 3);
    fs::remove_file(memory_path(&chain[2])).unwrap();
    fs::remove_file(memory_path(&chain[0])).unwrap();
    assert_eq!(store.dependents("s0").unwrap(), ["s1", "s2"]);
    fs::write(chain[1].folder().join(MANIFEST), "{").unwrap();
    assert_eq!(store.dependents("s1").unwrap(), ["s2"]);
}

#[test]
fn sizes_tell_own_from_inherited_and_room_from_length() {
    let (_folder, store) = store();
    let chain = chain(&store, 3);
    let (base, top) = (chain[0].sizes(), chain[2].sizes());
    assert_eq!(base.memory, base.own_memory);
    assert_eq!(base.disks, base.own_disks);
    assert_eq!(base.memory.logical, 8 << 20);
    assert!((8192..1 << 20).contains(&base.memory.physical), "{base:?}");
    assert_eq!((base.state.logical, base.disks.logical), (2, 2));
    assert!(base.state.physical > 0);
    assert_eq!(top.memory.logical, 3 * (8 << 20));
    assert_eq!(top.own_memory, base.own_memory);
    assert_eq!(top.memory.physical, 3 * top.own_memory.physical);
    assert_eq!(top.own_disks.logical, 2);
    assert_eq!(top.disks.logical, 6);
    let kinds: Vec<(Kind, bool)> = chain[2].layers().iter().map(|layer| (layer.kind, layer.own)).collect();
    let (memory, disk) = (Kind::Memory, Kind::Disk);
    assert_eq!(
        kinds,
        [(memory, false), (memory, false), (memory, true), (disk, false), (disk, false), (disk, true)]
    );
    // What a sandbox froze more than once since it was spawned is all its own.
    let mut disks: Vec<Vec<File>> = chain[0].open().unwrap().disks.into_iter().map(|it| it.layers).collect();
    disks[0].extend([disk_of(&store, 20), disk_of(&store, 21)]);
    let twice = Contents { parent: Some(chain[0].clone()), disks, ..Contents::new(guest()) };
    let twice = draft(&store, "twice", 9).publish(twice).unwrap();
    assert_eq!(twice.sizes().own_disks.logical, 4);
}

fn disk_of(store: &Store, seed: u8) -> File {
    super::disk(store, seed)
}

#[test]
fn a_layer_counts_for_each_snapshot_that_uses_it() {
    let (_folder, store) = store();
    let chain = chain(&store, 3);
    let users = store.layer_users().unwrap();
    let by_age: Vec<usize> = chain[2].manifest().memory.iter().map(|layer| users[&layer.blake3]).collect();
    assert_eq!(by_age, [3, 2, 1]);
    assert_eq!(users.len(), 6);
}

#[test]
fn a_chain_has_an_end() {
    let (_folder, store) = quick_store();
    let mut last = made(&store, "s0", 0);
    for index in 1..=MAX_DEPTH as u8 {
        last = over(&store, &last, &format!("s{index}"), index);
    }
    assert_eq!(last.depth(), MAX_DEPTH);
    assert_eq!(last.open().unwrap().memory.len(), MAX_DEPTH + 1);
    let more = Contents { parent: Some(last.clone()), ..Contents::new(guest()) };
    let error = draft(&store, "more", 99).publish(more).unwrap_err();
    assert!(matches!(&error, Error::Invalid(why) if why.contains("as long as one can be")), "{error}");
    // In full it is possible, however many came before.
    let mut origin = last;
    for index in 0..120u8 {
        let contents = Contents { origin: Some(origin), ..Contents::new(guest()) };
        origin = draft(&store, &format!("full{index}"), index).publish(contents).unwrap();
    }
    let ancestors = &origin.manifest().ancestors;
    assert_eq!((ancestors.len(), ancestors.last().unwrap().tag.as_str()), (128, "full118"));
}

#[test]
fn a_difference_to_a_memory_of_another_size_is_refused() {
    let (_folder, store) = store();
    let parent = made(&store, "warm", 1);
    let guest = GuestSpec { mem_size_mib: 16, ..guest() };
    let contents = Contents { parent: Some(parent), ..Contents::new(guest) };
    let error = draft(&store, "child", 2).publish(contents).unwrap_err();
    assert!(matches!(&error, Error::Invalid(why) if why.contains("16 MiB")), "{error}");
    assert_eq!(names(store.folder()), ["warm"]);
    assert_tidy(&store);
}
