//! Reads of namespaces into buffers.

use std::collections::HashMap;
use std::os::fd::RawFd;
use std::time::{Duration, Instant};

use te_core::{
    Completion, Error, ErrorKind, EventSource, Memory as _, Op, RegionId, RegionOffset, RemoteOffset,
    RemoteRegionId, Slice, Token, Transport as _,
};
use te_nvmeof::{Config, Namespace, NvmeofTransport, OpenError};

use super::NotDirect;
use crate::disk::AlignedBuffer;
use crate::stage::Exported;
use crate::sys;

/// Reads begin at multiples of this in a namespace, bytes, and have such lengths. An image begins at a
/// multiple of 512.
pub(super) const GRANULE: u64 = 4_096;
/// A target that shows no sign of life for this long is given up, ms.
const SILENCE_MS: u32 = 1_000;
/// Longest time to connect to a target, ms.
const CONNECT_MS: u32 = 500;
/// Reads under way at most.
pub(super) const READS_MAX: u32 = 256;
/// Completions that are taken at once.
const ENDS: usize = 64;

/// Namespaces of targets, and the reads from them under way.
pub(super) struct Namespaces {
    // Dropped before the memory that it refers to.
    transport: NvmeofTransport,
    /// By token.
    held: HashMap<u64, Held>,
    started: Instant,
    token: u64,
    regions: Numbers,
    remotes: Numbers,
    /// Namespaces that are given up once nothing is read from them.
    leaving: Vec<RemoteRegionId>,
}

/// Indexes with generations.
#[derive(Default)]
struct Numbers {
    generations: Vec<u32>,
    free: Vec<u32>,
}

impl Numbers {
    fn take(&mut self) -> (u32, u32) {
        let index = self.free.pop().unwrap_or_else(|| {
            self.generations.push(0);
            self.generations.len() as u32 - 1
        });
        let generation = &mut self.generations[index as usize];
        *generation += 1;
        (index, *generation)
    }

    fn give(&mut self, index: u32) {
        self.free.push(index);
    }
}

/// Where a read goes.
struct Held {
    region: RegionId,
    buffer: AlignedBuffer,
}

impl Namespaces {
    pub(super) fn new() -> Result<Self, OpenError> {
        let transport = NvmeofTransport::new(Config {
            granule_bytes: GRANULE as u32,
            peer_silence_ms_max: SILENCE_MS,
            keep_alive_ms: 4 * SILENCE_MS,
            connect_ms_max: CONNECT_MS,
            regions_max: READS_MAX,
            remote_regions_max: 4_096,
            connections_max: 1,
            ..Config::default()
        })?;
        Ok(Self {
            transport,
            held: HashMap::new(),
            started: Instant::now(),
            token: 0,
            regions: Numbers::default(),
            remotes: Numbers::default(),
            leaving: Vec::new(),
        })
    }

    /// Attaches the namespace of a disk, from the disk's beginning to its end.
    pub(super) fn attach(&mut self, disk: &Exported) -> Result<RemoteRegionId, Error> {
        let Exported { bytes, address, nqn, nsid, offset, .. } = disk;
        let namespace = Namespace {
            addresses: vec![address.ip()],
            port: address.port(),
            nqn: nqn.clone(),
            nsid: *nsid,
            // The disk has a name of its own.
            nguid: [0; 16],
        };
        let end = offset.checked_add(*bytes).ok_or(ErrorKind::InvalidArgument)?;
        let (index, generation) = self.remotes.take();
        let id = RemoteRegionId::new(index, generation);
        let attached = self.transport.attach_namespace(id, &namespace, *offset..end);
        if attached.is_err() {
            self.remotes.give(index);
        }
        attached.map(|()| id)
    }

    /// Gives a namespace up. What is being read from it ends as before.
    pub(super) fn detach(&mut self, id: RemoteRegionId) {
        self.leaving.push(id);
        self.leave();
    }

    fn leave(&mut self) {
        let Self { transport, remotes, leaving, .. } = self;
        leaving.retain(|id| match transport.detach(*id) {
            Err(error) if error.kind == ErrorKind::Busy => true,
            _ => {
                remotes.give(id.index);
                false
            }
        });
    }

