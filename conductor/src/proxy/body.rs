//! Bodies of requests and answers: bytes at hand, bytes that a future produces, and collecting with limits.

use std::convert::Infallible;
use std::fmt;
use std::pin::Pin;
use std::task::{Context, Poll};

use hyper::body::{Body, Bytes, Frame, Incoming, SizeHint};
use tokio::sync::mpsc;

/// Pieces of an answer that wait for a client that reads slowly, before the engine is no longer read.
const PIECES_MAX: usize = 8;

/// The body of an answer.
pub enum Answer {
    /// Bytes at hand.
    Whole(Option<Bytes>),
    /// Bytes that a future produces while the client reads. Dropped with the connection.
    Streamed(Stream),
}

/// A future, and the pieces that it has produced.
pub struct Stream {
    work: Option<Pin<Box<dyn Future<Output = ()> + Send>>>,
    pieces: mpsc::Receiver<Bytes>,
}

/// Where the future of a [`Stream`] puts its pieces.
#[derive(Clone, Debug)]
pub struct Sink(mpsc::Sender<Bytes>);

impl Sink {
    /// Waits until the client has read enough, and adds a piece.
    pub async fn send(&self, piece: Bytes) {
        // The receiver lives as long as the future that calls this.
        let _ = self.0.send(piece).await;
    }
}

impl fmt::Debug for Answer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Whole(bytes) => f.debug_tuple("Whole").field(&bytes.as_ref().map(Bytes::len)).finish(),
            Self::Streamed(_) => f.write_str("Streamed"),
        }
    }
}

impl Answer {
    /// Bytes at hand.
    pub fn whole(bytes: impl Into<Bytes>) -> Self {
        Self::Whole(Some(bytes.into()))
    }

    /// The pieces that a future sends. The future is polled only while the client reads, and dropped when
    /// the client goes away.
    pub fn streamed<F: Future<Output = ()> + Send + 'static>(work: impl FnOnce(Sink) -> F) -> Self {
        let (sink, pieces) = mpsc::channel(PIECES_MAX);
        Self::Streamed(Stream { work: Some(Box::pin(work(Sink(sink)))), pieces })
    }
}

impl Body for Answer {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        match &mut *self {
            Self::Whole(bytes) => Poll::Ready(bytes.take().map(|bytes| Ok(Frame::data(bytes)))),
            Self::Streamed(stream) => stream.poll(cx).map(|piece| piece.map(|piece| Ok(Frame::data(piece)))),
        }
    }

    fn is_end_stream(&self) -> bool {
        matches!(self, Self::Whole(None))
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Self::Whole(bytes) => SizeHint::with_exact(bytes.as_ref().map_or(0, Bytes::len) as u64),
            Self::Streamed(_) => SizeHint::default(),
        }
    }
}

impl Stream {
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Option<Bytes>> {
        if let Poll::Ready(Some(piece)) = self.pieces.poll_recv(cx) {
            return Poll::Ready(Some(piece));
        }
        if let Some(work) = &mut self.work
            && work.as_mut().poll(cx).is_ready()
        {
            // Drops what the future holds: the sink, and what it has reserved.
            self.work = None;
        }
        self.pieces.poll_recv(cx)
    }
}

/// Why a body was not collected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CollectError {
    /// It is longer than allowed.
    TooLong,
    /// The sender went away before its end.
    Broken,
}

/// Reads a body to its end.
///
/// # Errors
/// See [`CollectError`].
pub async fn collect(body: &mut Incoming, bytes_max: usize) -> Result<Bytes, CollectError> {
    if body.size_hint().lower() > bytes_max as u64 {
        return Err(CollectError::TooLong);
    }
    let mut first = Bytes::new();
    let mut all = Vec::new();
    while let Some(data) = next_data(body).await {
        let data = data.map_err(|_| CollectError::Broken)?;
        if first.len() + all.len() + data.len() > bytes_max {
            return Err(CollectError::TooLong);
        }
        // A body that came in one piece is not copied.
        if first.is_empty() && all.is_empty() {
            first = data;
            continue;
        }
        if all.is_empty() {
            all.extend_from_slice(&std::mem::take(&mut first));
        }
        all.extend_from_slice(&data);
    }
    Ok(if all.is_empty() { first } else { all.into() })
}

/// The next bytes of a body; `None` at its end. Trailers are ignored.
pub(super) async fn next_data(body: &mut Incoming) -> Option<hyper::Result<Bytes>> {
    loop {
        let frame = std::future::poll_fn(|cx| Pin::new(&mut *body).poll_frame(cx)).await?;
        match frame.map(Frame::into_data) {
            Ok(Ok(data)) if data.is_empty() => {}
            Ok(Ok(data)) => return Some(Ok(data)),
            Ok(Err(_trailers)) => {}
            Err(error) => return Some(Err(error)),
        }
    }
}
