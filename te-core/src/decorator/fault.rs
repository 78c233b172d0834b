//! A transport that fails, at random or at the n-th call or slice, and reports each failure correctly.
#![allow(unsafe_code, reason = "forwards `register`, whose promise the caller made")]

use alloc::string::String;
use core::time::Duration;

use super::access_inner;
use super::held::{Held, given_up};
use crate::{
    Capabilities, Completion, Error, ErrorKind, EventSource, ExpelMode, Features, Instant, RegionId,
    RemoteRegionId, Slice, Token, Transport,
};

/// How often each fault happens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct FaultConfig {
    /// Calls of `submit` that accept nothing, per million.
    pub submit_refused_ppm: u32,
    /// The error of a refused `submit`; `None` for a short count, as when the transport is full.
    pub submit_error: Option<Error>,
    /// Slices and fences that succeeded and are reported as failed, per million.
    pub completion_failed_ppm: u32,
    /// The error with which they are reported.
    pub completion_error: Error,
    /// Slices whose completion is lost, per million: they end `TimedOut`.
    pub slice_dropped_ppm: u32,
    /// How long after their acceptance they end.
    pub drop_timeout: Duration,
}

impl Default for FaultConfig {
    /// No faults except those that `refuse_nth_submit`, `fail_nth_completion` and `drop_nth_slice` order.
    fn default() -> Self {
        Self {
            submit_refused_ppm: 0,
            submit_error: None,
            completion_failed_ppm: 0,
            completion_error: Error::new(ErrorKind::Rail),
            slice_dropped_ppm: 0,
            drop_timeout: Duration::from_millis(20),
        }
    }
}

/// The number of faults that a [`Fault`] has caused.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct FaultCounters {
    /// Calls of `submit` that were refused.
    pub submits_refused: u64,
    /// Completions that were turned into failures.
    pub completions_failed: u64,
    /// Slices whose completion was lost.
    pub slices_dropped: u64,
}

/// Refuses, fails and loses slices. A slice that it fails has been carried out by the inner transport;
/// therefore it reports a READ as `NotApplied` (the local range holds anything) and a WRITE or fence as
/// `Unknown`.
#[derive(Debug)]
pub struct Fault<T> {
    inner: T,
    config: FaultConfig,
    counters: FaultCounters,
    held: Held,
    random: u64,
    refuse_in: u64,
    fail_in: u64,
    drop_in: u64,
    turned_away: bool,
    now: Instant,
}

access_inner!(Fault);

impl<T: Transport> Fault<T> {
    /// A transport around `inner` with the faults of `config`; `seed` decides which slices they hit.
    #[must_use]
    pub fn new(inner: T, seed: u64, config: FaultConfig) -> Self {
        let held = Held::new(inner.capabilities().inflight_max);
        Self {
            inner,
            config,
            counters: FaultCounters::default(),
            held,
            random: seed,
            refuse_in: 0,
            fail_in: 0,
            drop_in: 0,
            turned_away: false,
            now: Instant::ZERO,
        }
    }

    /// Changes the faults from now on.
    pub fn set_config(&mut self, config: FaultConfig) {
        self.config = config;
    }

    /// Refuses the `n`-th `submit` from now, once; 1 is the next one, 0 refuses none.
    pub fn refuse_nth_submit(&mut self, n: u64) {
        self.refuse_in = n;
    }

    /// Fails the `n`-th completion from now, once; 1 is the next one, 0 fails none. A completion that failed
    /// by itself counts.
    pub fn fail_nth_completion(&mut self, n: u64) {
        self.fail_in = n;
    }

    /// Loses the completion of the `n`-th slice that is accepted from now, once; 1 is the next one, 0 loses
    /// none.
    pub fn drop_nth_slice(&mut self, n: u64) {
        self.drop_in = n;
    }

    /// The number of faults so far.
    #[must_use]
    pub fn counters(&self) -> FaultCounters {
        self.counters
    }

