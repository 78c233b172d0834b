//! The thread of a disk: carries requests to the core, orders to the driver, and events to the owner.

use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use store_core::chunks::stored_len;
use store_core::disk::{
    Demote as CoreDemote, Disk, End, Event, Order, Piece, Stage as CoreStage, State, Target, Work,
};
use te_core::Instant as CoreInstant;

use super::bell::Bell;
use super::clock::Clock;
use super::driver::{Completion, Destination, Driver, Io, IoWork, Part};
use super::held::{LentMemory, Use};
use super::inbox::Command;
use super::meter::{Meter, OpKind};
use super::outbox::Outbox;
use super::request::{Demote, DiskEvent, NotDone, Stage};
use super::shared::{Last, Shared};
use super::sys::AlignedBuffer;

/// Requests that are taken before completions are looked for again.
const COMMANDS_PER_TURN: usize = 128;
/// The sync before the end, which the core does not know.
const LAST_SYNC: u64 = u64::MAX;

pub(super) struct Shell {
    pub(super) clock: Clock,
    pub(super) disk: Disk,
    pub(super) driver: Box<dyn Driver>,
    pub(super) bell: Bell,
    pub(super) outbox: Arc<Outbox>,
    pub(super) shared: Arc<Shared>,
    /// What the owner has lent.
    pub(super) lent: LentMemory,
    /// Events of the core that wait for room in the outbox.
    pub(super) withheld: bool,
    pub(super) meter: Meter,
    /// Which extents others were told of, as the core counts.
    pub(super) told_extents: u64,
}

impl Shell {
    /// The thread. Until the disk is closed it waits for nothing but its bell.
    pub(super) fn run(mut self) {
        let (shared, outbox) = (Arc::clone(&self.shared), Arc::clone(&self.outbox));
        let mut last = Last { shared, outbox, clean: false };
        loop {
            let busy = self.turn();
            let closing = self.shared.inbox.is_closed();
            if closing && let Some(clean) = self.close() {
                last.clean = clean;
                break;
            }
            if self.meter.is_due() {
                self.measure();
            }
            let wait = self.meter.due_in();
            if !busy {
                self.bell.wait(wait.into_iter().chain(self.due_in()).chain(self.close_in(closing)).min());
            }
        }
        self.measure();
        // The file is closed, and its lock released, before the owner is told.
        drop(self);
        drop(last);
    }

    /// One round. Returns whether there may be more to do at once.
    fn turn(&mut self) -> bool {
        while let Some(completion) = self.driver.poll() {
            self.complete(completion);
        }
        let mut taken = 0;
        while taken < COMMANDS_PER_TURN && self.outbox.has_room() {
            let Some(command) = self.shared.inbox.pop() else { break };
            self.obey(command);
            taken += 1;
        }
        let now = self.clock.now();
        if self.disk.poll_at().is_some_and(|at| at <= now) {
            self.disk.handle_timeout(now);
            self.meter.dirty = true;
        }
        self.pass_on();
        taken == COMMANDS_PER_TURN
    }

    /// Passes orders to the driver and events to the owner.
    fn pass_on(&mut self) {
        self.tell_extents();
        loop {
            self.pass_orders();
            while self.outbox.has_room()
                && let Some(event) = self.disk.poll_event()
            {
                self.meter.dirty = true;
                self.tell(event);
            }
            // A recovery pauses while its events wait; what follows was not ordered then.
            let paused = std::mem::replace(&mut self.withheld, !self.outbox.has_room());
            if !paused || self.withheld {
                return;
            }
            self.disk.handle_timeout(self.clock.now());
        }
    }

    fn pass_orders(&mut self) {
        let mut ordered = false;
        while let Some(order) = self.disk.poll_order() {
            ordered = true;
            let (op, kind) = (order.op, OpKind::of(&order.work));
            self.meter.begin(op, kind);
            let io = self.resolve(order);
            self.driver.submit(io);
        }
        if ordered {
            self.meter.dirty = true;
            self.driver.flush();
        }
    }

