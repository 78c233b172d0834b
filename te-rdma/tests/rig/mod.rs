//! Two devices with registered memory, and queue pairs between them.
#![allow(dead_code, reason = "each test program uses a part of it")]
#![allow(clippy::unwrap_used, reason = "a test")]

use te_core::{MemSpan, Op, VolatileSpan};
use te_rdma::sim::{DeviceConfig, SimConfig, SimDevice, SimFabric};
use te_rdma::verbs::{
    MrAccess, Path, Qp, QpConfig, QpStep, Registration, Sge, Verbs, WcStatus, WorkCompletion, WorkRequest,
};

pub(crate) const ALL: MrAccess =
    MrAccess::LOCAL_WRITE.union(MrAccess::REMOTE_WRITE).union(MrAccess::REMOTE_READ);
pub(crate) const EMPTY: WorkCompletion =
    WorkCompletion { id: 0, qp_number: 0, status: WcStatus::Other, code: 0 };

/// Memory to which no reference exists. It is never freed, so the order of drops does not matter.
#[derive(Clone, Copy)]
pub(crate) struct Mem {
    pub(crate) span: MemSpan,
}

impl Mem {
    pub(crate) fn new(bytes: usize) -> Self {
        let raw = Box::into_raw(vec![0u8; bytes].into_boxed_slice());
        Self { span: MemSpan::new(raw.cast(), bytes) }
    }

    fn view(&self) -> VolatileSpan<'_> {
        // SAFETY: never freed, and reached in no other way.
        unsafe { VolatileSpan::new(self.span) }
    }

    pub(crate) fn addr(&self) -> u64 {
        self.span.as_ptr().expose_provenance() as u64
    }

    pub(crate) fn fill(&self, byte: u8) {
        self.write(0, &vec![byte; self.span.len()]);
    }

    pub(crate) fn write(&self, offset: u64, bytes: &[u8]) {
        self.view().write(offset, bytes).unwrap();
    }

    pub(crate) fn read(&self, offset: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.view().read(offset, &mut bytes).unwrap();
        bytes
    }

    /// Whether every byte is `byte`.
    pub(crate) fn is_all(&self, byte: u8) -> bool {
        self.read(0, self.span.len()).iter().all(|&b| b == byte)
    }
}

/// A device with one registered buffer.
pub(crate) struct Node<V> {
    pub(crate) verbs: V,
    pub(crate) mem: Mem,
    pub(crate) mr: Registration,
}

impl<V: Verbs> Node<V> {
    pub(crate) fn new(verbs: V, bytes: usize) -> Self {
        let mem = Mem::new(bytes);
        // SAFETY: `Mem` is never freed and lends no references.
        let mr = unsafe { verbs.register(mem.span, ALL) }.unwrap();
        Self { verbs, mem, mr }
    }

    pub(crate) fn sge(&self, offset: u64, len: u32) -> Sge {
        Sge { addr: self.mem.addr() + offset, len, local_key: self.mr.local_key }
    }

    pub(crate) fn post(&mut self, qp: Qp, requests: &[WorkRequest], sges: &[Sge]) {
        // SAFETY: inline pieces of these tests lie in `Mem`.
        let (taken, error) = unsafe { self.verbs.post(qp.handle, requests, sges) };
        assert_eq!((taken, error), (requests.len(), None));
    }

    /// Takes all completions: ids and statuses.
    pub(crate) fn poll(&mut self) -> Vec<(u64, WcStatus)> {
        let mut out = [EMPTY; 64];
        let mut all = Vec::new();
        loop {
            let count = self.verbs.poll_cq(&mut out).unwrap();
            all.extend(out[..count].iter().map(|wc| (wc.id, wc.status)));
            if count < out.len() {
                return all;
            }
        }
    }
}

pub(crate) type SimNode = Node<SimDevice>;

pub(crate) const QP: QpConfig = QpConfig { depth: 64, sges: 4, inline_bytes: 64 };

pub(crate) struct Pair {
    pub(crate) fabric: SimFabric,
    pub(crate) a: SimNode,
    pub(crate) b: SimNode,
    pub(crate) qa: Qp,
    pub(crate) qb: Qp,
}

pub(crate) const BUFFER_BYTES: usize = 1 << 16;

impl Pair {
    pub(crate) fn new(config: SimConfig) -> Self {
        Self::with(config, DeviceConfig::default(), |_, _| {})
    }

    pub(crate) fn with(
        config: SimConfig,
        device: DeviceConfig,
        change: impl FnOnce(&mut Path, &mut Path),
    ) -> Self {
        let fabric = SimFabric::new(7, config);
        let mut a = Node::new(fabric.device(device.clone()), BUFFER_BYTES);
        let mut b = Node::new(fabric.device(device), BUFFER_BYTES);
        let (qa, qb) = connect(&mut a, &mut b, QP, change);
        Self { fabric, a, b, qa, qb }
    }

    /// A WRITE of `len` bytes from the start of a's buffer to `offset` of b's.
    pub(crate) fn write(&mut self, id: u64, offset: u64, len: u32) {
        let (request, sge) = (self.request(id, Op::Write, offset, 1), self.a.sge(0, len));
        self.a.post(self.qa, &[request], &[sge]);
    }

    pub(crate) fn read(&mut self, id: u64, offset: u64, len: u32) {
        let (request, sge) = (self.request(id, Op::Read, offset, 1), self.a.sge(0, len));
        self.a.post(self.qa, &[request], &[sge]);
    }

    pub(crate) fn request(&self, id: u64, op: Op, offset: u64, sges: u32) -> WorkRequest {
        WorkRequest {
            id,
            op,
            signaled: true,
            inline: false,
            sges,
            remote_addr: self.b.mem.addr() + offset,
            remote_key: self.b.mr.remote_key,
        }
    }

    /// Runs until nothing is on the wire, and returns a's completions.
    pub(crate) fn settle(&mut self) -> Vec<(u64, WcStatus)> {
        self.fabric.run_until_idle();
        self.a.poll()
    }
}

pub(crate) fn default_path(peer: Qp, peer_gid: [u8; 16]) -> Path {
    Path {
        peer_qp: peer.number,
        peer_lid: 0,
        peer_gid,
        gid_index: 3,
        mtu_bytes: 1024,
        peer_psn: 0,
        psn: 0,
        reads_from_peer: 4,
        reads_to_peer: 4,
        traffic_class: 0,
        service_level: 0,
        timeout_exponent: 10,
        retries: 3,
        rnr_retries: 2,
    }
}

/// Connects new queue pairs. `change` may make a's or b's path to the other wrong.
pub(crate) fn connect(
    a: &mut SimNode,
    b: &mut SimNode,
    config: QpConfig,
    change: impl FnOnce(&mut Path, &mut Path),
) -> (Qp, Qp) {
    let (qa, qb) = (a.verbs.create_qp(config).unwrap(), b.verbs.create_qp(config).unwrap());
    let gid = |node: &SimNode| node.verbs.gid(3).unwrap().unwrap().raw;
    let (mut to_b, mut to_a) = (default_path(qb, gid(b)), default_path(qa, gid(a)));
    (to_b.psn, to_b.peer_psn) = (0xff_fffe, 0x123);
    (to_a.psn, to_a.peer_psn) = (0x123, 0xff_fffe);
    change(&mut to_b, &mut to_a);
    for (node, qp, path) in [(a, qa, to_b), (b, qb, to_a)] {
        node.verbs.modify_qp(qp.handle, QpStep::Init(ALL)).unwrap();
        node.verbs.modify_qp(qp.handle, QpStep::Connect(path)).unwrap();
    }
    (qa, qb)
}
