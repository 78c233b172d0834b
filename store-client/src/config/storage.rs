//! Settings of storage that a node contributes: a range of a namespace of NVMe over TCP.

use std::fmt;
use std::net::SocketAddr;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::NodeConfig;
use super::disks::size_of;
use crate::error::ConnectError;

/// How the place of a namespace begins.
const SCHEME: &str = "nvme://";
/// Where something begins in a namespace is a multiple of this, bytes.
const OFFSET_ALIGNMENT: u64 = 4_096;

/// A range of a namespace of NVMe over TCP that a node contributes in place of memory that it allocates.
/// Clients read and write it past the node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct NodeStorageConfig {
    /// The namespace, as `nvme://ADDR:PORT/NQN/NSID`, with `+OFFSET` (bytes) when the range does not begin
    /// where the namespace does. Clients reach it by the same address. `nvmeof` must be in `engine.fabrics`,
    /// here and at clients. The node has no memory then, and so no disks. Default none: the node allocates
    /// memory.
    pub namespace: Option<NamespacePlace>,
    /// Length of the range, bytes: a multiple of `engine.nvmeof.granule_bytes`, at least two. Its first
    /// granule is overwritten with the node's mark, the others hold objects, and `capacity_bytes` has no
    /// effect. Default 0.
    pub bytes: u64,
    /// The NGUID of the namespace, or its UUID if it has no NGUID: 32 hexadecimal digits, with or without
    /// dashes. Another namespace is not touched. Default none.
    pub nguid: Option<Nguid>,
    /// Whether the namespace may have had an owner before, which has ended, such as this node before it was
    /// restarted. Every other host that is registered with the namespace, clients included, is cut off from
    /// it when the node starts, so no other range of the namespace may be in use. Without it, a node is
    /// refused what another host has reserved. Default false.
    pub take_over: bool,
}

/// Where something is in a namespace of a target: `nvme://10.0.0.1:4420/nqn.2014-08.org.example:box/1+1MiB`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct NamespacePlace {
    /// Where the target listens.
    pub address: SocketAddr,
    /// The NQN of the subsystem.
    pub nqn: String,
    /// The number of the namespace.
    pub nsid: u32,
    /// Where it begins in the namespace, bytes: a multiple of 4,096.
    pub offset: u64,
}

/// A text is not the place of a namespace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnknownNamespace(String);

/// The NGUID of a namespace, or its UUID; never zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Nguid(pub [u8; 16]);

/// A text is not an NGUID.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnknownNguid(String);

impl NodeStorageConfig {
    /// Whether there is any.
    #[must_use]
    pub const fn is_set(&self) -> bool {
        self.namespace.is_some()
    }

    /// Checks what can be checked before the namespace is reached.
    pub(super) fn validate(&self, config: &NodeConfig) -> Result<(), ConnectError> {
        let wrong = |field, need| Err(ConnectError::Config { field, need });
        if !self.is_set() {
            return match self.bytes == 0 && self.nguid.is_none() && !self.take_over {
                true => Ok(()),
                false => {
                    wrong("storage.namespace", "must name the namespace that the other settings are about")
                }
            };
        }
        if !cfg!(feature = "nvmeof") {
            return wrong("storage.namespace", "must be none in a build without the feature `nvmeof`");
        }
        if self.nguid.is_none() {
            let need = "must be the NGUID of the namespace, 32 hexadecimal digits: `nvme id-ns` of nvme-cli shows it";
            return wrong("storage.nguid", need);
        }
        if config.cxl.is_set() {
            return wrong(
                "storage.namespace",
                "cannot be combined with `cxl.pool`: a node contributes one of them",
            );
        }
        if !config.disks.0.is_empty() || !config.shared.0.is_empty() {
            let need = "cannot be combined with `disks` or `shared`: a node with storage has no memory that it could \
                        write to disks";
            return wrong("storage.namespace", need);
        }
        let granule = granule(config);
        let offset = self.namespace.as_ref().map_or(0, |place| place.offset);
        if !offset.is_multiple_of(granule) {
            let need = "must begin at a multiple of `engine.nvmeof.granule_bytes`";
            return wrong("storage.namespace", need);
        }
        let whole = self.bytes.is_multiple_of(granule) && self.bytes >= 2 * granule;
        if !whole || offset.checked_add(self.bytes).is_none_or(|end| end > i64::MAX as u64) {
            let need = "must be a multiple of `engine.nvmeof.granule_bytes` (4096 by default), at least two";
            return wrong("storage.bytes", need);
        }
        Ok(())
    }
}

/// The granule of storage that the node's engine mounts, bytes.
fn granule(config: &NodeConfig) -> u64 {
    #[cfg(feature = "nvmeof")]
    return config.engine.nvmeof.granule_bytes.max(1).into();
    #[cfg(not(feature = "nvmeof"))]
    {
        let _ = config;
        OFFSET_ALIGNMENT
    }
}

