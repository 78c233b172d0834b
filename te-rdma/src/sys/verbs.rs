//! What this fabric needs of an RDMA device: the seam between the transport and a provider of verbs.
//!
//! Two providers implement [`Verbs`]: [`SystemVerbs`](super::SystemVerbs) (libibverbs, found at run time) and
//! `sim` (several devices in one process, with faults). One value is *one port of one device*, opened: it
//! owns a protection domain, one completion queue with its event channel, and the queue pairs and
//! registrations that are made through it. Nothing here is the wire's or the transport's policy: no retries,
//! no batching, no choice of GID.
//!
//! Names and meanings follow the InfiniBand Architecture Specification, volume 1, chapters 9 to 11, and
//! `libibverbs(7)`.

use te_core::{Error, MemSpan, Op};

bitflags::bitflags! {
    /// What a registration allows (`IBV_ACCESS_*`).
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    pub struct MrAccess: u32 {
        /// The device may write it for our own work (READs).
        const LOCAL_WRITE = 1;
        /// Peers may write it. Needs `LOCAL_WRITE`.
        const REMOTE_WRITE = 1 << 1;
        /// Peers may read it.
        const REMOTE_READ = 1 << 2;
        /// The device may reorder its writes to memory (PCIe relaxed ordering). Ignored where the device
        /// cannot.
        const RELAXED_ORDERING = 1 << 20;
    }

    /// What a device and its library can do beyond the minimum.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub struct DeviceFeatures: u32 {
        /// Registrations may ask for relaxed ordering (`ibv_reg_mr_iova2` is there).
        const RELAXED_ORDERING = 1;
        /// Memory of another device can be registered by its dma-buf.
        const DMABUF = 1 << 1;
    }
}

/// An opened device: what does not change while it is open.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    /// The kernel's name: `mlx5_0`, `rxe0`.
    pub name: String,
    /// The port that was opened, from 1.
    pub port: u8,
    /// NUMA node of the device, when it has one.
    pub numa_node: Option<u16>,
    /// Longest registration, bytes.
    pub mr_bytes_max: u64,
    /// Registrations at a time, at most.
    pub mr_count_max: u32,
    /// Queue pairs at a time, at most.
    pub qp_count_max: u32,
    /// Work requests in one send queue, at most.
    pub qp_depth_max: u32,
    /// Entries of the completion queue.
    pub cq_depth: u32,
    /// Scatter/gather entries in one work request, at most.
    pub sge_max: u32,
    /// READs in flight on one queue pair: as initiator and as target the smaller of what the device allows.
    pub reads_max: u8,
    /// Longest message, bytes.
    pub message_bytes_max: u32,
    /// Abilities.
    pub features: DeviceFeatures,
}

/// How a port stands now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PortInfo {
    /// Whether it can carry traffic (`IBV_PORT_ACTIVE`).
    pub active: bool,
    /// InfiniBand (true) or Ethernet, that is RoCE (false).
    pub infiniband: bool,
    /// Path MTU in use, bytes: 256, 512, 1024, 2048 or 4096.
    pub mtu_bytes: u32,
    /// InfiniBand local identifier; 0 on Ethernet.
    pub lid: u16,
    /// Entries of the GID table.
    pub gids: u32,
    /// Link speed times width, bits per second; 0 when unknown.
    pub bits_per_s: u64,
}

/// How packets to a GID are wrapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum GidKind {
    /// InfiniBand.
    Infiniband,
    /// RoCE v1: its own Ethernet type, does not cross routers.
    RoceV1,
    /// RoCE v2: UDP over IPv4 (a GID of the form `::ffff:a.b.c.d`) or IPv6.
    RoceV2,
}

/// One entry of the GID table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gid {
    /// Its index in the table.
    pub index: u32,
    /// 128 bits, in network order.
    pub raw: [u8; 16],
    /// How it travels.
    pub kind: GidKind,
}

/// A registration: the provider's handle and the keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Registration {
    /// For `deregister`.
    pub handle: u64,
    /// Our own work requests name local memory with it.
    pub local_key: u32,
    /// Peers name it with it.
    pub remote_key: u32,
}

/// A queue pair of this provider. Not reused while the provider lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct QpHandle(pub u64);

/// What a new queue pair shall hold. The provider may give more, never less.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QpConfig {
    /// Work requests in its send queue.
    pub depth: u32,
    /// Scatter/gather entries a work request.
    pub sges: u32,
    /// Bytes of a WRITE that travel inside the work request. The provider lowers it to what the device takes.
    pub inline_bytes: u32,
}

/// A queue pair that was made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Qp {
    /// For everything else.
    pub handle: QpHandle,
    /// What a peer connects to: 24 bits.
    pub number: u32,
    /// What it really takes.
    pub config: QpConfig,
}

