//! Several rails behind one `Transport`: spreading slices, pausing rails and failing over are one mechanism,
//! the [`Route`].
//!
//! An export is the exports of the children, each under its child's name, so that two processes with
//! different fabrics find those that both have:
//!
//! ```text
//!   count u8, then count times:  name_len u8 | name | blob_len u16 LE | blob
//!            optionally, count times:  cost u8, from 1
//! ```
//!
//! A cost is the distance of the owner's rail from the region, in tenths of a near one. Costs are written
//! when they differ; a reader that does not know them refuses the export because of its length.
#![allow(unsafe_code, reason = "forwards `register`, whose promise the caller made")]

mod export;
mod regions;
mod retry;
mod slot;

use alloc::boxed::Box;
use alloc::vec::Vec;

use crate::route::to_tenths;
use crate::{
    Access, Capabilities, Completion, Error, ErrorKind, EventSource, ExpelMode, Features, Instant, MemSpan,
    Memory, MemoryKinds, Outcome, RAILS_MAX, RegionId, RegionOffset, RemoteOffset, RemoteRegionId, Route,
    Slice, Token, Transport,
};
pub use export::joined_exports;
use export::parse;
use slot::{Slot, slot_of};

/// The largest number of slices that one child gets in one call.
const RUN_SLICES_MAX: usize = 128;
/// The number of consecutive slices that one rail gets while several are usable.
const SPRAY_RUN_MAX: usize = 16;
/// Marks the end of the free list and of the retry queue.
const NONE: u32 = u32::MAX;

/// Several transports as one. Owns its children; the module's documentation has the export format.
///
/// A slice that failed on one rail for a reason that another rail may not have (see
/// [`ErrorKind::is_retryable_elsewhere`]) is sent again over another rail that reaches the remote region. The
/// caller sees one completion. When an earlier try was a WRITE that ended `Unknown`, that completion has
/// `fence_needed`.
pub struct MultiTransport<C, R> {
    rails: heapless::Vec<C, RAILS_MAX>,
    route: R,
    /// Remote regions, by index.
    remote_regions: Vec<RemoteRegion>,
    /// Regions, by index: the generation, and the rails that registered it.
    regions: Vec<Region>,
    slots: Box<[Slot]>,
    free: u32,
    /// Slots that wait for a rail after a failure, linked through `next`: the first and the last.
    retry: (u32, u32),
    /// Whether one of them waits only for its completion to be returned.
    retry_due: bool,
    fences: heapless::Vec<Fence, FENCES_MAX>,
    fence_generation: u32,
    features: Features,
    /// The granule of each rail's remote offsets and lengths, in bytes, less 1.
    granule_masks: heapless::Vec<u32, RAILS_MAX>,
    /// The rails whose granule is more than one byte, as a mask.
    granular: u32,
    /// Whether a region may lack a rail.
    missing: bool,
    /// See [`left_out`](Self::left_out).
    left_out: Option<(usize, Error)>,
    now: Instant,
    /// The slices that one call hands to a child. Kept here, because clearing the array for each call would
    /// cost more than the call.
    run: Box<[Slice; RUN_SLICES_MAX]>,
}

/// The largest number of fences in flight.
const FENCES_MAX: usize = 64;

#[derive(Clone, Copy, Debug, Default)]
struct RemoteRegion {
    generation: u32,
    reachable: u32,
    in_use: u32,
    live: bool,
}

#[derive(Clone, Copy, Debug)]
struct Region {
    generation: u32,
    rails: u32,
    /// The rails that refused it for their own reasons, which may pass.
    missing: u32,
    span: MemSpan,
    access: Access,
    live: bool,
}

impl Region {
    const NONE: Self = Self {
        generation: 0,
        rails: 0,
        missing: 0,
        span: MemSpan::new(core::ptr::null_mut(), 0),
        access: Access::empty(),
        live: false,
    };
}

