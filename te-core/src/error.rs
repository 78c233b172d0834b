//! One error for every fabric: a portable kind and the fabric's own number.

use core::fmt;

/// What went wrong, in words that mean the same on every fabric.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
#[repr(u8)]
pub enum ErrorKind {
    /// An argument makes no sense (zero length, unknown flag, blob that does not parse).
    InvalidArgument,
    /// The id names nothing: never registered, never attached, or already completed.
    NotFound,
    /// The id was reused: its generation is not the current one.
    Stale,
    /// The range does not lie inside the region or segment.
    OutOfRange,
    /// The rights or the key do not allow this.
    AccessDenied,
    /// Something still refers to it; poll until that has completed, then try again.
    Busy,
    /// A table or queue of fixed size is full; poll and try again.
    Full,
    /// This transport does not offer the operation (see its `Capabilities`).
    Unsupported,
    /// No transport reaches the segment.
    Unreachable,
    /// The peer is gone: refused, reset, or silent for longer than its liveness limit.
    PeerDead,
    /// The peer restarted: its incarnation is not the one that exported the segment.
    PeerRestarted,
    /// The peer broke the protocol, or speaks another version of it.
    Protocol,
    /// The bytes that arrived are not the bytes that were sent.
    Corrupt,
    /// The rail itself failed (device, link, queue pair), not the peer.
    Rail,
    /// The operation ran into its deadline.
    TimedOut,
    /// The caller cancelled it.
    Canceled,
    /// This process is a fork of the one that the call's subject belongs to.
    Forked,
    /// The target cut this process off (see [`Transport::expel`](crate::Transport::expel)), on every rail and for good.
    Expelled,
    /// The operating system or the driver refused; `code` is its number.
    System,
}

impl ErrorKind {
    /// Whether another rail may succeed where this one failed.
    #[must_use]
    pub const fn is_retryable_elsewhere(self) -> bool {
        matches!(
            self,
            Self::PeerDead
                | Self::Unreachable
                | Self::Rail
                | Self::TimedOut
                | Self::Protocol
                | Self::Corrupt
                | Self::System
        )
    }

    /// Whether the failure speaks against the rail rather than against the request or the peer.
    #[must_use]
    pub const fn is_rail_fault(self) -> bool {
        matches!(self, Self::Rail | Self::TimedOut | Self::System | Self::Corrupt)
    }
}

/// A portable kind and the raw number behind it.
///
/// `{:?}` gives the kind and the sentence: it is what a `main` that ends with an error prints.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Error {
    /// What to decide on.
    pub kind: ErrorKind,
    /// Raw `errno`, work-completion status, `CUresult` or NVMe status; 0 where there is none. For people and logs.
    pub code: i32,
}

impl Error {
    /// An error that no lower layer has numbered.
    #[must_use]
    pub const fn new(kind: ErrorKind) -> Self {
        Self { kind, code: 0 }
    }

    /// An error with the number that the lower layer gave.
    #[must_use]
    pub const fn with_code(kind: ErrorKind, code: i32) -> Self {
        Self { kind, code }
    }
}

impl From<ErrorKind> for Error {
    fn from(kind: ErrorKind) -> Self {
        Self::new(kind)
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.kind {
            ErrorKind::InvalidArgument => "invalid argument: check lengths, flags and the exported blob",
            ErrorKind::NotFound => "not found: the id was never registered or attached, or has completed",
            ErrorKind::Stale => "stale id: it was reused, get a new one",
            ErrorKind::OutOfRange => "out of range: the bytes do not lie inside the region or segment",
            ErrorKind::AccessDenied => "access denied: the export does not grant this, or the key is wrong",
            ErrorKind::Busy => "busy: wait for what still refers to it, then try again",
            ErrorKind::Full => "full: poll, then try again",
            ErrorKind::Unsupported => "not offered by this transport",
            ErrorKind::Unreachable => {
                "no transport reaches this segment: check the peer's address and both sides' fabrics"
            }
            ErrorKind::PeerDead => "the peer is gone: check that its process runs and is reachable",
            ErrorKind::PeerRestarted => "the peer restarted: open the segment again",
            ErrorKind::Protocol => {
                "the peer speaks another protocol or version: run the same release on both sides"
            }
            ErrorKind::Corrupt => "the bytes that arrived are not the bytes that were sent: check the link",
            ErrorKind::Rail => "the rail failed: check the device and its link",
            ErrorKind::TimedOut => "the deadline passed",
            ErrorKind::Canceled => "cancelled by the caller",
            ErrorKind::Forked => {
                "this process is a fork of the one that this belongs to: make it anew after the fork, or exec"
            }
            ErrorKind::Expelled => {
                "this process was cut off: it was stopped for longer than its peers wait; start a new engine"
            }
            ErrorKind::System => "the system refused",
        })?;
        if self.code != 0 { write!(f, " (code {})", self.code) } else { Ok(()) }
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}: {self}", self.kind)
    }
}

impl core::error::Error for Error {}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::format;

    #[test]
    fn an_error_that_main_returns_is_a_sentence() {
        let error = Error::with_code(ErrorKind::PeerDead, 111);
        assert_eq!(
            format!("{error:?}"),
            "PeerDead: the peer is gone: check that its process runs and is reachable (code 111)"
        );
        assert_eq!(format!("{:?}", Error::new(ErrorKind::Full)), "Full: full: poll, then try again");
    }
}
