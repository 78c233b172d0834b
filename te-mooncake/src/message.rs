//! The JSON of handshakes other than descriptors, and of the metadata entry that says where an engine answers
//! them.
//!
//! | | request | answer |
//! |---|---|---|
//! | Notify | `{"name":"n","notify_msg":"m"}` | `{"name":"","notify_msg":"success"}`; an empty message: refused |
//! | Probe | `{}` | `{"status":"success"}` |
//! | Connection | the queue pairs of an RDMA engine | the same members; a `reply_msg`: refused |
//! | `rpc_meta/NAME` | | `{"ip_or_host_name":"10.0.0.1","rpc_port":12345}` |
//!
//! As in [`descriptor`](crate::descriptor), what is written is exactly typed, and what is read may have any
//! shape. (Source: python.md 6.1 and 6.3; `transfer_metadata.cpp`, lines 53 to 140 and 1363 to 1462.)
//!
//! ```
//! use te_mooncake::message::{self, RpcMeta};
//!
//! assert_eq!(message::notify("step", "done"), b"{\"name\":\"step\",\"notify_msg\":\"done\"}\n");
//! let parsed = message::parse_notify(b"{\"notify_msg\":\"done\",\"name\":\"step\"}")?;
//! assert_eq!((parsed.name.as_str(), parsed.message.as_str()), ("step", "done"));
//! let meta = RpcMeta { host: "10.0.0.1".into(), port: 12345 };
//! assert_eq!(RpcMeta::parse(&meta.to_json())?, meta);
//! # Ok::<(), te_mooncake::message::MessageError>(())
//! ```

use core::fmt;

use serde::Serialize;
use serde_json::{Map, Value};

use crate::descriptor::{NAME_BYTES_MAX, json};

/// What a peer was sent with Notify.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Notification {
    /// The name that its sender gave to it.
    pub name: String,
    /// The message.
    pub message: String,
}

impl Notification {
    /// The number of bytes of both parts.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.name.len() + self.message.len()
    }
}

/// Where an engine answers handshakes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RpcMeta {
    /// Its host.
    pub host: String,
    /// Its handshake port; not 0.
    pub port: u16,
}

/// Why bytes are not the message that they should be.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum MessageError {
    /// They are not JSON; where and why.
    Json(String),
    /// They are JSON, but not an object.
    Object,
    /// A member has another type or value than it must.
    Member {
        /// The member.
        member: &'static str,
        /// The type or value that it must have: a phrase that follows "must be".
        need: &'static str,
    },
}

impl fmt::Display for MessageError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Json(why) => write!(f, "the message is not JSON: {why}"),
            Self::Object => f.write_str("the message is JSON, but not an object"),
            Self::Member { member, need } => write!(f, "`{member}` of the message must be {need}"),
        }
    }
}

impl std::error::Error for MessageError {}

#[derive(Serialize)]
struct WrittenNotify<'a> {
    name: &'a str,
    notify_msg: &'a str,
}

#[derive(Serialize)]
struct WrittenConnection<'a> {
    local_gid: &'a str,
    local_lid: u16,
    local_nic_path: &'a str,
    payload: &'a str,
    peer_nic_path: &'a str,
    qp_num: [u32; 0],
    reply_msg: &'a str,
}

#[derive(Serialize)]
struct WrittenRpcMeta<'a> {
    ip_or_host_name: &'a str,
    rpc_port: u16,
}

/// The request of a Probe, and what an initiator that exports nothing sends with Metadata.
pub const EMPTY: &[u8] = b"{}\n";
/// The answer to a Probe.
pub const ALIVE: &[u8] = b"{\"status\":\"success\"}\n";

/// The request of a Notify.
#[must_use]
pub fn notify(name: &str, message: &str) -> Vec<u8> {
    json(&WrittenNotify { name, notify_msg: message })
}

/// The answer to a Notify: whether the message was taken.
#[must_use]
pub fn notify_answer(taken: bool) -> Vec<u8> {
    notify("", if taken { "success" } else { "" })
}

/// The answer to a Connection: refused, for this reason.
#[must_use]
pub fn connection_refused(reason: &str) -> Vec<u8> {
    json(&WrittenConnection {
        local_gid: "",
        local_lid: 0,
        local_nic_path: "",
        payload: "",
        peer_nic_path: "",
        qp_num: [],
        reply_msg: reason,
    })
}

/// Parses the request of a Notify. An absent member is an empty string, as in Mooncake; numbers and truth
/// values are their text.
///
/// # Errors
/// `Json`, `Object`; `Member` for a list or an object.
pub fn parse_notify(bytes: &[u8]) -> Result<Notification, MessageError> {
    let root = object(bytes)?;
    Ok(Notification { name: text_of(&root, "name")?, message: text_of(&root, "notify_msg")? })
}

/// Parses the answer to a Notify: whether the peer has taken the message.
///
/// # Errors
/// As [`parse_notify`].
pub fn parse_notify_answer(bytes: &[u8]) -> Result<bool, MessageError> {
    Ok(!parse_notify(bytes)?.message.is_empty())
}

/// Checks that bytes are JSON of any shape. A Mooncake engine closes the connection on anything else.
///
/// # Errors
/// `Json`.
pub fn check(bytes: &[u8]) -> Result<(), MessageError> {
    let text = String::from_utf8_lossy(bytes);
    match serde_json::from_str::<serde::de::IgnoredAny>(&text) {
        Ok(_) => Ok(()),
        Err(error) => Err(MessageError::Json(error.to_string())),
    }
}

impl RpcMeta {
    /// The value under `rpc_meta/NAME`.
    #[must_use]
    pub fn to_json(&self) -> Vec<u8> {
        json(&WrittenRpcMeta { ip_or_host_name: &self.host, rpc_port: self.port })
    }

