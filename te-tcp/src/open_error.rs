//! Why a transport could not be opened.

use core::fmt;
use std::io;

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
    /// Names the step that the system refused: for `map_err`.
    pub(crate) fn step(what: &'static str) -> impl Fn(io::Error) -> Self {
        move |source| Self::System { what, source }
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
