//! The segments that a client has opened. A segment is looked up at the master and opened in the engine at
//! its first use, and forgotten when either restarts. A disk has the number of a segment, whose memory is the
//! staging memory of its node ([`crate::stage`]).

use std::collections::HashMap;
use std::time::{Duration, Instant};

use store_core::SegmentNo;
use store_core::message::{Export, Segments as AskSegments};
use te_engine::{PeerToPeer, SegmentError, SegmentHandle};

use crate::engine::Engine;
use crate::pools::Pages;
use crate::rpc::RpcConnection;

/// The segments that a client has used.
pub(crate) struct Segments {
    /// Fetches descriptors from engines.
    descriptors: PeerToPeer,
    known: HashMap<SegmentNo, Known>,
    /// The staging memory of directories of packs, which are known as such.
    staged: HashMap<SegmentNo, Known>,
    /// Directories of packs, by the number in [`Place::Packs`].
    packs: Vec<PackPlace>,
    /// Whether packs are read from here.
    direct: bool,
    lineage: u64,
    /// Pages of CXL pools.
    pages: Pages,
    /// Addresses of stage services, by the number in [`Place::Disk`].
    services: Vec<String>,
    /// Segments that the master knows, but whose owner could not be reached.
    unreached: Vec<SegmentNo>,
    /// Why the latest of them could not be reached.
    why: Option<String>,
}

#[derive(Clone, Copy)]
enum Known {
    Open(Place),
    /// The segment could not be reached, or the master does not know it. It is not tried again before this
    /// time.
    Shunned(Instant),
}

impl Known {
    /// What was found, or that nothing is looked for again in this time.
    fn of(found: Option<Place>, shun: Duration) -> Self {
        found.map_or_else(|| Self::Shunned(Instant::now() + shun), Self::Open)
    }

    /// The place, or none while it is not to be tried; `None`: it is time to look.
    fn now(&self) -> Option<Option<Place>> {
        match self {
            Self::Open(place) => Some(Some(*place)),
            Self::Shunned(until) => (Instant::now() < *until).then_some(None),
        }
    }
}

/// What has the number of a segment.
#[derive(Clone, Copy)]
pub(crate) enum Place {
    /// Memory of a node.
    Memory(SegmentHandle),
    /// Storage that a node has mounted, and its granule in bytes.
    Storage(SegmentHandle, u32),
    /// A directory of packs: [`Segments::packs`].
    Packs(u32),
    /// A disk, whose objects are read from this memory.
    Disk {
        /// The staging memory of the node.
        staging: SegmentHandle,
        /// The number of the node's stage service: [`Segments::service`].
        service: u32,
    },
}

impl Place {
    /// The memory, or the staging memory of a disk.
    const fn handle(self) -> Option<SegmentHandle> {
        match self {
            Self::Memory(handle) | Self::Storage(handle, _) | Self::Disk { staging: handle, .. } => {
                Some(handle)
            }
            Self::Packs(_) => None,
        }
    }
}

/// A directory of packs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PackPlace {
    /// Its path at its node.
    pub(crate) directory: String,
    /// Bytes of an extent.
    pub(crate) extent_bytes: u64,
}

impl Segments {
    /// No segments yet, for an engine with this configuration.
    pub(crate) fn new(config: &te_engine::Config) -> Self {
        Self {
            descriptors: PeerToPeer::of(config),
            known: HashMap::new(),
            staged: HashMap::new(),
            packs: Vec::new(),
            direct: true,
            lineage: 0,
            pages: Pages::default(),
            services: Vec::new(),
            unreached: Vec::new(),
            why: None,
        }
    }

    /// Packs are read by their nodes, as other disks are.
    pub(crate) const fn without_packs(mut self) -> Self {
        self.direct = false;
        self
    }

    /// A directory of packs.
    pub(crate) fn packs(&self, packs: u32) -> Option<&PackPlace> {
        self.packs.get(packs as usize)
    }

    /// Call this after a connection was made: a store that has begun anew (another lineage) assigns
    /// segment numbers anew.
    pub(crate) fn reconnected(&mut self, lineage: u64, engine: &mut Engine) {
        if self.lineage != lineage {
            self.lineage = lineage;
            self.pages.forget(engine);
            for (_, known) in self.known.drain().chain(self.staged.drain()) {
                if let Known::Open(place) = known {
                    close(place.handle(), engine);
                }
            }
        }
    }

