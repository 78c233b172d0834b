//! Rails over the NICs of real hosts: the share of each rail when rails are near, far, fast, slow or dead.
//! The hosts are fixtures, the fabric is simulated, and time is virtual.

mod sysfs;

use std::collections::HashMap;
use std::time::Duration;

use proptest::prelude::*;
use sysfs::Sysfs;
use te_core::sim::{LinkConfig, NodeId, SimConfig, SimNet, SimTransport};
use te_core::topology::{GpuVendor, Location, Nic, Topology};
use te_core::{
    Access, Completion, HealthConfig, HealthRoute, Instant, MemSpan, Memory, MultiTransport, Op, RailHealth,
    RailState, RegionId, RegionOffset, RemoteOffset, RemoteRegionId, Slice, Token, Transport,
};
use te_host::topology::read_sysfs;

const REGION: RegionId = RegionId::new(0, 1);
const REMOTE: RemoteRegionId = RemoteRegionId::new(0, 1);
const BYTES: usize = 1 << 20;
const HERE: NodeId = NodeId(0);
const THERE: NodeId = NodeId(1);
const SLICE: u32 = 64 << 10;

fn host(name: &str) -> Topology {
    read_sysfs(Sysfs::named(name).path()).expect("it reads").topology
}

/// A rail for each RDMA NIC of a host, and the far end of each.
struct Rails {
    nets: Vec<SimNet>,
    here: MultiTransport<SimTransport, HealthRoute>,
    there: MultiTransport<SimTransport, HealthRoute>,
    now: Instant,
    next: u64,
    _memory: Box<[u64]>,
}

impl Rails {
    /// `penalties` are those of the region's location, one for each rail.
    fn new(seed: u64, penalties: &[u32]) -> Self {
        Self::between(seed, penalties, &vec![100; penalties.len()])
    }

    /// Rails with these penalties here, and `there` at the owner of the remote region.
    fn between(seed: u64, penalties: &[u32], there: &[u32]) -> Self {
        let nets: Vec<SimNet> =
            (0..penalties.len() as u64).map(|rail| SimNet::new(seed + rail, SimConfig::CALM)).collect();
        let multi = |local: &[u32]| {
            let mut route = HealthRoute::new(&vec![100; nets.len()], HealthConfig::default());
            route.set_region_penalties(REGION, Some(local));
            MultiTransport::new(nets.iter().map(SimNet::node), route, 512).expect("rails")
        };
        let (mut here, mut there) = (multi(penalties), multi(there));
        let mut memory = vec![0u64; 2 * BYTES / 8].into_boxed_slice();
        let span = MemSpan::new(memory.as_mut_ptr().cast(), 2 * BYTES);
        let half = |at: usize| span.part((at * BYTES) as u64, BYTES as u64).expect("half");
        #[allow(unsafe_code, reason = "registers memory that the simulation alone uses")]
        // SAFETY: the memory is dropped after the transports, and only they access it.
        unsafe {
            here.register(REGION, half(0), Access::LOCAL).expect("registered");
            there.register(REGION, half(1), Access::REMOTE_READ | Access::REMOTE_WRITE).expect("registered");
        }
        here.attach(REMOTE, &export(&there)).expect("attached");
        Self { nets, here, there, now: Instant::ZERO, next: 0, _memory: memory }
    }

    /// Rails over the NICs of `topology`, for memory at `location`.
    fn of(seed: u64, topology: &Topology, location: Location) -> Self {
        let penalty = |nic: &Nic| topology.distance(location, nic).penalty_percent();
        Self::new(seed, &topology.rail_nics().map(penalty).collect::<Vec<_>>())
    }

    /// Moves `count` slices with at most `window` in flight; returns the bytes that each rail moved.
    fn run(&mut self, count: usize, window: usize) -> Vec<u64> {
        self.run_with(count, window, |_| SLICE, |_, _| {})
    }

