//! Reads of objects on disks that their nodes export: straight from the namespace, past the node.
//!
//! ```text
//!   the client's thread ── want ──▶ a bounded queue ──▶ one thread ── LocateExtents ──▶ the node, per extent
//!                       ◀── image, or why not ─────────┘    └──────── READ ───────────▶ the target
//! ```
//!
//! A locator names an extent by its sequence, which is never used again, and the node knows where on the disk
//! that extent is. What a reader has learned of that may be outdated by the time that it reads: the node
//! gives extents up without asking readers that it does not know. So a reader reads the image first and the
//! first page of its extent afterwards. A node destroys that page durably before it asks the master to give
//! an extent up, and writes to the extent only after the answer. With the disk's name, the slot and the
//! sequence still on that page, the image was the extent's when it was read. Then it is verified as
//! everything that is read: against the checksum that is bound to key and generation.
//!
//! Before the first read of a disk, its superblocks are read there and compared with what the node says.
//! Whatever is wrong, the object is read through its node, and nothing is reported about it.

use std::collections::VecDeque;
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use store_core::SegmentNo;
use te_core::Secret;

use crate::config::{DiskExport, NamespacePlace};
use crate::disk::{Bell, DiskError, DiskFile};
use crate::packs::PackEnd;
use crate::rpc::{Identity, RpcConfig};
use crate::stage::Exported;

#[cfg(feature = "nvmeof")]
mod namespaces;
#[cfg(feature = "nvmeof")]
mod reader;
#[cfg(not(feature = "nvmeof"))]
#[path = "direct/no_nvmeof.rs"]
mod reader;

/// Reads that wait at most.
const QUEUE_MAX: usize = 4_096;
/// Longest time to connect to a node, and to wait for its answer, ms.
const NODE_MS_MAX: u32 = 500;
/// How long a node that starts waits for the target of an exported disk.
const CHECK: Duration = Duration::from_secs(3);

/// Why an object on an exported disk was not read there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum NotDirect {
    /// The node does not export the disk.
    NotExported,
    /// The node or the target cannot be reached, or refuses.
    Unreachable,
    /// The namespace is not the disk.
    Foreign,
    /// The extent was given up, or its node does not know it.
    Moved,
    /// The bytes there are not the committed ones.
    Damaged,
    /// The target did not answer in time.
    Late,
}

impl NotDirect {
    /// The reasons that are counted, in the order of [`Counters::direct_fallbacks`](crate::Counters).
    pub const COUNTED: [Self; 5] = [Self::Unreachable, Self::Foreign, Self::Moved, Self::Damaged, Self::Late];

    /// As it is called in metrics.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::NotExported => "not_exported",
            Self::Unreachable => "unreachable",
            Self::Foreign => "foreign",
            Self::Moved => "moved",
            Self::Damaged => "damaged",
            Self::Late => "late",
        }
    }

    /// What is wrong, as a part of a sentence.
    pub(crate) const fn text(self) -> &'static str {
        match self {
            Self::NotExported => "its node does not export it",
            Self::Unreachable => "the node or the target cannot be reached, or refuses",
            Self::Foreign => "the namespace is not this disk: check `disk_exports` of its node",
            Self::Moved => "the extent was given up",
            Self::Damaged => "the bytes there are not the committed ones",
            Self::Late => "the target does not answer in time",
        }
    }

    /// How long the disk is not read past its node afterwards.
    pub(crate) const fn shun(self) -> Duration {
        match self {
            Self::NotExported => Duration::from_secs(60),
            Self::Unreachable | Self::Foreign | Self::Late => Duration::from_secs(10),
            Self::Moved | Self::Damaged => Duration::ZERO,
        }
    }
}

/// An object on a disk that may be exported.
#[derive(Clone, Debug)]
#[cfg_attr(not(feature = "nvmeof"), allow(dead_code, reason = "for the reader of namespaces"))]
pub(crate) struct DirectRead {
    /// Comes back with the end.
    pub(crate) id: u64,
    pub(crate) disk: DiskName,
    pub(crate) locator: u64,
    /// Bytes of the image, without padding.
    pub(crate) bytes: usize,
    /// It is worthless afterwards.
    pub(crate) deadline: Instant,
}

