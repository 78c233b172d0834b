//! L5: a fence is the target's confirmation that nothing older will land.

use super::super::rig::{REGION_BYTES, Rig, Skip, broken};
use crate::{ErrorKind, Features, MemoryKinds, Op, Outcome, RegionId, RemoteRegionId};

const OLD: u8 = 0x77;
const NEW: u8 = 0x99;

pub(super) fn a_fence_on_a_quiet_remote_region_is_acknowledged(rig: &mut Rig<'_>) -> Result<(), Skip> {
    rig.fence_for_sure();
    rig.still_works();
    rig.fence_for_sure();
    Ok(())
}

pub(super) fn after_a_fence_nothing_lands(rig: &mut Rig<'_>) -> Result<(), Skip> {
    nothing_lands(rig, false)
}

pub(super) fn after_a_fence_nothing_lands_that_a_stalled_target_held_back(
    rig: &mut Rig<'_>,
) -> Result<(), Skip> {
    nothing_lands(rig, true)
}

pub(super) fn a_fence_leaves_slices_in_flight_alone(rig: &mut Rig<'_>) -> Result<(), Skip> {
    rig.scramble();
    for _ in 0..4 {
        let slices = rig.random_slices(32, None);
        rig.submit_all(&slices);
        let remote_region = rig.remote_region();
        if let Err(error) = rig.fence(remote_region) {
            broken!(rig.law, "a fence with slices in flight was refused: {error}");
        }
        rig.settle();
        for slice in &slices {
            let end = rig.completion(slice.token);
            match end.result {
                Ok(()) => rig.check_content(slice),
                Err(error) if error.kind.is_retryable_elsewhere() => {}
                Err(error) => broken!(rig.law, "a fence ended a slice in flight: {error}"),
            }
        }
        rig.fence_for_sure();
    }
    Ok(())
}

pub(super) fn a_fence_needs_a_remote_region(rig: &mut Rig<'_>) -> Result<(), Skip> {
    let remote_region = rig.remote_region();
    for id in
        [RemoteRegionId::new(99, 1), RemoteRegionId::new(remote_region.index, remote_region.generation + 1)]
    {
        match rig.fence(id).map_err(|error| error.kind) {
            Err(ErrorKind::NotFound | ErrorKind::Stale) => {}
            other => broken!(rig.law, "a fence on {id}, which is not attached, gave {other:?}"),
        }
    }
    rig.still_works();
    Ok(())
}

pub(super) fn a_fence_to_a_dead_target_ends(rig: &mut Rig<'_>) -> Result<(), Skip> {
    rig.need(Features::WRITE.union(Features::FENCE))?;
    rig.still_works();
    let slices = rig.random_slices(16, Some(Op::Write));
    rig.submit_all(&slices);
    rig.kill()?;
    rig.settle();
    let unknown = slices.iter().any(|slice| rig.completion(slice.token).outcome == Outcome::Unknown);
    let remote_region = rig.remote_region();
    match rig.fence(remote_region) {
        Err(error) if error.kind.is_retryable_elsewhere() || error.kind == ErrorKind::PeerRestarted => {}
        Err(error) => broken!(rig.law, "a fence to a dead target was refused as {:?}", error.kind),
        Ok(token) => {
            rig.settle();
            if unknown && rig.completion(token).outcome == Outcome::Applied {
                broken!(rig.law, "a fence was acknowledged by a target that is dead");
            }
        }
    }
    Ok(())
}

pub(super) fn a_fence_after_a_restart_ends_and_holds(rig: &mut Rig<'_>) -> Result<(), Skip> {
    rig.need(Features::WRITE)?;
    rig.still_works();
    rig.local.fill(OLD);
    let slices = rig.random_slices(16, Some(Op::Write));
    rig.submit_all(&slices);
    rig.some_steps(4);
    rig.kill()?;
    rig.restart()?;
    rig.settle();
    let remote_region = rig.remote_region();
    for _ in 0..64 {
        // Applied, because the new incarnation fences the old one; or an error. It ends once.
        let Ok(token) = rig.fence(remote_region) else { break };
        rig.settle();
        if rig.completion(token).outcome == Outcome::Applied {
            rig.remote.fill(NEW);
            rig.linger_for_late_writes();
            check_new(rig);
            break;
        }
    }
    Ok(())
}

fn nothing_lands(rig: &mut Rig<'_>, stalled: bool) -> Result<(), Skip> {
    rig.need(Features::WRITE)?;
    rig.still_works();
    let mut unknown = 0;
    for round in 0..4 {
        rig.fill_remote(0);
        rig.local.fill(OLD);
        if stalled {
            rig.stall(true)?;
        }
        let slices = rig.random_slices(64, Some(Op::Write));
        rig.submit_all(&slices);
        rig.some_steps(if stalled { 4 + round } else { round });
        if !stalled && round % 2 == 0 {
            // Bytes have left about which the target has confirmed nothing. Those of a device are copied to
            // the host before.
            let steps = if rig.local.span().location().kind() == MemoryKinds::HOST { 1 } else { 32 };
            (0..steps).for_each(|_| rig.step_initiator());
        }
        for slice in &slices {
            let _done_or_not = rig.initiator().cancel(slice.token);
        }
        rig.settle();
        unknown +=
            slices.iter().filter(|slice| rig.completion(slice.token).outcome == Outcome::Unknown).count();
        if stalled {
            // A target that does not run cannot have confirmed anything. If the fence ends Applied in any
            // case, the bytes that wait at the target show the violation.
            let remote_region = rig.remote_region();
            let early = rig.fence(remote_region);
            rig.linger(core::time::Duration::from_millis(5));
            let acknowledged = early
                .is_ok_and(|token| rig.is_done(token) && rig.completion(token).outcome == Outcome::Applied);
            if acknowledged {
                rig.remote.fill(NEW);
            }
            rig.stall(false)?;
            if acknowledged {
                rig.linger_for_late_writes();
                check_new(rig);
            }
        }
        rig.fence_for_sure();
        // The range gets other bytes from another owner: from here on no byte of the batch may show.
        rig.remote.fill(NEW);
        rig.linger_for_late_writes();
        check_new(rig);
        check_reuse(rig);
    }
    match unknown {
        0 if rig.caps.features.contains(Features::FENCE) => {
            Err(Skip::because("no WRITE could be made to end Unknown"))
        }
        _ => Ok(()),
    }
}

fn check_new(rig: &Rig<'_>) {
    if rig.remote.read(0, REGION_BYTES).iter().any(|&byte| byte != NEW) {
        broken!(rig.law, "a WRITE from before a fence landed after it had been acknowledged");
    }
    rig.check_guards("a fenced WRITE");
}

/// After a fence the target may even deregister its memory.
fn check_reuse(rig: &mut Rig<'_>) {
    let region = rig.region();
    let give_up = rig.deadline();
    while let Err(error) = rig.target().deregister(region) {
        if error.kind != ErrorKind::Busy {
            broken!(rig.law, "the target cannot deregister a fenced region: {error}");
        }
        rig.step_before(give_up, rig.law, "a fenced region stays Busy at the target");
    }
    let remote_region = rig.remote_region();
    let give_up = rig.deadline();
    while rig.initiator().detach(remote_region).is_err() {
        rig.step_before(give_up, rig.law, "a fenced remote region stays Busy");
    }
    rig.export_remote(RegionId::new(region.index, region.generation), remote_region);
}
