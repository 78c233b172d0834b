//! Intruders that try what they may not: guess the handles of other clients' puts, take the names of live
//! nodes, and request the impossible. None of it may change anything.

use std::time::Duration;

use store_core::message::{
    Beat, Commit, EndExpulsions, EndTasks, Evict, Existing, ExpulsionEnd, FetchExpulsions, FetchRequest,
    FetchTasks, Heartbeat, Mount, MountResponse, MountSegment, NewObject, NodeProof, NodeStatus, Operation,
    Pin, PutEnd, PutOptions, PutRequest, PutRevoke, PutStart, Retention, Revocation, TaskEnd, Unmount,
    UnmountSegment,
};
use store_core::{ErrorCode, Frame, Incarnation, Key, NodeId, Placement, SegmentNo};

use crate::common::{Core, Event, Party};
use crate::node::segment_name;
use crate::scenario::{Lies, NODES, TENANTS, split_key};
use crate::shadow::{Claim, Violation};
use crate::trouble::ms;
use crate::world::World;

/// The intruder without a tenant, as nodes are.
const WITHOUT_TENANT: usize = TENANTS.len();

/// What changes when something is ended, taken or evicted.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Mark {
    counts: [u64; 18],
    segments: Vec<(SegmentNo, u64, u64)>,
}

impl Mark {
    fn of(core: &Core) -> Self {
        let stats = core.master.stats();
        let tasks = core.master.task_report();
        let counts = [
            stats.objects,
            stats.objects_processing,
            stats.nodes,
            stats.used_bytes,
            stats.unfinished_bytes,
            stats.quarantined_bytes,
            stats.held_dead_writer_bytes,
            stats.deferred_bytes,
            stats.put_starts_total,
            stats.put_ends_total,
            stats.put_revokes_total,
            stats.evictions_total,
            stats.mounts_total,
            stats.unmounts_total,
            stats.expulsions_total,
            tasks.pending,
            tasks.processing,
            tasks.extras_shed_total,
        ];
        let segments =
            core.master.segments().map(|info| (info.segment, info.node.get(), info.incarnation.get()));
        Self { counts, segments: segments.collect() }
    }
}

/// A party that acts as a node, and its claims.
struct Thief {
    node: u64,
    /// The node that it mounts as.
    mounts_as: u64,
    /// The node and the incarnation that have mounted the node's name.
    node_of: u64,
    segment: SegmentNo,
    held: u64,
    incarnation: u64,
    name: String,
    key: u64,
}

impl Thief {
    /// One of ten kinds of requests; from the sixth on it mounts.
    fn request(&self, core: &Core, kind: u64) -> Vec<u8> {
        let Self { node, mounts_as, node_of, segment, held, incarnation, ref name, key } = *self;
        let mut out = Vec::new();
        match kind {
            0 => {
                let beat =
                    Heartbeat { node: NodeId::new(node), incarnation: Incarnation::new(incarnation), key };
                Beat::encode_request(&mut out, 1, &beat, core::iter::empty()).unwrap();
            }
            1 => {
                let unmount = UnmountSegment {
                    node: NodeId::new(node_of),
                    incarnation: Incarnation::new(held),
                    segment,
                    key,
                };
                Unmount::encode_request(&mut out, 1, &unmount, core::iter::empty()).unwrap();
            }
            2 => {
                let fetch = FetchRequest {
                    node: NodeId::new(node),
                    incarnation: Incarnation::new(held),
                    count_max: 8,
                    key,
                };
                FetchTasks::encode_request(&mut out, 1, &fetch, core::iter::empty()).unwrap();
            }
            3 => {
                let fetch = FetchRequest {
                    node: NodeId::new(node),
                    incarnation: Incarnation::new(held),
                    count_max: 8,
                    key,
                };
                FetchExpulsions::encode_request(&mut out, 1, &fetch, core::iter::empty()).unwrap();
            }
            4 => {
                let ends = (1..64).map(|ticket| ExpulsionEnd { ticket, gone: true });
                let ends: Vec<_> = ends.collect();
                EndExpulsions::encode_request(
                    &mut out,
                    1,
                    &NodeProof { node: NodeId::new(node), key },
                    ends.into_iter(),
                )
                .unwrap();
            }
            5 => {
                let attempts = core.given.keys().copied().take(16);
                let result = Err(ErrorCode::TransferFail);
                let ids = core.task_owners.keys().rev().copied().take(16);
                let ends: Vec<_> = ids
                    .zip(attempts)
                    .map(|(id, attempt)| TaskEnd { id, attempt, result, quiet: true })
                    .collect();
                EndTasks::encode_request(
                    &mut out,
                    1,
                    &NodeProof { node: NodeId::new(node), key },
                    ends.into_iter(),
                )
                .unwrap();
            }
            _ => {
                let mount = MountSegment {
                    node: NodeId::new(mounts_as),
                    incarnation: Incarnation::new(incarnation),
                    name,
                    endpoint: "thief:1",
                    len: core.scenario.segment_bytes,
                    lineage: core.epoch().into(),
                    key,
                    ..MountSegment::default()
                };
                Mount::encode_request(&mut out, 1, &mount, core::iter::empty()).unwrap();
            }
        }
        out
    }
}

