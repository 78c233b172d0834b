//! Memory of GPUs, which a NIC reaches by a dma-buf: what is registered, what is refused, how long the file
//! descriptor stays open, and the conformance suite over such memory at both ends and at one.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]
#![allow(unsafe_code, reason = "registers memory, and reads and writes that of the fake devices")]

mod common;
#[path = "common/devices.rs"]
mod fake;

use std::alloc::System;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use common::{ALL, Block, Net, REMOTE, Reopen, config, kind, pattern, read, write};
use fake::ExportingDevices;
use te_core::device::{Devices, Stager};
use te_core::testkit::{CountingAlloc, FakeDevices, FakeStaging, Harness, Pair, PeekPoke, Side};
use te_core::{
    Access, Error, ErrorKind, GpuVendor, Location, MemSpan, Memory, MemoryKinds, RegionId, RegionOffset,
    Slice, Transport,
};
use te_fabric::testkit::{Ends, EndsConfig, EndsMemory, Node};
use te_rdma::sim::{DeviceConfig, LinkConfig, SimConfig, SimFabric};
use te_rdma::verbs::DeviceFeatures;
use te_rdma::{CHUNKS_MAX, Config, RdmaTransport};

#[global_allocator]
static ALLOC: CountingAlloc<System> = CountingAlloc::new(System);

const HERE: Location = Location::Device(GpuVendor::Nvidia, 0);
const THERE: Location = Location::Device(GpuVendor::Amd, 1);
/// A region of a device.
const ON_DEVICE: RegionId = RegionId::new(4, 1);
const BYTES: usize = 64 << 10;

/// A NIC that takes dma-bufs.
fn nic() -> DeviceConfig {
    DeviceConfig { features: DeviceFeatures::DMABUF, ..DeviceConfig::default() }
}

/// Adds a node with `devices` to `net`; its first region is on the heap.
fn add(net: &mut Net, nic: DeviceConfig, config: &Config, devices: Arc<dyn Devices>) -> usize {
    let nic = net.fabric.device(nic);
    net.ports.push(nic.id());
    let transport = RdmaTransport::with_devices(nic, config.clone(), devices).unwrap();
    net.nodes.push(Node::with(transport, BYTES, ALL));
    net.nodes.len() - 1
}

/// Two nodes with devices. Node 1 exports 64 KiB of its device, which node 0 has attached.
fn pair(config: &Config) -> (Net, ExportingDevices, MemSpan) {
    let mut net = Net::new(1);
    let (here, there) = (ExportingDevices::new(HERE), ExportingDevices::new(THERE));
    add(&mut net, nic(), config, Arc::new(here));
    add(&mut net, nic(), config, Arc::new(there.clone()));
    let span = there.allocate(BYTES);
    register(&mut net, 1, span, ALL).unwrap();
    net.attach(0, REMOTE, 1, ON_DEVICE);
    (net, there, span)
}

/// Two nodes, of which node 0 has devices. It has attached the region of node 1, which is on the heap.
fn pair_with_devices_here() -> (Net, ExportingDevices) {
    let mut net = Net::new(1);
    let here = ExportingDevices::new(HERE);
    add(&mut net, nic(), &config(), Arc::new(here.clone()));
    net.add(&config(), BYTES);
    net.attach(0, REMOTE, 1, common::REGION);
    net.warm_up();
    (net, here)
}

fn register(net: &mut Net, node: usize, span: MemSpan, access: Access) -> Result<(), ErrorKind> {
    let transport = &mut net.nodes[node].transport;
    // SAFETY: memory of fake devices, or of blocks that outlive the net; no reference to it exists.
    unsafe { transport.register(ON_DEVICE, span, access) }.map_err(|error| error.kind)
}

fn kinds(net: &Net, node: usize) -> MemoryKinds {
    net.nodes[node].transport.capabilities().memory
}

fn peek(devices: &ExportingDevices, span: MemSpan, offset: u64, len: usize) -> Vec<u8> {
    let mut out = vec![0; len];
    // SAFETY: memory of the devices.
    unsafe { devices.peek(span.part(offset, len as u64).unwrap(), &mut out) };
    out
}

