//! A simulated node: its memory, its export, its heartbeats, and its work for the master (see `mover`).

use store_core::message::{
    Beat, EndExpulsions, Expulsion, ExpulsionEnd, FetchExpulsions, FetchRequest, Heartbeat, Mount,
    MountResponse, MountSegment, NodeProof, NodeStatus, Operation,
};
use store_core::{Frame, Incarnation, Kind, NodeId, SegmentNo};
use te_core::sim::SimTransport;
use te_core::{Access, ExpelMode, Instant, Memory as _, RegionId, Transport as _};

use crate::clock::{Clock, Wall};
use crate::common::{Core, Event, Party};
use crate::memory::Memory;
use crate::mover::{Hands, Mounted, Mover};
use crate::scenario::{CLIENTS, Lies};
use crate::shadow::Violation;

/// The id of requests about expulsions: their responses are not waited for.
const EXPULSIONS: u64 = u64::MAX;
/// Mounts in a row that the master refuses. The clock of this node, or of the one that had its name before,
/// may be behind by hours; it is mounted at once, or when its previous incarnation has been silent for long
/// enough.
const REFUSED_MAX: u32 = 12;

pub(crate) struct Node {
    index: usize,
    /// Dropped before the memory that it serves.
    transport: Option<SimTransport>,
    memory: Option<Memory>,
    segment_bytes: u64,
    pub(crate) life: u64,
    /// The incarnation of the export; `None`: there is no export now.
    exported: Option<u64>,
    /// The latest incarnation, and the lowest one that the master accepts.
    incarnation: u64,
    incarnation_min: u64,
    /// Counts exports.
    exports: u32,
    /// The key that proves its identity: chosen when it started.
    key: u64,
    wall: Wall,
    /// Mounts that the master has refused since the last successful one.
    refused: u32,
    mounted: Option<SegmentNo>,
    /// The export must be withdrawn before anything else happens.
    leaving: bool,
    /// Until then no message between it and the master arrives.
    pub(crate) muted_until: Instant,
    request_id: u64,
    /// The master's epoch for which the export was made.
    epoch: u32,
    mover: Mover,
}

impl Node {
    pub(crate) fn new(
        index: usize,
        transport: SimTransport,
        segment_bytes: u64,
        clocks: (Clock, Wall),
        core: &mut Core,
    ) -> Self {
        let mut node = Self {
            index,
            transport: None,
            memory: None,
            segment_bytes,
            life: 0,
            exported: None,
            incarnation: 0,
            incarnation_min: 0,
            exports: 0,
            key: 0,
            wall: Wall::default(),
            refused: 0,
            mounted: None,
            leaving: false,
            muted_until: Instant::ZERO,
            request_id: 0,
            epoch: 0,
            mover: Mover::new(index, 0, clocks.0, 0),
        };
        node.restart(transport, 0, clocks, core);
        node
    }

    /// The process dies, and its memory with it.
    pub(crate) fn die(&mut self, core: &mut Core) {
        core.report.died_copying += u64::from(self.mover.is_copying());
        core.shadow.memory_is_gone(CLIENTS + self.index);
        self.end();
    }

    fn end(&mut self) {
        (self.transport, self.memory, self.exported) = (None, None, None);
        (self.mounted, self.leaving) = (None, false);
    }

    /// A new process, with other bytes in its memory.
    pub(crate) fn restart(
        &mut self,
        transport: SimTransport,
        life: u64,
        (clock, wall): (Clock, Wall),
        core: &mut Core,
    ) {
        self.end();
        core.report.set_back += u64::from(life > 0 && wall.is_behind(&self.wall));
        self.key = core.below(u64::MAX) | 1;
        core.node_keys.entry(self.index as u64 + 1).or_default().push(self.key);
        (self.wall, self.incarnation, self.incarnation_min, self.refused) = (wall, 0, 0, 0);
        self.memory = Some(Memory::new(self.segment_bytes as usize, 0x77));
        (self.transport, self.life) = (Some(transport), life);
        self.mover = Mover::new(self.index, life, clock, self.key);
    }

    pub(crate) fn clock_mut(&mut self) -> &mut Clock {
        self.mover.clock_mut()
    }

    /// The memory of a segment, if this node has exported it under this incarnation.
    pub(crate) fn memory_of(&self, incarnation: u64) -> Option<&Memory> {
        self.memory.as_ref().filter(|_| self.exported == Some(incarnation))
    }

