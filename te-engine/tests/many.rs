//! Many regions at a time, and one memory in many engines.
#![allow(clippy::unwrap_used, reason = "a test that fails reports the line")]

mod common;

use std::time::Duration;

use common::*;
use te_core::{Access, MemSpan, Op, RegionId};
use te_engine::{AtIndex, Fabrics, PeerToPeer, RegisterError, TransferEngine};

const LONG: Option<Duration> = Some(Duration::from_secs(30));
const PART: usize = 4096;

/// Parts of one allocation, of which there is no reference while it is registered.
struct Memory {
    span: MemSpan,
    _owner: Vec<u8>,
}

impl Memory {
    fn new(parts: usize) -> Self {
        let mut owner = vec![0; parts * PART];
        Self { span: MemSpan::new(owner.as_mut_ptr(), owner.len()), _owner: owner }
    }

    fn part(&self, index: usize) -> MemSpan {
        self.span.part((index * PART) as u64, PART as u64).unwrap()
    }

    fn content(&self, span: MemSpan) -> Vec<u8> {
        let mut out = vec![0; span.len()];
        // SAFETY: the span lies in the allocation, and the tests call this when no transfer is in flight.
        unsafe { std::ptr::copy_nonoverlapping(span.as_ptr(), out.as_mut_ptr(), out.len()) };
        out
    }

    fn parts(&self, indices: impl IntoIterator<Item = usize>) -> Vec<(MemSpan, Access)> {
        indices.into_iter().map(|index| (self.part(index), EVERYTHING)).collect()
    }
}

fn register(
    engine: &TransferEngine,
    parts: &[(MemSpan, Access)],
) -> Result<Vec<RegionId>, AtIndex<RegisterError>> {
    // SAFETY: the tests drop the memory after the engine, and make no reference to it.
    unsafe { engine.register_many(parts) }
}

/// The version of an engine's descriptor, and the number of its regions.
fn published(engine: &TransferEngine) -> (u64, usize) {
    let descriptor = PeerToPeer::of(engine.config()).fetch(engine.name()).unwrap();
    (descriptor.version, descriptor.regions.len())
}

#[test]
fn regions_are_registered_all_or_none_and_the_error_names_the_one() {
    let memory = Memory::new(8);
    let mut small = config(Fabrics::LOCAL);
    small.regions_max = 5;
    let engine = TransferEngine::start(small).unwrap();
    let first = register(&engine, &memory.parts([0])).unwrap();
    let none = |parts: &[(MemSpan, Access)], index, error| {
        let before = (engine.stats().regions, published(&engine).1);
        assert_eq!(register(&engine, parts), Err(AtIndex { index, error }));
        assert_eq!((engine.stats().regions, published(&engine).1), before);
    };
    let overlap =
        |span: MemSpan| RegisterError::Overlap { addr: span.as_ptr().addr() as u64, len: PART as u64 };
    // The same memory, memory that was registered before, and an overlap within the list.
    none(&memory.parts([1, 2, 0, 3]), 2, overlap(memory.part(0)));
    none(&memory.parts([1, 2, 1]), 2, overlap(memory.part(1)));
    let empty = [memory.parts([1]), vec![(MemSpan::new(memory.part(2).as_ptr(), 0), EVERYTHING)]].concat();
    none(&empty, 1, RegisterError::Empty);
    none(&memory.parts([1, 2, 3, 4, 5]), 4, RegisterError::Full { regions_max: 5 });
    let error = register(&engine, &memory.parts([1, 0])).unwrap_err();
    assert!(error.to_string().starts_with("region 1: overlaps the region of 4096 bytes at 0x"), "{error}");
    // Nothing of the failed ones is left.
    let rest = register(&engine, &memory.parts([1, 2, 3, 4])).unwrap();
    assert_eq!((engine.stats().regions, published(&engine).1), (5, 5));
    assert_eq!(register(&engine, &[]), Ok(vec![]));
    engine.unregister_many(&[first, rest].concat()).unwrap();
    assert_eq!((engine.stats().regions, published(&engine).1), (0, 0));
    assert_eq!(engine.unregister_many(&[]), Ok(()));
}

