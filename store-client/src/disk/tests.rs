//! The thread of a disk over a driver that stalls, does half of what it should, and fails.

use std::fs::File;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use store_core::disk::format::{Geometry, Stream};
use store_core::disk::{Disk, DiskConfig, Failure, IoError, Refused};
use te_core::testkit::pattern;

use super::bell::Bell;
use super::clock::Clock;
use super::driver::{Completion, Driver, DriverError, Io, IoWork};
use super::service::DiskService;
use super::sys::{Alignment, Transfer};
use super::{AlignedBuffer, Demote, DiskEvent, Lent, NotDone, Stage, image_of, is_intact};

const PATIENCE: Duration = Duration::from_secs(20);
const ALIGNMENT: Alignment = Alignment { memory: 512, block: 512 };

/// What the driver does with operations.
#[derive(Default)]
struct Trouble {
    /// Reads, or writes with memory of the owner, do not end.
    hold_reads: AtomicBool,
    hold_writes: AtomicBool,
    half: AtomicBool,
    fail_reads: AtomicBool,
    held: Mutex<Vec<Io>>,
    ended: Mutex<Vec<Completion>>,
}

struct Fake {
    file: File,
    trouble: Arc<Trouble>,
    bell: Bell,
}

impl Fake {
    fn carry_out(file: &File, trouble: &Trouble, io: Io) {
        let is_read = matches!(io.work, IoWork::Read(_));
        let (op, bytes) = (io.op, io.work.bytes());
        let half = trouble.half.load(Ordering::SeqCst) && bytes > 512;
        let transfer = Transfer::new(io, ALIGNMENT);
        let result = transfer.run(file).map(|done| if half { done / 2 } else { done });
        let mut completion = transfer.end(result);
        if is_read && trouble.fail_reads.load(Ordering::SeqCst) {
            let result = Err(DriverError { kind: IoError::Device, errno: libc::EIO });
            completion = Completion { op, result, data: None };
        }
        trouble.ended.lock().unwrap().push(completion);
    }
}

impl Driver for Fake {
    fn name(&self) -> &'static str {
        "fake"
    }

    fn submit(&mut self, io: Io) {
        let hold = match &io.work {
            IoWork::Read(_) => self.trouble.hold_reads.load(Ordering::SeqCst),
            IoWork::Write(parts) => parts.len() > 1 && self.trouble.hold_writes.load(Ordering::SeqCst),
            IoWork::Sync => false,
        };
        if hold {
            self.trouble.held.lock().unwrap().push(io);
        } else {
            Self::carry_out(&self.file, &self.trouble, io);
        }
        self.bell.ring();
    }

    fn poll(&mut self) -> Option<Completion> {
        let mut ended = self.trouble.ended.lock().unwrap();
        if ended.is_empty() { None } else { Some(ended.remove(0)) }
    }
}

/// A disk, and what its driver does.
struct Bench {
    disk: DiskService,
    trouble: Arc<Trouble>,
    file: File,
    bell: Bell,
}

impl Bench {
    fn new() -> Self {
        let (trouble, bell, clock) = (Arc::new(Trouble::default()), Bell::new().unwrap(), Clock::new());
        let file = tempfile::tempfile().unwrap();
        file.set_len(32 << 20).unwrap();
        let driver =
            Fake { file: file.try_clone().unwrap(), trouble: Arc::clone(&trouble), bell: bell.clone() };
        let geometry = Geometry::new(32 << 20, 1 << 20, 512).unwrap();
        let config = DiskConfig { batch_wait_ms: 1, sync_wait_ms: 5, stall_ms: 50, ..DiskConfig::default() };
        let disk = Disk::format(clock.now(), config, geometry, [3; 16], 1).unwrap();
        let disk = DiskService::start_with(disk, clock, Box::new(driver), bell.clone()).unwrap();
        let bench = Self { disk, trouble, file, bell };
        assert!(matches!(bench.event(), DiskEvent::Ready));
        bench
    }

    fn event(&self) -> DiskEvent {
        self.disk.wait_event(PATIENCE).expect("the disk answers")
    }

    fn demote(&self, id: u64, len: usize) -> u32 {
        let (crc32c, source) = image_of(&pattern(id, len));
        let (key, len, stream) = (format!("{id}").into_bytes().into(), len as u64, Stream::Trial);
        let request = Demote { id, tenant: 1, key, generation: id, len, crc32c, stream, source };
        self.disk.demote(request).unwrap();
        crc32c
    }

    fn demoted(&self) -> u64 {
        match self.event() {
            DiskEvent::Demoted { locator, .. } => locator,
            other => panic!("{other:?}"),
        }
    }

    /// Everything that was held is carried out.
    fn release(&self) {
        for io in self.trouble.held.lock().unwrap().drain(..) {
            Fake::carry_out(&self.file, &self.trouble, io);
        }
        self.bell.ring();
    }
}

/// Says when it is dropped.
struct Watched(AlignedBuffer, Arc<AtomicBool>);

impl Drop for Watched {
    fn drop(&mut self) {
        self.0.fill(0);
        self.1.store(true, Ordering::SeqCst);
    }
}

fn watched(bytes: usize) -> (Lent, Arc<AtomicBool>) {
    let gone = Arc::new(AtomicBool::new(false));
    let owner = Watched(AlignedBuffer::new(bytes), Arc::clone(&gone));
    let span = te_core::MemSpan::new(owner.0.as_ptr().cast_mut(), bytes);
    // SAFETY: the buffer is host memory, and lives as long as the owner; nothing refers to it meanwhile.
    #[allow(unsafe_code, reason = "memory is lent by address, as a node does it")]
    (unsafe { Lent::new(span, Box::new(owner)) }, gone)
}