    /// splitmix64, as a number per million.
    fn chance(&mut self, ppm: u32) -> bool {
        if ppm == 0 {
            return false;
        }
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.random ^ (self.random >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((u128::from(z ^ (z >> 31)) * 1_000_000) >> 64) < u128::from(ppm)
    }
}

/// Counts down to one call or slice.
fn strikes(countdown: &mut u64) -> bool {
    let strikes = *countdown == 1;
    *countdown = countdown.saturating_sub(1);
    strikes
}

super::held_memory!(Fault);

impl<T: Transport> Transport for Fault<T> {
    fn name(&self) -> &'static str {
        self.inner.name()
    }

    /// With `FENCE`, whatever `inner` offers: here a WRITE can end `Unknown`. And a cancelled slice may take
    /// some time.
    fn capabilities(&self) -> Capabilities {
        let inner = self.inner.capabilities();
        Capabilities { features: (inner.features | Features::FENCE) - Features::CALLER_DRIVEN, ..inner }
    }

    fn submit(&mut self, batch: &[Slice]) -> Result<usize, Error> {
        if strikes(&mut self.refuse_in) || self.chance(self.config.submit_refused_ppm) {
            self.counters.submits_refused += 1;
            self.turned_away = true;
            return self.config.submit_error.map_or(Ok(0), Err);
        }
        let room = self.held.room().min(batch.len());
        if room == 0 {
            return Ok(0);
        }
        let accepted = self.inner.submit(&batch[..room])?;
        for slice in &batch[..accepted] {
            let dropped = strikes(&mut self.drop_in) || self.chance(self.config.slice_dropped_ppm);
            self.counters.slices_dropped += u64::from(dropped);
            self.held.accept(slice, self.now, dropped);
        }
        Ok(accepted)
    }

    fn poll(&mut self, now: Instant, out: &mut [Completion]) -> usize {
        self.now = now;
        self.turned_away = false;
        let count = self.inner.poll(now, out);
        for completion in &out[..count] {
            let Some(entry) = self.held.ended(completion.token) else { continue };
            if entry.dropped && !entry.canceled {
                let lost = given_up(&entry, ErrorKind::TimedOut.into());
                self.held.hold(entry, lost, entry.accepted_at + self.config.drop_timeout);
                continue;
            }
            let fails = strikes(&mut self.fail_in) || self.chance(self.config.completion_failed_ppm);
            let completion = if fails && completion.result.is_ok() {
                self.counters.completions_failed += 1;
                given_up(&entry, self.config.completion_error)
            } else {
                *completion
            };
            self.held.hold(entry, completion, Instant::ZERO);
        }
        self.held.release(now, out)
    }

    fn poll_at(&self) -> Option<Instant> {
        let again = self.turned_away.then_some(self.now);
        self.inner.poll_at().into_iter().chain(self.held.next_due()).chain(again).min()
    }

    fn event_source(&self) -> Option<EventSource> {
        self.inner.event_source()
    }

    fn activity(&self) -> u64 {
        self.inner.activity()
    }

    fn set_checksums(&mut self, wanted: bool) {
        self.inner.set_checksums(wanted);
    }

    fn cancel(&mut self, token: Token) -> Result<(), Error> {
        let inner = self.inner.cancel(token);
        self.held.cancel(token, inner)
    }

    fn fence(&mut self, token: Token, remote_region: RemoteRegionId) -> Result<(), Error> {
        if !self.held.has_room_for_a_fence() {
            return Err(ErrorKind::Full.into());
        }
        self.inner.fence(token, remote_region)?;
        self.held.accept_fence(token, remote_region, self.now);
        Ok(())
    }

    fn why_not_exported(&self, region: RegionId) -> Option<String> {
        self.inner.why_not_exported(region)
    }

    fn is_connected(&self, peer: u64) -> bool {
        self.inner.is_connected(peer)
    }

    fn expel(&mut self, peer: u64, mode: ExpelMode) -> Result<bool, Error> {
        self.inner.expel(peer, mode)
    }
}
