//! The connection to the stage service of one node, and what is asked for over it.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use store_core::chunks::stored_len;
use store_core::message::{Operation as _, ReleaseStaged, Stage, StageRequest, Staged};
use store_core::{ErrorCode, Frame};

use super::connections::{Settings, StageEnd, StagedAt, Wanted};
use super::dialing::Link;
use super::room::padded;
use crate::error::RpcError;

/// Most objects, and bytes, in one request. Several are under way, so that the disk, the fabric and the
/// reader work at the same time.
const ITEMS_MAX: usize = 32;
const CHUNK_BYTES_MAX: u64 = 8 << 20;
/// Most bytes that are being staged, or are staged and not released, per node and reader: the staging memory
/// is for all readers.
const BYTES_MAX: u64 = 64 << 20;
/// Most requests under way per node.
const REQUESTS_MAX: usize = 32;
/// A service that has not answered this long after the deadline that it was told is not waited for.
const SILENCE_MAX: Duration = Duration::from_secs(1);

/// The connection to one service.
pub(super) struct Line<T> {
    pub(super) address: String,
    link: Link,
    /// Number of connections that were made.
    connects: u64,
    /// Not asked for yet.
    queue: VecDeque<Wanted<T>>,
    asked: VecDeque<Request<T>>,
    /// Bytes that are asked for, or staged and not released.
    bytes: u64,
    releases: Vec<u64>,
    /// No deadline is earlier.
    due: Option<Instant>,
}

struct Request<T> {
    id: u64,
    asked_at: Instant,
    /// When the service answers at latest.
    told: Instant,
    items: Vec<(u64, Option<Wanted<T>>)>,
}

impl<T> Line<T> {
    pub(super) fn new(address: &str) -> Self {
        Self {
            address: address.to_owned(),
            link: Link::Closed,
            connects: 0,
            queue: VecDeque::new(),
            asked: VecDeque::new(),
            bytes: 0,
            releases: Vec::new(),
            due: None,
        }
    }

    /// Whether there is an object that has not ended.
    pub(super) const fn is_busy(&self) -> bool {
        self.due.is_some()
    }

    pub(super) fn want(&mut self, wanted: Wanted<T>) {
        self.due = Some(self.due.map_or(wanted.deadline, |due| due.min(wanted.deadline)));
        self.queue.push_back(wanted);
    }

    pub(super) fn whats(&mut self) -> impl Iterator<Item = &mut T> {
        let asked = self.asked.iter_mut().flat_map(|request| &mut request.items);
        let asked = asked.filter_map(|(_, wanted)| wanted.as_mut());
        self.queue.iter_mut().chain(asked).map(|wanted| &mut wanted.what)
    }

    pub(super) fn release(&mut self, staged: &StagedAt, read: bool) {
        if self.connects == staged.connect {
            self.bytes = self.bytes.saturating_sub(staged.bytes);
            if read {
                self.releases.push(staged.ticket);
            }
        }
    }

    /// Whether the connection that the object was staged over is still there.
    pub(super) fn is_there(&mut self, staged: &StagedAt, ends: &mut Vec<StageEnd<T>>) -> bool {
        let same = self.connects == staged.connect && matches!(self.link, Link::Open(_));
        same && self.receive(staged.line, ends).is_ok()
    }

    /// Closes a connection that the service has closed.
    pub(super) fn drop_if_lost(&mut self) {
        if !self.is_busy() && self.asked.is_empty() && self.receive(0, &mut Vec::new()).is_err() {
            self.lose(Link::Closed);
        }
    }

    pub(super) fn abandon(&mut self) {
        self.lose(Link::Closed);
        self.queue.clear();
        self.due = None;
    }

    pub(super) fn poll(
        &mut self,
        index: usize,
        now: Instant,
        settings: &Settings,
        ends: &mut Vec<StageEnd<T>>,
    ) {
        if !self.is_busy() {
            return;
        }
        if let Err(error) = self.go_on(index, now, settings, ends) {
            log::info!(
                "the disks of {} cannot be read: {error}: they are not used for {} ms",
                self.address,
                settings.shun.as_millis()
            );
            self.lose(Link::Shunned(now + settings.shun));
        }
        if let Link::Shunned(_) = self.link {
            self.give_up(ErrorCode::TransferFail, |_| true, ends);
        }
        if self.due.is_some_and(|due| now >= due) {
            self.give_up(ErrorCode::UnavailableInCurrentStatus, |wanted| wanted.deadline <= now, ends);
        } else if self.queue.is_empty() && self.asked.iter().all(Request::is_over) {
            self.due = None;
        }
    }

