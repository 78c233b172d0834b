//! The conformance suite: one set of cases that checks the laws of [`Transport`] for every fabric, route and
//! decorator. And what other tests share: seeds, random numbers, patterns, fake devices, caches that are not
//! coherent ([`coldcache`]), a transport that moves nothing.
//!
//! A fabric's crate implements [`Harness`] once and gets one test per case:
//!
//! ```
//! use te_core::sim::SimConfig;
//! use te_core::testkit::SimHarness;
//!
//! // In the fabric's tests: one named test per case, and the cases that cannot run on it.
//! te_core::conformance_tests!(SimHarness::new(1, SimConfig::CALM), skips [
//!     a_caller_driven_transport_releases_memory_in_the_next_poll,
//!     a_slice_off_the_granule_is_refused_before_a_byte_moves,
//! ]);
//!
//! // Or all at once, with a table of the cases that passed, and of those that were skipped and why.
//! fn main() {
//!     println!("{}", te_core::testkit::conformance(&mut SimHarness::new(1, SimConfig::CALM)));
//! }
//! ```
//!
//! A violation of a law panics with a sentence that starts with the law's number. A case that needs what a
//! fabric does not offer ([`Capabilities`](crate::Capabilities)) or a harness cannot do ([`Hook`]) is
//! *skipped* with a reason; the test of a skipped case fails unless the harness declares it. Fabrics that
//! lose packets may fail slices in every case: the suite resubmits slices that failed for the fabric's
//! reasons, and checks the [`Outcome`](crate::Outcome) of each failure.

#![allow(unsafe_code, reason = "reads and writes memory under test by its address")]

mod buffer;
mod cases;
pub mod coldcache;
mod counting;
pub mod failover;
#[cfg(feature = "std")]
mod fake_device;
mod null;
mod pattern;
mod rig;
mod rng;
#[cfg(feature = "std")]
mod seeds;
mod sim_harness;
mod stager;

use alloc::boxed::Box;
use alloc::rc::Rc;
use alloc::string::String;
use alloc::vec::Vec;
use core::fmt;
use core::ops::Range;
use core::time::Duration;

use crate::{Instant, MemSpan, Transport, VolatileSpan};

pub use counting::{CountingAlloc, allocations, is_counting};
#[cfg(feature = "std")]
pub use fake_device::{FakeDevices, FakeStaging};
pub use null::NullTransport;
pub use pattern::{pattern, pattern_at};
pub use rig::{Rig, Skip};
pub use rng::Rng;
#[cfg(feature = "std")]
pub use seeds::{each_seed, on_all_cores, one_seed, seeds};
pub use sim_harness::SimHarness;
pub use stager::stager_conformance;
#[cfg(feature = "std")]
pub use wall_clock::WallClock;

/// Makes the transports that the suite tests. Each case requests a fresh pair.
pub trait Harness {
    /// Two transports of the fabric that can reach each other.
    fn pair(&mut self) -> Box<dyn Pair + '_>;

    /// The reason why this harness must not run a case, for the report; `None` when it may.
    fn skip(&self, case: &str) -> Option<&'static str> {
        let _ = case;
        None
    }
}

/// Two ends of a fabric, what can be done to them, and their time. Dropping it ends both.
pub trait Pair {
    /// The end that submits slices.
    fn initiator(&mut self) -> &mut dyn Transport;

    /// The end whose memory is read and written. Not called between [`kill_target`](Self::kill_target) and
    /// [`restart_target`](Self::restart_target).
    fn target(&mut self) -> &mut dyn Transport;

    /// Lets some time pass and returns the time: a virtual clock jumps to the next event, a real one sleeps
    /// for some microseconds (see [`WallClock`]). The suite then polls both ends.
    fn tick(&mut self) -> Instant;

    /// How long a slice or fence may take to end before the suite reports it as lost.
    fn patience(&self) -> Duration {
        Duration::from_secs(10)
    }

