//! Tests of the rules for tasks that panic.

use std::sync::Arc;
use std::sync::atomic::AtomicUsize;

use tokio::sync::mpsc;

use super::*;

fn count(task: Task) -> u64 {
    panics(task).load(Relaxed)
}

#[tokio::test]
async fn a_loop_that_panics_is_counted_and_runs_again() {
    let (begun, (tell, mut told)) = (Arc::new(AtomicUsize::new(0)), mpsc::unbounded_channel());
    let before = count(Task::AuditReopen);
    let looping = keep_running(Task::AuditReopen, move || {
        let (begun, tell) = (begun.clone(), tell.clone());
        async move {
            let round = begun.fetch_add(1, Relaxed);
            tell.send(round).unwrap();
            match round {
                0 => panic!("a bug"),
                1 => panic!("{} bug", "another"),
                _ => {}
            }
        }
    });
    looping.await.unwrap();
    let mut rounds = Vec::new();
    while let Some(round) = told.recv().await {
        rounds.push(round);
    }
    assert_eq!(rounds, [0, 1, 2]);
    assert_eq!(count(Task::AuditReopen) - before, 2);
    assert!(panic_counts().any(|(task, count)| task == "audit_reopen" && count >= 2));
    assert!(panic_counts().any(|(task, _)| task == "accept"), "those that never panicked are there, too");
}

#[tokio::test]
async fn a_loop_whose_start_panics_is_started_again() {
    let (mut first, before) = (true, count(Task::Traces));
    let looping = keep_running(Task::Traces, move || {
        assert!(!std::mem::take(&mut first), "a bug");
        async {}
    });
    looping.await.unwrap();
    assert_eq!(count(Task::Traces) - before, 1);
}

#[tokio::test]
async fn the_waiter_of_a_task_that_panics_gets_an_error() {
    let before = count(Task::Rollback);
    let error = spawn(Task::Rollback, async { panic!("a bug") }).await.map(|()| "done").unwrap_err();
    assert!(error.is_panic());
    let (tell, mut told) = mpsc::unbounded_channel();
    let work = async { panic!("a bug") };
    spawn_or(Task::Rollback, work, move |error| drop(tell.send(error))).await.unwrap();
    let error = told.recv().await.unwrap();
    assert_eq!(error.code(), forkd_api::Code::Internal);
    assert_eq!(count(Task::Rollback) - before, 2);
    assert_eq!(spawn(Task::Rollback, async { 7 }).await.unwrap(), 7);
}

#[tokio::test]
async fn a_vital_task_that_panics_is_fatal_and_one_that_ends_is_not() {
    let (vital, mut failed) = Vital::new();
    vital.spawn(Task::StopUnseen, async {}).await.unwrap();
    assert!(failed.next().now_or_never().is_none());
    vital.spawn(Task::StopUnseen, async { panic!("a bug") }).await.unwrap();
    assert_eq!(failed.next().await.code(), forkd_api::Code::Internal);
}

#[test]
fn names_are_of_one_task_each() {
    let names: std::collections::BTreeSet<&str> = Task::ALL.iter().map(|task| task.name()).collect();
    assert_eq!(names.len(), Task::ALL.len());
    assert!(Task::ALL.iter().enumerate().all(|(index, task)| *task as usize == index));
}

/// A task that is started elsewhere has no rule for a panic.
#[test]
fn nothing_else_starts_tasks() {
    fn look(folder: &std::path::Path, found: &mut Vec<String>) {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap().to_string_lossy().into_owned();
            if path.is_dir() {
                look(&path, found);
                continue;
            }
            // Tests, and what plays a guest for them.
            if path.ends_with("util/task/mod.rs")
                || name.contains("tests")
                || path.to_string_lossy().contains("/tests/")
            {
                continue;
            }
            let text = std::fs::read_to_string(&path).unwrap();
            let code = text.split("#[cfg(test)]\nmod tests {").next().unwrap();
            let bare = ["tokio::spawn(", "tokio::task::spawn(", "JoinSet::"];
            let lines =
                code.lines().enumerate().filter(|(_, line)| bare.iter().any(|bare| line.contains(bare)));
            found.extend(lines.map(|(number, line)| format!("{}:{}: {line}", path.display(), number + 1)));
        }
    }
    let mut found = Vec::new();
    look(&std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("src"), &mut found);
    found.retain(|line| !line.contains("fake_guest.rs"));
    assert!(found.is_empty(), "start these with crate::util::task:\n{}", found.join("\n"));
}
