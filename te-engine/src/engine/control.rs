//! Operations on peers: opening segments, sending notifications, probing.

use std::hash::Hasher;
use std::string::String;
use std::sync::Arc;
use std::time::Duration;
use std::vec::Vec;

use te_core::{Error, Memory, RegionId};

use super::Engine;
use super::segments::{Attached, Segment};
use crate::config::{Config, MetadataConfig};
use crate::control::{Answer, Request, Requester, call};
use crate::descriptor::Descriptor;
use crate::error::{SegmentError, StartError};
use crate::metadata::{Directory, Entry, Keeper, KeeperState, Metadata, PeerToPeer, Registration};
use crate::request::{Liveness, Notification, RemoteRegion, SegmentHandle};

impl Engine {
    /// Opens the memory that the engine called `name` exports: `host:port`, or a name that
    /// [`Config::metadata`] looks up. Fetches the descriptor of the owner, which takes at most
    /// `control.timeout_ms`, and `metadata.timeout_ms` for the directory. Opening a segment again refreshes
    /// it and returns the same handle, unless its owner has restarted: then the handle is new, and the old
    /// one refuses work with [`SegmentError::Restarted`].
    ///
    /// # Errors
    /// See [`SegmentError`].
    pub fn open_segment(&mut self, name: &str) -> Result<SegmentHandle, SegmentError> {
        self.here()?;
        let (endpoint, descriptor) = self.peers.describe(name)?;
        self.attach_at(name, endpoint.as_deref(), &descriptor)
    }

    /// Opens a segment whose descriptor the caller has; `name` is `host:port` of its owner.
    ///
    /// # Errors
    /// `NoRail` when no rail reaches any of its regions, `Full`.
    pub fn attach_segment(
        &mut self,
        name: &str,
        descriptor: &Descriptor,
    ) -> Result<SegmentHandle, SegmentError> {
        self.here()?;
        self.attach_at(name, Some(name), descriptor)
    }

