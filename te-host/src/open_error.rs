//! Why a transport could not be opened.

use std::{fmt, io};

use te_fabric::ConfigError;

/// Why a transport could not be opened.
#[derive(Debug)]
#[non_exhaustive]
pub enum OpenError {
    /// A setting is out of its limits.
    Config(ConfigError),
    /// The system refused.
    System {
        /// What was tried.
        what: &'static str,
        /// What it said.
        source: io::Error,
    },
}

impl OpenError {
    /// For `map_err`.
    pub(crate) fn system<E: Into<io::Error>>(what: &'static str) -> impl Fn(E) -> Self {
        move |source| Self::System { what, source: source.into() }
    }

    /// For `map_err` of what [`keys`](crate::keys) gives.
    pub(crate) fn randomness(error: te_core::Error) -> Self {
        Self::System { what: "get random numbers", source: io::Error::from_raw_os_error(error.code) }
    }
}

impl fmt::Display for OpenError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Config(error) => write!(f, "setting {error}"),
            Self::System { what, source } => write!(f, "could not {what}: {source}"),
        }
    }
}

impl std::error::Error for OpenError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Config(error) => Some(error),
            Self::System { source, .. } => Some(source),
        }
    }
}
