//! What waits for the disk, and what does not.

use mio::{Poll, Token};
use store_core::message::{
    Commit, Exists, Get, Mount, MountSegment, NewObject, Operation, PutEnd, PutOptions, PutRequest, PutStart,
    ReadStats,
};
use store_core::{Incarnation, Key, NodeId};
use te_fabric::testkit::eventually;

use super::*;

/// A master with a journal, and one connection.
struct Bench {
    master: Master,
    journal: Journal,
    session: Session,
    answer: Vec<u8>,
    now: u64,
    _poll: Poll,
}

impl Bench {
    fn open(dir: &Path) -> Self {
        let poll = Poll::new().unwrap();
        let waker = Arc::new(Waker::new(poll.registry(), Token(0)).unwrap());
        let mut store = MasterConfig::default();
        let opened = Opened::open(dir, &mut store).unwrap();
        let now = opened.at.as_nanos() / 1_000_000;
        let (master, journal) = opened.start(&Config::default(), waker).unwrap();
        Self { master, journal, session: Session::owner(), answer: Vec::new(), now, _poll: poll }
    }

    /// Carries a request out; returns whether its answer has to wait.
    fn waits<'a, O: Operation>(
        &mut self,
        head: &O::Request<'_>,
        items: impl ExactSizeIterator<Item = O::RequestItem<'a>>,
    ) -> bool {
        let mut request = Vec::new();
        O::encode_request(&mut request, 1, head, items).unwrap();
        let frame = Frame::parse(&request).unwrap().unwrap().0;
        self.now += 1;
        let now = store_core::Instant::from_millis(self.now);
        self.answer.clear();
        let lsn = self.journal.handle(&mut self.master, now, &mut self.session, &frame, &mut self.answer);
        assert_eq!(Frame::parse(&self.answer).unwrap().unwrap().0.header.status, 0);
        lsn > self.journal.confirmed()
    }

    fn put_start(&mut self, key: &[u8]) -> (bool, u64, u64) {
        let ask = PutRequest { writer: 1, ..PutRequest::once(PutOptions::DEFAULT) };
        let waits = self.waits::<PutStart>(&ask, [NewObject { key: Key(key), len: 10 }].into_iter());
        let frame = Frame::parse(&self.answer).unwrap().unwrap().0;
        let allocation = PutStart::decode_response(&frame).unwrap().1.next().unwrap().unwrap();
        (waits, allocation.generation, allocation.handle)
    }

    fn put(&mut self, key: &[u8]) {
        let (_, generation, handle) = self.put_start(key);
        let commit = Commit { key: Key(key), generation, handle, checksum: 1 };
        assert!(self.waits::<PutEnd>(&(), [commit].into_iter()));
    }

    fn get(&mut self, key: &[u8]) -> bool {
        self.waits::<Get>(&Default::default(), [Key(key)].into_iter())
    }

    fn settle(&mut self) {
        self.journal.submit_all();
        let (journal, last) = (&mut self.journal, self.now);
        eventually("everything is on disk", || {
            journal.confirm().unwrap();
            journal.confirmed() == journal.stats().lsn && last > 0
        });
    }

    fn mount(&mut self) {
        let segment = MountSegment {
            node: NodeId::new(1),
            incarnation: Incarnation::new(1),
            name: "n1",
            endpoint: "n:1",
            len: 1 << 20,
            lineage: self.master.config().epoch.into(),
            key: 1,
            ..MountSegment::default()
        };
        assert!(self.waits::<Mount>(&segment, std::iter::empty()));
    }
}

#[test]
fn a_get_waits_for_the_changes_of_its_own_keys_alone_and_other_answers_for_all() {
    let dir = tempfile::tempdir().unwrap();
    let mut bench = Bench::open(dir.path());
    bench.mount();
    bench.put(b"old");
    bench.settle();
    assert!(!bench.get(b"old"), "it is on disk");
    assert!(!bench.waits::<ReadStats>(&Default::default(), std::iter::empty()));
    let (waits, ..) = bench.put_start(b"new");
    assert!(waits, "a crash could give its space to another put");
    bench.put(b"newer");
    assert!(!bench.get(b"old"), "nothing has changed it");
    assert!(bench.get(b"newer"), "it could be lost");
    assert!(bench.waits::<Exists>(&(), [Key(b"old"), Key(b"newer")].into_iter()));
    assert!(bench.waits::<ReadStats>(&Default::default(), std::iter::empty()));
    bench.settle();
    assert!(!bench.get(b"newer") && !bench.waits::<ReadStats>(&Default::default(), std::iter::empty()));
}

#[test]
fn another_process_goes_on_with_the_same_epoch_time_and_objects() {
    let dir = tempfile::tempdir().unwrap();
    let mut bench = Bench::open(dir.path());
    bench.mount();
    bench.put(b"kept");
    bench.settle();
    let (epoch, seed) = (bench.master.config().epoch, bench.master.config().hash_seed);
    let (lsn, now) = (bench.journal.stats().lsn, bench.now);
    drop(bench);
    for round in 1..4 {
        let mut bench = Bench::open(dir.path());
        let config = bench.master.config();
        assert_eq!((config.epoch, config.hash_seed), (epoch, seed));
        assert!(bench.now >= now, "time does not go back");
        assert!(bench.journal.stats().lsn >= lsn + round, "the log goes on");
        assert!(bench.get(b"kept") || bench.journal.confirmed() > 0);
        assert_eq!(bench.master.stats().nodes, 1);
        bench.settle();
    }
}
