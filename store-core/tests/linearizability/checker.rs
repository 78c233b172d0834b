//! Whether what clients saw of a key could have been seen of one object store that does one thing at a time.
//!
//! # The model
//! Keys do not know of each other, so that a history is linearizable when that of each key is (Herlihy and Wing 1990,
//! locality). A key is in one of two states: *absent*, or *present* with one put, whose bytes never change. Every operation
//! takes effect at one instant between its call and its answer:
//!
//! | Operation, answer | may take effect when | and leaves |
//! |---|---|---|
//! | put, done | absent, and every put that took effect before was started before | present with this put |
//! | put, not known (no answer, or its caller died) | as above, now, later or never | |
//! | put, refused or given up | never: no get may return it | |
//! | get, an object | present with just this put, whose bytes these are | as it was |
//! | get, not found | absent | absent |
//! | get, any other error | whenever | as it was |
//! | exists, yes / no | present / absent | as it was |
//! | remove, done | present; forced: whenever, for it may have hit an unfinished put | absent |
//! | remove, not found | whenever: it may be the second try of one that was done | absent |
//! | remove, leased / not ready | present / absent | as it was |
//! | remove, not known | now, later or never | absent |
//! | loss | whenever | absent |
//!
//! A *loss* is the store's own doing, told by whoever runs it: evicted, expired, its last node gone, the master restarted.
//! A miss without a loss or a remove before it is therefore a violation, and so is an object after one of them. The order
//! of starts says that a put which was overtaken (displaced or removed while it was written) never comes back: the master
//! starts one put of a key at a time.
//!
//! # The search
//! Wing and Gong's, in the order of time (Lowe 2017, "just-in-time linearization"): the set of all configurations that the
//! answers so far allow, a configuration being a state and which of the running operations have taken effect. It is empty
//! after some answer: that answer has no explanation. Histories are short and few operations run at once; the limits below
//! are there so that one that is not is told so rather than searched for ever.
//!
//! What it is not: a judge of bytes (the recorder compares them, and says whose they are), nor of what lies in memory.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fmt;

/// Operations on one key that may run at once, those that never got an answer included.
pub(crate) const RUNNING_MAX: usize = 64;
/// Configurations that are kept at once.
pub(crate) const CONFIGURATIONS_MAX: usize = 1 << 18;

/// Names a put: chosen by the recorder, one for each put of each key.
pub(crate) type PutId = u64;

/// What was asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ask {
    /// Store this put's bytes.
    Put(PutId),
    /// Read.
    Get,
    /// Is it there?
    Exists,
    /// Forget it.
    Remove {
        /// Even under a lease, even unfinished.
        force: bool,
    },
}

/// What was answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Answer {
    /// The put is committed; the remove is done.
    Done,
    /// The put never will be; the get or remove says nothing about the object.
    Failed,
    /// No answer, or none that says: it may have taken effect, or may still.
    NotKnown,
    /// The get returned this put's bytes. `None`: bytes of no put of this key.
    Object(Option<PutId>),
    /// Get and remove: nothing there. Exists: no.
    NotFound,
    /// Exists: yes. Remove: there, but leased.
    Found,
    /// Remove: there, but not finished.
    NotReady,
}

/// Names a recorded operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Id(usize);

/// One recorded operation. Times are of one clock, in any unit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Operation {
    who: usize,
    ask: Ask,
    answer: Answer,
    called: u64,
    /// `None`: not yet, or never.
    answered: Option<u64>,
}

/// What happened, key by key.
#[derive(Clone, Debug, Default)]
pub(crate) struct History {
    operations: Vec<(Vec<u8>, Operation)>,
    losses: Vec<(Vec<u8>, u64)>,
    /// The order in which the puts were started, for those that got so far.
    starts: HashMap<PutId, u64>,
}

/// No order of the operations explains their answers, or none could be looked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Refusal {
    /// The key.
    pub(crate) key: String,
    /// Why.
    pub(crate) reason: Reason,
    /// The answer that has no explanation, and what happened around it.
    pub(crate) story: String,
}

/// Why a history is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reason {
    /// The bytes are of no put of this key.
    ForeignBytes,
    /// The bytes are of a put that was never finished.
    Unfinished,
    /// Nothing explains the answer.
    NoOrder,
    /// Over a limit of this checker.
    TooComplex,
}

impl History {
    /// Somebody asks for something.
    pub(crate) fn called(&mut self, who: usize, key: &[u8], ask: Ask, at: u64) -> Id {
        let operation = Operation { who, ask, answer: Answer::NotKnown, called: at, answered: None };
        self.operations.push((key.to_vec(), operation));
        Id(self.operations.len() - 1)
    }

