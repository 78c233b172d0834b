//! The search for the leader among several masters.
//!
//! ```text
//!   addresses: listed ∪ in etcd ∪ named by other masters
//!       │  all at once, one thread each, never two to the same address
//!       ▼
//!   connect, greet ──▶ welcome          the leader, unless a later one is known
//!                 ├──▶ NotLeader        the one that it names is tried at once
//!                 ├──▶ no answer        tried again after the pause
//!                 └──▶ refused for good not tried again in this search
//! ```
//!
//! A master that does not answer delays no caller: its thread ends by itself, and the others are tried again
//! meanwhile. Pauses double from 2 ms to 100 ms, each shortened by a random part, so that the clients of a
//! leader that died do not come back at the same moments.

use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use store_core::ErrorCode;
use store_core::ha::Reign;
use store_core::message::{MASTERS_MAX, NotLeader};

use super::standing::Standing;
use super::{Address, BACKOFF_MAX, Identity, Masters, RpcConfig, RpcConnection, directory};
use crate::error::RpcError;

/// Longest time to connect to one of several masters, handshake included.
const DIAL_MAX: Duration = Duration::from_millis(500);

/// What every connection to a master of the store needs.
#[derive(Clone, Debug)]
pub(super) struct Dialer {
    pub(super) config: RpcConfig,
    pub(super) identity: Identity,
    pub(super) standing: Standing,
}

/// What a master that does not lead, or a directory, says of the leader.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct LeaderHint {
    /// The latest reign that it knows; zeros: it does not say.
    pub reign: Reign,
    /// Where the leader is.
    pub leader: Option<Address>,
    /// Where the masters are, as far as they are known.
    pub members: Vec<Address>,
}

impl LeaderHint {
    /// Whether it names any master.
    pub(super) const fn helps(&self) -> bool {
        self.leader.is_some() || !self.members.is_empty()
    }
}

impl From<NotLeader<'_>> for LeaderHint {
    fn from(says: NotLeader<'_>) -> Self {
        // Names of sockets of another host, and what is no address, are left out.
        let tcp = |text: &&str| match text.parse() {
            Ok(address @ Address::Tcp(_)) => Some(address),
            _ => None,
        };
        Self {
            reign: says.reign(),
            leader: says.leader.as_ref().and_then(tcp),
            members: says.members.iter().filter_map(tcp).collect(),
        }
    }
}

/// The search, and what is known of the masters.
#[derive(Debug)]
pub(super) struct Search {
    masters: Masters,
    dialer: Dialer,
    /// Where masters are besides those that are listed, by the latest hint.
    hint: LeaderHint,
    /// Addresses to which a thread connects.
    dialing: Vec<Address>,
    /// A thread asks the directory.
    asking: bool,
    /// Addresses that refused this side for a reason that waiting does not change.
    hopeless: Vec<Address>,
    send: Sender<Found>,
    receive: Receiver<Found>,
}

/// What a thread has found.
#[derive(Debug)]
enum Found {
    Master(Address, Result<Box<RpcConnection>, RpcError>),
    Directory(Result<LeaderHint, RpcError>),
}

/// What follows from it.
enum Step {
    Leads(Box<RpcConnection>),
    Failed(RpcError),
    Goes,
}

impl Search {
    pub(super) fn new(masters: Masters, dialer: Dialer) -> Self {
        let (send, receive) = channel();
        let (dialing, hopeless) = (Vec::new(), Vec::new());
        Self { masters, dialer, hint: LeaderHint::default(), dialing, asking: false, hopeless, send, receive }
    }

    /// Notes what a master has said, unless something later is known.
    pub(super) fn learn(&mut self, hint: LeaderHint) {
        if hint.reign == Reign::default() {
            // It does not say of when it is: an address more to try.
            self.hint.leader = hint.leader.or_else(|| self.hint.leader.take());
        } else if hint.reign >= self.hint.reign {
            let mut members = hint.members;
            members.truncate(MASTERS_MAX);
            self.hint = LeaderHint { members, ..hint };
        }
    }

    /// Searches until a master welcomes this side, or `until` has passed. `backoff` is the first pause, and
    /// the last one afterwards.
    ///
    /// # Errors
    /// `NoLeader` with the latest failure; a refusal that waiting does not change, when no master is left.
    pub(super) fn run(
        &mut self,
        backoff: &mut Duration,
        until: Instant,
    ) -> Result<Box<RpcConnection>, RpcError> {
        self.hopeless.clear();
        // What an earlier search has left: a connection that was made then may be of no use by now.
        while let Ok(found) = self.receive.try_recv() {
            drop(self.note(found));
        }
        let mut last = None;
        loop {
            self.dial_all(None);
            let round = (Instant::now() + with_jitter(*backoff)).min(until);
            while let Some(found) = self.wait(round) {
                match self.note(found) {
                    Step::Leads(connection) => return Ok(connection),
                    Step::Failed(error) if self.is_hopeless() => return Err(error),
                    Step::Failed(error) => {
                        // That a master was replaced says more than that another one is dead.
                        let tells = |error: &RpcError| error.code() == ErrorCode::NotLeader;
                        if tells(&error) || !last.as_ref().is_some_and(tells) {
                            last = Some(error);
                        }
                    }
                    Step::Goes => {}
                }
            }
            if Instant::now() >= until {
                return Err(RpcError::NoLeader {
                    masters: self.masters.to_string(),
                    last: Box::new(last.unwrap_or(RpcError::Disconnected)),
                });
            }
            *backoff = (*backoff * 2).min(BACKOFF_MAX);
        }
    }

