//! The peer's half: the regions that it requested from owners, those that it was granted, and when it
//! releases them.

use alloc::collections::VecDeque;
use alloc::vec::Vec;
use core::time::Duration;

use super::{Message, PROTOCOL};
use crate::{Access, Error, ErrorKind, Instant, RegionId};

/// The largest number of owners that a peer knows at a time.
const OWNERS_MAX: usize = 1024;
/// How long after a failed send a request is sent again.
const RETRY: Duration = Duration::from_millis(1);
/// How long after its last request an owner that is late is asked again.
const RETRY_LATE: Duration = Duration::from_millis(100);

/// What an export states about a region.
#[derive(Clone, Copy, Debug)]
pub struct Want {
    /// The region, by its owner's id.
    pub region: RegionId,
    /// The key, which shows that its owner's export was given to us.
    pub key: [u8; 16],
    /// The length, in bytes.
    pub len: u64,
    /// The rights that we need.
    pub access: Access,
}

/// What the fabric has to do for a [`Peer`], in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PeerEffect {
    /// Send this message. If an [`Ask`](Message::Ask) cannot be sent now, call [`Peer::unsent`].
    Send {
        /// The owner.
        owner: u32,
        /// The message.
        message: Message,
    },
    /// Open the rows that came with the message, then call [`Peer::welcomed`], or [`Peer::lost`].
    OpenRows {
        /// The owner.
        owner: u32,
    },
    /// Map the memory that came with the message, then call [`Peer::mapped`]; when none came, [`Peer::lost`].
    Map {
        /// The owner of the memory.
        owner: u32,
        /// The link that it is for.
        link: u32,
        /// Where the region begins in that memory, in bytes.
        offset: u64,
        /// The length of the region, in bytes.
        len: u64,
        /// Whether it must be mapped writable.
        writable: bool,
    },
    /// Close the connection: nothing that came over it is used any more.
    Close {
        /// The owner.
        owner: u32,
    },
}

/// Whether the region of a link can be used, and how.
#[derive(Debug)]
pub enum LinkState<'a, L, M> {
    /// It can, after its row has been [entered](super::Row::enter).
    Ready {
        /// The rows of its owner.
        rows: &'a L,
        /// The row of its grant.
        row: u32,
        /// Its memory.
        mapping: &'a M,
    },
    /// Its owner has not answered yet.
    Waiting,
    /// Its owner has not answered in time. It may still answer.
    Late,
    /// It cannot be used any more.
    Closed(Error),
}

/// The peer's half of the protocol, for all owners whose memory it uses. By `L` it reaches the rows that an
/// owner shares; `M` is the mapped memory of a region, which is dropped before the owner learns that it is
/// free.
///
/// An owner has a number from [`connected`](Self::connected) on; a region that was requested (a *link*) has
/// one from [`attach`](Self::attach) to [`detach`](Self::detach). After every call the fabric takes the
/// effects and carries them out, before it takes the next message from a connection.
#[derive(Debug)]
pub struct Peer<L, M> {
    identity: u64,
    /// How long a link waits for its owner.
    grant_max: Duration,
    owners: Vec<Option<Host<L>>>,
    links: Vec<Option<Link<M>>>,
    requests: u32,
    /// The links that depend on time: not requested yet, or not late yet.
    waiting: usize,
    now: Instant,
    effects: VecDeque<PeerEffect>,
}

/// An owner.
#[derive(Debug)]
struct Host<L> {
    /// The rows that it shares, from its `Welcome` on.
    rows: Option<L>,
    /// Whether its connection has ended.
    gone: bool,
    links: u32,
}

/// One region that was requested.
#[derive(Debug)]
struct Link<M> {
    owner: u32,
    request: u32,
    want: Want,
    /// Whether it was detached; it is removed once it is mapped.
    detached: bool,
    state: State<M>,
}

#[derive(Debug)]
enum State<M> {
    /// Not granted yet.
    Waiting {
        /// Whether the request was sent. If not, it could not be sent.
        asked: bool,
        /// The link waits in time until then; the first `poll` after that time makes it late.
        since: Option<Instant>,
        /// The owner did not answer in time.
        late: bool,
    },
    /// Granted; its memory is being mapped.
    Mapping {
        row: u32,
        /// Why it must not be used after all.
        over: Option<Error>,
    },
    Ready {
        mapping: M,
        row: u32,
    },
    Closed(Error),
}

