//! Handlers of requests about the disks of nodes.

use alloc::vec::Vec;

use super::Call;
use crate::message::{
    AdoptObjects, Adoption, DiskReady, EndDiskOrders, FetchDiskOrders, Lease, LocateExtents, MountDisks,
    ReclaimExtents, ReleaseStaged, Stage,
};
use crate::{ErrorCode, Master};

pub(super) fn mount(master: &mut Master, call: Call<'_>) -> Result<(), ErrorCode> {
    let Call { now, request, .. } = call;
    let (_, mounts) = request.read::<MountDisks>()?;
    request.respond::<MountDisks>(&(), mounts.map(|mount| master.mount_disk(now, &mount)))
}

pub(super) fn adopt(master: &mut Master, call: Call<'_>) -> Result<(), ErrorCode> {
    let (proof, found) = call.request.read::<AdoptObjects>()?;
    let adopted: Result<Vec<Adoption>, ErrorCode> = found.map(|found| master.adopt(&proof, &found)).collect();
    call.request.respond::<AdoptObjects>(&(), adopted?.into_iter())
}

pub(super) fn ready(master: &mut Master, call: Call<'_>) -> Result<(), ErrorCode> {
    let (proof, _) = call.request.read::<DiskReady>()?;
    master.disk_ready(&proof)?;
    call.request.respond_head::<DiskReady>(&())
}

pub(super) fn fetch(master: &mut Master, call: Call<'_>) -> Result<(), ErrorCode> {
    let (fetch, _) = call.request.read::<FetchDiskOrders>()?;
    let head = Lease { lease_ms: master.config().lease_ttl_ms, first: 0 };
    let orders = master.fetch_disk(call.now, &fetch)?;
    call.request.respond::<FetchDiskOrders>(&head, orders.into_iter())
}

pub(super) fn end(master: &mut Master, call: Call<'_>) -> Result<(), ErrorCode> {
    let (proof, ends) = call.request.read::<EndDiskOrders>()?;
    call.request.respond::<EndDiskOrders>(&(), ends.map(|end| master.end_disk(&proof, &end)))
}

pub(super) fn reclaim(master: &mut Master, call: Call<'_>) -> Result<(), ErrorCode> {
    let (proof, sequences) = call.request.read::<ReclaimExtents>()?;
    for sequence in sequences {
        master.reclaim(&proof, sequence)?;
    }
    call.request.respond_head::<ReclaimExtents>(&())
}

/// A node takes this request, and a master does not.
pub(super) fn stage(_: &mut Master, call: Call<'_>) -> Result<(), ErrorCode> {
    call.request.read::<Stage>()?;
    Err(ErrorCode::NotSupported)
}

/// As [`stage`].
pub(super) fn release_staged(_: &mut Master, call: Call<'_>) -> Result<(), ErrorCode> {
    call.request.read::<ReleaseStaged>()?;
    Err(ErrorCode::NotSupported)
}

/// As [`stage`].
pub(super) fn locate_extents(_: &mut Master, call: Call<'_>) -> Result<(), ErrorCode> {
    call.request.read::<LocateExtents>()?;
    Err(ErrorCode::NotSupported)
}
