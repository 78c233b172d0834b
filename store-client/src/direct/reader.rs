//! The thread that reads exported disks.

use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::thread;
use std::time::{Duration, Instant};

use store_core::ErrorCode;
use store_core::disk::format::{BatchHeader, FIRST_EXTENT_AT, PAGE_BYTES, Superblock};
use store_core::message::LocateExtents;
use te_core::{Error, RemoteRegionId};

use super::namespaces::{GRANULE, Namespaces, reason};
use super::{DirectRead, DiskName, NotDirect, Queue, Settings, Shared};
use crate::disk::Bell;
use crate::error::RpcError;
use crate::packs::{NotRead, PackEnd};
use crate::rpc::{Address, RpcConnection};
use crate::stage::Exported;

/// The longest sleep.
const NAP: Duration = Duration::from_millis(500);
/// Bytes of images under way at most.
const BYTES_MAX: u64 = 64 << 20;
/// Sequences in one question to a node.
const ASKED_MAX: usize = 1_024;
/// Extents that are known of one disk.
const EXTENTS_MAX: usize = 1 << 16;
/// Disks that are known: their numbers change with each start of a node.
const DISKS_MAX: usize = 1_024;
/// Bytes of both superblocks.
const SUPERBLOCKS: u64 = 2 * PAGE_BYTES as u64;
/// Bytes that are read of an extent's first header.
const HEADER: u64 = PAGE_BYTES as u64;
const _: () = assert!(HEADER == GRANULE);

/// Starts the thread.
pub(super) fn start(settings: Settings, ended: Sender<PackEnd>) -> io::Result<Arc<Shared>> {
    let namespaces = Namespaces::new().map_err(io::Error::other)?;
    let shared = Arc::new(Shared { queue: Queue::default().into(), bell: Bell::new()? });
    let reader = Reader {
        settings,
        shared: Arc::clone(&shared),
        ended,
        namespaces,
        nodes: HashMap::new(),
        disks: HashMap::new(),
        waiting: Vec::new(),
        flights: HashMap::new(),
        bytes: 0,
    };
    thread::Builder::new().name("snowskin-direct".into()).spawn(move || reader.run())?;
    Ok(shared)
}

/// Whether a namespace is the disk that its node says.
pub(super) fn check(disk: &Exported, patience: Duration) -> Result<(), NotDirect> {
    let until = Instant::now() + patience;
    let mut namespaces = Namespaces::new().map_err(|_| NotDirect::Unreachable)?;
    let remote = namespaces.attach(disk).map_err(reason)?;
    let token = namespaces.begin(remote, 0, SUPERBLOCKS, 0).map_err(reason)?;
    let mut ends = Vec::new();
    while Instant::now() < until {
        namespaces.poll(&mut ends);
        if let Some((_, result)) = ends.pop() {
            result.map_err(reason)?;
            let pages = namespaces.take(token).ok_or(NotDirect::Unreachable)?;
            return if is_disk(disk, &pages) { Ok(()) } else { Err(NotDirect::Foreign) };
        }
        let nap = namespaces.due_in().unwrap_or(NAP).min(until.saturating_duration_since(Instant::now()));
        te_host::park([namespaces.fd()], Some(nap));
    }
    Err(NotDirect::Late)
}

/// Whether one of two superblocks is that of a disk.
fn is_disk(disk: &Exported, pages: &[u8]) -> bool {
    pages.chunks_exact(PAGE_BYTES as usize).filter_map(Superblock::decode).any(|found| {
        let geometry = found.geometry;
        let bytes = geometry.extent_at(geometry.extents());
        found.disk == disk.uuid && geometry.extent_bytes() == disk.extent_bytes && bytes == disk.bytes
    })
}

/// Whether the first page of the extent at `at` says that it is still the one with this sequence.
fn is_extent(disk: &Exported, at: u64, sequence: u64, page: &[u8]) -> bool {
    let slot = at.saturating_sub(FIRST_EXTENT_AT) / u64::from(disk.extent_bytes);
    BatchHeader::extent_of(page).is_some_and(|extent| {
        extent.disk == disk.uuid && u64::from(extent.slot) == slot && extent.sequence == sequence
    })
}

/// State of the thread.
struct Reader {
    settings: Settings,
    shared: Arc<Shared>,
    ended: Sender<PackEnd>,
    namespaces: Namespaces,
    nodes: HashMap<Arc<str>, RpcConnection>,
    disks: HashMap<DiskName, Disk>,
    waiting: Vec<DirectRead>,
    /// By token.
    flights: HashMap<u64, Flight>,
    bytes: u64,
}

