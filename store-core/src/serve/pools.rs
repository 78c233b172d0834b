//! Handlers of requests about pools of CXL memory.

use super::Call;
use crate::message::{ClaimExtents, FreePage, ListPools, ReleaseExtents, TakePage};
use crate::pools::Taker;
use crate::wire::KEYS_PER_BATCH_MAX;
use crate::{ErrorCode, Master};

pub(super) fn claim_extents(master: &mut Master, call: Call<'_>) -> Result<(), ErrorCode> {
    let Call { now, request, .. } = call;
    let (wanted, _) = request.read::<ClaimExtents>()?;
    let given = master.claim_extents(now, &wanted)?;
    request.respond_head::<ClaimExtents>(&given)
}

pub(super) fn release_extents(master: &mut Master, call: Call<'_>) -> Result<(), ErrorCode> {
    let (released, _) = call.request.read::<ReleaseExtents>()?;
    master.release_extents(&released)?;
    call.request.respond_head::<ReleaseExtents>(&())
}

pub(super) fn take_page(master: &mut Master, call: Call<'_>) -> Result<(), ErrorCode> {
    let Call { now, session, rights, request, .. } = call;
    let (wanted, found) = request.read::<TakePage>()?;
    let by = Taker { tenant: rights.tenant, session: master.session_no(session) };
    let given = master.take_page_over(now, &wanted, found, by)?;
    request.respond_head::<TakePage>(&given)
}

pub(super) fn free_page(master: &mut Master, call: Call<'_>) -> Result<(), ErrorCode> {
    let (freed, _) = call.request.read::<FreePage>()?;
    master.free_page(&freed)?;
    call.request.respond_head::<FreePage>(&())
}

pub(super) fn list_pools(master: &mut Master, call: Call<'_>) -> Result<(), ErrorCode> {
    let mut all = master.pools(call.now);
    all.truncate(KEYS_PER_BATCH_MAX);
    call.request.respond::<ListPools>(&(), all.into_iter())
}
