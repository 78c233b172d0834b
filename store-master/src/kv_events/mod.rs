//! Publishes KV events: which objects of the store a reader finds, and on which tier, for routers and
//! schedulers.
//!
//! ```text
//!   serving thread                              publishing thread
//!   master ─▶ KvEvents ─▶ Feed ── batches ────▶ Publisher ─┬─▶ PUB     every follower, as it happens
//!                          ▲                      │ buffer  └─▶ ROUTER  who asks for what it missed
//!                          └── "tell everything" ─┘
//! ```
//!
//! The messages are those of Mooncake's publisher (`kv_event_publisher.cpp`: empty topic, number as 8 bytes
//! in big endian, MessagePack), and are asked for again as vLLM's are (`vllm/distributed/kv_events.py`:
//! ROUTER, four frames per message, an end marker). What is different:
//!
//! * *Epochs.* The number of the first message of an epoch is the wall time in ms, times 2^20; it begins with
//!   the event `cleared`. A master that takes over, or that was started again, so continues with numbers that
//!   no follower has seen, and a follower never takes messages of one epoch for those of another.
//! * *Snapshots.* Who asks for a message that is not in the buffer any more is answered with every object, in
//!   messages of which the first begins with `cleared` and the last has the number of the latest message.
//!   Nothing before the first one is needed.
//! * *Nothing is told twice, and nothing is forgotten*: see [`store_core::KvEvents`].
//!
//! A follower that reads too slowly misses messages, and finds that by their numbers.

mod feed;
mod publisher;

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use serde::{Deserialize, Serialize};

use crate::error::ConfigError;

pub(crate) use feed::Feed;
pub(crate) use publisher::Publisher;

/// Longest name of a store, bytes.
const BACKEND_BYTES_MAX: usize = 256;

/// Settings of the publisher of KV events.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[non_exhaustive]
pub struct KvEventsConfig {
    /// Address at which followers (routers, schedulers) subscribe to KV events with a ZeroMQ SUB socket:
    /// which objects a reader finds, in the format of Mooncake's store. Every peer that reaches it learns the
    /// keys of every tenant. None: no events. Default none.
    pub listen: Option<SocketAddr>,
    /// Address at which followers ask for events that they missed, with a ZeroMQ DEALER or REQ socket; none:
    /// the port after that of `listen`. Default none.
    pub replay_listen: Option<SocketAddr>,
    /// Name of this store in its events, 1 to 256 bytes. Default `snowskin`.
    pub backend_id: String,
    /// Limit on the messages that are kept for followers that missed some, MiB, at least 1. A follower that
    /// missed more is told every object. Default 64.
    pub buffer_mib: u32,
    /// Most followers at a time, at least 1; further ones are refused. Default 64.
    pub followers_max: u32,
}

impl Default for KvEventsConfig {
    fn default() -> Self {
        Self {
            listen: None,
            replay_listen: None,
            backend_id: "snowskin".into(),
            buffer_mib: 64,
            followers_max: 64,
        }
    }
}

impl KvEventsConfig {
    pub(crate) fn check(&self) -> Result<(), ConfigError> {
        if self.backend_id.is_empty() || self.backend_id.len() > BACKEND_BYTES_MAX {
            return Err(ConfigError { field: "kv_events.backend_id", need: "must have 1 to 256 bytes" });
        }
        if self.listen.is_none() && self.replay_listen.is_some() {
            let need = "needs kv_events.listen: without it there are no events to ask for again";
            return Err(ConfigError { field: "kv_events.replay_listen", need });
        }
        if self.listen.is_some() && self.replays().is_none() {
            let need = "must be set: there is no port after 65535, the port of kv_events.listen";
            return Err(ConfigError { field: "kv_events.replay_listen", need });
        }
        Ok(())
    }

    /// Where followers ask again: see `replay_listen`.
    pub(crate) fn replays(&self) -> Option<SocketAddr> {
        let listen = self.listen?;
        let next = match listen.port() {
            // The system chooses both.
            0 => Some(0),
            port => port.checked_add(1),
        };
        self.replay_listen.or_else(|| next.map(|port| SocketAddr::new(listen.ip(), port)))
    }
}

/// What the two threads share.
#[derive(Debug, Default)]
pub(crate) struct Shared {
    /// Bytes of events that wait for the publishing thread.
    queued_bytes: AtomicU64,
    /// A follower needs every object.
    snapshot_wanted: AtomicBool,
    events_total: AtomicU64,
    messages_total: AtomicU64,
    epochs_total: AtomicU64,
    followers: AtomicU64,
    refused_total: AtomicU64,
    replays_total: AtomicU64,
    snapshots_total: AtomicU64,
    missed_total: AtomicU64,
    objects: AtomicU64,
}

/// Counters and gauges.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct KvEventsStats {
    pub(crate) events_total: u64,
    pub(crate) messages_total: u64,
    pub(crate) epochs_total: u64,
    pub(crate) followers: u64,
    pub(crate) refused_total: u64,
    pub(crate) replays_total: u64,
    pub(crate) snapshots_total: u64,
    pub(crate) missed_total: u64,
    pub(crate) objects: u64,
}

impl Shared {
    fn add(counter: &AtomicU64, more: u64) {
        counter.fetch_add(more, Ordering::Relaxed);
    }

    fn stats(&self) -> KvEventsStats {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        KvEventsStats {
            events_total: read(&self.events_total),
            messages_total: read(&self.messages_total),
            epochs_total: read(&self.epochs_total),
            followers: read(&self.followers),
            refused_total: read(&self.refused_total),
            replays_total: read(&self.replays_total),
            snapshots_total: read(&self.snapshots_total),
            missed_total: read(&self.missed_total),
            objects: read(&self.objects),
        }
    }
}
