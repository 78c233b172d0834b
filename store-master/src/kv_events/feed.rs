//! [`Feed`]: the side of the serving thread, which tells the publisher what has changed after each turn.

use std::str;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::Sender;

use mio::Waker;
use store_core::{KvEvent, KvEvents, KvTier, Master};

use super::{KvEventsStats, Shared};

/// Bytes of events that may wait for the publisher. Beyond them everything is told anew later.
const QUEUED_BYTES_MAX: u64 = 256 << 20;

/// What the publisher is told.
#[derive(Debug)]
pub(crate) enum Told {
    /// An epoch begins: followers forget everything.
    Begin,
    /// What has changed.
    Changes(Batch),
    /// Objects of a snapshot.
    Page(Batch),
    /// The snapshot is complete.
    SnapshotEnd,
}

/// Events, without an allocation for each.
#[derive(Debug, Default)]
pub(crate) struct Batch {
    text: String,
    items: Vec<Item>,
}

#[derive(Clone, Copy, Debug)]
struct Item {
    tenant_bytes: u32,
    key_bytes: u32,
    tier: KvTier,
    stored: bool,
}

/// An event of a batch. Keys that are no text are left out: routers name objects by text.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Entry<'a> {
    pub(crate) tenant: &'a str,
    pub(crate) key: &'a str,
    pub(crate) tier: KvTier,
    pub(crate) stored: bool,
}

impl Batch {
    pub(super) fn push(&mut self, event: KvEvent<'_>) {
        let Ok(key) = str::from_utf8(event.key) else { return };
        self.text.push_str(event.tenant);
        self.text.push_str(key);
        let (tenant_bytes, key_bytes) = (event.tenant.len() as u32, key.len() as u32);
        self.items.push(Item { tenant_bytes, key_bytes, tier: event.tier, stored: event.stored });
    }

    pub(crate) fn bytes(&self) -> u64 {
        (self.text.len() + self.items.len() * size_of::<Item>()) as u64
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = Entry<'_>> {
        let mut rest = &*self.text;
        self.items.iter().map(move |item| {
            let (tenant, others) = rest.split_at(item.tenant_bytes as usize);
            let (key, others) = others.split_at(item.key_bytes as usize);
            rest = others;
            Entry { tenant, key, tier: item.tier, stored: item.stored }
        })
    }
}

/// How far a scan of all objects is, and which followers it is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Scan {
    None,
    /// For every follower: the epoch has just begun.
    Epoch(u64),
    /// For those who asked.
    Snapshot(u64),
}

/// See the module's documentation.
#[derive(Debug)]
pub(crate) struct Feed {
    /// `None` while this master does not lead: nothing is found.
    events: Option<KvEvents>,
    scan: Scan,
    to: Sender<Told>,
    publisher: Arc<Waker>,
    shared: Arc<Shared>,
}

impl Feed {
    pub(super) fn new(to: Sender<Told>, publisher: Arc<Waker>, shared: Arc<Shared>) -> Self {
        Self { events: None, scan: Scan::None, to, publisher, shared }
    }

    pub(crate) fn stats(&self) -> KvEventsStats {
        self.shared.stats()
    }

    /// An epoch begins: this master leads from here on.
    pub(crate) fn begin(&mut self, master: &mut Master) {
        self.give_up_snapshot();
        self.events = Some(KvEvents::new(master));
        self.scan = Scan::Epoch(0);
        self.tell(Told::Begin);
    }

    /// This master leads no more.
    pub(crate) fn end(&mut self) {
        if self.events.take().is_some() {
            self.give_up_snapshot();
            self.scan = Scan::None;
            self.tell(Told::Begin);
        }
    }

    /// Those who wait for a snapshot that is being made are told another one.
    fn give_up_snapshot(&self) {
        if matches!(self.scan, Scan::Snapshot(_)) {
            self.shared.snapshot_wanted.store(true, Ordering::Release);
        }
    }

    /// Tells what has changed since the last turn, and a page of what is being told anew. Returns whether
    /// there is more to tell at once.
    pub(crate) fn turn(&mut self, master: &mut Master) -> bool {
        let Some(events) = &mut self.events else {
            if self.shared.snapshot_wanted.swap(false, Ordering::AcqRel) {
                self.tell(Told::SnapshotEnd);
            }
            return false;
        };
        if self.shared.queued_bytes.load(Ordering::Acquire) > QUEUED_BYTES_MAX {
            // The publisher does not keep up: it is told everything anew when it has caught up.
            if self.scan != Scan::Epoch(0) {
                self.begin(master);
            }
            return false;
        }
        let mut batch = Batch::default();
        let drained = events.drain(master, |event| batch.push(event));
        self.shared.objects.store(events.len() as u64, Ordering::Relaxed);
        if drained.is_err() {
            self.begin(master);
            return true;
        }
        if !batch.items.is_empty() {
            self.tell(Told::Changes(batch));
        }
        if self.scan == Scan::None && self.shared.snapshot_wanted.swap(false, Ordering::AcqRel) {
            self.scan = Scan::Snapshot(0);
        }
        self.page(master)
    }

    fn page(&mut self, master: &Master) -> bool {
        let (Scan::Epoch(cursor) | Scan::Snapshot(cursor)) = self.scan else { return false };
        let Some(events) = &mut self.events else { return false };
        let mut batch = Batch::default();
        let next = events.scan(master, cursor, |event| batch.push(event));
        let for_all = matches!(self.scan, Scan::Epoch(_));
        // The first page is told in any case: what changes from then on is part of the snapshot.
        if !batch.items.is_empty() || (!for_all && cursor == 0) {
            self.tell(if for_all { Told::Changes(batch) } else { Told::Page(batch) });
        }
        self.scan = match (next, for_all) {
            (0, _) => Scan::None,
            (next, true) => Scan::Epoch(next),
            (next, false) => Scan::Snapshot(next),
        };
        if next == 0 && !for_all {
            self.tell(Told::SnapshotEnd);
        }
        // A snapshot that was asked for meanwhile begins at once.
        next != 0 || self.shared.snapshot_wanted.load(Ordering::Acquire)
    }