    /// Opens the segment `name`, whose owner is at `endpoint`; `None`: the segment is foreign.
    pub(crate) fn attach_at(
        &mut self,
        name: &str,
        endpoint: Option<&str>,
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
            endpoint: endpoint.map(Into::into),
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

    /// Fetches the descriptor again: attaches regions that the owner has registered since, and detaches those
    /// that it has unregistered.
    ///
    /// # Errors
    /// `Restarted` when another process answers; the handle refuses further work.
    pub fn refresh_segment(&mut self, handle: SegmentHandle) -> Result<(), SegmentError> {
        self.here()?;
        let owner = self.segment_owner(handle)?;
        let descriptor = self.peers.describe_again(&owner)?;
        self.sync_segment(handle, &descriptor)
    }

    /// Closes a segment. A segment that was opened several times is detached by the last of as many calls.
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

    /// The attached regions of the segment, in the order of their addresses.
    ///
    /// # Errors
    /// `NotFound`.
    pub fn segment_regions(&self, handle: SegmentHandle) -> Result<Vec<RemoteRegion>, SegmentError> {
        self.here()?;
        let segment = self.segments.segment(handle).ok_or(SegmentError::NotFound)?;
        Ok(segment.regions.iter().map(RemoteRegion::from).collect())
    }

    /// Sends a message to the owner of the segment, which receives it with
    /// [`take_notifications`](Self::take_notifications). Returns when it is in the owner's queue.
    ///
    /// # Errors
    /// `Refused` when the message is too long or the owner's queue is full; `Unreachable`, `Restarted`;
    /// `Foreign` unless the [`Metadata`] that describes the segment carries notifications.
    pub fn notify(&mut self, handle: SegmentHandle, name: &str, message: &[u8]) -> Result<(), SegmentError> {
        let owner = self.segment_owner(handle)?;
        let sent = self.peers.notify(&owner, name, message);
        if let Err(SegmentError::Restarted { found, .. }) = sent {
            self.note_restart(handle, found);
        }
        sent
    }

    /// Takes all notifications that peers have sent since the last call.
    pub fn take_notifications(&mut self) -> Vec<Notification> {
        if self.here().is_err() {
            return Vec::new();
        }
        self.inbox.take()
    }

    /// Checks whether the owner of the segment is alive; waits at most `timeout`.
    ///
    /// # Errors
    /// `NotFound`, `Foreign`. An owner that does not answer is not an error but [`Liveness::Unreachable`].
    pub fn probe(&mut self, handle: SegmentHandle, timeout: Duration) -> Result<Liveness, SegmentError> {
        let owner = self.segment_owner(handle)?;
        let liveness = self.peers.probe(&owner, timeout)?;
        if let Liveness::Restarted { found, .. } = liveness {
            self.note_restart(handle, found);
        }
        Ok(liveness)
    }

    /// The state of this engine's name in the directory.
    #[must_use]
    pub fn registration(&self) -> Registration {
        if self.here().is_err() {
            return Registration::None;
        }
        self.registration.registration()
    }

    /// As [`registration`](Self::registration), after the first attempt to register the name; waits for its
    /// end at most `timeout`.
    #[must_use]
    pub fn wait_registered(&self, timeout: Duration) -> Registration {
        if self.here().is_err() {
            return Registration::None;
        }
        self.registration.wait(timeout)
    }

    /// The owner of an open segment.
    ///
    /// # Errors
    /// `NotFound`.
    pub(crate) fn segment_owner(&self, handle: SegmentHandle) -> Result<SegmentOwner, SegmentError> {
        self.here()?;
        let segment = self.segments.segment(handle).ok_or(SegmentError::NotFound)?;
        let Segment { name, endpoint, incarnation, .. } = segment;
        Ok(SegmentOwner { name: name.clone(), endpoint: endpoint.clone(), incarnation: *incarnation })
    }

    /// The owner of a segment, for a notification that is sent later.
    ///
    /// # Errors
    /// `NotFound`, `Refused` when the message is too long.
    pub(crate) fn notice_to(
        &self,
        segment: SegmentHandle,
        notice: &Notification,
    ) -> Result<SegmentOwner, SegmentError> {
        let owner = self.segment_owner(segment)?;
        self.peers.check_notice(&owner, &notice.name, &notice.message)?;
        Ok(owner)
    }

    /// Records that another process answers under the segment's name. The segment refuses work from here on.
    pub(crate) fn note_restart(&mut self, handle: SegmentHandle, found: u64) {
        if let Some(segment) = self.segments.segment_mut(handle) {
            segment.restarted = Some(found);
        }
    }

    /// Attaches and detaches regions, so that those of the descriptor are attached.
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
        // Answers may overtake each other; the latest version stays.
        if descriptor.version < segment.version {
            return Ok(());
        }
        segment.version = descriptor.version;
        let (name, mut regions) = (segment.name.clone(), std::mem::take(&mut segment.regions));
        regions.retain(|old| {
            let listed = descriptor.regions.binary_search_by_key(&old.addr, |region| region.addr);
            let kept = listed.is_ok_and(|index| {
                let region = &descriptor.regions[index];
                // A region that has joined a rail meanwhile has another export.
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
                        "segment {name:?}: a region of {} bytes cannot be attached: {error:?}",
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

    /// What threads other than the polling thread need to reach peers, the registration and the
    /// notifications.
    pub(crate) fn parts(&self) -> (Peers, KeeperState, Arc<crate::control::Inbox>) {
        ((*self.peers).clone(), self.registration.clone(), self.inbox.clone())
    }
}

/// The owner of an open segment.
pub(crate) struct SegmentOwner {
    name: String,
    /// `None`: the segment is foreign.
    endpoint: Option<String>,
    incarnation: u64,
}

impl SegmentOwner {
    /// Its address; the name of a foreign segment.
    pub(crate) fn place(&self) -> &str {
        self.endpoint.as_deref().unwrap_or(&self.name)
    }
}

/// Where names are looked up, and what keeps this engine's name registered there.
pub(super) struct Naming {
    pub(super) metadata: Arc<dyn Metadata>,
    pub(super) keeper: Option<Keeper>,
    pub(super) registration: KeeperState,
}

impl Naming {
    /// Starts to register this engine, which peers reach at `endpoint`, if it has a name. `metadata` replaces
    /// the configured directory for look-ups.
    pub(super) fn start(
        config: &Config,
        metadata: Option<Arc<dyn Metadata>>,
        endpoint: &str,
        incarnation: u64,
    ) -> Result<Self, StartError> {
        let MetadataConfig { source, name, ttl_ms, timeout_ms } = &config.metadata;
        let millis = |millis: u32| Duration::from_millis(millis.into());
        let need = "names a kind of server that this build lacks";
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
        let metadata = metadata.or(directory).unwrap_or_else(|| Arc::new(PeerToPeer::of(config)));
        Ok(Self { metadata, keeper, registration })
    }
}

/// A number by which exports that differ are distinguished.
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

/// How the owners of segments are reached, from any thread. Its calls block.
#[derive(Clone)]
pub(crate) struct Peers {
    control: PeerToPeer,
    notification_bytes_max: u32,
    metadata: Arc<dyn Metadata>,
}

impl Peers {
    pub(super) fn new(config: &Config, metadata: Arc<dyn Metadata>) -> Self {
        let notification_bytes_max = config.control.notification_bytes_max;
        Self { control: PeerToPeer::of(config), notification_bytes_max, metadata }
    }

    /// The endpoint of the owner of the segment `name` (`None`: it is foreign), and its descriptor.
    pub(crate) fn describe(&self, name: &str) -> Result<(Option<String>, Descriptor), SegmentError> {
        self.control.describe(&*self.metadata, name)
    }

    /// The descriptor of an open segment.
    pub(crate) fn describe_again(&self, owner: &SegmentOwner) -> Result<Descriptor, SegmentError> {
        self.control.describe_again(&*self.metadata, &owner.name, owner.endpoint.as_deref())
    }

    /// Refuses a notification that is too long for any owner. What is too long for a foreign one is left to
    /// its metadata.
    fn check_notice(&self, owner: &SegmentOwner, name: &str, message: &[u8]) -> Result<(), SegmentError> {
        let fits = name.len() + message.len() <= self.notification_bytes_max as usize;
        if fits || owner.endpoint.is_none() {
            return Ok(());
        }
        let what =
            "the message is longer than control.notification_bytes_max here: write it to memory instead";
        Err(SegmentError::Refused { name: owner.name.clone(), what })
    }

    /// Sends a notification.
    pub(crate) fn notify(
        &self,
        owner: &SegmentOwner,
        name: &str,
        message: &[u8],
    ) -> Result<(), SegmentError> {
        let SegmentOwner { name: segment, endpoint, incarnation } = owner;
        let incarnation = *incarnation;
        let Some(endpoint) = endpoint else { return self.metadata.notify(segment, name, message) };
        self.check_notice(owner, name, message)?;
        let refused = |what| Err(SegmentError::Refused { name: segment.into(), what });
        let request = Request::Notify { incarnation, name: name.into(), message: message.into() };
        match call(endpoint, &request, self.control.requester())? {
            Answer::Taken => Ok(()),
            Answer::Restarted { found } => {
                Err(SegmentError::Restarted { name: segment.clone(), expected: incarnation, found })
            }
            Answer::TooLong { .. } => {
                refused("the message is longer than its control.notification_bytes_max")
            }
            Answer::TakesNone => refused("its control.notifications_max is 0: it accepts no notifications"),
            Answer::InboxFull => {
                refused("its queue of notifications is full: try again when it has taken some")
            }
            _ => {
                let what = "its answer is not one to this request";
                Err(SegmentError::Protocol { name: segment.into(), what })
            }
        }
    }

    /// Checks whether a peer is alive.
    ///
    /// # Errors
    /// `Foreign`, and what the metadata of a foreign segment returns.
    pub(crate) fn probe(&self, owner: &SegmentOwner, timeout: Duration) -> Result<Liveness, SegmentError> {
        let expected = owner.incarnation;
        let Some(endpoint) = &owner.endpoint else { return self.metadata.probe(&owner.name, timeout) };
        let requester = Requester { timeout, ..self.control.requester() };
        Ok(match call(endpoint, &Request::Probe, requester) {
            Ok(Answer::Alive { incarnation }) if incarnation == expected => Liveness::Alive { incarnation },
            Ok(Answer::Alive { incarnation: found }) => Liveness::Restarted { expected, found },
            Ok(_) => Liveness::Unreachable,
            Err(error) => {
                log::debug!("probe: {error}");
                Liveness::Unreachable
            }
        })
    }
}