#[test]
fn a_peer_writes_and_reads_memory_of_a_device() {
    let (mut net, there, span) = pair(&config());
    net.nodes[0].memory.paint(3);
    net.transfer(&[write(1, 100, 5_000, 40_000)]);
    assert!(peek(&there, span, 5_000, 40_000) == pattern(3, 100, 40_000));
    assert!(peek(&there, span, 0, 5_000) == [0; 5_000]);
    net.nodes[0].memory.set(0, &[0; BYTES]);
    net.transfer(&[read(2, 7, 5_001, 30_000)]);
    assert!(net.nodes[0].memory.get(7, 30_000) == pattern(3, 101, 30_000));
}

#[test]
fn a_region_that_begins_inside_an_allocation_is_registered_in_chunks() {
    let config = Config { registration_chunk_bytes: 4_096, ..config() };
    let mut net = Net::new(1);
    let there = ExportingDevices::new(THERE);
    add(&mut net, nic(), &config, Arc::new(ExportingDevices::new(HERE)));
    add(&mut net, nic(), &config, Arc::new(there.clone()));
    let before = net.fabric.mr_count(net.ports[1]);
    let span = there.allocate(BYTES).part(5_000, 20_000).unwrap();
    register(&mut net, 1, span, ALL).unwrap();
    // From the middle of the second page to the middle of the seventh.
    assert_eq!(net.fabric.mr_count(net.ports[1]) - before, 6);
    net.attach(0, REMOTE, 1, ON_DEVICE);
    net.nodes[0].memory.paint(9);
    net.transfer(&[write(1, 0, 0, 20_000)]);
    assert!(peek(&there, span, 0, 20_000) == pattern(9, 0, 20_000));
    assert_eq!(there.descriptors(span), 1, "one for all chunks");
}

#[test]
fn memory_that_was_mapped_piece_by_piece_has_a_dmabuf_per_mapping_and_no_chunk_in_two() {
    let mut net = Net::new(1);
    let there = ExportingDevices::new(THERE);
    add(&mut net, nic(), &config(), Arc::new(ExportingDevices::new(HERE)));
    add(&mut net, nic(), &config(), Arc::new(there.clone()));
    let before = net.fabric.mr_count(net.ports[1]);
    // Mappings meet at 32 KiB and 40 KiB: chunks of 8 KiB, the first and the last of which are shorter.
    let span = there.allocate_in_pieces(&[32 << 10, 8 << 10, 24 << 10]).part(5_000, 55_000).unwrap();
    register(&mut net, 1, span, ALL).unwrap();
    assert_eq!(net.fabric.mr_count(net.ports[1]) - before, 8);
    for piece in [0, 28_000, 36_000] {
        assert_eq!(there.descriptors(span.part(piece, 1).unwrap()), 1, "at {piece}");
    }
    net.attach(0, REMOTE, 1, ON_DEVICE);
    net.nodes[0].memory.paint(9);
    net.transfer(&[write(1, 0, 0, 55_000)]);
    assert!(peek(&there, span, 0, 55_000) == pattern(9, 0, 55_000));
    net.nodes[0].memory.set(0, &[0; BYTES]);
    net.transfer(&[read(2, 0, 1, 54_000)]);
    assert!(net.nodes[0].memory.get(0, 54_000) == pattern(9, 1, 54_000));
    net.nodes[1].transport.deregister(ON_DEVICE).unwrap();
    for piece in [0, 28_000, 36_000] {
        assert_eq!(there.descriptors(span.part(piece, 1).unwrap()), 0, "at {piece}");
    }
}

#[test]
fn mappings_in_too_many_chunks_are_refused_and_closed() {
    let mut net = Net::new(1);
    let there = ExportingDevices::new(THERE);
    let nic = DeviceConfig { mr_count_max: 2 * CHUNKS_MAX, ..nic() };
    add(&mut net, nic, &config(), Arc::new(there.clone()));
    let before = net.fabric.mr_count(net.ports[0]);
    // They meet at a page, so that every page would be a chunk.
    let span = there.allocate_in_pieces(&[4_096, (CHUNKS_MAX as usize) * 4_096]);
    assert_eq!(register(&mut net, 0, span, ALL), Err(ErrorKind::Full));
    assert_eq!((net.fabric.mr_count(net.ports[0]), there.descriptors(span.part(0, 1).unwrap())), (before, 0));
    assert_eq!(register(&mut net, 0, span.part(0, 3 * 4_096).unwrap(), ALL), Ok(()));
}

