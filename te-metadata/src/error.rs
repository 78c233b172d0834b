//! Errors of a directory. No message contains a password.

use std::error::Error as StdError;
use std::fmt;
use std::string::String;

/// Why a request to a directory failed.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum MetadataError {
    /// The server does not answer, or not in time.
    Unreachable {
        /// Kind and address of the server.
        server: String,
        /// The system's reason.
        reason: String,
    },
    /// The server answered and refused the request.
    Refused {
        /// Kind and address of the server.
        server: String,
        /// The server's reason.
        reason: String,
    },
    /// What is stored under a segment's key is not an entry.
    Garbage {
        /// Kind and address of the server.
        server: String,
        /// The key.
        key: String,
        /// What is stored there.
        what: &'static str,
    },
    /// An owner with a higher incarnation has the name.
    Superseded {
        /// The segment's name.
        name: String,
        /// The endpoint of that owner.
        endpoint: String,
        /// The incarnation of that owner.
        incarnation: u64,
    },
}

/// An invalid connection string. The message does not repeat it: it may contain a password.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SourceError(pub(crate) &'static str);

impl fmt::Display for MetadataError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unreachable { server, reason } => {
                write!(
                    f,
                    "{server} does not answer ({reason}): check that it runs and that the address is right"
                )
            }
            Self::Refused { server, reason } => write!(f, "{server} refused: {reason}"),
            Self::Garbage { server, key, what } => {
                write!(
                    f,
                    "{server}: {key:?} holds {what}: remove it there, or use another server or database"
                )
            }
            Self::Superseded { name, endpoint, incarnation } => write!(
                f,
                "the segment name {name:?} belongs to a later owner at {endpoint} (incarnation {incarnation}): \
                 stop one of the two, or give it another name"
            ),
        }
    }
}

impl StdError for MetadataError {}

impl fmt::Display for SourceError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "metadata: {}: write p2p, http://HOST:PORT/metadata, redis://[USER:PASSWORD@]HOST:PORT[/DB] or \
             etcd://HOST:PORT[,HOST:PORT…]",
            self.0
        )
    }
}

impl StdError for SourceError {}
