//! Where segments are: asked of the master once, opened in the engine once, forgotten when either restarts.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use store_core::SegmentNo;
use store_core::message::{Export, Segments as AskSegments};
use te_engine::{PeerToPeer, SegmentError, SegmentHandle};

use crate::engine::Engine;
use crate::rpc::RpcConnection;

/// The segments that a client has met.
pub(crate) struct Segments {
    /// Asks engines what they export.
    descriptors: PeerToPeer,
    known: HashMap<SegmentNo, Known>,
    epoch: u64,
    /// Segments that the master knows, and whose owner could not be reached.
    unreached: Vec<SegmentNo>,
    /// Why the latest of them could not.
    why: Option<String>,
}

#[derive(Clone, Copy)]
enum Known {
    Open(SegmentHandle),
    /// Not reachable, or unknown to the master; not tried again before then.
    Shunned(Instant),
}

impl Segments {
    /// None, yet; for an engine of this configuration.
    pub(crate) fn new(config: &te_engine::Config) -> Self {
        let descriptors = PeerToPeer::of(config);
        Self { descriptors, known: HashMap::new(), epoch: 0, unreached: Vec::new(), why: None }
    }

    /// Call when a connection was made: another life of the master numbers segments afresh.
    pub(crate) fn reconnected(&mut self, epoch: u64, engine: &mut Engine) {
        if self.epoch != epoch {
            self.epoch = epoch;
            for (_, known) in self.known.drain() {
                if let Known::Open(handle) = known {
                    close(handle, engine);
                }
            }
        }
    }

    /// The engine's handle of a segment; `None` while it cannot be had.
    pub(crate) fn open(
        &mut self,
        segment: SegmentNo,
        rpc: &mut RpcConnection,
        engine: &mut Engine,
        shun: Duration,
    ) -> Option<SegmentHandle> {
        match self.known.get(&segment) {
            Some(Known::Open(handle)) => return Some(*handle),
            Some(Known::Shunned(until)) if Instant::now() < *until => return None,
            _ => {}
        }
        let opened = match open(segment, rpc, &self.descriptors, engine) {
            Opened::Here(handle) => Some(handle),
            Opened::Unknown => None,
            Opened::Unreached(why) => {
                if self.why.as_ref() != Some(&why) {
                    log::info!("segment {segment} could not be reached: {why}");
                }
                self.why = Some(why);
                self.unreached.push(segment);
                None
            }
        };
        let known = opened.map_or_else(|| Known::Shunned(Instant::now() + shun), Known::Open);
        self.known.insert(segment, known);
        opened
    }

    /// What could not be reached since this was asked last.
    pub(crate) fn take_unreached(&mut self) -> Vec<SegmentNo> {
        std::mem::take(&mut self.unreached)
    }

    /// Why the latest that could not be reached could not.
    pub(crate) fn why_unreached(&self) -> Option<&str> {
        self.why.as_deref()
    }

    /// Fences an open segment and waits. Whether its owner said so; one that is not open is asked nothing.
    pub(crate) fn fence(&self, segment: SegmentNo, engine: &mut Engine, timeout: Duration) -> bool {
        let Some(Known::Open(handle)) = self.known.get(&segment) else { return false };
        let Ok(fence) = engine.fence(*handle, Some(timeout)) else { return false };
        let held = engine.wait_fence(fence, Some(timeout)).is_ok();
        // It is known: it was made above.
        let _ = engine.free_fence(fence);
        held
    }

    /// A transfer found that its owner is gone or another: opened anew, in a while, should anybody still name it.
    pub(crate) fn failed(&mut self, segment: SegmentNo, engine: &mut Engine, shun: Duration) {
        if let Some(Known::Open(handle)) = self.known.insert(segment, Known::Shunned(Instant::now() + shun)) {
            close(handle, engine);
        }
    }
}

/// Asks where a segment is and opens it. The node may export afresh between the two, even at the same addresses; bytes that
/// are meant for the old export must not land in the new one. So when it is another by then, the master is asked again.
fn open(
    segment: SegmentNo,
    rpc: &mut RpcConnection,
    descriptors: &PeerToPeer,
    engine: &mut Engine,
) -> Opened {
    let mut why = String::new();
    for _ in 0..TRIES {
        let Some((endpoint, export)) = ask(segment, rpc) else { return Opened::Unknown };
        match open_export(&endpoint, export, descriptors, engine) {
            Ok(Some(handle)) => return Opened::Here(handle),
            Ok(None) => why = format!("{endpoint}: something else is exported there now"),
            Err(error) => return Opened::Unreached(error.to_string()),
        }
    }
    Opened::Unreached(why)
}

/// Opens what an endpoint exports, if the export is still `wanted` one; `None`: it is another.
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

/// Transfers that still use it keep it open; it is then closed with the engine.
fn close(segment: SegmentHandle, engine: &mut Engine) {
    if let Err(error) = engine.close_segment(segment) {
        log::debug!("closing a segment: {error}");
    }
}

/// What came of opening a segment.
enum Opened {
    Here(SegmentHandle),
    /// The master could not be asked, or does not know it.
    Unknown,
    /// Its owner could not be reached, or exports something else: where, and what was wrong.
    Unreached(String),
}

/// Times that the master is asked in a row.
const TRIES: u32 = 2;

fn ask(segment: SegmentNo, rpc: &mut RpcConnection) -> Option<(String, Export)> {
    let (_, mut infos) = rpc.call::<AskSegments>(&(), [segment].into_iter()).ok()?;
    infos.next()?.ok().map(|info| (info.endpoint.to_owned(), info.export))
}
