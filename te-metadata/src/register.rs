//! [`Registers`]: values with versions on etcd, each replaced only at the version that was read.

use std::string::String;
use std::time::Duration;
use std::vec::Vec;

use crate::backoff::Fault;
use crate::error::MetadataError;
use crate::etcd::Etcd;
use crate::key_value::KEY_BYTES_MAX;
use crate::source::{Kind, MetadataSource};

/// Maximum length of a value, bytes.
pub const REGISTER_BYTES_MAX: usize = 64 << 10;
/// Most keys that [`Registers::list`] returns.
pub const REGISTERS_MAX: usize = 64;

/// A value and its version. Version 0: the key does not exist.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Register {
    /// Grows with each change of any key.
    pub version: u64,
    /// Empty when the key does not exist.
    pub value: Vec<u8>,
}

/// What a swap has come to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Swapped {
    /// The value was replaced, and has this version.
    Yes(u64),
    /// The key has another version: this.
    No(Register),
}

/// Keys with versions on etcd. Values stay until they are replaced: there are no leases. Reads and swaps are
/// linearizable. Each call waits at most the timeout per server.
///
/// ```no_run
/// use std::time::Duration;
/// use te_metadata::{Registers, Swapped};
///
/// let etcd = Registers::open(&"etcd://10.0.0.5:2379".parse()?, Duration::from_millis(500))?;
/// let now = etcd.read("snowskin/master/default")?;
/// if let Swapped::No(other) = etcd.swap("snowskin/master/default", now.version, b"mine")? {
///     println!("someone was faster, and has written version {}", other.version);
/// }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Registers {
    server: String,
    etcd: Etcd,
}

impl Registers {
    /// The servers of `source`. Nothing is sent yet.
    ///
    /// # Errors
    /// `Refused` when `source` is not etcd.
    pub fn open(source: &MetadataSource, timeout: Duration) -> Result<Self, MetadataError> {
        let Kind::Etcd(servers) = &source.0 else {
            let reason = "write etcd://HOST:PORT[,HOST:PORT…]".into();
            return Err(MetadataError::Refused { server: std::format!("{source}"), reason });
        };
        let etcd = Etcd::new(servers, timeout);
        Ok(Self { server: etcd.name(), etcd })
    }

    /// Kind and addresses of the servers.
    #[must_use]
    pub fn server(&self) -> &str {
        &self.server
    }

    /// The value of a key.
    ///
    /// # Errors
    /// `Unreachable`, `Refused`; `Garbage` for a value of more than [`REGISTER_BYTES_MAX`] bytes.
    pub fn read(&self, key: &str) -> Result<Register, MetadataError> {
        self.checked(key, &[])?;
        self.etcd.register(key).map_err(|fault| self.error(key, fault))
    }

    /// Replaces the value of a key if its version is still this one; 0: if the key does not exist.
    ///
    /// # Errors
    /// `Unreachable`: the swap may have been carried out, or may be later. `Refused`; `Garbage` as for
    /// [`Self::read`].
    pub fn swap(&self, key: &str, version: u64, value: &[u8]) -> Result<Swapped, MetadataError> {
        self.checked(key, value)?;
        self.etcd.swap_register(key, version, value).map_err(|fault| self.error(key, fault))
    }

    /// Stores a value, whatever was there.
    ///
    /// # Errors
    /// `Unreachable`, `Refused`.
    pub fn put(&self, key: &str, value: &[u8]) -> Result<(), MetadataError> {
        self.checked(key, value)?;
        crate::key_value::Plain::put(&self.etcd, key, value).map_err(|fault| self.error(key, fault))
    }

    /// Keys that begin with `prefix`, and their values: at most [`REGISTERS_MAX`].
    ///
    /// # Errors
    /// `Unreachable`, `Refused`.
    pub fn list(&self, prefix: &str) -> Result<Vec<(String, Vec<u8>)>, MetadataError> {
        self.checked(prefix, &[])?;
        self.etcd.list(prefix, REGISTERS_MAX).map_err(|fault| self.error(prefix, fault))
    }

    fn checked(&self, key: &str, value: &[u8]) -> Result<(), MetadataError> {
        let refused = |reason: String| Err(MetadataError::Refused { server: self.server.clone(), reason });
        if !(1..=KEY_BYTES_MAX).contains(&key.len()) {
            return refused(std::format!("a key has 1 to {KEY_BYTES_MAX} bytes, not {}", key.len()));
        }
        if value.len() > REGISTER_BYTES_MAX {
            let len = value.len();
            return refused(std::format!("a value of {len} bytes is longer than {REGISTER_BYTES_MAX}"));
        }
        Ok(())
    }

    fn error(&self, key: &str, fault: Fault) -> MetadataError {
        let server = self.server.clone();
        match fault {
            Fault::Unreachable(reason) => MetadataError::Unreachable { server, reason },
            Fault::Refused(reason) => MetadataError::Refused { server, reason },
            Fault::Garbage(what) => MetadataError::Garbage { server, key: key.into(), what },
        }
    }
}

impl std::fmt::Debug for Registers {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Registers").field(&self.server).finish()
    }
}
