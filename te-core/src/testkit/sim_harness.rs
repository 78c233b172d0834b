//! The simulated fabric under the suite, alone or with a decorator or route on top.

use alloc::boxed::Box;
use alloc::vec::Vec;
use core::ops::Range;
use core::time::Duration;

use super::{Harness, Hook, Pair, Side};
use crate::sim::{NodeId, SimConfig, SimNet, SimTransport};
use crate::{Instant, Transport};

const RAIL_NAMES: [&str; 4] = ["sim", "sim-b", "sim-c", "sim-d"];

type Build = Box<dyn FnMut(Side, Vec<SimTransport>) -> Box<dyn Transport>>;

/// Pairs on [`sim`](crate::sim): each end consists of one node on each of some networks.
pub struct SimHarness {
    seed: u64,
    config: SimConfig,
    rails: usize,
    build: Build,
}

impl SimHarness {
    /// The fabric itself.
    #[must_use]
    pub fn new(seed: u64, config: SimConfig) -> Self {
        Self::wrapped(seed, config, |_, sim| Box::new(sim))
    }

    /// The fabric with something around it, a decorator for example.
    #[must_use]
    pub fn wrapped(
        seed: u64,
        config: SimConfig,
        mut build: impl FnMut(Side, SimTransport) -> Box<dyn Transport> + 'static,
    ) -> Self {
        Self::on_rails(seed, config, 1, move |side, mut rails| match rails.pop() {
            Some(sim) => build(side, sim),
            None => unreachable!("one rail was requested"),
        })
    }

    /// Something over several fabrics: each end gets a node on each of `rails` networks.
    #[must_use]
    pub fn on_rails(
        seed: u64,
        config: SimConfig,
        rails: usize,
        build: impl FnMut(Side, Vec<SimTransport>) -> Box<dyn Transport> + 'static,
    ) -> Self {
        Self { seed, config, rails, build: Box::new(build) }
    }
}

impl Harness for SimHarness {
    fn pair(&mut self) -> Box<dyn Pair + '_> {
        let rails: Vec<Rail> = (0..self.rails)
            .map(|i| {
                let config = SimConfig { name: RAIL_NAMES[i % RAIL_NAMES.len()], ..self.config };
                let net = SimNet::new(self.seed.wrapping_add(i as u64 * 1_000_003), config);
                Rail { initiator: NodeId(0), target: NodeId(1), net }
            })
            .collect();
        let mut nodes: Vec<SimTransport> = rails.iter().map(|rail| rail.net.node()).collect();
        let identity = nodes.first().map_or(0, SimTransport::identity);
        nodes.iter_mut().for_each(|node| node.set_identity(identity));
        let initiator = (self.build)(Side::Initiator, nodes);
        let target = (self.build)(Side::Target, rails.iter().map(|rail| rail.net.node()).collect());
        Box::new(SimPair {
            harness: self,
            rails,
            identity,
            initiator,
            target: Some(target),
            now: Instant::ZERO,
            polls_at_once: 0,
        })
    }

    fn skip(&self, case: &str) -> Option<&'static str> {
        (case == "submit_and_poll_do_not_allocate" && self.config.link.loss_ppm > 0)
            .then_some("sim allocates a copy of the bytes of a WRITE that times out on a lossy link")
    }
}

impl core::fmt::Debug for SimHarness {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("SimHarness")
            .field("seed", &self.seed)
            .field("rails", &self.rails)
            .finish_non_exhaustive()
    }
}

struct Rail {
    net: SimNet,
    initiator: NodeId,
    target: NodeId,
}

struct SimPair<'h> {
    harness: &'h mut SimHarness,
    rails: Vec<Rail>,
    identity: u64,
    initiator: Box<dyn Transport>,
    target: Option<Box<dyn Transport>>,
    now: Instant,
    polls_at_once: u32,
}

impl Pair for SimPair<'_> {
    fn initiator(&mut self) -> &mut dyn Transport {
        &mut self.initiator
    }

    fn target(&mut self) -> &mut dyn Transport {
        match &mut self.target {
            Some(target) => target,
            None => unreachable!("the suite does not use a dead target"),
        }
    }

    fn tick(&mut self) -> Instant {
        let events = self.rails.iter().filter_map(|rail| rail.net.next_event());
        let next = events
            .chain(self.initiator.poll_at())
            .chain(self.target.as_ref().and_then(|t| t.poll_at()))
            .min();
        // A transport that wants to be polled at once, again and again, is polled at growing intervals.
        let at_once = next.is_some_and(|next| next <= self.now);
        self.polls_at_once = if at_once { (self.polls_at_once + 1).min(8) } else { 0 };
        let least = self.now + Duration::from_micros(5 << self.polls_at_once);
        let rest = self.now + Duration::from_millis(10);
        self.now = next.unwrap_or(rest).clamp(least, rest);
        self.rails.iter().for_each(|rail| rail.net.advance_to(self.now));
        self.now
    }

    fn patience(&self) -> Duration {
        Duration::from_secs(120)
    }

    fn late_max(&self) -> Duration {
        match self.harness.config.link.loss_ppm {
            0 => Duration::from_secs(1),
            _ => self.harness.config.link.late_max + Duration::from_secs(1),
        }
    }

    fn key_bytes(&self, export: &[u8]) -> Option<Range<usize>> {
        (export.starts_with(b"SSIM") && self.harness.rails == 1).then_some(26..34)
    }

    fn initiator_identity(&self) -> Option<u64> {
        Some(self.identity)
    }

    fn kill_target(&mut self) -> Hook {
        self.target = None;
        self.rails.iter().for_each(|rail| rail.net.kill(rail.target));
        Hook::Done
    }

    fn restart_target(&mut self) -> Hook {
        self.target = None;
        let rails = self.rails.iter().map(|rail| rail.net.restart(rail.target)).collect();
        self.target = Some((self.harness.build)(Side::Target, rails));
        Hook::Done
    }

    fn stall_target(&mut self, stalled: bool) -> Hook {
        self.rails.iter().for_each(|rail| rail.net.stall(rail.target, stalled));
        Hook::Done
    }

    fn cut(&mut self) -> Hook {
        self.rails.iter().for_each(|rail| rail.net.cut(rail.initiator, rail.target));
        Hook::Done
    }
}
