//! Processes that fork and continue without `exec`, with real children.
#![allow(clippy::unwrap_used, reason = "a test that fails reports the line")]
#![allow(unsafe_code, reason = "copies what a fork inherits")]

mod common;

use std::time::Duration;

use common::*;
use te_core::{Access, ErrorKind, ExpelMode, Op, Status};
use te_engine::{
    Engine, ExpelError, Fabrics, RegisterError, Registration, SegmentError, SegmentHandle, SharedRegion,
    Transfer, TransferEngine, TransferError, TransferRequest,
};
use te_fabric::testkit::in_a_child;

const LONG: Option<Duration> = Some(Duration::from_secs(60));
const LEN: usize = 1 << 20;

fn is<T: std::fmt::Debug + PartialEq>(what: &str, found: T, wanted: T) -> Result<(), String> {
    if found == wanted { Ok(()) } else { Err(format!("{what}: {found:?}, not {wanted:?}")) }
}

#[test]
fn every_call_in_a_child_returns_forked_and_the_parent_is_not_affected() {
    for (name, fabrics) in each_fabric() {
        let (here, there) = (engine(fabrics), engine(fabrics));
        let remote = there.alloc_shared(2 * LEN, EVERYTHING).unwrap();
        let local = here.alloc_shared(2 * LEN, Access::LOCAL).unwrap();
        let segment = here.open_segment(there.name()).unwrap();
        for round in 0..150u64 {
            let content = pattern(round + 1, LEN);
            local.write(0, &content).unwrap();
            let write = request(Op::Write, (local.id(), 0), segment, remote.addr(), LEN as u64);
            let read = request(Op::Read, (local.id(), LEN as u64), segment, remote.addr(), LEN as u64);
            let at_work = here.submit(&[write], LONG).unwrap();
            let buffer = here.register_buffer(vec![0u8; 4096], Access::LOCAL).unwrap();
            let at_work_too = here.read(buffer, 0..4096, segment, remote.addr() + LEN as u64, LONG).unwrap();
            in_a_child(name, || {
                transfers_are_forked(&here, &at_work, write)?;
                calls_are_forked(&here, there.name(), &local, segment)?;
                for region in [&local, &remote] {
                    let mut out = [0];
                    let kind = |result: Result<(), te_core::Error>| result.map_err(|error| error.kind);
                    is("read", kind(region.read(0, &mut out)), Err(ErrorKind::Forked))?;
                    is("write", kind(region.write(0, &out)), Err(ErrorKind::Forked))?;
                    is("view", region.view().len(), 0)?;
                    is("discard", region.discard().is_err(), true)?;
                }
                {
                    // SAFETY: read once, and the process ends without running the parent's drops.
                    let mut at_work = unsafe { std::ptr::read(&raw const at_work) };
                    let mut context = std::task::Context::from_waker(std::task::Waker::noop());
                    let polled = std::pin::Pin::new(&mut at_work).poll(&mut context);
                    is("poll", polled.is_ready(), true)?;
                }
                // SAFETY: as above.
                drop(unsafe { std::ptr::read(&raw const at_work_too) });
                drop((here.clone(), local.clone(), remote.clone()));
                if round % 30 == 0 {
                    own_engine(&there, &remote, fabrics)?;
                }
                // Dropping the last handles, too, must not affect the parent's threads and sockets.
                // SAFETY: each is read once, and the process ends without running the parent's drops.
                unsafe {
                    drop(std::ptr::read(&raw const here));
                    drop(std::ptr::read(&raw const there));
                    drop(std::ptr::read(&raw const local));
                    drop(std::ptr::read(&raw const remote));
                }
                Ok(())
            });
            at_work.wait(None).unwrap_or_else(|error| panic!("{name}, round {round}: {error}"));
            let (read_too, buffer) = at_work_too.join();
            read_too.unwrap_or_else(|error| panic!("{name}, round {round}: {error}"));
            here.unregister_buffer(buffer.unwrap()).unwrap();
            let back = here.submit(&[read], LONG).unwrap();
            back.wait(None).unwrap_or_else(|error| panic!("{name}, round {round}: {error}"));
            assert!(bytes(&local)[LEN..] == content, "{name}, round {round}: other bytes came back");
        }
        assert_eq!(there.stats().regions, 1);
    }
}

/// What a child gets of a transfer of its parent's, and for another one.
fn transfers_are_forked(
    here: &TransferEngine,
    at_work: &Transfer,
    write: TransferRequest,
) -> Result<(), String> {
    match at_work.wait(None) {
        // It had ended before the fork.
        Ok(_) => {}
        error => is("wait", error.map(drop), Err(TransferError::Forked))?,
    }
    if at_work.status() != Status::Completed {
        let report = at_work.report();
        is("report", report.error.map(|error| error.kind), Some(ErrorKind::Forked))?;
        is("status", report.status, Status::Failed)?;
    }
    at_work.cancel();
    let forked = Err::<(), _>(TransferError::Forked);
    is("submit", here.submit(&[write], LONG).map(drop), forked.clone())?;
    is("fence", here.fence(write.segment, LONG).map(drop), forked)
}

