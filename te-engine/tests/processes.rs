//! Engines in several processes: this binary runs itself again as the peer.
#![allow(clippy::unwrap_used, reason = "a test that fails reports the line")]

mod common;

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use common::*;
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;
use te_core::{Access, ExpelMode, Op, Status};
use te_engine::{
    Config, Expulsion, Fabrics, Liveness, Populate, RegisterError, SegmentError, SharedRegion,
    TransferEngine, TransferError, TransferRequest,
};

const LONG: Option<Duration> = Some(Duration::from_secs(15));
const PEER_BYTES: usize = 32 << 20;
const ROLE: &str = "TE_ENGINE_TEST_PEER";

#[test]
fn bytes_go_to_another_process_and_back() {
    for (name, fabrics) in each_remote_fabric() {
        let mut peer = Peer::start(fabrics, "127.0.0.1:0");
        let here = engine(fabrics);
        let len = 5 << 20;
        let local = here.alloc_shared(2 * len, Access::LOCAL).unwrap();
        let content = pattern(1, len);
        local.write(0, &content).unwrap();
        let segment = here.open_segment(&peer.name).unwrap();
        let at = peer.addr + 4321;
        let write = request(Op::Write, (local.id(), 0), segment, at, len as u64);
        here.submit(&[write], None).unwrap().wait(LONG).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_eq!(
            peer.query(&format!("sum 4321 {len}")),
            sum(&content).to_string(),
            "{name}: the peer has them"
        );
        let read = request(Op::Read, (local.id(), len as u64), segment, at, len as u64);
        here.submit(&[read], None).unwrap().wait(LONG).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert!(bytes(&local)[len..] == content, "{name}: and returns them");
        let used: Vec<_> =
            here.stats().rails.iter().filter(|rail| rail.bytes > 0).map(|rail| rail.name).collect();
        assert_eq!(used, [if name == "tcp" { "tcp" } else { "shm" }], "{name}");
        let fence = here.fence(segment, LONG).unwrap();
        fence.wait(LONG).unwrap_or_else(|error| panic!("{name}: fence: {error}"));
    }
}

#[test]
fn a_peer_killed_in_mid_transfer_ends_every_batch_and_nothing_else() {
    for (name, fabrics) in each_remote_fabric() {
        let mut peer = Peer::start(fabrics, "127.0.0.1:0");
        let mut other = Peer::start(fabrics, "127.0.0.1:0");
        let here = engine(fabrics);
        let local = here.alloc_shared(PEER_BYTES, Access::LOCAL).unwrap();
        let (segment, healthy) =
            (here.open_segment(&peer.name).unwrap(), here.open_segment(&other.name).unwrap());
        let whole = |segment, addr, op| -> Vec<TransferRequest> {
            let piece = 1 << 20;
            (0..PEER_BYTES as u64 / piece)
                .map(|i| request(op, (local.id(), i * piece), segment, addr + i * piece, piece))
                .collect()
        };
        // Over shared memory, a dead peer's memory can be used until its death is detected.
        let mut failed = None;
        let mut killed = false;
        eventually("the death is detected", || {
            let op = if killed { Op::Write } else { Op::Read };
            let transfers: Vec<_> =
                (0..4).map(|_| here.submit(&whole(segment, peer.addr, op), LONG).unwrap()).collect();
            if !killed {
                peer.kill();
                killed = true;
            }
            for transfer in transfers {
                match transfer.wait(LONG) {
                    Ok(_) => {}
                    Err(TransferError::Ended { status: Status::Failed, error, .. }) => failed = Some(error),
                    Err(error) => panic!("{name}: {error:?}"),
                }
            }
            failed.is_some()
        });
        assert!(failed.unwrap().kind.is_retryable_elsewhere(), "{name}: {failed:?}");
        assert_eq!(here.stats().batches, 0, "{name}: every batch has ended");
        let transfer = here.submit(&whole(healthy, other.addr, Op::Write), LONG).unwrap();
        transfer.wait(None).unwrap_or_else(|error| panic!("{name}: another peer is not affected: {error}"));
        assert_eq!(here.probe(segment, Duration::from_secs(5)), Ok(Liveness::Unreachable), "{name}");
        assert!(matches!(here.refresh_segment(segment), Err(SegmentError::Unreachable { .. })), "{name}");
        here.unregister(local.id()).unwrap();
        drop(other.query("sum 0 1"));
    }
}

