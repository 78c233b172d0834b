//! L6: a peer reaches only what was exported, with the rights it was given; a refusal does not cost a
//! connection.

use super::super::Side;
use super::super::rig::{REGION_BYTES, Rig, Skip, broken};
use crate::{
    Access, ErrorKind, Features, MemSpan, Op, RegionId, RegionOffset, RemoteOffset, RemoteRegionId, Slice,
};

const RANGE: &[ErrorKind] = &[ErrorKind::OutOfRange, ErrorKind::InvalidArgument];
const GONE: &[ErrorKind] = &[ErrorKind::Stale, ErrorKind::NotFound, ErrorKind::AccessDenied];

pub(super) fn out_of_range_by_one_is_refused(rig: &mut Rig<'_>) -> Result<(), Skip> {
    let end = REGION_BYTES as u64;
    for op in rig.ops() {
        rig.scramble();
        let good = rig.slice(op, 0, 0, 100);
        let len = u64::from(good.len);
        for offset in [end - len + 1, end, end + 1, u64::MAX - len + 1, u64::MAX] {
            let remote = Slice { remote: RemoteOffset::new(good.remote.region, offset), ..good };
            rig.refused(remote, RANGE, "a slice that leaves the remote region");
            let local = Slice { local: RegionOffset::new(good.local.region, offset), ..good };
            rig.refused(local, RANGE, "a slice that leaves the local region");
        }
        rig.still_works();
    }
    Ok(())
}

pub(super) fn a_huge_length_is_refused(rig: &mut Rig<'_>) -> Result<(), Skip> {
    for op in rig.ops() {
        rig.scramble();
        for len in [REGION_BYTES as u32 + 1, 1 << 31, u32::MAX] {
            let slice = Slice { len, ..rig.slice(op, 0, 0, 1) };
            rig.refused(slice, RANGE, "a slice longer than its region");
        }
        rig.still_works();
    }
    Ok(())
}

pub(super) fn a_zero_length_is_refused(rig: &mut Rig<'_>) -> Result<(), Skip> {
    for op in rig.ops() {
        let slice = rig.slice(op, 0, 0, 0);
        rig.refused(slice, &[ErrorKind::InvalidArgument], "a slice without bytes");
        rig.still_works();
    }
    Ok(())
}

pub(super) fn a_read_only_export_cannot_be_written(rig: &mut Rig<'_>) -> Result<(), Skip> {
    rig.need(Features::WRITE)?;
    one_right_only(rig, Access::REMOTE_READ, Op::Write, Op::Read)
}

pub(super) fn a_write_only_export_cannot_be_read(rig: &mut Rig<'_>) -> Result<(), Skip> {
    rig.need(Features::READ)?;
    one_right_only(rig, Access::REMOTE_WRITE, Op::Read, Op::Write)
}

pub(super) fn local_rights_are_kept_too(rig: &mut Rig<'_>) -> Result<(), Skip> {
    for (op, access) in [(Op::Read, Access::LOCAL_READ), (Op::Write, Access::LOCAL_WRITE)] {
        if !rig.ops().contains(&op) {
            continue;
        }
        rig.scramble();
        let buffer = rig.allocate(Side::Initiator, 4096);
        let id = RegionId::new(rig.fresh_index(), 1);
        let buffers = core::mem::take(&mut rig.more);
        let registered = rig.register_at(Side::Initiator, id, &buffers[buffer], access);
        rig.more = buffers;
        if let Err(error) = registered {
            return Err(Skip(::alloc::format!(
                "local memory with {access:?} alone cannot be registered: {error}"
            )));
        }
        let slice = Slice { local: RegionOffset::new(id, 0), ..rig.slice(op, 0, 0, 64) };
        rig.refused(slice, &[ErrorKind::AccessDenied], "an operation that the local region does not allow");
    }
    rig.still_works();
    Ok(())
}

