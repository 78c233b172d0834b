//! Memory of devices beyond what the conformance suite checks: which ends wait for hops, that staging slots
//! come back, and that no peer keeps others waiting for ever.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod common;

use std::io::Write;
use std::sync::Arc;
use std::time::Duration;

use common::raw::{Raw, frame_of};
use common::{ALL, Node, drive, eventually, finish, skip};
use te_core::testkit::{FakeDevices, FakeStaging, PeekPoke, each_seed};
use te_core::{
    Access, ErrorKind, ExpelMode, GpuVendor, Location, MemSpan, Memory, MemoryKinds, Op, Outcome, RegionId,
    RegionOffset, RemoteOffset, RemoteRegionId, Slice, Token, Transport,
};
use te_tcp::frame::{self, ConnectionEntry, Header, Kind};
use te_tcp::{Config, TcpTransport};
use zerocopy::IntoBytes;

const GPU: Location = Location::Device(GpuVendor::Nvidia, 0);
/// The region on the device.
const ON_DEVICE: RegionId = RegionId::new(1, 1);
const REMOTE: RemoteRegionId = RemoteRegionId::new(1, 1);
const BYTES: usize = 64 << 10;

/// A node with a device, and a region of the device's memory.
struct Gpu {
    node: Node,
    device: FakeDevices,
    span: MemSpan,
}

#[allow(unsafe_code, reason = "registers memory of the device, reads and writes it")]
impl Gpu {
    fn new(config: Config, seed: u64, slots: u32) -> Self {
        let staging = FakeStaging { slots, slot_bytes: 1_000, hops_max: 2, polls_max: 9 };
        let device = FakeDevices::new(seed, GPU, staging);
        let transport = TcpTransport::with_devices(config, Arc::new(device.clone())).unwrap();
        let mut node = Node::with(transport, 4_096, ALL);
        let span = device.allocate(BYTES);
        // SAFETY: memory of the device lives as long as the device.
        unsafe { node.transport.register(ON_DEVICE, span, ALL) }.unwrap();
        Self { node, device, span }
    }

    fn attach(&mut self, target: &Self) {
        let export = target.node.export_of(ON_DEVICE);
        self.node.transport.attach(REMOTE, &export).unwrap();
    }

    fn fill(&self, byte: u8) {
        // SAFETY: memory of the device that no slice of the test uses.
        unsafe { self.device.poke(self.span, &[byte; BYTES]) };
    }

    fn bytes(&self, at: usize, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        // SAFETY: as in `fill`.
        unsafe { self.device.peek(self.span.part(at as u64, len as u64).unwrap(), &mut bytes) };
        bytes
    }

    fn slots_taken(&self) -> usize {
        self.node.transport.slots_taken()
    }

    /// A connection of a peer that the test plays, for operations on the region on the device.
    fn connect(&mut self, session: u64, connection: u16) -> Raw {
        let mut raw = Raw::greeted(&mut self.node, session, connection);
        raw.export = frame::parse_export(&self.node.export_of(ON_DEVICE)).unwrap();
        raw
    }

    /// Waits until all bytes of one WRITE have arrived and its only hop runs.
    fn wait_for_hop(&mut self, raw: &mut Raw, len: usize) {
        raw.stream.write_all(&frame_of(Kind::Write, 0, 0, &[raw.operation(0, len as u64)])).unwrap();
        raw.stream.write_all(&vec![7; len]).unwrap();
        eventually("the hop runs", || {
            self.node.poll();
            self.node.transport.stats().bytes_served == len as u64
        });
    }

    /// Fills the memory, polls on, and checks that no hop changes it any more.
    fn stays(&mut self, byte: u8) -> bool {
        self.fill(byte);
        (0..20).for_each(|_| _ = self.node.poll());
        self.is_full(byte)
    }

    fn is_full(&self, byte: u8) -> bool {
        self.bytes(0, BYTES) == [byte; BYTES]
    }
}

fn slice(token: u64, op: Op, at: u64, len: u32) -> Slice {
    Slice {
        token: Token(token),
        local: RegionOffset::new(ON_DEVICE, at),
        remote: RemoteOffset::new(REMOTE, at),
        len,
        op,
    }
}

