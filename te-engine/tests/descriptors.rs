//! A process that has no file descriptor left for another peer. The only test of this binary, because it uses
//! up all file descriptors and measures the CPU time of the process.
#![allow(clippy::unwrap_used, reason = "a test that fails reports the line")]

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
    let peer = socket(AddressFamily::Unix, SockType::SeqPacket, SockFlag::empty(), None).unwrap();
    let caller = socket(AddressFamily::Inet, SockType::Stream, SockFlag::empty(), None).unwrap();
    let port: SocketAddrV4 = there.name().parse().unwrap();
    let name = listener();
    let taken: Vec<File> = std::iter::from_fn(|| File::open("/dev/null").ok()).collect();
    connect(peer.as_raw_fd(), &UnixAddr::new_abstract(name.as_bytes()).unwrap()).unwrap();
    // Another connection at the control port.
    connect(caller.as_raw_fd(), &SockaddrIn::from(port)).unwrap();
    let before = cpu();
    std::thread::sleep(Duration::from_secs(1)); // timing: the CPU time of one second is measured
    let used = cpu() - before;
    // A worker that is woken again and again would use the whole second.
    assert!(used < Duration::from_millis(60), "waiting connections cost {used:?} of CPU in one second");
    drop(taken);
    drop((peer, caller));
    let segment = here.open_segment(there.name()).unwrap();
    let one = request(Op::Read, (local.id(), 0), segment, remote.addr(), 4096);
    here.submit(&[one], Some(Duration::from_secs(15))).unwrap().wait(None).unwrap();
}

/// The abstract name under which the exporting engine of this process listens.
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

/// User and system time of this process. Opens no file.
fn cpu() -> Duration {
    let usage = getrusage(UsageWho::RUSAGE_SELF).unwrap();
    let time = |time: nix::sys::time::TimeVal| {
        Duration::from_micros(time.tv_sec() as u64 * 1_000_000 + time.tv_usec() as u64)
    };
    time(usage.user_time()) + time(usage.system_time())
}
