//! The copies and the ledger on a model of hosts whose caches are not coherent
//! ([`te_core::testkit::coldcache`], which says what it does not model), by seed. Each seed is one schedule
//! of one of seven cases.
//!
//! The default is 20,000 schedules; `SNOWSKIN_SEEDS=1000000 cargo test --release -p te-cxl --test coldcache`
//! runs a million. Versions of the code that are broken on purpose have to be found within 10,000.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]

use te_core::testkit::coldcache::{ColdCache, Order, Process, Steps};
use te_core::testkit::{Rng, on_all_cores};
use te_core::{Access, ErrorKind};
use te_cxl::Coherence::Flush;
use te_cxl::ledger::{Grant, Guest, enter, leave, revoke, take, write_line};
use te_cxl::lines::{Cause, Fault, Fence, LINE, Lines, Local, drop_stale, get, put, put_parts};
use te_cxl::pool::format::{OwnerRecord, Row, Superblock};

/// How the code is broken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mutant {
    /// It is not.
    None,
    /// Readers do not drop what their caches hold.
    NoReaderFlush,
    /// Writers do not fence their stores.
    NoStoreFence,
    /// Writers store the first and the last line through the cache, also when they are not whole.
    CachedEdges,
    /// Nothing waits for everything: a reader's flush may come too late, the handshake is not ordered.
    NoFullFence,
    /// Where everything is to be ordered, only stores are.
    StoreFenceOnly,
    /// A new owner looks for peers first, and writes its records then.
    LookFirst,
    /// A writer of a part of a line takes the rest of the line from its cache.
    NoMergeFlush,
    /// The owner of memory reads it as its cache has it.
    NoOwnerRefresh,
}

const WITHIN: u64 = 10_000;
const CASES: u64 = 7;
const CLAIM: u64 = 3;
const REVOKE: u64 = 4;
const HANDED_OVER: u64 = 5;
const SIDE_BY_SIDE: u64 = 6;

/// The pool as one host of the model sees it. Offsets are those of the pool; the model has the first pages,
/// and the beginning of the first extent.
struct Host<'a, 'b> {
    steps: &'a mut Steps<'b>,
    mutant: Mutant,
}

/// The lines that the cases use, by their place in the pool, with their place in the model.
const BLOCK: Superblock =
    Superblock { uuid: [7; 16], size: 4 << 20, extent_bytes: 2 << 20, extents: 1, peers: 2 };
const DATA: u64 = 2 << 20;
const DATA_LINES: u64 = 4;
const DATA_BYTES: usize = (DATA_LINES * LINE) as usize;
/// Owner and row of extent 0; the peers' lines; the data.
const MODEL_BYTES: usize = DATA_BYTES + 4 * LINE as usize;

/// Whether a line is one of the rest of the extent's page: they are left out, because no case reads them.
fn is_left_out(at: u64) -> bool {
    (4224..8192).contains(&at)
}

fn place(at: u64) -> usize {
    let line = match at - at % LINE {
        4096 => 0,
        4160 => 1,
        8256 => 2,
        12_352 => 3,
        data => 4 + (data - DATA) / LINE,
    };
    (line * LINE + at % LINE) as usize
}

impl Lines for Host<'_, '_> {
    fn load(&mut self, at: u64, to: Local<'_>) -> Result<(), Fault> {
        if is_left_out(at) {
            return Ok(());
        }
        let mut bytes = vec![0; to.len()];
        self.steps.load(place(at), &mut bytes);
        to.write(&bytes).unwrap();
        Ok(())
    }

    /// The model has one pool: no case copies between two.
    fn load_past(&mut self, _: u64, _: Local<'_>) -> Result<(), Fault> {
        Err(Fault::RANGE)
    }

    fn store(&mut self, at: u64, from: Local<'_>) -> Result<(), Fault> {
        let mut bytes = vec![0; from.len()];
        from.read(&mut bytes).unwrap();
        self.steps.store(place(at), &bytes);
        Ok(())
    }

    fn nt_store(&mut self, at: u64, from: Local<'_>) -> Result<(), Fault> {
        if is_left_out(at) {
            return Ok(());
        }
        let mut bytes = vec![0; from.len()];
        from.read(&mut bytes).unwrap();
        self.steps.nt_store(place(at), &bytes);
        Ok(())
    }

    fn flush(&mut self, at: u64, len: u64) -> Result<(), Fault> {
        if self.mutant != Mutant::NoReaderFlush && !is_left_out(at) {
            self.steps.flush(place(at), len as usize);
        }
        Ok(())
    }