    /// How long a WRITE that has ended for its initiator may still be on its way; the suite watches for that
    /// time.
    fn late_max(&self) -> Duration {
        Duration::from_millis(100)
    }

    /// Memory for one end, where heap memory does not work: shared memory, memory of a device. Valid until
    /// the pair is dropped, aligned to 4096.
    fn allocate(&mut self, side: Side, bytes: usize) -> Option<MemSpan> {
        let _ = (side, bytes);
        None
    }

    /// How the suite reads and writes memory under test. Memory that the CPU cannot touch needs its own
    /// implementation.
    fn peek_poke(&self) -> Rc<dyn PeekPoke> {
        Rc::new(ByPointer)
    }

    /// The bytes of an export that contain the peer's address: the suite does not change them when it forges
    /// exports, because it must not connect to other hosts.
    fn address_bytes(&self, export: &[u8]) -> Range<usize> {
        let _ = export;
        0..0
    }

    /// The bytes of an export that are the access key, if they can be told apart: every bit of them must
    /// matter.
    fn key_bytes(&self, export: &[u8]) -> Option<Range<usize>> {
        let _ = export;
        None
    }

    /// The identity by which the target knows the initiator, where the fabric has identities. `None`: the
    /// cases about [`expel`](crate::Transport::expel) are skipped.
    fn initiator_identity(&self) -> Option<u64> {
        None
    }

    /// Kills the target's process without any message to the initiator.
    fn kill_target(&mut self) -> Hook {
        Hook::Unsupported("the harness cannot kill the target")
    }

    /// Starts a killed target again at the same address, as a new process with no regions.
    fn restart_target(&mut self) -> Hook {
        Hook::Unsupported("the harness cannot restart the target")
    }

    /// Stops the target's process (true) or continues it (false). The suite does not poll a stalled target;
    /// if another thread serves it, this must stop that, too.
    fn stall_target(&mut self, stalled: bool) -> Hook {
        let _ = stalled;
        Hook::Unsupported("the harness cannot stall the target")
    }

    /// Breaks the connection; both processes stay alive.
    fn cut(&mut self) -> Hook {
        Hook::Unsupported("the harness cannot cut the connection")
    }
}

/// Reads and writes memory under test, while a transport may be writing it.
pub trait PeekPoke {
    /// Copies the bytes of `span` into `out`, which has the same length.
    ///
    /// # Safety
    /// `span` lies in memory that the pair [allocated](Pair::allocate), or in mapped host memory to which no
    /// reference exists.
    unsafe fn peek(&self, span: MemSpan, out: &mut [u8]);

    /// Copies `bytes` into `span`, which has the same length.
    ///
    /// # Safety
    /// As for [`peek`](Self::peek).
    unsafe fn poke(&self, span: MemSpan, bytes: &[u8]);
}

/// Host memory, by its address.
#[derive(Clone, Copy, Debug, Default)]
pub struct ByPointer;

impl PeekPoke for ByPointer {
    unsafe fn peek(&self, span: MemSpan, out: &mut [u8]) {
        // SAFETY: mapped host memory without references to it, as the caller promised.
        let read = unsafe { VolatileSpan::new(span) }.read(0, out);
        assert!(read.is_ok(), "{} bytes were to be read from a span of {} bytes", out.len(), span.len());
    }

    unsafe fn poke(&self, span: MemSpan, bytes: &[u8]) {
        // SAFETY: as in `peek`.
        let written = unsafe { VolatileSpan::new(span) }.write(0, bytes);
        assert!(
            written.is_ok(),
            "{} bytes were to be written to a span of {} bytes",
            bytes.len(),
            span.len()
        );
    }
}

/// One end of a [`Pair`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Side {
    /// The end that submits.
    Initiator,
    /// The end whose memory is read and written.
    Target,
}

/// Whether the harness could do what the suite requested.
#[must_use]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hook {
    /// It did.
    Done,
    /// It cannot, for this reason; the case is skipped.
    Unsupported(&'static str),
}