#[test]
fn a_restarted_peer_is_refused_under_its_old_handle_by_both_incarnations() {
    for (name, fabrics) in each_remote_fabric() {
        // The peer returns to its address, so no other process may get its port meanwhile: those use
        // 127.0.0.1.
        let mut peer = Peer::start(fabrics, "127.0.0.9:0");
        let here = engine(fabrics);
        let local = here.alloc_shared(4096, Access::LOCAL).unwrap();
        let old = here.open_segment(&peer.name).unwrap();
        let Ok(Liveness::Alive { incarnation: expected }) = here.probe(old, Duration::from_secs(5)) else {
            panic!("{name}: it is alive")
        };
        let read = request(Op::Read, (local.id(), 0), old, peer.addr, 4096);
        here.submit(&[read], LONG).unwrap().wait(None).unwrap();
        peer.kill();
        let address = peer.name.clone();
        drop(peer);
        let mut peer = Peer::start(fabrics, &address);
        assert_eq!(peer.name, address);
        // The restart is not known here yet: requests fail, and never read from the new process.
        local.write(0, &[7; 4096]).unwrap();
        eventually("the old connection is detected as dead", || {
            here.submit(&[read], LONG).unwrap().wait(None).is_err()
        });
        let error = here.refresh_segment(old).unwrap_err();
        let SegmentError::Restarted { found, .. } = error else { panic!("{name}: {error:?}") };
        assert_ne!(found, expected);
        let message = format!(
            "segment {address:?} restarted (incarnation {found}, expected {expected}): open it again"
        );
        assert_eq!(error.to_string(), message, "{name}");
        assert_eq!(
            here.probe(old, Duration::from_secs(5)),
            Ok(Liveness::Restarted { expected, found }),
            "{name}"
        );
        assert_eq!(here.notify(old, "hello", b""), Err(error.clone()), "{name}");
        let refused = here.submit(&[read], LONG).unwrap().wait(None);
        assert_eq!(refused, Err(TransferError::Segment { index: 0, source: error }), "{name}");
        let new = here.open_segment(&address).unwrap();
        assert_ne!(new, old);
        let read = request(Op::Read, (local.id(), 0), new, peer.addr, 4096);
        here.submit(&[read], LONG).unwrap().wait(None).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_eq!(sum(&bytes(&local)).to_string(), peer.query("sum 0 4096"), "{name}");
        here.close_segment(old).unwrap();
    }
}

#[test]
fn memory_belongs_to_its_owner_alone_after_unregister_returned() {
    for (name, fabrics) in each_remote_fabric() {
        // The peer is alive and ends its operation; on a busy machine, late.
        let here = TransferEngine::start(Config { drain_ms: 10_000, ..config(fabrics) }).unwrap();
        for round in 0..3u8 {
            let len = 1 << 20;
            let region = here.alloc_shared(len, EVERYTHING).unwrap();
            let ours = vec![round + 1; len];
            region.write(0, &ours).unwrap();
            let mut peer = Peer::start(fabrics, "127.0.0.1:0");
            // It reads all and writes the same bytes back, over and over.
            peer.send(&format!("hammer {} {} {len}", here.name(), region.addr()));
            eventually("the peer has begun", || peer.query("rounds").parse::<u64>().unwrap() > 3);
            here.unregister(region.id()).unwrap_or_else(|error| panic!("{name}: {error}"));
            // What a late write of the peer would undo, and a late read would see.
            region.write(0, &vec![0xEE; len]).unwrap();
            eventually("the peer is refused", || peer.query("refused") == "true");
            assert!(bytes(&region) == vec![0xEE; len], "{name}: the peer wrote after unregister");
            assert_eq!(
                peer.query("seen"),
                format!("{}", round + 1),
                "{name}: the peer read after unregister"
            );
        }
    }
}

