//! Nodes, which lend memory to the leader. In some simulations they have a disk each, die, and come back
//! with what their disks have kept.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::time::Duration;

use store_core::message::*;
use store_core::{ErrorCode, Frame, Incarnation, Key, NodeId, TenantTag};
use te_core::Instant;

use crate::clients::CALL_TIMEOUT;
use crate::report::{Lies, Violation};
use crate::world::{CLIENTS, Event, World};

#[path = "../tier/node.rs"]
mod disk;
pub(crate) use disk::LEN;
use disk::{EXTENT, Image, Write};

/// Nodes of a simulation with disks.
const NODES: u64 = 3;
/// Objects that the memory of a node with a disk has room for.
const ROOM: u64 = 8;
/// Bytes of the memory of a node without a disk.
const SEGMENT_BYTES: u64 = 24 << 10;

/// A request that has no answer yet.
#[derive(Debug)]
enum Call {
    Mount,
    Beat,
    MountDisk,
    Announce(Vec<u64>),
    Ready,
    Fetch,
    /// Reports, as many as were sent.
    Ends(usize),
    Reclaim(u64),
    Tasks,
    EndTasks(usize),
}

/// A node. Its memory is not lost when masters change.
pub(crate) struct Node {
    /// The node, and what is on its disk.
    on: disk::Node,
    has_disk: bool,
    /// The member that it talks to.
    member: usize,
    connection: u64,
    asked: Option<(u64, Call, Instant)>,
    /// When it has last sent a heartbeat.
    beat: Instant,
    /// The lineage for which it has mounted its memory.
    mounted: Option<u64>,
    mounting: bool,
    /// Extents whose headers are destroyed. They can be read until the leader knows that they are given up.
    reclaiming: BTreeSet<u64>,
    ends: VecDeque<(u64, End)>,
    /// Removals that are durable, of which the leader was told.
    confirmed: BTreeSet<u64>,
    /// Generations that are on the disk, but for the leader are not.
    unknown: BTreeSet<u64>,
    task_ends: VecDeque<TaskEnd>,
    /// Tasks that have ended.
    tasks_done: HashMap<u64, TaskEnd>,
}

/// A report about the disk, with the generation or the number that it is about.
#[derive(Clone, Copy, Debug)]
enum End {
    Demoted(Result<u64, ErrorCode>),
    Forgotten,
    Cleared,
    /// What was at this locator cannot be read.
    Dropped,
}

impl End {
    const fn encoded(self, of: u64) -> DiskEnd<'static> {
        match self {
            Self::Demoted(result) => DiskEnd::Demoted { generation: of, result },
            Self::Forgotten => DiskEnd::Forgotten { generation: of },
            Self::Cleared => DiskEnd::Cleared { ticket: of },
            Self::Dropped => DiskEnd::Dropped { from: of, to: of + 1 },
        }
    }
}

impl Node {
    fn new(no: u64, has_disk: bool) -> Self {
        let mut on = disk::Node::new(no);
        on.alive = true;
        Self {
            on,
            has_disk,
            member: 0,
            connection: 0,
            asked: None,
            beat: Instant::ZERO,
            mounted: None,
            mounting: false,
            reclaiming: BTreeSet::new(),
            ends: VecDeque::new(),
            confirmed: BTreeSet::new(),
            unknown: BTreeSet::new(),
            task_ends: VecDeque::new(),
            tasks_done: HashMap::new(),
        }
    }

    /// One node, or several with disks.
    pub(crate) fn all(have_disks: bool) -> Vec<Self> {
        (1..=if have_disks { NODES } else { 1 }).map(|no| Self::new(no, have_disks)).collect()
    }

    const fn id(&self) -> (NodeId, Incarnation, u64) {
        (NodeId::new(self.on.no), Incarnation::new(self.on.incarnation), self.on.no)
    }

    const fn proof(&self) -> DiskProof {
        let (node, _, key) = self.id();
        DiskProof { node: NodeProof { node, key }, disk: self.on.disk }
    }