    pub(super) fn has_room(&self) -> bool {
        self.held.len() < READS_MAX as usize
    }

    /// Begins to read `len` bytes from `at` on into a new buffer, which has `spare` bytes more behind them.
    /// All three are multiples of the granule. Returns what names the read.
    pub(super) fn begin(
        &mut self,
        from: RemoteRegionId,
        at: u64,
        len: u64,
        spare: u64,
    ) -> Result<u64, Error> {
        let bytes = usize::try_from(len + spare).map_err(|_| ErrorKind::InvalidArgument)?;
        let buffer = AlignedBuffer::new(bytes);
        let (index, generation) = self.regions.take();
        let region = RegionId::new(index, generation);
        #[allow(unsafe_code, reason = "registers a buffer that is kept beside the transport")]
        // SAFETY: the buffer goes to `held` and is not looked at there. It leaves `held` in `take`, when its
        // region has been deregistered; else it is dropped after the transport (order of the fields).
        let registered = unsafe { sys::register_buffer(&mut self.transport, region, buffer.span()) };
        if let Err(error) = registered {
            self.regions.give(index);
            return Err(error);
        }
        self.token += 1;
        let token = self.token;
        self.held.insert(token, Held { region, buffer });
        let begun = self.again(token, from, at, len, 0);
        if begun.is_err() {
            self.take(token);
        }
        begun.map(|()| token)
    }

    /// Reads more into the buffer of a read that has ended, from its byte `to` on.
    pub(super) fn again(
        &mut self,
        token: u64,
        from: RemoteRegionId,
        at: u64,
        len: u64,
        to: u64,
    ) -> Result<(), Error> {
        let region = self.held.get(&token).ok_or(ErrorKind::NotFound)?.region;
        let slice = Slice {
            token: Token(token),
            local: RegionOffset::new(region, to),
            remote: RemoteOffset::new(from, at),
            len: u32::try_from(len).map_err(|_| ErrorKind::InvalidArgument)?,
            op: Op::Read,
        };
        match self.transport.submit(&[slice])? {
            0 => Err(ErrorKind::Full.into()),
            _ => Ok(()),
        }
    }

    /// Reads that have ended since the last call.
    pub(super) fn poll(&mut self, ends: &mut Vec<(u64, Result<(), Error>)>) {
        loop {
            let now = te_core::Instant::ZERO + self.started.elapsed();
            let mut out = [Completion::applied(Token(0)); ENDS];
            let count = self.transport.poll(now, &mut out);
            ends.extend(out[..count].iter().map(|end| (end.token.0, end.result)));
            if count < ENDS {
                return self.leave();
            }
        }
    }

    /// Ends a read early; its end comes with the next poll.
    pub(super) fn cancel(&mut self, token: u64) {
        if let Err(error) = self.transport.cancel(Token(token)) {
            log::debug!("a read has ended before it was cancelled: {error}");
        }
    }

    /// The buffer of a read that has ended.
    pub(super) fn take(&mut self, token: u64) -> Option<AlignedBuffer> {
        let held = self.held.remove(&token)?;
        if let Err(error) = self.transport.deregister(held.region) {
            // It stays until the transport ends.
            log::error!("a buffer is lost that a fabric does not return: {error}");
            self.held.insert(token, held);
            return None;
        }
        self.regions.give(held.region.index);
        Some(held.buffer)
    }

    /// The descriptor that is readable while there is something to poll for.
    pub(super) fn fd(&self) -> RawFd {
        self.transport.event_source().map_or(-1, |EventSource(fd)| fd)
    }

    /// How long until there is something to poll for that the descriptor does not tell.
    pub(super) fn due_in(&self) -> Option<Duration> {
        let now = te_core::Instant::ZERO + self.started.elapsed();
        self.transport.poll_at().map(|at| at - now)
    }
}

/// What an error of a read says about the disk.
pub(super) const fn reason(error: Error) -> NotDirect {
    match error.kind {
        ErrorKind::Stale | ErrorKind::OutOfRange | ErrorKind::InvalidArgument | ErrorKind::Unsupported => {
            NotDirect::Foreign
        }
        ErrorKind::Corrupt => NotDirect::Damaged,
        ErrorKind::Canceled => NotDirect::Late,
        _ => NotDirect::Unreachable,
    }
}
