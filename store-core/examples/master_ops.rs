//! The speed of the master on one core, frames included: `cargo run --release -p store-core --example
//! master_ops`.
//!
//! Every figure is measured on one thread that decodes a request frame, carries it out and encodes the
//! response, in memory. The cost of sockets is not included.

use std::error::Error;
use std::hint::black_box;
use std::time::Instant as Clock;

use store_core::client::{Action, ClientConfig, GetItem, GetOp, TransferEnd};
use store_core::message::{
    Commit, Exists, Get, LeaseWanted, MountSegment, NewObject, Operation, PutEnd, PutRequest, PutStart,
};
use store_core::{Frame, Incarnation, Key, Master, MasterConfig, NodeId, Session, bound};
use te_core::Instant;

const OBJECTS: usize = 1_000_000;
const KEYS: usize = 2_000_000;

fn main() -> Result<(), Box<dyn Error>> {
    let mut master = Master::new(MasterConfig::default())?;
    for node in 1..=3 {
        let name = format!("node-{node}");
        let len = OBJECTS as u64 * 4096;
        let segment = MountSegment {
            node: NodeId::new(node),
            incarnation: Incarnation::new(1),
            name: &name,
            endpoint: "127.0.0.1:9000",
            len,
            ..MountSegment::default()
        };
        master.mount(Instant::ZERO, &segment)?;
    }
    let keys: Vec<String> =
        (0..OBJECTS).map(|object| format!("{:032x}", object as u128 * 0x9e37_79b9_7f4a_7c15)).collect();
    let start = Clock::now();
    for batch in keys.chunks(128) {
        put(&mut master, batch, &mut Buffers::default())?;
    }
    let fill = start.elapsed().as_secs_f64();
    println!("{:>28} {:>10} {:>12}", "operation", "ns/key", "keys/s");
    row("put, filling, batch 128", fill, OBJECTS);
    for batch in [1, 128] {
        requests(&mut master, &keys, batch)?;
    }
    gets(&mut master, &keys)?;
    let stats = master.stats();
    let objects = stats.objects + stats.objects_processing;
    println!(
        "{objects} objects, {:.1} bytes of master memory each",
        stats.memory_bytes as f64 / objects as f64
    );
    Ok(())
}

/// The object that is requested in this turn: a stride that defeats the cache.
fn key_of(keys: &[String], turn: usize) -> &[u8] {
    keys[turn * 7_919_333 % OBJECTS].as_bytes()
}

/// Requests with this many keys each.
fn requests(master: &mut Master, keys: &[String], batch: usize) -> Result<(), Box<dyn Error>> {
    let mut buffers = Buffers::default();
    let mut now = Instant::from_millis(1);
    let order: Vec<&[u8]> = (0..KEYS).map(|turn| key_of(keys, turn)).collect();
    let start = Clock::now();
    for keys in order.chunks(batch) {
        Exists::encode_request(&mut buffers.request, 1, &(), keys.iter().map(|key| Key(key)))?;
        buffers.send(master, now)?;
    }
    row(&format!("exists, batch {batch}"), start.elapsed().as_secs_f64(), KEYS);
    let start = Clock::now();
    for keys in order.chunks(batch) {
        Get::encode_request(&mut buffers.request, 1, &LeaseWanted::Quick, keys.iter().map(|key| Key(key)))?;
        buffers.send(master, now)?;
        now = Instant::from_nanos(now.as_nanos() + 1_000);
    }
    row(&format!("get, batch {batch}"), start.elapsed().as_secs_f64(), KEYS);
    let fresh: Vec<String> =
        (0..OBJECTS / 2).map(|object| format!("fresh-{batch:06}-{object:019x}")).collect();
    let start = Clock::now();
    for keys in fresh.chunks(batch) {
        put(master, keys, &mut buffers)?;
    }
    row(&format!("put start + end, batch {batch}"), start.elapsed().as_secs_f64(), fresh.len());
    Ok(())
}

/// Gets of one key, the client's state machine included.
fn gets(master: &mut Master, keys: &[String]) -> Result<(), Box<dyn Error>> {
    let start = Clock::now();
    let mut get = GetOp::new(ClientConfig::default());
    let mut buffers = Buffers::default();
    for turn in 0..KEYS / 4 {
        get.start([GetItem { key: key_of(keys, turn), capacity: 4096, len_min: 1 }], &[]);
        while let Some(action) = get.poll(Instant::ZERO, turn as u64, &mut buffers.request) {
            match action {
                Action::Call => {
                    buffers.send(master, Instant::ZERO)?;
                    get.handle_response(&Frame::parse(&buffers.response)?.ok_or("incomplete")?.0);
                }
                Action::Transfer(read) => get.handle_transfer(Instant::ZERO, read.id, TransferEnd::read(1)),
                _ => {}
            }
        }
        if !matches!(get.result(0), Some(Ok(_))) {
            return Err("a get failed".into());
        }
    }
    row("get, client and master", start.elapsed().as_secs_f64(), KEYS / 4);
    Ok(())
}

#[derive(Default)]
struct Buffers {
    request: Vec<u8>,
    response: Vec<u8>,
    generations: Vec<(u64, u64)>,
    session: Session,
}

impl Buffers {
    fn send(&mut self, master: &mut Master, now: Instant) -> Result<(), Box<dyn Error>> {
        self.response.clear();
        let (frame, _) = Frame::parse(&self.request)?.ok_or("incomplete")?;
        master.handle(now, &mut self.session, &frame, &mut self.response);
        black_box(&self.response);
        self.request.clear();
        Ok(())
    }
}

fn put(master: &mut Master, keys: &[String], buffers: &mut Buffers) -> Result<(), Box<dyn Error>> {
    let new = keys.iter().map(|key| NewObject { key: Key(key.as_bytes()), len: 4096 });
    PutStart::encode_request(
        &mut buffers.request,
        1,
        &PutRequest { writer: 1, ..PutRequest::default() },
        new,
    )?;
    buffers.send(master, Instant::ZERO)?;
    let (frame, _) = Frame::parse(&buffers.response)?.ok_or("incomplete")?;
    buffers.generations.clear();
    for allocation in PutStart::decode_response(&frame)?.1 {
        let allocation = allocation?;
        buffers.generations.push((allocation.generation, allocation.handle));
    }
    let commits = keys.iter().zip(&buffers.generations);
    let commits = commits.map(|(key, &(generation, handle))| Commit {
        key: Key(key.as_bytes()),
        generation,
        handle,
        checksum: bound(1, key.as_bytes(), generation),
    });
    PutEnd::encode_request(&mut buffers.request, 1, &(), commits)?;
    buffers.send(master, Instant::ZERO)
}

fn row(name: &str, seconds: f64, keys: usize) {
    println!("{name:>28} {:>10.0} {:>12.0}", seconds * 1e9 / keys as f64, keys as f64 / seconds);
}