/// A disk, as its node describes it.
struct Disk {
    exported: Exported,
    remote: RemoteRegionId,
    check: Check,
    /// Where extents begin on it, by their sequences.
    extents: HashMap<u64, u64>,
}

/// Whether the namespace is the disk.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Check {
    Open,
    Reading,
    Good,
}

/// A read from a namespace.
struct Flight {
    /// Why it is read.
    what: What,
    deadline: Instant,
    canceled: bool,
}

enum What {
    Superblocks(DiskName),
    Image { read: DirectRead, place: Place, header: bool },
}

/// Where an image is.
#[derive(Clone, Copy)]
struct Place {
    remote: RemoteRegionId,
    sequence: u64,
    /// Where its extent begins on the disk.
    extent: u64,
    /// What is read: granules around the image.
    at: u64,
    len: u64,
    /// Where the image begins in that.
    skip: u64,
}

impl Reader {
    fn run(mut self) {
        let mut ends = Vec::new();
        loop {
            let mut queue = self.shared.lock();
            if queue.closed {
                return;
            }
            self.waiting.extend(queue.waiting.drain(..));
            drop(queue);
            self.locate();
            self.begin();
            self.namespaces.poll(&mut ends);
            let any = !ends.is_empty();
            ends.drain(..).for_each(|(token, result)| self.read(token, result));
            self.expire();
            if !any {
                self.wait();
            }
        }
    }

    fn wait(&self) {
        let now = Instant::now();
        let flights = self.flights.values().filter(|flight| !flight.canceled).map(|flight| flight.deadline);
        let deadlines = self.waiting.iter().map(|read| read.deadline).chain(flights);
        let due = deadlines.min().map(|at| at.saturating_duration_since(now));
        let nap = [due, self.namespaces.due_in()].into_iter().flatten().fold(NAP, Duration::min);
        self.shared.bell.wait_or(self.namespaces.fd(), Some(nap));
    }

    fn end(&self, read: &DirectRead, why: NotDirect) {
        // A client that is gone waits for nothing.
        let _ = self.ended.send((read.id, Err(NotRead::Direct(why))));
    }

    /// Ends the reads of a disk that wait.
    fn end_all(&mut self, disk: &DiskName, why: NotDirect) {
        let ended: Vec<DirectRead> = self.waiting.extract_if(.., |read| read.disk == *disk).collect();
        ended.iter().for_each(|read| self.end(read, why));
    }

    // Which disk, and where in it.

    /// Asks nodes about disks and extents that are not known.
    fn locate(&mut self) {
        let mut unknown: Vec<DiskName> = self.waiting.iter().map(|read| read.disk.clone()).collect();
        unknown.dedup();
        unknown.retain(|name| !self.disks.contains_key(name));
        for name in unknown {
            if !self.disks.contains_key(&name)
                && let Err(why) = self.learn(&name)
            {
                self.end_all(&name, why);
            }
        }
        let mut names: Vec<DiskName> = self.disks.keys().cloned().collect();
        names.retain(|name| self.waiting.iter().any(|read| read.disk == *name));
        for name in names {
            let sequences = self.unknown(&name);
            if sequences.is_empty() {
                continue;
            }
            match self.ask(&name, &sequences) {
                Ok((exported, found)) => self.located(&name, &exported, &sequences, found),
                Err(why) => self.end_all(&name, why),
            }
        }
    }

    /// Sequences of extents of a disk that are wanted and not known.
    fn unknown(&self, name: &DiskName) -> Vec<u64> {
        let Some(disk) = self.disks.get(name) else { return Vec::new() };
        let of = |read: &DirectRead| read.locator / u64::from(disk.exported.extent_bytes);
        let wanted = self.waiting.iter().filter(|read| read.disk == *name).map(of);
        let mut sequences: Vec<u64> =
            wanted.filter(|sequence| !disk.extents.contains_key(sequence)).collect();
        sequences.sort_unstable();
        sequences.dedup();
        sequences.truncate(ASKED_MAX);
        sequences
    }

    fn learn(&mut self, name: &DiskName) -> Result<(), NotDirect> {
        let (exported, _) = self.ask(name, &[])?;
        let remote = self.namespaces.attach(&exported).map_err(reason)?;
        if self.disks.len() >= DISKS_MAX {
            // Reads under way end as those of a disk that is not known.
            self.disks.drain().for_each(|(_, disk)| self.namespaces.detach(disk.remote));
        }
        let disk = Disk { exported, remote, check: Check::Open, extents: HashMap::new() };
        self.disks.insert(name.clone(), disk);
        Ok(())
    }

