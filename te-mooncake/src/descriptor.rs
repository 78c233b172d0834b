//! Segment descriptors: what an engine of Mooncake says about its memory, as JSON.
//!
//! ```json
//! {"buffers":[{"addr":139895810027536,"length":1048576,"name":"10.0.0.7:15734"}],"name":"10.0.0.7:15734",
//!  "protocol":"tcp","rdma_server_name":"","tcp_data_host":"10.0.0.7","tcp_data_port":16709,"tcp_proto_version":2}
//! ```
//!
//! **Writing.** A member of another type aborts the process of a Mooncake peer, so the encoder writes a fixed
//! set of members from typed fields; see [`SegmentDescriptor::to_json`].
//!
//! **Reading.** [`SegmentDescriptor::parse`] accepts or refuses any bytes, and says which member is wrong.
//! Unknown members are ignored, as a Mooncake peer ignores them. The member `snowskin` is ours: a Snowskin
//! initiator that sees it opens the peer's native segment instead ([`Native`]).
//!
//! (Source: python.md 6.2; `transfer_metadata.cpp`, lines 361 to 555 and 731 to 1017.)

use core::fmt;
use core::hash::Hasher;

use serde::Serialize;
use serde_json::{Map, Value};

use crate::header::Version;

/// The largest number of buffers in a descriptor that is accepted.
pub const BUFFERS_MAX: usize = 65_536;
/// The longest name of a segment, a buffer or a host that is accepted, bytes.
pub const NAME_BYTES_MAX: usize = 1_024;

/// The memory that a Mooncake engine exports over TCP.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SegmentDescriptor {
    /// The name under which the engine is known. Without a metadata server: `host:port` of its handshakes.
    pub name: String,
    /// The host of the data port. `None`: that of the handshake port; releases before 0.3.13 do not say it.
    pub data_host: Option<String>,
    /// The data port; not 0.
    pub data_port: u16,
    /// The version of the data port's protocol that the engine speaks.
    pub version: Version,
    /// What it exports, in the order in which it was registered.
    pub buffers: Vec<Buffer>,
    /// Where a Snowskin engine is reached over its own fabrics.
    pub native: Option<Native>,
}

/// One exported range.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Buffer {
    /// The first address, in the engine's address space; not 0.
    pub addr: u64,
    /// The length, in bytes; not 0.
    #[serde(rename = "length")]
    pub len: u64,
    /// The name of the segment; not empty.
    pub name: String,
}

/// Where the owner of a descriptor is reached as a Snowskin engine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Native {
    /// `host:port` of its control port.
    pub endpoint: String,
    /// The incarnation that must answer there.
    pub incarnation: u64,
}

/// Why bytes are not the descriptor of a peer that can be reached.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum DescriptorError {
    /// They are not JSON; where and why.
    Json(String),
    /// A member is missing, or has another type or value than it must.
    Member {
        /// The member: `tcp_data_port`, `buffers[3].addr`.
        member: String,
        /// The type or value that it must have: a phrase that follows "must be".
        need: &'static str,
        /// What is there.
        found: String,
    },
    /// The peer serves its memory over another transport.
    Transport(String),
}

impl fmt::Display for DescriptorError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Json(why) => write!(f, "the descriptor is not JSON: {why}"),
            Self::Member { member, need, found } => {
                write!(f, "`{member}` of the descriptor must be {need}, but is {found}")
            }
            Self::Transport(name) => write!(
                f,
                "the peer serves its memory over {name:?}, and only \"tcp\" is spoken here: set MC_FORCE_TCP=1 there"
            ),
        }
    }
}

impl std::error::Error for DescriptorError {}

/// What is written. The members of a descriptor of release 0.3.13, in the order of their names.
#[derive(Serialize)]
struct Written<'a> {
    buffers: &'a [Buffer],
    name: &'a str,
    protocol: &'static str,
    rdma_server_name: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    snowskin: Option<&'a Native>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tcp_data_host: Option<&'a str>,
    tcp_data_port: u16,
    tcp_proto_version: u8,
}

impl SegmentDescriptor {
    /// The JSON that [`parse`](Self::parse) and Mooncake peers accept, compact, with sorted members and a
    /// newline.
    #[must_use]
    pub fn to_json(&self) -> Vec<u8> {
        json(&Written {
            buffers: &self.buffers,
            name: &self.name,
            protocol: "tcp",
            rdma_server_name: "",
            snowskin: self.native.as_ref(),
            tcp_data_host: self.data_host.as_deref(),
            tcp_data_port: self.data_port,
            tcp_proto_version: if self.version == Version::V2 { 2 } else { 1 },
        })
    }

