//! `forkd mcp`: serves the Model Context Protocol over standard input and output.
//!
//! Nothing but the protocol goes to standard output. The daemon is looked for at the first request that needs it: a
//! client that waits for the first answer must not wait for a machine that boots.

mod config;

use std::sync::Arc;

use anyhow::{Context as _, Result};
use bytes::Bytes;
use forkd_mcp::{Api, ApiBody, ApiReply, ApiRequest, Window};
use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use http_body_util::{BodyExt, Full};
use tokio::sync::OnceCell;

use super::Context;
use crate::args::{DaemonArgs, McpArgs, McpCommand};
use crate::client::{Daemon, Streamed, discover};
use crate::host::paths::DataDir;
use crate::stream::signals::{Caught, Forwarded};
use crate::ui::{self, Ui};

/// Serves one client, or prints the settings of a client.
pub(crate) fn mcp(context: &Context, args: &McpArgs) -> Result<u8> {
    match &args.command {
        Some(McpCommand::Config(args)) => config::config(context, args),
        None => serve(context, args),
    }
}

fn serve(context: &Context, args: &McpArgs) -> Result<u8> {
    // Two threads: one may start a machine, while the other answers the client.
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let api = Arc::new(DaemonApi {
        data: context.data.clone(),
        args: args.daemon.clone(),
        ui: context.ui,
        daemon: OnceCell::new(),
    });
    let served = runtime.block_on(async {
        let mut signals = Forwarded::drain()?;
        let mut caught: Option<Caught> = None;
        let limit = args.output_limit_kib as usize * 1024;
        let streams = (tokio::io::stdin(), tokio::io::stdout());
        let ended =
            forkd_mcp::serve(api, limit, streams, async { caught = Some(signals.next().await) }).await;
        let made = [(ended.sandboxes, "sandbox", "sandboxes"), (ended.snapshots, "snapshot", "snapshots")];
        let parts = made.into_iter().filter(|(count, ..)| *count > 0);
        let parts: Vec<_> = parts.map(|(count, one, many)| ui::count(count, one, many)).collect();
        if !parts.is_empty() {
            context.ui.note(format!("the session has ended, and with it {}", parts.join(" and ")));
        }
        if ended.failed > 0 {
            context.ui.warn(format!(
                "{} could not be ended; see `forkd ls`",
                ui::count(ended.failed, "object", "objects")
            ));
        }
        Ok(caught.map_or(0, Caught::status))
    });
    // A thread may still wait for standard input; it ends with the process.
    runtime.shutdown_background();
    served
}

/// The REST API of the daemon that the command line names, or of the one on this host.
struct DaemonApi {
    data: DataDir,
    args: DaemonArgs,
    ui: Ui,
    daemon: OnceCell<Daemon>,
}

impl Api for DaemonApi {
    fn call(&self, request: ApiRequest) -> BoxFuture<'_, Result<ApiReply, String>> {
        async move {
            let sent = self.send(request).await;
            sent.map_err(|error| {
                format!(
                    "{error:#}; start a daemon with `sudo forkd serve`, or give its address with FORKD_URL"
                )
            })
        }
        .boxed()
    }
}

impl DaemonApi {
    async fn send(&self, request: ApiRequest) -> Result<ApiReply> {
        // A daemon that could not be found or started is looked for again at the next request.
        let daemon = self.daemon.get_or_try_init(|| self.find()).await?;
        let (body, kind) = match &request.body {
            ApiBody::Empty => (Bytes::new(), None),
            ApiBody::Json(json) => (json.to_string().into(), Some("application/json")),
            ApiBody::Bytes(bytes) => (bytes.clone(), Some("application/octet-stream")),
        };
        let body: Streamed = Full::from(body).map_err(|never| match never {}).boxed_unsync();
        let key = request.idempotency_key.as_deref();
        let (status, mut reply) = daemon.send(request.method.clone(), &request.path, body, kind, key).await?;
        let length = reply.length();
        let mut window = Window::new(&request, status.as_u16());
        while let Some(piece) = reply.next().await? {
            if !window.push(&piece) {
                break;
            }
        }
        Ok(window.reply(status.as_u16(), length))
    }

    async fn find(&self) -> Result<Daemon> {
        let (data, args, ui) = (self.data.clone(), self.args.clone(), self.ui);
        let runtime = tokio::runtime::Handle::current();
        // Starting a daemon or a machine blocks its thread.
        let found = tokio::task::spawn_blocking(move || runtime.block_on(discover::ensure(&data, &args, ui)));
        found.await.context("the search for a daemon failed")?
    }
}
