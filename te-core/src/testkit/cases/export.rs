//! L6 for the bytes that applications carry between processes: exports that are cut short, forged, or noise.

use alloc::vec;
use alloc::vec::Vec;
use core::ops::Range;

use super::super::rig::{REGION_BYTES, Rig, Skip, broken};
use crate::{Access, Completion, ErrorKind, Op, RegionId, RemoteOffset, RemoteRegionId, Slice};

pub(super) fn a_truncated_export_is_refused_at_every_length(rig: &mut Rig<'_>) -> Result<(), Skip> {
    let region = rig.region();
    let blob = rig.export(region);
    for len in 0..blob.len() {
        let id = RemoteRegionId::new(rig.fresh_index(), 1);
        match rig.initiator().attach(id, &blob[..len]).map_err(|error| error.kind) {
            Err(ErrorKind::InvalidArgument | ErrorKind::Unreachable) => {}
            Err(kind) => {
                broken!(rig.law, "{len} of {} bytes of an export were refused as {kind:?}", blob.len())
            }
            Ok(()) => {
                broken!(rig.law, "{len} of {} bytes of an export were taken for a whole one", blob.len())
            }
        }
    }
    rig.still_works();
    Ok(())
}

pub(super) fn a_forged_export_reaches_nothing_else(rig: &mut Rig<'_>) -> Result<(), Skip> {
    // The remote region is a read-only window of the target's memory; the bytes around it, which are
    // registered, too, are secret.
    rig.still_works();
    let region = rig.region();
    let give_up = rig.deadline();
    while rig.target().deregister(region).is_err() {
        rig.step_before(give_up, rig.law, "an unused region stays Busy at the target");
    }
    let id = RegionId::new(rig.fresh_index(), 3);
    let blob = rig.register_remote(id, Access::REMOTE_READ);
    let address = rig.pair().address_bytes(&blob);
    for at in (0..blob.len()).filter(|at| !address.contains(at)) {
        for mask in [0x01, 0x80, 0xFF] {
            let mut forged = blob.clone();
            forged[at] ^= mask;
            try_forged(rig, &forged, at);
        }
    }
    // None of that may affect the valid export.
    let remote_region = RemoteRegionId::new(rig.fresh_index(), 1);
    if let Err(error) = rig.initiator().attach(remote_region, &blob) {
        broken!(rig.law, "a valid export was refused after forged ones: {error}");
    }
    if rig.ops().contains(&Op::Read) {
        let slice = Slice { remote: RemoteOffset::new(remote_region, 0), ..rig.slice(Op::Read, 0, 0, 64) };
        rig.transfer(&[slice]);
        rig.check_content(&slice);
    }
    Ok(())
}

pub(super) fn a_wrong_key_opens_nothing(rig: &mut Rig<'_>) -> Result<(), Skip> {
    let region = rig.region();
    let blob = rig.export(region);
    let Some(key) = rig.pair().key_bytes(&blob) else {
        return Err(Skip::because("the harness does not know where the key is"));
    };
    rig.scramble();
    for at in key {
        let mut forged = blob.clone();
        forged[at] ^= 1 << rig.rng.below(8);
        let remote_region = RemoteRegionId::new(rig.fresh_index(), 1);
        if rig.initiator().attach(remote_region, &forged).is_err() {
            continue;
        }
        for op in rig.ops() {
            let slice = Slice { remote: RemoteOffset::new(remote_region, 0), ..rig.slice(op, 0, 0, 64) };
            rig.refused(slice, &[ErrorKind::AccessDenied, ErrorKind::Stale], "a slice under a wrong key");
        }
    }
    rig.still_works();
    Ok(())
}

pub(super) fn garbage_is_not_an_export(rig: &mut Rig<'_>) -> Result<(), Skip> {
    let longest = rig.caps.export_bytes_max as usize;
    rig.scramble();
    let before = rig.remote.read(0, REGION_BYTES);
    for round in 0..200 {
        let mut noise = vec![0; rig.rng.index(2 * longest + 2)];
        rig.rng.fill(&mut noise);
        if round % 8 == 0 {
            noise.fill((round as u8).wrapping_mul(17));
        }
        let remote_region = RemoteRegionId::new(rig.fresh_index(), 1);
        if rig.initiator().attach(remote_region, &noise).is_ok() {
            broken!(rig.law, "{} random bytes were taken for an export", noise.len());
        }
    }
    if rig.remote.read(0, REGION_BYTES) != before {
        broken!(rig.law, "garbage changed the target's memory");
    }
    rig.still_works();
    Ok(())
}

/// Whatever a forged export contains, the target decides: no byte changes, and none outside the window is
/// read.
fn try_forged(rig: &mut Rig<'_>, forged: &[u8], at: usize) {
    const CANARY: u8 = 0x42;
    const SECRET_FREE: u8 = 0x5A;
    let remote_region = RemoteRegionId::new(rig.fresh_index(), 1);
    if rig.initiator().attach(remote_region, forged).is_err() {
        return;
    }
    rig.fill_remote(CANARY);
    rig.local.fill(SECRET_FREE);
    let window = REGION_BYTES as u64;
    let reaches: [(Op, u64, Range<u64>); 4] = [
        (Op::Write, 0, 0..64),
        (Op::Write, window, window..window + 64),
        (Op::Read, window - 32, window - 32..window + 32),
        (Op::Read, window + 64, window + 64..window + 128),
    ];
    for (op, offset, range) in reaches {
        if !rig.ops().contains(&op) {
            continue;
        }
        let slice = Slice { remote: RemoteOffset::new(remote_region, offset), ..rig.slice(op, 0, 0, 64) };
        let end = rig.run_one(slice);
        if let Ok(Completion { result: Ok(()), .. }) = end {
            broken!(
                rig.law,
                "an export forged at byte {at} allowed {op:?} of {range:?} in a read-only window"
            );
        }
        let there: Vec<u8> = rig.remote.read(0, REGION_BYTES);
        if there.iter().any(|&byte| byte != CANARY) {
            broken!(rig.law, "an export forged at byte {at} let a peer change the target's memory");
        }
        if rig.local.read(0, 64).iter().any(|&byte| byte != SECRET_FREE) {
            broken!(rig.law, "an export forged at byte {at} brought bytes from outside the window");
        }
        rig.check_guards("a forged export");
    }
    let give_up = rig.deadline();
    while rig.initiator().detach(remote_region).is_err() {
        rig.step_before(give_up, rig.law, "a remote region stays Busy after its last slice has completed");
    }
}
