//! Errors of a master. Errors of peers are not here: they are answered and counted, and the master continues.

use std::error::Error as StdError;
use std::fmt;
use std::io;

use crate::journal::JournalError;

/// A field of the configuration has an invalid value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConfigError {
    /// Name of the field.
    pub field: &'static str,
    /// The values that the field may have.
    pub need: &'static str,
}

/// Why a master did not start.
#[derive(Debug)]
#[non_exhaustive]
pub enum BindError {
    /// A field of the configuration has an invalid value.
    Config(ConfigError),
    /// The master cannot listen at an address or a path.
    Listen {
        /// Name of the field with the address.
        field: &'static str,
        /// Value of the field.
        addr: String,
        /// The error of the operating system.
        source: io::Error,
    },
    /// The arbiter of several masters cannot be used.
    Arbiter {
        /// The setting `ha.arbiter`.
        arbiter: String,
        /// Why not.
        source: io::Error,
    },
    /// The operating system gave no file descriptor or thread.
    System(io::Error),
    /// The store in the journal's directory cannot be continued.
    Journal(JournalError),
}

/// Why a running master ended without being stopped.
#[derive(Debug)]
#[non_exhaustive]
pub enum ServeError {
    /// Waiting for sockets failed.
    Poll(io::Error),
    /// The journal cannot be written.
    Journal(JournalError),
    /// The master's thread panicked; the message is on standard error.
    Panicked,
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "configuration: {} {}", self.field, self.need)
    }
}

impl StdError for ConfigError {}

impl fmt::Display for BindError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Config(error) => error.fmt(f),
            Self::Journal(error) => error.fmt(f),
            Self::Arbiter { arbiter, source } => {
                write!(f, "configuration: ha.arbiter {arbiter} cannot be used: {source}")
            }
            Self::Listen { field, addr, source } => {
                write!(
                    f,
                    "cannot listen at {addr}: {source}: choose another `{field}`, or stop the process that listens there"
                )
            }
            Self::System(source) => write!(
                f,
                "the operating system gave no file descriptor or thread: {source}: check its limits"
            ),
        }
    }
}

impl StdError for BindError {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        match self {
            Self::Config(error) => Some(error),
            Self::Journal(error) => Some(error),
            Self::Listen { source, .. } | Self::Arbiter { source, .. } | Self::System(source) => Some(source),
        }
    }
}

impl From<ConfigError> for BindError {
    fn from(error: ConfigError) -> Self {
        Self::Config(error)
    }
}

impl From<io::Error> for BindError {
    fn from(source: io::Error) -> Self {
        Self::System(source)
    }
}

impl fmt::Display for ServeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Journal(error) => error.fmt(f),
            Self::Poll(source) => write!(f, "waiting for sockets failed: {source}"),
            Self::Panicked => {
                f.write_str("the master panicked: report this with the message on standard error")
            }
        }
    }
}

impl StdError for ServeError {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        match self {
            Self::Poll(source) => Some(source),
            Self::Journal(error) => Some(error),
            Self::Panicked => None,
        }
    }
}
