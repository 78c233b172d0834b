//! Segments that accept nothing new: in maintenance, draining, drained.
//!
//! Draining proceeds in rounds. A round lists the objects on the segment and moves them, a few at a time;
//! objects that are being written, and space that is pending release, are left to the next round. Nothing is
//! evicted elsewhere. An object for which there is no room elsewhere loses its replica here if it has another
//! one. Objects without another replica and without room elsewhere are counted, and stay readable as long as
//! the segment is mounted. So do objects whose bytes turn out to be damaged: they cannot be moved.

use alloc::vec::Vec;
use core::time::Duration;

use serde::{Deserialize, Serialize};
use te_core::Instant;

use super::Master;
use super::tasks::Wish;
use crate::allocator::Allocator;
use crate::event::Event;
use crate::message::{DrainInfo, SegmentOrder, SegmentState, TaskCause, TaskState};
use crate::segments::HELD;
use crate::{ErrorCode, SegmentNo, TaskId};

/// Objects that one step examines.
const LOOKS_PER_STEP: u32 = 1_024;
/// Segments that one call takes a step for.
const STEPS_PER_CALL_MAX: usize = 16;
/// Pause between two rounds.
const ROUND_PAUSE: Duration = Duration::from_millis(1_000);
/// Pause before the next step when there are too many tasks.
const FULL_PAUSE: Duration = Duration::from_millis(100);

/// A segment that is not active.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct Drain {
    info: DrainInfo,
    /// Its moves in progress.
    moves: Vec<TaskId>,
    /// Objects that this round has still to examine; `None`: no round is running.
    round: Option<Vec<u32>>,
    /// Objects that this round leaves.
    left: Left,
    /// Number of objects without room and of bad objects in the latest event.
    reported: Option<(u64, u64)>,
    /// When the next step is due; `None`: when a move has ended, or never.
    next_at: Option<Instant>,
}

/// Objects that a round leaves, by reason.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
struct Left {
    no_room: u64,
    unfinished: u64,
    bad: u64,
}

impl Master {
    /// Puts a segment into a state.
    ///
    /// # Errors
    /// `SegmentNotFound`.
    pub fn order_segment(&mut self, now: Instant, order: &SegmentOrder) -> Result<DrainInfo, ErrorCode> {
        let no = order.segment;
        let state = self.drains.get(&no).map_or(SegmentState::Active, |drain| drain.info.state);
        if !self.segments.set_accepts_new(no, order.state == SegmentState::Active) {
            return Err(ErrorCode::SegmentNotFound);
        }
        let drains = |state| matches!(state, SegmentState::Draining | SegmentState::Drained);
        if state != order.state && !(drains(state) && drains(order.state)) {
            // Moves that a node carries out continue; the others are canceled.
            let waiting: Vec<TaskId> = self.tasks.draining(no).collect();
            for id in waiting {
                // The task exists: it was just listed.
                let _ = self.cancel_task(now, id);
            }
            self.drains.remove(&no);
            if order.state != SegmentState::Active {
                let begins = drains(order.state);
                let state = if begins { SegmentState::Draining } else { order.state };
                let info = DrainInfo { segment: no, state, ..DrainInfo::default() };
                self.drains.insert(no, Drain { info, next_at: begins.then_some(now), ..Drain::default() });
            }
            if let Some(name) = self.segments.get(no).map(|segment| segment.name.clone()) {
                self.emit(|| Event::SegmentState { segment: no, name, state: order.state });
            }
        }
        self.drain_info(no)
    }

    /// The progress of draining a segment.
    ///
    /// # Errors
    /// `SegmentNotFound`.
    pub fn drain_info(&self, no: SegmentNo) -> Result<DrainInfo, ErrorCode> {
        let segment = self.segments.get(no).ok_or(ErrorCode::SegmentNotFound)?;
        let info = self.drains.get(&no).map_or(DrainInfo::default(), |drain| drain.info);
        Ok(DrainInfo {
            segment: no,
            node: segment.node,
            used_bytes: segment.allocator.used_bytes(),
            blocks: segment.allocator.blocks_used().into(),
            ..info
        })
    }

    /// The progress of all segments that are not active.
    pub fn drains(&self) -> impl Iterator<Item = DrainInfo> {
        self.drains.keys().filter_map(|no| self.drain_info(*no).ok())
    }

    pub(super) fn draining(&self) -> u64 {
        self.drains.values().filter(|drain| drain.info.state == SegmentState::Draining).count() as u64
    }

    pub(super) fn drains_due(&self) -> Option<Instant> {
        self.drains.values().filter_map(|drain| drain.next_at).min()
    }

    /// Space was released: a drain that waits for it starts its next round.
    pub(super) fn drains_look_again(&mut self, now: Instant) {
        let waits = |drain: &&mut Drain| drain.info.state == SegmentState::Draining && drain.round.is_none();
        self.drains.values_mut().filter(waits).for_each(|drain| drain.next_at = Some(now));
    }

    pub(super) fn drains_timeout(&mut self, now: Instant) {
        if self.drains.is_empty() {
            return;
        }
        let is_due = |drain: &Drain| drain.next_at.is_some_and(|at| at <= now);
        let due: Vec<SegmentNo> =
            self.drains.iter().filter(|(_, drain)| is_due(drain)).map(|(no, _)| *no).collect();
        for no in due.into_iter().take(STEPS_PER_CALL_MAX) {
            self.drain_step(now, no);
        }
    }