    /// Its disk is to be mounted again, under this process.
    fn reopen(&mut self) {
        (self.on.mounted, self.on.ready) = (false, false);
        self.on.writing.clear();
        self.on.announce.clear();
        self.ends.clear();
        self.confirmed.clear();
        self.task_ends.clear();
        self.tasks_done.clear();
    }

    fn crash(&mut self, keeps: impl FnMut() -> bool) {
        self.reopen();
        for sequence in std::mem::take(&mut self.reclaiming) {
            self.on.drop_extent(sequence);
        }
        self.on.crash(keeps);
        (self.asked, self.mounted, self.mounting) = (None, None, false);
    }
}

fn encode<'a, O: Operation>(
    number: u64,
    head: &O::Request<'_>,
    items: impl ExactSizeIterator<Item = O::RequestItem<'a>>,
) -> Vec<u8> {
    let mut bytes = Vec::new();
    O::encode_request(&mut bytes, number, head, items).unwrap();
    bytes
}

impl World {
    /// A node does what it does next.
    pub(crate) fn node_steps(&mut self, index: usize) {
        let busy = self.nodes[index].has_disk;
        let pause = if busy { self.us(5_000, 60_000) } else { Duration::from_millis(200) };
        self.after(pause, Event::Node(index));
        let now = self.now;
        let node = &mut self.nodes[index];
        if !node.on.alive || node.asked.as_ref().is_some_and(|(.., at)| now < *at + CALL_TIMEOUT) {
            return;
        }
        if node.asked.take().is_some() {
            self.node_moves_on(index);
        }
        if self.nodes[index].on.ready {
            self.node_works(index);
        }
        let number = self.number();
        let Some((call, bytes)) = self.next_call(index, number) else { return };
        let node = &mut self.nodes[index];
        node.asked = Some((number, call, now));
        let (member, connection) = (node.member, node.connection);
        if self.is_quiet() || self.rng.below(40) > 0 {
            self.call(CLIENTS + index, member, connection, bytes);
        }
    }

    /// The node asks another member, over a new connection.
    fn node_moves_on(&mut self, index: usize) {
        let connection = self.number();
        let node = &mut self.nodes[index];
        let (member, old) = (node.member, node.connection);
        (node.member, node.connection) = ((member + 1) % crate::world::MEMBERS, connection);
        self.hang_up(member, CLIENTS + index, old);
    }

    fn next_call(&mut self, index: usize, number: u64) -> Option<(Call, Vec<u8>)> {
        let now = self.now;
        let member = self.nodes[index].member;
        let Some(lineage) = self.nodes[index].mounted.filter(|_| !self.nodes[index].mounting) else {
            let Some(epoch) = self.epoch_of(member) else {
                self.node_moves_on(index);
                return None;
            };
            return Some((Call::Mount, self.mount(index, number, epoch)));
        };
        let node = &mut self.nodes[index];
        let (id, incarnation, key) = node.id();
        if now >= node.beat + Duration::from_millis(200) {
            node.beat = now;
            let beat = Heartbeat { node: id, incarnation, key };
            return Some((Call::Beat, encode::<Beat>(number, &beat, std::iter::empty())));
        }
        if !node.has_disk {
            return None;
        }
        if !node.on.mounted {
            let mount = MountDisk {
                node: id,
                incarnation,
                key,
                lineage,
                uuid: node.on.uuid,
                bytes: 1 << 30,
                extent_bytes: EXTENT,
                endpoint: "n:1",
                stage: "n:2",
                ..MountDisk::default()
            };
            return Some((Call::MountDisk, encode::<MountDisks>(number, &(), [mount].into_iter())));
        }
        let proof = node.proof();
        if !node.on.ready {
            return Some(node.announcement(number));
        }
        match self.rng.below(10) {
            _ if !node.ends.is_empty() => {
                let some = node.ends.len().min(5);
                let ends: Vec<_> = node.ends.iter().take(some).map(|(of, end)| end.encoded(*of)).collect();
                Some((Call::Ends(some), encode::<EndDiskOrders>(number, &proof, ends.into_iter())))
            }
            0 if !node.reclaiming.is_empty() => {
                let sequence = *node.reclaiming.first()?;
                let call = encode::<ReclaimExtents>(number, &proof, [sequence].into_iter());
                Some((Call::Reclaim(sequence), call))
            }
            1 | 2 if !node.task_ends.is_empty() => {
                let ends: Vec<TaskEnd> = node.task_ends.iter().copied().collect();
                let call = Call::EndTasks(ends.len());
                Some((call, encode::<EndTasks>(number, &proof.node, ends.into_iter())))
            }
            1 | 2 => {
                let fetch = FetchRequest { node: id, incarnation, count_max: 9, key };
                Some((Call::Tasks, encode::<FetchTasks>(number, &fetch, std::iter::empty())))
            }
            3..7 => {
                let fetch = FetchRequest { node: id, incarnation, count_max: 6, key };
                let fetch = FetchDisk { fetch, disk: node.on.disk, bytes_max: 1 << 20 };
                Some((Call::Fetch, encode::<FetchDiskOrders>(number, &fetch, std::iter::empty())))
            }
            _ => None,
        }
    }

