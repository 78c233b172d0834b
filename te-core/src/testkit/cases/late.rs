//! L2: after a slice's completion its local memory is not touched, and its outcome is right.

use alloc::vec::Vec;

use super::super::rig::{REGION_BYTES, Rig, Skip, broken};
use crate::{ErrorKind, Features, Op, Outcome, Slice};

const CANARY: u8 = 0xC3;

pub(super) fn a_finished_read_never_writes_again(rig: &mut Rig<'_>) -> Result<(), Skip> {
    rig.need(Features::READ)?;
    rig.scramble();
    let slices = rig.random_slices(32, Some(Op::Read));
    rig.submit_all(&slices);
    rig.settle();
    rig.local.fill(CANARY);
    rig.linger_for_late_writes();
    check_canary(rig, "a finished READ");
    Ok(())
}

pub(super) fn a_cancelled_read_never_writes_again(rig: &mut Rig<'_>) -> Result<(), Skip> {
    rig.need(Features::READ)?;
    rig.scramble();
    for round in 0..16 {
        let slices = rig.random_slices(32, Some(Op::Read));
        rig.submit_all(&slices);
        rig.some_steps(round + 1);
        cancel_all(rig, &slices);
        rig.settle();
        rig.local.fill(CANARY);
        rig.some_steps(64);
        check_canary(rig, "a cancelled READ");
    }
    rig.linger_for_late_writes();
    check_canary(rig, "a cancelled READ");
    rig.still_works();
    Ok(())
}

pub(super) fn a_read_cancelled_under_a_stalled_target_never_writes_again(
    rig: &mut Rig<'_>,
) -> Result<(), Skip> {
    rig.need(Features::READ)?;
    rig.scramble();
    rig.still_works();
    for round in 0..6 {
        let slices = rig.random_slices(16, Some(Op::Read));
        if round % 2 == 0 {
            rig.stall(true)?;
            rig.submit_all(&slices);
        } else {
            rig.submit_all(&slices);
            rig.step();
            rig.stall(true)?;
        }
        rig.some_steps(32);
        cancel_all(rig, &slices);
        rig.settle();
        rig.local.fill(CANARY);
        rig.stall(false)?;
        rig.linger_for_late_writes();
        check_canary(rig, "a READ cancelled under a stalled target");
    }
    rig.still_works();
    Ok(())
}

pub(super) fn the_source_of_a_finished_write_is_free_for_reuse(rig: &mut Rig<'_>) -> Result<(), Skip> {
    const OLD: u8 = 0x11;
    const SENT: u8 = 0x22;
    const REUSED: u8 = 0x33;
    rig.need(Features::WRITE)?;
    for round in 0..12 {
        if round > 0 {
            rig.fence_for_sure();
        }
        rig.fill_remote(OLD);
        rig.local.fill(SENT);
        let slices = rig.random_slices(32, Some(Op::Write));
        rig.submit_all(&slices);
        if round % 2 == 1 {
            rig.some_steps(round);
            cancel_all(rig, &slices);
        }
        rig.settle();
        rig.local.fill(REUSED);
        if round % 4 == 3 {
            rig.linger_for_late_writes()
        } else {
            rig.some_steps(64)
        }
        let remote = rig.remote.read(0, REGION_BYTES);
        if remote.contains(&REUSED) {
            broken!(rig.law, "a WRITE read its source again after it had completed");
        }
        if let Some(odd) = remote.iter().find(|&&byte| byte != OLD && byte != SENT) {
            broken!(rig.law, "a WRITE put {odd:#x} there, which was not sent");
        }
    }
    Ok(())
}

pub(super) fn outcomes_are_honest_under_cancels(rig: &mut Rig<'_>) -> Result<(), Skip> {
    for round in 0..12 {
        if round > 0 && rig.caps.features.contains(Features::WRITE) {
            rig.fence_for_sure();
        }
        rig.scramble();
        let (local, remote) = (rig.local.read(0, REGION_BYTES), rig.remote.read(0, REGION_BYTES));
        let slices = rig.random_slices(48, None);
        rig.submit_all(&slices);
        rig.some_steps(round + 1);
        for slice in &slices {
            if rig.rng.chance_ppm(500_000) {
                let _done_or_not = rig.initiator().cancel(slice.token);
            }
        }
        rig.settle();
        check_outcomes(rig, &slices, &local, &remote);
        if round % 6 == 5 {
            rig.linger_for_late_writes();
            check_outcomes(rig, &slices, &local, &remote);
        }
    }
    rig.check_guards("a cancelled batch");
    Ok(())
}