#[test]
fn a_peer_killed_while_it_uses_memory_does_not_keep_it_registered() {
    for (name, fabrics) in each_remote_fabric() {
        let here = engine(fabrics);
        for _ in 0..3 {
            let len = 8 << 20;
            let region = here.alloc_shared(len, EVERYTHING).unwrap();
            let mut peer = Peer::start(fabrics, "127.0.0.1:0");
            peer.send(&format!("hammer {} {} {len}", here.name(), region.addr()));
            eventually("the peer has begun", || peer.query("rounds").parse::<u64>().unwrap() > 1);
            peer.kill();
            eventually("the memory is unregistered", || match here.unregister(region.id()) {
                Ok(()) => true,
                Err(error) => {
                    assert!(error.to_string().contains("peer"), "{name}: {error}");
                    false
                }
            });
        }
        assert_eq!(here.stats().regions, 0);
    }
}

#[test]
fn peers_notify_each_other_and_limits_hold() {
    let mut config = config(Fabrics::SHM);
    config.control.notifications_max = 3;
    config.control.notification_bytes_max = 1000;
    let here = TransferEngine::start(config).unwrap();
    let mut peer = Peer::start(Fabrics::SHM, "127.0.0.1:0");
    for message in ["one", "two", "three"] {
        assert_eq!(peer.query(&format!("notify {} {message}", here.name())), "ok");
    }
    assert!(
        peer.query(&format!("notify {} four", here.name())).contains("its queue of notifications is full")
    );
    let taken: Vec<_> = here.take_notifications().into_iter().map(|one| (one.name, one.message)).collect();
    let expected = ["one", "two", "three"].map(|text| ("test".to_string(), text.as_bytes().to_vec()));
    assert_eq!(taken, expected);
    assert!(here.take_notifications().is_empty());
    assert_eq!(here.stats().notifications_refused, 1);
    let long = "x".repeat(997);
    assert!(peer.query(&format!("notify {} {long}", here.name())).contains("longer than"));
    assert_eq!(peer.query(&format!("notify {} {}", here.name(), &long[1..])), "ok");
    assert_eq!(here.take_notifications().len(), 1);
}

#[test]
fn a_writer_that_is_stopped_in_the_middle_of_a_copy_is_not_gone_until_it_continues() {
    for (name, fabrics) in each_remote_fabric() {
        let here = engine(fabrics);
        let len = 4 << 20;
        let region = here.alloc_shared(len, EVERYTHING).unwrap();
        let (mut inside, mut outside) = (0, 0);
        // Where a writer is when it is stopped is chance; mostly it copies. Over TCP it never touches the
        // target's memory: the target does.
        while inside < 2 && (name != "tcp" || outside < 3) {
            assert!(outside < 200, "{name}: no writer was ever stopped in the middle of a copy");
            let mut peer = Peer::start(fabrics, "127.0.0.1:0");
            let identity = peer.query("identity").parse().unwrap();
            peer.send(&format!("flood {} {} {len}", here.name(), region.addr()));
            eventually("the peer has begun", || peer.query("rounds").parse::<u64>().unwrap() > 0);
            assert_eq!(here.expel(identity, ExpelMode::SpareConnected), Ok(Expulsion::Connected), "{name}");
            peer.stop();
            assert_eq!(
                here.expel(identity, ExpelMode::SpareConnected),
                Ok(Expulsion::Connected),
                "{name}: stopped is not gone"
            );
            if name != "tcp" && here.expel(identity, ExpelMode::Force) == Ok(Expulsion::Underway) {
                inside += 1;
                for _ in 0..50 {
                    std::thread::sleep(Duration::from_millis(2)); // timing: it has to stay so for a while
                    let may_write = here.expel(identity, ExpelMode::Force);
                    assert_eq!(may_write, Ok(Expulsion::Underway), "{name}: it may still write");
                }
                peer.resume();
            } else {
                outside += 1;
            }
            eventually("it is gone", || match here.expel(identity, ExpelMode::Force).unwrap() {
                Expulsion::Gone => true,
                other => {
                    assert_eq!(other, Expulsion::Underway, "{name}");
                    false
                }
            });
            assert_eq!(here.expel(identity, ExpelMode::SpareConnected), Ok(Expulsion::Gone), "{name}");
            // The space is used for something else from here on.
            region.write(0, &vec![0x11; len]).unwrap();
            peer.resume();
            eventually("the peer is refused", || peer.query("refused") == "true");
            // Further attempts are refused, too, and in the end with the reason.
            eventually("the peer gets the reason", || {
                peer.send(&format!("flood {} {} {len}", here.name(), region.addr()));
                eventually("the peer is refused again", || peer.query("refused") == "true");
                peer.query("error").contains("a peer expelled this process")
            });
            assert!(
                bytes(&region) == vec![0x11; len],
                "{name}: a byte landed in space that was declared free"
            );
        }
    }
}

