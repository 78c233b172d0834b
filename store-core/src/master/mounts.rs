//! Nodes and their segments: mounts, node keys, nodes that are given up.
//!
//! A node proves its identity with the key that it chose when it started. A name, or a node's number, belongs
//! to the node that mounted it for as long as that node is alive: connected and heard of. Another node that
//! requests it is told which node has it, and nothing changes. What a node mounted under lower incarnations
//! is dropped when the node mounts under a higher one, and never otherwise.

use te_core::Instant;

use super::{Master, millis};
use crate::allocator::{Allocator, GRAIN_BYTES};
use crate::event::Event;
use crate::message::{
    FetchRequest, Heartbeat, MountResponse, MountSegment, Mounted, NAME_BYTES_MAX, NodeStatus, UnmountSegment,
};
use crate::segments::{HELD, Segment};
use crate::{ErrorCode, Incarnation, NodeId, SegmentNo, Session};

/// How far a node's clock may be ahead of the master's, ms.
const AHEAD_MS_MAX: u64 = 3_600_000;
const NS_PER_MS: u64 = 1_000_000;

impl Master {
    /// Mounts a segment.
    ///
    /// # Errors
    /// `InvalidParams`; `IllegalClient` when the memory was exported for another lineage of the master;
    /// `SegmentAlreadyExists` when the same incarnation has mounted another segment under the name;
    /// `IncarnationTooHigh`; `TooManySegments`; `NotSupported` for memory of a kind that this release does
    /// not know.
    pub fn mount(
        &mut self,
        now: Instant,
        segment: &MountSegment<'_>,
    ) -> Result<MountResponse<'_>, ErrorCode> {
        self.mount_from(now, segment, 0)
    }

    /// As [`Self::mount`], for the connection with this number; 0: it is unknown whether the node stays
    /// connected.
    pub(crate) fn mount_from(
        &mut self,
        now: Instant,
        segment: &MountSegment<'_>,
        session: u64,
    ) -> Result<MountResponse<'_>, ErrorCode> {
        self.check_mount(now, segment)?;
        if let Some((no, silent_ms)) = self.holder_of(now, segment) {
            return Ok(self.refuse_held(segment, no, silent_ms));
        }
        let least = self.least_incarnation(now, segment);
        if segment.incarnation < least {
            return Ok(MountResponse::Stale { incarnation_min: least });
        }
        if let Some(old) = self.segments.named(segment.name) {
            let no = old.no;
            if old.incarnation == segment.incarnation {
                if !is_same(old, segment) {
                    return Err(ErrorCode::SegmentAlreadyExists);
                }
                self.nodes.heard(now, segment.node, session);
                return Ok(MountResponse::Mounted(self.mounted(no)));
            }
            self.replace(now, no, segment);
        }
        self.drop_older(now, segment);
        let new_node = self.nodes.get(segment.node).is_none();
        if self.segments.len() >= self.config.segments_max as usize
            || (new_node && self.nodes.len() >= self.config.nodes_max as usize)
        {
            return Err(ErrorCode::TooManySegments);
        }
        let make = |no| Segment {
            no,
            node: segment.node,
            incarnation: segment.incarnation,
            name: segment.name.into(),
            endpoint: segment.endpoint.into(),
            base: segment.base,
            len: segment.len,
            location: segment.location,
            export: segment.export,
            joined: now,
            accepts_new: true,
            unreachable: false,
            allocator: self.config.allocator.build_for(segment.len, segment.location.granule_bytes().into()),
        };
        let no = self.segments.add(make).ok_or(ErrorCode::TooManySegments)?;
        self.nodes.mounted(now, segment, no);
        self.nodes.heard(now, segment.node, session);
        self.stats.mounts_total += 1;
        let (name, endpoint) = (segment.name.into(), segment.endpoint.into());
        let MountSegment { node, len: bytes, .. } = *segment;
        self.emit(|| Event::SegmentMounted { node, segment: no, name, endpoint, bytes });
        Ok(MountResponse::Mounted(self.mounted(no)))
    }

    /// Checks what can be checked without regard to mounted segments.
    fn check_mount(&mut self, now: Instant, segment: &MountSegment<'_>) -> Result<(), ErrorCode> {
        let named = |text: &str| (1..=NAME_BYTES_MAX).contains(&text.len());
        let fits = (GRAIN_BYTES..=self.config.segment_bytes_max).contains(&segment.len)
            && segment.base.checked_add(segment.len).is_some()
            && self.segments.can_count(segment.len);
        segment.location.check()?;
        let granule = u64::from(segment.location.granule_bytes());
        let whole = segment.base.is_multiple_of(granule) && segment.len.is_multiple_of(granule);
        if !named(segment.name) || !named(segment.endpoint) || !fits || !whole {
            return Err(ErrorCode::InvalidParams);
        }
        if segment.lineage != u64::from(self.config.epoch) {
            return Err(ErrorCode::IllegalClient);
        }
        let incarnation_ms = segment.incarnation.get() / NS_PER_MS;
        let ahead = |wall_ms: &u64| incarnation_ms > wall_ms.saturating_add(AHEAD_MS_MAX);
        if let Some(wall_ms) = self.wall_ms(now).filter(ahead) {
            let (name, endpoint) = (segment.name.into(), segment.endpoint.into());
            self.emit(|| Event::IncarnationTooHigh { name, endpoint, incarnation_ms, wall_ms });
            return Err(ErrorCode::IncarnationTooHigh);
        }
        Ok(())
    }

    /// Refuses a mount because the node with segment `no` has the name or the node's number, and reports it
    /// as an event.
    fn refuse_held(
        &mut self,
        segment: &MountSegment<'_>,
        no: SegmentNo,
        silent_ms: u64,
    ) -> MountResponse<'_> {
        if let Some(held) = self.segments.get(no) {
            let (name, endpoint) = (segment.name.into(), segment.endpoint.into());
            let holder_endpoint = held.endpoint.clone();
            self.emit(|| Event::MountRefused {
                name,
                endpoint,
                holder_endpoint,
                holder_silent_ms: silent_ms,
            });
        }
        let endpoint = self.segments.get(no).map_or("", |held| &held.endpoint);
        MountResponse::Held { endpoint, silent_ms }
    }

    /// Drops the segment whose name is about to be mounted.
    fn replace(&mut self, now: Instant, old: SegmentNo, segment: &MountSegment<'_>) {
        let old_endpoint = self.segments.get(old).map_or_else(Default::default, |old| old.endpoint.clone());
        let objects_lost = self.drop_segment(now, old);
        let (name, endpoint) = (segment.name.into(), segment.endpoint.into());
        let MountSegment { node, takeover, .. } = *segment;
        self.emit(|| Event::SegmentReplaced { node, name, endpoint, old_endpoint, objects_lost, takeover });
    }

    /// Unmounts a segment; its replicas are gone, and so are objects without other replicas.
    ///
    /// # Errors
    /// `SegmentNotFound`, `IllegalClient` when another node, or another incarnation, mounted it.
    pub fn unmount(&mut self, now: Instant, unmount: &UnmountSegment) -> Result<(), ErrorCode> {
        let segment = self.segments.get(unmount.segment).ok_or(ErrorCode::SegmentNotFound)?;
        if (segment.node, segment.incarnation) != (unmount.node, unmount.incarnation) {
            return Err(ErrorCode::IllegalClient);
        }
        let (name, endpoint) = (segment.name.clone(), segment.endpoint.clone());
        self.check_node(unmount.node, unmount.key)?;
        let objects_lost = self.drop_segment(now, unmount.segment);
        let UnmountSegment { node, segment, .. } = *unmount;
        self.emit(|| Event::SegmentUnmounted { node, segment, name, endpoint, objects_lost });
        Ok(())
    }

    /// Notes that a node is alive.
    ///
    /// # Errors
    /// `IllegalClient`: the key is not the node's.
    pub fn heartbeat(&mut self, now: Instant, beat: &Heartbeat) -> Result<NodeStatus, ErrorCode> {
        self.heartbeat_from(now, beat, 0)
    }

    /// As [`Self::heartbeat`], for the connection with this number; 0: it is unknown whether the node stays
    /// connected.
    pub(crate) fn heartbeat_from(
        &mut self,
        now: Instant,
        beat: &Heartbeat,
        session: u64,
    ) -> Result<NodeStatus, ErrorCode> {
        let Some(node) = self.nodes.get(beat.node) else { return Ok(NodeStatus::NeedRemount) };
        if node.key != beat.key {
            return Err(ErrorCode::IllegalClient);
        }
        if node.incarnation != beat.incarnation {
            return Ok(NodeStatus::NeedRemount);
        }
        self.nodes.heard(now, beat.node, session);
        self.reached(beat.node);
        let work = self.tasks.has_work(beat.node) || self.writers.has_orders(beat.node);
        Ok(if work { NodeStatus::Work } else { NodeStatus::Ok })
    }

    /// Checks the node's key, and that the incarnation is the node's latest.
    pub(crate) fn check_incarnation(&self, fetch: &FetchRequest) -> Result<(), ErrorCode> {
        self.check_node(fetch.node, fetch.key)?;
        let latest = self.nodes.get(fetch.node).is_some_and(|node| node.incarnation == fetch.incarnation);
        if latest { Ok(()) } else { Err(ErrorCode::ClientNotFound) }
    }

    /// Checks the node's key.
    pub(crate) fn check_node(&self, node: NodeId, key: u64) -> Result<(), ErrorCode> {
        let known = self.nodes.get(node).ok_or(ErrorCode::ClientNotFound)?;
        if known.key == key { Ok(()) } else { Err(ErrorCode::IllegalClient) }
    }

    /// A connection has ended. To be called once for each session that was passed to [`Self::handle`].
    ///
    /// Nodes are ordered to cut off the writer of the session's unfinished puts, if it has no connection to
    /// them any more either.
    pub fn session_ended(&mut self, _now: Instant, session: Session) {
        self.lease_bytes = self.lease_bytes.saturating_sub(session.leases.memory_bytes());
        if session.no == 0 {
            return;
        }
        self.nodes.hung_up(session.no);
        if session.writer != 0 {
            self.expel(session.writer, false);
        }
    }

    /// Sets the wall time, ms since 1970: the incarnations of nodes are compared with it.
    pub fn set_wall_ms(&mut self, now: Instant, wall_ms: u64) {
        self.wall = Some((now, wall_ms));
    }

    /// The number of a connection that the master has to distinguish from others.
    pub(crate) fn session_no(&mut self, session: &mut Session) -> u64 {
        if session.no == 0 {
            self.sessions += 1;
            session.no = self.sessions;
        }
        session.no
    }

    /// Number of unfinished puts of a connection.
    pub(crate) fn unfinished_of(&self, session: u64) -> u32 {
        self.writers.of_session(session)
    }

    fn wall_ms(&self, now: Instant) -> Option<u64> {
        let (at, wall_ms) = self.wall?;
        Some(wall_ms.saturating_add((now - at).as_millis() as u64))
    }

    /// The segment of another live node that has the name or the node's number that is to be mounted; and how
    /// long that node has been silent, ms.
    fn holder_of(&self, now: Instant, segment: &MountSegment<'_>) -> Option<(SegmentNo, u64)> {
        if segment.takeover {
            return None;
        }
        let named = self.segments.named(segment.name).map(|held| (held.node, held.no));
        let numbered =
            self.nodes.get(segment.node).and_then(|node| Some((segment.node, *node.segments.first()?)));
        [named, numbered].into_iter().flatten().find_map(|(holder, no)| {
            let node = self.nodes.get(holder)?;
            let other = holder != segment.node || node.key != segment.key;
            let lives = node.connected && node.seen + millis(self.config.node_ttl_ms) > now;
            (other && lives).then(|| (no, (now - node.seen).as_millis() as u64))
        })
    }

    /// The lowest incarnation under which this mount is not stale.
    fn least_incarnation(&self, now: Instant, segment: &MountSegment<'_>) -> Incarnation {
        let after = |incarnation: Incarnation| incarnation.next().unwrap_or(Incarnation::MAX);
        let mut least = self.nodes.last_incarnation(now, segment.name).map_or(Incarnation::default(), after);
        if let Some(node) = self.nodes.get(segment.node) {
            // Several segments of one incarnation share it; another incarnation is higher.
            let same = node.key == segment.key && node.incarnation <= segment.incarnation;
            least = least.max(if same { node.incarnation } else { after(node.incarnation) });
        }
        if let Some(old) = self.segments.named(segment.name) {
            let repeated = old.node == segment.node && old.incarnation == segment.incarnation;
            least = least.max(if repeated { old.incarnation } else { after(old.incarnation) });
        }
        least
    }

    /// Drops what a node mounted under lower incarnations.
    fn drop_older(&mut self, now: Instant, segment: &MountSegment<'_>) {
        let older = self.nodes.get(segment.node).filter(|known| known.incarnation < segment.incarnation);
        let Some(known) = older else { return };
        for no in known.segments.clone() {
            self.drop_segment(now, no);
        }
    }

    /// Drops a segment; returns the number of objects that had no replica elsewhere.
    pub(super) fn drop_segment(&mut self, now: Instant, no: SegmentNo) -> u64 {
        if let Some(segment) = self.segments.get(no) {
            let gone = self.pending_release.drop_segment(no, |len| segment.allocator.rounded(len));
            gone.into_iter().for_each(|(writer, generation)| self.writers.let_go(writer, generation));
        }
        let Some(segment) = self.segments.remove(no) else { return 0 };
        let mut lost = 0;
        for (.., index) in segment.allocator.blocks().filter(|(.., tag)| *tag != HELD) {
            if !self.objects.drop_segment(index, no) {
                let removed = self.objects.remove(index);
                lost += u64::from(removed.complete);
                self.writers.ended(removed.generation);
            }
        }
        self.stats.objects_lost_total += lost;
        let until = now + millis(self.config.put_start_release_timeout_ms);
        let node = segment.node;
        self.nodes.unmounted(node, no, segment.name, segment.incarnation, until);
        self.stats.unmounts_total += 1;
        self.drains.remove(&no);
        self.tasks_lost_segment(now, no);
        if self.nodes.get(node).is_none() {
            self.writers.forget_node(node);
            self.disks_away(now, node);
        }
        lost
    }

    fn mounted(&self, segment: SegmentNo) -> Mounted {
        Mounted { segment, node_ttl_ms: self.config.node_ttl_ms }
    }
}

/// Whether a mount repeats the mount of a segment.
fn is_same(old: &Segment, segment: &MountSegment<'_>) -> bool {
    old.node == segment.node
        && old.base == segment.base
        && old.len == segment.len
        && old.location == segment.location
        && old.export == segment.export
        && *old.endpoint == *segment.endpoint
}
