//! Peers: opening their segments, telling them things, asking whether they live.

use std::hash::Hasher;
use std::string::String;
use std::sync::Arc;
use std::time::Duration;
use std::vec::Vec;

use te_core::{Error, Memory, RegionId};

use super::Engine;
use super::segments::{Attached, Segment};
use crate::config::{Config, MetadataConfig};
use crate::control::{Answer, Request, call};
use crate::descriptor::Descriptor;
use crate::error::{SegmentError, StartError};
use crate::metadata::{Directory, Entry, Keeper, KeeperState, Metadata, PeerToPeer, Registration};
use crate::request::{Liveness, Notification, RemoteRegion, SegmentHandle};

impl Engine {
    /// Opens the memory that the engine called `name` exports: `host:port`, or a name that [`Config::metadata`] looks up. Asks it
    /// for its descriptor; waits for the answer at most `control.timeout_ms`, and `metadata.timeout_ms` for the directory's. Opening a segment again refreshes it and gives the same handle, unless its owner
    /// has restarted: then the handle is new, and the old one refuses work with [`SegmentError::Restarted`].
    ///
    /// # Errors
    /// See [`SegmentError`].
    pub fn open_segment(&mut self, name: &str) -> Result<SegmentHandle, SegmentError> {
        self.here()?;
        let (endpoint, descriptor) = peer_to_peer(&self.config).describe(&**self.metadata, name)?;
        self.attach_at(name, &endpoint, &descriptor)
    }

    /// Opens a segment whose descriptor is known already; `name` is its owner's `host:port`.
    ///
    /// # Errors
    /// `NoRail` when no region can be reached, `Full`.
    pub fn attach_segment(
        &mut self,
        name: &str,
        descriptor: &Descriptor,
    ) -> Result<SegmentHandle, SegmentError> {
        self.here()?;
        self.attach_at(name, name, descriptor)
    }

