//! What can go wrong with a directory. No message holds a password.

use std::error::Error as StdError;
use std::fmt;
use std::string::String;

/// Why a directory did not do what it was asked.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum MetadataError {
    /// It does not answer, or not in time.
    Unreachable {
        /// Kind and address.
        server: String,
        /// What the system said.
        reason: String,
    },
    /// It answers, and will not.
    Refused {
        /// Kind and address.
        server: String,
        /// What it said.
        reason: String,
    },
    /// What it keeps under a segment's key is not an entry.
    Garbage {
        /// Kind and address.
        server: String,
        /// Where.
        key: String,
        /// What it is.
        what: &'static str,
    },
    /// A later owner has the name.
    Superseded {
        /// The segment's name.
        name: String,
        /// Where its owner is.
        endpoint: String,
        /// Which life of it.
        incarnation: u64,
    },
}

/// A connection string that cannot be. What it was is not repeated: it may hold a password.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SourceError(pub(super) &'static str);

impl fmt::Display for MetadataError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unreachable { server, reason } => {
                write!(f, "{server} does not answer ({reason}): is it running, and the address right?")
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
