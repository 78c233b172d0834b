//! What a stage service has accepted and what it has staged, without sockets, threads or clocks.
//!
//! ```text
//!   StageItem ─▶ refused                                     (no room, queue full, invalid length)
//!             └▶ Job ─▶ read in time ─▶ Ticket ─▶ free        released, or the window and the guard over
//!                  │ └▶ failed ───────────────▶ free
//!                  └──▶ quarantine ─▶ finished ─▶ free        the deadline came first
//!                                 └▶ dropped: never free
//! ```

use std::collections::{BTreeSet, HashMap};
use std::time::{Duration, Instant};

use store_core::chunks::stored_len;
use store_core::message::{StageItem, Staged};
use store_core::{ErrorCode, SegmentNo};

use super::config::StageConfig;
use super::room::{Place, Room};
use super::server::StageCounters;
use super::source::JobEnd;

/// Longest deadline of a request; a longer one is shortened.
const DEADLINE_MAX: Duration = Duration::from_secs(60);

/// The state of a stage service.
pub(super) struct Desk {
    config: StageConfig,
    /// Address of the first byte of the staging memory in its export.
    base: u64,
    room: Room,
    jobs: HashMap<u64, Job>,
    job_bytes: u64,
    requests: HashMap<u64, Request>,
    tickets: HashMap<u64, Ticket>,
    /// What is due when: ends of requests and of tickets.
    due: BTreeSet<(Instant, Due)>,
    /// Numbers jobs, requests and tickets.
    number: u64,
    pub(super) counters: StageCounters,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Due {
    Request(u64),
    Ticket(u64),
}

/// An object that is being read.
struct Job {
    place: Place,
    /// The request and the index of the item; `None`: the buffer is in quarantine.
    reader: Option<(u64, usize)>,
}

struct Request {
    connection: u64,
    id: u64,
    deadline: Instant,
    window: Duration,
    items: Vec<Item>,
    /// Number of items that are being read.
    left: usize,
}

#[derive(Clone, Copy)]
enum Item {
    Reading(u64),
    Refused(ErrorCode),
    Staged(Staged),
}

struct Ticket {
    connection: u64,
    place: Place,
    /// `None` before the answer.
    end: Option<Instant>,
}

/// A request of a connection.
pub(super) struct Asked {
    pub(super) connection: u64,
    pub(super) id: u64,
    pub(super) deadline_ms: u32,
}

/// A read that the source has to begin: the buffer is `place` of the staging memory.
pub(super) struct Order {
    pub(super) number: u64,
    pub(super) object: (SegmentNo, u64, u64),
    pub(super) place: Place,
    pub(super) deadline: Instant,
}

/// An answered request.
pub(super) struct Answer {
    pub(super) connection: u64,
    pub(super) id: u64,
    pub(super) window_ms: u32,
    pub(super) items: Vec<Result<Staged, ErrorCode>>,
}

impl Desk {
    pub(super) fn new(config: StageConfig, base: u64, bytes: u64) -> Self {
        Self {
            config,
            base,
            room: Room::new(bytes),
            jobs: HashMap::new(),
            job_bytes: 0,
            requests: HashMap::new(),
            tickets: HashMap::new(),
            due: BTreeSet::new(),
            number: 0,
            counters: StageCounters::default(),
        }
    }

