//! The suite finds violations: for each law there is a transport that breaks just that law, and a case that
//! reports it.
//!
//! Each `Flaw` changes one thing in a transport that keeps the laws. `caught` runs the cases of one law and
//! expects a panic whose sentence names law and flaw; `nothing_else_is_wrong` checks the wrapper without a
//! flaw.

use std::alloc::System;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};

use te_core::sim::{SimConfig, SimTransport};
use te_core::testkit::{CountingAlloc, Law, SimHarness, conformance, conformance_of_law};
use te_core::{
    Access, Capabilities, Completion, Error, ErrorKind, ExpelMode, Features, Instant, Location, MemSpan,
    Memory, MemoryKinds, Op, Outcome, RegionId, RemoteOffset, RemoteRegionId, Slice, Token, Transport,
};

#[global_allocator]
static ALLOC: CountingAlloc<System> = CountingAlloc::new(System);

#[derive(Clone, Copy, PartialEq, Eq)]
enum Flaw {
    None,
    // L1
    CompletesTwice,
    LosesACompletion,
    CompletesWhatItRefused,
    ForgetsTheLastBytes,
    DropsCompletionsWithoutRoom,
    // L2
    WritesAfterARead,
    WritesAfterACancelledRead,
    SaysAppliedTooSoon,
    SaysNotAppliedAlways,
    ContradictsItself,
    DeregistersInUse,
    ReadsTheSourceLate,
    ReportsAWrongChecksum,
    ChecksumsWhatFailed,
    // L3
    CancelNeverCompletes,
    CancelEndsTwice,
    CancelsAnything,
    CancelsTheNeighbour,
    SaysCallerDrivenAndIsNot,
    // L4
    AllocatesInPoll,
    AllocatesInSubmit,
    FullIsAnError,
    TakesMoreThanItSays,
    // L5
    FenceEndsAtOnce,
    FenceNeverEnds,
    FenceOnNothing,
    FenceCancels,
    // L6
    GrantsEveryRight,
    ExportsMore,
    NeverForgets,
    TakesHalfAnExport,
    RefusalCutsTheConnection,
    AcceptsNothingSlices,
    // The expulsion of initiators, L5 and L6
    ExpelsNone,
    ExpelsLate,
    ExpelsAll,
    ExpelsTheConnected,
    ExpelsSilently,
    // L7
    RegistersACopy,
    // L8
    TakesMemoryOfAnyKind,
    KeepsTheRegionItRefused,
    MovesPartsOfGranules,
}

/// Checks that the cases of `law` find the flaw and report it in a sentence with these words.
fn caught(flaw: Flaw, law: Law, words: &str, config: SimConfig) {
    let outcome = catch_unwind(AssertUnwindSafe(|| conformance_of_law(law, &mut harness(flaw, config))));
    let panic = outcome.expect_err("the suite passed a broken transport");
    let sentence = panic.downcast_ref::<String>().map_or("no sentence", String::as_str);
    assert!(sentence.starts_with(&format!("{law:?} broken: ")) && sentence.contains(words), "{sentence}");
}

fn harness(flaw: Flaw, config: SimConfig) -> SimHarness {
    SimHarness::wrapped(99, config, move |_, sim| Box::new(Broken::new(flaw, sim)))
}

#[test]
fn nothing_else_is_wrong_with_the_wrapper() {
    let report = conformance(&mut harness(Flaw::None, SimConfig::CALM));
    // A law that it does not promise to keep is skipped.
    let skipped: Vec<&str> = report.skipped().map(|(case, _)| case).collect();
    let not_offered = [
        "a_caller_driven_transport_releases_memory_in_the_next_poll",
        "a_slice_off_the_granule_is_refused_before_a_byte_moves",
    ];
    assert_eq!(skipped, not_offered, "{report}");
}

macro_rules! catches {
    ($($law:ident $flaw:ident as $name:ident: $words:literal,)*) => {$(
        #[test]
        fn $name() {
            caught(Flaw::$flaw, Law::$law, $words, SimConfig::CALM);
        }
    )*};
}