    fn tell(&self, told: Told) {
        if let Told::Changes(batch) | Told::Page(batch) = &told {
            Shared::add(&self.shared.queued_bytes, batch.bytes());
            self.shared.events_total.fetch_add(batch.items.len() as u64, Ordering::Relaxed);
        }
        // The publisher is gone only when the master ends.
        let _ = self.to.send(told);
        let _ = self.publisher.wake();
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

    use std::collections::BTreeSet;
    use std::sync::mpsc::{Receiver, channel};

    use mio::{Poll, Token};
    use store_core::message::{MountSegment, PutOptions};
    use store_core::{Incarnation, MasterConfig, NodeId};
    use te_core::Instant;

    use super::*;

    /// Objects so that a scan has several pages.
    const MANY: u64 = 10_000;

    struct Bench {
        // The waker needs it.
        _poll: Poll,
        master: Master,
        feed: Feed,
        from: Receiver<Told>,
        shared: Arc<Shared>,
    }

    impl Bench {
        fn new() -> Self {
            let poll = Poll::new().unwrap();
            let waker = Arc::new(Waker::new(poll.registry(), Token(0)).unwrap());
            let (to, from) = channel();
            let shared = Arc::<Shared>::default();
            let mut master = Master::new(MasterConfig::default()).unwrap();
            let segment = MountSegment {
                node: NodeId::new(1),
                incarnation: Incarnation::new(1),
                name: "node",
                endpoint: "host:1",
                base: 0x1000,
                len: 1 << 30,
                ..MountSegment::default()
            };
            master.mount(Instant::ZERO, &segment).unwrap();
            let feed = Feed::new(to, waker, Arc::clone(&shared));
            Self { _poll: poll, master, feed, from, shared }
        }

        fn put(&mut self, key: &str) {
            let key = key.as_bytes();
            let put = self.master.put_start(Instant::ZERO, key, 64, &PutOptions::DEFAULT).unwrap();
            self.master.put_end(Instant::ZERO, key, put.generation, 7).unwrap();
        }

        /// What was told since the last call.
        fn told(&mut self) -> Vec<Told> {
            self.from.try_iter().collect()
        }

        fn turns(&mut self) -> Vec<Told> {
            while self.feed.turn(&mut self.master) {}
            self.told()
        }
    }

    fn epochs(told: &[Told]) -> usize {
        told.iter().filter(|told| matches!(told, Told::Begin)).count()
    }

    /// The keys that were told, and how many events that were.
    fn keys<'a>(told: impl IntoIterator<Item = &'a Told>) -> (BTreeSet<&'a str>, usize) {
        let batches = told.into_iter().filter_map(|told| match told {
            Told::Changes(batch) | Told::Page(batch) => Some(batch),
            Told::Begin | Told::SnapshotEnd => None,
        });
        let keys: Vec<&str> = batches.flat_map(Batch::iter).map(|entry| entry.key).collect();
        (keys.iter().copied().collect(), keys.len())
    }

    #[test]
    fn a_publisher_that_is_too_slow_is_told_everything_once() {
        let mut bench = Bench::new();
        bench.feed.begin(&mut bench.master);
        (0..MANY).for_each(|object| bench.put(&object.to_string()));
        let told = bench.turns();
        assert_eq!((epochs(&told), keys(&told).0.len()), (1, MANY as usize));

        bench.shared.queued_bytes.store(QUEUED_BYTES_MAX + 1, Ordering::Release);
        bench.put("while it is too slow");
        for _ in 0..3 {
            assert!(!bench.feed.turn(&mut bench.master), "nothing can be told now");
        }
        let told = bench.told();
        assert_eq!((epochs(&told), keys(&told).1), (1, 0), "one epoch, and no events in it yet");

        bench.shared.queued_bytes.store(0, Ordering::Release);
        bench.put("when it has caught up");
        let told = bench.turns();
        assert_eq!(epochs(&told), 0);
        let (found, events) = keys(&told);
        assert_eq!(found.len(), MANY as usize + 2);
        // What changed just then may be among the changes and in the scan.
        assert!(events <= found.len() + 1, "{events}");
    }

    #[test]
    fn a_follower_that_waits_for_a_snapshot_gets_one_though_an_epoch_begins() {
        let mut bench = Bench::new();
        bench.feed.begin(&mut bench.master);
        (0..MANY).for_each(|object| bench.put(&object.to_string()));
        bench.turns();

        bench.shared.snapshot_wanted.store(true, Ordering::Release);
        assert!(bench.feed.turn(&mut bench.master), "the snapshot has more than one page");
        bench.feed.begin(&mut bench.master);
        let told = bench.turns();
        let ends = told.iter().filter(|told| matches!(told, Told::SnapshotEnd)).count();
        assert_eq!((epochs(&told), ends), (1, 1));
        let begin = told.iter().position(|told| matches!(told, Told::Begin)).unwrap();
        let (_, behind) = told.split_at(begin);
        let pages = behind.iter().filter(|told| matches!(told, Told::Page(_)));
        assert_eq!(keys(pages).0.len(), MANY as usize, "all of it in the new epoch");

        // A master that does not lead finds nothing, and says so at once.
        bench.feed.end();
        bench.shared.snapshot_wanted.store(true, Ordering::Release);
        let told = bench.turns();
        assert!(matches!(&*told, [Told::Begin, Told::SnapshotEnd]), "{told:?}");
    }
}