    /// A move away from a segment has ended.
    pub(super) fn drain_move_ended(
        &mut self,
        now: Instant,
        no: SegmentNo,
        id: TaskId,
        state: TaskState,
        error: Option<ErrorCode>,
    ) {
        let Some(drain) = self.drains.get_mut(&no) else { return };
        // Moves of a drain that was called off, and moves that had ended before and were retried, do not
        // belong to this round.
        let Some(at) = drain.moves.iter().position(|one| *one == id) else { return };
        drain.moves.swap_remove(at);
        drain.info.moving = drain.moves.len() as u32;
        match (state, error) {
            (TaskState::Done, _) => drain.info.moved_total += 1,
            (TaskState::Failed, Some(ErrorCode::ChecksumMismatch)) => drain.left.bad += 1,
            // The next round tries the object again.
            _ => drain.left.unfinished += 1,
        }
        drain.info.failed_total += u64::from(state != TaskState::Done);
        if drain.info.state == SegmentState::Draining && drain.round.is_some() {
            drain.next_at = Some(now);
        }
    }

    fn drain_step(&mut self, now: Instant, no: SegmentNo) {
        let Some(mut drain) = self.drains.remove(&no) else { return };
        drain.next_at = None;
        let mut round = match drain.round.take() {
            Some(round) => round,
            None => {
                drain.left = Left::default();
                self.replicas_on(no)
            }
        };
        let most = self.config.tasks.drain_moves_max;
        for _ in 0..LOOKS_PER_STEP {
            if drain.info.moving >= most {
                break;
            }
            let Some(index) = round.pop() else { break };
            if let Err(again) = self.drain_object(now, no, index, &mut drain) {
                round.push(index);
                drain.next_at = Some(now + again);
                break;
            }
        }
        if round.is_empty() && drain.info.moving == 0 {
            // The round is over.
            let Left { no_room, unfinished, bad } = drain.left;
            (drain.info.left_no_room, drain.info.left_unfinished) = (no_room, unfinished);
            drain.info.left_bad = bad;
            let empty = self.segments.get(no).is_some_and(|segment| segment.allocator.used_bytes() == 0);
            if empty {
                drain.info.state = SegmentState::Drained;
                // What the round could not move was removed meanwhile.
                (drain.info.left_no_room, drain.info.left_unfinished, drain.info.left_bad) = (0, 0, 0);
                self.emit_left(no, 0, 0);
            } else {
                drain.next_at = Some(now + ROUND_PAUSE);
                // What is left is reported when nothing else is to come, and again when more is left, or
                // other bad objects.
                let news = match drain.reported {
                    None => no_room + bad > 0 && unfinished == 0,
                    Some((before, bad_before)) => no_room > before || bad != bad_before,
                };
                if news {
                    drain.reported = Some((no_room, bad));
                    self.emit_left(no, no_room, bad);
                }
            }
        } else {
            if drain.info.moving < most && !round.is_empty() {
                drain.next_at = drain.next_at.or(Some(now));
            }
            drain.round = Some(round);
        }
        self.drains.insert(no, drain);
    }

    fn emit_left(&mut self, no: SegmentNo, left_objects: u64, left_bad: u64) {
        if let Some(name) = self.segments.get(no).map(|segment| segment.name.clone()) {
            self.emit(|| Event::SegmentDrained { segment: no, name, left_objects, left_bad });
        }
    }

    /// Begins to move one object away. An error is the time to wait because there are too many tasks.
    fn drain_object(
        &mut self,
        now: Instant,
        no: SegmentNo,
        index: u32,
        drain: &mut Drain,
    ) -> Result<(), Duration> {
        let entry = self.objects.entry(index);
        let replicas = entry.replicas.as_slice();
        if !replicas.iter().any(|placed| placed.segment == no) {
            return Ok(());
        }
        if !entry.is_complete() {
            drain.left.unfinished += 1;
            return Ok(());
        }
        let elsewhere = replicas.len() > 1;
        let wish = Wish { index, source: Some(no), target: None, cause: TaskCause::Drain };
        match self.add_task(now, wish) {
            Ok(id) => {
                drain.moves.push(id);
                drain.info.moving = drain.moves.len() as u32;
            }
            Err(ErrorCode::NoAvailableHandle | ErrorCode::KeysUltraLimit) if elsewhere => {
                self.drop_replica(now, index, no);
                drain.info.dropped_total += 1;
            }
            Err(ErrorCode::NoAvailableHandle) => drain.left.no_room += 1,
            Err(ErrorCode::TaskPendingLimitExceeded) => return Err(FULL_PAUSE),
            // The object is expired, or has another task: the next round examines it again.
            Err(_) => drain.left.unfinished += 1,
        }
        Ok(())
    }

    /// Entries of the objects with a replica, or with space for one, on a segment.
    fn replicas_on(&self, no: SegmentNo) -> Vec<u32> {
        let Some(segment) = self.segments.get(no) else { return Vec::new() };
        let mut found: Vec<u32> =
            segment.allocator.blocks().map(|(.., tag)| tag).filter(|tag| *tag != HELD).collect();
        // They are taken from the end.
        found.reverse();
        found
    }
}