    /// Parses what a peer or a metadata server sent. Invalid UTF-8 in strings is replaced.
    ///
    /// # Errors
    /// What is wrong: one bad member refuses the whole descriptor, as Mooncake does.
    pub fn parse(bytes: &[u8]) -> Result<Self, DescriptorError> {
        let text = String::from_utf8_lossy(bytes);
        let json: Value =
            serde_json::from_str(&text).map_err(|error| DescriptorError::Json(error.to_string()))?;
        let Value::Object(root) = json else {
            return Err(wrong("(the whole)", "an object", &json));
        };
        check_protocol(root.get("protocol").unwrap_or(&Value::Null))?;
        let data_port = match root.get("tcp_data_port").unwrap_or(&Value::Null) {
            Value::Number(number) => number.as_u64().and_then(|port| u16::try_from(port).ok()),
            _ => None,
        };
        let need_port = || {
            wrong(
                "tcp_data_port",
                "an integer from 1 to 65535",
                root.get("tcp_data_port").unwrap_or(&Value::Null),
            )
        };
        let data_port = data_port.filter(|port| *port != 0).ok_or_else(need_port)?;
        let version = match root.get("tcp_proto_version") {
            None | Some(Value::Null) => Version::V1,
            Some(found) => match found.as_i64() {
                Some(2..) => Version::V2,
                Some(_) => Version::V1,
                None => return Err(wrong("tcp_proto_version", "an integer", found)),
            },
        };
        Ok(Self {
            name: text_of(&root, "name", "name")?,
            data_host: Some(text_of(&root, "tcp_data_host", "tcp_data_host")?)
                .filter(|host| !host.is_empty()),
            data_port,
            version,
            buffers: buffers(root.get("buffers").unwrap_or(&Value::Null))?,
            native: native(root.get("snowskin")),
        })
    }

    /// The ranges in which an operation may lie, by address: buffers that overlap are joined, because a
    /// descriptor may still list buffers of an earlier life of its owner, and only the owner knows which.
    /// Buffers that merely touch stay apart: no operation may lie in two of them.
    #[must_use]
    pub fn ranges(&self) -> Vec<Range> {
        let mut all: Vec<Range> =
            self.buffers.iter().map(|buffer| Range { addr: buffer.addr, len: buffer.len }).collect();
        all.sort_unstable();
        let mut joined: Vec<Range> = Vec::with_capacity(all.len());
        for range in all {
            match joined.last_mut() {
                Some(last) if range.addr < last.end() => {
                    last.len = range.end().max(last.end()) - last.addr;
                }
                _ => joined.push(range),
            }
        }
        joined
    }

    /// Whether `len` bytes from `addr` on lie in one of the [ranges](Self::ranges).
    #[must_use]
    pub fn contains(&self, addr: u64, len: u64) -> bool {
        self.ranges().iter().any(|range| range.contains(addr, len))
    }

    /// A number for one life of the owner, from what changes when its process restarts: the data port, which
    /// Mooncake draws at random, its host, and the incarnation of a Snowskin engine. Never 0.
    #[must_use]
    pub fn life(&self) -> u64 {
        // `DefaultHasher::new` has fixed keys: the number is the same wherever this process computes it.
        let mut hasher = std::hash::DefaultHasher::new();
        hasher.write(self.data_host.as_deref().unwrap_or("").as_bytes());
        hasher.write_u16(self.data_port);
        hasher.write_u64(self.native.as_ref().map_or(0, |native| native.incarnation));
        hasher.finish().max(1)
    }
}

/// A range of addresses of a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Range {
    /// The first address.
    pub addr: u64,
    /// The length, in bytes. The end is at most 2^64 - 1.
    pub len: u64,
}

impl Range {
    const fn end(self) -> u64 {
        self.addr.saturating_add(self.len)
    }

    /// Whether `len` bytes from `addr` on lie in the range.
    #[must_use]
    pub const fn contains(self, addr: u64, len: u64) -> bool {
        match addr.checked_add(len) {
            Some(end) => addr >= self.addr && end <= self.end(),
            None => false,
        }
    }
}

/// Compact JSON and a newline, as Mooncake writes it.
pub(crate) fn json(value: &impl Serialize) -> Vec<u8> {
    // Writing these types into memory cannot fail: their keys are strings.
    let mut bytes = serde_json::to_vec(value).unwrap_or_default();
    bytes.push(b'\n');
    bytes
}

