//! The stager: slots of page-locked memory, and a channel for each direction.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use te_core::device::{Hop, HopDirection, HopEnd, Stager, StagingSlot};
use te_core::{Error, ErrorKind, MemSpan, Token};

use super::abi::{Descriptor, DevicePtr};
use super::channel::{Channel, Group, Layout, Way};
use super::device::Device;
use super::module::{Kernels, TICKET_BYTES};
use super::pointer;
use super::ring::{Pinned, Spare};
use crate::config::Config;
use crate::flight::{ENTRIES_MAX, LAUNCHES_PER_START};
use crate::plan::{LARGE_BYTES, Offer, Path, Plan};
use crate::slots::Slots;

/// Ranges of device memory that are remembered.
const KNOWN_MAX: usize = 16;
/// A cache line of two, so that the words of two channels do not share one.
const WORD_BYTES: usize = 128;
/// How long the first mark may take.
const TRIAL: Duration = Duration::from_millis(500);

/// The memory of a device that hops were started for: the driver is asked once per allocation, and again
/// after memory was registered anywhere in the process.
struct Known {
    ranges: [(DevicePtr, DevicePtr); KNOWN_MAX],
    /// Whether each is memory of another context: the kernel does not copy it.
    foreign: [bool; KNOWN_MAX],
    next: usize,
    /// Counts registrations: memory can only be freed, and something else come to its address, when a region
    /// was deregistered and another one registered.
    registrations: Arc<AtomicU64>,
    as_of: u64,
}

impl Known {
    /// Whether these bytes are memory of the device, and then whether they are of another context.
    fn find(&mut self, device: &Device, at: DevicePtr, len: usize) -> Option<bool> {
        let now = self.registrations.load(Ordering::Relaxed);
        if self.as_of != now {
            (self.as_of, self.ranges) = (now, [(0, 0); KNOWN_MAX]);
        }
        let end = at.checked_add(len as u64)?;
        if let Some(nth) = self.ranges.iter().position(|(from, to)| *from <= at && end <= *to) {
            return Some(self.foreign[nth]);
        }
        let (mut all_here, mut any_foreign) = (true, false);
        let walked = pointer::walk(&device.driver, at, len, |found| {
            all_here &= found.ordinal == device.info.ordinal;
            let range = (found.mapping, found.mapping + found.mapping_bytes as u64);
            let is_foreign = !device.is_own_context(found.context);
            any_foreign |= is_foreign;
            self.foreign[self.next] = is_foreign;
            self.ranges[self.next] = if all_here { range } else { (0, 0) };
            self.next = (self.next + 1) % KNOWN_MAX;
        });
        (walked.is_ok() && all_here).then_some(any_foreign)
    }
}

/// Hops of one class are launched together.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Class {
    /// Both ends have the same address modulo 16.
    Small,
    SmallUnaligned,
    Large,
}

impl Class {
    pub(crate) const ALL: [Self; LAUNCHES_PER_START] = [Self::Small, Self::SmallUnaligned, Self::Large];

    pub(crate) const fn of(len: usize, here: DevicePtr, there: DevicePtr) -> Self {
        match len >= LARGE_BYTES as usize {
            true => Self::Large,
            false if (here ^ there).is_multiple_of(16) => Self::Small,
            false => Self::SmallUnaligned,
        }
    }
}

/// Copies between slots and the memory of one device.
pub(crate) struct GpuStager {
    device: Arc<Device>,
    /// Dropped before the memory that they use.
    channels: [Channel; 2],
    kernels: Option<Kernels>,
    pinned: Pinned,
    /// Where the slots are once the device has failed: copies may still write to `pinned`.
    spare: Spare,
    slots: Slots,
    slot_bytes: u32,
    known: Known,
    /// Whether any hop of this call of `start` has memory of another context.
    any_foreign: bool,
    group: Group,
    plan: Plan,
    blocks_max: u32,
    drain: Duration,
    /// Which channel is polled first.
    turn: usize,
}