    fn run_with(
        &mut self,
        count: usize,
        window: usize,
        len: impl Fn(u64) -> u32,
        mut meddle: impl FnMut(&[SimNet], usize),
    ) -> Vec<u64> {
        let before: Vec<u64> = (0..self.nets.len()).map(|rail| self.health(rail).bytes_done).collect();
        let (mut sent, mut ended) = (0, 0);
        let mut out = [Completion::applied(Token(0)); 64];
        while ended < count {
            let room = (window - (sent - ended)).min(count - sent).min(128);
            let slice = |token: u64| {
                let at = token * u64::from(SLICE) % BYTES as u64;
                // Only WRITEs: with single slices in flight, a rail would leave its other direction idle.
                let op = Op::Read;
                Slice {
                    token: Token(token),
                    local: RegionOffset::new(REGION, at),
                    remote: RemoteOffset::new(REMOTE, at),
                    len: len(token),
                    op,
                }
            };
            let batch: Vec<Slice> = (self.next..self.next + room as u64).map(slice).collect();
            self.here.tick(self.now);
            let accepted = self.here.submit(&batch).expect("valid");
            self.next += accepted as u64;
            sent += accepted;
            let event = self.nets.iter().filter_map(SimNet::next_event).chain(self.here.poll_at()).min();
            let least = self.now + Duration::from_micros(1);
            self.now = event.map_or(least + Duration::from_micros(100), |at| at.max(least));
            let polled = self.here.poll(self.now, &mut out);
            for end in &out[..polled] {
                assert_eq!(end.result, Ok(()), "while a rail lives, nothing fails");
                ended += 1;
                meddle(&self.nets, ended);
            }
            assert!(self.now < Instant::from_millis(3_600_000), "it ends within an hour");
        }
        (0..self.nets.len()).map(|rail| self.health(rail).bytes_done - before[rail]).collect()
    }

    fn health(&self, rail: usize) -> RailHealth {
        self.here.route().health(rail).expect("a rail")
    }

    /// Makes the wire of a rail `factor` times as slow as it was.
    fn set_slow(&self, rail: usize, factor: u64) {
        let mut link = LinkConfig::CALM;
        link.bytes_per_s /= factor;
        self.nets[rail].set_link(HERE, THERE, link);
        self.nets[rail].set_link(THERE, HERE, link);
    }
}

/// What the owner exports of the remote region.
fn export(there: &MultiTransport<SimTransport, HealthRoute>) -> Vec<u8> {
    let mut blob = vec![0; there.capabilities().export_bytes_max as usize];
    let len = there.export(REGION, &mut blob).expect("it fits");
    blob.truncate(len);
    blob
}

