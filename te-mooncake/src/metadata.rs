//! Mooncake's metadata: where descriptors are, and where handshakes are answered.
//!
//! Without a server (`P2PHANDSHAKE`) the name of a segment is `host:port` of its owner's handshake port, and
//! the owner sends the descriptor. With a server, two entries per engine are there, as JSON. `C` is
//! [`Config::cluster_id`](crate::Config::cluster_id) and a slash, or nothing:
//!
//! | key | value |
//! |---|---|
//! | `mooncake/C` `ram/NAME`; for a name with a slash `mooncake/C` `NAME` | the descriptor |
//! | `mooncake/C` `rpc_meta/NAME` | [`RpcMeta`] |
//!
//! Neither has a time to live: the entries of an engine that was killed stay, and a later engine of the same
//! name replaces them. (Source: python.md 6.3; `transfer_metadata.cpp`, lines 149 to 263 and 1363 to 1462.)

use core::fmt;
use core::net::Ipv6Addr;
use core::str::FromStr;
use core::time::Duration;

use te_metadata::{KeyValue, MetadataError, MetadataSource};

use crate::error::{MetadataStringError, PeerError};
use crate::message::RpcMeta;

/// What stands for no server.
const PEER_TO_PEER: &str = "P2PHANDSHAKE";

/// Where Mooncake's metadata is, as Mooncake's programs write it: `P2PHANDSHAKE`, `http://host:port/path`,
/// `redis://host[:port]`, `etcd://host:port[;host:port…]`, and without a scheme etcd.
///
/// In addition `redis://user:password@host:port/db` is understood; Mooncake takes those from the environment
/// ([`with_login`](Self::with_login)). A password is never printed.
///
/// ```
/// use te_mooncake::MetadataString;
///
/// let metadata = MetadataString::parse("10.0.0.5:2379;10.0.0.6:2379")?;
/// assert_eq!(metadata.to_string(), "etcd://10.0.0.5:2379,10.0.0.6:2379");
/// assert!(MetadataString::parse("P2PHANDSHAKE")?.is_peer_to_peer());
/// assert!(MetadataString::parse("https://10.0.0.5/metadata").is_err(), "there is no TLS");
/// # Ok::<(), te_mooncake::MetadataStringError>(())
/// ```
#[derive(Clone, Default, PartialEq, Eq)]
pub struct MetadataString {
    /// Peer-to-peer for `P2PHANDSHAKE`.
    source: MetadataSource,
    /// `host:port` of Redis, to which a login can be added.
    redis: Option<String>,
}

impl MetadataString {
    /// Without a server.
    #[must_use]
    pub fn peer_to_peer() -> Self {
        Self::default()
    }

    /// Parses a connection string.
    ///
    /// # Errors
    /// What is wrong with the text.
    pub fn parse(text: &str) -> Result<Self, MetadataStringError> {
        let text = text.trim();
        if text.is_empty() {
            return Err(MetadataStringError::Empty);
        }
        if text == PEER_TO_PEER {
            return Ok(Self::default());
        }
        let (scheme, rest) = text.split_once("://").unwrap_or(("etcd", text));
        let whole = match scheme {
            "http" => {
                let (server, path) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
                format!("http://{}{path}", with_port(server, 80))
            }
            "redis" => {
                let (login, place) = rest.rsplit_once('@').unwrap_or(("", rest));
                let (server, db) = place.split_once('/').unwrap_or((place, ""));
                let (at, slash) =
                    (if login.is_empty() { "" } else { "@" }, if db.is_empty() { "" } else { "/" });
                format!("redis://{login}{at}{}{slash}{db}", with_port(server, 6_379))
            }
            "etcd" => {
                // Mooncake separates servers with semicolons, and takes URLs.
                let servers = rest.trim_end_matches('/').split([';', ',']).map(|server| {
                    let server = server.trim();
                    with_port(server.strip_prefix("http://").unwrap_or(server), 2_379)
                });
                format!("etcd://{}", servers.collect::<Vec<_>>().join(","))
            }
            "https" | "rediss" | "etcds" => return Err(MetadataStringError::Tls),
            _ => text.into(),
        };
        let source: MetadataSource = whole.parse().map_err(MetadataStringError::Source)?;
        let redis = (scheme == "redis").then(|| {
            let place = whole.trim_start_matches("redis://");
            let place = place.rsplit_once('@').map_or(place, |(_, place)| place);
            place.split_once('/').map_or(place, |(server, _)| server).into()
        });
        Ok(Self { source, redis })
    }