/// What one end of a connection must know to reach the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Path {
    /// The peer's queue pair.
    pub peer_qp: u32,
    /// The peer's local identifier (InfiniBand).
    pub peer_lid: u16,
    /// The peer's GID.
    pub peer_gid: [u8; 16],
    /// Index of our GID.
    pub gid_index: u32,
    /// Bytes; the smaller of both ends' port MTUs.
    pub mtu_bytes: u32,
    /// First packet number that the peer sends: 24 bits.
    pub peer_psn: u32,
    /// First packet number that we send: 24 bits.
    pub psn: u32,
    /// READs that the peer may have in flight towards us.
    pub reads_from_peer: u8,
    /// READs that we may have in flight towards the peer.
    pub reads_to_peer: u8,
    /// Class of service: traffic class (RoCE: DSCP and ECN) and InfiniBand service level.
    pub traffic_class: u8,
    /// See `traffic_class`.
    pub service_level: u8,
    /// Local ACK timeout: 4.096 µs × 2^this; 1 to 31.
    pub timeout_exponent: u8,
    /// Transport retries, 0 to 7.
    pub retries: u8,
    /// Retries after "receiver not ready", 0 to 6; 7 is for ever.
    pub rnr_retries: u8,
}

/// A step of a queue pair's life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QpStep {
    /// RESET to INIT, with what peers may do through this queue pair.
    Init(MrAccess),
    /// INIT to RTR to RTS: connected both ways.
    Connect(Path),
    /// Any state to ERR: everything posted is flushed, and what arrives is not carried out any more. A packet
    /// that is being carried out at that moment may still be (soft-RoCE under load): only `destroy_qp` is a
    /// fence.
    Error,
}

/// The rest of a [`Verbs::connect_qp`] that may wait. Ends as `QpStep::Connect` does.
pub type ConnectJob = Box<dyn FnOnce() -> Result<(), Error> + Send>;

/// How far [`Verbs::connect_qp`] got.
pub enum Connecting {
    /// Connected.
    Done,
    /// The rest may wait for the network: it is to be run on a thread that has the time. Until it has run, or
    /// was dropped, the queue pair can be neither modified nor destroyed (`EBUSY`).
    Later(ConnectJob),
}

/// One piece of local memory in a work request. Laid out as `struct ibv_sge`, so that a list of them needs no
/// copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Sge {
    /// First byte.
    pub addr: u64,
    /// Bytes.
    pub len: u32,
    /// The registration's local key.
    pub local_key: u32,
}

/// One one-sided operation. Its local pieces are the next `sges` entries of the list that is posted with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WorkRequest {
    /// Comes back in the completion.
    pub id: u64,
    /// READ or WRITE.
    pub op: Op,
    /// Whether success is reported. Errors always are.
    pub signaled: bool,
    /// WRITEs up to the queue pair's `inline_bytes`: the bytes are copied at once, local keys are not looked
    /// at.
    pub inline: bool,
    /// How many entries of the list are its own.
    pub sges: u32,
    /// First byte at the peer.
    pub remote_addr: u64,
    /// The peer's remote key.
    pub remote_key: u32,
}

/// How a work request ended (`enum ibv_wc_status`), grouped by what to do about it. `code` is the provider's
/// number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum WcStatus {
    /// Done; so is everything that was posted to this queue pair before it.
    Success,
    /// Our own fault: length, local key, our queue pair.
    Local,
    /// The peer refused: key, range or rights. No byte of this request was written, unless the peer ended the
    /// registration while it arrived. Both queue pairs are in error (IBA 9.9.3.1; not every device raises an
    /// event at the target, soft-RoCE does not).
    RemoteAccess,
    /// The peer failed in carrying it out, or found it malformed.
    RemoteOperation,
    /// No acknowledgement after all retries: link, path or peer is gone. What was written is not known.
    RetriesExceeded,
    /// The peer had no receive posted. Does not happen to one-sided work on healthy peers.
    NotReady,
    /// Flushed because the queue pair is in error. Whether it was carried out is not known.
    Flushed,
    /// Anything else.
    Other,
}

/// A completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WorkCompletion {
    /// The work request's.
    pub id: u64,
    /// The queue pair's number.
    pub qp_number: u32,
    /// How it ended.
    pub status: WcStatus,
    /// The provider's own status and vendor error, for people: `status | vendor_err << 8`; 0 with `Success`.
    pub code: i32,
}

/// Something that happened to the device beside work (`ibv_get_async_event(3)`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AsyncEvent {
    /// The port can carry traffic.
    PortActive,
    /// It cannot.
    PortError,
    /// The GID table changed.
    GidChange,
    /// A queue pair, by number, went into error.
    QpError(u32),
    /// The completion queue overran or failed. Nothing on this device can be relied on.
    CqError,
    /// The device is gone.
    DeviceFatal,
    /// Of no consequence here, by the provider's number.
    Other(i32),
}

/// An opened port of an RDMA device. One owner, no waiting: every call on the data path returns at once.
///
/// Errors carry `ErrorKind::System` and the `errno` unless a method says otherwise.
pub trait Verbs: Send {
    /// What the device is.
    fn info(&self) -> &DeviceInfo;

    /// How the port stands now.
    ///
    /// # Errors
    /// The driver's.
    fn port(&self) -> Result<PortInfo, Error>;

    /// Entry `index` of the GID table; `None`: it is empty.
    ///
    /// # Errors
    /// The driver's.
    fn gid(&self, index: u32) -> Result<Option<Gid>, Error>;

