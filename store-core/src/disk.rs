//! The SSD tier of a node: what is on a disk, as a state machine without I/O.
//!
//! ```text
//!    the node's driver                    this module                          the master
//!  ┌──────────────────┐  orders  ┌──────────────────────────┐  events  ┌───────────────────────────┐
//!  │ threads, io_uring│ ◀─────── │ Disk                     │ ───────▶ │ Demoted, Adopt: places    │
//!  │ or a simulation  │          │  queues ─▶ open extents  │          │ Forgotten: no tombstone   │
//!  │                  │ complete │  tombstones, superblock  │  demote  │ Reclaim: drops places     │
//!  │ memory of objects│ ───────▶ │  recovery                │ ◀─────── │ stage, forget, reclaimed  │
//!  └────────┬─────────┘          └──────────────────────────┘          └───────────────────────────┘
//!           ▼
//!   [superblocks][extent][extent][extent] …      an endless log: extents are written, then given up whole
//! ```
//!
//! The log has two open extents: one for objects that were read since their put, and one for objects *on
//! trial*, whose extents age three times as fast. An object is written once and never moved; when room is
//! needed, the oldest extent is given up with everything in it. So there is no garbage collection, and nearly
//! every byte written is a byte of an object. [`format`](mod@format) describes the bytes.
//!
//! The node has no index: four bytes per object say where images begin. The master knows the objects, and
//! names them by *locator*: the sequence of an extent and the offset in it. Sequences are never used twice,
//! so a locator whose extent was given up finds nothing ([`Refused::Gone`]), and never other bytes.
//!
//! # The life of an object on a disk
//!
//! 1. [`Disk::demote`] queues it. With others of its stream it becomes a batch: a header, and the images of
//!    the objects, written straight from the memory that [`Demote::token`] names. [`Event::Demoted`] has its
//!    locator. From now on it can be read; it survives a loss of power after the next sync, which is at most
//!    64 MiB or a second away.
//! 2. [`Disk::stage`] reads its image into a buffer, for which a deadline holds. **The reader verifies**
//!    the checksum that is bound to key and generation. So nothing that goes wrong with a disk, errors that
//!    it does not report included, makes a reader accept wrong bytes.
//! 3. When it is removed or replaced, [`Disk::forget`] records a *tombstone*. A later recovery does not
//!    announce the object any more; [`Event::Forgotten`] says when that is certain.
//! 4. When its extent is given up, the first header and the footer of the extent are destroyed durably. Then
//!    [`Event::Reclaim`] asks the master, and after [`Disk::reclaimed`] the extent is overwritten.
//! 5. After a restart, [`Disk::open`] finds the objects again. Footers say what full extents contain;
//!    extents without one are walked header by header, and data that may not have been synced is verified.
//!    Then [`Event::Adopt`] announces the objects, and [`Event::Ready`] follows.
//!
//! # What the master has to know
//!
//! * A generation *may be on the disk* from the moment at which `demote` accepted it, until
//!   [`Event::Reclaim`] for its extent, [`Event::Cleared`], or an [`Event::Ready`] before which it was not
//!   announced. As long as it may be, its removal has to be told by `forget`, and the master keeps a
//!   tombstone until [`Event::Forgotten`]: also after [`Event::DemoteFailed`] (except [`Failure::Removed`]),
//!   [`Event::ReadFailed`] and [`Event::Dropped`]. After a restart of the node it tells those that were not
//!   confirmed again.
//! * A generation that was demoted again after a failed read has two images, and may be announced twice. It
//!   may be on the disk as long as one of them is.
//! * It adopts an object only if it has no tombstone of this generation and knows no newer one of the key.
//!   Otherwise it answers with `forget` and the locator. Objects of another lineage than its own are its own
//!   decision.
//! * Tombstones are bounded. At [`Refused::TombstonesFull`] it drops all places on the disk and calls
//!   [`Disk::clear`]; [`Event::Cleared`] confirms all removals that came before the call.
//! * [`Event::Distrusted`]: recovery found that headers are missing which had been synced, and tombstones
//!   may be missing with them. Nothing is announced.
//!
//! # What the driver has to know
//!
//! * Each order is carried out once, in any order; orders that overlap are never in flight together, except
//!   for reads. A completion is passed on when nothing touches the order's memory any more.
//! * Reads and writes go past the cache of the operating system (`O_DIRECT`): what a failed sync has lost
//!   must not be readable.
//! * A write that ended early is reported with the bytes that were written, and never as an error. The rest
//!   is ordered again.
//! * [`Disk::poll_order`] and [`Disk::poll_event`] are drained after every call of another function.
//!
//! # Errors of the disk
//!
//! | What happens | What follows |
//! |---|---|
//! | A read or write does less than it should | The rest is ordered again, within limits |
//! | A read fails | [`Event::ReadFailed`]; the master drops the place |
//! | A write fails | [`Event::DemoteFailed`]; the extent is given up, and listed in the superblock |
//! | There is no space | The same, but it does not count as an error of the disk |
//! | Many reads and writes fail within an hour | The disk is read-only: [`Why::Errors`] |
//! | A sync fails | The disk is read-only; what was not synced is dropped. The sync is not repeated |
//! | An order does not end | Nothing more is ordered; readers are answered at their deadline |
//! | A footer is damaged | The headers of the extent say the same |
//! | A superblock is damaged | The other one is used |
//! | Headers that were synced are missing or unreadable | [`Event::Distrusted`] |
//!
//! One damage is not noticed: that of the first header of an extent which has no footer yet, when no other
//! header was written after it. Tombstones that were recorded in this extent alone are lost then.
//!
//! # Example
//!
//! An object is written to a disk that is a `Vec`, and read again:
//!
//! ```
//! use store_core::disk::format::{FIRST_EXTENT_AT, Geometry, Stream};
//! use store_core::disk::{Demote, Disk, DiskConfig, End, Event, Piece, Stage, Target, Work};
//! use te_core::Instant;
//!
//! let object = vec![42; 5_000]; // Shorter than a chunk: it has no trailer.
//! let mut buffer = vec![0; 8_192];
//! let mut bytes = vec![0; 16 << 20];
//! let mut now = Instant::from_millis(1);
//! let geometry = Geometry::new(bytes.len() as u64, 1 << 20, 512)?;
//! let mut disk = Disk::format(now, DiskConfig::default(), geometry, *b"random in truth!", 1)?;
//!
//! let mut locator = None;
//! loop {
//!     // The driver.
//!     while let Some(order) = disk.poll_order() {
//!         let at = order.offset as usize;
//!         let mut data = Vec::new();
//!         match &order.work {
//!             Work::Write(pieces) => {
//!                 for piece in pieces {
//!                     match piece {
//!                         Piece::Bytes(bytes, from) => data.extend_from_slice(&bytes[*from as usize..]),
//!                         Piece::Zeros(bytes) => data.resize(data.len() + *bytes as usize, 0),
//!                         Piece::Source { token: 7, offset, bytes } => {
//!                             data.extend_from_slice(&object[*offset as usize..][..*bytes as usize]);
//!                         }
//!                         other => panic!("there is one object only: {other:?}"),
//!                     }
//!                 }
//!                 bytes[at..at + data.len()].copy_from_slice(&data);
//!             }
//!             Work::Read { bytes: len, into: Target::Buffer { token: 9, offset } } => {
//!                 let (to, len) = (*offset as usize, *len as usize);
//!                 buffer[to..to + len].copy_from_slice(&bytes[at..at + len]);
//!             }
//!             Work::Read { bytes: len, .. } => data = bytes[at..at + *len as usize].to_vec(),
//!             Work::Sync => {}
//!         }
//!         disk.complete(now, order.op, End::Done { bytes: order.work.bytes(), data: &data });
//!     }
//!     // The node, on behalf of the master.
//!     match disk.poll_event() {
//!         Some(Event::Ready) => {
//!             let (key, stream) = (Box::from(*b"key"), Stream::Trial);
//!             let (len, crc32c) = (object.len() as u64, 0x1234);
//!             let (tenant, generation) = (1, 1);
//!             disk.demote(now, Demote { id: 1, tenant, key, generation, len, crc32c, stream, token: 7 })?;
//!         }
//!         Some(Event::Demoted { id: 1, locator: at }) => {
//!             locator = Some(at);
//!             let deadline = now + core::time::Duration::from_millis(10);
//!             disk.stage(now, Stage { id: 2, locator: at, len: object.len() as u64, token: 9, deadline })?;
//!         }
//!         Some(Event::Staged { id: 2 }) => break,
//!         Some(other) => panic!("nothing goes wrong here: {other:?}"),
//!         None => {
//!             now = disk.poll_at().expect("the batch is due");
//!             disk.handle_timeout(now);
//!         }
//!     }
//! }
//! assert_eq!(disk.geometry().place(locator.expect("it was written")), (1, 4_096));
//! assert_eq!(buffer[..object.len()], object); // A real reader verifies the checksum.
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod config;
mod crc;
mod durable;
mod extents;
pub mod format;
mod io;
mod message;
mod open;
mod reading;
mod reclaim;
mod recovery;
mod tombstones;
mod wear;
mod writing;

