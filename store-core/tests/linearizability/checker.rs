//! Whether the responses that clients got about a key could have come from an object store that executes one
//! operation at a time.
//!
//! # The model
//! Keys are independent of each other, so a history is linearizable when that of each key is (Herlihy and
//! Wing 1990, locality). A key is in one of two states: *absent*, or *present* with one put, whose bytes
//! never change. Every operation takes effect at one instant between its request and its response:
//!
//! | Operation, response | may take effect when | resulting state |
//! |---|---|---|
//! | put, done | absent, and every put that took effect before was started before | present with this put |
//! | put, unknown (no response, or its caller died) | as above, now, later or never | |
//! | upsert, done | always | present with this put |
//! | upsert, unknown | now, later or never | |
//! | put or upsert, refused or given up | never: no get may return it | |
//! | get, an object | present with exactly this put, whose bytes these are | unchanged |
//! | get, not found | absent | absent |
//! | get, any other error | always | unchanged |
//! | exists, yes / no | present / absent | as it was |
//! | remove, done | present; forced: always, for it may have hit an unfinished put | absent |
//! | remove, not found | always: it may be the second try of one that was done | absent |
//! | remove, leased / not ready | present / absent | as it was |
//! | remove, unknown | now, later or never | absent |
//! | loss | always | absent |
//!
//! A *loss* is caused by the store itself and reported by its operator: an eviction, an expiry, the end of
//! the last node, a restart of the master. A miss without a loss or a remove before it is therefore a
//! violation, and so is an object after one of them. From the order of starts it follows that a put which was
//! overtaken (displaced or removed while it was written) never comes back: the master starts one put of a key
//! at a time. Any number of upserts of a key run at once, and each takes effect whenever it is committed.
//!
//! # The search
//! Wing and Gong's, in the order of time (Lowe 2017, "just-in-time linearization"): the set of all
//! configurations that the responses so far allow, a configuration being a state and the set of running
//! operations that have taken effect. If it is empty after a response, that response has no explanation.
//! Histories are short and few operations run at once; a history beyond the limits below is refused instead
//! of searched forever.
//!
//! It does not judge bytes (the recorder compares them and identifies their put), nor the contents of memory.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fmt;

/// Limit on operations on one key that run at once, including those that never got a response.
pub(crate) const RUNNING_MAX: usize = 64;
/// Limit on configurations that are kept at once.
pub(crate) const CONFIGURATIONS_MAX: usize = 1 << 18;

/// Identifies a put: chosen by the recorder, one per put and key.
pub(crate) type PutId = u64;

/// A request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Request {
    /// Store this put's bytes, unless there is an object.
    Put(PutId),
    /// Store this put's bytes, whether there is an object or not.
    Upsert(PutId),
    /// Read.
    Get,
    /// Does the object exist?
    Exists,
    /// Remove the object.
    Remove {
        /// Even under a lease, even unfinished.
        force: bool,
    },
}

impl Request {
    /// The put that it stores.
    fn put(self) -> Option<PutId> {
        if let Self::Put(put) | Self::Upsert(put) = self { Some(put) } else { None }
    }
}

/// A response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Response {
    /// The put is committed; the remove is done.
    Done,
    /// The put will never be committed; the get or remove says nothing about the object.
    Failed,
    /// No response, or one without information: it may have taken effect, or may still.
    NotKnown,
    /// The get returned this put's bytes. `None`: bytes of no put of this key.
    Object(Option<PutId>),
    /// Get and remove: no object. Exists: no.
    NotFound,
    /// Exists: yes. Remove: the object exists, but is leased.
    Found,
    /// Remove: the object exists, but is not finished.
    NotReady,
}

/// Identifies a recorded operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Id(usize);

/// One recorded operation. Times are of one clock, in any unit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Operation {
    who: usize,
    request: Request,
    answer: Response,
    called: u64,
    /// `None`: not yet, or never.
    answered: Option<u64>,
}

/// The recorded operations, by key.
#[derive(Clone, Debug, Default)]
pub(crate) struct History {
    operations: Vec<(Vec<u8>, Operation)>,
    losses: Vec<(Vec<u8>, u64)>,
    /// The order in which puts were started, for those that were.
    starts: HashMap<PutId, u64>,
}

/// A history that no order of the operations explains, or that is over a limit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Refusal {
    /// The key.
    pub(crate) key: String,
    /// Why.
    pub(crate) reason: Reason,
    /// The response that has no explanation, and the operations around it.
    pub(crate) story: String,
}

/// Why a history is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reason {
    /// The bytes belong to no put of this key.
    ForeignBytes,
    /// The bytes belong to a put that was never finished.
    Unfinished,
    /// No order explains the response.
    NoOrder,
    /// Over a limit of this checker.
    TooComplex,
}