const fn channel_of(direction: HopDirection) -> usize {
    match direction {
        HopDirection::ToDevice => 0,
        HopDirection::ToHost => 1,
    }
}

impl GpuStager {
    /// A stager that has been tried: marks, and the kernel if there is one. Its plan has the default table.
    pub(crate) fn new(
        device: &Arc<Device>,
        config: &Config,
        registrations: Arc<AtomicU64>,
    ) -> Result<Self, Error> {
        if device.is_dead() {
            return Err(ErrorKind::Rail.into());
        }
        let _entered = device.enter()?;
        let count = config.ring_bytes / config.slot_bytes;
        let hops_max = config.hops_max as usize;
        let ring_bytes = count as usize * config.slot_bytes as usize;
        let words = ring_bytes.next_multiple_of(WORD_BYTES);
        let descriptors = words + 2 * WORD_BYTES;
        let bytes = descriptors + 2 * hops_max * size_of::<Descriptor>();
        let pinned = Pinned::new(device, bytes)?;
        let channel = |direction| {
            let nth = channel_of(direction);
            let layout = Layout {
                word: words + nth * WORD_BYTES,
                descriptors: descriptors + nth * hops_max * size_of::<Descriptor>(),
                hops_max,
            };
            Channel::new(device, Way::Staged(direction), layout)
        };
        let channels = [channel(HopDirection::ToDevice)?, channel(HopDirection::ToHost)?];
        let as_of = registrations.load(Ordering::Relaxed);
        let mut stager = Self {
            device: Arc::clone(device),
            channels,
            kernels: None,
            pinned,
            spare: Spare::new(ring_bytes)?,
            slots: Slots::new(count),
            slot_bytes: config.slot_bytes,
            known: Known {
                ranges: [(0, 0); KNOWN_MAX],
                foreign: [false; KNOWN_MAX],
                next: 0,
                registrations,
                as_of,
            },
            any_foreign: false,
            group: Group::new(hops_max),
            plan: Plan::new(config.table().ok().flatten().unwrap_or_default(), Offer::default()),
            blocks_max: config.blocks_max,
            drain: Duration::from_millis(config.drain_ms_max.into()),
            turn: 0,
        };
        stager.try_marks()?;
        if config.kernel && stager.plan.table().uses(Path::Kernel) {
            stager.try_kernel();
        }
        if stager.plan.table().uses(Path::Batch) {
            stager.try_batch();
        }
        match stager.is_idle() {
            true => Ok(stager),
            false => Err(ErrorKind::TimedOut.into()),
        }
    }

    pub(crate) fn set_plan(&mut self, plan: Plan) {
        self.plan = Plan::new(plan.table(), self.plan.offer());
    }

    pub(crate) fn plan(&self) -> Plan {
        self.plan
    }

    pub(crate) fn ring_bytes(&self) -> usize {
        self.slots.count() * self.slot_bytes as usize
    }

    /// Whether the device stores words behind launches, so that polls need no call.
    pub(crate) fn stores_words(&self) -> bool {
        self.channels.iter().all(Channel::stores_words)
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.channels.iter().all(Channel::is_empty)
    }

    /// Words where the device can store them, events elsewhere.
    fn try_marks(&mut self) -> Result<(), Error> {
        let can_store = self.device.attribute(super::abi::DEVICE_STREAM_MEM_OPS_64) != Some(0)
            && self.device.driver.stream_write.is_some();
        if can_store && self.try_copy(Path::Loop, 64) && self.channels.iter().all(Channel::stores_words) {
            return Ok(());
        }
        log::info!("{}: completions are told by events", self.device.info.location);
        for channel in &mut self.channels {
            channel.use_events()?;
        }
        match self.wait(self.drain).is_ok() && self.try_copy(Path::Loop, 64) {
            true => Ok(()),
            false => Err(ErrorKind::System.into()),
        }
    }

