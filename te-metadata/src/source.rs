//! [`MetadataSource`]: where segment names are looked up, as a connection string.

use std::fmt;
use std::str::FromStr;
use std::string::{String, ToString};
use std::vec::Vec;

use serde::{Deserialize, Serialize};

use crate::entry::is_endpoint;
use crate::error::SourceError;

/// Printed in place of a password.
const HIDDEN: &str = "***";
const ETCD_SERVERS_MAX: usize = 16;

/// Where segment names are looked up.
///
/// Its text is a connection string: `p2p` (the default: names are addresses), `http://host:port/metadata`,
/// `redis://[user:password@]host:port[/db]`, `etcd://host:port[,host:port…]`. In user and password, `@` and
/// other special characters are percent-encoded (`%40`). A password is never printed: `***` replaces it, and
/// a source with `***` is refused.
///
/// ```
/// use te_metadata::MetadataSource;
///
/// let source: MetadataSource = "redis://cache:s3cret@10.0.0.5:6379/2".parse()?;
/// assert_eq!(source.to_string(), "redis://cache:***@10.0.0.5:6379/2");
/// assert_eq!("p2p".parse::<MetadataSource>()?, MetadataSource::default());
/// # Ok::<(), te_metadata::SourceError>(())
/// ```
#[derive(Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct MetadataSource(pub(crate) Kind);

#[derive(Clone, Default, PartialEq, Eq)]
pub(crate) enum Kind {
    #[default]
    PeerToPeer,
    Http {
        server: String,
        path: String,
    },
    Redis(RedisSource),
    Etcd(Vec<String>),
}

#[derive(Clone, PartialEq, Eq)]
pub(crate) struct RedisSource {
    pub(crate) server: String,
    pub(crate) user: String,
    pub(crate) password: String,
    pub(crate) db: u16,
}

impl MetadataSource {
    /// Whether names are addresses, and no directory is used.
    #[must_use]
    pub fn is_peer_to_peer(&self) -> bool {
        self.0 == Kind::PeerToPeer
    }

    /// The feature that this build lacks to use the source, as a phrase that follows the setting's name.
    #[must_use]
    pub fn missing_feature(&self) -> Option<&'static str> {
        match self.0 {
            Kind::Redis(_) if !cfg!(feature = "redis") => {
                Some("names redis, which this build lacks: build it with the feature `redis`")
            }
            Kind::Etcd(_) if !cfg!(feature = "etcd") => {
                Some("names etcd, which this build lacks: build it with the feature `etcd`")
            }
            _ => None,
        }
    }
}

impl FromStr for MetadataSource {
    type Err = SourceError;

    fn from_str(text: &str) -> Result<Self, SourceError> {
        let text = text.trim();
        if text == "p2p" {
            return Ok(Self::default());
        }
        let (scheme, rest) = text.split_once("://").ok_or(SourceError("not a connection string"))?;
        let kind = match scheme {
            "http" => http(rest),
            "redis" => redis(rest).map(Kind::Redis),
            "etcd" => etcd(rest),
            "https" | "rediss" | "etcds" => Err("TLS is not supported: use a network that you trust"),
            _ => Err("unknown kind of server"),
        };
        kind.map(Self).map_err(SourceError)
    }
}

impl fmt::Display for MetadataSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Kind::PeerToPeer => f.write_str("p2p"),
            Kind::Http { server, path } => write!(f, "http://{server}{path}"),
            Kind::Redis(RedisSource { server, user, password, db }) => {
                f.write_str("redis://")?;
                if !user.is_empty() || !password.is_empty() {
                    write!(f, "{}:{}@", encoded(user), if password.is_empty() { "" } else { HIDDEN })?;
                }
                write!(f, "{server}/{db}")
            }
            Kind::Etcd(servers) => write!(f, "etcd://{}", servers.join(",")),
        }
    }
}

/// As `Display`: no password.
impl fmt::Debug for MetadataSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl TryFrom<String> for MetadataSource {
    type Error = SourceError;

    fn try_from(text: String) -> Result<Self, SourceError> {
        text.parse()
    }
}

impl From<MetadataSource> for String {
    fn from(source: MetadataSource) -> Self {
        source.to_string()
    }
}

fn http(rest: &str) -> Result<Kind, &'static str> {
    let (server, path) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
    let plain = |byte: u8| byte.is_ascii_graphic() && !b"?#\"<>\\^`{|}".contains(&byte);
    if !is_endpoint(server) {
        return Err("not http://host:port/path");
    }
    if !path.bytes().all(plain) || path.len() > 256 {
        return Err("the path is longer than 256 bytes or has characters that are not allowed");
    }
    let path = if path.is_empty() { "/metadata" } else { path };
    Ok(Kind::Http { server: server.into(), path: path.into() })
}

