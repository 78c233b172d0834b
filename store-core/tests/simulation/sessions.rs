//! A simulated client that writes objects range by range, in any order, and commits or revokes them in the
//! end.

use store_core::chunks::{CHUNK_BYTES, RangeSums, stored_len};
use store_core::client::{CloseItem, OpenPut, PutEnding, RangeItem, Transfer};
use te_core::testkit::Rng;

use crate::checker::Response;
use crate::client::{Client, Running};
use crate::common::Core;
use crate::memory::checksum;
use crate::scenario::Lies;
use crate::shadow::Range;

/// What the operation of an open put does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    Opening,
    Writing,
    Closing,
}

/// Puts that are open, or are being opened.
pub(crate) struct Session {
    rng: Rng,
    /// By item of the session; `None`: it was refused.
    open: Vec<Option<(OpenPut, RangeSums)>>,
    /// Ranges that are not written yet: item, offset and length.
    left: Vec<(usize, u64, u64)>,
    /// What the running operation is about, in its order: item, and the offset of the bytes in the object.
    now: Vec<(usize, u64, u64)>,
    /// Of the items that are being closed, those that are committed.
    commits: Vec<bool>,
}

impl Session {
    pub(crate) fn new(rng: Rng, items: usize) -> Self {
        let now = (0..items).map(|item| (item, 0, 0)).collect();
        Self { rng, open: Vec::new(), left: Vec::new(), now, commits: Vec::new() }
    }

    /// Whether an item could not be opened.
    pub(crate) fn is_refused(&self, item: usize) -> bool {
        matches!(self.open.get(item), Some(None))
    }
}

/// The bytes of a range of an open put that a transfer moves.
pub(crate) struct Moved {
    /// The item of the session.
    pub(crate) item: usize,
    /// Their offset in the object.
    pub(crate) offset: u64,
    /// The space of the whole object.
    pub(crate) whole: Range,
}

impl Client {
    /// The item that a write belongs to, and the bytes that it moves; `None`: the whole object.
    pub(crate) fn moved(&self, transfer: &Transfer) -> Option<Moved> {
        let Running::Session(_) = self.running else { return None };
        let (item, offset, _) = *self.session.as_ref()?.now.get(transfer.item as usize)?;
        let whole = (transfer.segment, transfer.addr - offset, stored_len(self.asked[item].len));
        Some(Moved { item, offset, whole })
    }

    /// The operation of a stage is over; returns whether the session is.
    pub(crate) fn next_stage(&mut self, core: &mut Core, stage: Stage) -> bool {
        let Some(mut session) = self.session.take() else { return true };
        let over = match stage {
            Stage::Opening => self.opened(core, &mut session),
            Stage::Writing => {
                self.note_written(&mut session);
                self.write_some(core, &mut session);
                false
            }
            Stage::Closing => {
                self.closed(core, &session);
                true
            }
        };
        self.session = (!over).then_some(session);
        over
    }

    fn opened(&mut self, core: &mut Core, session: &mut Session) -> bool {
        for item in 0..self.asked.len() {
            let opened = self.put.opened(item);
            session.open.push(opened.map(|put| (put, RangeSums::new(put.len()))));
            let Some(put) = opened else {
                core.report.failed_puts += 1;
                self.answer(core, item, Response::Failed);
                continue;
            };
            core.report.opened += 1;
            let step = 1 + put.len() / 6 + session.rng.below(put.len());
            let mut at = 0;
            while at < put.len() {
                let len = (1 + session.rng.below(step)).min(put.len() - at);
                session.left.push((item, at, len));
                at += len;
            }
        }
        for at in (1..session.left.len()).rev() {
            session.left.swap(at, session.rng.index(at + 1));
        }
        if session.left.is_empty() {
            return true;
        }
        self.write_some(core, session);
        false
    }

    /// Writes the next few ranges; after the last one, the puts are closed.
    fn write_some(&mut self, core: &mut Core, session: &mut Session) {
        if core.lies.contains(Lies::HOLE) && session.left.len() > 1 {
            // It leaves a range out, and says that it has written it.
            let hole = session.left.pop();
            session.now = hole.into_iter().collect();
            self.add_sums(session, 0);
        }
        let count = (1 + session.rng.index(4)).min(session.left.len());
        session.now = session.left.split_off(session.left.len() - count);
        if session.now.is_empty() {
            return self.close(session);
        }
        let items = session.now.iter().filter_map(|(item, offset, len)| {
            let (put, sums) = session.open[*item].as_mut()?;
            assert!(sums.claim(*offset, *len), "each range is written once");
            Some(RangeItem { put: *put, offset: *offset, len: *len })
        });
        self.put.write(items.collect::<Vec<_>>());
        self.running = Running::Session(Stage::Writing);
    }

    /// Notes the results of the ranges that were written.
    fn note_written(&mut self, session: &mut Session) {
        for at in 0..session.now.len() {
            let item = session.now[at].0;
            if let Some(Ok(_)) = self.put.result(at) {
                self.add_sums(session, at);
            }
            if let Some((put, _)) = &mut session.open[item] {
                self.put.note_writes(at, put);
                if put.has_failed() {
                    session.left.retain(|(left, ..)| *left != item);
                }
            }
        }
    }

    /// Adds the checksums of a range of the running operation.
    fn add_sums(&self, session: &mut Session, at: usize) {
        let (item, offset, len) = session.now[at];
        let Some((_, sums)) = &mut session.open[item] else { return };
        // A range that was left out is not claimed yet.
        let _ = sums.claim(offset, len);
        let bytes = self.memory.read(item as u64 * self.slot_bytes + offset, len);
        let mut from = offset;
        while from < offset + len {
            let to = ((from / CHUNK_BYTES + 1) * CHUNK_BYTES).min(offset + len);
            sums.add(from, to - from, checksum(&bytes[(from - offset) as usize..(to - offset) as usize]));
            from = to;
        }
    }

    /// Commits what is complete, unless it changes its mind, and revokes the rest.
    fn close(&mut self, session: &mut Session) {
        let mut items = Vec::new();
        session.commits.clear();
        for (item, open) in session.open.iter().enumerate() {
            let Some((put, sums)) = open else { continue };
            let finished = sums.finish().filter(|_| session.rng.below(6) > 0);
            if let Some(sums) = &finished {
                self.memory.write(item as u64 * self.slot_bytes + put.len(), sums.trailer());
            }
            let ending = match &finished {
                Some(sums) if !put.has_failed() => PutEnding::Commit { checksum: sums.whole() },
                _ => PutEnding::Revoke,
            };
            session.now.push((item, put.len(), 0));
            session.commits.push(ending != PutEnding::Revoke);
            items.push(CloseItem { key: &self.asked[item].key, put: *put, ending });
        }
        self.put.close(items);
        self.running = Running::Session(Stage::Closing);
    }

    fn closed(&mut self, core: &mut Core, session: &Session) {
        for (at, (item, ..)) in session.now.iter().enumerate() {
            match self.put.result(at) {
                Some(Ok(_)) if session.commits[at] => {
                    core.report.puts += 1;
                    core.report.sessions += 1;
                    core.report.upserts += u64::from(self.replaces);
                    self.answer(core, *item, Response::Done);
                }
                _ => {
                    core.report.failed_puts += 1;
                    // Once its commit was sent, the put may have been committed, or will be.
                    if !self.asked[*item].ending {
                        self.answer(core, *item, Response::Failed);
                    }
                }
            }
        }
    }
}
