//! Handlers of reports, tasks and drains.

use alloc::vec::Vec;

use te_core::Instant;

use super::{ALL_TENANTS, Call, Keyed, LIST_BYTES_MAX, batch};
use crate::message::{
    CancelTasks, CreateTasks, DrainStatus, EndTasks, FetchTasks, Lease, ListPosition, ListTasks, Operation,
    OrderSegments, QueryTasks, ReadTaskReport, ReportReplicas, ResponseWriter, RetryTasks, TaskInfo,
};
use crate::{ErrorCode, Master, TaskId, TenantNo};

pub(super) fn report_replicas(master: &mut Master, call: Call<'_>) -> Result<(), ErrorCode> {
    let Call { now, tenant, request, .. } = call;
    batch::<ReportReplicas>(master, tenant, request, &(), |master, _, reporter, bad| {
        master.report_replica_of(now, *reporter, filter_of(tenant), &bad)
    })
}

pub(super) fn create(master: &mut Master, call: Call<'_>) -> Result<(), ErrorCode> {
    let Call { now, tenant, request, .. } = call;
    batch::<CreateTasks>(master, tenant, request, &(), |master, _, (), task| {
        master.create_task(now, task.of(tenant), task.source, task.target)
    })
}

pub(super) fn query(master: &mut Master, call: Call<'_>) -> Result<(), ErrorCode> {
    let Call { now, tenant, request, .. } = call;
    let (_, ids) = request.read::<QueryTasks>()?;
    request.respond::<QueryTasks>(&(), ids.map(|task| task_of(master, now, tenant, task)))
}

pub(super) fn cancel(master: &mut Master, call: Call<'_>) -> Result<(), ErrorCode> {
    let now = call.now;
    change::<CancelTasks>(master, call, |master, task| master.cancel_task(now, task).map(|_| ()))
}

pub(super) fn retry(master: &mut Master, call: Call<'_>) -> Result<(), ErrorCode> {
    let now = call.now;
    change::<RetryTasks>(master, call, |master, task| master.retry_task(now, task).map(|_| ()))
}

pub(super) fn list(master: &mut Master, call: Call<'_>) -> Result<(), ErrorCode> {
    let Call { now, tenant, request, .. } = call;
    let (query, _) = request.read::<ListTasks>()?;
    let mut page: Vec<TaskInfo<'_>> = Vec::new();
    let mut bytes = 0;
    let cursor = master.list_tasks_of(now, filter_of(tenant), &query, |task| {
        bytes += task.key.0.len();
        let fits = bytes <= LIST_BYTES_MAX;
        if fits {
            page.push(task);
        }
        fits
    });
    request.respond::<ListTasks>(&ListPosition { cursor }, page.into_iter())
}

pub(super) fn fetch(master: &mut Master, call: Call<'_>) -> Result<(), ErrorCode> {
    let (fetch, _) = call.request.read::<FetchTasks>()?;
    let head = Lease { lease_ms: master.config().lease_ttl_ms, first: 0 };
    let orders = master.fetch_tasks(call.now, &fetch)?;
    call.request.respond::<FetchTasks>(&head, orders.into_iter())
}

pub(super) fn end(master: &mut Master, call: Call<'_>) -> Result<(), ErrorCode> {
    let Call { now, request, .. } = call;
    let (proof, ends) = request.read::<EndTasks>()?;
    master.check_node(proof.node, proof.key)?;
    request.respond::<EndTasks>(&(), ends.map(|end| master.end_task(now, proof.node, &end)))
}

pub(super) fn order_segments(master: &mut Master, call: Call<'_>) -> Result<(), ErrorCode> {
    let Call { now, request, .. } = call;
    let (_, orders) = request.read::<OrderSegments>()?;
    request.respond::<OrderSegments>(&(), orders.map(|order| master.order_segment(now, &order)))
}

pub(super) fn drain_status(master: &mut Master, call: Call<'_>) -> Result<(), ErrorCode> {
    let (_, wanted) = call.request.read::<DrainStatus>()?;
    if wanted.is_empty() {
        let all: Vec<_> = master.drains().map(Ok).collect();
        return call.request.respond::<DrainStatus>(&(), all.into_iter());
    }
    call.request.respond::<DrainStatus>(&(), wanted.map(|no| master.drain_info(no)))
}

pub(super) fn read_report(master: &mut Master, call: Call<'_>) -> Result<(), ErrorCode> {
    call.request.respond_head::<ReadTaskReport>(&master.task_report())
}

fn task_of(master: &Master, now: Instant, tenant: TenantNo, id: TaskId) -> Result<TaskInfo<'_>, ErrorCode> {
    if master.is_task_of(id, filter_of(tenant)) { master.task(now, id) } else { Err(ErrorCode::TaskNotFound) }
}

/// Changes tasks one by one, and responds with the resulting state of each.
fn change<O>(
    master: &mut Master,
    call: Call<'_>,
    mut change: impl FnMut(&mut Master, TaskId) -> Result<(), ErrorCode>,
) -> Result<(), ErrorCode>
where
    O: for<'a> Operation<
            RequestItem<'a> = TaskId,
            Response<'a> = (),
            ResponseItem<'a> = Result<TaskInfo<'a>, ErrorCode>,
        >,
{
    let Call { now, tenant, request, .. } = call;
    let (_, ids) = request.read::<O>()?;
    let mut response = ResponseWriter::begin::<O>(request.out, request.id, &(), ids.len())?;
    for id in ids {
        let known = task_of(master, now, tenant, id).map(|_| ());
        let changed = known.and_then(|()| change(master, id)).and_then(|()| master.task(now, id));
        response.item(&changed)?;
    }
    Ok(response.finish()?)
}

fn filter_of(tenant: TenantNo) -> Option<TenantNo> {
    if tenant == ALL_TENANTS { None } else { Some(tenant) }
}
