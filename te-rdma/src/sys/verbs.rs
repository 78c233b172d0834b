//! What this fabric needs of an RDMA device: the interface between the transport and a provider of verbs.
//!
//! Two providers implement [`Verbs`]: [`SystemVerbs`](super::SystemVerbs) (libibverbs, found at run time) and
//! `sim` (several devices in one process, with faults). One value is *one port of one device*, opened: it
//! owns a protection domain, one completion queue with its event channel, and the queue pairs and
//! registrations that are made through it. A provider has no policy: no retries, no batching, no choice of
//! GID.
//!
//! Names and meanings follow the InfiniBand Architecture Specification, volume 1, chapters 9 to 11, and
//! `libibverbs(7)`.

use std::os::fd::BorrowedFd;

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
        /// The device may reorder its writes to memory (PCIe relaxed ordering). Ignored by devices that
        /// cannot.
        const RELAXED_ORDERING = 1 << 20;
    }

    /// Optional abilities of a device and its library.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub struct DeviceFeatures: u32 {
        /// Registrations may request relaxed ordering (`ibv_reg_mr_iova2` is there).
        const RELAXED_ORDERING = 1;
        /// Memory of a GPU can be registered by its dma-buf.
        const DMABUF = 1 << 1;
    }
}

/// The constant properties of an opened device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    /// The kernel's name: `mlx5_0`, `rxe0`.
    pub name: String,
    /// The port that was opened, from 1.
    pub port: u8,
    /// NUMA node of the device; `None`: unknown.
    pub numa_node: Option<u16>,
    /// Longest registration, bytes.
    pub mr_bytes_max: u64,
    /// The most registrations that exist at the same time.
    pub mr_count_max: u32,
    /// The most queue pairs that exist at the same time.
    pub qp_count_max: u32,
    /// The most work requests in one send queue.
    pub qp_depth_max: u32,
    /// Entries of the completion queue.
    pub cq_depth: u32,
    /// The most scatter/gather entries in one work request.
    pub sge_max: u32,
    /// The most READs in flight on one queue pair: the smaller of the device's limits as initiator and as
    /// target.
    pub reads_max: u8,
    /// Longest message, bytes.
    pub message_bytes_max: u32,
    /// Optional abilities.
    pub features: DeviceFeatures,
}

/// The state of a port at one moment.
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

/// How packets to a GID are encapsulated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum GidKind {
    /// InfiniBand.
    Infiniband,
    /// RoCE v1: an Ethernet type of its own, which routers do not forward.
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
    /// How packets to it are encapsulated.
    pub kind: GidKind,
}

/// A registration: the provider's handle and the device's keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Registration {
    /// The provider's name for it.
    pub handle: u64,
    /// The key with which our own work requests name the memory.
    pub local_key: u32,
    /// The key with which peers name the memory.
    pub remote_key: u32,
}

/// A provider's name for a queue pair. Not reused while the provider exists.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct QpHandle(pub u64);

/// The capacity of a new queue pair. The provider may give more, never less.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QpConfig {
    /// Work requests in its send queue.
    pub depth: u32,
    /// Scatter/gather entries per work request.
    pub sges: u32,
    /// Longest WRITE that is carried inside its work request, bytes. The provider lowers it to the limit of
    /// the device.
    pub inline_bytes: u32,
}

/// A queue pair that was made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Qp {
    /// The provider's name for it.
    pub handle: QpHandle,
    /// The number that a peer connects to, 24 bits.
    pub number: u32,
    /// Its capacity.
    pub config: QpConfig,
}

/// How one end of a connection reaches the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Path {
    /// The peer's queue pair.
    pub peer_qp: u32,
    /// The peer's local identifier (InfiniBand).
    pub peer_lid: u16,
    /// The peer's GID.
    pub peer_gid: [u8; 16],
    /// Index of our GID in the port's table.
    pub gid_index: u32,
    /// Path MTU, bytes: the smaller of both ends' port MTUs.
    pub mtu_bytes: u32,
    /// First packet number that the peer sends, 24 bits.
    pub peer_psn: u32,
    /// First packet number that we send, 24 bits.
    pub psn: u32,
    /// READs that the peer may have in flight towards us.
    pub reads_from_peer: u8,
    /// READs that we may have in flight towards the peer.
    pub reads_to_peer: u8,
    /// Traffic class (on RoCE: DSCP and ECN).
    pub traffic_class: u8,
    /// InfiniBand service level.
    pub service_level: u8,
    /// Local ACK timeout: 4.096 µs × 2^this; 1 to 31.
    pub timeout_exponent: u8,
    /// Transport retries, 0 to 7.
    pub retries: u8,
    /// Retries after "receiver not ready", 0 to 6; 7: no limit.
    pub rnr_retries: u8,
}

