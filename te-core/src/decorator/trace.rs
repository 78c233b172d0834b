//! A transport that records its calls and their results.
#![allow(unsafe_code, reason = "forwards `register`, whose promise the caller made")]

use alloc::string::String;
use alloc::vec::Vec;
use core::fmt;

use super::access_inner;
use crate::{
    Access, Capabilities, Completion, Error, EventSource, ExpelMode, Instant, MemSpan, Memory, RegionId,
    RemoteRegionId, Slice, Token, Transport,
};

/// Keeps the last events; older ones are overwritten. `Display` writes one line per event.
#[derive(Debug)]
pub struct Trace<T> {
    inner: T,
    ring: Vec<TraceEntry>,
    capacity: usize,
    recorded: u64,
    now: Instant,
}

/// One event.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TraceEntry {
    /// The number of events that were recorded before it.
    pub number: u64,
    /// The time of the last `poll` before it, or the time of this one.
    pub at: Instant,
    /// The call or result.
    pub event: TraceEvent,
}

/// What a [`Trace`] records.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum TraceEvent {
    /// Memory was registered: id, bytes, rights, result.
    Register(RegionId, u64, Access, Result<(), Error>),
    /// A registration was ended.
    Deregister(RegionId, Result<(), Error>),
    /// An export was attached: id, length of the export in bytes, result.
    Attach(RemoteRegionId, u32, Result<(), Error>),
    /// A remote region was detached.
    Detach(RemoteRegionId, Result<(), Error>),
    /// A batch was submitted: its length, and how many slices were accepted. Each accepted slice follows.
    Submit(u32, Result<u32, Error>),
    /// A slice was accepted.
    Accept(Slice),
    /// A slice or fence ended.
    Complete(Completion),
    /// A slice was cancelled.
    Cancel(Token, Result<(), Error>),
    /// A fence was started.
    Fence(Token, RemoteRegionId, Result<(), Error>),
    /// A call of [`expel`](Transport::expel): the identity, the mode and the result.
    Expel(u64, ExpelMode, Result<bool, Error>),
}

access_inner!(Trace);

impl<T: Transport> Trace<T> {
    /// A transport around `inner` that keeps its last `events_max` events (at least 1).
    #[must_use]
    pub fn new(inner: T, events_max: usize) -> Self {
        let capacity = events_max.max(1);
        Self { inner, ring: Vec::with_capacity(capacity), capacity, recorded: 0, now: Instant::ZERO }
    }
}

impl<T> Trace<T> {
    /// The recorded events, oldest first.
    pub fn events(&self) -> impl Iterator<Item = &TraceEntry> {
        let oldest = if self.ring.len() < self.capacity { 0 } else { self.recorded as usize % self.capacity };
        self.ring[oldest..].iter().chain(&self.ring[..oldest])
    }

    /// The number of events so far, with the overwritten ones.
    #[must_use]
    pub fn recorded(&self) -> u64 {
        self.recorded
    }

    /// Deletes the recorded events.
    pub fn clear(&mut self) {
        self.ring.clear();
        self.recorded = 0;
    }

    fn record(&mut self, event: TraceEvent) {
        let entry = TraceEntry { number: self.recorded, at: self.now, event };
        if self.ring.len() < self.capacity {
            self.ring.push(entry);
        } else {
            self.ring[self.recorded as usize % self.capacity] = entry;
        }
        self.recorded += 1;
    }
}

impl<T> fmt::Display for Trace<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.events().try_for_each(|entry| writeln!(f, "{entry}"))
    }
}

