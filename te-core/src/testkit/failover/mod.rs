//! The fault plan: what goes wrong while verified transfers run, for how long, and by when all must be well again.
//!
//! It is data. [`simulate`] carries it out on [`sim`](crate::sim) in virtual time; tests of real fabrics carry the same plan
//! out with their own tools and keep the same [`Watch`]:
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
//!     // Break it; meanwhile, for each transfer: watch.transfer(started, ended, ok). Then mend it, and:
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

/// What goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The links of the rails go down and come back.
    LinkDown,
    /// So many packets in a million are lost.
    Loss {
        /// Per million.
        ppm: u32,
    },
    /// The rails' connections are forced into error, once: a queue pair in ERR, a socket that is reset.
    Broken,
    /// The rails refuse every `submit`, as a driver does whose device is gone.
    Refuses(ErrorKind),
    /// The rails report every slice as failed. In truth they carried it out.
    Fails(ErrorKind),
    /// Everything takes so many times as long.
    Slow {
        /// 1 is full speed.
        factor: u32,
    },
    /// The peer's process dies without a word, and another one takes its place at the end.
    PeerKilled,
}

/// One fault, its rails and its time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Phase {
    /// What.
    pub fault: Fault,
    /// Which rails are hit, as a mask. Of no account for [`Fault::PeerKilled`].
    pub rails: u32,
    /// How long. [`Fault::Broken`] happens at the start and is over at once.
    pub lasts: Duration,
    /// Each further rail is hit, and mended, that much later than the one before it.
    pub stagger: Duration,
}

/// What the bounds are made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timing {
    /// A rail reports a lost slice that long after it took it, at the latest.
    pub give_up: Duration,
    /// A transfer takes that long when nothing is wrong, at the most.
    pub transfer: Duration,
    /// A transfer starts at least that often: a probe needs a slice to ride on.
    pub pace: Duration,
    /// How the route pauses rails.
    pub health: HealthConfig,
}

/// By when it must be well.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bounds {
    /// A transfer that meets the fault takes that long, at the most.
    pub slowest: Duration,
    /// Every rail that was hit carries bytes again that long after the fault is over, at the latest.
    pub back: Duration,
}

impl Phase {
    /// `fault` on `rails` for `lasts`.
    #[must_use]
    pub const fn new(fault: Fault, rails: u32, lasts: Duration) -> Self {
        Self { fault, rails, lasts, stagger: Duration::ZERO }
    }

    /// What this phase may cost.
    ///
    /// A transfer that meets the fault may have to be given up by each rail that is hit before a rail that lives takes it, and
    /// by each of them once more when they break one after another. A rail that was away for a time `t` has been probed
    /// in pauses that double; the last of them is at most twice `t`, and the next slice after it is the probe.
    #[must_use]
    pub fn bounds(&self, timing: &Timing) -> Bounds {
        let (rails, slowness) = match self.fault {
            Fault::PeerKilled => (4, 1),
            Fault::Slow { factor } => (1, factor),
            _ => (self.rails.count_ones() * if self.stagger.is_zero() { 1 } else { 2 }, 1),
        };
        let away = self.length() + timing.give_up;
        let pause = (2 * away + timing.health.cooldown_min).min(timing.health.cooldown_max);
        Bounds {
            slowest: timing.give_up * rails + timing.transfer * slowness,
            back: timing.give_up + pause + timing.pace + timing.transfer * slowness,
        }
    }

    /// From the first rail that is hit to the last one that is mended.
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

/// A plan of `count` phases for a simulation with three rails, the last of which is the last resort. At any time one of
/// the rails is well, except while the peer is dead.
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
            // Rolling: one rail after another, the last resort too, each mended just before the next one breaks.
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
