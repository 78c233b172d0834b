//! Both halves of the grant protocol against each other: an owner, and processes that connect, are paused in
//! the middle of a use and are killed, while messages of different connections arrive in any order.
//!
//! What must hold: no process uses memory that was revoked, and every revocation ends once the processes that
//! were paused continue or die. Every run is a seed; `SNOWSKIN_SEED=7 cargo test -p te-core --test grant`
//! runs one.

use std::cell::Cell;
use std::collections::VecDeque;
use std::rc::Rc;
use std::time::Duration;

use te_core::grant::{
    Inside, LinkState, Message, Offer, Owner, OwnerEffect, OwnerLimits, Peer, PeerEffect, Revoked, Row, Rows,
    Want,
};
use te_core::testkit::{Rng, each_seed, seeds};
use te_core::{Access, Error, ErrorKind, Instant, RegionId};

const REGIONS: usize = 4;
const PROCESSES: usize = 4;
const STEPS: usize = 600;
const LEN: u64 = 4096;
/// The number of rows that one connection needs here. They exist as long as the test, since processes are
/// paused while they use a row.
const ROWS: usize = 64;

#[derive(Clone, Copy)]
struct Shared(&'static [Row]);

impl Rows for Shared {
    fn reset(&self, row: u32) {
        self.0[row as usize].reset();
    }

    fn revoke(&self, row: u32, why: Revoked) -> bool {
        self.0[row as usize].revoke(why)
    }
}

/// A region's memory, mapped by a process.
struct Mapping {
    region: RegionId,
    mapped: Rc<Cell<usize>>,
}

impl Drop for Mapping {
    fn drop(&mut self) {
        self.mapped.set(self.mapped.get() - 1);
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Region {
    /// The owner alone uses it.
    Own,
    Shared,
    /// It is being revoked.
    Leaving,
}

/// What is handed over with a message.
#[derive(Clone, Copy)]
enum With {
    Nothing,
    Rows(Shared),
    Memory(RegionId),
}

/// The messages between a process and the owner. `None`: the connection is closed after what was sent before.
struct Connection {
    /// The owner's number of the connection; `None` once the owner has closed its end.
    number: Option<u32>,
    up: VecDeque<Option<Message>>,
    down: VecDeque<Option<(Message, With)>>,
    rows: Option<Shared>,
}

/// A process that uses the owner's memory.
struct Process {
    identity: u64,
    half: Peer<Shared, Mapping>,
    /// Its connection, and the owner's number in its half.
    connection: Option<(usize, u32)>,
    links: Vec<(u32, RegionId)>,
    /// A use that has begun and not ended.
    inside: Option<(Inside<'static>, RegionId)>,
    /// The number of steps for which it is stopped.
    paused: u32,
    mapped: Rc<Cell<usize>>,
}

/// The number of events of each kind: a run without them would prove nothing.
#[derive(Default, Debug)]
struct Seen {
    uses: u32,
    waited: u32,
    taken_back: u32,
    killed_inside: u32,
    expelled_inside: u32,
    expelled: u32,
    refused_entry: u32,
    lost: u32,
    nonsense: u32,
}

struct World {
    rng: Rng,
    now: Instant,
    owner: Owner<Shared>,
    /// The state and the generation of each region.
    regions: [(Region, u32); REGIONS],
    connections: Vec<Connection>,
    processes: Vec<Process>,
    next_identity: u64,
    /// The identities whose expulsion has begun and not ended.
    expelling: Vec<u64>,
    expelled: Vec<u64>,
    /// Whether messages are lost and calls fail.
    rough: bool,
    seen: Seen,
}

fn key(id: RegionId) -> [u8; 16] {
    [id.index as u8 + 1; 16]
}

impl Process {
    fn new(identity: u64) -> Self {
        Self {
            identity,
            half: Peer::new(identity, Duration::from_secs(2)),
            connection: None,
            links: Vec::new(),
            inside: None,
            paused: 0,
            mapped: Rc::default(),
        }
    }

    fn is_busy(&self) -> bool {
        self.inside.is_some() || self.paused > 0
    }
}

impl World {
    fn new(seed: u64) -> Self {
        let limits = OwnerLimits { peers_max: 6, idle_max: Duration::from_secs(2) };
        Self {
            rng: Rng::new(seed),
            now: Instant::ZERO,
            owner: Owner::new(limits),
            regions: [(Region::Own, 0); REGIONS],
            connections: Vec::new(),
            processes: (1..=PROCESSES as u64).map(Process::new).collect(),
            next_identity: PROCESSES as u64 + 1,
            expelling: Vec::new(),
            expelled: Vec::new(),
            rough: true,
            seen: Seen::default(),
        }
    }

    fn one_in(&mut self, n: u64) -> bool {
        self.rough && self.rng.below(n) == 0
    }

    fn pick(&mut self, count: usize) -> usize {
        self.rng.below(count as u64) as usize
    }

    fn id(&self, index: usize) -> RegionId {
        RegionId::new(index as u32, self.regions[index].1)
    }

    /// What must hold: no living process is in the middle of using a region that only its owner may use.
    fn check(&self) {
        for process in &self.processes {
            if let Some((_, region)) = &process.inside {
                let (state, generation) = self.regions[region.index as usize];
                let lent = state != Region::Own && generation == region.generation;
                assert!(lent, "process {} uses {region}, which was taken back", process.identity);
            }
        }
    }

    // The owner.

    fn share(&mut self, index: usize) {
        if self.regions[index].0 == Region::Own {
            self.regions[index] = (Region::Shared, self.regions[index].1 + 1);
            let id = self.id(index);
            self.owner.share(id, Offer { key: key(id), offset: 0, len: LEN, access: Access::REMOTE_WRITE });
        }
    }

    fn unshare(&mut self, index: usize) {
        if self.regions[index].0 == Region::Own {
            return;
        }
        self.regions[index].0 = Region::Leaving;
        if self.owner.unshare(self.id(index)) {
            self.regions[index].0 = Region::Own;
            self.seen.taken_back += 1;
            self.check();
        } else {
            self.seen.waited += 1;
        }
        self.settle_owner();
    }

    fn expel(&mut self, identity: u64) {
        if !self.expelled.contains(&identity) && !self.expelling.contains(&identity) {
            self.expelling.push(identity);
        }
        let inside = self.processes.iter().any(|p| p.identity == identity && p.inside.is_some());
        if self.owner.expel(identity).expect("few are expelled") {
            assert!(!inside, "process {identity} was expelled, and uses memory");
            self.expelling.retain(|other| *other != identity);
            self.expelled.push(identity);
            self.seen.expelled += 1;
        } else {
            self.seen.expelled_inside += u32::from(inside);
        }
        self.settle_owner();
    }

    fn settle_owner(&mut self) {
        while let Some(effect) = self.owner.effect() {
            let of = |peer: u32| move |connection: &Connection| connection.number == Some(peer);
            match effect {
                OwnerEffect::MakeRows { peer } if self.one_in(20) => {
                    self.owner.disconnect(peer, Error::new(ErrorKind::System));
                }
                OwnerEffect::MakeRows { peer } => {
                    let rows = Shared(Box::leak((0..ROWS).map(|_| Row::new()).collect()));
                    let at = self.connections.iter().position(of(peer)).expect("it is connected");
                    self.connections[at].rows = Some(rows);
                    self.owner.welcomed(peer, rows);
                }
                OwnerEffect::Send { message: Message::Revoked { .. }, .. } if self.one_in(4) => {
                    self.seen.lost += 1;
                }
                OwnerEffect::Send { peer, message } => {
                    let at = self.connections.iter().position(of(peer)).expect("it is connected");
                    let connection = &mut self.connections[at];
                    let with = match (message, connection.rows) {
                        (Message::Welcome, Some(rows)) => With::Rows(rows),
                        _ => With::Nothing,
                    };
                    connection.down.push_back(Some((message, with)));
                }
                OwnerEffect::Grant { peer, message, .. } if self.one_in(20) => {
                    self.owner.withdraw(peer, message);
                }
                OwnerEffect::Grant { peer, region, message } => {
                    let at = self.connections.iter().position(of(peer)).expect("it is connected");
                    let offered = self.regions[region.index as usize] == (Region::Shared, region.generation);
                    assert!(offered, "{region} is granted, although it is not offered");
                    let mut askers =
                        self.processes.iter().filter(|p| p.connection.is_some_and(|(c, _)| c == at));
                    let cut_off = |p: &Process| self.expelling.contains(&p.identity);
                    assert!(!askers.any(cut_off), "a peer that is being disconnected gets a grant");
                    self.connections[at].down.push_back(Some((message, With::Memory(region))));
                }
                OwnerEffect::Close { peer, .. } => {
                    let at = self.connections.iter().position(of(peer)).expect("it is connected");
                    let uses = |p: &Process| p.inside.is_some() && p.connection.is_some_and(|(c, _)| c == at);
                    assert!(!self.processes.iter().any(uses), "a peer that uses memory is forgotten");
                    self.connections[at].number = None;
                    self.connections[at].up.clear();
                    self.connections[at].down.push_back(None);
                }
            }
        }
    }

    // Messages.

    fn deliver_up(&mut self, at: usize) {
        let Some(number) = self.connections[at].number else { return };
        match self.connections[at].up.pop_front() {
            None => return,
            Some(Some(message)) => self.owner.received(number, message),
            Some(None) => {
                self.owner.ended(number);
                self.connections[at].number = None;
            }
        }
        self.settle_owner();
    }

    fn deliver_down(&mut self, who: usize) {
        let process = &mut self.processes[who];
        let Some((at, owner)) = process.connection else { return };
        let mut came = With::Nothing;
        match self.connections[at].down.pop_front() {
            None => return,
            Some(None) => process.half.lost(owner, Error::new(ErrorKind::PeerDead)),
            Some(Some((message, with))) => {
                came = with;
                process.half.received(owner, message);
            }
        }
        self.settle(who, came);
    }

    // The processes.

    fn settle(&mut self, who: usize, came: With) {
        while let Some(effect) = self.processes[who].half.effect() {
            let unlucky = self.one_in(10);
            let process = &mut self.processes[who];
            let (at, _) = process.connection.expect("effects are about the connection");
            match effect {
                PeerEffect::Send { message: message @ Message::Ask { .. }, .. } if unlucky => {
                    process.half.unsent(message);
                }
                PeerEffect::Send { message: Message::Release { .. }, .. } if unlucky => self.seen.lost += 1,
                PeerEffect::Send { message, .. } => self.connections[at].up.push_back(Some(message)),
                PeerEffect::OpenRows { owner } => match came {
                    With::Rows(rows) => process.half.welcomed(owner, rows),
                    _ => panic!("rows come with a welcome"),
                },
                PeerEffect::Map { link, .. } if unlucky => {
                    process.half.mapped(link, Err(Error::new(ErrorKind::System)));
                }
                PeerEffect::Map { link, .. } => {
                    let With::Memory(region) = came else { panic!("memory comes with a grant") };
                    let wanted = process.links.iter().find(|(number, _)| *number == link);
                    assert_eq!(wanted.map(|(_, region)| *region), Some(region), "other memory");
                    process.mapped.set(process.mapped.get() + 1);
                    process.half.mapped(link, Ok(Mapping { region, mapped: process.mapped.clone() }));
                }
                PeerEffect::Close { .. } => {
                    self.connections[at].up.push_back(None);
                    process.connection = None;
                }
            }
        }
        let process = &self.processes[who];
        let is_ready =
            |link: &&(u32, RegionId)| matches!(process.half.link_state(link.0), LinkState::Ready { .. });
        assert_eq!(
            process.links.iter().filter(is_ready).count(),
            process.mapped.get(),
            "it maps what it uses"
        );
    }

    fn attach(&mut self, who: usize, want: Want) {
        if self.processes[who].connection.is_none() {
            // A grant that it had over another connection does not count any more, but is still there.
            let Ok(number) = self.owner.connected() else { return };
            let (up, down) = (VecDeque::new(), VecDeque::new());
            self.connections.push(Connection { number: Some(number), up, down, rows: None });
            let owner = self.processes[who].half.connected().expect("room");
            self.processes[who].connection = Some((self.connections.len() - 1, owner));
        }
        let process = &mut self.processes[who];
        let (_, owner) = process.connection.expect("just made");
        let link = process.half.attach(owner, want);
        process.links.push((link, want.region));
        self.settle(who, With::Nothing);
    }

    fn detach(&mut self, who: usize, nth: usize) {
        if let Some((link, _)) = self.processes[who].links.get(nth).copied() {
            self.processes[who].links.remove(nth);
            self.processes[who].half.detach(link);
            self.settle(who, With::Nothing);
        }
    }

    fn begin(&mut self, who: usize, nth: usize) {
        let process = &mut self.processes[who];
        let Some(&(link, region)) = process.links.get(nth) else { return };
        let LinkState::Ready { rows, row, mapping } = process.half.link_state(link) else { return };
        assert_eq!(mapping.region, region);
        match rows.0[row as usize].enter() {
            Ok(inside) => {
                process.inside = Some((inside, region));
                self.seen.uses += 1;
            }
            Err(_) => self.seen.refused_entry += 1,
        }
        self.check();
    }

    /// The system unmaps its memory, and then closes its connection.
    fn kill(&mut self, who: usize) {
        let fresh = Process::new(self.next_identity);
        self.next_identity += 1;
        let mut dead = std::mem::replace(&mut self.processes[who], fresh);
        if let Some((inside, _)) = dead.inside.take() {
            // Its row is in use for ever.
            std::mem::forget(inside);
            self.seen.killed_inside += 1;
        }
        if let Some((at, _)) = dead.connection {
            self.connections[at].up.push_back(None);
        }
    }

    fn step(&mut self) {
        let who = self.pick(PROCESSES);
        let region = self.pick(REGIONS);
        let nth = self.pick(6);
        self.processes[who].paused = self.processes[who].paused.saturating_sub(1);
        let free = !self.processes[who].is_busy();
        match self.rng.below(20) {
            0..4 if !self.connections.is_empty() => {
                let at = self.pick(self.connections.len());
                self.deliver_up(at);
            }
            4..8 if free => self.deliver_down(who),
            8 => self.share(region),
            9 => self.unshare(region),
            10 | 11 if free => {
                let (mut id, wrong) = (self.id(region), self.one_in(10));
                id.generation = id.generation.saturating_sub(u32::from(self.one_in(10)));
                let key = if wrong { [0xff; 16] } else { key(id) };
                self.attach(who, Want { region: id, key, len: LEN, access: Access::REMOTE_WRITE });
            }
            12 if free => self.detach(who, nth),
            13..16 if free => self.begin(who, nth),
            16 if self.processes[who].paused == 0 => drop(self.processes[who].inside.take()),
            17 => self.trouble(who),
            18 => {
                self.now = self.now + Duration::from_millis(self.rng.below(300));
                self.owner.poll(self.now);
                self.settle_owner();
            }
            19 if free => {
                self.processes[who].half.poll(self.now);
                self.settle(who, With::Nothing);
            }
            _ => {}
        }
        self.check();
    }

    fn trouble(&mut self, who: usize) {
        match self.rng.below(12) {
            0 => self.kill(who),
            1 if self.expelled.len() < 8 => self.expel(self.processes[who].identity),
            2 => {
                if let Some((at, _)) = self.processes[who].connection {
                    self.connections[at].up.push_back(Some(Message::Welcome));
                    self.seen.nonsense += 1;
                }
            }
            3..6 => self.processes[who].paused = 5 + self.rng.below(40) as u32,
            _ => self.expelling.clone().into_iter().for_each(|identity| self.expel(identity)),
        }
    }

    /// Delivers all messages, and continues all processes that were paused.
    fn calm_down(&mut self) {
        self.rough = false;
        for _ in 0..60 {
            for who in 0..PROCESSES {
                self.processes[who].paused = 0;
                self.processes[who].inside = None;
                self.deliver_down(who);
                self.processes[who].half.poll(self.now);
                self.settle(who, With::Nothing);
            }
            (0..self.connections.len()).for_each(|at| self.deliver_up(at));
            self.owner.poll(self.now);
            self.settle_owner();
        }
    }

    /// Checks that every revocation ends, and that every process that may have memory gets it.
    fn end(&mut self) {
        if self.pick(2) == 0 {
            (0..PROCESSES).filter(|who| who % 2 == 0).for_each(|who| self.kill(who));
        }
        self.calm_down();
        for process in &self.processes {
            let waits = |link: &(u32, RegionId)| {
                matches!(process.half.link_state(link.0), LinkState::Waiting | LinkState::Late)
            };
            assert!(!process.links.iter().any(waits), "process {} waits for ever", process.identity);
        }
        (0..REGIONS).for_each(|index| self.unshare(index));
        self.expelling.clone().into_iter().for_each(|identity| self.expel(identity));
        assert_eq!(
            (self.owner.waited_for().count(), self.expelling.len()),
            (0, 0),
            "not every revocation ended"
        );
        assert!(self.regions.iter().all(|(state, _)| *state == Region::Own));
        (0..REGIONS).for_each(|index| self.share(index));
        for who in 0..PROCESSES {
            let (identity, region) = (self.processes[who].identity, self.id(who % REGIONS));
            while !self.processes[who].links.is_empty() {
                self.detach(who, 0);
            }
            self.calm_down();
            let want = Want { region, key: key(region), len: LEN, access: Access::REMOTE_WRITE };
            self.attach(who, want);
            self.calm_down();
            let (link, _) = self.processes[who].links[0];
            match self.processes[who].half.link_state(link) {
                LinkState::Ready { .. } => {
                    assert!(!self.expelled.contains(&identity), "an expelled process is accepted")
                }
                LinkState::Closed(error) if error.kind == ErrorKind::Expelled => {
                    assert!(self.expelled.contains(&identity), "{identity} was not expelled");
                }
                other => panic!("process {identity} waits for ever: {:?}", std::mem::discriminant(&other)),
            }
        }
    }
}

#[test]
fn memory_that_was_revoked_is_not_used_and_every_revocation_ends() {
    const DEFAULT: std::ops::Range<u64> = 0..400;
    let chosen_by_hand = seeds(DEFAULT) != DEFAULT;
    let mut all = Seen::default();
    for seed in each_seed(DEFAULT) {
        let mut world = World::new(seed);
        (0..STEPS).for_each(|_| world.step());
        world.end();
        let seen = world.seen;
        let Seen { uses, waited, taken_back, killed_inside, .. } = seen;
        all.uses += uses;
        all.waited += waited;
        all.taken_back += taken_back;
        all.killed_inside += killed_inside;
        all.expelled_inside += seen.expelled_inside;
        all.expelled += seen.expelled;
        all.refused_entry += seen.refused_entry;
        all.lost += seen.lost;
        all.nonsense += seen.nonsense;
    }
    let trouble = [
        all.uses,
        all.waited,
        all.taken_back,
        all.killed_inside,
        all.expelled_inside,
        all.expelled,
        all.refused_entry,
        all.lost,
        all.nonsense,
    ];
    assert!(
        chosen_by_hand || trouble.into_iter().all(|count| count >= 20),
        "too little has happened: {all:?}"
    );
}