#[test]
fn a_writer_that_is_killed_while_it_is_stopped_is_gone() {
    let here = engine(Fabrics::SHM);
    let len = 4 << 20;
    let region = here.alloc_shared(len, EVERYTHING).unwrap();
    let mut other = Peer::start(Fabrics::SHM, "127.0.0.1:0");
    other.send(&format!("hammer {} {} {len}", here.name(), region.addr()));
    eventually("the other has begun", || other.query("rounds").parse::<u64>().unwrap() > 0);
    for _ in 0..4 {
        let mut peer = Peer::start(Fabrics::SHM, "127.0.0.1:0");
        let identity = peer.query("identity").parse().unwrap();
        peer.send(&format!("flood {} {} {len}", here.name(), region.addr()));
        eventually("the peer has begun", || peer.query("rounds").parse::<u64>().unwrap() > 0);
        peer.stop();
        peer.kill();
        eventually("its death is detected", || {
            here.expel(identity, ExpelMode::SpareConnected) == Ok(Expulsion::Gone)
        });
    }
    let rounds = other.query("rounds");
    eventually("the other continues", || other.query("rounds") != rounds);
    assert_eq!(other.query("refused"), "false");
}

#[test]
fn memory_that_a_stopped_peer_may_use_is_quarantined_and_its_pages_are_freed() {
    let here = TransferEngine::start(Config { drain_ms: 50, ..config(Fabrics::SHM) }).unwrap();
    let len = 16 << 20;
    let mut tries = 0;
    let mut peer = loop {
        tries += 1;
        assert!(tries < 200, "no peer was ever stopped in the middle of a copy");
        let region = here.alloc_shared_with(len, EVERYTHING, Populate::Now).unwrap();
        let mut peer = Peer::start(Fabrics::SHM, "127.0.0.1:0");
        peer.send(&format!("flood {} {} {len}", here.name(), region.addr()));
        eventually("the peer has begun", || peer.query("rounds").parse::<u64>().unwrap() > 0);
        peer.stop();
        match here.unregister(region.id()) {
            Ok(()) => continue,
            Err(error) => assert_eq!(error, RegisterError::Busy { requests: 0 }),
        }
        assert!(resident(region.addr()) >= len as u64);
        let addr = region.addr();
        here.quarantine_shared(region).unwrap();
        assert_eq!(resident(addr), 0, "its pages are returned to the system");
        break peer;
    };
    let stats = here.stats();
    assert_eq!((stats.quarantined_regions, stats.quarantined_region_bytes), (1, len as u64));
    // The owner continues with other memory meanwhile.
    let fresh = here.alloc_shared(len, EVERYTHING).unwrap();
    fresh.write(0, &vec![0x22; len]).unwrap();
    let mut other = Peer::start(Fabrics::SHM, "127.0.0.1:0");
    other.send(&format!("hammer {} {} {len}", here.name(), fresh.addr()));
    eventually("another peer is served", || other.query("rounds").parse::<u64>().unwrap() > 1);
    assert_eq!(here.stats().quarantined_regions, 1);
    peer.resume();
    eventually("the last copy has ended", || here.stats().quarantined_regions == 0);
    assert_eq!(here.stats().regions, 1);
    eventually("the peer is refused", || peer.query("refused") == "true");
    assert_eq!(other.query("seen"), format!("{}", 0x22));
}