    /// The address of a stage service.
    pub(crate) fn service(&self, service: u32) -> &str {
        self.services.get(service as usize).map_or("", String::as_str)
    }

    /// Where a segment is; `None` while the segment cannot be opened.
    pub(crate) fn open(
        &mut self,
        segment: SegmentNo,
        rpc: &mut RpcConnection,
        engine: &mut Engine,
        shun: Duration,
    ) -> Option<Place> {
        if let Some(known) = self.known.get(&segment).and_then(Known::now) {
            return known;
        }
        let opened = self.try_open(segment, rpc, engine, (self.direct, shun));
        self.known.insert(segment, Known::of(opened, shun));
        opened
    }

    /// Where the node of a directory of packs reads objects of it for others; `None` while it does not.
    pub(crate) fn open_staging(
        &mut self,
        segment: SegmentNo,
        rpc: &mut RpcConnection,
        engine: &mut Engine,
        shun: Duration,
    ) -> Option<Place> {
        if let Some(known) = self.staged.get(&segment).and_then(Known::now) {
            return known;
        }
        let opened = self.try_open(segment, rpc, engine, (false, shun));
        let opened = opened.filter(|place| matches!(place, Place::Disk { .. }));
        self.staged.insert(segment, Known::of(opened, shun));
        opened
    }

    fn try_open(
        &mut self,
        segment: SegmentNo,
        rpc: &mut RpcConnection,
        engine: &mut Engine,
        (direct, shun): (bool, Duration),
    ) -> Option<Place> {
        self.pages.ensure(rpc, engine);
        match open(segment, rpc, &self.descriptors, engine, direct) {
            Opened::Packs(packs) => Some(Place::Packs(self.number_of_packs(packs))),
            Opened::Here(handle, stage, 1) if stage.is_empty() => Some(Place::Memory(handle)),
            Opened::Here(handle, stage, granule) if stage.is_empty() => Some(Place::Storage(handle, granule)),
            Opened::Here(staging, stage, _) => Some(Place::Disk { staging, service: self.number(stage) }),
            Opened::Unknown => None,
            Opened::NoFabric => {
                let why = format!("name `{STORAGE_FABRIC}` in `engine.fabrics` to use storage of nodes");
                if self.why.as_ref() != Some(&why) {
                    log::info!("segment {segment} is storage, which this client cannot reach: {why}");
                }
                self.why = Some(why);
                None
            }
            Opened::Unreached(why) => {
                if self.why.as_ref() != Some(&why) {
                    log::info!(
                        "segment {segment} could not be reached: {why}: other segments are used for {} ms",
                        shun.as_millis()
                    );
                }
                self.why = Some(why);
                self.unreached.push(segment);
                None
            }
        }
    }

    fn number_of_packs(&mut self, packs: PackPlace) -> u32 {
        let known = self.packs.iter().position(|place| *place == packs);
        let number = known.unwrap_or_else(|| {
            self.packs.push(packs);
            self.packs.len() - 1
        });
        number as u32
    }

    fn number(&mut self, stage: String) -> u32 {
        let known = self.services.iter().position(|service| *service == stage);
        let number = known.unwrap_or_else(|| {
            self.services.push(stage);
            self.services.len() - 1
        });
        number as u32
    }

    /// The segments that could not be reached since the last call.
    pub(crate) fn take_unreached(&mut self) -> Vec<SegmentNo> {
        std::mem::take(&mut self.unreached)
    }

    /// Why the latest unreachable segment could not be reached.
    pub(crate) fn why_unreached(&self) -> Option<&str> {
        self.why.as_deref()
    }

    /// Fences an open segment and waits for the end. Returns whether its owner confirmed the fence; `false`
    /// for a segment that is not open.
    pub(crate) fn fence(&self, segment: SegmentNo, engine: &mut Engine, timeout: Duration) -> bool {
        let Some(Known::Open(Place::Memory(handle) | Place::Storage(handle, _))) = self.known.get(&segment)
        else {
            return false;
        };
        let Ok(fence) = engine.fence(*handle, Some(timeout)) else { return false };
        let held = engine.wait_fence(fence, Some(timeout)).is_ok();
        // The fence was created above, so it is known.
        let _ = engine.free_fence(fence);
        held
    }