    /// Loads the kernel and lets each entry copy, which also makes the driver place it on the device now and
    /// not at the first hop. A kernel that does not copy what it should is not used.
    fn try_kernel(&mut self) {
        let kernels = match Kernels::load(&self.device) {
            Ok(kernels) => kernels,
            Err(error) => {
                log::info!("{}: no copy kernel: {error}", self.device.info.location);
                return;
            }
        };
        for (nth, channel) in self.channels.iter_mut().enumerate() {
            channel.set_ticket(kernels.tickets + (nth * TICKET_BYTES) as u64);
        }
        self.kernels = Some(kernels);
        let copies = [4_096, 1, 15, 4_095, 2_049].into_iter().all(|len| self.try_copy(Path::Kernel, len));
        if copies {
            self.plan = Plan::new(self.plan.table(), Offer { kernel: true, ..self.plan.offer() });
        } else {
            log::error!("{}: the copy kernel does not copy what it should", self.device.info.location);
            // The module stays loaded until the channels are empty.
        }
    }

    fn try_batch(&mut self) {
        let driver = &self.device.driver;
        let has = driver.batch_13.is_some() || driver.batch_12.is_some();
        if has && self.try_copy(Path::Batch, 512) {
            self.plan = Plan::new(self.plan.table(), Offer { batch: true, ..self.plan.offer() });
        }
    }

    /// Copies `len` bytes from one place of the first slots to another through a scratch of device memory,
    /// by one path, and compares.
    fn try_copy(&mut self, path: Path, len: usize) -> bool {
        const ROOM: usize = 8_192;
        if self.ring_bytes() < 2 * ROOM && len > 512 {
            return true;
        }
        let half = self.ring_bytes() / 2;
        let Ok(scratch) = Scratch::new(&self.device, ROOM) else { return false };
        // Two alignments: the same at both ends, and another one.
        for (skip, skip_there) in [(5, 5), (3, 8)] {
            let pattern = |at: usize| (at * 7 + len + skip) as u8 | 1;
            for at in 0..len {
                self.pinned.put(skip + at, pattern(at));
                self.pinned.put(half + skip + at, 0_u8);
            }
            let (here, there) = (self.pinned.by_host(skip), scratch.at + skip_there);
            let back = self.pinned.by_host(half + skip);
            for (channel, to, from) in [(0, there, here), (1, back, there)] {
                self.group.clear();
                self.group.add(to, from, len, Token(0));
                if self.launch(channel, path).is_err() || self.wait(TRIAL).is_err() {
                    let _drained = self.wait(self.drain);
                    if !self.is_idle() {
                        scratch.abandon();
                    }
                    return false;
                }
            }
            if !(0..len).all(|at| self.pinned.byte(half + skip + at) == pattern(at)) {
                return false;
            }
        }
        true
    }

    fn launch(&mut self, channel: usize, path: Path) -> Result<(), Error> {
        let with = (&self.pinned, self.kernels.as_ref());
        self.channels[channel].launch(&mut self.group, path, with, self.blocks_max)
    }

    /// Waits until nothing runs. Not for the data path.
    ///
    /// # Errors
    /// The first error of a hop; `TimedOut`.
    fn wait(&mut self, limit: Duration) -> Result<(), Error> {
        let mut out = [HopEnd { token: Token(0), result: Ok(()) }; 64];
        let (start, mut result, mut spins) = (Instant::now(), Ok(()), 0_u32);
        while self.channels.iter().any(|channel| !channel.is_empty()) {
            let count = self.poll_channels(&mut out);
            result = out[..count].iter().fold(result, |result, end| result.and(end.result));
            spins += 1;
            if count == 0 && spins > 1_000 {
                std::thread::sleep(Duration::from_micros(20));
            }
            if start.elapsed() > limit {
                return Err(ErrorKind::TimedOut.into());
            }
        }
        result
    }