    fn mount(&mut self, index: usize, number: u64, epoch: u64) -> Vec<u8> {
        let node = &mut self.nodes[index];
        if !node.mounting {
            node.mounting = true;
            node.on.incarnation += 1;
        }
        let (id, incarnation, key) = node.id();
        let (name, endpoint) = (format!("n{key}"), format!("n{key}:9000"));
        let segment = MountSegment {
            node: id,
            incarnation,
            name: &name,
            endpoint: &endpoint,
            len: if node.has_disk { ROOM * LEN } else { SEGMENT_BYTES },
            lineage: epoch,
            key,
            ..MountSegment::default()
        };
        encode::<Mount>(number, &segment, std::iter::empty())
    }

    /// What happens at a node without a request: writes and syncs end, and removals are durable.
    fn node_works(&mut self, index: usize) {
        let writes: Vec<Write> = self.nodes[index].on.writing.values().cloned().collect();
        for write in writes {
            if self.rng.below(3) == 0 {
                continue;
            }
            let node = &mut self.nodes[index];
            node.on.writing.remove(&write.generation);
            let content = self.memory.get(&(node.on.segment, write.addr)).copied().unwrap_or(0);
            let result = match self.rng.below(12) {
                0 => Err(ErrorCode::UnavailableInCurrentStatus),
                1 => {
                    // It failed, and is on the disk nevertheless.
                    node.on.write(&write, content);
                    Err(ErrorCode::TransferFail)
                }
                _ => Ok(node.on.write(&write, content)),
            };
            self.report.demoted += u64::from(result.is_ok());
            node.ends.push_back((write.generation, End::Demoted(result)));
        }
        let (syncs, breaks, gives_up) = (self.rng.below(8), self.rng.below(400), self.rng.below(150));
        let quiet = self.is_quiet();
        let node = &mut self.nodes[index];
        if syncs == 0 {
            node.on.sync();
            let durable = node.on.removals.keys().filter(|generation| !node.confirmed.contains(generation));
            let durable: Vec<u64> = durable.copied().collect();
            for generation in durable {
                node.confirmed.insert(generation);
                node.ends.push_back((generation, End::Forgotten));
            }
        }
        let oldest = node.on.oldest_extent();
        if gives_up == 0
            && let Some(sequence) = oldest
        {
            node.reclaiming.insert(sequence);
            if self.lies == Lies::REUSED {
                for image in node.on.images.range_mut(sequence * EXTENT..(sequence + 1) * EXTENT) {
                    image.1.content += 1;
                }
            }
        }
        let many = node.on.images.len();
        if breaks == 0 && many > 0 && !quiet {
            let pick = self.rng.index(many);
            let (locator, image) = node.on.images.iter_mut().nth(pick).unwrap();
            image.broken = true;
            node.ends.push_back((*locator, End::Dropped));
        }
    }

