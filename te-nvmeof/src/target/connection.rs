//! State of one connection of a host, and of one controller.

use te_core::Instant;

use super::reservation::HostId;
use crate::command::Status;
use crate::stream::Stream;
use crate::sys::Pinned;

/// How far a connection is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// ICReq is awaited.
    Opened,
    /// Connect is awaited.
    Initialized,
    /// It is a queue of the controller at this index.
    Queue(u32),
    /// A last PDU was sent; what comes is discarded until the host closes.
    Ending,
}

/// A WRITE that is not complete.
#[derive(Clone, Copy, Debug)]
pub(super) struct Transfer {
    pub(super) cid: u16,
    pub(super) nsid: u32,
    pub(super) region: u32,
    /// Where the data goes; `None` once it is to be discarded.
    pub(super) memory: Option<Pinned>,
    pub(super) len: u32,
    pub(super) received: u32,
    pub(super) status: Status,
    /// Its data comes in H2CData PDUs.
    pub(super) by_transfer: bool,
}

#[derive(Debug)]
pub(super) struct Connection {
    pub(super) stream: Stream,
    pub(super) phase: Phase,
    /// The queue: 0 is the admin queue.
    pub(super) qid: u16,
    /// Entries of the submission queue.
    pub(super) entries: u16,
    pub(super) sqhd: u16,
    pub(super) no_flow_control: bool,
    /// WRITEs in flight, by their tag.
    pub(super) transfers: Box<[Option<Transfer>]>,
    pub(super) transfers_open: usize,
    /// When it is closed if it has not become a queue, or has not ended.
    pub(super) deadline: Option<Instant>,
    pub(super) interest: te_fabric::Interest,
}

impl Connection {
    pub(super) fn new(stream: Stream, deadline: Instant) -> Self {
        Self {
            stream,
            phase: Phase::Opened,
            qid: 0,
            entries: 1,
            sqhd: 0,
            no_flow_control: false,
            transfers: Box::new([]),
            transfers_open: 0,
            deadline: Some(deadline),
            interest: te_fabric::Interest::READ,
        }
    }

    /// Stores a transfer; returns its tag. The host has sent more commands than the queue has entries when
    /// there is no room.
    pub(super) fn begin(&mut self, transfer: Transfer) -> Option<u16> {
        let free = self.transfers.iter().position(Option::is_none)?;
        self.transfers[free] = Some(transfer);
        self.transfers_open += 1;
        Some(free as u16)
    }

    pub(super) fn transfer(&mut self, tag: u16) -> Option<&mut Transfer> {
        self.transfers.get_mut(usize::from(tag))?.as_mut()
    }

    pub(super) fn end(&mut self, tag: u16) -> Option<Transfer> {
        let ended = self.transfers.get_mut(usize::from(tag))?.take()?;
        self.transfers_open -= 1;
        Some(ended)
    }

    /// The head of the submission queue after one more command.
    pub(super) fn fetched(&mut self) -> u16 {
        self.sqhd = (self.sqhd + 1) % self.entries.max(1);
        self.sqhd
    }
}

/// One controller: the association with a host.
#[derive(Debug)]
pub(super) struct Controller {
    pub(super) id: u16,
    pub(super) instance: u8,
    pub(super) instance_random: u64,
    pub(super) host: HostId,
    pub(super) discovery: bool,
    /// CC.
    pub(super) configuration: u32,
    /// Its connections, by index; the first is the admin queue.
    pub(super) connections: Vec<u32>,
    /// Namespaces whose key the host has stated, sorted.
    pub(super) granted: Vec<u32>,
    pub(super) keep_alive_ms: u32,
    pub(super) last_seen: Instant,
    /// Async Event Requests that wait.
    pub(super) events: u8,
}

impl Controller {
    pub(super) const fn is_enabled(&self) -> bool {
        self.configuration & crate::command::CC_ENABLE != 0
    }

    pub(super) fn is_granted(&self, nsid: u32) -> bool {
        self.granted.binary_search(&nsid).is_ok()
    }

    pub(super) fn grant(&mut self, nsid: u32) {
        if let Err(at) = self.granted.binary_search(&nsid) {
            self.granted.insert(at, nsid);
        }
    }
}
