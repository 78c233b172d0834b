//! Reservations: a slab of fixed size, with lists through it.

use alloc::boxed::Box;
use alloc::vec::Vec;

use te_core::Instant;

use super::projection::{Entry, Load};
use super::types::{ReservationId, Slo};
use crate::cost::PrefillWork;

/// No reservation, or no instance.
pub(super) const NONE: u32 = u32::MAX;

/// Where a reservation is in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// Not in use.
    Free,
    /// Waits for its prefill.
    Queued,
    /// Its prefill runs.
    Prefilling,
    /// Its prefill ended; its KV is on its way, or its first token is awaited.
    Prefilled,
    /// Its first token was seen.
    Decoding,
    /// An instance of it was lost.
    Orphan,
}

/// A transfer that occupies the NICs of two instances.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Booking {
    /// The instance that sends; [`NONE`] for the store.
    pub from: u32,
    /// The instance that receives.
    pub to: u32,
    /// Nanoseconds of the NICs.
    pub span: u64,
    /// When it should have left the sender, in nanoseconds.
    pub sent: u64,
    /// When it should end, in nanoseconds.
    pub end: u64,
}

/// A KV transfer to the decode instance that has not begun.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct PendingShip {
    /// Nanoseconds of the NICs.
    pub span: u64,
    /// The step in which the receiver expects it.
    pub step: u64,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Reservation {
    pub generation: u32,
    pub stage: Stage,
    pub model: u32,
    pub slo: Slo,
    pub arrival: Instant,
    /// When it was placed (again).
    pub placed: Instant,
    pub tokens: u32,
    pub output: u32,
    pub output_expected: u32,
    pub prefilled_before_loss: bool,
    /// Predicted nanoseconds from `placed` to the first token.
    pub ttft_predicted: u64,

    /// Slots of instances; [`NONE`] once lost.
    pub prefill: u32,
    pub decode: u32,

    /// In the queue of its prefill instance: what it costs there, and when.
    pub work: PrefillWork,
    pub prefill_ns: u64,
    pub occupancy_ns: u64,
    pub uncached: u32,
    /// When its KV is there, in nanoseconds.
    pub ready: u64,
    pub start: u64,
    pub end: u64,
    /// When its prefill was reported to have begun, and to have ended.
    pub started: Option<Instant>,
    pub prefilled: Option<Instant>,

    pub fetch: Option<Booking>,
    pub ship: Option<Booking>,
    pub ship_pending: Option<PendingShip>,
    pub load: Load,
    pub counted: Option<Entry>,
    /// Nanoseconds per step of its decode instance when it was placed.
    pub step_ns: u64,

    pub queue: Link,
    pub touched: Link,
    /// The last report, or its placement.
    pub touched_at: Instant,
}

impl Reservation {
    const EMPTY: Self = Self {
        generation: 0,
        stage: Stage::Free,
        model: 0,
        slo: Slo::NONE,
        arrival: Instant::ZERO,
        placed: Instant::ZERO,
        tokens: 0,
        output: 0,
        output_expected: 0,
        prefilled_before_loss: false,
        ttft_predicted: 0,
        prefill: NONE,
        decode: NONE,
        work: PrefillWork { prompts: 0.0, uncached: 0.0, squares: 0.0, reused: 0.0 },
        prefill_ns: 0,
        occupancy_ns: 0,
        uncached: 0,
        ready: 0,
        start: 0,
        end: 0,
        started: None,
        prefilled: None,
        fetch: None,
        ship: None,
        ship_pending: None,
        load: Load { sequences: 0, context: 0, kv: 0 },
        counted: None,
        step_ns: 0,
        queue: Link::NONE,
        touched: Link::NONE,
        touched_at: Instant::ZERO,
    };

    pub(super) const fn in_queue(&self) -> bool {
        matches!(self.stage, Stage::Queued | Stage::Prefilling)
    }
}

/// A place in a list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Link {
    previous: u32,
    next: u32,
}

impl Link {
    const NONE: Self = Self { previous: NONE, next: NONE };
}

/// A list of reservations, by slot.
#[derive(Clone, Copy, Debug)]
pub(super) struct List {
    head: u32,
    tail: u32,
    len: u32,
}

impl List {
    pub(super) const EMPTY: Self = Self { head: NONE, tail: NONE, len: 0 };

    pub(super) const fn len(&self) -> u32 {
        self.len
    }

    pub(super) const fn head(&self) -> Option<u32> {
        if self.head == NONE { None } else { Some(self.head) }
    }
}

/// Which link of a reservation a list uses.
type Of = fn(&mut Reservation) -> &mut Link;

pub(super) fn queue_link(reservation: &mut Reservation) -> &mut Link {
    &mut reservation.queue
}

fn touched_link(reservation: &mut Reservation) -> &mut Link {
    &mut reservation.touched
}

/// Every reservation.
#[derive(Debug)]
pub(super) struct Book {
    slots: Box<[Reservation]>,
    free: Vec<u32>,
    /// Those in use, the one without a report for longest first.
    touched: List,
    /// Those whose instance was lost and that no caller has taken yet; linked as queues are.
    orphans: List,
}

impl Book {
    pub(super) fn new(reservations: u32) -> Self {
        Self {
            slots: (0..reservations).map(|_| Reservation::EMPTY).collect(),
            free: (0..reservations).rev().collect(),
            touched: List::EMPTY,
            orphans: List::EMPTY,
        }
    }

