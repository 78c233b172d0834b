//! Reads of objects that are on disks of nodes: their nodes read them into memory first ([`crate::stage`]),
//! or this client reads them where the disk is exported ([`crate::direct`]).
//!
//! ```text
//!   GetOp ── Transfer from a disk ──▶ StageConnections ── staged ──▶ mover, as from memory ──▶ GetOp
//!                                          └── refused, or too late ────────────────────────▶ GetOp
//! ```
//!
//! The reads from memory of the same operation go on meanwhile. An object that its disk does not deliver by
//! the deadline is read from another replica, if it has one, or is a miss. From there on it is a read from
//! memory like others, and ends with the lease.
//!
//! What a node says is not there is not reported to the master: the node has told it, and is believed
//! (`crate::node`); a reader would not be.

use std::time::{Duration, Instant};

use store_core::ErrorCode;
use store_core::client::{Transfer, TransferEnd};
use store_core::message::StageItem;
use te_core::Outcome;
use te_engine::SegmentHandle;

use super::Client;
use super::packs::{Origin, Packs};
use crate::config::ClientConfig;
use crate::direct::NotDirect;
use crate::mover::Buffers;
use crate::stage::{StageConnections, StageEnd, StagedAt, Wanted};

/// How long to wait for a fabric before disks are asked again, while both are under way.
const SLICE: Duration = Duration::from_micros(200);

/// The item was read from a disk.
const READ: u8 = 1;
/// A disk did not deliver the item.
pub(super) const MISSED: u8 = 2;
/// It was read from a pack by this client.
const DIRECT: u8 = 4;
/// It was read from an exported disk by this client.
const EXPORTED: u8 = 8;

/// The objects of an operation that are read from disks.
pub(super) struct Staging {
    connections: StageConnections<Pending>,
    /// Transfers from staging memory that are under way.
    reading: Vec<(u32, StagedAt)>,
    ends: Vec<StageEnd<Pending>>,
    /// What is known about each item, up to the last one that was on a disk.
    items: Vec<u8>,
    /// How long an operation waits for disks.
    pub(super) patience: Duration,
    /// Until when this operation does, once it has asked.
    pub(super) deadline: Option<Instant>,
    pub(super) packs: Packs,
}

/// A read that waits for a disk.
struct Pending {
    transfer: Transfer,
    staging: SegmentHandle,
}

impl Staging {
    pub(super) fn new(config: &ClientConfig) -> Self {
        let shun = Duration::from_millis(config.unreachable_ms.into());
        Self {
            connections: StageConnections::new(config.rpc, config.identity.cluster_secret(), shun),
            reading: Vec::new(),
            ends: Vec::new(),
            items: Vec::new(),
            patience: Duration::from_millis(config.disk_deadline_ms.into()),
            deadline: None,
            packs: Packs::new(config),
        }
    }

    pub(super) fn begin(&mut self) {
        self.items.clear();
        self.packs.forget();
        self.deadline = None;
    }

    /// Sends what the operation has released.
    pub(super) fn finish(&mut self) {
        if self.deadline.is_some() {
            self.connections.flush();
        }
    }

    pub(super) const fn is_idle(&self) -> bool {
        self.connections.is_idle() && self.packs.is_idle()
    }

    /// Stops waiting for the disk that a transfer waits for.
    pub(super) fn cancel(&mut self, id: u32) {
        let is = |pending: &Pending| pending.transfer.id == id;
        self.packs.cancel(id);
        self.connections.give_up(ErrorCode::LeaseExpired, is, &mut self.ends);
    }

    pub(super) fn abandon(&mut self) {
        self.packs.forget();
        self.connections.abandon();
        self.reading.clear();
        self.ends.clear();
    }

    /// Whether an item was read from a disk.
    pub(super) fn was_read(&self, item: usize) -> bool {
        self.items.get(item).is_some_and(|known| known & READ != 0)
    }

    /// Whether an item was read from a pack, without its node.
    pub(super) fn was_read_direct(&self, item: usize) -> bool {
        self.items.get(item).is_some_and(|known| known & (READ | DIRECT) == READ | DIRECT)
    }

    /// Whether an item was read from an exported disk, past its node.
    pub(super) fn was_read_exported(&self, item: usize) -> bool {
        self.items.get(item).is_some_and(|known| known & (READ | EXPORTED) == READ | EXPORTED)
    }

    /// Whether the disk that had an item did not deliver it.
    pub(super) fn was_missed(&self, item: usize) -> bool {
        self.items.get(item).is_some_and(|known| known & MISSED != 0)
    }

    /// Another replica of an item is read.
    pub(super) fn read_again(&mut self, item: u32) {
        if let Some(known) = self.items.get_mut(item as usize) {
            *known &= !(READ | DIRECT | EXPORTED);
        }
    }

    pub(super) fn note(&mut self, item: u32, known: u8) {
        let item = item as usize;
        if self.items.len() <= item {
            self.items.resize(item + 1, 0);
        }
        self.items[item] |= known;
    }
}

