//! Several rails as one: what the caller sees when one of them is slow, flaps, or fails.

use core::time::Duration;
use std::collections::BTreeMap;

use te_core::sim::{LinkConfig, NodeId, SimConfig, SimNet, SimTransport};
use te_core::{
    Access, Completion, ErrorKind, HealthConfig, HealthRoute, Instant, MemSpan, Memory, MultiTransport, Op,
    Outcome, RegionId, RegionOffset, RemoteOffset, RemoteRegionId, Slice, Token, Transport,
};

const REGION: RegionId = RegionId::new(0, 1);
const REMOTE_REGION: RemoteRegionId = RemoteRegionId::new(0, 1);
const BYTES: usize = 1 << 20;
const HERE: NodeId = NodeId(0);
const THERE: NodeId = NodeId(1);

struct Rails {
    nets: Vec<SimNet>,
    here: MultiTransport<SimTransport, HealthRoute>,
    _there: MultiTransport<SimTransport, HealthRoute>,
    now: Instant,
    _memory: Box<[u64]>,
}

fn rails(link: LinkConfig) -> Rails {
    rails_with_granules(link, [1, 1])
}

fn rails_with_granules(link: LinkConfig, granules: [u32; 2]) -> Rails {
    // One name for both, as with two NICs of one fabric: each must find its own counterpart.
    let names = ["rail", "rail"];
    let config = |name, granule_bytes| {
        let mut config = SimConfig::CALM;
        (config.name, config.link, config.granule_bytes) = (name, link, granule_bytes);
        config
    };
    let nets = names.iter().zip(granules).map(|(name, granule)| SimNet::new(5, config(name, granule)));
    let nets: Vec<SimNet> = nets.collect();
    let multi = || {
        let route = HealthRoute::new(&[100, 100], HealthConfig::default());
        MultiTransport::new(nets.iter().map(SimNet::node), route, 256).expect("two rails")
    };
    let (mut here, mut there) = (multi(), multi());
    let mut memory = vec![0u64; 2 * BYTES / 8].into_boxed_slice();
    let span = MemSpan::new(memory.as_mut_ptr().cast(), 2 * BYTES);
    let half = |at: usize| span.part((at * BYTES) as u64, BYTES as u64).expect("half");
    // SAFETY: the memory is dropped after the transports, and no reference to it is made meanwhile.
    unsafe {
        here.register(REGION, half(0), Access::LOCAL).expect("registered");
        there.register(REGION, half(1), Access::REMOTE_READ | Access::REMOTE_WRITE).expect("registered");
    }
    let mut blob = [0; 256];
    let len = there.export(REGION, &mut blob).expect("exported");
    here.attach(REMOTE_REGION, &blob[..len]).expect("attached");
    assert_eq!(here.reachable(REMOTE_REGION), 0b11);
    Rails { nets, here, _there: there, now: Instant::ZERO, _memory: memory }
}

impl Rails {
    /// Moves `count` slices of 16 KiB, calls `meddle` after each that has ended, and returns all completions.
    fn run(&mut self, op: Op, count: u64, mut meddle: impl FnMut(&[SimNet], usize)) -> Vec<Completion> {
        let slice = |i: u64| {
            let at = i * 16384 % BYTES as u64;
            Slice {
                token: Token(i),
                local: RegionOffset::new(REGION, at),
                remote: RemoteOffset::new(REMOTE_REGION, at),
                len: 16384,
                op,
            }
        };
        let mut ends = BTreeMap::new();
        let mut out = [Completion::applied(Token(0)); 32];
        let mut sent = 0;
        while ends.len() < count as usize {
            let next: Vec<Slice> = (sent..count.min(sent + 16)).map(slice).collect();
            sent += self.here.submit(&next).expect("valid") as u64;
            let event = self.nets.iter().filter_map(SimNet::next_event).chain(self.here.poll_at()).min();
            let least = self.now + Duration::from_micros(1);
            self.now = event.map_or(least + Duration::from_millis(1), |at| at.max(least));
            let count = self.here.poll(self.now, &mut out);
            for end in &out[..count] {
                assert!(ends.insert(end.token.0, *end).is_none(), "one completion per slice");
                meddle(&self.nets, ends.len());
            }
            assert!(self.now < Instant::from_millis(600_000), "it ends in ten minutes");
        }
        ends.into_values().collect()
    }

