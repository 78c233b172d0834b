//! A node with a disk, and a master that answers what readers ask, so that a test decides where objects are.
#![allow(dead_code, unused_imports, reason = "each test file uses its part")]

use std::collections::HashMap;
use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread;

use store_client::stage::{MapSource, StageConfig, StageServer};
use store_client::{Client, ClientConfig, ErrorCode, Fabrics, SegmentNo, SharedRegion};
use store_core::chunks::{CHUNK_BYTES, ChunkSums, stored_len};
use store_core::message::{
    Export, Get, Hello, Kind, Lease, Object, Operation, Replica, Replicas, ReportReplicas, ReportSegments,
    SegmentInfo, Segments, Verdict, Welcome, encode_failure,
};
use store_core::wire::VERSION;
use store_core::{Frame, FrameBuffer, Incarnation, NodeId, bound};
use te_core::{Access, Secret};
use te_engine::TransferEngine;

pub(crate) const DISK: SegmentNo = SegmentNo::new(7);
pub(crate) const MEMORY: SegmentNo = SegmentNo::new(3);

/// A node's engine, staging memory, disk and memory.
pub(crate) struct Host {
    pub(crate) engine: TransferEngine,
    pub(crate) memory: SharedRegion,
    pub(crate) staging: SharedRegion,
    pub(crate) source: Arc<MapSource>,
    pub(crate) server: StageServer,
    used: u64,
}

impl Host {
    pub(crate) fn new(fabrics: Fabrics) -> Self {
        Self::with(fabrics, StageConfig::default(), Secret::default())
    }

    pub(crate) fn with(fabrics: Fabrics, config: StageConfig, cluster: Secret) -> Self {
        let listen = "127.0.0.1:0".parse().unwrap();
        let mut engine = te_engine::Config { listen, fabrics, ..te_engine::Config::default() };
        engine.cluster_secret = cluster.clone();
        let engine = TransferEngine::start(engine).unwrap();
        let memory = engine.alloc_shared(80 << 20, Access::all()).unwrap();
        let staging = engine.alloc_shared(config.memory_bytes as usize, Access::REMOTE_READ).unwrap();
        let source = Arc::new(MapSource::new());
        let served = Arc::clone(&source);
        let server = StageServer::start(config, staging.clone(), cluster, served).unwrap();
        Self { engine, memory, staging, source, server, used: 0 }
    }

    pub(crate) fn export(&self, region: &SharedRegion) -> Export {
        Export { engine: self.engine.incarnation(), region: region.id().to_bits() }
    }

    /// Stores an object in memory; returns its replica.
    pub(crate) fn in_memory(&mut self, data: &[u8]) -> Replica {
        let image = image(data);
        let addr = self.memory.addr() + self.used;
        self.memory.write(self.used, &image).unwrap();
        self.used += (image.len() as u64).next_multiple_of(64);
        Replica { segment: MEMORY, addr }
    }

    /// Stores an object on the disk; returns its replica.
    pub(crate) fn on_disk(&self, locator: u64, data: &[u8]) -> Replica {
        self.source.insert(DISK, locator, data);
        Replica { segment: DISK, addr: locator }
    }
}

/// Data and trailer.
fn image(data: &[u8]) -> Vec<u8> {
    let mut sums = ChunkSums::default();
    for chunk in data.chunks(CHUNK_BYTES as usize) {
        sums.push(te_host::crc32c_of(0, chunk), chunk.len() as u64);
    }
    let image = [data, sums.trailer()].concat();
    assert_eq!(image.len() as u64, stored_len(data.len() as u64));
    image
}

/// What the master knows, and what it was told.
#[derive(Default)]
pub(crate) struct Known {
    pub(crate) objects: HashMap<Vec<u8>, Object>,
    /// Endpoint, export and stage address of each segment.
    pub(crate) segments: HashMap<SegmentNo, (String, Export, String)>,
    pub(crate) bad: Vec<(Vec<u8>, SegmentNo)>,
    pub(crate) unreached: Vec<SegmentNo>,
    pub(crate) asked: HashMap<Kind, u32>,
}

/// A master of readers, on threads of its own.
pub(crate) struct Readers {
    pub(crate) addr: SocketAddr,
    pub(crate) known: Arc<Mutex<Known>>,
}