struct Fence {
    token: Token,
    generation: u32,
    remote_region: RemoteRegionId,
    pending: u32,
    error: Option<Error>,
}

impl<C: Transport, R: Route> MultiTransport<C, R> {
    /// The transports `rails` under `route`, which accept up to `inflight_max` slices at a time.
    ///
    /// # Errors
    /// `InvalidArgument` when there are no rails or more than [`RAILS_MAX`], and for an `inflight_max` of 0
    /// or above 2^24.
    pub fn new(rails: impl IntoIterator<Item = C>, route: R, inflight_max: u32) -> Result<Self, Error> {
        let mut own = heapless::Vec::new();
        for rail in rails {
            own.push(rail).map_err(|_| Error::new(ErrorKind::InvalidArgument))?;
        }
        if own.is_empty() || inflight_max == 0 || inflight_max > 1 << 24 {
            return Err(Error::new(ErrorKind::InvalidArgument));
        }
        // An ability of one rail is an ability of all together; a promise holds only if all rails keep it.
        let offered = || own.iter().map(|rail| rail.capabilities().features);
        let promised = offered().fold(Features::CALLER_DRIVEN, Features::intersection);
        let offered = offered().fold(Features::empty(), Features::union);
        let features = (offered - Features::CALLER_DRIVEN) | promised;
        let granule_masks: heapless::Vec<u32, RAILS_MAX> =
            own.iter().map(|rail| rail.capabilities().granule_bytes.saturating_sub(1)).collect();
        let granular = granule_masks.iter().rev().fold(0, |rails, mask| rails << 1 | u32::from(*mask != 0));
        let empty = Slice {
            token: Token(0),
            local: RegionOffset::new(RegionId::new(0, 0), 0),
            remote: RemoteOffset::new(RemoteRegionId::new(0, 0), 0),
            len: 0,
            op: crate::Op::Read,
        };
        let slots = (0..inflight_max)
            .map(|index| Slot::new(empty, if index + 1 == inflight_max { NONE } else { index + 1 }))
            .collect();
        Ok(Self {
            rails: own,
            route,
            remote_regions: Vec::new(),
            regions: Vec::new(),
            slots,
            free: 0,
            retry: (NONE, NONE),
            retry_due: false,
            fences: heapless::Vec::new(),
            fence_generation: 0,
            features,
            granule_masks,
            granular,
            missing: false,
            left_out: None,
            now: Instant::ZERO,
            run: Box::new([empty; RUN_SLICES_MAX]),
        })
    }

    /// The transports of all rails.
    #[must_use]
    pub fn rails(&self) -> &[C] {
        &self.rails
    }

    /// The transports of all rails, to inject faults or to read statistics. Do not submit to them.
    pub fn rails_mut(&mut self) -> &mut [C] {
        &mut self.rails
    }

    /// The route, with its measurements.
    #[must_use]
    pub fn route(&self) -> &R {
        &self.route
    }

    /// The last rail that did not take the most recently registered region for its own reason (a device that
    /// is gone, a limit of locked memory), and that reason. Slices of that region use the other rails until
    /// [`rejoin`](Self::rejoin) registers it there.
    #[must_use]
    pub const fn left_out(&self) -> Option<(usize, Error)> {
        self.left_out
    }

    /// The route, for what callers know about the location of memory. Callers must not route slices with it.
    pub fn route_mut(&mut self) -> &mut R {
        &mut self.route
    }

    /// Sets the time without polling. Slices count as accepted at the last time that was set: after a break
    /// between polls, call this before `submit`, or the break counts as part of the time that slices take.
    pub fn tick(&mut self, now: Instant) {
        self.now = now;
        self.route.tick(now);
    }

    /// The rails that reach the remote region, as a mask.
    #[must_use]
    pub fn reachable(&self, remote_region: RemoteRegionId) -> u32 {
        self.remote_region(remote_region).map_or(0, |remote_region| remote_region.reachable)
    }

