//! Owners and initiators in different processes: this test binary, started once more, each with a fake
//! driver of its own. Memory at odd places, in chunks, freed and allocated again; processes that are
//! stopped or killed.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]

mod common;
#[path = "../../te-gpu/tests/common/mod.rs"]
mod fakes;

use std::io::{BufRead, BufReader, Lines, Write};
use std::process::{ChildStdin, ChildStdout, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use common::{
    INITIATOR, MIB, REGION, REMOTE, TARGET, bytes, export, fabric_memory, on_a_host, poll, register, run,
    slice, transport, until,
};
use fakes::Fake;
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;
use te_core::{Access, ErrorKind, MemSpan, Memory, Op, RegionId, RemoteRegionId, Transport};
use te_fabric::testkit::{Process, bytes_of, hex};
use te_nvlink::{Export, NvlinkTransport};

/// What the other process is to be.
const ROLE: &str = "SNOWSKIN_TEST_NVLINK";
/// Bytes of a region.
const BYTES: usize = 5 * MIB + 1_000;
/// A place in an allocation that is no multiple of a page.
const ODD: u64 = 3 * MIB as u64 + 512;
/// The blocks of a writer.
const BLOCK: u32 = 16 << 10;

/// Memory of one kind. Spans of host memory come from a memory file that is never dropped.
fn allocate(fake: &Fake, kind: &str) -> MemSpan {
    match kind {
        "legacy" => fake.allocate(64 * MIB).part(ODD, BYTES as u64).unwrap(),
        // The span begins in the first of three chunks and ends in the last.
        "chunks" => fake.map_chunks(3, 2 * MIB).part(512, BYTES as u64).unwrap(),
        "fabric" => fabric_memory(fake, 3, 2 * MIB).part(512, BYTES as u64).unwrap(),
        _ => {
            let memory = common::shared(64 * MIB);
            let span = memory.span().part(ODD, BYTES as u64).unwrap();
            std::mem::forget(memory);
            span
        }
    }
}

/// An end that shares memory of this kind. Processes with fabric memory stand for those of different hosts.
fn open(fake: &Fake, identity: u64, kind: &str) -> NvlinkTransport {
    if kind == "fabric" { on_a_host(fake, identity) } else { transport(fake, identity) }
}

fn is_host(span: MemSpan) -> bool {
    span.location() == te_core::Location::Host
}

fn fill(fake: &Fake, span: MemSpan, bytes: &[u8]) {
    fake.fill(span.part(0, bytes.len() as u64).unwrap(), bytes);
}

fn contents(fake: &Fake, span: MemSpan) -> Vec<u8> {
    fake.bytes(span)
}

#[test]
fn other_process() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let parts: Vec<&str> = role.split(' ').collect();
    let fake = Fake::cuda();
    match parts[0] {
        "owner" => owner(&fake, parts[1]),
        _ => writer(&fake, &bytes_of(parts[1])),
    }
}

/// Owns a region, and does what it is told.
fn owner(fake: &Fake, kind: &str) {
    let mut transport = open(fake, TARGET, kind);
    let mut span = allocate(fake, kind);
    register(&mut transport, REGION, span, Access::all());
    say(&format!("export {}", hex(&export(&transport, REGION))));
    let commands = commands();
    loop {
        poll(&mut transport);
        let Ok(command) = commands.try_recv() else {
            std::thread::yield_now();
            continue;
        };
        let (what, seed) = command.split_once(' ').unwrap();
        let seed = seed.parse().unwrap();
        match what {
            "fill" => {
                fill(fake, span, &bytes(seed, BYTES));
                say("filled");
            }
            "check" => {
                let right = contents(fake, span) == bytes(seed, BYTES);
                say(if right { "check right" } else { "check wrong" });
            }
            "realloc" => {
                until("the region is deregistered", || {
                    poll(&mut transport);
                    transport.deregister(REGION).is_ok()
                });
                let before = span.as_ptr();
                fake.free(whole(span));
                let mut tries = 0;
                loop {
                    span = allocate(fake, kind);
                    tries += 1;
                    if span.as_ptr() == before || tries == 1_000 {
                        break;
                    }
                    fake.free(whole(span));
                }
                assert_eq!(span.as_ptr(), before, "the address never came back");
                let again = RegionId::new(0, 2);
                register(&mut transport, again, span, Access::all());
                fill(fake, span, &bytes(seed, BYTES));
                say(&format!("again {} {}", fake.freed_while_open(), hex(&export(&transport, again))));
            }
            "deregister" => {
                // timing: how long it takes is what the test is about
                let start = std::time::Instant::now();
                until("the region is deregistered", || {
                    poll(&mut transport);
                    transport.deregister(REGION).is_ok()
                });
                // timing: as above
                say(&format!("deregistered {}", start.elapsed().as_millis()));
            }
            _ => return,
        }
    }
}