impl Readers {
    pub(crate) fn new(host: &Host) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let addr = listener.local_addr().unwrap();
        let known = Arc::new(Mutex::new(Known::default()));
        let shared = Arc::clone(&known);
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let known = Arc::clone(&shared);
                thread::spawn(move || serve(stream, &known));
            }
        });
        let this = Self { addr, known };
        this.know(host);
        this
    }

    /// The segments of a host.
    pub(crate) fn know(&self, host: &Host) {
        let endpoint = host.engine.name().to_owned();
        let stage = host.server.addr().to_string();
        let mut known = self.known.lock().unwrap();
        let memory = (endpoint.clone(), host.export(&host.memory), String::new());
        known.segments.insert(MEMORY, memory);
        known.segments.insert(DISK, (endpoint, host.export(&host.staging), stage));
    }

    pub(crate) fn put(&self, key: &[u8], data: &[u8], replicas: &[Replica]) {
        let mut all = Replicas::new();
        replicas.iter().for_each(|replica| all.push(*replica).unwrap());
        let generation = 5 + key.len() as u64;
        let checksum = bound(te_host::crc32c_of(0, data), key, generation);
        let object = Object { len: data.len() as u64, checksum, generation, replicas: all };
        self.known.lock().unwrap().objects.insert(key.to_vec(), object);
    }

    pub(crate) fn config(&self, fabrics: Fabrics) -> ClientConfig {
        ClientConfig::new(self.addr.into()).fabrics(fabrics)
    }

    pub(crate) fn client(&self, fabrics: Fabrics) -> Client {
        Client::connect(self.config(fabrics)).unwrap()
    }

    pub(crate) fn bad(&self) -> Vec<(Vec<u8>, SegmentNo)> {
        std::mem::take(&mut self.known.lock().unwrap().bad)
    }

    pub(crate) fn asked(&self, kind: Kind) -> u32 {
        self.known.lock().unwrap().asked.get(&kind).copied().unwrap_or(0)
    }
}

fn serve(mut stream: TcpStream, known: &Mutex<Known>) {
    let mut input = FrameBuffer::new();
    let mut out = Vec::new();
    loop {
        while let Ok(Some(frame)) = input.next_frame() {
            answer(&frame, &mut known.lock().unwrap(), &mut out);
        }
        if stream.write_all(&out).is_err() {
            return;
        }
        out.clear();
        match stream.read(input.spare_mut(64 << 10)) {
            Ok(0) | Err(_) => return,
            Ok(len) => input.filled(len),
        }
    }
}

fn answer(frame: &Frame<'_>, known: &mut Known, out: &mut Vec<u8>) {
    let id = frame.header.request_id;
    let kind = Kind::from_byte(frame.header.kind).unwrap();
    *known.asked.entry(kind).or_default() += 1;
    match kind {
        Kind::Hello => {
            let welcome = Welcome {
                version: VERSION,
                lineage: 1,
                term: 1,
                keys_per_batch_max: 4096,
                key_bytes_max: 1024,
                replicas_max: 8,
                lease_ms: 5_000,
                node_ttl_ms: 5_000,
                challenge: [1; 32],
            };
            Hello::encode_response(out, id, &welcome, std::iter::empty()).unwrap();
        }
        Kind::Get => {
            let (_, keys) = Get::decode_request(frame.body).unwrap();
            let find =
                |key: store_core::Key<'_>| known.objects.get(key.0).copied().ok_or(ErrorCode::ObjectNotFound);
            let found: Vec<_> = keys.map(find).collect();
            let lease = Lease { lease_ms: 5_000, first: 1 };
            Get::encode_response(out, id, &lease, found.into_iter()).unwrap();
        }
        Kind::Segments => {
            let (_, numbers) = Segments::decode_request(frame.body).unwrap();
            let infos = numbers.map(|segment| {
                let (endpoint, export, stage) =
                    known.segments.get(&segment).ok_or(ErrorCode::SegmentNotFound)?;
                Ok(SegmentInfo {
                    shared: "",
                    extent_bytes: 0,
                    segment,
                    node: NodeId::new(1),
                    incarnation: Incarnation::new(1),
                    name: "a",
                    endpoint,
                    base: 0,
                    len: 0,
                    location: store_core::MemoryLocation::default(),
                    export: *export,
                    stage,
                    used: 0,
                    free_bytes_largest: 0,
                })
            });
            let infos: Vec<_> = infos.collect();
            Segments::encode_response(out, id, &(), infos.into_iter()).unwrap();
        }
        Kind::ReportReplicas => {
            let (_, bad) = ReportReplicas::decode_request(frame.body).unwrap();
            let count = bad.len();
            known.bad.extend(bad.map(|bad| (bad.key.0.to_vec(), bad.segment)));
            let verdicts = std::iter::repeat_n(Ok(Verdict::Noted), count);
            ReportReplicas::encode_response(out, id, &(), verdicts).unwrap();
        }
        Kind::ReportSegments => {
            let (_, segments) = ReportSegments::decode_request(frame.body).unwrap();
            let count = segments.len();
            known.unreached.extend(segments);
            ReportSegments::encode_response(out, id, &(), std::iter::repeat_n(Ok(()), count)).unwrap();
        }
        Kind::ReturnLeases => {}
        other => encode_failure(out, other as u8, id, ErrorCode::NotSupported),
    }
}