/// A state change of a queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QpStep {
    /// RESET to INIT, with what peers may do through this queue pair.
    Init(MrAccess),
    /// INIT to RTR to RTS: connected both ways.
    Connect(Path),
    /// Any state to ERR: everything posted is flushed, and arriving packets are no longer executed. A packet
    /// that the device is executing at that moment may still take effect (soft-RoCE under load): only
    /// `destroy_qp` is a fence.
    Error,
}

/// The blocking part of a [`Verbs::connect_qp`]. Its result is that of `QpStep::Connect`.
pub type ConnectJob = Box<dyn FnOnce() -> Result<(), Error> + Send>;

/// The result of [`Verbs::connect_qp`].
pub enum Connecting {
    /// Connected.
    Done,
    /// The rest may block on the network, and has to run on a thread that may block. Until it has run, or was
    /// dropped, the queue pair can be neither modified nor destroyed (`EBUSY`).
    Later(ConnectJob),
}

/// One piece of local memory in a work request. Laid out as `struct ibv_sge`, so that a list of them is
/// passed to the driver without a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Sge {
    /// Address of its first byte.
    pub addr: u64,
    /// Its length, bytes.
    pub len: u32,
    /// The local key of its registration.
    pub local_key: u32,
}

/// One one-sided operation. Its local pieces are the next `sges` entries of the list with which it is posted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WorkRequest {
    /// The caller's name for it. Its completion carries it.
    pub id: u64,
    /// READ or WRITE.
    pub op: Op,
    /// Whether success is reported. Errors always are.
    pub signaled: bool,
    /// For WRITEs up to the queue pair's `inline_bytes`: the bytes are copied during the call, and local keys
    /// are ignored.
    pub inline: bool,
    /// How many entries of the list belong to it.
    pub sges: u32,
    /// Address of the first byte at the peer.
    pub remote_addr: u64,
    /// The peer's remote key.
    pub remote_key: u32,
}

/// How a work request ended (`enum ibv_wc_status`), grouped by what follows from it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum WcStatus {
    /// It succeeded, and so did everything that was posted to this queue pair before it.
    Success,
    /// An error on our side: length, local key, our queue pair.
    Local,
    /// The peer refused: key, range or rights. No byte of this request was written, unless the peer ended the
    /// registration while it arrived. Both queue pairs are in error (IBA 9.9.3.1; not every device raises an
    /// event at the target, soft-RoCE does not).
    RemoteAccess,
    /// The peer failed to execute it, or found it malformed.
    RemoteOperation,
    /// No acknowledgement after all retries: link, path or peer is gone. How much was written is unknown.
    RetriesExceeded,
    /// The peer had no receive posted. Does not happen to one-sided work on healthy peers.
    NotReady,
    /// Flushed because the queue pair is in error. Whether it was executed is unknown.
    Flushed,
    /// Every other status.
    Other,
}

/// A completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WorkCompletion {
    /// The id of the work request.
    pub id: u64,
    /// The number of the queue pair.
    pub qp_number: u32,
    /// How the work request ended.
    pub status: WcStatus,
    /// The provider's own status and vendor error, for diagnosis: `status | vendor_err << 8`; 0 with
    /// `Success`.
    pub code: i32,
}

/// An asynchronous event of the device (`ibv_get_async_event(3)`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AsyncEvent {
    /// The port can carry traffic.
    PortActive,
    /// The port can no longer carry traffic.
    PortError,
    /// The GID table changed.
    GidChange,
    /// The queue pair with this number is in error.
    QpError(u32),
    /// The completion queue overran or failed. The device is unusable.
    CqError,
    /// The device is gone.
    DeviceFatal,
    /// An event that this fabric ignores, by the provider's number.
    Other(i32),
}

/// An opened port of an RDMA device. It is used by one thread at a time, and no call on the data path blocks.
///
/// Errors carry `ErrorKind::System` and the `errno` unless a method says otherwise.
pub trait Verbs: Send {
    /// The constant properties of the device.
    fn info(&self) -> &DeviceInfo;

    /// The present state of the port.
    ///
    /// # Errors
    /// The driver's.
    fn port(&self) -> Result<PortInfo, Error>;

    /// Entry `index` of the GID table; `None`: the entry is empty.
    ///
    /// # Errors
    /// The driver's.
    fn gid(&self, index: u32) -> Result<Option<Gid>, Error>;

