//! Counters of one transport.

/// Counters since the transport was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Stats {
    /// Payload bytes that this transport's READs have brought.
    pub bytes_read: u64,
    /// Payload bytes that this transport's WRITEs have put in place at targets.
    pub bytes_written: u64,
    /// Payload bytes that peers have read from this transport's regions or written to them.
    pub bytes_served: u64,
    /// Bytes received on all sockets, heads of frames included.
    pub bytes_received: u64,
    /// Bytes sent on all sockets, heads of frames included.
    pub bytes_sent: u64,
    /// System calls that received something.
    pub receives: u64,
    /// System calls that sent something.
    pub sends: u64,
    /// System calls that asked which sockets are ready.
    pub waits: u64,
    /// READ and WRITE frames sent.
    pub frames_sent: u64,
    /// Slices that ended with an error, cancelled slices included.
    pub failed: u64,
    /// Operations of peers that were refused.
    pub refused: u64,
    /// Payloads whose checksum did not match.
    pub corrupt: u64,
    /// Fences of peers that were answered.
    pub fences_served: u64,
    /// Connections that this transport opened or tried to open.
    pub connections_opened: u64,
    /// Connections among these that have ended.
    pub connections_lost: u64,
    /// Peers' connections that were accepted.
    pub accepted: u64,
    /// Peers' connections that were closed because they were idle: to make room for others, or because they
    /// had never carried anything.
    pub evicted: u64,
    /// Peers' connections that were refused because there was no room.
    pub turned_away: u64,
    /// Peers that were given up because they were silent for too long.
    pub peers_lost: u64,
    /// Peers' connections that were closed because they broke the protocol.
    pub protocol_errors: u64,
}

impl Stats {
    /// The sums of the counters of two parts of one transport.
    #[must_use]
    pub(crate) const fn plus(self, other: &Self) -> Self {
        Self {
            bytes_read: self.bytes_read + other.bytes_read,
            bytes_written: self.bytes_written + other.bytes_written,
            bytes_served: self.bytes_served + other.bytes_served,
            bytes_received: self.bytes_received + other.bytes_received,
            bytes_sent: self.bytes_sent + other.bytes_sent,
            receives: self.receives + other.receives,
            sends: self.sends + other.sends,
            waits: self.waits + other.waits,
            frames_sent: self.frames_sent + other.frames_sent,
            failed: self.failed + other.failed,
            refused: self.refused + other.refused,
            corrupt: self.corrupt + other.corrupt,
            fences_served: self.fences_served + other.fences_served,
            connections_opened: self.connections_opened + other.connections_opened,
            connections_lost: self.connections_lost + other.connections_lost,
            accepted: self.accepted + other.accepted,
            evicted: self.evicted + other.evicted,
            turned_away: self.turned_away + other.turned_away,
            peers_lost: self.peers_lost + other.peers_lost,
            protocol_errors: self.protocol_errors + other.protocol_errors,
        }
    }
}