    fn share(&self, rail: usize) -> f64 {
        let bytes = |rail| self.here.route().health(rail).expect("a rail").bytes_done as f64;
        bytes(rail) / (bytes(0) + bytes(1))
    }
}

#[test]
fn both_rails_carry_their_share() {
    let mut rails = rails(LinkConfig::CALM);
    let ends = rails.run(Op::Read, 2000, |_, _| {});
    assert!(ends.iter().all(|end| end.result.is_ok()));
    assert!((0.3..0.7).contains(&rails.share(0)), "{}", rails.share(0));
}

#[test]
fn a_slice_goes_to_a_rail_whose_granule_it_fits() {
    let mut rails = rails_with_granules(LinkConfig::CALM, [512, 1]);
    let slice = |token, offset, len| Slice {
        token: Token(token),
        local: RegionOffset::new(REGION, 3),
        remote: RemoteOffset::new(REMOTE_REGION, offset),
        len,
        op: Op::Write,
    };
    // In one call, with slices for both rails next to each other.
    let odd = [(1, 512), (0, 511), (511, 512), (512, 100)];
    let pairs = (0..32).zip(odd.iter().cycle());
    let all =
        pairs.flat_map(|(i, &(offset, len))| [slice(2 * i, 1024 * i, 1024), slice(2 * i + 1, offset, len)]);
    let all: Vec<Slice> = all.collect();
    assert_eq!(rails.here.submit(&all), Ok(all.len()), "there is room for all");
    let mut ended = 0;
    let mut out = [Completion::applied(Token(0)); 32];
    while ended < all.len() {
        rails.now = rails.now + Duration::from_micros(100);
        let count = rails.here.poll(rails.now, &mut out);
        assert!(out[..count].iter().all(|end| end.result.is_ok()), "{:?}", &out[..count]);
        ended += count;
    }
    assert!(rails.share(0) > 0.0, "the rail with a granule takes slices, too: {}", rails.share(0));
    for (offset, len) in odd {
        assert_eq!(rails.here.on_granule(0b11, offset, u64::from(len)), 0b10);
    }

    // Where no rail takes it, nothing moves.
    let mut rails = rails_with_granules(LinkConfig::CALM, [512, 4096]);
    let error = rails.here.submit(&[slice(1, 512, 100)]).expect_err("off every granule");
    assert_eq!(error.kind, ErrorKind::InvalidArgument);
    assert_eq!(rails.here.submit(&[slice(1, 512, 512)]), Ok(1));
}

#[test]
fn a_slow_rail_gets_less() {
    let mut rails = rails(LinkConfig::CALM);
    rails.nets[1].set_slow(THERE, 10);
    rails.run(Op::Write, 4000, |_, _| {});
    assert!(rails.share(1) < 0.3, "{}", rails.share(1));
}

#[test]
fn a_rail_that_goes_down_costs_no_slice() {
    let mut rails = rails(LinkConfig::CALM);
    let ends = rails.run(Op::Read, 3000, |nets, done| match done {
        500 => nets[0].link_down(HERE, THERE),
        2000 => nets[0].link_up(HERE, THERE),
        _ => {}
    });
    assert!(ends.iter().all(|end| end.outcome == Outcome::Applied), "the other rail took over");
    assert!(rails.here.route().health(0).expect("a rail").errors > 0);
    let before = rails.share(0);
    rails.now = rails.now + Duration::from_secs(60);
    rails.run(Op::Read, 3000, |_, _| {});
    assert!(rails.share(0) > before, "it came back: {before}, then {}", rails.share(0));
}

