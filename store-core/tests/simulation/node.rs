//! A simulated node: memory, an export, and a word to the master now and then.

use store_core::message::{Beat, Heartbeat, Mount, MountSegment, NodeStatus, Operation};
use store_core::{ErrorCode, Frame, Kind};
use te_core::sim::SimTransport;
use te_core::{Access, Instant, Memory as _, RegionId};

use crate::memory::Memory;
use crate::world::{Core, Party};

pub(crate) struct Node {
    index: usize,
    /// Dropped before the memory it serves.
    transport: Option<SimTransport>,
    memory: Option<Memory>,
    segment_bytes: u64,
    life: u64,
    /// Counts exports over all lives; `None` when there is none at the moment.
    exported: Option<u64>,
    exports: u64,
    mounted: bool,
    /// Until then the master hears nothing from it, and it nothing from the master.
    pub(crate) muted_until: Instant,
    request_id: u64,
    /// The master for which the export was made.
    epoch: u32,
}

impl Node {
    pub(crate) fn new(index: usize, transport: SimTransport, segment_bytes: u64) -> Self {
        let mut node = Self {
            index,
            transport: None,
            memory: None,
            segment_bytes,
            life: 0,
            exported: None,
            exports: 0,
            mounted: false,
            muted_until: Instant::ZERO,
            request_id: 0,
            epoch: 0,
        };
        node.restart(transport, 0);
        node
    }

    /// The process dies, and its memory with it.
    pub(crate) fn die(&mut self) {
        (self.transport, self.memory, self.exported) = (None, None, None);
        self.mounted = false;
    }

    /// A new process, with other bytes in its memory.
    pub(crate) fn restart(&mut self, transport: SimTransport, life: u64) {
        self.die();
        self.memory = Some(Memory::new(self.segment_bytes as usize, 0x77));
        (self.transport, self.life) = (Some(transport), life);
    }

    /// Says something to the master; false when this life is over.
    pub(crate) fn tick(&mut self, core: &mut Core, life: u64) -> bool {
        if life != self.life || self.transport.is_none() {
            return false;
        }
        if self.epoch != core.epoch() {
            // Another life of the master knows nothing of who may still write through the old export.
            self.mounted = false;
            self.unexport();
        }
        self.export(core);
        let Some(incarnation) = self.exported.filter(|_| self.epoch == core.epoch()) else { return true };
        if core.now < self.muted_until {
            return true;
        }
        self.request_id += 1;
        let node = self.index as u64 + 1;
        let name = format!("segment-{node}");
        let mut out = Vec::new();
        if self.mounted {
            Beat::encode_request(
                &mut out,
                self.request_id,
                &Heartbeat { node, incarnation },
                core::iter::empty(),
            )
            .unwrap();
        } else {
            let endpoint = "sim:1";
            let mount = MountSegment {
                node,
                incarnation,
                name: &name,
                endpoint,
                base: 0,
                len: self.segment_bytes,
                export: Default::default(),
                epoch: self.epoch.into(),
            };
            Mount::encode_request(&mut out, self.request_id, &mount, core::iter::empty()).unwrap();
        }
        core.send(Party::Node(self.index), life, out);
        true
    }

    pub(crate) fn receive(&mut self, core: &mut Core, life: u64, bytes: &[u8]) {
        let (frame, _) = Frame::parse(bytes).unwrap().unwrap();
        // Only the answer to the latest word counts.
        if life != self.life || frame.header.request_id != self.request_id || core.now < self.muted_until {
            return;
        }
        let refused = if frame.header.kind == Kind::Mount as u8 {
            let answer = Mount::decode_response(&frame);
            self.mounted = answer.is_ok();
            core.report.remounts += u64::from(self.mounted);
            answer.is_err_and(|error| error == ErrorCode::IllegalClient)
        } else {
            Beat::decode_response(&frame).is_ok_and(|(status, _)| status == NodeStatus::NeedRemount)
        };
        if refused {
            // The old export must be dead before the memory is offered again.
            self.mounted = false;
            self.unexport();
        }
    }

    fn export(&mut self, core: &mut Core) {
        let (None, Some(transport), Some(memory)) = (self.exported, &mut self.transport, &self.memory) else {
            return;
        };
        let incarnation = self.exports + 1;
        let region = RegionId::new(0, incarnation as u32);
        let access = Access::REMOTE_READ | Access::REMOTE_WRITE;
        // SAFETY: `memory` outlives `transport` by the order of the fields, and is only touched through volatile views.
        unsafe { transport.register(region, memory.span(), access) }.unwrap();
        let mut blob = [0; 128];
        let len = transport.export(region, &mut blob).unwrap();
        core.directory.insert((format!("segment-{}", self.index + 1), incarnation), blob[..len].to_vec());
        (self.exported, self.exports) = (Some(incarnation), incarnation);
        self.epoch = core.epoch();
    }

    fn unexport(&mut self) {
        if let (Some(incarnation), Some(transport)) = (self.exported, &mut self.transport) {
            // Busy: somebody is in the middle of it; the next refusal tries again.
            if transport.deregister(RegionId::new(0, incarnation as u32)).is_ok() {
                self.exported = None;
            }
        }
    }
}
