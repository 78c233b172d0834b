//! The address of a master.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::error::RpcError;

/// The address of a master: `host:port`, or `unix:/path/of/socket`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Address {
    /// A host, by name or IP address, and a port.
    Tcp(String),
    /// A Unix socket on this host.
    Unix(PathBuf),
}

impl FromStr for Address {
    type Err = RpcError;

    fn from_str(text: &str) -> Result<Self, RpcError> {
        if let Some(path) = text.strip_prefix("unix:") {
            if path.is_empty() {
                return Err(RpcError::Address { text: text.into() });
            }
            return Ok(Self::Unix(path.into()));
        }
        match text.rsplit_once(':') {
            Some((host, port)) if !host.is_empty() && port.parse::<u16>().is_ok() => {
                Ok(Self::Tcp(text.into()))
            }
            _ => Err(RpcError::Address { text: text.into() }),
        }
    }
}

/// The address at which `snowskin master` listens by default.
impl Default for Address {
    fn default() -> Self {
        Self::Tcp("127.0.0.1:50051".into())
    }
}

impl TryFrom<String> for Address {
    type Error = RpcError;

    fn try_from(text: String) -> Result<Self, RpcError> {
        text.parse()
    }
}

impl From<Address> for String {
    fn from(address: Address) -> Self {
        address.to_string()
    }
}

impl From<std::net::SocketAddr> for Address {
    fn from(addr: std::net::SocketAddr) -> Self {
        Self::Tcp(addr.to_string())
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(addr) => f.write_str(addr),
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_as_they_are_written() {
        for text in ["127.0.0.1:50051", "[::1]:7", "store.example:80", "unix:/run/snowskin.sock"] {
            assert_eq!(text.parse::<Address>().unwrap().to_string(), text);
        }
        for text in ["", "unix:", "host", "host:", ":80", "host:99999"] {
            assert!(text.parse::<Address>().is_err(), "{text}");
        }
    }
}
