//! [`Reading`]: one batch of gets, whose objects have lengths that are not known before.
//!
//! A get without a destination needs room in the pool before the length of its object is known. It gets as
//! much as the last objects needed ([`crate::guess`]); a batch may begin with one object, whose length the
//! others are assumed to have. Objects that do not fit are not read; their lengths are looked up with one
//! request, and they are tried again with that much room. In a cache whose blocks have one length, this
//! happens once.

use store_client::{BufferRange, Get, RegionId, Sink, StoreError};

use super::backend::Backend;
use super::jobs::{Fetched, Value, Wanted};
use super::worker::{Kept, Worker};
use crate::buffers::Writable;
use crate::errors::Fault;
use crate::guess::Guess;
use crate::memory::{Memory, Place};
use crate::overlap::Occupied;

/// How often lengths are looked up for one batch. An object that a writer replaces by a longer one each time
/// is an error then.
const LOOK_UPS_MAX: usize = 64;

/// A batch of gets under way.
pub(super) struct Reading<'w> {
    worker: &'w mut Worker,
    flights: Vec<Flight>,
}

/// One get.
struct Flight {
    wanted: Wanted,
    /// The registration of a destination in memory of a GPU.
    region: Option<RegionId>,
    place: Option<Place>,
    /// Room that is known to be enough, bytes.
    room: Option<u64>,
    end: Option<Result<Option<Value>, Fault>>,
}

impl Flight {
    /// Whether the length of its object is not known before.
    const fn is_sought(&self) -> bool {
        self.wanted.into.is_none() && !matches!(self.wanted.part, Some((_, Some(_))))
    }
}

/// A place of `room` bytes, or, where that much is only an estimate, of fewer.
fn place(backend: &mut Backend, room: Option<u64>, guess: u64) -> Result<Place, Fault> {
    match (room, backend.place(room.unwrap_or(guess))) {
        (None, Err(fault)) => Guess::smaller(guess).find_map(|room| backend.place(room).ok()).ok_or(fault),
        (_, place) => place,
    }
}

impl<'w> Reading<'w> {
    #[allow(unsafe_code, reason = "registers memory that Python lends")]
    pub(super) fn new(worker: &'w mut Worker, items: Vec<Wanted>) -> Self {
        let backend = &mut worker.backend;
        let flight = |wanted: Wanted| {
            let room = wanted.part.and_then(|(_, len)| len);
            let span = wanted.into.as_ref().and_then(Writable::on_device).filter(|span| !span.is_empty());
            // SAFETY: the item keeps the memory, and `take_back` keeps it on if the registration does not
            // end.
            let (region, end) = match span.map(|span| unsafe { backend.register(span) }).transpose() {
                Ok(region) => (region, None),
                Err(error) => (None, Some(Err(Fault::from(error).of_key(&wanted.key)))),
            };
            Flight { wanted, region, place: None, room, end }
        };
        Self { flights: items.into_iter().map(flight).collect(), worker }
    }

    /// Ends the registration of a destination. Memory that a device may still write stays with the worker.
    fn take_back(worker: &mut Worker, flight: &mut Flight) {
        if let Some(region) = flight.region.take()
            && !worker.backend.unregister(region)
            && let Some(into) = flight.wanted.into.take()
        {
            worker.held.push((region, Kept::Written(into)));
        }
    }

    pub(super) fn run(mut self) -> Vec<Fetched> {
        let (mut shortest, mut longest, mut looked_up) = (u64::MAX, 0, 0);
        let sought = self.flights.iter().filter(|flight| flight.is_sought()).count();
        let mut probing = self.worker.guess.probes(sought);
        loop {
            let room = match (probing, longest, looked_up) {
                // The probe was a miss, or there was none: the estimate is old.
                (false, 0, 0) => self.worker.guess.room_of(sought),
                _ => self.worker.guess.room(),
            };
            let now = self.choose(probing, room);
            probing = false;
            if now.is_empty() {
                break;
            }
            let results = self.read(&now);
            let expelled = results.iter().any(|result| matches!(result, Err(StoreError::Expelled)));
            let mut long = Vec::new();
            for (&at, result) in now.iter().zip(results) {
                if let (Ok(Some(len)), true) = (&result, self.flights[at].is_sought()) {
                    (shortest, longest) = (shortest.min(*len), longest.max(*len));
                }
                if self.settle(at, result) {
                    long.push(at);
                }
            }
            if expelled {
                self.worker.backend.revive();
            }
            if !long.is_empty() {
                looked_up += 1;
                self.learn(&long, looked_up);
            } else if longest > 0 {
                // The probe, and at the end the whole batch.
                self.worker.guess.saw(shortest, longest);
            }
        }
        self.flights.iter_mut().for_each(|flight| Self::take_back(self.worker, flight));
        let fetched = |flight: Flight| Fetched {
            key: flight.wanted.key,
            result: flight.end.unwrap_or(Ok(None)),
            into: flight.wanted.into,
        };
        self.flights.into_iter().map(fetched).collect()
    }

