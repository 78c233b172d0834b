//! Tests of the logic of the native module that needs no interpreter. The module itself is an extension,
//! which no test binary can link, so its sources are included here.
#![allow(dead_code, unreachable_pub, reason = "each module is included as a whole")]

#[path = "../src/guess.rs"]
mod guess;
#[path = "../src/overlap.rs"]
mod overlap;
#[path = "../src/ranges.rs"]
mod ranges;
#[path = "../src/slot.rs"]
mod slot;

mod ranges_tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use crate::ranges::{ALIGN, Ranges};

    #[test]
    fn what_is_taken_is_aligned_disjoint_and_given_back_whole() {
        let mut ranges = Ranges::new(1000);
        assert_eq!(ranges.free_bytes(), 960);
        assert_eq!((ranges.take(0), ranges.take(961), ranges.take(u64::MAX)), (None, None, None));
        let (a, b) = (ranges.take(1).unwrap(), ranges.take(100).unwrap());
        assert_eq!((a, b, ranges.free_bytes()), (0, 64, 960 - 64 - 128));
        ranges.give(a, 1);
        ranges.give(b, 100);
        assert_eq!(ranges.take(960), Some(0), "neighbours are joined");
    }

    #[test]
    fn the_shortest_range_that_fits_is_used() {
        let mut ranges = Ranges::new(10 * 64);
        let taken: Vec<u64> = (0..10).map(|_| ranges.take(64).unwrap()).collect();
        for free in [1, 3, 4, 5, 8] {
            ranges.give(taken[free], 64);
        }
        assert_eq!(ranges.take(3 * 64), Some(3 * 64));
        assert_eq!(ranges.take(64), Some(64));
    }

    #[test]
    fn a_range_is_shortened_in_place() {
        let mut ranges = Ranges::new(4096);
        let offset = ranges.take(4096).unwrap();
        ranges.shorten(offset, 4096, 100);
        assert_eq!((ranges.free_bytes(), ranges.take(4096 - 128)), (4096 - 128, Some(128)));
        ranges.shorten(offset, 100, 100);
        ranges.shorten(offset, 100, 5000);
        assert_eq!(ranges.free_bytes(), 0);
    }

    #[derive(Clone, Debug)]
    enum Step {
        Take(u64),
        Shorten(usize, u64),
        Give(usize),
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let step = prop_oneof![
            (1..3000_u64).prop_map(Step::Take),
            (any::<usize>(), 1..3000_u64).prop_map(|(which, len)| Step::Shorten(which, len)),
            any::<usize>().prop_map(Step::Give),
        ];
        proptest::collection::vec(step, 1..200)
    }

    proptest! {
        #[test]
        fn ranges_never_overlap_and_nothing_is_lost(steps in steps()) {
            const LEN: u64 = 64 * 300;
            let mut ranges = Ranges::new(LEN);
            let mut taken: BTreeMap<u64, u64> = BTreeMap::new();
            let rounded = |len: u64| len.next_multiple_of(ALIGN);
            for step in steps {
                let pick = |which: usize| taken.iter().nth(which % taken.len().max(1)).map(|(&at, &len)| (at, len));
                match step {
                    Step::Take(len) => {
                        if let Some(offset) = ranges.take(len) {
                            prop_assert_eq!(offset % ALIGN, 0);
                            prop_assert!(offset + rounded(len) <= LEN);
                            let before = taken.range(..=offset).next_back();
                            prop_assert!(before.is_none_or(|(&at, &other)| at + rounded(other) <= offset));
                            let after = taken.range(offset..).next();
                            prop_assert!(after.is_none_or(|(&at, _)| offset + rounded(len) <= at));
                            taken.insert(offset, len);
                        }
                    }
                    Step::Shorten(which, to) => {
                        if let Some((at, len)) = pick(which) {
                            ranges.shorten(at, len, to);
                            taken.insert(at, len.min(to));
                        }
                    }
                    Step::Give(which) => {
                        if let Some((at, len)) = pick(which) {
                            ranges.give(at, len);
                            taken.remove(&at);
                        }
                    }
                }
                let used: u64 = taken.values().map(|&len| rounded(len)).sum();
                prop_assert_eq!(ranges.free_bytes(), LEN - used);
            }
            for (at, len) in taken {
                ranges.give(at, len);
            }
            prop_assert_eq!(ranges.take(LEN), Some(0));
        }
    }
}

