//! Segments that a metadata of the caller describes: their owners have no control port that this engine
//! knows.
#![allow(clippy::unwrap_used, reason = "a test that fails reports the line")]

mod common;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use common::*;
use te_core::{Access, Op};
use te_engine::{
    Descriptor, Fabrics, Liveness, Located, Metadata, PeerToPeer, RegionDescriptor, SegmentError,
    SubmitOptions, TransferEngine, TransferError,
};

const LONG: Option<Duration> = Some(Duration::from_secs(30));

/// Describes the segment `foreign` by the exports of an engine, as another system's metadata would; every
/// other name is an address.
struct Other {
    owner: TransferEngine,
    incarnation: AtomicU64,
    described: AtomicU64,
    /// Whether notifications and probes are carried, and what was.
    carries: bool,
    /// Whether another process answers for its owner.
    restarted: AtomicBool,
    carried: Mutex<Vec<(String, Vec<u8>)>>,
}

/// The exports of a region by rail, as `MultiTransport` joins them.
fn exports(joined: &[u8]) -> Vec<(String, Vec<u8>)> {
    let mut rest = &joined[1..];
    let mut take = |len: usize| {
        let (head, tail) = rest.split_at(len);
        rest = tail;
        head.to_vec()
    };
    (0..joined[0])
        .map(|_| {
            let name_len = take(1)[0];
            let name = String::from_utf8(take(name_len.into())).unwrap();
            let len = take(2);
            (name, take(u16::from_le_bytes([len[0], len[1]]).into()))
        })
        .collect()
}

impl Metadata for Other {
    fn locate(&self, name: &str) -> Result<Located, SegmentError> {
        Ok(Located { endpoint: name.into(), incarnation: None })
    }

    fn describe(&self, name: &str) -> Option<Result<Descriptor, SegmentError>> {
        if name != "foreign" {
            return None;
        }
        self.described.fetch_add(1, Ordering::Relaxed);
        let native = PeerToPeer::of(self.owner.config()).fetch(self.owner.name()).unwrap();
        let regions = native.regions.iter().map(|region| {
            let exports = exports(&region.export);
            let exports: Vec<_> =
                exports.iter().map(|(name, export)| (name.as_str(), export.as_slice())).collect();
            let access = Access::from_bits(region.access).unwrap();
            RegionDescriptor::new(region.addr, region.len, access, &exports).unwrap()
        });
        let regions = regions.collect();
        let described = Descriptor::new(name, self.incarnation.load(Ordering::Relaxed), regions);
        Some(Ok(described.unwrap()))
    }

    fn notify(&self, segment: &str, name: &str, message: &[u8]) -> Result<(), SegmentError> {
        if !self.carries {
            return Err(SegmentError::Foreign { name: segment.into() });
        }
        if self.restarted.load(Ordering::Relaxed) {
            return Err(SegmentError::Restarted { name: segment.into(), expected: 5, found: 6 });
        }
        assert_eq!(segment, "foreign");
        self.carried.lock().unwrap().push((name.into(), message.into()));
        Ok(())
    }

    fn probe(&self, segment: &str, _: Duration) -> Result<Liveness, SegmentError> {
        if !self.carries {
            return Err(SegmentError::Foreign { name: segment.into() });
        }
        Ok(Liveness::Alive { incarnation: self.incarnation.load(Ordering::Relaxed) })
    }
}

fn start(carries: bool) -> (TransferEngine, Arc<Other>) {
    let other = Arc::new(Other {
        owner: engine(Fabrics::LOCAL),
        incarnation: AtomicU64::new(5),
        described: AtomicU64::new(0),
        carries,
        restarted: AtomicBool::new(false),
        carried: Mutex::default(),
    });
    let here = TransferEngine::start_with_parts(config(Fabrics::LOCAL), Some(other.clone()), &[]).unwrap();
    (here, other)
}