fn redis(rest: &str) -> Result<RedisSource, &'static str> {
    let (login, place) = rest.rsplit_once('@').unwrap_or(("", rest));
    let (user, password) = login.split_once(':').unwrap_or((login, ""));
    if password == HIDDEN {
        return Err("*** stands for a password that was not printed: put the password in again");
    }
    if !user.is_empty() && password.is_empty() {
        return Err("a user without a password");
    }
    let decode =
        |text| decoded(text).ok_or("user or password has a % that is not part of %XX, or is not UTF-8");
    let (server, db) = place.split_once('/').unwrap_or((place, ""));
    if !is_endpoint(server) {
        return Err("not redis://host:port");
    }
    let db = if db.is_empty() { "0" } else { db };
    let db = db.parse().map_err(|_| "the database is not a number from 0 to 65535")?;
    Ok(RedisSource { server: server.into(), user: decode(user)?, password: decode(password)?, db })
}

fn etcd(rest: &str) -> Result<Kind, &'static str> {
    if rest.contains('@') {
        return Err("etcd with users is not supported");
    }
    let servers: Vec<String> =
        rest.trim_end_matches('/').split(',').map(|server| server.trim().into()).collect();
    if servers.len() > ETCD_SERVERS_MAX {
        return Err("more than 16 etcd servers");
    }
    if !servers.iter().all(|server| is_endpoint(server)) {
        return Err("not etcd://host:port,host:port");
    }
    Ok(Kind::Etcd(servers))
}

/// Decodes `%XX`.
fn decoded(text: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        let hex = |byte: Option<u8>| char::from(byte?).to_digit(16);
        bytes.push(if byte == b'%' { (hex(rest.next())? * 16 + hex(rest.next())?) as u8 } else { byte });
    }
    String::from_utf8(bytes).ok()
}

/// Encodes all but unreserved characters as `%XX`.
pub(crate) fn encoded(text: &str) -> String {
    let mut out = String::new();
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() || b"._-~".contains(&byte) {
            out.push(char::from(byte));
        } else {
            out.push_str(&std::format!("%{byte:02X}"));
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn parsed(text: &str) -> MetadataSource {
        text.parse().unwrap_or_else(|error| panic!("{text}: {error}"))
    }

    #[test]
    fn sources_are_read_and_written_as_connection_strings() {
        for (text, written) in [
            ("p2p", "p2p"),
            ("http://meta:9003/metadata", "http://meta:9003/metadata"),
            ("http://[::1]:9003", "http://[::1]:9003/metadata"),
            ("redis://h:6379", "redis://h:6379/0"),
            ("redis://h:6379/3", "redis://h:6379/3"),
            ("etcd://a:2379,b:2379", "etcd://a:2379,b:2379"),
            (" etcd://a:2379/ ", "etcd://a:2379"),
        ] {
            assert_eq!(parsed(text).to_string(), written);
            assert_eq!(parsed(written), parsed(text));
        }
    }

    #[test]
    fn a_password_is_parsed_and_never_printed() {
        for text in ["redis://u%20r:p%40ss@h:1/2", "redis://:p%40ss@h:1/2"] {
            let source = parsed(text);
            let Kind::Redis(redis) = &source.0 else { panic!("{source}") };
            assert_eq!((redis.password.as_str(), redis.db), ("p@ss", 2));
            let printed = std::format!("{source} {source:?} {}", serde_json::to_string(&source).unwrap());
            assert!(!printed.contains("ss@") && !printed.contains("p%40ss"), "{printed}");
            let again = source.to_string().parse::<MetadataSource>().unwrap_err();
            assert!(again.to_string().contains("put the password in again"), "{again}");
        }
        let error = "redis://u:hunter2@nowhere".parse::<MetadataSource>().unwrap_err();
        assert!(!error.to_string().contains("hunter2"));
    }

    #[test]
    fn invalid_connection_strings_are_refused() {
        for bad in [
            "",
            "P2PHANDSHAKE",
            "http://",
            "http://h",
            "http://h:0/",
            "http://h:1/a?b",
            "http://h:1/a b",
            "https://h:1/metadata",
            "redis://h",
            "redis://u@h:1",
            "redis://h:1/x",
            "redis://h:1/65536",
            "redis://u:%zz@h:1",
            "redis://u:%f@h:1",
            "redis://u:%ff@h:1",
            "etcd://",
            "etcd://a",
            "etcd://a:1,,b:2",
            "etcd://u:p@a:1",
            "ftp://h:1",
            "http://h:1\r\nx: y/",
        ] {
            assert!(bad.parse::<MetadataSource>().is_err(), "{bad:?}");
        }
    }

    proptest! {
        #[test]
        fn any_text_is_a_source_or_an_error(text in "(http|redis|etcd)?(://)?.{0,60}") {
            if let Ok(source) = text.parse::<MetadataSource>() {
                let _ = source.to_string();
            }
        }
    }
}