    /// # Errors
    /// The service cannot be used.
    fn go_on(
        &mut self,
        index: usize,
        now: Instant,
        settings: &Settings,
        ends: &mut Vec<StageEnd<T>>,
    ) -> Result<(), RpcError> {
        if let Link::Dialing(_) = self.link {
            self.notice(Duration::ZERO)?;
        }
        // A connection that was closed while nothing was under way is replaced.
        let idle = self.asked.iter().all(Request::is_over);
        match self.receive(index, ends) {
            Ok(()) => {}
            Err(error) if idle => {
                log::debug!("the stage service at {} has closed the connection: {error}", self.address);
                self.lose(Link::Closed);
            }
            Err(error) => return Err(error),
        }
        if let (Link::Open(connection), Some(request)) = (&self.link, self.asked.front())
            && now >= request.told + SILENCE_MAX
        {
            let call_ms_max = (now - request.asked_at).as_millis() as u32;
            return Err(RpcError::TimedOut { call_ms_max, trace: connection.trace() });
        }
        if matches!(self.link, Link::Shunned(until) if now >= until) {
            self.link = Link::Closed;
        }
        if matches!(self.link, Link::Closed) && !self.queue.is_empty() {
            self.link = Link::dial(&self.address, settings.rpc, settings.identity.clone())?;
        }
        self.send(now)
    }

    fn notice(&mut self, wait: Duration) -> Result<(), RpcError> {
        self.link.notice(wait)?;
        if let Link::Open(_) = self.link {
            self.connects += 1;
        }
        Ok(())
    }

    /// The connection is gone, and with it what it had staged.
    fn lose(&mut self, link: Link) {
        self.link = link;
        // Their objects go back, to be given up or asked for again.
        for request in self.asked.drain(..).rev() {
            let wanted = request.items.into_iter().rev().filter_map(|(_, wanted)| wanted);
            wanted.for_each(|wanted| self.queue.push_front(wanted));
        }
        self.connects += 1;
        self.bytes = 0;
        self.releases.clear();
    }

    fn receive(&mut self, index: usize, ends: &mut Vec<StageEnd<T>>) -> Result<(), RpcError> {
        let Self { link: Link::Open(connection), asked, releases, bytes, connects, .. } = self else {
            return Ok(());
        };
        while let Some(frame) = connection.try_recv()? {
            let id = frame.header.request_id;
            if id == 0 {
                return Err(RpcError::Refused(
                    frame.header.result().err().unwrap_or(ErrorCode::InternalError),
                ));
            }
            // Other frames are answers to releases.
            let Some(at) = asked.iter().position(|request| request.id == id) else { continue };
            let Some(request) = asked.remove(at) else { continue };
            let Request { asked_at, items, .. } = request;
            let (until, results) = answer(&frame, asked_at, items.len());
            for ((len, wanted), staged) in items.into_iter().zip(results) {
                let result = staged.map(|Staged { ticket, addr }| StagedAt {
                    addr,
                    until,
                    ticket,
                    line: index,
                    connect: *connects,
                    bytes: len,
                });
                match wanted {
                    Some(Wanted { what, .. }) => {
                        if result.is_err() {
                            *bytes = bytes.saturating_sub(len);
                        }
                        ends.push(StageEnd { what, result });
                    }
                    None => {
                        *bytes = bytes.saturating_sub(len);
                        releases.extend(result.ok().map(|staged| staged.ticket));
                    }
                }
            }
        }
        Ok(())
    }

