//! The protocol's server: it answers with the tools, the resources and the prompts.

use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::LocalBoxFuture;
use http::request::Parts;
use rmcp::model::{
    CallToolRequestParams, CallToolResponse, ErrorData, GetPromptRequestParams, GetPromptResponse,
    Implementation, ListPromptsResult, ListResourceTemplatesResult, ListResourcesResult, ListToolsResult,
    PaginatedRequestParams, ProgressNotificationParam, ReadResourceRequestParams, ReadResourceResponse,
    ReadResourceResult, ServerCapabilities, ServerConfig, Tool,
};
use rmcp::service::{RequestContext, RoleServer};
use rmcp::transport::async_rw::AsyncRwTransport;
use rmcp::{ServerHandler, serve_server};
use tokio::io::{AsyncRead, AsyncWrite};

use crate::api::Api;
use crate::limit::{MIN_OUTPUT_LIMIT, before};
use crate::session::{Ended, Session};
use crate::tool_error::ToolError;
use crate::tools::Caller;
use crate::{prompts, resources, tools};

/// The longest message of a client.
pub(crate) const MAX_MESSAGE: usize = 8 << 20;
/// How often a client that wants to see progress gets it.
const PROGRESS_EVERY: Duration = Duration::from_millis(if cfg!(test) { 200 } else { 5000 });

const INSTRUCTIONS: &str = "forkd runs sandboxes: virtual machines that can be forked like processes. Begin with \
    list_snapshots and spawn_sandboxes, then run_code, exec_command and the file tools. fork_sandbox copies a running \
    sandbox with its memory and its files; use it to try several ways from one state. branch_sandbox saves a moment, \
    rollback_sandbox returns to it. Sandboxes and branches end with this session, unless you keep them.";

/// Lines of one client.
type Transport =
    AsyncRwTransport<RoleServer, Box<dyn AsyncRead + Send + Unpin>, Box<dyn AsyncWrite + Send + Unpin>>;

/// Answers the requests of one client, or of many over HTTP.
#[derive(Debug, Clone)]
pub(crate) struct Server(Source);

/// Where the caller of a request comes from.
#[derive(Debug, Clone)]
enum Source {
    /// There is only one.
    Fixed(Caller),
    /// It is in the extensions of the HTTP request.
    Request,
}

impl Server {
    pub(crate) fn fixed(caller: Caller) -> Self {
        Server(Source::Fixed(caller))
    }

    pub(crate) fn of_requests() -> Self {
        Server(Source::Request)
    }

    fn caller(&self, context: &RequestContext<RoleServer>) -> Result<Caller, ErrorData> {
        let found = match &self.0 {
            Source::Fixed(caller) => Some(caller.clone()),
            Source::Request => {
                context.extensions.get::<Parts>().and_then(|parts| parts.extensions.get::<Caller>().cloned())
            }
        };
        found.ok_or_else(|| {
            ErrorData::internal_error("the request has no client; this is a bug of forkd", None)
        })
    }
}

/// Serves one client over a pair of streams, until the client closes its stream or `stop` returns; then ends what the
/// client made and did not keep.
pub async fn serve<R, W>(
    api: Arc<dyn Api>,
    output_limit: usize,
    (read, write): (R, W),
    stop: impl Future<Output = ()>,
) -> Ended
where
    R: AsyncRead + Send + Unpin + 'static,
    W: AsyncWrite + Send + Unpin + 'static,
{
    // One type of stream: the protocol's code is compiled here, and only once.
    serve_boxed(api, output_limit, Box::new(read), Box::new(write), stop.boxed_local()).await
}

fn serve_boxed<'a>(
    api: Arc<dyn Api>,
    output_limit: usize,
    read: Box<dyn AsyncRead + Send + Unpin>,
    write: Box<dyn AsyncWrite + Send + Unpin>,
    stop: LocalBoxFuture<'a, ()>,
) -> LocalBoxFuture<'a, Ended> {
    let session = Session::new(api.clone());
    let caller = Caller { api, session: session.clone(), output_limit: output_limit.max(MIN_OUTPUT_LIMIT) };
    let transport = AsyncRwTransport::new_server(read, write).with_max_line_length(MAX_MESSAGE);
    async move {
        tokio::select! {
            () = converse(caller, transport) => {}
            () = stop => {}
        }
        session.end().await
    }
    .boxed_local()
}

/// One conversation, until the client closes its stream.
async fn converse(caller: Caller, transport: Transport) {
    match serve_server(Server::fixed(caller), transport).await {
        Ok(running) => drop(running.waiting().await),
        // The client left before it introduced itself.
        Err(error) => tracing::debug!(%error, "no MCP session began"),
    }
}