/// A disk of a node: its number, and the address of the node's stage service.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct DiskName {
    pub(crate) no: SegmentNo,
    pub(crate) service: Arc<str>,
}

/// The thread of a client that reads exported disks.
pub(crate) struct DirectReader {
    settings: Settings,
    /// `None` until there is something to read.
    shared: Option<Arc<Shared>>,
    /// The thread cannot be started, or the client does not want it.
    is_off: bool,
}

/// How nodes are asked.
#[derive(Clone)]
#[cfg_attr(not(feature = "nvmeof"), allow(dead_code, reason = "for the reader of namespaces"))]
struct Settings {
    rpc: RpcConfig,
    identity: Identity,
}

struct Shared {
    queue: Mutex<Queue>,
    bell: Bell,
}

#[derive(Default)]
struct Queue {
    waiting: VecDeque<DirectRead>,
    closed: bool,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl DirectReader {
    /// A reader that asks nodes with this secret.
    pub(crate) fn new(rpc: RpcConfig, cluster: Secret, wanted: bool) -> Self {
        // The secrets of a tenant or an admin are not for nodes.
        let identity =
            Identity { tenant: String::new(), secret: Secret::default(), admin: Secret::default(), cluster };
        let connect_ms_max = rpc.connect_ms_max.min(NODE_MS_MAX);
        let rpc = RpcConfig { connect_ms_max, reconnect_ms_max: 0, call_ms_max: connect_ms_max, ..rpc };
        let is_off = !wanted || !cfg!(feature = "nvmeof");
        Self { settings: Settings { rpc, identity }, shared: None, is_off }
    }

    /// Whether anything is read at all.
    pub(crate) const fn is_off(&self) -> bool {
        self.is_off
    }

    /// Reads an image, whose end is sent to `ended`. Returns whether it was accepted.
    pub(crate) fn want(&mut self, read: DirectRead, ended: Sender<PackEnd>) -> bool {
        if self.is_off {
            return false;
        }
        let shared = match &self.shared {
            Some(shared) => shared,
            None => match reader::start(self.settings.clone(), ended) {
                Ok(shared) => self.shared.insert(shared),
                Err(error) => {
                    log::warn!("exported disks are read through their nodes: no thread: {error}");
                    self.is_off = true;
                    return false;
                }
            },
        };
        let mut queue = shared.lock();
        if queue.waiting.len() >= QUEUE_MAX {
            return false;
        }
        queue.waiting.push_back(read);
        drop(queue);
        shared.bell.ring();
        true
    }
}

impl Drop for DirectReader {
    fn drop(&mut self) {
        if let Some(shared) = &self.shared {
            shared.lock().closed = true;
            shared.bell.ring();
        }
    }
}

/// What readers are told about a disk that is exported. The namespace has to be the disk; that its target
/// does not answer is logged, since readers find out themselves.
///
/// # Errors
/// `NotExported`; the disk cannot be read.
pub(crate) fn exported(export: &DiskExport, file: &DiskFile) -> Result<Exported, DiskError> {
    let superblock = file.superblock()?;
    let DiskExport { path, place: NamespacePlace { address, nqn, nsid, offset } } = export.clone();
    let geometry = superblock.geometry;
    let exported = Exported {
        uuid: superblock.disk,
        bytes: geometry.extent_at(geometry.extents()),
        extent_bytes: geometry.extent_bytes(),
        address,
        nqn,
        nsid,
        offset,
    };
    let wrong = |what: &str| {
        let why = format!("namespace {nsid} of {} at {address} {what}", exported.nqn);
        Err(DiskError::NotExported { path: path.clone(), why })
    };
    match reader::check(&exported, CHECK) {
        Ok(()) => Ok(exported),
        Err(NotDirect::Unreachable | NotDirect::Late) => {
            log::warn!(
                "{}: namespace {nsid} of {} at {address} cannot be read, and was not compared with the disk: check \
                 that its target runs",
                path.display(),
                exported.nqn
            );
            Ok(exported)
        }
        Err(NotDirect::Foreign) => wrong(&format!("is not this disk, or does not hold it at byte {offset}")),
        Err(_) => wrong("cannot be compared with the disk"),
    }
}