/// A string; an absent one and null are empty, as in Mooncake.
fn text_of(object: &Map<String, Value>, key: &str, member: &str) -> Result<String, DescriptorError> {
    match object.get(key) {
        None | Some(Value::Null) => Ok(String::new()),
        Some(Value::String(text)) if text.len() <= NAME_BYTES_MAX => Ok(text.clone()),
        Some(found) => Err(wrong(member, "a string of at most 1024 bytes", found)),
    }
}

/// A descriptor of several transports lists them.
fn check_protocol(protocol: &Value) -> Result<(), DescriptorError> {
    match protocol {
        Value::String(name) if name == "tcp" => Ok(()),
        Value::String(name) => Err(DescriptorError::Transport(shortened(name))),
        Value::Array(names) if names.iter().any(|name| name == "tcp") => Ok(()),
        Value::Array(_) => Err(DescriptorError::Transport(shortened(&protocol.to_string()))),
        found => Err(wrong("protocol", "a string", found)),
    }
}

fn buffers(found: &Value) -> Result<Vec<Buffer>, DescriptorError> {
    let list = match found {
        Value::Null => return Ok(Vec::new()),
        Value::Array(list) if list.len() <= BUFFERS_MAX => list,
        Value::Array(list) => {
            let found = format!("one of {}", list.len());
            return Err(DescriptorError::Member {
                member: "buffers".into(),
                need: "a list of at most 65536",
                found,
            });
        }
        found => return Err(wrong("buffers", "a list", found)),
    };
    let mut all = Vec::with_capacity(list.len());
    for (index, entry) in list.iter().enumerate() {
        let member = |name: &str| format!("buffers[{index}]{name}");
        let Value::Object(buffer) = entry else { return Err(wrong(&member(""), "an object", entry)) };
        // One of a descriptor of several transports.
        if buffer.get("protocol").is_some_and(|protocol| protocol.is_string() && protocol != "tcp") {
            continue;
        }
        let number = |key: &str, name: &str| match buffer.get(key).unwrap_or(&Value::Null) {
            Value::Number(number) if number.as_u64().is_some_and(|number| number != 0) => {
                Ok(number.as_u64().unwrap_or(0))
            }
            found => Err(wrong(&member(name), "an integer from 1 to 2^64 - 1", found)),
        };
        let (addr, len) = (number("addr", ".addr")?, number("length", ".length")?);
        let name = text_of(buffer, "name", &member(".name"))?;
        if name.is_empty() {
            return Err(DescriptorError::Member {
                member: member(".name"),
                need: "a name",
                found: "empty".into(),
            });
        }
        if addr.checked_add(len).is_none() {
            let found = format!("{len} at address {addr}");
            let need = "a length that ends before 2^64";
            return Err(DescriptorError::Member { member: member(".length"), need, found });
        }
        all.push(Buffer { addr, len, name });
    }
    Ok(all)
}

/// Our own member. One that is not as we write it is of another release, and ignored.
fn native(found: Option<&Value>) -> Option<Native> {
    let found = found?;
    let endpoint = found.get("endpoint").and_then(Value::as_str);
    let endpoint = endpoint.filter(|text| text.len() <= NAME_BYTES_MAX && text.contains(':'));
    let incarnation = found.get("incarnation").and_then(Value::as_u64);
    match (endpoint, incarnation) {
        (Some(endpoint), Some(incarnation)) => Some(Native { endpoint: endpoint.into(), incarnation }),
        _ => {
            log::debug!(
                "the member `snowskin` of a descriptor is ignored: {}",
                shortened(&found.to_string())
            );
            None
        }
    }
}

fn wrong(member: &str, need: &'static str, found: &Value) -> DescriptorError {
    let found = match found {
        Value::Null => "missing".into(),
        Value::Array(_) => "a list".into(),
        Value::Object(_) => "an object".into(),
        Value::String(text) => format!("the string {:?}", shortened(text)),
        other => other.to_string(),
    };
    DescriptorError::Member { member: member.into(), need, found }
}

/// The first characters of a text that a peer chose, for an error.
fn shortened(text: &str) -> String {
    const CHARS_MAX: usize = 64;
    let mut short: String = text.chars().take(CHARS_MAX).collect();
    if short.len() < text.len() {
        short.push('…');
    }
    short
}

#[cfg(test)]
#[path = "descriptor/tests.rs"]
mod tests;
