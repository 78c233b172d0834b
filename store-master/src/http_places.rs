//! Places of HTTP connections: which one is closed when all are taken, and the reserve for health checks.
//!
//! ```text
//!   connections_max                                            RESERVE
//!   ┌────────────────────────────────────────────────────────┬─────────┐
//!   │ any request                                            │ /health │
//!   └────────────────────────────────────────────────────────┴─────────┘
//!     a new connection replaces the one that was silent for the longest time; while all are busy, it gets the reserve
//! ```

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use tokio::sync::Notify;

/// Places beyond the limit, for [`is_vital`] requests.
pub(crate) const RESERVE: usize = 32;

/// Whether a request is answered even when all ordinary places are busy.
pub(crate) fn is_vital(path: &str) -> bool {
    matches!(path, "/health" | "/ready")
}

/// The places of one server. Clones share them.
#[derive(Clone, Debug)]
pub(crate) struct Places(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    /// Number of places for any request.
    ordinary_max: usize,
    began: Instant,
    taken: Mutex<Taken>,
    freed: Notify,
}

#[derive(Debug, Default)]
struct Taken {
    seats: HashMap<u64, Arc<Seat>>,
    ordinary: usize,
    next: u64,
}

#[derive(Debug)]
struct Seat {
    /// Whether the place belongs to the reserve.
    reserved: AtomicBool,
    /// When a byte was last transferred in either direction, nanoseconds since the server's start.
    heard_ns: AtomicU64,
    /// Number of requests that are being answered.
    at_work: AtomicU32,
    hang_up: Notify,
}

/// The place of a connection. Dropping it frees it.
#[derive(Debug)]
pub(crate) struct Place {
    places: Places,
    number: u64,
    seat: Arc<Seat>,
}

/// Keeps a place from being taken away while a request is being answered.
#[derive(Debug)]
pub(crate) struct AtWork {
    heard: Heard,
}

/// Records that bytes were transferred.
#[derive(Clone, Debug)]
pub(crate) struct Heard {
    began: Instant,
    seat: Arc<Seat>,
}

impl Places {
    pub(crate) fn new(ordinary_max: usize) -> Self {
        let taken = Mutex::new(Taken::default());
        Self(Arc::new(Shared { ordinary_max, began: Instant::now(), taken, freed: Notify::new() }))
    }

    /// Waits for a place.
    pub(crate) async fn enter(&self) -> Place {
        loop {
            let freed = self.0.freed.notified();
            if let Some(place) = self.try_enter() {
                return place;
            }
            freed.await;
        }
    }

    fn try_enter(&self) -> Option<Place> {
        let mut taken = self.taken();
        if taken.ordinary >= self.0.ordinary_max {
            taken.spare(false);
        }
        let reserved = taken.ordinary >= self.0.ordinary_max;
        if reserved && taken.seats.len() >= self.0.ordinary_max + RESERVE && !taken.spare(true) {
            return None;
        }
        taken.ordinary += usize::from(!reserved);
        taken.next += 1;
        let number = taken.next;
        let seat = Arc::new(Seat {
            reserved: AtomicBool::new(reserved),
            heard_ns: AtomicU64::new(0),
            at_work: AtomicU32::new(0),
            hang_up: Notify::new(),
        });
        taken.seats.insert(number, Arc::clone(&seat));
        drop(taken);
        let place = Place { places: self.clone(), number, seat };
        place.heard().now();
        Some(place)
    }

    fn taken(&self) -> MutexGuard<'_, Taken> {
        self.0.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Taken {
    /// Closes the connection that was silent for the longest time, if one of these is not busy. Returns
    /// whether there was one.
    fn spare(&mut self, reserved: bool) -> bool {
        let idle = self.seats.iter().filter(|(_, seat)| {
            seat.at_work.load(Ordering::Relaxed) == 0 && seat.reserved.load(Ordering::Relaxed) == reserved
        });
        let silent = idle.min_by_key(|(number, seat)| (seat.heard_ns.load(Ordering::Relaxed), **number));
        let Some(number) = silent.map(|(number, _)| *number) else { return false };
        self.leave(number);
        true
    }

    /// Removes a connection, unless it is removed already.
    fn leave(&mut self, number: u64) {
        if let Some(seat) = self.seats.remove(&number) {
            self.ordinary -= usize::from(!seat.reserved.load(Ordering::Relaxed));
            seat.hang_up.notify_one();
        }
    }
}

impl Place {
    pub(crate) fn heard(&self) -> Heard {
        Heard { began: self.places.0.began, seat: Arc::clone(&self.seat) }
    }