impl History {
    /// Records a request.
    pub(crate) fn called(&mut self, who: usize, key: &[u8], request: Request, at: u64) -> Id {
        let operation = Operation { who, request, answer: Response::NotKnown, called: at, answered: None };
        self.operations.push((key.to_vec(), operation));
        Id(self.operations.len() - 1)
    }

    /// Records its response.
    pub(crate) fn answered(&mut self, id: Id, answer: Response, at: u64) {
        let operation = &mut self.operations[id.0].1;
        assert!(
            operation.answered.is_none() && operation.called <= at,
            "a response was recorded twice, or before its request"
        );
        (operation.answer, operation.answered) = (answer, Some(at));
    }

    /// Records that a put was started. The later the start, the higher `order`.
    pub(crate) fn started(&mut self, put: PutId, order: u64) {
        self.starts.insert(put, order);
    }

    /// Records that the store lost the key's object.
    pub(crate) fn lost(&mut self, key: &[u8], at: u64) {
        self.losses.push((key.to_vec(), at));
    }

    /// Number of recorded operations.
    pub(crate) fn len(&self) -> usize {
        self.operations.len()
    }

    /// Number of recorded losses.
    pub(crate) fn losses(&self) -> usize {
        self.losses.len()
    }

    /// Searches for an order that explains all responses.
    pub(crate) fn check(&self) -> Result<(), Refusal> {
        let mut keys: BTreeMap<&[u8], (Vec<&Operation>, Vec<u64>)> = BTreeMap::new();
        for (key, operation) in &self.operations {
            keys.entry(key).or_default().0.push(operation);
        }
        for (key, at) in &self.losses {
            keys.entry(key).or_default().1.push(*at);
        }
        for (key, (operations, losses)) in keys {
            let mut search = Search::new(&operations, &self.starts);
            search.run(&losses).map_err(|(reason, at)| Refusal {
                key: String::from_utf8_lossy(key).into_owned(),
                reason,
                story: story(&operations, &losses, &self.starts, at),
            })?;
        }
        Ok(())
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} for key {:?}:\n{}", self.reason, self.key, self.story)
    }
}

/// The put that is present, if any, and the start of the latest put so far.
type State = (Option<PutId>, u64);

/// A state, and one bit per running operation that has taken effect.
type Configuration = (State, u64);

struct Search<'a> {
    operations: &'a [&'a Operation],
    starts: &'a HashMap<PutId, u64>,
    /// Running operations, each at the index of its bit.
    running: Vec<Option<usize>>,
    configurations: HashSet<Configuration>,
}

/// In this order at the same instant: an operation that ends at an instant runs at the same time as one that
/// begins there.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    Called(usize),
    LossBegins(usize),
    LossEnds(usize),
    Answered(usize),
}