impl fmt::Display for UnknownNamespace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{:?} is not the place of a namespace: write nvme://ADDR:PORT/NQN/NSID, and +OFFSET behind it for a part \
             that begins later, in multiples of {OFFSET_ALIGNMENT} bytes",
            self.0
        )
    }
}

impl std::error::Error for UnknownNamespace {}

impl FromStr for NamespacePlace {
    type Err = UnknownNamespace;

    fn from_str(text: &str) -> Result<Self, UnknownNamespace> {
        let text = text.trim();
        let parts = || {
            let (address, name) = text.strip_prefix(SCHEME)?.split_once('/')?;
            let (nqn, number) = name.rsplit_once('/')?;
            let (nsid, offset) = number.split_once('+').unwrap_or((number, "0"));
            let this = Self {
                address: address.parse().ok()?,
                nqn: nqn.to_owned(),
                nsid: nsid.parse().ok()?,
                offset: size_of(offset)?,
            };
            let valid = this.address.port() != 0
                && nqn.starts_with("nqn.")
                && this.nsid != 0
                && this.offset.is_multiple_of(OFFSET_ALIGNMENT);
            valid.then_some(this)
        };
        parts().ok_or_else(|| UnknownNamespace(text.into()))
    }
}

impl fmt::Display for NamespacePlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { address, nqn, nsid, offset } = self;
        write!(f, "{SCHEME}{address}/{nqn}/{nsid}")?;
        if *offset > 0 { write!(f, "+{offset}") } else { Ok(()) }
    }
}

impl TryFrom<String> for NamespacePlace {
    type Error = UnknownNamespace;

    fn try_from(text: String) -> Result<Self, UnknownNamespace> {
        text.parse()
    }
}

impl From<NamespacePlace> for String {
    fn from(place: NamespacePlace) -> Self {
        place.to_string()
    }
}

impl fmt::Display for UnknownNguid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} is not an NGUID: write 32 hexadecimal digits, which are not all zero", self.0)
    }
}

impl std::error::Error for UnknownNguid {}

impl FromStr for Nguid {
    type Err = UnknownNguid;

    fn from_str(text: &str) -> Result<Self, UnknownNguid> {
        let digits: Vec<u8> = text.trim().bytes().filter(|byte| *byte != b'-').collect();
        let parts = || {
            let number = std::str::from_utf8(&digits).ok()?;
            let valid = digits.len() == 32 && digits.iter().all(u8::is_ascii_hexdigit);
            u128::from_str_radix(number, 16).ok().filter(|number| valid && *number != 0)
        };
        parts().map(|number| Self(number.to_be_bytes())).ok_or_else(|| UnknownNguid(text.into()))
    }
}

impl fmt::Display for Nguid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", u128::from_be_bytes(self.0))
    }
}

impl TryFrom<String> for Nguid {
    type Error = UnknownNguid;

    fn try_from(text: String) -> Result<Self, UnknownNguid> {
        text.parse()
    }
}

impl From<Nguid> for String {
    fn from(nguid: Nguid) -> Self {
        nguid.to_string()
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    const PLACE: &str = "nvme://10.0.0.1:4420/nqn.2014-08.org.example:box/1+1MiB";

    #[test]
    fn namespaces_and_their_names_are_read_as_they_are_written() {
        let place: NamespacePlace = PLACE.parse().unwrap();
        assert_eq!((place.nsid, place.offset), (1, 1 << 20));
        assert_eq!(place.to_string().parse(), Ok(place));
        for wrong in
            ["", "10.0.0.1:4420/nqn.x/1", "nvme://box:4420/nqn.x/1", "nvme://10.0.0.1:4420/nqn.x/1+512"]
        {
            let error = wrong.parse::<NamespacePlace>().unwrap_err().to_string();
            assert!(error.contains("nvme://ADDR:PORT/NQN/NSID") && error.contains(wrong), "{error}");
        }
        let plain: Nguid = "0123456789abcdef0123456789ABCDEF".parse().unwrap();
        assert_eq!("01234567-89ab-cdef-0123-456789abcdef".parse(), Ok(plain));
        assert_eq!(plain.0[..3], [0x01, 0x23, 0x45]);
        assert_eq!(plain.to_string(), "0123456789abcdef0123456789abcdef");
        for wrong in ["", "0123", "+123456789abcdef0123456789abcdef", "00000000000000000000000000000000"] {
            assert!(
                wrong.parse::<Nguid>().unwrap_err().to_string().contains("32 hexadecimal digits"),
                "{wrong}"
            );
        }
    }

    #[test]
    #[cfg(not(feature = "nvmeof"))]
    fn storage_without_the_feature_is_refused_with_its_name() {
        let mut node = NodeConfig::new("a", SocketAddr::from(([127, 0, 0, 1], 1)).into(), 1 << 20);
        node.storage.namespace = PLACE.parse().ok();
        let refused = node.validate().map_err(|error| error.to_string());
        assert!(
            refused.is_err_and(|error| error.contains("storage.namespace") && error.contains("`nvmeof`"))
        );
    }
}