use alloc::boxed::Box;
use alloc::collections::VecDeque;
use alloc::vec::Vec;
use core::time::Duration;

use te_core::Instant;

use extents::{Extents, Status};
use format::{DiskUuid, Geometry, GeometryError, Marks, Superblock};
use io::Ops;
use recovery::Opening;
use tombstones::Tombstones;
use wear::Wear;
use writing::Writing;

pub use config::{DiskConfig, DiskConfigError};
pub use io::{End, IoError, Order, Piece, Target, Work};
pub use message::{Adopted, Counters, Demote, Event, Failure, Refused, Stage, State, Why};
pub use tombstones::Removed;

const HOUR: Duration = Duration::from_secs(3_600);

/// One disk of a node.
///
/// * *Inputs*: [`demote`](Self::demote), [`stage`](Self::stage), [`forget`](Self::forget),
///   [`reclaimed`](Self::reclaimed), [`clear`](Self::clear), [`complete`](Self::complete) and
///   [`handle_timeout`](Self::handle_timeout).
/// * *Outputs*, which may change after every input: [`poll_order`](Self::poll_order),
///   [`poll_event`](Self::poll_event) and [`poll_at`](Self::poll_at).
#[derive(Debug)]
pub struct Disk {
    config: DiskConfig,
    geometry: Geometry,
    uuid: DiskUuid,
    lineage: u64,
    state: State,
    ops: Ops<Purpose>,
    extents: Extents,
    writing: Writing,
    durable: durable::Durable,
    reclaim: reclaim::Wiping,
    tombstones: Tombstones,
    wear: Wear,
    events: VecDeque<Event>,
    counters: Counters,
    reads: reading::Reads,
    /// Errors since a time.
    errors: (u32, Instant),
    opening: Option<Box<Opening>>,
    /// When everything that was due was last begun.
    proceeded_at: Instant,
}