#[test]
fn regions_are_unregistered_all_or_none() {
    let memory = Memory::new(4);
    let (here, there) = (engine(Fabrics::LOCAL), engine(Fabrics::LOCAL));
    let ids = register(&there, &memory.parts(0..4)).unwrap();
    let not_found = |index| Err(AtIndex { index, error: RegisterError::NotFound });
    // One that is listed twice, and one that was never there.
    assert_eq!(there.unregister_many(&[ids[0], ids[1], ids[0]]), not_found(2));
    assert_eq!(there.unregister_many(&[ids[2], RegionId::new(77, 0)]), not_found(1));
    assert_eq!(published(&there).1, 4);
    // They are all usable still.
    let segment = here.open_segment(there.name()).unwrap();
    let local = here.alloc_shared(PART, Access::LOCAL).unwrap();
    for part in 0..4 {
        let addr = memory.part(part).as_ptr().addr() as u64;
        let write = request(Op::Write, (local.id(), 0), segment, addr, PART as u64);
        here.submit(&[write], LONG).unwrap().wait(LONG).unwrap();
    }
    there.unregister_many(&ids).unwrap();
    assert_eq!(there.unregister_many(&ids[..1]), not_found(0), "an id is stale once it is unregistered");
    assert_eq!(published(&there).1, 0);
}

#[test]
fn regions_in_use_by_a_request_keep_all_of_their_list_registered() {
    let memory = Memory::new(2);
    let fabrics = Fabrics::SHM.and(Fabrics::LOCAL);
    let mut here = te_engine::Engine::start(config(fabrics)).unwrap();
    // SAFETY: as in `register`.
    let ids = unsafe { here.register_many(&memory.parts(0..2)) }.unwrap();
    let there = engine(fabrics);
    let remote = there.alloc_shared(PART, EVERYTHING).unwrap();
    let segment = here.open_segment(there.name()).unwrap();
    let write = request(Op::Write, (ids[1], 0), segment, remote.addr(), PART as u64);
    let batch = here.submit(&[write], LONG).unwrap();
    assert!(!here.is_done(batch).unwrap(), "nothing ends before a poll");
    let busy = Err(AtIndex { index: 1, error: RegisterError::Busy { requests: 1 } });
    assert_eq!(here.unregister_many(&ids), busy);
    assert_eq!(here.stats().regions, 2);
    here.wait(batch, LONG).unwrap();
    here.unregister_many(&ids).unwrap();
    assert_eq!(here.stats().regions, 0);
}

#[test]
fn five_engines_of_one_process_share_a_memory() {
    for (name, fabrics) in each_fabric() {
        let memory = Memory::new(4);
        let peer = engine(fabrics);
        let remote = peer.alloc_shared(4 * PART, EVERYTHING).unwrap();
        let engines: Vec<_> = (0..5).map(|_| engine(fabrics)).collect();
        let ids: Vec<_> = engines.iter().map(|one| register(one, &memory.parts(0..4)).unwrap()).collect();
        // Each reads into the same memory, from the same peer.
        for (round, (one, ids)) in engines.iter().zip(&ids).enumerate() {
            let content = pattern(round as u64, 4 * PART);
            remote.write(0, &content).unwrap();
            let segment = one.open_segment(peer.name()).unwrap();
            let reads: Vec<_> = ids
                .iter()
                .enumerate()
                .map(|(part, id)| {
                    let addr = remote.addr() + (part * PART) as u64;
                    request(Op::Read, (*id, 0), segment, addr, PART as u64)
                })
                .collect();
            one.submit(&reads, LONG).unwrap().wait(LONG).unwrap_or_else(|error| panic!("{name}: {error}"));
            assert!(memory.content(memory.span) == content, "{name}: engine {round}");
        }
        // A peer writes to it through each of them. What one engine unregisters the others keep.
        let local = peer.alloc_shared(PART, Access::LOCAL).unwrap();
        for (round, (one, ids)) in engines.iter().zip(&ids).enumerate() {
            let segment = peer.open_segment(one.name()).unwrap();
            let reached = peer.segment_regions(segment).unwrap();
            if name != "shm" {
                assert_eq!(reached.len(), 4, "{name}");
                let content = pattern(100 + round as u64, PART);
                local.write(0, &content).unwrap();
                let addr = memory.part(1).as_ptr().addr() as u64;
                let write = request(Op::Write, (local.id(), 0), segment, addr, PART as u64);
                peer.submit(&[write], LONG).unwrap().wait(LONG).unwrap();
                assert!(memory.content(memory.part(1)) == content, "{name}: engine {round}");
            }
            one.unregister_many(ids).unwrap();
            assert_eq!(one.stats().regions, 0);
        }
    }
}
