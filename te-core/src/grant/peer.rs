//! The peer's half: what it asked owners for, what it was granted, and when it lets go.

use alloc::collections::VecDeque;
use alloc::vec::Vec;
use core::time::Duration;

use super::{Message, PROTOCOL};
use crate::{Access, Error, ErrorKind, Instant, RegionId};

/// Owners that a peer knows at a time.
const OWNERS_MAX: usize = 1024;
/// When to ask again what could not be sent.
const RETRY: Duration = Duration::from_millis(1);
/// When to ask again an owner that is late.
const RETRY_LATE: Duration = Duration::from_millis(100);

/// What an export says of a region.
#[derive(Clone, Copy, Debug)]
pub struct Want {
    /// The region, by its owner's id.
    pub region: RegionId,
    /// What shows that we were told of it.
    pub key: [u8; 16],
    /// Bytes.
    pub len: u64,
    /// What we want to do with it.
    pub access: Access,
}

/// What is to be done for a [`Peer`], in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PeerEffect {
    /// Send this. If an [`Ask`](Message::Ask) cannot be sent now, call [`Peer::unsent`].
    Send {
        /// The owner.
        owner: u32,
        /// What to say.
        message: Message,
    },
    /// Open the rows that came with the message, then call [`Peer::welcomed`], or [`Peer::lost`].
    OpenRows {
        /// The owner.
        owner: u32,
    },
    /// Map the memory that came with the message, then call [`Peer::mapped`]; when none came, [`Peer::lost`].
    Map {
        /// Whose memory it is.
        owner: u32,
        /// For which link.
        link: u32,
        /// Where the region begins in that memory, bytes.
        offset: u64,
        /// Bytes.
        len: u64,
        /// Whether it will be written.
        writable: bool,
    },
    /// Close the connection: nothing that came over it is used any more.
    Close {
        /// The owner.
        owner: u32,
    },
}

/// Whether a region can be used, and how.
#[derive(Debug)]
pub enum Way<'a, L, M> {
    /// Once its row has been [entered](super::Row::enter).
    Ready {
        /// The rows of its owner.
        rows: &'a L,
        /// Its row.
        row: u32,
        /// Its memory.
        mapping: &'a M,
    },
    /// Its owner has not answered yet.
    Waiting,
    /// Its owner has not answered in time. It still may.
    Late,
    /// Not any more.
    Closed(Error),
}

/// The peer's half of the protocol, for all owners whose memory it uses. `L` is how the rows that an owner
/// shares are reached, `M` is a region's memory: it is dropped before the owner hears that it is free.
///
/// An owner has a number from [`connected`](Self::connected) on, a region that is wanted (a *link*) from
/// [`attach`](Self::attach) to [`detach`](Self::detach). After every call the effects are to be taken and
/// carried out, before the next message is taken from a connection.
#[derive(Debug)]
pub struct Peer<L, M> {
    identity: u64,
    /// How long a link waits for its owner.
    grant_max: Duration,
    owners: Vec<Option<Host<L>>>,
    links: Vec<Option<Link<M>>>,
    requests: u32,
    /// Links that time does something to: not asked yet, or not late yet.
    waiting: usize,
    now: Instant,
    effects: VecDeque<PeerEffect>,
}

/// An owner.
#[derive(Debug)]
struct Host<L> {
    /// From its `Welcome` on.
    rows: Option<L>,
    /// Its connection is gone.
    gone: bool,
    links: u32,
}

/// The way to one region.
#[derive(Debug)]
struct Link<M> {
    owner: u32,
    request: u32,
    want: Want,
    /// Nobody wants it any more; it goes once it is mapped.
    detached: bool,
    state: State<M>,
}

#[derive(Debug)]
enum State<M> {
    /// Not granted yet.
    Waiting {
        /// False: the question could not be sent.
        asked: bool,
        /// Waiting before then; told by the first `poll` after.
        since: Option<Instant>,
        /// The owner did not answer in time.
        late: bool,
    },
    /// Granted; its memory is being mapped.
    Mapping {
        row: u32,
        /// Why it is not to be used after all.
        over: Option<Error>,
    },
    Ready {
        mapping: M,
        row: u32,
    },
    Closed(Error),
}

impl<L, M> Peer<L, M> {
    /// A peer that owners know by `identity`, and that waits `grant_max` for a grant.
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

    /// What is to be done next.
    pub fn effect(&mut self) -> Option<PeerEffect> {
        self.effects.pop_front()
    }

