//! Memory that fails under a copy (SIGBUS): the slice ends, the process lives. A SIGBUS that is not ours
//! still ends the process.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]
#![allow(unsafe_code, reason = "forks, and touches memory that is not there")]

mod common;

use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};

use common::{Ends, MIB, PoolFile, REGION, REMOTE, leaked, peek, poke, run, slice};
use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, kill, raise, sigaction};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::{ForkResult, fork, ftruncate};
use te_core::{Completion, ErrorKind, Instant, Op, Outcome, Token, Transport};
use te_cxl::Coherence::{Flush, Hardware};
use te_fabric::testkit::eventually;

const LEN: u32 = 1 << 20;

#[test]
fn a_read_of_a_pool_that_was_cut_ends_as_a_rail_fault_in_the_same_poll() {
    for coherence in [Flush, Hardware] {
        let mut ends = Ends::new(coherence);
        // The region begins at 2 MiB: its first half MiB stays.
        let keep = 2 * MIB + MIB / 2;
        poke(ends.there, 0, &[7; 4096]);
        assert_eq!(run(&mut ends.peer, slice(1, Op::Read, 0, LEN)).result, Ok(()));
        ftruncate(&ends.file.fd, keep as i64).unwrap();
        for round in 0..100 {
            // The first failing byte is within the range, at its beginning, or everywhere.
            let offset = [0, MIB / 2, MIB, 3 * MIB][round % 4];
            let end = run(&mut ends.peer, slice(round as u64 + 2, Op::Read, offset, LEN));
            let error = end.result.unwrap_err();
            assert_eq!((error.kind, end.outcome), (ErrorKind::Rail, Outcome::NotApplied), "round {round}");
        }
        // What is still there can be read.
        assert_eq!(run(&mut ends.peer, slice(200, Op::Read, 0, LEN / 2)).result, Ok(()));
        assert_eq!(peek(ends.here, 0, 4096), [7; 4096]);
    }
}

#[test]
fn a_write_to_a_pool_that_was_cut_is_unknown_and_its_fence_ends_at_once() {
    for coherence in [Flush, Hardware] {
        let mut ends = Ends::new(coherence);
        ftruncate(&ends.file.fd, (2 * MIB + MIB / 2) as i64).unwrap();
        for round in 0..100 {
            let end = run(&mut ends.peer, slice(round * 2, Op::Write, (round % 3) * MIB / 4, LEN));
            assert_eq!(end.result.unwrap_err().kind, ErrorKind::Rail, "round {round}");
            assert_eq!((end.outcome, end.fence_needed), (Outcome::Unknown, true));
            ends.peer.fence(Token(round * 2 + 1), REMOTE).unwrap();
            let mut out = [Completion::applied(Token(0))];
            assert_eq!(ends.peer.poll(Instant::ZERO, &mut out), 1);
            assert_eq!(out[0], Completion::applied(Token(round * 2 + 1)));
        }
        assert_eq!(run(&mut ends.peer, slice(999, Op::Write, 0, LEN / 2)).result, Ok(()));
        assert_eq!(peek(ends.there, 0, 4096), [0x11; 4096]);
    }
}

#[test]
fn a_pool_that_is_gone_altogether_fails_slices_and_attachments_and_nothing_else() {
    let mut ends = Ends::new(Flush);
    ftruncate(&ends.file.fd, 0).unwrap();
    for op in [Op::Read, Op::Write] {
        // The ledger fails before any byte of the region is touched.
        let end = run(&mut ends.peer, slice(1, op, 0, 4096));
        assert_eq!((end.result.unwrap_err().kind, end.outcome), (ErrorKind::Rail, Outcome::NotApplied));
    }
    use te_core::Memory;
    let blob = common::export(&ends.owner, REGION);
    let error = ends.peer.attach(te_core::RemoteRegionId::new(1, 1), &blob).unwrap_err();
    assert_eq!(error.kind, ErrorKind::Rail);
    assert_eq!(ends.owner.deregister(REGION).unwrap_err().kind, ErrorKind::Rail);
    assert!(ends.owner_pool.write_back(ends.there).is_err());
}

