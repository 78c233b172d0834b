//! The contract's conformance suite over loopback.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::ops::Range;
use std::time::Duration;

use te_core::testkit::{CountingAlloc, Harness, Hook, Pair, WallClock};
use te_core::{Instant, Transport};
use te_tcp::{Config, TcpTransport};

#[global_allocator]
static ALLOCATOR: CountingAlloc<std::alloc::System> = CountingAlloc::new(std::alloc::System);

/// Pairs of transports on this machine.
struct Loopback(Config);

impl Harness for Loopback {
    fn pair(&mut self) -> Box<dyn Pair + '_> {
        let open = |config: &Config| TcpTransport::new(config.clone()).unwrap();
        let target = open(&self.0);
        Box::new(Ends {
            initiator: open(&self.0),
            restart: Config { bind: target.local_addr(), ..self.0.clone() },
            target: Some(target),
            clock: WallClock::new(Duration::ZERO),
        })
    }
}

struct Ends {
    initiator: TcpTransport,
    target: Option<TcpTransport>,
    restart: Config,
    clock: WallClock,
}

impl Pair for Ends {
    fn initiator(&mut self) -> &mut dyn Transport {
        &mut self.initiator
    }

    fn target(&mut self) -> &mut dyn Transport {
        self.target.as_mut().unwrap()
    }

    fn tick(&mut self) -> Instant {
        self.clock.tick()
    }

    fn late_max(&self) -> Duration {
        Duration::from_millis(30)
    }

    fn initiator_identity(&self) -> Option<u64> {
        Some(self.initiator.identity())
    }

    fn address_bytes(&self, export: &[u8]) -> Range<usize> {
        46..export.len()
    }

    fn key_bytes(&self, _export: &[u8]) -> Option<Range<usize>> {
        Some(24..32)
    }

    fn kill_target(&mut self) -> Hook {
        // What the system does to the sockets of a killed process.
        self.target = None;
        Hook::Done
    }

    fn restart_target(&mut self) -> Hook {
        self.target = Some(TcpTransport::new(self.restart.clone()).unwrap());
        Hook::Done
    }

    fn stall_target(&mut self, _stalled: bool) -> Hook {
        // Nothing but the suite polls it.
        Hook::Done
    }

    fn cut(&mut self) -> Hook {
        self.target.as_mut().unwrap().close_connections();
        Hook::Done
    }
}

/// The suite's longest slices, short limits.
fn plain() -> Config {
    Config {
        peer_silence_ms_max: 1_000,
        connect_ms_max: 1_000,
        slice_bytes_max: 16 << 20,
        ..Config::default()
    }
}

mod plain_lane {
    te_core::conformance_tests!(super::Loopback(super::plain()));
}

mod with_checksums {
    use te_tcp::Config;
    te_core::conformance_tests!(super::Loopback(Config { checksum: true, ..super::plain() }));
}

mod many_lanes_and_small_pieces {
    use te_tcp::Config;
    te_core::conformance_tests!(super::Loopback(Config {
        lanes: 4,
        piece_bytes_max: 4_096,
        ..super::plain()
    }));
}

mod tight_buffers {
    use te_tcp::Config;
    te_core::conformance_tests!(super::Loopback(Config {
        send_buffer_bytes: Some(32_768),
        receive_buffer_bytes: Some(65_536),
        aside_bytes_max: 0,
        ..super::plain()
    }));
}

#[cfg(feature = "uring")]
mod uring {
    use te_tcp::{Config, Driver};

    fn ring() -> Config {
        Config { driver: Driver::Uring, ..super::plain() }
    }

    mod plain_lane {
        te_core::conformance_tests!(super::super::Loopback(super::ring()));
    }

    mod many_lanes_with_checksums {
        use te_tcp::Config;
        te_core::conformance_tests!(super::super::Loopback(Config {
            lanes: 4,
            checksum: true,
            ..super::ring()
        }));
    }

    mod tight_buffers {
        use te_tcp::Config;
        te_core::conformance_tests!(super::super::Loopback(Config {
            send_buffer_bytes: Some(32_768),
            receive_buffer_bytes: Some(65_536),
            aside_bytes_max: 0,
            ..super::ring()
        }));
    }
}
