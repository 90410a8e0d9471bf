//! The warmed Python interpreter: one long-lived process of the image's `python3`, which evaluates all
//! requests in one namespace.
//!
//! It starts with the first evaluation or with the warm-up, runs as the default user like any other command,
//! and does one evaluation at a time; others wait. In a forked guest it gets a notice, idle or in the middle
//! of an evaluation, and reseeds what it can. `driver.py` runs in it, and documents the protocol between the
//! two. Everything that comes out of it is as hostile as any output: evaluated code can write whatever it
//! likes into any descriptor.

mod interpreter;

use std::{
    collections::BTreeMap,
    io,
    path::Path,
    sync::{Arc, Condvar, Mutex, PoisonError, Weak},
    time::{Duration, Instant},
};

use forkd_protocol::{
    agent::EvalResponse,
    connect::{Code, Error},
};
pub(crate) use interpreter::Notices;
use interpreter::{Ended, Interpreter, Stop};

use crate::{
    process::{Cgroups, DEFAULT_PATH, Variables},
    users::User,
};

/// How long an interrupted evaluation has to end before the interpreter is killed.
const GRACE: Duration = Duration::from_secs(2);

/// The image's interpreter, running or not.
pub(crate) struct Python {
    state: Mutex<InterpreterSlot>,
    /// Callers wait here for their turn.
    free: Condvar,
    /// Of the interpreter that runs: reachable also during an evaluation.
    notices: Mutex<Weak<Notices>>,
    cgroups: Arc<Cgroups>,
    variables: Arc<Variables>,
}

enum InterpreterSlot {
    Free(Option<Interpreter>),
    /// In use, see [`InterpreterGuard`].
    Taken,
}

/// One caller's time with the interpreter, which goes back when this is dropped.
struct InterpreterGuard<'p> {
    python: &'p Python,
    interpreter: Option<Interpreter>,
}

impl Drop for InterpreterGuard<'_> {
    fn drop(&mut self) {
        let mut state = self.python.state.lock().unwrap_or_else(PoisonError::into_inner);
        *state = InterpreterSlot::Free(self.interpreter.take());
        self.python.free.notify_one();
    }
}

impl Python {
    pub(crate) fn new(cgroups: Arc<Cgroups>, variables: Arc<Variables>) -> Self {
        Python {
            state: Mutex::new(InterpreterSlot::Free(None)),
            free: Condvar::new(),
            notices: Mutex::default(),
            cgroups,
            variables,
        }
    }

    /// Sends the interpreter, if there is one, a notice of the fork with its new variables. It reads that
    /// before anything else when it runs again. Returned if it is to run before others do: when it has
    /// functions to call or threads. A sleeping one is not woken for the notice.
    pub(crate) fn forked(&self, variables: &BTreeMap<String, String>) -> io::Result<Option<Arc<Notices>>> {
        let notices = self.notices.lock().unwrap_or_else(PoisonError::into_inner).upgrade();
        let Some(notices) = notices else { return Ok(None) };
        let runs_first = notices.have_listeners();
        notices.send(variables)?;
        Ok(runs_first.then_some(notices))
    }

    /// Waits for the interpreter to be free.
    fn lock_interpreter(&self, deadline: Option<Instant>) -> Result<InterpreterGuard<'_>, Error> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if let InterpreterSlot::Free(interpreter) = std::mem::replace(&mut *state, InterpreterSlot::Taken)
            {
                return Ok(InterpreterGuard { python: self, interpreter });
            }
            state = match deadline.map(|deadline| deadline.saturating_duration_since(Instant::now())) {
                None => self.free.wait(state).unwrap_or_else(PoisonError::into_inner),
                Some(Duration::ZERO) => return Err(timed_out("other evaluations took all of it")),
                Some(left) => self.free.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0,
            };
        }
    }

    /// The image's `python3`, if it has one.
    pub(crate) fn find() -> Option<String> {
        let mut places = DEFAULT_PATH.split(':').map(|folder| format!("{folder}/python3"));
        places.find(|place| Path::new(place).exists())
    }

    /// Starts the interpreter if it does not run.
    pub(crate) fn start(&self, user: &User) -> Result<(), Error> {
        let mut turn = self.lock_interpreter(None)?;
        self.ensure_running(&mut turn.interpreter, user, None)?;
        Ok(())
    }

    /// Evaluates `code`, within `limit`.
    pub(crate) fn eval(
        &self,
        code: &str,
        user: &User,
        limit: Option<Duration>,
    ) -> Result<EvalResponse, Error> {
        let deadline = limit.and_then(|limit| Instant::now().checked_add(limit));
        let mut turn = self.lock_interpreter(deadline)?;
        let running = &mut turn.interpreter;
        if let Some(ended) = running.as_ref().and_then(Interpreter::ended) {
            // Code that relies on what earlier code left must not run without it.
            *running = None;
            let error = format!(
                "the interpreter ended after the last evaluation ({ended}); its variables are lost. The next \
                 evaluation starts with a fresh one"
            );
            return Ok(EvalResponse { error: Some(error), ..EvalResponse::default() });
        }
        let interpreter = self.ensure_running(running, user, deadline)?;
        match interpreter.eval(code, deadline, GRACE) {
            Ok(response) => Ok(response),
            Err(Stop::Interrupted) => {
                Err(timed_out("the evaluation was interrupted; the interpreter's variables are kept"))
            }
            Err(Stop::Killed) => {
                *running = None;
                Err(timed_out(
                    "the evaluation did not stop when interrupted, and the interpreter was killed; its \
                               variables are lost",
                ))
            }
            Err(Stop::Ended(Ended { why, stdout, stderr })) => {
                *running = None;
                let error = format!(
                    "the evaluation ended the interpreter ({why}); its variables are lost. The next evaluation \
                     starts with a fresh one"
                );
                Ok(EvalResponse { stdout, stderr, error: Some(error), ..EvalResponse::default() })
            }
        }
    }

    fn ensure_running<'r>(
        &self,
        running: &'r mut Option<Interpreter>,
        user: &User,
        deadline: Option<Instant>,
    ) -> Result<&'r mut Interpreter, Error> {
        if running.as_ref().is_some_and(|interpreter| interpreter.ended().is_some()) {
            *running = None;
        }
        match running {
            Some(interpreter) => Ok(interpreter),
            None => {
                let python = Python::find().ok_or_else(|| {
                    Error::new(
                        Code::FailedPrecondition,
                        "there is no python3 in this image: nothing can be evaluated",
                    )
                })?;
                let env = self.variables.environment(user, false, &BTreeMap::new())?;
                let started = Interpreter::start(&python, user, &env, &self.cgroups, deadline)?;
                let notices = Arc::downgrade(&started.notices);
                *self.notices.lock().unwrap_or_else(PoisonError::into_inner) = notices;
                Ok(running.insert(started))
            }
        }
    }
}

fn timed_out(what: &str) -> Error {
    Error::new(Code::DeadlineExceeded, format!("the time given is over: {what}"))
}

#[cfg(test)]
mod tests;