    /// Chooses the gets of the next attempt, and gives them places, of `guess` bytes where the length is not
    /// known. Gets into the same memory are not carried out together. With `probing`, one get that needs a
    /// place is enough.
    fn choose(&mut self, probing: bool, guess: u64) -> Vec<usize> {
        let mut occupied = Occupied::default();
        let mut now = Vec::new();
        let mut placed = 0;
        for (at, flight) in self.flights.iter_mut().enumerate().filter(|(_, flight)| flight.end.is_none()) {
            match &flight.wanted.into {
                Some(into) if occupied.add(into.addr(), into.len()) => now.push(at),
                Some(_) => {}
                None if probing && placed > 0 => {}
                None => match place(&mut self.worker.backend, flight.room, guess) {
                    Ok(place) => {
                        flight.place = Some(place);
                        placed += 1;
                        now.push(at);
                    }
                    Err(fault) => flight.end = Some(Err(fault.of_key(&flight.wanted.key))),
                },
            }
        }
        now
    }

    /// Reads the chosen objects.
    #[allow(unsafe_code, reason = "writes memory that Python lends")]
    fn read(&mut self, now: &[usize]) -> Vec<Result<Option<u64>, StoreError>> {
        let backend = &mut self.worker.backend;
        let mut chosen = now.iter().copied().peekable();
        let mut items = Vec::with_capacity(now.len());
        for (at, flight) in self.flights.iter_mut().enumerate() {
            if chosen.next_if_eq(&at).is_none() {
                continue;
            }
            let Flight { wanted: Wanted { key, part, into }, region, place, .. } = flight;
            let on_device = region.zip(into.as_ref()).map(|(region, into)| {
                Sink::Region(BufferRange { region, offset: 0, len: into.len() as u64 })
            });
            let sink = match (into, place) {
                _ if on_device.is_some() => on_device,
                // SAFETY: `choose` has checked that no other get of this batch writes a part of it.
                (Some(into), _) => Some(Sink::Bytes(unsafe { into.bytes_mut() })),
                (None, Some(place)) => backend.sink(place),
                (None, None) => None,
            };
            // A get without a place was not chosen.
            let item = Get::new(&**key, sink.unwrap_or(Sink::Bytes(&mut [])));
            items.push(match *part {
                None => item,
                Some((start, None)) => item.range(start..),
                Some((start, Some(len))) => item.range(start..start.saturating_add(len)),
            });
        }
        backend.get(&mut items);
        items.into_iter().map(Get::into_result).collect()
    }

    /// Records how a get ended. Returns whether it is to be tried again with more room.
    fn settle(&mut self, at: usize, result: Result<Option<u64>, StoreError>) -> bool {
        let flight = &mut self.flights[at];
        let place = flight.place.take();
        let end = match (result, place) {
            (Ok(Some(len)), Some(mut place)) => {
                if let Place::Block(block) = &mut place {
                    block.shorten(len);
                }
                Ok(Some(Value::Memory(Memory::new(place, len as usize))))
            }
            (Ok(Some(len)), None) => Ok(Some(Value::Bytes(len))),
            (Ok(None), _) => Ok(None),
            (Err(StoreError::TooLong { .. }), Some(_)) => return true,
            (Err(error), place) => {
                if let (StoreError::Held, Some(Place::Block(block))) = (&error, place) {
                    self.worker.park(block);
                }
                Err(Fault::from(error).of_key(&flight.wanted.key))
            }
        };
        flight.end = Some(end);
        false
    }

    /// Looks up the lengths of objects that did not fit.
    fn learn(&mut self, long: &[usize], looked_up: usize) {
        let keys: Vec<&[u8]> = long.iter().map(|&at| &*self.flights[at].wanted.key).collect();
        let lengths = self.worker.backend.lengths(&keys);
        let (mut shortest, mut longest) = (u64::MAX, 0);
        for (&at, len) in long.iter().zip(lengths) {
            let flight = &mut self.flights[at];
            let Wanted { key, part, .. } = &flight.wanted;
            match len {
                Ok(Some(len)) => {
                    let room = len.saturating_sub(part.map_or(0, |(start, _)| start)).max(1);
                    if looked_up > LOOK_UPS_MAX {
                        let error = StoreError::TooLong { room: flight.room.unwrap_or(0) };
                        flight.end = Some(Err(Fault::from(error).of_key(key)));
                    }
                    flight.room = Some(room);
                    (shortest, longest) = (shortest.min(room), longest.max(room));
                }
                Ok(None) => flight.end = Some(Ok(None)),
                Err(error) => flight.end = Some(Err(Fault::from(error).of_key(key))),
            }
        }
        if longest > 0 {
            self.worker.guess.saw(shortest, longest);
        }
    }
}
