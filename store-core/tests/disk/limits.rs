//! Limits and errors, one by one: what is refused, what is answered, and when.

use std::time::Duration;

use store_core::disk::format::{FIRST_EXTENT_AT, Geometry, Stream};
use store_core::disk::{
    Demote, Disk, DiskConfig, End, Event, Failure, IoError, Order, Refused, Removed, Stage, State, Why, Work,
};
use te_core::Instant;

const LEN: u64 = 20_000;

/// A disk whose orders the test ends itself.
struct Bench {
    disk: Disk,
    now: Instant,
}

impl Bench {
    fn new(config: DiskConfig) -> Self {
        let geometry = Geometry::new(FIRST_EXTENT_AT + (2 << 20), 128 << 10, 512).unwrap();
        let now = Instant::from_millis(10_000);
        let disk = Disk::format(now, config, geometry, [7; 16], 1).unwrap();
        let mut this = Self { disk, now };
        assert_eq!(this.serve(), [Event::Ready]);
        this
    }

    fn demote(&mut self, id: u64) -> Result<(), Refused> {
        let key = format!("{id}").into_bytes().into();
        let stream = Stream::Trial;
        let request = Demote { id, tenant: 1, key, generation: id, len: LEN, crc32c: 0, stream, token: id };
        self.disk.demote(self.now, request)
    }

    fn removed(id: u64) -> Removed {
        Removed { generation: id, tenant: 1, key: format!("{id}").into_bytes().into() }
    }

    fn stage(&mut self, id: u64, locator: u64, within_ms: u64) -> Result<(), Refused> {
        let deadline = self.now + Duration::from_millis(within_ms);
        self.disk.stage(self.now, Stage { id, locator, len: LEN, token: 100 + id, deadline })
    }

    fn orders(&mut self) -> Vec<Order> {
        std::iter::from_fn(|| self.disk.poll_order()).collect()
    }

    fn events(&mut self) -> Vec<Event> {
        std::iter::from_fn(|| self.disk.poll_event()).collect()
    }

    fn succeed(&mut self, order: &Order) {
        self.disk.complete(self.now, order.op, End::Done { bytes: order.work.bytes(), data: &[] });
    }

    /// Ends all orders; returns the events.
    fn serve(&mut self) -> Vec<Event> {
        loop {
            let orders = self.orders();
            if orders.is_empty() {
                return self.events();
            }
            orders.iter().for_each(|order| self.succeed(order));
        }
    }

    fn wait(&mut self, ms: u64) {
        self.now = self.now + Duration::from_millis(ms);
        self.disk.handle_timeout(self.now);
    }

    /// Writes an object; returns its locator.
    fn written(&mut self, id: u64) -> u64 {
        self.demote(id).unwrap();
        self.wait(100);
        let found = self.serve().into_iter().find_map(|event| match event {
            Event::Demoted { locator, .. } => Some(locator),
            _ => None,
        });
        found.unwrap()
    }
}

#[test]
fn settings_that_are_zero_are_refused_by_name() {
    let geometry = Geometry::new(FIRST_EXTENT_AT + (2 << 20), 128 << 10, 512).unwrap();
    let config = DiskConfig { batches_max: 0, ..DiskConfig::default() };
    let refused = Disk::format(Instant::ZERO, config, geometry, [7; 16], 1).unwrap_err();
    assert!(refused.to_string().starts_with("batches_max is 0"), "{refused}");
}

#[test]
fn a_full_queue_is_busy_and_what_is_unsuitable_is_refused() {
    let mut bench = Bench::new(DiskConfig { queue_objects_max: 3, ..DiskConfig::default() });
    for id in 1..=3 {
        bench.demote(id).unwrap();
    }
    assert_eq!(bench.demote(4), Err(Refused::Busy));
    let key = Box::from(*b"k");
    let request = Demote {
        id: 9,
        tenant: 1,
        key,
        generation: 9,
        len: 4_095,
        crc32c: 0,
        stream: Stream::Trial,
        token: 9,
    };
    for (len, key) in [(4_095, 1), (u64::MAX, 1), (LEN, 0), (LEN, 1_025)] {
        let request = Demote { len, key: vec![1; key].into(), ..request.clone() };
        assert_eq!(bench.disk.demote(bench.now, request), Err(Refused::Unsuitable), "{len}, key of {key}");
    }
    bench.wait(100);
    assert_eq!(bench.serve().len(), 3, "one batch, three answers");
    bench.demote(4).unwrap();
}