    pub(crate) fn node_crashes(&mut self, index: usize) {
        let mut rng = self.rng.fork();
        let node = &mut self.nodes[index];
        if !node.on.alive {
            return;
        }
        let segment = node.on.segment;
        node.crash(|| rng.below(2) == 0);
        self.leases.retain(|(of, ..)| *of != segment);
        self.report.node_crashes += 1;
        // Mostly it is back soon; now and then its disk is forgotten meanwhile.
        let back =
            if self.rng.below(6) == 0 { self.us(9_000_000, 14_000_000) } else { self.us(1_000, 2_000_000) };
        self.after(back, Event::NodeBack(index));
    }

    pub(crate) fn node_is_back(&mut self, index: usize) {
        self.nodes[index].on.alive = true;
        self.node_moves_on(index);
    }

    pub(crate) fn node_answered(
        &mut self,
        index: usize,
        connection: u64,
        bytes: Option<Vec<u8>>,
    ) -> Result<(), Violation> {
        if connection != self.nodes[index].connection {
            return Ok(());
        }
        let Some(bytes) = bytes else {
            self.nodes[index].asked = None;
            self.node_moves_on(index);
            return Ok(());
        };
        if self.nodes[index].has_disk && !self.is_quiet() && self.rng.below(40) == 0 {
            // The answer is lost.
            return Ok(());
        }
        let (frame, _) = Frame::parse(&bytes).unwrap().unwrap();
        let asked = self.nodes[index].asked.take_if(|(number, ..)| *number == frame.header.request_id);
        let Some((_, call, _)) = asked else { return Ok(()) };
        match call {
            Call::Mount => self.memory_mounted(index, &frame),
            Call::Beat => {
                let remount = matches!(Beat::decode_response(&frame), Ok((NodeStatus::NeedRemount, _)));
                let node = &mut self.nodes[index];
                if remount && node.mounted == Some(self.lineage) {
                    return Err(Violation::Forgotten(format!("lineage {} at {:?}", self.lineage, self.now)));
                }
                if remount {
                    node.mounted = None;
                    node.reopen();
                }
            }
            other => self.disk_answered(index, other, &frame),
        }
        Ok(())
    }

    fn memory_mounted(&mut self, index: usize, frame: &Frame<'_>) {
        let node = &mut self.nodes[index];
        match Mount::decode_response(frame) {
            Ok((MountResponse::Mounted(mounted), _)) => {
                node.on.segment = mounted.segment;
                (node.mounted, node.mounting) = (Some(self.lineage), false);
                node.reopen();
            }
            Ok((MountResponse::Stale { incarnation_min }, _)) => {
                node.on.incarnation = incarnation_min.get();
            }
            _ => {}
        }
    }

