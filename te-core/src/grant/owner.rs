//! The owner's half: what each peer was granted, and how it is revoked.

use alloc::collections::{BTreeSet, VecDeque};
use alloc::vec::Vec;
use core::time::Duration;

use super::{Message, PROTOCOL, ROWS_MAX, Revoked, Rows};
use crate::{Access, EXPELLED_MAX, Error, ErrorKind, Instant, RegionId};

/// The limits of an [`Owner`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OwnerLimits {
    /// The largest number of connections at a time.
    pub peers_max: u32,
    /// How long a connection that was granted nothing may stay.
    pub idle_max: Duration,
}

/// A region that peers may request.
#[derive(Clone, Copy, Debug)]
pub struct Offer {
    /// The key in its export.
    pub key: [u8; 16],
    /// Where it begins in the memory that comes with a grant, in bytes.
    pub offset: u64,
    /// The length of the region, in bytes.
    pub len: u64,
    /// The rights of peers.
    pub access: Access,
}

/// What the fabric has to do for an [`Owner`], in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OwnerEffect {
    /// Make rows for this peer, then call [`Owner::welcomed`], or [`Owner::disconnect`] when none can be
    /// made.
    MakeRows {
        /// The peer.
        peer: u32,
    },
    /// Send this message. A [`Revoked`](Message::Revoked) may be lost where both ends see the same rows: the
    /// rows decide.
    Send {
        /// The peer.
        peer: u32,
        /// The message. With [`Welcome`](Message::Welcome), hand over access to the rows.
        message: Message,
    },
    /// Send this message, and hand over the memory of `region` with it. If that is not possible, call
    /// [`Owner::withdraw`].
    Grant {
        /// The peer.
        peer: u32,
        /// The region.
        region: RegionId,
        /// The message.
        message: Message,
    },
    /// Close the connection: the owner has forgotten this peer. Messages that were to be sent before may be
    /// lost.
    Close {
        /// The peer.
        peer: u32,
        /// The reason: `TimedOut` for a peer that was granted nothing in time.
        why: Error,
    },
}

/// The owner's half of the protocol. By `L` it reaches the [`Rows`] that are shared with one peer.
///
/// Each connection has a number, from [`connected`](Self::connected) until [`ended`](Self::ended) or
/// [`OwnerEffect::Close`]. After every call the fabric takes the effects and carries them out, before it
/// takes the next message from a connection.
#[derive(Debug)]
pub struct Owner<L> {
    limits: OwnerLimits,
    /// Whether a grant lasts until its holder has released it, and not only until it is out.
    until_released: bool,
    /// The regions, by index.
    offers: Vec<Option<(u32, Offer)>>,
    peers: Vec<Option<Holder<L>>>,
    expelled: BTreeSet<u64>,
    /// Whether some peers may have been granted nothing yet, or are to be disconnected and still use memory.
    unsettled: bool,
    effects: VecDeque<OwnerEffect>,
}

/// A peer.
#[derive(Debug)]
struct Holder<L> {
    /// Its identity, from its `Hello` on; 0 before.
    identity: u64,
    /// It is connected for less than its limit until then; the first `poll` after that time disconnects it.
    since: Option<Instant>,
    /// Whether it was ever granted anything.
    granted: bool,
    rows: Option<L>,
    /// Its grants, by row. A row is in use until its holder releases it.
    grants: Vec<Option<Grant>>,
    /// Whether it is to be disconnected as soon as it uses nothing, and why.
    parting: Option<(Revoked, Error)>,
}

#[derive(Clone, Copy, Debug)]
struct Grant {
    region: RegionId,
    revoked: bool,
    /// Whether it is revoked, and was seen not to be in use since.
    quiet: bool,
}

impl<L: Rows> Owner<L> {
    /// An owner that offers no regions yet.
    #[must_use]
    pub const fn new(limits: OwnerLimits) -> Self {
        Self {
            limits,
            until_released: false,
            offers: Vec::new(),
            peers: Vec::new(),
            expelled: BTreeSet::new(),
            unsettled: false,
            effects: VecDeque::new(),
        }
    }

