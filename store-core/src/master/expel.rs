//! Writers that nodes have to cut off, and segments that clients cannot reach.
//!
//! ```text
//!   connection ended ──▶ order without force ── not gone: it has a connection to the node ──▶ nothing
//!   release timeout  ──▶ order with force ───── not gone: the node cannot ──▶ its space is freed by the timeout
//!                             └── gone ──▶ what the writer held there is free
//! ```
//!
//! Space of a writer that cannot be named waits for the segment to be mounted anew, unless its node cannot cut off anybody.

use alloc::collections::{BTreeMap, BTreeSet};
use alloc::vec::Vec;

use te_core::Instant;

use super::{Master, millis};
use crate::allocator::Allocator;
use crate::blocks::stored_len;
use crate::event::Event;
use crate::limbo::Reason;
use crate::message::{Expulsion, ExpulsionEnd, FetchAsk};
use crate::wire::KEYS_PER_BATCH_MAX;
use crate::{ErrorCode, SegmentNo};

impl Master {
    /// Which writers a node is to cut off. Asked again, it tells the same ones.
    ///
    /// # Errors
    /// `ClientNotFound` when the node is not known under this incarnation, `IllegalClient` when the key is not its.
    pub fn fetch_expulsions(&mut self, _now: Instant, ask: &FetchAsk) -> Result<Vec<Expulsion>, ErrorCode> {
        self.check_life(ask)?;
        let most = (ask.count_max as usize).min(KEYS_PER_BATCH_MAX);
        let orders = self.writers.orders(ask.node).take(most);
        let told = |(writer, order): (u64, &crate::writers::Order)| Expulsion {
            ticket: order.ticket,
            writer,
            force: order.force,
        };
        Ok(orders.map(told).collect())
    }

    /// A node reports what became of one. Repeating it is harmless.
    ///
    /// # Errors
    /// `TaskNotFound`: there is no such order, or not any more.
    pub fn end_expulsion(&mut self, now: Instant, node: u64, end: &ExpulsionEnd) -> Result<(), ErrorCode> {
        let (writer, order) = self.writers.take(node, end.ticket).ok_or(ErrorCode::TaskNotFound)?;
        if end.gone {
            let freed_bytes = self.expelled(now, node, writer, order.generation_max);
            self.stats.expulsions_total += 1;
            self.tell(|| Event::WriterExpelled { writer, node, freed_bytes });
        } else if order.force {
            // It cannot: for its space the timeout holds, as it always did.
            self.nodes.cannot_expel(node);
            let due = self.limbo.overdue(now);
            self.settle_writers(now, due);
        }
        Ok(())
    }

    /// A client could not reach a segment. Nothing is dropped for it: the segment is used last for puts, and its objects are
    /// not vouched for, until its node is heard of again.
    ///
    /// # Errors
    /// `SegmentNotFound`.
    pub fn report_unreachable(&mut self, _now: Instant, no: SegmentNo) -> Result<(), ErrorCode> {
        if self.segments.set_unreachable(no, true).ok_or(ErrorCode::SegmentNotFound)? {
            self.tell_reach(no, true);
        }
        Ok(())
    }

    /// A node was heard of: its segments are in reach, as far as is known.
    pub(super) fn reached(&mut self, node: u64) {
        if self.segments.unreachable == 0 {
            return;
        }
        let segments = self.nodes.get(node).map(|node| node.segments.clone()).unwrap_or_default();
        for no in segments {
            if self.segments.set_unreachable(no, false) == Some(true) {
                self.tell_reach(no, false);
            }
        }
    }

    fn tell_reach(&mut self, no: SegmentNo, lost: bool) {
        let Some(segment) = self.segments.get(no) else { return };
        let (name, endpoint) = (segment.name.clone(), segment.endpoint.clone());
        self.tell(|| match lost {
            true => Event::SegmentUnreachable { segment: no, name, endpoint },
            false => Event::SegmentReachable { segment: no, name, endpoint },
        });
    }

    /// Tells every node on which a writer holds something to cut it off.
    pub(super) fn expel(&mut self, writer: u64, force: bool) {
        let mut nodes: BTreeMap<u64, u64> = BTreeMap::new();
        for generation in self.writers.holdings(writer) {
            let held = self.writers.put(generation).map(|put| {
                let entry = self.objects.entry(put.index);
                (&entry.replicas, stored_len(entry.len))
            });
            let Some((replicas, len)) = held.or_else(|| self.limbo.get(generation)) else { continue };
            for placed in replicas.as_slice() {
                if let Some(segment) = self.segments.get(placed.segment) {
                    *nodes.entry(segment.node).or_default() += segment.allocator.rounded(len);
                }
            }
        }
        for (node, bytes) in nodes {
            self.writers.order(node, writer, force, self.generation, bytes);
        }
    }

    /// What is due of writers that never said that they are quiet: nodes that can are told to cut them off.
    pub(super) fn settle_writers(&mut self, _now: Instant, due: Vec<u64>) {
        let mut writers = BTreeSet::new();
        for generation in due {
            let Some(writer) = self.limbo.writer(generation) else { continue };
            let (segments, nodes) = (&mut self.segments, &self.nodes);
            let timeout_holds = |segments: &crate::segments::Segments, no| {
                segments
                    .get(no)
                    .is_none_or(|segment| nodes.get(segment.node).is_some_and(|node| !node.expels))
            };
            let (_, left) = self.limbo.release_on(segments, generation, timeout_holds);
            match (left, writer) {
                (false, _) => self.writers.let_go(writer, generation),
                (true, 0) => self.limbo.note_unknown(generation),
                (true, _) => drop(writers.insert(writer)),
            }
        }
        writers.into_iter().for_each(|writer| self.expel(writer, true));
    }

    /// Nothing of a writer can land on a node any more: what it held there from puts up to this one is free. Gives how many
    /// bytes.
    fn expelled(&mut self, now: Instant, node: u64, writer: u64, generation_max: u64) -> u64 {
        let held: Vec<u64> = self.writers.holdings(writer).filter(|held| *held <= generation_max).collect();
        let mut freed = 0;
        for generation in held {
            let on = |segments: &crate::segments::Segments, no| {
                segments.get(no).is_some_and(|segment| segment.node == node)
            };
            if let Some(put) = self.writers.put(generation).copied() {
                let entry = self.objects.entry(put.index);
                let began = entry.time;
                if !entry.replicas.as_slice().iter().any(|placed| on(&self.segments, placed.segment)) {
                    continue;
                }
                // It cannot be completed any more.
                let until = began.max(now) + millis(self.config.put_start_release_timeout_ms);
                self.drop_object(put.index, Some((until, Reason::Writer)));
                self.stats.zombies_total += 1;
            }
            let (bytes, left) = self.limbo.release_on(&mut self.segments, generation, on);
            freed += bytes;
            if !left {
                self.writers.let_go(writer, generation);
            }
        }
        freed
    }
}
