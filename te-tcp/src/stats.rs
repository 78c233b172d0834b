//! What a transport has done so far.

/// Counters since the transport was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Stats {
    /// Payload bytes that our READs brought.
    pub bytes_read: u64,
    /// Payload bytes that our WRITEs put in place.
    pub bytes_written: u64,
    /// Payload bytes that peers read here or wrote here.
    pub bytes_served: u64,
    /// Bytes out of all sockets, heads included.
    pub bytes_received: u64,
    /// Bytes into all sockets, heads included.
    pub bytes_sent: u64,
    /// System calls that received something.
    pub receives: u64,
    /// System calls that sent something.
    pub sends: u64,
    /// System calls that asked who is ready.
    pub waits: u64,
    /// READ and WRITE frames sent.
    pub frames_sent: u64,
    /// Slices that ended with an error, cancelled ones included.
    pub failed: u64,
    /// Operations of peers that were refused.
    pub refused: u64,
    /// Payloads whose checksum did not match.
    pub corrupt: u64,
    /// Fences that peers asked for and got.
    pub fences_served: u64,
    /// Lanes that we opened or tried to open.
    pub lanes_opened: u64,
    /// Of these, how many have ended.
    pub lanes_lost: u64,
    /// Connections of peers that were accepted.
    pub accepted: u64,
    /// Peers' lanes that were ended because they were idle, in favour of others or because they had never carried anything.
    pub retired: u64,
    /// Peers' lanes that were refused because there was no room for them.
    pub turned_away: u64,
    /// Peers that were given up because they were silent.
    pub peers_lost: u64,
    /// Peers' lanes that were ended because they broke the protocol.
    pub protocol_errors: u64,
}