/// The laws, as in the documentation of [`Transport`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[allow(missing_docs, reason = "the laws are documented at the trait")]
pub enum Law {
    L1,
    L2,
    L3,
    L4,
    L5,
    L6,
    L7,
    L8,
}

/// One case of the suite.
#[derive(Clone, Copy)]
pub struct Case {
    /// The name: a sentence, with underscores.
    pub name: &'static str,
    /// The law that it checks first; the rig checks L1 in every case.
    pub law: Law,
    run: fn(&mut Rig<'_>) -> Result<(), Skip>,
}

/// How a case ended. A violation panics instead.
#[must_use]
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The law held.
    Passed,
    /// It was not checked, for this reason.
    Skipped(String),
}

/// The results of the suite.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// The cases that were run, with their verdicts.
    pub verdicts: Vec<(&'static str, Verdict)>,
}

/// Every case of the suite.
#[must_use]
pub fn cases() -> &'static [Case] {
    cases::CASES
}

/// Runs the whole suite.
///
/// # Panics
/// With a sentence, at the first violation of a law.
pub fn conformance(harness: &mut dyn Harness) -> Report {
    Report { verdicts: cases().iter().map(|case| (case.name, run(case, harness))).collect() }
}

/// Runs the cases of one law.
///
/// # Panics
/// As [`conformance`].
pub fn conformance_of_law(law: Law, harness: &mut dyn Harness) -> Report {
    let of_law = cases().iter().filter(|case| case.law == law);
    Report { verdicts: of_law.map(|case| (case.name, run(case, harness))).collect() }
}

/// Runs one case.
///
/// # Panics
/// As [`conformance`], and when there is no such case.
pub fn run_case(name: &str, harness: &mut dyn Harness) -> Verdict {
    match cases().iter().find(|case| case.name == name) {
        Some(case) => run(case, harness),
        None => panic!("the suite has no case {name}"),
    }
}

/// Runs one case for a test: it passes, or it is skipped and listed in `skips`. A case in `may_skip`, which
/// depends on timing, may do either.
///
/// # Panics
/// As [`run_case`]; when the case is skipped and not declared, or declared and not skipped; when a list names
/// no case.
pub fn check_case(name: &str, harness: &mut dyn Harness, skips: &[&str], may_skip: &[&str]) {
    let mut declared = skips.iter().chain(may_skip);
    let unknown = declared.find(|skip| cases().iter().all(|case| case.name != **skip));
    assert!(unknown.is_none(), "the suite has no case {unknown:?}, which is declared as skipped");
    match (run_case(name, harness), skips.contains(&name)) {
        (Verdict::Passed, false) | (Verdict::Skipped(_), true) => {}
        (Verdict::Skipped(_), false) if may_skip.contains(&name) => {}
        (Verdict::Skipped(reason), false) => {
            panic!("{name} was skipped ({reason}): declare it with `skips [{name}]`, or make it run")
        }
        (Verdict::Passed, true) => {
            panic!("{name} passed, though it is declared as skipped: remove it from `skips`")
        }
    }
}

fn run(case: &Case, harness: &mut dyn Harness) -> Verdict {
    if let Some(reason) = harness.skip(case.name) {
        return Verdict::Skipped(reason.into());
    }
    match Rig::new(case.law, harness.pair()).and_then(|mut rig| (case.run)(&mut rig)) {
        Ok(()) => Verdict::Passed,
        Err(Skip(reason)) => Verdict::Skipped(reason),
    }
}

impl Report {
    /// The number of cases that passed.
    #[must_use]
    pub fn passed(&self) -> usize {
        self.verdicts.iter().filter(|(_, verdict)| *verdict == Verdict::Passed).count()
    }