    fn disk_answered(&mut self, index: usize, call: Call, frame: &Frame<'_>) {
        let node = &mut self.nodes[index];
        match call {
            Call::Mount | Call::Beat => {}
            Call::MountDisk => {
                let mounted = MountDisks::decode_response(frame).ok().and_then(|(_, mut them)| them.next());
                let Some(Ok(mounted)) = mounted else { return };
                (node.on.disk, node.on.mounted) = (mounted.disk, true);
                node.on.open();
                let given_up = &node.reclaiming;
                node.on.announce.retain(|locator| !given_up.contains(&(locator / EXTENT)));
                self.disks.insert(mounted.disk, index);
            }
            Call::Announce(locators) => {
                let Ok((_, answers)) = AdoptObjects::decode_response(frame) else { return node.reopen() };
                for (locator, answer) in locators.iter().zip(answers) {
                    self.report.adopted += u64::from(answer == Adoption::Adopted);
                    let Some(image) = node.on.images.get(locator) else { continue };
                    if answer == Adoption::Adopted {
                        node.unknown.remove(&image.generation);
                    } else if answer == Adoption::Forget {
                        node.on.removals.insert(image.generation, false);
                    } else {
                        node.unknown.insert(image.generation);
                    }
                }
                node.on.announce.drain(..locators.len());
            }
            Call::Ready => match DiskReady::decode_response(frame) {
                Ok(_) => node.on.ready = true,
                Err(_) => node.reopen(),
            },
            Call::Fetch => {
                let Ok((_, orders)) = FetchDiskOrders::decode_response(frame) else { return node.reopen() };
                for order in orders {
                    self.report.cleared += u64::from(matches!(order, DiskOrder::Clear { .. }));
                    node.take(order);
                }
            }
            Call::Ends(some) => {
                let Ok((_, answers)) = EndDiskOrders::decode_response(frame) else { return node.reopen() };
                for (end, answer) in node.ends.drain(..some).zip(answers) {
                    match end {
                        (_, End::Forgotten) => self.report.forgotten += u64::from(answer.is_ok()),
                        (generation, End::Demoted(result)) if answer.is_err() || result.is_err() => {
                            node.unknown.insert(generation);
                        }
                        _ => {}
                    }
                }
            }
            Call::Reclaim(sequence) => {
                if ReclaimExtents::decode_response(frame).is_ok() {
                    node.on.drop_extent(sequence);
                    node.reclaiming.remove(&sequence);
                    self.report.reclaimed += 1;
                }
            }
            Call::Tasks => self.carry_out_tasks(index, frame),
            Call::EndTasks(some) => {
                if EndTasks::decode_response(frame).is_ok() {
                    node.task_ends.drain(..some);
                }
            }
        }
    }

    /// Objects are copied from disks into memory.
    fn carry_out_tasks(&mut self, index: usize, frame: &Frame<'_>) {
        let Ok((_, orders)) = FetchTasks::decode_response(frame) else { return };
        for order in orders {
            if let Some(done) = self.nodes[index].tasks_done.get(&order.attempt) {
                let done = *done;
                self.nodes[index].task_ends.push_back(done);
                continue;
            }
            let source = order.sources[0];
            let content = match self.disks.get(&source.segment).map(|at| &self.nodes[*at]) {
                Some(node) => {
                    let image = node.on.images.get(&source.addr).filter(|image| !image.broken);
                    image.filter(|_| node.on.alive).map(|image| image.content)
                }
                None => self.memory.get(&(source.segment, source.addr)).copied(),
            };
            // A copy is compared with its checksum.
            let result = if content == Some(order.generation) && self.rng.below(6) > 0 {
                self.memory.insert((order.segment, order.addr), order.generation);
                self.report.promoted += 1;
                Ok(order.checksum)
            } else {
                Err(ErrorCode::TransferFail)
            };
            let end = TaskEnd { id: order.id, attempt: order.attempt, result, quiet: true };
            let node = &mut self.nodes[index];
            node.tasks_done.insert(order.attempt, end);
            node.task_ends.push_back(end);
        }
    }

    /// Whether a client can read an object where it is said to be. `None`: it is not there any more, or
    /// cannot be reached.
    pub(crate) fn read(&mut self, key: &[u8], object: &Object) -> Result<Option<()>, Violation> {
        let (replica, generation) = (object.replicas[0], object.generation);
        let text = |what: &dyn std::fmt::Debug| {
            format!("{} of generation {generation} is {what:?}", String::from_utf8_lossy(key))
        };
        if let Some(at) = self.disks.get(&replica.segment) {
            let node = &self.nodes[*at].on;
            let here = node.alive && node.mounted && node.disk == replica.segment;
            let image = node.images.get(&replica.addr).filter(|image| here && !image.broken);
            return match image {
                None => Ok(None),
                Some(image)
                    if (image.key.as_bytes(), image.generation, image.content)
                        == (key, generation, generation) =>
                {
                    self.report.disk_hits += 1;
                    Ok(Some(()))
                }
                Some(image) => Err(Violation::OtherBytes(text(image))),
            };
        }
        let holds = |node: &&Node| node.on.alive && node.on.segment == replica.segment;
        if self.nodes.iter().find(holds).is_none() {
            return Ok(None);
        }
        match self.memory.get(&(replica.segment, replica.addr)) {
            Some(content) if *content == generation => Ok(Some(())),
            content => Err(Violation::OtherBytes(text(&content))),
        }
    }