/// What an order is for.
#[derive(Debug)]
enum Purpose {
    Stage(reading::Flight),
    Batch(Box<writing::Batch>),
    Footer { slot: u32 },
    Wipe { slot: u32 },
    Superblock,
    Sync { tick: u64, marks: Marks },
    Recover(recovery::Probing),
}

/// Why a disk cannot be formatted or opened with these parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OpenError {
    /// A setting.
    Config(DiskConfigError),
    /// The size of the disk, of its extents or of its blocks.
    Geometry(GeometryError),
}

impl core::fmt::Display for OpenError {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self {
            Self::Config(error) => error.fmt(f),
            Self::Geometry(error) => error.fmt(f),
        }
    }
}

impl core::error::Error for OpenError {}

impl Disk {
    /// Formats a disk. Whatever is on it does not exist any more when the first order has ended.
    ///
    /// `uuid` is random. `lineage` is that of the master that objects are written for.
    ///
    /// # Errors
    /// A setting is impossible.
    pub fn format(
        now: Instant,
        config: DiskConfig,
        geometry: Geometry,
        uuid: DiskUuid,
        lineage: u64,
    ) -> Result<Self, OpenError> {
        config.validate().map_err(OpenError::Config)?;
        let mut disk = Self::new(now, config, geometry, uuid, lineage);
        disk.format_superblocks(now);
        Ok(disk)
    }

