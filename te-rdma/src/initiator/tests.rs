//! The initiator on a simulated device, with control of its control connection.

use te_core::{Access, Op, RegionId, RegionOffset, RemoteOffset};
use te_fabric::Interest;

use super::*;
use crate::io::connection::Connection;
use crate::io::{Io, Outage};
use crate::memory::testing::memory;
use crate::peers::outbound::Outbound;
use crate::sim::{DeviceConfig, SimConfig, SimDevice, SimFabric};
use crate::wire::{EXPORT_FORMAT, Resolved, Response, Status, Withdrawn};

const REGION: RegionId = RegionId::new(1, 1);
const REMOTE: RemoteRegionId = RemoteRegionId::new(2, 1);
const PEER: u32 = 3;

/// An initiator with one attached remote region of 8 KiB, and the shared parts.
struct Bench {
    initiator: Initiator,
    io: Io<SimDevice>,
    memory: LocalMemory,
    timers: Timers,
    config: Config,
    out: Outbound,
}

impl Bench {
    fn new() -> Self {
        let config = Config { proof_ms_max: 0, qps: 2, ..Config::default() };
        let device = SimFabric::new(1, SimConfig::IMMEDIATE).device(DeviceConfig::default());
        let (io, address) = Io::open(device, &config).expect("a working port");
        let stream = std::net::TcpStream::connect(address).expect("it listens");
        let out = Outbound::new(Connection::new(stream, Interest::BOTH), PEER, 0, Instant::ZERO);
        let mut initiator = Initiator::new(&config);
        initiator.attach(REMOTE, PEER, &export(), &config).expect("an empty table");
        Self { initiator, io, memory: memory(REGION, 8_192), timers: Timers::new(), config, out }
    }

    fn submit(&mut self, token: u64) -> Result<usize, Error> {
        let (local, remote) = (RegionOffset::new(REGION, 0), RemoteOffset::new(REMOTE, 0));
        let slice = Slice { token: Token(token), local, remote, len: 100, op: Op::Write };
        self.with(|initiator, _, env| initiator.submit(&[slice], env))
    }

    fn with<T>(
        &mut self,
        what: impl FnOnce(&mut Initiator, &mut Outbound, &mut Env<'_, SimDevice>) -> T,
    ) -> T {
        let env = &mut Env {
            io: &mut self.io,
            memory: &mut self.memory,
            timers: &mut self.timers,
            config: &self.config,
        };
        what(&mut self.initiator, &mut self.out, env)
    }

    fn write_requests(&mut self) -> u32 {
        self.with(|initiator, out, env| initiator.write_requests(PEER, out, env))
    }

    fn answer(&mut self, response: Response<'_>) -> bool {
        self.with(|initiator, _, env| initiator.answer(PEER, &response, env))
    }

    fn ended(&mut self) -> Option<(Token, ErrorKind)> {
        let mut out = [Completion::applied(Token(0)); 1];
        let count = self.initiator.fetch(&mut out);
        (count == 1).then(|| (out[0].token, out[0].result.expect_err("it failed").kind))
    }
}

fn export() -> Export {
    Export {
        format: EXPORT_FORMAT,
        rights: Access::all().bits(),
        addresses: [[127, 0, 0, 1].into(); 4],
        address_count: 1,
        port: 1,
        incarnation: 7,
        region: 0,
        generation: 1,
        key: 99,
        len: 8_192,
        location: te_core::Location::Host,
    }
}

#[test]
fn a_first_slice_asks_for_keys_and_offers_queue_pairs_at_once() {
    let mut bench = Bench::new();
    assert!(!bench.initiator.has_requests(PEER, &bench.io, &bench.config));
    assert_eq!(bench.submit(1), Ok(1));
    assert!(bench.initiator.needs_connection(PEER) && bench.initiator.listed_count() == 1);
    assert!(bench.initiator.has_requests(PEER, &bench.io, &bench.config));
    assert_eq!((bench.write_requests(), bench.io.links().len()), (2, 2));
    assert!(!bench.initiator.has_requests(PEER, &bench.io, &bench.config));
    assert_eq!((bench.write_requests(), bench.initiator.use_state(PEER)), (0, UseState::Busy));
}

#[test]
fn a_refused_offer_leaves_no_queue_pair_and_is_not_repeated_at_once() {
    let mut bench = Bench::new();
    bench.submit(1).expect("room");
    bench.write_requests();
    let id = 2 << 24;
    assert!(bench.answer(Response::Refused { id, status: Status::Full }));
    assert_eq!(bench.io.links().len(), 0);
    assert!(bench.answer(Response::Refused { id: (1 << 24) | 2, status: Status::AccessDenied }));
    assert_eq!(bench.ended(), Some((Token(1), ErrorKind::AccessDenied)));
    assert!(
        !bench.answer(Response::Refused { id: 99 << 24, status: Status::Full }),
        "there was no such request"
    );
}

#[test]
fn inconsistent_keys_are_refused() {
    let mut bench = Bench::new();
    bench.submit(1).expect("room");
    bench.write_requests();
    let of = Resolved {
        base: 0x1000.into(),
        len: 8_192.into(),
        chunk_bytes: 4_096.into(),
        chunks: 2.into(),
        first: 1.into(),
        rights: 12,
        reserved: [0; 7],
    };
    let id = (1 << 24) | 2;
    assert!(!bench.answer(Response::Resolved { id, of, keys: &[5.into()] }), "not the first chunk");
    let of = Resolved { first: 0.into(), ..of };
    assert!(bench.answer(Response::Resolved { id, of, keys: &[5.into()] }));
    assert!(
        bench.initiator.has_requests(PEER, &bench.io, &bench.config),
        "the second chunk's key is missing"
    );
}

#[test]
fn a_withdrawn_region_ends_waiting_slices_and_refuses_new_ones() {
    let mut bench = Bench::new();
    bench.submit(1).expect("room");
    let region = Withdrawn { region: 0.into(), generation: 1.into() };
    assert!(bench.answer(Response::Withdrawn { region }));
    assert_eq!(bench.ended(), Some((Token(1), ErrorKind::Stale)));
    assert_eq!(bench.submit(2).map_err(|error| error.kind), Err(ErrorKind::Stale));
}

#[test]
fn a_lost_port_ends_queue_pairs_and_lists_every_peer() {
    let mut bench = Bench::new();
    bench.submit(1).expect("room");
    bench.write_requests();
    bench.with(|initiator, _, env| initiator.lose_port(Outage::Port, env));
    assert_eq!((bench.io.links().len(), bench.io.outage()), (0, Some(Outage::Port)));
    assert_eq!(bench.initiator.listed(0), Some(PEER));
    bench.initiator.give_up(PEER, true, Outage::Port.error(), &mut bench.memory);
    assert_eq!(bench.ended(), Some((Token(1), ErrorKind::Rail)));
    assert_eq!(bench.initiator.detach(REMOTE), Ok(PEER));
    assert!(bench.initiator.is_idle(PEER));
}
