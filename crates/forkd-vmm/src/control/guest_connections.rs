//! Connections of the guest to the host, on their way from the device thread to the controller.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use crate::{Error, Result};

/// Connections that wait to be passed to the controller. More are refused.
pub(super) const WAITING_CONNECTIONS: usize = 64;

/// The device thread's end of the queue. It never waits for the controller.
#[derive(Clone)]
pub(super) struct Outbox {
    attached: Arc<AtomicBool>,
    connections: SyncSender<(u32, OwnedFd)>,
    event: Arc<EventFd>,
}

/// The control thread's end.
pub(super) struct Inbox {
    attached: Arc<AtomicBool>,
    connections: Receiver<(u32, OwnedFd)>,
    event: Arc<EventFd>,
}

/// An empty queue, with no controller attached.
pub(super) fn queue() -> Result<(Outbox, Inbox)> {
    let event = Arc::new(EventFd::new(EFD_NONBLOCK).map_err(Error::system("create an eventfd"))?);
    let (sender, receiver) = sync_channel(WAITING_CONNECTIONS);
    let attached = Arc::new(AtomicBool::new(false));
    let outbox = Outbox { attached: attached.clone(), connections: sender, event: event.clone() };
    Ok((outbox, Inbox { attached, connections: receiver, event }))
}

impl Outbox {
    /// Hands over a connection if a controller is attached and the queue has room.
    pub(super) fn offer(&self, port: u32, fd: OwnedFd) -> bool {
        let taken = self.attached.load(Ordering::SeqCst) && self.connections.try_send((port, fd)).is_ok();
        // It fails only when it is set already.
        let _ = self.event.write(1);
        taken
    }
}

impl Inbox {
    /// Sets whether a controller is there to take connections.
    pub(super) fn set_attached(&self, attached: bool) {
        self.attached.store(attached, Ordering::SeqCst);
    }

    /// Readable when connections wait.
    pub(super) fn event(&self) -> &EventFd {
        &self.event
    }

    /// Takes what waits: so many and no more, because a guest that never stops connecting must not keep the
    /// controller, or the VM's end, waiting. The event is set again for the rest.
    pub(super) fn take(&self) -> Vec<(u32, OwnedFd)> {
        let _ = self.event.read();
        let taken: Vec<_> = self.connections.try_iter().take(WAITING_CONNECTIONS).collect();
        if taken.len() == WAITING_CONNECTIONS {
            // It fails only when it is set already.
            let _ = self.event.write(1);
        }
        taken
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn connection() -> OwnedFd {
        std::os::unix::net::UnixStream::pair().unwrap().0.into()
    }

    #[test]
    fn a_guest_connection_nobody_can_take_is_refused() {
        let (outbox, inbox) = queue().unwrap();
        assert!(!outbox.offer(1, connection()), "no controller");
        inbox.set_attached(true);
        for port in 0..WAITING_CONNECTIONS as u32 {
            assert!(outbox.offer(port, connection()));
        }
        assert!(!outbox.offer(99, connection()), "too many wait");
        assert_eq!(inbox.take().len(), WAITING_CONNECTIONS);
        assert!(outbox.offer(100, connection()));
    }

    #[test]
    fn a_guest_that_connects_without_end_keeps_nobody_waiting() {
        let (outbox, inbox) = queue().unwrap();
        inbox.set_attached(true);
        (0..WAITING_CONNECTIONS as u32).for_each(|port| assert!(outbox.offer(port, connection())));
        inbox.take();
        assert_eq!(inbox.event().read().unwrap(), 1, "there may be more, after others had a turn");
        assert_eq!(inbox.take().len(), 0);
        assert!(inbox.event().read().is_err(), "there was no more");
    }
}