    /// A connection to an owner was made; gives its number. The first [`attach`](Self::attach) follows.
    ///
    /// # Errors
    /// `Full`: it is to be closed.
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

    /// Asks an owner for a region; gives the link's number.
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

    /// Lets go of a region. With the last one its owner's connection is closed.
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

    /// Whether a region can be used, and how.
    #[inline]
    #[must_use]
    pub fn way(&self, link: u32) -> Way<'_, L, M> {
        let Some(Some(link)) = self.links.get(link as usize) else {
            return Way::Closed(Error::new(ErrorKind::NotFound));
        };
        match &link.state {
            State::Ready { mapping, row } => {
                let host = self.owners.get(link.owner as usize).and_then(Option::as_ref);
                match host.and_then(|host| host.rows.as_ref()) {
                    Some(rows) => Way::Ready { rows, row: *row, mapping },
                    None => Way::Closed(Error::new(ErrorKind::Stale)),
                }
            }
            State::Waiting { late: true, .. } => Way::Late,
            State::Waiting { late: false, .. } | State::Mapping { .. } => Way::Waiting,
            State::Closed(error) => Way::Closed(*error),
        }
    }

    /// A message of an owner. One that says nonsense, or has expelled us, is [lost](Self::lost).
    pub fn received(&mut self, owner: u32, message: Message) {
        if let Err(error) = self.handle(owner, message) {
            self.lost(owner, error);
        }
    }

    /// The rows that an owner shares.
    pub fn welcomed(&mut self, owner: u32, rows: L) {
        if let Some(Some(host)) = self.owners.get_mut(owner as usize) {
            host.rows = Some(rows);
        }
    }

    /// The memory behind a link, or why it could not be mapped.
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
            // What was mapped is dropped.
            (Ok(_), over) => State::Closed(over.unwrap_or(Error::new(ErrorKind::Stale))),
            (Err(error), over) => State::Closed(over.unwrap_or(error)),
        };
        self.send(owner, Message::Release { row });
        if detached {
            self.links[link as usize] = None;
            self.leave(owner);
        }
    }

    /// A question that could not be sent; it is asked again.
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

    /// Ends all ways over an owner: its connection is gone, or what it says makes no sense.
    pub fn lost(&mut self, owner: u32, error: Error) {
        let Some(Some(host)) = self.owners.get_mut(owner as usize) else { return };
        if core::mem::replace(&mut host.gone, true) {
            return;
        }
        for link in self.links.iter_mut().flatten().filter(|link| link.owner == owner) {
            self.waiting -= usize::from(link.state.is_due());
            // Revoked links too: an owner that goes takes its memory back first, and its end is the better
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

    /// Asks what could not be asked, and gives up on owners that do not answer.
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

    /// In a moment.
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

    /// One link of an owner less.
    fn leave(&mut self, owner: u32) {
        let Some(slot) = self.owners.get_mut(owner as usize) else { return };
        let Some(host) = slot else { return };
        host.links = host.links.saturating_sub(1);
        if host.links == 0 {
            // Closing the connection releases what is left.
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
                    // Detached meanwhile.
                    self.send(owner, Message::Release { row });
                    return Ok(());
                };
                let want = self.settle(link, State::Mapping { row, over: None });
                if len != want.len || !access.contains(want.access) {
                    // The export claims more than is there.
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

    /// The link that waits for an answer to `request`.
    fn asker(&self, owner: u32, request: u32) -> Option<usize> {
        self.links.iter().position(|link| {
            let is_it = |link: &Link<M>| link.owner == owner && link.request == request;
            link.as_ref().is_some_and(|link| is_it(link) && matches!(link.state, State::Waiting { .. }))
        })
    }

    /// Gives a link another state; what was mapped is dropped. Gives what it wants.
    fn settle(&mut self, index: usize, state: State<M>) -> Want {
        let nothing = Want { region: RegionId::new(0, 0), key: [0; 16], len: 0, access: Access::empty() };
        let Some(link) = &mut self.links[index] else { return nothing };
        self.waiting -= usize::from(link.state.is_due());
        self.waiting += usize::from(state.is_due());
        link.state = state;
        link.want
    }

    /// The memory is dropped, and then the owner told.
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

    /// Whether `poll` has something to do about it, now or later.
    const fn is_due(&self) -> bool {
        matches!(self, Self::Waiting { asked, late, .. } if !*asked || !*late)
    }
}