    /// Registers host memory; peers and work requests use its own addresses.
    ///
    /// Takes microseconds to seconds (it pins pages) and may be called from several threads at a time through
    /// [`Registrar`].
    ///
    /// # Errors
    /// The driver's: `ENOMEM` when the locked-memory limit is reached, `EAGAIN` when it is busy, `EINVAL`,
    /// `EFAULT`. Nothing was registered then, so the call may be made again.
    ///
    /// # Safety
    /// As `te_core::Memory::register`: until `deregister` returned `Ok`, the span stays mapped and no `&` or
    /// `&mut` exists to bytes that a peer or an operation may write.
    unsafe fn register(&self, span: MemSpan, access: MrAccess) -> Result<Registration, Error> {
        // SAFETY: the caller's promise.
        unsafe { self.registrar().register(span, access) }
    }

    /// The part of the provider that threads may share: registers pieces of a large span in parallel.
    fn registrar(&self) -> &dyn Registrar;

    /// Registers `len` bytes from `offset` on of another device's memory by its dma-buf. `address` is what
    /// peers and work requests call its first byte.
    ///
    /// # Errors
    /// `Unsupported` without [`DeviceFeatures::DMABUF`]; the driver's.
    fn register_dmabuf(
        &self,
        fd: i32,
        offset: u64,
        len: u64,
        address: u64,
        access: MrAccess,
    ) -> Result<Registration, Error>;

    /// Ends a registration: neither the device nor any peer reaches the memory by its keys any more.
    ///
    /// # Errors
    /// The driver's.
    fn deregister(&self, registration: Registration) -> Result<(), Error>;

    /// Makes a reliable-connected queue pair, in state RESET, on the completion queue.
    ///
    /// # Errors
    /// The driver's: `ENOMEM`, `EINVAL`.
    fn create_qp(&mut self, config: QpConfig) -> Result<Qp, Error>;

    /// Takes a queue pair one step further.
    ///
    /// # Errors
    /// The driver's: `EINVAL` for a step out of order, `ENETUNREACH`, `ETIMEDOUT` when the path cannot be
    /// resolved, `EBUSY` while it is being connected.
    fn modify_qp(&mut self, qp: QpHandle, step: QpStep) -> Result<(), Error>;

    /// Takes a queue pair through [`QpStep::Connect`] without waiting, or gives back what does. The kernel
    /// looks for a RoCE neighbour's address meanwhile, which takes up to seconds when there is no answer.
    ///
    /// # Errors
    /// As [`modify_qp`](Self::modify_qp).
    fn connect_qp(&mut self, qp: QpHandle, path: Path) -> Result<Connecting, Error> {
        self.modify_qp(qp, QpStep::Connect(path)).map(|()| Connecting::Done)
    }

    /// Destroys a queue pair: when this returned `Ok`, nothing of it touches our memory, on our behalf or a
    /// peer's. Packets that have left us may still land at the peer (L5). Completions not polled before are
    /// lost.
    ///
    /// # Errors
    /// The driver's; `EBUSY` while it is being connected.
    fn destroy_qp(&mut self, qp: QpHandle) -> Result<(), Error>;

    /// Posts work requests in order, ringing the doorbell once: how many the queue pair took, and why not
    /// all.
    ///
    /// `ENOMEM` means that the send queue is full: a slot is free again when the completion of its request,
    /// or of a later signaled one, was polled. On a queue pair in error requests are taken and flushed;
    /// `EINVAL` before `Connect`.
    ///
    /// # Safety
    /// The pieces of `inline` requests are readable during the call, and no `&mut` to them exists. (Other
    /// requests are checked by the device against what was registered.)
    unsafe fn post(&mut self, qp: QpHandle, requests: &[WorkRequest], sges: &[Sge])
    -> (usize, Option<Error>);

    /// Takes completions, oldest first; gives how many.
    ///
    /// # Errors
    /// The completion queue failed: nothing more will come out of it.
    fn poll_cq(&mut self, out: &mut [WorkCompletion]) -> Result<usize, Error>;

    /// Asks for one event on [`event_fds`](Self::event_fds) at the next completion. Poll once more
    /// afterwards: what came in between raises no event.
    ///
    /// # Errors
    /// The driver's.
    fn arm(&mut self) -> Result<(), Error>;

    /// Descriptors that become readable: the completion channel's, and the device's asynchronous events'.
    /// Empty when the provider has none; then poll in a loop.
    fn event_fds(&self) -> [Option<i32>; 2];

    /// Takes what made [`event_fds`](Self::event_fds) readable; gives the next asynchronous event. Never
    /// waits. Call until `None`.
    fn next_event(&mut self) -> Option<AsyncEvent>;
}

/// Registration, callable from several threads at a time.
pub trait Registrar: Sync {
    /// As [`Verbs::register`].
    ///
    /// # Errors
    /// As [`Verbs::register`].
    ///
    /// # Safety
    /// As [`Verbs::register`].
    unsafe fn register(&self, span: MemSpan, access: MrAccess) -> Result<Registration, Error>;
}
