//! Owners and peers in different processes: this test binary, started once more. Writers that are stopped or
//! killed in the middle of a copy, and owners that are killed.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]

mod common;

use std::io::{BufRead, BufReader, Lines, Write};
use std::os::fd::AsRawFd;
use std::path::Path;
use std::process::{ChildStdout, Command, Stdio};

use common::{KEY, MIB, PoolFile, REGION, REMOTE, export, leaked, peek, poke, register, run, slice};
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;
use te_core::{Access, Completion, ErrorKind, Instant, MemSpan, Memory, Op, RegionId, Token, Transport};
use te_cxl::Coherence::{self, Flush, Hardware};
use te_cxl::{Claim, Config, CxlTransport, Mount, Part, Pool, Seat};
use te_fabric::testkit::{Process, bytes_of, eventually, hex};

/// What the other process is to be: role, mode, path of the pool, slot, epoch, export.
const ROLE: &str = "SNOWSKIN_TEST_CXL";
const OLD: u8 = 0x0F;
const NEW: u8 = 0xF0;
const WRITER: u64 = 0x7777;
/// The longest slice: a copy takes as long as it can.
const SLICE: u32 = 2 << 20;

#[test]
fn other_process() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let parts: Vec<&str> = role.split(' ').collect();
    let coherence = if parts[1] == "flush" { Flush } else { Hardware };
    let pool = Pool::open(Path::new(parts[2]), coherence, None).unwrap();
    let (slot, epoch) = (parts[3].parse().unwrap(), parts[4].parse().unwrap());
    // As processes of a store do, before they use a page.
    assert!(!parts[0].starts_with("locked") || pool.lock(Part::Page(slot)).unwrap());
    let config = Config { coherence, identity: WRITER, ..Config::default() };
    let mount = Mount { pool: pool.clone(), seat: Some(Seat { slot, epoch }) };
    let mut transport = CxlTransport::new(config, vec![mount]).unwrap();
    if parts[0] == "owner" {
        let claim = Claim { first: 0, count: 1, incarnation: epoch, epoch, key: KEY };
        let there = pool.claim(claim).unwrap();
        register(&mut transport, REGION, there, Access::all());
        poke(there, 0, &[OLD; 4096]);
        pool.write_back(there.part(0, 4096).unwrap()).unwrap();
        say(&format!("export {}", hex(&export(&transport, REGION))));
        loop {
            std::thread::park();
        }
    }
    let here = leaked(SLICE as usize, OLD);
    register(&mut transport, REGION, here, Access::LOCAL);
    transport.attach(REMOTE, &bytes_of(parts[5])).unwrap();
    if parts[0] == "once" {
        assert_eq!(run(&mut transport, slice(1, Op::Write, 0, SLICE)).result, Ok(()));
        poke(here, 0, &vec![0; SLICE as usize]);
        assert_eq!(run(&mut transport, slice(2, Op::Read, 0, SLICE)).result, Ok(()));
        assert_eq!(peek(here, 0, SLICE as usize), vec![OLD; SLICE as usize]);
        say("done");
        return;
    }
    for token in 0.. {
        let ended = run(&mut transport, slice(token, Op::Write, 0, SLICE)).result;
        if token == 10 {
            say("writing");
        }
        if let Err(error) = ended {
            say(&format!("ended {:?}", error.kind));
            return;
        }
    }
}

fn say(line: &str) {
    println!("\n{line}");
    std::io::stdout().flush().unwrap();
}

struct Other {
    process: Process,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Other {
    fn start(role: &str, coherence: Coherence, file: &PoolFile, slot: u32, blob: &[u8]) -> Self {
        let mode = if coherence == Flush { "flush" } else { "hardware" };
        let path = format!("/proc/{}/fd/{}", std::process::id(), file.fd.as_raw_fd());
        let role = format!("{role} {mode} {path} {slot} {} {}", file.epoch(), hex(blob));
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["other_process", "--exact", "--nocapture"])
            .env(ROLE, role)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        Self { process: Process(child), lines }
    }

    /// The rest of the next line that begins with `word`.
    fn line(&mut self, word: &str) -> String {
        let line = self.lines.by_ref().map_while(Result::ok).find(|line| line.starts_with(word));
        line.unwrap_or_else(|| panic!("the other process has ended before it said {word}"))[word.len()..]
            .trim()
            .into()
    }

    fn pid(&self) -> Pid {
        Pid::from_raw(self.process.0.id() as i32)
    }

