//! What a transport has done since it was opened.

/// Counters since the transport was opened, and a few gauges.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Work requests posted.
    pub posted: u64,
    /// Calls that posted them: each rings the doorbell once.
    pub doorbells: u64,
    /// Work requests that were to report success.
    pub signaled: u64,
    /// WRITEs that travelled inside their work request.
    pub inlined: u64,
    /// Slices that rode in the work request of the slice before them.
    pub merged: u64,
    /// Completions taken from the completion queue.
    pub completions: u64,
    /// Calls that asked for an event at the next completion.
    pub arms: u64,
    /// Queue pairs that were put into error, by us or by the device, with something posted.
    pub flushes: u64,
    /// Slices that were sent again, because the failure or cancel of another slice had flushed them.
    pub replays: u64,
    /// Our own queue pairs that were made and destroyed.
    pub qps_made: u64,
    /// See `qps_made`.
    pub qps_destroyed: u64,
    /// Queue pairs that were made for peers, and destroyed.
    pub peer_qps_made: u64,
    /// See `peer_qps_made`.
    pub peer_qps_destroyed: u64,
    /// Control connections that we opened, and that ended.
    pub channels_opened: u64,
    /// See `channels_opened`.
    pub channels_lost: u64,
    /// Control connections that peers opened.
    pub channels_accepted: u64,
    /// Peers' control connections that we refused.
    pub channels_refused: u64,
    /// Frames of the control connection that were understood, peers' and ours.
    pub frames: u64,
    /// Fences that we asked for and that were acknowledged.
    pub fences: u64,
    /// Peers' fences that we acknowledged.
    pub peer_fences: u64,
    /// Peers' questions about regions that were refused: wrong key, stale, unknown.
    pub resolves_refused: u64,
    /// Endpoints whose connection was given up for another's.
    pub evictions: u64,
    /// The device's events about its port, its GIDs or itself.
    pub events: u64,
    /// Now: bytes of slices on queue pairs that would neither flush nor be destroyed. Their memory is not
    /// handed back.
    pub quarantined_bytes: u64,
    /// Now: bytes registered.
    pub registered_bytes: u64,
}