mod guess_tests {
    use crate::guess::Guess;

    #[test]
    fn blocks_of_one_length_need_no_probe_and_others_do() {
        let mut guess = Guess::new();
        assert_eq!(guess.room(), 64 << 10);
        guess.saw(4096, 4096);
        assert_eq!((guess.room(), guess.probes(1), guess.probes(1000)), (4096, false, false));
        guess.saw(10, 1 << 20);
        assert_eq!((guess.room(), guess.probes(1), guess.probes(2)), (1 << 20, false, true));
        guess.saw(1 << 20, 1 << 20);
        assert!(!guess.probes(64) && guess.probes(65), "many long places are probed in any case");
        assert_eq!(guess.room_of(1024), 64 << 10);
        guess.saw(1, 1);
        assert_eq!(guess.room(), 4096, "places have a least length");
    }

    #[test]
    fn smaller_places_are_tried_down_to_a_page() {
        assert_eq!(Guess::smaller(1 << 20).collect::<Vec<_>>(), [1 << 18, 1 << 16, 1 << 14, 1 << 12]);
        assert_eq!(Guess::smaller(4096).count(), 0);
    }
}

mod overlap_tests {
    use crate::overlap::Occupied;

    #[test]
    fn a_byte_is_written_by_one_get_of_a_batch() {
        let mut occupied = Occupied::default();
        assert!(occupied.add(100, 100) && occupied.add(300, 100));
        for (start, len, free) in [
            (0, 101, false),
            (199, 1, false),
            (150, 10, false),
            (0, 1000, false),
            (399, 1, false),
            (200, 101, false),
        ] {
            assert_eq!(occupied.add(start, len), free, "{start}+{len}");
        }
        assert!(
            occupied.add(0, 100) && occupied.add(200, 100) && occupied.add(400, 10) && occupied.add(150, 0)
        );
        assert!(!occupied.add(usize::MAX - 1, 10) || occupied.add(0, 0));
    }
}

mod slot_tests {
    use std::future::Future;
    use std::pin::Pin;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::task::{Context, Poll, Wake, Waker};
    use std::thread;
    use std::time::Duration;

    use te_host::Spin;

    use crate::slot::{Filled, Slot};

    #[derive(Default)]
    struct Count(AtomicU32);

    impl Wake for Count {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[test]
    fn a_value_is_set_once_and_taken_once() {
        let slot = Slot::new();
        assert!(!slot.is_ready() && slot.take().is_none());
        slot.set(1);
        slot.set(2);
        assert!(slot.is_ready());
        assert_eq!((slot.take(), slot.take()), (Some(1), None));
    }

    #[test]
    fn a_waiting_thread_is_woken_and_one_that_waits_too_long_continues() {
        for spin_us in [0, 50] {
            let slot: Arc<Slot<u32>> = Slot::new();
            let mut spin = Spin::new(Duration::from_micros(spin_us));
            assert!(!slot.wait(&mut spin, Duration::ZERO));
            let other = Arc::clone(&slot);
            let waiting = thread::spawn(move || {
                let set = other.wait(&mut Spin::new(Duration::ZERO), Duration::from_secs(30));
                (set, other.take())
            });
            slot.set(7);
            assert_eq!(waiting.join().unwrap(), (true, Some(7)));
        }
    }

    #[test]
    fn a_future_is_woken_by_its_value() {
        let slot = Slot::new();
        let mut future = Filled(Arc::clone(&slot));
        let count = Arc::new(Count::default());
        let waker = Waker::from(Arc::clone(&count));
        let mut context = Context::from_waker(&waker);
        for _ in 0..3 {
            assert!(Pin::new(&mut future).poll(&mut context).is_pending());
        }
        slot.set("value");
        assert_eq!(count.0.load(Ordering::Relaxed), 1);
        assert_eq!(Pin::new(&mut future).poll(&mut context), Poll::Ready("value"));
    }
}
