//! Counters of one transport.

/// Counters since the transport was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Stats {
    /// Payload bytes that this transport's READs have brought.
    pub bytes_read: u64,
    /// Payload bytes that this transport's WRITEs have put in place at targets.
    pub bytes_written: u64,
    /// Payload bytes that hosts have read from this transport's regions or written to them.
    pub bytes_served: u64,
    /// Bytes received on all sockets.
    pub bytes_received: u64,
    /// Bytes sent on all sockets.
    pub bytes_sent: u64,
    /// System calls that received something.
    pub receives: u64,
    /// System calls that sent something.
    pub sends: u64,
    /// READ and WRITE commands sent.
    pub commands: u64,
    /// Commands of hosts that were carried out.
    pub served: u64,
    /// Commands of hosts that were refused.
    pub refused: u64,
    /// Slices that ended with an error, cancelled slices included.
    pub failed: u64,
    /// Data whose digest did not match.
    pub corrupt: u64,
    /// Associations with subsystems that became ready.
    pub associations: u64,
    /// Associations that were lost.
    pub associations_lost: u64,
    /// Controllers, lost with a WRITE in doubt, that were excluded by a cross-controller reset.
    pub fenced_by_reset: u64,
    /// The same, excluded by time.
    pub fenced_by_time: u64,
    /// Cross-controller resets that the target has carried out.
    pub resets_served: u64,
    /// Hosts' connections that were accepted.
    pub accepted: u64,
    /// Hosts' connections that were refused because there was no room.
    pub turned_away: u64,
    /// Hosts' controllers that were ended because they were silent for too long.
    pub expired: u64,
    /// Connections that were closed because the other end broke the protocol.
    pub protocol_errors: u64,
}
