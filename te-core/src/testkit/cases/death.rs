//! How slices end when the target dies, comes back with another incarnation, or the connection breaks.

use alloc::vec;

use super::super::rig::{REGION_BYTES, Rig, Skip, broken};
use super::late::check_outcomes;
use crate::{Access, ErrorKind, RegionId, RemoteOffset, RemoteRegionId, Slice};

pub(super) fn when_the_target_dies_every_slice_ends_once(rig: &mut Rig<'_>) -> Result<(), Skip> {
    rig.still_works();
    rig.scramble();
    let (local, remote) = (rig.local.read(0, REGION_BYTES), rig.remote.read(0, REGION_BYTES));
    let slices = rig.random_slices(128, None);
    rig.submit_all(&slices);
    rig.some_steps(8);
    rig.kill()?;
    rig.settle();
    check_outcomes(rig, &slices, &local, &remote);
    for op in rig.ops() {
        let slice = rig.slice(op, 0, 0, 64);
        match rig.run_one(slice).map(|end| end.result) {
            Ok(Ok(())) => broken!(rig.law, "a {op:?} to a dead target was applied"),
            Ok(Err(error)) | Err(error) if error.kind.is_retryable_elsewhere() => {}
            Ok(Err(error)) | Err(error) => {
                broken!(rig.law, "a {op:?} to a dead target ended as {:?}", error.kind)
            }
        }
    }
    rig.linger_for_late_writes();
    rig.check_guards("a slice to a dying target");
    Ok(())
}

pub(super) fn after_a_restart_an_old_remote_region_is_refused_and_never_misread(
    rig: &mut Rig<'_>,
) -> Result<(), Skip> {
    const OURS: u8 = 0x0F;
    const THEIRS: u8 = 0xF0;
    rig.still_works();
    rig.kill()?;
    rig.restart()?;
    // The new process registers under the same id, with the same length: only the incarnation differs.
    let access = Access::LOCAL | Access::REMOTE_READ | Access::REMOTE_WRITE;
    let region = rig.region();
    let _new_export = rig.register_remote(region, access);
    rig.local.fill(OURS);
    rig.remote.fill(THEIRS);
    for op in rig.ops() {
        let give_up = rig.deadline();
        loop {
            let slice = rig.slice(op, 0, 0, 4096);
            let kind = match rig.run_one(slice).map(|end| end.result) {
                Ok(Ok(())) => {
                    broken!(rig.law, "a {op:?} under the export of a former incarnation was applied")
                }
                Ok(Err(error)) | Err(error) => error.kind,
            };
            if rig.remote.read(0, REGION_BYTES) != vec![THEIRS; REGION_BYTES] {
                broken!(
                    rig.law,
                    "a WRITE under the export of a former incarnation changed the new one's memory"
                );
            }
            if rig.local.read(0, REGION_BYTES) != vec![OURS; REGION_BYTES] {
                broken!(
                    rig.law,
                    "a READ under the export of a former incarnation brought the new one's bytes"
                );
            }
            if kind == ErrorKind::PeerRestarted {
                break;
            }
            if !kind.is_retryable_elsewhere() {
                broken!(
                    rig.law,
                    "a remote region of a former incarnation was refused as {kind:?}, not PeerRestarted"
                );
            }
            rig.step_before(give_up, rig.law, "the restart of the target is never reported as PeerRestarted");
        }
    }
    Ok(())
}

pub(super) fn after_a_restart_a_new_export_works(rig: &mut Rig<'_>) -> Result<(), Skip> {
    rig.still_works();
    let slices = rig.random_slices(16, None);
    rig.submit_all(&slices);
    rig.kill()?;
    rig.restart()?;
    rig.settle();
    let remote_region = RemoteRegionId::new(rig.fresh_index(), 1);
    rig.export_remote(RegionId::new(0, 1), remote_region);
    rig.scramble();
    for op in rig.ops() {
        let slice = rig.slice(op, 17, 21, 5000);
        let slice = Slice { remote: RemoteOffset::new(remote_region, slice.remote.offset), ..slice };
        rig.transfer(&[slice]);
        rig.check_content(&slice);
    }
    Ok(())
}

pub(super) fn a_cut_connection_ends_every_slice_and_heals(rig: &mut Rig<'_>) -> Result<(), Skip> {
    rig.still_works();
    for round in 0..3 {
        rig.scramble();
        let (local, remote) = (rig.local.read(0, REGION_BYTES), rig.remote.read(0, REGION_BYTES));
        let slices = rig.random_slices(64, None);
        rig.submit_all(&slices);
        rig.some_steps(4 + round);
        rig.cut()?;
        rig.settle();
        check_outcomes(rig, &slices, &local, &remote);
        rig.fence_for_sure();
        rig.still_works();
    }
    Ok(())
}