pub(super) fn a_private_region_cannot_be_exported(rig: &mut Rig<'_>) -> Result<(), Skip> {
    let buffer = rig.allocate(Side::Target, 4096);
    let id = RegionId::new(rig.fresh_index(), 1);
    let buffers = core::mem::take(&mut rig.more);
    let registered = rig.register_at(Side::Target, id, &buffers[buffer], Access::LOCAL);
    rig.more = buffers;
    if let Err(error) = registered {
        broken!(rig.law, "registering private memory failed: {error}");
    }
    let mut blob = [0; 1024];
    match rig.target().export(id, &mut blob).map_err(|error| error.kind) {
        Err(ErrorKind::AccessDenied) => {}
        other => broken!(rig.law, "exporting a private region gave {other:?}, not AccessDenied"),
    }
    let region = rig.region();
    match rig.target().export(region, &mut []).map_err(|error| error.kind) {
        Err(ErrorKind::OutOfRange) => {}
        other => broken!(rig.law, "exporting into no room gave {other:?}, not OutOfRange"),
    }
    match rig.target().export(RegionId::new(98, 1), &mut blob).map_err(|error| error.kind) {
        Err(ErrorKind::NotFound | ErrorKind::Stale) => Ok(()),
        other => broken!(rig.law, "exporting a region that does not exist gave {other:?}, not NotFound"),
    }
}

pub(super) fn unknown_and_stale_ids_are_refused(rig: &mut Rig<'_>) -> Result<(), Skip> {
    let (region, remote_region) = (rig.region(), rig.remote_region());
    for op in rig.ops() {
        rig.scramble();
        let good = rig.slice(op, 0, 0, 64);
        for id in [
            RegionId::new(97, 1),
            RegionId::new(region.index, region.generation + 1),
            RegionId::new(u32::MAX, 0),
        ] {
            rig.refused(
                Slice { local: RegionOffset::new(id, 0), ..good },
                GONE,
                "a slice of an unknown or stale region",
            );
        }
        for id in [
            RemoteRegionId::new(97, 1),
            RemoteRegionId::new(remote_region.index, remote_region.generation + 1),
        ] {
            rig.refused(
                Slice { remote: RemoteOffset::new(id, 0), ..good },
                GONE,
                "a slice to an unknown or stale remote region",
            );
        }
        rig.still_works();
    }
    let stale_region = rig.initiator().deregister(RegionId::new(region.index, region.generation + 1));
    let stale_remote_region =
        rig.initiator().detach(RemoteRegionId::new(remote_region.index, remote_region.generation + 1));
    for (what, result) in [("deregister", stale_region), ("detach", stale_remote_region)] {
        match result.map_err(|error| error.kind) {
            Err(ErrorKind::Stale | ErrorKind::NotFound) => {}
            other => broken!(rig.law, "{what} of a stale id gave {other:?}, not Stale"),
        }
    }
    rig.still_works();
    Ok(())
}

pub(super) fn a_registered_again_region_does_not_answer_to_its_old_export(
    rig: &mut Rig<'_>,
) -> Result<(), Skip> {
    rig.still_works();
    rig.scramble();
    take_back(rig);
    let region = rig.region();
    let again = RegionId::new(region.index, region.generation + 1);
    let access = Access::LOCAL | Access::REMOTE_READ | Access::REMOTE_WRITE;
    let blob = rig.register_remote(again, access);
    for op in rig.ops() {
        let slice = rig.slice(op, 0, 0, 64);
        rig.refused(slice, GONE, "a slice under an export of the region's former generation");
    }
    let remote_region = RemoteRegionId::new(rig.fresh_index(), 1);
    if let Err(error) = rig.initiator().attach(remote_region, &blob) {
        broken!(rig.law, "the new export of a region could not be attached beside the old one: {error}");
    }
    for op in rig.ops() {
        let slice = rig.slice(op, 9, 7, 500);
        let slice = Slice { remote: RemoteOffset::new(remote_region, slice.remote.offset), ..slice };
        rig.transfer(&[slice]);
        rig.check_content(&slice);
    }
    Ok(())
}

