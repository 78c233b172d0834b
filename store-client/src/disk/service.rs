//! [`DiskService`]: a disk with its thread, for an owner that never waits for it.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::thread;
use std::time::{Duration, Instant};

use store_core::disk::format::Geometry;
use store_core::disk::{Disk, DiskConfig, Removed};

use super::bell::Bell;
use super::clock::Clock;
use super::driver::Driver;
use super::error::DiskError;
use super::file::DiskFile;
use super::held::LentMemory;
use super::inbox::{Command, Inbox};
use super::meter::Meter;
use super::outbox::Outbox;
use super::packs::PackDirectory;
use super::request::{Demote, DiskEvent, Stage, Unsent};
use super::shared::Shared;
use super::shell::Shell;
use super::stats::DiskStats;
use super::threads::{Medium, Threads};

/// Operations of a disk that are in flight at a time.
pub const QUEUE_DEPTH: u32 = 32;
/// The same at most, for a directory of packs.
const PACK_DEPTH_MAX: u32 = 16;

/// Which driver carries out the operations of a disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DriverKind {
    /// io_uring where this build and the kernel have it, else threads.
    #[default]
    Best,
    /// Threads.
    Threads,
}

/// How a disk is driven.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct DiskOptions {
    /// The settings of the disk itself.
    pub disk: DiskConfig,
    /// Most operations that are in flight at a time, 1 to 1,024. Default 32.
    pub queue_depth: u32,
    /// What carries them out.
    pub driver: DriverKind,
}

impl Default for DiskOptions {
    fn default() -> Self {
        Self { disk: DiskConfig::default(), queue_depth: QUEUE_DEPTH, driver: DriverKind::Best }
    }
}

/// A disk and its thread.
///
/// No function waits for the disk: requests go into a bounded queue, and answers come from
/// [`poll_event`](Self::poll_event) while [`as_fd`](AsFd::as_fd) is readable. Only [`close`](Self::close)
/// waits, for as long as it is told. Dropping a service closes it without waiting: what was demoted is not
/// synced, and is verified by the next recovery.
///
/// A process that was forked has no thread of the disk: it must not use the service.
pub struct DiskService {
    bell: Bell,
    outbox: Arc<Outbox>,
    shared: Arc<Shared>,
}

impl DiskService {
    /// Formats a disk that [`DiskFile::prepare`] has prepared, and starts its thread. Whatever was on it does
    /// not exist any more at [`DiskEvent::Ready`].
    ///
    /// # Errors
    /// A setting is impossible, or threads cannot be started.
    pub fn format(
        file: DiskFile,
        geometry: Geometry,
        options: DiskOptions,
        lineage: u64,
    ) -> Result<Self, DiskError> {
        let mut uuid = [0; 16];
        random(&mut uuid).map_err(DiskError::System)?;
        let clock = Clock::new();
        let disk = Disk::format(clock.now(), options.disk.clone(), geometry, uuid, lineage);
        Self::start(file, disk.map_err(DiskError::Open)?, clock, &options)
    }

    /// Starts the thread of a disk, which begins with its recovery. Objects on it are announced before
    /// [`DiskEvent::Ready`].
    ///
    /// # Errors
    /// A setting is impossible, or threads cannot be started.
    pub fn open(file: DiskFile, options: DiskOptions, lineage: u64) -> Result<Self, DiskError> {
        let clock = Clock::new();
        let (bytes, block) = (file.bytes(), file.block_bytes());
        let disk = Disk::open(clock.now(), options.disk.clone(), bytes, block, lineage);
        Self::start(file, disk.map_err(DiskError::Open)?, clock, &options)
    }

    /// Formats a directory of packs that [`PackDirectory::create`] has made, and starts its thread.
    ///
    /// # Errors
    /// As [`format`](Self::format).
    pub fn format_packs(packs: PackDirectory, options: DiskOptions, lineage: u64) -> Result<Self, DiskError> {
        let clock = Clock::new();
        let (geometry, uuid) = (packs.geometry(), *packs.uuid());
        let disk = Disk::format(clock.now(), options.disk.clone(), geometry, uuid, lineage);
        Self::start_packs(packs, disk.map_err(DiskError::Open)?, clock, &options)
    }