#[test]
fn memory_of_a_device_is_never_read_by_the_cpu() {
    let (mut net, here) = pair_with_devices_here();
    let span = here.allocate(4_096);
    // SAFETY: memory of the devices.
    unsafe { here.poke(span, &pattern(3, 0, 4_096)) };
    register(&mut net, 0, span, ALL).unwrap();
    let before = net.nodes[0].transport.stats().inlined;
    // The CPU would read an inline piece, which faults. The second slice is contiguous at the peer, so that
    // both share one work request.
    let on_device = Slice { local: RegionOffset::new(ON_DEVICE, 0), ..write(1, 0, 0, 100) };
    net.transfer(&[on_device, write(2, 0, 100, 20)]);
    assert_eq!(net.nodes[0].transport.stats().inlined, before);
    assert!(net.nodes[1].memory.get(0, 100) == pattern(3, 0, 100));
    net.transfer(&[write(3, 0, 0, 20)]);
    assert_eq!(net.nodes[0].transport.stats().inlined, before + 1);
}

#[test]
fn devices_without_dmabufs_are_refused_and_nothing_is_left_behind() {
    let mut net = Net::new(1);
    // These have none, and loading from their memory faults.
    let devices = FakeDevices::new(1, HERE, FakeStaging::default());
    add(&mut net, nic(), &config(), Arc::new(devices.clone()));
    let before = net.fabric.mr_count(net.ports[0]);
    let span = devices.allocate(4_096);
    assert_eq!(register(&mut net, 0, span, ALL), Err(ErrorKind::Unsupported));
    assert_eq!(net.fabric.mr_count(net.ports[0]), before);
    let block = Block::new(4_096);
    assert_eq!(register(&mut net, 0, block.span(), ALL), Ok(()), "the id is free");
    net.nodes[0].transport.deregister(ON_DEVICE).unwrap();
}

#[test]
fn a_nic_that_takes_no_dmabufs_declares_host_memory_alone() {
    let mut net = Net::new(1);
    let here = ExportingDevices::new(HERE);
    add(&mut net, DeviceConfig::default(), &config(), Arc::new(here.clone()));
    assert_eq!(kinds(&net, 0), MemoryKinds::HOST);
    let span = here.allocate(4_096);
    assert_eq!(register(&mut net, 0, span, ALL), Err(ErrorKind::Unsupported));
    assert_eq!(here.descriptors(span), 0);

    add(&mut net, nic(), &config(), Arc::new(here));
    assert_eq!(kinds(&net, 1), MemoryKinds::HOST | MemoryKinds::CUDA);
    net.add_device(nic(), &config(), BYTES);
    assert_eq!(kinds(&net, 2), MemoryKinds::HOST, "without devices");
}

#[test]
fn a_region_of_too_many_chunks_is_refused() {
    let config = Config { registration_chunk_bytes: 4_096, ..config() };
    let mut net = Net::new(1);
    let here = ExportingDevices::new(HERE);
    add(&mut net, DeviceConfig { mr_count_max: 2 * CHUNKS_MAX, ..nic() }, &config, Arc::new(here.clone()));
    let span = here.allocate((CHUNKS_MAX as usize + 1) * 4_096);
    let before = net.fabric.mr_count(net.ports[0]);
    assert_eq!(register(&mut net, 0, span, ALL), Err(ErrorKind::Full));
    assert_eq!((net.fabric.mr_count(net.ports[0]), here.descriptors(span)), (before, 0));
    assert_eq!(register(&mut net, 0, span.part(0, 16 * 4_096).unwrap(), ALL), Ok(()));
}

#[test]
fn a_span_that_is_not_memory_of_its_device_is_invalid() {
    let mut net = Net::new(1);
    let here = ExportingDevices::new(HERE);
    add(&mut net, nic(), &config(), Arc::new(here.clone()));
    let (span, block) = (here.allocate(4_096), Block::new(4_096));
    let too_long = MemSpan::new(span.as_ptr(), 8_192).at(HERE);
    let elsewhere = span.at(Location::Device(GpuVendor::Nvidia, 1));
    for wrong in [too_long, elsewhere, block.span().at(HERE)] {
        assert_eq!(register(&mut net, 0, wrong, ALL), Err(ErrorKind::InvalidArgument), "{wrong:?}");
    }
    assert_eq!(register(&mut net, 0, span.at(THERE), ALL), Err(ErrorKind::Unsupported));
}