#[test]
fn two_nodes_with_one_slot_each_that_write_and_read_each_other_both_finish() {
    let config = Config { connections: 3, ..common::config() };
    let (mut a, mut b) = (Gpu::new(config.clone(), 1, 1), Gpu::new(config, 2, 1));
    a.attach(&b);
    b.attach(&a);
    a.fill(1);
    b.fill(2);
    let batch: Vec<Slice> =
        (0..32).map(|i| slice(i, if i % 2 == 0 { Op::Write } else { Op::Read }, i * 1_500, 1_500)).collect();
    a.node.submit(&batch[..16]);
    b.node.submit(&batch[16..]);
    drive(&mut [&mut a.node, &mut b.node], |node| node.done.len() == 16);
    drive(&mut [&mut b.node, &mut a.node], |node| node.done.len() == 16);
    assert!(a.node.done.iter().chain(&b.node.done).all(|end| end.outcome == Outcome::Applied));
    for (i, slice) in batch.iter().enumerate() {
        let source = if (i < 16) == (slice.op == Op::Write) { 1 } else { 2 };
        let at = slice.local.offset as usize;
        assert_eq!((a.bytes(at, 1_500), b.bytes(at, 1_500)), (vec![source; 1_500], vec![source; 1_500]));
    }
    assert_eq!((a.slots_taken(), b.slots_taken()), (0, 0));
}

#[test]
fn slots_come_back_after_cancels_broken_connections_and_an_expulsion() {
    for checksum in [false, true] {
        let config = Config { checksum, ..common::config() };
        let (mut a, mut b) = (Gpu::new(config.clone(), 3, 3), Gpu::new(config, 4, 3));
        a.attach(&b);
        for round in 0..24_u64 {
            let batch: Vec<Slice> = (0..8)
                .map(|i| slice(round * 8 + i, [Op::Write, Op::Read][i as usize % 2], i * 5_000, 5_000))
                .collect();
            a.node.submit(&batch);
            for _ in 0..round * 3 {
                a.node.poll();
                b.node.poll();
            }
            match round % 3 {
                0 => batch.iter().for_each(|slice| {
                    // It may have ended already.
                    let _ended_or_not = a.node.transport.cancel(slice.token);
                }),
                1 => b.node.transport.close_connections(),
                _ => a.node.transport.close_connections(),
            }
            let all = (round as usize + 1) * 8;
            drive(&mut [&mut a.node, &mut b.node], |node| node.done.len() == all);
            drive(&mut [&mut a.node, &mut b.node], |node| node.transport.slots_taken() == 0);
            drive(&mut [&mut b.node, &mut a.node], |node| node.transport.slots_taken() == 0);
        }
        let batch: Vec<Slice> = (0..8).map(|i| slice(900 + i, Op::Write, i * 5_000, 5_000)).collect();
        a.node.submit(&batch);
        drive(&mut [&mut b.node, &mut a.node], |node| node.transport.slots_taken() > 0);
        let peer = a.node.transport.identity();
        drive(&mut [&mut b.node, &mut a.node], |node| {
            node.transport.expel(peer, ExpelMode::Force) == Ok(true)
        });
        b.fill(7);
        drive(&mut [&mut a.node, &mut b.node], |node| node.done.len() == 25 * 8);
        assert!(b.is_full(7), "a hop of an expelled peer landed");
        drive(&mut [&mut b.node, &mut a.node], |node| node.transport.slots_taken() == 0);
        for end in [&mut a, &mut b] {
            assert_eq!(end.node.transport.deregister(ON_DEVICE), Ok(()));
        }
    }
}

#[test]
fn a_cancelled_slice_ends_when_its_hop_has_and_its_region_is_busy_until_then() {
    let (mut a, b) = (Gpu::new(common::config(), 5, 2), Gpu::new(common::config(), 6, 2));
    a.attach(&b);
    a.node.submit(&[slice(1, Op::Write, 0, 500)]);
    a.node.poll();
    a.node.transport.cancel(Token(1)).unwrap();
    a.node.transport.cancel(Token(1)).unwrap();
    assert!(a.node.ended(1).is_none() && a.slots_taken() == 1);
    let busy = a.node.transport.deregister(ON_DEVICE).map_err(|error| error.kind);
    assert_eq!(busy, Err(ErrorKind::Busy));
    // The target is not polled: the completion waits for the hop alone.
    let end = finish(&mut [&mut a.node], 1);
    assert_eq!((end.outcome, common::kind(&end)), (Outcome::NotApplied, ErrorKind::Canceled));
    assert_eq!((a.slots_taken(), a.node.transport.deregister(ON_DEVICE)), (0, Ok(())));
}

