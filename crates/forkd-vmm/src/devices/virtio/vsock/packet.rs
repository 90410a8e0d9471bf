//! The header in front of every vsock packet.

use crate::devices::virtio::buffers::Buffers;

/// Size of a header in memory.
pub(super) const HEADER_SIZE: usize = 44;
/// The host's address.
pub(super) const HOST_CID: u64 = 2;
/// The only type of socket there is here: a stream.
pub(super) const TYPE_STREAM: u16 = 1;
/// In the flags of [`Op::Shutdown`]: the sender will take no more data.
pub(super) const SHUTDOWN_RECEIVE: u32 = 1;
/// In the flags of [`Op::Shutdown`]: the sender will send no more data.
pub(super) const SHUTDOWN_SEND: u32 = 2;

/// The operation of a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Op {
    /// Asks for a connection.
    Request,
    /// Accepts it.
    Response,
    /// Refuses or ends it.
    Reset,
    /// Closes one or both directions.
    Shutdown,
    /// Carries data.
    Data,
    /// Announces how much room there is.
    CreditUpdate,
    /// Asks how much room there is.
    CreditRequest,
}

impl Op {
    const ALL: [Op; 7] =
        [Op::Request, Op::Response, Op::Reset, Op::Shutdown, Op::Data, Op::CreditUpdate, Op::CreditRequest];

    fn from_wire(value: u16) -> Option<Op> {
        Op::ALL.get(usize::from(value).checked_sub(1)?).copied()
    }

    fn to_wire(self) -> u16 {
        self as u16 + 1
    }
}

/// A header.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Header {
    /// Address of the sender.
    pub(super) src_cid: u64,
    /// Address of the receiver.
    pub(super) dst_cid: u64,
    /// Port of the sender.
    pub(super) src_port: u32,
    /// Port of the receiver.
    pub(super) dst_port: u32,
    /// Bytes of data that follow.
    pub(super) len: u32,
    /// Type of socket.
    pub(super) socket_type: u16,
    /// Its operation; `None` for an undefined one.
    pub(super) op: Option<Op>,
    /// For [`Op::Shutdown`].
    pub(super) flags: u32,
    /// Size of the sender's receive buffer.
    pub(super) buf_alloc: u32,
    /// How many bytes the sender has passed on from it since the connection began, wrapping.
    pub(super) fwd_cnt: u32,
}

impl Header {
    /// Takes a header off `buffers`; `None` if they are too short for one.
    pub(super) fn take_from(buffers: &mut Buffers<'_>) -> Option<Header> {
        let mut bytes = [0; HEADER_SIZE];
        if !buffers.split_to(HEADER_SIZE)?.copy_to(&mut bytes) {
            return None;
        }
        Some(Header {
            src_cid: u64::from_le_bytes(field(&bytes, 0)),
            dst_cid: u64::from_le_bytes(field(&bytes, 8)),
            src_port: u32::from_le_bytes(field(&bytes, 16)),
            dst_port: u32::from_le_bytes(field(&bytes, 20)),
            len: u32::from_le_bytes(field(&bytes, 24)),
            socket_type: u16::from_le_bytes(field(&bytes, 28)),
            op: Op::from_wire(u16::from_le_bytes(field(&bytes, 30))),
            flags: u32::from_le_bytes(field(&bytes, 32)),
            buf_alloc: u32::from_le_bytes(field(&bytes, 36)),
            fwd_cnt: u32::from_le_bytes(field(&bytes, 40)),
        })
    }

    /// The header as it goes into memory.
    pub(super) fn to_bytes(&self) -> [u8; HEADER_SIZE] {
        let mut bytes = [0; HEADER_SIZE];
        bytes[0..8].copy_from_slice(&self.src_cid.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.dst_cid.to_le_bytes());
        bytes[16..20].copy_from_slice(&self.src_port.to_le_bytes());
        bytes[20..24].copy_from_slice(&self.dst_port.to_le_bytes());
        bytes[24..28].copy_from_slice(&self.len.to_le_bytes());
        bytes[28..30].copy_from_slice(&self.socket_type.to_le_bytes());
        bytes[30..32].copy_from_slice(&self.op.map_or(0, Op::to_wire).to_le_bytes());
        bytes[32..36].copy_from_slice(&self.flags.to_le_bytes());
        bytes[36..40].copy_from_slice(&self.buf_alloc.to_le_bytes());
        bytes[40..44].copy_from_slice(&self.fwd_cnt.to_le_bytes());
        bytes
    }

    /// The reset that answers this packet.
    pub(super) fn reset(&self) -> Header {
        Header {
            src_cid: self.dst_cid,
            dst_cid: self.src_cid,
            src_port: self.dst_port,
            dst_port: self.src_port,
            len: 0,
            socket_type: self.socket_type,
            op: Some(Op::Reset),
            flags: 0,
            buf_alloc: 0,
            fwd_cnt: 0,
        }
    }
}

fn field<const N: usize>(bytes: &[u8; HEADER_SIZE], at: usize) -> [u8; N] {
    std::array::from_fn(|index| bytes[at + index])
}