#[test]
fn private_memory_that_fails_is_not_blamed_on_the_pool() {
    use te_core::{Access, Memory, RegionId, RegionOffset};
    let mut ends = Ends::new(Flush);
    let other = PoolFile::new(16 * MIB, 1);
    let mapping = other.open(Flush);
    // To the peer, which does not know that pool, it is private memory.
    let span = mapping.claim(other.claim(0, 1, 1)).unwrap().at(te_core::Location::Host);
    let id = RegionId::new(1, 1);
    common::register(&mut ends.peer, id, span, Access::LOCAL);
    ftruncate(&other.fd, 0).unwrap();
    for op in [Op::Read, Op::Write] {
        let slice = te_core::Slice { local: RegionOffset::new(id, 0), ..slice(1, op, 0, 4096) };
        assert_eq!(run(&mut ends.peer, slice).result.unwrap_err().kind, ErrorKind::System, "{op:?}");
    }
    ends.peer.deregister(id).unwrap();
}

/// Runs `body` in a child, which must not return, and says how it ended.
fn in_a_child(body: impl FnOnce()) -> WaitStatus {
    // SAFETY: the child allocates nothing that another thread may have locked, and ends without unwinding.
    match unsafe { fork() }.unwrap() {
        ForkResult::Parent { child } => {
            let mut ended = WaitStatus::StillAlive;
            let has_ended = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                eventually("the child has ended", || {
                    ended = waitpid(child, Some(WaitPidFlag::WNOHANG)).unwrap();
                    ended != WaitStatus::StillAlive
                });
            }));
            if has_ended.is_err() {
                kill(child, Signal::SIGKILL).unwrap();
                ended = waitpid(child, None).unwrap();
            }
            ended
        }
        ForkResult::Child => {
            body();
            // SAFETY: ends the process without running what belongs to its parent.
            unsafe { libc::_exit(0) }
        }
    }
}

/// One page of a file without contents: a load from it is a SIGBUS.
fn trap() -> *const u8 {
    use nix::sys::mman::{MapFlags, ProtFlags, mmap};
    let fd = nix::sys::memfd::memfd_create("trap", nix::sys::memfd::MFdFlags::MFD_CLOEXEC).unwrap();
    let len = std::num::NonZeroUsize::new(4096).unwrap();
    // SAFETY: the kernel picks the address.
    unsafe { mmap(None, len, ProtFlags::PROT_READ, MapFlags::MAP_SHARED, &fd, 0) }.unwrap().as_ptr().cast()
}

#[test]
fn a_foreign_sigbus_still_ends_the_process() {
    // The handler is installed from here on.
    let _ends = Ends::new(Flush);
    let trap = trap();
    for _ in 0..3 {
        let ended = in_a_child(|| {
            // SAFETY: the load ends the child, which is what is tested.
            let _ = unsafe { trap.read_volatile() };
        });
        assert!(matches!(ended, WaitStatus::Signaled(_, Signal::SIGBUS, _)), "a fault elsewhere: {ended:?}");
        // The handler of std, which was there before, lets the first one pass and takes itself away.
        let ended = in_a_child(|| {
            let _ = (raise(Signal::SIGBUS), raise(Signal::SIGBUS));
        });
        assert!(matches!(ended, WaitStatus::Signaled(_, Signal::SIGBUS, _)), "a signal: {ended:?}");
    }
}

static HANDLED: AtomicU32 = AtomicU32::new(0);

extern "C" fn foreign(_: libc::c_int) {
    HANDLED.fetch_add(1, Ordering::SeqCst);
}

