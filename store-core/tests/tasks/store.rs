//! A master, and the memory of its nodes.

use std::collections::{BTreeMap, HashMap};

use store_core::message::*;
use store_core::{
    ErrorCode, EvictionPolicy, Incarnation, Master, MasterConfig, NodeId, Placement, SegmentNo, TaskConfig,
    TaskId,
};
use te_core::Instant;

/// The segment with this number.
pub(crate) fn no(number: u32) -> SegmentNo {
    SegmentNo::new(number)
}

/// The segments with these numbers.
pub(crate) fn nos<const N: usize>(numbers: [u32; N]) -> Vec<SegmentNo> {
    numbers.map(SegmentNo::new).to_vec()
}

pub(crate) const KIB: u64 = 1024;
pub(crate) const LEASE_MS: u64 = 1_000;
pub(crate) const RELEASE_MS: u64 = 60_000;
pub(crate) const ONE: PutOptions = PutOptions::DEFAULT;
pub(crate) const TWO: PutOptions = PutOptions { replicas: 2, ..PutOptions::DEFAULT };

pub(crate) fn at(ms: u64) -> Instant {
    Instant::from_millis(ms)
}

pub(crate) fn config() -> MasterConfig {
    MasterConfig {
        lease_ttl_ms: LEASE_MS as u32,
        lease_guard_ms: 0,
        put_start_discard_timeout_ms: 3_000,
        put_start_release_timeout_ms: RELEASE_MS as u32,
        node_ttl_ms: 1_000_000,
        eviction_high_watermark: 1.0,
        eviction_ratio: 0.0,
        eviction: EvictionPolicy::Lru,
        slow_start_ms: 0,
        tasks: TaskConfig {
            processing_timeout_ms: 5_000,
            pending_timeout_ms: 20_000,
            ..TaskConfig::default()
        },
        ..MasterConfig::default()
    }
}

/// The bytes that a put writes.
pub(crate) fn content(generation: u64, len: u64) -> Vec<u8> {
    (0..len).map(|i| (generation.wrapping_mul(0x9e37_79b9) >> (i % 29)) as u8 ^ (i * 7) as u8).collect()
}

pub(crate) fn checksum(bytes: &[u8]) -> u32 {
    bytes.iter().fold(0x811c_9dc5, |sum: u32, byte| (sum ^ u32::from(*byte)).wrapping_mul(0x0100_0193))
}

/// A master and the memory of its segments. Node `n` has segment `n`, until it restarts.
pub(crate) struct Store {
    pub(crate) master: Master,
    pub(crate) memory: HashMap<SegmentNo, Vec<u8>>,
    pub(crate) incarnations: BTreeMap<u64, u64>,
}

impl Store {
    pub(crate) fn new(config: MasterConfig, segments: &[u64]) -> Self {
        let master = Master::new(config).unwrap();
        let mut store = Self { master, memory: HashMap::new(), incarnations: BTreeMap::new() };
        for (node, len) in segments.iter().enumerate() {
            assert_eq!(store.mount(0, node as u64 + 1, *len), no(node as u32 + 1));
        }
        store
    }

    pub(crate) fn mount(&mut self, ms: u64, node: u64, len: u64) -> SegmentNo {
        let incarnation = self.incarnations.entry(node).or_default();
        *incarnation += 1;
        let name = format!("s{node}");
        let segment = MountSegment {
            node: NodeId::new(node),
            incarnation: Incarnation::new(*incarnation),
            name: &name,
            endpoint: "host:1",
            len,
            ..MountSegment::default()
        };
        let no = self.master.mount(at(ms), &segment).unwrap().mounted().unwrap().segment;
        self.memory.insert(no, vec![0; len as usize]);
        no
    }

    pub(crate) fn put(&mut self, ms: u64, key: &str, len: u64, options: &PutOptions) -> u64 {
        let put = self.master.put_start(at(ms), key.as_bytes(), len, options).unwrap();
        let bytes = content(put.generation, len);
        for replica in put.replicas.iter() {
            self.write(replica.segment, replica.addr, &bytes);
        }
        self.master.put_end(at(ms), key.as_bytes(), put.generation, checksum(&bytes)).unwrap();
        put.generation
    }