    /// And is answered.
    pub(crate) fn answered(&mut self, id: Id, answer: Answer, at: u64) {
        let operation = &mut self.operations[id.0].1;
        assert!(
            operation.answered.is_none() && operation.called <= at,
            "answered twice, or before it was asked"
        );
        (operation.answer, operation.answered) = (answer, Some(at));
    }

    /// A put got its place. The later the start, the higher `order`.
    pub(crate) fn started(&mut self, put: PutId, order: u64) {
        self.starts.insert(put, order);
    }

    /// The store lost the key's object by its own doing.
    pub(crate) fn lost(&mut self, key: &[u8], at: u64) {
        self.losses.push((key.to_vec(), at));
    }

    /// How many operations were recorded.
    pub(crate) fn len(&self) -> usize {
        self.operations.len()
    }

    /// How many losses were recorded.
    pub(crate) fn losses(&self) -> usize {
        self.losses.len()
    }

    /// Looks for an order that explains everything.
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

/// The put that is there, if any, and when the latest one was started that ever was.
type State = (Option<PutId>, u64);

/// A state, and a bit for each running operation that has taken effect.
type Configuration = (State, u64);

struct Search<'a> {
    operations: &'a [&'a Operation],
    starts: &'a HashMap<PutId, u64>,
    /// Operations that run, each in the place of its bit.
    running: Vec<Option<usize>>,
    configurations: HashSet<Configuration>,
}

/// In this order at the same instant: what ends at an instant runs at the same time as what begins there.
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

    /// The error names the operation, or the loss after all operations, that has no explanation.
    fn run(&mut self, losses: &[u64]) -> Result<(), (Reason, usize)> {
        self.judge_bytes()?;
        let mut events: Vec<(u64, Event)> = Vec::new();
        for (index, operation) in self.operations.iter().enumerate() {
            if !operation.can_take_effect(self.starts) {
                continue;
            }
            events.push((operation.called, Event::Called(index)));
            // One whose answer says nothing may take effect until the end of time.
            let ends = operation.answered.filter(|_| operation.answer != Answer::NotKnown);
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

    /// What needs no search: whose bytes were read, and whether that put can ever have been there.
    fn judge_bytes(&self) -> Result<(), (Reason, usize)> {
        for (index, get) in self.operations.iter().enumerate() {
            let Answer::Object(object) = get.answer else { continue };
            let put = object.and_then(|put| self.operations.iter().find(|other| other.ask == Ask::Put(put)));
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

    /// The operation has an answer, so that it has taken effect: before it perhaps some of the others that run.
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

    /// The state that the operation leaves behind, if it may take effect in this one.
    fn effect(&self, index: usize, state: State) -> Option<State> {
        let (object, latest) = state;
        let gone = (None, latest);
        let Some(operation) = self.operations.get(index) else { return Some(gone) };
        match (operation.ask, operation.answer) {
            (Ask::Put(put), _) => {
                let start = self.starts.get(&put).copied().unwrap_or(u64::MAX);
                (object.is_none() && start > latest).then_some((Some(put), start))
            }
            (Ask::Get, Answer::Object(read)) => (object == read).then_some(state),
            (Ask::Get | Ask::Exists, Answer::NotFound) => object.is_none().then_some(state),
            (Ask::Exists | Ask::Remove { .. }, Answer::Found) => object.is_some().then_some(state),
            (Ask::Remove { .. }, Answer::NotReady) => object.is_none().then_some(state),
            (Ask::Remove { force }, Answer::Done) => (force || object.is_some()).then_some(gone),
            (Ask::Remove { .. }, Answer::NotFound | Answer::NotKnown) => Some(gone),
            _ => Some(state),
        }
    }
}

impl Operation {
    /// Whether it says or does anything.
    fn can_take_effect(&self, starts: &HashMap<PutId, u64>) -> bool {
        match (self.ask, self.answer) {
            (_, Answer::Failed) => false,
            // Without a place nothing can be committed.
            (Ask::Put(put), _) => starts.contains_key(&put),
            (Ask::Get | Ask::Exists, Answer::NotKnown) => false,
            _ => true,
        }
    }
}

/// What happened near the operation (or loss) that has no explanation.
fn story(operations: &[&Operation], losses: &[u64], starts: &HashMap<PutId, u64>, at: usize) -> String {
    const BEFORE: usize = 24;
    let mut lines: Vec<(u64, bool, String)> = Vec::new();
    let mut until = u64::MAX;
    for (index, operation) in operations.iter().enumerate() {
        let Operation { who, ask, answer, called, answered } = operation;
        let start = match ask {
            Ask::Put(put) => starts.get(put).map_or_else(String::new, |order| format!(", start {order}")),
            _ => String::new(),
        };
        let end = answered.map_or_else(|| "…".to_owned(), |at| at.to_string());
        let text = format!("{called}–{end} client {who}: {ask:?} → {answer:?}{start}");
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
