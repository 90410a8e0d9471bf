//! One end of a control connection: messages in packets, descriptors attached.

use std::io;
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags,
};
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::{MAX_FDS, MAX_MESSAGE, Message, Request};

/// One end of a control connection. Calls block if its socket does.
#[derive(Debug)]
pub struct Channel {
    socket: OwnedFd,
}

impl Channel {
    /// Takes a connected `SEQPACKET` socket.
    pub fn new(socket: OwnedFd) -> Self {
        Channel { socket }
    }

    /// Sends `message` with `fds` attached.
    pub fn send<T: Serialize>(&self, message: &T, fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        let bytes = serde_json::to_vec(message)?;
        if bytes.len() > MAX_MESSAGE || fds.len() > MAX_FDS {
            let text =
                format!("a message of {} bytes and {} descriptors is over the limit", bytes.len(), fds.len());
            return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
        }
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() {
            ancillary.push(SendAncillaryMessage::ScmRights(fds));
        }
        let flags = SendFlags::NOSIGNAL;
        rustix::io::retry_on_intr(|| {
            rustix::net::sendmsg(&self.socket, &[IoSlice::new(&bytes)], &mut ancillary, flags)
        })?;
        Ok(())
    }

    /// Receives the next message and its descriptors; `None` when the peer closed.
    pub fn recv<T: DeserializeOwned>(&self) -> io::Result<Option<(T, Vec<OwnedFd>)>> {
        let length = self.next_length()?;
        self.take(length)
    }

    /// Waits for the next message and returns its length.
    fn next_length(&self) -> io::Result<usize> {
        let flags = RecvFlags::PEEK | RecvFlags::TRUNC;
        let (_, length) = past_reset(|| rustix::net::recv(&self.socket, &mut [0u8; 0], flags))?;
        Ok(length)
    }

    fn take<T: DeserializeOwned>(&self, length: usize) -> io::Result<Option<(T, Vec<OwnedFd>)>> {
        // As much memory as the message takes, and not as much as one could take: a template that forks
        // pays for every page it touches between two forks.
        let mut bytes = vec![0u8; length.clamp(1, MAX_MESSAGE + 1)];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let received = past_reset(|| {
            let flags = RecvFlags::CMSG_CLOEXEC;
            rustix::net::recvmsg(&self.socket, &mut [IoSliceMut::new(&mut bytes)], &mut ancillary, flags)
        })?;
        let mut fds = Vec::new();
        for message in ancillary.drain() {
            if let RecvAncillaryMessage::ScmRights(rights) = message {
                fds.extend(rights);
            }
        }
        if received.bytes == 0 {
            return Ok(None);
        }
        Ok(Some((parse(&bytes[..received.bytes])?, fds)))
    }
}

impl AsFd for Channel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// Receives past the error of a peer that closed without having read everything: its earlier messages are
/// still in the queue, behind that error, which the kernel reports once.
fn past_reset<T>(mut receive: impl FnMut() -> rustix::io::Result<T>) -> rustix::io::Result<T> {
    match rustix::io::retry_on_intr(&mut receive) {
        Err(rustix::io::Errno::CONNRESET) => rustix::io::retry_on_intr(receive),
        other => other,
    }
}

fn parse<T: DeserializeOwned>(bytes: &[u8]) -> io::Result<T> {
    if bytes.len() > MAX_MESSAGE {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "the message is over the limit"));
    }
    serde_json::from_slice(bytes).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
}

/// Fuzz body: parsing either side's messages ends without a panic, and a parsed request is equal after a
/// round trip.
pub fn fuzz_messages(data: &[u8]) {
    if let Ok(request) = parse::<Request>(data) {
        let bytes = serde_json::to_vec(&request).unwrap_or_default();
        assert_eq!(parse::<Request>(&bytes).ok(), Some(request));
    }
    let _ = parse::<Message>(data);
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
    use std::io::Read;

    fn pair() -> (Channel, Channel) {
        let (a, b) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
        (Channel::new(a), Channel::new(b))
    }

    #[test]
    fn descriptors_arrive_with_the_message_that_names_them() {
        let (ours, theirs) = pair();
        let (reader, writer) = std::io::pipe().unwrap();
        ours.send(&Request::Status, &[reader.as_fd()]).unwrap();
        drop(reader);
        let (request, fds) = theirs.recv::<Request>().unwrap().unwrap();
        assert_eq!(request, Request::Status);
        std::io::Write::write_all(&mut { writer }, b"x").unwrap();
        let mut text = String::new();
        std::fs::File::from(fds.into_iter().next().unwrap()).read_to_string(&mut text).unwrap();
        assert_eq!(text, "x");
    }

    #[test]
    fn a_closed_peer_is_an_end_and_garbage_is_an_error() {
        let (ours, theirs) = pair();
        rustix::net::send(&ours, b"{\"nonsense\":1}", SendFlags::empty()).unwrap();
        assert!(theirs.recv::<Request>().is_err());
        drop(ours);
        assert!(theirs.recv::<Request>().unwrap().is_none());
    }

    #[test]
    fn the_last_words_of_a_peer_that_read_nothing_arrive() {
        let spoken = || {
            let (ours, theirs) = pair();
            ours.send(&Request::Status, &[]).unwrap();
            theirs.send(&Request::Freeze, &[]).unwrap();
            (ours, theirs)
        };
        let (ours, theirs) = spoken();
        drop(theirs);
        assert!(matches!(ours.recv::<Request>().unwrap(), Some((Request::Freeze, _))));
        assert!(ours.recv::<Request>().unwrap().is_none());
        // The reset may also come between the look at the message and its taking.
        let (ours, theirs) = spoken();
        let length = ours.next_length().unwrap();
        drop(theirs);
        assert!(matches!(ours.take::<Request>(length).unwrap(), Some((Request::Freeze, _))));
        assert!(ours.recv::<Request>().unwrap().is_none());
    }

    #[test]
    fn a_request_with_an_unknown_field_is_refused() {
        assert!(parse::<Request>(br#"{"hello":{"version":1,"extra":2}}"#).is_err());
        assert!(parse::<Request>(br#"{"surprise":{}}"#).is_err());
    }

    #[test]
    fn what_fuzzing_found_stays_harmless() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fuzz/corpus/control_messages");
        let inputs: Vec<_> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
        assert!(!inputs.is_empty(), "{folder} is empty");
        inputs.iter().for_each(|path| fuzz_messages(&std::fs::read(path).unwrap()));
    }
}
