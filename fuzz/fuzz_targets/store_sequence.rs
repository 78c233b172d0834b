//! Sequences of well-formed requests to one master, from nodes and clients in any order: every byte of every
//! segment stays accounted for, memory stays bounded, and in the end all space is free.
//!
//! Input: `op u8 | a u8 | b u8 | c u8`, repeated; there are few names, so that requests meet.
#![no_main]

use libfuzzer_sys::fuzz_target;
use std::time::Duration;
use store_core::message::*;
use store_core::{
    ErrorCode, Frame, FullKey, Incarnation, Key, Master, MasterConfig, MemoryLocation, NodeId, Role, Secret,
    SegmentNo, Session, TaskId, TenantConfig, TenantNo, prove,
};
use te_core::Instant;

const TENANTS: [&str; 2] = ["a", "b"];
/// The limit of a master's memory; one input cannot make it need more.
const MEMORY_BYTES_MAX: u64 = 64 << 20;

struct World {
    master: Master,
    session: Session,
    now: Instant,
    /// The key, the generation and the handle of every put that was started.
    started: Vec<([u8; 2], (u64, u64))>,
    /// The id, the try and the checksum of every order that a node got.
    orders: Vec<(TaskId, u64, u32)>,
    /// Whether there was a task, or may have been one.
    tasked: bool,
}

impl World {
    /// Sends a request, and checks that it is answered once, with one item per item of the request.
    fn request<'a, O: Operation>(
        &mut self,
        head: &O::Request<'_>,
        items: impl ExactSizeIterator<Item = O::RequestItem<'a>>,
        each: impl FnMut(O::ResponseItem<'_>),
    ) {
        let (mut request, mut out) = (Vec::new(), Vec::new());
        let requested = items.len();
        O::encode_request(&mut request, 7, head, items).expect("it fits");
        let (frame, _) = Frame::parse(&request).expect("ours").expect("whole");
        self.master.handle(self.now, &mut self.session, &frame, &mut out);
        let (response, len) = Frame::parse(&out).expect("a frame").expect("a whole frame");
        assert_eq!((len, response.header.request_id, response.header.response), (out.len(), 7, true));
        match O::decode_response(&response) {
            Ok((_, items)) => {
                assert!(
                    requested == 0 || items.len() == requested,
                    "{:?}: {} of {requested}",
                    O::KIND,
                    items.len()
                );
                items.for_each(each);
            }
            Err(error) => assert_ne!(error, ErrorCode::InternalError, "{:?}", O::KIND),
        }
    }

