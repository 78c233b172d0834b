//! What a transport has done since it was opened.

/// Counters since the transport was opened, and gauges: those whose description begins with "Now".
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Stats {
    /// Work requests posted.
    pub posted: u64,
    /// Calls that posted them. Each call rings the doorbell once.
    pub doorbells: u64,
    /// Posted work requests that request a completion on success.
    pub signaled: u64,
    /// WRITEs whose bytes were carried inside the work request.
    pub inlined: u64,
    /// Slices that share the work request of the slice before them.
    pub merged: u64,
    /// Completions taken from the completion queue.
    pub completions: u64,
    /// Requests for an event at the next completion.
    pub arms: u64,
    /// Queue pairs with posted work that went to the error state, set by this transport or by the device.
    pub flushes: u64,
    /// Slices that were sent again because the failure or the cancellation of another slice had flushed them.
    pub replays: u64,
    /// Queue pairs made for slices of this transport.
    pub qps_made: u64,
    /// Queue pairs for slices of this transport that were destroyed.
    pub qps_destroyed: u64,
    /// Queue pairs made for peers.
    pub peer_qps_made: u64,
    /// Queue pairs for peers that were destroyed.
    pub peer_qps_destroyed: u64,
    /// Control connections that this transport opened or tried to open.
    pub connections_opened: u64,
    /// Control connections that this transport opened and that have ended.
    pub connections_lost: u64,
    /// Control connections that peers opened.
    pub accepted: u64,
    /// Control connections of peers that were refused, or ended because the peer broke the protocol.
    pub connections_refused: u64,
    /// Frames received and understood on all control connections.
    pub frames: u64,
    /// Fences of this transport that their targets acknowledged.
    pub fences: u64,
    /// Fences of peers that this transport acknowledged.
    pub fences_served: u64,
    /// Requests of peers for remote keys that were refused: wrong key, stale or unknown region.
    pub resolves_refused: u64,
    /// Control connections that this transport closed to connect to another peer (see
    /// [`Config::peers_max`](crate::Config::peers_max)).
    pub evictions: u64,
    /// Asynchronous events of the device about its port, its GIDs or the device.
    pub events: u64,
    /// Now: bytes of slices on queue pairs that neither flushed nor could be destroyed. Their memory is not
    /// handed back.
    pub quarantined_bytes: u64,
    /// Now: bytes registered.
    pub registered_bytes: u64,
}
