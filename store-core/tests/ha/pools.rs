//! Processes that share a pool of CXL memory: each wants a page of it, and one of its extents. They die and
//! are replaced by others. A process of the same host holds the kernel's lock that one which has ended has
//! left, and no other; what is in the pool survives all processes and masters.
//!
//! What must hold: a process is never given what a live process can still write, and no two processes are
//! given the same page in the same epoch.

use std::collections::{BTreeMap, HashMap};

use store_core::message::*;
use store_core::{ErrorCode, Frame, NodeId};
use te_core::Instant;

use crate::clients::CALL_TIMEOUT;
use crate::report::{Lies, Violation};
use crate::world::{CLIENTS, Event, MEMBERS, World};

/// The host of each process.
const HOSTS: [u64; 6] = [1, 1, 1, 2, 2, 3];
const PAGES: u32 = 5;
const EXTENTS: u32 = 2;
const NAME: [u8; 16] = [9; 16];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Call {
    Page,
    Claim { locked: bool },
    Release,
}

/// A process, which has its number as its identity, its node's number and its key.
#[derive(Debug)]
pub(crate) struct Process {
    host: u64,
    identity: u64,
    alive: bool,
    member: usize,
    connection: u64,
    asked: Option<(u64, Call, Instant)>,
    /// The bytes of that request, and the lineage under which the pool was read for it.
    bytes: Vec<u8>,
    lineage: u64,
    page: Option<(u32, u64)>,
    extent: Option<u64>,
}

/// The pool, and the locks of the hosts.
#[derive(Default)]
pub(crate) struct Pool {
    pub(crate) processes: Vec<Process>,
    /// Epoch and identity.
    pages: BTreeMap<u32, (u64, u64, u64)>,
    /// Epoch, host, and whether the owner has not given it back.
    extents: BTreeMap<u32, (u64, u64, bool)>,
    /// By host: pages, and extents after them.
    locks: HashMap<(u64, u32), u64>,
    /// The process that each page was given to, by its epoch.
    given: HashMap<(u32, u64), u64>,
}

impl Pool {
    pub(crate) fn new() -> Self {
        let process = |(at, host): (usize, &u64)| Process {
            host: *host,
            // Apart from the numbers that later processes get.
            identity: (1 << 40) + at as u64,
            alive: true,
            member: 0,
            connection: 0,
            asked: None,
            bytes: Vec::new(),
            lineage: 0,
            page: None,
            extent: None,
        };
        Self { processes: HOSTS.iter().enumerate().map(process).collect(), ..Self::default() }
    }

    /// Takes a lock; `false` when another process of the host has it.
    fn lock(&mut self, host: u64, what: u32, identity: u64) -> bool {
        *self.locks.entry((host, what)).or_insert(identity) == identity
    }

    fn unlock(&mut self, host: u64, what: u32, identity: u64) {
        if self.locks.get(&(host, what)) == Some(&identity) {
            self.locks.remove(&(host, what));
        }
    }
}

/// The extent that a process wants.
const fn extent_of(index: usize) -> u32 {
    index as u32 % EXTENTS
}

impl World {
    /// A process does what it does next.
    pub(crate) fn pool_steps(&mut self, index: usize) {
        let pause = self.us(20_000, 200_000);
        self.after(pause, Event::Pool(index));
        let (now, quiet, fate) = (self.now, self.is_quiet(), self.rng.below(60));
        let fresh = self.number();
        let process = &mut self.pool.processes[index];
        if !process.alive {
            (process.alive, process.identity) = (true, fresh);
            (process.page, process.extent, process.asked) = (None, None, None);
            self.pool_moves_on(index);
            return;
        }
        if fate == 0 && !quiet {
            process.alive = false;
            let identity = process.identity;
            self.pool.locks.retain(|_, holder| *holder != identity);
            self.report.pool_deaths += 1;
            return;
        }
        if process.asked.as_ref().is_some_and(|(.., at)| now < *at + CALL_TIMEOUT) {
            return;
        }
        if let Some((number, call, _)) = process.asked.take() {
            self.pool_moves_on(index);
            if self.rng.below(2) == 0 {
                // The same bytes to another member, whatever is in the pool by now.
                self.pool_asks(index, number, call);
                return;
            }
        }
        // A process that does not know the lineage finds a leader first.
        let Some(lineage) = self.epoch_of(self.pool.processes[index].member) else {
            self.pool_moves_on(index);
            return;
        };
        self.pool.processes[index].lineage = lineage;
        let (call, bytes) = match self.pool.processes[index] {
            Process { page: None, .. } => (Call::Page, self.page_call(index, fresh)),
            Process { extent: None, .. } => self.claim_call(index, fresh),
            Process { extent: Some(epoch), .. } if fate < 4 => {
                (Call::Release, self.release_call(index, fresh, epoch))
            }
            _ if fate < 30 => (Call::Page, self.page_call(index, fresh)),
            _ => self.claim_call(index, fresh),
        };
        self.pool.processes[index].bytes = bytes;
        self.pool_asks(index, fresh, call);
    }