#[test]
fn a_locator_that_names_no_object_is_gone_or_absent_and_another_length_is_neither() {
    let mut bench = Bench::new(DiskConfig::default());
    let locator = bench.written(1);
    for never in [0, 1, 4_096] {
        assert_eq!(bench.stage(1, never, 10), Err(Refused::Gone), "{never}");
    }
    // A batch may still bring something there.
    for wrong in [locator - 512, locator + 1, locator + 512, locator + (128 << 10), u64::MAX] {
        assert_eq!(bench.stage(1, wrong, 10), Err(Refused::Absent), "{wrong}");
    }
    // The length is what the reader says, and decides nothing about the object.
    for len in [0, 4_095, 60_000, u64::MAX] {
        let other = Stage { id: 1, locator, len, token: 1, deadline: bench.now + Duration::from_secs(1) };
        assert_eq!(bench.disk.stage(bench.now, other), Err(Refused::OtherLength), "{len}");
    }
    bench.stage(1, locator, 10).unwrap();
    assert_eq!(bench.serve(), [Event::Staged { id: 1 }]);
    bench.disk.forget(bench.now, Bench::removed(1), Some(locator)).unwrap();
    assert_eq!(bench.stage(2, locator, 10), Err(Refused::Absent), "it was removed");
    assert_eq!(bench.demote(1), Err(Refused::Removed));
}

#[test]
fn a_removal_is_confirmed_by_the_sync_behind_its_record_and_not_before() {
    let mut bench = Bench::new(DiskConfig::default());
    let locator = bench.written(1);
    bench.disk.forget(bench.now, Bench::removed(1), Some(locator)).unwrap();
    bench.wait(100);
    let record = bench.orders();
    assert!(matches!(record.as_slice(), [Order { work: Work::Write(_), .. }]), "{record:?}");
    bench.succeed(&record[0]);
    assert_eq!(bench.events(), []);
    bench.wait(1_000);
    assert_eq!(bench.serve(), [Event::Forgotten(Bench::removed(1))]);
    bench.disk.forget(bench.now, Bench::removed(1), None).unwrap();
    assert_eq!(bench.events(), [Event::Forgotten(Bench::removed(1))], "asked again");
}

#[test]
fn too_many_tombstones_are_refused_until_the_disk_is_cleared() {
    let mut bench = Bench::new(DiskConfig { tombstone_bytes_max: 60, ..DiskConfig::default() });
    let locator = bench.written(1);
    bench.disk.forget(bench.now, Bench::removed(1), Some(locator)).unwrap();
    bench.disk.forget(bench.now, Bench::removed(2), None).unwrap();
    assert_eq!(bench.disk.forget(bench.now, Bench::removed(3), None), Err(Refused::TombstonesFull));
    bench.disk.clear(bench.now).unwrap();
    assert_eq!(bench.stage(1, locator, 10), Err(Refused::Gone));
    let events = bench.serve();
    assert_eq!(events.last(), Some(&Event::Cleared), "{events:?}");
    assert_eq!(bench.disk.tombstones(), 0);
    bench.written(4);
}

#[test]
fn while_the_disk_does_not_answer_readers_are_answered_and_nothing_more_is_ordered() {
    let mut bench = Bench::new(DiskConfig { stall_ms: 500, ..DiskConfig::default() });
    let locator = bench.written(1);
    bench.wait(1_000);
    bench.serve();
    bench.stage(1, locator, 20).unwrap();
    let stuck = bench.orders();
    bench.wait(20);
    let why = Failure::Deadline;
    assert_eq!(bench.events(), [Event::ReadFailed { id: 1, why, buffer_free: false }]);
    bench.demote(2).unwrap();
    bench.wait(481);
    // The demotion was accepted before the stall, and its batch was ordered.
    bench.orders();
    assert_eq!(bench.stage(2, locator, 1_000), Err(Refused::Busy));
    assert_eq!(bench.demote(3), Err(Refused::Busy));
    bench.wait(5_000);
    assert_eq!(bench.orders(), [], "no sync either");
    assert_eq!(bench.disk.poll_at(), None, "and nothing to wait for but a completion");
    bench.succeed(&stuck[0]);
    assert!(bench.events().contains(&Event::BufferFree { token: 101 }));
}

#[test]
fn a_short_write_is_continued_where_it_ended_and_not_for_ever() {
    let mut bench = Bench::new(DiskConfig::default());
    bench.demote(1).unwrap();
    bench.wait(100);
    let first = bench.orders().remove(0);
    bench.disk.complete(bench.now, first.op, End::Done { bytes: 9_000, data: &[] });
    let rest = bench.orders().remove(0);
    // Up to a whole block.
    assert_eq!((rest.offset, rest.work.bytes()), (first.offset + 8_704, first.work.bytes() - 8_704));
    assert_eq!(bench.events(), []);
    let mut next = rest;
    for _ in 0..7 {
        bench.disk.complete(bench.now, next.op, End::Done { bytes: 0, data: &[] });
        next = bench.orders().remove(0);
    }
    bench.disk.complete(bench.now, next.op, End::Done { bytes: 511, data: &[] });
    assert_eq!(bench.events(), [Event::DemoteFailed { id: 1, why: Failure::Device }]);
    assert_eq!(bench.disk.counters().short_total, 9);
}