    fn fence(&mut self, of: Fence) {
        match (of, self.mutant) {
            (Fence::Stores, Mutant::NoStoreFence) | (Fence::All, Mutant::NoFullFence) => {}
            (Fence::Stores, _) | (Fence::All, Mutant::StoreFenceOnly) => self.steps.fence(Order::Stores),
            (Fence::All, _) => self.steps.fence(Order::All),
        }
    }
}

/// A write: the real one, or the one with cached edges.
fn write(host: &mut Host<'_, '_>, at: u64, bytes: &mut [u8]) -> Result<(), Fault> {
    if host.mutant != Mutant::CachedEdges {
        return put(host, Flush, at, Local::of(bytes));
    }
    let head = (at.next_multiple_of(LINE).max(at + 1) - at).min(bytes.len() as u64) as usize;
    let head = if at.is_multiple_of(LINE) { (LINE as usize).min(bytes.len()) } else { head };
    let body = (bytes.len() - head) / LINE as usize * LINE as usize;
    let (first, rest) = bytes.split_at_mut(head);
    let (middle, last) = rest.split_at_mut(body);
    host.store(at, Local::of(first))?;
    host.nt_store(at + head as u64, Local::of(middle))?;
    host.store(at + (head + body) as u64, Local::of(last))?;
    host.fence(Fence::Stores);
    Ok(())
}

/// One schedule.
struct Schedule {
    model: ColdCache,
    rng: Rng,
    mutant: Mutant,
}

impl Schedule {
    fn new(seed: u64, mutant: Mutant) -> Self {
        let mut rng = Rng::new(seed);
        let model = ColdCache::new(rng.fork(), 3, MODEL_BYTES);
        Self { model, rng, mutant }
    }

    /// A range of whole lines of the data.
    fn range(&mut self) -> (u64, usize) {
        let first = self.rng.below(DATA_LINES);
        let count = 1 + self.rng.below(DATA_LINES - first);
        (DATA + first * LINE, (count * LINE) as usize)
    }

    fn write(&mut self, host: usize, at: u64, len: usize, byte: u8) -> Result<(), Fault> {
        let mutant = self.mutant;
        let written =
            Process::new(host, |steps| write(&mut Host { steps, mutant }, at, &mut vec![byte; len]))
                .finish(&mut self.model);
        self.model.publish(host);
        written
    }

    fn read(&mut self, host: usize, at: u64, len: usize) -> Vec<u8> {
        let mutant = self.mutant;
        Process::new(host, |steps| {
            let mut bytes = vec![0; len];
            get(&mut Host { steps, mutant }, Flush, at, Local::of(&mut bytes)).unwrap();
            bytes
        })
        .finish(&mut self.model)
    }

    /// Reads a range that is not announced, as a prefetcher or a peer that is wrong may do.
    fn look(&mut self, host: usize) {
        let (at, len) = self.range();
        Process::new(host, |steps| steps.load(place(at), &mut vec![0; len])).finish(&mut self.model);
    }

    fn in_memory(&mut self, at: u64, len: usize) -> Vec<u8> {
        self.model.settle();
        self.model.memory(place(at), len)
    }
}

/// What is wrong after a schedule.
type Wrong = Option<&'static str>;

/// A reader sees what was announced, whatever it has cached before.
fn publish_and_read(mut run: Schedule) -> Wrong {
    let (at, len) = run.range();
    for byte in 1..=2 {
        run.look(1);
        run.write(0, at, len, byte).unwrap();
        if run.read(1, at, len) != vec![byte; len] {
            return Some("a reader saw something else than what was announced");
        }
    }
    (run.in_memory(at, len) != vec![2; len]).then_some("memory holds something else than the last write")
}

/// A range goes from one writer to another: nothing of the first one comes after that.
fn reuse(mut run: Schedule) -> Wrong {
    let (at, len) = run.range();
    run.write(0, at, len, 1).unwrap();
    if run.read(2, at, len) != vec![1; len] {
        return Some("a reader saw something else than what was announced");
    }
    run.look(1);
    run.write(1, at, len, 2).unwrap();
    if run.read(2, at, len) != vec![2; len] {
        return Some("a reader saw what the range's former owner had written");
    }
    (run.in_memory(at, len) != vec![2; len]).then_some("the former owner's bytes landed late")
}

