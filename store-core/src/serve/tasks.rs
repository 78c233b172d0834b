//! Replicas, tasks and drains behind the wire.

use alloc::vec::Vec;

use te_core::Instant;

use super::{Keyed, LIST_BYTES_MAX, batch};
use crate::message::{
    Answer, CancelTasks, CreateTasks, DrainStatus, EndTasks, FetchTasks, FindReplicas, Kind, Lease,
    ListPosition, ListTasks, Operation, OrderSegments, QueryTasks, ReadTaskReport, ReportReplicas,
    RetryTasks, TaskId, TaskInfo,
};
use crate::wire::{Frame, WireError};
use crate::{ErrorCode, Master, TenantNo};

/// In place of a tenant: an admin asks. No tenant has this number.
pub(super) const EVERYBODY: TenantNo = TenantNo::MAX;

impl Master {
    pub(super) fn serve_tasks(
        &mut self,
        now: Instant,
        kind: Kind,
        tenant: TenantNo,
        frame: &Frame<'_>,
        out: &mut Vec<u8>,
    ) -> Result<(), ErrorCode> {
        let (id, body) = (frame.header.request_id, frame.body);
        let none = core::iter::empty;
        let done = match kind {
            Kind::ReportReplicas => {
                batch::<ReportReplicas>(self, tenant, body, id, out, &(), |master, _, reporter, bad| {
                    master.report_replica_of(now, *reporter, whose(tenant), &bad)
                })
            }
            Kind::FindReplicas => {
                batch::<FindReplicas>(self, tenant, body, id, out, &(), |master, _, (), key| {
                    master.find_replicas(key.of(tenant))
                })
            }
            Kind::CreateTasks => {
                batch::<CreateTasks>(self, tenant, body, id, out, &(), |master, _, (), task| {
                    master.create_task(now, task.of(tenant), task.source, task.target)
                })
            }
            Kind::QueryTasks => {
                let (_, ids) = QueryTasks::decode_request(body).map_err(WireError::code)?;
                QueryTasks::encode_response(out, id, &(), ids.map(|task| self.task_of(now, tenant, task)))
            }
            Kind::CancelTasks => self.change_tasks::<CancelTasks>(now, tenant, frame, out, |master, task| {
                master.cancel_task(now, task).map(|_| ())
            }),
            Kind::RetryTasks => self.change_tasks::<RetryTasks>(now, tenant, frame, out, |master, task| {
                master.retry_task(now, task).map(|_| ())
            }),
            Kind::ListTasks => {
                let (query, _) = ListTasks::decode_request(body).map_err(WireError::code)?;
                let mut page: Vec<TaskInfo<'_>> = Vec::new();
                let mut bytes = 0;
                let cursor = self.list_tasks_of(now, whose(tenant), &query, |task| {
                    bytes += task.key.0.len();
                    let fits = bytes <= LIST_BYTES_MAX;
                    if fits {
                        page.push(task);
                    }
                    fits
                });
                ListTasks::encode_response(out, id, &ListPosition { cursor }, page.into_iter())
            }
            Kind::FetchTasks => {
                let (ask, _) = FetchTasks::decode_request(body).map_err(WireError::code)?;
                let head = Lease { lease_ms: self.config().lease_ttl_ms, first: 0 };
                let orders = self.fetch_tasks(now, &ask)?;
                FetchTasks::encode_response(out, id, &head, orders.into_iter())
            }
            Kind::EndTasks => {
                let (proof, ends) = EndTasks::decode_request(body).map_err(WireError::code)?;
                self.check_node(proof.node, proof.key)?;
                EndTasks::encode_response(out, id, &(), ends.map(|end| self.end_task(now, proof.node, &end)))
            }
            Kind::OrderSegments => {
                let (_, orders) = OrderSegments::decode_request(body).map_err(WireError::code)?;
                let states = orders.map(|order| self.order_segment(now, &order));
                OrderSegments::encode_response(out, id, &(), states)
            }
            Kind::DrainStatus => {
                let (_, wanted) = DrainStatus::decode_request(body).map_err(WireError::code)?;
                if wanted.is_empty() {
                    let all: Vec<_> = self.drains().map(Ok).collect();
                    DrainStatus::encode_response(out, id, &(), all.into_iter())
                } else {
                    DrainStatus::encode_response(out, id, &(), wanted.map(|no| self.drain_info(no)))
                }
            }
            Kind::ReadTaskReport => ReadTaskReport::encode_response(out, id, &self.task_report(), none()),
            _ => return Err(ErrorCode::NotSupported),
        };
        done.map_err(WireError::code)
    }

    fn task_of(&self, now: Instant, tenant: TenantNo, id: TaskId) -> Result<TaskInfo<'_>, ErrorCode> {
        if self.is_task_of(id, whose(tenant)) { self.task(now, id) } else { Err(ErrorCode::TaskNotFound) }
    }

    /// Changes tasks one by one, and tells what has become of each.
    fn change_tasks<O>(
        &mut self,
        now: Instant,
        tenant: TenantNo,
        frame: &Frame<'_>,
        out: &mut Vec<u8>,
        mut change: impl FnMut(&mut Self, TaskId) -> Result<(), ErrorCode>,
    ) -> Result<(), WireError>
    where
        O: for<'a> Operation<
                AskItem<'a> = TaskId,
                Answer<'a> = (),
                AnswerItem<'a> = Result<TaskInfo<'a>, ErrorCode>,
            >,
    {
        let (_, ids) = O::decode_request(frame.body)?;
        let mut answer = Answer::begin::<O>(out, frame.header.request_id, &(), ids.len())?;
        for id in ids {
            let known = self.task_of(now, tenant, id).map(|_| ());
            let changed = known.and_then(|()| change(self, id)).and_then(|()| self.task(now, id));
            answer.item(&changed)?;
        }
        answer.finish()
    }
}

const fn whose(tenant: TenantNo) -> Option<TenantNo> {
    if tenant == EVERYBODY { None } else { Some(tenant) }
}