    /// Sends a request to the master; false when this incarnation is over.
    pub(crate) fn tick(&mut self, core: &mut Core, life: u64) -> Result<bool, Violation> {
        if life != self.life || self.transport.is_none() {
            return Ok(false);
        }
        self.reap(core)?;
        if self.epoch != core.epoch() {
            // The master of another epoch does not know which writers may still use the old export.
            self.leave();
        }
        self.unexport();
        if self.leaving {
            return Ok(true);
        }
        self.export(core);
        let Some(incarnation) = self.exported else { return Ok(true) };
        if core.now < self.muted_until {
            return Ok(true);
        }
        self.mover.tick(core);
        self.request_id += 1;
        let node = self.index as u64 + 1;
        let mut out = Vec::new();
        if self.mounted.is_some() {
            let beat = Heartbeat {
                node: NodeId::new(node),
                incarnation: Incarnation::new(incarnation),
                key: self.key,
            };
            Beat::encode_request(&mut out, self.request_id, &beat, core::iter::empty()).unwrap();
        } else {
            let mount = MountSegment {
                node: NodeId::new(node),
                incarnation: Incarnation::new(incarnation),
                name: &segment_name(self.index),
                endpoint: "sim:1",
                len: self.segment_bytes,
                lineage: self.epoch.into(),
                key: self.key,
                ..MountSegment::default()
            };
            Mount::encode_request(&mut out, self.request_id, &mount, core::iter::empty()).unwrap();
        }
        core.send(Party::Node(self.index), life, out);
        Ok(true)
    }

    pub(crate) fn receive(&mut self, core: &mut Core, life: u64, bytes: &[u8]) -> Result<(), Violation> {
        let (frame, _) = Frame::parse(bytes).unwrap().unwrap();
        if life != self.life || core.now < self.muted_until {
            return Ok(());
        }
        let kind = Kind::from_byte(frame.header.kind);
        match kind {
            Some(Kind::FetchExpulsions) => {
                self.expel(core, &frame);
                return Ok(());
            }
            // The response is not waited for: what was lost is repeated.
            Some(Kind::EndExpulsions) => return Ok(()),
            _ => {}
        }
        if !matches!(kind, Some(Kind::Mount | Kind::Beat)) {
            return match (&mut self.transport, &self.memory) {
                (Some(transport), Some(memory)) if !self.leaving => {
                    self.mover.receive(core, &frame, &mut Hands { transport, memory })
                }
                _ => Ok(()),
            };
        }
        // Only the response to the latest request counts.
        if frame.header.request_id != self.request_id {
            return Ok(());
        }
        if kind == Some(Kind::Mount) {
            return self.mount_answered(core, &frame);
        }
        match Beat::decode_response(&frame) {
            Ok((NodeStatus::NeedRemount, _)) => self.leave(),
            Ok((NodeStatus::Work, _)) if !self.leaving => {
                self.fetch_expulsions(core);
                if let (Some(segment), Some(incarnation)) = (self.mounted, self.exported) {
                    self.mover.wake(core, Mounted { region: region(self.exports), segment, incarnation });
                }
            }
            _ => {}
        }
        Ok(())
    }

    fn mount_answered(&mut self, core: &mut Core, frame: &Frame<'_>) -> Result<(), Violation> {
        self.refused += 1;
        match Mount::decode_response(frame).map(|(answer, _)| answer) {
            Ok(MountResponse::Mounted(mounted)) => {
                self.mounted = Some(mounted.segment);
                self.refused = 0;
                core.report.remounts += 1;
            }
            // Its clock, or that of the previous holder of the name, was wrong: it continues from there.
            Ok(MountResponse::Stale { incarnation_min }) => {
                core.report.stale += 1;
                if !core.lies.contains(Lies::WALL) {
                    self.incarnation_min = incarnation_min.get();
                }
                self.leave();
            }
            // Its previous incarnation still counts as alive.
            Ok(MountResponse::Held { .. }) => {}
            // The master has another epoch.
            Err(_) => self.leave(),
        }
        if self.refused > REFUSED_MAX {
            let text = format!("node {} is not mounted: {:?}", self.index, Mount::decode_response(frame));
            return core.judge(Err(Violation::Stuck(text)));
        }
        Ok(())
    }

