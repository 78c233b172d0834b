//! The master: who owns which bytes of whose memory.

use alloc::vec::Vec;

use te_core::Instant;

use crate::message::{
    Allocation, Heartbeat, ListQuery, Listed, MountSegment, Mounted, NodeStatus, Object, PutOptions,
    SegmentInfo, UnmountSegment, encode_failure,
};
use crate::wire::Frame;
use crate::{ConfigError, ErrorCode, MasterConfig, SegmentNo, Stats};

/// The master of one store. One owner, no locks.
#[derive(Debug)]
pub struct Master {
    config: MasterConfig,
    stats: Stats,
}

impl Master {
    /// An empty store.
    ///
    /// # Errors
    /// A setting is out of its limits.
    pub fn new(config: MasterConfig) -> Result<Self, ConfigError> {
        config.validate()?;
        Ok(Self { config, stats: Stats::default() })
    }

    /// The settings.
    #[must_use]
    pub const fn config(&self) -> &MasterConfig {
        &self.config
    }

    /// Counters and gauges.
    #[must_use]
    pub fn stats(&self) -> Stats {
        self.stats
    }

    /// Estimated memory of the master itself, bytes.
    #[must_use]
    pub fn memory_bytes(&self) -> usize {
        0
    }

    /// Carries out one request frame and appends exactly one response frame to `out`.
    pub fn handle(&mut self, _now: Instant, frame: &Frame<'_>, out: &mut Vec<u8>) {
        encode_failure(
            out,
            frame.header.kind,
            frame.header.request_id,
            ErrorCode::UnavailableInCurrentStatus,
        );
    }

    /// Does what is due. Call when [`Self::poll_timeout`] has passed; earlier or later does no harm.
    pub fn handle_timeout(&mut self, _now: Instant) {}

    /// When [`Self::handle_timeout`] is to be called next. May change after every call of a `&mut self` method.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Instant> {
        None
    }

    /// Mounts a segment.
    ///
    /// # Errors
    /// `InvalidParams`, `SegmentAlreadyExists`, `IllegalClient`, `KeysUltraLimit`.
    pub fn mount(&mut self, _now: Instant, _segment: &MountSegment<'_>) -> Result<Mounted, ErrorCode> {
        Err(ErrorCode::UnavailableInCurrentStatus)
    }

    /// Unmounts a segment; replicas on it are gone.
    ///
    /// # Errors
    /// `SegmentNotFound`, `IllegalClient` when it is another node's.
    pub fn unmount(&mut self, _now: Instant, _segment: &UnmountSegment) -> Result<(), ErrorCode> {
        Err(ErrorCode::UnavailableInCurrentStatus)
    }

    /// Notes that a node lives.
    pub fn heartbeat(&mut self, _now: Instant, _beat: &Heartbeat) -> NodeStatus {
        NodeStatus::NeedRemount
    }

    /// Allocates space for a new object.
    ///
    /// # Errors
    /// `InvalidKey`, `InvalidParams`, `ObjectAlreadyExists`, `NoAvailableHandle`, `KeysUltraLimit`.
    pub fn put_start(
        &mut self,
        _now: Instant,
        _key: &[u8],
        _len: u64,
        _options: &PutOptions,
    ) -> Result<Allocation, ErrorCode> {
        Err(ErrorCode::UnavailableInCurrentStatus)
    }

    /// Commits a put; the object is readable from here.
    ///
    /// # Errors
    /// `ObjectNotFound` when this generation is not (or no longer) there, `InvalidWrite` when it is committed with another checksum.
    pub fn put_end(
        &mut self,
        _now: Instant,
        _key: &[u8],
        _generation: u64,
        _checksum: u32,
    ) -> Result<(), ErrorCode> {
        Err(ErrorCode::UnavailableInCurrentStatus)
    }

    /// Gives a put up.
    ///
    /// # Errors
    /// `ObjectNotFound` when this generation is not there, `InvalidWrite` when it is committed.
    pub fn put_revoke(
        &mut self,
        _now: Instant,
        _key: &[u8],
        _generation: u64,
        _quiet: bool,
    ) -> Result<(), ErrorCode> {
        Err(ErrorCode::UnavailableInCurrentStatus)
    }

    /// Finds an object and leases it for reading.
    ///
    /// # Errors
    /// `ObjectNotFound`, `ReplicaIsNotReady` while it is written.
    pub fn get(&mut self, _now: Instant, _key: &[u8]) -> Result<Object, ErrorCode> {
        Err(ErrorCode::UnavailableInCurrentStatus)
    }

    /// Whether a get would find it. Neither leases nor counts as a use.
    pub fn exists(&mut self, _key: &[u8]) -> bool {
        false
    }

    /// Forgets an object.
    ///
    /// # Errors
    /// `ObjectNotFound`; without `force` `ObjectHasLease`, `ReplicaIsNotReady`.
    pub fn remove(&mut self, _now: Instant, _key: &[u8], _force: bool) -> Result<(), ErrorCode> {
        Err(ErrorCode::UnavailableInCurrentStatus)
    }

    /// Calls `each` for a page of keys; gives the cursor of the next page, 0 at the end. `each` returns false to stop early.
    pub fn list(&self, _now: Instant, _query: &ListQuery<'_>, _each: impl FnMut(Listed<'_>) -> bool) -> u64 {
        0
    }

    /// What a segment is and where.
    #[must_use]
    pub fn segment(&self, _segment: SegmentNo) -> Option<SegmentInfo<'_>> {
        None
    }

    /// Every mounted segment, in the order of mounting.
    pub fn segments(&self) -> impl Iterator<Item = SegmentInfo<'_>> {
        core::iter::empty()
    }
}