    /// Stops it; it does nothing more when this returns.
    fn stop(&self) {
        kill(self.pid(), Signal::SIGSTOP).unwrap();
        let stopped = waitpid(self.pid(), Some(WaitPidFlag::WUNTRACED)).unwrap();
        assert!(matches!(stopped, WaitStatus::Stopped(..)), "{stopped:?}");
    }

    fn go_on(&self) {
        kill(self.pid(), Signal::SIGCONT).unwrap();
    }
}

/// An owner in this process, and its region of 2 MiB.
fn owner(coherence: Coherence) -> (PoolFile, CxlTransport, MemSpan) {
    let file = PoolFile::new(16 * MIB, 8);
    let (pool, mut owner) = file.transport(coherence, 0, 1);
    let there = pool.claim(file.claim(0, 1, 7)).unwrap();
    register(&mut owner, REGION, there, Access::all());
    (file, owner, there)
}

#[test]
fn a_peer_in_another_process_writes_and_reads_a_region() {
    for coherence in [Flush, Hardware] {
        let (file, owner, there) = owner(coherence);
        let mut peer = Other::start("once", coherence, &file, 1, &export(&owner, REGION));
        peer.line("done");
        assert!(peer.process.0.wait().unwrap().success());
        assert_eq!(peek(there, 0, SLICE as usize), vec![OLD; SLICE as usize]);
    }
}

#[test]
fn the_range_of_a_writer_that_is_stopped_in_the_middle_of_a_copy_is_not_reused() {
    for coherence in [Flush, Hardware] {
        let mut inside = 0;
        for _round in 0..200 {
            let (file, mut owner, there) = owner(coherence);
            let mut writer = Other::start("writer", coherence, &file, 1, &export(&owner, REGION));
            writer.line("writing");
            writer.stop();
            let busy = owner.deregister(REGION).is_err();
            if busy {
                inside += 1;
                for _ in 0..100 {
                    assert_eq!(owner.deregister(REGION).unwrap_err().kind, ErrorKind::Busy);
                }
            } else {
                // It was between two copies; it must not begin another one.
                poke(there, 0, &vec![NEW; SLICE as usize]);
            }
            writer.go_on();
            if busy {
                eventually("the writer has left", || owner.deregister(REGION).is_ok());
                poke(there, 0, &vec![NEW; SLICE as usize]);
            }
            assert_eq!(writer.line("ended"), "Stale");
            assert_eq!(peek(there, 0, SLICE as usize), vec![NEW; SLICE as usize], "a late write");
            if inside >= 2 {
                break;
            }
        }
        assert!(inside > 0, "no writer was stopped in the middle of a copy");
    }
}

#[test]
fn the_range_of_a_writer_that_was_killed_is_free_once_its_page_has_another_process() {
    let mut inside = false;
    for _round in 0..200 {
        let (file, mut owner, there) = owner(Flush);
        let mut writer = Other::start("writer", Flush, &file, 1, &export(&owner, REGION));
        writer.line("writing");
        writer.stop();
        kill(writer.pid(), Signal::SIGKILL).unwrap();
        writer.process.0.wait().unwrap();
        if owner.deregister(REGION).is_err() {
            inside = true;
            assert_eq!(owner.deregister(REGION).unwrap_err().kind, ErrorKind::Busy);
            // Nor can the master give the extent to another owner.
            let next = file.open(Flush);
            let claim = file.claim(0, 1, 8);
            let refused = next.claim(claim);
            assert!(matches!(refused, Err(te_cxl::PoolError::InUse { peer: 1 })), "{refused:?}");
            // An expulsion does not end either: the process may only have been stopped.
            assert_eq!(owner.expel(WRITER, te_core::ExpelMode::Force), Ok(false));
            // The master knows that the process is gone, and gives its page to another one.
            let _successor = file.transport(Flush, 1, 0x8888);
            assert_eq!(owner.deregister(REGION), Ok(()));
            next.claim(claim).unwrap();
        }
        poke(there, 0, &[NEW; 4096]);
        if inside {
            return;
        }
    }
    panic!("no writer was killed in the middle of a copy");
}