    /// Opens a disk of `disk_bytes` bytes, whose logical blocks have at most `block_bytes`: reads what is on
    /// it, announces its objects, and becomes ready.
    ///
    /// # Errors
    /// A setting is impossible. What is found on the disk is reported by [`Self::state`].
    pub fn open(
        now: Instant,
        config: DiskConfig,
        disk_bytes: u64,
        block_bytes: u32,
        lineage: u64,
    ) -> Result<Self, OpenError> {
        config.validate().map_err(OpenError::Config)?;
        // The smallest one, until that of the superblock is known.
        let bytes = format::EXTENT_BYTES_MIN;
        let least = format::FIRST_EXTENT_AT + u64::from(format::EXTENTS_MIN * bytes);
        let geometry = Geometry::new(least, bytes, block_bytes);
        let geometry = geometry.map_err(OpenError::Geometry)?;
        let mut disk = Self::new(now, config, geometry, [0; 16], lineage);
        disk.begin_recovery(now, disk_bytes, block_bytes);
        Ok(disk)
    }

    fn new(now: Instant, config: DiskConfig, geometry: Geometry, uuid: DiskUuid, lineage: u64) -> Self {
        Self {
            geometry,
            uuid,
            lineage,
            state: State::Opening,
            ops: Ops::new(geometry.block_bytes()),
            extents: Extents::new(&geometry),
            writing: Writing::default(),
            durable: durable::Durable::new(uuid, geometry),
            reclaim: reclaim::Wiping::default(),
            tombstones: Tombstones::default(),
            wear: Wear::new(config.wear_bytes_per_s),
            events: VecDeque::new(),
            counters: Counters::default(),
            reads: reading::Reads::default(),
            errors: (0, now),
            opening: None,
            proceeded_at: now,
            config,
        }
    }

    /// What the disk can do at present.
    #[must_use]
    pub const fn state(&self) -> State {
        self.state
    }

    /// What was counted since the disk was opened.
    #[must_use]
    pub const fn counters(&self) -> Counters {
        Counters { short_total: self.ops.short_total, ..self.counters }
    }

    /// The size of the disk, of its extents and blocks. Known when the state is not [`State::Opening`].
    #[must_use]
    pub const fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    /// Where each extent begins on the disk, bytes, by its sequence, ascending; free ones have none. It stays
    /// the same as long as [`Self::extents_version`] does.
    pub fn extents(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        self.extents.oldest_first().map(|(sequence, slot)| (sequence, self.geometry.extent_at(slot)))
    }

    /// Counts what may have changed [`Self::extents`].
    #[must_use]
    pub const fn extents_version(&self) -> u64 {
        self.extents.version
    }

    /// The name of the disk. Known when the state is not [`State::Opening`].
    #[must_use]
    pub const fn uuid(&self) -> &DiskUuid {
        &self.uuid
    }

    /// What the superblock says: bytes written in all its time, and bad extents.
    #[must_use]
    pub const fn superblock(&self) -> &Superblock {
        &self.durable.current
    }

    /// Objects that readers can find.
    #[must_use]
    pub fn objects(&self) -> u64 {
        self.extents.live()
    }

    /// Extents that are free.
    #[must_use]
    pub fn free_extents(&self) -> usize {
        self.extents.free()
    }

    /// Removed objects that are remembered.
    #[must_use]
    pub fn tombstones(&self) -> usize {
        self.tombstones.len()
    }

    /// Orders that have not ended.
    #[must_use]
    pub fn orders_in_flight(&self) -> usize {
        self.ops.len()
    }

    /// Estimated bytes of memory that are in proportion to the extents and objects on the disk.
    #[must_use]
    pub fn memory_bytes(&self) -> usize {
        self.extents.memory_bytes()
    }

    /// From now on objects are written for a master of this lineage.
    pub fn set_lineage(&mut self, lineage: u64) {
        if self.lineage != lineage {
            self.lineage = lineage;
            // The entries of an extent are all of one lineage.
            self.close_all();
        }
    }

    /// Changes [`DiskConfig::wear_bytes_per_s`].
    pub const fn set_wear_limit(&mut self, bytes_per_s: u64) {
        self.wear.set(bytes_per_s);
    }

    /// The next order for the driver.
    pub fn poll_order(&mut self) -> Option<Order> {
        self.ops.poll()
    }

