//! A disk under the simulated pool: the state machine of a real one, whose writes all succeed and store
//! nothing. It plays the node, too, which copies between its memory and its disk without taking any time.

use std::collections::BTreeSet;

use store_core::disk::format::Stream;
use store_core::disk::{Demote, Disk, DiskConfig, End, Event, Removed, Work};
use store_core::message::{
    DiskEnd, DiskOrder, DiskProof, EndDiskOrders, EndTasks, FetchDisk, FetchDiskOrders, FetchRequest,
    MountDisk, NodeProof, ReclaimExtents, TaskEnd,
};
use store_core::{ErrorCode, Frame, Incarnation, Instant, Master, NodeId, Operation, SegmentNo, Session};

use super::disks::Shape;

/// Orders in one response.
const ORDERS_MAX: u32 = 256;

/// The disk and its node.
pub(super) struct SimulatedDisk {
    disk: Disk,
    no: SegmentNo,
    node: FetchRequest,
    session: Session,
    /// Generations that are being written.
    writing: BTreeSet<u64>,
    forgetting: BTreeSet<u64>,
    request: Vec<u8>,
    /// Blocks that were written.
    pub(super) written: u64,
    /// Most blocks that may have been written by now.
    allowed: f64,
}

impl SimulatedDisk {
    /// A disk of a node whose memory is mounted. It does not write before [`Self::allow`].
    pub(super) fn new(master: &mut Master, now: Instant, node: NodeId, shape: Shape) -> anyhow::Result<Self> {
        let node = FetchRequest { node, incarnation: Incarnation::new(1), count_max: ORDERS_MAX, key: 0 };
        let mut uuid = [0; 16];
        uuid[..8].copy_from_slice(&node.node.get().to_le_bytes());
        let disk = Disk::format(now, DiskConfig::default(), shape.geometry()?, uuid, 0)?;
        let mount = MountDisk {
            shared: "",
            node: node.node,
            incarnation: node.incarnation,
            uuid,
            bytes: shape.bytes,
            extent_bytes: shape.extent_bytes.into(),
            endpoint: "nowhere:0",
            stage: "nowhere:1",
            ..MountDisk::default()
        };
        let no = master.mount_disk(now, &mount)?.disk;
        let mut this = Self {
            disk,
            no,
            node,
            session: Session::owner(),
            writing: BTreeSet::new(),
            forgetting: BTreeSet::new(),
            request: Vec::new(),
            written: 0,
            allowed: 0.0,
        };
        this.drive(master, now)?;
        Ok(this)
    }

    /// The number that names the disk in replicas.
    pub(super) const fn no(&self) -> SegmentNo {
        self.no
    }

    /// Lets the disk write so many blocks more.
    pub(super) fn allow(&mut self, blocks: f64) {
        self.allowed += blocks;
    }

    /// Does all work that there is for the node.
    pub(super) fn work(&mut self, master: &mut Master, now: Instant) -> anyhow::Result<()> {
        self.carry_out_tasks(master, now)?;
        loop {
            let begun = self.take_orders(master, now)?;
            // What was not enough for a batch waits no longer.
            let later = self.disk.poll_at().map_or(now, |at| at.max(now));
            self.disk.handle_timeout(later);
            self.drive(master, now)?;
            if begun == 0 {
                return Ok(());
            }
        }
    }

    /// Returns the number of orders that are new.
    fn take_orders(&mut self, master: &mut Master, now: Instant) -> anyhow::Result<usize> {
        // What is not allowed yet is not ordered either.
        let left = (self.allowed - self.written as f64) as u32;
        let (bytes_max, count_max) =
            if left == 0 { (0, ORDERS_MAX) } else { (u64::MAX, left.min(ORDERS_MAX)) };
        let fetch = FetchDisk { fetch: FetchRequest { count_max, ..self.node }, disk: self.no, bytes_max };
        let mut out = Vec::new();
        self.call::<FetchDiskOrders>(master, now, &fetch, [], &mut out)?;
        let frame = Frame::parse(&out)?.ok_or(ErrorCode::InternalError)?.0;
        let (_, orders) = FetchDiskOrders::decode_response(&frame)?;
        let mut begun = 0;
        let mut refused = Vec::new();
        for order in orders {
            match order {
                DiskOrder::Demote { tenant, key, generation, len, crc32c, proven, .. } => {
                    if !self.writing.insert(generation) {
                        continue;
                    }
                    let stream = if proven { Stream::Proven } else { Stream::Trial };
                    let (id, tenant, key) = (generation, tenant.0, key.0.into());
                    let demote = Demote { id, tenant, key, generation, len, crc32c, stream, token: 0 };
                    match self.disk.demote(now, demote) {
                        Ok(()) => begun += 1,
                        Err(_) => refused.push(generation),
                    }
                }
                DiskOrder::Forget { tenant, key, generation, locator } => {
                    if self.forgetting.insert(generation) {
                        let removed = Removed { tenant: tenant.0, key: key.0.into(), generation };
                        self.disk.forget(now, removed, locator)?;
                        begun += 1;
                    }
                }
                DiskOrder::Clear { .. } => {}
            }
        }
        for generation in refused {
            self.writing.remove(&generation);
            let result = Err(ErrorCode::UnavailableInCurrentStatus);
            self.end(master, now, DiskEnd::Demoted { generation, result })?;
        }
        self.drive(master, now)?;
        Ok(begun)
    }