/// Two writers whose ranges meet in the middle of a line: that line is refused, or belongs to one of them.
fn half_lines(mut run: Schedule) -> Wrong {
    let mutant = run.mutant;
    let cut = 1 + run.rng.index(DATA_BYTES - 1);
    let cut = if cut.is_multiple_of(LINE as usize) { cut + 1 } else { cut };
    // The real code takes whole lines alone, and moves no byte of others.
    let refused = run.write(0, DATA, cut, 1).is_err();
    if refused && run.in_memory(DATA, DATA_BYTES) != vec![0; DATA_BYTES] {
        return Some("a refused write has changed something");
    }
    let cut = if refused { cut.next_multiple_of(LINE as usize).min(DATA_BYTES - LINE as usize) } else { cut };
    let put = |steps: &mut Steps<'_>, at: usize, len: usize, byte| {
        write(&mut Host { steps, mutant }, DATA + at as u64, &mut vec![byte; len]).unwrap();
    };
    let mut first = Process::new(0, |steps| put(steps, 0, cut, 1));
    let mut second = Process::new(1, |steps| put(steps, cut, DATA_BYTES - cut, 2));
    interleave(&mut run.rng, &mut run.model, &mut first, &mut second);
    run.model.publish(0);
    run.model.publish(1);
    let mut expected = vec![1; cut];
    expected.resize(DATA_BYTES, 2);
    if run.read(2, DATA, DATA_BYTES) != expected {
        return Some("of two neighbours' writes one was not whole");
    }
    (run.in_memory(DATA, DATA_BYTES) != expected).then_some("a neighbour's bytes were replaced late")
}

/// Writes a range of any bytes, as a store does whose allocations begin and end at lines.
fn write_parts(mutant: Mutant, steps: &mut Steps<'_>, at: u64, len: usize, byte: u8) {
    let mutant = match mutant {
        Mutant::NoMergeFlush => Mutant::NoReaderFlush,
        Mutant::NoOwnerRefresh => Mutant::None,
        other => other,
    };
    put_parts(&mut Host { steps, mutant }, at, Local::of(&mut vec![byte; len])).unwrap();
}

impl Schedule {
    /// The owner of the memory, on host 2, reads all of it by its addresses, after `Pool::refresh`.
    fn read_as_owner(&mut self) -> Vec<u8> {
        let mutant = match self.mutant {
            Mutant::NoOwnerRefresh => Mutant::NoReaderFlush,
            Mutant::NoMergeFlush => Mutant::None,
            other => other,
        };
        Process::new(2, |steps| {
            let mut bytes = vec![0; DATA_BYTES];
            let host = &mut Host { steps, mutant };
            drop_stale(host, DATA, DATA_BYTES as u64).unwrap();
            host.load(DATA, Local::of(&mut bytes)).unwrap();
            bytes
        })
        .finish(&mut self.model)
    }
}

/// A range is written by one host after the other, each a part that begins or ends in the middle of a line.
fn handed_over(mut run: Schedule) -> Wrong {
    let mutant = run.mutant;
    let cut = 1 + run.rng.index(DATA_BYTES - 1);
    for (host, from, to) in [(1, cut, DATA_BYTES), (0, 0, cut)] {
        run.look(0);
        run.look(2);
        Process::new(host, |steps| write_parts(mutant, steps, DATA + from as u64, to - from, host as u8 + 1))
            .finish(&mut run.model);
        run.model.publish(host);
    }
    let mut expected = vec![1; cut];
    expected.resize(DATA_BYTES, 2);
    if run.read_as_owner() != expected {
        return Some("a part that was written before is gone");
    }
    (run.in_memory(DATA, DATA_BYTES) != expected).then_some("a part was replaced late")
}

/// Two hosts write objects in neighbouring allocations at a time, each in two writes that meet in the middle
/// of a line; the owner reads both, and the allocations are used again, by the other host.
fn side_by_side(mut run: Schedule) -> Wrong {
    let mutant = run.mutant;
    let half = DATA_BYTES / 2;
    let mut expected = vec![0; DATA_BYTES];
    for round in 0..2 {
        run.look(2);
        let objects = [0, 1].map(|host| {
            let len = 2 + run.rng.index(half - 2);
            (host, DATA as usize + (host ^ round) * half, len, 1 + run.rng.index(len - 1))
        });
        let put = |(host, at, len, cut): (usize, usize, usize, usize)| {
            Process::new(host, move |steps| {
                let byte = (1 + host + 2 * round) as u8;
                write_parts(mutant, steps, at as u64, cut, byte);
                write_parts(mutant, steps, (at + cut) as u64, len - cut, byte);
            })
        };
        let (mut first, mut second) = (put(objects[0]), put(objects[1]));
        interleave(&mut run.rng, &mut run.model, &mut first, &mut second);
        for (host, at, len, _) in objects {
            run.model.publish(host);
            let at = at - DATA as usize;
            expected[at..at + len].fill((1 + host + 2 * round) as u8);
        }
        if run.read_as_owner() != expected {
            return Some("an object is not what was put");
        }
    }
    (run.in_memory(DATA, DATA_BYTES) != expected).then_some("an object was changed late")
}

