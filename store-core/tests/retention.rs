//! Changes of retention after the put: pins and times to live.
#![allow(clippy::unwrap_used, reason = "tests")]

use store_core::message::{
    Kept, MountSegment, Pin, PutOptions, Retention, RetentionChange, TtlChange, WriterState,
};
use store_core::{ErrorCode, Incarnation, Instant, Master, MasterConfig, NodeId};

const GRAIN: u64 = 64;
const SOFT_MS: u64 = 10_000;
const NONE: RetentionChange = RetentionChange { pin: None, soft_pin_ttl_ms: None, ttl: TtlChange::Keep };

fn at(ms: u64) -> Instant {
    Instant::from_millis(ms)
}

/// Room for so many objects, of which half may be pinned for good.
fn master(objects: u64) -> Master {
    let config = MasterConfig {
        lease_ttl_ms: 1_000,
        lease_guard_ms: 0,
        soft_pin_ttl_ms: SOFT_MS as u32,
        hard_pin_share_max: 0.5,
        node_ttl_ms: 86_400_000,
        eviction_high_watermark: 1.0,
        eviction_ratio: 0.0,
        ..MasterConfig::default()
    };
    let mut master = Master::new(config).unwrap();
    let segment = MountSegment {
        node: NodeId::new(1),
        incarnation: Incarnation::new(1),
        name: "s",
        endpoint: "host:1",
        len: objects * GRAIN,
        ..MountSegment::default()
    };
    master.mount(at(0), &segment).unwrap();
    master
}

fn put(master: &mut Master, ms: u64, key: &str, retention: Retention) -> Result<(), ErrorCode> {
    let options = PutOptions { retention, ..PutOptions::DEFAULT };
    let put = master.put_start(at(ms), key.as_bytes(), GRAIN, &options)?;
    master.put_end(at(ms), key.as_bytes(), put.generation, 0)
}

fn pin(master: &mut Master, ms: u64, key: &str, pin: Pin) -> Result<(), ErrorCode> {
    master.change_retention(at(ms), key.as_bytes(), &RetentionChange { pin: Some(pin), ..NONE })
}

fn live(master: &mut Master, ms: u64, key: &str, ttl: TtlChange) -> Result<(), ErrorCode> {
    master.change_retention(at(ms), key.as_bytes(), &RetentionChange { ttl, ..NONE })
}

fn kept(master: &Master, ms: u64, key: &str) -> Option<Kept> {
    master.kept(at(ms), key.as_bytes()).unwrap()
}

#[test]
fn a_pin_after_the_put_is_like_one_of_the_put_and_can_be_taken_back() {
    let mut master = master(3);
    for key in ["a", "b", "c"] {
        put(&mut master, 1, key, Retention::DEFAULT).unwrap();
    }
    pin(&mut master, 2, "a", Pin::Hard).unwrap();
    pin(&mut master, 2, "b", Pin::Soft).unwrap();
    assert_eq!(
        ["a", "b", "c"].map(|key| kept(&master, 3, key)),
        [Some(Kept::HardPinned), Some(Kept::SoftPinned), None]
    );
    put(&mut master, 4, "d", Retention::DEFAULT).unwrap();
    assert_eq!([b"a", b"b", b"c"].map(|key| master.exists(key)), [true, true, false]);
    pin(&mut master, 5, "a", Pin::None).unwrap();
    pin(&mut master, 5, "d", Pin::Soft).unwrap();
    put(&mut master, 6, "e", Retention::DEFAULT).unwrap();
    assert_eq!([b"a", b"b", b"d"].map(|key| master.exists(key)), [false, true, true]);
    let report = master.eviction();
    assert_eq!((report.kept_hard_pinned, report.kept_soft_pinned, report.hard_pinned_bytes), (0, 2, 0));
}

