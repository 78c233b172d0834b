//! Engines over simulated RDMA NICs and real TCP: rails fail and recover, and every transfer completes over
//! another rail.
//!
//! The NICs are te-rdma's simulated provider; everything above it, from te-rdma's control connections to the
//! engine, is real.
#![allow(clippy::unwrap_used, reason = "a test that fails reports the line")]

mod common;

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use common::*;
use te_core::{Access, Op};
use te_engine::{
    Config, Engine, Fabric, FabricContext, FabricEntry, Fabrics, Rail, SegmentError, SegmentHandle,
    SharedRegion, StartError, Tier, TransferEngine, TransferError,
};
use te_rdma::RdmaTransport;
use te_rdma::sim::{DeviceConfig, PortId, SimConfig, SimFabric};

const LONG: Option<Duration> = Some(Duration::from_secs(20));
/// The fabrics beside the simulated NICs; not `rdma`, so that devices of this host are not used.
const BESIDE: Fabrics = if cfg!(feature = "tcp") { Fabrics::TCP } else { Fabrics::NONE };
const LEN: usize = 4 << 20;

/// An engine with `nics` new NICs on the simulated fabric.
fn engine_on(fabric: &SimFabric, nics: usize, name: &str) -> (TransferEngine, Vec<PortId>) {
    let ports = RefCell::new(Vec::new());
    let open = |_: &FabricContext<'_>| {
        let rail = |nic| {
            let device =
                fabric.device(DeviceConfig { name: format!("{name}{nic}"), ..DeviceConfig::default() });
            ports.borrow_mut().push(device.id());
            let transport = RdmaTransport::new(device, te_rdma::Config::default())?;
            Ok(Rail { device: format!("{name}{nic}:1"), transport: Box::new(transport) })
        };
        (0..nics).map(rail).collect()
    };
    let engine = TransferEngine::start_with_fabrics(config(BESIDE), &[simulated(&open)]).unwrap();
    (engine, ports.into_inner())
}

/// The line of the registry for simulated NICs.
fn simulated(open: &dyn Fabric) -> FabricEntry<'_> {
    FabricEntry::new("simulated", Tier::Rdma, "Simulated NICs", open)
}

/// Two engines, each with a region.
struct Two {
    fabric: SimFabric,
    here: TransferEngine,
    there: TransferEngine,
    /// The ports of `here`.
    ports: Vec<PortId>,
    local: SharedRegion,
    remote: SharedRegion,
    segment: SegmentHandle,
    round: u64,
}

impl Two {
    fn new(nics: usize) -> Self {
        let fabric = SimFabric::new(7, SimConfig::IMMEDIATE);
        let (here, ports) = engine_on(&fabric, nics, "here");
        let (there, _) = engine_on(&fabric, nics, "there");
        let remote = there.alloc_shared(LEN, EVERYTHING).unwrap();
        let local = here.alloc_shared(2 * LEN, Access::LOCAL).unwrap();
        let segment = here.open_segment(there.name()).unwrap();
        Self { fabric, here, there, ports, local, remote, segment, round: 0 }
    }

    /// Writes other bytes than before, reads them back, and compares them on both sides.
    fn there_and_back(&mut self) {
        self.round += 1;
        let content = pattern(self.round, LEN);
        self.local.write(0, &content).unwrap();
        let (id, addr, len) = (self.local.id(), self.remote.addr(), LEN as u64);
        let write = request(Op::Write, (id, 0), self.segment, addr, len);
        let written = self.here.submit(&[write], LONG).unwrap().wait(None).unwrap();
        // A copy may still be under way on a rail that failed: the range can be used again after a fence.
        if written.fence_needed {
            self.fence();
        }
        assert!(bytes(&self.remote) == content, "what was written is there");
        let read = request(Op::Read, (id, len), self.segment, addr, len);
        self.here.submit(&[read], LONG).unwrap().wait(None).unwrap();
        assert!(bytes(&self.local)[LEN..] == content, "what was read is here");
    }