    /// Accepts a request. What has to be read is appended to `orders`; the answer comes from
    /// [`next_answer`](Self::answer_if_over) at once if nothing has.
    pub(super) fn request(
        &mut self,
        now: Instant,
        asked: &Asked,
        items: impl ExactSizeIterator<Item = StageItem>,
        orders: &mut Vec<Order>,
    ) -> Option<Answer> {
        let wait = Duration::from_millis(asked.deadline_ms.into()).min(DEADLINE_MAX);
        let deadline = now + wait;
        let request = self.next_number();
        self.counters.requests_total += 1;
        let mut states = Vec::with_capacity(items.len());
        for (index, item) in items.enumerate() {
            self.counters.objects_total += 1;
            let admitted = self.admit(&item, wait);
            states.push(match admitted {
                Ok(place) => {
                    let number = self.next_number();
                    self.jobs.insert(number, Job { place, reader: Some((request, index)) });
                    self.job_bytes += place.bytes;
                    let object = (item.disk, item.locator, item.len);
                    orders.push(Order { number, object, place, deadline });
                    Item::Reading(number)
                }
                Err(code) => {
                    self.counters.refused_total += 1;
                    Item::Refused(code)
                }
            });
        }
        let left = states.iter().filter(|state| matches!(state, Item::Reading(_))).count();
        let window = Duration::from_millis(self.config.window_ms.into()) + wait;
        let Asked { connection, id, .. } = *asked;
        self.requests.insert(request, Request { connection, id, deadline, window, items: states, left });
        self.due.insert((deadline, Due::Request(request)));
        self.answer_if_over(now, request)
    }

    fn admit(&mut self, item: &StageItem, wait: Duration) -> Result<Place, ErrorCode> {
        let bytes = stored_len(item.len);
        if item.len == 0 {
            return Err(ErrorCode::InvalidParams);
        }
        if bytes > self.room.bytes() {
            return Err(ErrorCode::ObjectTooLarge);
        }
        let full = self.jobs.len() >= self.config.queue_items_max as usize
            || self.job_bytes > 0 && self.job_bytes.saturating_add(bytes) > self.config.queue_bytes_max;
        if full || wait.is_zero() {
            return Err(ErrorCode::UnavailableInCurrentStatus);
        }
        self.room.take(bytes).ok_or(ErrorCode::UnavailableInCurrentStatus)
    }

    /// A job has ended. Returns the answer of its request, if that is complete now.
    pub(super) fn job_ended(&mut self, now: Instant, number: u64, end: JobEnd) -> Option<Answer> {
        let Job { place, reader } = self.jobs.remove(&number)?;
        self.job_bytes -= place.bytes;
        if reader.is_none() {
            self.counters.quarantined_bytes -= place.bytes;
        }
        if end == JobEnd::Lost {
            // Something may still write there.
            self.counters.lost_bytes += place.bytes;
            log::error!(
                "a read of a disk was dropped unfinished: {} bytes of staging memory stay unused until the \
                 node is restarted",
                place.bytes
            );
        }
        let waiting =
            reader.and_then(|(request, index)| Some((request, index, self.requests.get_mut(&request)?)));
        let Some((request, index, waiting)) = waiting else {
            self.free(place, end);
            return None;
        };
        waiting.left -= 1;
        let connection = waiting.connection;
        let state = &mut waiting.items[index];
        if end == JobEnd::Read {
            // Never used twice, so that a late release does not free another object.
            self.number += 1;
            let ticket = self.number;
            *state = Item::Staged(Staged { ticket, addr: self.base + place.offset });
            self.tickets.insert(ticket, Ticket { connection, place, end: None });
        } else {
            let code = if let JobEnd::Failed(code) = end { code } else { ErrorCode::InternalError };
            *state = Item::Refused(code);
            self.counters.failed_total += 1;
            self.free(place, end);
        }
        self.answer_if_over(now, request)
    }

    fn free(&mut self, place: Place, end: JobEnd) {
        if end != JobEnd::Lost {
            self.room.give(place);
        }
    }

    /// Ends what is due. Returns one answer; call it again until it returns `None`.
    pub(super) fn expire(&mut self, now: Instant) -> Option<Answer> {
        while let Some(&(at, due)) = self.due.first().filter(|(at, _)| *at <= now) {
            self.due.remove(&(at, due));
            match due {
                Due::Ticket(ticket) => {
                    if let Some(ticket) = self.tickets.remove(&ticket) {
                        self.counters.expired_total += 1;
                        self.room.give(ticket.place);
                    }
                }
                Due::Request(request) => {
                    self.give_up(request);
                    if let Some(answer) = self.answer_if_over(now, request) {
                        return Some(answer);
                    }
                }
            }
        }
        None
    }