#[test]
fn an_extent_with_a_failed_write_is_listed_given_up_and_never_used_again() {
    let mut bench = Bench::new(DiskConfig::default());
    bench.demote(1).unwrap();
    bench.wait(100);
    let failed = bench.orders().remove(0);
    bench.disk.complete(bench.now, failed.op, End::Failed(IoError::Device));
    assert_eq!(bench.events(), [Event::DemoteFailed { id: 1, why: Failure::Device }]);
    assert_eq!(bench.serve(), [Event::Reclaim { sequence: 1 }], "after both superblocks list it");
    assert_eq!(bench.disk.superblock().bad.len(), 1);
    let free = bench.disk.free_extents();
    bench.disk.reclaimed(bench.now, 1);
    assert_eq!(bench.disk.free_extents(), free);
    bench.written(2);
}

#[test]
fn a_failed_sync_drops_what_was_written_since_the_last_one_and_is_not_repeated() {
    let mut bench = Bench::new(DiskConfig::default());
    let kept = bench.written(1);
    bench.wait(1_000);
    bench.serve();
    let lost = bench.written(2);
    bench.wait(1_000);
    let sync = bench.orders().remove(0);
    assert_eq!(sync.work, Work::Sync);
    bench.disk.complete(bench.now, sync.op, End::Failed(IoError::Device));
    let events = bench.events();
    assert!(
        matches!(events[0], Event::Dropped { from, to } if from > kept && from < lost && lost < to),
        "{events:?}"
    );
    assert_eq!(events[1], Event::Stopped(Why::Sync));
    assert_eq!(bench.disk.state(), State::ReadOnly(Why::Sync));
    assert_eq!(bench.stage(1, lost, 10), Err(Refused::Absent));
    bench.stage(1, kept, 10).unwrap();
    assert_eq!(bench.serve(), [Event::Staged { id: 1 }]);
    assert_eq!(bench.demote(3), Err(Refused::ReadOnly));
    bench.wait(10_000);
    assert_eq!(bench.orders(), []);
}

#[test]
fn many_errors_within_an_hour_make_a_disk_read_only_and_few_do_not() {
    for (apart_ms, read_only) in [(1_000, true), (3_700_000, false)] {
        let mut bench = Bench::new(DiskConfig { errors_max: 3, ..DiskConfig::default() });
        let locator = bench.written(1);
        for id in 0..3 {
            bench.stage(id, locator, 10).unwrap();
            let read = bench.orders().remove(0);
            bench.disk.complete(bench.now, read.op, End::Failed(IoError::Device));
            let why = Failure::Device;
            assert_eq!(bench.events()[0], Event::ReadFailed { id, why, buffer_free: true });
            bench.wait(apart_ms);
            bench.serve();
        }
        assert_eq!(bench.disk.state() == State::ReadOnly(Why::Errors), read_only);
    }
}

#[test]
fn over_the_wear_limit_demotion_waits_and_then_is_busy() {
    let config = DiskConfig { wear_bytes_per_s: 20_000, queue_objects_max: 2, ..DiskConfig::default() };
    let mut bench = Bench::new(config);
    let mut accepted = 0;
    for id in 0..600 {
        accepted += u64::from(bench.demote(id).is_ok());
        bench.wait(100);
        bench.serve();
    }
    // A minute at 20,000 bytes per second, with a header of 4 KiB per batch, and what waits at the end.
    assert!((35..60).contains(&accepted), "{accepted}");
}

#[test]
fn an_unknown_disk_is_not_formatted() {
    let mut now = Instant::from_millis(1);
    let mut disk = Disk::open(now, DiskConfig::default(), 64 << 20, 512, 1).unwrap();
    while let Some(order) = disk.poll_order() {
        let Work::Read { bytes, .. } = order.work else { panic!("{order:?}") };
        now = now + Duration::from_millis(1);
        disk.complete(now, order.op, End::Done { bytes, data: &vec![0xa5; bytes as usize] });
    }
    assert_eq!(disk.state(), State::Failed(Why::NoSuperblock));
    assert_eq!(disk.poll_event(), Some(Event::Stopped(Why::NoSuperblock)));
}
