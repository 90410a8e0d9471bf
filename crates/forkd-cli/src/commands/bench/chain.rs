//! Chains of layers that differ in scattered single pages: their size, and the cost of a spawn from a long
//! chain.

use std::time::Duration;

use anyhow::{Context as _, Result};
use forkd_bench::bare::Kind;
use forkd_bench::branch::{Attempts, Line, Record, Subject};
use forkd_bench::writer::{PAGE, Writer};
use serde_json::json;

use super::branch::BranchRun;
use super::results::Results;
use super::server::BenchDaemon;

/// The number of layers over the base.
const DEPTH: u64 = 8;
/// Memory of the guest. All pages of the base have content, so holes save nothing.
const MEM_MIB: u64 = 512;
/// The distance between the pages that each layer adds.
const DISTANCE: u64 = 2 << 20;
/// The content of the base's pages. Layers write their depth, so this differs from every layer.
const BASE: u64 = 0x77;
/// The time in which a child writes its pages after it has reported that it runs.
const WRITES: Duration = Duration::from_millis(300);

/// Builds the chain, then spawns from its end and from its base in turns.
pub(super) async fn measure(
    run: &BranchRun<'_>,
    server: &mut BenchDaemon,
    results: &mut Results<'_, Record>,
) -> Result<()> {
    let progress = run.context.ui.progress(format!("a chain of {DEPTH} layers"));
    let writer = Writer { mem_mib: MEM_MIB, booted: PAGE, value: BASE, dirty: 0, each: DISTANCE };
    let subject = Subject { guest: "tiny".into(), memory: Kind::Layer, mem_mib: MEM_MIB, dirty_pct: 0 };
    let base = run.tag("chain-0");
    server.snapshot(&base, run.kernel(&writer, "chain")?).await?;
    let mut top = base.clone();
    for depth in 1..=DEPTH {
        let (child, _) = server.child(&top, false).await?;
        tokio::time::sleep(WRITES).await;
        top = run.tag(&format!("chain-{depth}"));
        let (branch, _) = server.branch(&child.id, &top, &json!({ "mode": "diff", "wait": true })).await?;
        server.delete(&[child]).await?;
        let bytes = branch.bytes.context("the daemon's reply has no size of the layer")?;
        let mut line = Line::of("layer_bytes", &subject, &Attempts::default(), run.conditions);
        (line.n, line.ok, line.depth) = (1, 1, Some(depth));
        (line.bytes, line.differing_bytes) = (Some(bytes), Some(writer.pages_of_each(depth) * PAGE));
        results.add(Record::Line(line))?;
    }

    let mut times = [(0, &base), (DEPTH, &top)].map(|(depth, tag)| (depth, tag, Attempts::default()));
    for (_, tag, _) in &times {
        // One child before the measurement: the first one pays for the loading of the template.
        server.unload(tag).await?;
        let (child, _) = server.child(tag, false).await?;
        server.delete(&[child]).await?;
    }
    for _ in 0..run.turns(60) {
        for (_, tag, attempts) in &mut times {
            match server.child(tag, false).await {
                Ok((child, burst)) => {
                    attempts.add(burst.times_ms.first().copied().ok_or("the daemon's reply has no time"));
                    server.delete(&[child]).await?;
                }
                Err(error) => attempts.add(Err(error)),
            }
        }
    }
    for (depth, _, attempts) in times {
        let mut line = Line::of("chain_spawn", &subject, &attempts, run.conditions);
        line.depth = Some(depth);
        results.add(Record::Line(line))?;
    }
    progress.done("a chain is measured");
    Ok(())
}