#[test]
fn a_write_that_succeeds_on_the_second_rail_still_asks_for_a_fence() {
    let mut rails = rails(LinkConfig::CALM);
    // Lost on the left rail, and perhaps late; in order on the right rail.
    let mut lossy = LinkConfig::CALM;
    (lossy.loss_ppm, lossy.late_ppm) = (200_000, 1_000_000);
    rails.nets[0].set_link(HERE, THERE, lossy);
    let ends = rails.run(Op::Write, 1000, |_, _| {});
    assert!(ends.iter().all(|end| end.outcome == Outcome::Applied));
    let strays = ends.iter().filter(|end| end.fence_needed).count();
    assert!(strays > 0 && rails.nets[0].orphaned_writes(THERE) > 0, "{strays} strays");
    // After one fence through all rails, nothing is on the wire.
    rails.nets[0].set_link(HERE, THERE, LinkConfig::CALM);
    rails.here.fence(Token(1 << 40), REMOTE_REGION).expect("accepted");
    let mut out = [Completion::applied(Token(0)); 1];
    while rails.here.poll(rails.now, &mut out) == 0 {
        rails.now = rails.now + Duration::from_micros(10);
    }
    assert_eq!(out[0], Completion::applied(Token(1 << 40)));
    assert_eq!(rails.nets[0].orphaned_writes(THERE), 0);
}

#[test]
fn a_rail_that_refuses_everything_is_paused_like_one_that_fails_everything() {
    use te_core::{Error, ErrorKind, Fault, FaultConfig};
    let nets = [1, 2].map(|seed| SimNet::new(seed, SimConfig::CALM));
    let multi = || {
        let rails = nets.iter().map(|net| Fault::new(net.node(), 3, FaultConfig::default()));
        MultiTransport::new(rails, HealthRoute::new(&[100, 100], HealthConfig::default()), 64)
            .expect("two rails")
    };
    let (mut here, mut there) = (multi(), multi());
    let mut memory = [0u64; 2];
    let word = |at: usize| MemSpan::new(memory.as_mut_ptr().wrapping_add(at).cast(), 8);
    let words = [0, 1].map(word);
    // SAFETY: the words outlive the transports' use of them, and no reference to them is made meanwhile.
    unsafe {
        here.register(REGION, words[0], Access::LOCAL).expect("registered");
        there.register(REGION, words[1], Access::REMOTE_READ).expect("registered");
    }
    let mut blob = [0; 256];
    let len = there.export(REGION, &mut blob).expect("exported");
    here.attach(REMOTE_REGION, &blob[..len]).expect("attached");

    let mut refuses = FaultConfig::default();
    refuses.submit_refused_ppm = 1_000_000;
    refuses.submit_error = Some(Error::new(ErrorKind::System));
    here.rails_mut()[0].set_config(refuses);
    let mut out = [Completion::applied(Token(0)); 4];
    let mut now = Instant::ZERO;
    for i in 0..100 {
        let slice = Slice {
            token: Token(i),
            local: RegionOffset::new(REGION, 0),
            remote: RemoteOffset::new(REMOTE_REGION, 0),
            len: 8,
            op: Op::Read,
        };
        assert_eq!(here.submit(&[slice]), Ok(1), "the other rail takes it");
        now = now + Duration::from_micros(50);
        nets.iter().for_each(|net| net.advance_to(now));
        assert_eq!((here.poll(now, &mut out), out[0]), (1, Completion::applied(Token(i))));
    }
    assert_eq!(here.rails()[0].counters().submits_refused, 3, "then it is left alone");
    assert_eq!(here.route().health(0).map(|health| health.errors), Some(3));
}