fn interleave<A, B>(rng: &mut Rng, model: &mut ColdCache, a: &mut Process<'_, A>, b: &mut Process<'_, B>) {
    if rng.below(4) == 0 {
        // The first is stopped once, at some place, for as long as the second runs.
        let (begun, done) = (rng.below(16), rng.below(32));
        (0..begun).for_each(|_| {
            b.step(model);
        });
        (0..done).for_each(|_| {
            a.step(model);
        });
        while !b.step(model) {}
    }
    // Uneven odds, and many steps in a row: also schedules in which one is stopped for long.
    let odds = 1 + rng.below(15);
    while a.result().is_none() || b.result().is_none() {
        let first = rng.below(16) < odds;
        for _ in 0..1 << rng.below(9) {
            let ended = if first { a.step(model) } else { b.step(model) };
            if ended {
                break;
            }
        }
    }
}

/// An owner takes a region back while a peer begins to write it.
fn revoke_and_write(run: Schedule) -> Wrong {
    taken_from_a_peer(run, ErrorKind::Stale, |host, _, number| {
        revoke(host, Flush, &BLOCK, (0, 0), number, &|_| false).unwrap()
    })
}

/// The master gives an extent to another owner while a peer begins to write a region of the former one.
fn claim_and_write(run: Schedule) -> Wrong {
    taken_from_a_peer(run, ErrorKind::PeerRestarted, |host, attempt, _| {
        let next = OwnerRecord { incarnation: 6, epoch: 2, key_hash: [4; 16], ..OWNER };
        let fresh: &[OwnerRecord] = if attempt == 0 { &[next] } else { &[] };
        if host.mutant == Mutant::LookFirst {
            let user = take(host, Flush, &BLOCK, &[], (0, 1), &|_| false).unwrap();
            return take(host, Flush, &BLOCK, fresh, (9, 0), &|_| false).unwrap().or(user).is_none();
        }
        take(host, Flush, &BLOCK, fresh, (0, 1), &|_| false).unwrap().is_none()
    })
}

const OWNER: OwnerRecord =
    OwnerRecord { uuid: BLOCK.uuid, extent: 0, owned: true, incarnation: 5, epoch: 1, key_hash: [3; 16] };

/// Host 0 takes the memory of a region and writes it, while host 1 begins to write it. `take` returns whether
/// it may; it is given the number of the attempt, and the number of the region.
fn taken_from_a_peer(
    mut run: Schedule,
    refusal: ErrorKind,
    take: impl Fn(&mut Host<'_, '_>, u32, u64) -> bool,
) -> Wrong {
    let mutant = run.mutant;
    let (base, len) = (DATA, DATA_BYTES as u64);
    let (rights, number) = (Access::REMOTE_WRITE, 99);
    let OwnerRecord { incarnation, epoch, key_hash, .. } = OWNER;
    let row = Row { granted: true, rights, number, base, len, expelled: 0, epoch };
    let (first, count) = (0, 1);
    let grant = Grant { first, count, row: 0, number, base, len, rights, incarnation, epoch, key_hash };
    let guest = Guest { slot: 1, identity: 8 };
    // The real code prepares: what it does later is under test.
    Process::new(0, |steps| {
        let mut host = Host { steps, mutant: Mutant::None };
        write_line(&mut host, Flush, 4096, OWNER.write()).unwrap();
        write_line(&mut host, Flush, 4160, row.write()).unwrap();
    })
    .finish(&mut run.model);
    // The peer has used the region before, so its cache may hold the row.
    Process::new(1, |steps| steps.load(place(4160), &mut [0; LINE as usize])).finish(&mut run.model);
    let mut peer = Process::new(1, |steps| {
        let mut host = Host { steps, mutant };
        enter(&mut host, Flush, &BLOCK, guest, &grant, (0, 1))?;
        write(&mut host, base, &mut [1; DATA_BYTES])?;
        leave(&mut host, Flush, &BLOCK, guest)?;
        Ok::<(), te_core::Error>(())
    });
    let mut taker = Process::new(0, |steps| {
        let mut host = Host { steps, mutant };
        for attempt in 0..3 {
            if take(&mut host, attempt, number) {
                // From here on the range has other bytes.
                write(&mut host, base, &mut [2; DATA_BYTES]).unwrap();
                return true;
            }
        }
        false
    });
    interleave(&mut run.rng, &mut run.model, &mut peer, &mut taker);
    let (entered, taken) = (peer.result().cloned().unwrap(), taker.result().copied().unwrap());
    drop((peer, taker));
    run.model.publish(0);
    run.model.publish(1);
    // A page that is only half written refuses a peer as stale.
    if entered.is_err_and(|error| error.kind != refusal && error.kind != ErrorKind::Stale) {
        return Some("a peer was refused for a wrong reason");
    }
    let expected = match (taken, entered.is_ok()) {
        (true, _) => 2,
        (false, true) => 1,
        (false, false) => 0,
    };
    let again = Process::new(0, |steps| take(&mut Host { steps, mutant }, 3, number));
    if !again.finish(&mut run.model) {
        return Some("an owner waits for a peer that has left");
    }
    if run.read(2, DATA, DATA_BYTES) != [expected; DATA_BYTES] {
        return Some("a peer wrote a region that its owner had taken back");
    }
    (run.in_memory(DATA, DATA_BYTES) != [expected; DATA_BYTES])
        .then_some("a peer's write landed after its owner had taken the region back")
}