#[test]
fn memory_that_is_registered_again_is_the_same_and_old_grants_do_not_reach_it() {
    for (name, fabrics) in each_remote_fabric() {
        let here = TransferEngine::start(Config { drain_ms: 10_000, ..config(fabrics) }).unwrap();
        let len = 4 << 20;
        let first = here.alloc_shared(len, EVERYTHING).unwrap();
        let content = pattern(3, len);
        first.write(0, &content).unwrap();
        // A peer that has mapped the memory, and is stopped while it is idle, so that it misses the
        // revocation of its grant.
        let mut idle = Peer::start(fabrics, "127.0.0.1:0");
        assert_eq!(
            idle.query(&format!("read {} {} {len}", here.name(), first.addr())),
            sum(&content).to_string()
        );
        idle.stop();
        let mut region = first;
        for _ in 0..4 {
            assert!(matches!(here.reregister(&region, EVERYTHING), Err(RegisterError::Overlap { .. })));
            here.unregister(region.id()).unwrap_or_else(|error| panic!("{name}: {error}"));
            let again = here.reregister(&region, EVERYTHING).unwrap();
            assert_ne!(again.id(), region.id());
            assert_eq!(again.addr(), region.addr());
            region = again;
        }
        assert!(bytes(&region) == content, "{name}: the contents stay");
        assert_eq!((here.stats().regions, here.stats().registered_bytes), (1, len as u64));
        idle.resume();
        // Its old grant does not reach the memory; a new one does.
        assert_eq!(idle.query(&format!("write-old {} 4096", region.addr())), "refused", "{name}");
        assert!(bytes(&region) == content, "{name}: nothing was written through an old grant");
        assert_eq!(
            idle.query(&format!("read {} {} {len}", here.name(), region.addr())),
            sum(&content).to_string()
        );
    }
}

/// Bytes of the memory mapped at `addr` that are resident.
fn resident(addr: u64) -> u64 {
    let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let mut lines = maps.lines().skip_while(|line| !line.starts_with(&format!("{addr:x}-")));
    let line = lines.find(|line| line.starts_with("Rss:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() * 1024
}

/// Not a test but the peer's process. Does nothing unless `ROLE` is set.
#[test]
fn peer() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let (fabrics, listen) = role.split_once(' ').unwrap();
    let fabrics = fabrics.parse().unwrap();
    let engine =
        TransferEngine::start(Config { fabrics, listen: listen.parse().unwrap(), ..Config::default() })
            .unwrap();
    let region = engine.alloc_shared(PEER_BYTES, EVERYTHING).unwrap();
    region.write(0, &pattern(u64::from(std::process::id()), 1 << 20)).unwrap();
    reply(&format!("{} {}", engine.name(), region.addr()));
    let mut hammer = None;
    let mut opened = None;
    for line in std::io::stdin().lines() {
        let line = line.unwrap();
        let words: Vec<&str> = line.split(' ').collect();
        let number = |index: usize| words[index].parse::<u64>().unwrap();
        match words[0] {
            "sum" => {
                let mut out = vec![0; number(2) as usize];
                region.read(number(1), &mut out).unwrap();
                reply(&sum(&out).to_string());
            }
            "notify" => {
                let segment = engine.open_segment(words[1]).unwrap();
                match engine.notify(segment, "test", words[2].as_bytes()) {
                    Ok(()) => reply("ok"),
                    Err(error) => reply(&error.to_string()),
                }
            }
            "identity" => reply(&engine.identity().to_string()),
            "hammer" => hammer = Some(Hammer::start(&engine, words[1], number(2), number(3), true)),
            "flood" => hammer = Some(Hammer::start(&engine, words[1], number(2), number(3), false)),
            "error" => reply(&hammer.as_ref().unwrap().error()),
            "read" => {
                let segment = engine.open_segment(words[1]).unwrap();
                let len = number(3) as usize;
                let local = engine.alloc_shared(len, Access::LOCAL).unwrap();
                let read = request(Op::Read, (local.id(), 0), segment, number(2), number(3));
                engine.submit(&[read], LONG).unwrap().wait(None).unwrap();
                reply(&sum(&bytes(&local)).to_string());
                opened = Some(segment);
            }
            "write-old" => {
                let local = engine.alloc_shared(number(2) as usize, Access::LOCAL).unwrap();
                let write = request(Op::Write, (local.id(), 0), opened.unwrap(), number(1), number(2));
                let written = engine.submit(&[write], LONG).unwrap().wait(None);
                reply(if written.is_err() { "refused" } else { "written" });
            }
            "rounds" => reply(&hammer.as_ref().unwrap().rounds().to_string()),
            "refused" => reply(&hammer.as_ref().unwrap().refused().to_string()),
            "seen" => reply(&hammer.as_ref().unwrap().seen().to_string()),
            other => panic!("no such command: {other}"),
        }
    }
}

/// Reads a region of another process and writes it back, until it is refused; or only writes, bytes that no
/// other process does.
struct Hammer {
    state: std::sync::Arc<std::sync::Mutex<(u64, bool, u8, String)>>,
}

impl Hammer {
    fn start(engine: &TransferEngine, name: &str, addr: u64, len: u64, reads: bool) -> Self {
        let local = engine.alloc_shared(len as usize, Access::LOCAL).unwrap();
        let segment = engine.open_segment(name).unwrap();
        let state = std::sync::Arc::<std::sync::Mutex<(u64, bool, u8, String)>>::default();
        if !reads {
            local.write(0, &vec![0xDD; len as usize]).unwrap();
        }
        let (engine, shared) = (engine.clone(), std::sync::Arc::clone(&state));
        std::thread::spawn(move || {
            loop {
                let one = |op| request(op, (local.id(), 0), segment, addr, len);
                let ops = if reads { Op::Read } else { Op::Write };
                let read = engine.submit(&[one(ops)], None).unwrap().wait(None);
                let written = read.and_then(|_| {
                    let seen = uniform(&local);
                    let mut state = shared.lock().unwrap();
                    state.0 += 1;
                    // 255: the bytes differ, or are not those of the last round.
                    state.2 = if state.2 == 0 || state.2 == seen { seen } else { 255 };
                    drop(state);
                    engine.submit(&[one(Op::Write)], None).unwrap().wait(None)
                });
                if let Err(error) = written {
                    let mut state = shared.lock().unwrap();
                    (state.1, state.3) = (true, error.to_string());
                    return;
                }
            }
        });
        Self { state }
    }

    fn rounds(&self) -> u64 {
        self.state.lock().unwrap().0
    }

    fn refused(&self) -> bool {
        self.state.lock().unwrap().1
    }

    fn seen(&self) -> u8 {
        self.state.lock().unwrap().2
    }

    fn error(&self) -> String {
        self.state.lock().unwrap().3.clone()
    }
}

/// The byte of which all of a region consists; 255 if its bytes differ.
fn uniform(region: &SharedRegion) -> u8 {
    let all = bytes(region);
    if all.iter().all(|&byte| byte == all[0]) { all[0] } else { 255 }
}

fn sum(bytes: &[u8]) -> u64 {
    bytes
        .iter()
        .fold(0xcbf2_9ce4_8422_2325, |hash, &byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3))
}