    /// Intact images, by key and generation, that the leader must know at the end.
    pub(crate) fn on_disks(&self) -> Vec<(String, u64)> {
        let settled = |node: &&Node| {
            node.has_disk && node.on.ready && node.ends.is_empty() && node.on.writing.is_empty()
        };
        let mut all = Vec::new();
        for node in self.nodes.iter().filter(settled) {
            let known = node.on.images.iter().filter(|(locator, image)| {
                let generation = image.generation;
                let gone = node.on.removals.contains_key(&generation) || node.unknown.contains(&generation);
                let intact = !image.broken && image.content == generation;
                intact && !gone && !node.reclaiming.contains(&(*locator / EXTENT))
            });
            all.extend(known.map(|(_, image)| (image.key.clone(), image.generation)));
        }
        all
    }

    /// What a broken leader does when it takes over: it believes that all removals are confirmed.
    pub(crate) fn forget_tombstones(&mut self, member: usize) {
        for index in 0..self.nodes.len() {
            let node = &self.nodes[index];
            let generations: BTreeSet<u64> = node.on.images.values().map(|image| image.generation).collect();
            let proof = node.proof();
            let ends: Vec<_> =
                generations.iter().map(|generation| DiskEnd::Forgotten { generation: *generation }).collect();
            let number = self.number();
            let bytes = encode::<EndDiskOrders>(number, &proof, ends.into_iter());
            let (frame, _) = Frame::parse(&bytes).unwrap().unwrap();
            let mut session = store_core::Session::default();
            self.with(member, |member, now| {
                let _ = member.handle(now, &mut session, &frame, &mut Vec::new());
            });
        }
    }
}

impl Node {
    /// Announces some objects; or that all of them were announced.
    fn announcement(&self, number: u64) -> (Call, Vec<u8>) {
        let proof = self.proof();
        if self.on.announce.is_empty() {
            return (Call::Ready, encode::<DiskReady>(number, &proof, std::iter::empty()));
        }
        let some = self.on.announce.len().min(7);
        let locators = self.on.announce[..some].to_vec();
        let images: Vec<Image> = locators.iter().map(|at| self.on.images[at].clone()).collect();
        let found: Vec<_> = locators
            .iter()
            .zip(&images)
            .map(|(locator, image)| FoundObject {
                tenant: TenantTag::of("default"),
                key: Key(image.key.as_bytes()),
                generation: image.generation,
                len: LEN,
                crc32c: image.generation as u32,
                locator: *locator,
            })
            .collect();
        let bytes = encode::<AdoptObjects>(number, &proof, found.into_iter());
        (Call::Announce(locators), bytes)
    }

    fn take(&mut self, order: DiskOrder<'_>) {
        let text = |key: Key<'_>| String::from_utf8(key.0.into()).unwrap();
        match order {
            DiskOrder::Demote { key, generation, addr, .. } => {
                let reported = |(of, end): &(u64, End)| *of == generation && matches!(end, End::Demoted(_));
                if !self.ends.iter().any(reported) {
                    let write = Write { key: text(key), generation, addr };
                    self.on.writing.entry(generation).or_insert(write);
                }
            }
            DiskOrder::Forget { generation, .. } => {
                self.on.removals.entry(generation).or_insert(false);
                self.confirmed.remove(&generation);
            }
            DiskOrder::Clear { ticket } => {
                self.on.images.clear();
                self.on.removals.clear();
                self.on.writing.clear();
                self.reclaiming.clear();
                self.ends.clear();
                self.ends.push_back((ticket, End::Cleared));
            }
        }
    }
}