#[test]
fn a_disk_that_stalls_answers_at_the_deadline_and_keeps_the_memory() {
    let bench = Bench::new();
    let crc32c = bench.demote(1, 10_000);
    let locator = bench.demoted();
    bench.trouble.hold_reads.store(true, Ordering::SeqCst);
    let (buffer, gone) = watched(16_384);
    let start = Instant::now();
    let deadline = start + Duration::from_millis(30);
    bench.disk.stage(Stage { id: 2, locator, len: 10_000, deadline, buffer }).unwrap();
    let event = bench.event();
    let late = Instant::now().saturating_duration_since(deadline);
    let why = NotDone::Failed(Failure::Deadline);
    assert!(matches!(event, DiskEvent::ReadFailed { id: 2, why: w, buffer: None } if w == why), "{event:?}");
    assert!(late < Duration::from_secs(2), "{late:?} after the deadline");
    assert!(!gone.load(Ordering::SeqCst), "the kernel may still write it");
    // From now on everything is refused at once, and comes back.
    std::thread::sleep(Duration::from_millis(60)); // timing: the stall has to be noticed
    bench.demote(3, 5_000);
    let event = bench.event();
    let busy = NotDone::Refused(Refused::Busy);
    let refused = matches!(&event, DiskEvent::DemoteFailed { id: 3, why, source: Some(_) } if *why == busy);
    assert!(refused, "{event:?}");
    bench.release();
    let event = bench.event();
    let DiskEvent::BufferFree { id: 2, buffer } = event else { panic!("{event:?}") };
    let owner = buffer.into_owner().downcast::<Watched>().unwrap();
    assert!(is_intact(&owner.0, 10_000, crc32c), "the late read has filled it");
    drop(owner);
    assert!(gone.load(Ordering::SeqCst));
}

#[test]
fn closing_a_stalled_disk_is_bounded_and_keeps_the_memory_until_the_last_operation_ends() {
    let bench = Bench::new();
    bench.demote(1, 10_000);
    let locator = bench.demoted();
    bench.trouble.hold_reads.store(true, Ordering::SeqCst);
    bench.trouble.hold_writes.store(true, Ordering::SeqCst);
    let (buffer, gone) = watched(16_384);
    let deadline = Instant::now() + PATIENCE;
    bench.disk.stage(Stage { id: 2, locator, len: 10_000, deadline, buffer }).unwrap();
    bench.demote(3, 8_000);
    while bench.trouble.held.lock().unwrap().len() < 2 {
        std::thread::yield_now();
    }
    let start = Instant::now();
    bench.disk.begin_close(Duration::from_millis(50));
    let mut ends = Vec::new();
    let clean = loop {
        match bench.event() {
            DiskEvent::ReadFailed { id, why: NotDone::Closed, buffer: None } => ends.push(id),
            DiskEvent::DemoteFailed { id, why: NotDone::Closed, source: None } => ends.push(id),
            DiskEvent::Closed { clean } => break clean,
            other => panic!("{other:?}"),
        }
    };
    ends.sort_unstable();
    assert_eq!((clean, ends), (false, vec![2, 3]));
    // timing: the end of a close is bounded.
    assert!(start.elapsed() < Duration::from_secs(3), "{:?}", start.elapsed());
    assert!(!gone.load(Ordering::SeqCst), "an operation is left in the kernel");
    bench.release();
    assert!(gone.load(Ordering::SeqCst), "its end releases the memory");
    let unsent = bench.disk.clear().unwrap_err();
    assert!(unsent.closed);
}

#[test]
fn operations_that_end_early_are_continued_to_the_end() {
    let bench = Bench::new();
    bench.trouble.half.store(true, Ordering::SeqCst);
    for (id, len) in [(1, 4_096), (2, 100_001), (3, 300_000)] {
        let crc32c = bench.demote(id, len);
        let locator = bench.demoted();
        let buffer = Lent::buffer(AlignedBuffer::new(400_000));
        let deadline = Instant::now() + PATIENCE;
        bench.disk.stage(Stage { id, locator, len: len as u64, deadline, buffer }).unwrap();
        let event = bench.event();
        let DiskEvent::Staged { buffer, .. } = event else { panic!("{event:?}") };
        let buffer = buffer.into_buffer().unwrap();
        assert!(is_intact(&buffer, len as u64, crc32c) && buffer[..len] == pattern(id, len)[..]);
    }
}

#[test]
fn a_read_that_fails_says_so_and_many_stop_the_disk() {
    let bench = Bench::new();
    bench.demote(1, 10_000);
    let locator = bench.demoted();
    bench.trouble.fail_reads.store(true, Ordering::SeqCst);
    let (mut failed, mut stopped) = (0, false);
    for id in 2..10 {
        let buffer = Lent::buffer(AlignedBuffer::new(16_384));
        let deadline = Instant::now() + PATIENCE;
        bench.disk.stage(Stage { id, locator, len: 10_000, deadline, buffer }).unwrap();
    }
    while failed < 8 || !stopped {
        match bench.event() {
            DiskEvent::ReadFailed { why: NotDone::Failed(Failure::Device), buffer: Some(_), .. } => {
                failed += 1
            }
            DiskEvent::Stopped(store_core::disk::Why::Errors) => stopped = true,
            other => panic!("{other:?}"),
        }
    }
    bench.demote(10, 5_000);
    let event = bench.event();
    let read_only = NotDone::Refused(Refused::ReadOnly);
    assert!(matches!(&event, DiskEvent::DemoteFailed { why, .. } if *why == read_only), "{event:?}");
}
