//! Time of the machine, as the core has it.

use std::time::{Duration, Instant};

use te_core::Instant as CoreInstant;

/// Turns time of the machine into that of the core.
#[derive(Clone, Copy, Debug)]
pub(super) struct Clock {
    pub(super) epoch: Instant,
}

impl Clock {
    /// The core's time is not 0 at the beginning, so that there is a past.
    const BEFORE: Duration = Duration::from_secs(60);

    pub(super) fn new() -> Self {
        Self { epoch: Instant::now() }
    }

    pub(super) fn now(self) -> CoreInstant {
        self.of(Instant::now())
    }

    pub(super) fn of(self, at: Instant) -> CoreInstant {
        CoreInstant::ZERO + Self::BEFORE + at.saturating_duration_since(self.epoch)
    }
}