/// The allocation that a span of `legacy` memory lies in.
fn whole(span: MemSpan) -> MemSpan {
    MemSpan::new(span.as_ptr().wrapping_sub(ODD as usize), 64 * MIB).at(span.location())
}

/// Writes blocks for ever, with another byte in each round.
fn writer(fake: &Fake, blob: &[u8]) {
    let kind = if Export::parse(blob).unwrap().addresses.is_empty() { "" } else { "fabric" };
    let mut transport = open(fake, INITIATOR, kind);
    let here = fake.allocate(BYTES);
    register(&mut transport, REGION, here, Access::LOCAL);
    transport.attach(REMOTE, blob).unwrap();
    let blocks = BYTES as u64 / u64::from(BLOCK);
    for round in 0_u64.. {
        fill(fake, here, &vec![round as u8; BYTES]);
        let slices: Vec<_> = (0..blocks)
            .map(|nth| slice(nth, Op::Write, nth * u64::from(BLOCK), nth * u64::from(BLOCK), BLOCK))
            .collect();
        let ended = run(&mut transport, None, &slices);
        if let Some(error) = ended.iter().find_map(|end| end.err()) {
            say(&format!("ended {:?}", error.kind));
            // What was revoked is released.
            for _ in 0..10_000 {
                poll(&mut transport);
            }
            return;
        }
        if round == 1 {
            say("writing");
        }
    }
}

fn say(line: &str) {
    println!("\n{line}");
    std::io::stdout().flush().unwrap();
}

fn commands() -> Receiver<String> {
    let (tell, commands) = channel();
    std::thread::spawn(move || {
        std::io::stdin().lines().map_while(Result::ok).try_for_each(|line| tell.send(line)).unwrap();
    });
    commands
}