    /// Registers memory by its address, which peers and work requests use as well: host memory, or memory of
    /// a GPU that a kernel module translates.
    ///
    /// Takes microseconds to seconds (it pins pages). Several threads may do it at the same time through
    /// [`Registrar`].
    ///
    /// # Errors
    /// The driver's: `ENOMEM` when the limit of locked memory is reached, `EAGAIN` when it is busy, `EINVAL`,
    /// `EFAULT`. Nothing was registered then, so the call may be made again.
    ///
    /// # Safety
    /// As `te_core::Memory::register`: until `deregister` returned `Ok`, the span stays mapped and no `&` or
    /// `&mut` exists to bytes that a peer or an operation may write.
    unsafe fn register(&self, span: MemSpan, access: MrAccess) -> Result<Registration, Error> {
        // SAFETY: the caller's promise.
        unsafe { self.registrar().register(span, access) }
    }

    /// The part of the provider that threads may share: it registers pieces of a large span in parallel.
    fn registrar(&self) -> &dyn Registrar;

    /// Registers `len` bytes from `offset` on of the dma-buf behind `fd`, which may be closed afterwards.
    /// `address` is the address by which peers and work requests name the first byte; drivers want it to
    /// have the same offset in its page as `offset`.
    ///
    /// # Errors
    /// `Unsupported` without [`DeviceFeatures::DMABUF`]; the driver's.
    fn register_dmabuf(
        &self,
        fd: BorrowedFd<'_>,
        offset: u64,
        len: u64,
        address: u64,
        access: MrAccess,
    ) -> Result<Registration, Error>;

    /// Ends a registration: when this returned `Ok`, neither the device nor any peer reaches the memory by
    /// its keys.
    ///
    /// # Errors
    /// The driver's.
    fn deregister(&self, registration: Registration) -> Result<(), Error>;

    /// Makes a reliable-connected queue pair on the completion queue, in state RESET.
    ///
    /// # Errors
    /// The driver's: `ENOMEM`, `EINVAL`.
    fn create_qp(&mut self, config: QpConfig) -> Result<Qp, Error>;

    /// Changes the state of a queue pair.
    ///
    /// # Errors
    /// The driver's: `EINVAL` for a step out of order, `ENETUNREACH`, `ETIMEDOUT` when the path cannot be
    /// resolved, `EBUSY` while it is being connected.
    fn modify_qp(&mut self, qp: QpHandle, step: QpStep) -> Result<(), Error>;

    /// Takes a queue pair through [`QpStep::Connect`] without blocking, or returns the part that may block:
    /// the kernel resolves a RoCE neighbour's address, which takes up to seconds when there is no answer.
    ///
    /// # Errors
    /// As [`modify_qp`](Self::modify_qp).
    fn connect_qp(&mut self, qp: QpHandle, path: Path) -> Result<Connecting, Error> {
        self.modify_qp(qp, QpStep::Connect(path)).map(|()| Connecting::Done)
    }

    /// Destroys a queue pair: when this returned `Ok`, it no longer touches our memory, on our behalf or a
    /// peer's. Packets that have left may still land at the peer (L5). Completions that were not polled are
    /// lost.
    ///
    /// # Errors
    /// The driver's; `EBUSY` while it is being connected.
    fn destroy_qp(&mut self, qp: QpHandle) -> Result<(), Error>;

    /// Posts work requests in order and rings the doorbell once. Returns how many the queue pair took, and
    /// the error that stopped it.
    ///
    /// `ENOMEM` means that the send queue is full: a slot is free again when the completion of its request,
    /// or of a later signaled one, was polled. A queue pair in error takes requests and flushes them.
    /// `EINVAL` before `Connect`.
    ///
    /// # Safety
    /// The pieces of `inline` requests are readable during the call, and no `&mut` to them exists. (The
    /// device checks other requests against the registrations.)
    unsafe fn post(&mut self, qp: QpHandle, requests: &[WorkRequest], sges: &[Sge])
    -> (usize, Option<Error>);

    /// Writes completions into `out`, oldest first; returns how many.
    ///
    /// # Errors
    /// The completion queue failed: it will give no more completions.
    fn poll_cq(&mut self, out: &mut [WorkCompletion]) -> Result<usize, Error>;

    /// Requests one event on [`event_fds`](Self::event_fds) at the next completion. Poll once more
    /// afterwards: a completion that came in between raises no event.
    ///
    /// # Errors
    /// The driver's.
    fn arm(&mut self) -> Result<(), Error>;

    /// File descriptors that become readable: that of the completion channel, and that of asynchronous
    /// events. A provider without them has to be polled in a loop. Neither changes while it exists.
    fn event_fds(&self) -> [Option<BorrowedFd<'_>>; 2];

    /// Makes [`event_fds`](Self::event_fds) unreadable again, and returns the next asynchronous event. Does
    /// not block. Call it until it returns `None`.
    fn next_event(&mut self) -> Option<AsyncEvent>;
}

/// Registration by several threads at the same time.
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