    pub(crate) fn put_on(&mut self, ms: u64, key: &str, len: u64, segment: SegmentNo) -> u64 {
        self.put(ms, key, len, &PutOptions { placement: Placement::on(segment), ..ONE })
    }

    pub(crate) fn write(&mut self, segment: SegmentNo, addr: u64, bytes: &[u8]) {
        // A segment that was unmounted has no memory.
        if let Some(memory) = self.memory.get_mut(&segment) {
            memory[addr as usize..][..bytes.len()].copy_from_slice(bytes);
        }
    }

    pub(crate) fn bytes(&self, segment: SegmentNo, addr: u64, len: u64) -> Vec<u8> {
        self.memory[&segment][addr as usize..][..len as usize].to_vec()
    }

    /// Reads every replica; each must have the bytes of the put.
    pub(crate) fn read(&mut self, ms: u64, key: &str) -> Result<Vec<SegmentNo>, ErrorCode> {
        let object = self.master.get(at(ms), key.as_bytes())?;
        for replica in object.replicas.iter() {
            let bytes = self.bytes(replica.segment, replica.addr, object.len);
            assert_eq!(bytes, content(object.generation, object.len), "{key} on {}", replica.segment);
        }
        Ok(object.replicas.iter().map(|replica| replica.segment).collect())
    }

    pub(crate) fn fetch(&mut self, ms: u64, node: u64) -> Vec<Order> {
        let incarnation = self.incarnations[&node];
        let fetch = FetchRequest {
            node: NodeId::new(node),
            incarnation: Incarnation::new(incarnation),
            count_max: 1_000,
            key: 0,
        };
        self.master.fetch_tasks(at(ms), &fetch).unwrap().iter().map(Order::new).collect()
    }

    /// Carries out an order; returns the report.
    pub(crate) fn copy(&mut self, order: &Order) -> TaskEnd {
        let source = order.sources[0];
        let bytes = self.bytes(source.segment, source.addr, order.len);
        self.write(order.segment, order.addr, &bytes);
        order.end(Ok(checksum(&bytes)))
    }

    pub(crate) fn report(&mut self, ms: u64, node: u64, end: &TaskEnd) -> Result<(), ErrorCode> {
        self.master.end_task(at(ms), NodeId::new(node), end)
    }

    /// A node carries out all of its tasks.
    pub(crate) fn work(&mut self, ms: u64, node: u64) -> usize {
        let orders = self.fetch(ms, node);
        for order in &orders {
            let end = self.copy(order);
            assert_eq!(self.report(ms, node, &end), Ok(()));
        }
        orders.len()
    }

    /// All nodes work until there is nothing left to do.
    pub(crate) fn settle(&mut self, ms: u64) {
        for _ in 0..10_000 {
            self.master.handle_timeout(at(ms));
            let nodes: Vec<u64> = self.incarnations.keys().copied().collect();
            if nodes.into_iter().map(|node| self.work(ms, node)).sum::<usize>() == 0 {
                return;
            }
        }
        panic!("the work does not end");
    }

    pub(crate) fn task(&self, ms: u64, id: TaskId) -> TaskInfo<'_> {
        self.master.task(at(ms), id).unwrap()
    }

    pub(crate) fn used(&self) -> u64 {
        self.master.stats().used_bytes
    }

    pub(crate) fn order(&mut self, ms: u64, segment: SegmentNo, state: SegmentState) -> DrainInfo {
        self.master.order_segment(at(ms), &SegmentOrder { segment, state }).unwrap()
    }
}

/// [`TaskOrder`] without the key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Order {
    pub(crate) id: TaskId,
    pub(crate) attempt: u64,
    pub(crate) len: u64,
    pub(crate) segment: SegmentNo,
    pub(crate) addr: u64,
    pub(crate) sources: Vec<Replica>,
}

impl Order {
    pub(crate) fn new(order: &TaskOrder<'_>) -> Self {
        let TaskOrder { id, attempt, len, segment, addr, .. } = *order;
        Self { id, attempt, len, segment, addr, sources: order.sources.to_vec() }
    }

    pub(crate) fn end(&self, result: Result<u32, ErrorCode>) -> TaskEnd {
        TaskEnd { id: self.id, attempt: self.attempt, result, quiet: true }
    }
}
