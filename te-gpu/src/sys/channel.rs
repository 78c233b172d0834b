//! One direction of a stager, or a queue of copies between any memory: a stream, what runs in it, and the
//! calls that put copies into it.
//!
//! Every launch has a mark behind its copies. The usual one is the *completion word*: the device stores the
//! sequence number of the launch to page-locked memory, after the copies. So a poll is one load, without a
//! call of the driver. Where the driver cannot do that, marks are events.

use std::ffi::c_int;
use std::ptr;
use std::sync::Arc;

use te_core::device::{HopDirection, HopEnd};
use te_core::{Error, ErrorKind, Token};

use super::abi::{
    Api, CopyAttributes, Descriptor, DevicePtr, EVENT_DISABLE_TIMING, NOT_READY, Opaque, STREAM_NON_BLOCKING,
    SUCCESS, SourceOrder,
};
use super::device::Device;
use super::module::Kernels;
use super::ring::{Pinned, seen};
use crate::flight::{Flight, LAUNCHES_MAX, Mark};
use crate::kernel::{Shape, THREADS};
use crate::plan::Path;

/// Polls without progress after which the driver is asked whether the context still works. Nothing else would
/// notice that it does not, because a dead context stores no words.
const POLLS_UNTIL_DOUBT: u32 = 1 << 14;

/// The same unknown answer in a row after which the context counts as dead: hops always end.
const DOUBTS_MAX: u32 = 8;

/// A group of copies in arrays, as the batch call wants them.
pub(crate) struct Group {
    to: Vec<DevicePtr>,
    from: Vec<DevicePtr>,
    sizes: Vec<usize>,
    tokens: Vec<Token>,
    /// The addresses of destination and source that a kernel uses, where they are not made from the others.
    by_kernel: Vec<(DevicePtr, DevicePtr)>,
    bytes: u64,
    /// All copies have the same address modulo 16 at both ends.
    pub(crate) is_aligned: bool,
}

impl Group {
    pub(crate) fn new(hops_max: usize) -> Self {
        let words = || Vec::with_capacity(hops_max);
        let (sizes, tokens) = (Vec::with_capacity(hops_max), Vec::with_capacity(hops_max));
        let by_kernel = Vec::new();
        Self { to: words(), from: words(), sizes, tokens, by_kernel, bytes: 0, is_aligned: true }
    }

    /// A group of copies between any memory, whose places say what address a kernel uses.
    pub(crate) fn of_places(hops_max: usize) -> Self {
        Self { by_kernel: Vec::with_capacity(hops_max), ..Self::new(hops_max) }
    }

    pub(crate) fn clear(&mut self) {
        self.to.clear();
        self.from.clear();
        self.sizes.clear();
        self.tokens.clear();
        self.by_kernel.clear();
        (self.bytes, self.is_aligned) = (0, true);
    }

    pub(crate) fn add(&mut self, to: DevicePtr, from: DevicePtr, len: usize, token: Token) {
        self.to.push(to);
        self.from.push(from);
        self.sizes.push(len);
        self.tokens.push(token);
        self.bytes += len as u64;
        self.is_aligned &= (to ^ from).is_multiple_of(16);
    }

    pub(crate) fn add_places(&mut self, to: Place, from: Place, len: usize, token: Token) {
        self.add(to.at, from.at, len, token);
        self.by_kernel.push((to.by_kernel, from.by_kernel));
    }

    pub(crate) fn count(&self) -> u32 {
        self.tokens.len() as u32
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }
}

/// One end of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// The address for the copy engines.
    pub(crate) at: DevicePtr,
    /// The address for a kernel.
    pub(crate) by_kernel: DevicePtr,
}

impl Place {
    /// The place `offset` bytes behind this one.
    #[inline]
    #[must_use]
    pub const fn plus(self, offset: u64) -> Self {
        Self { at: self.at.wrapping_add(offset), by_kernel: self.by_kernel.wrapping_add(offset) }
    }
}

/// What a channel copies between.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    /// Slots of a stager and device memory.
    Staged(HopDirection),
    /// Device memory of any device, and page-locked host memory.
    Any,
}

/// Where a channel has its parts in the page-locked memory of its stager.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Layout {
    pub(crate) word: usize,
    pub(crate) descriptors: usize,
    /// A power of two.
    pub(crate) hops_max: usize,
}

