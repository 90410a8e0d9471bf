//! The agent: routes a path to its service, authorises the caller, and chooses the user a call acts as.

use std::{io, net::Ipv4Addr, os::fd::OwnedFd, path::PathBuf, sync::Arc, thread};

use forkd_protocol::{
    agent::{
        BecomeRequest, DEFAULT_USER_HEADER, EvalRequest, FreezeRequest, NameRequest, Pong, TOKEN_HEADER,
        WarmRequest,
    },
    connect::{Code, Error},
};
use serde_json::{Value, json};

use crate::{
    files::{self, tree::Trees, watch::Watchers},
    fork::{ForkService, System},
    http::{self, Exchange, Head},
    json_lines,
    process::{Cgroups, Processes, Variables},
    python::Python,
    rpc, sys, usage,
    users::User,
    warm::{Warm, WarmContext},
};

/// The agent's configuration at its start.
pub struct Config {
    /// The user a call acts as by default; root when absent.
    pub default_user: Option<String>,
    /// The token that every request but `/health` must carry, when any host can connect.
    pub token: Option<String>,
    /// The cgroup (v2) folder under which all started processes live; absent if there are none.
    pub cgroup: Option<PathBuf>,
    /// A folder for the agent's own files.
    pub run_dir: PathBuf,
    /// The machine that becomes another when it is forked.
    pub system: System,
    /// Ends the guest.
    pub shut_down: fn(),
}

/// The services of a guest.
pub struct Agent {
    default_user: Option<String>,
    token: Option<String>,
    run_dir: PathBuf,
    shut_down: fn(),
    pub(crate) processes: Arc<Processes>,
    pub(crate) python: Arc<Python>,
    forking: ForkService,
    warm: Warm,
    watchers: Watchers,
    trees: Trees,
}

impl Agent {
    /// An agent that does nothing yet.
    pub fn new(config: Config) -> Arc<Agent> {
        let Config { default_user, token, cgroup, run_dir, system, shut_down } = config;
        let cgroups = Cgroups::new(cgroup);
        let variables = Arc::<Variables>::default();
        let processes = Arc::new(Processes::new(cgroups.clone(), variables.clone()));
        let python = Arc::new(Python::new(cgroups, variables));
        let forking = ForkService::new(system, run_dir.clone(), processes.clone(), python.clone());
        let warm = Warm::default();
        let (watchers, trees) = (Watchers::default(), Trees::default());
        Arc::new(Agent {
            default_user,
            token,
            run_dir,
            shut_down,
            processes,
            python,
            forking,
            warm,
            watchers,
            trees,
        })
    }

    /// Serves all connections to a listening stream socket. Returns only if that is broken.
    pub fn serve(self: &Arc<Self>, listener: &OwnedFd) -> io::Error {
        let agent = self.clone();
        http::serve(listener, Arc::new(move |exchange: &mut Exchange| agent.answer(exchange)))
    }

    /// Serves the JSON-lines protocol to permitted clients, on a listening TCP socket; `gateway` is the host's
    /// address in the guest's network. Returns only if the socket is broken.
    pub fn serve_lines(self: &Arc<Self>, listener: &OwnedFd, gateway: Option<Ipv4Addr>) -> io::Error {
        json_lines::serve(listener, self.clone(), gateway)
    }

