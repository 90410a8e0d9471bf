//! The bare alternatives, done for real to a little memory.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::fs::File;
use std::io::Cursor;
use std::path::Path;

use forkd_bench::bare::{Answer, Kind, serve};

fn main() {
    if File::options().read(true).write(true).open("/dev/kvm").is_err() {
        println!("NOT RUN: the bare alternatives (no /dev/kvm here)");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    for kind in [Kind::Layer, Kind::Huge] {
        every_question_is_answered_in_its_turn(folder.path(), kind);
    }
    memory_in_a_file_cannot_be_write_protected_and_that_is_said(folder.path());
    nonsense_is_refused(folder.path());
    println!("test bare ... ok");
}

const MIB: u64 = 16;

fn ask(folder: &Path, kind: Kind, dirty_pct: u64, questions: &str) -> Vec<Answer> {
    let (memory, answers) = (folder.join("memory"), folder.join("answers"));
    File::create(&memory).unwrap().set_len(MIB << 20).unwrap();
    let output = File::create(&answers).unwrap();
    serve(kind, &memory, MIB, dirty_pct, Cursor::new(questions.to_owned()), output).unwrap();
    let text = std::fs::read_to_string(&answers).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn every_question_is_answered_in_its_turn(folder: &Path, kind: Kind) {
    let questions = [
        "{\"do\":\"fork\"}",
        "\"rewrite\"",
        "{\"do\":\"copy\"}",
        "{\"do\":\"fork_plain\"}",
        "{\"do\":\"fork\"}",
    ];
    let answers = ask(folder, kind, 10, &(questions.join("\n") + "\n"));
    assert_eq!(answers.len(), 6, "{answers:?}");
    let ready: Vec<bool> = answers.iter().map(|answer| *answer == Answer::Ready).collect();
    assert_eq!(ready, [true, false, true, false, false, false], "{answers:?}");
    let times = answers.iter().filter(|answer| matches!(answer, Answer::Ms(ms) if *ms > 0.0));
    assert_eq!(times.count(), 4, "{answers:?}");
}

fn memory_in_a_file_cannot_be_write_protected_and_that_is_said(folder: &Path) {
    let answers = ask(folder, Kind::Layer, 100, "{\"do\":\"uffd_wp\"}\n");
    assert!(matches!(&answers[1], Answer::Impossible(why) if why.contains("cannot ")), "{answers:?}");
}

fn nonsense_is_refused(folder: &Path) {
    let memory = folder.join("memory");
    let refused = |mib, dirty, text: &str| {
        serve(Kind::Layer, &memory, mib, dirty, Cursor::new(text.to_owned()), std::io::sink()).is_err()
    };
    assert!(refused(MIB, 0, "{\"do\":\"melt\"}\n"));
    assert!(refused(MIB + 1, 0, ""), "a file shorter than the memory");
    assert!(refused(MIB, 33, "") && refused(0, 0, "") && refused(u64::MAX, 0, ""));
}
