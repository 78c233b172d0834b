//! One error for every fabric: a portable kind, and the number that the fabric's lower layer reported.

use core::fmt;

/// What went wrong, with the same meaning on every fabric.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
#[repr(u8)]
pub enum ErrorKind {
    /// An argument is not valid (zero length, unknown flag, export that does not parse).
    InvalidArgument,
    /// The id refers to nothing: it was never registered or attached, or it has completed already.
    NotFound,
    /// The id is of an earlier generation: its index was used again since.
    Stale,
    /// The range does not lie inside the region or the remote region.
    OutOfRange,
    /// The rights or the key do not allow the operation.
    AccessDenied,
    /// Slices, fences or a peer's operations still use it; poll until they have completed, then try again.
    Busy,
    /// A table or queue of fixed size is full; poll and try again.
    Full,
    /// This transport does not offer the operation (see its `Capabilities`).
    Unsupported,
    /// No transport reaches the remote region.
    Unreachable,
    /// The peer does not answer: it refused or reset the connection, or was silent for longer than the
    /// liveness limit.
    PeerDead,
    /// The peer restarted: its incarnation is not the one that exported the region.
    PeerRestarted,
    /// The peer broke the protocol, or supports another version of it.
    Protocol,
    /// The bytes that arrived are not the bytes that were sent.
    Corrupt,
    /// The rail itself failed (device, link, queue pair), not the peer.
    Rail,
    /// The deadline of the operation passed.
    TimedOut,
    /// The caller cancelled it.
    Canceled,
    /// This process is a fork of the process to which the object of the call belongs.
    Forked,
    /// The target expelled this process (see [`Transport::expel`](crate::Transport::expel)), on every rail
    /// and for good.
    Expelled,
    /// The operating system or the driver refused the call; `code` is its number.
    System,
}

impl ErrorKind {
    /// Whether another rail may succeed after this one failed.
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

    /// Whether the failure counts against the rail rather than against the request or the peer.
    #[must_use]
    pub const fn is_rail_fault(self) -> bool {
        matches!(self, Self::Rail | Self::TimedOut | Self::System | Self::Corrupt)
    }
}

/// A portable kind and the number of the lower layer.
///
/// `{:?}` writes the kind and the sentence: a `main` that returns the error prints that.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Error {
    /// The kind, on which callers decide.
    pub kind: ErrorKind,
    /// The raw `errno`, work-completion status, `CUresult` or NVMe status, for people and logs; 0 where there
    /// is none.
    pub code: i32,
}

impl Error {
    /// An error without a number of a lower layer.
    #[must_use]
    pub const fn new(kind: ErrorKind) -> Self {
        Self { kind, code: 0 }
    }

    /// An error with the number that the lower layer reported.
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
            ErrorKind::InvalidArgument => "invalid argument: check lengths, flags and the export",
            ErrorKind::NotFound => "not found: the id was never registered or attached, or has completed",
            ErrorKind::Stale => "stale id: its index was used again; get the current id",
            ErrorKind::OutOfRange => "out of range: the bytes do not lie inside the region",
            ErrorKind::AccessDenied => "access denied: the export does not grant this, or the key is wrong",
            ErrorKind::Busy => "busy: it is still in use; wait until what uses it has ended, or use another id",
            ErrorKind::Full => "full: poll, then try again",
            ErrorKind::Unsupported => "this transport does not support the operation or this kind of memory",
            ErrorKind::Unreachable => {
                "no transport reaches the peer's region: check the peer's address and the fabrics of both hosts"
            }
            ErrorKind::PeerDead => "the peer is gone: check that its process runs and is reachable",
            ErrorKind::PeerRestarted => "the peer restarted: open its segment again",
            ErrorKind::Protocol => {
                "the peer speaks another protocol or version: run the same release on both hosts"
            }
            ErrorKind::Corrupt => "the bytes that arrived are not the bytes that were sent: check the link",
            ErrorKind::Rail => "the rail failed: check the device and its link",
            ErrorKind::TimedOut => "the deadline passed",
            ErrorKind::Canceled => "cancelled by the caller",
            ErrorKind::Forked => {
                "this process is a fork of the owner of the object: create the object again after the fork, or exec"
            }
            ErrorKind::Expelled => {
                "a peer expelled this process, which did not answer for too long: start a new engine"
            }
            ErrorKind::System => "the system refused the call",
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
