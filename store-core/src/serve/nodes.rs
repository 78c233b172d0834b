//! Handlers of requests about nodes and segments.

use alloc::vec::Vec;

use super::Call;
use crate::message::{
    Beat, EndExpulsions, FetchExpulsions, ListNodes, Mount, MountResponse, NodeStatus, QueryHosts,
    ReportSegments, Segments, Unmount,
};
use crate::wire::KEYS_PER_BATCH_MAX;
use crate::{ErrorCode, Master};

pub(super) fn mount(master: &mut Master, call: Call<'_>) -> Result<(), ErrorCode> {
    let Call { now, session, request, .. } = call;
    let (segment, _) = request.read::<Mount>()?;
    let no = master.session_no(session);
    let response = master.mount_from(now, &segment, no)?;
    session.node |= matches!(response, MountResponse::Mounted(_));
    request.respond_head::<Mount>(&response)
}

pub(super) fn unmount(master: &mut Master, call: Call<'_>) -> Result<(), ErrorCode> {
    let Call { now, request, .. } = call;
    let (segment, _) = request.read::<Unmount>()?;
    master.unmount(now, &segment)?;
    request.respond_head::<Unmount>(&())
}

pub(super) fn beat(master: &mut Master, call: Call<'_>) -> Result<(), ErrorCode> {
    let Call { now, session, request, .. } = call;
    let (beat, _) = request.read::<Beat>()?;
    let no = master.session_no(session);
    let status = master.heartbeat_from(now, &beat, no)?;
    session.node |= status != NodeStatus::NeedRemount;
    request.respond_head::<Beat>(&status)
}

pub(super) fn fetch_expulsions(master: &mut Master, call: Call<'_>) -> Result<(), ErrorCode> {
    let Call { now, request, .. } = call;
    let (fetch, _) = request.read::<FetchExpulsions>()?;
    let orders = master.fetch_expulsions(now, &fetch)?;
    request.respond::<FetchExpulsions>(&(), orders.into_iter())
}

pub(super) fn end_expulsions(master: &mut Master, call: Call<'_>) -> Result<(), ErrorCode> {
    let Call { now, request, .. } = call;
    let (proof, ends) = request.read::<EndExpulsions>()?;
    master.check_node(proof.node, proof.key)?;
    let ended = ends.map(|end| master.end_expulsion(now, proof.node, &end));
    request.respond::<EndExpulsions>(&(), ended)
}

pub(super) fn report_segments(master: &mut Master, call: Call<'_>) -> Result<(), ErrorCode> {
    let Call { now, request, .. } = call;
    let (_, reported) = request.read::<ReportSegments>()?;
    let noted = reported.map(|no| master.report_unreachable(now, no));
    request.respond::<ReportSegments>(&(), noted)
}

pub(super) fn segments(master: &mut Master, call: Call<'_>) -> Result<(), ErrorCode> {
    let request = call.request;
    let (_, wanted) = request.read::<Segments>()?;
    if wanted.is_empty() {
        let all: Vec<_> = master.segments().chain(master.disk_list()).map(Ok).collect();
        return request.respond::<Segments>(&(), all.into_iter());
    }
    let found = wanted.map(|no| master.segment(no).ok_or(ErrorCode::SegmentNotFound));
    request.respond::<Segments>(&(), found)
}

pub(super) fn query_hosts(master: &mut Master, call: Call<'_>) -> Result<(), ErrorCode> {
    let (_, wanted) = call.request.read::<QueryHosts>()?;
    call.request.respond::<QueryHosts>(&(), wanted.map(|of| master.hosts(of)))
}

pub(super) fn list_nodes(master: &mut Master, call: Call<'_>) -> Result<(), ErrorCode> {
    let nodes: Vec<_> = master.nodes(call.now).take(KEYS_PER_BATCH_MAX).collect();
    call.request.respond::<ListNodes>(&(), nodes.into_iter())
}