    /// Fences until a fence succeeds on every rail.
    fn fence(&self) {
        eventually("the segment is fenced", || {
            self.here.fence(self.segment, LONG).unwrap().wait(None).is_ok()
        });
    }

    /// Bytes per rail since the last call.
    fn carried(&self, before: &mut BTreeMap<String, u64>) -> BTreeMap<String, u64> {
        let name = |rail: &te_engine::RailStats| format!("{} {}", rail.name, rail.device).trim().to_owned();
        let now: BTreeMap<String, u64> =
            self.here.stats().rails.iter().map(|rail| (name(rail), rail.bytes)).collect();
        let since = now.iter().map(|(name, bytes)| (name.clone(), bytes - before.get(name).unwrap_or(&0)));
        let since = since.filter(|(_, bytes)| *bytes > 0).collect();
        *before = now;
        since
    }
}

#[test]
fn both_nics_carry_a_large_transfer_and_tcp_nothing() {
    let mut two = Two::new(2);
    let mut before = BTreeMap::new();
    // The shares depend on measured speeds, and on a busy machine one NIC is measured as slow for a while.
    let give_up = Instant::now() + Duration::from_secs(60);
    loop {
        for _ in 0..4 {
            two.there_and_back();
        }
        let carried = two.carried(&mut before);
        assert_eq!(carried.keys().collect::<Vec<_>>(), ["rdma here0:1", "rdma here1:1"], "{carried:?}");
        assert_eq!(carried.values().sum::<u64>(), 8 * LEN as u64);
        if carried.values().all(|&bytes| bytes > LEN as u64) {
            break;
        }
        assert!(Instant::now() < give_up, "each takes a fair share: {carried:?}");
    }
}

#[test]
fn every_transfer_completes_while_ports_go_down_and_up() {
    let mut two = Two::new(2);
    let mut before = BTreeMap::new();
    two.there_and_back();
    two.carried(&mut before);
    for round in 0..3 {
        two.fabric.set_port_active(two.ports[0], false);
        two.there_and_back();
        two.carried(&mut before);
        two.there_and_back();
        let carried = two.carried(&mut before);
        assert!(!carried.contains_key("rdma here0:1"), "round {round}: its port is down: {carried:?}");
        if cfg!(feature = "tcp") {
            two.fabric.set_port_active(two.ports[1], false);
            two.there_and_back();
            let carried = two.carried(&mut before);
            assert!(carried.contains_key("tcp"), "round {round}: at worst over TCP: {carried:?}");
        }
        for &port in &two.ports {
            two.fabric.set_port_active(port, true);
        }
        // On a busy machine the outage was long, and the backoff grew with it: at most 10 s.
        let give_up = Instant::now() + Duration::from_secs(60);
        loop {
            two.there_and_back();
            let carried = two.carried(&mut before);
            if carried.keys().collect::<Vec<_>>() == ["rdma here0:1", "rdma here1:1"] {
                break;
            }
            assert!(Instant::now() < give_up, "both NICs carry bytes again, and TCP none: {carried:?}");
        }
    }
    two.fence();
    assert_eq!(two.here.stats().quarantined_bytes, 0);
}

#[test]
fn a_device_that_fails_for_good_is_not_used_any_more() {
    let mut two = Two::new(2);
    let mut before = BTreeMap::new();
    two.there_and_back();
    two.fabric.kill(two.ports[1]);
    two.there_and_back();
    two.carried(&mut before);
    for _ in 0..5 {
        two.there_and_back();
    }
    let carried = two.carried(&mut before);
    assert_eq!(carried.get("rdma here0:1"), Some(&(10 * LEN as u64)), "{carried:?}");
    // New memory is registered with the other rails.
    two.local = two.here.alloc_shared(2 * LEN, Access::LOCAL).unwrap();
    two.there_and_back();
}

#[test]
fn eight_nics_fit_into_a_descriptor_and_all_move_bytes() {
    let mut two = Two::new(8);
    for _ in 0..3 {
        two.there_and_back();
    }
    let carried = two.carried(&mut BTreeMap::new());
    assert_eq!(carried.len(), 8, "{carried:?}");
}

