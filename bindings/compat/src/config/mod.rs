//! Settings as Mooncake's users write them: sizes, the dictionary of `setup`, the JSON file
//! that `MOONCAKE_CONFIG_PATH` names, and the variables `MOONCAKE_*`. Metadata strings are parsed by
//! `te_mooncake`.

mod size;
mod store;

use std::fmt;

pub use size::{parse_bool, parse_size};
pub use store::StoreConfig;

/// Why settings cannot be used.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ConfigError {
    /// A setting that has no default is missing or empty.
    Missing {
        /// The key of the setting.
        key: &'static str,
    },
    /// A value is not one that the setting may have.
    Invalid {
        /// The key of the setting.
        key: String,
        /// The value, at most 80 characters of it.
        value: String,
        /// What the value has to be: a phrase that follows "which is not".
        need: &'static str,
    },
    /// A file cannot be read or is not a JSON object.
    File {
        /// The path of the file.
        path: String,
        /// Why.
        reason: String,
    },
}

/// Characters of a value that an error repeats.
const SHOWN_MAX: usize = 80;

impl ConfigError {
    pub(crate) fn invalid(key: impl Into<String>, value: &str, need: &'static str) -> Self {
        Self::Invalid { key: key.into(), value: value.chars().take(SHOWN_MAX).collect(), need }
    }
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Missing { key } => write!(f, "`{key}` is missing or empty: set it"),
            Self::Invalid { key, value, need } => {
                write!(f, "`{key}` is `{}`, which is not {need}", value.escape_debug())
            }
            Self::File { path, reason } => write!(f, "{path}: {reason}"),
        }
    }
}

impl std::error::Error for ConfigError {}
