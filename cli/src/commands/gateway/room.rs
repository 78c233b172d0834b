//! Memory for objects in transit: how much each request may have, and reading bodies into it.
//!
//! Uploads and downloads have separate shares, so that uploads cannot block downloads. An upload holds memory
//! for the bytes that have arrived, not for its announced length; an upload that stalls is aborted.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::{Body, Bytes, HttpBody};
use axum::http::StatusCode;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, timeout_at};

use super::objects::{Problem, too_large};

/// The unit in which memory is accounted, bytes.
const KIB: u64 = 1024;
/// Most permits of a share.
const PERMITS_MAX: usize = Semaphore::MAX_PERMITS;
/// A body stalls when this many bytes take too long. Memory is taken in steps of at least this size.
const STEP_BYTES: u64 = 64 << 10;
/// A response is sent in pieces, so that its memory is accounted for until nearly all of it is sent.
const PIECE_BYTES: usize = 64 << 10;

/// The two shares of memory.
#[derive(Clone)]
pub(super) struct Rooms {
    /// Permits for uploads, `KIB` bytes each.
    coming: Arc<Semaphore>,
    /// Permits for downloads, `KIB` bytes each.
    going: Arc<Semaphore>,
    /// Permits of each share when nothing is in transit.
    permits: usize,
    limits: BodyLimits,
}

/// Limits on the body of a request.
#[derive(Clone, Copy, Debug)]
pub(super) struct BodyLimits {
    /// Timeout for the whole body.
    pub(super) time_max: Duration,
    /// Timeout for each `STEP_BYTES` of it.
    pub(super) stall_max: Duration,
}

/// Part of a share, held until it is dropped.
#[derive(Debug)]
pub(super) struct Room(Option<OwnedSemaphorePermit>);

impl Rooms {
    /// Divides `bytes` equally between the two directions.
    pub(super) fn new(bytes: u64, limits: BodyLimits) -> Self {
        let permits =
            usize::try_from((bytes / 2).div_ceil(KIB)).map_or(PERMITS_MAX, |half| half.min(PERMITS_MAX));
        let half = || Arc::new(Semaphore::new(permits));
        Self { coming: half(), going: half(), permits, limits }
    }

    /// Bytes in use by uploads, and by downloads.
    pub(super) fn taken(&self) -> [u64; 2] {
        [&self.coming, &self.going].map(|share| (self.permits - share.available_permits()) as u64 * KIB)
    }

    /// Takes memory for a value that is read from the store.
    pub(super) fn to_go(&self, bytes: u64) -> Result<Room, Problem> {
        take(&self.going, bytes).map(|permit| Room(Some(permit)))
    }

    /// Reads a body of at most `max` bytes. A body that ends early, is too long, stalls or takes too long is
    /// an error.
    pub(super) async fn collect(
        &self,
        mut body: Body,
        max: u64,
        announced: Option<u64>,
    ) -> Result<(Vec<u8>, Room), Problem> {
        let longest = announced.unwrap_or(max).min(max);
        let (mut bytes, mut room) = (Vec::new(), Room(None));
        let end = Instant::now() + self.limits.time_max;
        let mut step = (0, Instant::now() + self.limits.stall_max);
        loop {
            let frame = std::future::poll_fn(|cx| Pin::new(&mut body).poll_frame(cx));
            let Ok(frame) = timeout_at(end.min(step.1), frame).await else { return Err(halted()) };
            let Some(frame) = frame else { return Ok((bytes, room)) };
            let frame = frame.map_err(|error| Problem::wrong(format!("the body ended early: {error}")))?;
            let Ok(data) = frame.into_data() else { continue };
            let len = bytes.len() as u64 + data.len() as u64;
            if len > max {
                return Err(too_large(max));
            }
            if len > bytes.capacity() as u64 {
                // Doubles each time, as a vector does, but takes no more than the body can need.
                let wanted = len.max(bytes.capacity() as u64 * 2).max(STEP_BYTES).min(longest.max(len));
                room.grow_to(&self.coming, wanted)?;
                bytes.reserve_exact(wanted as usize - bytes.len());
            }
            bytes.extend_from_slice(&data);
            if len >= step.0 + STEP_BYTES {
                step = (len, Instant::now() + self.limits.stall_max);
            }
        }
    }
}

impl Room {
    /// Extends it to this many bytes in total.
    fn grow_to(&mut self, share: &Arc<Semaphore>, bytes: u64) -> Result<(), Problem> {
        let has = self.0.as_ref().map_or(0, |permit| permit.num_permits() as u64);
        let more = take(share, (bytes.div_ceil(KIB)).saturating_sub(has) * KIB)?;
        match &mut self.0 {
            Some(permit) => permit.merge(more),
            None => self.0 = Some(more),
        }
        Ok(())
    }
}

fn take(share: &Arc<Semaphore>, bytes: u64) -> Result<OwnedSemaphorePermit, Problem> {
    let permits = u32::try_from(bytes.div_ceil(KIB)).unwrap_or(u32::MAX);
    Arc::clone(share).try_acquire_many_owned(permits).map_err(|_| {
        Problem::new(
            StatusCode::SERVICE_UNAVAILABLE,
            "all memory of the gateway for objects is in use: try again, or raise --buffered-bytes",
        )
    })
}

fn halted() -> Problem {
    Problem::new(StatusCode::REQUEST_TIMEOUT, "the body arrived too slowly")
}

/// Bytes that count against their share until they are sent.
pub(super) struct Kept {
    pub(super) bytes: Bytes,
    pub(super) _room: Room,
}

impl HttpBody for Kept {
    type Data = Bytes;
    type Error = std::convert::Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<hyper::body::Frame<Bytes>, Self::Error>>> {
        if self.bytes.is_empty() {
            return Poll::Ready(None);
        }
        let len = self.bytes.len().min(PIECE_BYTES);
        let piece = self.bytes.split_to(len);
        Poll::Ready(Some(Ok(hyper::body::Frame::data(piece))))
    }

    fn is_end_stream(&self) -> bool {
        self.bytes.is_empty()
    }

    fn size_hint(&self) -> hyper::body::SizeHint {
        hyper::body::SizeHint::with_exact(self.bytes.len() as u64)
    }
}