#[test]
fn several_rails_share_the_one_that_the_peer_has() {
    let net = SimNet::new(5, SimConfig::CALM);
    let route = || HealthRoute::new(&[100, 100], HealthConfig::default());
    let mut here = MultiTransport::new([net.node(), net.node()], route(), 64).expect("two rails");
    let mut there = MultiTransport::new([net.node()], route(), 64).expect("one rail");
    let mut byte = 0u8;
    // SAFETY: no bytes are moved.
    unsafe { there.register(REGION, MemSpan::new(&raw mut byte, 1), Access::REMOTE_READ) }
        .expect("registered");
    let mut blob = [0; 256];
    let len = there.export(REGION, &mut blob).expect("exported");
    here.attach(REMOTE_REGION, &blob[..len]).expect("attached");
    assert_eq!(here.reachable(REMOTE_REGION), 0b11);
}

const READ: Slice = Slice {
    token: Token(0),
    local: RegionOffset::new(REGION, 0),
    remote: RemoteOffset::new(REMOTE_REGION, 0),
    len: 4096,
    op: Op::Read,
};

/// A thousand slices one after another over two rails, each of which takes 20 µs.
fn a_thousand(route: &mut HealthRoute, now: &mut Instant) {
    use te_core::Route;
    let slice = READ;
    for _ in 0..1000 {
        route.tick(*now);
        let rail = route.route(&slice, 0b11).expect("a rail");
        route.accepted(rail, &slice);
        let ahead = route.bytes_in_flight(rail);
        *now = *now + Duration::from_micros(20);
        route.tick(*now);
        route.completed(rail, &slice, &Completion::applied(Token(0)), 20_000, ahead);
    }
}

#[test]
fn a_rail_that_took_long_once_is_not_shunned_for_ever() {
    use te_core::Route;
    let mut route = HealthRoute::new(&[100, 100], HealthConfig::default());
    let mut now = Instant::ZERO;
    a_thousand(&mut route, &mut now);
    // One slice took half a second, by bad luck.
    let slice = READ;
    for _ in 0..8 {
        route.accepted(0, &slice);
        now = now + Duration::from_millis(500);
        route.tick(now);
        route.completed(0, &slice, &Completion::applied(Token(0)), 500_000_000, 4096);
    }
    let bandwidth = |route: &HealthRoute, rail| route.health(rail).expect("a rail").bandwidth;
    assert!(
        bandwidth(&route, 0) < bandwidth(&route, 1) / 100,
        "without a probe the figures would never be corrected"
    );
    for _ in 0..100 {
        a_thousand(&mut route, &mut now);
    }
    // Now there is work for two rails, and the rail is tried.
    assert!(bandwidth(&route, 0) >= bandwidth(&route, 1) / 4, "{route:?}");
}

#[test]
fn the_slice_that_waited_for_a_new_connection_does_not_count_against_its_rail() {
    use te_core::{Error, ErrorKind, Route};
    let mut route = HealthRoute::new(&[100, 100], HealthConfig::default());
    let mut now = Instant::ZERO;
    a_thousand(&mut route, &mut now);
    let before = route.health(0).expect("a rail").bandwidth;
    let slice = READ;
    let fault = Completion::not_applied(Token(0), Error::new(ErrorKind::Rail));
    for _ in 0..3 {
        route.accepted(0, &slice);
        route.completed(0, &slice, &fault, 1_000, 4096);
    }
    now = now + Duration::from_secs(1);
    route.tick(now);
    assert_eq!(route.route(&slice, 0b01), Some(0), "a probe");
    route.accepted(0, &slice);
    now = now + Duration::from_millis(800);
    route.tick(now);
    route.completed(0, &slice, &Completion::applied(Token(0)), 800_000_000, 4096);
    assert_eq!(route.health(0).expect("a rail").bandwidth, before);
}