#[test]
fn the_range_of_a_writer_that_was_killed_is_free_at_once_where_the_lock_on_its_page_is_seen() {
    for coherence in [Flush, Hardware] {
        let mut inside = false;
        for _round in 0..200 {
            let (file, mut owner, there) = owner(coherence);
            let mut writer = Other::start("locked-writer", coherence, &file, 1, &export(&owner, REGION));
            writer.line("writing");
            writer.stop();
            let next = file.open(coherence);
            let claim = file.claim(0, 1, 8);
            if owner.deregister(REGION).is_err() {
                inside = true;
                // Stopped, it may go on.
                assert_eq!(owner.deregister(REGION).unwrap_err().kind, ErrorKind::Busy);
                assert_eq!(owner.expel(WRITER, te_core::ExpelMode::Force), Ok(false));
                assert!(matches!(next.claim(claim), Err(te_cxl::PoolError::InUse { peer: 1 })));
            }
            kill(writer.pid(), Signal::SIGKILL).unwrap();
            writer.process.0.wait().unwrap();
            if inside {
                // Another owner of this host has the same proof, and so has one that expels.
                next.claim(claim).unwrap();
                assert_eq!(owner.expel(WRITER, te_core::ExpelMode::Force), Ok(true));
                assert_eq!(owner.deregister(REGION), Ok(()));
                poke(there, 0, &vec![NEW; SLICE as usize]);
                assert_eq!(peek(there, 0, SLICE as usize), vec![NEW; SLICE as usize], "a late write");
                break;
            }
        }
        assert!(inside, "no writer was killed in the middle of a copy");
    }
}

#[test]
fn a_region_outlives_its_owner_until_its_extents_are_given_away() {
    let file = PoolFile::new(16 * MIB, 8);
    let mut owner = Other::start("owner", Flush, &file, 1, &[]);
    let blob = bytes_of(&owner.line("export"));
    let (_, mut peer) = file.transport(Flush, 0, 1);
    let here = leaked(4096, 0);
    register(&mut peer, REGION, here, Access::LOCAL);
    peer.attach(REMOTE, &blob).unwrap();
    kill(owner.pid(), Signal::SIGKILL).unwrap();
    owner.process.0.wait().unwrap();
    assert_eq!(run(&mut peer, slice(1, Op::Read, 0, 4096)).result, Ok(()));
    assert_eq!(peek(here, 0, 4096), [OLD; 4096]);
    // The process starts again and is given the same extent.
    let mut again = Other::start("owner", Flush, &file, 1, &[]);
    let new_blob = bytes_of(&again.line("export"));
    for op in [Op::Read, Op::Write] {
        let error = run(&mut peer, slice(2, op, 0, 4096)).result.unwrap_err();
        assert_eq!(error.kind, ErrorKind::PeerRestarted);
    }
    let other = te_core::RemoteRegionId::new(1, 1);
    assert_eq!(peer.attach(other, &blob).unwrap_err().kind, ErrorKind::PeerRestarted);
    peer.attach(other, &new_blob).unwrap();
}

#[test]
fn a_child_after_a_fork_does_not_use_its_parents_pool() {
    let (file, mut owner, there) = owner(Flush);
    let (pool, mut peer) = file.transport(Flush, 1, 5);
    let here = leaked(4096, 9);
    register(&mut peer, REGION, here, Access::LOCAL);
    peer.attach(REMOTE, &export(&owner, REGION)).unwrap();
    te_fabric::testkit::in_a_child("fork", || {
        let mut out = [Completion::applied(Token(0))];
        let accepted = peer.submit(&[slice(1, Op::Write, 0, 4096)]);
        let ended = (peer.poll(Instant::ZERO, &mut out), out[0].result.map_err(|error| error.kind));
        if (accepted, ended) != (Ok(1), (1, Err(ErrorKind::Forked))) {
            return Err(format!("{accepted:?} {ended:?}"));
        }
        let attached = peer.attach(te_core::RemoteRegionId::new(1, 1), &export(&owner, REGION));
        if attached.map_err(|error| error.kind) != Err(ErrorKind::Forked) {
            return Err(format!("{attached:?}"));
        }
        // SAFETY: read once; the process ends without running the parent's drop.
        #[allow(unsafe_code, reason = "drops what the parent keeps")]
        unsafe {
            drop(std::ptr::read(&raw const peer));
            drop(std::ptr::read(&raw const pool));
        }
        Ok(())
    });
    assert_eq!(run(&mut peer, slice(1, Op::Write, 0, 4096)).result, Ok(()));
    assert_eq!(peek(there, 0, 4096), [9; 4096]);
    assert_eq!(owner.deregister(RegionId::new(0, 1)), Ok(()));
}
