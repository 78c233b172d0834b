//! Sequences of well-formed requests to one master, from nodes and clients that follow no protocol: whatever they do, in
//! whatever order, every byte of every segment is accounted for, memory stays bounded, and in the end all space comes back.
//!
//! Input: `op u8 | a u8 | b u8 | c u8`, again and again; names are few, so that requests meet.
#![no_main]

use libfuzzer_sys::fuzz_target;
use std::time::Duration;
use store_core::message::*;
use store_core::{ErrorCode, Frame, FullKey, Key, Master, MasterConfig, SegmentNo, Session, TenantConfig};
use te_core::Instant;

const TENANTS: [&str; 2] = ["a", "b"];
/// More than a master needs for all that one input can make.
const MEMORY_BYTES_MAX: u64 = 64 << 20;

struct World {
    master: Master,
    session: Session,
    now: Instant,
    /// Of every start that was answered.
    generations: Vec<u64>,
}

impl World {
    /// Asks, and is answered once, with as many items as it asked for.
    fn ask<'a, O: Operation>(
        &mut self,
        ask: &O::Ask<'_>,
        items: impl ExactSizeIterator<Item = O::AskItem<'a>>,
        each: impl FnMut(O::AnswerItem<'_>),
    ) {
        let (mut request, mut out) = (Vec::new(), Vec::new());
        let asked = items.len();
        O::encode_request(&mut request, 7, ask, items).expect("it fits");
        let (frame, _) = Frame::parse(&request).expect("ours").expect("whole");
        self.master.handle(self.now, &mut self.session, &frame, &mut out);
        let (answer, len) = Frame::parse(&out).expect("a frame").expect("a whole frame");
        assert_eq!((len, answer.header.request_id, answer.header.response), (out.len(), 7, true));
        match O::decode_response(&answer) {
            Ok((_, answers)) => {
                assert!(asked == 0 || answers.len() == asked, "{:?}: {} of {asked}", O::KIND, answers.len());
                answers.for_each(each);
            }
            Err(error) => assert_ne!(error, ErrorCode::InternalError, "{:?}", O::KIND),
        }
    }