/// Writes a line to the parent. The test harness writes to the same pipe, so the line is marked.
fn reply(text: &str) {
    let mut out = std::io::stdout().lock();
    writeln!(out, "\n@{text}").unwrap();
    out.flush().unwrap();
}

/// A peer process. Killed when dropped.
struct Peer {
    child: Child,
    stdin: ChildStdin,
    lines: mpsc::Receiver<String>,
    name: String,
    addr: u64,
}

impl Peer {
    fn start(fabrics: Fabrics, listen: &str) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "peer", "--nocapture"])
            .env(ROLE, format!("{fabrics} {listen}"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let stdin = child.stdin.take().unwrap();
        let stdout = BufReader::new(child.stdout.take().unwrap());
        let (sender, lines) = mpsc::channel();
        std::thread::spawn(move || {
            for line in stdout.lines().map_while(Result::ok) {
                if let Some(text) = line.strip_prefix('@') {
                    let _ = sender.send(text.to_string());
                }
            }
        });
        let mut peer = Self { child, stdin, lines, name: String::new(), addr: 0 };
        let hello = peer.receive();
        let (name, addr) = hello.split_once(' ').unwrap();
        (peer.name, peer.addr) = (name.into(), addr.parse().unwrap());
        peer
    }

    fn send(&mut self, command: &str) {
        writeln!(self.stdin, "{command}").unwrap();
    }

    fn receive(&mut self) -> String {
        self.lines.recv_timeout(Duration::from_secs(15)).expect("the peer answers")
    }

    fn query(&mut self, command: &str) -> String {
        self.send(command);
        self.receive()
    }

    /// Sends SIGSTOP and waits until the process is stopped.
    fn stop(&mut self) {
        let pid = Pid::from_raw(self.child.id() as i32);
        kill(pid, Signal::SIGSTOP).unwrap();
        assert_eq!(waitpid(pid, Some(WaitPidFlag::WUNTRACED)), Ok(WaitStatus::Stopped(pid, Signal::SIGSTOP)));
    }

    fn resume(&mut self) {
        kill(Pid::from_raw(self.child.id() as i32), Signal::SIGCONT).unwrap();
    }

    /// Sends SIGKILL and waits for the end of the process.
    fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
