//! The world: clocks, nodes, the client, the judge.

use std::collections::BTreeMap;

use store_core::command_log::{Command, Recorder, Standby};
use store_core::message::*;
use store_core::{
    ErrorCode, Frame, Incarnation, Instant, Key, Master, MasterConfig, NodeId, SegmentNo, Session, TenantTag,
    bound, snapshot,
};
use te_core::testkit::Rng;

use crate::node::{EXTENT, Image, LEN, Node, Write};

const NODES: u64 = 3;
const KEYS: u64 = 60;
/// Objects that fit into the memory of a node.
const ROOM: u64 = 8;

/// A rule that is broken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lie {
    None,
    ConfirmsAtOnce,
    ReusesAtOnce,
    DoesNotClear,
    WritesLate,
    Untouched,
}

/// What a run has seen.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Report {
    pub(crate) hits: u64,
    pub(crate) disk_hits: u64,
    pub(crate) removes: u64,
    pub(crate) crashes: u64,
    pub(crate) adopted: u64,
    pub(crate) reclaimed: u64,
    pub(crate) cleared: u64,
    pub(crate) snapshots: u64,
    pub(crate) promoted: u64,
}

impl Report {
    pub(crate) fn add(&mut self, other: &Self) {
        self.hits += other.hits;
        self.disk_hits += other.disk_hits;
        self.removes += other.removes;
        self.crashes += other.crashes;
        self.adopted += other.adopted;
        self.reclaimed += other.reclaimed;
        self.cleared += other.cleared;
        self.snapshots += other.snapshots;
        self.promoted += other.promoted;
    }
}

pub(crate) struct World {
    rng: Rng,
    lie: Lie,
    master: Master,
    recorder: Recorder,
    standby: Option<Standby>,
    session: Session,
    now: u64,
    nodes: Vec<Node>,
    /// The generation that was put last under each key, and not removed since.
    latest: BTreeMap<String, u64>,
    /// What is in memory: the generation that was written last at each place.
    memory: BTreeMap<(SegmentNo, u64), u64>,
    report: Report,
}

impl World {
    pub(crate) fn new(seed: u64, lie: Lie) -> Self {
        let config = MasterConfig {
            lease_ttl_ms: 20,
            lease_guard_ms: 0,
            node_ttl_ms: 500,
            disk_away_ms: 2_000,
            demote_ahead: 0.3,
            put_start_discard_timeout_ms: 1_000,
            put_start_release_timeout_ms: 2_000,
            hash_seed: seed,
            ..MasterConfig::default()
        };
        let mut master = Master::new(config.clone()).unwrap();
        let recorder = Recorder::new(&mut master);
        Self {
            rng: Rng::new(seed),
            lie,
            master,
            recorder,
            standby: Some(Standby::new(config).unwrap()),
            session: Session::owner(),
            now: 1,
            nodes: (1..=NODES).map(Node::new).collect(),
            latest: BTreeMap::new(),
            memory: BTreeMap::new(),
            report: Report::default(),
        }
    }

    pub(crate) fn run(mut self, steps: u32) -> Result<Report, String> {
        for _ in 0..steps {
            self.now += self.rng.range(1..15);
            let node = self.rng.range(0..NODES) as usize;
            match self.rng.range(0..100) {
                0..35 => self.put(),
                35..55 => self.get()?,
                55..60 => self.remove(),
                60..85 => self.work(node),
                85..88 => self.nodes[node].sync(),
                88..91 => self.give_up_an_extent(node),
                91 => self.break_an_image(node),
                92 => self.crash(node),
                93 => self.now += self.rng.range(0..400),
                94 if self.rng.range(0..10) == 0 => self.stay_away(node),
                _ => self.heartbeats(),
            }
            let now = Instant::from_millis(self.now);
            if self.master.poll_timeout().is_some_and(|at| at <= now) {
                self.recorder.handle_timeout(&mut self.master, now);
            }
            self.follow()?;
        }
        let stats = self.master.stats();
        self.report.reclaimed = stats.disk_reclaimed_total;
        self.report.promoted = stats.promotions_total;
        Ok(self.report)
    }

