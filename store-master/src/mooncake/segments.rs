//! Segments under Mooncake's paths.

use axum::extract::State;
use axum::http::{StatusCode, Uri};
use axum::response::Response;
use serde::Serialize;
use store_core::message::{SegmentInfo, SegmentState, Segments};
use store_core::{ErrorCode, SegmentNo};

use super::{Refused, Shared, id, json, text, text_param};
use crate::http::Asker;

/// What the routes need of a segment.
#[derive(Debug)]
pub(super) struct Segment {
    pub(super) no: SegmentNo,
    pub(super) name: String,
    pub(super) state: SegmentState,
    node: u64,
    incarnation: u64,
    endpoint: String,
    base: u64,
    pub(super) used_bytes: u64,
    capacity_bytes: u64,
}

impl Segment {
    fn of(info: &SegmentInfo<'_>) -> Self {
        Self {
            no: info.segment,
            name: info.name.to_owned(),
            state: SegmentState::Active,
            node: info.node.get(),
            incarnation: info.incarnation.get(),
            endpoint: info.endpoint.to_owned(),
            base: info.base,
            used_bytes: info.used,
            capacity_bytes: info.len,
        }
    }

    /// Its state as Mooncake's number and name. A segment in maintenance serves its objects.
    fn status(&self) -> (i32, &'static str) {
        match self.state {
            SegmentState::Active | SegmentState::Maintenance => (1, "OK"),
            SegmentState::Draining => (2, "DRAINING"),
            SegmentState::Drained => (3, "DRAINED"),
        }
    }
}

/// All mounted segments.
pub(super) async fn mounted(asker: &Asker) -> Result<Vec<Segment>, Refused> {
    let mut segments: Vec<Segment> = asker
        .ask::<Segments, _>(&(), |(), infos| infos.flatten().map(|info| Segment::of(&info)).collect())
        .await?;
    for drain in asker.drains().await? {
        if let Some(segment) = segments.iter_mut().find(|segment| segment.no == drain.segment) {
            segment.state = drain.state;
        }
    }
    Ok(segments)
}

/// The segment with this name, or else the one at this endpoint.
pub(super) fn named<'a>(segments: &'a [Segment], name: &str) -> Option<&'a Segment> {
    let by_name = segments.iter().find(|segment| segment.name == name);
    by_name.or_else(|| segments.iter().find(|segment| segment.endpoint == name))
}

/// The names, one per line. SGLang waits for a line here before it starts.
pub(super) async fn names(State(shared): State<Shared>) -> Result<Response, Refused> {
    let names = |(), infos: store_core::Items<'_, Result<SegmentInfo<'_>, ErrorCode>>| {
        infos.flatten().map(|info| format!("{}\n", info.name)).collect()
    };
    Ok(text(shared.asker.ask::<Segments, String>(&(), names).await?))
}

#[derive(Serialize)]
struct Detail {
    segment_name: String,
    segment_id: String,
    client_id: String,
    base_address: String,
    size_bytes: u64,
    size_human: String,
    te_endpoint: String,
    protocol: &'static str,
    status: &'static str,
    allocator_used_bytes: u64,
    allocator_capacity_bytes: u64,
    allocator_usage_percent: f64,
}

#[derive(Serialize)]
struct Details {
    total_segments: usize,
    segments: Vec<Detail>,
}

pub(super) async fn details(State(shared): State<Shared>) -> Result<Response, Refused> {
    let detail = |segment: Segment| Detail {
        segment_id: id(u64::from(segment.no.get()), segment.incarnation),
        client_id: id(segment.node, segment.incarnation),
        base_address: format!("{:#x}", segment.base),
        size_bytes: segment.capacity_bytes,
        size_human: format!("{} GiB", segment.capacity_bytes as f64 / f64::from(1 << 30)),
        protocol: "tcp",
        status: segment.status().1,
        allocator_used_bytes: segment.used_bytes,
        allocator_capacity_bytes: segment.capacity_bytes,
        allocator_usage_percent: segment.used_bytes as f64 / segment.capacity_bytes.max(1) as f64 * 100.0,
        segment_name: segment.name,
        te_endpoint: segment.endpoint,
    };
    let segments: Vec<Detail> = mounted(&shared.asker).await?.into_iter().map(detail).collect();
    Ok(json(StatusCode::OK, &Details { total_segments: segments.len(), segments }))
}

/// Used and total bytes of a segment, as text.
pub(super) async fn one(State(shared): State<Shared>, uri: Uri) -> Result<Response, Refused> {
    let (name, segment) = wanted(&shared, &uri).await?;
    let (used, capacity) = (segment.used_bytes, segment.capacity_bytes);
    Ok(text(format!("{name}\nUsed(bytes): {used}\nCapacity(bytes) : {capacity}\n")))
}

#[derive(Serialize)]
struct Status<'a> {
    success: bool,
    segment: &'a str,
    status: i32,
    status_name: &'static str,
    error_code: i32,
    error_message: &'static str,
}

pub(super) async fn status(State(shared): State<Shared>, uri: Uri) -> Result<Response, Refused> {
    let (name, segment) = wanted(&shared, &uri).await?;
    let (status, status_name) = segment.status();
    Ok(json(
        StatusCode::OK,
        &Status { success: true, segment: &name, status, status_name, error_code: 0, error_message: "" },
    ))
}

/// The segment that `?segment=` names, and that name.
async fn wanted(shared: &Shared, uri: &Uri) -> Result<(String, Segment), Refused> {
    let name = text_param(uri, "segment")?.ok_or(Refused::params("?segment=NAME is missing"))?;
    let mut segments = mounted(&shared.asker).await?;
    let at = named(&segments, &name).and_then(|found| segments.iter().position(|one| one.no == found.no));
    match at {
        Some(at) => Ok((name, segments.swap_remove(at))),
        None => Err(ErrorCode::SegmentNotFound.into()),
    }
}