    /// The same owner, for memory that must not be freed while a peer has it mapped, even if it never uses it
    /// again: [`unshare`](Self::unshare) returns true only once each peer has [released](Message::Release) what
    /// it was granted, or has [ended](Self::ended), and a peer that is [expelled](Self::expel) or disconnected
    /// stays until then. Peers are told of every revocation, by messages that must not be lost.
    #[must_use]
    pub const fn until_released(mut self) -> Self {
        self.until_released = true;
        self
    }

    /// Whether a peer has grants that it has not released.
    #[must_use]
    pub fn holds(&self, peer: u32) -> bool {
        let holder = self.peers.get(peer as usize).and_then(Option::as_ref);
        holder.is_some_and(|holder| holder.grants.iter().any(Option::is_some))
    }

    /// The next effect, to be carried out now.
    pub fn effect(&mut self) -> Option<OwnerEffect> {
        self.effects.pop_front()
    }

    /// Offers a region to peers that state its key. An earlier generation of it was unshared before.
    pub fn share(&mut self, id: RegionId, offer: Offer) {
        let index = id.index as usize;
        if self.offers.len() <= index {
            self.offers.resize_with(index + 1, || None);
        }
        self.offers[index] = Some((id.generation, offer));
    }

    /// Withdraws the offer of a region, and revokes its grants. Returns whether no peer uses it any more, nor
    /// will; the caller calls it again until that is true.
    #[must_use]
    pub fn unshare(&mut self, id: RegionId) -> bool {
        if let Some(slot) = self.offers.get_mut(id.index as usize)
            && slot.is_some_and(|(generation, _)| generation == id.generation)
        {
            *slot = None;
        }
        let mut all_out = true;
        for (index, slot) in self.peers.iter_mut().enumerate() {
            let Some(holder) = slot else { continue };
            let announce = |row| {
                let message = Message::Revoked { row };
                self.effects.push_back(OwnerEffect::Send { peer: index as u32, message });
            };
            let of = |grant: &Grant| grant.region == id;
            all_out &=
                holder.revoke(Revoked::Region, of, announce) && !(self.until_released && holder.has(of));
        }
        all_out
    }

    /// The peers that were asked to stop and may still use memory. For one that has died, the caller calls
    /// [`ended`](Self::ended).
    pub fn waited_for(&self) -> impl Iterator<Item = u32> {
        let waits = |grant: &Grant| grant.revoked && (self.until_released || !grant.quiet);
        self.numbers(move |holder| holder.has(waits))
    }

    /// The connections of a peer that was not expelled.
    pub fn connections(&self, identity: u64) -> impl Iterator<Item = u32> {
        let welcome = !self.expelled.contains(&identity);
        self.numbers(move |holder| welcome && holder.identity == identity)
    }

    fn numbers(&self, is: impl Fn(&Holder<L>) -> bool) -> impl Iterator<Item = u32> {
        let chosen = move |(index, slot): (usize, &Option<Holder<L>>)| {
            slot.as_ref().is_some_and(&is).then_some(index as u32)
        };
        self.peers.iter().enumerate().filter_map(chosen)
    }

    /// Revokes the grants of a peer, and grants it nothing from now on. Returns whether it uses nothing any
    /// more; the caller calls it again until that is true.
    ///
    /// # Errors
    /// `Full` when [`EXPELLED_MAX`] peers are expelled already: nothing has changed.
    pub fn expel(&mut self, identity: u64) -> Result<bool, Error> {
        if self.expelled.len() >= EXPELLED_MAX && !self.expelled.contains(&identity) {
            return Err(Error::new(ErrorKind::Full));
        }
        self.expelled.insert(identity);
        let mut gone = true;
        for peer in 0..self.peers.len() {
            let is_it = |holder: &Holder<L>| holder.identity == identity;
            if self.peers[peer].as_ref().is_some_and(is_it) {
                gone &= self.part_as(peer, Revoked::Peer, Error::new(ErrorKind::Expelled));
            }
        }
        Ok(gone)
    }

