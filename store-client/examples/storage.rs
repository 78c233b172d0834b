//! Objects on storage beside objects in memory of a node over TCP, in the same run: puts and gets.
//!
//! ```text
//! cargo run --release -p store-client --features nvmeof --example storage
//! ```
//!
//! The target of NVMe/TCP is our own, which serves memory from a thread, and nodes and master run in this
//! process: it shows the cost of the path, not that of a disk. Each row is the median of 7 rounds, which
//! alternate between the two.
#![allow(clippy::print_stdout, reason = "prints its result")]
#![allow(clippy::unwrap_used, reason = "a figure that cannot be measured reports the line")]
#![allow(unsafe_code, reason = "registers memory that outlives its transport, and reads a clock")]

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use store_client::{
    BufferRange, Client, ClientConfig, Fabrics, Get, NamespacePlace, Nguid, Node, NodeConfig, Placement, Put,
    PutOptions, RemoveMode, Store as _,
};
use te_core::{Access, MemSpan, Memory as _, RegionId, Transport as _};
use te_nvmeof::{Config, NvmeofTransport};

const ROUNDS: usize = 7;
/// Objects of a round, and their length in bytes: in one batch.
const LARGE: (usize, usize) = (64, 1 << 20);
/// And one at a time.
const SMALL: (usize, usize) = (2_000, 4 << 10);
const RANGE: u64 = 256 << 20;

fn main() {
    let fabrics: Fabrics = "nvmeof,tcp".parse().unwrap();
    let config = store_master::Config {
        rpc_listen: "127.0.0.1:0".parse().unwrap(),
        http_listen: None,
        ..store_master::Config::default()
    };
    let master = store_master::MasterServer::bind(config).unwrap().spawn().unwrap();
    let memory = Box::leak(vec![0_u64; RANGE as usize / 8].into_boxed_slice());
    let mut target = NvmeofTransport::new(Config { open_to_hosts: true, ..Config::default() }).unwrap();
    let id = RegionId::new(0, 1);
    let span = MemSpan::new(memory.as_mut_ptr().cast(), RANGE as usize);
    // SAFETY: the memory is never freed, and nothing refers to it from here on.
    unsafe { target.register(id, span, Access::REMOTE_READ | Access::REMOTE_WRITE) }.unwrap();
    let namespace = target.namespace(id).unwrap();
    let stop = Arc::new(AtomicBool::new(false));
    let stopped = Arc::clone(&stop);
    let serving = std::thread::spawn(move || {
        let started = Instant::now();
        while !stopped.load(Ordering::Relaxed) {
            let now = te_core::Instant::ZERO + started.elapsed();
            target.poll(now, &mut []);
            std::thread::yield_now();
        }
    });
    let of = |name: &str| NodeConfig::new(name, master.rpc_addr().into(), RANGE).fabrics(fabrics);
    let in_memory = Node::start(of("memory").fabrics(Fabrics::TCP)).unwrap();
    let mut config = of("storage");
    let address = SocketAddr::new(namespace.addresses[0], namespace.port);
    let place = NamespacePlace { address, nqn: namespace.nqn, nsid: namespace.nsid, offset: 0 };
    (config.storage.namespace, config.storage.nguid) = (Some(place), Some(Nguid(namespace.nguid)));
    config.storage.bytes = RANGE;
    let on_storage = Node::start(config).unwrap();
    let mut client = Client::connect(ClientConfig::new(master.rpc_addr().into()).fabrics(fabrics)).unwrap();
    let buffer = client.alloc(LARGE.0 * LARGE.1).unwrap();
    let mut rows = [[const { Vec::new() }; 6], [const { Vec::new() }; 6]];
    for _ in 0..ROUNDS {
        for (node, row) in [&in_memory, &on_storage].into_iter().zip(&mut rows) {
            let segment = node.status().segment.unwrap();
            let options = PutOptions { placement: Placement::on(segment), ..PutOptions::DEFAULT };
            let figures = round(&mut client, &buffer, &options);
            row.iter_mut().zip(figures).for_each(|(row, figure)| row.push(figure));
        }
    }
    stop.store(true, Ordering::Relaxed);
    serving.join().unwrap();
    let names = [
        "put, 64 x 1 MiB",
        "get, 64 x 1 MiB",
        "put, CPU",
        "get, CPU",
        "put of 4 KiB, p50",
        "get of 4 KiB, p50",
    ];
    let units = ["GB/s", "GB/s", "CPU-s/GiB", "CPU-s/GiB", "us", "us"];
    println!("{:<20} {:>10} {:>10} {:>8}", "", "TCP", "NVMe/TCP", "ratio");
    for (at, name) in names.iter().enumerate() {
        let [tcp, storage] = [0, 1].map(|of| median(&mut rows[of][at]));
        println!("{name:<20} {tcp:>10.2} {storage:>10.2} {:>8.2}  {}", storage / tcp, units[at]);
    }
    // The target is gone; nothing is to be unmounted from it.
    std::process::exit(0);
}

/// Rates of puts and gets of large objects, GB/s; their CPU time, s/GiB; times of small ones, µs.
fn round(client: &mut Client, buffer: &te_engine::SharedRegion, options: &PutOptions) -> [f64; 6] {
    let (count, len) = LARGE;
    let keys: Vec<String> = (0..count).map(|at| format!("large{at}")).collect();
    let part = |at: usize| BufferRange::part(buffer, (at * len) as u64, len as u64);
    let bytes = (count * len) as f64;
    let mut figures = [0.0; 6];
    for (at, puts) in [true, false].into_iter().enumerate() {
        let (began, cpu) = (Instant::now(), cpu_time());
        let tally = if puts {
            let mut items: Vec<_> =
                keys.iter().enumerate().map(|(at, key)| Put::new(key, part(at))).collect();
            client.batch_put(&mut items, options)
        } else {
            let mut items: Vec<_> =
                keys.iter().enumerate().map(|(at, key)| Get::new(key, part(at))).collect();
            client.batch_get(&mut items)
        };
        assert!(tally.is_complete(), "{tally:?}");
        figures[at] = bytes / began.elapsed().as_secs_f64() / 1e9;
        figures[2 + at] = (cpu_time() - cpu).as_secs_f64() / (bytes / f64::from(1 << 30));
    }
    let value = vec![7; SMALL.1];
    let mut into = Vec::new();
    let [mut puts, mut gets] = [(); 2].map(|()| Vec::with_capacity(SMALL.0));
    for _ in 0..SMALL.0 {
        let began = Instant::now();
        assert!(client.put(b"small", &value, options).unwrap());
        puts.push(began.elapsed().as_secs_f64() * 1e6);
        let began = Instant::now();
        assert!(client.get_with(Get::new(b"small", &mut into)).unwrap().is_some());
        gets.push(began.elapsed().as_secs_f64() * 1e6);
        client.remove(b"small", RemoveMode::Force).unwrap();
    }
    (figures[4], figures[5]) = (median(&mut puts), median(&mut gets));
    let keys: Vec<&[u8]> = keys.iter().map(String::as_bytes).collect();
    client.batch_remove(&keys, RemoveMode::Force).unwrap();
    figures
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// CPU time of this process.
fn cpu_time() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the clock exists, and `time` is valid for the call.
    unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &raw mut time) };
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}