    fn pool_asks(&mut self, index: usize, number: u64, call: Call) {
        let now = self.now;
        let process = &mut self.pool.processes[index];
        process.asked = Some((number, call, now));
        let (member, connection, bytes) = (process.member, process.connection, process.bytes.clone());
        self.call(CLIENTS + self.nodes.len() + index, member, connection, bytes);
    }

    fn pool_moves_on(&mut self, index: usize) {
        let connection = self.number();
        let party = CLIENTS + self.nodes.len() + index;
        let process = &mut self.pool.processes[index];
        let (member, old) = (process.member, process.connection);
        (process.member, process.connection) = ((member + 1) % MEMBERS, connection);
        self.hang_up(member, party, old);
    }

    /// The lock domain that a process states.
    fn domain(&self, host: u64) -> u64 {
        if self.lies == Lies::ONE_DOMAIN { 1 } else { host }
    }

    fn page_call(&self, index: usize, number: u64) -> Vec<u8> {
        let Process { host, identity, lineage, .. } = self.pool.processes[index];
        let wanted = PageWanted { lineage, pool: NAME, pages: PAGES, identity, domain: self.domain(host) };
        let found = (0..PAGES).filter_map(|slot| {
            let record = self.pool.pages.get(&slot).copied();
            let locked = self.pool.locks.get(&(host, slot)).is_some_and(|holder| *holder != identity);
            let (epoch, identity, domain) = record.unwrap_or_default();
            let found = PageFound { slot, epoch, identity, domain, left: false, locked };
            (record.is_some() || locked).then_some(found)
        });
        let found: Vec<_> = found.filter(|_| self.lies != Lies::UNTOLD).collect();
        let mut bytes = Vec::new();
        TakePage::encode_request(&mut bytes, number, &wanted, found.into_iter()).unwrap();
        bytes
    }

    fn claim_call(&mut self, index: usize, number: u64) -> (Call, Vec<u8>) {
        let Process { host, identity, lineage, .. } = self.pool.processes[index];
        let (first, domain) = (extent_of(index), self.domain(host));
        let locked = self.pool.lock(host, PAGES + first, identity);
        let (above, owner, owned) = self.pool.extents.get(&first).copied().unwrap_or_default();
        let told = self.lies != Lies::UNTOLD;
        let wanted = ExtentsWanted {
            node: NodeId::new(identity),
            key: identity,
            lineage,
            name: "p",
            pool: NAME,
            first,
            count: 1,
            incarnation: identity,
            domain,
            locked,
            above: if told { above } else { 0 },
            owned_elsewhere: told && owned && self.domain(owner) != domain,
            takeover: false,
        };
        let mut bytes = Vec::new();
        ClaimExtents::encode_request(&mut bytes, number, &wanted, std::iter::empty()).unwrap();
        (Call::Claim { locked }, bytes)
    }

    /// The process has stopped using its extent.
    fn release_call(&mut self, index: usize, number: u64, epoch: u64) -> Vec<u8> {
        let Process { identity, .. } = self.pool.processes[index];
        let (node, first) = (NodeId::new(identity), extent_of(index));
        self.pool.processes[index].extent = None;
        if let Some(record) = self.pool.extents.get_mut(&first).filter(|record| record.0 == epoch) {
            record.2 = false;
        }
        let released = ExtentsReleased { node, key: identity, pool: NAME, first, count: 1, epoch };
        let mut bytes = Vec::new();
        ReleaseExtents::encode_request(&mut bytes, number, &released, std::iter::empty()).unwrap();
        bytes
    }

