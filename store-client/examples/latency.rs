//! Measures a store on this machine: a master, a node and this process, all real processes.
//!
//! ```text
//! cargo run --release -p store-client --example latency [-- master | store | all]
//! ```

use std::env;
use std::future::Future;
use std::io::{BufRead, BufReader, Read};
use std::pin::Pin;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::time::{Duration, Instant};

use store_client::{
    AsyncClient, BufferRange, Client, ClientConfig, Fabrics, Get, Masters, Node, NodeConfig, RemoveMode,
    RpcConfig, RpcConnection, Store as _,
};
use store_core::message::{
    Allocation, Beat, Commit, Exists, Get as AskGet, Heartbeat, LeaseWanted, Mount, MountSegment, NewObject,
    Operation, PutEnd, PutOptions, PutRequest, PutStart,
};
use store_core::{ErrorCode, Incarnation, Key, NodeId};
use store_master::{Config, MasterServer};
use te_core::{Access, Op};
use te_engine::{Engine, LocalAddr, TransferRequest};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

fn main() -> Result<()> {
    let role = env::args().nth(1).unwrap_or_else(|| "all".into());
    match role.as_str() {
        "serve-master" => serve_master(),
        "serve-node" => serve_node(),
        "master" => measure_master(),
        "store" => measure_store(),
        "all" => measure_master().and_then(|()| measure_store()),
        other => Err(format!("`{other}` is not a measurement: use master, store or all").into()),
    }
}

fn serve_master() -> Result<()> {
    let config = Config { rpc_listen: "127.0.0.1:0".parse()?, http_listen: None, ..Config::default() };
    let server = MasterServer::bind(config)?;
    println!("{}", server.rpc_addr());
    stop_with_parent(server.stopper());
    Ok(server.run()?)
}

fn serve_node() -> Result<()> {
    let master: Masters = env::args().nth(2).ok_or("no address")?.parse()?;
    let node = Node::start(NodeConfig::new("node", master, 256 << 20))?;
    println!("{}", node.endpoint());
    let _ = std::io::stdin().read(&mut [0]);
    node.stop();
    Ok(())
}

/// Stops when the parent ends, in whatever way: the pipe breaks then.
fn stop_with_parent(stopper: store_master::Stopper) {
    std::thread::spawn(move || {
        let _ = std::io::stdin().read(&mut [0]);
        stopper.stop();
    });
}

struct Process {
    child: Child,
    says: String,
}

impl Process {
    fn start(args: &[&str]) -> Result<Self> {
        let mut child = Command::new(env::current_exe()?)
            .args(args)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let mut says = String::new();
        BufReader::new(child.stdout.take().ok_or("no stdout")?).read_line(&mut says)?;
        Ok(Self { child, says: says.trim().to_owned() })
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        drop(self.child.stdin.take());
        let _ = self.child.wait();
    }
}

fn measure_master() -> Result<()> {
    let master = Process::start(&["serve-master"])?;
    let mut rpc = RpcConnection::connect(master.says.parse()?, RpcConfig::default())?;
    let segment = MountSegment {
        node: NodeId::new(1),
        incarnation: Incarnation::new(1),
        name: "fake",
        endpoint: "127.0.0.1:1",
        len: 1 << 40,
        lineage: rpc.welcome().lineage,
        ..MountSegment::default()
    };
    rpc.call::<Mount>(&segment, std::iter::empty())?;
    println!("{:<8} {:>6} {:>6} {:>12} {:>12}", "op", "batch", "depth", "requests/s", "keys/s");
    for (batch, depth, rounds) in [(1, 1, 5_000), (1, 64, 200_000), (32, 16, 10_000), (128, 8, 4_000)] {
        let keys: Vec<Vec<u8>> =
            (0..rounds * batch).map(|i| format!("{batch:04}-{depth:04}-{i:022}").into_bytes()).collect();
        rpc.call::<Beat>(
            &Heartbeat { node: NodeId::new(1), incarnation: Incarnation::new(1), key: 0 },
            std::iter::empty(),
        )?;
        let started = Instant::now();
        keys.chunks(UNFINISHED_MAX).try_for_each(|keys| put(&mut rpc, batch, depth, keys))?;
        row("put", batch, depth, rounds, started.elapsed());
        let started = Instant::now();
        pipeline::<Exists, _>(
            &mut rpc,
            depth,
            keys.chunks(batch),
            |rpc, keys| rpc.queue::<Exists>(&(), keys.iter().map(|key| Key(key))),
            |found| assert!(found.into_iter().all(|found| found)),
        )?;
        row("exists", batch, depth, rounds, started.elapsed());
        let started = Instant::now();
        pipeline::<AskGet, _>(
            &mut rpc,
            depth,
            keys.chunks(batch),
            |rpc, keys| rpc.queue::<AskGet>(&LeaseWanted::Quick, keys.iter().map(|key| Key(key))),
            |found| assert!(found.into_iter().all(|found| found.is_ok())),
        )?;
        row("get", batch, depth, rounds, started.elapsed());
    }
    Ok(())
}