pub(super) fn a_deregistered_region_is_out_of_reach(rig: &mut Rig<'_>) -> Result<(), Skip> {
    rig.still_works();
    rig.scramble();
    take_back(rig);
    for op in rig.ops() {
        let slice = rig.slice(op, 0, 0, 64);
        rig.refused(slice, GONE, "a slice to a region that its owner has deregistered");
    }
    // The peer, and what else it exports, is still reachable.
    let remote_region = RemoteRegionId::new(rig.fresh_index(), 1);
    rig.export_remote(RegionId::new(remote_region.index, 1), remote_region);
    for op in rig.ops() {
        let slice = Slice { remote: RemoteOffset::new(remote_region, 0), ..rig.slice(op, 0, 0, 64) };
        rig.transfer(&[slice]);
    }
    Ok(())
}

pub(super) fn a_taken_index_is_busy(rig: &mut Rig<'_>) -> Result<(), Skip> {
    let (region, remote_region) = (rig.region(), rig.remote_region());
    let blob = rig.export(region);
    let buffer = rig.allocate(Side::Initiator, 4096);
    let buffers = core::mem::take(&mut rig.more);
    for generation in [region.generation, region.generation + 1] {
        let id = RegionId::new(region.index, generation);
        match rig
            .register_at(Side::Initiator, id, &buffers[buffer], Access::LOCAL)
            .map_err(|error| error.kind)
        {
            Err(ErrorKind::Busy) => {}
            other => broken!(rig.law, "registering {id} over an existing region gave {other:?}, not Busy"),
        }
        let id = RemoteRegionId::new(remote_region.index, generation);
        match rig.initiator().attach(id, &blob).map_err(|error| error.kind) {
            Err(ErrorKind::Busy) => {}
            other => {
                broken!(rig.law, "attaching {id} over an existing remote region gave {other:?}, not Busy")
            }
        }
    }
    rig.more = buffers;
    let id = RegionId::new(rig.fresh_index(), 1);
    let whole = rig.local.span();
    let empty = MemSpan::new(whole.as_ptr(), 0).at(whole.location());
    match rig.register_span(id, empty).map_err(|error| error.kind) {
        Err(ErrorKind::InvalidArgument) => {}
        other => broken!(rig.law, "registering no bytes gave {other:?}, not InvalidArgument"),
    }
    rig.still_works();
    Ok(())
}

fn one_right_only(rig: &mut Rig<'_>, right: Access, denied: Op, granted: Op) -> Result<(), Skip> {
    rig.scramble();
    take_back(rig);
    let id = RegionId::new(rig.fresh_index(), 1);
    let remote_region = RemoteRegionId::new(id.index, 1);
    let blob = rig.register_remote(id, Access::LOCAL | right);
    if let Err(error) = rig.initiator().attach(remote_region, &blob) {
        broken!(rig.law, "an export with {right:?} alone could not be attached: {error}");
    }
    for offset in [0, 1, REGION_BYTES - 100] {
        let slice = rig.slice(denied, 0, offset, 100);
        let slice = Slice { remote: RemoteOffset::new(remote_region, slice.remote.offset), ..slice };
        rig.refused(slice, &[ErrorKind::AccessDenied], "an operation that the export does not grant");
    }
    if rig.ops().contains(&granted) {
        let slice = Slice { remote: RemoteOffset::new(remote_region, 0), ..rig.slice(granted, 0, 0, 100) };
        rig.transfer(&[slice]);
        rig.check_content(&slice);
    }
    Ok(())
}

/// Deregisters the target's region.
fn take_back(rig: &mut Rig<'_>) {
    let region = rig.region();
    let give_up = rig.deadline();
    while let Err(error) = rig.target().deregister(region) {
        if error.kind != ErrorKind::Busy {
            broken!(rig.law, "the target cannot deregister its region: {error}");
        }
        rig.step_before(give_up, rig.law, "an unused region stays Busy at the target");
    }
}