pub(super) fn a_region_in_use_cannot_be_deregistered(rig: &mut Rig<'_>) -> Result<(), Skip> {
    let slices = rig.random_slices(8, None);
    rig.submit_all(&slices);
    let region = rig.region();
    if rig.in_flight() > 0 {
        match rig.initiator().deregister(region) {
            Err(error) if error.kind == ErrorKind::Busy => {}
            Err(error) => broken!(rig.law, "deregistering a region in use gave {:?}, not Busy", error.kind),
            Ok(()) => broken!(rig.law, "a region was deregistered while slices in flight refer to it"),
        }
    }
    rig.settle();
    let give_up = rig.deadline();
    while let Err(error) = rig.initiator().deregister(region) {
        if error.kind != ErrorKind::Busy {
            broken!(rig.law, "deregistering a region that is no longer used failed: {error}");
        }
        rig.step_before(give_up, rig.law, "a region stays Busy after its last slice has completed");
    }
    rig.local.fill(CANARY);
    rig.linger_for_late_writes();
    check_canary(rig, "a slice of a deregistered region");
    let again = rig.initiator().deregister(region);
    match again.map_err(|error| error.kind) {
        Err(ErrorKind::NotFound | ErrorKind::Stale) => Ok(()),
        other => broken!(rig.law, "deregistering twice gave {other:?}, not NotFound"),
    }
}

pub(super) fn a_remote_region_in_use_cannot_be_detached(rig: &mut Rig<'_>) -> Result<(), Skip> {
    let slices = rig.random_slices(8, None);
    rig.submit_all(&slices);
    let remote_region = rig.remote_region();
    if rig.in_flight() > 0 {
        match rig.initiator().detach(remote_region).map_err(|error| error.kind) {
            Err(ErrorKind::Busy) => {}
            other => broken!(rig.law, "detaching a remote region in use gave {other:?}, not Busy"),
        }
    }
    rig.settle();
    rig.fence_if_due();
    let give_up = rig.deadline();
    while let Err(error) = rig.initiator().detach(remote_region) {
        if error.kind != ErrorKind::Busy {
            broken!(rig.law, "detaching a remote region that is no longer used failed: {error}");
        }
        rig.step_before(give_up, rig.law, "a remote region stays Busy after its last slice has completed");
    }
    for op in rig.ops() {
        let slice = rig.slice(op, 0, 0, 64);
        rig.refused(slice, &[ErrorKind::NotFound, ErrorKind::Stale], "a slice to a detached remote region");
    }
    Ok(())
}

fn cancel_all(rig: &mut Rig<'_>, slices: &[Slice]) {
    for slice in slices {
        let cancelled = rig.initiator().cancel(slice.token);
        if !rig.is_done(slice.token) && cancelled.is_err() {
            broken!(rig.law, "cancelling a slice in flight gave {cancelled:?}");
        }
    }
}

fn check_canary(rig: &Rig<'_>, what: &str) {
    if rig.local.read(0, REGION_BYTES).iter().any(|&byte| byte != CANARY) {
        broken!(rig.law, "{what} changed its local memory after it had completed");
    }
    rig.check_guards(what);
}

/// Compares each outcome with the bytes. `local` and `remote` are the bytes of both ends before the batch.
pub(super) fn check_outcomes(rig: &Rig<'_>, slices: &[Slice], local: &[u8], remote: &[u8]) {
    for slice in slices {
        let end = rig.completion(slice.token);
        let (at, len) = (slice.remote.offset as usize, slice.len as usize);
        let there: Vec<u8> = rig.remote.read(at, len);
        let source = &local[slice.local.offset as usize..][..len];
        let old = &remote[at..][..len];
        match (slice.op, end.outcome) {
            (_, Outcome::Applied) => rig.check_content(slice),
            (Op::Write, Outcome::NotApplied) if there != old => {
                broken!(rig.law, "a WRITE that ended NotApplied ({:?}) changed the target", end.result)
            }
            (Op::Write, Outcome::Unknown) => {
                let mixed =
                    there.iter().zip(old).zip(source).all(|((byte, old), new)| byte == old || byte == new);
                if !mixed {
                    broken!(rig.law, "a WRITE that ended Unknown put bytes there that were not sent");
                }
            }
            (Op::Read, _) if there != old => broken!(rig.law, "a READ changed the target"),
            _ => {}
        }
    }
}
