//! NVMe over TCP as a fabric of the engine: each engine serves its regions as namespaces.
#![cfg(feature = "nvmeof")]
#![allow(clippy::unwrap_used, reason = "a test that fails reports the line")]

mod common;

use std::time::Duration;

use common::{EVERYTHING, bytes, pattern, request};
use te_core::{Access, ExpelMode, Op};
use te_engine::{
    Config, Expulsion, RequestProblem, SegmentHandle, SharedRegion, SubmitOptions, TransferEngine,
    TransferError,
};

const LONG: Option<Duration> = Some(Duration::from_secs(30));
const LEN: usize = 3 << 20;

struct Pair {
    here: TransferEngine,
    there: TransferEngine,
    local: SharedRegion,
    remote: SharedRegion,
    segment: SegmentHandle,
}

fn pair(fabrics: &str) -> Pair {
    let engine =
        || TransferEngine::start(Config { fabrics: fabrics.parse().unwrap(), ..Config::default() }).unwrap();
    let (here, there) = (engine(), engine());
    let remote = there.alloc_shared(LEN, EVERYTHING).unwrap();
    let local = here.alloc_shared(LEN, Access::LOCAL).unwrap();
    let segment = here.open_segment(there.name()).unwrap();
    Pair { here, there, local, remote, segment }
}

impl Pair {
    /// Moves `len` bytes between offset `at` of the local region and offset `to` of the remote one.
    fn transfer(&self, op: Op, (at, to): (u64, u64), len: u64) -> Result<(), TransferError> {
        let requests = [request(op, (self.local.id(), at), self.segment, self.remote.addr() + to, len)];
        let options = SubmitOptions::new().timeout(Duration::from_secs(20));
        self.here.submit_with(&requests, &options)?.wait(LONG).map(drop)
    }

    fn moved(&self, fabric: &str) -> u64 {
        self.here.stats().rails.iter().filter(|rail| rail.name == fabric).map(|rail| rail.bytes).sum()
    }
}

#[test]
fn regions_of_peers_are_read_and_written_in_blocks() {
    let pair = pair("nvmeof");
    let content = pattern(11, LEN);
    pair.local.write(0, &content).unwrap();
    pair.transfer(Op::Write, (0, 0), LEN as u64).unwrap();
    assert_eq!(bytes(&pair.remote), content);
    pair.local.write(0, &vec![0; LEN]).unwrap();
    // The local side has no granule.
    pair.transfer(Op::Read, (5, 8192), (1 << 20) + 4096).unwrap();
    assert_eq!(bytes(&pair.local)[5..][..(1 << 20) + 4096], content[8192..][..(1 << 20) + 4096]);
    for (to, len) in [(1, 4096), (0, 4095), (512, 4096), (4096, 100)] {
        let refused = pair.transfer(Op::Write, (0, to), len);
        let problem = Err(TransferError::Request { index: 0, problem: RequestProblem::Granule });
        assert_eq!(refused, problem, "{to} {len}");
    }
}

#[cfg(feature = "tcp")]
#[test]
fn requests_off_the_granule_go_over_a_fabric_without_one() {
    let pair = pair("tcp,nvmeof");
    pair.transfer(Op::Write, (0, 1), 4095).unwrap();
    pair.transfer(Op::Write, (0, 0), 8192).unwrap();
    assert_eq!((pair.moved("tcp"), pair.moved("nvmeof")), (4095 + 8192, 0), "TCP is nearer");
    let requests = [request(Op::Write, (pair.local.id(), 0), pair.segment, pair.remote.addr(), 8192)];
    let options = SubmitOptions::new().fabric("nvmeof");
    pair.here.submit_with(&requests, &options).unwrap().wait(LONG).unwrap();
    assert_eq!(pair.moved("nvmeof"), 8192);
    let requests = [request(Op::Write, (pair.local.id(), 0), pair.segment, pair.remote.addr(), 8191)];
    let problem = Err(TransferError::Request { index: 0, problem: RequestProblem::Granule });
    let ended = pair.here.submit_with(&requests, &options).and_then(|batch| batch.wait(LONG).map(drop));
    assert_eq!(ended, problem);
}

#[test]
fn an_expelled_peer_writes_no_more() {
    let pair = pair("nvmeof");
    pair.transfer(Op::Write, (0, 0), 4096).unwrap();
    let mut state = pair.there.expel(pair.here.identity(), ExpelMode::Force).unwrap();
    common::eventually("the peer is gone", || {
        state = pair.there.expel(pair.here.identity(), ExpelMode::Force).unwrap();
        state == Expulsion::Gone
    });
    pair.local.write(0, &[9; 4096]).unwrap();
    assert!(pair.transfer(Op::Write, (0, 0), 4096).is_err());
    // Nor over an attachment that it makes anew.
    let again = pair.here.open_segment(pair.there.name()).unwrap();
    let requests = [request(Op::Write, (pair.local.id(), 0), again, pair.remote.addr(), 4096)];
    let options = SubmitOptions::new().timeout(Duration::from_secs(5));
    let ended = pair.here.submit_with(&requests, &options).and_then(|batch| batch.wait(LONG).map(drop));
    assert!(ended.is_err());
    assert_eq!(bytes(&pair.remote)[..4096], [0; 4096]);
}

#[test]
fn it_is_used_only_when_it_is_named_or_has_a_port() {
    let rails = |config: Config| TransferEngine::start(config).unwrap().stats().rails;
    assert!(rails(Config::default()).iter().all(|rail| rail.name != "nvmeof"));
    let mut config = Config::default();
    config.nvmeof.port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    assert!(rails(config).iter().any(|rail| rail.name == "nvmeof"));
}