    fn call<'a, O: Operation>(
        &mut self,
        out: &'a mut Vec<u8>,
        head: &O::Request<'_>,
        items: Vec<O::RequestItem<'_>>,
    ) -> Result<(O::Response<'a>, Vec<O::ResponseItem<'a>>), ErrorCode> {
        let mut request = Vec::new();
        O::encode_request(&mut request, 1, head, items.into_iter()).unwrap();
        let frame = Frame::parse(&request).unwrap().unwrap().0;
        let now = Instant::from_millis(self.now);
        self.recorder.handle(&mut self.master, now, &mut self.session, &frame, out);
        let frame = Frame::parse(out).unwrap().unwrap().0;
        O::decode_response(&frame).map(|(head, items)| (head, items.collect()))
    }

    fn key(&mut self) -> String {
        format!("key-{}", self.rng.range(0..KEYS))
    }

    fn put(&mut self) {
        let key = self.key();
        let existing = if self.rng.range(0..4) == 0 { Existing::REPLACE } else { Existing::Keep };
        let options = PutOptions { existing, ..PutOptions::DEFAULT };
        let put = PutRequest { writer: 1, nonce: 0, options };
        let new = NewObject { key: Key(key.as_bytes()), len: LEN };
        let mut out = Vec::new();
        let Ok((_, answers)) = self.call::<PutStart>(&mut out, &put, vec![new]) else { return };
        let Ok(allocation) = answers[0] else { return };
        let Allocation { generation, handle, .. } = allocation;
        for replica in &*allocation.replicas {
            self.memory.insert((replica.segment, replica.addr), generation);
        }
        let checksum = bound(generation as u32, key.as_bytes(), generation);
        let commit = Commit { key: Key(key.as_bytes()), generation, handle, checksum };
        let mut out = Vec::new();
        if let Ok((_, answers)) = self.call::<PutEnd>(&mut out, &(), vec![commit])
            && answers[0].is_ok()
        {
            self.latest.insert(key, generation);
        }
    }

    fn remove(&mut self) {
        let key = self.key();
        let removal = Removal { key: Key(key.as_bytes()), force: true };
        let mut out = Vec::new();
        let answer = self.call::<Remove>(&mut out, &(), vec![removal]).unwrap().1[0];
        self.report.removes += u64::from(answer.is_ok());
        if answer.is_ok() || answer == Err(ErrorCode::KeyNotFound) {
            // Not there, or not there any more: it must not come back.
            self.latest.remove(&key);
        }
    }

    /// Gets a key and the one after it, as two blocks of a prefix.
    fn get(&mut self) -> Result<(), String> {
        let keys = [self.key(), self.key()];
        let mut out = Vec::new();
        let items = keys.iter().map(|key| Key(key.as_bytes())).collect();
        let (_, answers) = self.call::<Get>(&mut out, &LeaseWanted::Quick, items).unwrap();
        for (key, answer) in keys.iter().zip(answers) {
            if let Ok(object) = answer {
                self.judge(key, &object)?;
            }
        }
        Ok(())
    }

    fn judge(&mut self, key: &str, object: &Object) -> Result<(), String> {
        let generation = object.generation;
        if self.latest.get(key) != Some(&generation) {
            return Err(format!("{key} has generation {generation}, and not {:?}", self.latest.get(key)));
        }
        let replica = object.replicas[0];
        let node = self.nodes.iter().find(|node| node.mounted && node.disk == replica.segment);
        let Some(node) = node else {
            self.report.hits += 1;
            return Ok(());
        };
        match node.images.get(&replica.addr) {
            None => {}
            Some(Image { broken: true, .. }) => {}
            Some(image)
                if (&*image.key, image.generation, image.content) == (key, generation, generation) =>
            {
                self.report.disk_hits += 1;
            }
            Some(image) => return Err(format!("{key} of generation {generation} is {image:?} on its disk")),
        }
        Ok(())
    }

    fn heartbeats(&mut self) {
        for at in 0..self.nodes.len() {
            let Node { no, incarnation, alive, .. } = self.nodes[at];
            if !alive {
                if self.rng.range(0..4) == 0 {
                    self.start(at);
                }
                continue;
            }
            let (node, incarnation) = (NodeId::new(no), Incarnation::new(incarnation));
            let mut out = Vec::new();
            let status = self.call::<Beat>(&mut out, &Heartbeat { node, incarnation, key: no }, vec![]);
            if status.is_ok_and(|(status, _)| status == NodeStatus::NeedRemount) {
                self.crash(at);
            }
        }
    }

    fn start(&mut self, at: usize) {
        let node = &mut self.nodes[at];
        node.incarnation += 1;
        let name = format!("n{}", node.no);
        let mount = MountSegment {
            node: NodeId::new(node.no),
            incarnation: Incarnation::new(node.incarnation),
            name: &name,
            endpoint: "n:1",
            len: ROOM * LEN,
            key: node.no,
            ..MountSegment::default()
        };
        let mut out = Vec::new();
        let Ok((MountResponse::Mounted(mounted), _)) = self.call::<Mount>(&mut out, &mount, vec![]) else {
            return;
        };
        let segment = mounted.segment;
        let node = &mut self.nodes[at];
        (node.alive, node.segment) = (true, segment);
    }

    fn proof(&self, at: usize) -> DiskProof {
        let Node { no, disk, .. } = self.nodes[at];
        DiskProof { node: NodeProof { node: NodeId::new(no), key: no }, disk }
    }

    fn work(&mut self, at: usize) {
        if !self.nodes[at].alive {
            return;
        }
        if !self.nodes[at].mounted {
            return self.mount_disk(at);
        }
        if !self.nodes[at].ready {
            return self.announce(at);
        }
        // A request that is lost on its way.
        if self.rng.range(0..10) == 0 {
            return;
        }
        self.fetch(at);
        self.finish_writes(at);
        self.confirm_removals(at);
        self.carry_out_tasks(at);
    }

    fn mount_disk(&mut self, at: usize) {
        let node = &self.nodes[at];
        let mount = MountDisk {
            shared: "",
            node: NodeId::new(node.no),
            incarnation: Incarnation::new(node.incarnation),
            key: node.no,
            uuid: node.uuid,
            bytes: 1 << 30,
            extent_bytes: EXTENT,
            endpoint: "n:1",
            stage: "n:2",
            ..MountDisk::default()
        };
        let mut out = Vec::new();
        let answer = self.call::<MountDisks>(&mut out, &(), vec![mount]).unwrap().1[0];
        let Ok(mounted) = answer else { return };
        let node = &mut self.nodes[at];
        (node.disk, node.mounted) = (mounted.disk, true);
        node.open();
    }

    fn announce(&mut self, at: usize) {
        let proof = self.proof(at);
        let count = self.nodes[at].announce.len().min(7);
        let locators: Vec<u64> = self.nodes[at].announce[..count].to_vec();
        let images: Vec<_> = locators.iter().map(|at_| self.nodes[at].images[at_].clone()).collect();
        let tenant = TenantTag::of("default");
        let found = locators.iter().zip(&images).map(|(locator, image)| FoundObject {
            tenant,
            key: Key(image.key.as_bytes()),
            generation: image.generation,
            len: LEN,
            crc32c: image.generation as u32,
            locator: *locator,
        });
        let mut out = Vec::new();
        let Ok((_, answers)) = self.call::<AdoptObjects>(&mut out, &proof, found.collect()) else { return };
        if self.rng.range(0..5) == 0 {
            // The answer is lost: they are announced again.
            return;
        }
        let node = &mut self.nodes[at];
        for (image, answer) in images.iter().zip(answers) {
            self.report.adopted += u64::from(answer == Adoption::Adopted);
            if answer == Adoption::Forget {
                node.removals.insert(image.generation, false);
            }
        }
        node.announce.drain(..count);
        if node.announce.is_empty() && self.call::<DiskReady>(&mut Vec::new(), &proof, vec![]).is_ok() {
            self.nodes[at].ready = true;
        }
    }

    fn fetch(&mut self, at: usize) {
        let Node { no, incarnation, disk, .. } = self.nodes[at];
        let (node, incarnation) = (NodeId::new(no), Incarnation::new(incarnation));
        let fetch = FetchRequest { node, incarnation, count_max: 6, key: no };
        let fetch = FetchDisk { fetch, disk, bytes_max: 1 << 20 };
        let mut out = Vec::new();
        let Ok((_, orders)) = self.call::<FetchDiskOrders>(&mut out, &fetch, vec![]) else { return };
        let text = |key: Key<'_>| String::from_utf8(key.0.into()).unwrap();
        let node = &mut self.nodes[at];
        let mut clear = None;
        for order in orders {
            match order {
                DiskOrder::Demote { key, generation, addr, .. } => {
                    let write = Write { key: text(key), generation, addr };
                    node.writing.entry(generation).or_insert(write);
                }
                DiskOrder::Forget { generation, .. } => {
                    node.removals.entry(generation).or_insert(false);
                }
                DiskOrder::Clear { ticket } => clear = Some(ticket),
            }
        }
        if let Some(ticket) = clear {
            self.report.cleared += 1;
            if self.lie != Lie::DoesNotClear {
                let node = &mut self.nodes[at];
                node.images.clear();
                node.removals.clear();
                node.writing.clear();
            }
            self.end(at, DiskEnd::Cleared { ticket });
        }
    }

    fn end(&mut self, at: usize, end: DiskEnd<'_>) {
        let proof = self.proof(at);
        let _ = self.call::<EndDiskOrders>(&mut Vec::new(), &proof, vec![end]);
    }

    fn finish_writes(&mut self, at: usize) {
        let writes: Vec<Write> = self.nodes[at].writing.values().cloned().collect();
        for write in writes {
            if self.rng.range(0..3) == 0 {
                continue;
            }
            let generation = write.generation;
            self.nodes[at].writing.remove(&generation);
            let place = (self.nodes[at].segment, write.addr);
            let mut content = self.memory.get(&place).copied().unwrap_or(0);
            if self.lie == Lie::WritesLate && self.rng.range(0..4) == 0 {
                content += 1;
            }
            let result = match self.rng.range(0..12) {
                0 => Err(ErrorCode::UnavailableInCurrentStatus),
                1 => {
                    // It failed, and is on the disk nevertheless.
                    self.nodes[at].write(&write, content);
                    Err(ErrorCode::TransferFail)
                }
                _ => Ok(self.nodes[at].write(&write, content)),
            };
            // The report may be lost with the node.
            if self.rng.range(0..15) > 0 {
                self.end(at, DiskEnd::Demoted { generation, result });
            } else {
                return self.crash(at);
            }
        }
    }

    fn confirm_removals(&mut self, at: usize) {
        let lies = self.lie == Lie::ConfirmsAtOnce;
        let removals = self.nodes[at].removals.iter();
        let durable = removals.filter(|(_, synced)| **synced || lies);
        let durable: Vec<u64> = durable.map(|(generation, _)| *generation).collect();
        for generation in durable {
            self.end(at, DiskEnd::Forgotten { generation });
        }
    }

    fn carry_out_tasks(&mut self, at: usize) {
        let Node { no, incarnation, .. } = self.nodes[at];
        let (node, incarnation) = (NodeId::new(no), Incarnation::new(incarnation));
        let fetch = FetchRequest { node, incarnation, count_max: 9, key: no };
        let mut out = Vec::new();
        let Ok((_, orders)) = self.call::<FetchTasks>(&mut out, &fetch, vec![]) else { return };
        let mut ends = Vec::new();
        for order in orders {
            let fails = self.rng.range(0..6) == 0;
            if !fails {
                self.memory.insert((order.segment, order.addr), order.generation);
            }
            let result = if fails { Err(ErrorCode::TransferFail) } else { Ok(order.checksum) };
            ends.push(TaskEnd { id: order.id, attempt: order.attempt, result, quiet: true });
        }
        let proof = NodeProof { node, key: no };
        let _ = self.call::<EndTasks>(&mut Vec::new(), &proof, ends);
    }

    fn give_up_an_extent(&mut self, at: usize) {
        if !self.nodes[at].ready {
            return;
        }
        let Some(sequence) = self.nodes[at].oldest_extent() else { return };
        let proof = self.proof(at);
        let told = self.lie != Lie::ReusesAtOnce;
        if told && self.call::<ReclaimExtents>(&mut Vec::new(), &proof, vec![sequence]).is_err() {
            return;
        }
        if told {
            return self.nodes[at].drop_extent(sequence);
        }
        // Other objects are written there.
        for image in self.nodes[at].images.range_mut(sequence * EXTENT..(sequence + 1) * EXTENT) {
            image.1.content += 1;
        }
    }

    fn break_an_image(&mut self, at: usize) {
        if !self.nodes[at].ready {
            return;
        }
        let many = self.nodes[at].images.len() as u64;
        if many == 0 {
            return;
        }
        let pick = self.rng.range(0..many) as usize;
        let Some((locator, image)) = self.nodes[at].images.iter_mut().nth(pick) else { return };
        image.broken = true;
        let from = *locator;
        self.end(at, DiskEnd::Dropped { from, to: from + 1 });
    }

    fn crash(&mut self, at: usize) {
        let mut rng = self.rng.fork();
        self.report.crashes += 1;
        self.nodes[at].crash(|| rng.range(0..2) == 0);
    }

    /// A node that is away for longer than its disk is remembered.
    fn stay_away(&mut self, at: usize) {
        self.crash(at);
        for _ in 0..30 {
            self.now += 100;
            let now = Instant::from_millis(self.now);
            self.recorder.handle_timeout(&mut self.master, now);
            let alive: Vec<u64> = self.nodes.iter().filter(|node| node.alive).map(|node| node.no).collect();
            for no in alive {
                let incarnation = Incarnation::new(self.nodes[no as usize - 1].incarnation);
                let beat = Heartbeat { node: NodeId::new(no), incarnation, key: no };
                let _ = self.call::<Beat>(&mut Vec::new(), &beat, vec![]);
            }
        }
    }

    /// The standby repeats what the master did, and must be as the master is.
    fn follow(&mut self) -> Result<(), String> {
        let log = self.recorder.take();
        let mut standby = self.standby.take().unwrap();
        let mut kept = Vec::new();
        let mut rest = &log[..];
        while let Some((command, left)) = Command::decode(rest).unwrap() {
            if !(self.lie == Lie::Untouched && matches!(command, Command::Touched { .. })) {
                command.encode(&mut kept);
            }
            rest = left;
        }
        standby.apply(&kept).map_err(|error| format!("the standby cannot follow: {error}"))?;
        if self.rng.range(0..40) == 0 {
            if standby.master().digest() != self.master.digest() {
                return Err("the standby is not as the master".into());
            }
            let mut bytes = Vec::new();
            let mut sink = |chunk: &[u8]| -> Result<(), ()> {
                bytes.extend_from_slice(chunk);
                Ok(())
            };
            standby.snapshot(1, crc32c::crc32c, &mut sink).unwrap();
            let mut rest = &bytes[..];
            let read = &mut |to: &mut [u8]| std::io::Read::read(&mut rest, to);
            standby = snapshot::restore(crc32c::crc32c, read).map_err(|error| error.to_string())?.0;
            if standby.master().digest() != self.master.digest() {
                return Err("the snapshot is not as the master".into());
            }
            self.report.snapshots += 1;
        }
        self.standby = Some(standby);
        Ok(())
    }
}
