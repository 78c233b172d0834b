//! Drain jobs under Mooncake's paths. A job is a list of segments that are drained together, which only this
//! interface knows; the master knows the state and the counters of each segment, see
//! [`DrainStatus`](store_core::message::DrainStatus). Jobs are forgotten when the master restarts.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::{MutexGuard, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use axum::body::Body;
use axum::extract::{ConnectInfo, State};
use axum::http::{HeaderMap, StatusCode, Uri};
use axum::response::Response;
use serde::{Deserialize, Serialize};
use store_core::message::{DrainInfo, DrainStatus, OrderSegments, SegmentOrder, SegmentState};
use store_core::{ErrorCode, SegmentNo};

use super::segments::{Segment, mounted, named};
use super::{Refused, Shared, id, json, text_param};
use crate::admin::read;

/// Most jobs that are remembered. The oldest that has ended makes room.
const JOBS_MAX: usize = 256;
/// Most segments of a job.
const SEGMENTS_MAX: usize = 256;
/// Mooncake's number for "there is no such job".
const JOB_NOT_FOUND: i32 = -1402;
/// What every answer about a job that runs says.
const PACE: &str =
    "the master chooses the targets, and moves as many objects at a time as store.tasks.drain_moves_max";

/// The jobs, the oldest first.
#[derive(Debug, Default)]
pub(super) struct Jobs {
    last: u64,
    list: VecDeque<Job>,
}

#[derive(Clone, Debug)]
struct Job {
    /// Milliseconds since 1970 when the job was made, and its number.
    id: (u64, u64),
    updated_ms: u64,
    parts: Vec<Part>,
    status: Status,
    /// Why it failed.
    failure: String,
}

/// A segment of a job.
#[derive(Clone, Debug)]
struct Part {
    no: SegmentNo,
    name: String,
    /// Bytes in use when the job began.
    used_before: u64,
    /// What was last known of it.
    info: DrainInfo,
}

/// The state of a job, with Mooncake's numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Status {
    Running = 2,
    Succeeded = 3,
    Failed = 4,
    Canceled = 5,
}

impl Status {
    const fn name(self) -> &'static str {
        match self {
            Self::Running => "RUNNING",
            Self::Succeeded => "SUCCEEDED",
            Self::Failed => "FAILED",
            Self::Canceled => "CANCELED",
        }
    }
}

/// Body of a POST to `/api/v1/drain_jobs`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Wanted {
    segments: Vec<String>,
    #[serde(default)]
    target_segments: Vec<String>,
    #[serde(default)]
    max_concurrency: Option<u32>,
}

#[derive(Serialize)]
struct Changed {
    success: bool,
    job_id: String,
    status: &'static str,
    error_code: i32,
    error_message: &'static str,
}

impl Changed {
    fn to(job: (u64, u64), status: &'static str) -> Response {
        let job_id = id(job.0, job.1);
        json(StatusCode::OK, &Self { success: true, job_id, status, error_code: 0, error_message: "" })
    }
}