    /// Forgets a segment after a transfer found that its owner is gone or has restarted. It is opened again
    /// when an operation names it after the pause.
    pub(crate) fn failed(&mut self, segment: SegmentNo, engine: &mut Engine, shun: Duration) {
        let shunned = Known::Shunned(Instant::now() + shun);
        // What is known of a directory of packs does not depend on its node.
        let is_packs = matches!(self.known.get(&segment), Some(Known::Open(Place::Packs(_))));
        let known = if is_packs { &mut self.staged } else { &mut self.known };
        if let Some(Known::Open(place)) = known.insert(segment, shunned) {
            close(place.handle(), engine);
        }
    }
}

/// Looks a segment up at the master and opens it. The node may have exported its memory anew between the two
/// steps, even at the same addresses, and bytes that are meant for the old export must not land in the new
/// one. If the export is another one, the segment is looked up again.
fn open(
    segment: SegmentNo,
    rpc: &mut RpcConnection,
    descriptors: &PeerToPeer,
    engine: &mut Engine,
    direct: bool,
) -> Opened {
    let mut why = String::new();
    for _ in 0..TRIES {
        let Some(Asked { endpoint, export, granule, stage, packs }) = ask(segment, rpc) else {
            return Opened::Unknown;
        };
        if granule > 1 && !engine.stats().rails.iter().any(|rail| rail.name == STORAGE_FABRIC) {
            // That this client cannot reach it says nothing of its node.
            return Opened::NoFabric;
        }
        match packs {
            Some(packs) if direct => return Opened::Packs(packs),
            // Its node is gone.
            Some(_) if stage.is_empty() => return Opened::Unknown,
            _ => {}
        }
        match open_export(&endpoint, export, descriptors, engine) {
            Ok(Some(handle)) => return Opened::Here(handle, stage, granule),
            Ok(None) => why = format!("{endpoint}: the node has replaced the export that the master knows"),
            Err(error) => return Opened::Unreached(error.to_string()),
        }
    }
    Opened::Unreached(why)
}

/// Opens the memory that an endpoint exports, if it is still the `wanted` export; `None` if it is another
/// one.
fn open_export(
    endpoint: &str,
    wanted: Export,
    descriptors: &PeerToPeer,
    engine: &mut Engine,
) -> Result<Option<SegmentHandle>, SegmentError> {
    let descriptor = descriptors.fetch(endpoint)?;
    let there = descriptor.incarnation == wanted.engine
        && descriptor.regions.iter().any(|region| region.region == wanted.region);
    if there { engine.attach_segment(endpoint, &descriptor).map(Some) } else { Ok(None) }
}

/// Transfers that still use the segment keep it open; it is then closed with the engine.
fn close(segment: Option<SegmentHandle>, engine: &mut Engine) {
    let Some(segment) = segment else { return };
    if let Err(error) = engine.close_segment(segment) {
        log::debug!("a segment could not be closed: {error}");
    }
}

/// Result of opening a segment.
enum Opened {
    /// A directory that this client may have mounted.
    Packs(PackPlace),
    /// Its memory, the address of the stage service of a disk, which is empty for memory and storage, and its
    /// granule in bytes.
    Here(SegmentHandle, String, u32),
    /// No answer from the master, or the master does not know the segment.
    Unknown,
    /// It is storage, for which this client has no fabric.
    NoFabric,
    /// The owner could not be reached, or exports something else: its address and the error.
    Unreached(String),
}

/// The fabric that reaches storage.
const STORAGE_FABRIC: &str = "nvmeof";

/// How often the segment is looked up before it counts as unreachable.
const TRIES: u32 = 2;

/// What the master says about a segment.
struct Asked {
    endpoint: String,
    export: Export,
    /// 1 for memory, bytes.
    granule: u32,
    stage: String,
    packs: Option<PackPlace>,
}

fn ask(segment: SegmentNo, rpc: &mut RpcConnection) -> Option<Asked> {
    let (_, mut infos) = rpc.call::<AskSegments>(&(), [segment].into_iter()).ok()?;
    let info = infos.next()?.ok()?;
    let directory = info.shared.to_owned();
    let packs = (!directory.is_empty() && info.extent_bytes > 0)
        .then_some(PackPlace { directory, extent_bytes: info.extent_bytes });
    let (endpoint, export, stage) = (info.endpoint.to_owned(), info.export, info.stage.to_owned());
    let granule = info.location.granule_bytes();
    Some(Asked { endpoint, export, granule, stage, packs })
}
