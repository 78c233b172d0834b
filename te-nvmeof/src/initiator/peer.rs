//! What the initiator keeps about a subsystem, the association with it, and its queues.

use std::collections::VecDeque;

use te_core::{Error, Instant, Token};
use te_fabric::Queue;
use te_fabric::peer::Contact;

use crate::controller::Life;
use crate::export::Place;
use crate::fence::Doubts;
use crate::identify::IDENTIFY_BYTES;
use crate::queue::Commands;
use crate::stream::Stream;
use crate::sys::Pinned;

/// What is known about a remote region on the current association.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Check {
    /// Nothing.
    Open,
    /// It is being checked, or waits for that.
    Asked(u64),
    /// It is what the export says. Holds the association.
    Good(u64),
    /// It is not, on this association.
    Bad(u64, Error),
}

/// Which data the association collects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Checking {
    Remote(u32),
    Owner(u32),
    /// That of a command whose region, with this number, was given up: none other before its answer.
    Orphan(u64),
}

/// What this fabric keeps with a remote region.
#[derive(Debug)]
pub(super) struct RemoteExt {
    pub(super) place: Place,
    pub(super) check: Check,
    /// Bytes per block, once it is checked.
    pub(super) block: u32,
    /// Slices that wait for the check.
    pub(super) waiting: Queue,
    /// What the superblock has to say, where there is one.
    pub(super) superblock: Option<crate::namespace::Superblock>,
    /// Tells it apart from others that had its index before.
    pub(super) sequence: u64,
}

pub(super) type RemoteRegions = te_fabric::RemoteRegions<RemoteExt>;

/// The part of an operation that only this fabric needs.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ext {
    pub(super) local: Pinned,
    /// Bytes of a WRITE have changed the remote memory, or may have.
    pub(super) touched: bool,
    /// It waits for the check of its remote region.
    pub(super) waits: bool,
}

pub(super) type Operation = te_fabric::Operation<Ext>;
pub(super) type Operations = te_fabric::Operations<Ext>;

/// A fence that waits for a proof.
#[derive(Clone, Copy, Debug)]
pub(super) struct Fence {
    pub(super) token: Token,
    pub(super) remote: u32,
    pub(super) stamp: u64,
    pub(super) deadline: Instant,
}

/// A subsystem: one incarnation of our own target, or a subsystem of another.
#[derive(Debug)]
pub(super) struct Peer {
    pub(super) nqn: String,
    pub(super) ours: bool,
    pub(super) contact: Contact,
    /// Slices whose region is checked and that have unsent pieces.
    pub(super) pending: Queue,
    /// Remote regions that are attached.
    pub(super) regions: u32,
    /// Remote regions whose check is due.
    pub(super) checks: VecDeque<u32>,
    pub(super) fences: Vec<Fence>,
    pub(super) doubts: Doubts,
    pub(super) association: Option<Association>,
    /// Namespaces with which our key was registered: once, for a client that was fenced must not come back.
    pub(super) registered: Vec<u32>,
    /// Namespaces to which Register was sent and has no response, with the generation of their reservation
    /// before.
    pub(super) registering: Vec<(u32, Option<u32>)>,
    /// It is in the list of peers with work.
    pub(super) listed: bool,
    /// A command of the association waits for room in its queue: the peer has work after the next response.
    pub(super) starved: bool,
}

impl Peer {
    pub(super) fn new(place: &Place, contact: Contact) -> Self {
        Self {
            nqn: place.nqn.clone(),
            ours: place.ours,
            contact,
            pending: Queue::new(),
            regions: 0,
            checks: VecDeque::new(),
            fences: Vec::new(),
            doubts: Doubts::default(),
            association: None,
            registered: Vec::new(),
            registering: Vec::new(),
            listed: false,
            starved: false,
        }
    }

    /// The number of the association that is up.
    pub(super) fn up(&self) -> Option<u64> {
        self.association.as_ref().filter(|association| association.up).map(|association| association.number)
    }
}

/// One association: a controller and its queues.
#[derive(Debug)]
pub(super) struct Association {
    pub(super) number: u64,
    /// The number of the address in the contact.
    pub(super) address: u8,
    pub(super) socket_address: core::net::SocketAddr,
    /// Its queues, by index; the first is the admin queue.
    pub(super) queues: Vec<u32>,
    /// I/O queues that have not answered Connect.
    pub(super) connecting: u16,
    pub(super) up: bool,
    pub(super) life: Life,
    /// When it has to be up.
    pub(super) deadline: Instant,
    pub(super) last_heard: Instant,
    pub(super) keep_alive_at: Instant,
    /// The longest transfer, and the longest data within a command, bytes.
    pub(super) transfer_bytes: u32,
    pub(super) in_capsule_bytes: u32,
    /// Data of the last command whose data is collected.
    pub(super) collected: Box<[u8; IDENTIFY_BYTES]>,
    /// What is being checked.
    pub(super) checking: Option<Checking>,
    /// A reset is on its way.
    pub(super) resetting: bool,
}

/// How far a connection is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    Connecting,
    /// ICResp is awaited.
    Opened,
    /// The response to Connect is awaited.
    Initialized,
    Up,
}

/// One queue: a connection.
#[derive(Debug)]
pub(super) struct QueueConnection {
    pub(super) peer: u32,
    /// The association that it belongs to.
    pub(super) number: u64,
    pub(super) qid: u16,
    pub(super) phase: Phase,
    pub(super) stream: Stream,
    pub(super) commands: Commands,
    /// WRITEs with data to send for which there was no room.
    pub(super) backlog: VecDeque<u16>,
    /// MAXH2CDATA.
    pub(super) data_bytes_max: u32,
    pub(super) no_flow_control: bool,
    pub(super) bytes_in_flight: u64,
    pub(super) interest: te_fabric::Interest,
}