    /// Carries out what the disk orders, and tells the master what has happened.
    fn drive(&mut self, master: &mut Master, now: Instant) -> anyhow::Result<()> {
        loop {
            while let Some(order) = self.disk.poll_order() {
                let data = match &order.work {
                    Work::Read { .. } => vec![0; order.work.bytes() as usize],
                    Work::Write(_) | Work::Sync => Vec::new(),
                };
                self.disk.complete(now, order.op, End::Done { bytes: order.work.bytes(), data: &data });
            }
            let Some(event) = self.disk.poll_event() else { return Ok(()) };
            let proof = self.proof();
            match event {
                Event::Demoted { id, locator } => {
                    self.writing.remove(&id);
                    self.written += 1;
                    self.end(master, now, DiskEnd::Demoted { generation: id, result: Ok(locator) })?;
                }
                Event::DemoteFailed { id, .. } => {
                    self.writing.remove(&id);
                    let result = Err(ErrorCode::InternalError);
                    self.end(master, now, DiskEnd::Demoted { generation: id, result })?;
                }
                Event::Forgotten(removed) => {
                    self.forgetting.remove(&removed.generation);
                    self.end(master, now, DiskEnd::Forgotten { generation: removed.generation })?;
                }
                Event::Reclaim { sequence } => {
                    self.call::<ReclaimExtents>(master, now, &proof, [sequence], &mut Vec::new())?;
                    self.disk.reclaimed(now, sequence);
                }
                Event::Ready => {
                    self.call::<store_core::message::DiskReady>(master, now, &proof, [], &mut Vec::new())?;
                }
                _ => {}
            }
        }
    }

    /// Copies from the disk into memory.
    fn carry_out_tasks(&mut self, master: &mut Master, now: Instant) -> anyhow::Result<()> {
        loop {
            let orders = master.fetch_tasks(now, &self.node)?;
            let ends: Vec<TaskEnd> = orders
                .iter()
                .map(|order| TaskEnd {
                    id: order.id,
                    attempt: order.attempt,
                    result: Ok(order.checksum),
                    quiet: true,
                })
                .collect();
            if ends.is_empty() {
                return Ok(());
            }
            let proof = self.proof().node;
            self.call::<EndTasks>(master, now, &proof, ends, &mut Vec::new())?;
        }
    }

    const fn proof(&self) -> DiskProof {
        DiskProof { node: NodeProof { node: self.node.node, key: 0 }, disk: self.no }
    }

    /// Reports an end. What the master does not expect any more is none of a simulation's business.
    fn end(&mut self, master: &mut Master, now: Instant, end: DiskEnd<'_>) -> anyhow::Result<()> {
        let proof = self.proof();
        self.call::<EndDiskOrders>(master, now, &proof, [end], &mut Vec::new())
    }

    fn call<'a, O: Operation>(
        &mut self,
        master: &mut Master,
        now: Instant,
        head: &O::Request<'_>,
        items: impl IntoIterator<Item = O::RequestItem<'a>, IntoIter: ExactSizeIterator>,
        out: &mut Vec<u8>,
    ) -> anyhow::Result<()> {
        self.request.clear();
        O::encode_request(&mut self.request, 1, head, items.into_iter())?;
        let frame = Frame::parse(&self.request)?.ok_or(ErrorCode::InternalError)?.0;
        master.handle(now, &mut self.session, &frame, out);
        Frame::parse(out)?.ok_or(ErrorCode::InternalError)?.0.header.result()?;
        Ok(())
    }
}