    fn step(&mut self, op: u8, a: u8, b: u8, c: u8) {
        let key = [b'k', a % 8];
        let (started, (generation, handle)) = match self.started.len() {
            0 => (key, (u64::from(b), 0)),
            len => self.started[usize::from(b) % len],
        };
        // Sometimes with the key of another put.
        let ended = if c & 2 == 0 { started } else { key };
        match op % 18 {
            0..=2 => self.node(op % 18, a, b, c),
            3 | 4 => self.start_puts(op, a, b, c),
            5 => {
                let commit = Commit { key: Key(&ended), generation, handle, checksum: u32::from(c & 1) };
                self.request::<PutEnd>(&(), std::iter::once(commit), drop);
            }
            6 => {
                let revocation = Revocation { key: Key(&ended), generation, handle, quiet: c & 1 == 0 };
                self.request::<PutRevoke>(&(), std::iter::once(revocation), drop);
            }
            7 => {
                let other = [b'k', b % 8];
                self.request::<Get>(&LeaseWanted::Quick, [Key(&key), Key(&other)].into_iter(), drop);
            }
            8 if c & 1 == 0 => self.request::<Exists>(&(), std::iter::once(Key(&key)), drop),
            8 => self.request::<ExistsLeased>(&(), std::iter::once(Key(&key)), drop),
            9 => {
                let removal = Removal { key: Key(&key), force: b & 1 == 0 };
                self.request::<Remove>(&(), std::iter::once(removal), drop);
            }
            10 => {
                let query = ListQuery { prefix: Key(b"k"), cursor: u64::from(a), limit: u32::from(b) };
                self.request::<List>(&query, std::iter::empty(), |_| {});
            }
            11 => self.greet(a),
            12 => {
                self.request::<ReadStats>(&(), std::iter::empty(), drop);
                self.request::<Segments>(&(), std::iter::empty(), |_| {});
                self.request::<ExplainEviction>(&u32::from(a), std::iter::empty(), |_| {});
                self.request::<WhyKept>(&(), std::iter::once(Key(&key)), drop);
                let change = RetentionChange {
                    pin: [None, Some(Pin::None), Some(Pin::Soft), Some(Pin::Hard)][usize::from(b & 3)],
                    soft_pin_ttl_ms: (b & 4 != 0).then_some(u32::from(c)),
                    ttl: [TtlChange::Keep, TtlChange::Never, TtlChange::After(u32::from(c))]
                        [usize::from(b >> 3) % 3],
                };
                self.request::<ChangeRetention>(&change, std::iter::once(Key(&key)), drop);
            }
            13 => self.tasks(&key, a, b, c),
            14 => self.fetch(a, b),
            15 => {
                // The node of a task reports, or another node does.
                let Some((id, attempt, checksum)) = self.orders.get(usize::from(a)).copied() else { return };
                let result = if b & 1 == 0 { Ok(checksum) } else { Err(ErrorCode::TransferFail) };
                let end = TaskEnd { id, attempt: attempt + u64::from(b & 6 == 6), result, quiet: c & 1 == 0 };
                self.request::<EndTasks>(
                    &NodeProof { node: NodeId::new((c >> 4 & 3).into()), key: 0 },
                    std::iter::once(end),
                    drop,
                );
            }
            16 => {
                let segment = self.segment(a);
                let bad = BadReplica { key: Key(&ended), generation, segment };
                self.request::<ReportReplicas>(&u64::from(b), std::iter::once(bad), drop);
                self.request::<FindReplicas>(&(), std::iter::once(Key(&key)), drop);
            }
            _ => {
                self.now = self.now + Duration::from_millis(10) * (u32::from(a) * u32::from(b));
                self.master.handle_timeout(self.now);
            }
        }
    }

    /// A node mounts or unmounts a segment, or sends a heartbeat.
    fn node(&mut self, op: u8, a: u8, b: u8, c: u8) {
        match op {
            0 => {
                let name = format!("n{}", c % 4);
                // Some are storage, whose length may not be whole granules.
                let storage = MemoryLocation::storage(512).filter(|_| c & 24 == 24);
                let segment = MountSegment {
                    node: NodeId::new((a % 3).into()),
                    incarnation: Incarnation::new(b.into()),
                    name: &name,
                    endpoint: "n:1",
                    base: u64::from(c) << 20,
                    len: 64 * (1 + u64::from(c)),
                    location: storage.unwrap_or_default(),
                    ..MountSegment::default()
                };
                self.request::<Mount>(&segment, std::iter::empty(), drop);
            }
            1 => {
                let segments: Vec<(SegmentNo, Incarnation)> =
                    self.master.segments().map(|info| (info.segment, info.incarnation)).collect();
                let (segment, incarnation) = segments
                    .get(usize::from(a))
                    .copied()
                    .unwrap_or((SegmentNo::new(a.into()), Incarnation::new(c.into())));
                let unmount =
                    UnmountSegment { node: NodeId::new((b % 3).into()), incarnation, segment, key: 0 };
                self.request::<Unmount>(&unmount, std::iter::empty(), drop);
            }
            _ => {
                let beat = Heartbeat {
                    node: NodeId::new((a % 3).into()),
                    incarnation: Incarnation::new(b.into()),
                    key: 0,
                };
                self.request::<Beat>(&beat, std::iter::empty(), drop);
            }
        }
    }

