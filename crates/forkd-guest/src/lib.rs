//! The guest side of forkd: init and agent in one static binary, PID 1 of every guest.
//!
//! - [`init`] brings the machine up from `/forkd/init.json`: modules, root, mounts, network.
//! - [`agent`] serves the host afterwards: it runs commands, reads and writes files, and keeps a
//!   warmed Python interpreter.
//! - [`fork`] makes a guest ready to be copied, and makes each copy a machine of its own.
//! - `json_lines` serves clients of the reference, on TCP, with what the agent does.
//! - [`http`] is the small HTTP server underneath; it knows no service.
//!
//! # What runs in a fork, and what can be hooked into it
//!
//! While a guest is copied its user processes are frozen. In each copy they are thawed when the kernel
//! has random numbers of its own, the clock is right, host name, `/etc/machine-id` and
//! `/run/forkd/sandbox-id` are the copy's own and inherited TCP connections are reset (sockets that
//! listen go on listening; `ECONNRESET` is what a reader or writer of the others gets). Processes
//! started from then on have `FORKD_SANDBOX_ID`, and whatever variables were given, in their
//! environment.
//!
//! A process's own memory is the same in all copies, unless the process changes it. There are two places to
//! do that:
//!
//! - **In the warmed Python interpreter** the shared generators are reseeded before anything else runs:
//!   `random`, `numpy.random`'s global one, OpenSSL's, the names of `tempfile`; `uuid.uuid1` gets a random
//!   node. `os.environ` gets the new variables. Functions registered with `forkd_guest.on_fork(function)` run
//!   next, in that order; one that raises is reported on standard error and harms nothing. A generator that
//!   was made with a seed, such as `numpy.random.default_rng(42)`, is left alone, and so is the seed of
//!   `hash`.
//!
//!   ```python
//!   import forkd_guest
//!
//!   @forkd_guest.on_fork
//!   def reconnect():
//!       pool.reset()
//!   ```
//!
//!   An interpreter with functions or threads does that before any other process runs, for five
//!   seconds at most. One without is not woken for it: it does so when it evaluates next.
//!
//! - **For any other process** there are the programs in `/etc/forkd/forked.d`. Those that can be
//!   executed run before any user process is thawed, as root, in the order of their names and one
//!   after the other, with `FORKD_SANDBOX_ID` in their environment; names that begin with a dot are
//!   left out. Those in the folder `after` there run after the thaw. The child is ready when they are
//!   done. All of them together have 10 seconds; what fails or takes longer is a warning in the answer
//!   to `Become`, with the end of its output. A server might be told with
//!
//!   ```sh
//!   #!/bin/sh
//!   exec kill -HUP "$(cat /run/server.pid)"
//!   ```
//!
//!   and acts on it as soon as it thaws. Where there is an SSH server, its host keys are made new in
//!   the same way, without a program in that folder.
//!
//! An image without hooks pays nothing for them.
//!
//! # What it does not know
//!
//! The messages are `forkd-protocol`'s. This crate knows nothing of KVM, of the controller or of how many
//! siblings a guest has. Plain threads, no async: PID 1 must stay small, and it must stay up whatever the
//! processes of the guest do. Input from the network, from those processes and from the image is hostile: it
//! may get an error, never a panic or memory without bound.

pub mod agent;
mod files;
pub mod fork;
mod forward;
pub mod http;
pub mod init;
mod json_lines;
mod listener;
mod log;
mod process;
mod python;
mod rpc;
mod sys;
mod usage;
mod users;
mod warm;

pub use files::fuzz_multipart;
pub use http::fuzz_request;
