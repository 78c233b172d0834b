//! What one Conductor tells the other: late, twice, damaged, or of a run that has ended.

use conductor_core::knowledge::Said;
use conductor_core::stream::{Adoption, Position};
use te_core::Instant;

use crate::judge::{Cursor, Lie};
use crate::world::World;

/// Blocks that are recorded at a time.
const BUDGET: usize = 3;
/// Offers that are made until one is given up.
const OFFERS_MAX: u32 = 40;

/// What a Conductor knew of a publisher.
#[derive(Clone, Debug)]
pub(crate) struct Transfer {
    publisher: usize,
    bytes: Vec<u8>,
    /// How far it was.
    cursor: Cursor,
    arrives: Instant,
    offers: u32,
}

impl World {
    /// Fetches what the other Conductor knows, and offers what was fetched.
    pub(crate) fn anti_entropy(&mut self, side: usize) -> Result<(), String> {
        for at in 0..self.publishers.len() {
            if self.rng.index(if self.calm { 10 } else { 25 }) == 0 {
                self.fetch(at, side)?;
            }
        }
        let due: Vec<Transfer> =
            self.sides[side].transfers.extract_if(.., |transfer| transfer.arrives <= self.now).collect();
        for transfer in due {
            self.offer(side, transfer)?;
        }
        Ok(())
    }

    /// Fetches what the other one knows of a publisher: when it knows more, or without a reason.
    fn fetch(&mut self, at: usize, side: usize) -> Result<(), String> {
        let [ours, theirs] =
            [side, 1 - side].map(|side| self.publishers[at].followers[side].stream.position());
        let Some(position) = theirs else { return Ok(()) };
        let knows_more = ours.is_none_or(|ours| position.begin < ours.begin);
        let wanted = knows_more || (!self.calm && self.rng.index(3) == 0);
        if !wanted || !self.with(at, side, |stream, now, _| stream.prepare(now))? {
            return Ok(());
        }
        let id = self.publishers[at].id;
        let said = self.sides[1 - side].knowledge.said_by(id, position).ok_or("an engine")?;
        let mut bytes = Vec::new();
        said.write(&mut bytes);
        let excused = self.publishers[at].followers[1 - side].excused();
        self.publishers[at].followers[side].excused |= excused;
        let cursor = self.publishers[at].followers[1 - side].cursor.clone();
        let delay = if self.calm { self.rng.below(3) } else { [0, 2, 5, 60][self.rng.index(4)] };
        let arrives = self.now + std::time::Duration::from_millis(100 * delay);
        self.sides[side].transfers.push(Transfer { publisher: at, bytes, cursor, arrives, offers: 0 });
        Ok(())
    }

    fn offer(&mut self, side: usize, mut transfer: Transfer) -> Result<(), String> {
        let at = transfer.publisher;
        if self.fault(20) {
            // Damaged on its way.
            let damaged = self.rng.index(transfer.bytes.len());
            transfer.bytes[damaged] ^= 1 << self.rng.index(8);
            if Said::read(&transfer.bytes).is_ok() {
                return Err(format!("damage at byte {damaged} was not noticed"));
            }
            self.report.damaged += 1;
            return Ok(());
        }
        let said = Said::read(&transfer.bytes).map_err(|error| error.to_string())?;
        let mut position = said.position();
        if self.fault(20) {
            // The other one claims to be elsewhere, or in another run.
            match self.rng.index(3) {
                0 => position.next += 1,
                1 => position.next = position.next.saturating_sub(1),
                _ => position.digest ^= 1,
            }
        }
        let is_tied = self.lie != Some(Lie::AdoptionsNotTied);
        let latest = self.publishers[at].followers[1 - side].stream.position();
        if let Some(latest) = latest.filter(|_| !is_tied) {
            position = Position { begin: position.begin, ..latest };
        }
        let theirs = transfer.cursor.clone();
        let adoption = self.with(at, side, |stream, now, sink| {
            let adoption = stream.adopt(now, position, sink, |sink| {
                let mut step = 0;
                while step < said.steps() {
                    match sink.feed.adopt(&said, step, BUDGET) {
                        Some(next) => step = next,
                        None => return false,
                    }
                }
                sink.cursor.adopted(&theirs);
                true
            });
            sink.acted = true;
            adoption
        })?;
        match adoption {
            Adoption::Adopted => self.report.adopted += 1,
            Adoption::Refused => self.report.refused += 1,
            Adoption::Later if transfer.offers < OFFERS_MAX => {
                transfer.offers += 1;
                transfer.arrives = self.now + std::time::Duration::from_millis(100);
                self.sides[side].transfers.push(transfer.clone());
            }
            Adoption::Later => {}
        }
        // A transfer may come again, much later.
        if !self.calm && adoption != Adoption::Later && self.rng.index(4) == 0 {
            transfer.arrives = self.now + std::time::Duration::from_millis(100 * self.rng.below(80));
            self.sides[side].transfers.push(transfer);
        }
        Ok(())
    }
}