    fn remote_region(&self, id: RemoteRegionId) -> Result<&RemoteRegion, Error> {
        match self.remote_regions.get(id.index as usize) {
            Some(remote_region) if remote_region.live && remote_region.generation == id.generation => {
                Ok(remote_region)
            }
            Some(remote_region) if remote_region.live => Err(Error::new(ErrorKind::Stale)),
            _ => Err(Error::new(ErrorKind::NotFound)),
        }
    }

    fn region(&self, id: RegionId) -> Result<&Region, Error> {
        match self.regions.get(id.index as usize) {
            Some(region) if region.live && region.generation == id.generation => Ok(region),
            Some(region) if region.live => Err(Error::new(ErrorKind::Stale)),
            _ => Err(Error::new(ErrorKind::NotFound)),
        }
    }

    /// The rails that reach the remote region and have registered the local one, as a mask; 0 for a region
    /// that is not there.
    #[must_use]
    pub fn rails_between(&self, region: RegionId, remote_region: RemoteRegionId) -> u32 {
        self.region(region).map_or(0, |region| region.rails) & self.reachable(remote_region)
    }

    /// Those of `rails` whose granule the remote offset and the length are multiples of.
    #[must_use]
    pub fn on_granule(&self, rails: u32, offset: u64, len: u64) -> u32 {
        if rails & self.granular == 0 {
            return rails;
        }
        let off = |mask: u32| (offset | len) & u64::from(mask) != 0;
        let off = self.granule_masks.iter().rev().fold(0, |rails, mask| rails << 1 | u32::from(off(*mask)));
        rails & !off
    }

    /// The rails that reach the slice's remote region, have registered its region, and may carry it.
    fn usable(&self, slice: &Slice) -> Result<u32, Error> {
        let mask =
            self.remote_region(slice.remote.region)?.reachable & self.region(slice.local.region)?.rails;
        let mask = mask & self.route.permitted(slice);
        let on_granule = self.on_granule(mask, slice.remote.offset, u64::from(slice.len));
        match (mask, on_granule) {
            (0, _) => Err(Error::new(ErrorKind::Unreachable)),
            (_, 0) => Err(Error::new(ErrorKind::InvalidArgument)),
            _ => Ok(on_granule),
        }
    }

    /// Stages slices from the front of `batch` that go to one rail. Returns their number, the rail, and the
    /// error of the next slice if no rail can ever take it.
    ///
    /// The route is asked once per run. A run is short enough that `whole` slices still spread over all rails
    /// that reach them.
    #[inline]
    fn stage_run(&mut self, batch: &[Slice], whole: usize, excluded: u32) -> (usize, usize, Option<Error>) {
        let first = &batch[0];
        let mask = match self.usable(first) {
            Ok(mask) => mask & !excluded,
            Err(error) => return (0, 0, Some(error)),
        };
        let Some(rail) = self.route.route(first, mask) else { return (0, 0, None) };
        let burst = if !self.route.takes_more(rail) {
            1
        } else if mask.is_power_of_two() {
            RUN_SLICES_MAX
        } else {
            (whole / mask.count_ones() as usize).clamp(1, SPRAY_RUN_MAX)
        };
        let permitted = self.route.permitted(first);
        let granule = u64::from(self.granule_masks[rail]);
        let mut bytes_ahead = self.route.bytes_in_flight(rail);
        let mut filled = 0;
        for (slice, staged) in batch.iter().take(burst).zip(self.run.iter_mut()) {
            if slice.local.region != first.local.region
                || slice.remote.region != first.remote.region
                || self.route.permitted(slice) != permitted
                || (slice.remote.offset | u64::from(slice.len)) & granule != 0
            {
                break;
            }
            // No rail: every slot is in use.
            let Some(slot) = self.slots.get_mut(self.free as usize) else { break };
            let token = slot.take(self.free, slice, rail, self.now);
            self.free = slot.next;
            bytes_ahead += u64::from(slice.len);
            slot.bytes_ahead = bytes_ahead;
            *staged = Slice { token, ..*slice };
            filled += 1;
        }
        for slice in &self.run[..filled] {
            self.route.accepted(rail, slice);
        }
        (filled, rail, None)
    }

