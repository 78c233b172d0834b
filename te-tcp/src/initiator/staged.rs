//! Slices whose local memory is a device's: their pieces get staging slots before connections see them.
//!
//! ```text
//!   WRITE   unstaged ──▶ slot ──▶ hop ──▶ ready ──▶ connection ──▶ answer ──▶ slot given back
//!   READ    unstaged ──▶ slot ──▶ ready ──▶ connection ──▶ payload ──▶ hop ──▶ slot given back
//! ```
//!
//! A piece has its slot from before it is framed until its last use, and is no longer than the slot. So what
//! is on a connection never waits for a slot, and connections, cancels and closed connections treat its bytes
//! like any host memory.

use te_core::Location;
use te_core::device::{Devices, HopDirection};

use super::*;
use crate::connection::Destination;
use crate::frame::CHECKSUM_BYTES_MAX;
use crate::operation::{Piece, Stage};
use crate::staging::{SlotId, Staging};
use crate::sys::Reach;

/// A piece whose hop runs, and its peer.
pub(super) struct Hopping {
    pub(super) peer: u32,
    pub(super) piece: Piece,
}

/// The staging slots and hops of an initiator.
pub(super) type Stagings = Staging<Hopping>;

impl Initiator {
    /// Prepares for slices on memory at this location.
    ///
    /// # Errors
    /// Those of [`Devices::stager`].
    pub(crate) fn prepare(&mut self, location: Location, devices: &dyn Devices) -> Result<(), Error> {
        self.staging.prepare(location, devices)
    }

    /// Slots that pieces hold.
    #[cfg(feature = "testkit")]
    pub(crate) fn slots_taken(&self) -> usize {
        self.staging.slots_taken()
    }

    /// Takes in the hops that have ended, and gives slots to pieces that wait for one.
    pub(crate) fn run_staging(&mut self, peers: &mut Peers, cx: &mut Context<'_>) {
        self.staging.collect();
        while let Some(end) = self.staging.next_end() {
            self.hop_ended(end.slot, &end.tag, end.result, peers, cx);
        }
        self.give_slots(peers, cx);
        self.staging.flush();
        cx.timers.wake_if(self.staging.is_hopping());
    }

    fn hop_ended(
        &mut self,
        staged: SlotId,
        Hopping { peer: number, piece }: &Hopping,
        result: Result<(), Error>,
        peers: &mut Peers,
        cx: &mut Context<'_>,
    ) {
        self.slices.hop_ended(piece.slot);
        if piece.op == Op::Write
            && result.is_ok()
            && self.slices.device_part(piece).is_some()
            && let Some(peer) = peers.get_mut(*number)
        {
            peer.ready.push_back(*piece);
            peers.list(*number, cx.timers);
            return;
        }
        self.staging.give_back(staged);
        if piece.op == Op::Read && result.is_ok() {
            self.slices.landed(piece);
        }
        self.slices.settle(piece.slot, result.err(), false, peers, cx.regions);
        self.slices.end_cancel_after_hop(piece.slot, peers, cx.regions);
    }

    /// Gives out free slots in rounds: one per round to each peer whose slices wait for one and whose share
    /// allows it. Each call begins with another peer.
    fn give_slots(&mut self, peers: &mut Peers, cx: &mut Context<'_>) {
        let bound = peers.bound();
        self.first_served = self.first_served.wrapping_add(1);
        let first = self.first_served;
        let mut some = bound > 0;
        while some {
            some = false;
            for at in 0..bound {
                some |= self.give_slot((first % bound + at) % bound, peers, cx);
            }
        }
    }

    /// Gives a slot to the next piece for this peer. Returns false when no piece waits, no slot is free, or
    /// the peer has its share.
    fn give_slot(&mut self, number: u32, peers: &mut Peers, cx: &mut Context<'_>) -> bool {
        let Some(peer) = peers.get_mut(number) else { return false };
        let Some((slot, operation)) =
            peer.unstaged.first().and_then(|slot| Some((slot, *self.slices.get(slot)?)))
        else {
            return false;
        };
        let Reach::Device(local) = operation.ext.local.reach() else { return false };
        let Some(staged) = self.staging.take_share(local.location(), number) else { return false };
        let longest = match cx.config.checksum {
            true => cx.config.piece_bytes_max.min(CHECKSUM_BYTES_MAX),
            false => cx.config.piece_bytes_max,
        };
        let (offset, op) = (operation.issued, operation.op);
        let len = (operation.len - offset).min(longest).min(self.staging.slot_bytes(local.location()));
        let piece = Piece { slot, len, offset, op, stage: Stage::Framed, staged: Some(staged), entry_at: 0 };
        self.slices.issue(slot, len, peer);
        if op == Op::Read {
            peer.ready.push_back(piece);
            peers.list(number, cx.timers);
        } else if let Ok(device) = local.part(u64::from(offset), u64::from(len)) {
            self.slices.hop_begins(slot);
            self.staging.start(staged, device, HopDirection::ToHost, Hopping { peer: number, piece });
        }
        true
    }
}

/// Takes in a piece of a READ whose bytes are all in its slot, or which was refused. Returns true when a hop
/// to the device was started; the piece is settled when that has ended.
#[inline(never)]
pub(super) fn land(
    staged: SlotId,
    peer: u32,
    piece: Piece,
    destination: &Destination,
    staging: &mut Stagings,
    slices: &mut Slices,
) -> bool {
    let arrived = destination.memory.is_some() && destination.status == 0 && destination.is_intact();
    match slices.device_part(&piece).filter(|_| arrived) {
        Some(device) => {
            slices.hop_begins(piece.slot);
            staging.start(staged, device, HopDirection::ToDevice, Hopping { peer, piece });
            true
        }
        None => {
            staging.give_back(staged);
            false
        }
    }
}

/// Gives back the slot of a piece that is settled, if it has one.
#[inline]
pub(super) fn release(piece: &Piece, staging: &mut Stagings) {
    if let Some(staged) = piece.staged {
        staging.give_back(staged);
    }
}