catches! {
    L1 CompletesTwice as a_slice_that_completes_twice_is_caught: "completed twice",
    L1 LosesACompletion as a_lost_completion_is_caught: "never completed",
    L1 CompletesWhatItRefused as a_completion_of_a_refused_slice_is_caught: "never accepted",
    L1 ForgetsTheLastBytes as bytes_that_never_arrive_are_caught: "the two ends differ",
    L1 DropsCompletionsWithoutRoom as completions_lost_for_want_of_room_are_caught: "never completed",
    L2 WritesAfterARead as a_late_local_write_is_caught: "a finished READ changed",
    L2 WritesAfterACancelledRead as a_late_local_write_after_a_cancel_is_caught: "a cancelled READ changed",
    L2 SaysAppliedTooSoon as an_applied_that_is_not_is_caught: "the two ends differ",
    L2 SaysNotAppliedAlways as a_not_applied_that_was_is_caught: "ended NotApplied",
    L2 ContradictsItself as an_ok_without_applied_is_caught: "contradicts itself",
    L2 ReportsAWrongChecksum as a_checksum_of_other_bytes_is_caught: "reported the checksum 00000000",
    L2 ChecksumsWhatFailed as a_checksum_of_what_was_not_applied_is_caught: "a checksum of what was not applied",
    L2 DeregistersInUse as deregistering_memory_in_use_is_caught: "was deregistered while",
    L2 ReadsTheSourceLate as reading_the_source_of_a_finished_write_is_caught: "read its source again",
    L3 CancelNeverCompletes as a_cancel_that_never_completes_is_caught: "never completed",
    L3 CancelsAnything as a_cancel_of_nothing_that_succeeds_is_caught: "not NotFound",
    L3 CancelsTheNeighbour as a_cancel_of_the_wrong_slice_is_caught: "that was not cancelled",
    L3 SaysCallerDrivenAndIsNot as a_promise_of_caller_driven_that_is_not_kept_is_caught: "has not ended, though",
    L4 AllocatesInPoll as an_allocating_poll_is_caught: "allocated",
    L4 AllocatesInSubmit as an_allocating_submit_is_caught: "allocated",
    L4 FullIsAnError as being_full_as_an_error_is_caught: "being full",
    L4 TakesMoreThanItSays as more_than_inflight_max_is_caught: "more than inflight_max",
    L5 FenceEndsAtOnce as a_fence_that_lies_is_caught: "landed after",
    L5 FenceNeverEnds as a_fence_that_never_ends_is_caught: "never completed",
    L5 FenceOnNothing as a_fence_on_nothing_is_caught: "not attached",
    L5 FenceCancels as a_fence_that_ends_other_slices_is_caught: "ended a slice in flight",
    L6 GrantsEveryRight as rights_that_are_not_kept_are_caught: "does not grant was carried out",
    L6 ExportsMore as an_access_check_that_is_off_by_one_is_caught: "leaves the remote region was carried out",
    L6 NeverForgets as a_region_reached_after_its_end_is_caught: "has deregistered was carried out",
    L6 TakesHalfAnExport as a_truncated_export_that_attaches_is_caught: "taken for a whole one",
    L6 RefusalCutsTheConnection as a_refusal_that_costs_the_connection_is_caught: "never refused, only lost",
    L6 AcceptsNothingSlices as a_slice_without_bytes_that_passes_is_caught: "without bytes was carried out",
    L5 ExpelsNone as an_expulsion_that_does_nothing_is_caught: "landed after it had been expelled",
    L5 ExpelsLate as an_expulsion_that_is_reported_too_soon_is_caught: "landed after it had been expelled",
    L6 ExpelsAll as an_expulsion_of_the_wrong_one_is_caught: "expelling another ended a slice",
    L6 ExpelsTheConnected as an_expulsion_of_a_live_peer_without_force_is_caught: "not Busy",
    L6 ExpelsSilently as an_expelled_initiator_that_gets_no_reason_is_caught: "never saw that it was expelled",
    L7 RegistersACopy as memory_that_is_only_a_copy_is_caught: "does not show",
    L8 TakesMemoryOfAnyKind as memory_of_a_kind_that_is_not_declared_is_caught: "gave Ok(()), not Unsupported",
    L8 KeepsTheRegionItRefused as a_refused_region_that_stays_is_caught: "of a region that was refused gave Ok(())",
}

#[test]
fn a_slice_off_the_granule_that_is_carried_out_is_caught() {
    let mut config = SimConfig::CALM;
    config.granule_bytes = 512;
    caught(Flaw::MovesPartsOfGranules, Law::L8, "off the granule was carried out", config);
}

#[test]
fn a_cancel_that_ends_a_slice_twice_is_caught_as_a_second_completion() {
    let outcome =
        catch_unwind(|| conformance_of_law(Law::L3, &mut harness(Flaw::CancelEndsTwice, SimConfig::CALM)));
    let panic = outcome.expect_err("the suite passed a broken transport");
    let sentence = panic.downcast_ref::<String>().expect("a sentence");
    assert!(sentence.starts_with("L1 broken: ") && sentence.contains("completed twice"), "{sentence}");
}

