//! The digest of sparse files: what the format says, wherever the holes are.

use std::fs::{self, File};
use std::os::unix::fs::{FileExt, MetadataExt};

use tempfile::TempDir;

use crate::digest::digest;
use crate::layers::copy_sparse;

/// What is where in a file.
type Data<'d> = &'d [(u64, &'d [u8])];

fn file(folder: &TempDir, name: &str, len: u64, data: Data) -> File {
    let options = File::options().read(true).write(true).create(true).truncate(true).to_owned();
    let file = options.open(folder.path().join(name)).unwrap();
    file.set_len(len).unwrap();
    data.iter().for_each(|(at, bytes)| file.write_all_at(bytes, *at).unwrap());
    file
}

/// As the front page of `digest.rs` says it, slowly.
fn by_the_book(bytes: &[u8]) -> String {
    let pages: Vec<(u64, &[u8])> =
        (0..).zip(bytes.chunks(4096)).filter(|(_, page)| page.iter().any(|byte| *byte != 0)).collect();
    let mut places = Vec::new();
    for run in pages.chunk_by(|a, b| a.0 + 1 == b.0) {
        places.extend(run[0].0.to_le_bytes());
        places.extend((run.len() as u64).to_le_bytes());
    }
    let contents: Vec<u8> = pages.iter().flat_map(|(_, page)| page.iter().copied()).collect();
    let mut whole = b"forkd sparse file 1".to_vec();
    whole.extend((bytes.len() as u64).to_le_bytes());
    whole.extend(blake3::hash(&places).as_bytes());
    whole.extend(blake3::hash(&contents).as_bytes());
    blake3::hash(&whole).to_hex().to_string()
}

#[test]
fn are_what_the_format_says_wherever_the_holes_are() {
    let folder = tempfile::tempdir().unwrap();
    let long = vec![9; 3 << 20];
    let cases: &[(u64, Data)] = &[
        (0, &[]),
        (1, &[]),
        (1, &[(0, b"x")]),
        (4096, &[(4095, b"x")]),
        (4097, &[(4096, b"x")]),
        (10 << 20, &[(0, b"x"), (5 << 20, &long)]),
        (10 << 20, &[((1 << 20) - 1, b"xy"), ((10 << 20) - 1, b"z")]),
        ((10 << 20) + 5, &[(4096 * 3, &[1; 8192]), (4096 * 6, &[2; 10]), (10 << 20, b"end")]),
    ];
    for (len, data) in cases {
        let sparse = file(&folder, "sparse", *len, data);
        let bytes = fs::read(folder.path().join("sparse")).unwrap();
        let full = file(&folder, "full", 0, &[(0, &bytes)]);
        let expected = by_the_book(&bytes);
        assert_eq!(digest(&sparse, *len).unwrap(), expected, "{len}");
        assert_eq!(digest(&full, *len).unwrap(), expected, "{len}");
    }
}

#[test]
fn differ_by_length_place_and_contents() {
    let folder = tempfile::tempdir().unwrap();
    let page = [1u8; 4096];
    let files: &[(u64, Data)] = &[
        (0, &[]),
        (4096, &[]),
        (8192, &[]),
        (8192, &[(0, &page)]),
        (8192, &[(4096, &page)]),
        (8192, &[(0, &page), (4096, &page)]),
        (12288, &[(0, &page), (8192, &page)]),
    ];
    let digests: std::collections::HashSet<String> =
        files.iter().map(|(len, data)| digest(&file(&folder, "f", *len, data), *len).unwrap()).collect();
    assert_eq!(digests.len(), files.len());
}

#[test]
fn of_a_terabyte_of_nothing_take_no_time() {
    let folder = tempfile::tempdir().unwrap();
    let len = 1 << 40;
    let huge = file(&folder, "huge", len, &[(len - 1, b"x")]);
    let start = std::time::Instant::now();
    digest(&huge, len).unwrap();
    assert!(start.elapsed().as_secs() < 5, "{:?}", start.elapsed());
}

#[test]
fn of_a_file_that_shrinks_are_an_error_not_a_crash() {
    let folder = tempfile::tempdir().unwrap();
    let short = file(&folder, "short", 0, &[(0, b"short")]);
    assert!(digest(&short, 4096).is_err());
}

#[test]
fn of_a_copy_are_those_of_the_original_and_the_holes_are_the_same() {
    let folder = tempfile::tempdir().unwrap();
    let from = file(&folder, "from", 64 << 20, &[(0, b"first"), ((40 << 20) + 100, &[7; 9000])]);
    let to = file(&folder, "to", 0, &[]);
    copy_sparse(&from, &to).unwrap();
    assert_eq!(digest(&from, 64 << 20).unwrap(), digest(&to, 64 << 20).unwrap());
    assert_eq!(to.metadata().unwrap().len(), 64 << 20);
    assert!(to.metadata().unwrap().blocks() * 512 < 1 << 20);
}
