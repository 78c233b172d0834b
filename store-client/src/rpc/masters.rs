//! [`Masters`]: where the masters of a store are.

use std::fmt;
use std::net::SocketAddr;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use store_core::message::MASTERS_MAX;

use super::Address;
use crate::error::RpcError;

/// What an address of etcd begins with.
const ETCD: &str = "etcd://";
/// Most servers of one etcd cluster, and length limit of a cluster's name, bytes.
const SERVERS_MAX: usize = 16;
const CLUSTER_BYTES_MAX: usize = 128;

/// Where the masters of a store are: one address, several separated by commas, or the etcd cluster in which
/// the leader is published.
///
/// ```text
///   10.0.0.1:50051                            one master
///   10.0.0.1:50051,10.0.0.2:50051             several: one of them leads, the others name it
///   unix:/run/snowskin.sock                   a socket on this host
///   etcd://10.0.0.5:2379,10.0.0.6:2379/NAME   the masters of the cluster NAME, in etcd
/// ```
///
/// ```
/// use store_client::{Address, Masters};
///
/// let masters: Masters = "10.0.0.1:50051, 10.0.0.2:50051".parse()?;
/// assert_eq!(masters.to_string(), "10.0.0.1:50051,10.0.0.2:50051");
/// let one = Masters::from("10.0.0.1:50051".parse::<Address>()?);
/// assert_eq!(one.to_string(), "10.0.0.1:50051");
/// # Ok::<(), store_client::RpcError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Masters(Source);

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Source {
    /// One to [`MASTERS_MAX`], each once.
    List(Vec<Address>),
    Etcd(Directory),
}

/// Where masters publish themselves.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Directory {
    /// The servers of etcd, `host:port`.
    pub(super) servers: Vec<String>,
    /// The name of the store's cluster.
    pub(super) cluster: String,
}

impl Masters {
    /// The addresses, if they are listed here; none for etcd.
    #[must_use]
    pub fn listed(&self) -> &[Address] {
        match &self.0 {
            Source::List(list) => list,
            Source::Etcd(_) => &[],
        }
    }

    /// The address, if there is one alone.
    #[must_use]
    pub fn lone(&self) -> Option<&Address> {
        match self.listed() {
            [address] => Some(address),
            _ => None,
        }
    }

    pub(super) const fn directory(&self) -> Option<&Directory> {
        match &self.0 {
            Source::List(_) => None,
            Source::Etcd(directory) => Some(directory),
        }
    }
}

impl FromStr for Masters {
    type Err = RpcError;

    fn from_str(text: &str) -> Result<Self, RpcError> {
        let wrong = || RpcError::Address { text: text.into() };
        if let Some(rest) = text.trim().strip_prefix(ETCD) {
            return directory(rest).map(|it| Self(Source::Etcd(it))).ok_or_else(wrong);
        }
        let mut list: Vec<Address> = Vec::new();
        for part in text.split(',') {
            let address: Address = part.trim().parse().map_err(|_| wrong())?;
            if !list.contains(&address) {
                list.push(address);
            }
        }
        if list.len() <= MASTERS_MAX { Ok(Self(Source::List(list))) } else { Err(wrong()) }
    }
}

/// The address at which `snowskin master` listens by default.
impl Default for Masters {
    fn default() -> Self {
        Address::default().into()
    }
}

impl From<Address> for Masters {
    fn from(address: Address) -> Self {
        Self(Source::List(vec![address]))
    }
}

impl From<SocketAddr> for Masters {
    fn from(addr: SocketAddr) -> Self {
        Address::from(addr).into()
    }
}

impl TryFrom<String> for Masters {
    type Error = RpcError;

    fn try_from(text: String) -> Result<Self, RpcError> {
        text.parse()
    }
}

impl From<Masters> for String {
    fn from(masters: Masters) -> Self {
        masters.to_string()
    }
}

impl fmt::Display for Masters {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Source::List(list) => {
                for (at, address) in list.iter().enumerate() {
                    write!(f, "{}{address}", if at == 0 { "" } else { "," })?;
                }
                Ok(())
            }
            Source::Etcd(Directory { servers, cluster }) => {
                write!(f, "{ETCD}{}/{cluster}", servers.join(","))
            }
        }
    }
}

fn directory(rest: &str) -> Option<Directory> {
    let (servers, cluster) = rest.split_once('/')?;
    let servers: Vec<String> = servers.split(',').map(|server| server.trim().to_owned()).collect();
    let is_server = |server: &String| matches!(server.parse(), Ok(Address::Tcp(_)));
    let in_name = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    let named = (1..=CLUSTER_BYTES_MAX).contains(&cluster.len()) && cluster.bytes().all(in_name);
    (named && servers.len() <= SERVERS_MAX && servers.iter().all(is_server))
        .then(|| Directory { servers, cluster: cluster.to_owned() })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> Option<String> {
        text.parse::<Masters>().ok().map(|masters| masters.to_string())
    }

    #[test]
    fn lists_and_directories_are_read_as_they_are_written() {
        for text in ["a:1", "unix:/x", "a:1,b:2,[::1]:3", "etcd://e:2379/name", "etcd://e:1,f:2/a-b_c.d"] {
            assert_eq!(parsed(text).as_deref(), Some(text));
        }
        assert_eq!(parsed(" a:1 , b:2,a:1").as_deref(), Some("a:1,b:2"), "each address once");
        let most: Vec<String> = (1..=MASTERS_MAX).map(|port| format!("h:{port}")).collect();
        assert!(parsed(&most.join(",")).is_some() && parsed(&(most.join(",") + ",h:99")).is_none());
        let name = "n".repeat(CLUSTER_BYTES_MAX);
        assert!(parsed(&format!("etcd://e:1/{name}")).is_some());
        let refused = [
            "",
            ",",
            "a:1,",
            "a:1,b",
            "etcd://e:1",
            "etcd://e:1/",
            "etcd:///n",
            "etcd://e/n",
            "etcd://e:1,unix:/x/n",
            "etcd://e:1/a/b",
            "etcd://e:1/a b",
            &format!("etcd://e:1/{name}n"),
        ];
        for text in refused {
            let error = text.parse::<Masters>().unwrap_err();
            assert!(error.to_string().contains("etcd://host:port/CLUSTER"), "{text}: {error}");
        }
    }

    #[test]
    fn only_a_single_address_is_alone() {
        let of = |text: &str| text.parse::<Masters>().unwrap();
        assert_eq!(of("a:1").lone(), Some(&Address::Tcp("a:1".into())));
        assert_eq!((of("a:1,b:2").lone(), of("a:1,b:2").listed().len()), (None, 2));
        assert_eq!((of("etcd://e:1/n").lone(), of("etcd://e:1/n").listed().len()), (None, 0));
        assert_eq!(Masters::default(), Address::default().into());
    }
}