    fn fetch_expulsions(&mut self, core: &mut Core) {
        let Some(incarnation) = self.exported else { return };
        let fetch = FetchRequest {
            node: NodeId::new(self.index as u64 + 1),
            incarnation: Incarnation::new(incarnation),
            count_max: 64,
            key: self.key,
        };
        let mut out = Vec::new();
        FetchExpulsions::encode_request(&mut out, EXPULSIONS, &fetch, core::iter::empty()).unwrap();
        core.send(Party::Node(self.index), self.life, out);
    }

    /// Carries out orders to cut off writers, and reports.
    fn expel(&mut self, core: &mut Core, frame: &Frame<'_>) {
        let (Some(transport), Some(segment), false) = (&mut self.transport, self.mounted, self.leaving)
        else {
            return;
        };
        let Ok((_, orders)) = FetchExpulsions::decode_response(frame) else { return };
        let mut ends = Vec::new();
        for Expulsion { ticket, writer, force } in orders {
            let mode = if force { ExpelMode::Force } else { ExpelMode::SpareConnected };
            let expelled =
                if core.lies.contains(Lies::EXPEL) { Ok(true) } else { transport.expel(writer, mode) };
            match expelled {
                Ok(true) => {
                    if !core.lies.contains(Lies::EXPEL) {
                        core.cut_off(writer, segment);
                    }
                    ends.push(ExpulsionEnd { ticket, gone: true });
                }
                // In progress: the order comes again.
                Ok(false) => {}
                Err(_) => ends.push(ExpulsionEnd { ticket, gone: false }),
            }
        }
        if !ends.is_empty() {
            let proof = NodeProof { node: NodeId::new(self.index as u64 + 1), key: self.key };
            let mut out = Vec::new();
            EndExpulsions::encode_request(&mut out, EXPULSIONS, &proof, ends.into_iter()).unwrap();
            core.send(Party::Node(self.index), self.life, out);
        }
    }

    /// Takes completions from the fabric, unless it is stopped.
    pub(crate) fn reap(&mut self, core: &mut Core) -> Result<(), Violation> {
        match (&mut self.transport, &self.memory) {
            (Some(transport), Some(memory)) if core.now >= self.muted_until => {
                self.mover.reap(core, &mut Hands { transport, memory })
            }
            _ => Ok(()),
        }
    }

    /// It was slow, and continues.
    pub(crate) fn go_on(&mut self, core: &mut Core, life: u64) -> Result<(), Violation> {
        if life == self.life && core.now < self.muted_until {
            core.at(self.muted_until, Event::GoOn { node: self.index, life });
            return Ok(());
        }
        match (&mut self.transport, &self.memory) {
            (Some(transport), Some(memory)) if life == self.life => {
                self.mover.wake_up(core, &mut Hands { transport, memory })
            }
            _ => Ok(()),
        }
    }

    fn export(&mut self, core: &mut Core) {
        let (None, Some(transport), Some(memory)) = (self.exported, &mut self.transport, &self.memory) else {
            return;
        };
        // As `store-client` does.
        let incarnation = self.wall.shows_ns(core.now).max(self.incarnation + 1).max(self.incarnation_min);
        self.exports += 1;
        let id = region(self.exports);
        let access = Access::LOCAL | Access::REMOTE_READ | Access::REMOTE_WRITE;
        // SAFETY: `memory` outlives `transport` by the order of the fields, and is only touched through
        // volatile views.
        unsafe { transport.register(id, memory.span(), access) }.unwrap();
        let mut blob = [0; 128];
        let len = transport.export(id, &mut blob).unwrap();
        core.directory.insert((segment_name(self.index), incarnation), blob[..len].to_vec());
        (self.exported, self.incarnation) = (Some(incarnation), incarnation);
        self.epoch = core.epoch();
    }

    /// The old export must be withdrawn before the memory is exported again.
    fn leave(&mut self) {
        (self.mounted, self.leaving) = (None, true);
        self.mover.forget();
        self.unexport();
    }

    fn unexport(&mut self) {
        let (true, Some(transport)) = (self.leaving, &mut self.transport) else { return };
        // Busy: a slice is in progress, perhaps one of its own; the next tick tries again.
        self.leaving = self.exported.is_some() && transport.deregister(region(self.exports)).is_err();
        if !self.leaving {
            self.exported = None;
        }
    }
}

const fn region(export: u32) -> RegionId {
    RegionId::new(0, export)
}

pub(crate) fn segment_name(index: usize) -> String {
    format!("segment-{}", index + 1)
}