pub(crate) struct Channel {
    device: Arc<Device>,
    way: Way,
    stream: Opaque,
    /// Empty while marks are words.
    events: Vec<Opaque>,
    next_event: u64,
    layout: Layout,
    /// The last sequence number that was given to a launch, and the last that the device stored.
    sequence: u64,
    seen: u64,
    flight: Flight,
    idle_polls: u32,
    /// The driver's last unknown answer, and how often it came in a row.
    doubts: (c_int, u32),
    /// Where the blocks of a kernel count themselves, in device memory; 0: there is no kernel.
    ticket: DevicePtr,
}

// SAFETY: streams and events are used by any thread, one at a time here.
unsafe impl Send for Channel {}

impl Channel {
    /// A channel whose marks are words. The caller has entered the device.
    pub(crate) fn new(device: &Arc<Device>, way: Way, layout: Layout) -> Result<Self, Error> {
        let mut stream = ptr::null_mut();
        // SAFETY: writes one address. Priority 0 is the lowest.
        device.check(unsafe { (device.driver.stream_create)(&raw mut stream, STREAM_NON_BLOCKING, 0) })?;
        Ok(Self {
            device: Arc::clone(device),
            way,
            stream,
            events: Vec::new(),
            next_event: 0,
            layout,
            sequence: 0,
            seen: 0,
            flight: Flight::new(layout.hops_max),
            idle_polls: 0,
            doubts: (SUCCESS, 0),
            ticket: 0,
        })
    }

    /// From now on, marks are events. The caller has entered the device.
    pub(crate) fn use_events(&mut self) -> Result<(), Error> {
        self.events.reserve_exact(LAUNCHES_MAX);
        while self.events.len() < LAUNCHES_MAX {
            let mut event = ptr::null_mut();
            let create = self.device.driver.event_create;
            // SAFETY: writes one address.
            self.device.check(unsafe { create(&raw mut event, EVENT_DISABLE_TIMING) })?;
            self.events.push(event);
        }
        Ok(())
    }

    /// Whether the device has stored the word of every launch.
    pub(crate) fn stores_words(&self) -> bool {
        self.sequence > 0 && self.seen == self.sequence && self.events.is_empty()
    }

    pub(crate) fn set_ticket(&mut self, ticket: DevicePtr) {
        self.ticket = ticket;
    }

    pub(crate) fn room(&self) -> usize {
        self.flight.room()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.flight.is_empty()
    }

    /// Puts a group of copies into the stream, and a mark behind it. Each hop of the group ends later, with
    /// the error if there was one: copies that were put into the stream before the error may still run.
    pub(crate) fn launch(
        &mut self,
        group: &mut Group,
        path: Path,
        (pinned, kernels): (&Pinned, Option<&Kernels>),
        blocks_max: u32,
    ) -> Result<(), Error> {
        let count = group.count();
        let first = self.flight.next();
        group.tokens.iter().for_each(|token| self.flight.add(*token));
        let driver = &self.device.driver;
        let has_batch = driver.batch_13.is_some() || driver.batch_12.is_some();
        // Entries of the driver's queue: the calls, and the mark.
        let (result, entries) = match (path, kernels) {
            (Path::Kernel, Some(kernels)) => {
                (self.copy_by_kernel(group, first, pinned, kernels, blocks_max), 2)
            }
            (Path::Batch, _) if has_batch => (self.copy_by_batch(group), 2),
            _ => (self.copy_by_loop(group), count + 1),
        };
        // A kernel stores the word itself.
        let is_marked = path == Path::Kernel && kernels.is_some() && self.events.is_empty();
        let mark = match is_marked && result.is_ok() {
            true => {
                self.sequence += 1;
                Mark::Word(self.sequence)
            }
            false => self.mark(pinned),
        };
        self.flight.close(count, entries, mark, result);
        result
    }

    fn copy_by_loop(&self, group: &Group) -> Result<(), Error> {
        for ((to, from), len) in group.to.iter().zip(&group.from).zip(&group.sizes) {
            let driver = &self.device.driver;
            // SAFETY: one end is a slot of the stager's page-locked memory, the other memory of the device,
            // both of `len` bytes; the stager keeps both apart from other uses until the hop has ended. For
            // other copies, the caller of `CopyQueue::start` has promised as much.
            let code = unsafe {
                match self.way {
                    Way::Any => match driver.copy_any {
                        Some(copy) => copy(*to, *from, *len, self.stream),
                        None => super::abi::NOT_SUPPORTED,
                    },
                    Way::Staged(HopDirection::ToDevice) => {
                        let from = ptr::with_exposed_provenance(*from as usize);
                        (driver.copy_to_device)(*to, from, *len, self.stream)
                    }
                    Way::Staged(HopDirection::ToHost) => {
                        let to = ptr::with_exposed_provenance_mut(*to as usize);
                        (driver.copy_to_host)(to, *from, *len, self.stream)
                    }
                }
            };
            self.device.check(code)?;
        }
        Ok(())
    }