#[test]
fn the_descriptor_is_open_until_the_region_is_deregistered() {
    let (mut net, there, span) = pair(&config());
    assert_eq!(there.descriptors(span), 1);
    net.warm_up();
    net.nodes[1].transport.deregister(ON_DEVICE).unwrap();
    assert_eq!(there.descriptors(span), 0);
    net.nodes[0].memory.paint(5);
    net.nodes[0].submit(&[write(1, 0, 0, 100)]);
    assert!(matches!(kind(&net.finish(1)), ErrorKind::AccessDenied | ErrorKind::Stale));
    assert_eq!(peek(&there, span, 0, 100), [0; 100], "nothing was written");

    register(&mut net, 1, span, ALL).unwrap();
    assert_eq!(there.descriptors(span), 1);
    drop(net);
    assert_eq!(there.descriptors(span), 0, "the transport is gone");
}

#[test]
fn a_region_in_use_is_busy_and_keeps_its_descriptor() {
    let (mut net, here) = pair_with_devices_here();
    let span = here.allocate(BYTES);
    register(&mut net, 0, span, ALL).unwrap();
    net.nodes[1].memory.paint(6);
    net.set_link(0, 1, LinkConfig { latency_ns: 300_000, ..LinkConfig::CALM });
    net.nodes[0].submit(&[Slice { local: RegionOffset::new(ON_DEVICE, 0), ..read(1, 0, 0, 4_096) }]);
    net.step();
    let busy = net.nodes[0].transport.deregister(ON_DEVICE);
    assert_eq!(busy.map_err(|error| error.kind), Err(ErrorKind::Busy));
    assert_eq!(here.descriptors(span), 1);
    assert_eq!(net.finish(1).result, Ok(()));
    assert!(peek(&here, span, 0, 4_096) == pattern(6, 0, 4_096));
    net.nodes[0].transport.deregister(ON_DEVICE).unwrap();
    assert_eq!(here.descriptors(span), 0);
}

#[test]
fn a_registration_that_fails_closes_the_descriptor() {
    let config = Config { registration_chunk_bytes: 4_096, ..config() };
    let mut net = Net::new(1);
    let here = ExportingDevices::new(HERE);
    add(&mut net, nic(), &config, Arc::new(here.clone()));
    let span = here.allocate(BYTES);
    let before = net.fabric.mr_count(net.ports[0]);
    net.fabric.fail_registrations(net.ports[0], libc::ENOMEM, 1);
    assert_eq!(register(&mut net, 0, span, ALL), Err(ErrorKind::System));
    assert_eq!((here.descriptors(span), net.fabric.mr_count(net.ports[0])), (0, before));
    assert_eq!(register(&mut net, 0, span, Access::empty()), Err(ErrorKind::InvalidArgument));
    here.refuse_dmabufs(true);
    assert_eq!(register(&mut net, 0, span, ALL), Err(ErrorKind::Unsupported));
    here.refuse_dmabufs(false);
    assert_eq!(register(&mut net, 0, span, ALL), Ok(()));
    assert_eq!(register(&mut net, 0, span, ALL), Err(ErrorKind::Busy));
    assert_eq!(here.descriptors(span), 1);
}

/// Devices whose memory a NIC reaches by its address. Host memory stands in for theirs.
struct PeerDirect(MemSpan);

impl Devices for PeerDirect {
    fn locate(&self, ptr: *mut u8, len: usize) -> Option<Location> {
        let at = ptr.addr().checked_sub(self.0.as_ptr().addr())?;
        self.0.contains(at as u64, len as u64).then_some(HERE)
    }

    fn kinds(&self) -> MemoryKinds {
        HERE.kind()
    }

    fn is_peer_direct(&self, location: Location) -> bool {
        location == HERE
    }

    fn stager(&self, _location: Location) -> Result<Box<dyn Stager>, Error> {
        panic!("a NIC that reaches the memory needs no stager")
    }
}

#[test]
fn memory_that_is_peer_direct_is_registered_by_its_address() {
    let block = Block::new(4_096);
    // With a NIC that takes dma-bufs, too: these devices have none.
    for nic in [DeviceConfig::default(), nic()] {
        let mut net = Net::new(1);
        add(&mut net, nic, &config(), Arc::new(PeerDirect(block.span())));
        net.add(&config(), BYTES);
        net.attach(0, REMOTE, 1, common::REGION);
        net.warm_up();
        assert_eq!(kinds(&net, 0), MemoryKinds::HOST | MemoryKinds::CUDA);
        register(&mut net, 0, block.span().at(HERE), ALL).unwrap();
        block.paint(8);
        let before = net.nodes[0].transport.stats().inlined;
        net.transfer(&[Slice { local: RegionOffset::new(ON_DEVICE, 0), ..write(1, 0, 0, 64) }]);
        assert!(net.nodes[1].memory.get(0, 64) == pattern(8, 0, 64));
        assert_eq!(net.nodes[0].transport.stats().inlined, before, "the CPU does not read it");
        net.nodes[0].transport.deregister(ON_DEVICE).unwrap();
    }
}