impl World {
    pub(crate) fn intruders(&mut self) -> Result<(), Violation> {
        if self.core.now >= self.busy_until {
            return Ok(());
        }
        if self.core.away_until().is_none() {
            match self.rng.below(3) {
                0 => self.guess()?,
                1 => self.steal()?,
                _ => self.wish()?,
            }
        }
        let next = self.core.now + ms(&mut self.rng, 100, 1_500);
        self.core.at(next, Event::Intruders);
        Ok(())
    }

    /// An intruder ends a put of another client.
    fn guess(&mut self) -> Result<(), Violation> {
        let rng = &mut self.rng;
        let claims = &self.core.shadow.claims;
        let Some((generation, claim)) = claims.iter().nth(rng.index(claims.len())) else { return Ok(()) };
        let Claim { key, handle: known, .. } = claim.clone();
        // A put that is over is no better.
        let former = rng.below(8) == 0;
        let generation = if former { generation.saturating_sub(1 + rng.below(3)) } else { *generation };
        let others = claims.values().map(|other| other.handle).rfind(|other| *other != known);
        let handle = match rng.below(4) {
            _ if self.core.lies.contains(Lies::HANDLE) => known,
            0 => generation,
            1 => rng.below(2).wrapping_neg(),
            2 if !former => others.unwrap_or(known ^ 1),
            _ => rng.next(),
        };
        let (tenant, key) = split_key(&key);
        let who = if rng.below(3) == 0 { rng.index(TENANTS.len()) } else { tenant };
        let (key, mut out) = (Key(key), Vec::new());
        if rng.below(3) == 0 {
            let commit = Commit { key, generation, handle, checksum: rng.next() as u32 };
            PutEnd::encode_request(&mut out, 1, &(), [commit].into_iter()).unwrap();
        } else {
            let revocation = Revocation { key, generation, handle, quiet: rng.below(4) > 0 };
            PutRevoke::encode_request(&mut out, 1, &(), [revocation].into_iter()).unwrap();
        }
        let before = Mark::of(&self.core);
        let answer = self.core.request_as_intruder(who, &out)?;
        let (frame, _) = Frame::parse(&answer).unwrap().unwrap();
        // Both responses are alike.
        let results = PutRevoke::decode_response(&frame).or_else(|_| PutEnd::decode_response(&frame));
        let refused = results.map_or(true, |(_, mut results)| results.all(|result| result.is_err()));
        self.core.report.guesses += 1;
        let found = self.core.unchanged(&before, refused).map_err(|change| {
            Violation::Forged(format!("{generation:#x} of {key} with {handle:#x} by {who}: {change}"))
        });
        self.core.judge(found)
    }