    /// A client starts puts.
    fn start_puts(&mut self, op: u8, a: u8, b: u8, c: u8) {
        let retention = Retention {
            pin: [Pin::None, Pin::Soft, Pin::Hard, Pin::None][usize::from(c >> 2 & 3)],
            ttl_ms: (c & 16 != 0).then_some(u32::from(c) * 10),
            group: (c & 32 != 0).then_some(u64::from(c >> 6)),
            ..Retention::DEFAULT
        };
        let pin = [InheritPin::No, InheritPin::Hard, InheritPin::Stronger][usize::from(a >> 4 & 3) % 3];
        let inherit = Inherit { pin, group: a & 64 != 0 };
        let existing = if a & 8 == 0 { Existing::Keep } else { Existing::Replace(inherit) };
        let options = PutOptions { replicas: c & 3, retention, existing, ..PutOptions::DEFAULT };
        let head = PutRequest { nonce: u32::from(op / 18), options, writer: 1 + u64::from(a % 3) };
        let keys: Vec<[u8; 2]> = (0..1 + op / 128).map(|n| [b'k', (a % 8) + n]).collect();
        let items: Vec<NewObject<'_>> =
            keys.iter().map(|key| NewObject { key: Key(key), len: u64::from(b) * 16 }).collect();
        let mut generations = Vec::new();
        self.request::<PutStart>(&head, items.into_iter(), |item| {
            generations.push(item.ok().map(|allocation| (allocation.generation, allocation.handle)));
        });
        let started = keys.iter().zip(generations);
        self.started.extend(started.filter_map(|(key, generation)| Some((*key, generation?))));
    }

    /// An administrator of a tenant connects.
    fn greet(&mut self, a: u8) {
        let tenant = TENANTS[usize::from(a) % TENANTS.len()];
        // On a new connection: an earlier greeting has used the challenge.
        self.session = Session::default();
        let proof = prove(b"s", Role::Admin, &[0; 32], tenant);
        let greeting = Greeting {
            version: store_core::wire::VERSION,
            tenant,
            admin_proof: Key(&proof),
            ..Greeting::default()
        };
        self.request::<Hello>(&greeting, std::iter::empty(), drop);
    }

    fn segment(&self, at: u8) -> SegmentNo {
        let segments: Vec<SegmentNo> = self.master.segments().map(|info| info.segment).collect();
        segments.get(usize::from(at) % segments.len().max(1)).copied().unwrap_or(SegmentNo::new(at.into()))
    }

    /// An administrator's request about tasks or segments.
    fn tasks(&mut self, key: &[u8], a: u8, b: u8, c: u8) {
        let (source, target) = (self.segment(b), self.segment(c));
        let id = TaskId::new(b.into());
        self.tasked |= c % 6 < 5;
        match c % 6 {
            0 | 1 => {
                let new = NewTask {
                    key: Key(key),
                    source: (b & 64 != 0).then_some(source),
                    target: (c & 64 != 0).then_some(target),
                };
                self.request::<CreateTasks>(&(), std::iter::once(new), |_| {});
            }
            2 => self.request::<CancelTasks>(&(), std::iter::once(id), |_| {}),
            3 => self.request::<RetryTasks>(&(), std::iter::once(id), |_| {}),
            4 => {
                let states = [SegmentState::Active, SegmentState::Maintenance, SegmentState::Draining];
                let order = SegmentOrder { segment: source, state: states[usize::from(a) % states.len()] };
                self.request::<OrderSegments>(&(), std::iter::once(order), |_| {});
            }
            _ => {
                self.request::<DrainStatus>(&(), std::iter::once(source), |_| {});
                self.request::<QueryTasks>(&(), std::iter::once(id), |_| {});
                let query = TaskQuery { cursor: 0, limit: 100, state: None };
                self.request::<ListTasks>(&query, std::iter::empty(), |_| {});
                self.request::<ReadTaskReport>(&(), std::iter::empty(), |_| {});
            }
        }
    }