impl Client {
    /// Reads an object from its disk: past its node where the disk is exported, else from where the node has
    /// read it to. Returns whether the read is not the first transfer of its item, as far as it has begun.
    pub(super) fn read_from_disk(
        &mut self,
        transfer: Transfer,
        staging: SegmentHandle,
        service: u32,
        buffers: &Buffers<'_, '_>,
    ) -> bool {
        if !self.get.handle_disk(transfer.id) {
            return false;
        }
        if self.read_exported(transfer, staging, service) {
            return false;
        }
        self.stage(transfer, staging, service, buffers)
    }

    /// As [`read_from_disk`](Self::read_from_disk), for a read that has its turn.
    pub(super) fn stage(
        &mut self,
        transfer: Transfer,
        staging: SegmentHandle,
        service: u32,
        buffers: &Buffers<'_, '_>,
    ) -> bool {
        let now = Instant::now();
        let patience = self.staging.patience;
        let deadline = *self.staging.deadline.get_or_insert(now + patience);
        if deadline <= now {
            self.staging.note(transfer.item, MISSED);
            return self.mover.start(transfer, None, buffers);
        }
        let line = self.staging.connections.line(self.segments.service(service));
        let item = StageItem { disk: transfer.segment, locator: transfer.addr, len: transfer.len };
        let what = Pending { transfer, staging };
        self.staging.connections.want(line, Wanted { item, deadline, what });
        false
    }

    /// Sends requests to disks, and starts the reads of what they have delivered. Returns whether anything
    /// happened.
    pub(super) fn pump_staging(&mut self, buffers: &Buffers<'_, '_>) -> bool {
        let staging = &mut self.staging;
        if staging.is_idle() && staging.ends.is_empty() {
            return false;
        }
        let read = self.pump_packs(buffers);
        let staging = &mut self.staging;
        staging.connections.poll(&mut staging.ends);
        let mut ends = std::mem::take(&mut staging.ends);
        let any = !ends.is_empty() | read;
        for StageEnd { what: Pending { transfer, staging }, result } in ends.drain(..) {
            match result {
                Ok(staged) => {
                    self.staging.reading.push((transfer.id, staged));
                    let transfer = Transfer { addr: staged.addr, ..transfer };
                    if self.mover.start(transfer, Some(staging), buffers) {
                        self.counters.replica_failovers += 1;
                    }
                }
                Err(error) => {
                    log::debug!(
                        "operation {}: disk {} does not deliver an object: {error}",
                        self.trace(),
                        transfer.segment
                    );
                    if error == ErrorCode::SegmentNotFound {
                        // The node knows the disk by another number now.
                        let shun = Duration::from_millis(self.config.unreachable_ms.into());
                        self.segments.failed(transfer.segment, &mut self.engine, shun);
                    }
                    self.staging.note(transfer.item, MISSED);
                    self.mover.start(transfer, None, buffers);
                }
            }
        }
        // Keeps its memory for the next operation.
        self.staging.ends = ends;
        any
    }

    /// The end of a transfer, if it was from staging memory: what was read too late does not count. `None`:
    /// it was from an exported disk and is not what was committed; its node reads it instead.
    pub(super) fn staged_end(
        &mut self,
        transfer: &Transfer,
        end: TransferEnd,
        buffers: &Buffers<'_, '_>,
    ) -> Option<TransferEnd> {
        let applied = end.outcome == Outcome::Applied;
        let staging = &mut self.staging;
        match staging.packs.take_image(transfer.id) {
            Some(Origin::Packs(_)) => {
                staging.note(transfer.item, if applied { READ | DIRECT } else { MISSED });
                return Some(end);
            }
            Some(Origin::Disk { staging: memory, service }) if applied => {
                if !self.get.is_intact(transfer.id, &end) {
                    self.not_direct(transfer, NotDirect::Damaged);
                    self.stage(*transfer, memory, service, buffers);
                    return None;
                }
                self.staging.note(transfer.item, READ | EXPORTED);
                return Some(end);
            }
            Some(Origin::Disk { .. }) => {
                staging.note(transfer.item, MISSED);
                return Some(end);
            }
            None => {}
        }
        if staging.reading.is_empty() {
            return Some(end);
        }
        let Some(at) = staging.reading.iter().position(|(id, _)| *id == transfer.id) else {
            return Some(end);
        };
        let (_, staged) = staging.reading.swap_remove(at);
        let valid = staging.connections.is_valid(&staged, &mut staging.ends);
        // A read that failed may still be under way: the memory is not used for another object meanwhile.
        staging.connections.release(&staged, applied);
        let counts = applied && valid;
        staging.note(transfer.item, if counts { READ } else { MISSED });
        Some(if counts || !applied { end } else { TransferEnd::not_applied() })
    }

    /// Waits until there may be progress, while objects are waited for that are on disks.
    pub(super) fn wait_staging(&mut self, until: Instant) {
        if !self.staging.packs.is_idle() {
            // Files answer here, nodes on sockets, and fabrics elsewhere.
            let alone = self.mover.is_idle() && self.staging.connections.is_idle();
            let slice = if alone { until } else { until.min(Instant::now() + SLICE) };
            self.staging.packs.wait(slice);
        } else if self.mover.is_idle() {
            self.staging.connections.wait(until);
        } else {
            self.mover.wait(&mut self.engine, until.min(Instant::now() + SLICE));
        }
    }
}