    /// An intruder acts as a node.
    fn steal(&mut self) -> Result<(), Violation> {
        let index = self.rng.index(NODES);
        let (node, name) = (index as u64 + 1, segment_name(index));
        let held = self.core.master.segments().find(|info| info.name == name);
        let Some((segment, node_of, held)) =
            held.map(|info| (info.segment, info.node.get(), info.incarnation.get()))
        else {
            return Ok(());
        };
        let lives = self.core.is_held(node);
        // As long as the node is not mounted, the master knows its previous incarnation.
        let latest = self.core.heard.get(&node).is_some_and(|(_, life)| *life == self.nodes[index].life);
        let rng = &mut self.rng;
        let keys = &self.core.node_keys[&node];
        let (current, former) = (keys[keys.len() - 1], keys[keys.len().saturating_sub(2)]);
        let key = match rng.below(4) {
            _ if self.core.lies.contains(Lies::KEY) => current,
            0 => 0,
            1 if latest && former != current => former,
            _ => rng.next() & !1,
        };
        let incarnation = match rng.below(6) {
            0 => 1,
            1 => held,
            2 => held - 1,
            3 => u64::MAX,
            _ => held + 1 + rng.below(1_000_000),
        };
        let kind = rng.below(10);
        // It mounts as another node, or as this one.
        let mounts_as = if kind > 5 && rng.below(2) == 0 { node } else { 50 };
        let thief = Thief { node, mounts_as, node_of, segment, held, incarnation, name, key };
        let out = thief.request(&self.core, kind);
        let before = Mark::of(&self.core);
        let answer = self.core.request_as_intruder(WITHOUT_TENANT, &out)?;
        let (frame, _) = Frame::parse(&answer).unwrap().unwrap();
        let mounted = match Mount::decode_response(&frame) {
            Ok((MountResponse::Mounted(mounted), _)) if kind > 5 => Some(mounted.segment),
            _ => None,
        };
        let refused = match kind {
            0 => !matches!(Beat::decode_response(&frame), Ok((NodeStatus::Ok | NodeStatus::Work, _))),
            1..=5 => frame.header.result().is_err(),
            _ => mounted.is_none(),
        };
        // A request for a node needs its key in any case; a name is free when its holder is gone.
        if lives || kind <= 5 {
            self.core.report.thefts += 1;
            let found = self.core.unchanged(&before, refused).map_err(|change| {
                Violation::Stolen(format!(
                    "node {node} with {key:#x} by {kind} at {:?}: {change}",
                    self.core.now
                ))
            });
            self.core.judge(found)?;
        } else if let Some(segment) = mounted {
            self.core.report.successions += 1;
            self.leave_again(segment, key)?;
        }
        Ok(())
    }

    /// Unmounts memory that does not exist, before a client writes to it.
    fn leave_again(&mut self, segment: SegmentNo, key: u64) -> Result<(), Violation> {
        let Some(info) = self.core.master.segment(segment) else { return Ok(()) };
        let unmount = UnmountSegment { node: info.node, incarnation: info.incarnation, segment, key };
        let mut out = Vec::new();
        Unmount::encode_request(&mut out, 2, &unmount, core::iter::empty()).unwrap();
        let answer = self.core.request_as_intruder(WITHOUT_TENANT, &out)?;
        assert_eq!(Frame::parse(&answer).unwrap().unwrap().0.header.result(), Ok(()));
        self.core.heard.remove(&unmount.node.get());
        Ok(())
    }