/// Runs a test of this file in a process of its own, because the handler belongs to the whole process.
/// Returns whether this is that process.
fn in_its_own_process(test: &str) -> bool {
    if std::env::var_os("TE_CXL_CHAIN").is_some() {
        return true;
    }
    let command = std::process::Command::new(std::env::current_exe().unwrap())
        .args([test, "--exact", "--nocapture"])
        .env("TE_CXL_CHAIN", "1")
        .output()
        .unwrap();
    assert!(command.status.success(), "{:?} {}", command.status, String::from_utf8_lossy(&command.stderr));
    false
}

/// Cuts a pool and reads it.
fn read_what_was_cut(ends: &mut Ends) -> ErrorKind {
    ftruncate(&ends.file.fd, (2 * MIB) as i64).unwrap();
    run(&mut ends.peer, slice(1, Op::Read, 0, 4096)).result.unwrap_err().kind
}

#[test]
fn copies_are_still_protected_after_the_handler_of_std_has_taken_itself_away() {
    if !in_its_own_process("copies_are_still_protected_after_the_handler_of_std_has_taken_itself_away") {
        return;
    }
    let mut ends = Ends::new(Flush);
    raise(Signal::SIGBUS).unwrap();
    assert_eq!(read_what_was_cut(&mut ends), ErrorKind::Rail);
}

#[test]
fn a_report_of_damage_elsewhere_is_no_failed_access() {
    if !in_its_own_process("a_report_of_damage_elsewhere_is_no_failed_access") {
        return;
    }
    let ignore = SigAction::new(SigHandler::SigIgn, SaFlags::empty(), SigSet::empty());
    // SAFETY: no handler.
    unsafe { sigaction(Signal::SIGBUS, &ignore) }.unwrap();
    let mut ends = Ends::new(Flush);
    const BUS_MCEERR_AO: i32 = 5;
    // SAFETY: zeroes are a valid `siginfo_t`; the thread sends it to itself.
    let sent = unsafe {
        let mut info = std::mem::zeroed::<libc::siginfo_t>();
        (info.si_signo, info.si_code) = (libc::SIGBUS, BUS_MCEERR_AO);
        let (process, thread) = (libc::getpid(), libc::gettid());
        libc::syscall(libc::SYS_rt_tgsigqueueinfo, process, thread, libc::SIGBUS, &raw const info)
    };
    assert_eq!(sent, 0, "{}", std::io::Error::last_os_error());
    assert_eq!(read_what_was_cut(&mut ends), ErrorKind::Rail);
}

/// The kernel's report that the page at `addr` is damaged, which it sends to each process that has mapped the
/// page (with `vm.memory_failure_early_kill`).
fn report(addr: *mut u8) {
    const BUS_MCEERR_AO: i32 = 5;
    // SAFETY: zeroes are a valid `siginfo_t`; the address of a SIGBUS follows three numbers and padding.
    let sent = unsafe {
        let mut info = std::mem::zeroed::<libc::siginfo_t>();
        (info.si_signo, info.si_code) = (libc::SIGBUS, BUS_MCEERR_AO);
        (&raw mut info).cast::<*mut u8>().add(2).write(addr);
        assert_eq!(info.si_addr(), addr.cast());
        libc::syscall(
            libc::SYS_rt_tgsigqueueinfo,
            libc::getpid(),
            libc::gettid(),
            libc::SIGBUS,
            &raw const info,
        )
    };
    assert_eq!(sent, 0, "{}", std::io::Error::last_os_error());
}

