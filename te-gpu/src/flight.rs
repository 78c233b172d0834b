//! The hops that run in one stream, in their order. Sans-IO: the stager tells it what has ended.
//!
//! A *launch* is a group of hops with one mark behind them in the stream. A mark that the device has passed
//! ends all hops of its launch, and those of earlier ones. Nothing allocates after `new`.

use std::collections::VecDeque;

use te_core::device::HopEnd;
use te_core::{Error, ErrorKind, Token};

/// Launches in flight at a time.
pub(crate) const LAUNCHES_MAX: usize = 64;

/// Entries of the driver's queue that are in flight at a time. The queue has about 1,024, and a call blocks
/// when it is full.
pub(crate) const ENTRIES_MAX: usize = 512;

/// The most launches that one call of `start` makes in a stream.
pub(crate) const LAUNCHES_PER_START: usize = 3;

/// How the end of a launch is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mark {
    /// The stream's completion word has this value or a later one.
    Word(u64),
    /// This event of the stream has passed.
    Event(u64),
    /// Nothing could be put behind it: it has ended when the stream is empty.
    Empty,
}

#[derive(Clone, Copy, Debug)]
struct Launch {
    mark: Mark,
    /// Hops that have not been reported.
    hops: u32,
    /// What it takes of the driver's queue.
    entries: u32,
    result: Result<(), Error>,
}

/// What runs in one stream.
#[derive(Debug)]
pub(crate) struct Flight {
    tokens: VecDeque<Token>,
    launches: VecDeque<Launch>,
    hops_max: usize,
    /// Entries of all launches.
    entries: usize,
    /// Hops of this stream so far: the next one's index.
    next: u64,
}

impl Flight {
    pub(crate) fn new(hops_max: usize) -> Self {
        Self {
            tokens: VecDeque::with_capacity(hops_max),
            launches: VecDeque::with_capacity(LAUNCHES_MAX),
            hops_max,
            entries: 0,
            next: 0,
        }
    }

    /// Hops that can be added; 0 while there is no room for the launches of one call. Each may take an entry
    /// of the driver's queue, and each launch one for its mark: how they are copied is chosen later.
    pub(crate) fn room(&self) -> usize {
        if self.launches.len() + LAUNCHES_PER_START > LAUNCHES_MAX {
            return 0;
        }
        let entries = ENTRIES_MAX.saturating_sub(self.entries + LAUNCHES_PER_START);
        entries.min(self.hops_max - self.tokens.len())
    }

    /// The index of the next hop, counted from the first of the stream.
    pub(crate) const fn next(&self) -> u64 {
        self.next
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.launches.is_empty()
    }

    /// Adds a hop to the launch that [`close`](Self::close) will end.
    pub(crate) fn add(&mut self, token: Token) {
        debug_assert!(self.tokens.len() < self.hops_max, "room() was asked");
        self.tokens.push_back(token);
        self.next += 1;
    }

    /// Ends a launch of the last `hops` hops, which takes so many entries of the driver's queue.
    pub(crate) fn close(&mut self, hops: u32, entries: u32, mark: Mark, result: Result<(), Error>) {
        debug_assert!(self.launches.len() < LAUNCHES_MAX, "room() was asked");
        self.entries += entries as usize;
        self.launches.push_back(Launch { mark, hops, entries, result });
    }

    /// The mark of the oldest launch.
    pub(crate) fn front(&self) -> Option<Mark> {
        self.launches.front().map(|launch| launch.mark)
    }

    /// Reports hops of the oldest launch, which has ended; returns how many.
    pub(crate) fn end_front(&mut self, out: &mut [HopEnd]) -> usize {
        let Some(launch) = self.launches.front_mut() else { return 0 };
        let count = (launch.hops as usize).min(out.len());
        for (end, token) in out.iter_mut().zip(self.tokens.drain(..count)) {
            *end = HopEnd { token, result: launch.result };
        }
        launch.hops -= count as u32;
        if launch.hops == 0 {
            self.entries -= launch.entries as usize;
            self.launches.pop_front();
        }
        count
    }