    /// A node fetches its tasks.
    fn fetch(&mut self, a: u8, b: u8) {
        let node = NodeId::new((a % 3).into());
        let known = self.master.segments().find(|info| info.node == node).map(|info| info.incarnation);
        let incarnation = known.filter(|_| b & 7 != 7).unwrap_or(Incarnation::new(b.into()));
        let mut orders = Vec::new();
        let fetch = FetchRequest { node, incarnation, count_max: 4, key: 0 };
        self.request::<FetchTasks>(&fetch, std::iter::empty(), |order: TaskOrder<'_>| {
            orders.push((order.id, order.attempt, order.checksum));
        });
        self.orders.extend(orders);
    }

    /// Checks that used space belongs to objects, or is pending release, and that no other space is used.
    fn check(&self) {
        let stats = self.master.stats();
        let segments: u64 = self.master.segments().map(|info| info.used).sum();
        assert_eq!(stats.used_bytes, segments);
        let mut bytes = 0;
        let mut count =
            |listed: Listed<'_>| bytes += listed.len.div_ceil(64) * 64 * u64::from(listed.replicas);
        self.each_object(|_, listed| count(listed));
        (0..=TENANTS.len() as u16).map(TenantNo::new).for_each(|tenant| {
            self.master.unfinished_upserts(self.now, tenant).for_each(&mut count);
        });
        let accounted = bytes + stats.quarantined_bytes + stats.deferred_bytes;
        let rounds_more = self.master.segments().any(|info| info.location.is_storage());
        // The rest belongs to copies that are being made, and to the last granules of storage.
        assert!(stats.used_bytes >= accounted, "{stats:?}");
        assert!(stats.used_bytes == accounted || self.tasked || rounds_more, "{stats:?}");
        assert!(stats.memory_bytes <= MEMORY_BYTES_MAX, "{stats:?}");
    }

    fn each_object<'a>(&'a self, mut each: impl FnMut(TenantNo, Listed<'a>)) {
        let query = ListQuery { prefix: Key(b""), cursor: 0, limit: 4096 };
        for tenant in (0..=TENANTS.len() as u16).map(TenantNo::new) {
            self.master.list_of(self.now, tenant, &query, |listed| {
                each(tenant, listed);
                true
            });
        }
    }

    /// Removes everything, and lets every timeout pass except that of the nodes.
    fn end(mut self) {
        let mut keys = Vec::new();
        self.each_object(|tenant, listed| keys.push((tenant, listed.key.0.to_vec())));
        for (tenant, key) in &keys {
            assert_eq!(
                self.master.remove(self.now, FullKey { tenant: *tenant, key }, RemoveMode::Force),
                Ok(())
            );
        }
        self.now = self.now + Duration::from_secs(86_400);
        self.master.handle_timeout(self.now);
        let stats = self.master.stats();
        let left =
            (stats.used_bytes, stats.quarantined_bytes, stats.deferred_bytes, stats.objects_processing);
        assert_eq!(left, (0, 0, 0, 0), "{stats:?}");
    }
}

fuzz_target!(|bytes: &[u8]| {
    let tenants = TENANTS.map(|name| TenantConfig { name: name.into(), ..TenantConfig::default() });
    let config = MasterConfig {
        multi_tenants: true,
        tenants: tenants.into(),
        admin_secret: Secret::new(b"s"),
        objects_max: 12,
        segments_max: 6,
        nodes_max: 2,
        node_ttl_ms: 3_600_000,
        ..MasterConfig::default()
    };
    let master = Master::new(config).expect("within the limits");
    let mut world = World {
        master,
        session: Session::default(),
        now: Instant::ZERO,
        started: Vec::new(),
        orders: Vec::new(),
        tasked: false,
    };
    world.step(11, 0, 0, 0);
    for step in bytes.chunks_exact(4).take(2_000) {
        world.step(step[0], step[1], step[2], step[3]);
        world.check();
    }
    world.end();
});
