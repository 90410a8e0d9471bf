//! The server of the Model Context Protocol: an agent's model forks, branches and rolls back sandboxes with tools.
//!
//! It owns the tools, the resources and the prompts, their words and limits, and the sessions: a session ends what it
//! made, unless the client keeps it. `forkd mcp` serves one session over standard input and output ([`serve`]); the
//! daemon serves many over HTTP ([`HttpServer`]).
//!
//! It reaches sandboxes through the REST API alone, by the trait [`Api`]: the command implements it with its HTTP
//! client, the daemon with its own router. So an MCP client has the rights, the quota and the audit log of a REST
//! client. This crate must not know sockets, tokens or how the daemon works inside.
//!
//! - `api` is the trait, and requests and replies.
//! - `session` has what a session made, and ends it.
//! - `tools`, `resources` and `prompts` are what a client sees; `server` connects them to the protocol.
//! - `limit` cuts long outputs, `tool_error` words errors.
//! - `http` has the sessions of HTTP clients.

mod api;
mod http_server;
mod limit;
mod prompts;
mod resources;
mod server;
mod session;
#[cfg(test)]
mod testing;
mod tool_error;
mod tools;

pub use api::{Api, ApiBody, ApiReply, ApiRequest, Window};
pub use http_server::{HttpOptions, HttpServer, Tracked};
pub use limit::DEFAULT_OUTPUT_LIMIT;
pub use server::serve;
pub use session::Ended;