/// Puts that are begun before the first of them is ended: a master allows 65,536 per connection
/// (`session_puts_max`).
const UNFINISHED_MAX: usize = 1 << 15;

/// Begins and ends puts of these keys; no bytes are moved.
fn put(rpc: &mut RpcConnection, batch: usize, depth: usize, keys: &[Vec<u8>]) -> Result<()> {
    let mut started = Vec::with_capacity(keys.len());
    pipeline::<PutStart, _>(
        rpc,
        depth,
        keys.chunks(batch),
        |rpc, keys| {
            let objects = keys.iter().map(|key| NewObject { key: Key(key), len: 4096 });
            rpc.queue::<PutStart>(&PutRequest { writer: 1, ..PutRequest::default() }, objects)
        },
        |results| {
            started.extend(results.map(|result: std::result::Result<Allocation, ErrorCode>| {
                result.map(|a| (a.generation, a.handle))
            }))
        },
    )?;
    let named: std::result::Result<Vec<(u64, u64)>, ErrorCode> = started.into_iter().collect();
    let pairs: Vec<(&[u8], (u64, u64))> = keys.iter().map(Vec::as_slice).zip(named?).collect();
    pipeline::<PutEnd, _>(
        rpc,
        depth,
        pairs.chunks(batch),
        |rpc, pairs| {
            let commits = pairs.iter().map(|&(key, (generation, handle))| Commit {
                key: Key(key),
                generation,
                handle,
                checksum: 7,
            });
            rpc.queue::<PutEnd>(&(), commits)
        },
        |results| assert!(results.into_iter().all(|result| result.is_ok())),
    )
}

fn row(op: &str, batch: usize, depth: usize, requests: usize, took: Duration) {
    let per_s = requests as f64 / took.as_secs_f64();
    println!("{op:<8} {batch:>6} {depth:>6} {per_s:>12.0} {:>12.0}", per_s * batch as f64);
}

/// Keeps up to `depth` requests under way: whenever half of them are answered, as many more are sent.
fn pipeline<'k, O: Operation, T>(
    rpc: &mut RpcConnection,
    depth: usize,
    mut chunks: std::slice::Chunks<'k, T>,
    mut send: impl FnMut(&mut RpcConnection, &'k [T]) -> std::result::Result<u64, store_client::RpcError>,
    mut each: impl FnMut(store_core::Items<'_, O::ResponseItem<'_>>),
) -> Result<()> {
    let mut under_way = 0;
    loop {
        while under_way < depth {
            let Some(chunk) = chunks.next() else { break };
            send(rpc, chunk)?;
            under_way += 1;
        }
        if under_way == 0 {
            return Ok(());
        }
        let low = under_way / 2;
        while under_way > low {
            let frame = rpc.recv()?;
            each(O::decode_response(&frame)?.1);
            under_way -= 1;
        }
    }
}

