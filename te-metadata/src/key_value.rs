//! [`KeyValue`]: plain keys and values on the same servers, without versions and times to live.

use std::boxed::Box;
use std::string::String;
use std::time::Duration;
use std::vec::Vec;

use crate::backoff::{Fault, Guard};
use crate::error::MetadataError;
use crate::source::{Kind, MetadataSource};

/// Maximum length of a key, bytes.
pub const KEY_BYTES_MAX: usize = 1024;
/// Maximum length of a value that [`KeyValue::put`] sends, bytes.
pub const VALUE_BYTES_MAX: usize = 64 << 20;

/// A server that stores values under keys, without comparing.
pub(crate) trait Plain: Send + Sync {
    /// The value; longer ones than `bytes_max` are garbage.
    fn get(&self, key: &str, bytes_max: usize) -> Result<Option<Vec<u8>>, Fault>;
    fn put(&self, key: &str, value: &[u8]) -> Result<(), Fault>;
    /// Whether the key was there.
    fn delete(&self, key: &str) -> Result<bool, Fault>;
}

/// Keys and values on a server over HTTP, Redis or etcd, as other systems keep them there: Mooncake's engines
/// store their descriptors so. A value is replaced, also one of another writer, and stays until it is
/// deleted. Threads share it; each call opens another connection, and waits at most the timeout.
///
/// HTTP is `GET`, `PUT` and `DELETE` of `PATH?key=KEY`, the key percent-encoded; only status 200 is success,
/// and 404 says that the key does not exist. Redis is `GET`, `SET` and `DEL`. etcd is its v3 keys.
///
/// ```no_run
/// use std::time::Duration;
/// use te_metadata::KeyValue;
///
/// let server = KeyValue::open(&"http://10.0.0.5:8080/metadata".parse()?, Duration::from_secs(3))?;
/// server.put("mooncake/ram/10.0.0.7:15000", b"{}")?;
/// assert_eq!(server.get("mooncake/ram/10.0.0.7:15000", 1 << 20)?.as_deref(), Some(&b"{}"[..]));
/// assert!(server.delete("mooncake/ram/10.0.0.7:15000")?);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct KeyValue {
    guard: Guard,
    plain: Box<dyn Plain>,
}

impl KeyValue {
    /// The server of `source`. Nothing is sent yet. `timeout` is for one request to one server.
    ///
    /// # Errors
    /// `Refused` when `source` names no server (`p2p`), or when this build lacks that kind of server.
    pub fn open(source: &MetadataSource, timeout: Duration) -> Result<Self, MetadataError> {
        let refused =
            |reason: &str| Err(MetadataError::Refused { server: "this build".into(), reason: reason.into() });
        if let Some(missing) = source.missing_feature() {
            return refused(missing);
        }
        let (server, plain): (String, Box<dyn Plain>) = match &source.0 {
            Kind::Http { server, path } => {
                let http = crate::http::Http::new(server, path, timeout);
                (http.name(), Box::new(http))
            }
            #[cfg(feature = "redis")]
            Kind::Redis(source) => {
                let redis = crate::redis::Redis::new(source, timeout);
                (redis.name(), Box::new(redis))
            }
            #[cfg(feature = "etcd")]
            Kind::Etcd(servers) => {
                let etcd = crate::etcd::Etcd::new(servers, timeout);
                (etcd.name(), Box::new(etcd))
            }
            _ => return refused("the source names no server: write its address"),
        };
        Ok(Self { guard: Guard::new(server), plain })
    }

    /// Kind and address of the server, without passwords: `redis at 10.0.0.5:6379`.
    #[must_use]
    pub fn server(&self) -> &str {
        &self.guard.server
    }

    /// The value of `key`; `None`: the key does not exist.
    ///
    /// # Errors
    /// `Garbage` for a value of more than `bytes_max` or [`VALUE_BYTES_MAX`] bytes; `Unreachable`, `Refused`.
    pub fn get(&self, key: &str, bytes_max: usize) -> Result<Option<Vec<u8>>, MetadataError> {
        self.checked(key)?;
        self.guard.request(key, || self.plain.get(key, bytes_max.min(VALUE_BYTES_MAX)))
    }

    /// Stores `value` under `key`.
    ///
    /// # Errors
    /// `Refused` for a value of more than [`VALUE_BYTES_MAX`] bytes, too; `Unreachable`.
    pub fn put(&self, key: &str, value: &[u8]) -> Result<(), MetadataError> {
        self.checked(key)?;
        if value.len() > VALUE_BYTES_MAX {
            return self.refuse(std::format!(
                "a value of {} bytes is longer than {VALUE_BYTES_MAX}: store less under one key",
                value.len()
            ));
        }
        self.guard.request(key, || self.plain.put(key, value))
    }

    /// Deletes `key`. Returns whether it was there.
    ///
    /// # Errors
    /// `Unreachable`, `Refused`.
    pub fn delete(&self, key: &str) -> Result<bool, MetadataError> {
        self.checked(key)?;
        self.guard.request(key, || self.plain.delete(key))
    }

    fn checked(&self, key: &str) -> Result<(), MetadataError> {
        if (1..=KEY_BYTES_MAX).contains(&key.len()) {
            return Ok(());
        }
        self.refuse(std::format!("a key has 1 to {KEY_BYTES_MAX} bytes, not {}", key.len()))
    }

    fn refuse(&self, reason: String) -> Result<(), MetadataError> {
        Err(MetadataError::Refused { server: self.guard.server.clone(), reason })
    }
}

impl std::fmt::Debug for KeyValue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("KeyValue").field(&self.guard.server).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_and_values_have_limits_and_nothing_is_sent_beyond_them() {
        // No server listens there: a request would be `Unreachable`.
        let server =
            KeyValue::open(&"http://127.0.0.1:1/m".parse().unwrap(), Duration::from_secs(5)).unwrap();
        for key in ["", &"k".repeat(KEY_BYTES_MAX + 1)] {
            assert!(matches!(server.get(key, 9), Err(MetadataError::Refused { .. })));
            assert!(matches!(server.put(key, b"v"), Err(MetadataError::Refused { .. })));
            assert!(matches!(server.delete(key), Err(MetadataError::Refused { .. })));
        }
        let long = vec![0; VALUE_BYTES_MAX + 1];
        let error = server.put("k", &long).unwrap_err();
        assert!(std::string::ToString::to_string(&error).contains("store less"), "{error}");
        assert!(matches!(server.get("k", 9), Err(MetadataError::Unreachable { .. })));
    }

    #[test]
    fn names_that_are_addresses_are_no_server() {
        let error = KeyValue::open(&MetadataSource::default(), Duration::from_secs(5)).unwrap_err();
        assert!(matches!(error, MetadataError::Refused { .. }), "{error}");
    }
}