    /// The same Redis with a user, a password and a database, as Mooncake takes them from
    /// `MC_REDIS_USERNAME`, `MC_REDIS_PASSWORD` and `MC_REDIS_DB_INDEX`. An empty text stands for none. Other
    /// metadata is unchanged.
    ///
    /// # Errors
    /// A user without a password.
    pub fn with_login(self, user: &str, password: &str, db: u8) -> Result<Self, MetadataStringError> {
        let Some(server) = &self.redis else { return Ok(self) };
        let login = match (user, password) {
            ("", "") => String::new(),
            _ => format!("{}:{}@", percent_encoded(user), percent_encoded(password)),
        };
        let source = format!("redis://{login}{server}/{db}").parse().map_err(MetadataStringError::Source)?;
        Ok(Self { source, redis: self.redis })
    }

    /// Whether there is no server: names are addresses.
    #[must_use]
    pub fn is_peer_to_peer(&self) -> bool {
        self.source.is_peer_to_peer()
    }
}

impl FromStr for MetadataString {
    type Err = MetadataStringError;

    fn from_str(text: &str) -> Result<Self, MetadataStringError> {
        Self::parse(text)
    }
}

impl fmt::Display for MetadataString {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_peer_to_peer() { f.write_str(PEER_TO_PEER) } else { fmt::Display::fmt(&self.source, f) }
    }
}

/// As `Display`: no password.
impl fmt::Debug for MetadataString {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// The entries of engines, on a server or nowhere.
#[derive(Debug)]
pub(crate) struct Entries {
    /// `None`: peer to peer.
    server: Option<KeyValue>,
    /// `mooncake/C`.
    prefix: String,
    value_bytes_max: usize,
    /// The port of a peer whose name has none.
    peer_port: u16,
}

impl Entries {
    pub(crate) fn open(
        metadata: &MetadataString,
        cluster_id: Option<&str>,
        timeout: Duration,
        value_bytes_max: u32,
        peer_port: u16,
    ) -> Result<Self, MetadataError> {
        let server = match metadata.is_peer_to_peer() {
            true => None,
            false => Some(KeyValue::open(&metadata.source, timeout)?),
        };
        let cluster = cluster_id.map(|id| id.trim_end_matches('/')).filter(|id| !id.is_empty());
        let prefix = cluster.map_or("mooncake/".into(), |id| format!("mooncake/{id}/"));
        Ok(Self { server, prefix, value_bytes_max: value_bytes_max as usize, peer_port })
    }

    pub(crate) const fn is_peer_to_peer(&self) -> bool {
        self.server.is_none()
    }

    /// The descriptor of a segment as the server has it. `None` without a server.
    pub(crate) fn descriptor(&self, name: &str) -> Option<Result<Vec<u8>, PeerError>> {
        let server = self.server.as_ref()?;
        Some(self.get(server, &self.segment_key(name), name))
    }

    /// Where the owner of a segment answers handshakes.
    pub(crate) fn rpc_meta(&self, name: &str) -> Result<RpcMeta, PeerError> {
        let Some(server) = &self.server else { return host_and_port(name, self.peer_port) };
        let value = self.get(server, &self.rpc_key(name), name)?;
        RpcMeta::parse(&value).map_err(|source| PeerError::Message { name: name.into(), source })
    }

    /// Stores the descriptor of a segment. Does nothing without a server.
    pub(crate) fn put_descriptor(&self, name: &str, json: &[u8]) -> Result<(), MetadataError> {
        self.server.as_ref().map_or(Ok(()), |server| server.put(&self.segment_key(name), json))
    }

    /// Stores where the owner of a segment answers handshakes.
    pub(crate) fn put_rpc_meta(&self, name: &str, meta: &RpcMeta) -> Result<(), MetadataError> {
        self.server.as_ref().map_or(Ok(()), |server| server.put(&self.rpc_key(name), &meta.to_json()))
    }