    /// Opens the segment `name`, whose owner is at `endpoint`.
    pub(crate) fn attach_at(
        &mut self,
        name: &str,
        endpoint: &str,
        descriptor: &Descriptor,
    ) -> Result<SegmentHandle, SegmentError> {
        if let Some(handle) = self.segments.find(name) {
            match self.sync_segment(handle, descriptor) {
                Ok(()) => {
                    if let Some(segment) = self.segments.segment_mut(handle) {
                        segment.opens += 1;
                    }
                    return Ok(handle);
                }
                // The old handle refuses work from here on; this is a new segment.
                Err(SegmentError::Restarted { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        let handle = self.segments.insert(Segment {
            name: name.into(),
            endpoint: endpoint.into(),
            incarnation: descriptor.incarnation,
            version: 0,
            opens: 1,
            restarted: None,
            requests: 0,
            regions: Vec::new(),
        });
        if let Err(error) = self.sync_segment(handle, descriptor) {
            self.forget_segment(handle);
            return Err(error);
        }
        Ok(handle)
    }

    /// Learns which regions the owner has registered and unregistered since.
    ///
    /// # Errors
    /// `Restarted` when another process answers; the handle refuses further work.
    pub fn refresh_segment(&mut self, handle: SegmentHandle) -> Result<(), SegmentError> {
        self.here()?;
        let SegmentOwner { name, endpoint, .. } = self.segment_owner(handle)?;
        let descriptor = peer_to_peer(&self.config).describe_again(&**self.metadata, &name, &endpoint)?;
        self.sync_segment(handle, &descriptor)
    }

    /// Forgets a segment. It must be closed as often as it was opened.
    ///
    /// # Errors
    /// `Busy` while requests in flight use it; `NotFound`.
    pub fn close_segment(&mut self, handle: SegmentHandle) -> Result<(), SegmentError> {
        self.here()?;
        let segment = self.segments.segment_mut(handle).ok_or(SegmentError::NotFound)?;
        if segment.opens > 1 {
            segment.opens -= 1;
            return Ok(());
        }
        if segment.requests > 0 {
            return Err(SegmentError::Busy);
        }
        self.forget_segment(handle);
        Ok(())
    }

    /// The regions that the segment's owner exports, by address.
    ///
    /// # Errors
    /// `NotFound`.
    pub fn segment_regions(&self, handle: SegmentHandle) -> Result<Vec<RemoteRegion>, SegmentError> {
        self.here()?;
        let segment = self.segments.segment(handle).ok_or(SegmentError::NotFound)?;
        Ok(segment.regions.iter().map(RemoteRegion::from).collect())
    }

    /// Sends a message to the segment's owner, who finds it with [`take_notifications`](Self::take_notifications). Returns
    /// when the owner has it.
    ///
    /// # Errors
    /// `Refused` when it is too long or the owner's queue is full; `Unreachable`, `Restarted`.
    pub fn notify(&mut self, handle: SegmentHandle, name: &str, message: &[u8]) -> Result<(), SegmentError> {
        let owner = self.segment_owner(handle)?;
        let told = notify(&self.config, &owner, name, message);
        if let Err(SegmentError::Restarted { found, .. }) = told {
            self.note_restart(handle, found);
        }
        told
    }

    /// Takes all notifications that peers have sent since the last call.
    pub fn take_notifications(&mut self) -> Vec<Notification> {
        if self.here().is_err() {
            return Vec::new();
        }
        self.inbox.take()
    }

    /// Asks the segment's owner whether it lives; waits at most `timeout`.
    ///
    /// # Errors
    /// `NotFound`. That nobody answers is not an error but [`Liveness::Unreachable`].
    pub fn probe(&mut self, handle: SegmentHandle, timeout: Duration) -> Result<Liveness, SegmentError> {
        let owner = self.segment_owner(handle)?;
        let liveness = probe(&self.config, &owner, timeout);
        if let Liveness::Restarted { found, .. } = liveness {
            self.note_restart(handle, found);
        }
        Ok(liveness)
    }

    /// How this engine's name stands in the directory.
    #[must_use]
    pub fn registration(&self) -> Registration {
        if self.here().is_err() {
            return Registration::None;
        }
        self.registration.registration()
    }

    /// As [`registration`](Self::registration), once the first attempt has ended; waits for that at most `timeout`.
    #[must_use]
    pub fn wait_registered(&self, timeout: Duration) -> Registration {
        if self.here().is_err() {
            return Registration::None;
        }
        self.registration.wait(timeout)
    }

    /// Whom a segment was opened of.
    ///
    /// # Errors
    /// `NotFound`.
    pub(crate) fn segment_owner(&self, handle: SegmentHandle) -> Result<SegmentOwner, SegmentError> {
        self.here()?;
        let segment = self.segments.segment(handle).ok_or(SegmentError::NotFound)?;
        let Segment { name, endpoint, incarnation, .. } = segment;
        Ok(SegmentOwner { name: name.clone(), endpoint: endpoint.clone(), incarnation: *incarnation })
    }

    /// The segment refuses work from here on.
    pub(crate) fn note_restart(&mut self, handle: SegmentHandle, found: u64) {
        if let Some(segment) = self.segments.segment_mut(handle) {
            segment.restarted = Some(found);
        }
    }

    /// Makes what is attached what the descriptor lists.
    pub(crate) fn sync_segment(
        &mut self,
        handle: SegmentHandle,
        descriptor: &Descriptor,
    ) -> Result<(), SegmentError> {
        let segment = self.segments.segment_mut(handle).ok_or(SegmentError::NotFound)?;
        if segment.incarnation != descriptor.incarnation {
            segment.restarted = Some(descriptor.incarnation);
        }
        if let Some(error) = segment.restart_error() {
            return Err(error);
        }
        // Answers may overtake each other; what was learnt later stays.
        if descriptor.version < segment.version {
            return Ok(());
        }
        segment.version = descriptor.version;
        let (name, mut regions) = (segment.name.clone(), std::mem::take(&mut segment.regions));
        regions.retain(|old| {
            let listed = descriptor.regions.binary_search_by_key(&old.addr, |region| region.addr);
            let kept = listed.is_ok_and(|index| {
                let region = &descriptor.regions[index];
                // A region that has joined a rail meanwhile is exported anew.
                region.region == old.region
                    && region.len == old.len
                    && region.access() == old.access
                    && fingerprint(&region.export) == old.export
            });
            if !kept {
                self.leaving.push(old.id);
            }
            kept
        });
        self.leave();
        let mut failed = None;
        let mut at = 0;
        let mut attached = Vec::with_capacity(descriptor.regions.len());
        for region in &descriptor.regions {
            if let Some(old) = regions.get(at).filter(|old| old.addr == region.addr) {
                attached.push(*old);
                at += 1;
                continue;
            }
            match self.attach_region(region.region, region.addr, region.len, &region.export) {
                Ok(id) => attached.push(Attached {
                    id,
                    region: region.region,
                    addr: region.addr,
                    len: region.len,
                    access: region.access(),
                    location: region.location(),
                    export: fingerprint(&region.export),
                }),
                Err(error) => {
                    log::warn!(
                        "segment {name:?}: a region of {} bytes is not attached: {error:?}",
                        region.len
                    );
                    failed = Some(error);
                }
            }
        }
        let nothing = attached.is_empty();
        if let Some(segment) = self.segments.segment_mut(handle) {
            segment.regions = attached;
        }
        match failed {
            Some(AttachError::Rails(source)) if nothing => Err(SegmentError::NoRail { name, source }),
            Some(AttachError::Segment(error)) => Err(error),
            _ => Ok(()),
        }
    }

    fn attach_region(
        &mut self,
        region: u64,
        addr: u64,
        len: u64,
        export: &[u8],
    ) -> Result<te_core::RemoteRegionId, AttachError> {
        let id = self.segments.take_id().map_err(AttachError::Segment)?;
        log::debug!("attaching {} ({len} bytes at {addr:#x}) as {id}", RegionId::from_bits(region));
        match self.rails.attach(id, export) {
            Ok(()) => Ok(id),
            Err(error) => {
                self.segments.put_id(id);
                Err(AttachError::Rails(error))
            }
        }
    }

    fn forget_segment(&mut self, handle: SegmentHandle) {
        if let Some(segment) = self.segments.remove(handle) {
            self.leaving.extend(segment.regions.iter().map(|region| region.id));
            self.leave();
        }
    }

    /// What a thread that does not own the engine needs to talk to peers.
    pub(crate) fn parts(&self) -> (Arc<dyn Metadata>, KeeperState, Arc<crate::control::Inbox>) {
        (Arc::clone(&self.metadata), self.registration.clone(), self.inbox.clone())
    }
}

/// Whom a segment was opened of.
pub(crate) struct SegmentOwner {
    pub(crate) name: String,
    pub(crate) endpoint: String,
    pub(crate) incarnation: u64,
}

/// Where names are looked up, and who keeps ours there.
pub(super) struct Naming {
    pub(super) metadata: Arc<dyn Metadata>,
    pub(super) keeper: Option<Keeper>,
    pub(super) registration: KeeperState,
}

impl Naming {
    /// Starts to register this engine, which peers reach at `endpoint`, if it has a name. `metadata` stands before the
    /// configuration's directory.
    pub(super) fn start(
        config: &Config,
        metadata: Option<Arc<dyn Metadata>>,
        endpoint: &str,
        incarnation: u64,
    ) -> Result<Self, StartError> {
        let MetadataConfig { source, name, ttl_ms, timeout_ms } = &config.metadata;
        let millis = |millis: u32| Duration::from_millis(millis.into());
        let need = "names a server that this build lacks";
        let directory = Directory::open(source, millis(*timeout_ms))
            .map_err(|_| StartError::Config { field: "metadata.source", need })?
            .map(Arc::new);
        let keeper = match (&directory, name) {
            (Some(directory), Some(name)) => {
                let entry = Entry { name: name.clone(), endpoint: endpoint.into(), incarnation };
                Some(Keeper::start(directory.clone(), entry, millis(*ttl_ms))?)
            }
            _ => None,
        };
        let registration = keeper.as_ref().map_or(KeeperState::new(Registration::None), Keeper::state);
        let directory = directory.map(|directory| directory as Arc<dyn Metadata>);
        let metadata = metadata.or(directory).unwrap_or_else(|| Arc::new(peer_to_peer(config)));
        Ok(Self { metadata, keeper, registration })
    }
}

/// What two exports that differ do not share.
fn fingerprint(export: &[u8]) -> u64 {
    let mut hasher = std::hash::DefaultHasher::new();
    hasher.write(export);
    hasher.finish()
}

#[derive(Debug)]
enum AttachError {
    Rails(Error),
    Segment(SegmentError),
}

pub(crate) fn peer_to_peer(config: &Config) -> PeerToPeer {
    PeerToPeer::of(config)
}

/// Sends a notification. Blocks.
pub(crate) fn notify(
    config: &Config,
    owner: &SegmentOwner,
    name: &str,
    message: &[u8],
) -> Result<(), SegmentError> {
    let SegmentOwner { name: segment, endpoint, incarnation } = owner;
    let incarnation = *incarnation;
    let refused = |what| Err(SegmentError::Refused { name: segment.into(), what });
    if name.len() + message.len() > config.control.notification_bytes_max as usize {
        return refused(
            "the message is longer than control.notification_bytes_max: write it to memory instead",
        );
    }
    let request = Request::Notify { incarnation, name: name.into(), message: message.into() };
    match call(endpoint, &request, peer_to_peer(config).asker())? {
        Answer::Taken => Ok(()),
        Answer::Restarted { found } => {
            Err(SegmentError::Restarted { name: segment.clone(), expected: incarnation, found })
        }
        Answer::TooLong { .. } => refused("the message is longer than its control.notification_bytes_max"),
        Answer::TakesNone => refused("it takes no notifications: see its control.notifications_max"),
        Answer::InboxFull => refused("too many messages wait there: try again when it has taken some"),
        _ => {
            let what = "it answers another question than it was asked";
            Err(SegmentError::Protocol { name: segment.into(), what })
        }
    }
}

/// Asks whether a peer lives. Blocks.
pub(crate) fn probe(config: &Config, owner: &SegmentOwner, timeout: Duration) -> Liveness {
    let expected = owner.incarnation;
    let peers = PeerToPeer { timeout, ..peer_to_peer(config) };
    match call(&owner.endpoint, &Request::Probe, peers.asker()) {
        Ok(Answer::Alive { incarnation }) if incarnation == expected => Liveness::Alive { incarnation },
        Ok(Answer::Alive { incarnation: found }) => Liveness::Restarted { expected, found },
        Ok(_) => Liveness::Unreachable,
        Err(error) => {
            log::debug!("probe: {error}");
            Liveness::Unreachable
        }
    }
}
