//! Copies between memory of devices, of this process or another one, and page-locked host memory.

use std::sync::Arc;
use std::time::{Duration, Instant};

use te_core::device::{HopDirection, HopEnd};
use te_core::{Error, ErrorKind, Location, Token};

use super::abi::{DEVICE_STREAM_MEM_OPS_64, Descriptor};
use super::channel::{Channel, Group, Layout, Place, Way};
use super::device::Device;
use super::module::Kernels;
use super::ring::Pinned;
use super::stager::{Class, Scratch};
use crate::config::Config;
use crate::plan::{Offer, Path, Plan};

const WORD_BYTES: usize = 128;
/// What a trial copies.
const TRIAL_BYTES: usize = 4_096;
/// How long the first mark may take.
const TRIAL: Duration = Duration::from_millis(500);

/// One copy. Both ends are memory that the queue's device reaches.
#[derive(Clone, Copy, Debug)]
pub struct Copy {
    /// The caller's name for it.
    pub token: Token,
    /// The destination.
    pub to: Place,
    /// The source.
    pub from: Place,
    /// The length, bytes.
    pub len: u32,
    /// Whether the kernel may do it: both ends are memory of the queue's device and its primary context, of
    /// an import, or page-locked host memory.
    pub kernel: bool,
}

/// Copies by one device, in a stream of its own. Copies of one queue are carried out in their order; each
/// ends once.
///
/// `start` and `poll` neither wait nor allocate, and at most 64 launches are in flight.
pub struct CopyQueue {
    device: Arc<Device>,
    /// Dropped before the memory that it uses.
    channel: Channel,
    kernels: Option<Kernels>,
    pinned: Pinned,
    group: Group,
    plan: Plan,
    blocks_max: u32,
    drain: Duration,
}

impl CopyQueue {
    /// A queue whose marks, and paths, have been tried.
    pub(crate) fn new(device: &Arc<Device>, config: &Config) -> Result<Self, Error> {
        if device.is_dead() {
            return Err(ErrorKind::Rail.into());
        }
        if device.driver.copy_any.is_none() {
            return Err(ErrorKind::Unsupported.into());
        }
        let _entered = device.enter()?;
        let hops_max = config.hops_max as usize;
        let descriptors = 2 * TRIAL_BYTES + WORD_BYTES;
        let bytes = descriptors + hops_max * size_of::<Descriptor>();
        let layout = Layout { word: 2 * TRIAL_BYTES, descriptors, hops_max };
        let mut queue = Self {
            device: Arc::clone(device),
            channel: Channel::new(device, Way::Any, layout)?,
            kernels: None,
            pinned: Pinned::new(device, bytes)?,
            group: Group::of_places(hops_max),
            plan: Plan::new(config.table().ok().flatten().unwrap_or_default(), Offer::default()),
            blocks_max: config.blocks_max,
            drain: Duration::from_millis(config.drain_ms_max.into()),
        };
        queue.try_marks()?;
        let table = queue.plan.table();
        let kernel = config.kernel && table.uses(Path::Kernel) && queue.try_kernel();
        let driver = &device.driver;
        let has_batch = table.uses(Path::Batch) && (driver.batch_13.is_some() || driver.batch_12.is_some());
        let batch = has_batch && queue.try_copy(Path::Batch);
        queue.plan = Plan::new(table, Offer { batch, kernel });
        match queue.channel.is_empty() {
            true => Ok(queue),
            false => Err(ErrorKind::TimedOut.into()),
        }
    }

    /// The device.
    #[must_use]
    pub fn location(&self) -> Location {
        self.device.info.location
    }

    /// Which paths the queue has, and which one is used when.
    #[must_use]
    pub const fn plan(&self) -> Plan {
        self.plan
    }

    /// Copies that can be started now.
    #[inline]
    #[must_use]
    pub fn room(&self) -> usize {
        self.channel.room()
    }