    /// Parses the value under `rpc_meta/NAME`.
    ///
    /// # Errors
    /// `Json`, `Object`, `Member`.
    pub fn parse(bytes: &[u8]) -> Result<Self, MessageError> {
        let root = object(bytes)?;
        let host = match root.get("ip_or_host_name") {
            Some(Value::String(host)) if !host.is_empty() && host.len() <= NAME_BYTES_MAX => host.clone(),
            _ => {
                return Err(MessageError::Member {
                    member: "ip_or_host_name",
                    need: "the name or address of a host",
                });
            }
        };
        let port = root.get("rpc_port").and_then(Value::as_u64).and_then(|port| u16::try_from(port).ok());
        match port.filter(|port| *port != 0) {
            Some(port) => Ok(Self { host, port }),
            None => Err(MessageError::Member { member: "rpc_port", need: "an integer from 1 to 65535" }),
        }
    }
}

fn object(bytes: &[u8]) -> Result<Map<String, Value>, MessageError> {
    let text = String::from_utf8_lossy(bytes);
    match serde_json::from_str(&text) {
        Ok(Value::Object(root)) => Ok(root),
        Ok(_) => Err(MessageError::Object),
        Err(error) => Err(MessageError::Json(error.to_string())),
    }
}

fn text_of(root: &Map<String, Value>, member: &'static str) -> Result<String, MessageError> {
    match root.get(member) {
        None | Some(Value::Null) => Ok(String::new()),
        Some(Value::String(text)) => Ok(text.clone()),
        Some(value @ (Value::Bool(_) | Value::Number(_))) => Ok(value.to_string()),
        Some(Value::Array(_) | Value::Object(_)) => Err(MessageError::Member { member, need: "a string" }),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn what_is_written_has_the_bytes_of_a_live_peer() {
        // Recorded from 0.3.13.post1.
        assert_eq!(notify_answer(true), b"{\"name\":\"\",\"notify_msg\":\"success\"}\n");
        let refused = connection_refused("");
        let expected = concat!(
            r#"{"local_gid":"","local_lid":0,"local_nic_path":"","payload":"","peer_nic_path":"","qp_num":[],"#,
            r#""reply_msg":""}"#,
            "\n"
        );
        assert_eq!(refused, expected.as_bytes());
        let meta = RpcMeta { host: "10.0.0.1".into(), port: 12_345 }.to_json();
        assert_eq!(meta, b"{\"ip_or_host_name\":\"10.0.0.1\",\"rpc_port\":12345}\n");
    }

    #[test]
    fn an_empty_message_in_the_answer_refuses_a_notification() {
        assert_eq!(parse_notify_answer(&notify_answer(true)), Ok(true));
        assert_eq!(parse_notify_answer(&notify_answer(false)), Ok(false));
        assert_eq!(parse_notify_answer(b"{}"), Ok(false));
    }

    #[test]
    fn every_shape_of_a_notification_is_taken_or_refused() {
        for (text, expected) in [
            (r#"{"name":"a","notify_msg":"b\u0000c"}"#, Some(("a", "b\0c"))),
            ("{}", Some(("", ""))),
            (r#"{"name":null,"notify_msg":7}"#, Some(("", "7"))),
            (r#"{"name":true,"notify_msg":1.5}"#, Some(("true", "1.5"))),
            (r#"{"name":{}}"#, None),
            (r#"{"notify_msg":[]}"#, None),
            ("[1]", None),
            (r#""str""#, None),
            ("", None),
            ("{nope", None),
        ] {
            let parsed = parse_notify(text.as_bytes());
            let parsed = parsed.as_ref().ok().map(|of| (of.name.as_str(), of.message.as_str()));
            assert_eq!(parsed, expected, "{text}");
        }
    }

    #[test]
    fn a_place_of_handshakes_has_a_host_and_a_port() {
        for (text, named) in [
            ("{}", "ip_or_host_name"),
            (r#"{"ip_or_host_name":"","rpc_port":1}"#, "ip_or_host_name"),
            (r#"{"ip_or_host_name":7,"rpc_port":1}"#, "ip_or_host_name"),
            (r#"{"ip_or_host_name":"h","rpc_port":0}"#, "rpc_port"),
            (r#"{"ip_or_host_name":"h","rpc_port":65536}"#, "rpc_port"),
            (r#"{"ip_or_host_name":"h","rpc_port":"1"}"#, "rpc_port"),
            ("[]", "not an object"),
            ("x", "not JSON"),
        ] {
            let error = RpcMeta::parse(text.as_bytes()).expect_err(text).to_string();
            assert!(error.contains(named), "{text}: {error}");
        }
    }

    #[test]
    fn any_json_is_a_request_and_nothing_else_is() {
        for good in ["{}", "{}\n", " [1] ", "null", "\"x\"", "{\"a\":\"\\u00e9\"}"] {
            assert_eq!(check(good.as_bytes()), Ok(()), "{good}");
        }
        for bad in ["", "\n", "{nope", "{}{}", "{\"a\":}"] {
            assert!(check(bad.as_bytes()).is_err(), "{bad}");
        }
        assert!(check("[".repeat(1 << 20).as_bytes()).is_err());
    }

    proptest! {
        #[test]
        fn a_notification_comes_back(name: String, message: String) {
            prop_assert_eq!(parse_notify(&notify(&name, &message)), Ok(Notification { name, message }));
        }

        #[test]
        fn any_bytes_are_taken_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..64)) {
            let _ = (parse_notify(&bytes), RpcMeta::parse(&bytes), check(&bytes));
        }
    }
}