struct Other {
    process: Process,
    stdin: ChildStdin,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Other {
    fn start(role: &str) -> Self {
        Self::by(&mut Command::new(std::env::current_exe().unwrap()), role)
    }

    fn by(command: &mut Command, role: &str) -> Self {
        let mut child = command
            .args(["other_process", "--exact", "--nocapture"])
            .env(ROLE, role)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let stdin = child.stdin.take().unwrap();
        Self { process: Process(child), stdin, lines }
    }

    /// The rest of the next line that begins with `word`.
    fn line(&mut self, word: &str) -> String {
        let line = self.lines.by_ref().map_while(Result::ok).find(|line| line.starts_with(word));
        line.unwrap_or_else(|| panic!("the other process has ended before it said {word}"))[word.len()..]
            .trim()
            .into()
    }

    /// The same, while something else is done again and again.
    fn line_while(mut self, word: &'static str, mut and: impl FnMut()) -> (Self, String) {
        let waits = std::thread::spawn(move || {
            let line = self.line(word);
            (self, line)
        });
        until(word, || {
            and();
            waits.is_finished()
        });
        waits.join().unwrap()
    }

    fn tell(&mut self, command: &str) {
        writeln!(self.stdin, "{command}").unwrap();
    }

    fn ask(&mut self, command: &str, answer: &str) -> String {
        self.tell(command);
        self.line(answer)
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

    fn kill(&mut self) {
        kill(self.pid(), Signal::SIGKILL).unwrap();
        self.process.0.wait().unwrap();
    }
}

/// Slices over a whole region, of odd lengths.
fn cut(op: Op) -> Vec<te_core::Slice> {
    let (mut at, mut slices) = (0_u64, Vec::new());
    let mut rng = te_core::testkit::Rng::new(5);
    while at < BYTES as u64 {
        let len = (1 + rng.below(200_000)).min(BYTES as u64 - at);
        slices.push(slice(slices.len() as u64, op, at, at, len as u32));
        at += len;
    }
    slices
}

/// Writes a region of another process and reads it, and both see the right bytes.
fn moves(local: &str, remote: &str) {
    let fake = Fake::cuda();
    let mut other = Other::start(&format!("owner {remote}"));
    let blob = bytes_of(&other.line("export"));
    let mut here = open(&fake, INITIATOR, remote);
    let memory = allocate(&fake, local);
    register(&mut here, REGION, memory, Access::LOCAL);
    here.attach(REMOTE, &blob).unwrap();
    fill(&fake, memory, &bytes(1, BYTES));
    assert!(run(&mut here, None, &cut(Op::Write)).iter().all(Result::is_ok));
    assert_eq!(other.ask("check 1", "check"), "right", "{local} to {remote}");
    other.ask("fill 2", "filled");
    assert!(run(&mut here, None, &cut(Op::Read)).iter().all(Result::is_ok));
    assert!(contents(&fake, memory) == bytes(2, BYTES), "{remote} to {local}");
    assert_eq!(is_host(memory), local == "host");
}

/// n1 and n3: memory of cudaMalloc, 3 MiB and 512 bytes into an allocation of 64 MiB.
#[test]
fn a_part_of_an_allocation_is_opened_by_ipc_at_its_place() {
    moves("legacy", "legacy");
}

/// n2 and n4.
#[test]
fn a_span_over_three_mappings_is_mapped_without_gaps() {
    moves("legacy", "chunks");
    moves("chunks", "chunks");
}

#[test]
fn memory_of_another_host_is_mapped_by_its_fabric_handles() {
    moves("legacy", "fabric");
    moves("fabric", "fabric");
    moves("host", "fabric");
}

/// n8.
#[test]
fn devices_copy_to_and_from_shared_memory_of_another_process() {
    moves("legacy", "host");
    moves("chunks", "host");
}

#[test]
fn host_memory_is_copied_to_and_from_a_device_of_another_process() {
    moves("host", "legacy");
    moves("host", "chunks");
}

/// n5.
#[test]
fn memory_that_was_freed_and_allocated_at_the_same_address_is_stale_and_was_closed_before() {
    let fake = Fake::cuda();
    let mut other = Other::start("owner legacy");
    let blob = bytes_of(&other.line("export"));
    let mut here = transport(&fake, INITIATOR);
    let memory = allocate(&fake, "legacy");
    register(&mut here, REGION, memory, Access::LOCAL);
    here.attach(REMOTE, &blob).unwrap();
    fill(&fake, memory, &bytes(1, BYTES));
    assert!(run(&mut here, None, &cut(Op::Write)).iter().all(Result::is_ok));
    let opened = fake.calls("cuIpcOpenMemHandle_v2");
    // The other process gets its memory back while this one polls.
    other.tell("realloc 7");
    let (mut other, answer) = other.line_while("again", || _ = poll(&mut here));
    assert_eq!(fake.calls("cuIpcCloseMemHandle"), 1, "the mapping is closed");
    let (freed_while_open, again) = answer.split_once(' ').unwrap();
    assert_eq!(freed_while_open, "0", "memory was freed while it was mapped here");
    for op in [Op::Write, Op::Read] {
        let error = run(&mut here, None, &[slice(0, op, 0, 0, 4_096)])[0].unwrap_err();
        assert_eq!(error.kind, ErrorKind::Stale);
    }
    let second = RemoteRegionId::new(1, 1);
    here.attach(second, &blob).unwrap();
    let mut stale = slice(0, Op::Write, 0, 0, 4_096);
    stale.remote.region = second;
    assert_eq!(run(&mut here, None, &[stale])[0].unwrap_err().kind, ErrorKind::Stale, "the old export");
    assert_eq!(other.ask("check 7", "check"), "right", "nothing of the old region landed");
    let third = RemoteRegionId::new(2, 1);
    here.attach(third, &bytes_of(again)).unwrap();
    let mut good = slice(0, Op::Read, 0, 0, BYTES as u32);
    good.remote.region = third;
    assert_eq!(run(&mut here, None, &[good]), [Ok(())]);
    assert!(contents(&fake, memory) == bytes(7, BYTES));
    assert_eq!(fake.calls("cuIpcOpenMemHandle_v2"), opened + 1, "a handle is opened once per attachment");
}

/// An owner in this process, and another process that writes to it.
fn written(kind: &str) -> (Fake, NvlinkTransport, MemSpan, Other) {
    let fake = Fake::cuda();
    let mut here = open(&fake, TARGET, kind);
    let memory = allocate(&fake, kind);
    register(&mut here, REGION, memory, Access::all());
    let writer = Other::start(&format!("writer {}", hex(&export(&here, REGION))));
    // The writer is granted the memory while this process polls.
    let (writer, _) = writer.line_while("writing", || _ = poll(&mut here));
    (fake, here, memory, writer)
}

/// n6.
#[test]
fn after_a_writer_was_killed_its_memory_is_constant_once_it_is_deregistered() {
    for round in 0..12 {
        let kind = ["legacy", "chunks", "host", "fabric"][round % 4];
        let (fake, mut here, memory, mut writer) = written(kind);
        // timing: another moment of the writer's loop in each round
        std::thread::sleep(Duration::from_micros(700 * round as u64));
        kill(writer.pid(), Signal::SIGKILL).unwrap();
        until("the death of the writer is noticed", || {
            poll(&mut here);
            here.deregister(REGION).is_ok()
        });
        let before = contents(&fake, memory);
        // timing: a late write would come within this time
        std::thread::sleep(Duration::from_millis(100));
        assert!(contents(&fake, memory) == before, "a late write, {kind}");
        writer.kill();
        assert_eq!(fake.freed_while_open(), 0);
    }
}

#[test]
fn a_writer_that_is_stopped_keeps_the_region_busy_until_it_goes_on() {
    for kind in ["legacy", "chunks", "host", "fabric"] {
        let (fake, mut here, memory, mut writer) = written(kind);
        writer.stop();
        let before = contents(&fake, memory);
        for _ in 0..50 {
            poll(&mut here);
            assert_eq!(here.deregister(REGION).unwrap_err().kind, ErrorKind::Busy);
            // timing: a second in which a peer that is stopped is taken for dead would be an error
            std::thread::sleep(Duration::from_millis(30));
        }
        assert!(contents(&fake, memory) == before, "a process that is stopped writes nothing");
        kill(writer.pid(), Signal::SIGCONT).unwrap();
        until("the writer has released the region", || {
            poll(&mut here);
            here.deregister(REGION).is_ok()
        });
        let before = contents(&fake, memory);
        assert_eq!(writer.line("ended"), "Stale");
        assert!(contents(&fake, memory) == before, "a late write");
    }
}

#[test]
fn a_writer_that_is_killed_while_it_is_stopped_frees_the_region() {
    let (_fake, mut here, _memory, mut writer) = written("legacy");
    writer.stop();
    assert_eq!(here.deregister(REGION).unwrap_err().kind, ErrorKind::Busy);
    writer.kill();
    until("the death of the writer is noticed", || here.deregister(REGION).is_ok());
}

/// n7.
#[test]
fn every_slice_ends_when_the_owner_is_killed() {
    for kind in ["legacy", "chunks", "host", "fabric"] {
        let fake = Fake::cuda();
        let mut other = Other::start(&format!("owner {kind}"));
        let blob = bytes_of(&other.line("export"));
        let mut here = open(&fake, INITIATOR, kind);
        let memory = allocate(&fake, "legacy");
        register(&mut here, REGION, memory, Access::LOCAL);
        here.attach(REMOTE, &blob).unwrap();
        assert_eq!(run(&mut here, None, &[slice(0, Op::Write, 0, 0, 4_096)]), [Ok(())]);
        let accepted = here.submit(&cut(Op::Write)).unwrap();
        assert!(accepted > 0);
        other.kill();
        let mut ended = 0;
        until("all slices end", || {
            ended += poll(&mut here).len();
            ended == accepted
        });
        until("the death of the owner is noticed", || {
            let result = run(&mut here, None, &[slice(0, Op::Read, 0, 0, 4_096)])[0];
            result.is_err_and(|error| error.kind == ErrorKind::PeerDead)
        });
        here.detach(REMOTE).unwrap();
        assert_eq!(here.deregister(REGION), Ok(()));
        drop(here);
        assert_eq!(fake.wrong(), 0, "{kind}");
    }
}

/// An owner in a PID namespace of its own does not see the process of its peer by a number. Kernels from 6.5
/// on lead to it by the socket.
#[test]
fn the_death_of_a_peer_of_another_pid_namespace_is_noticed_or_assumed_after_a_quarantine() {
    if te_host::own_uid() != 0 {
        println!("skipped: only root can make a PID namespace");
        return;
    }
    let mut command = Command::new("unshare");
    command.args(["--pid", "--fork", "--kill-child"]).arg(std::env::current_exe().unwrap());
    // The fake driver opens IPC handles by the number of a process.
    let mut owner = Other::by(&mut command, "owner host");
    let blob = owner.line("export");
    let mut writer = Other::start(&format!("writer {blob}"));
    writer.line("writing");
    writer.kill();
    let waited: u64 = owner.ask("deregister 0", "deregistered").parse().unwrap();
    match has_peer_pidfds() {
        true => assert!(waited < 900, "{waited} ms"),
        false => assert!((900..20_000).contains(&waited), "{waited} ms, and quarantine_ms is 1,000"),
    }
}

#[allow(unsafe_code, reason = "asks the kernel for an option that has no name in a crate")]
fn has_peer_pidfds() -> bool {
    use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
    let (one, _two) = std::os::unix::net::UnixStream::pair().unwrap();
    let (mut fd, mut len) = (-1_i32, 4);
    // SAFETY: writes 4 bytes.
    let code = unsafe {
        libc::getsockopt(one.as_raw_fd(), libc::SOL_SOCKET, 77, (&raw mut fd).cast(), &raw mut len)
    };
    if code == 0 {
        // SAFETY: opened just now.
        drop(unsafe { OwnedFd::from_raw_fd(fd) });
    }
    code == 0
}