#[test]
fn a_report_of_damage_in_a_pool_is_survived_and_remembered() {
    if !in_its_own_process("a_report_of_damage_in_a_pool_is_survived_and_remembered") {
        return;
    }
    let mut ends = Ends::new(Flush);
    // More than one: the handler of std takes itself away at the first signal that is none of its own.
    for round in 0..3 {
        report(ends.there.as_ptr().wrapping_add(4096 * round));
    }
    // The peer has a mapping of its own in this process; the kernel reports each.
    assert_eq!(run(&mut ends.peer, slice(1, Op::Read, 0, 4096)).result, Ok(()), "not about this mapping");
    assert_eq!((ends.owner_pool.bad_granules(), ends.peer_pool.bad_granules()), (vec![2 * MIB], vec![]));
    let mapping = ends.peer_pool.claim(ends.file.claim(4, 1, 9)).unwrap();
    report(mapping.as_ptr());
    assert_eq!(ends.peer_pool.bad_granules().len(), 1);
    // A report about memory that is no pool's goes to the handler that was there before.
    let memory = leaked(4096, 0);
    let elsewhere = in_a_child(|| (0..2).for_each(|_| report(memory.as_ptr())));
    assert!(matches!(elsewhere, WaitStatus::Signaled(_, Signal::SIGBUS, _)), "{elsewhere:?}");
}

extern "C" fn replaces(_: libc::c_int) {
    // SAFETY: ends the process: it has got a fault of a copy.
    unsafe { libc::_exit(9) }
}

#[test]
fn a_pool_that_is_mapped_later_is_protected_again() {
    if !in_its_own_process("a_pool_that_is_mapped_later_is_protected_again") {
        return;
    }
    let _first = Ends::new(Flush);
    let action = SigAction::new(SigHandler::Handler(replaces), SaFlags::empty(), SigSet::empty());
    // SAFETY: the handler ends the process.
    unsafe { sigaction(Signal::SIGBUS, &action) }.unwrap();
    let mut second = Ends::new(Flush);
    assert_eq!(read_what_was_cut(&mut second), ErrorKind::Rail);
}

static OURS: AtomicUsize = AtomicUsize::new(0);

extern "C" fn passes_on(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    HANDLED.fetch_add(1, Ordering::SeqCst);
    type WithInfo = extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void);
    // SAFETY: the handler that was there when this one was installed.
    let ours = unsafe { std::mem::transmute::<usize, WithInfo>(OURS.load(Ordering::SeqCst)) };
    ours(signal, info, context);
}

#[test]
fn two_handlers_that_pass_on_to_each_other_come_to_an_end() {
    if !in_its_own_process("two_handlers_that_pass_on_to_each_other_come_to_an_end") {
        return;
    }
    let ignore = SigAction::new(SigHandler::SigIgn, SaFlags::empty(), SigSet::empty());
    let theirs = SigAction::new(SigHandler::SigAction(passes_on), SaFlags::SA_SIGINFO, SigSet::empty());
    // SAFETY: the first one is no handler.
    unsafe { sigaction(Signal::SIGBUS, &ignore) }.unwrap();
    let _first = Ends::new(Flush);
    // SAFETY: the handler passes on what it gets.
    let before = unsafe { sigaction(Signal::SIGBUS, &theirs) }.unwrap();
    let SigHandler::SigAction(ours) = before.handler() else { panic!("not ours: {before:?}") };
    OURS.store(ours as usize, Ordering::SeqCst);
    let mut second = Ends::new(Flush);
    raise(Signal::SIGBUS).unwrap();
    assert_eq!(HANDLED.load(Ordering::SeqCst), 1, "ignored, as it was before all of them");
    assert_eq!(read_what_was_cut(&mut second), ErrorKind::Rail);
}

#[test]
fn a_handler_that_was_there_before_still_gets_what_is_not_ours() {
    if !in_its_own_process("a_handler_that_was_there_before_still_gets_what_is_not_ours") {
        return;
    }
    let action = SigAction::new(SigHandler::Handler(foreign), SaFlags::empty(), SigSet::empty());
    // SAFETY: the handler only counts.
    unsafe { sigaction(Signal::SIGBUS, &action) }.unwrap();
    let mut ends = Ends::new(Flush);
    raise(Signal::SIGBUS).unwrap();
    assert_eq!(HANDLED.load(Ordering::SeqCst), 1, "a signal that was sent");
    ftruncate(&ends.file.fd, (2 * MIB) as i64).unwrap();
    let error = run(&mut ends.peer, slice(1, Op::Read, 0, 4096)).result.unwrap_err();
    assert_eq!((error.kind, HANDLED.load(Ordering::SeqCst)), (ErrorKind::Rail, 1), "a fault of ours");
}