    /// What a node has said about extents. A disk that is exported elsewhere by now is learned anew.
    fn located(&mut self, name: &DiskName, exported: &Exported, sequences: &[u64], found: Vec<Option<u64>>) {
        let Some(disk) = self.disks.get_mut(name) else { return };
        if disk.exported != *exported {
            self.forget(name);
            return self.end_all(name, NotDirect::Moved);
        }
        if disk.extents.len() + found.len() > EXTENTS_MAX {
            disk.extents.clear();
        }
        let mut missing = Vec::new();
        for (sequence, at) in sequences.iter().zip(found) {
            match at {
                Some(at) => drop(disk.extents.insert(*sequence, at)),
                None => missing.push(*sequence),
            }
        }
        let bytes = u64::from(disk.exported.extent_bytes);
        let is_missing =
            |read: &mut DirectRead| read.disk == *name && missing.contains(&(read.locator / bytes));
        let ended: Vec<DirectRead> = self.waiting.extract_if(.., is_missing).collect();
        ended.iter().for_each(|read| self.end(read, NotDirect::Moved));
    }

    /// A disk is not what was known about it. What is being read of it ends by itself.
    fn forget(&mut self, name: &DiskName) {
        if let Some(disk) = self.disks.remove(name) {
            self.namespaces.detach(disk.remote);
        }
    }

    fn ask(&mut self, name: &DiskName, sequences: &[u64]) -> Result<(Exported, Vec<Option<u64>>), NotDirect> {
        let node = match self.nodes.remove(&name.service) {
            Some(node) => Ok(node),
            None => name.service.parse::<Address>().and_then(|address| {
                RpcConnection::connect_as(address.into(), self.settings.rpc, self.settings.identity.clone())
            }),
        };
        let asked = node.and_then(|mut node| {
            let answer = node.call::<LocateExtents>(&name.no, sequences.iter().copied());
            let answer = answer.map(|(said, found)| (Exported::of(&said), found.map(Result::ok).collect()));
            let lost = !matches!(answer, Ok(_) | Err(RpcError::Refused(_)));
            if !lost {
                self.nodes.insert(Arc::clone(&name.service), node);
            }
            answer
        });
        match asked {
            Ok((Some(exported), found)) => Ok((exported, found)),
            Ok((None, _)) => Err(NotDirect::Foreign),
            Err(RpcError::Refused(ErrorCode::NotSupported)) => Err(NotDirect::NotExported),
            Err(error) => {
                log::debug!("{}: where disk {} is exported is not known: {error}", name.service, name.no);
                Err(NotDirect::Unreachable)
            }
        }
    }

    // Reads.

    /// Begins what can be begun.
    fn begin(&mut self) {
        let mut at = 0;
        while at < self.waiting.len() && self.namespaces.has_room() {
            let read = &self.waiting[at];
            let Some(disk) = self.disks.get_mut(&read.disk) else {
                at += 1;
                continue;
            };
            let begun = match disk.check {
                Check::Reading => {
                    at += 1;
                    continue;
                }
                Check::Open => {
                    let what = What::Superblocks(read.disk.clone());
                    let token = self.namespaces.begin(disk.remote, 0, SUPERBLOCKS, 0);
                    disk.check = Check::Reading;
                    token.map(|token| (token, what))
                }
                Check::Good => {
                    let Some(place) = place(disk, read) else {
                        let read = self.waiting.remove(at);
                        self.end(&read, NotDirect::Foreign);
                        continue;
                    };
                    let Some(place) = place else {
                        at += 1;
                        continue;
                    };
                    if self.bytes > 0 && self.bytes + place.len > BYTES_MAX {
                        return;
                    }
                    let token = self.namespaces.begin(place.remote, place.at, place.len, HEADER);
                    let read = self.waiting.remove(at);
                    if let Err(error) = token {
                        self.end(&read, reason(error));
                        continue;
                    }
                    self.bytes += place.len;
                    token.map(|token| (token, What::Image { read, place, header: false }))
                }
            };
            match begun {
                Ok((token, what)) => {
                    let deadline = match &what {
                        What::Image { read, .. } => read.deadline,
                        What::Superblocks(_) => Instant::now() + NAP,
                    };
                    self.flights.insert(token, Flight { what, deadline, canceled: false });
                }
                Err(error) => {
                    let name = self.waiting[at].disk.clone();
                    self.forget(&name);
                    self.end_all(&name, reason(error));
                }
            }
        }
    }

