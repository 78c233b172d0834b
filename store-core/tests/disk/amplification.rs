//! How many bytes are written per byte of an object.

use store_core::disk::format::{FIRST_EXTENT_AT, Geometry, PAGE_BYTES, Stream};
use store_core::disk::{Demote, Disk, DiskConfig, End, Event, State, Work};
use te_core::Instant;
use te_core::testkit::Rng;

/// A disk on which every order succeeds at once.
struct Easy {
    disk: Disk,
    now: Instant,
    written: u64,
    demoted: u64,
}

impl Easy {
    fn new(block_bytes: u32) -> Self {
        let extent_bytes = 64 << 20;
        let geometry =
            Geometry::new(FIRST_EXTENT_AT + 12 * u64::from(extent_bytes), extent_bytes, block_bytes).unwrap();
        let now = Instant::from_millis(1_000);
        let disk = Disk::format(now, DiskConfig::default(), geometry, [1; 16], 1).unwrap();
        let mut this = Self { disk, now, written: 0, demoted: 0 };
        this.serve();
        assert_eq!(this.disk.state(), State::Ready);
        this
    }

    fn serve(&mut self) {
        loop {
            while let Some(order) = self.disk.poll_order() {
                let bytes = order.work.bytes();
                if let Work::Write(_) = order.work {
                    assert!(
                        bytes.is_multiple_of(PAGE_BYTES) && order.offset.is_multiple_of(PAGE_BYTES.into())
                    );
                    self.written += u64::from(bytes);
                }
                self.disk.complete(self.now, order.op, End::Done { bytes, data: &[] });
            }
            let Some(event) = self.disk.poll_event() else { return };
            match event {
                Event::Demoted { .. } => self.demoted += 1,
                Event::Reclaim { sequence } => self.disk.reclaimed(self.now, sequence),
                _ => {}
            }
        }
    }

    /// Writes objects of these lengths with keys of 32 bytes for a lap and a half; returns the bytes written
    /// per byte of an object.
    fn amplification(mut self, mut len: impl FnMut() -> u64) -> f64 {
        let (mut bytes, mut n) = (0, 0);
        while bytes < 1_200 << 20 {
            let len = len();
            n += 1;
            let key = format!("{n:032x}").into_bytes().into();
            let stream = Stream::ALL[n as usize % 2];
            let request = Demote { id: n, tenant: 1, key, generation: n, len, crc32c: 0, stream, token: n };
            self.disk.demote(self.now, request).unwrap();
            bytes += len;
            self.serve();
        }
        while let Some(at) = self.disk.poll_at() {
            self.now = at;
            self.disk.handle_timeout(at);
            self.serve();
        }
        assert_eq!(self.demoted, n);
        let counters = self.disk.counters();
        assert_eq!(counters.object_bytes_total, bytes);
        let counted = counters.object_bytes_total + counters.pad_bytes_total + counters.header_bytes_total;
        assert_eq!(counted, self.written, "every byte is counted");
        self.written as f64 / bytes as f64
    }
}

fn at_most(limit: f64, block_bytes: u32, lens: std::ops::Range<u64>) {
    let mut rng = Rng::new(7);
    let found = Easy::new(block_bytes).amplification(|| rng.range(lens.clone()));
    println!("blocks of {block_bytes}, objects of {lens:?}: {found:.4}");
    assert!(found <= limit, "{found} is more than {limit} for {lens:?}");
}

#[test]
fn of_objects_from_64_kib_on_at_most_two_per_cent_more_is_written() {
    for len in [64 << 10, 128 << 10, 1 << 20, 16 << 20] {
        at_most(1.02, 512, len..len + 1);
    }
    at_most(1.02, 512, 64 << 10..512 << 10);
    at_most(1.02, 512, (64 << 10)..(66 << 10));
}

#[test]
fn of_objects_of_16_kib_at_most_ten_per_cent_more_is_written() {
    at_most(1.1, 512, 16 << 10..(16 << 10) + 1);
    at_most(1.1, 512, 16 << 10..20 << 10);
}

#[test]
fn on_disks_with_blocks_of_4_kib_at_most_five_per_cent_more_is_written() {
    at_most(1.05, 4_096, 64 << 10..128 << 10);
    at_most(1.05, 4_096, 128 << 10..(128 << 10) + 1);
}