#[test]
fn a_foreign_segment_is_used_like_any_other_and_described_again_by_a_refresh() {
    let (here, other) = start(false);
    let remote = other.owner.alloc_shared(4096, EVERYTHING).unwrap();
    let local = here.alloc_shared(4096, Access::LOCAL).unwrap();
    local.write(0, b"kv cache").unwrap();
    let segment = here.open_segment("foreign").unwrap();
    let write = request(Op::Write, (local.id(), 0), segment, remote.addr(), 8);
    here.submit(&[write], LONG).unwrap().wait(LONG).unwrap();
    assert_eq!(&bytes(&remote)[..8], b"kv cache");

    // What its owner exports later is there after a refresh; so is what it withdrew gone.
    let more = other.owner.alloc_shared(4096, EVERYTHING).unwrap();
    let later = request(Op::Write, (local.id(), 0), segment, more.addr(), 8);
    here.submit(&[later], LONG).unwrap().wait(LONG).unwrap_err();
    assert_eq!(other.described.load(Ordering::Relaxed), 1);
    here.refresh_segment(segment).unwrap();
    assert_eq!(
        (other.described.load(Ordering::Relaxed), here.segment_regions(segment).unwrap().len()),
        (2, 2)
    );
    here.submit(&[later], LONG).unwrap().wait(LONG).unwrap();
    other.owner.unregister(remote.id()).unwrap();
    here.refresh_segment(segment).unwrap();
    assert_eq!(here.segment_regions(segment).unwrap()[0].addr, more.addr());
    // Another life of its owner.
    other.incarnation.store(6, Ordering::Relaxed);
    let restarted = SegmentError::Restarted { name: "foreign".into(), expected: 5, found: 6 };
    assert_eq!(here.refresh_segment(segment), Err(restarted.clone()));
    let refused = here.submit(&[later], LONG).unwrap().wait(LONG);
    assert_eq!(refused, Err(TransferError::Segment { index: 0, source: restarted }));
    let again = here.open_segment("foreign").unwrap();
    assert_ne!(again, segment);
    let again = request(Op::Write, (local.id(), 0), again, more.addr(), 8);
    here.submit(&[again], LONG).unwrap().wait(LONG).unwrap();
}

#[test]
fn what_needs_a_control_port_is_a_typed_error_unless_the_metadata_does_it() {
    for carries in [false, true] {
        let (here, other) = start(carries);
        let remote = other.owner.alloc_shared(4096, EVERYTHING).unwrap();
        let local = here.alloc_shared(4096, Access::LOCAL).unwrap();
        let segment = here.open_segment("foreign").unwrap();
        let foreign = SegmentError::Foreign { name: "foreign".into() };
        let alive = Ok(Liveness::Alive { incarnation: 5 });
        assert_eq!(
            here.probe(segment, Duration::from_secs(5)),
            if carries { alive } else { Err(foreign.clone()) }
        );
        let done = if carries { Ok(()) } else { Err(foreign) };
        assert_eq!(here.notify(segment, "direct", b"1"), done);
        // Nothing is too long here: the metadata knows the limits of the other system.
        let long = vec![7; 1 << 20];
        let write = request(Op::Write, (local.id(), 0), segment, remote.addr(), 8);
        let transfer = here.submit_with(&[write], &SubmitOptions::new().notify("after", &long)).unwrap();
        transfer.wait(LONG).unwrap();
        assert_eq!(transfer.notified(), Some(done));
        let carried = std::mem::take(&mut *other.carried.lock().unwrap());
        let expected = [("direct".to_owned(), b"1".to_vec()), ("after".to_owned(), long)];
        assert_eq!(carried, if carries { &expected[..] } else { &[] });
        // The owner's own queue is not used.
        assert_eq!(other.owner.take_notifications().len(), 0);
    }
}

#[test]
fn a_notification_that_finds_another_owner_ends_the_use_of_the_segment() {
    let (here, other) = start(true);
    let remote = other.owner.alloc_shared(4096, EVERYTHING).unwrap();
    let local = here.alloc_shared(4096, Access::LOCAL).unwrap();
    let segment = here.open_segment("foreign").unwrap();
    let write = request(Op::Write, (local.id(), 0), segment, remote.addr(), 8);
    other.restarted.store(true, Ordering::Relaxed);
    let transfer = here.submit_with(&[write], &SubmitOptions::new().notify("n", b"m")).unwrap();
    transfer.wait(LONG).unwrap();
    let restarted = SegmentError::Restarted { name: "foreign".into(), expected: 5, found: 6 };
    assert_eq!(transfer.notified(), Some(Err(restarted.clone())));
    let refused = here.submit(&[write], LONG).unwrap().wait(LONG);
    assert_eq!(refused, Err(TransferError::Segment { index: 0, source: restarted }));
}

#[test]
fn names_that_the_metadata_does_not_describe_are_located_as_before() {
    let (here, other) = start(false);
    let _exported = other.owner.alloc_shared(4096, EVERYTHING).unwrap();
    let segment = here.open_segment(other.owner.name()).unwrap();
    assert_eq!(other.described.load(Ordering::Relaxed), 0);
    here.notify(segment, "native", b"").unwrap();
    assert_eq!(other.owner.take_notifications().len(), 1);
    here.refresh_segment(segment).unwrap();
}