    /// Whether no copy runs.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.channel.is_empty()
    }

    /// Whether the device has failed: nothing of it runs any more, as far as the driver says.
    #[must_use]
    pub fn is_dead(&self) -> bool {
        self.device.is_dead()
    }

    /// Starts a prefix of the copies and returns its length; fewer when the queue is full.
    ///
    /// # Errors
    /// `Rail` when the device has failed, and the driver's when nothing could be started. Errors of copies
    /// that were started come with their ends.
    ///
    /// # Safety
    /// Until a copy has ended, all bytes of both its ends are mapped for the queue's device, or are
    /// page-locked host memory, and no reference to the destination exists.
    pub unsafe fn start(&mut self, copies: &[Copy]) -> Result<usize, Error> {
        if self.device.is_dead() {
            return Err(ErrorKind::Rail.into());
        }
        let count = copies.len().min(self.channel.room());
        let Some(copies) = copies.get(..count).filter(|copies| !copies.is_empty()) else { return Ok(0) };
        let device = Arc::clone(&self.device);
        let _entered = device.enter()?;
        let can_use_kernel = copies.iter().all(|copy| copy.kernel);
        for class in Class::ALL {
            self.group.clear();
            for copy in copies {
                let len = copy.len as usize;
                if Class::of(len, copy.to.at, copy.from.at) == class {
                    self.group.add_places(copy.to, copy.from, len, copy.token);
                }
            }
            if self.group.count() > 0 {
                let offer = self.plan.offer();
                let plan =
                    Plan::new(self.plan.table(), Offer { kernel: offer.kernel && can_use_kernel, ..offer });
                let path = plan.choose(HopDirection::ToDevice, self.group.count(), self.group.bytes());
                // The copies end with the error.
                let _told_by_the_copies = self.launch(path);
            }
        }
        Ok(count)
    }

    /// Writes the ends of copies into `out`; returns how many. When the device has failed, all end with
    /// `Rail`.
    #[inline]
    pub fn poll(&mut self, out: &mut [HopEnd]) -> usize {
        if self.device.is_dead() {
            self.pinned.abandon();
            return self.channel.poll_dead(out);
        }
        self.channel.poll(&self.pinned, out)
    }

    /// Waits until no copy runs, whose ends are lost. Not for the data path.
    ///
    /// # Errors
    /// The first error of a copy; `TimedOut` when copies still run after the setting `drain_ms_max`.
    pub fn drain(&mut self) -> Result<(), Error> {
        self.wait(self.drain)
    }

    fn launch(&mut self, path: Path) -> Result<(), Error> {
        self.channel.launch(&mut self.group, path, (&self.pinned, self.kernels.as_ref()), self.blocks_max)
    }

    fn try_marks(&mut self) -> Result<(), Error> {
        let can_store = self.device.attribute(DEVICE_STREAM_MEM_OPS_64) != Some(0)
            && self.device.driver.stream_write.is_some();
        if can_store && self.try_copy(Path::Loop) && self.channel.stores_words() {
            return Ok(());
        }
        log::info!("{}: completions of copies are told by events", self.device.info.location);
        self.channel.use_events()?;
        match self.wait(self.drain).is_ok() && self.try_copy(Path::Loop) {
            true => Ok(()),
            false => Err(ErrorKind::System.into()),
        }
    }

    fn try_kernel(&mut self) -> bool {
        match Kernels::load(&self.device) {
            Ok(kernels) => {
                self.channel.set_ticket(kernels.tickets);
                self.kernels = Some(kernels);
            }
            Err(error) => {
                log::info!("{}: no copy kernel: {error}", self.device.info.location);
                return false;
            }
        }
        let copies = self.try_copy(Path::Kernel);
        if !copies {
            log::error!("{}: the copy kernel does not copy what it should", self.device.info.location);
        }
        copies
    }

    /// Copies page-locked memory to the device, and back, by one path, and compares. Two alignments: the same
    /// at both ends, and another one.
    fn try_copy(&mut self, path: Path) -> bool {
        let Ok(scratch) = Scratch::new(&self.device, TRIAL_BYTES) else { return false };
        for (skip, skip_there) in [(5, 5), (3, 8)] {
            let len = TRIAL_BYTES - 16;
            let pattern = |at: usize| (at * 7 + skip) as u8 | 1;
            for at in 0..len {
                self.pinned.put(skip + at, pattern(at));
                self.pinned.put(TRIAL_BYTES + skip + at, 0_u8);
            }
            let here =
                |at: usize| Place { at: self.pinned.by_host(at), by_kernel: self.pinned.by_device(at) };
            let there = scratch.at() + skip_there;
            let there = Place { at: there, by_kernel: there };
            for (to, from) in [(there, here(skip)), (here(TRIAL_BYTES + skip), there)] {
                self.group.clear();
                self.group.add_places(to, from, len, Token(0));
                let launched =
                    self.channel.launch(&mut self.group, path, (&self.pinned, self.kernels.as_ref()), 1);
                if launched.is_err() || self.wait(TRIAL).is_err() {
                    let _drained = self.wait(self.drain);
                    if !self.channel.is_empty() {
                        scratch.abandon();
                    }
                    return false;
                }
            }
            if !(0..len).all(|at| self.pinned.byte(TRIAL_BYTES + skip + at) == pattern(at)) {
                return false;
            }
        }
        true
    }

    fn wait(&mut self, limit: Duration) -> Result<(), Error> {
        let mut out = [HopEnd { token: Token(0), result: Ok(()) }; 64];
        let (start, mut result, mut spins) = (Instant::now(), Ok(()), 0_u32);
        while !self.channel.is_empty() {
            let count = self.poll(&mut out);
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
}

impl std::fmt::Debug for CopyQueue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CopyQueue").field("device", &self.location()).finish_non_exhaustive()
    }
}

impl Drop for CopyQueue {
    fn drop(&mut self) {
        if self.device.is_forked() {
            return;
        }
        let drained = self.wait(self.drain);
        if !self.channel.is_empty() || self.device.is_dead() {
            log::error!("{}: copies of a queue did not end: {drained:?}", self.device.info.location);
            self.pinned.abandon();
            // Unloading would wait for kernels that run.
            std::mem::forget(self.kernels.take());
        }
    }
}
