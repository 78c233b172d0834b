//! Why a transport could not be opened.

use core::fmt;
use std::io;

use crate::ConfigError;

/// Why a transport could not be opened.
#[derive(Debug)]
#[non_exhaustive]
pub enum OpenError {
    /// A setting is outside its range.
    Config(ConfigError),
    /// The system refused a step.
    System {
        /// What was tried, to be read after "could not".
        what: &'static str,
        /// The system's error.
        source: io::Error,
    },
}

impl OpenError {
    /// Makes the error of a step that the system refused, for `map_err`.
    pub fn step<E: Into<io::Error>>(what: &'static str) -> impl Fn(E) -> Self {
        move |source| Self::System { what, source: source.into() }
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::error::Error;

    #[test]
    fn an_error_names_the_setting_or_the_step_and_its_cause() {
        let config = OpenError::Config(ConfigError { field: "depth", value: 9, min: 1, max: 8 });
        assert_eq!(config.to_string(), "setting depth is 9: set it to a value from 1 to 8");
        let refused = OpenError::step("listen")(io::Error::from(io::ErrorKind::AddrInUse));
        assert!(refused.to_string().starts_with("could not listen: "), "{refused}");
        assert!(config.source().is_some() && refused.source().is_some());
    }
}