    fn copy_by_batch(&self, group: &mut Group) -> Result<(), Error> {
        let driver = &self.device.driver;
        let mut attributes = CopyAttributes::new(match self.way {
            // Slots are filled before the hop is started, so the source may be read at once.
            Way::Staged(HopDirection::ToDevice) => SourceOrder::Any,
            // Device memory may be written by earlier work: it is read in the order of the stream.
            Way::Staged(HopDirection::ToHost) | Way::Any => SourceOrder::Stream,
        });
        let (count, mut first, mut failed) = (group.to.len(), 0, 0);
        let (to, from) = (group.to.as_mut_ptr(), group.from.as_mut_ptr());
        let sizes = group.sizes.as_mut_ptr();
        // SAFETY: `count` entries in each array, which the driver reads during the call; the copies are as in
        // `copy_by_loop`.
        let code = unsafe {
            if let Some(batch) = driver.batch_13 {
                batch(to, from, sizes, count, &raw mut attributes, &raw mut first, 1, self.stream)
            } else if let Some(batch) = driver.batch_12 {
                // HIP refuses attributes up to 7.12, and ignores them later.
                let of_call = usize::from(driver.api == Api::Cuda);
                let (attributes, first) = match of_call {
                    0 => (ptr::null_mut(), ptr::null_mut()),
                    _ => (&raw mut attributes, &raw mut first),
                };
                batch(to, from, sizes, count, attributes, first, of_call, &raw mut failed, self.stream)
            } else {
                return Err(ErrorKind::Unsupported.into());
            }
        };
        self.device.check(code)
    }

    fn copy_by_kernel(
        &self,
        group: &Group,
        first: u64,
        pinned: &Pinned,
        kernels: &Kernels,
        blocks_max: u32,
    ) -> Result<(), Error> {
        let Some(launch) = self.device.driver.launch else { return Err(ErrorKind::Unsupported.into()) };
        let mask = self.layout.hops_max as u64 - 1;
        for (nth, ((to, from), len)) in group.to.iter().zip(&group.from).zip(&group.sizes).enumerate() {
            let at = ((first + nth as u64) & mask) as usize * size_of::<Descriptor>();
            let (to, from) = match (self.way, group.by_kernel.get(nth)) {
                (Way::Staged(HopDirection::ToDevice), _) => (*to, pinned.to_device(*from)),
                (Way::Staged(HopDirection::ToHost), _) => (pinned.to_device(*to), *from),
                (Way::Any, Some((to, from))) => (*to, *from),
                (Way::Any, None) => return Err(ErrorKind::Unsupported.into()),
            };
            let descriptor = Descriptor { to, from, len: *len as u32, flags: 0 };
            pinned.put(self.layout.descriptors + at, descriptor);
        }
        let shape = Shape::of(group.count(), group.bytes, blocks_max);
        let mut descriptors = pinned.by_device(self.layout.descriptors);
        let (mut from, mut mask, mut count) = ((first & mask) as u32, mask as u32, group.count());
        let (mut split, mut ticket) = (shape.split, self.ticket);
        let mut word = if self.events.is_empty() { pinned.by_device(self.layout.word) } else { 0 };
        let mut sequence = self.sequence + 1;
        let mut parameters: [*mut std::ffi::c_void; 8] = [
            (&raw mut descriptors).cast(),
            (&raw mut from).cast(),
            (&raw mut mask).cast(),
            (&raw mut count).cast(),
            (&raw mut split).cast(),
            (&raw mut ticket).cast(),
            (&raw mut word).cast(),
            (&raw mut sequence).cast(),
        ];
        let function = if group.is_aligned { kernels.copy16 } else { kernels.copy1 };
        let none = ptr::null_mut();
        let parameters = parameters.as_mut_ptr();
        // SAFETY: the parameters are those of the entry, and are read during the call. The kernel reads the
        // descriptors, whose places in the ring are not used again before their hops have ended, and copies
        // what they say: as in `copy_by_loop`.
        let code =
            unsafe { launch(function, shape.blocks, 1, 1, THREADS, 1, 1, 0, self.stream, parameters, none) };
        self.device.check(code)
    }

