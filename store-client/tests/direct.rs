//! Disks of nodes that are exported as namespaces: clients read objects there, past the node. The target is
//! our own, which serves the disk's file as it is mapped, or a copy of it.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::fs::{File, OpenOptions};
use std::net::SocketAddr;
use std::os::fd::AsRawFd as _;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use common::{MIB, client_over, master_with, pattern, with};
use store_client::disk::{Caching, DiskFile, FormatOptions};
use store_client::{
    Client, DiskExport, DiskExportList, DiskList, Fabrics, Get, NamespacePlace, Node, NodeConfig,
    NodeDiskConfig, NotDirect, PutOptions, Stats, Store as _,
};
use store_core::MasterConfig;
use te_core::{Access, MemSpan, Memory as _, RegionId, Transport as _};
use te_fabric::testkit::eventually;
use te_nvmeof::{Config, Namespace, NvmeofTransport};

const OBJECT: usize = 256 << 10;
const DISK: u64 = 64 * MIB;

/// Bytes that a target serves: a part of a file, behind bytes of something else, or a copy.
struct Image {
    start: *mut u8,
    bytes: usize,
}

// SAFETY: the mapping belongs to the image; it is reached through registered memory alone.
unsafe impl Send for Image {}

impl Image {
    /// `prefix` bytes of something else, and the file.
    fn of(file: &File, prefix: u64) -> Self {
        let len = file.metadata().unwrap().len() as usize;
        let image = Self::new(prefix as usize + len);
        // SAFETY: a mapping of the file over the end of the one that the image owns.
        unsafe {
            let at = image.start.add(prefix as usize).cast();
            let flags = libc::MAP_SHARED | libc::MAP_FIXED;
            assert_eq!(libc::mmap(at, len, libc::PROT_READ, flags, file.as_raw_fd(), 0), at);
        }
        image
    }

    fn new(bytes: usize) -> Self {
        let (read_write, new) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: a new mapping.
        let start = unsafe { libc::mmap(std::ptr::null_mut(), bytes, read_write, new, -1, 0) };
        assert_ne!(start, libc::MAP_FAILED);
        Self { start: start.cast(), bytes }
    }

    /// A copy of the file, in which `change` may change something.
    fn copy(path: &Path, change: impl FnOnce(&mut [u8])) -> Self {
        let mut bytes = std::fs::read(path).unwrap();
        change(&mut bytes);
        let image = Self::new(bytes.len());
        // SAFETY: the mapping is new and has this length.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), image.start, bytes.len()) };
        image
    }
}

impl Drop for Image {
    fn drop(&mut self) {
        // SAFETY: it was mapped with this length, and the transport is gone.
        unsafe { libc::munmap(self.start.cast(), self.bytes) };
    }
}

