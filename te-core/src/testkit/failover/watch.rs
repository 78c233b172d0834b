//! What became of the transfers while one fault lasted, held against its bounds.

use alloc::format;
use alloc::string::String;
use core::fmt;
use core::time::Duration;

use super::{Bounds, Fault, Phase};
use crate::Instant;

/// Looks on while one [`Phase`] is carried out.
#[derive(Clone, Debug)]
pub struct Watch {
    began: Instant,
    over: Option<Instant>,
    /// Rails that have not carried anything since, as a mask.
    away: u32,
    /// Since the fault is over, a transfer has been done from start to end.
    served: bool,
    recovery: Recovery,
}

/// What a fault has cost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Recovery {
    /// Which.
    pub phase: Phase,
    /// The longest that a transfer took which met the fault, counted from the fault's start.
    pub slowest: Duration,
    /// From the end of the fault until transfers are served and every rail that was hit carries bytes. `None`: not yet.
    pub back: Option<Duration>,
    /// Transfers done.
    pub done: u64,
    /// Transfers that their caller saw fail.
    pub failed: u64,
}

impl Watch {
    /// `phase` begins. Of the rails that it hits, those of the mask `observed` are expected to carry bytes afterwards: not
    /// one that is only the last resort.
    #[must_use]
    pub fn new(phase: Phase, observed: u32, began: Instant) -> Self {
        let away = if phase.fault == Fault::PeerKilled { 0 } else { phase.rails & observed };
        let recovery = Recovery { phase, slowest: Duration::ZERO, back: None, done: 0, failed: 0 };
        Self { began, over: None, away, served: false, recovery }
    }

    /// A transfer has ended.
    pub fn transfer(&mut self, started: Instant, ended: Instant, ok: bool) {
        *if ok { &mut self.recovery.done } else { &mut self.recovery.failed } += 1;
        self.recovery.slowest = self.recovery.slowest.max(ended - started.max(self.began));
        self.served |= ok && self.over.is_some_and(|over| started >= over);
        self.look(ended);
    }

    /// The last rail is mended, or the peer's successor is there.
    pub fn over(&mut self, now: Instant) {
        self.over.get_or_insert(now);
    }

    /// A rail has carried a slice.
    pub fn carried(&mut self, rail: usize, now: Instant) {
        if self.over.is_some() {
            self.away &= !(1 << rail);
            self.look(now);
        }
    }

    /// Whether all is as it was before.
    #[must_use]
    pub fn is_back(&self) -> bool {
        self.recovery.back.is_some()
    }

    /// What is known so far.
    #[must_use]
    pub fn recovery(&self) -> Recovery {
        self.recovery
    }

    fn look(&mut self, now: Instant) {
        if let (Some(over), true) = (self.over, self.served && self.away == 0) {
            self.recovery.back.get_or_insert(now - over);
        }
    }
}

impl Recovery {
    /// Holds it against the bounds.
    ///
    /// # Errors
    /// A sentence that says what was missed.
    pub fn judge(&self, bounds: &Bounds) -> Result<(), String> {
        let phase = &self.phase;
        if self.failed > 0 && phase.fault != Fault::PeerKilled {
            return Err(format!("{phase}: {} transfers failed though a rail lived", self.failed));
        }
        if self.slowest > bounds.slowest {
            let (took, most) = (self.slowest, bounds.slowest);
            return Err(format!("{phase}: a transfer took {took:?}, at most {most:?} are allowed"));
        }
        match self.back {
            None => Err(format!("{phase}: not everything carries bytes again")),
            Some(took) if took > bounds.back => {
                Err(format!("{phase}: well again after {took:?}, at most {:?} are allowed", bounds.back))
            }
            Some(_) => Ok(()),
        }
    }
}

impl fmt::Display for Recovery {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { phase, slowest, back, done, failed } = self;
        write!(f, "{phase}: {done} transfers done, {failed} failed, slowest {slowest:?}, ")?;
        match back {
            Some(back) => write!(f, "well again after {back:?}"),
            None => f.write_str("not well again"),
        }
    }
}