#[test]
fn a_peer_that_takes_no_answers_keeps_others_waiting_for_a_second_at_most() {
    let config = Config { send_buffer_bytes: Some(8_192), ..common::config() };
    let mut target = Gpu::new(config, 7, 2);
    let mut reader = Raw::greeted(&mut target.node, 1, 0);
    reader.export = frame::parse_export(&target.node.export_of(ON_DEVICE)).unwrap();
    // More bytes than the sockets hold.
    for seq in 0..100 {
        let request = frame_of(Kind::Read, 0, seq, &[reader.operation(0, BYTES as u64)]);
        reader.send(&mut target.node, &request);
    }
    let mut quiet = 0;
    while quiet < 10_000 {
        let sent = target.node.transport.stats().bytes_sent;
        target.node.poll();
        quiet = if target.node.transport.stats().bytes_sent == sent { quiet + 1 } else { 0 };
    }
    assert_eq!(target.slots_taken(), 2, "the reader holds all");

    let mut other = Gpu::new(common::config(), 8, 2);
    other.attach(&target);
    other.fill(9);
    other.node.submit(&[slice(1, Op::Write, 0, BYTES as u32)]);
    common::linger(&mut [&mut other.node, &mut target.node], Duration::from_millis(50));
    assert!(other.node.ended(1).is_none());
    skip(Duration::from_millis(1_100));
    let end = finish(&mut [&mut other.node, &mut target.node], 1);
    assert!(end.outcome == Outcome::Applied && target.is_full(9));
    assert_eq!(target.slots_taken(), 0);
}

/// A target to which half of a WRITE of 5,000 bytes was sent; two parts of it have both slots.
fn half_of_a_write(seed: u64) -> (Gpu, Raw) {
    let mut target = Gpu::new(common::config(), seed, 2);
    let mut writer = target.connect(1, 0);
    let request = frame_of(Kind::Write, 0, 0, &[writer.operation(0, 5_000)]);
    writer.send(&mut target.node, &request);
    writer.send(&mut target.node, &[1; 2_500]);
    drive(&mut [&mut target.node], |node| {
        node.transport.region_pins(ON_DEVICE).is_ok_and(|users| users.peers == 2)
    });
    (target, writer)
}

#[test]
fn no_part_of_an_operation_begins_in_a_region_that_is_withdrawn() {
    for seed in each_seed(0..32) {
        let (mut target, mut writer) = half_of_a_write(seed);
        // The other parts have not begun, and do not begin any more.
        assert_eq!(target.node.transport.deregister(ON_DEVICE), Err(ErrorKind::Busy.into()));
        writer.send(&mut target.node, &[1; 2_500]);
        let answer = writer.receive(&mut target.node, 20);
        assert_eq!(answer[16..], (frame::Status::Withdrawn as u32).to_le_bytes());
        assert_eq!(target.bytes(0, 2_000), [1; 2_000]);
        assert_eq!(target.bytes(2_000, 3_000), [0; 3_000]);
        drive(&mut [&mut target.node], |node| node.transport.deregister(ON_DEVICE) == Ok(()));
        assert!(target.slots_taken() == 0 && writer.is_alive(&mut target.node));
    }
}

#[test]
fn what_still_arrives_for_a_withdrawn_region_is_discarded() {
    let (mut target, mut writer) = half_of_a_write(9);
    drive(&mut [&mut target.node], |node| node.transport.deregister(ON_DEVICE) == Ok(()));
    assert_eq!(target.bytes(0, 2_000), [1; 2_000]);
    target.fill(3);
    writer.send(&mut target.node, &[1; 2_500]);
    let answer = writer.receive(&mut target.node, 20);
    assert_eq!(answer[16..], (frame::Status::Withdrawn as u32).to_le_bytes());
    assert!(target.is_full(3) && target.slots_taken() == 0 && writer.is_alive(&mut target.node));
}

#[test]
#[allow(unsafe_code, reason = "registers what is to be refused")]
fn memory_is_refused_that_no_stager_reaches() {
    let mut end = Gpu::new(common::config(), 10, 2);
    assert_eq!(end.node.transport.capabilities().memory, MemoryKinds::HOST | MemoryKinds::CUDA);
    let elsewhere = Location::Device(GpuVendor::Nvidia, 1);
    let host = MemSpan::new(core::ptr::without_provenance_mut(4_096), 64);
    for (span, kind) in [
        (end.span.at(elsewhere), ErrorKind::Unsupported),
        (end.span.at(Location::Device(GpuVendor::Amd, 0)), ErrorKind::Unsupported),
        (host.at(GPU), ErrorKind::InvalidArgument),
    ] {
        let id = RegionId::new(5, 1);
        // SAFETY: the call is refused, and the memory is never accessed.
        let refused = unsafe { end.node.transport.register(id, span, Access::all()) };
        assert_eq!(refused.map_err(|error| error.kind), Err(kind), "{span:?}");
        assert!(end.node.transport.deregister(id).is_err());
    }
}

#[test]
fn a_write_is_acknowledged_when_its_last_hop_has_ended() {
    for seed in each_seed(0..16) {
        let mut target = Gpu::new(common::config(), seed, 3);
        let mut writer = target.connect(1, 0);
        writer.stream.write_all(&frame_of(Kind::Write, 0, 0, &[writer.operation(0, 2_500)])).unwrap();
        writer.stream.write_all(&[7; 2_500]).unwrap();
        eventually("the ACK has arrived", || {
            target.node.poll();
            assert!(writer.receive_some());
            writer.received.len() >= 20
        });
        assert!(target.bytes(0, 2_500) == [7; 2_500], "seed {seed}: acknowledged before the last hop");
    }
}