    /// The time that `count` copies of `bytes` each take on one path, from the launch until its end is seen.
    /// `None`: they failed.
    pub(crate) fn measure(
        &mut self,
        scratch: &Scratch,
        (direction, path): (HopDirection, Path),
        (bytes, count): (u32, u32),
    ) -> Option<Duration> {
        let device = Arc::clone(&self.device);
        let _entered = device.enter().ok()?;
        // No call starts more.
        let count = count.min((ENTRIES_MAX - LAUNCHES_PER_START) as u32);
        let cells = (self.ring_bytes() / bytes as usize) as u32;
        if cells == 0 || count as usize > self.channels[channel_of(direction)].room() {
            return None;
        }
        self.group.clear();
        for nth in 0..count {
            let at = (nth % cells) as usize * bytes as usize;
            let (here, there) = (self.pinned.by_host(at), scratch.at + at as u64);
            let (to, from) = if direction == HopDirection::ToDevice { (there, here) } else { (here, there) };
            self.group.add(to, from, bytes as usize, Token(0));
        }
        let start = Instant::now();
        // Copies that were started before an error run.
        let launched = self.launch(channel_of(direction), path);
        self.wait(self.drain).and(launched).ok()?;
        Some(start.elapsed())
    }

    fn check(&mut self, hop: &Hop) -> Result<(), Error> {
        if !self.slots.is_taken(hop.slot) {
            return Err(ErrorKind::NotFound.into());
        }
        if hop.device.is_empty() || hop.device.location() != self.device.info.location {
            return Err(ErrorKind::InvalidArgument.into());
        }
        let end = u64::from(hop.offset) + hop.device.len() as u64;
        if end > self.slot_bytes.into() {
            return Err(ErrorKind::OutOfRange.into());
        }
        let at = hop.device.as_ptr().addr() as DevicePtr;
        let is_foreign =
            self.known.find(&self.device, at, hop.device.len()).ok_or(ErrorKind::InvalidArgument)?;
        self.any_foreign |= is_foreign;
        Ok(())
    }

    /// The hops that can be started now: how many, and of each channel.
    fn admit(&mut self, hops: &[Hop]) -> Result<usize, Error> {
        self.any_foreign = false;
        let mut room = [self.channels[0].room(), self.channels[1].room()];
        for (nth, hop) in hops.iter().enumerate() {
            match self.check(hop) {
                Ok(()) => {}
                Err(error) if nth == 0 => return Err(error),
                Err(_) => return Ok(nth),
            }
            let room = &mut room[channel_of(hop.direction)];
            if *room == 0 {
                return Ok(nth);
            }
            *room -= 1;
        }
        Ok(hops.len())
    }

    /// Launches the hops of one direction and class.
    fn launch_group(&mut self, hops: &[Hop], channel: usize, class: Class) {
        let Self { group, pinned, slot_bytes, .. } = self;
        let direction = if channel == 0 { HopDirection::ToDevice } else { HopDirection::ToHost };
        group.clear();
        for hop in hops.iter().filter(|hop| hop.direction == direction) {
            let offset = hop.slot as usize * *slot_bytes as usize + hop.offset as usize;
            let here = pinned.by_host(offset);
            let there = hop.device.as_ptr().addr() as DevicePtr;
            if Class::of(hop.device.len(), here, there) == class {
                let (to, from) = if channel == 0 { (there, here) } else { (here, there) };
                group.add(to, from, hop.device.len(), hop.token);
            }
        }
        if group.count() > 0 {
            let offer = self.plan.offer();
            // A fault in memory of another context would be a fault of ours.
            let plan = match self.any_foreign {
                true => Plan::new(self.plan.table(), Offer { kernel: false, ..offer }),
                false => self.plan,
            };
            let path = plan.choose(direction, self.group.count(), self.group.bytes());
            // The hops end with the error.
            let _told_by_the_hops = self.launch(channel, path);
        }
    }