    /// The cases that were skipped, with their reasons.
    pub fn skipped(&self) -> impl Iterator<Item = (&'static str, &str)> {
        self.verdicts.iter().filter_map(|(name, verdict)| match verdict {
            Verdict::Passed => None,
            Verdict::Skipped(reason) => Some((*name, reason.as_str())),
        })
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (name, verdict) in &self.verdicts {
            match verdict {
                Verdict::Passed => writeln!(f, "passed   {name}")?,
                Verdict::Skipped(reason) => writeln!(f, "skipped  {name}: {reason}")?,
            }
        }
        write!(f, "{} passed, {} skipped", self.passed(), self.verdicts.len() - self.passed())
    }
}

/// Expands to one `#[test]` per case of the suite, so that a failure has a name. Takes an expression that
/// makes a [`Harness`], and the cases that cannot run on it: any other case that is skipped fails, and so
/// does a listed one that passes. `may_skip [...]` after them lists cases that may do either. Several in one
/// crate need a module each.
///
/// ```
/// # mod tests {
/// use te_core::sim::SimConfig;
/// use te_core::testkit::SimHarness;
///
/// te_core::conformance_tests!(SimHarness::new(1, SimConfig::CALM), skips [
///     a_caller_driven_transport_releases_memory_in_the_next_poll,
///     a_slice_off_the_granule_is_refused_before_a_byte_moves,
/// ]);
/// # }
/// ```
#[macro_export]
macro_rules! conformance_tests {
    (@names [$($skip:ident),* $(,)?]) => {
        &[$(stringify!($skip)),*]
    };
    (@tests ($harness:expr, $skips:tt, $may_skip:tt) [$($law:ident $module:ident $name:ident,)*]) => {$(
        #[test]
        fn $name() {
            let skips: &[&str] = $crate::conformance_tests!(@names $skips);
            let may_skip: &[&str] = $crate::conformance_tests!(@names $may_skip);
            $crate::testkit::check_case(stringify!($name), &mut $harness, skips, may_skip);
        }
    )*};
    (@table () [$($law:ident $module:ident $name:ident,)*]) => {
        &[$($crate::testkit::Case {
            name: stringify!($name),
            law: $crate::testkit::Law::$law,
            run: $module::$name,
        },)*]
    };
    (@for $what:ident $args:tt) => {
        $crate::conformance_tests! { @$what $args [
            L1 completion every_accepted_slice_completes_exactly_once,
            L1 completion a_slice_that_was_not_accepted_never_completes,
            L1 completion a_refused_batch_leaves_nothing_behind,
            L1 completion poll_with_no_room_loses_nothing,
            L1 completion completions_come_one_at_a_time_if_asked,
            L1 completion an_idle_transport_completes_nothing,
            L1 content a_write_puts_the_bytes_there_at_odd_offsets_and_lengths,
            L1 content a_read_brings_the_bytes_at_odd_offsets_and_lengths,
            L1 content overlapping_reads_agree,
            L1 content a_slice_of_the_longest_length_arrives_whole,
            L1 content what_was_written_is_read_back,
            L2 late a_finished_read_never_writes_again,
            L2 late a_cancelled_read_never_writes_again,
            L2 late a_read_cancelled_under_a_stalled_target_never_writes_again,
            L2 late the_source_of_a_finished_write_is_free_for_reuse,
            L2 late outcomes_are_honest_under_cancels,
            L2 checksum a_reported_checksum_is_that_of_the_bytes_that_arrived,
            L2 late a_region_in_use_cannot_be_deregistered,
            L2 late a_remote_region_in_use_cannot_be_detached,
            L3 cancel cancel_before_the_first_poll_ends_the_slice,
            L3 cancel cancel_in_mid_flight_ends_every_slice_once,
            L3 cancel cancel_of_something_finished_is_not_found,
            L3 cancel cancel_of_nothing_is_not_found,
            L3 cancel a_cancel_ends_the_slice_even_when_the_target_is_stalled,
            L3 cancel a_cancel_does_not_disturb_its_neighbours,
            L3 cancel a_caller_driven_transport_releases_memory_in_the_next_poll,
            L4 capacity submit_and_poll_do_not_allocate,
            L4 capacity a_full_transport_accepts_a_prefix_and_the_rest_later,
            L4 capacity no_more_than_inflight_max_are_accepted,
            L5 fence a_fence_on_a_quiet_remote_region_is_acknowledged,
            L5 fence after_a_fence_nothing_lands,
            L5 fence after_a_fence_nothing_lands_that_a_stalled_target_held_back,
            L5 fence a_fence_leaves_slices_in_flight_alone,
            L5 fence a_fence_needs_a_remote_region,
            L5 fence a_fence_to_a_dead_target_ends,
            L5 fence a_fence_after_a_restart_ends_and_holds,
            L6 access out_of_range_by_one_is_refused,
            L6 access a_huge_length_is_refused,
            L6 access a_zero_length_is_refused,
            L6 access a_read_only_export_cannot_be_written,
            L6 access a_write_only_export_cannot_be_read,
            L6 access local_rights_are_kept_too,
            L6 access a_private_region_cannot_be_exported,
            L6 access unknown_and_stale_ids_are_refused,
            L6 access a_registered_again_region_does_not_answer_to_its_old_export,
            L6 access a_deregistered_region_is_out_of_reach,
            L6 access a_taken_index_is_busy,
            L6 export a_truncated_export_is_refused_at_every_length,
            L6 export a_forged_export_reaches_nothing_else,
            L6 export a_wrong_key_opens_nothing,
            L6 export garbage_is_not_an_export,
            L7 volatile what_a_peer_writes_shows_through_a_volatile_span,
            L7 volatile a_peer_reads_what_was_written_through_a_volatile_span,
            L1 death when_the_target_dies_every_slice_ends_once,
            L2 death after_a_restart_an_old_remote_region_is_refused_and_never_misread,
            L6 death after_a_restart_a_new_export_works,
            L5 expel nothing_of_an_expelled_initiator_lands,
            L5 expel nothing_lands_of_an_initiator_that_was_expelled_while_it_was_stopped,
            L6 expel an_expelled_initiator_is_refused_with_the_reason,
            L6 expel a_connected_initiator_is_left_alone_without_force,
            L6 expel expelling_one_initiator_does_not_disturb_another,
            L6 expel the_identity_0_is_refused,
            L1 death a_cut_connection_ends_every_slice_and_heals,
            L8 kinds memory_of_another_kind_is_refused_before_it_is_touched,
            L8 kinds a_slice_off_the_granule_is_refused_before_a_byte_moves,
        ] }
    };
    ($harness:expr $(,)?) => {
        $crate::conformance_tests! { @for tests ($harness, [], []) }
    };
    ($harness:expr, skips $skips:tt $(,)?) => {
        $crate::conformance_tests! { @for tests ($harness, $skips, []) }
    };
    ($harness:expr, skips $skips:tt, may_skip $may_skip:tt $(,)?) => {
        $crate::conformance_tests! { @for tests ($harness, $skips, $may_skip) }
    };
}

#[cfg(feature = "std")]
mod wall_clock {
    use crate::Instant;
    use core::time::Duration;

    /// The real time, for harnesses of real fabrics.
    #[derive(Clone, Copy, Debug)]
    pub struct WallClock {
        epoch: std::time::Instant,
        pause: Duration,
    }

    impl WallClock {
        /// A clock that starts now and sleeps for `pause` at each tick.
        #[must_use]
        pub fn new(pause: Duration) -> Self {
            Self { epoch: std::time::Instant::now(), pause }
        }

        /// The implementation of [`Pair::tick`](super::Pair::tick).
        #[must_use]
        pub fn tick(&self) -> Instant {
            match self.pause.is_zero() {
                true => std::thread::yield_now(),
                false => std::thread::sleep(self.pause),
            }
            self.now()
        }

        /// The time since the start.
        #[must_use]
        pub fn now(&self) -> Instant {
            Instant::ZERO + self.epoch.elapsed()
        }
    }
}