    /// Notes a new connection; returns its number.
    ///
    /// # Errors
    /// `Full`: the fabric closes the connection.
    pub fn connected(&mut self) -> Result<u32, Error> {
        let index = self.peers.iter().position(Option::is_none).unwrap_or(self.peers.len());
        if index >= self.limits.peers_max as usize {
            return Err(Error::new(ErrorKind::Full));
        }
        if index == self.peers.len() {
            self.peers.push(None);
        }
        self.unsettled = true;
        self.peers[index] = Some(Holder {
            identity: 0,
            since: None,
            granted: false,
            rows: None,
            grants: Vec::new(),
            parting: None,
        });
        Ok(index as u32)
    }

    /// Notes that a connection has ended, and with it every use of what was granted over it: the peer has
    /// closed it, or has died.
    pub fn ended(&mut self, peer: u32) {
        if let Some(slot) = self.peers.get_mut(peer as usize) {
            *slot = None;
        }
    }

    /// Takes the rows for a peer that has stated its identity.
    pub fn welcomed(&mut self, peer: u32, rows: L) {
        if let Some(Some(holder)) = self.peers.get_mut(peer as usize) {
            holder.rows = Some(rows);
            self.effects.push_back(OwnerEffect::Send { peer, message: Message::Welcome });
        }
    }

    /// Handles a message of a peer. A peer whose message is not valid is [disconnected](Self::disconnect).
    pub fn received(&mut self, peer: u32, message: Message) {
        if let Err(error) = self.answer(peer, message) {
            self.disconnect(peer, error);
        }
    }

    /// Disconnects a peer: revokes its grants, and closes its connection once it uses none of them.
    pub fn disconnect(&mut self, peer: u32, why: Error) {
        if self.peers.get(peer as usize).is_some_and(Option::is_some) {
            self.part_as(peer as usize, Revoked::Region, why);
        }
    }

    /// Notes that the memory of an [`OwnerEffect::Grant`] could not be handed over: its peer is refused.
    pub fn withdraw(&mut self, peer: u32, message: Message) {
        let Message::Grant { request, row, .. } = message else { return };
        if let Some(Some(holder)) = self.peers.get_mut(peer as usize) {
            // The peer does not know this grant.
            holder.release(row);
            let message = Message::Refuse { request, stale: false };
            self.effects.push_back(OwnerEffect::Send { peer, message });
        }
    }

    /// Disconnects the peers that were granted nothing in time.
    pub fn poll(&mut self, now: Instant) {
        if !self.unsettled {
            return;
        }
        self.unsettled = false;
        for peer in 0..self.peers.len() {
            let Some(holder) = &mut self.peers[peer] else { continue };
            if let Some((how, why)) = holder.parting {
                self.part_as(peer, how, why);
            } else if !holder.granted {
                if now >= *holder.since.get_or_insert(now) + self.limits.idle_max {
                    self.part_as(peer, Revoked::Region, Error::new(ErrorKind::TimedOut));
                } else {
                    self.unsettled = true;
                }
            }
        }
    }

    /// When `poll` has something to do; `now` when at once. No event announces that a peer has stopped using
    /// memory: the next poll sees it.
    #[must_use]
    pub fn poll_at(&self, now: Instant) -> Option<Instant> {
        if !self.unsettled {
            return None;
        }
        let unknown = self.peers.iter().flatten().filter(|holder| !holder.granted);
        unknown.map(|holder| holder.since.map_or(now, |since| since + self.limits.idle_max)).min()
    }

    /// Revokes all grants of a peer. Returns whether it uses none any more.
    fn part_as(&mut self, peer: usize, how: Revoked, why: Error) -> bool {
        let Some(holder) = &mut self.peers[peer] else { return true };
        // A peer that is expelled stays expelled, whatever it sends meanwhile.
        let (how, why) = match holder.parting {
            Some(parting @ (Revoked::Peer, _)) => parting,
            _ => (how, why),
        };
        let announce = |row| {
            if self.until_released {
                let message = Message::Revoked { row };
                self.effects.push_back(OwnerEffect::Send { peer: peer as u32, message });
            }
        };
        let quiet = holder.revoke(how, |_| true, announce);
        if !quiet || (self.until_released && holder.has(|_| true)) {
            holder.parting = Some((how, why));
            self.unsettled = true;
            return quiet;
        }
        let peer_no = peer as u32;
        if why.kind == ErrorKind::Expelled {
            // So that the peer learns the reason. If the message is lost, it learns it at its next
            // connection.
            self.effects.push_back(OwnerEffect::Send { peer: peer_no, message: Message::Expelled });
        }
        self.effects.push_back(OwnerEffect::Close { peer: peer_no, why });
        self.peers[peer] = None;
        true
    }

