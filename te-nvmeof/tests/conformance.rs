//! Runs the contract's conformance suite over loopback, against our own target.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::time::Duration;

use te_core::testkit::{CountingAlloc, Harness, Pair};
use te_fabric::testkit::{Ends, EndsConfig, Fabric};
use te_nvmeof::{Config, NvmeofTransport};

#[global_allocator]
static ALLOCATOR: CountingAlloc<std::alloc::System> = CountingAlloc::new(std::alloc::System);

/// Opens pairs of transports on this machine.
struct Loopback(Config);

impl Loopback {
    fn open(&self) -> NvmeofTransport {
        NvmeofTransport::new(self.0.clone()).unwrap()
    }
}

impl Harness for Loopback {
    fn pair(&mut self) -> Box<dyn Pair + '_> {
        let (initiator, target) = (self.open(), self.open());
        let restart = Self(Config { bind: target.local_address(), ..self.0.clone() });
        let config = EndsConfig { patience: Duration::from_secs(20), late_max: Duration::from_millis(30) };
        Box::new(Ends::new(initiator, target, restart, config))
    }
}

impl Fabric for Loopback {
    type Transport = NvmeofTransport;

    fn reopen(&mut self) -> NvmeofTransport {
        self.open()
    }

    fn identity(transport: &NvmeofTransport) -> u64 {
        transport.identity()
    }

    fn cut(transport: &mut NvmeofTransport) {
        transport.close_connections();
    }
}

/// The suite's slices are small: the smallest granule, few in flight, short time limits.
fn plain() -> Config {
    Config {
        granule_bytes: 512,
        inflight_max: 120,
        peer_silence_ms_max: 2_000,
        connect_ms_max: 2_000,
        slice_bytes_max: 16 << 20,
        ..Config::default()
    }
}

mod plain_connections {
    te_core::conformance_tests!(super::Loopback(super::plain()));
}

mod with_digests {
    use te_nvmeof::Config;
    te_core::conformance_tests!(super::Loopback(Config {
        header_digest: true,
        data_digest: true,
        ..super::plain()
    }));
}

mod without_in_capsule_data_and_small_pieces {
    use te_nvmeof::Config;
    te_core::conformance_tests!(super::Loopback(Config {
        in_capsule_bytes_max: 0,
        transfer_bytes_max: 4_096,
        queues: 4,
        queue_depth: 8,
        ..super::plain()
    }));
}

mod tight_buffers {
    use te_nvmeof::Config;
    te_core::conformance_tests!(super::Loopback(Config {
        send_buffer_bytes: Some(32_768),
        receive_buffer_bytes: Some(65_536),
        detached_bytes_max: 0,
        queues: 1,
        ..super::plain()
    }));
}