    /// An intruder requests room that cannot be made.
    fn wish(&mut self) -> Result<(), Violation> {
        let rng = &mut self.rng;
        let who = rng.index(TENANTS.len());
        let stats = self.core.master.stats();
        let segments: Vec<SegmentNo> = self.core.master.segments().map(|info| info.segment).collect();
        let usage = self.core.master.tenant(TENANTS[who]).unwrap();
        let longest = self.core.scenario.segment_bytes;
        let mut options = PutOptions { replicas: 1 + rng.below(2) as u8, ..PutOptions::DEFAULT };
        let mut len = 1 + rng.below(3_000);
        match rng.below(5) {
            // Excludes every segment.
            0 => {
                for segment in &segments {
                    options.placement.excluded.push(*segment).unwrap();
                }
                for segment in segments.iter().take(rng.index(3)) {
                    options.placement.preferred.push(*segment).unwrap();
                }
            }
            // More than its tenant may have.
            1 if usage.quota_bytes.is_some_and(|quota| quota < longest) => {
                len = usage.quota_bytes.unwrap_or(0) + 1 + rng.below(3_000);
            }
            // More than may be pinned.
            2 => {
                let share = self.core.master.config().hard_pin_share_max;
                len = (stats.capacity_bytes as f64 * share) as u64 + 64;
                options.retention = Retention { pin: Pin::Hard, ..Retention::DEFAULT };
            }
            // More replicas than the limit.
            3 => options.replicas = self.core.master.config().replicas_max + 1 + rng.below(3) as u8,
            // Longer than any segment, and on one of them.
            _ => {
                let most = [64, longest, u64::MAX / 4][rng.index(3)];
                len = longest + 1 + rng.below(most);
                let preferred = segments.get(rng.index(segments.len()));
                options.placement = preferred.map_or(Placement::ANY, |segment| Placement::on(*segment));
            }
        }
        let mut keys = ["wish", "wish-2", "wish-3"].map(str::as_bytes);
        if rng.below(3) == 0 {
            // An upsert, of an object that exists if there is one.
            options.existing = Existing::REPLACE;
            let own = self.core.visible.keys().map(|key| split_key(key)).filter(|(tenant, _)| *tenant == who);
            keys[0] = own.map(|(_, key)| key).next().unwrap_or(keys[0]);
        }
        let items = keys[..1 + rng.index(3)].iter().map(|key| NewObject { key: Key(key), len });
        // A writer's identity of zero would be refused before the put is looked at.
        let put = PutRequest { nonce: 0, options, writer: u64::MAX };
        let mut out = Vec::new();
        PutStart::encode_request(&mut out, 1, &put, items).unwrap();
        let tempting = self.core.master.eviction().candidates > 0;
        let before = Mark::of(&self.core);
        let answer = self.core.request_as_intruder(who, &out)?;
        let (frame, _) = Frame::parse(&answer).unwrap().unwrap();
        let results = PutStart::decode_response(&frame);
        let codes: Vec<_> = results.map_or_else(|_| Vec::new(), |(_, results)| results.collect());
        let refused = codes.iter().all(Result::is_err);
        // A put that was refused for its form alone was not weighed against objects of others.
        let weighed =
            codes.iter().flat_map(|code| code.as_ref().err()).any(|code| *code != ErrorCode::InvalidParams);
        self.core.report.wishes += u64::from(tempting && weighed);
        let found = self.core.unchanged(&before, refused).map_err(|change| {
            Violation::EvictedForNothing(format!("{len} bytes, {options:?}, by {who}: {change}"))
        });
        self.core.judge(found)
    }
}

impl Core {
    /// Whether the master has to count a node as alive: its connection is open, and it was heard of.
    fn is_held(&self, node: u64) -> bool {
        let Some((heard, life)) = self.heard.get(&node) else { return false };
        let ttl = Duration::from_millis(self.master.config().node_ttl_ms.into());
        let stands = self.sessions.contains_key(&(Party::Node(node as usize - 1), *life));
        stands && self.counted() - *heard < ttl
    }

    /// Whether nothing changed, and the request was refused; otherwise what changed.
    fn unchanged(&self, before: &Mark, refused: bool) -> Result<(), String> {
        let after = Mark::of(self);
        if *before == after && refused {
            return Ok(());
        }
        Err(format!("refused {refused} at {:?}: {before:?}, {after:?}", self.now))
    }
}

/// Evicts something for a put.
pub(crate) fn make_room(core: &mut Core) {
    let objects_max = core.master.stats().objects.saturating_sub(1);
    let now = core.shown();
    core.master.evict_now(now, Evict { objects_max, used_bytes_max: u64::MAX });
}