    /// Removes both entries of a segment.
    pub(crate) fn remove(&self, name: &str) -> Result<(), MetadataError> {
        let Some(server) = &self.server else { return Ok(()) };
        let rpc_meta = server.delete(&self.rpc_key(name));
        server.delete(&self.segment_key(name))?;
        rpc_meta.map(|_| ())
    }

    fn get(&self, server: &KeyValue, key: &str, name: &str) -> Result<Vec<u8>, PeerError> {
        let value = server.get(key, self.value_bytes_max).map_err(PeerError::Metadata)?;
        value.ok_or_else(|| PeerError::Unknown { name: name.into(), server: server.server().into() })
    }

    fn segment_key(&self, name: &str) -> String {
        let kind = if name.contains('/') { "" } else { "ram/" };
        format!("{}{kind}{name}", self.prefix)
    }

    fn rpc_key(&self, name: &str) -> String {
        format!("{}rpc_meta/{name}", self.prefix)
    }
}

/// `host:port` without a metadata server: `10.0.0.7:15000`, `node-7`, `[::1]:15000`, `::1`.
///
/// # Errors
/// `Name`.
pub(crate) fn host_and_port(name: &str, default: u16) -> Result<RpcMeta, PeerError> {
    let wrong = || PeerError::Name(name.chars().take(128).collect());
    let (host, port) = match name.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        Some((host, "")) => (host, None),
        Some((host, port)) => (host, Some(port.strip_prefix(':').ok_or_else(wrong)?)),
        None if name.parse::<Ipv6Addr>().is_ok() => (name, None),
        None => name.rsplit_once(':').map_or((name, None), |(host, port)| (host, Some(port))),
    };
    let port = match port {
        None => default,
        Some(port) => port.parse().map_err(|_| wrong())?,
    };
    if host.is_empty()
        || port == 0
        || host.len() > 255
        || host.contains(|c: char| c.is_whitespace() || "/[]".contains(c))
    {
        return Err(wrong());
    }
    Ok(RpcMeta { host: host.into(), port })
}

/// A host and a port as one text: `[::1]:15000`.
pub(crate) fn join(host: &str, port: u16) -> String {
    if host.contains(':') && !host.starts_with('[') {
        format!("[{host}]:{port}")
    } else {
        format!("{host}:{port}")
    }
}

/// The text with a port, where it has none.
fn with_port(server: &str, port: u16) -> String {
    let has_port = match server.rfind(']') {
        Some(end) => server[end..].contains(':'),
        None => server.contains(':'),
    };
    if has_port || server.is_empty() { server.into() } else { format!("{server}:{port}") }
}