impl<L, M> Peer<L, M> {
    /// A peer with this `identity`, which waits up to `grant_max` for a grant.
    #[must_use]
    pub const fn new(identity: u64, grant_max: Duration) -> Self {
        Self {
            identity,
            grant_max,
            owners: Vec::new(),
            links: Vec::new(),
            requests: 0,
            waiting: 0,
            now: Instant::ZERO,
            effects: VecDeque::new(),
        }
    }

    /// The next effect, to be carried out now.
    pub fn effect(&mut self) -> Option<PeerEffect> {
        self.effects.pop_front()
    }

    /// Notes a new connection to an owner; returns its number. The first [`attach`](Self::attach) follows.
    ///
    /// # Errors
    /// `Full`: the fabric closes the connection.
    pub fn connected(&mut self) -> Result<u32, Error> {
        let index = self.owners.iter().position(Option::is_none).unwrap_or(self.owners.len());
        if index == OWNERS_MAX {
            return Err(Error::new(ErrorKind::Full));
        }
        if index == self.owners.len() {
            self.owners.push(None);
        }
        self.owners[index] = Some(Host { rows: None, gone: false, links: 0 });
        self.send(index as u32, Message::Hello { protocol: PROTOCOL, identity: self.identity });
        Ok(index as u32)
    }

    /// Requests a region from an owner; returns the link's number.
    pub fn attach(&mut self, owner: u32, want: Want) -> u32 {
        self.requests = self.requests.wrapping_add(1);
        let index = self.links.iter().position(Option::is_none).unwrap_or(self.links.len());
        if index == self.links.len() {
            self.links.push(None);
        }
        let dead = State::Closed(Error::new(ErrorKind::PeerDead));
        let (owner, state) = match self.owners.get_mut(owner as usize) {
            Some(Some(host)) => {
                host.links += 1;
                (owner, if host.gone { dead } else { State::WAITING })
            }
            _ => (u32::MAX, dead),
        };
        self.waiting += usize::from(state.is_due());
        self.links[index] = Some(Link { owner, request: self.requests, want, detached: false, state });
        self.ask(index);
        index as u32
    }

    /// Releases a region. With the last one the connection to its owner is closed.
    pub fn detach(&mut self, link: u32) {
        let Some(slot) = self.links.get_mut(link as usize) else { return };
        if let Some(Link { detached, state: State::Mapping { .. }, .. }) = slot {
            *detached = true;
            return;
        }
        let Some(Link { owner, state, .. }) = slot.take() else { return };
        self.waiting -= usize::from(state.is_due());
        if let State::Ready { mapping, row } = state {
            drop(mapping);
            self.send(owner, Message::Release { row });
        }
        self.leave(owner);
    }

