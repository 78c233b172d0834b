//! Puts pieces of slices into frames, and frames on connections.

use te_core::Op;
use zerocopy::IntoBytes;
use zerocopy::little_endian::{U32, U64};

use super::connection::OwnConnection;
use super::slices::Slices;
use super::staged::Stagings;
use crate::config::Config;
use crate::connection::Source;
use crate::frame::{CHECKSUM_BYTES_MAX, ENTRIES_MAX, FLAG_CHECKSUM, Header, Kind, Operation};
use crate::operation::{Piece, Stage};
use crate::peers::Endpoint;
use crate::sys::{Memory, Pinned};

/// A frame takes further operations while its payloads have fewer bytes than this.
const FRAME_BYTES: u64 = 256 << 10;
const _: () = assert!(FRAME_BYTES <= CHECKSUM_BYTES_MAX as u64);

const EMPTY: Operation = Operation {
    region: U32::ZERO,
    generation: U32::ZERO,
    key: U64::ZERO,
    offset: U64::ZERO,
    len: U64::ZERO,
    crc: U32::ZERO,
    reserved: U32::ZERO,
};

/// Scratch space in which frames are assembled, one after the other.
#[derive(Debug)]
pub(super) struct Frame {
    entries: Box<[Operation; ENTRIES_MAX]>,
    /// The payload of each filled entry. Empty between frames.
    memory: Vec<Pinned>,
}

impl Frame {
    pub(super) fn new() -> Self {
        Self { entries: Box::new([EMPTY; ENTRIES_MAX]), memory: Vec::with_capacity(ENTRIES_MAX) }
    }

    /// Moves pieces of one kind from the queues of `peer` to `connection`, in one frame. Returns false when
    /// there was no such piece.
    pub(super) fn send(
        &mut self,
        kind: Op,
        peer: &mut Endpoint,
        connection: &mut OwnConnection,
        slices: &mut Slices,
        staging: &Stagings,
        config: &Config,
    ) -> bool {
        let first = connection.role.next();
        self.fill(kind, peer, connection, slices, staging, config);
        let count = self.memory.len();
        if count == 0 {
            return false;
        }
        let flags = if config.checksum { FLAG_CHECKSUM } else { 0 };
        let wire_kind = if kind == Op::Read { Kind::Read } else { Kind::Write };
        let header = Header::new(wire_kind, flags, count as u16, first);
        let at = connection.outbox.push_head(&[header.as_bytes(), self.entries[..count].as_bytes()]);
        let mut entry_at = at + size_of::<Header>() as u64;
        let pieces = connection.role.pieces_from(first).zip(self.memory.drain(..));
        for ((piece, part), seq) in pieces.zip(first..) {
            piece.entry_at = entry_at;
            entry_at += size_of::<Operation>() as u64;
            if kind == Op::Write {
                connection.outbox.push_payload(part, Source::Piece(seq));
            }
        }
        true
    }

    /// Adds pieces to the frame while the next one is of this kind and fits.
    fn fill(
        &mut self,
        kind: Op,
        peer: &mut Endpoint,
        connection: &mut OwnConnection,
        slices: &mut Slices,
        staging: &Stagings,
        config: &Config,
    ) {
        let piece_bytes_max = match config.checksum {
            true => config.piece_bytes_max.min(CHECKSUM_BYTES_MAX),
            false => config.piece_bytes_max,
        };
        let with_crc = kind == Op::Write && config.checksum;
        let mut bytes = 0;
        while self.memory.len() < ENTRIES_MAX
            && let ready = peer.ready.front().copied()
            && let Some(slot) = ready.map(|piece| piece.slot).or(peer.pending.first())
            && let Some(operation) = slices.get(slot)
            && operation.op == kind
        {
            let (offset, len) = match ready {
                Some(piece) => (piece.offset, piece.len),
                None => (operation.issued, (operation.len - operation.issued).min(piece_bytes_max)),
            };
            if !self.memory.is_empty() && bytes + u64::from(len) > FRAME_BYTES {
                break;
            }
            let Some(remote) = slices.remote_region(operation.remote_region) else { break };
            let staged = ready.and_then(|piece| piece.staged);
            let part = match staged {
                None => {
                    let part = operation.ext.local.part(u64::from(offset), u64::from(len));
                    part.ok().and_then(Memory::host)
                }
                Some(staged) => staging.memory(staged, u64::from(len)),
            };
            let Some(part) = part else { break };
            self.entries[self.memory.len()] = Operation {
                region: U32::new(remote.region),
                generation: U32::new(remote.region_generation),
                key: U64::new(remote.key),
                offset: U64::new(operation.remote_offset + u64::from(offset)),
                len: U64::new(u64::from(len)),
                crc: U32::new(if with_crc { part.crc32c(0) } else { 0 }),
                reserved: U32::ZERO,
            };
            self.memory.push(part);
            connection.role.push(Piece {
                slot,
                len,
                offset,
                op: kind,
                stage: Stage::Framed,
                staged,
                entry_at: 0,
            });
            if ready.is_some() {
                // A piece of the `ready` queue was counted when it got its slot, or when another connection
                // took it.
                peer.ready.pop_front();
            } else {
                slices.issue(slot, len, peer);
            }
            bytes += u64::from(len);
        }
    }
}
