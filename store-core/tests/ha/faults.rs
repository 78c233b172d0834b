//! What goes wrong, and rules that are broken on purpose.

use store_core::command_log::{Command, Lsn};
use store_core::ha::{MemberId, Message, Reign};

use super::{CLIENTS, Event, MEMBERS, Party, World};
use crate::report::Lies;

impl World {
    /// What a broken member would have sent.
    pub(super) fn falsified(&self, to: usize, message: Message) -> Message {
        match message {
            Message::Ack { reign, life, lsn, beat, gap } => {
                let leader = self.processes[to].member.as_ref();
                let leader = leader.filter(|leader| leader.leads().is_some_and(|(led, _)| led == reign));
                match leader {
                    Some(leader) if self.lies == Lies::ACKED_BEFORE => {
                        Message::Ack { reign, life, lsn: leader.lsn(), beat, gap: false }
                    }
                    _ => Message::Ack { reign, life, lsn, beat, gap },
                }
            }
            Message::Append { reign, after, commands, beat, .. } if self.lies == Lies::UNTOUCHED => {
                let commands = altered(&commands, |command| match command {
                    Command::Touched { after_ns, .. } => Command::Timeout { after_ns },
                    other => other,
                });
                // The members do not compare their states: the simulation does.
                Message::Append { reign, after, commands, beat, digest: None }
            }
            other => other,
        }
    }

    pub(super) fn acks_falsely(&mut self, from: usize, to: usize, of: (Reign, Lsn, u64), commands: &[u8]) {
        let ((reign, mut lsn, beat), mut rest) = (of, commands);
        let Some(life) = self.lives_then.get(&(to, reign)).copied() else { return };
        while let Ok(Some((_, left))) = Command::decode(rest) {
            (rest, lsn) = (left, lsn + 1);
        }
        let ack = Message::Ack { reign, life, lsn, beat, gap: false };
        let delay = self.us(50, 500);
        self.after(delay, Event::Message { from: to, to: from, message: ack });
    }

    pub(super) fn trouble(&mut self) {
        if self.is_quiet() {
            self.cuts.clear();
            self.arbiter_away = self.now;
            return;
        }
        let index = self.rng.index(MEMBERS);
        let leader = (0..MEMBERS)
            .find(|at| self.processes[*at].member.as_ref().is_some_and(|member| member.leads().is_some()));
        let index = if self.rng.below(2) == 0 { leader.unwrap_or(index) } else { index };
        if self.has_disks && self.rng.below(2) == 0 {
            let node = self.rng.index(self.nodes.len());
            self.node_crashes(node);
        }
        match self.rng.below(12) {
            10.. => self.switch_over(leader),
            0..3 => self.crash(index),
            3..5 if self.processes[index].stopped.is_none() => {
                self.report.stops += 1;
                let back = self.now + self.us(1_000, 3_000_000);
                self.processes[index].stopped = Some(back);
                self.at(back, Event::GoOn(index));
            }
            5 => self.arbiter_away = self.now + self.us(1_000, 4_000_000),
            _ => {
                self.report.cuts += 1;
                let others = [
                    Party::Arbiter,
                    Party::Member(self.rng.index(MEMBERS)),
                    Party::Member(self.rng.index(MEMBERS)),
                    Party::Client(self.rng.index(CLIENTS)),
                ];
                let (a, b) = (Party::Member(index), others[self.rng.index(others.len())]);
                let until = self.now + self.us(1_000, 4_000_000);
                let both = self.rng.below(2) == 0;
                if both || self.rng.below(2) == 0 {
                    self.cuts.push((a, b, until));
                }
                if both || self.rng.below(2) == 0 {
                    self.cuts.push((b, a, until));
                }
            }
        }
        self.cuts.retain(|(.., until)| self.now < *until);
        let next = self.us(50_000, 1_500_000);
        self.after(next, Event::Trouble);
    }

    pub(super) fn crash(&mut self, index: usize) {
        let process = &mut self.processes[index];
        if process.member.take().is_none() {
            return;
        }
        process.stopped = None;
        process.sessions.clear();
        process.held.clear();
        self.report.crashes += 1;
        // Often so soon that the leader has not noticed.
        let most = if self.rng.below(2) == 0 { 100_000 } else { 4_000_000 };
        let back = self.us(1_000, most);
        self.after(back, Event::Restart(index));
    }

    /// The leader is asked to hand over.
    pub(super) fn switch_over(&mut self, leader: Option<usize>) {
        let to = (self.rng.below(2) == 0).then(|| MemberId(self.rng.below(MEMBERS as u64)));
        let Some(index) = leader else { return };
        let mut begun = None;
        self.with(index, |member, now| {
            let reign = member.leads().map(|(reign, _)| reign);
            begun = member.hand_over(now, to).ok().and(reign);
        });
        self.report.switchovers += u64::from(begun.is_some());
        self.processes[index].handing = begun;
    }
}

/// A log with other commands.
fn altered(log: &[u8], alter: impl Fn(Command<'_>) -> Command<'_>) -> Vec<u8> {
    let (mut out, mut rest) = (Vec::new(), log);
    while let Ok(Some((command, left))) = Command::decode(rest) {
        alter(command).encode(&mut out);
        rest = left;
    }
    out
}
