//! A process that has no descriptor left for one more peer. In a test binary of its own: it takes all there are, and measures the
//! CPU time of the process.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]

mod common;

use std::fs::File;
use std::net::SocketAddrV4;
use std::os::fd::AsRawFd;
use std::time::Duration;

use common::*;
use nix::sys::resource::{Resource, UsageWho, getrusage, setrlimit};
use nix::sys::socket::{AddressFamily, SockFlag, SockType, SockaddrIn, UnixAddr, connect, socket};
use te_core::{Access, Op};
use te_engine::Fabrics;

#[test]
fn a_peer_that_cannot_be_accepted_costs_no_cpu_and_others_come_in_later() {
    setrlimit(Resource::RLIMIT_NOFILE, 256, 256).unwrap();
    let (here, there) = (engine(Fabrics::SHM), engine(Fabrics::SHM));
    let remote = there.alloc_shared(4096, EVERYTHING).unwrap();
    let local = here.alloc_shared(4096, Access::LOCAL).unwrap();
    let stranger = socket(AddressFamily::Unix, SockType::SeqPacket, SockFlag::empty(), None).unwrap();
    let caller = socket(AddressFamily::Inet, SockType::Stream, SockFlag::empty(), None).unwrap();
    let port: SocketAddrV4 = there.name().parse().unwrap();
    let name = listener();
    let taken: Vec<File> = std::iter::from_fn(|| File::open("/dev/null").ok()).collect();
    connect(stranger.as_raw_fd(), &UnixAddr::new_abstract(name.as_bytes()).unwrap()).unwrap();
    // And one at the control port.
    connect(caller.as_raw_fd(), &SockaddrIn::from(port)).unwrap();
    let before = cpu();
    std::thread::sleep(Duration::from_secs(1));
    let burnt = cpu() - before;
    // A worker that is woken again and again takes all of the second.
    assert!(burnt < Duration::from_millis(60), "a peer at the door took {burnt:?} of CPU in a second");
    drop(taken);
    drop((stranger, caller));
    let segment = here.open_segment(there.name()).unwrap();
    let one = request(Op::Read, (local.id(), 0), segment, remote.addr(), 4096);
    here.submit(&[one], Some(Duration::from_secs(15))).unwrap().wait(None).unwrap();
}

/// The abstract name under which this process listens: it has one exporting engine.
fn listener() -> String {
    let links = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
    let targets: Vec<_> = links.filter_map(|link| std::fs::read_link(link.path()).ok()).collect();
    let ours =
        |inode: &str| targets.iter().any(|target| target.as_os_str() == format!("socket:[{inode}]").as_str());
    let sockets = std::fs::read_to_string("/proc/net/unix").unwrap();
    let mut names = sockets.lines().filter_map(|line| {
        // Num RefCount Protocol Flags Type St Inode Path
        let fields: Vec<&str> = line.split_whitespace().collect();
        let [_, _, _, _, _, _, inode, path] = fields[..] else { return None };
        path.strip_prefix("@snowskin-").filter(|_| ours(inode)).map(|rest| format!("snowskin-{rest}"))
    });
    names.next().expect("an engine that exports shared memory listens")
}

/// User and system time of this process. Opens nothing.
fn cpu() -> Duration {
    let usage = getrusage(UsageWho::RUSAGE_SELF).unwrap();
    let time = |time: nix::sys::time::TimeVal| {
        Duration::from_micros(time.tv_sec() as u64 * 1_000_000 + time.tv_usec() as u64)
    };
    time(usage.user_time()) + time(usage.system_time())
}