fn percent_encoded(text: &str) -> String {
    let mut out = String::new();
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() || b"._-~".contains(&byte) {
            out.push(char::from(byte));
        } else {
            out.push_str(&format!("%{byte:02X}"));
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strings_of_mooncake_are_read() {
        for (text, written) in [
            ("P2PHANDSHAKE", "P2PHANDSHAKE"),
            (" P2PHANDSHAKE ", "P2PHANDSHAKE"),
            ("http://10.0.0.5:8080/metadata", "http://10.0.0.5:8080/metadata"),
            ("http://meta/metadata", "http://meta:80/metadata"),
            ("redis://10.0.0.5:6380", "redis://10.0.0.5:6380/0"),
            ("redis://10.0.0.5", "redis://10.0.0.5:6379/0"),
            ("redis://u:p@10.0.0.5:1/3", "redis://u:***@10.0.0.5:1/3"),
            ("etcd://10.0.0.5:2379", "etcd://10.0.0.5:2379"),
            ("10.0.0.5:2379", "etcd://10.0.0.5:2379"),
            ("10.0.0.5", "etcd://10.0.0.5:2379"),
            ("http://10.0.0.5:2379;http://10.0.0.6:2379", "http"),
            ("etcd://a:1;http://b:2,[::1]:3", "etcd://a:1,b:2,[::1]:3"),
        ] {
            match MetadataString::parse(text) {
                Ok(metadata) => assert_eq!(metadata.to_string(), written, "{text}"),
                // Not a server over HTTP, and not etcd without its scheme.
                Err(_) => assert_eq!(written, "http", "{text}"),
            }
        }
    }

    #[test]
    fn texts_that_name_no_metadata_are_refused_without_being_repeated() {
        assert_eq!(MetadataString::parse(" "), Err(MetadataStringError::Empty));
        for text in ["https://h/m", "rediss://h", "etcds://h"] {
            assert_eq!(MetadataString::parse(text), Err(MetadataStringError::Tls));
        }
        for text in ["ftp://h:1", "http://", "redis://", "etcd://", "redis://:s3cret@h:1/x", "http://h:x/m"] {
            let error = MetadataString::parse(text).expect_err(text).to_string();
            assert!(error.contains("P2PHANDSHAKE") && !error.contains("s3cret"), "{error}");
        }
    }

    #[test]
    fn a_login_is_added_to_redis_alone_and_never_printed() {
        let redis = MetadataString::parse("redis://10.0.0.5").expect("valid");
        let with = redis.clone().with_login("mc", "p@ss/1", 7).expect("valid");
        assert_eq!(
            format!("{with} {with:?}"),
            "redis://mc:***@10.0.0.5:6379/7 redis://mc:***@10.0.0.5:6379/7"
        );
        assert_eq!(with, MetadataString::parse("redis://mc:p%40ss%2F1@10.0.0.5:6379/7").expect("valid"));
        assert_eq!(redis.clone().with_login("", "", 0), Ok(redis.clone()));
        assert!(redis.with_login("mc", "", 0).is_err(), "a user without a password");
        let etcd = MetadataString::parse("h:1").expect("valid");
        assert_eq!(etcd.clone().with_login("mc", "p", 7), Ok(etcd));
    }

    #[test]
    fn names_are_hosts_and_ports() {
        for (name, host, port) in [
            ("10.0.0.7:15000", "10.0.0.7", 15_000),
            ("node-7", "node-7", 12_001),
            ("node-7:1", "node-7", 1),
            ("[::1]:15000", "::1", 15_000),
            ("[::1]", "::1", 12_001),
            ("fd00::7", "fd00::7", 12_001),
        ] {
            assert_eq!(host_and_port(name, 12_001), Ok(RpcMeta { host: host.into(), port }), "{name}");
        }
        for bad in ["", ":1", "h:", "h:0", "h:65536", "h:x", "[::1", "[::1]x", "a b:1", "a/b:1"] {
            assert_eq!(host_and_port(bad, 1), Err(PeerError::Name(bad.into())), "{bad}");
        }
        assert_eq!(
            (join("h", 1), join("::1", 2), join("[::1]", 3)),
            ("h:1".into(), "[::1]:2".into(), "[::1]:3".into())
        );
    }

    #[test]
    fn keys_are_those_of_mooncake() {
        let open = |cluster_id| {
            Entries::open(&MetadataString::peer_to_peer(), cluster_id, Duration::from_secs(1), 1 << 20, 1)
                .expect("no server")
        };
        let plain = open(None);
        assert_eq!(plain.segment_key("nodeA:12345"), "mooncake/ram/nodeA:12345");
        assert_eq!(plain.segment_key("nvmeof/x"), "mooncake/nvmeof/x");
        assert_eq!(plain.rpc_key("nodeA:12345"), "mooncake/rpc_meta/nodeA:12345");
        for id in ["blue", "blue/"] {
            assert_eq!(open(Some(id)).segment_key("a"), "mooncake/blue/ram/a");
        }
        assert_eq!(open(Some("")).rpc_key("a"), "mooncake/rpc_meta/a");
    }

    #[test]
    fn without_a_server_nothing_is_stored_and_the_name_is_the_place() {
        let entries = Entries::open(&MetadataString::peer_to_peer(), None, Duration::from_secs(1), 1, 7)
            .expect("no server");
        assert!(entries.is_peer_to_peer() && entries.descriptor("h:1").is_none());
        assert_eq!(entries.rpc_meta("h"), Ok(RpcMeta { host: "h".into(), port: 7 }));
        let meta = RpcMeta { host: "h".into(), port: 7 };
        assert_eq!(
            (entries.put_descriptor("h", b"{}"), entries.put_rpc_meta("h", &meta), entries.remove("h")),
            (Ok(()), Ok(()), Ok(()))
        );
    }
}