/// The memory of the two ends: a device's, or the heap's where there is none.
#[derive(Clone)]
struct Memories {
    initiator: Option<ExportingDevices>,
    target: Option<ExportingDevices>,
}

impl Memories {
    fn of(&self, location: Location) -> &ExportingDevices {
        let devices = if location == HERE { &self.initiator } else { &self.target };
        devices.as_ref().unwrap()
    }
}

impl PeekPoke for Memories {
    unsafe fn peek(&self, span: MemSpan, out: &mut [u8]) {
        // SAFETY: the caller's promise, passed on.
        unsafe { self.of(span.location()).peek(span, out) }
    }

    unsafe fn poke(&self, span: MemSpan, bytes: &[u8]) {
        // SAFETY: the caller's promise, passed on.
        unsafe { self.of(span.location()).poke(span, bytes) }
    }
}

impl EndsMemory for Memories {
    fn allocate(&self, side: Side, bytes: usize) -> Option<MemSpan> {
        let devices = match side {
            Side::Initiator => &self.initiator,
            Side::Target => &self.target,
        };
        devices.as_ref().map(|devices| devices.allocate(bytes))
    }
}

/// Pairs of transports with devices at these ends.
struct OnDevices {
    config: Config,
    ends: (bool, bool),
}

impl Harness for OnDevices {
    fn pair(&mut self) -> Box<dyn Pair + '_> {
        let sim = SimFabric::new(7, SimConfig::TIMED);
        let on = |location, wanted: bool| wanted.then(|| ExportingDevices::new(location));
        let memories = Memories { initiator: on(HERE, self.ends.0), target: on(THERE, self.ends.1) };
        let shared = |devices: &Option<ExportingDevices>| {
            devices.clone().map(|devices| Arc::new(devices) as Arc<dyn Devices>)
        };
        let mut restart = Reopen::new(sim, nic(), self.config.clone());
        restart.devices = shared(&memories.initiator);
        let initiator = restart.open();
        restart.devices = shared(&memories.target);
        let target = restart.open();
        // The restarted target comes back at the same address.
        restart.config.bind = target.local_address();
        let limits = EndsConfig { patience: Duration::from_secs(30), late_max: Duration::from_millis(30) };
        Box::new(Ends::new(initiator, target, restart, limits).with_memory(Rc::new(memories)))
    }
}

fn plain() -> Config {
    Config { slice_bytes_max: 16 << 20, ..config() }
}

macro_rules! on_devices {
    ($name:ident, $config:expr, $ends:expr, skips $skips:tt) => {
        mod $name {
            use super::*;

            te_core::conformance_tests!(
                OnDevices { config: $config, ends: $ends },
                skips $skips,
                may_skip [
                    after_a_fence_nothing_lands,
                    after_a_fence_nothing_lands_that_a_stalled_target_held_back,
                ]
            );
        }
    };
}

on_devices!(both_ends, plain(), (true, true), skips [
    a_slice_off_the_granule_is_refused_before_a_byte_moves,
    a_caller_driven_transport_releases_memory_in_the_next_poll,
    what_a_peer_writes_shows_through_a_volatile_span,
    a_peer_reads_what_was_written_through_a_volatile_span,
]);

on_devices!(both_ends_in_chunks, Config { registration_chunk_bytes: 4_096, ..plain() }, (true, true), skips [
    a_slice_off_the_granule_is_refused_before_a_byte_moves,
    a_caller_driven_transport_releases_memory_in_the_next_poll,
    what_a_peer_writes_shows_through_a_volatile_span,
    a_peer_reads_what_was_written_through_a_volatile_span,
]);

on_devices!(at_the_initiator, plain(), (true, false), skips [
    a_slice_off_the_granule_is_refused_before_a_byte_moves,
    a_caller_driven_transport_releases_memory_in_the_next_poll,
]);

on_devices!(at_the_target, plain(), (false, true), skips [
    a_slice_off_the_granule_is_refused_before_a_byte_moves,
    a_caller_driven_transport_releases_memory_in_the_next_poll,
    what_a_peer_writes_shows_through_a_volatile_span,
    a_peer_reads_what_was_written_through_a_volatile_span,
]);