fn schedule(seed: u64, mutant: Mutant) -> Wrong {
    let run = Schedule::new(seed, mutant);
    match seed % CASES {
        0 => publish_and_read(run),
        1 => reuse(run),
        2 => half_lines(run),
        CLAIM => claim_and_write(run),
        REVOKE => revoke_and_write(run),
        HANDED_OVER => handed_over(run),
        _ => side_by_side(run),
    }
}

#[test]
fn the_real_code_survives_every_schedule() {
    on_all_cores(0..20_000, |seed| {
        if let Some(wrong) = schedule(seed, Mutant::None) {
            panic!("schedule {seed}: {wrong}");
        }
    });
}

/// The first schedule that finds a mutant, among those of `cases`.
fn found(mutant: Mutant, cases: &[u64]) -> u64 {
    let mut of_cases = (0..WITHIN).filter(|seed| cases.contains(&(seed % CASES)));
    let found = of_cases.find(|seed| schedule(*seed, mutant).is_some());
    found.unwrap_or_else(|| panic!("{mutant:?} survives {WITHIN} schedules of the cases {cases:?}"))
}

#[test]
fn a_reader_that_does_not_flush_is_found() {
    let found = |case| found(Mutant::NoReaderFlush, &[case]);
    println!("publish {}, claim {}, revoke {}", found(0), found(CLAIM), found(REVOKE));
}

#[test]
fn a_writer_that_does_not_fence_is_found() {
    let found = |case| found(Mutant::NoStoreFence, &[case]);
    println!("publish {}, reuse {}, handed over {}", found(0), found(1), found(HANDED_OVER));
}

#[test]
fn a_writer_with_cached_edges_is_found() {
    let found = |case| found(Mutant::CachedEdges, &[case]);
    println!("publish {}, reuse {}, half lines {}", found(0), found(1), found(2));
}

#[test]
fn a_writer_of_a_part_that_takes_the_rest_from_its_cache_is_found() {
    println!("handed over {}", found(Mutant::NoMergeFlush, &[HANDED_OVER]));
}

#[test]
fn an_owner_that_reads_its_memory_from_its_cache_is_found() {
    let found = |case| found(Mutant::NoOwnerRefresh, &[case]);
    println!("handed over {}, side by side {}", found(HANDED_OVER), found(SIDE_BY_SIDE));
}

#[test]
fn a_handshake_without_full_fences_is_found() {
    for mutant in [Mutant::NoFullFence, Mutant::StoreFenceOnly] {
        let found = |case| found(mutant, &[case]);
        println!("{mutant:?}: publish {}, claim {}, revoke {}", found(0), found(CLAIM), found(REVOKE));
    }
}

#[test]
fn an_owner_that_looks_before_it_writes_is_found() {
    println!("claim {}", found(Mutant::LookFirst, &[CLAIM]));
}

#[test]
fn the_model_has_the_lines_of_the_pool() {
    assert_eq!(BLOCK.front_bytes(), DATA);
    let refused = Fault { cause: Cause::Range, done: 0 };
    assert_eq!(Schedule::new(0, Mutant::None).write(0, DATA + 1, 64, 1), Err(refused));
}