fn shares(bytes: &[u64]) -> Vec<f64> {
    let total: u64 = bytes.iter().sum();
    bytes.iter().map(|&bytes| bytes as f64 / total as f64).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 6, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn equal_rails_carry_equal_loads_within_5_percent(
        seed: u64, rails in 2usize..=8, window in 256usize..400, lens in prop::collection::vec(32 << 10..=SLICE, 1..5),
    ) {
        let mut rails = Rails::new(seed >> 8, &vec![100; rails]);
        // The first slices only train the route.
        rails.run(500, window);
        let bytes = rails.run_with(6000, window, |token| lens[token as usize % lens.len()], |_, _| {});
        for share in shares(&bytes) {
            let of_fair = share * bytes.len() as f64;
            prop_assert!((0.95..1.05).contains(&of_fair), "{of_fair:.3} of a fair share: {bytes:?}");
        }
    }

    #[test]
    fn a_rail_ten_times_slower_gets_about_a_tenth_and_is_seen(seed: u64, rails in 2usize..=8, slow in 0usize..8) {
        let slow = slow % rails;
        let mut rails = Rails::new(seed >> 8, &vec![100; rails]);
        rails.run(1000, 256);
        rails.set_slow(slow, 10);
        rails.run(1000, 256);
        let bytes = rails.run(6000, 256);
        let others: u64 = bytes.iter().enumerate().filter(|&(rail, _)| rail != slow).map(|(_, bytes)| bytes).sum();
        let of_others = bytes[slow] as f64 / (others as f64 / (bytes.len() - 1) as f64);
        prop_assert!((0.06..0.16).contains(&of_others), "{of_others:.3} of what the others got: {bytes:?}");
        for rail in 0..bytes.len() {
            let health = rails.health(rail);
            // By chance a slow rail may have counted as fast once more, or a fast one as slow for a moment:
            // about one run in a thousand.
            let (expected, slowdowns) = if rail == slow { (RailState::Slow, 1..=3) } else { (RailState::Open, 0..=1) };
            prop_assert_eq!(health.state, expected, "rail {}: {:?}", rail, health);
            prop_assert!(slowdowns.contains(&health.slowdowns), "rail {}: {:?}", rail, health);
        }
    }

    #[test]
    fn a_dead_rail_gets_nothing_but_probes_and_comes_back(seed: u64, rails in 2usize..=8, dead in 0usize..8) {
        let dead = dead % rails;
        let mut rails = Rails::new(seed >> 8, &vec![100; rails]);
        rails.run(1000, 256);
        rails.nets[dead].link_down(HERE, THERE);
        rails.run(2000, 256);
        let found = rails.health(dead);
        prop_assert!(found.pauses > 0 && found.state != RailState::Open, "{found:?}");

        let bytes = rails.run(4000, 256);
        let later = rails.health(dead);
        prop_assert_eq!(bytes[dead], 0);
        let probes = later.slices_ended - found.slices_ended;
        prop_assert_eq!(probes, later.pauses - found.pauses, "one slice per backoff");
        prop_assert!(probes <= 8, "{probes} probes");

        rails.nets[dead].link_up(HERE, THERE);
        // Ten seconds are the longest backoff.
        rails.now = rails.now + Duration::from_secs(11);
        rails.run(1000, 256);
        prop_assert_eq!(rails.health(dead).state, RailState::Open);
        let bytes = rails.run(4000, 256);
        let share = shares(&bytes)[dead] * bytes.len() as f64;
        prop_assert!((0.9..1.1).contains(&share), "{share:.3} of a fair share: {bytes:?}");
    }

    #[test]
    fn near_nics_are_used_alone_while_they_are_free_and_all_of_them_under_load(
        seed: u64, gpu in 0u16..8, len in prop::sample::select(vec![4096, 16 << 10, SLICE]),
    ) {
        let dgx = host("dgx");
        let location = Location::Device(GpuVendor::Nvidia, gpu);
        let mut rails = Rails::of(seed >> 8, &dgx, location);
        let matrix = dgx.matrix();
        let row = matrix.rows().iter().find(|row| row.location == location).expect("a row");
        let near: Vec<bool> = dgx.rail_nics().map(|nic| row.preferred.contains(&nic.name)).collect();
        let near_share = |bytes: &[u64]| -> f64 {
            shares(bytes).iter().zip(&near).filter(|&(_, &near)| near).map(|(share, _)| share).sum()
        };
        // Rails of which nothing is known may be tried first.
        rails.run_with(300, 1, |_| len, |_, _| {});
        let idle = rails.run_with(1000, 1, |_| len, |_, _| {});
        prop_assert!(near_share(&idle) > 0.97, "{idle:?}");
        let busy = rails.run(8000, 512);
        prop_assert!(busy.iter().all(|&bytes| bytes > 0), "{busy:?}");
        prop_assert!((0.25..0.7).contains(&near_share(&busy)), "{} near: {busy:?}", near_share(&busy));
        prop_assert!((0..8).all(|rail| rails.health(rail).state == RailState::Open), "far is not slow");
    }
}

#[test]
fn memory_of_each_node_goes_over_the_nics_of_its_node() {
    let dgx = host("dgx");
    for node in [0, 1] {
        let mut rails = Rails::of(7, &dgx, Location::Numa(node));
        let bytes = rails.run(500, 1);
        let used: Vec<u16> = (0..8).filter(|&rail| bytes[rail as usize] > 0).map(|rail| rail / 4).collect();
        assert!(!used.is_empty() && used.iter().all(|&side| side == node), "{bytes:?}");
    }
}

#[test]
fn memory_goes_over_the_nics_that_are_near_it_at_its_owner() {
    // All rails are equally near on this side. At the owner, the first and the last are on another socket.
    let mut rails = Rails::between(17, &[100; 4], &[315, 150, 150, 315]);
    rails.run(100, 1);
    let bytes = rails.run(500, 1);
    assert_eq!((bytes[0], bytes[3]), (0, 0), "{bytes:?}");
    // Both ends count: on this side, the first two are near.
    let mut rails = Rails::between(19, &[150, 150, 315, 315], &[315, 150, 150, 315]);
    rails.run(100, 1);
    let bytes = rails.run(500, 1);
    assert_eq!(shares(&bytes)[1], 1.0, "{bytes:?}");
}

