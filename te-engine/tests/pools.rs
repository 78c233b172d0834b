//! CXL pools as a fabric of the engine. The pools are files; no CXL device is behind them.
#![cfg(feature = "cxl")]
#![allow(clippy::unwrap_used, reason = "a test that fails reports the line")]
#![allow(unsafe_code, reason = "the tests keep the pools mapped until their engines are gone")]

mod common;

use std::path::{Path, PathBuf};
use std::time::Duration;

use common::{EVERYTHING, bytes, pattern, request};
use te_core::{Access, Error, ErrorKind, Location, MemSpan, Op, RegionId, VolatileSpan};
use te_cxl::{Claim, Coherence, FormatOptions, Pool, Seat};
use te_engine::{
    Config, Fabrics, RegisterError, RequestProblem, SegmentError, StartError, SubmitOptions, TransferEngine,
    TransferError,
};

const LONG: Option<Duration> = Some(Duration::from_secs(30));
const LEN: usize = 1 << 20;

/// A file with a pool, which is removed at the end.
struct PoolFile(PathBuf);

impl PoolFile {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("snowskin-engine-{name}-{}", std::process::id()));
        std::fs::File::create(&path).unwrap().set_len(16 << 20).unwrap();
        Pool::format(&path, FormatOptions::default()).unwrap();
        Self(path)
    }
}