#[test]
fn a_rail_is_tried_again_when_others_have_become_much_better() {
    use te_core::Route;
    let mut route = HealthRoute::new(&[100, 100], HealthConfig::default());
    let mut now = Instant::ZERO;
    let slice = READ;
    // Both were slow when they were first used, and later only one was.
    for (rail, micros) in [(0, 20_000), (1, 20_000), (1, 20)] {
        for _ in 0..100 {
            route.accepted(rail, &slice);
            now = now + Duration::from_micros(micros);
            route.tick(now);
            route.completed(rail, &slice, &Completion::applied(Token(0)), micros * 1000, 4096);
        }
    }
    for _ in 0..100 {
        a_thousand(&mut route, &mut now);
    }
    let bandwidth = |rail| route.health(rail).expect("a rail").bandwidth;
    assert!(bandwidth(0) >= bandwidth(1) / 4, "{route:?}");
}

#[test]
fn a_rail_whose_figures_were_spoilt_is_tried_again_though_the_other_is_never_busy() {
    use te_core::Route as _;
    let mut route = HealthRoute::new(&[100, 100], HealthConfig::default());
    let slice = |i| Slice {
        token: Token(i),
        local: RegionOffset::new(REGION, 0),
        remote: RemoteOffset::new(REMOTE_REGION, 0),
        len: 16384,
        op: Op::Read,
    };
    let ends = |route: &mut HealthRoute, rail, nanos| {
        route.accepted(rail, &slice(0));
        route.completed(rail, &slice(0), &Completion::applied(Token(0)), nanos, 16384);
    };
    // Not slow enough to be called slow, and worse than the other for as long as it is not tried.
    (0..200).for_each(|_| ends(&mut route, 0, 10_000));
    (0..200).for_each(|_| ends(&mut route, 1, 24_000));
    let mut asked = 0;
    for ms in 1..60_000 {
        route.tick(Instant::from_millis(ms));
        let rail = route.route(&slice(ms), 0b11).expect("both are open");
        asked += u32::from(rail == 1);
        ends(&mut route, rail, 10_000);
    }
    let bandwidth = |rail| route.health(rail).expect("a rail").bandwidth;
    assert!(asked > 8, "asked {asked} times");
    assert!(bandwidth(1) * 3 > bandwidth(0) * 2, "{} beside {}", bandwidth(1), bandwidth(0));
}

/// A rail whose device can be missing: it takes no memory then.
struct Device {
    rail: SimTransport,
    gone: std::rc::Rc<std::cell::Cell<bool>>,
}

impl Memory for Device {
    unsafe fn register(&mut self, id: RegionId, span: MemSpan, access: Access) -> Result<(), te_core::Error> {
        if self.gone.get() {
            return Err(te_core::ErrorKind::Rail.into());
        }
        // SAFETY: the caller's promise, passed on.
        unsafe { self.rail.register(id, span, access) }
    }

    fn deregister(&mut self, id: RegionId) -> Result<(), te_core::Error> {
        self.rail.deregister(id)
    }

    fn export(&self, id: RegionId, out: &mut [u8]) -> Result<usize, te_core::Error> {
        self.rail.export(id, out)
    }

    fn attach(&mut self, id: RemoteRegionId, blob: &[u8]) -> Result<(), te_core::Error> {
        self.rail.attach(id, blob)
    }

    fn detach(&mut self, id: RemoteRegionId) -> Result<(), te_core::Error> {
        self.rail.detach(id)
    }
}

impl Transport for Device {
    fn name(&self) -> &'static str {
        self.rail.name()
    }

    fn capabilities(&self) -> te_core::Capabilities {
        self.rail.capabilities()
    }

    fn submit(&mut self, batch: &[Slice]) -> Result<usize, te_core::Error> {
        self.rail.submit(batch)
    }

    fn poll(&mut self, now: Instant, out: &mut [Completion]) -> usize {
        self.rail.poll(now, out)
    }

    fn poll_at(&self) -> Option<Instant> {
        self.rail.poll_at()
    }

    fn cancel(&mut self, token: Token) -> Result<(), te_core::Error> {
        self.rail.cancel(token)
    }

    fn fence(&mut self, token: Token, remote_region: RemoteRegionId) -> Result<(), te_core::Error> {
        self.rail.fence(token, remote_region)
    }
}