/// Does work; tells a client that wants to see progress that it still goes on.
async fn with_progress<T>(
    context: &RequestContext<RoleServer>,
    what: &str,
    work: impl Future<Output = T>,
) -> T {
    tokio::pin!(work);
    let Some(token) = context.meta.get_progress_token() else { return work.await };
    let begun = tokio::time::Instant::now();
    loop {
        match tokio::time::timeout(PROGRESS_EVERY, &mut work).await {
            Ok(done) => return done,
            Err(_) => {
                let secs = begun.elapsed().as_secs();
                let progress = ProgressNotificationParam::new(token.clone(), secs as f64)
                    .with_message(format!("{what}: {secs} s"));
                // A client that has left is found by the transport.
                let _ = context.peer.notify_progress(progress).await;
            }
        }
    }
}

fn protocol_error(error: &ToolError) -> ErrorData {
    let data = Some(error.json());
    match error.is_not_found() {
        true => ErrorData::resource_not_found(error.text(), data),
        false => ErrorData::internal_error(error.text(), data),
    }
}

impl ServerHandler for Server {
    fn get_info(&self) -> ServerConfig {
        let capabilities =
            ServerCapabilities::builder().enable_tools().enable_resources().enable_prompts().build();
        ServerConfig::new(capabilities)
            .with_server_info(Implementation::new("forkd", env!("CARGO_PKG_VERSION")))
            .with_instructions(INSTRUCTIONS)
    }

    async fn list_tools(
        &self,
        _: Option<PaginatedRequestParams>,
        _: RequestContext<RoleServer>,
    ) -> Result<ListToolsResult, ErrorData> {
        Ok(ListToolsResult::with_all_items(tools::list()))
    }

    fn get_tool(&self, name: &str) -> Option<Tool> {
        tools::find(name)
    }

    async fn call_tool(
        &self,
        request: CallToolRequestParams,
        context: RequestContext<RoleServer>,
    ) -> Result<CallToolResponse, ErrorData> {
        let caller = self.caller(&context)?;
        let call = tools::call(caller, &request.name, request.arguments.unwrap_or_default());
        let called = tokio::select! {
            called = with_progress(&context, &request.name, call) => called,
            // The client does not wait any more. What makes something goes on, and the session learns of it.
            () = context.ct.cancelled() => return Err(ErrorData::internal_error("cancelled by the client", None)),
        };
        match called {
            Some(result) => Ok(result.into()),
            None => {
                let text = format!("there is no tool {:?}; tools/list has all", short(&request.name));
                Err(ErrorData::invalid_params(text, None))
            }
        }
    }

    async fn list_resources(
        &self,
        _: Option<PaginatedRequestParams>,
        context: RequestContext<RoleServer>,
    ) -> Result<ListResourcesResult, ErrorData> {
        let listed = resources::list(&self.caller(&context)?).await;
        listed.map(ListResourcesResult::with_all_items).map_err(|error| protocol_error(&error))
    }

    async fn list_resource_templates(
        &self,
        _: Option<PaginatedRequestParams>,
        _: RequestContext<RoleServer>,
    ) -> Result<ListResourceTemplatesResult, ErrorData> {
        Ok(ListResourceTemplatesResult::with_all_items(resources::templates()))
    }

    async fn read_resource(
        &self,
        request: ReadResourceRequestParams,
        context: RequestContext<RoleServer>,
    ) -> Result<ReadResourceResponse, ErrorData> {
        match resources::read(&self.caller(&context)?, &request.uri).await {
            Ok(Some(contents)) => Ok(ReadResourceResult::new(vec![contents]).into()),
            Ok(None) => {
                let text = format!("there is no resource {:?}; resources/list has all", short(&request.uri));
                Err(ErrorData::resource_not_found(text, None))
            }
            Err(error) => Err(protocol_error(&error)),
        }
    }

    async fn list_prompts(
        &self,
        _: Option<PaginatedRequestParams>,
        _: RequestContext<RoleServer>,
    ) -> Result<ListPromptsResult, ErrorData> {
        Ok(ListPromptsResult::with_all_items(prompts::list()))
    }

    async fn get_prompt(
        &self,
        request: GetPromptRequestParams,
        _: RequestContext<RoleServer>,
    ) -> Result<GetPromptResponse, ErrorData> {
        prompts::get(&request.name, &request.arguments.unwrap_or_default())
            .map(Into::into)
            .map_err(|text| ErrorData::invalid_params(text, None))
    }
}

/// A name of the client, short enough for an error.
fn short(name: &str) -> &str {
    &name[..before(name, 100)]
}

#[cfg(test)]
mod tests;
