//! Expulsion of writers by nodes, and segments that clients cannot reach.
//!
//! ```text
//!   connection ended ──▶ order without force ── not gone: it has a connection to the node ──▶ nothing happens
//!   release timeout  ──▶ order with force ───── not gone: the node cannot ──▶ its space waits for a remount
//!                             └── gone ──▶ the writer's space on the node is released
//! ```
//!
//! Space of an unknown writer waits for the segment to be mounted anew, too. Time alone releases nothing.

use alloc::collections::{BTreeMap, BTreeSet};
use alloc::vec::Vec;

use te_core::Instant;

use super::{Master, millis};
use crate::allocator::Allocator;
use crate::chunks::stored_len;
use crate::event::Event;
use crate::message::{Expulsion, ExpulsionEnd, FetchRequest};
use crate::pending_release::Reason;
use crate::wire::KEYS_PER_BATCH_MAX;
use crate::{ErrorCode, NodeId, SegmentNo};

impl Master {
    /// The orders of a node to cut off writers. A repetition returns the same orders.
    ///
    /// # Errors
    /// `ClientNotFound` when the node is not known under this incarnation, `IllegalClient` when the key is
    /// wrong.
    pub fn fetch_expulsions(
        &mut self,
        _now: Instant,
        fetch: &FetchRequest,
    ) -> Result<Vec<Expulsion>, ErrorCode> {
        self.check_incarnation(fetch)?;
        let most = (fetch.count_max as usize).min(KEYS_PER_BATCH_MAX);
        let orders = self.writers.orders(fetch.node).take(most);
        let expulsion = |(writer, order): (u64, &crate::writers::Order)| Expulsion {
            ticket: order.ticket,
            writer,
            force: order.force,
        };
        Ok(orders.map(expulsion).collect())
    }

    /// A node reports the result of an order. A repetition has no effect.
    ///
    /// # Errors
    /// `TaskNotFound`: there is no such order, or not any more.
    pub fn end_expulsion(&mut self, now: Instant, node: NodeId, end: &ExpulsionEnd) -> Result<(), ErrorCode> {
        let (writer, order) = self.writers.take(node, end.ticket).ok_or(ErrorCode::TaskNotFound)?;
        if end.gone {
            let freed_bytes = self.expelled(now, node, writer, order.generation_max);
            self.stats.expulsions_total += 1;
            self.emit(|| Event::WriterExpelled { writer, node, freed_bytes });
        } else if order.force {
            // The node cannot cut the writer off, and so it is unknown what may still land there: the space
            // waits for the segment to be mounted anew.
            let held: Vec<u64> = self.writers.holdings(writer).collect();
            for generation in held {
                let here = self.pending_release.get(generation).is_some_and(|(replicas, _)| {
                    let mut segments = replicas.as_slice().iter().map(|placed| placed.segment);
                    segments.any(|no| self.segments.get(no).is_some_and(|segment| segment.node == node))
                });
                if here {
                    self.pending_release.note_unknown(generation);
                }
            }
        }
        Ok(())
    }

    /// A client could not reach a segment. Nothing is dropped: puts use the segment last, and `exists` does
    /// not report objects that are only there, until its node is heard of again.
    ///
    /// # Errors
    /// `SegmentNotFound`.
    pub fn report_unreachable(&mut self, _now: Instant, no: SegmentNo) -> Result<(), ErrorCode> {
        if self.segments.set_unreachable(no, true).ok_or(ErrorCode::SegmentNotFound)? {
            self.emit_reach(no, true);
        }
        Ok(())
    }

    /// A node was heard of: its segments are within reach, as far as is known.
    pub(super) fn reached(&mut self, node: NodeId) {
        if self.segments.unreachable == 0 {
            return;
        }
        let segments = self.nodes.get(node).map(|node| node.segments.clone()).unwrap_or_default();
        for no in segments {
            if self.segments.set_unreachable(no, false) == Some(true) {
                self.emit_reach(no, false);
            }
        }
    }

    fn emit_reach(&mut self, no: SegmentNo, lost: bool) {
        let Some(segment) = self.segments.get(no) else { return };
        let (name, endpoint) = (segment.name.clone(), segment.endpoint.clone());
        self.emit(|| match lost {
            true => Event::SegmentUnreachable { segment: no, name, endpoint },
            false => Event::SegmentReachable { segment: no, name, endpoint },
        });
    }

    /// Orders every node on which a writer holds space to cut it off.
    pub(super) fn expel(&mut self, writer: u64, force: bool) {
        let mut nodes: BTreeMap<NodeId, u64> = BTreeMap::new();
        for generation in self.writers.holdings(writer) {
            let held = self.writers.put(generation).map(|put| {
                let entry = self.objects.entry(put.index);
                (&entry.replicas, stored_len(entry.len))
            });
            let Some((replicas, len)) = held.or_else(|| self.pending_release.get(generation)) else {
                continue;
            };
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

    /// The release timeout of writers that never reported that they are quiet has passed: orders nodes to cut
    /// them off.
    pub(super) fn settle_writers(&mut self, _now: Instant, due: Vec<u64>) {
        let mut writers = BTreeSet::new();
        for generation in due {
            match self.pending_release.writer(generation) {
                None => {}
                Some(0) => self.pending_release.note_unknown(generation),
                Some(writer) => drop(writers.insert(writer)),
            }
        }
        writers.into_iter().for_each(|writer| self.expel(writer, true));
    }

    /// No write of a writer can land on a node any more: releases the space that it held there from puts up
    /// to this one. Returns the number of bytes.
    fn expelled(&mut self, now: Instant, node: NodeId, writer: u64, generation_max: u64) -> u64 {
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
                // The put cannot be completed any more.
                let until = began.max(now) + millis(self.config.put_start_release_timeout_ms);
                self.drop_object(put.index, Some((until, Reason::Writer)));
                self.stats.puts_abandoned_total += 1;
            }
            let (bytes, left) = self.pending_release.release_on(&mut self.segments, generation, on);
            freed += bytes;
            if !left {
                self.writers.let_go(writer, generation);
            }
        }
        freed
    }
}
