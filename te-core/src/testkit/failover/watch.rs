//! The transfers during one fault, compared with its bounds.

use alloc::format;
use alloc::string::String;
use core::fmt;
use core::time::Duration;

use super::{Bounds, Fault, Phase};
use crate::Instant;

/// Observes while one [`Phase`] is carried out.
#[derive(Clone, Debug)]
pub struct Watch {
    began: Instant,
    over: Option<Instant>,
    /// The rails that have not carried anything since, as a mask.
    away: u32,
    /// Whether a whole transfer was done since the end of the fault.
    served: bool,
    recovery: Recovery,
}

/// The effects of a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Recovery {
    /// The phase.
    pub phase: Phase,
    /// The longest time that a transfer during the fault took, counted from the fault's start.
    pub slowest: Duration,
    /// The time from the end of the fault until transfers succeed and every rail that was hit carries bytes.
    /// `None`: not yet.
    pub back: Option<Duration>,
    /// The number of transfers that succeeded.
    pub done: u64,
    /// The number of transfers that failed for their caller.
    pub failed: u64,
}

impl Watch {
    /// Begins `phase`. Of the rails that it hits, those of the mask `observed` are expected to carry bytes
    /// afterwards: not one that is only the last resort.
    #[must_use]
    pub fn new(phase: Phase, observed: u32, began: Instant) -> Self {
        let away = if phase.fault == Fault::PeerKilled { 0 } else { phase.rails & observed };
        let recovery = Recovery { phase, slowest: Duration::ZERO, back: None, done: 0, failed: 0 };
        Self { began, over: None, away, served: false, recovery }
    }

    /// Notes that a transfer has ended.
    pub fn transfer(&mut self, started: Instant, ended: Instant, ok: bool) {
        *if ok { &mut self.recovery.done } else { &mut self.recovery.failed } += 1;
        self.recovery.slowest = self.recovery.slowest.max(ended - started.max(self.began));
        self.served |= ok && self.over.is_some_and(|over| started >= over);
        self.look(ended);
    }

    /// Notes the end of the fault: the last rail works again, or the peer's successor runs.
    pub fn over(&mut self, now: Instant) {
        self.over.get_or_insert(now);
    }

    /// Notes that a rail has carried a slice.
    pub fn carried(&mut self, rail: usize, now: Instant) {
        if self.over.is_some() {
            self.away &= !(1 << rail);
            self.look(now);
        }
    }

    /// Whether everything works as before.
    #[must_use]
    pub fn is_back(&self) -> bool {
        self.recovery.back.is_some()
    }

    /// The effects that are known so far.
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
    /// Compares it with the bounds.
    ///
    /// # Errors
    /// A sentence about the bound that was missed.
    pub fn judge(&self, bounds: &Bounds) -> Result<(), String> {
        let phase = &self.phase;
        if self.failed > 0 && phase.fault != Fault::PeerKilled {
            return Err(format!("{phase}: {} transfers failed although a rail worked", self.failed));
        }
        if self.slowest > bounds.slowest {
            let (took, most) = (self.slowest, bounds.slowest);
            return Err(format!("{phase}: a transfer took {took:?}, at most {most:?} are allowed"));
        }
        match self.back {
            None => Err(format!("{phase}: not everything carries bytes again")),
            Some(took) if took > bounds.back => {
                Err(format!("{phase}: working again after {took:?}, at most {:?} are allowed", bounds.back))
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
            Some(back) => write!(f, "working again after {back:?}"),
            None => f.write_str("not working again"),
        }
    }
}