impl<'a> Search<'a> {
    fn new(operations: &'a [&'a Operation], starts: &'a HashMap<PutId, u64>) -> Self {
        Self { operations, starts, running: Vec::new(), configurations: HashSet::from([((None, 0), 0)]) }
    }

    /// The error contains the operation, or the loss after all operations, that has no explanation.
    fn run(&mut self, losses: &[u64]) -> Result<(), (Reason, usize)> {
        self.judge_bytes()?;
        let mut events: Vec<(u64, Event)> = Vec::new();
        for (index, operation) in self.operations.iter().enumerate() {
            if !operation.can_take_effect(self.starts) {
                continue;
            }
            events.push((operation.called, Event::Called(index)));
            // An operation without an informative response may take effect until the end of time.
            let ends = operation.answered.filter(|_| operation.answer != Response::NotKnown);
            events.extend(ends.map(|at| (at, Event::Answered(index))));
        }
        for (index, at) in losses.iter().enumerate() {
            let index = self.operations.len() + index;
            events.extend([(*at, Event::LossBegins(index)), (*at, Event::LossEnds(index))]);
        }
        events.sort_unstable();
        for (_, event) in events {
            match event {
                Event::Called(index) | Event::LossBegins(index) => self.begin(index)?,
                Event::Answered(index) | Event::LossEnds(index) => self.end(index)?,
            }
        }
        Ok(())
    }

    /// The checks without a search: which put the bytes belong to, and whether that put can ever have been
    /// present.
    fn judge_bytes(&self) -> Result<(), (Reason, usize)> {
        for (index, get) in self.operations.iter().enumerate() {
            let Response::Object(object) = get.answer else { continue };
            let put =
                object.and_then(|put| self.operations.iter().find(|other| other.request.put() == Some(put)));
            match put {
                None => return Err((Reason::ForeignBytes, index)),
                Some(put) if !put.can_take_effect(self.starts) => return Err((Reason::Unfinished, index)),
                Some(_) => {}
            }
        }
        Ok(())
    }

    fn begin(&mut self, index: usize) -> Result<(), (Reason, usize)> {
        let free = self.running.iter().position(Option::is_none);
        let place = free.unwrap_or_else(|| {
            self.running.push(None);
            self.running.len() - 1
        });
        if place >= RUNNING_MAX {
            return Err((Reason::TooComplex, index));
        }
        self.running[place] = Some(index);
        Ok(())
    }

    /// The operation has a response, so it has taken effect; before it perhaps some of the other running
    /// ones.
    fn end(&mut self, index: usize) -> Result<(), (Reason, usize)> {
        let Some(place) = self.running.iter().position(|running| *running == Some(index)) else {
            return Ok(());
        };
        let bit = 1 << place;
        let mut found = HashSet::new();
        let mut seen = HashSet::new();
        let mut todo: Vec<Configuration> = self.configurations.drain().collect();
        while let Some((state, done)) = todo.pop() {
            if !seen.insert((state, done)) {
                continue;
            }
            if seen.len() > CONFIGURATIONS_MAX {
                return Err((Reason::TooComplex, index));
            }
            if done & bit != 0 {
                found.insert((state, done & !bit));
                continue;
            }
            for (other, running) in self.running.iter().enumerate() {
                let Some(running) = running.filter(|_| done & (1 << other) == 0) else { continue };
                if let Some(next) = self.effect(running, state) {
                    todo.push((next, done | 1 << other));
                }
            }
        }
        self.running[place] = None;
        self.configurations = found;
        if self.configurations.is_empty() { Err((Reason::NoOrder, index)) } else { Ok(()) }
    }

    /// The state after the operation, if it may take effect in this one.
    fn effect(&self, index: usize, state: State) -> Option<State> {
        let (object, latest) = state;
        let gone = (None, latest);
        let Some(operation) = self.operations.get(index) else { return Some(gone) };
        match (operation.request, operation.answer) {
            (Request::Put(put), _) => {
                let start = self.starts.get(&put).copied().unwrap_or(u64::MAX);
                (object.is_none() && start > latest).then_some((Some(put), start))
            }
            (Request::Upsert(put), _) => {
                let start = self.starts.get(&put).copied().unwrap_or(0);
                Some((Some(put), latest.max(start)))
            }
            (Request::Get, Response::Object(read)) => (object == read).then_some(state),
            (Request::Get | Request::Exists, Response::NotFound) => object.is_none().then_some(state),
            (Request::Exists | Request::Remove { .. }, Response::Found) => object.is_some().then_some(state),
            (Request::Remove { .. }, Response::NotReady) => object.is_none().then_some(state),
            (Request::Remove { force }, Response::Done) => (force || object.is_some()).then_some(gone),
            (Request::Remove { .. }, Response::NotFound | Response::NotKnown) => Some(gone),
            _ => Some(state),
        }
    }
}

impl Operation {
    /// Whether it can have an effect, or has an informative response.
    fn can_take_effect(&self, starts: &HashMap<PutId, u64>) -> bool {
        match (self.request, self.answer) {
            (_, Response::Failed) => false,
            // A put that was not started cannot be committed.
            (Request::Put(put) | Request::Upsert(put), _) => starts.contains_key(&put),
            (Request::Get | Request::Exists, Response::NotKnown) => false,
            _ => true,
        }
    }
}

/// The operations near the one (or the loss) that has no explanation.
fn story(operations: &[&Operation], losses: &[u64], starts: &HashMap<PutId, u64>, at: usize) -> String {
    const BEFORE: usize = 24;
    let mut lines: Vec<(u64, bool, String)> = Vec::new();
    let mut until = u64::MAX;
    for (index, operation) in operations.iter().enumerate() {
        let Operation { who, request, answer, called, answered } = operation;
        let start = request.put().and_then(|put| starts.get(&put));
        let start = start.map_or_else(String::new, |order| format!(", start {order}"));
        let end = answered.map_or_else(|| "…".to_owned(), |at| at.to_string());
        let text = format!("{called}–{end} client {who}: {request:?} → {answer:?}{start}");
        lines.push((*called, index == at, text));
        if index == at {
            until = answered.unwrap_or(u64::MAX);
        }
    }
    for (index, lost) in losses.iter().enumerate() {
        lines.push((*lost, operations.len() + index == at, format!("{lost} lost")));
    }
    lines.retain(|(called, ..)| *called <= until);
    lines.sort();
    let lines: Vec<String> = lines
        .iter()
        .skip(lines.len().saturating_sub(BEFORE))
        .map(|(_, culprit, text)| format!("{} {text}", if *culprit { "→" } else { " " }))
        .collect();
    lines.join("\n")
}
