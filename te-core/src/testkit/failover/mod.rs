//! The fault plan: which faults happen while verified transfers run, for how long, and by when everything
//! must work again.
//!
//! The plan is data. [`simulate`] carries it out on [`sim`](crate::sim) in virtual time; tests of real
//! fabrics carry the same plan out with their own tools and use the same [`Watch`]:
//!
//! ```
//! use core::time::Duration;
//! use te_core::testkit::failover::{Timing, Watch, every_fault};
//! use te_core::{HealthConfig, Instant};
//!
//! let timing = Timing {
//!     give_up: Duration::from_millis(500),
//!     transfer: Duration::from_millis(50),
//!     pace: Duration::ZERO,
//!     health: HealthConfig::default(),
//! };
//! for phase in every_fault(Duration::from_secs(2)) {
//!     let mut watch = Watch::new(phase, 0b11, Instant::ZERO);
//!     // Cause the fault; meanwhile, for each transfer: watch.transfer(started, ended, ok). Then end it, and:
//!     watch.over(Instant::from_millis(2_000));
//!     // For each rail that carries bytes again: watch.carried(rail, now), until watch.is_back().
//!     # watch.transfer(Instant::from_millis(1), Instant::from_millis(2), true);
//!     # watch.transfer(Instant::from_millis(2_001), Instant::from_millis(2_002), true);
//!     # (0..2).for_each(|rail| watch.carried(rail, Instant::from_millis(2_003)));
//!     watch.recovery().judge(&phase.bounds(&timing)).unwrap();
//! }
//! ```

mod sim;
mod watch;

use alloc::vec::Vec;
use core::fmt;
use core::time::Duration;

use crate::testkit::Rng;
use crate::{ErrorKind, HealthConfig};

pub use sim::{FAST, RAIL_NAMES, TIERS, simulate};
pub use watch::{Recovery, Watch};

/// A fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The links of the rails go down and come back.
    LinkDown,
    /// Packets are lost at this rate.
    Loss {
        /// How many packets per million.
        ppm: u32,
    },
    /// The rails' connections are forced into an error state, once: a queue pair in ERR, a socket that is
    /// reset.
    Broken,
    /// The rails refuse every `submit`, as a driver does whose device was removed.
    Refuses(ErrorKind),
    /// The rails report every slice as failed, although they carried it out.
    Fails(ErrorKind),
    /// Everything takes several times as long.
    Slow {
        /// How many times; 1 is full speed.
        factor: u32,
    },
    /// The peer's process is killed, and another one takes its place at the end.
    PeerKilled,
}

/// One fault, its rails and its time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Phase {
    /// The fault.
    pub fault: Fault,
    /// The rails that are hit, as a mask. Ignored for [`Fault::PeerKilled`].
    pub rails: u32,
    /// How long it lasts. [`Fault::Broken`] happens at the start and is over at once.
    pub lasts: Duration,
    /// Each further rail is hit, and works again, this much later than the one before it.
    pub stagger: Duration,
}

/// The times from which bounds are computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timing {
    /// The longest time until a rail reports a lost slice, after it accepted the slice.
    pub give_up: Duration,
    /// The longest time that a transfer takes without faults.
    pub transfer: Duration,
    /// The longest time between the starts of two transfers: a probe needs a slice.
    pub pace: Duration,
    /// How the route pauses rails.
    pub health: HealthConfig,
}

/// By when everything must work again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bounds {
    /// The longest time that a transfer during the fault may take.
    pub slowest: Duration,
    /// The longest time after the end of the fault until every rail that was hit carries bytes again.
    pub back: Duration,
}

impl Phase {
    /// `fault` on `rails` for `lasts`.
    #[must_use]
    pub const fn new(fault: Fault, rails: u32, lasts: Duration) -> Self {
        Self { fault, rails, lasts, stagger: Duration::ZERO }
    }

    /// The bounds of this phase.
    ///
    /// A transfer during the fault may time out on each rail that is hit before a rail that works takes it,
    /// and on each of them once more when they fail one after another. A rail that did not work for a time
    /// `t` has been probed after pauses that double; the last pause is at most twice `t`, and the next slice
    /// after it is the probe.
    #[must_use]
    pub fn bounds(&self, timing: &Timing) -> Bounds {
        let (rails, slowness) = match self.fault {
            Fault::PeerKilled => (4, 1),
            Fault::Slow { factor } => (1, factor),
            _ => (self.rails.count_ones() * if self.stagger.is_zero() { 1 } else { 2 }, 1),
        };
        let away = self.length() + timing.give_up;
        let pause = (2 * away + timing.health.backoff_min).min(timing.health.backoff_max);
        Bounds {
            slowest: timing.give_up * rails + timing.transfer * slowness,
            back: timing.give_up + pause + timing.pace + timing.transfer * slowness,
        }
    }