    fn answer(&mut self, peer: u32, message: Message) -> Result<(), Error> {
        let Some(Some(holder)) = self.peers.get_mut(peer as usize) else { return Ok(()) };
        let reply = match message {
            Message::Release { row } => {
                holder.release(row);
                return Ok(());
            }
            // A peer that is to be disconnected, and still uses memory, is granted nothing new.
            Message::Ask { request, .. } if holder.parting.is_some() => {
                Message::Refuse { request, stale: true }
            }
            _ if holder.parting.is_some() => return Ok(()),
            Message::Hello { protocol: PROTOCOL, identity } if holder.identity == 0 && identity != 0 => {
                if self.expelled.contains(&identity) {
                    return Err(Error::new(ErrorKind::Expelled));
                }
                holder.identity = identity;
                self.effects.push_back(OwnerEffect::MakeRows { peer });
                return Ok(());
            }
            Message::Ask { request, region, key } if holder.rows.is_some() => {
                let offer = self.offers.get(region.index as usize).copied().flatten();
                match holder.grant(request, region, &key, offer) {
                    Ok(message) => {
                        self.effects.push_back(OwnerEffect::Grant { peer, region, message });
                        return Ok(());
                    }
                    Err(error) => Message::Refuse { request, stale: error.kind == ErrorKind::Stale },
                }
            }
            _ => return Err(Error::new(ErrorKind::Protocol)),
        };
        self.effects.push_back(OwnerEffect::Send { peer, message: reply });
        Ok(())
    }
}

impl<L: Rows> Holder<L> {
    /// Revokes the grants that `of` chooses, and marks the rows that were not revoked before. Returns whether
    /// none of them is in use.
    fn revoke(&mut self, why: Revoked, of: impl Fn(&Grant) -> bool, mut announce: impl FnMut(u32)) -> bool {
        let Some(rows) = &self.rows else { return true };
        let mut all_out = true;
        for (row, grant) in self.grants.iter_mut().enumerate() {
            let Some(grant) = grant.as_mut().filter(|grant| of(grant) && !grant.quiet) else { continue };
            grant.quiet = rows.revoke(row as u32, why);
            all_out &= grant.quiet;
            if !core::mem::replace(&mut grant.revoked, true) {
                announce(row as u32);
            }
        }
        all_out
    }

    fn has(&self, grant: impl Fn(&Grant) -> bool) -> bool {
        self.grants.iter().flatten().any(grant)
    }

    /// Grants a region under a free row.
    fn grant(
        &mut self,
        request: u32,
        region: RegionId,
        key: &[u8; 16],
        offer: Option<(u32, Offer)>,
    ) -> Result<Message, Error> {
        let stale = Error::new(ErrorKind::Stale);
        let (_, offer) = offer.filter(|(generation, _)| *generation == region.generation).ok_or(stale)?;
        if !same_key(&offer.key, key) {
            return Err(Error::new(ErrorKind::AccessDenied));
        }
        let row = self.grants.iter().position(Option::is_none).unwrap_or(self.grants.len());
        let rows = self.rows.as_ref().filter(|_| row < ROWS_MAX as usize);
        rows.ok_or(Error::new(ErrorKind::Full))?.reset(row as u32);
        if row == self.grants.len() {
            self.grants.push(None);
        }
        self.granted = true;
        self.grants[row] = Some(Grant { region, revoked: false, quiet: false });
        let Offer { offset, len, access, .. } = offer;
        Ok(Message::Grant { request, row: row as u32, offset, len, access })
    }

    fn release(&mut self, row: u32) {
        if let Some(grant) = self.grants.get_mut(row as usize) {
            *grant = None;
        }
    }
}

/// Whether two keys are equal, in a time that does not depend on where they differ.
fn same_key(a: &[u8; 16], b: &[u8; 16]) -> bool {
    core::hint::black_box(a.iter().zip(b).fold(0, |differs, (a, b)| differs | (a ^ b))) == 0
}