#[test]
fn a_fence_that_lies_is_caught_on_a_lossy_fabric_too() {
    caught(Flaw::FenceEndsAtOnce, Law::L5, "landed after", SimConfig::STORMY);
}

/// A transport with one flaw.
struct Broken {
    flaw: Flaw,
    inner: SimTransport,
    /// Completions that the flaw invents, returned at the next poll.
    extra: VecDeque<Completion>,
    canceled: Vec<Token>,
    slices: Vec<Slice>,
    regions: Vec<(RegionId, MemSpan)>,
    shadows: Vec<Box<[u8]>>,
    pending: Vec<(u32, Slice)>,
    last_read: Option<MemSpan>,
    counter: u64,
    dead: bool,
    /// The initiator to expel, and the number of polls until then.
    expulsion: Option<(u64, u32)>,
}

impl Broken {
    fn new(flaw: Flaw, inner: SimTransport) -> Self {
        Self {
            flaw,
            inner,
            extra: VecDeque::with_capacity(1024),
            canceled: Vec::with_capacity(1 << 16),
            slices: Vec::with_capacity(1 << 16),
            regions: Vec::new(),
            shadows: Vec::new(),
            pending: Vec::with_capacity(1 << 10),
            last_read: None,
            counter: 0,
            dead: false,
            expulsion: None,
        }
    }

    fn span_of(&self, slice: &Slice) -> Option<MemSpan> {
        let (_, span) = self.regions.iter().find(|(id, _)| *id == slice.local.region)?;
        span.part(slice.local.offset, u64::from(slice.len)).ok()
    }

    /// True once in a while.
    fn now_and_then(&mut self) -> bool {
        self.counter += 1;
        self.counter.is_multiple_of(5)
    }

    fn falsify(&mut self, mut completion: Completion) -> Option<Completion> {
        let slice = self.slices.iter().rev().find(|slice| slice.token == completion.token).copied();
        let is_slice = slice.is_some();
        let canceled = self.canceled.contains(&completion.token);
        let random =
            matches!(self.flaw, Flaw::CompletesTwice | Flaw::LosesACompletion) && self.now_and_then();
        match self.flaw {
            Flaw::CompletesTwice if random => self.extra.push_back(completion),
            Flaw::LosesACompletion if is_slice && random => return None,
            Flaw::WritesAfterARead | Flaw::WritesAfterACancelledRead => {
                let wanted = canceled == (self.flaw == Flaw::WritesAfterACancelledRead);
                if let Some(slice) = slice.filter(|slice| slice.op == Op::Read && wanted) {
                    self.last_read = self.span_of(&slice);
                }
            }
            Flaw::SaysAppliedTooSoon if canceled && completion.outcome != Outcome::Applied => {
                completion = Completion::applied(completion.token);
            }
            Flaw::SaysNotAppliedAlways if canceled && completion.outcome == Outcome::Applied => {
                completion = Completion::not_applied(completion.token, ErrorKind::Canceled.into());
            }
            Flaw::ContradictsItself if is_slice => completion.outcome = Outcome::NotApplied,
            Flaw::ReportsAWrongChecksum if is_slice && completion.result.is_ok() => {
                completion = completion.with_crc32c(0);
            }
            Flaw::ChecksumsWhatFailed if is_slice && completion.result.is_err() => {
                completion = completion.with_crc32c(0);
            }
            Flaw::ExpelsSilently if completion.result == Err(ErrorKind::Expelled.into()) => {
                completion.result = Err(ErrorKind::PeerDead.into());
            }
            Flaw::CancelNeverCompletes if canceled => return None,
            Flaw::CancelEndsTwice if canceled => self.extra.push_back(completion),
            _ => {}
        }
        Some(completion)
    }
}