    pub(super) fn in_use(&self) -> u32 {
        self.touched.len
    }

    pub(super) fn is_full(&self) -> bool {
        self.free.is_empty()
    }

    pub(super) fn capacity(&self) -> u32 {
        self.slots.len() as u32
    }

    /// The slot of `id`, if it still names a reservation.
    pub(super) fn find(&self, id: ReservationId) -> Option<u32> {
        let reservation = self.slots.get(id.slot as usize)?;
        (reservation.generation == id.generation && reservation.stage != Stage::Free).then_some(id.slot)
    }

    pub(super) fn id(&self, slot: u32) -> ReservationId {
        ReservationId { slot, generation: self.get(slot).generation }
    }

    pub(super) fn get(&self, slot: u32) -> &Reservation {
        &self.slots[slot as usize]
    }

    pub(super) fn get_mut(&mut self, slot: u32) -> &mut Reservation {
        &mut self.slots[slot as usize]
    }

    /// A slot with a new generation, last touched `now`.
    pub(super) fn take(&mut self, now: Instant) -> Option<u32> {
        let slot = self.free.pop()?;
        let reservation = &mut self.slots[slot as usize];
        let generation = reservation.generation.wrapping_add(1);
        *reservation = Reservation { generation, touched_at: now, ..Reservation::EMPTY };
        Self::push(&mut self.slots, &mut self.touched, slot, touched_link);
        Some(slot)
    }

    /// The former name of a reservation has no effect any more.
    pub(super) fn fence(&mut self, slot: u32) {
        let reservation = self.get_mut(slot);
        reservation.generation = reservation.generation.wrapping_add(1);
    }

    pub(super) fn give_back(&mut self, slot: u32) {
        Self::unlink(&mut self.slots, &mut self.touched, slot, touched_link);
        let reservation = &mut self.slots[slot as usize];
        reservation.generation = reservation.generation.wrapping_add(1);
        reservation.stage = Stage::Free;
        self.free.push(slot);
    }

    pub(super) fn touch(&mut self, slot: u32, now: Instant) {
        Self::unlink(&mut self.slots, &mut self.touched, slot, touched_link);
        Self::push(&mut self.slots, &mut self.touched, slot, touched_link);
        let reservation = self.get_mut(slot);
        reservation.touched_at = reservation.touched_at.max(now);
    }

    /// The reservation without a report for longest.
    pub(super) const fn least_recent(&self) -> Option<u32> {
        self.touched.head()
    }

    pub(super) fn push_queue(&mut self, list: &mut List, slot: u32) {
        Self::push(&mut self.slots, list, slot, queue_link);
    }

    pub(super) fn unlink_queue(&mut self, list: &mut List, slot: u32) {
        Self::unlink(&mut self.slots, list, slot, queue_link);
    }

    /// Moves `slot` before every reservation of the queue whose prefill has not begun.
    pub(super) fn requeue_before_waiting(&mut self, list: &mut List, slot: u32) {
        self.unlink_queue(list, slot);
        let mut after = NONE;
        let mut at = list.head;
        while at != NONE && self.get(at).stage == Stage::Prefilling {
            after = at;
            at = self.get(at).queue.next;
        }
        self.get_mut(slot).queue = Link { previous: after, next: at };
        match after {
            NONE => list.head = slot,
            after => self.get_mut(after).queue.next = slot,
        }
        match at {
            NONE => list.tail = slot,
            at => self.get_mut(at).queue.previous = slot,
        }
        list.len += 1;
    }

    /// The next of a queue.
    pub(super) fn next(&self, slot: u32) -> Option<u32> {
        let next = self.get(slot).queue.next;
        (next != NONE).then_some(next)
    }

    pub(super) fn push_orphan(&mut self, slot: u32) {
        Self::push(&mut self.slots, &mut self.orphans, slot, queue_link);
    }

    pub(super) fn pop_orphan(&mut self) -> Option<u32> {
        let slot = self.orphans.head()?;
        self.drop_orphan(slot);
        Some(slot)
    }

    /// Removes `slot` from the list of orphans if it is there.
    pub(super) fn drop_orphan(&mut self, slot: u32) {
        let link = self.get(slot).queue;
        if link != Link::NONE || self.orphans.head == slot {
            Self::unlink(&mut self.slots, &mut self.orphans, slot, queue_link);
        }
    }

    fn push(slots: &mut [Reservation], list: &mut List, slot: u32, of: Of) {
        *of(&mut slots[slot as usize]) = Link { previous: list.tail, next: NONE };
        match list.tail {
            NONE => list.head = slot,
            tail => of(&mut slots[tail as usize]).next = slot,
        }
        list.tail = slot;
        list.len += 1;
    }

    fn unlink(slots: &mut [Reservation], list: &mut List, slot: u32, of: Of) {
        let Link { previous, next } = core::mem::replace(of(&mut slots[slot as usize]), Link::NONE);
        match previous {
            NONE => list.head = next,
            previous => of(&mut slots[previous as usize]).next = next,
        }
        match next {
            NONE => list.tail = previous,
            next => of(&mut slots[next as usize]).previous = previous,
        }
        list.len -= 1;
    }
}
