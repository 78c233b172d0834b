//! Processes that have lost what the master gave them, and pools that are gone: the others go on.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]

mod common;

use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Duration;

use common::{Ends, MIB, PoolFile, REGION, REMOTE, export, run, slice};
use nix::unistd::ftruncate;
use te_core::{ErrorKind, ExpelMode, Instant, Memory, Op, Transport};
use te_cxl::Coherence::{Flush, Hardware};
use te_cxl::pool::format::{OwnerRecord, PeerRecord};
use te_cxl::{Claim, Config, CxlTransport, Mount, Pool, PoolError, Seat};

fn at(ms: u64) -> Instant {
    Instant::ZERO + Duration::from_millis(ms)
}

fn record(file: &PoolFile, slot: usize) -> PeerRecord {
    let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&file.fd));
    Pool::inspect(Path::new(&path)).unwrap().peers[slot].unwrap()
}

#[test]
fn a_release_and_a_claim_whose_memory_fails_can_be_repeated() {
    let file = PoolFile::new(16 * MIB, 4);
    let pool = file.open(Flush);
    let claim = file.claim(0, 2, 7);
    pool.claim(claim).unwrap();
    // The records are still there, and the extents are not.
    let cut = || ftruncate(&file.fd, 2 * MIB as i64).unwrap();
    let whole = || ftruncate(&file.fd, 16 * MIB as i64).unwrap();
    cut();
    let failed = pool.release(0, 2, claim.epoch);
    assert!(matches!(failed, Err(PoolError::Memory(_))), "lines of the extents may be dirty: {failed:?}");
    whole();
    pool.release(0, 2, claim.epoch).unwrap();
    assert!(matches!(pool.release(0, 2, claim.epoch), Err(PoolError::NotClaimed { .. })));
    let next = Claim { epoch: file.epoch(), ..claim };
    cut();
    assert!(matches!(pool.claim(next), Err(PoolError::Memory(_))));
    whole();
    pool.claim(next).unwrap();
    pool.release(0, 2, next.epoch).unwrap();
    // Coherent caches hold nothing that could land later.
    let pool = file.open(Hardware);
    cut();
    let last = Claim { epoch: file.epoch(), ..claim };
    pool.claim(last).unwrap();
    pool.release(0, 2, last.epoch).unwrap();
}

#[test]
fn a_transport_that_has_lost_its_page_does_not_write_it() {
    let mut ends = Ends::new(Flush);
    ends.peer.poll(at(100), &mut []);
    assert_eq!((record(&ends.file, 1).identity, record(&ends.file, 1).beat), (0x1111, 1));
    // The master gives the page to another process.
    let (_pool, next) = ends.file.transport(Flush, 1, 0x3333);
    let given = record(&ends.file, 1);
    assert_eq!((given.identity, given.present), (0x3333, true));
    ends.peer.poll(at(500), &mut []);
    assert_eq!(record(&ends.file, 1), given, "a sign of life");
    let none = CxlTransport::new(Config::default(), Vec::new()).unwrap();
    drop(std::mem::replace(&mut ends.peer, none));
    assert_eq!(record(&ends.file, 1), given, "the last word");
    drop(next);
    assert!(!record(&ends.file, 1).present);
}

#[test]
fn signs_of_life_in_two_pools_are_not_taken_for_each_other() {
    const PEER: u64 = 0x1111;
    let mut ends = Ends::new(Flush);
    ends.peer.poll(at(100), &mut []);
    let other = PoolFile::new(16 * MIB, 8);
    let (_pool, _silent) = other.transport(Flush, 1, PEER);
    assert_ne!(record(&ends.file, 1).beat, record(&other, 1).beat);
    let mounts = [&ends.file, &other].map(|file| Mount { pool: file.open(Flush), seat: None });
    let mut asker = CxlTransport::new(Config::default(), mounts.into()).unwrap();
    // It was silent in both since each was first looked at: in the second one, at 6 s.
    for (ms, connected) in [(0, true), (6_000, true), (12_000, false), (18_000, false)] {
        asker.poll(at(ms), &mut []);
        assert_eq!(asker.is_connected(PEER), connected, "{ms} ms");
    }
}

#[test]
fn a_peer_is_expelled_from_the_pools_that_are_still_there() {
    let mut ends = Ends::new(Flush);
    let lost = PoolFile::new(16 * MIB, 8);
    let mounts = vec![
        Mount { pool: lost.open(Flush), seat: None },
        Mount { pool: ends.owner_pool.clone(), seat: None },
    ];
    let mut second = CxlTransport::new(Config::default(), mounts).unwrap();
    ftruncate(&lost.fd, 0).unwrap();
    let error = second.expel(ends.peer.identity(), ExpelMode::Force).unwrap_err();
    assert_eq!(error.kind, ErrorKind::Rail);
    let end = run(&mut ends.peer, slice(1, Op::Write, 0, 64));
    assert_eq!(end.result.unwrap_err().kind, ErrorKind::Expelled);
    let (_pool, mut again) = ends.file.transport(Flush, 4, ends.peer.identity());
    let attached = again.attach(REMOTE, &export(&ends.owner, REGION));
    assert_eq!(attached.unwrap_err().kind, ErrorKind::Expelled);
}

#[test]
fn a_page_that_was_taken_again_by_the_same_process_counts_as_another() {
    let file = PoolFile::new(16 * MIB, 4);
    let open = |epoch| {
        let mount = Mount { pool: file.open(Flush), seat: Some(Seat { slot: 0, epoch }) };
        CxlTransport::new(Config { identity: 5, ..Config::default() }, vec![mount]).unwrap()
    };
    let first = open(1);
    let _second = open(2);
    drop(first);
    assert!(record(&file, 0).present && record(&file, 0).epoch == 2);
}

#[test]
fn a_claim_that_is_overtaken_while_it_is_written_down_is_refused() {
    let file = PoolFile::new(140 * MIB, 1);
    let (slow, fast) = (file.open(Flush), file.open(Flush));
    let bytes = std::fs::File::from(file.fd.try_clone().unwrap());
    // Whether the second claim comes in the middle of the first one depends on the scheduler.
    let is_refused = (0..100).any(|_| {
        let (first, second) = (file.claim(0, 60, 7), file.claim(0, 1, 8));
        let overtaken = std::thread::scope(|scope| {
            let overtakes = scope.spawn(|| {
                let mut line = [0; 64];
                while OwnerRecord::parse(&line).map(|owner| owner.epoch) != Ok(first.epoch) {
                    bytes.read_exact_at(&mut line, 4096).unwrap();
                }
                fast.claim(second).unwrap();
            });
            let claimed = slow.claim(first);
            overtakes.join().unwrap();
            claimed
        });
        matches!(overtaken, Err(PoolError::Stale { number: 0, found, .. }) if found == second.epoch)
    });
    assert!(is_refused, "a hundred claims did not see that they were overtaken");
}