#[test]
fn costs_follow_an_export_when_they_differ_and_wrong_ones_are_refused() {
    use te_core::ErrorKind;
    let plain = export(&Rails::between(1, &[100; 3], &[315; 3]).there);
    let mut rails = Rails::between(1, &[100; 3], &[315, 100, 3000]);
    let costly = export(&rails.there);
    assert_eq!(costly[plain.len()..], [31, 10, 255]);

    let mut attach = |index, blob: &[u8]| {
        rails.here.attach(RemoteRegionId::new(index, 0), blob).map_err(|error| error.kind)
    };
    assert_eq!(attach(10, &costly), Ok(()));
    assert_eq!(attach(11, &costly[..plain.len()]), Ok(()), "an export without costs");
    let bad = Err(ErrorKind::InvalidArgument);
    assert_eq!(attach(12, &costly[..plain.len() + 2]), bad, "one is missing");
    assert_eq!(attach(12, &[&costly[..], &[10]].concat()), bad, "one too many");
    assert_eq!(attach(12, &[&costly[..plain.len()], &[10, 0, 10]].concat()), bad, "a cost of 0 is refused");
    for len in 0..plain.len() {
        assert_eq!(attach(12, &costly[..len]), bad, "cut at {len}");
    }
    assert_eq!(attach(12, &plain), Ok(()), "a refused attachment leaves nothing behind");
}

#[test]
fn the_far_end_counts_as_much_as_the_near_one() {
    // On this side NICs 0 and 1 are near, at the owner NICs 1 and 2.
    let mut route = HealthRoute::new(&[100; 4], HealthConfig::default());
    let slice = |region, remote| Slice {
        token: Token(0),
        local: RegionOffset::new(RegionId::new(region, 0), 0),
        remote: RemoteOffset::new(RemoteRegionId::new(remote, 0), 0),
        len: 4096,
        op: Op::Read,
    };
    route.set_region_penalties(RegionId::new(3, 0), Some(&[100, 100, 300, 300]));
    route.set_remote_region_penalties(RemoteRegionId::new(5, 0), Some(&[300, 100, 100, 300]));
    let best = |route: &mut HealthRoute, region, remote| route.route(&slice(region, remote), 0b1111);
    use te_core::Route as _;
    assert_eq!(best(&mut route, 3, 5), Some(1), "near on both sides");
    assert_eq!(best(&mut route, 3, 4), Some(0), "nothing is known of the far end");
    assert_eq!(best(&mut route, 9, 5), Some(1), "nothing is known of the near end");
    assert_eq!(route.route(&slice(3, 5), 0b1001), Some(0), "near on one side");
    route.set_remote_region_penalties(RemoteRegionId::new(5, 0), None);
    assert_eq!(best(&mut route, 3, 5), Some(0), "forgotten");
}

#[test]
fn a_slow_rail_that_recovers_is_detected_although_it_is_not_needed() {
    let mut rails = Rails::new(11, &[100, 100]);
    rails.set_slow(1, 20);
    rails.run(2000, 256);
    assert_eq!(rails.health(1).state, RailState::Slow);
    // One slice at a time: the other rail is always cheaper, and this one only gets probes.
    let light = rails.run(4000, 1);
    assert!(light[1] > 0 && light[1] < light[0] / 50, "{light:?}");
    assert_eq!(rails.health(1).state, RailState::Slow);
    rails.set_slow(1, 1);
    let mut slices = 0;
    while rails.health(1).state == RailState::Slow {
        rails.now = rails.now + Duration::from_millis(10);
        rails.run(10, 1);
        slices += 10;
        assert!(slices < 30_000, "{:?}", rails.health(1));
    }
    assert_eq!(rails.health(1).slowdowns, 1);
}

#[test]
fn a_rail_that_is_slow_for_a_while_is_counted_each_time() {
    let mut rails = Rails::new(13, &[100, 100, 100]);
    let mut seen = HashMap::new();
    for round in 1..=3 {
        rails.set_slow(2, 20);
        rails.run(3000, 256);
        seen.insert(round, rails.health(2).slowdowns);
        rails.set_slow(2, 1);
        rails.run(3000, 256);
        assert_eq!(rails.health(2).state, RailState::Open, "round {round}");
    }
    assert_eq!(seen, HashMap::from([(1, 1), (2, 2), (3, 3)]));
}