    fn put_slot(&mut self, index: usize) {
        self.slots[index].free(self.free);
        self.free = index as u32;
    }

    /// Handles the completions of a child. Those that the caller gets move to the front of `ended`, under the
    /// caller's tokens; returns their number.
    #[inline]
    fn reap(&mut self, rail: usize, ended: &mut [Completion]) -> usize {
        let plain = self.reap_plain(rail, ended);
        if plain == ended.len() { plain } else { self.reap_mixed(rail, ended, plain) }
    }

    /// As [`reap`](Self::reap), when the first `plain` completions are handled and the next one is not plain.
    #[cold]
    fn reap_mixed(&mut self, rail: usize, ended: &mut [Completion], plain: usize) -> usize {
        let mut told = plain;
        for at in plain..ended.len() {
            let mut child = [ended[at]];
            let heard = match self.reap_plain(rail, &mut child) {
                0 => self.reap_one(rail, &child[0]),
                _ => Some(child[0]),
            };
            if let Some(completion) = heard {
                ended[told] = completion;
                told += 1;
            }
        }
        told
    }

    /// Handles completions from the first on, as long as they are plain, as nearly all are: slices that their
    /// first rail applied. Returns their number.
    #[inline]
    fn reap_plain(&mut self, rail: usize, ended: &mut [Completion]) -> usize {
        let mut count = 0;
        // Slices of one remote region follow each other: its count is updated once.
        let (mut remote_region, mut of_remote_region) = (0, 0);
        for child in ended {
            let index = slot_of(child.token);
            let Some(slot) = self.slots.get_mut(index) else { break };
            if child.result.is_err() || child.fence_needed || !slot.is_plain(child.token, rail) {
                break;
            }
            let nanos = self.now.nanos_since(slot.accepted_at);
            self.route.completed(rail, &slot.slice, child, nanos, slot.bytes_ahead);
            slot.free(self.free);
            self.free = index as u32;
            child.token = slot.slice.token;
            let left = slot.slice.remote.region.index;
            if left != remote_region {
                self.leave_remote_region(remote_region, of_remote_region);
                (remote_region, of_remote_region) = (left, 0);
            }
            of_remote_region += 1;
            count += 1;
        }
        self.leave_remote_region(remote_region, of_remote_region);
        count
    }

    #[inline]
    fn leave_remote_region(&mut self, index: u32, slices: u32) {
        if let Some(remote_region) = self.remote_regions.get_mut(index as usize) {
            remote_region.in_use -= slices;
        }
    }

    /// Handles one completion of a child, of any sort. `Some` when the caller gets a completion.
    fn reap_one(&mut self, rail: usize, child: &Completion) -> Option<Completion> {
        if let Some(generation) = child.token.fence_number() {
            return self.reap_fence(rail, generation, child.result);
        }
        let index = slot_of(child.token);
        let slot = *self.slots.get(index)?;
        if !slot.is_posted(child.token, rail) {
            debug_assert!(false, "rail {rail} completed a slice twice (L1)");
            return None;
        }
        self.route.completed(
            rail,
            &slot.slice,
            child,
            self.now.nanos_since(slot.accepted_at),
            slot.bytes_ahead,
        );
        let stray = slot.is_stray() || (child.fence_needed && child.outcome == Outcome::Unknown);
        if let Err(error) = child.result {
            let tried = slot.tried | 1 << rail;
            if error.kind.is_retryable_elsewhere()
                && !slot.is_canceled()
                && self.untried(index as u32, tried, error) != 0
            {
                let slot = &mut self.slots[index];
                if stray {
                    slot.stray();
                }
                self.enqueue_retry(index as u32);
                return None;
            }
        }
        let stray = stray || child.fence_needed;
        // A copy on another rail may still land: it is not known that the remote bytes are unchanged.
        let outcome = match child.outcome {
            Outcome::NotApplied if stray => Outcome::Unknown,
            outcome => outcome,
        };
        Some(self.end(index, Completion { token: slot.slice.token, outcome, fence_needed: stray, ..*child }))
    }