impl Memory for Broken {
    unsafe fn register(&mut self, id: RegionId, span: MemSpan, access: Access) -> Result<(), Error> {
        let (span, access) = match self.flaw {
            Flaw::GrantsEveryRight => (span, Access::all()),
            // The suite's buffers have guards behind them.
            Flaw::TakesMemoryOfAnyKind => (span.at(Location::Host), access),
            Flaw::KeepsTheRegionItRefused
                if span.location().kind() != MemoryKinds::HOST && access == Access::all() =>
            {
                // SAFETY: the simulated fabric touches a region only for slices, and no slice is of this one.
                unsafe { self.inner.register(id, span.at(Location::Host), access)? };
                return Err(ErrorKind::Unsupported.into());
            }
            Flaw::ExportsMore => (MemSpan::new(span.as_ptr(), span.len() + 100), access),
            Flaw::RegistersACopy => {
                let mut shadow = vec![0u8; span.len()].into_boxed_slice();
                let copy = MemSpan::new(shadow.as_mut_ptr(), shadow.len());
                self.shadows.push(shadow);
                (copy, access)
            }
            // The region that it has not forgotten occupies the index: it is moved, and the old memory stays
            // reachable under the new id.
            Flaw::NeverForgets => {
                self.regions.retain(|(known, _)| known.index != id.index);
                let _absent_or_not =
                    self.inner.deregister(RegionId::new(id.index, id.generation.wrapping_sub(1)));
                (span, access)
            }
            _ => (span, access),
        };
        // SAFETY: the caller's promise, stretched as far as this test's flaws need it: the suite's guards are
        // mapped, too, and a shadow exists as long as `self`.
        unsafe { self.inner.register(id, span, access)? };
        self.regions.push((id, span));
        Ok(())
    }

    fn deregister(&mut self, id: RegionId) -> Result<(), Error> {
        if self.flaw == Flaw::NeverForgets && self.regions.iter().any(|(known, _)| *known == id) {
            return Ok(());
        }
        match self.inner.deregister(id) {
            Err(error) if error.kind == ErrorKind::Busy && self.flaw == Flaw::DeregistersInUse => Ok(()),
            other => other,
        }
    }

    fn export(&self, id: RegionId, out: &mut [u8]) -> Result<usize, Error> {
        self.inner.export(id, out)
    }

    fn attach(&mut self, id: RemoteRegionId, blob: &[u8]) -> Result<(), Error> {
        match self.inner.attach(id, blob) {
            Err(error)
                if self.flaw == Flaw::TakesHalfAnExport && error.kind == ErrorKind::InvalidArgument =>
            {
                Ok(())
            }
            other => other,
        }
    }

    fn detach(&mut self, id: RemoteRegionId) -> Result<(), Error> {
        self.inner.detach(id)
    }
}