#[test]
fn faults_in_many_threads_end_where_they_are() {
    let threads: Vec<_> = (0..8)
        .map(|thread| {
            std::thread::spawn(move || {
                let mut ends = Ends::new(if thread % 2 == 0 { Flush } else { Hardware });
                for round in 0..200 {
                    assert_eq!(run(&mut ends.peer, slice(1, Op::Read, 0, 65_536)).result, Ok(()));
                    if round == 100 {
                        ftruncate(&ends.file.fd, (3 * MIB) as i64).unwrap();
                    }
                    let end = run(&mut ends.peer, slice(2, Op::Read, MIB - 64, 65_536));
                    assert_eq!(end.result.is_err(), round >= 100, "thread {thread}, round {round}");
                }
            })
        })
        .collect();
    threads.into_iter().for_each(|thread| thread.join().unwrap());
}

#[test]
fn memory_that_the_hardware_reports_as_damaged_is_corrupt_and_is_remembered() {
    let mut ends = Ends::new(Flush);
    poke(ends.there, MIB, &[9; 4096]);
    let page = ends.there.as_ptr().wrapping_add(MIB as usize + 8192);
    poke(ends.there, MIB + 8192, &[1]);
    // SAFETY: a page of the test's own pool, which nothing else uses.
    let poisoned = unsafe { libc::madvise(page.cast(), 4096, libc::MADV_HWPOISON) };
    if poisoned != 0 {
        println!("skipped: the kernel does not poison pages here: {}", std::io::Error::last_os_error());
        return;
    }
    let end = run(&mut ends.peer, slice(1, Op::Read, MIB, LEN));
    assert_eq!((end.result.unwrap_err().kind, end.outcome), (ErrorKind::Corrupt, Outcome::NotApplied));
    assert_eq!(ends.peer_pool.bad_granules(), [2 * MIB]);
    // From now on without touching it.
    assert_eq!(
        run(&mut ends.peer, slice(2, Op::Write, MIB, 4096)).result.unwrap_err().kind,
        ErrorKind::Corrupt
    );
    // The neighbouring granule is not affected.
    assert_eq!(run(&mut ends.peer, slice(3, Op::Read, 2 * MIB, LEN)).result, Ok(()));
}

#[test]
fn private_heap_memory_is_copied_to_and_from_at_any_alignment() {
    for coherence in [Flush, Hardware] {
        let mut ends = Ends::new(coherence);
        let granule = u64::from(coherence.granule_bytes());
        for (shift, len) in [(0, 64), (1, 64), (63, 4096), (7, 1 << 16), (32, 192), (5, 128)] {
            let span = leaked(len + 64, 0);
            let pattern: Vec<u8> = (0..len).map(|at| (at * 7 + shift) as u8).collect();
            poke(span, shift as u64, &pattern);
            let id = te_core::RegionId::new(2, 1);
            common::register(&mut ends.peer, id, span, te_core::Access::LOCAL);
            let with = |op| te_core::Slice {
                local: te_core::RegionOffset::new(id, shift as u64),
                ..slice(1, op, 3 * granule, len as u32)
            };
            assert_eq!(run(&mut ends.peer, with(Op::Write)).result, Ok(()));
            assert_eq!(peek(ends.there, 3 * granule, len), pattern);
            poke(span, 0, &vec![0; len + 64]);
            assert_eq!(run(&mut ends.peer, with(Op::Read)).result, Ok(()));
            assert_eq!(peek(span, shift as u64, len), pattern);
            assert_eq!(peek(span, 0, shift), vec![0; shift], "nothing before the range");
            use te_core::Memory;
            ends.peer.deregister(id).unwrap();
        }
    }
}