    /// Cancels every slice in flight whose token is `wanted`, in one pass over them.
    ///
    /// # Errors
    /// The first error of a rail; the other slices are cancelled in any case.
    pub fn cancel_where(&mut self, wanted: impl Fn(Token) -> bool) -> Result<(), Error> {
        let mut first_error = Ok(());
        for index in 0..self.slots.len() {
            let slot = &self.slots[index];
            if !slot.is_free() && wanted(slot.slice.token) {
                first_error = first_error.and(self.cancel_slot(index));
            }
        }
        first_error
    }

    fn cancel_slot(&mut self, index: usize) -> Result<(), Error> {
        let slot = &mut self.slots[index];
        slot.cancel();
        if slot.is_queued() {
            self.retry_due = true;
            return Ok(());
        }
        let (rail, child) = (slot.rail(), slot.child_token(index as u32));
        match self.rails[rail].cancel(child) {
            // It has ended already, and the child has its completion.
            Err(error) if error.kind == ErrorKind::NotFound => Ok(()),
            other => other,
        }
    }

    fn end(&mut self, index: usize, completion: Completion) -> Completion {
        self.leave_remote_region(self.slots[index].slice.remote.region.index, 1);
        self.put_slot(index);
        completion
    }

    fn reap_fence(&mut self, rail: usize, generation: u32, result: Result<(), Error>) -> Option<Completion> {
        let position = self.fences.iter().position(|fence| fence.generation == generation)?;
        let fence = &mut self.fences[position];
        fence.pending &= !(1 << rail);
        if let Err(error) = result {
            fence.error.get_or_insert(error);
        }
        if fence.pending != 0 {
            return None;
        }
        let fence = self.fences.swap_remove(position);
        Some(self.end_fence(&fence))
    }

    fn end_fence(&mut self, fence: &Fence) -> Completion {
        if let Some(remote_region) = self.remote_regions.get_mut(fence.remote_region.index as usize) {
            remote_region.in_use -= 1;
        }
        match fence.error {
            None => Completion::applied(fence.token),
            Some(error) => Completion::unknown(fence.token, error),
        }
    }
}

impl<C: Transport, R: Route> Memory for MultiTransport<C, R> {
    unsafe fn register(&mut self, id: RegionId, span: MemSpan, access: Access) -> Result<(), Error> {
        let each = |rails: &mut [C], results: &mut [Result<(), Error>]| {
            for (rail, result) in rails.iter_mut().zip(results) {
                // SAFETY: the caller's promise covers every child.
                *result = unsafe { rail.register(id, span, access) };
            }
        };
        // SAFETY: `each` registers the region under the caller's promise.
        unsafe { self.register_with(id, span, access, each) }
    }

    fn deregister(&mut self, id: RegionId) -> Result<(), Error> {
        self.region(id)?;
        let waiting = |slot: &Slot| slot.is_queued() && slot.slice.local.region == id;
        if self.retry.0 != NONE && self.slots.iter().any(waiting) {
            return Err(Error::new(ErrorKind::Busy));
        }
        // From here on no rail registers it any more.
        self.regions[id.index as usize].missing = 0;
        // A rail that has deregistered the region is not asked again: when another rail is busy, the next
        // call asks only the remaining ones. A busy rail does not keep the others from deregistering.
        let mut first_error = None;
        for (rail, child) in self.rails.iter_mut().enumerate() {
            let region = &mut self.regions[id.index as usize];
            if region.rails & 1 << rail != 0 {
                match child.deregister(id) {
                    Ok(()) => region.rails &= !(1 << rail),
                    Err(error) => {
                        first_error.get_or_insert(error);
                    }
                }
            }
        }
        if let Some(error) = first_error {
            return Err(error);
        }
        self.regions[id.index as usize].live = false;
        Ok(())
    }