#[test]
fn a_region_that_was_registered_while_a_rail_was_gone_joins_it_later() {
    let mut other = SimConfig::CALM;
    other.name = "sim-b";
    let nets = [SimNet::new(1, SimConfig::CALM), SimNet::new(2, other)];
    let gone = std::rc::Rc::new(std::cell::Cell::new(true));
    let never = std::rc::Rc::default();
    let devices = || {
        let rails = nets.iter().map(SimNet::node).zip([&never, &gone]);
        rails.map(|(rail, gone)| Device { rail, gone: gone.clone() })
    };
    let multi = || {
        let route = HealthRoute::new(&[100, 100], HealthConfig::default());
        MultiTransport::new(devices(), route, 256).expect("two rails")
    };
    let (mut here, mut there) = (multi(), multi());
    let mut memory = vec![0u64; 2 * BYTES / 8].into_boxed_slice();
    let span = MemSpan::new(memory.as_mut_ptr().cast(), 2 * BYTES);
    let half = |at: usize| span.part((at * BYTES) as u64, BYTES as u64).expect("half");
    // SAFETY: the memory is dropped after the transports, and no reference to it is made meanwhile.
    unsafe {
        here.register(REGION, half(0), Access::LOCAL).expect("one rail is enough");
        there
            .register(REGION, half(1), Access::REMOTE_READ | Access::REMOTE_WRITE)
            .expect("one rail is enough");
    }
    let attached =
        |here: &mut MultiTransport<Device, HealthRoute>, there: &MultiTransport<Device, _>, remote_region| {
            let mut blob = [0; 256];
            let len = there.export(REGION, &mut blob).expect("exported");
            here.attach(remote_region, &blob[..len]).expect("attached");
            here.reachable(remote_region)
        };
    assert_eq!(attached(&mut here, &there, REMOTE_REGION), 0b01);
    let none = |_| panic!("the device is still missing");
    assert_eq!((here.rejoin(none), there.rejoin(none)), (0, 0));
    assert!(here.is_missing_rails());
    gone.set(false);
    let mut joined = Vec::new();
    assert_eq!(there.rejoin(|id| joined.push(id)), 1);
    assert_eq!((joined, here.rejoin(drop)), (vec![REGION], 1));
    assert!(!here.is_missing_rails() && !there.is_missing_rails());
    // The new export reaches it over the rail that was missing, and bytes go there.
    let again = RemoteRegionId::new(1, 1);
    assert_eq!(attached(&mut here, &there, again), 0b11);
    here.rails_mut()[0].gone.set(true);
    let slice = |token| Slice {
        token: Token(token),
        local: RegionOffset::new(REGION, 0),
        remote: RemoteOffset::new(again, 0),
        len: 4096,
        op: Op::Write,
    };
    let mut carried = 0;
    let mut out = [Completion::applied(Token(0)); 8];
    let mut now = Instant::ZERO;
    for token in 0..64 {
        assert_eq!(here.submit(&[slice(token)]), Ok(1));
        let mut ended = 0;
        while ended == 0 {
            now = now + Duration::from_micros(5);
            ended = here.poll(now, &mut out);
        }
        assert_eq!(out[0], Completion::applied(Token(token)));
        carried = here.route().health(1).expect("a rail").bytes_done;
    }
    assert!(carried > 0, "the rail that came back carries a share");
    // A region that was deregistered is not registered again.
    gone.set(true);
    here.deregister(REGION).expect("nothing is in flight");
    gone.set(false);
    assert_eq!(here.rejoin(|id| panic!("{id} is deregistered")), 0);
}