impl fmt::Display for TraceEntry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:>6} {:>14.3} µs  ", self.number, self.at.as_nanos() as f64 / 1e3)?;
        let end = |f: &mut fmt::Formatter<'_>, result: Result<(), Error>| match result {
            Ok(()) => Ok(()),
            Err(error) => write!(f, ": {error}"),
        };
        match self.event {
            TraceEvent::Register(id, bytes, access, result) => {
                write!(f, "register {id}, {bytes} B, {access:?}")?;
                end(f, result)
            }
            TraceEvent::Deregister(id, result) => {
                write!(f, "deregister {id}")?;
                end(f, result)
            }
            TraceEvent::Attach(id, bytes, result) => {
                write!(f, "attach {id}, export of {bytes} B")?;
                end(f, result)
            }
            TraceEvent::Detach(id, result) => {
                write!(f, "detach {id}")?;
                end(f, result)
            }
            TraceEvent::Submit(offered, Ok(accepted)) => write!(f, "submit {offered}, accepted {accepted}"),
            TraceEvent::Submit(offered, Err(error)) => write!(f, "submit {offered}: {error}"),
            TraceEvent::Accept(slice) => write!(
                f,
                "  {:?} {:#x}: {}+{:#x} {}+{:#x}, {} B",
                slice.op,
                slice.token.0,
                slice.local.region,
                slice.local.offset,
                slice.remote.region,
                slice.remote.offset,
                slice.len
            ),
            TraceEvent::Complete(completion) => {
                let fence = if completion.fence_needed { ", fence needed" } else { "" };
                write!(f, "  {:#x} {:?}{fence}", completion.token.0, completion.outcome)?;
                if let Some(crc32c) = completion.crc32c {
                    write!(f, ", CRC-32C {crc32c:?}")?;
                }
                end(f, completion.result)
            }
            TraceEvent::Cancel(token, result) => {
                write!(f, "cancel {:#x}", token.0)?;
                end(f, result)
            }
            TraceEvent::Fence(token, remote_region, result) => {
                write!(f, "fence {:#x} on {remote_region}", token.0)?;
                end(f, result)
            }
            TraceEvent::Expel(peer, mode, result) => {
                write!(f, "expel {peer:#x}{}", if mode == ExpelMode::Force { " by force" } else { "" })?;
                match result {
                    Ok(true) => f.write_str(": it can do nothing any more"),
                    Ok(false) => f.write_str(": under way"),
                    Err(error) => write!(f, ": {error}"),
                }
            }
        }
    }
}

impl<T: Transport> Memory for Trace<T> {
    unsafe fn register(&mut self, id: RegionId, span: MemSpan, access: Access) -> Result<(), Error> {
        // SAFETY: the caller's promise, passed on.
        let result = unsafe { self.inner.register(id, span, access) };
        self.record(TraceEvent::Register(id, span.len() as u64, access, result));
        result
    }

    fn deregister(&mut self, id: RegionId) -> Result<(), Error> {
        let result = self.inner.deregister(id);
        self.record(TraceEvent::Deregister(id, result));
        result
    }

    fn export(&self, id: RegionId, out: &mut [u8]) -> Result<usize, Error> {
        self.inner.export(id, out)
    }

    fn attach(&mut self, id: RemoteRegionId, blob: &[u8]) -> Result<(), Error> {
        let result = self.inner.attach(id, blob);
        self.record(TraceEvent::Attach(id, blob.len() as u32, result));
        result
    }

    fn detach(&mut self, id: RemoteRegionId) -> Result<(), Error> {
        let result = self.inner.detach(id);
        self.record(TraceEvent::Detach(id, result));
        result
    }
}

impl<T: Transport> Transport for Trace<T> {
    fn name(&self) -> &'static str {
        self.inner.name()
    }

    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    fn submit(&mut self, batch: &[Slice]) -> Result<usize, Error> {
        let result = self.inner.submit(batch);
        self.record(TraceEvent::Submit(batch.len() as u32, result.map(|accepted| accepted as u32)));
        for slice in &batch[..result.unwrap_or(0)] {
            self.record(TraceEvent::Accept(*slice));
        }
        result
    }

    fn poll(&mut self, now: Instant, out: &mut [Completion]) -> usize {
        self.now = now;
        let count = self.inner.poll(now, out);
        for completion in &out[..count] {
            self.record(TraceEvent::Complete(*completion));
        }
        count
    }

    fn poll_at(&self) -> Option<Instant> {
        self.inner.poll_at()
    }

    fn event_source(&self) -> Option<EventSource> {
        self.inner.event_source()
    }

    fn activity(&self) -> u64 {
        self.inner.activity()
    }

    fn set_checksums(&mut self, wanted: bool) {
        self.inner.set_checksums(wanted);
    }

    fn cancel(&mut self, token: Token) -> Result<(), Error> {
        let result = self.inner.cancel(token);
        self.record(TraceEvent::Cancel(token, result));
        result
    }

    fn fence(&mut self, token: Token, remote_region: RemoteRegionId) -> Result<(), Error> {
        let result = self.inner.fence(token, remote_region);
        self.record(TraceEvent::Fence(token, remote_region, result));
        result
    }

    fn why_not_exported(&self, region: RegionId) -> Option<String> {
        self.inner.why_not_exported(region)
    }

    fn is_connected(&self, peer: u64) -> bool {
        self.inner.is_connected(peer)
    }

    fn expel(&mut self, peer: u64, mode: ExpelMode) -> Result<bool, Error> {
        let result = self.inner.expel(peer, mode);
        self.record(TraceEvent::Expel(peer, mode, result));
        result
    }
}
