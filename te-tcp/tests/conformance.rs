//! Runs the contract's conformance suite over loopback.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::time::Duration;

use te_core::testkit::{CountingAlloc, Harness, Pair};
use te_fabric::testkit::{Ends, EndsConfig, Fabric};
use te_tcp::{Config, TcpTransport};

#[global_allocator]
static ALLOCATOR: CountingAlloc<std::alloc::System> = CountingAlloc::new(std::alloc::System);

/// Opens pairs of transports on this machine.
struct Loopback(Config);

impl Loopback {
    fn open(&self) -> TcpTransport {
        TcpTransport::new(self.0.clone()).unwrap()
    }
}

impl Harness for Loopback {
    fn pair(&mut self) -> Box<dyn Pair + '_> {
        let (initiator, target) = (self.open(), self.open());
        let restart = Self(Config { bind: target.local_address(), ..self.0.clone() });
        let config = EndsConfig { patience: Duration::from_secs(10), late_max: Duration::from_millis(30) };
        Box::new(Ends::new(initiator, target, restart, config))
    }
}

impl Fabric for Loopback {
    type Transport = TcpTransport;

    fn reopen(&mut self) -> TcpTransport {
        self.open()
    }

    fn identity(transport: &TcpTransport) -> u64 {
        transport.identity()
    }

    fn cut(transport: &mut TcpTransport) {
        transport.close_connections();
    }
}

/// The longest slices of the suite, and short time limits.
fn plain() -> Config {
    Config {
        peer_silence_ms_max: 1_000,
        connect_ms_max: 1_000,
        slice_bytes_max: 16 << 20,
        ..Config::default()
    }
}

mod plain_connection {
    te_core::conformance_tests!(
        super::Loopback(super::plain()),
        skips[a_slice_off_the_granule_is_refused_before_a_byte_moves]
    );
}

mod with_checksums {
    use te_tcp::Config;
    te_core::conformance_tests!(
        super::Loopback(Config { checksum: true, ..super::plain() }),
        skips[a_slice_off_the_granule_is_refused_before_a_byte_moves]
    );
}

mod many_connections_and_small_pieces {
    use te_tcp::Config;
    te_core::conformance_tests!(
        super::Loopback(Config { connections: 4, piece_bytes_max: 4_096, ..super::plain() }),
        skips[a_slice_off_the_granule_is_refused_before_a_byte_moves]
    );
}

mod tight_buffers {
    use te_tcp::Config;
    te_core::conformance_tests!(
        super::Loopback(Config {
            send_buffer_bytes: Some(32_768),
            receive_buffer_bytes: Some(65_536),
            detached_bytes_max: 0,
            ..super::plain()
        }),
        skips[a_slice_off_the_granule_is_refused_before_a_byte_moves]
    );
}

#[cfg(feature = "uring")]
mod uring {
    use te_tcp::{Config, Driver};

    fn ring() -> Config {
        Config { driver: Driver::Uring, ..super::plain() }
    }

    mod plain_connection {
        te_core::conformance_tests!(
            super::super::Loopback(super::ring()),
            skips[a_slice_off_the_granule_is_refused_before_a_byte_moves]
        );
    }

    mod many_connections_with_checksums {
        use te_tcp::Config;
        te_core::conformance_tests!(
            super::super::Loopback(Config { connections: 4, checksum: true, ..super::ring() }),
            skips[a_slice_off_the_granule_is_refused_before_a_byte_moves]
        );
    }

    mod tight_buffers {
        use te_tcp::Config;
        te_core::conformance_tests!(
            super::super::Loopback(Config {
                send_buffer_bytes: Some(32_768),
                receive_buffer_bytes: Some(65_536),
                detached_bytes_max: 0,
                ..super::ring()
            }),
            skips[a_slice_off_the_granule_is_refused_before_a_byte_moves]
        );
    }
}