    fn export(&self, id: RegionId, out: &mut [u8]) -> Result<usize, Error> {
        let region = self.region(id)?;
        let short = Error::new(ErrorKind::OutOfRange);
        *out.first_mut().ok_or(short)? = 0;
        let mut at = 1;
        let mut first_error = None;
        let mut costs: heapless::Vec<u8, RAILS_MAX> = heapless::Vec::new();
        for (rail, child) in self.rails.iter().enumerate().filter(|(rail, _)| region.rails & 1 << rail != 0) {
            let name = child.name().as_bytes();
            let head = at + 1 + name.len();
            let body = head + 2;
            let room = out.get_mut(body..).ok_or(short)?;
            match child.export(id, room) {
                Ok(len) => {
                    out[at] = name.len() as u8;
                    out[at + 1..head].copy_from_slice(name);
                    out[head..body].copy_from_slice(&u16::try_from(len).map_err(|_| short)?.to_le_bytes());
                    at = body + len;
                    out[0] += 1;
                    let pushed = costs.push(to_tenths(self.route.region_penalty(id, rail)));
                    debug_assert!(pushed.is_ok(), "one cost per rail");
                }
                Err(error) if error.kind == ErrorKind::OutOfRange => return Err(error),
                Err(error) => {
                    first_error.get_or_insert(error);
                }
            }
        }
        match first_error {
            Some(error) if out[0] == 0 => Err(error),
            // No rail is preferred.
            _ if costs.iter().all(|cost| *cost == costs[0]) => Ok(at),
            _ => {
                let end = at + costs.len();
                out.get_mut(at..end).ok_or(short)?.copy_from_slice(&costs);
                Ok(end)
            }
        }
    }

    fn attach(&mut self, id: RemoteRegionId, blob: &[u8]) -> Result<(), Error> {
        let index = id.index as usize;
        if self.remote_regions.get(index).is_some_and(|remote_region| remote_region.live) {
            return Err(Error::new(ErrorKind::Busy));
        }
        // Parse the whole export before any child sees a part of it.
        let (exports, costs) = parse(blob)?;
        let mut reachable = 0;
        let mut penalties = [100; RAILS_MAX];
        let mut first_error = None;
        let mut names: heapless::Vec<&'static str, RAILS_MAX> = heapless::Vec::new();
        for (rail, child) in self.rails.iter_mut().enumerate() {
            // Several rails of one name: our first one takes the peer's first one, and so on.
            let name = child.name();
            let nth = names.iter().filter(|&&earlier| earlier == name).count();
            let pushed = names.push(name);
            debug_assert!(pushed.is_ok(), "one name per rail");
            let mut alike = exports.iter().enumerate().filter(|(_, (other, _))| *other == name.as_bytes());
            // When the peer has fewer, several of ours share one of the peer's.
            let count = alike.clone().count();
            let Some((at, (_, export))) = alike.nth(nth % count.max(1)) else { continue };
            if let Some(&cost) = costs.get(at) {
                penalties[rail] = u32::from(cost) * 10;
            }
            match child.attach(id, export) {
                Ok(()) => reachable |= 1 << rail,
                Err(error) => {
                    first_error.get_or_insert(error);
                }
            }
        }
        if reachable == 0 {
            return Err(first_error.unwrap_or(Error::new(ErrorKind::Unreachable)));
        }
        if self.remote_regions.len() <= index {
            self.remote_regions.resize(index + 1, RemoteRegion::default());
        }
        self.remote_regions[index] =
            RemoteRegion { generation: id.generation, reachable, in_use: 0, live: true };
        self.route.attached(id, (!costs.is_empty()).then_some(&penalties));
        Ok(())
    }

