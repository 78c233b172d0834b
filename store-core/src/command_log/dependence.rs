//! Which commands an answer depends on: it is given when none of them can be lost any more.

use alloc::collections::{BTreeMap, VecDeque};

use super::{Effect, Lsn};
use crate::codec::{self, Items, Key};
use crate::message::{Exists, ExistsLeased, Get, Kind, LeaseWanted, Operation as _};
use crate::wire::Frame;
use crate::{Master, Session};

/// What the commands have changed that are not *confirmed*: that not every follower has, or that are not on
/// disk. Two leaders use it: one whose followers acknowledge commands ([`ha`](crate::ha)), and one alone
/// whose journal does.
///
/// The answer to a request about keys depends on the unconfirmed commands that have changed these keys, and
/// any other answer on all that have changed anything. So a get is answered at once as long as its objects
/// have been there for a while, and no answer tells of what could be lost. An answer that grants a lasting
/// lease depends on the command that says so.
#[derive(Debug)]
pub struct Dependence {
    /// The position of the last command that has changed anything that a question is about.
    changed: Lsn,
    /// The position of the last command that grants a lasting lease.
    leased: Lsn,
    /// By hash of the key, the last command that has changed its object.
    keys: BTreeMap<u64, Lsn>,
    /// The same in the order of the log.
    order: VecDeque<(Lsn, u64)>,
}

impl Dependence {
    /// Everything up to `changed` is a change that is not confirmed. From here on the master notes which keys
    /// change.
    #[must_use]
    pub fn new(master: &mut Master, changed: Lsn) -> Self {
        master.note_changes();
        Self { changed, leased: 0, keys: BTreeMap::new(), order: VecDeque::new() }
    }

    /// Notes what the last command, at `lsn`, has changed; call it after each one that may change anything.
    pub fn note(&mut self, master: &mut Master, lsn: Lsn) {
        self.changed = lsn;
        self.note_keys(master, lsn);
    }

    fn note_keys(&mut self, master: &mut Master, lsn: Lsn) {
        for hash in master.take_changes() {
            self.changed = lsn;
            self.keys.insert(hash, lsn);
            self.order.push_back((lsn, hash));
        }
    }

    /// Notes what a request has changed that was just executed; `lsn` is the position of the last command.
    pub fn executed(&mut self, master: &mut Master, frame: &Frame<'_>, lsn: Lsn) {
        let kind = Kind::from_byte(frame.header.kind);
        if kind == Some(Kind::ReturnLeases) {
            // It has no answer, and no question is about leases.
            return self.note_keys(master, lsn);
        }
        let effect = kind.map_or(Effect::Asks, Kind::effect);
        if matches!(effect, Effect::Changes | Effect::Greets) {
            self.note(master, lsn);
        } else if grants_lasting(frame) {
            self.leased = lsn;
        }
    }

    /// The last command on which the answer to this request depends. Call it after the request was executed.
    #[must_use]
    pub fn of(&self, master: &Master, session: &Session, frame: &Frame<'_>) -> Lsn {
        let of_keys = |keys: Items<'_, Key<'_>>| {
            let lsn = |key: Key<'_>| {
                let hash = master.key_hash(session, key.0)?;
                self.keys.get(&hash).copied()
            };
            keys.filter_map(lsn).max().unwrap_or(0)
        };
        let keys = match Kind::from_byte(frame.header.kind) {
            // Usually there is nothing to look up.
            Some(Kind::Get | Kind::Exists | Kind::ExistsLeased) if self.keys.is_empty() => None,
            Some(Kind::Get) => Get::decode_request(frame.body).ok().map(|(_, keys)| keys),
            Some(Kind::Exists) => Exists::decode_request(frame.body).ok().map(|(_, keys)| keys),
            Some(Kind::ExistsLeased) => ExistsLeased::decode_request(frame.body).ok().map(|(_, keys)| keys),
            _ => return self.changed,
        };
        let leased = if grants_lasting(frame) { self.leased } else { 0 };
        keys.map_or(0, of_keys).max(leased)
    }

    /// The last command that has changed anything.
    #[must_use]
    pub const fn changed(&self) -> Lsn {
        self.changed
    }

    /// The last command that an answer may depend on.
    #[must_use]
    pub fn awaited(&self) -> Lsn {
        self.changed.max(self.leased)
    }

    /// The commands up to `lsn` cannot be lost any more.
    pub fn confirm(&mut self, lsn: Lsn) {
        while let Some(&(of, hash)) = self.order.front().filter(|(of, _)| *of <= lsn) {
            self.order.pop_front();
            if self.keys.get(&hash) == Some(&of) {
                self.keys.remove(&hash);
            }
        }
    }
}

/// Whether the answer to a request grants leases that last.
fn grants_lasting(frame: &Frame<'_>) -> bool {
    match Kind::from_byte(frame.header.kind) {
        Some(Kind::ExistsLeased) => true,
        // The keys behind it are not looked at.
        Some(Kind::Get) => {
            codec::take(frame.body).is_ok_and(|(wanted, _): (LeaseWanted, _)| wanted == LeaseWanted::Lasting)
        }
        _ => false,
    }
}