    /// Names the memory of an order.
    fn resolve(&self, order: Order) -> Io {
        let Order { op, offset, work } = order;
        let lent = |token: &u64| self.lent.share(*token);
        let work = match work {
            Work::Write(pieces) => {
                let part = |piece: Piece| match piece {
                    Piece::Bytes(bytes, from) => Part::Bytes(bytes, from),
                    Piece::Zeros(bytes) => Part::Zeros(bytes),
                    // Memory is held until the request is answered, and the core answers after the write.
                    Piece::Source { token, offset, bytes } => match lent(&token) {
                        Some(memory) => Part::Lent { memory, offset, bytes },
                        None => Part::Zeros(bytes),
                    },
                };
                IoWork::Write(pieces.into_iter().map(part).collect())
            }
            Work::Read { bytes, into: Target::Buffer { token, offset } } => {
                let buffer = || Destination::Buffer(AlignedBuffer::new(bytes as usize));
                let memory = lent(&token);
                let lent = memory.map(|memory| Destination::Lent { memory, offset, bytes });
                IoWork::Read(lent.unwrap_or_else(buffer))
            }
            Work::Read { bytes, into: Target::Completion } => {
                IoWork::Read(Destination::Buffer(AlignedBuffer::new(bytes as usize)))
            }
            Work::Sync => IoWork::Sync,
        };
        Io { op, offset, work }
    }

    fn complete(&mut self, completion: Completion) {
        let Completion { op, result, data } = completion;
        self.meter.dirty = true;
        self.meter.end(op);
        let end = match result {
            Ok(bytes) => End::Done { bytes, data: data.as_deref().unwrap_or_default() },
            Err(error) => {
                log::warn!("an operation of the disk failed: errno {}", error.errno);
                End::Failed(error.kind)
            }
        };
        self.disk.complete(self.clock.now(), op, end);
    }

    fn obey(&mut self, command: Command) {
        let now = self.clock.now();
        self.meter.dirty = true;
        match command {
            Command::Demote(request) => self.demote(now, *request),
            Command::Stage(request) => self.stage(now, request),
            Command::Forget(object, locator) => {
                if let Err(why) = self.disk.forget(now, object.clone(), locator) {
                    self.outbox.push(DiskEvent::ForgetRefused { object, why });
                }
            }
            Command::Reclaimed(sequence) => self.disk.reclaimed(now, sequence),
            Command::RepeatReclaims => {
                for sequence in self.disk.unanswered_reclaims() {
                    self.outbox.push(DiskEvent::Reclaim { sequence });
                }
            }
            Command::Clear => {
                if let Err(why) = self.disk.clear(now) {
                    self.outbox.push(DiskEvent::ClearRefused(why));
                }
            }
            Command::Lineage(lineage) => {
                self.disk.set_lineage(lineage);
                self.disk.handle_timeout(now);
            }
            Command::Wear(bytes_per_s) => {
                self.disk.set_wear_limit(bytes_per_s);
                self.disk.handle_timeout(now);
            }
        }
        // The core expects its orders to be taken after every call.
        self.pass_orders();
    }

    fn demote(&mut self, now: CoreInstant, request: Demote) {
        let Demote { id, tenant, key, generation, len, crc32c, stream, source } = request;
        let bytes = stored_len(len);
        if !source.holds(bytes) {
            return self.outbox.push(DiskEvent::DemoteFailed {
                id,
                why: NotDone::Memory,
                source: Some(source),
            });
        }
        let token = self.lent.hold(id, source, bytes, Use::Source);
        let request = CoreDemote { id: token, tenant, key, generation, len, crc32c, stream, token };
        if let Err(why) = self.disk.demote(now, request) {
            let source = self.lent.release(token);
            self.outbox.push(DiskEvent::DemoteFailed { id, why: NotDone::Refused(why), source });
        }
    }

    fn stage(&mut self, now: CoreInstant, request: Stage) {
        let Stage { id, locator, len, deadline, buffer } = request;
        let bytes = u64::from(self.disk.geometry().image_bytes(len));
        if !buffer.holds(bytes) {
            return self.outbox.push(DiskEvent::ReadFailed {
                id,
                why: NotDone::Memory,
                buffer: Some(buffer),
            });
        }
        let token = self.lent.hold(id, buffer, bytes, Use::Buffer);
        let deadline = self.clock.of(deadline);
        if let Err(why) = self.disk.stage(now, CoreStage { id: token, locator, len, token, deadline }) {
            let buffer = self.lent.release(token);
            self.outbox.push(DiskEvent::ReadFailed { id, why: NotDone::Refused(why), buffer });
        }
    }