#[test]
fn a_change_of_what_does_not_exist_or_makes_no_sense_is_refused_and_changes_nothing() {
    let mut master = master(4);
    let soft = |ms| RetentionChange { soft_pin_ttl_ms: Some(ms), ..NONE };
    assert_eq!(pin(&mut master, 1, "none", Pin::Soft), Err(ErrorCode::ObjectNotFound));
    let unfinished = master.put_start(at(1), b"u", GRAIN, &PutOptions::DEFAULT).unwrap().generation;
    assert_eq!(pin(&mut master, 1, "u", Pin::Hard), Err(ErrorCode::ReplicaIsNotReady));
    master.put_revoke(at(1), b"u", unfinished, WriterState::Quiet).unwrap();
    put(&mut master, 1, "k", Retention { ttl_ms: Some(100), ..Retention::DEFAULT }).unwrap();
    for change in [
        soft(5),
        RetentionChange { pin: Some(Pin::Hard), ..soft(5) },
        RetentionChange { pin: Some(Pin::Soft), ..soft(0) },
        RetentionChange { pin: Some(Pin::Soft), ..soft(30 * 86_400_000 + 1) },
        RetentionChange { pin: Some(Pin::Hard), ttl: TtlChange::After(0), ..NONE },
    ] {
        let changed = master.change_retention(at(2), b"k", &change);
        assert_eq!(changed, Err(ErrorCode::InvalidParams), "{change:?}");
    }
    assert_eq!(kept(&master, 3, "k"), None);
    assert_eq!(master.change_retention(at(4), b"k", &NONE), Ok(()));
    assert_eq!(pin(&mut master, 101, "k", Pin::Soft), Err(ErrorCode::ObjectNotFound), "it is expired");
    master.handle_timeout(at(101));
    assert_eq!(master.stats().used_bytes, 0);
}

#[test]
fn no_more_than_the_share_is_pinned_for_good_whenever_it_is_pinned() {
    let mut master = master(4);
    for key in ["a", "b", "c"] {
        put(&mut master, 1, key, Retention::DEFAULT).unwrap();
    }
    for key in ["a", "b"] {
        pin(&mut master, 2, key, Pin::Hard).unwrap();
        pin(&mut master, 2, key, Pin::Hard).unwrap();
    }
    assert_eq!(pin(&mut master, 3, "c", Pin::Hard), Err(ErrorCode::PinnedShareReached));
    assert_eq!(kept(&master, 3, "c"), None);
    pin(&mut master, 4, "a", Pin::Soft).unwrap();
    pin(&mut master, 5, "c", Pin::Hard).unwrap();
    assert_eq!(master.eviction().hard_pinned_bytes, 2 * GRAIN);
}

#[test]
fn a_soft_pin_that_is_set_again_is_valid_from_then_on_for_as_long_as_it_says() {
    let mut master = master(4);
    put(&mut master, 1, "k", Retention { pin: Pin::Soft, ..Retention::DEFAULT }).unwrap();
    let soft = |ms| RetentionChange { soft_pin_ttl_ms: Some(ms), ..NONE };
    // Shorter than what is left.
    master.change_retention(at(2), b"k", &soft(500)).unwrap();
    master.handle_timeout(at(501));
    assert_eq!(kept(&master, 501, "k"), Some(Kept::SoftPinned));
    // Again, and again: only the latest counts.
    for ms in 501..600 {
        pin(&mut master, ms, "k", Pin::Soft).unwrap();
    }
    master.handle_timeout(at(1_098));
    assert_eq!(kept(&master, 1_098, "k"), Some(Kept::SoftPinned));
    master.handle_timeout(at(1_099));
    assert_eq!(kept(&master, 1_099, "k"), None, "it has run out");
    // One that has run out can be renewed, and lengthened.
    master.change_retention(at(1_200), b"k", &soft(5_000)).unwrap();
    master.handle_timeout(at(6_199));
    assert_eq!(kept(&master, 6_199, "k"), Some(Kept::SoftPinned));
    master.handle_timeout(at(6_200));
    assert_eq!(kept(&master, 6_200, "k"), None);
    // After a hard pin the length is the default again.
    pin(&mut master, 6_300, "k", Pin::Hard).unwrap();
    pin(&mut master, 6_400, "k", Pin::Soft).unwrap();
    master.handle_timeout(at(6_399 + SOFT_MS));
    assert_eq!(kept(&master, 6_399 + SOFT_MS, "k"), Some(Kept::SoftPinned));
    master.handle_timeout(at(6_400 + SOFT_MS));
    assert_eq!(kept(&master, 6_400 + SOFT_MS, "k"), None);
}