    /// The next event.
    pub fn poll_event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }

    /// Takes the end of an order. An order that is not known is ignored.
    pub fn complete(&mut self, now: Instant, op: u64, end: End<'_>) {
        let Some((purpose, result)) = self.ops.complete(now, op, end) else { return };
        match purpose {
            Purpose::Stage(flight) => self.stage_ended(now, &flight, result.is_ok()),
            Purpose::Batch(batch) => self.batch_ended(now, *batch, result.err()),
            Purpose::Footer { slot } => self.footer_ended(now, slot, result.err()),
            Purpose::Wipe { slot } => self.wipe_ended(now, slot, result.err()),
            Purpose::Superblock => self.superblock_ended(now, result.is_ok()),
            Purpose::Sync { tick, marks } => self.sync_ended(tick, marks, result.is_ok()),
            Purpose::Recover(probing) => self.probe_ended(now, probing, result),
        }
        self.proceed(now);
    }

    /// Does what is due. To be called at [`Self::poll_at`].
    pub fn handle_timeout(&mut self, now: Instant) {
        self.expire_reads(now);
        self.proceed(now);
    }

    /// When [`Self::handle_timeout`] has to be called; `None`: only after another input.
    #[must_use]
    pub fn poll_at(&self) -> Option<Instant> {
        let reads = self.reads_due_at();
        if self.state != State::Ready {
            return reads;
        }
        // What was due and could not begin waits for another input.
        let later = |at: &Instant| *at > self.proceeded_at;
        let writes = self.batches_due_at().into_iter().chain([self.sync_due_at()]);
        writes.flatten().filter(later).chain(reads).min()
    }

    /// Begins everything that can begin.
    fn proceed(&mut self, now: Instant) {
        self.proceeded_at = now;
        if self.opening.is_some() {
            self.proceed_recovery(now);
        }
        if self.state == State::Ready && !self.is_stalled(now) {
            self.give_up_extents(now);
            if !self.durable.is_listing_bad() {
                self.write_batches(now);
                self.write_footers(now);
            }
            self.write_superblock(now);
            self.sync(now);
        }
    }

    fn stall(&self) -> Duration {
        Duration::from_millis(self.config.stall_ms.into())
    }

    /// Whether an order does not end.
    fn is_stalled(&self, now: Instant) -> bool {
        self.ops.stalls_at(self.stall()).is_some_and(|at| at < now)
    }

    fn tombstone_bytes_max(&self) -> usize {
        self.config.tombstone_bytes_max.min(self.geometry.extent_bytes() / 16) as usize
    }

    /// Counts a failed read or write.
    fn count_error(&mut self, now: Instant) {
        let (errors, since) = &mut self.errors;
        if now - *since > HOUR {
            (*errors, *since) = (0, now);
        }
        *errors += 1;
        if *errors >= self.config.errors_max {
            self.stop(Why::Errors);
        }
    }

    /// From now on nothing is written.
    fn stop(&mut self, why: Why) {
        match self.state {
            State::ReadOnly(_) | State::Failed(_) => return,
            State::Opening => {
                self.state = State::Failed(why);
                self.opening = None;
            }
            // What was not announced yet never will be.
            State::Adopting | State::Ready => {
                self.state = State::ReadOnly(why);
                self.opening = None;
            }
        }
        self.events.push_back(Event::Stopped(why));
        self.fail_queue(Failure::Abandoned);
    }

    fn confirm(&mut self, removed: Vec<Removed>) {
        self.events.extend(removed.into_iter().map(Event::Forgotten));
    }

    /// Forgets tombstones for which no bytes are left.
    fn prune_tombstones(&mut self) {
        if self.tombstones.is_empty() {
            return;
        }
        let exists = |slot: u32| {
            let status = self.extents.slot(slot).status;
            !matches!(status, Status::Reclaiming | Status::Drained)
        };
        let oldest = self.extents.oldest_first().find(|(_, slot)| exists(*slot));
        let oldest = oldest.map_or(self.writing.next_sequence, |(sequence, _)| sequence);
        let confirmed = self.tombstones.prune(oldest);
        self.confirm(confirmed);
    }
}