impl Transport for Broken {
    fn name(&self) -> &'static str {
        "broken"
    }

    fn capabilities(&self) -> Capabilities {
        let mut capabilities = self.inner.capabilities();
        if self.flaw == Flaw::TakesMoreThanItSays {
            capabilities.inflight_max /= 2;
        }
        if self.flaw == Flaw::SaysCallerDrivenAndIsNot {
            capabilities.features |= Features::CALLER_DRIVEN;
        }
        capabilities
    }

    fn submit(&mut self, batch: &[Slice]) -> Result<usize, Error> {
        if self.dead {
            return Err(ErrorKind::Rail.into());
        }
        if self.flaw == Flaw::AllocatesInSubmit {
            drop(std::hint::black_box(batch.to_vec()));
        }
        let granule = self.inner.capabilities().granule_bytes;
        let other = |slice: &Slice| match self.flaw {
            Flaw::ForgetsTheLastBytes => Slice { len: slice.len.div_ceil(2), ..*slice },
            Flaw::MovesPartsOfGranules => Slice {
                remote: RemoteOffset::new(
                    slice.remote.region,
                    slice.remote.offset / u64::from(granule) * u64::from(granule),
                ),
                len: slice.len.next_multiple_of(granule),
                ..*slice
            },
            _ => *slice,
        };
        let mut others = Vec::new();
        let mut batch = batch;
        if matches!(self.flaw, Flaw::ForgetsTheLastBytes | Flaw::MovesPartsOfGranules) {
            others.extend(batch.iter().map(other));
            batch = &others;
        }
        if let (Flaw::AcceptsNothingSlices, [Slice { len: 0, token, .. }, ..]) = (self.flaw, batch) {
            self.extra.push_back(Completion::applied(*token));
            return Ok(1);
        }
        if self.flaw == Flaw::ReadsTheSourceLate {
            // Reports the end at once, and sends at any later time.
            for slice in batch.iter().filter(|slice| slice.op == Op::Write) {
                self.extra.push_back(Completion::applied(slice.token));
                self.pending.push((6, *slice));
            }
            if batch.iter().all(|slice| slice.op == Op::Write) {
                return Ok(batch.len());
            }
        }
        let accepted = self.inner.submit(batch);
        match (self.flaw, accepted) {
            (Flaw::CompletesWhatItRefused, Ok(count)) if count < batch.len() => {
                let token = batch[count].token;
                self.extra.push_back(Completion::not_applied(token, ErrorKind::NotFound.into()));
            }
            (Flaw::FullIsAnError, Ok(0)) if !batch.is_empty() => return Err(ErrorKind::Full.into()),
            (Flaw::RefusalCutsTheConnection, Err(_)) => self.dead = true,
            _ => {}
        }
        if let Ok(count) = accepted {
            let room = self.slices.capacity() - self.slices.len();
            if room < count {
                self.slices.drain(..self.slices.len() / 2);
            }
            self.slices.extend_from_slice(&batch[..count]);
        }
        accepted
    }

    fn poll(&mut self, now: Instant, out: &mut [Completion]) -> usize {
        if self.flaw == Flaw::AllocatesInPoll {
            drop(std::hint::black_box(vec![0u8; 8]));
        }
        if let Some(span) = self.last_read.take_if(|_| self.counter.is_multiple_of(3)) {
            // SAFETY: the suite keeps its buffers; writing now, after the completion, is the flaw.
            unsafe { span.as_ptr().write(0xEE) };
        }
        self.counter += u64::from(self.last_read.is_some());
        self.pending.iter_mut().for_each(|(wait, _)| *wait -= 1);
        while let Some(at) = self.pending.iter().position(|(wait, _)| *wait == 0) {
            let (_, slice) = self.pending.swap_remove(at);
            let _lost_or_not = self.inner.submit(&[Slice { token: Token(slice.token.0 | 1 << 63), ..slice }]);
        }
        if let Some((peer, polls)) = &mut self.expulsion {
            *polls -= 1;
            if *polls == 0 {
                let _gone = self.inner.expel(*peer, ExpelMode::Force);
                self.expulsion = None;
            }
        }
        let mut written = 0;
        while written < out.len() {
            let Some(extra) = self.extra.pop_front() else { break };
            out[written] = extra;
            written += 1;
        }
        if self.flaw == Flaw::DropsCompletionsWithoutRoom && out.is_empty() {
            self.inner.poll(now, &mut [Completion::applied(Token(0))]);
        }
        let from = written;
        let count = self.inner.poll(now, &mut out[from..]);
        for at in from..from + count {
            let mine = self.flaw == Flaw::ReadsTheSourceLate && out[at].token.0 >> 63 == 1;
            if let Some(completion) = (!mine).then(|| self.falsify(out[at])).flatten() {
                out[written] = completion;
                written += 1;
            }
        }
        written
    }

    fn poll_at(&self) -> Option<Instant> {
        self.inner.poll_at()
    }

    fn cancel(&mut self, token: Token) -> Result<(), Error> {
        let cancelled = self.inner.cancel(token);
        if cancelled.is_ok() && self.canceled.len() < self.canceled.capacity() {
            self.canceled.push(token);
        }
        match self.flaw {
            Flaw::CancelsAnything => Ok(()),
            Flaw::CancelsTheNeighbour => {
                let at = self.slices.iter().position(|slice| slice.token == token);
                if let Some(neighbour) = at.and_then(|at| self.slices.get(at + 1)) {
                    let _done_or_not = self.inner.cancel(neighbour.token);
                }
                cancelled
            }
            _ => cancelled,
        }
    }

    fn fence(&mut self, token: Token, remote_region: RemoteRegionId) -> Result<(), Error> {
        match self.flaw {
            Flaw::FenceEndsAtOnce if remote_region == RemoteRegionId::new(0, 1) => {
                self.extra.push_back(Completion::applied(token))
            }
            Flaw::FenceOnNothing if self.inner.fence(token, remote_region).is_err() => {
                self.extra.push_back(Completion::applied(token));
            }
            Flaw::FenceOnNothing | Flaw::FenceNeverEnds => {}
            Flaw::FenceCancels => {
                for slice in self.slices.iter().rev().take(32) {
                    let _done_or_not = self.inner.cancel(slice.token);
                }
                return self.inner.fence(token, remote_region);
            }
            _ => return self.inner.fence(token, remote_region),
        }
        Ok(())
    }

    fn is_connected(&self, peer: u64) -> bool {
        self.inner.is_connected(peer)
    }

    fn expel(&mut self, peer: u64, mode: ExpelMode) -> Result<bool, Error> {
        match self.flaw {
            Flaw::ExpelsNone if peer != 0 => Ok(true),
            Flaw::ExpelsLate => {
                self.expulsion = Some((peer, 8));
                Ok(true)
            }
            Flaw::ExpelsAll => {
                for bit in 0..64 {
                    let _gone = self.inner.expel(peer ^ 1 << bit, ExpelMode::Force);
                }
                self.inner.expel(peer, mode)
            }
            Flaw::ExpelsTheConnected => self.inner.expel(peer, ExpelMode::Force),
            _ => self.inner.expel(peer, mode),
        }
    }
}