    /// The time from the first rail that is hit to the last one that works again.
    #[must_use]
    pub fn length(&self) -> Duration {
        let lasts = if self.fault == Fault::Broken { Duration::ZERO } else { self.lasts };
        lasts + self.stagger * self.rails.count_ones().saturating_sub(1)
    }

    /// The rails that are hit, in order, with the time after the start at which each is hit.
    pub fn hits(&self) -> impl Iterator<Item = (usize, Duration)> {
        let (rails, stagger) = (self.rails, self.stagger);
        let hit = (0..u32::BITS as usize).filter(move |rail| rails & 1 << rail != 0);
        hit.zip(0..).map(move |(rail, nth)| (rail, stagger * nth))
    }
}

/// Every fault that a real fabric can be made to have, on two rails, each for `lasts`: the plan for hardware.
#[must_use]
pub fn every_fault(lasts: Duration) -> Vec<Phase> {
    let loss = Fault::Loss { ppm: 10_000 };
    let one_after_another = Phase { stagger: lasts / 2, ..Phase::new(Fault::LinkDown, 0b11, lasts) };
    [
        Phase::new(Fault::LinkDown, 0b01, lasts),
        Phase::new(Fault::LinkDown, 0b10, lasts),
        Phase::new(Fault::LinkDown, 0b11, lasts),
        one_after_another,
        Phase::new(loss, 0b01, lasts),
        Phase::new(loss, 0b11, lasts),
        Phase::new(Fault::Broken, 0b01, lasts),
        Phase::new(Fault::Broken, 0b11, lasts),
        Phase::new(Fault::Slow { factor: 10 }, 0b10, lasts),
        Phase::new(Fault::PeerKilled, 0b11, lasts),
    ]
    .into()
}

/// A random plan of `count` phases for a simulation with three rails, the last of which is the last resort.
/// At any time one of the rails works, except while the peer is dead.
#[must_use]
pub fn drawn(rng: &mut Rng, count: usize) -> Vec<Phase> {
    const KINDS: [ErrorKind; 6] = [
        ErrorKind::Rail,
        ErrorKind::System,
        ErrorKind::TimedOut,
        ErrorKind::Unreachable,
        ErrorKind::Protocol,
        ErrorKind::Corrupt,
    ];
    let phase = |_| {
        let kind = KINDS[rng.index(KINDS.len())];
        let fault = match rng.below(9) {
            0..=2 => Fault::LinkDown,
            3 => Fault::Loss { ppm: 10_000 },
            4 => Fault::Broken,
            5 => Fault::Refuses(kind),
            6 => Fault::Fails(kind),
            7 => Fault::Slow { factor: 10 },
            _ => Fault::PeerKilled,
        };
        let lasts = Duration::from_micros(rng.range(5_000..60_000));
        let stagger =
            if rng.chance_ppm(500_000) { lasts / (1 + rng.below(3) as u32) } else { Duration::ZERO };
        if matches!(fault, Fault::LinkDown | Fault::Refuses(_) | Fault::Fails(_)) && rng.chance_ppm(250_000) {
            // Rolling: one rail after another, with the last resort, each working again just before the next
            // one fails.
            let lasts = lasts / 10;
            return Phase { fault, rails: 0b111, lasts, stagger: lasts + Duration::from_micros(50) };
        }
        Phase { fault, rails: 1 + rng.below(6) as u32, lasts, stagger }
    };
    (0..count).map(phase).collect()
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.fault {
            Fault::LinkDown => write!(f, "link down")?,
            Fault::Loss { ppm } => write!(f, "loss of {} in 1000", ppm / 1000)?,
            Fault::Broken => write!(f, "connection broken")?,
            Fault::Refuses(kind) => write!(f, "refuses everything ({kind:?})")?,
            Fault::Fails(kind) => write!(f, "fails everything ({kind:?})")?,
            Fault::Slow { factor } => write!(f, "{factor} times as slow")?,
            Fault::PeerKilled => return write!(f, "peer killed, back after {:?}", self.lasts),
        }
        f.write_str(", rail")?;
        self.hits().try_for_each(|(rail, _)| write!(f, " {rail}"))?;
        if self.fault != Fault::Broken {
            write!(f, ", for {:?}", self.lasts)?;
        }
        if self.stagger.is_zero() { Ok(()) } else { write!(f, ", one every {:?}", self.stagger) }
    }
}