    /// Puts a mark behind what is in the stream.
    fn mark(&mut self, pinned: &Pinned) -> Mark {
        if !self.events.is_empty() {
            let event = self.events[self.next_event as usize % LAUNCHES_MAX];
            // SAFETY: an event and a stream of this context.
            let code = unsafe { (self.device.driver.event_record)(event, self.stream) };
            if self.device.check(code).is_err() {
                return Mark::Empty;
            }
            self.next_event += 1;
            return Mark::Event(self.next_event - 1);
        }
        let word = pinned.by_device(self.layout.word);
        let code = match self.device.driver.stream_write {
            // SAFETY: an aligned word of page-locked memory that the CPU reads as an atomic.
            Some(write) => unsafe { write(self.stream, word, self.sequence + 1, 0) },
            None => super::abi::NOT_SUPPORTED,
        };
        if self.device.check(code).is_err() {
            return Mark::Empty;
        }
        self.sequence += 1;
        Mark::Word(self.sequence)
    }

    /// Writes the ends of hops into `out`; returns how many.
    pub(crate) fn poll(&mut self, pinned: &Pinned, out: &mut [HopEnd]) -> usize {
        let mut ended = 0;
        while ended < out.len() {
            let Some(mark) = self.flight.front() else { break };
            if !self.is_past(mark, pinned) {
                break;
            }
            ended += self.flight.end_front(&mut out[ended..]);
        }
        if ended > 0 || self.flight.is_empty() {
            (self.idle_polls, self.doubts.1) = (0, 0);
        } else {
            self.doubt();
        }
        ended
    }

    /// Ends everything: the context is dead.
    pub(crate) fn poll_dead(&mut self, out: &mut [HopEnd]) -> usize {
        self.flight.end_dead(out)
    }

    #[inline]
    fn is_past(&mut self, mark: Mark, pinned: &Pinned) -> bool {
        match mark {
            Mark::Word(sequence) => {
                if self.seen < sequence {
                    self.seen = seen(pinned.word(self.layout.word));
                }
                // Words that were put into the stream before marks became events.
                self.seen >= sequence || (!self.events.is_empty() && self.is_stream_empty())
            }
            Mark::Event(nth) => {
                let event = self.events[nth as usize % LAUNCHES_MAX];
                let Ok(_entered) = self.device.enter() else { return false };
                // SAFETY: an event of this channel; the call returns at once.
                self.is_over(unsafe { (self.device.driver.event_query)(event) })
            }
            Mark::Empty => self.is_stream_empty(),
        }
    }

    fn is_stream_empty(&self) -> bool {
        let Ok(_entered) = self.device.enter() else { return false };
        // SAFETY: a stream of this channel; the call returns at once.
        self.is_over(unsafe { (self.device.driver.stream_query)(self.stream) })
    }

    /// A query's answer. An error that is not the context's end says nothing about the copies: it is asked
    /// again.
    fn is_over(&self, code: c_int) -> bool {
        code == SUCCESS || (code != NOT_READY && self.device.check(code).is_ok())
    }

    fn doubt(&mut self) {
        self.idle_polls += 1;
        if self.idle_polls >= POLLS_UNTIL_DOUBT {
            self.idle_polls = 0;
            let code = match self.device.enter() {
                // SAFETY: a stream of this channel; the call returns at once.
                Ok(_entered) => unsafe { (self.device.driver.stream_query)(self.stream) },
                Err(error) => error.code,
            };
            if code == NOT_READY || self.device.check(code).is_ok() {
                self.doubts = (SUCCESS, 0);
                return;
            }
            // A dead context is remembered in the device.
            let before = if self.doubts.0 == code { self.doubts.1 } else { 0 };
            self.doubts = (code, before + 1);
            if self.doubts.1 >= DOUBTS_MAX {
                self.device.died(code);
            }
        }
    }
}

impl Drop for Channel {
    /// The stager has waited for the hops, or has given the memory up.
    fn drop(&mut self) {
        let device = Arc::clone(&self.device);
        let Ok(_entered) = device.enter_to_free() else { return };
        let driver = &device.driver;
        for event in self.events.drain(..) {
            // SAFETY: created by `use_events`, destroyed once.
            device.gave_back("an event", unsafe { (driver.event_destroy)(event) });
        }
        // SAFETY: created by `new`, destroyed once. What still runs in it goes on.
        device.gave_back("a stream", unsafe { (driver.stream_destroy)(self.stream) });
    }
}