impl Drop for PoolFile {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

fn start(fabrics: &str, pool: &Path, coherence: Coherence) -> Result<TransferEngine, StartError> {
    let mut config = Config { fabrics: fabrics.parse().unwrap(), ..Config::default() };
    (config.cxl.pools, config.cxl.coherence) = (vec![pool.to_path_buf()], coherence);
    TransferEngine::start(config)
}

/// Claims the first extent, as if a master had given it to this engine.
fn claim(engine: &TransferEngine) -> MemSpan {
    let claim = Claim { first: 0, count: 1, incarnation: engine.incarnation(), epoch: 1, key: [7; 16] };
    engine.pools()[0].claim(claim).unwrap()
}

fn register(engine: &TransferEngine, span: MemSpan) -> Result<RegionId, RegisterError> {
    // SAFETY: the pool stays mapped while the engine has it.
    unsafe { engine.register(span, EVERYTHING) }
}

fn moved(engine: &TransferEngine, fabric: &str) -> u64 {
    engine.stats().rails.iter().filter(|rail| rail.name == fabric).map(|rail| rail.bytes).sum()
}

#[test]
fn a_region_in_a_pool_is_reached_through_the_pool_once_a_page_is_taken() {
    for coherence in [Coherence::Flush, Coherence::Hardware] {
        let file = PoolFile::new(if coherence == Coherence::Flush { "flush" } else { "hardware" });
        let (owner, peer) = (start("auto", &file.0, coherence), start("auto", &file.0, coherence));
        let (owner, peer) = (owner.unwrap(), peer.unwrap());
        let span = claim(&owner);
        assert_eq!(span.location() == Location::Pool, coherence == Coherence::Flush);
        let region = register(&owner, span).unwrap();
        let local = peer.alloc_shared(LEN, Access::LOCAL).unwrap();
        let content = pattern(3, LEN);
        local.write(0, &content).unwrap();

        let address = span.as_ptr().addr() as u64;
        let transfer = |op, fabric: Option<&str>| {
            let segment = peer.open_segment(owner.name()).map_err(|error| error.to_string())?;
            let options = SubmitOptions::new().timeout(Duration::from_secs(20));
            let options = fabric.map_or(options.clone(), |fabric| options.fabric(fabric));
            let requests = [request(op, (local.id(), 0), segment, address, LEN as u64)];
            let ended = peer.submit_with(&requests, &options).and_then(|batch| batch.wait(LONG));
            peer.close_segment(segment).unwrap();
            ended.map(drop).map_err(|error| error.to_string())
        };
        assert!(transfer(Op::Write, Some("cxl")).is_err(), "without a page");
        peer.pools()[0].take_seat(Seat { slot: 5, epoch: 1 });
        transfer(Op::Write, Some("cxl")).unwrap();
        assert_eq!(moved(&peer, "cxl"), LEN as u64);
        assert_eq!(peer.pools()[0].seat(), None, "the transport has it");

        local.write(0, &vec![0; LEN]).unwrap();
        transfer(Op::Read, Some("cxl")).unwrap();
        assert_eq!(bytes(&local), content);
        owner.pools()[0].refresh(span).unwrap();
        let mut seen = vec![0; LEN];
        // SAFETY: the claimed extent stays mapped, and its size is more than `LEN`.
        unsafe { VolatileSpan::new(span) }.read(0, &mut seen).unwrap();
        assert_eq!(seen, content, "the owner sees it");
        owner.unregister(region).unwrap();
    }
}

#[test]
fn memory_of_a_pool_without_coherent_caches_is_refused_by_every_other_fabric() {
    let file = PoolFile::new("apart");
    let owner = start("auto", &file.0, Coherence::Flush).unwrap();
    let other = TransferEngine::start(Config { fabrics: Fabrics::AUTO, ..Config::default() }).unwrap();
    let span = claim(&owner);
    let refused = register(&other, span).unwrap_err();
    assert_eq!(refused, RegisterError::Rails(Error::new(ErrorKind::Unsupported)));
    // As a caller gives it that knows only the address: the engine that has the pool knows the rest.
    let plain = MemSpan::new(span.as_ptr(), span.len());
    let region = register(&owner, plain).unwrap();
    // TCP would read what the caches of this host hold.
    let error = other.open_segment(owner.name()).unwrap_err();
    assert!(matches!(error, SegmentError::NoRail { .. }), "{error}");
    owner.unregister(region).unwrap();
}

#[test]
fn requests_off_the_granule_are_refused_before_a_byte_moves() {
    let file = PoolFile::new("granule");
    let owner = start("cxl", &file.0, Coherence::Flush).unwrap();
    let peer = start("auto", &file.0, Coherence::Flush).unwrap();
    peer.pools()[0].take_seat(Seat { slot: 0, epoch: 1 });
    let span = claim(&owner);
    let region = register(&owner, span).unwrap();
    let local = peer.alloc_shared(4096, Access::LOCAL).unwrap();
    let segment = peer.open_segment(owner.name()).unwrap();
    let address = span.as_ptr().addr() as u64;
    for (offset, len) in [(0, 100), (32, 64), (0, 63), (1, 63)] {
        let requests = [
            request(Op::Write, (local.id(), 0), segment, address, 64),
            request(Op::Write, (local.id(), 0), segment, address + offset, len),
        ];
        let problem = Err(TransferError::Request { index: 1, problem: RequestProblem::Granule });
        let ended = peer.submit(&requests, LONG).and_then(|batch| batch.wait(LONG).map(drop));
        assert_eq!(ended, problem, "{offset} {len}");
    }
    assert_eq!(moved(&peer, "cxl"), 0);
    let requests = [request(Op::Write, (local.id(), 7), segment, address + 128, 192)];
    peer.submit(&requests, LONG).unwrap().wait(LONG).unwrap();
    owner.unregister(region).unwrap();
}

#[test]
fn an_engine_says_which_pool_it_cannot_open_and_starts_without_any_if_none_is_named() {
    let none = Config { fabrics: Fabrics::CXL, ..Config::default() };
    let error = TransferEngine::start(none).map(drop).unwrap_err().to_string();
    assert!(error.contains("cxl.pools"), "{error}");
    let auto = TransferEngine::start(Config::default()).unwrap();
    assert!(auto.pools().is_empty() && auto.stats().rails.iter().all(|rail| rail.name != "cxl"));
    // A pool that is named must open, also beside other fabrics.
    let missing = Path::new("/nonexistent/dax0.0");
    let error = start("auto", missing, Coherence::Flush).map(drop).unwrap_err().to_string();
    assert!(error.contains("/nonexistent/dax0.0"), "{error}");
    let empty = std::env::temp_dir().join(format!("snowskin-engine-empty-{}", std::process::id()));
    std::fs::File::create(&empty).unwrap().set_len(16 << 20).unwrap();
    let error = start("auto", &empty, Coherence::Flush).map(drop).unwrap_err().to_string();
    std::fs::remove_file(&empty).unwrap();
    assert!(error.contains("snowskin cxl format"), "{error}");
}

#[test]
fn extents_without_coherent_caches_are_registered_and_read_past_the_cache() {
    let file = PoolFile::new("claimed");
    let engine = start("cxl,tcp", &file.0, Coherence::Flush).unwrap();
    let span = claim(&engine);
    let region = engine.register_claimed(&engine.pools()[0], span, EVERYTHING).unwrap();
    assert!(region.is_apart() && region.view().is_empty());
    let content = pattern(5, 1_000);
    region.write(77, &content).unwrap();
    let mut found = vec![0; 1_000];
    region.read(77, &mut found).unwrap();
    assert_eq!(found, content);
    let before = engine.pools()[0].refreshed_bytes();
    region.refresh(77, 1_000).unwrap();
    assert_eq!(engine.pools()[0].refreshed_bytes() - before, 1_000);
    let end = region.len() as u64;
    for refused in [region.read(end, &mut [0]), region.write(end, &[0]), region.refresh(end, 1)] {
        assert_eq!(refused.unwrap_err().kind, ErrorKind::OutOfRange);
    }
    engine.unregister(region.id()).unwrap();
}