/// A target in a thread, which stops with it.
struct Target {
    namespace: Namespace,
    stopping: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Target {
    fn serve(image: Image) -> Self {
        let config = Config { open_to_hosts: true, ..Config::default() };
        let mut transport = NvmeofTransport::new(config).unwrap();
        let id = RegionId::new(0, 1);
        let span = MemSpan::new(image.start, image.bytes);
        // SAFETY: the thread drops the transport before the image, and nothing refers to its bytes.
        unsafe { transport.register(id, span, Access::REMOTE_READ) }.unwrap();
        let namespace = transport.namespace(id).unwrap();
        let stopping = Arc::new(AtomicBool::new(false));
        let stop = Arc::clone(&stopping);
        let thread = std::thread::spawn(move || {
            let (started, image) = (Instant::now(), image);
            while !stop.load(Ordering::Relaxed) {
                // timing: a transport is driven by the time that it is told.
                transport.poll(te_core::Instant::ZERO + started.elapsed(), &mut []);
                std::thread::yield_now();
            }
            drop(transport);
            drop(image);
        });
        Self { namespace, stopping, thread: Some(thread) }
    }

    fn export(&self, path: &Path, offset: u64) -> DiskExport {
        let Namespace { addresses, port, nqn, nsid, .. } = self.namespace.clone();
        let address = SocketAddr::new(addresses[0], port);
        DiskExport { path: path.to_owned(), place: NamespacePlace { address, nqn, nsid, offset } }
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        self.stopping.store(true, Ordering::Relaxed);
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

fn config() -> MasterConfig {
    MasterConfig { lease_ttl_ms: 2_000, lease_guard_ms: 0, demote_ahead: 0.3, ..MasterConfig::default() }
}

/// A file that is a formatted disk.
fn format(path: &Path) {
    let options = FormatOptions { bytes: Some(DISK), caching: Caching::Buffered, ..Default::default() };
    let (file, geometry) = DiskFile::prepare(path, options).unwrap();
    let service = store_client::disk::DiskService::format(file, geometry, Default::default(), 0).unwrap();
    eventually("it is formatted", || service.poll_event().is_some());
    assert!(service.close(Duration::from_secs(10)));
}

fn node_config(master: SocketAddr, disk: &Path, exports: Vec<DiskExport>) -> NodeConfig {
    let listed = NodeDiskConfig { path: disk.to_owned(), bytes: Some(DISK) };
    with(NodeConfig::new("a", master.into(), 8 * MIB).fabrics(Fabrics::TCP), |it| {
        it.disks = DiskList(vec![listed]);
        it.disk_exports = DiskExportList(exports);
        it.stage.memory_bytes = 8 * MIB;
    })
}

fn start(master: SocketAddr, disk: &Path, exports: Vec<DiskExport>) -> Node {
    let node = Node::start(node_config(master, disk, exports)).unwrap();
    eventually("the disk is ready", || node.disks().iter().any(|disk| disk.ready));
    node
}

fn value(number: usize) -> Vec<u8> {
    pattern(number as u64, OBJECT)
}

fn key(number: usize) -> Vec<u8> {
    format!("object-{number}").into_bytes()
}

fn stats(client: &mut Client) -> Stats {
    client.master().stats().unwrap()
}

/// Puts more than fits into memory, slowly enough for the disk.
fn fill(client: &mut Client, numbers: std::ops::Range<usize>) {
    for number in numbers {
        eventually("there is room", || {
            client.put(&key(number), &value(number), &PutOptions::DEFAULT).unwrap_or(false)
        });
        let expected = (number + 1).saturating_sub(24) as u64;
        eventually("the disk keeps up", || stats(client).demotions_total >= expected);
    }
}

/// Reads what is there; every byte is right.
fn read_all(client: &mut Client, numbers: std::ops::Range<usize>) -> usize {
    let mut found = 0;
    for number in numbers {
        if let Some(read) = client.get(&key(number)).unwrap() {
            assert!(read == value(number), "{number}");
            found += 1;
        }
    }
    found
}

fn fallbacks(client: &Client, why: NotDirect) -> u64 {
    let at = NotDirect::COUNTED.iter().position(|counted| *counted == why).unwrap();
    client.counters().direct_fallbacks[at]
}

fn file(path: &Path) -> File {
    OpenOptions::new().read(true).open(path).unwrap()
}

#[test]
fn objects_on_an_exported_disk_are_read_past_its_node() {
    for prefix in [0, MIB + 4_096] {
        let dir = tempfile::tempdir().unwrap();
        let disk = dir.path().join("disk");
        format(&disk);
        let target = Target::serve(Image::of(&file(&disk), prefix));
        let master = master_with(config());
        let node = start(master.rpc_addr(), &disk, vec![target.export(&disk, prefix)]);
        let mut client = client_over(master.rpc_addr(), Fabrics::TCP);
        fill(&mut client, 0..80);
        let on_disk = stats(&mut client).disk_objects;
        assert!(on_disk >= 40, "{on_disk}");
        let before = node.stage().staged_total;
        assert_eq!(read_all(&mut client, 0..80), 80);
        let counters = client.counters();
        assert!(counters.direct_hits >= 40, "{counters:?}");
        assert_eq!((counters.direct_hits, counters.direct_fallbacks), (counters.disk_hits, [0; 5]));
        assert_eq!((counters.replica_failovers, counters.disk_misses), (0, 0));
        assert_eq!(node.stage().staged_total, before, "the node has read nothing for it");
        let text = client.metrics_text();
        assert!(text.contains(&format!("snowskin_client_direct_hits_total {}", counters.direct_hits)));
        assert!(text.contains("snowskin_client_direct_fallbacks_total{reason=\"moved\"} 0"));
        // One that does not want to, and parts of objects.
        let mut other = Client::connect(with(
            store_client::ClientConfig::new(master.rpc_addr().into()).fabrics(Fabrics::TCP),
            |it| it.exported_disks = false,
        ))
        .unwrap();
        read_all(&mut other, 0..80);
        assert_eq!(other.counters().direct_hits, 0);
        let mut part = Vec::new();
        client.get_with(Get::new(&key(1), &mut part).range(70_000..170_000)).unwrap().unwrap();
        assert!(part == value(1)[70_000..170_000]);
        assert_eq!(client.counters().direct_hits, counters.direct_hits + 1);
        node.stop();
    }
}

#[test]
fn extents_that_are_given_up_and_used_again_never_give_other_bytes() {
    let dir = tempfile::tempdir().unwrap();
    let disk = dir.path().join("disk");
    format(&disk);
    let target = Target::serve(Image::of(&file(&disk), 0));
    let master = master_with(config());
    let node = start(master.rpc_addr(), &disk, vec![target.export(&disk, 0)]);
    let mut client = client_over(master.rpc_addr(), Fabrics::TCP);
    fill(&mut client, 0..60);
    let writing = Arc::new(AtomicBool::new(true));
    let (goes_on, address) = (Arc::clone(&writing), master.rpc_addr());
    let reading = std::thread::spawn(move || {
        let mut reader = client_over(address, Fabrics::TCP);
        while goes_on.load(Ordering::Relaxed) {
            read_all(&mut reader, 0..600);
        }
        reader.counters()
    });
    // More than twice what the disk holds.
    fill(&mut client, 60..600);
    writing.store(false, Ordering::Relaxed);
    let counters = reading.join().unwrap();
    assert!(counters.direct_hits > 0 && counters.checksum_mismatches == 0, "{counters:?}");
    assert!(node.disks()[0].stats.counters.reclaimed_total > 60, "extents were given up");
    node.stop();
}

#[test]
fn a_node_does_not_start_with_the_export_of_something_else() {
    let dir = tempfile::tempdir().unwrap();
    let [disk, other] = ["disk", "other"].map(|name| dir.path().join(name));
    [&disk, &other].iter().for_each(|path| format(path));
    let master = master_with(config());
    let target = Target::serve(Image::of(&file(&disk), MIB));
    let foreign = Target::serve(Image::of(&file(&other), 0));
    let short = Target::serve(Image::copy(&disk, |_| {}));
    let refused = |export: DiskExport| {
        let started = Node::start(node_config(master.rpc_addr(), &disk, vec![export]));
        started.map(Node::stop).unwrap_err().to_string()
    };
    for wrong in [target.export(&disk, 0), foreign.export(&disk, 0), short.export(&disk, 4_096)] {
        let error = refused(wrong);
        assert!(error.contains("is not this disk") && error.contains("disk_exports"), "{error}");
    }
    let error = refused(target.export(&other, MIB));
    assert!(error.contains("must name disks of `disks`"), "{error}");
    // A target that is away is no reason: clients find out themselves.
    let mut away = target.export(&disk, MIB);
    away.place.address.set_port(1);
    start(master.rpc_addr(), &disk, vec![away]).stop();
    start(master.rpc_addr(), &disk, vec![target.export(&disk, MIB)]).stop();
}

/// The namespace is an older copy of the disk, and damaged: its headers are right, its data is not.
#[test]
fn what_is_wrong_in_the_namespace_is_read_through_the_node_and_not_reported() {
    let dir = tempfile::tempdir().unwrap();
    let disk = dir.path().join("disk");
    let master = master_with(config());
    let mut client = client_over(master.rpc_addr(), Fabrics::TCP);
    let node = start(master.rpc_addr(), &disk, Vec::new());
    fill(&mut client, 0..80);
    assert_eq!(client.counters().direct_fallbacks, [0; 5], "what is not exported is not counted");
    node.stop();
    eventually("the master notices", || stats(&mut client).disks_away == 1);
    let target = Target::serve(Image::copy(&disk, |bytes| {
        // In each object, somewhere: no extent begins there.
        (MIB as usize + 100_000..bytes.len()).step_by(128 << 10).for_each(|at| bytes[at] ^= 1);
    }));
    let node = start(master.rpc_addr(), &disk, vec![target.export(&disk, 0)]);
    let objects = stats(&mut client).disk_objects as usize;
    let mut client = client_over(master.rpc_addr(), Fabrics::TCP);
    let found = read_all(&mut client, 0..80);
    let counters = client.counters();
    assert!(found >= objects && objects >= 40, "{found} of {objects}");
    assert!(fallbacks(&client, NotDirect::Damaged) >= 40, "{counters:?}");
    assert_eq!(counters.checksum_mismatches, 0, "nothing was reported to the master");
    assert_eq!(stats(&mut client).disk_objects as usize, objects);
    assert_eq!(counters.disk_misses, 0);
    node.stop();
}

#[test]
fn without_its_target_a_disk_is_read_through_its_node() {
    let dir = tempfile::tempdir().unwrap();
    let disk = dir.path().join("disk");
    format(&disk);
    let target = Target::serve(Image::of(&file(&disk), 0));
    let master = master_with(config());
    let node = start(master.rpc_addr(), &disk, vec![target.export(&disk, 0)]);
    let mut client = client_over(master.rpc_addr(), Fabrics::TCP);
    fill(&mut client, 0..80);
    assert!(read_all(&mut client, 0..20) > 0);
    let direct = client.counters().direct_hits;
    assert!(direct > 0);
    drop(target);
    assert_eq!(read_all(&mut client, 0..80), 80);
    let counters = client.counters();
    let missed: u64 = counters.direct_fallbacks.iter().sum();
    assert!((1..=4).contains(&missed), "then it is left alone for a time: {counters:?}");
    assert!(counters.disk_hits > counters.direct_hits, "{counters:?}");
    assert_eq!(counters.disk_misses, 0, "{counters:?}");
    node.stop();
}