    /// When [`Self::expire`] is to be called.
    pub(super) fn due_at(&self) -> Option<Instant> {
        self.due.first().map(|(at, _)| *at)
    }

    /// Refuses what is still being read, and puts the buffers in quarantine.
    fn give_up(&mut self, request: u64) {
        let Some(request) = self.requests.get_mut(&request) else { return };
        for item in &mut request.items {
            let Item::Reading(number) = *item else { continue };
            *item = Item::Refused(ErrorCode::UnavailableInCurrentStatus);
            request.left -= 1;
            self.counters.busy_total += 1;
            if let Some(job) = self.jobs.get_mut(&number) {
                job.reader = None;
                self.counters.quarantined_total += 1;
                self.counters.quarantined_bytes += job.place.bytes;
            }
        }
    }

    fn answer_if_over(&mut self, now: Instant, number: u64) -> Option<Answer> {
        if self.requests.get(&number)?.left > 0 {
            return None;
        }
        let Request { connection, id, deadline, window, items, .. } = self.requests.remove(&number)?;
        self.due.remove(&(deadline, Due::Request(number)));
        let end = now + window + self.config.guard();
        let items = items.into_iter().map(|item| match item {
            Item::Refused(code) => Err(code),
            Item::Reading(_) => Err(ErrorCode::InternalError),
            Item::Staged(staged) => {
                if let Some(ticket) = self.tickets.get_mut(&staged.ticket) {
                    ticket.end = Some(end);
                    self.due.insert((end, Due::Ticket(staged.ticket)));
                    self.counters.staged_total += 1;
                    self.counters.staged_bytes_total += ticket.place.bytes;
                }
                Ok(staged)
            }
        });
        let items = items.collect();
        let window_ms = u32::try_from(window.as_millis()).unwrap_or(u32::MAX);
        Some(Answer { connection, id, window_ms, items })
    }

    /// A reader needs an object no more. A ticket of another connection, or one that is over, is ignored.
    pub(super) fn release(&mut self, connection: u64, number: u64) {
        if self.tickets.get(&number).is_some_and(|ticket| ticket.connection == connection)
            && let Some(ticket) = self.tickets.remove(&number)
        {
            if let Some(end) = ticket.end {
                self.due.remove(&(end, Due::Ticket(number)));
            }
            self.room.give(ticket.place);
        }
    }

    /// A connection has ended: its requests are given up, and its tickets end with the guard.
    pub(super) fn connection_ended(&mut self, now: Instant, connection: u64) {
        let of = |(number, request): (&u64, &Request)| (request.connection == connection).then_some(*number);
        let requests: Vec<u64> = self.requests.iter().filter_map(of).collect();
        for request in requests {
            self.give_up(request);
            // There is nowhere to send the answer, but the tickets in it have an end now.
            let _ = self.answer_if_over(now, request);
        }
        let end = now + self.config.guard();
        for (number, ticket) in &mut self.tickets {
            if ticket.connection == connection
                && let Some(then) = ticket.end.filter(|then| *then > end)
            {
                self.due.remove(&(then, Due::Ticket(*number)));
                self.due.insert((end, Due::Ticket(*number)));
                ticket.end = Some(end);
            }
        }
    }

    /// The counters, as of now.
    pub(super) fn counted(&self) -> StageCounters {
        StageCounters {
            reading: self.jobs.len() as u64,
            tickets: self.tickets.len() as u64,
            memory_used_bytes: self.room.used_bytes(),
            memory_bytes: self.room.bytes(),
            ..self.counters
        }
    }

    fn next_number(&mut self) -> u64 {
        self.number += 1;
        self.number
    }
}
