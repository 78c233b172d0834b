//! L3: a cancel starts the end of a slice, whose completion still comes exactly once.

use super::super::rig::{Rig, Skip, broken};
use super::late::check_outcomes;
use crate::{ErrorKind, Features, MemoryKinds, Outcome, Token};

pub(super) fn cancel_before_the_first_poll_ends_the_slice(rig: &mut Rig<'_>) -> Result<(), Skip> {
    for op in rig.ops() {
        rig.scramble();
        let slice = rig.slice(op, 10, 20, 3000);
        if let Err(error) = rig.submit_one(slice) {
            broken!(rig.law, "a valid slice was refused: {error}");
        }
        if let Err(error) = rig.initiator().cancel(slice.token) {
            broken!(rig.law, "a slice that has just been accepted cannot be cancelled: {error}");
        }
        rig.settle();
        let end = rig.completion(slice.token);
        if let Err(error) = end.result
            && error.kind != ErrorKind::Canceled
            && !error.kind.is_retryable_elsewhere()
        {
            broken!(rig.law, "a cancelled slice ended as {:?}", error.kind);
        }
        if end.outcome == Outcome::Applied {
            rig.check_content(&slice);
        }
        if rig.caps.features.contains(Features::WRITE) {
            rig.fence_for_sure();
        }
    }
    rig.still_works();
    Ok(())
}

pub(super) fn cancel_in_mid_flight_ends_every_slice_once(rig: &mut Rig<'_>) -> Result<(), Skip> {
    for round in 0..16 {
        let slices = rig.random_slices(64, None);
        rig.submit_all(&slices);
        rig.some_steps(round + 1);
        for slice in &slices {
            let was_done = rig.is_done(slice.token);
            let cancelled = rig.initiator().cancel(slice.token);
            if !was_done && cancelled.is_err() {
                broken!(rig.law, "cancelling a slice in flight gave {cancelled:?}");
            }
            if rig.rng.chance_ppm(300_000) {
                // A second cancel changes nothing.
                let _ended_or_not = rig.initiator().cancel(slice.token);
            }
        }
        rig.settle();
    }
    rig.linger_for_late_writes();
    rig.still_works();
    Ok(())
}

pub(super) fn cancel_of_something_finished_is_not_found(rig: &mut Rig<'_>) -> Result<(), Skip> {
    let slices = rig.random_slices(8, None);
    rig.submit_all(&slices);
    rig.settle();
    for slice in &slices {
        match rig.initiator().cancel(slice.token).map_err(|error| error.kind) {
            Err(ErrorKind::NotFound) => {}
            other => broken!(rig.law, "cancelling a slice that has completed gave {other:?}, not NotFound"),
        }
    }
    rig.linger_for_late_writes();
    Ok(())
}

pub(super) fn cancel_of_nothing_is_not_found(rig: &mut Rig<'_>) -> Result<(), Skip> {
    let in_flight = rig.random_slices(4, None);
    rig.submit_all(&in_flight);
    for token in [Token(0), Token(3), Token(u64::MAX)] {
        match rig.initiator().cancel(token).map_err(|error| error.kind) {
            Err(ErrorKind::NotFound) => {}
            other => {
                broken!(
                    rig.law,
                    "cancelling {token:?}, which was not submitted, gave {other:?}, not NotFound"
                )
            }
        }
    }
    rig.settle();
    for slice in &in_flight {
        if rig.completion(slice.token).result.is_err_and(|error| error.kind == ErrorKind::Canceled) {
            broken!(rig.law, "cancelling an unknown token cancelled {:?}", slice.token);
        }
    }
    Ok(())
}

pub(super) fn a_cancel_ends_the_slice_even_when_the_target_is_stalled(rig: &mut Rig<'_>) -> Result<(), Skip> {
    rig.still_works();
    rig.stall(true)?;
    let slices = rig.random_slices(16, None);
    rig.submit_all(&slices);
    rig.some_steps(16);
    for slice in &slices {
        let _done_or_not = rig.initiator().cancel(slice.token);
    }
    rig.settle();
    rig.stall(false)?;
    rig.linger_for_late_writes();
    rig.still_works();
    Ok(())
}

pub(super) fn a_caller_driven_transport_releases_memory_in_the_next_poll(
    rig: &mut Rig<'_>,
) -> Result<(), Skip> {
    rig.need(Features::CALLER_DRIVEN)?;
    if rig.local.span().location().kind() != MemoryKinds::HOST {
        return Err(Skip::because("CALLER_DRIVEN is about memory of the host alone"));
    }
    for round in 0..16 {
        let slices = rig.random_slices(48, None);
        rig.submit_all(&slices);
        rig.some_steps(round + 1);
        for slice in &slices {
            // It may have ended already.
            let _ended_or_not = rig.initiator().cancel(slice.token);
        }
        rig.step();
        if let Some(slice) = slices.iter().find(|slice| !rig.is_done(slice.token)) {
            broken!(
                rig.law,
                "{slice:?} was cancelled and polled, and has not ended, though the transport is CALLER_DRIVEN"
            );
        }
        let region = rig.region();
        if let Err(error) = rig.initiator().deregister(region) {
            broken!(rig.law, "memory that no slice uses any more cannot be deregistered: {error}");
        }
        rig.register_local();
    }
    rig.linger_for_late_writes();
    rig.still_works();
    Ok(())
}

pub(super) fn a_cancel_does_not_disturb_its_neighbours(rig: &mut Rig<'_>) -> Result<(), Skip> {
    for _ in 0..8 {
        rig.scramble();
        let (local, remote) = (rig.local.read(0, rig.local.len()), rig.remote.read(0, rig.remote.len()));
        let slices = rig.random_slices(32, None);
        rig.submit_all(&slices);
        rig.some_steps(4);
        for slice in slices.iter().step_by(2) {
            let _done_or_not = rig.initiator().cancel(slice.token);
        }
        rig.settle();
        for slice in slices.iter().skip(1).step_by(2) {
            if rig.completion(slice.token).result.is_err_and(|error| error.kind == ErrorKind::Canceled) {
                broken!(rig.law, "a slice that was not cancelled ended Canceled");
            }
        }
        check_outcomes(rig, &slices, &local, &remote);
        if rig.caps.features.contains(Features::WRITE) {
            rig.fence_for_sure();
        }
    }
    Ok(())
}