    /// Asks for as much as may be under way.
    fn send(&mut self, now: Instant) -> Result<(), RpcError> {
        self.send_releases();
        while self.asked.len() < REQUESTS_MAX {
            let Link::Open(connection) = &mut self.link else { return Ok(()) };
            let (mut count, mut chunk) = (0, 0_u64);
            for wanted in self.queue.iter().take(ITEMS_MAX) {
                let sum = chunk.saturating_add(room_of(wanted));
                if count > 0 && sum > CHUNK_BYTES_MAX {
                    break;
                }
                (count, chunk) = (count + 1, sum);
            }
            if count == 0 || self.bytes > 0 && self.bytes.saturating_add(chunk) > BYTES_MAX {
                return Ok(());
            }
            let wanted: Vec<Wanted<T>> = self.queue.drain(..count).collect();
            let left = wanted.iter().map(|wanted| wanted.deadline).max().unwrap_or(now);
            let left = left.saturating_duration_since(now);
            // The service answers before the reader gives up, so that one slow object does not cost the
            // others.
            let deadline_ms = u32::try_from((left * 9 / 10).as_millis()).unwrap_or(u32::MAX);
            let items = wanted.iter().map(|wanted| wanted.item);
            let queued = connection.queue::<Stage>(&StageRequest { deadline_ms }, items);
            match queued.and_then(|id| connection.flush().map(|()| id)) {
                Ok(id) => {
                    let items = wanted.into_iter().map(|wanted| (room_of(&wanted), Some(wanted))).collect();
                    self.asked.push_back(Request { id, asked_at: now, told: now + left, items });
                    self.bytes = self.bytes.saturating_add(chunk);
                }
                Err(error) => {
                    wanted.into_iter().rev().for_each(|wanted| self.queue.push_front(wanted));
                    return Err(error);
                }
            }
        }
        Ok(())
    }

    pub(super) fn send_releases(&mut self) {
        let Link::Open(connection) = &mut self.link else { return self.releases.clear() };
        if self.releases.is_empty() {
            return;
        }
        // A loss of the connection shows at the next request; the service frees everything then.
        let sent = connection.queue::<ReleaseStaged>(&(), self.releases.drain(..));
        if let Err(error) = sent.and_then(|_| connection.flush()) {
            log::debug!("the stage service at {}: {error}", self.address);
        }
    }

    pub(super) fn give_up(
        &mut self,
        error: ErrorCode,
        mut is: impl FnMut(&Wanted<T>) -> bool,
        ends: &mut Vec<StageEnd<T>>,
    ) {
        let mut due: Option<Instant> = None;
        let mut keeps = |wanted: &Wanted<T>| {
            due = Some(due.map_or(wanted.deadline, |due| due.min(wanted.deadline)));
        };
        for _ in 0..self.queue.len() {
            let Some(wanted) = self.queue.pop_front() else { break };
            if is(&wanted) {
                ends.push(StageEnd { what: wanted.what, result: Err(error) });
            } else {
                keeps(&wanted);
                self.queue.push_back(wanted);
            }
        }
        for (_, place) in self.asked.iter_mut().flat_map(|request| &mut request.items) {
            match place.take() {
                Some(wanted) if is(&wanted) => ends.push(StageEnd { what: wanted.what, result: Err(error) }),
                Some(wanted) => {
                    keeps(&wanted);
                    *place = Some(wanted);
                }
                None => {}
            }
        }
        self.due = due;
    }

    /// Waits until something arrives, or the earliest deadline.
    pub(super) fn wait(&mut self, wait: Duration, settings: &Settings) {
        let due = self.due.map(|due| due.saturating_duration_since(Instant::now()));
        let wait = due.map_or(wait, |due| due.min(wait));
        match &mut self.link {
            Link::Open(connection) => connection.wait_readable(wait),
            Link::Dialing(_) => {
                if let Err(error) = self.notice(wait) {
                    log::debug!("the stage service at {}: {error}", self.address);
                    self.lose(Link::Shunned(Instant::now() + settings.shun));
                }
            }
            Link::Closed | Link::Shunned(_) => {}
        }
    }
}

impl<T> Request<T> {
    /// Whether no object of it is waited for.
    fn is_over(&self) -> bool {
        self.items.iter().all(|(_, wanted)| wanted.is_none())
    }
}

/// Bytes of staging memory that an object takes.
fn room_of<T>(wanted: &Wanted<T>) -> u64 {
    padded(stored_len(wanted.item.len)).unwrap_or(u64::MAX)
}

/// The results in an answer, one for each object, and until when they may be read. The window begins when the
/// service sends the answer; it is counted from before the request was sent, since nothing says how long the
/// answer was under way.
fn answer(frame: &Frame<'_>, asked_at: Instant, count: usize) -> (Instant, Vec<Result<Staged, ErrorCode>>) {
    match Stage::decode_response(frame) {
        Ok((window, items)) if items.len() == count => {
            (asked_at + Duration::from_millis(window.window_ms.into()), items.collect())
        }
        Ok(_) => (asked_at, vec![Err(ErrorCode::InternalError); count]),
        Err(error) => (asked_at, vec![Err(error); count]),
    }
}