/// What a child gets from every other call.
fn calls_are_forked(
    here: &TransferEngine,
    peer: &str,
    local: &SharedRegion,
    segment: SegmentHandle,
) -> Result<(), String> {
    let region = Err::<(), _>(RegisterError::Forked);
    is("alloc_shared", here.alloc_shared(4096, Access::LOCAL).map(drop), region.clone())?;
    is("unregister", here.unregister(local.id()), region.clone())?;
    is("reregister", here.reregister(local, Access::LOCAL).map(drop), region.clone())?;
    let refused = here.register_buffer(vec![0u8; 64], Access::LOCAL).map(drop);
    is("register_buffer", refused.map_err(|given_back| given_back.error), region)?;
    let no_segment = Err::<(), _>(SegmentError::Forked);
    is("open_segment", here.open_segment(peer).map(drop), no_segment.clone())?;
    is("refresh_segment", here.refresh_segment(segment), no_segment.clone())?;
    is("close_segment", here.close_segment(segment), no_segment.clone())?;
    is("segment_regions", here.segment_regions(segment).map(drop), no_segment.clone())?;
    is("notify", here.notify(segment, "name", b"message"), no_segment.clone())?;
    is("probe", here.probe(segment, Duration::from_secs(60)).map(drop), no_segment)?;
    is("expel", here.expel(7, ExpelMode::Force), Err(ExpelError::Forked))?;
    is("take_notifications", here.take_notifications().len(), 0)?;
    is("registration", here.wait_registered(Duration::from_secs(60)), Registration::None)?;
    is("stats", here.stats().rails.len(), 0)
}

/// A child starts another engine and reaches its parent's memory with it, as any other process does, over the
/// fabrics that reach other processes.
fn own_engine(there: &TransferEngine, remote: &SharedRegion, fabrics: Fabrics) -> Result<(), String> {
    let fabrics = if fabrics == Fabrics::LOCAL { return Ok(()) } else { fabrics };
    let own = TransferEngine::start(config(fabrics)).map_err(|error| error.to_string())?;
    let local = own.alloc_shared(2 * 4096, Access::LOCAL).map_err(|error| error.to_string())?;
    let content = pattern(99, 4096);
    local.write(0, &content).map_err(|error| error.to_string())?;
    let segment = own.open_segment(there.name()).map_err(|error| error.to_string())?;
    let at = remote.addr() + remote.len() as u64 - 4096;
    for (op, offset) in [(Op::Write, 0), (Op::Read, 4096)] {
        let one = request(op, (local.id(), offset), segment, at, 4096);
        let transfer = own.submit(&[one], LONG).map_err(|error| error.to_string())?;
        transfer.wait(None).map_err(|error| format!("{op:?}: {error}"))?;
    }
    is("what came back", bytes(&local)[4096..] == content, true)
}

#[test]
fn every_call_of_a_polled_engine_in_a_child_returns_forked() {
    for (name, fabrics) in each_fabric() {
        let there = engine(fabrics);
        let remote = there.alloc_shared(LEN, EVERYTHING).unwrap();
        let mut here = Engine::start(config(fabrics)).unwrap();
        let local = here.alloc_shared(LEN, Access::LOCAL).unwrap();
        let segment = here.open_segment(there.name()).unwrap();
        let write = request(Op::Write, (local.id(), 0), segment, remote.addr(), LEN as u64);
        for round in 0..10u8 {
            local.write(0, &vec![round + 1; LEN]).unwrap();
            let batch = here.submit(&[write], LONG).unwrap();
            let engine = &mut here;
            in_a_child(name, || {
                is("submit", engine.submit(&[write], LONG).map(drop), Err(TransferError::Forked))?;
                is("poll", engine.poll(), 0)?;
                is("wait", engine.wait(batch, None).map(drop), Err(TransferError::Forked))?;
                is("report", engine.report(batch).map(drop), Err(TransferError::Forked))?;
                is("cancel", engine.cancel(batch), Err(TransferError::Forked))?;
                is("free", engine.free(batch), Err(TransferError::Forked))?;
                is("event_sources", engine.event_sources().count(), 0)?;
                engine.park(None);
                is("fence", engine.fence(segment, None).map(drop), Err(TransferError::Forked))?;
                is("open", engine.open_segment(there.name()).map(drop), Err(SegmentError::Forked))?;
                is("alloc", engine.alloc_lent(64, Access::LOCAL).map(drop), Err(RegisterError::Forked))?;
                // SAFETY: read once, and the process ends without running the parent's drop.
                drop(unsafe { std::ptr::read(&raw const *engine) });
                Ok(())
            });
            here.wait(batch, LONG).unwrap_or_else(|error| panic!("{name}, round {round}: {error}"));
            here.free(batch).unwrap();
            assert!(bytes(&remote) == vec![round + 1; LEN], "{name}, round {round}");
        }
    }
}