    /// Starts the thread of a directory of packs whose ownership was [taken](PackDirectory::take), which
    /// begins with its recovery.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn open_packs(packs: PackDirectory, options: DiskOptions, lineage: u64) -> Result<Self, DiskError> {
        let clock = Clock::new();
        let (bytes, block) = (packs.bytes(), packs.geometry().block_bytes());
        let disk = Disk::open(clock.now(), options.disk.clone(), bytes, block, lineage);
        Self::start_packs(packs, disk.map_err(DiskError::Open)?, clock, &options)
    }

    /// Formats a directory of packs that [`PackBucket::create`](super::PackBucket::create) has made, and
    /// starts its thread.
    ///
    /// # Errors
    /// As [`format`](Self::format).
    #[cfg(feature = "s3")]
    pub fn format_bucket(
        packs: super::PackBucket,
        options: DiskOptions,
        lineage: u64,
    ) -> Result<Self, DiskError> {
        let clock = Clock::new();
        let (geometry, uuid) = (packs.geometry(), *packs.uuid());
        let disk = Disk::format(clock.now(), options.disk.clone(), geometry, uuid, lineage);
        Self::start_packs(packs, disk.map_err(DiskError::Open)?, clock, &options)
    }

    /// Starts the thread of a directory of packs whose ownership was [taken](super::PackBucket::take), which
    /// begins with its recovery.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    #[cfg(feature = "s3")]
    pub fn open_bucket(
        packs: super::PackBucket,
        options: DiskOptions,
        lineage: u64,
    ) -> Result<Self, DiskError> {
        let clock = Clock::new();
        let (bytes, block) = (packs.bytes(), packs.geometry().block_bytes());
        let disk = Disk::open(clock.now(), options.disk.clone(), bytes, block, lineage);
        Self::start_packs(packs, disk.map_err(DiskError::Open)?, clock, &options)
    }

    fn start_packs<M: Medium>(
        packs: M,
        disk: Disk,
        clock: Clock,
        options: &DiskOptions,
    ) -> Result<Self, DiskError> {
        let bell = Bell::new().map_err(DiskError::System)?;
        let depth = options.queue_depth.clamp(1, PACK_DEPTH_MAX);
        let driver = Threads::start(Arc::new(packs), depth, bell.clone()).map_err(DiskError::System)?;
        Self::start_with(disk, clock, Box::new(driver), bell).map_err(DiskError::System)
    }

    fn start(file: DiskFile, disk: Disk, clock: Clock, options: &DiskOptions) -> Result<Self, DiskError> {
        let bell = Bell::new().map_err(DiskError::System)?;
        let file = Arc::new(file);
        let depth = options.queue_depth.clamp(1, 1_024);
        let driver = driver(&file, depth, &bell, options.driver).map_err(DiskError::System)?;
        Self::start_with(disk, clock, driver, bell).map_err(DiskError::System)
    }

    /// Starts a disk over any driver: for tests of disks that fail.
    pub(super) fn start_with(
        disk: Disk,
        clock: Clock,
        driver: Box<dyn Driver>,
        bell: Bell,
    ) -> io::Result<Self> {
        let outbox = Outbox::new(bell.clone())?;
        let (mut meter, lent) = (Meter::new(clock.epoch), LentMemory::default());
        let shared = Arc::new(Shared {
            inbox: Inbox::default(),
            stats: Mutex::new(meter.measure(&disk, driver.name(), &lent)),
            close_by: Mutex::new(None),
            extents: RwLock::default(),
            locates: AtomicBool::new(false),
        });
        let shell = Shell {
            clock,
            disk,
            driver,
            bell: bell.clone(),
            outbox: Arc::clone(&outbox),
            shared: Arc::clone(&shared),
            lent,
            withheld: false,
            meter,
            told_extents: u64::MAX,
        };
        thread::Builder::new().name("snowskin-disk".into()).spawn(move || shell.run())?;
        Ok(Self { bell, outbox, shared })
    }

    /// Asks for an object to be written. Answered by [`DiskEvent::Demoted`] or [`DiskEvent::DemoteFailed`],
    /// with the memory.
    ///
    /// # Errors
    /// The queue is full, or the disk is closed. The request comes back.
    pub fn demote(&self, request: Demote) -> Result<(), Unsent<Demote>> {
        self.send(request, |request| Command::Demote(Box::new(request)))
    }

    /// Asks for an image to be read. Answered by [`DiskEvent::Staged`] or [`DiskEvent::ReadFailed`], at the
    /// deadline at the latest.
    ///
    /// The disk knows nothing about keys and generations: the reader verifies what was read, with the
    /// checksum that the master keeps ([`store_core::bound`]).
    ///
    /// # Errors
    /// The queue is full, or the disk is closed. The request comes back.
    pub fn stage(&self, request: Stage) -> Result<(), Unsent<Stage>> {
        self.send(request, Command::Stage)
    }

    /// Remembers that a generation of a key was removed. Answered by [`DiskEvent::Forgotten`] or
    /// [`DiskEvent::ForgetRefused`]. `locator`: where the object is, if that is known.
    ///
    /// # Errors
    /// The queue is full, or the disk is closed: the removal must be told again.
    pub fn forget(&self, object: Removed, locator: Option<u64>) -> Result<(), Unsent<Removed>> {
        self.send(object, |object| Command::Forget(object, locator))
    }

    /// The answer to [`DiskEvent::Reclaim`].
    ///
    /// # Errors
    /// The queue is full, or the disk is closed: the answer must be given again.
    pub fn reclaimed(&self, sequence: u64) -> Result<(), Unsent<u64>> {
        self.send(sequence, Command::Reclaimed)
    }

    /// Asks for [`DiskEvent::Reclaim`] again, for every extent whose question was not answered: after the
    /// connection to the master was lost.
    ///
    /// # Errors
    /// The queue is full, or the disk is closed.
    pub fn repeat_reclaims(&self) -> Result<(), Unsent<()>> {
        self.send((), |()| Command::RepeatReclaims)
    }

    /// Gives up everything on the disk at once. Answered by [`DiskEvent::Cleared`] or
    /// [`DiskEvent::ClearRefused`].
    ///
    /// # Errors
    /// The queue is full, or the disk is closed.
    pub fn clear(&self) -> Result<(), Unsent<()>> {
        self.send((), |()| Command::Clear)
    }

    /// From now on objects are written for a master of this lineage.
    ///
    /// # Errors
    /// The queue is full, or the disk is closed.
    pub fn set_lineage(&self, lineage: u64) -> Result<(), Unsent<u64>> {
        self.send(lineage, Command::Lineage)
    }

    /// Changes [`DiskConfig::wear_bytes_per_s`].
    ///
    /// # Errors
    /// The queue is full, or the disk is closed.
    pub fn set_wear_limit(&self, bytes_per_s: u64) -> Result<(), Unsent<u64>> {
        self.send(bytes_per_s, Command::Wear)
    }

    /// The next event, without waiting. The descriptor is readable while there is one.
    #[must_use]
    pub fn poll_event(&self) -> Option<DiskEvent> {
        self.outbox.pop()
    }

    /// The next event, after at most `timeout`: for tools and tests.
    #[must_use]
    pub fn wait_event(&self, timeout: Duration) -> Option<DiskEvent> {
        self.outbox.wait(timeout)
    }

    /// From here on, [`extent_at`](Self::extent_at) has answers.
    pub(crate) fn locate_extents(&self) {
        self.shared.locates.store(true, Ordering::Relaxed);
        self.bell.ring();
    }

    /// Where the extent with this sequence begins on the disk, bytes; `None`: it is not known here, or not
    /// any more. The answer may be outdated when it arrives.
    pub(crate) fn extent_at(&self, sequence: u64) -> Option<u64> {
        let extents = self.shared.extents.read().unwrap_or_else(PoisonError::into_inner);
        let at = extents.binary_search_by_key(&sequence, |(sequence, _)| *sequence).ok()?;
        Some(extents[at].1)
    }

    /// A snapshot, at most about 100 ms old.
    #[must_use]
    pub fn stats(&self) -> DiskStats {
        let mut stats = self.shared.stats.lock().unwrap_or_else(PoisonError::into_inner).clone();
        stats.unsent_total = self.shared.inbox.refused();
        stats
    }

    /// Begins to close the disk: what was accepted is written and synced, until `timeout` from now. No
    /// further request is accepted. [`DiskEvent::Closed`] is the last event.
    pub fn begin_close(&self, timeout: Duration) {
        *self.shared.close_by.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now() + timeout);
        self.shared.inbox.begin_close();
        self.bell.ring();
    }

    /// As [`begin_close`](Self::begin_close), and waits for it. Returns whether everything is durable, and
    /// nothing is left in the kernel. Events that come meanwhile are dropped with the memory that they
    /// return.
    pub fn close(self, timeout: Duration) -> bool {
        self.begin_close(timeout);
        // The thread answers at its time; the margin is for a machine without a free processor.
        let end = Instant::now() + timeout + Duration::from_secs(1);
        while let Some(left) = end.checked_duration_since(Instant::now()) {
            match self.wait_event(left) {
                Some(DiskEvent::Closed { clean }) => return clean,
                Some(_) => {}
                None => break,
            }
        }
        false
    }

    fn send<T>(&self, request: T, command: impl FnOnce(T) -> Command) -> Result<(), Unsent<T>> {
        self.shared.inbox.push(request, command)?;
        self.bell.ring();
        Ok(())
    }
}

impl AsFd for DiskService {
    /// Readable while there are events. Only to be polled.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.outbox.event().as_fd()
    }
}

impl Drop for DiskService {
    fn drop(&mut self) {
        self.shared.inbox.begin_close();
        self.bell.ring();
    }
}

fn driver(file: &Arc<DiskFile>, depth: u32, bell: &Bell, kind: DriverKind) -> io::Result<Box<dyn Driver>> {
    #[cfg(all(feature = "uring", target_os = "linux"))]
    if kind == DriverKind::Best {
        match super::uring::Uring::start(Arc::clone(file), depth, bell) {
            Ok(driver) => return Ok(Box::new(driver)),
            Err(error) => log::info!("io_uring is not available for disks, threads are used: {error}"),
        }
    }
    let _ = kind;
    Ok(Box::new(Threads::start(Arc::clone(file), depth, bell.clone())?))
}

/// Fills the bytes from the operating system's source of randomness.
fn random(bytes: &mut [u8]) -> io::Result<()> {
    use std::io::Read as _;
    std::fs::File::open("/dev/urandom")?.read_exact(bytes)
}