fn measure_store() -> Result<()> {
    let master = Process::start(&["serve-master"])?;
    let node = Process::start(&["serve-node", &master.says])?;
    for (name, fabrics) in [("shm", Fabrics::SHM), ("tcp", Fabrics::TCP)] {
        println!("\n{name}");
        let mut client = Client::connect(ClientConfig::new(master.says.parse()?).fabrics(fabrics))?;
        for value_bytes in [4 << 10, 1 << 20] {
            measure_raw(&node.says, fabrics, value_bytes)?;
            measure_values(&mut client, name, value_bytes)?;
        }
        println!("{:?}", client.counters());
        measure_tasks(client)?;
    }
    Ok(())
}

/// Measures the engine alone, over as much memory.
fn measure_raw(endpoint: &str, fabrics: Fabrics, value_bytes: usize) -> Result<()> {
    let mut engine = Engine::start(te_engine::Config { fabrics, ..te_engine::Config::default() })?;
    let segment = engine.open_segment(endpoint)?;
    let base = engine.segment_regions(segment)?.first().ok_or("no memory")?.addr;
    let local = engine.alloc_shared(value_bytes, Access::LOCAL)?;
    for op in [Op::Write, Op::Read, Op::Write, Op::Read] {
        let rounds: Vec<Vec<u8>> = (0..100_u64).map(|i| i.to_le_bytes().to_vec()).collect();
        sample(if op == Op::Read { "raw read" } else { "raw write" }, &rounds, value_bytes, |round| {
            let index = u64::from_le_bytes(round.try_into()?);
            let request = TransferRequest {
                op,
                local: LocalAddr::Region(local.id(), 0),
                segment,
                remote_addr: base + (128 << 20) + index * value_bytes as u64,
                len: value_bytes as u64,
            };
            let batch = engine.submit(&[request], None)?;
            engine.wait(batch, None)?;
            Ok(engine.free(batch)?)
        })?;
    }
    Ok(())
}

fn measure_values(client: &mut Client, name: &str, value_bytes: usize) -> Result<()> {
    let rounds = if value_bytes > 1 << 16 { 100 } else { 2_000 };
    let value: Vec<u8> = (0..value_bytes).map(|i| (i * 31) as u8).collect();
    let keys: Vec<Vec<u8>> = (0..rounds).map(|i| format!("{name}-{value_bytes}-{i}").into_bytes()).collect();
    let region = client.alloc(value_bytes)?;
    region.write(0, &value).map_err(|error| format!("{error:?}"))?;
    let range = BufferRange::all(&region);
    let options = PutOptions::default();
    sample("put", &keys, value_bytes, |key| Ok(client.put(key, &value, &options).map(|_| ())?))?;
    sample("get", &keys, value_bytes, |key| match client.get(key)? {
        Some(found) if found == value => Ok(()),
        _ => Err("missed".into()),
    })?;
    sample("get mem", &keys, value_bytes, |key| match client.get_with(Get::new(key, range))? {
        Some(len) if len == value_bytes as u64 => Ok(()),
        _ => Err("missed".into()),
    })?;
    if value_bytes > 1 << 16 {
        measure_parts(client, &keys, value_bytes)?;
    }
    const BATCH: usize = 16;
    let many = client.alloc(BATCH * value_bytes)?;
    let batches: Vec<Vec<u8>> = (0..keys.len() / BATCH).map(|i| i.to_le_bytes().to_vec()).collect();
    sample("get x16", &batches, BATCH * value_bytes, |batch| {
        let first = usize::from_le_bytes(batch.try_into()?) * BATCH;
        let part = |i: usize| BufferRange::part(&many, (i * value_bytes) as u64, value_bytes as u64);
        let mut items: Vec<_> = (0..BATCH).map(|i| Get::new(&keys[first + i], part(i))).collect();
        if client.batch_get(&mut items).is_complete() { Ok(()) } else { Err("missed".into()) }
    })?;
    client.unregister(many.id())?;
    client.batch_remove(&keys.iter().map(Vec::as_slice).collect::<Vec<_>>(), RemoveMode::Force)?;
    let keys: Vec<Vec<u8>> = keys.iter().map(|key| [key, b"-from".as_slice()].concat()).collect();
    for _ in 0..2 {
        // The second pass uses pages that this process has touched.
        sample("put mem", &keys, value_bytes, |key| Ok(client.put(key, range, &options).map(|_| ())?))?;
        client.batch_remove(&keys.iter().map(Vec::as_slice).collect::<Vec<_>>(), RemoveMode::Force)?;
    }
    client.unregister(region.id())?;
    Ok(())
}

