//! What the judge sees of a stream: it follows every message that is applied, and compares.

use std::collections::HashMap;

use conductor_core::InstanceId;
use conductor_core::knowledge::{Feed, Matches, PublisherId};
use conductor_core::stream::{FenceReason, Sink};

use crate::model::{Op, Truth};

/// A rule that the Conductor breaks on purpose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lie {
    /// It does not forget what it knows after a gap that was not filled.
    NoFenceAfterGap,
    /// It does not check that a replay begins with the message that it applied last.
    ReplaysNotVerified,
    /// It takes a new connection for the old one.
    ReconnectsNotNoticed,
    /// It ignores the removal of a block that has successors.
    RemovalsOfParentsIgnored,
    /// It serves what a snapshot says before the publisher has confirmed it.
    SnapshotsTrusted,
    /// It takes what the other Conductor knew for what is known at the publisher's latest message.
    AdoptionsNotTied,
}

/// Where a message came from: publisher, run, number.
pub(crate) type Origin = (usize, usize, u64);

/// What a publisher ever said: per run and message, what it means.
#[derive(Debug, Default)]
pub(crate) struct Told {
    pub(crate) runs: Vec<Vec<Vec<Op>>>,
    pub(crate) first_seq: u64,
}

impl Told {
    /// What was true when a run had sent the messages before `next`.
    fn truth_at(&self, run: usize, next: u64) -> Truth {
        let mut truth = Truth::default();
        let messages = (next - self.first_seq) as usize;
        self.runs[run][..messages].iter().flatten().for_each(|op| truth.apply(op));
        truth
    }
}

/// How far the stream of a publisher got, by what it applied.
#[derive(Clone, Debug, Default)]
pub(crate) struct Cursor {
    /// Run and number of the next message; `None` after a fence.
    pub(crate) at: Option<(usize, u64)>,
    pub(crate) truth: Truth,
    pub(crate) served: bool,
    pub(crate) fences: u64,
}

impl Cursor {
    /// What another Conductor knew, which followed with `theirs`, took the place of what was known.
    pub(crate) fn adopted(&mut self, theirs: &Self) {
        (self.at, self.truth) = (theirs.at, theirs.truth.clone());
    }

    fn applied(&mut self, said: &Told, (_, run, seq): Origin) -> Result<(), String> {
        match self.at {
            Some((of, next)) if (of, next) != (run, seq) => {
                return Err(format!("message {seq} of run {run} was applied after {next} of run {of}"));
            }
            Some(_) => {
                said.runs[run][(seq - said.first_seq) as usize].iter().for_each(|op| self.truth.apply(op));
            }
            None => self.truth = said.truth_at(run, seq + 1),
        }
        self.at = Some((run, seq + 1));
        Ok(())
    }
}

/// The sink of a stream, watched.
pub(crate) struct Watched<'a> {
    pub(crate) feed: Feed<'a>,
    pub(crate) cursor: &'a mut Cursor,
    pub(crate) said: &'a Told,
    pub(crate) origins: &'a HashMap<Vec<u8>, Origin>,
    pub(crate) publisher: usize,
    pub(crate) lie: Option<Lie>,
    pub(crate) wrong: Result<(), String>,
    /// Whether it was called.
    pub(crate) acted: bool,
    /// Without removals of parents, for the lie.
    pub(crate) altered: &'a dyn Fn(Origin) -> Option<Vec<u8>>,
}

impl Sink for Watched<'_> {
    fn apply(&mut self, seq: u64, payload: &[u8]) -> bool {
        self.acted = true;
        let origin = self.origins[payload];
        if self.wrong.is_ok() {
            self.wrong = match origin {
                (publisher, _, number) if (publisher, number) != (self.publisher, seq) => {
                    Err(format!("{origin:?} was applied as {seq} of {}", self.publisher))
                }
                _ => self.cursor.applied(self.said, origin),
            };
        }
        let altered =
            (self.lie == Some(Lie::RemovalsOfParentsIgnored)).then(|| (self.altered)(origin)).flatten();
        self.feed.apply(seq, altered.as_deref().unwrap_or(payload))
    }

    fn fence(&mut self, reason: FenceReason) {
        self.acted = true;
        self.cursor.at = None;
        self.cursor.truth = Truth::default();
        self.cursor.fences += 1;
        let gap = matches!(reason, FenceReason::Lost | FenceReason::NoReplay);
        if !(gap && self.lie == Some(Lie::NoFenceAfterGap)) {
            self.feed.fence(reason);
        }
    }

    fn serve(&mut self, served: bool) {
        self.acted = true;
        self.cursor.served = served;
        self.feed.serve(served);
    }

    fn ask(&mut self, from: u64) {
        self.feed.ask(from);
    }
}

/// What is answered for one rank.
pub(crate) fn answered(matches: &Matches, instance: InstanceId, dp_rank: u32) -> [u32; 3] {
    let found = matches.ranks.iter().find(|rank| (rank.instance, rank.dp_rank) == (instance, dp_rank));
    found.map_or([0; 3], |rank| [rank.gpu, rank.cpu, rank.disk])
}

/// Nothing that is answered exceeds the truth at the stream's position; with `equal`, it is the truth.
pub(crate) fn compare(
    answered: [u32; 3],
    cursor: &Cursor,
    prompt: &[usize],
    equal: bool,
    publisher: PublisherId,
) -> Result<(), String> {
    let truth = if cursor.served { cursor.truth.matched(prompt) } else { [0; 3] };
    let exceeds = answered.iter().zip(truth).any(|(answered, truth)| *answered > truth);
    if exceeds || (equal && answered != truth) {
        return Err(format!(
            "{publisher:?}: {answered:?} of {prompt:?} answered, true is {truth:?} at {:?}",
            cursor.at
        ));
    }
    Ok(())
}