    /// A read has ended.
    fn read(&mut self, token: u64, result: Result<(), Error>) {
        let Some(Flight { what, deadline, canceled }) = self.flights.remove(&token) else { return };
        match what {
            What::Superblocks(name) => self.checked(token, &name, result),
            What::Image { read, place, header: false } if result.is_ok() => {
                // From here on nothing is read that was not there before.
                let next = self.namespaces.again(token, place.remote, place.extent, HEADER, place.len);
                let what = What::Image { read, place, header: true };
                match next {
                    Ok(()) => drop(self.flights.insert(token, Flight { what, deadline, canceled })),
                    Err(error) => {
                        if let What::Image { read, .. } = what {
                            self.image(token, &read, place, Err(reason(error)));
                        }
                    }
                }
            }
            What::Image { read, place, .. } => {
                self.image(token, &read, place, result.map_err(reason));
            }
        }
    }

    /// The superblocks of a disk were read.
    fn checked(&mut self, token: u64, name: &DiskName, result: Result<(), Error>) {
        let pages = self.namespaces.take(token);
        let Some(disk) = self.disks.get_mut(name) else { return };
        let result = match (result, pages) {
            (Ok(()), Some(pages)) if is_disk(&disk.exported, &pages) => Ok(()),
            (Ok(()), Some(_)) => Err(NotDirect::Foreign),
            (Ok(()), None) => Err(NotDirect::Unreachable),
            (Err(error), _) => Err(reason(error)),
        };
        match result {
            Ok(()) => disk.check = Check::Good,
            Err(why) => {
                self.forget(name);
                self.end_all(name, why);
            }
        }
    }

    /// The image of an object was read, and the header of its extent after it.
    fn image(&mut self, token: u64, read: &DirectRead, place: Place, result: Result<(), NotDirect>) {
        self.bytes -= place.len;
        let buffer = self.namespaces.take(token).ok_or(NotDirect::Unreachable);
        let mut buffer = match result.and(buffer) {
            Ok(buffer) => buffer,
            Err(why) => {
                if why == NotDirect::Unreachable || why == NotDirect::Foreign {
                    // Another namespace may be there when it comes back.
                    self.forget(&read.disk);
                }
                return self.end(read, why);
            }
        };
        let header = buffer.get(place.len as usize..).unwrap_or_default();
        let disk = self.disks.get_mut(&read.disk);
        let Some(disk) = disk.filter(|disk| is_extent(&disk.exported, place.extent, place.sequence, header))
        else {
            if let Some(disk) = self.disks.get_mut(&read.disk) {
                disk.extents.remove(&place.sequence);
            }
            return self.end(read, NotDirect::Moved);
        };
        debug_assert!(disk.check == Check::Good, "nothing is read from a disk that was not checked");
        if place.skip > 0 {
            buffer.copy_within(place.skip as usize..place.len as usize, 0);
        }
        let _ = self.ended.send((read.id, Ok(buffer)));
    }

    /// Ends reads whose time is over.
    fn expire(&mut self) {
        let now = Instant::now();
        let late: Vec<DirectRead> = self.waiting.extract_if(.., |read| read.deadline <= now).collect();
        late.iter().for_each(|read| self.end(read, NotDirect::Late));
        for (token, flight) in &mut self.flights {
            if flight.deadline <= now && !flight.canceled {
                flight.canceled = true;
                self.namespaces.cancel(*token);
            }
        }
    }
}

/// Where an image is; `None`: nowhere on this disk; `Some(None)`: its extent is not known yet.
#[allow(clippy::option_option, reason = "impossible and unknown are told apart")]
fn place(disk: &Disk, read: &DirectRead) -> Option<Option<Place>> {
    let extent_bytes = u64::from(disk.exported.extent_bytes);
    let (sequence, offset) = (read.locator / extent_bytes, read.locator % extent_bytes);
    let Some(&extent) = disk.extents.get(&sequence) else { return Some(None) };
    let begin = extent.checked_add(offset)?;
    let end = begin.checked_add(read.bytes as u64)?.checked_next_multiple_of(GRANULE)?;
    let at = begin / GRANULE * GRANULE;
    let inside = extent >= FIRST_EXTENT_AT
        && (extent - FIRST_EXTENT_AT).is_multiple_of(extent_bytes)
        && end <= extent.checked_add(extent_bytes)?
        && end <= disk.exported.bytes;
    inside.then_some(Some(Place {
        remote: disk.remote,
        sequence,
        extent,
        at,
        len: end - at,
        skip: begin - at,
    }))
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests;