pub(super) async fn create(
    State(shared): State<Shared>,
    ConnectInfo(peer): ConnectInfo<SocketAddr>,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, Refused> {
    shared.may_change(peer, &headers).await?;
    let wanted: Wanted = read(&headers, body).await?;
    if !(1..=SEGMENTS_MAX).contains(&wanted.segments.len()) || wanted.max_concurrency == Some(0) {
        return Err(Refused::params(format!(
            "segments must have 1 to {SEGMENTS_MAX} names, and max_concurrency must be at least 1"
        )));
    }
    let segments = mounted(&shared.asker).await?;
    let mut parts: Vec<Part> = Vec::new();
    for name in &wanted.segments {
        let segment = named(&segments, name).ok_or(ErrorCode::SegmentNotFound)?;
        if parts.iter().all(|part| part.no != segment.no) {
            parts.push(Part {
                no: segment.no,
                name: name.clone(),
                used_before: segment.used_bytes,
                info: DrainInfo::default(),
            });
        }
    }
    check_targets(&segments, &parts, &wanted.target_segments)?;
    let infos = order(&shared, parts.iter().map(|part| part.no), SegmentState::Draining).await?;
    for (part, info) in parts.iter_mut().zip(infos) {
        part.info = info?;
    }
    let job = jobs(&shared).add(parts)?;
    Ok(Changed::to(job, "CREATED"))
}

/// Drains move objects to any segment that accepts them. A list of targets is accepted if it names all of
/// these.
fn check_targets(segments: &[Segment], parts: &[Part], targets: &[String]) -> Result<(), Refused> {
    let targets: Vec<Option<&Segment>> = targets.iter().map(|name| named(segments, name)).collect();
    if targets.iter().any(Option::is_none) {
        return Err(ErrorCode::SegmentNotFound.into());
    }
    let accepts = |segment: &&Segment| {
        segment.state == SegmentState::Active && parts.iter().all(|part| part.no != segment.no)
    };
    let listed = |segment: &Segment| targets.iter().flatten().any(|target| target.no == segment.no);
    match segments.iter().filter(accepts).find(|segment| !listed(segment)) {
        Some(other) if !targets.is_empty() => Err(Refused::new(
            StatusCode::CONFLICT,
            ErrorCode::NotSupported,
            format!(
                "target_segments leaves out {:?}, and the master chooses the targets among all segments that accept \
                 objects: put that one into maintenance first, or leave target_segments out",
                other.name
            ),
        )),
        _ => Ok(()),
    }
}

#[derive(Serialize)]
struct Report {
    success: bool,
    job_id: String,
    #[serde(rename = "type")]
    kind: i32,
    type_name: &'static str,
    status: i32,
    status_name: &'static str,
    created_at_ms_epoch: u64,
    last_updated_at_ms_epoch: u64,
    segments: Vec<String>,
    succeeded_units: u64,
    failed_units: u64,
    blocked_units: u64,
    active_units: u64,
    /// Bytes that have left the segments since the job began, moved or removed.
    migrated_bytes: u64,
    message: String,
    error_code: i32,
    error_message: &'static str,
}

impl From<&Job> for Report {
    fn from(job: &Job) -> Self {
        let sum = |of: fn(&DrainInfo) -> u64| job.parts.iter().map(|part| of(&part.info)).sum();
        let left = |part: &Part| part.used_before.saturating_sub(part.info.used_bytes);
        Self {
            success: true,
            job_id: id(job.id.0, job.id.1),
            kind: 0,
            type_name: "DRAIN",
            status: job.status as i32,
            status_name: job.status.name(),
            created_at_ms_epoch: job.id.0,
            last_updated_at_ms_epoch: job.updated_ms,
            segments: job.parts.iter().map(|part| part.name.clone()).collect(),
            succeeded_units: sum(|info| info.moved_total + info.dropped_total),
            failed_units: sum(|info| info.failed_total),
            blocked_units: sum(|info| info.left_no_room + info.left_unfinished + info.left_bad),
            active_units: sum(|info| info.moving.into()),
            migrated_bytes: job.parts.iter().map(left).sum(),
            message: if job.status == Status::Failed { job.failure.clone() } else { PACE.into() },
            error_code: 0,
            error_message: "",
        }
    }
}

pub(super) async fn query(State(shared): State<Shared>, uri: Uri) -> Result<Response, Refused> {
    let job = current(&shared, &uri).await?;
    Ok(json(StatusCode::OK, &Report::from(&job)))
}

pub(super) async fn cancel(
    State(shared): State<Shared>,
    ConnectInfo(peer): ConnectInfo<SocketAddr>,
    headers: HeaderMap,
    uri: Uri,
) -> Result<Response, Refused> {
    shared.may_change(peer, &headers).await?;
    let job = current(&shared, &uri).await?;
    if job.status != Status::Running {
        let message = format!("the job has ended: {}", job.status.name());
        return Err(Refused::new(StatusCode::CONFLICT, ErrorCode::UnavailableInCurrentStatus, message));
    }
    // Segments that are empty by now stay drained.
    let draining = job.parts.iter().filter(|part| part.info.state == SegmentState::Draining);
    // A segment that was unmounted meanwhile needs no order.
    order(&shared, draining.map(|part| part.no), SegmentState::Active).await?;
    jobs(&shared).update(job.id, |job| job.status = Status::Canceled);
    Ok(Changed::to(job.id, Status::Canceled.name()))
}

/// The job that `?job_id=` names, brought up to date.
async fn current(shared: &Shared, uri: &Uri) -> Result<Job, Refused> {
    let invalid = || Refused::params("?job_id=NUMBER-NUMBER is missing or invalid");
    let text = text_param(uri, "job_id")?.ok_or_else(invalid)?;
    let (first, second) = text.split_once('-').ok_or_else(invalid)?;
    let wanted = (first.parse().map_err(|_| invalid())?, second.parse().map_err(|_| invalid())?);
    let unknown = || Refused {
        status: StatusCode::NOT_FOUND,
        code: JOB_NOT_FOUND,
        message: "JOB_NOT_FOUND: no such job, or it ended long ago, or the master has restarted since".into(),
    };
    let job = jobs(shared).find(wanted).ok_or_else(unknown)?;
    if job.status != Status::Running {
        return Ok(job);
    }
    let numbers = job.parts.iter().map(|part| part.no);
    let infos: Vec<Result<DrainInfo, ErrorCode>> =
        shared.asker.ask_for::<DrainStatus, _>(None, &(), numbers, |(), infos| infos.collect()).await?;
    let mut jobs = jobs(shared);
    jobs.update(wanted, |job| job.see(&infos));
    jobs.find(wanted).ok_or_else(unknown)
}

/// Puts segments into a state. One result per segment.
async fn order(
    shared: &Shared,
    numbers: impl Iterator<Item = SegmentNo>,
    state: SegmentState,
) -> Result<Vec<Result<DrainInfo, ErrorCode>>, Refused> {
    let orders: Vec<SegmentOrder> = numbers.map(|segment| SegmentOrder { segment, state }).collect();
    let ordered = shared
        .asker
        .ask_for::<OrderSegments, _>(None, &(), orders.into_iter(), |(), infos| infos.collect())
        .await?;
    Ok(ordered)
}

fn jobs(shared: &Shared) -> MutexGuard<'_, Jobs> {
    shared.jobs.lock().unwrap_or_else(PoisonError::into_inner)
}