    fn answer(&self, exchange: &mut Exchange) -> io::Result<()> {
        let head = exchange.head();
        let path = head.path.clone();
        if path == "/health" {
            return exchange.respond(204, &[], b"");
        }
        if !self.is_authorized(head) {
            let message = format!("the header {TOKEN_HEADER} does not hold this agent's token");
            if path == "/files" {
                return files::content::refuse(exchange, (401, message));
            }
            return rpc::fail(exchange, &Error::new(Code::Unauthenticated, message));
        }
        if path == "/files" {
            let named =
                |head: &Head| head.query("username").filter(|name| !name.is_empty()).map(String::from);
            return files::content::call(exchange, &|head| self.user_of(head, named(head)));
        }
        let Some((service, method)) = path.trim_start_matches('/').split_once('/') else {
            return rpc::fail(exchange, &Error::new(Code::NotFound, format!("there is nothing at {path}")));
        };
        if exchange.head().method != "POST" {
            let message = format!("{path} takes POST only");
            return rpc::refuse(
                exchange,
                405,
                &[("allow", "POST")],
                &Error::new(Code::Unimplemented, message),
            );
        }
        let user = |head: &Head| self.user_of(head, head.basic_user());
        let answered = match service {
            "process.Process" => self.processes.call(method, &user, exchange),
            "filesystem.Filesystem" => files::service::call(method, &user, exchange)
                .or_else(|| self.watchers.call(method, &user, exchange)),
            "forkd.Agent" => self.call(method, exchange),
            _ => None,
        };
        answered.unwrap_or_else(|| {
            rpc::fail(exchange, &Error::new(Code::Unimplemented, format!("this agent has no {path}")))
        })
    }

    fn is_authorized(&self, head: &Head) -> bool {
        self.token.as_ref().is_none_or(|token| {
            head.header(TOKEN_HEADER)
                .is_some_and(|given| sys::equal_secrets(given.as_bytes(), token.as_bytes()))
        })
    }

    /// The user that a request names, or the default user of such requests.
    fn user_of(&self, head: &Head, named: Option<String>) -> Result<User, Error> {
        match (named, head.header(DEFAULT_USER_HEADER)) {
            (None, Some(default)) => User::find(default).or_else(|_| self.user(None)),
            (named, _) => self.user(named.as_deref()),
        }
    }

    /// The named user, or the default user.
    pub(crate) fn user(&self, name: Option<&str>) -> Result<User, Error> {
        User::find(name.or(self.default_user.as_deref()).unwrap_or("root"))
    }

    fn call(&self, method: &str, exchange: &mut Exchange) -> Option<io::Result<()>> {
        Some(match method {
            "Ping" => rpc::unary(exchange, |_: Value, _| Ok(self.ping())),
            "Warm" => rpc::unary(exchange, |request: WarmRequest, _| {
                let workplace = WarmContext {
                    processes: self.processes.clone(),
                    python: self.python.clone(),
                    user: self.user(None)?,
                    run_dir: self.run_dir.clone(),
                };
                Ok(self.warm.start(request, workplace))
            }),
            "Usage" => rpc::unary(exchange, |_: Value, _| usage::measure()),
            "Tree" => self.trees.call(&|head| self.user_of(head, head.basic_user()), exchange),
            "Eval" => rpc::unary(exchange, |request: EvalRequest, head| {
                self.python.eval(&request.code, &self.user(None)?, rpc::timeout(head)?)
            }),
            "Freeze" => rpc::watched(exchange, |request: FreezeRequest, exchange| {
                self.forking.freeze(&request, exchange.head().received, || !exchange.peer_has_left())
            }),
            "Thaw" => rpc::unary(exchange, |_: Value, _| self.forking.thaw().map(|()| json!({}))),
            "Name" => rpc::unary(exchange, |request: NameRequest, _| {
                self.forking.name(&request).map(|()| json!({}))
            }),
            "Become" => rpc::unary(exchange, |request: BecomeRequest, head| {
                self.forking.become_child(request, head.received)
            }),
            "Shutdown" => rpc::unary(exchange, |_: Value, _| Ok(json!({}))).and_then(|()| {
                // Not here: this connection ends first, and with it the caller's wait.
                thread::Builder::new().name("shutdown".into()).spawn(self.shut_down).map(drop)
            }),
            _ => return None,
        })
    }

    pub(crate) fn ping(&self) -> Pong {
        Pong {
            version: env!("CARGO_PKG_VERSION").into(),
            uptime_ms: sys::uptime_ms(),
            python: Python::find().is_some(),
            warm: self.warm.status(),
            numpy_version: self.warm.numpy_version(),
        }
    }
}

#[cfg(test)]
pub(crate) mod tests;