#[test]
fn a_read_ends_when_its_last_hop_has_ended() {
    for seed in each_seed(0..16) {
        let (mut a, mut b) = (Gpu::new(common::config(), seed, 3), Gpu::new(common::config(), seed + 1, 3));
        a.attach(&b);
        b.fill(9);
        a.node.submit(&[slice(1, Op::Read, 0, 2_500)]);
        assert_eq!(finish(&mut [&mut a.node, &mut b.node], 1).outcome, Outcome::Applied);
        assert!(a.bytes(0, 2_500) == [9; 2_500], "seed {seed}: completed before the last hop");
    }
}

#[test]
fn a_fence_is_answered_when_no_hop_of_an_older_connection_runs() {
    for seed in each_seed(0..32) {
        let mut target = Gpu::new(common::config(), seed, 2);
        let (mut old, mut new) = (target.connect(1, 0), target.connect(1, 1));
        target.wait_for_hop(&mut old, 800);
        new.stream.write_all(Header::new(Kind::Fence, 0, 1, 5).as_bytes()).unwrap();
        new.stream.write_all(ConnectionEntry::new(1, 1).as_bytes()).unwrap();
        eventually("the FENCE_ACK has arrived", || {
            target.node.poll();
            assert!(new.receive_some());
            new.received.len() >= 16
        });
        assert!(target.stays(3), "seed {seed}: a hop has ended after the fence");
        assert_eq!(target.slots_taken(), 0);
    }
}

#[test]
fn an_expulsion_is_complete_when_no_hop_of_the_peer_runs() {
    for seed in each_seed(0..32) {
        let mut target = Gpu::new(common::config(), seed, 2);
        let mut writer = target.connect(1, 0);
        target.wait_for_hop(&mut writer, 800);
        eventually("the peer is expelled", || {
            target.node.poll();
            target.node.transport.expel(2, ExpelMode::Force) == Ok(true)
        });
        assert!(target.stays(3), "seed {seed}: a hop has ended after the expulsion");
    }
}

#[test]
fn a_region_is_busy_until_the_hops_of_peers_have_ended() {
    for seed in each_seed(0..32) {
        let mut target = Gpu::new(common::config(), seed, 2);
        let mut writer = target.connect(1, 0);
        target.wait_for_hop(&mut writer, 800);
        eventually("the region is free", || {
            let ended = target.node.transport.deregister(ON_DEVICE);
            assert!(ended.is_ok_and(|()| true) || ended == Err(ErrorKind::Busy.into()));
            ended.is_err().then(|| target.node.poll());
            ended.is_ok()
        });
        assert!(target.stays(3), "seed {seed}: a hop has ended after `deregister`");
    }
}

#[test]
fn a_region_is_busy_until_the_hops_of_its_own_slices_have_ended() {
    for seed in each_seed(0..32) {
        let (mut a, mut b) = (Gpu::new(common::config(), seed, 2), Gpu::new(common::config(), seed + 1, 2));
        a.attach(&b);
        a.node.submit(&[slice(1, Op::Read, 0, 800)]);
        drive(&mut [&mut a.node, &mut b.node], |node| node.transport.stats().bytes_received > 800);
        a.node.transport.cancel(Token(1)).ok();
        eventually("the region is free", || {
            let ended = a.node.transport.deregister(ON_DEVICE);
            ended.is_err().then(|| a.node.poll());
            ended.is_ok()
        });
        assert!(a.stays(3), "seed {seed}: a hop has ended after `deregister`");
    }
}

#[test]
fn peers_that_do_not_answer_leave_slots_for_the_others() {
    let mut a = Gpu::new(common::config(), 11, 8);
    let targets = [1, 2, 3].map(|_| common::node(common::config(), BYTES));
    for (index, target) in (2..).zip(&targets) {
        a.node.transport.attach(RemoteRegionId::new(index, 1), &target.export()).unwrap();
    }
    let write = |token, index, len| Slice {
        remote: RemoteOffset::new(RemoteRegionId::new(index, 1), 0),
        ..slice(token, Op::Write, 0, len)
    };
    // The first two are not polled. Each of these slices has 66 pieces.
    for index in [2, 3] {
        a.node.submit(&[write(u64::from(index), index, BYTES as u32)]);
        (0..200).for_each(|_| _ = a.node.poll());
    }
    assert!(a.slots_taken() < 8, "both have all {} slots", a.slots_taken());
    let [_, _, mut third] = targets;
    a.node.submit(&[write(4, 4, 2_500)]);
    let end = finish(&mut [&mut a.node, &mut third], 4);
    assert_eq!((end.outcome, a.node.ended(2), a.node.ended(3)), (Outcome::Applied, None, None));
}
