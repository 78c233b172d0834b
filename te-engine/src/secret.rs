//! [`Secret`]: bytes that only the processes of one cluster know.

use std::fmt;

use te_host::keys::same_bytes;

/// A shared secret. It is never printed, and is compared in a time that does not depend on where two secrets
/// differ.
#[derive(Clone, Default)]
pub struct Secret(Box<[u8]>);

impl Secret {
    /// A secret of these bytes. Without bytes, there is no secret.
    #[must_use]
    pub fn new(bytes: &[u8]) -> Self {
        Self(bytes.into())
    }

    /// Whether there is a secret.
    #[must_use]
    pub fn is_set(&self) -> bool {
        !self.0.is_empty()
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.0
    }
}

impl PartialEq for Secret {
    fn eq(&self, other: &Self) -> bool {
        same_bytes(&self.0, &other.0)
    }
}

impl Eq for Secret {}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.is_set() { "Secret(set)" } else { "Secret(none)" })
    }
}

impl From<&str> for Secret {
    fn from(text: &str) -> Self {
        Self::new(text.as_bytes())
    }
}
