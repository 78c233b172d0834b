//! What can go wrong with a master. Peers' mistakes are not here: they are answered, counted and survived.

use std::error::Error as StdError;
use std::fmt;
use std::io;

/// A field of the configuration cannot be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConfigError {
    /// Which.
    pub field: &'static str,
    /// What it may be.
    pub need: &'static str,
}

/// Why a master did not start.
#[derive(Debug)]
#[non_exhaustive]
pub enum BindError {
    /// The configuration cannot be.
    Config(ConfigError),
    /// An address or a path could not be listened on.
    Listen {
        /// Which field of the configuration.
        field: &'static str,
        /// Its value.
        addr: String,
        /// The system's reason.
        source: io::Error,
    },
    /// The system gave no descriptor or thread.
    System(io::Error),
}

/// Why a master that ran ended other than by being stopped.
#[derive(Debug)]
#[non_exhaustive]
pub enum ServeError {
    /// Waiting for sockets failed.
    Poll(io::Error),
    /// The thread that ran it panicked; its message is on standard error.
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
            Self::Listen { field, addr, source } => {
                write!(f, "{addr}: {source}: choose another `{field}`, or stop what listens there")
            }
            Self::System(source) => write!(f, "the system refused: {source}"),
        }
    }
}

impl StdError for BindError {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        match self {
            Self::Config(error) => Some(error),
            Self::Listen { source, .. } | Self::System(source) => Some(source),
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
            Self::Poll(source) => write!(f, "waiting for sockets failed: {source}"),
            Self::Panicked => {
                f.write_str("the master panicked: report it with what it wrote to standard error")
            }
        }
    }
}

impl StdError for ServeError {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        match self {
            Self::Poll(source) => Some(source),
            Self::Panicked => None,
        }
    }
}