/// Parts of objects, each verified by its own checksum chunks.
fn measure_parts(client: &mut Client, keys: &[Vec<u8>], value_bytes: usize) -> Result<()> {
    let into = client.alloc(value_bytes)?;
    let edge = value_bytes as u64 / 2 + 100;
    for (what, offset, len) in [("4K part", edge, 4096), ("256K part", edge & !0xffff, 256 << 10)] {
        sample(what, keys, len as usize, |key| {
            let item = Get::new(key, BufferRange::part(&into, 0, len)).range(offset..offset + len);
            match client.get_with(item)? {
                Some(read) if read == len => Ok(()),
                _ => Err("missed".into()),
            }
        })?;
    }
    Ok(client.unregister(into.id())?)
}

/// Many tasks, one client: waiting operations go together.
fn measure_tasks(client: Client) -> Result<()> {
    const TASKS: usize = 64;
    let client = AsyncClient::start(client)?;
    let value = vec![7; 4096];
    let rounds: Vec<Vec<u8>> = (0..200_u32).map(|round| round.to_le_bytes().to_vec()).collect();
    let key = |round: &[u8], task: usize| [round, &task.to_le_bytes()].concat();
    sample("64 puts", &rounds, TASKS * value.len(), |round| {
        let puts: Vec<_> = (0..TASKS)
            .map(|task| client.put(key(round, task), value.clone(), &PutOptions::default()))
            .collect();
        block_on_all(puts).into_iter().try_for_each(|stored| Ok(stored.map(|_| ())?))
    })?;
    sample("64 gets", &rounds, TASKS * value.len(), |round| {
        let gets: Vec<_> = (0..TASKS).map(|task| client.get(key(round, task))).collect();
        block_on_all(gets).into_iter().try_for_each(|found| found?.map(|_| ()).ok_or_else(|| "missed".into()))
    })?;
    client.stop();
    Ok(())
}

/// A minimal executor: polls all futures whenever it is woken.
fn block_on_all<F: Future + Unpin>(mut futures: Vec<F>) -> Vec<F::Output> {
    struct Unpark(std::thread::Thread);
    impl Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }
    let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
    let mut context = Context::from_waker(&waker);
    let mut outputs: Vec<Option<F::Output>> = futures.iter().map(|_| None).collect();
    while outputs.iter().any(Option::is_none) {
        let mut ready = false;
        for (future, output) in futures.iter_mut().zip(&mut outputs).filter(|(_, output)| output.is_none()) {
            if let Poll::Ready(value) = Pin::new(future).poll(&mut context) {
                *output = Some(value);
                ready = true;
            }
        }
        if !ready {
            std::thread::park();
        }
    }
    outputs.into_iter().flatten().collect()
}

fn sample(
    what: &str,
    keys: &[Vec<u8>],
    value_bytes: usize,
    mut each: impl FnMut(&[u8]) -> Result<()>,
) -> Result<()> {
    let mut us = Vec::with_capacity(keys.len());
    let started = Instant::now();
    for key in keys {
        let begun = Instant::now();
        each(key)?;
        us.push(begun.elapsed().as_secs_f64() * 1e6);
    }
    let took = started.elapsed().as_secs_f64();
    us.sort_by(f64::total_cmp);
    let at = |share: f64| us[((us.len() - 1) as f64 * share) as usize];
    let gb_s = (keys.len() * value_bytes) as f64 / took / 1e9;
    println!(
        "{what:<9} {:>8} B  p50 {:>8.1} us  p99 {:>8.1} us  {gb_s:>6.2} GB/s",
        value_bytes,
        at(0.5),
        at(0.99)
    );
    Ok(())
}