    fn step(&mut self, op: u8, a: u8, b: u8, c: u8) {
        let key = [b'k', a % 8];
        let generation = match self.generations.len() {
            0 => u64::from(b),
            len => self.generations[usize::from(b) % len],
        };
        match op % 14 {
            0 => {
                let name = format!("n{}", c % 4);
                let segment = MountSegment {
                    node: u64::from(a % 3),
                    incarnation: u64::from(b),
                    name: &name,
                    endpoint: "n:1",
                    base: u64::from(c) << 20,
                    len: 64 * (1 + u64::from(c)),
                    export: Export::default(),
                    epoch: 0,
                };
                self.ask::<Mount>(&segment, std::iter::empty(), drop);
            }
            1 => {
                let segments: Vec<(SegmentNo, u64)> =
                    self.master.segments().map(|info| (info.segment, info.incarnation)).collect();
                let (segment, incarnation) =
                    segments.get(usize::from(a)).copied().unwrap_or((a.into(), c.into()));
                let unmount = UnmountSegment { node: u64::from(b % 3), incarnation, segment };
                self.ask::<Unmount>(&unmount, std::iter::empty(), drop);
            }
            2 => {
                let beat = Heartbeat { node: u64::from(a % 3), incarnation: u64::from(b) };
                self.ask::<Beat>(&beat, std::iter::empty(), drop);
            }
            3 | 4 => {
                let retention = Retention {
                    pin: [Pin::None, Pin::Soft, Pin::Hard, Pin::None][usize::from(c >> 2 & 3)],
                    ttl_ms: (c & 16 != 0).then_some(u32::from(c) * 10),
                    group: (c & 32 != 0).then_some(u64::from(c >> 6)),
                };
                let options = PutOptions { replicas: c & 3, retention, ..PutOptions::DEFAULT };
                let ask = PutAsk { nonce: u32::from(op / 14), options };
                let items =
                    (0..1 + u64::from(op / 128)).map(|n| [b'k', (a % 8) + n as u8]).collect::<Vec<_>>();
                let mut generations = Vec::new();
                let items: Vec<NewObject<'_>> =
                    items.iter().map(|key| NewObject { key: Key(key), len: u64::from(b) * 16 }).collect();
                self.ask::<PutStart>(&ask, items.into_iter(), |answer| {
                    generations.extend(answer.ok().map(|allocation| allocation.generation));
                });
                self.generations.append(&mut generations);
            }
            5 => {
                let commit = Commit { key: Key(&key), generation, checksum: u32::from(c & 1) };
                self.ask::<PutEnd>(&(), std::iter::once(commit), drop);
            }
            6 => {
                let revocation = Revocation { key: Key(&key), generation, quiet: c & 1 == 0 };
                self.ask::<PutRevoke>(&(), std::iter::once(revocation), drop);
            }
            7 => {
                let other = [b'k', b % 8];
                self.ask::<Get>(&(), [Key(&key), Key(&other)].into_iter(), drop);
            }
            8 => self.ask::<Exists>(&(), std::iter::once(Key(&key)), drop),
            9 => {
                let removal = Removal { key: Key(&key), force: b & 1 == 0 };
                self.ask::<Remove>(&(), std::iter::once(removal), drop);
            }
            10 => {
                let query = ListQuery { prefix: Key(b"k"), cursor: u64::from(a), limit: u32::from(b) };
                self.ask::<List>(&query, std::iter::empty(), drop);
            }
            11 => {
                let tenant = TENANTS[usize::from(a) % TENANTS.len()];
                let greeting = Greeting { version: store_core::wire::VERSION, tenant, ..Greeting::default() };
                self.ask::<Hello>(&greeting, std::iter::empty(), drop);
            }
            12 => {
                self.ask::<ReadStats>(&(), std::iter::empty(), drop);
                self.ask::<Segments>(&(), std::iter::empty(), drop);
                self.ask::<ExplainEviction>(&u32::from(a), std::iter::empty(), drop);
                self.ask::<WhyKept>(&(), std::iter::once(Key(&key)), drop);
            }
            _ => {
                self.now = self.now + Duration::from_millis(10) * (u32::from(a) * u32::from(b));
                self.master.handle_timeout(self.now);
            }
        }
    }

    /// What lies in segments is an object's, or held back; nothing else is.
    fn check(&self) {
        let stats = self.master.stats();
        let segments: u64 = self.master.segments().map(|info| info.used).sum();
        assert_eq!(stats.used_bytes, segments);
        let mut bytes = 0;
        self.each_object(|_, listed| bytes += listed.len.div_ceil(64) * 64 * u64::from(listed.replicas));
        assert_eq!(stats.used_bytes, bytes + stats.quarantined_bytes + stats.deferred_bytes, "{stats:?}");
        assert!(stats.memory_bytes <= MEMORY_BYTES_MAX, "{stats:?}");
    }

    fn each_object<'a>(&'a self, mut each: impl FnMut(u16, Listed<'a>)) {
        let query = ListQuery { prefix: Key(b""), cursor: 0, limit: 4096 };
        for tenant in 0..=TENANTS.len() as u16 {
            self.master.list_of(self.now, tenant, &query, |listed| {
                each(tenant, listed);
                true
            });
        }
    }

    /// Everything is removed, and every timeout passes but that of the nodes.
    fn end(mut self) {
        let mut keys = Vec::new();
        self.each_object(|tenant, listed| keys.push((tenant, listed.key.0.to_vec())));
        for (tenant, key) in &keys {
            assert_eq!(self.master.remove(self.now, FullKey { tenant: *tenant, key }, true), Ok(()));
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
        objects_max: 12,
        segments_max: 6,
        nodes_max: 2,
        node_ttl_ms: 3_600_000,
        ..MasterConfig::default()
    };
    let master = Master::new(config).expect("within the limits");
    let mut world =
        World { master, session: Session::default(), now: Instant::ZERO, generations: Vec::new() };
    world.step(11, 0, 0, 0);
    for step in bytes.chunks_exact(4).take(2_000) {
        world.step(step[0], step[1], step[2], step[3]);
        world.check();
    }
    world.end();
});