#[test]
fn a_time_to_live_can_be_given_shortened_lengthened_and_taken_away() {
    let mut master = master(4);
    for key in ["given", "shorter", "longer", "never"] {
        let ttl_ms = (key != "given").then_some(1_000);
        put(&mut master, 0, key, Retention { ttl_ms, ..Retention::DEFAULT }).unwrap();
    }
    live(&mut master, 100, "given", TtlChange::After(400)).unwrap();
    live(&mut master, 100, "shorter", TtlChange::After(300)).unwrap();
    live(&mut master, 100, "longer", TtlChange::After(5_000)).unwrap();
    live(&mut master, 100, "never", TtlChange::Never).unwrap();
    let mut there = |ms: u64| {
        master.handle_timeout(at(ms));
        ["given", "shorter", "longer", "never"].map(|key| master.exists(key.as_bytes()))
    };
    assert_eq!(there(399), [true; 4]);
    assert_eq!(there(400), [true, false, true, true]);
    assert_eq!(there(500), [false, false, true, true]);
    assert_eq!(there(1_000), [false, false, true, true], "the old times do not count");
    assert_eq!(there(5_099), [false, false, true, true]);
    assert_eq!(there(5_100), [false, false, false, true]);
    assert_eq!(there(1_000_000), [false, false, false, true]);
}

#[test]
fn a_pin_of_one_member_holds_its_group_and_lets_it_go_with_the_last() {
    let mut master = master(3);
    let grouped = Retention { group: Some(1), ..Retention::DEFAULT };
    for key in ["a", "b"] {
        put(&mut master, 1, key, grouped).unwrap();
    }
    put(&mut master, 1, "c", Retention::DEFAULT).unwrap();
    pin(&mut master, 2, "a", Pin::Hard).unwrap();
    assert_eq!((kept(&master, 3, "a"), kept(&master, 3, "b")), (Some(Kept::HardPinned), Some(Kept::Group)));
    pin(&mut master, 4, "b", Pin::Soft).unwrap();
    pin(&mut master, 5, "a", Pin::None).unwrap();
    assert_eq!((kept(&master, 6, "a"), kept(&master, 6, "b")), (Some(Kept::Group), Some(Kept::SoftPinned)));
    put(&mut master, 7, "d", Retention::DEFAULT).unwrap();
    assert_eq!([b"a", b"b", b"c"].map(|key| master.exists(key)), [true, true, false]);
    pin(&mut master, 8, "b", Pin::None).unwrap();
    assert_eq!((kept(&master, 9, "a"), kept(&master, 9, "b")), (None, None));
    pin(&mut master, 9, "d", Pin::Hard).unwrap();
    put(&mut master, 10, "e", Retention::DEFAULT).unwrap();
    assert_eq!([b"a", b"b", b"d"].map(|key| master.exists(key)), [false, false, true], "both went together");
}

#[test]
fn changes_over_and_over_take_no_more_memory_and_no_more_time() {
    let mut master = master(4);
    put(&mut master, 0, "k", Retention::DEFAULT).unwrap();
    let before = master.memory_bytes();
    for round in 0..100_000u32 {
        let change = RetentionChange {
            pin: Some([Pin::Soft, Pin::Hard, Pin::None][round as usize % 3]),
            soft_pin_ttl_ms: (round % 3 == 0).then_some(1_000_000 + round % 7),
            ttl: TtlChange::After(1_000_000_000 - round),
        };
        master.change_retention(at(1), b"k", &change).unwrap();
        // Soft again and again, sooner and sooner.
        let sooner = RetentionChange { pin: Some(Pin::Soft), soft_pin_ttl_ms: Some(900_000 - round), ..NONE };
        master.change_retention(at(1), b"k", &sooner).unwrap();
    }
    let after = master.memory_bytes();
    assert!(after < before + (64 << 10), "{before} and {after} bytes");
    live(&mut master, 2, "k", TtlChange::Never).unwrap();
    pin(&mut master, 2, "k", Pin::None).unwrap();
    assert_eq!(kept(&master, 2, "k"), None);
}