fn now_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

impl Jobs {
    fn add(&mut self, parts: Vec<Part>) -> Result<(u64, u64), Refused> {
        if self.list.len() >= JOBS_MAX {
            let ended = self.list.iter().position(|job| job.status != Status::Running);
            let at = ended.ok_or_else(|| {
                let message = format!("{JOBS_MAX} drain jobs are running: cancel some, or wait");
                Refused::new(StatusCode::CONFLICT, ErrorCode::TaskPendingLimitExceeded, message)
            })?;
            self.list.remove(at);
        }
        self.last += 1;
        let now = now_ms();
        let id = (now, self.last);
        let (status, failure) = (Status::Running, String::new());
        self.list.push_back(Job { id, updated_ms: now, parts, status, failure });
        Ok(id)
    }

    fn find(&self, id: (u64, u64)) -> Option<Job> {
        self.list.iter().find(|job| job.id == id).cloned()
    }

    /// Changes a job, unless it has ended.
    fn update(&mut self, id: (u64, u64), change: impl FnOnce(&mut Job)) {
        if let Some(job) = self.list.iter_mut().find(|job| job.id == id && job.status == Status::Running) {
            job.updated_ms = now_ms();
            change(job);
        }
    }
}

impl Job {
    /// Takes over the states of its segments, in their order.
    fn see(&mut self, infos: &[Result<DrainInfo, ErrorCode>]) {
        for (part, info) in self.parts.iter_mut().zip(infos) {
            match info {
                Ok(info) if matches!(info.state, SegmentState::Draining | SegmentState::Drained) => {
                    part.info = *info;
                }
                Ok(_) => self.failure = format!("segment {:?} was put back into use", part.name),
                // Unmounted. What was seen drained lost nothing by that.
                Err(_) if part.info.state == SegmentState::Drained => {}
                Err(_) => {
                    self.failure = format!("segment {:?} was unmounted before it was drained", part.name);
                }
            }
        }
        if !self.failure.is_empty() {
            self.status = Status::Failed;
        } else if self.parts.iter().all(|part| part.info.state == SegmentState::Drained) {
            self.status = Status::Succeeded;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn part(no: u32) -> Part {
        let info = DrainInfo { state: SegmentState::Draining, used_bytes: 100, ..DrainInfo::default() };
        Part { no: SegmentNo::new(no), name: format!("n{no}"), used_before: 100, info }
    }

    fn info(state: SegmentState, used_bytes: u64, moved_total: u64) -> Result<DrainInfo, ErrorCode> {
        Ok(DrainInfo { state, used_bytes, moved_total, moving: 1, ..DrainInfo::default() })
    }

    #[test]
    fn a_job_succeeds_when_all_its_segments_are_drained_and_stays_so() {
        let mut jobs = Jobs::default();
        let id = jobs.add(vec![part(1), part(2)]).expect("room");
        let gone = Err(ErrorCode::SegmentNotFound);
        let (draining, drained) = (SegmentState::Draining, SegmentState::Drained);
        jobs.update(id, |job| job.see(&[info(draining, 60, 4), info(drained, 0, 9)]));
        let report = Report::from(&jobs.find(id).expect("there"));
        assert_eq!((report.status_name, report.succeeded_units, report.active_units), ("RUNNING", 13, 2));
        assert_eq!((report.migrated_bytes, report.type_name, report.kind), (140, "DRAIN", 0));
        // The node of the second one may leave now.
        jobs.update(id, |job| job.see(&[info(drained, 0, 8), gone]));
        assert_eq!(jobs.find(id).expect("there").status, Status::Succeeded);
        jobs.update(id, |job| job.see(&[gone, gone]));
        let report = Report::from(&jobs.find(id).expect("there"));
        assert_eq!((report.status, report.succeeded_units, report.migrated_bytes), (3, 17, 200));
    }

    #[test]
    fn a_job_fails_when_a_segment_is_unmounted_or_used_again_before_its_end() {
        for (end, why) in [
            (Err(ErrorCode::SegmentNotFound), "unmounted"),
            (info(SegmentState::Active, 50, 1), "back into use"),
        ] {
            let mut jobs = Jobs::default();
            let id = jobs.add(vec![part(1)]).expect("room");
            jobs.update(id, |job| job.see(&[end]));
            let report = Report::from(&jobs.find(id).expect("there"));
            assert_eq!(report.status_name, "FAILED");
            assert!(report.message.contains("\"n1\"") && report.message.contains(why), "{}", report.message);
        }
    }

    #[test]
    fn jobs_are_bounded_and_those_that_ended_make_room() {
        let mut jobs = Jobs::default();
        let ids: Vec<_> = (0..JOBS_MAX).map(|_| jobs.add(vec![part(1)]).expect("room")).collect();
        assert_eq!(jobs.add(vec![part(1)]).expect_err("full").status, StatusCode::CONFLICT);
        jobs.update(ids[7], |job| job.status = Status::Canceled);
        jobs.add(vec![part(1)]).expect("room again");
        assert!(jobs.find(ids[7]).is_none() && jobs.find(ids[6]).is_some());
    }
}
