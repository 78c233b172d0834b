//! The conformance suite through `MultiTransport`: over one rail of this fabric, and over two.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::time::Duration;

use te_core::testkit::{CountingAlloc, Harness, Pair};
use te_core::{HealthConfig, HealthRoute, MultiTransport};
use te_fabric::testkit::{Ends, EndsConfig, Fabric};
use te_nvmeof::{Config, NvmeofTransport};

#[global_allocator]
static ALLOCATOR: CountingAlloc<std::alloc::System> = CountingAlloc::new(std::alloc::System);

type Multi = MultiTransport<NvmeofTransport, HealthRoute>;

/// Pairs of transports with this many rails.
struct Rails(usize);

/// Opens an end again, its rails at the addresses that they had.
struct Restart(Vec<Config>);

fn config(identity: u64) -> Config {
    Config {
        granule_bytes: 512,
        inflight_max: 120,
        peer_silence_ms_max: 2_000,
        connect_ms_max: 2_000,
        slice_bytes_max: 16 << 20,
        identity,
        ..Config::default()
    }
}

fn open(configs: &[Config]) -> Multi {
    let rails = configs.iter().map(|config| NvmeofTransport::new(config.clone()).unwrap());
    let route = HealthRoute::new(&vec![100; configs.len()], HealthConfig::default());
    MultiTransport::new(rails, route, 120).unwrap()
}

impl Harness for Rails {
    fn pair(&mut self) -> Box<dyn Pair + '_> {
        let (initiator, target) = (open(&vec![config(11); self.0]), open(&vec![config(12); self.0]));
        let addresses = target.rails().iter().map(NvmeofTransport::local_address);
        let restart = Restart(addresses.map(|bind| Config { bind, ..config(12) }).collect());
        let ends = EndsConfig { patience: Duration::from_secs(20), late_max: Duration::from_millis(30) };
        Box::new(Ends::new(initiator, target, restart, ends))
    }

    fn skip(&self, case: &str) -> Option<&'static str> {
        (case == "a_wrong_key_opens_nothing").then_some("the keys lie inside the exports of the rails")
    }
}

impl Fabric for Restart {
    type Transport = Multi;

    fn reopen(&mut self) -> Multi {
        open(&self.0)
    }

    fn identity(transport: &Multi) -> u64 {
        transport.rails()[0].identity()
    }

    fn cut(transport: &mut Multi) {
        transport.rails_mut().iter_mut().for_each(NvmeofTransport::close_connections);
    }
}

mod one_rail {
    te_core::conformance_tests!(super::Rails(1), skips[a_wrong_key_opens_nothing]);
}

mod two_rails {
    te_core::conformance_tests!(super::Rails(2), skips[a_wrong_key_opens_nothing]);
}