    fn detach(&mut self, id: RemoteRegionId) -> Result<(), Error> {
        if self.remote_region(id)?.in_use > 0 {
            return Err(Error::new(ErrorKind::Busy));
        }
        for (rail, child) in self.rails.iter_mut().enumerate() {
            let remote_region = &mut self.remote_regions[id.index as usize];
            if remote_region.reachable & 1 << rail != 0 {
                child.detach(id)?;
                remote_region.reachable &= !(1 << rail);
            }
        }
        self.remote_regions[id.index as usize].live = false;
        Ok(())
    }
}

impl<C: Transport, R: Route> Transport for MultiTransport<C, R> {
    fn name(&self) -> &'static str {
        "multi"
    }

    fn capabilities(&self) -> Capabilities {
        let each = || self.rails.iter().map(Transport::capabilities);
        let of_rail = |rail: &C| 4 + rail.name().len() as u32 + rail.capabilities().export_bytes_max;
        let least = |bytes: fn(Capabilities) -> u32| each().map(bytes).min().unwrap_or(0);
        Capabilities::new(self.features)
            .with_slice_bytes(least(|rail| rail.slice_bytes_preferred), least(|rail| rail.slice_bytes_max))
            .with_inflight_max(self.slots.len() as u32)
            .with_export_bytes_max(1 + self.rails.iter().map(of_rail).sum::<u32>())
            // A region is registered with the rails that can touch it.
            .with_memory(each().map(|rail| rail.memory).fold(MemoryKinds::empty(), MemoryKinds::union))
            // A slice goes to rails whose granule fits it. The granules are powers of two: multiples of the
            // largest fit all of them.
            .with_granule_bytes(each().map(|rail| rail.granule_bytes).max().unwrap_or(1))
    }

    fn submit(&mut self, batch: &[Slice]) -> Result<usize, Error> {
        let mut done = 0;
        // The rails that refused the next slice for their own reasons.
        let mut excluded = 0;
        // Consecutive slices for the same rail go there in one call.
        while done < batch.len() {
            let (filled, rail, refused) = self.stage_run(&batch[done..], batch.len(), excluded);
            let accepted = if filled == 0 { Ok(0) } else { self.rails[rail].submit(&self.run[..filled]) };
            let count = *accepted.as_ref().unwrap_or(&0);
            for at in (count..filled).rev() {
                match accepted {
                    Err(error) if at == 0 => self.refused(rail, error),
                    _ => self.route.returned(rail, &self.run[at]),
                }
                self.put_slot(slot_of(self.run[at].token));
            }
            if count > 0 {
                self.remote_regions[batch[done].remote.region.index as usize].in_use += count as u32;
            }
            done += count;
            match accepted {
                Err(error) => {
                    excluded |= 1 << rail;
                    let elsewhere = self.usable(&batch[done]).map_or(0, |mask| mask & !excluded);
                    if error.kind.is_retryable_elsewhere() && elsewhere != 0 {
                        continue;
                    }
                    return if done == 0 { Err(error) } else { Ok(done) };
                }
                Ok(_) if count < filled => return Ok(done),
                Ok(_) => excluded = 0,
            }
            match refused {
                Some(error) if done == 0 => return Err(error),
                Some(_) => return Ok(done),
                None if filled == 0 => return Ok(done),
                None => {}
            }
        }
        Ok(done)
    }

    fn poll(&mut self, now: Instant, out: &mut [Completion]) -> usize {
        self.now = now;
        self.route.tick(now);
        let mut written = 0;
        // Completions of fences over rails that all ended within `fence` itself.
        while let Some(position) = self.fences.iter().position(|fence| fence.pending == 0) {
            let Some(room) = out.get_mut(written) else { return written };
            let fence = self.fences.swap_remove(position);
            *room = self.end_fence(&fence);
            written += 1;
        }
        for rail in 0..self.rails.len() {
            loop {
                // Never take more completions from a child than there is room for: a child returns each once.
                let room = &mut out[written..];
                let wanted = room.len();
                let count = self.rails[rail].poll(now, room);
                written += self.reap(rail, &mut room[..count]);
                if count < wanted || written == out.len() {
                    break;
                }
            }
        }
        if self.retry.0 != NONE {
            written += self.run_retries(&mut out[written..]);
        }
        written
    }

    fn poll_at(&self) -> Option<Instant> {
        // Slices that wait for a rail, in the retry queue or at the caller, can go on when a pause ends. A
        // rail that is merely full has completions to come, and therefore its own reason to be polled.
        let due = self.retry_due || self.fences.iter().any(|fence| fence.pending == 0);
        let due = due.then_some(self.now);
        self.rails.iter().filter_map(Transport::poll_at).chain(self.route.wake_at()).chain(due).min()
    }

    fn activity(&self) -> u64 {
        self.rails.iter().map(Transport::activity).fold(0, u64::wrapping_add)
    }

    /// The event source of the only rail. Several rails have several: a caller that parks waits on those of
    /// all [`rails`](Self::rails).
    fn event_source(&self) -> Option<EventSource> {
        match &*self.rails {
            [only] => only.event_source(),
            _ => None,
        }
    }

    fn set_checksums(&mut self, wanted: bool) {
        self.rails.iter_mut().for_each(|rail| rail.set_checksums(wanted));
    }

    fn cancel(&mut self, token: Token) -> Result<(), Error> {
        let wanted = |slot: &Slot| !slot.is_free() && slot.slice.token == token;
        let index = self.slots.iter().position(wanted).ok_or(Error::new(ErrorKind::NotFound))?;
        self.cancel_slot(index)
    }

    fn fence(&mut self, token: Token, remote_region: RemoteRegionId) -> Result<(), Error> {
        let reachable = self.remote_region(remote_region)?.reachable;
        if self.fences.is_full() {
            return Err(Error::new(ErrorKind::Full));
        }
        self.fence_generation = self.fence_generation.wrapping_add(1);
        let child = Token::of_fence(self.fence_generation);
        let mut fence =
            Fence { token, generation: self.fence_generation, remote_region, pending: 0, error: None };
        for (rail, transport) in
            self.rails.iter_mut().enumerate().filter(|(rail, _)| reachable & 1 << rail != 0)
        {
            match transport.fence(child, remote_region) {
                Ok(()) => fence.pending |= 1 << rail,
                Err(error) => {
                    fence.error.get_or_insert(error);
                }
            }
        }
        self.remote_regions[remote_region.index as usize].in_use += 1;
        let pushed = self.fences.push(fence);
        debug_assert!(pushed.is_ok(), "room was checked above");
        Ok(())
    }

    fn is_connected(&self, peer: u64) -> bool {
        self.rails.iter().any(|rail| rail.is_connected(peer))
    }

    fn expel(&mut self, peer: u64, mode: ExpelMode) -> Result<bool, Error> {
        // An initiator that is connected over one rail is left alone on all of them.
        if mode == ExpelMode::SpareConnected && self.is_connected(peer) {
            return Err(Error::new(ErrorKind::Busy));
        }
        let mut gone = true;
        let mut first_error = None;
        // A rail that cannot expel must not keep the others from it: every connection that can be closed is
        // closed, and the error says that not all are.
        for rail in &mut self.rails {
            match rail.expel(peer, mode) {
                Ok(here) => gone &= here,
                Err(error) => {
                    first_error.get_or_insert(error);
                }
            }
        }
        first_error.map_or(Ok(gone), Err)
    }
}