    /// Notices what the other masters say, while `address` does not answer; if it `asks`, asks them first. It
    /// never waits. Returns the connection to one that leads under a later reign than `than`.
    pub(super) fn probe(&mut self, address: &Address, than: Reign, asks: bool) -> Option<Box<RpcConnection>> {
        if asks {
            self.hopeless.clear();
            self.dial_all(Some(address));
        }
        while let Ok(found) = self.receive.try_recv() {
            match self.note(found) {
                Step::Leads(connection) if connection.welcome().reign() > than => return Some(connection),
                _ => {}
            }
        }
        None
    }

    fn wait(&self, until: Instant) -> Option<Found> {
        let left = until.saturating_duration_since(Instant::now());
        // This side keeps a sender, so an error is a timeout.
        self.receive.recv_timeout(left).ok()
    }

    fn note(&mut self, found: Found) -> Step {
        match found {
            Found::Master(address, result) => {
                self.dialing.retain(|it| *it != address);
                match result {
                    Ok(connection) => {
                        // Another one may have welcomed this side meanwhile.
                        match self.dialer.standing.check(connection.welcome().reign(), &mut 0) {
                            Ok(()) => Step::Leads(connection),
                            Err(error) => Step::Failed(error),
                        }
                    }
                    Err(error) => {
                        if let RpcError::NotLeader { hint } = &error {
                            self.learn((**hint).clone());
                            self.dial_leader();
                        } else if error.is_final() {
                            self.hopeless.push(address);
                        }
                        Step::Failed(error)
                    }
                }
            }
            Found::Directory(result) => {
                self.asking = false;
                match result {
                    Ok(hint) => {
                        self.learn(hint);
                        self.dial_all(None);
                        Step::Goes
                    }
                    Err(error) => Step::Failed(error),
                }
            }
        }
    }

    /// Whether every master that is known has refused this side for good.
    fn is_hopeless(&self) -> bool {
        let mut known = self.known().peekable();
        let cannot_ask = self.masters.directory().is_some() && !directory::IS_BUILT_IN;
        cannot_ask
            || !self.asking && known.peek().is_some() && known.all(|address| self.hopeless.contains(address))
    }

    fn known(&self) -> impl Iterator<Item = &Address> {
        self.masters.listed().iter().chain(&self.hint.leader).chain(&self.hint.members)
    }

    /// Connects to all masters that are known, but for `except`, and asks the directory.
    fn dial_all(&mut self, except: Option<&Address>) {
        let known: Vec<Address> = self.known().filter(|it| Some(*it) != except).cloned().collect();
        known.into_iter().for_each(|address| self.dial(address));
        let Some(directory) = self.masters.directory().filter(|_| !self.asking) else { return };
        let (directory, send) = (directory.clone(), self.send.clone());
        let ask = move || drop(send.send(Found::Directory(directory::ask(&directory))));
        self.asking = thread::Builder::new().name("snowskin-etcd".into()).spawn(ask).is_ok();
    }

    fn dial_leader(&mut self) {
        if let Some(leader) = self.hint.leader.clone() {
            self.dial(leader);
        }
    }

    fn dial(&mut self, address: Address) {
        if self.dialing.contains(&address) || self.hopeless.contains(&address) {
            return;
        }
        let mut dialer = self.dialer.clone();
        let config = &mut dialer.config;
        config.connect_ms_max = config.connect_ms_max.min(DIAL_MAX.as_millis() as u32);
        let (send, there) = (self.send.clone(), address.clone());
        let dial = move || {
            let mut connection = RpcConnection::unconnected(there.clone().into(), dialer);
            let made = connection.dial_at(there.clone(), false).map(|()| Box::new(connection));
            // A receiver that is gone needs no connection.
            drop(send.send(Found::Master(there, made)));
        };
        // Without a thread, the address is tried again in the next round.
        if thread::Builder::new().name("snowskin-dial".into()).spawn(dial).is_ok() {
            self.dialing.push(address);
        }
    }
}

/// At least half of it, and at most all of it.
pub(super) fn with_jitter(pause: Duration) -> Duration {
    let random = RandomState::new().hash_one(0_u8) as u32;
    pause / 2 + (pause / 2).mul_f64(f64::from(random) / f64::from(u32::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_keep_their_bounds_and_differ() {
        let pauses: Vec<Duration> = (0..100).map(|_| with_jitter(BACKOFF_MAX)).collect();
        assert!(pauses.iter().all(|pause| (BACKOFF_MAX / 2..=BACKOFF_MAX).contains(pause)), "{pauses:?}");
        assert!(pauses.iter().any(|pause| *pause != pauses[0]));
    }

    #[test]
    fn a_later_hint_replaces_an_earlier_one_and_names_only_addresses_that_can_be_reached() {
        let dialer = Dialer {
            config: RpcConfig::default(),
            identity: Identity::default(),
            standing: Standing::default(),
        };
        let mut search = Search::new("a:1,b:2".parse().unwrap(), dialer);
        let mut says = NotLeader { lineage: 2, term: 3, leader: Some("unix:/x"), ..NotLeader::default() };
        for name in ["c:3", "no port", "unix:/y", "a:1"] {
            says.members.push(name).unwrap();
        }
        search.learn(says.into());
        let known = |search: &Search| search.known().map(ToString::to_string).collect::<Vec<_>>();
        assert_eq!(known(&search), ["a:1", "b:2", "c:3", "a:1"]);
        search.learn(NotLeader { lineage: 2, term: 2, leader: Some("d:4"), ..says }.into());
        assert_eq!(known(&search), ["a:1", "b:2", "c:3", "a:1"], "it is of an earlier term");
        says = NotLeader { lineage: 2, term: 3, leader: Some("e:5"), ..NotLeader::default() };
        search.learn(says.into());
        assert_eq!(known(&search), ["a:1", "b:2", "e:5"]);
    }
}