    #[inline]
    fn poll_channels(&mut self, out: &mut [HopEnd]) -> usize {
        if self.device.is_dead() {
            return self.poll_dead(out);
        }
        self.turn ^= 1;
        let (first, second) = (self.turn, self.turn ^ 1);
        let ended = self.channels[first].poll(&self.pinned, out);
        ended + self.channels[second].poll(&self.pinned, &mut out[ended..])
    }

    #[cold]
    fn poll_dead(&mut self, out: &mut [HopEnd]) -> usize {
        // What still runs may write to the slots.
        self.pinned.abandon();
        let ended = self.channels[0].poll_dead(out);
        ended + self.channels[1].poll_dead(&mut out[ended..])
    }
}

// SAFETY: the slots are parts of page-locked memory that stays mapped as long as the stager, or for ever when
// the device died; they do not overlap, `take` hands out each once, and no reference to their bytes is made.
// `check` limits each hop to its slot and to memory of this device. A hop ends when the mark behind its copy
// has passed, or when the context is dead; from then on `take` returns other memory, and no hop is started.
// `drop` waits for hops.
unsafe impl Stager for GpuStager {
    fn slot_bytes(&self) -> u32 {
        self.slot_bytes
    }

    fn take(&mut self) -> Option<StagingSlot> {
        let index = self.slots.take()?;
        let at = u64::from(index) * u64::from(self.slot_bytes);
        // Callers that wait for a slot get one, and learn from `start` that the device has failed.
        let all = if self.device.is_dead() { self.spare.span() } else { self.pinned.span() };
        let span: MemSpan = all.part(at, self.slot_bytes.into()).ok()?;
        Some(StagingSlot { index, span })
    }

    fn give_back(&mut self, slot: StagingSlot) {
        self.slots.give_back(slot.index);
    }

    fn start(&mut self, hops: &[Hop]) -> Result<usize, Error> {
        if hops.is_empty() {
            return Ok(0);
        }
        if self.device.is_dead() {
            return Err(ErrorKind::Rail.into());
        }
        let count = self.admit(hops)?;
        let hops = &hops[..count];
        if count > 0 {
            let device = Arc::clone(&self.device);
            let _entered = device.enter()?;
            for channel in [0, 1] {
                Class::ALL.into_iter().for_each(|class| self.launch_group(hops, channel, class));
            }
        }
        Ok(count)
    }

    fn poll(&mut self, out: &mut [HopEnd]) -> usize {
        self.poll_channels(out)
    }
}

impl Drop for GpuStager {
    fn drop(&mut self) {
        if self.device.is_forked() {
            return;
        }
        let drained = self.wait(self.drain);
        let is_busy = self.channels.iter().any(|channel| !channel.is_empty());
        if is_busy || self.device.is_dead() {
            self.device.quarantined.fetch_add(1, Ordering::Relaxed);
            log::error!(
                "{}: the slots of a stager are never used again, because hops did not end: {drained:?}",
                self.device.info.location
            );
            self.pinned.abandon();
            // Unloading would wait for kernels that run.
            std::mem::forget(self.kernels.take());
        }
    }
}

/// Device memory that only its owner uses.
pub(crate) struct Scratch {
    device: Arc<Device>,
    at: DevicePtr,
}

impl Scratch {
    pub(crate) fn new(device: &Arc<Device>, bytes: usize) -> Result<Self, Error> {
        let _entered = device.enter()?;
        let mut at = 0;
        // SAFETY: writes one address.
        device.check(unsafe { (device.driver.mem_alloc)(&raw mut at, bytes) })?;
        Ok(Self { device: Arc::clone(device), at })
    }
}

impl Scratch {
    pub(crate) const fn at(&self) -> DevicePtr {
        self.at
    }

    /// The memory is never freed: copies may still use it.
    pub(crate) fn abandon(self) {
        std::mem::forget(self);
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        if let Ok(_entered) = self.device.enter_to_free() {
            // SAFETY: allocated in `new`; its owner has waited for its copies.
            self.device.gave_back("memory", unsafe { (self.device.driver.mem_free)(self.at) });
        }
    }
}