    /// Whether the region of a link can be used, and how.
    #[inline]
    #[must_use]
    pub fn link_state(&self, link: u32) -> LinkState<'_, L, M> {
        let Some(Some(link)) = self.links.get(link as usize) else {
            return LinkState::Closed(Error::new(ErrorKind::NotFound));
        };
        match &link.state {
            State::Ready { mapping, row } => {
                let host = self.owners.get(link.owner as usize).and_then(Option::as_ref);
                match host.and_then(|host| host.rows.as_ref()) {
                    Some(rows) => LinkState::Ready { rows, row: *row, mapping },
                    None => LinkState::Closed(Error::new(ErrorKind::Stale)),
                }
            }
            State::Waiting { late: true, .. } => LinkState::Late,
            State::Waiting { late: false, .. } | State::Mapping { .. } => LinkState::Waiting,
            State::Closed(error) => LinkState::Closed(*error),
        }
    }

    /// Handles a message of an owner. An owner whose message is not valid, or that has expelled us, is
    /// [lost](Self::lost).
    pub fn received(&mut self, owner: u32, message: Message) {
        if let Err(error) = self.handle(owner, message) {
            self.lost(owner, error);
        }
    }

    /// Takes the rows that an owner shares.
    pub fn welcomed(&mut self, owner: u32, rows: L) {
        if let Some(Some(host)) = self.owners.get_mut(owner as usize) {
            host.rows = Some(rows);
        }
    }

    /// Takes the memory of a link, or the reason why it could not be mapped.
    pub fn mapped(&mut self, link: u32, mapping: Result<M, Error>) {
        let Some(slot) = self.links.get_mut(link as usize) else { return };
        let Some(Link { owner, detached, state, .. }) = slot else { return };
        let State::Mapping { row, over } = *state else { return };
        let (owner, detached) = (*owner, *detached);
        *state = match (mapping, over) {
            (Ok(mapping), None) if !detached => {
                *state = State::Ready { mapping, row };
                return;
            }
            // The mapping is dropped.
            (Ok(_), over) => State::Closed(over.unwrap_or(Error::new(ErrorKind::Stale))),
            (Err(error), over) => State::Closed(over.unwrap_or(error)),
        };
        self.send(owner, Message::Release { row });
        if detached {
            self.links[link as usize] = None;
            self.leave(owner);
        }
    }

    /// Notes that a request could not be sent; it is sent again later.
    pub fn unsent(&mut self, message: Message) {
        let Message::Ask { request, .. } = message else { return };
        let mut links = self.links.iter_mut().flatten().filter(|link| link.request == request);
        if let Some(Link { state: state @ State::Waiting { .. }, .. }) = links.next() {
            self.waiting -= usize::from(state.is_due());
            if let State::Waiting { asked, .. } = state {
                *asked = false;
            }
            self.waiting += usize::from(state.is_due());
        }
    }

    /// Closes all links of an owner: its connection has ended, or a message of it was not valid.
    pub fn lost(&mut self, owner: u32, error: Error) {
        let Some(Some(host)) = self.owners.get_mut(owner as usize) else { return };
        if core::mem::replace(&mut host.gone, true) {
            return;
        }
        for link in self.links.iter_mut().flatten().filter(|link| link.owner == owner) {
            self.waiting -= usize::from(link.state.is_due());
            // Revoked links, too: an owner that ends revokes its memory first, and its end is the better
            // reason.
            match &mut link.state {
                State::Mapping { over, .. } => *over = Some(error),
                state => *state = State::Closed(error),
            }
        }
        host.rows = None;
        if host.links == 0 {
            self.owners[owner as usize] = None;
        }
        self.effects.push_back(PeerEffect::Close { owner });
    }

    /// Sends requests that could not be sent, and marks owners that do not answer as late.
    pub fn poll(&mut self, now: Instant) {
        self.now = now;
        if self.waiting == 0 {
            return;
        }
        for index in 0..self.links.len() {
            let Some(link) = &mut self.links[index] else { continue };
            let State::Waiting { asked, since, late } = &mut link.state else { continue };
            let unasked = !*asked;
            if !*late && now >= *since.get_or_insert(now) + self.grant_max {
                *late = true;
                self.waiting -= usize::from(*asked);
            }
            if unasked {
                self.ask(index);
            }
        }
    }

    /// When `poll` has something to do.
    #[must_use]
    pub fn poll_at(&self) -> Option<Instant> {
        if self.waiting == 0 {
            return None;
        }
        let at = |link: &Link<M>| match link.state {
            State::Waiting { asked: false, late: true, .. } => Some(self.now + RETRY_LATE),
            State::Waiting { asked: true, late: true, .. } => None,
            State::Waiting { asked: true, since: Some(since), .. } => Some(since + self.grant_max),
            State::Waiting { .. } => Some(self.soon()),
            State::Mapping { .. } | State::Ready { .. } | State::Closed(_) => None,
        };
        self.links.iter().flatten().filter_map(at).min()
    }

    /// After a short wait.
    #[must_use]
    pub fn soon(&self) -> Instant {
        self.now + RETRY
    }

    fn send(&mut self, owner: u32, message: Message) {
        let known = self.owners.get(owner as usize).and_then(Option::as_ref);
        if known.is_some_and(|host| !host.gone) {
            self.effects.push_back(PeerEffect::Send { owner, message });
        }
    }

    /// Removes one link of an owner.
    fn leave(&mut self, owner: u32) {
        let Some(slot) = self.owners.get_mut(owner as usize) else { return };
        let Some(host) = slot else { return };
        host.links = host.links.saturating_sub(1);
        if host.links == 0 {
            // Closing the connection releases the remaining rows.
            if !host.gone {
                self.effects.push_back(PeerEffect::Close { owner });
            }
            *slot = None;
        }
    }

    fn ask(&mut self, index: usize) {
        let Some(Some(link)) = self.links.get_mut(index) else { return };
        let State::Waiting { asked: asked @ false, late, .. } = &mut link.state else { return };
        *asked = true;
        self.waiting -= usize::from(*late);
        let (owner, Want { region, key, .. }) = (link.owner, link.want);
        let message = Message::Ask { request: link.request, region, key };
        self.send(owner, message);
    }

    fn handle(&mut self, owner: u32, message: Message) -> Result<(), Error> {
        let Some(Some(host)) = self.owners.get(owner as usize) else { return Ok(()) };
        if host.gone {
            return Ok(());
        }
        match message {
            Message::Welcome if host.rows.is_none() => {
                self.effects.push_back(PeerEffect::OpenRows { owner });
            }
            Message::Grant { request, row, offset, len, access } if host.rows.is_some() => {
                let Some(link) = self.asker(owner, request) else {
                    // It was detached meanwhile.
                    self.send(owner, Message::Release { row });
                    return Ok(());
                };
                let want = self.settle(link, State::Mapping { row, over: None });
                if len != want.len || !access.contains(want.access) {
                    // The export claims a longer region than there is.
                    self.settle(link, State::Closed(Error::new(ErrorKind::AccessDenied)));
                    self.send(owner, Message::Release { row });
                    return Ok(());
                }
                let writable = want.access.contains(Access::REMOTE_WRITE);
                self.effects.push_back(PeerEffect::Map { owner, link: link as u32, offset, len, writable });
            }
            Message::Refuse { request, stale } => {
                if let Some(link) = self.asker(owner, request) {
                    let kind = if stale { ErrorKind::Stale } else { ErrorKind::AccessDenied };
                    self.settle(link, State::Closed(Error::new(kind)));
                }
            }
            Message::Revoked { row } => self.revoked(owner, row),
            Message::Expelled => return Err(Error::new(ErrorKind::Expelled)),
            _ => return Err(Error::new(ErrorKind::Protocol)),
        }
        Ok(())
    }

    /// The link that waits for the answer to `request`.
    fn asker(&self, owner: u32, request: u32) -> Option<usize> {
        self.links.iter().position(|link| {
            let is_it = |link: &Link<M>| link.owner == owner && link.request == request;
            link.as_ref().is_some_and(|link| is_it(link) && matches!(link.state, State::Waiting { .. }))
        })
    }

    /// Sets the state of a link, which drops its mapping. Returns its request.
    fn settle(&mut self, index: usize, state: State<M>) -> Want {
        let nothing = Want { region: RegionId::new(0, 0), key: [0; 16], len: 0, access: Access::empty() };
        let Some(link) = &mut self.links[index] else { return nothing };
        self.waiting -= usize::from(link.state.is_due());
        self.waiting += usize::from(state.is_due());
        link.state = state;
        link.want
    }

    /// Drops the memory, and then tells the owner that the row is free.
    fn revoked(&mut self, owner: u32, row: u32) {
        let stale = Error::new(ErrorKind::Stale);
        for link in self.links.iter_mut().flatten().filter(|link| link.owner == owner) {
            match &mut link.state {
                State::Ready { row: own, .. } if *own == row => {
                    link.state = State::Closed(stale);
                    self.send(owner, Message::Release { row });
                    return;
                }
                State::Mapping { row: own, over } if *own == row => {
                    *over = Some(stale);
                    return;
                }
                _ => {}
            }
        }
    }
}

impl<M> State<M> {
    const WAITING: Self = Self::Waiting { asked: false, since: None, late: false };

    /// Whether `poll` has something to do for it, now or later.
    const fn is_due(&self) -> bool {
        matches!(self, Self::Waiting { asked, late, .. } if !*asked || !*late)
    }
}