#[test]
fn a_peer_with_fewer_nics_is_reached_over_all_local_nics() {
    let fabric = SimFabric::new(7, SimConfig::IMMEDIATE);
    let (here, _) = engine_on(&fabric, 4, "here");
    let (there, _) = engine_on(&fabric, 1, "there");
    let remote = there.alloc_shared(LEN, EVERYTHING).unwrap();
    let local = here.alloc_shared(LEN, Access::LOCAL).unwrap();
    let segment = here.open_segment(there.name()).unwrap();
    remote.write(0, &pattern(3, LEN)).unwrap();
    let read = request(Op::Read, (local.id(), 0), segment, remote.addr(), LEN as u64);
    for _ in 0..3 {
        here.submit(&[read], LONG).unwrap().wait(None).unwrap();
    }
    assert!(bytes(&local) == pattern(3, LEN));
    let used = here.stats().rails.iter().filter(|rail| rail.bytes > 0).count();
    assert_eq!(used, 4);
}

#[test]
fn after_a_restart_the_old_handle_is_refused_and_a_new_one_works() {
    let mut two = Two::new(2);
    two.there_and_back();
    let name = two.there.name().to_owned();
    drop(std::mem::replace(&mut two.there, engine(Fabrics::LOCAL)));
    let listen = name.parse().unwrap();
    let open = |_: &FabricContext<'_>| {
        let rail = |nic| {
            let device = two.fabric.device(DeviceConfig::default());
            let transport = RdmaTransport::new(device, te_rdma::Config::default())?;
            Ok(Rail { device: format!("again{nic}:1"), transport: Box::new(transport) })
        };
        (0..2).map(rail).collect()
    };
    let again = Config { listen, ..config(BESIDE) };
    let there = TransferEngine::start_with_fabrics(again, &[simulated(&open)]).unwrap();
    let remote = there.alloc_shared(LEN, EVERYTHING).unwrap();
    let refused = two.here.refresh_segment(two.segment);
    assert!(matches!(refused, Err(SegmentError::Restarted { .. })), "{refused:?}");
    let old = request(Op::Read, (two.local.id(), 0), two.segment, two.remote.addr(), 1);
    let refused = two.here.submit(&[old], LONG).unwrap().wait(None);
    assert!(matches!(refused, Err(TransferError::Segment { .. })), "{refused:?}");
    two.segment = two.here.open_segment(&name).unwrap();
    (two.there, two.remote) = (there, remote);
    let mut before = BTreeMap::new();
    two.carried(&mut before);
    two.there_and_back();
    let carried = two.carried(&mut before);
    assert_eq!(carried.keys().collect::<Vec<_>>(), ["rdma here0:1", "rdma here1:1"], "{carried:?}");
}

#[test]
fn a_host_without_rdma_is_an_error_only_if_rdma_is_named() {
    let engine = Engine::start(config(Fabrics::AUTO)).unwrap();
    let carried: Vec<_> = engine.stats().rails.iter().map(|rail| rail.name).collect();
    assert!(carried.starts_with(&["local", "shm"]), "{carried:?}");
    // No host has a device of this name, and a device that is named must start.
    for fabrics in [Fabrics::RDMA, Fabrics::RDMA.and(Fabrics::LOCAL), Fabrics::AUTO] {
        let mut config = config(fabrics);
        config.rdma.devices = vec!["no-such-device".into()];
        let refused = Engine::start(config);
        assert!(matches!(refused, Err(StartError::Fabric { name: "rdma", .. })), "{refused:?}");
    }
    // A fabric that is not used need not start, whatever its settings are.
    let mut off = config(Fabrics::LOCAL);
    off.rdma.devices = vec!["no-such-device".into()];
    Engine::start(off).unwrap();
    if te_rdma::devices().is_err() {
        let refused = Engine::start(config(Fabrics::RDMA.and(Fabrics::LOCAL)));
        assert!(matches!(refused, Err(StartError::Fabric { name: "rdma", .. })), "{refused:?}");
    }
}