    /// The device does nothing any more: reports hops of any launch as failed.
    pub(crate) fn end_dead(&mut self, out: &mut [HopEnd]) -> usize {
        let mut ended = 0;
        while ended < out.len() && !self.launches.is_empty() {
            let part = &mut out[ended..];
            let count = self.end_front(part);
            for end in &mut part[..count] {
                end.result = end.result.and(Err(ErrorKind::Rail.into()));
            }
            ended += count;
        }
        ended
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const NO_END: HopEnd = HopEnd { token: Token(u64::MAX), result: Ok(()) };

    #[test]
    fn there_is_no_room_without_room_for_the_launches_of_a_call() {
        let mut flight = Flight::new(300);
        for launch in 0..(LAUNCHES_MAX - LAUNCHES_PER_START + 1) as u64 {
            assert_eq!(flight.room(), 300 - launch as usize);
            flight.add(Token(launch));
            flight.close(1, 2, Mark::Word(launch), Ok(()));
        }
        assert_eq!(flight.room(), 0);
        assert_eq!(flight.end_front(&mut [NO_END; 4]), 1);
        assert_eq!(flight.room(), 300 - LAUNCHES_MAX + LAUNCHES_PER_START);
    }

    #[test]
    fn the_entries_of_the_drivers_queue_are_bounded() {
        let mut flight = Flight::new(4_096);
        assert_eq!(flight.room(), 509);
        for (hops, entries, room) in [(300, 301, 208), (200, 2, 206), (206, 207, 0)] {
            (0..hops).for_each(|token| flight.add(Token(token)));
            flight.close(hops as u32, entries, Mark::Empty, Ok(()));
            assert_eq!(flight.room(), room);
        }
        let mut out = [NO_END; 299];
        assert_eq!((flight.end_front(&mut out), flight.room()), (299, 0), "the launch has not ended");
        assert_eq!((flight.end_front(&mut out), flight.room()), (1, 300));
    }

    #[test]
    fn a_dead_device_ends_all_with_an_error() {
        let mut flight = Flight::new(8);
        let own = Err(ErrorKind::System.into());
        for (token, result) in [(1, Ok(())), (2, own)] {
            flight.add(Token(token));
            flight.close(1, 2, Mark::Empty, result);
        }
        let mut out = [NO_END; 1];
        assert_eq!((flight.end_dead(&mut out), out[0].result), (1, Err(ErrorKind::Rail.into())));
        assert_eq!((flight.end_dead(&mut out), out[0].result), (1, own));
        assert_eq!((flight.end_dead(&mut out), flight.is_empty()), (0, true));
    }

    proptest! {
        /// Each hop ends once, in order, with the result of its launch, however the ends are taken.
        #[test]
        fn every_hop_ends_once(launches in prop::collection::vec((1_u32..9, any::<bool>()), 1..40), room in 1_usize..7) {
            let mut flight = Flight::new(64);
            let (mut begun, mut expected, mut ended) = (0, Vec::new(), Vec::new());
            let mut out = vec![NO_END; room];
            for (hops, fails) in launches {
                while flight.room() < hops as usize {
                    let count = flight.end_front(&mut out);
                    prop_assert!(count > 0);
                    ended.extend_from_slice(&out[..count]);
                }
                let result = if fails { Err(ErrorKind::System.into()) } else { Ok(()) };
                for _ in 0..hops {
                    prop_assert_eq!(flight.next(), begun);
                    flight.add(Token(begun));
                    expected.push(HopEnd { token: Token(begun), result });
                    begun += 1;
                }
                flight.close(hops, hops + 1, Mark::Word(begun), result);
            }
            while !flight.is_empty() {
                let count = flight.end_front(&mut out);
                ended.extend_from_slice(&out[..count]);
            }
            prop_assert_eq!(ended, expected);
        }
    }
}