    /// Begins a request. `None`: the place belongs to the reserve, which is not for this request.
    pub(crate) fn begin(&self, vital: bool) -> Option<AtWork> {
        if self.seat.reserved.load(Ordering::Relaxed) && !vital {
            let mut taken = self.places.taken();
            if taken.ordinary >= self.places.0.ordinary_max || !taken.seats.contains_key(&self.number) {
                return None;
            }
            taken.ordinary += 1;
            self.seat.reserved.store(false, Ordering::Relaxed);
        }
        self.seat.at_work.fetch_add(1, Ordering::Relaxed);
        Some(AtWork { heard: self.heard() })
    }

    /// Waits until another connection needs the place.
    pub(crate) async fn wanted(&self) {
        self.seat.hang_up.notified().await;
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.places.taken().leave(self.number);
        self.places.0.freed.notify_one();
    }
}

impl Drop for AtWork {
    fn drop(&mut self) {
        self.heard.now();
        self.heard.seat.at_work.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Heard {
    /// Records that a byte was transferred.
    pub(crate) fn now(&self) {
        let ns = u64::try_from(self.began.elapsed().as_nanos()).unwrap_or(u64::MAX);
        self.seat.heard_ns.store(ns, Ordering::Relaxed);
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    fn is_wanted(place: &Place) -> bool {
        !place.places.taken().seats.contains_key(&place.number)
    }

    #[test]
    fn the_longest_silent_connection_is_replaced_and_a_busy_one_is_not() {
        let places = Places::new(2);
        let first = places.try_enter().unwrap();
        let second = places.try_enter().unwrap();
        let at_work = first.begin(false).unwrap();
        let third = places.try_enter().unwrap();
        assert_eq!((is_wanted(&first), is_wanted(&second)), (false, true));
        drop(at_work);
        // The third came before the first answer was complete.
        let fourth = places.try_enter().unwrap();
        assert_eq!((is_wanted(&first), is_wanted(&third)), (false, true));
        assert!(fourth.begin(false).is_some());
    }

    #[test]
    fn when_all_are_busy_the_reserve_answers_vital_requests() {
        let places = Places::new(2);
        let (first, second) = (places.try_enter().unwrap(), places.try_enter().unwrap());
        let (one, _two) = (first.begin(false).unwrap(), second.begin(false).unwrap());
        let reserved = places.try_enter().unwrap();
        assert!(reserved.begin(false).is_none());
        assert!(reserved.begin(true).is_some());
        // A place is free again: the connection of the reserve moves there.
        drop((one, first));
        assert!(reserved.begin(false).is_some());
        let next = places.try_enter().unwrap();
        assert!(!is_wanted(&next) && is_wanted(&reserved));
    }

    #[test]
    fn the_reserve_has_an_end_and_silent_connections_in_it_are_replaced() {
        let places = Places::new(1);
        let first = places.try_enter().unwrap();
        let _work = first.begin(false).unwrap();
        let reserve: Vec<_> = (0..RESERVE).map(|_| places.try_enter().unwrap()).collect();
        assert!(!reserve.iter().any(is_wanted));
        let more = places.try_enter().unwrap();
        assert!(is_wanted(&reserve[0]) && !reserve[1..].iter().any(is_wanted));
        drop(reserve);
        let work = |place: Place| (place.begin(true).unwrap(), place);
        let mut at_work: Vec<_> = (1..RESERVE).map(|_| work(places.try_enter().unwrap())).collect();
        at_work.push(work(more));
        assert!(places.try_enter().is_none());
        at_work.pop();
        assert!(places.try_enter().is_some());
    }
}
