//! `forkd run`: one command in a fresh sandbox, with the streams of this process.
//!
//! The stream is a WebSocket. The daemon ends the sandbox with it, so this process has nothing to clean up,
//! however it ends.

use std::collections::BTreeMap;

use anyhow::Result;
use forkd_api::stream::RunRequest;

use super::{Context, prepare_image, runtime};
use crate::args::RunArgs;
use crate::client::discover;
use crate::stream::conversation::{Conversation, Streams};

/// Runs the command and returns the exit status.
pub(crate) fn run(context: &Context, args: RunArgs) -> Result<u8> {
    let Context { data, ui } = context;
    prepare_image(context, &args.daemon, &args.image)?;
    let runtime = runtime()?;
    let result = runtime.block_on(async {
        let daemon = discover::ensure(data, &args.daemon, *ui).await?;
        let socket = daemon.websocket("/v1/run").await?;
        // Standard input is forwarded with and without `-i`.
        let streams = Streams { stdin: true, tty: args.tty };
        Conversation::new(socket, *ui, streams).hold(&request(args)).await
    });
    // A thread may still wait for standard input; it ends with the process.
    runtime.shutdown_background();
    result
}

fn request(args: RunArgs) -> RunRequest {
    RunRequest {
        image: args.image,
        args: args.command,
        env: args.process.env.into_iter().collect::<BTreeMap<_, _>>(),
        cwd: args.process.cwd,
        user: args.process.user,
        vcpus: Some(args.guest.vcpus),
        mem_size_mib: Some(args.guest.mem_size_mib),
        timeout_secs: args.timeout,
        tty: args.tty.then(crate::stream::conversation::terminal_size),
        network: args.guest.no_network.then_some(false),
    }
}