    pub(crate) fn pool_answered(
        &mut self,
        index: usize,
        connection: u64,
        bytes: Option<Vec<u8>>,
    ) -> Result<(), Violation> {
        let lost = !self.is_quiet() && self.rng.below(30) == 0;
        let process = &mut self.pool.processes[index];
        if connection != process.connection || !process.alive {
            return Ok(());
        }
        let Some(bytes) = bytes else {
            process.asked = None;
            self.pool_moves_on(index);
            return Ok(());
        };
        let (frame, _) = Frame::parse(&bytes).unwrap().unwrap();
        let asked = process.asked.take_if(|(number, ..)| *number == frame.header.request_id && !lost);
        match asked {
            Some((_, Call::Page, _)) => match TakePage::decode_response(&frame).map(|(given, _)| given) {
                Ok(PageGiven::Given { slot, epoch }) => self.page_given(index, slot, epoch)?,
                Ok(PageGiven::Full { .. }) => self.report.pool_full += 1,
                Ok(given @ PageGiven::Limited { .. }) => panic!("a process has one page: {given:?}"),
                Err(ErrorCode::IllegalClient) => self.report.pool_refused += 1,
                Err(error) => panic!("{error:?}"),
            },
            Some((_, Call::Claim { locked }, _)) => {
                match ClaimExtents::decode_response(&frame).map(|(given, _)| given) {
                    Ok(ExtentsGiven::Given { epoch }) if locked => self.extent_given(index, epoch)?,
                    Ok(given @ ExtentsGiven::Given { .. }) => {
                        return Err(Violation::PoolShared(format!("{given:?} without a lock")));
                    }
                    Ok(ExtentsGiven::Held { .. }) => self.report.pool_held += 1,
                    Err(ErrorCode::IllegalClient) => self.report.pool_refused += 1,
                    Err(error) => panic!("{error:?}"),
                }
            }
            Some((_, Call::Release, _)) => {
                let Process { host, identity, .. } = self.pool.processes[index];
                self.pool.unlock(host, PAGES + extent_of(index), identity);
            }
            None => {}
        }
        Ok(())
    }

    fn page_given(&mut self, index: usize, slot: u32, epoch: u64) -> Result<(), Violation> {
        let Process { host, identity, page, .. } = self.pool.processes[index];
        let shared = |with: &dyn std::fmt::Debug| {
            Err(Violation::PoolShared(format!("page {slot} in epoch {epoch} given to {identity}, {with:?}")))
        };
        let to = *self.pool.given.entry((slot, epoch)).or_insert(identity);
        if to != identity {
            return shared(&to);
        }
        match page {
            Some(has) if has == (slot, epoch) => return Ok(()),
            Some(_) => return shared(&page),
            None => {}
        }
        if !self.pool.lock(host, slot, identity) {
            self.report.pool_contested += 1;
            return Ok(());
        }
        let has = |other: &Process| other.alive && other.page.is_some_and(|(has, _)| has == slot);
        if let Some(other) = self.pool.processes.iter().find(|other| has(other)) {
            return shared(other);
        }
        if self.pool.pages.get(&slot).is_some_and(|(found, ..)| *found >= epoch) {
            self.pool.unlock(host, slot, identity);
            return Ok(());
        }
        self.pool.pages.insert(slot, (epoch, identity, self.domain(host)));
        self.pool.processes[index].page = Some((slot, epoch));
        self.report.pool_pages += 1;
        Ok(())
    }

    fn extent_given(&mut self, index: usize, epoch: u64) -> Result<(), Violation> {
        let first = extent_of(index);
        let Process { host, identity, extent, .. } = self.pool.processes[index];
        if extent == Some(epoch) {
            return Ok(());
        }
        let has = |(at, other): &(usize, &Process)| {
            *at != index && other.alive && extent_of(*at) == first && other.extent.is_some()
        };
        if let Some((_, other)) = self.pool.processes.iter().enumerate().find(has) {
            let text = format!("extent {first} in epoch {epoch} given to {identity}, {other:?}");
            return Err(Violation::PoolShared(text));
        }
        if self.pool.extents.get(&first).is_some_and(|(found, ..)| *found >= epoch) {
            return Ok(());
        }
        self.pool.extents.insert(first, (epoch, host, true));
        self.pool.processes[index].extent = Some(epoch);
        self.report.pool_extents += 1;
        Ok(())
    }
}