    fn tell(&mut self, event: Event) {
        let event = match event {
            Event::Adopt { lineage, objects } => DiskEvent::Adopt { lineage, objects },
            Event::Ready => {
                self.meter.recovered();
                // The owner may look at once.
                self.measure();
                DiskEvent::Ready
            }
            Event::Distrusted => DiskEvent::Distrusted,
            Event::Demoted { id: token, locator } => {
                let id = self.lent.id_of(token);
                match self.lent.release(token) {
                    Some(source) => DiskEvent::Demoted { id, locator, source },
                    // Only a driver that breaks its contract.
                    None => DiskEvent::DemoteFailed { id, why: NotDone::Memory, source: None },
                }
            }
            Event::DemoteFailed { id: token, why } => {
                let id = self.lent.id_of(token);
                DiskEvent::DemoteFailed { id, why: NotDone::Failed(why), source: self.lent.release(token) }
            }
            Event::Staged { id: token } => {
                let id = self.lent.id_of(token);
                match self.lent.release(token) {
                    Some(buffer) => DiskEvent::Staged { id, buffer },
                    None => DiskEvent::ReadFailed { id, why: NotDone::Memory, buffer: None },
                }
            }
            Event::ReadFailed { id: token, why, buffer_free } => {
                let id = self.lent.id_of(token);
                self.lent.answered(token);
                let buffer = if buffer_free { self.lent.release(token) } else { None };
                DiskEvent::ReadFailed { id, why: NotDone::Failed(why), buffer }
            }
            Event::BufferFree { token } => {
                let id = self.lent.id_of(token);
                match self.lent.release(token) {
                    Some(buffer) => DiskEvent::BufferFree { id, buffer },
                    None => return,
                }
            }
            Event::Forgotten(object) => DiskEvent::Forgotten(object),
            Event::Reclaim { sequence } => DiskEvent::Reclaim { sequence },
            Event::Dropped { from, to } => DiskEvent::Dropped { from, to },
            Event::Cleared => DiskEvent::Cleared,
            Event::Stopped(why) => {
                self.measure();
                DiskEvent::Stopped(why)
            }
        };
        self.outbox.push(event);
    }

    /// Tells others where extents are, before anything about objects in them.
    fn tell_extents(&mut self) {
        let version = self.disk.extents_version();
        if self.told_extents == version || !self.shared.locates.load(Ordering::Relaxed) {
            return;
        }
        self.told_extents = version;
        let extents = self.disk.extents().collect();
        *self.shared.extents.write().unwrap_or_else(PoisonError::into_inner) = extents;
    }

    fn due_in(&self) -> Option<Duration> {
        self.disk.poll_at().map(|at| at - self.clock.now())
    }

    fn close_in(&self, closing: bool) -> Option<Duration> {
        let by = (*self.shared.close_by.lock().unwrap_or_else(PoisonError::into_inner)).filter(|_| closing);
        by.map(|by| by.saturating_duration_since(Instant::now()))
    }

    /// Ends the work where that is possible now. Returns whether the end is a clean one.
    fn close(&mut self) -> Option<bool> {
        // What was sent before is part of the work.
        while self.outbox.has_room()
            && let Some(command) = self.shared.inbox.pop()
        {
            self.obey(command);
        }
        self.pass_on();
        let by = *self.shared.close_by.lock().unwrap_or_else(PoisonError::into_inner);
        let left = by.map_or(Duration::ZERO, |by| by.saturating_duration_since(Instant::now()));
        let idle = self.lent.is_empty() && self.disk.orders_in_flight() == 0;
        let opening = matches!(self.disk.state(), State::Opening | State::Adopting);
        let over = left.is_zero() || idle || opening && self.lent.is_empty();
        if !over {
            return None;
        }
        let synced = idle && !left.is_zero() && self.sync_at_last(left);
        self.lent.close().for_each(|event| self.outbox.push(event));
        Some(synced)
    }

    /// Makes durable what was written since the last sync of the core.
    fn sync_at_last(&mut self, left: Duration) -> bool {
        if !matches!(self.disk.state(), State::Ready) {
            return true;
        }
        let end = Instant::now() + left;
        self.driver.submit(Io { op: LAST_SYNC, offset: 0, work: IoWork::Sync });
        self.driver.flush();
        loop {
            if let Some(completion) = self.driver.poll() {
                if completion.op == LAST_SYNC {
                    return completion.result.is_ok();
                }
                continue;
            }
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            self.bell.wait(Some(left));
        }
    }

    /// Publishes the figures.
    fn measure(&mut self) {
        let stats = self.meter.measure(&self.disk, self.driver.name(), &self.lent);
        *self.shared.stats.lock().unwrap_or_else(PoisonError::into_inner) = stats;
    }
}
