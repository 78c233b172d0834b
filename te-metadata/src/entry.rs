//! [`Entry`]: what a directory stores of a segment, and its format.

use std::format;
use std::string::String;
use std::vec::Vec;

use serde::{Deserialize, Serialize};

/// Maximum length of an entry, bytes of JSON.
pub const ENTRY_BYTES_MAX: usize = 1024;
const NAME_BYTES_MAX: usize = 128;
const ENDPOINT_BYTES_MAX: usize = 280;
const VERSION: u32 = 1;

/// The owner of a segment's name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The segment's name: 1 to 128 of `A–Z a–z 0–9 . _ - /`, a letter or digit first.
    pub name: String,
    /// `host:port` of its owner's control port.
    pub endpoint: String,
    /// The incarnation of the owner. The highest has the name.
    pub incarnation: u64,
}

/// The stored form of an [`Entry`].
#[derive(Serialize, Deserialize)]
struct Stored {
    v: u32,
    name: String,
    endpoint: String,
    incarnation: u64,
}

/// The member that every version of the format has.
#[derive(Deserialize)]
struct Version {
    v: u32,
}

impl Entry {
    /// Parses what a directory stores for `name`.
    ///
    /// # Errors
    /// What the bytes are instead: a phrase that follows "holds".
    pub fn parse(name: &str, bytes: &[u8]) -> Result<Self, &'static str> {
        if bytes.len() > ENTRY_BYTES_MAX {
            return Err("more bytes than an entry may have");
        }
        // serde would also accept an array with the fields in their order.
        if !bytes.trim_ascii_start().starts_with(b"{") {
            return Err("something that is not an entry");
        }
        let Version { v } = serde_json::from_slice(bytes).map_err(|_| "something that is not an entry")?;
        if v != VERSION {
            return Err("an entry of another release");
        }
        let stored: Stored =
            serde_json::from_slice(bytes).map_err(|_| "an entry with a missing or invalid member")?;
        if stored.name != name {
            return Err("an entry of another segment");
        }
        if !is_endpoint(&stored.endpoint) {
            return Err("an entry whose endpoint is not host:port");
        }
        Ok(Self { name: stored.name, endpoint: stored.endpoint, incarnation: stored.incarnation })
    }

    /// The bytes that [`parse`](Self::parse) accepts.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        let Self { name, endpoint, incarnation } = self.clone();
        // Serialising strings and numbers into memory cannot fail.
        serde_json::to_vec(&Stored { v: VERSION, name, endpoint, incarnation }).unwrap_or_default()
    }

    /// Whether this entry keeps the name when the owner of `ours` wants it: it has a higher incarnation, or
    /// the same and is another owner's.
    pub(crate) fn outranks(&self, ours: &Self) -> bool {
        self.incarnation > ours.incarnation || (self.incarnation == ours.incarnation && self != ours)
    }
}

/// The key under which the entry of a segment is stored.
pub(crate) fn key(name: &str) -> String {
    format!("snowskin/segment/{name}")
}

/// Whether a segment may be registered under `name`: 1 to 128 of `A–Z a–z 0–9 . _ - /`, a letter or digit
/// first.
#[must_use]
pub fn is_segment_name(name: &str) -> bool {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"._-/".contains(&byte);
    (1..=NAME_BYTES_MAX).contains(&name.len())
        && name.as_bytes()[0].is_ascii_alphanumeric()
        && name.bytes().all(allowed)
}

/// Whether `text` is `host:port`.
pub(crate) fn is_endpoint(text: &str) -> bool {
    let Some((host, port)) = text.rsplit_once(':') else { return false };
    let printable = text.bytes().all(|byte| byte.is_ascii_graphic() && !b"/?#@\"\\".contains(&byte));
    let bracketed = host.starts_with('[') && host.ends_with(']');
    text.len() <= ENDPOINT_BYTES_MAX
        && printable
        && !host.is_empty()
        && (bracketed || !host.contains(':'))
        && port.parse::<u16>().is_ok_and(|port| port != 0)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn entry() -> Entry {
        Entry { name: "node-7".into(), endpoint: "10.0.0.7:7400".into(), incarnation: 1_792_023_600_000_000 }
    }

    #[test]
    fn an_entry_is_stored_as_the_documentation_shows_it() {
        let text = r#"{"v":1,"name":"node-7","endpoint":"10.0.0.7:7400","incarnation":1792023600000000}"#;
        assert_eq!(String::from_utf8(entry().to_bytes()).unwrap(), text);
        assert_eq!(Entry::parse("node-7", text.as_bytes()), Ok(entry()));
        let later = text.replace("}", r#","zone":"b"}"#);
        assert_eq!(Entry::parse("node-7", later.as_bytes()), Ok(entry()), "more of the same version");
    }

    #[test]
    fn what_is_not_an_entry_of_the_segment_is_refused_with_the_reason() {
        let text = String::from_utf8(entry().to_bytes()).unwrap();
        let long = text.replace("}", &format!(r#","more":"{}"}}"#, "x".repeat(ENTRY_BYTES_MAX)));
        for (bad, what) in [
            ("", "not an entry"),
            ("\u{0}\u{1}", "not an entry"),
            ("[1]", "not an entry"),
            (&text.replace(":1,", ":2,"), "another release"),
            (&text.replace("incarnation", "incarnations"), "missing or invalid"),
            (&text.replace("1792023600000000", "-1"), "missing or invalid"),
            (&text.replace("node-7", "node-8"), "another segment"),
            (&text.replace(":7400", ""), "not host:port"),
            (&text.replace(":7400", ":0"), "not host:port"),
            (&text.replace("10.0.0.7", "a b"), "not host:port"),
            (&long, "more bytes than"),
        ] {
            let found = Entry::parse("node-7", bad.as_bytes()).unwrap_err();
            assert!(found.contains(what), "{bad:?}: {found}");
        }
    }

    #[test]
    fn the_longest_name_and_endpoint_fit_an_entry() {
        let name = "n".repeat(NAME_BYTES_MAX);
        let endpoint = format!("{}:65535", "h".repeat(ENDPOINT_BYTES_MAX - 6));
        let longest = Entry { name: name.clone(), endpoint, incarnation: u64::MAX };
        assert!(is_segment_name(&name) && is_endpoint(&longest.endpoint));
        assert_eq!(Entry::parse(&name, &longest.to_bytes()), Ok(longest));
    }

    #[test]
    fn names_that_are_no_segment_names_are_told() {
        for good in ["a", "node-7", "prefill/3", "A.b_c"] {
            assert!(is_segment_name(good), "{good}");
        }
        for bad in ["", "host:1", "a b", "/a", "-a", "é", "a\"", "a\n", "a?b", "a%20", &"x".repeat(129)] {
            assert!(!is_segment_name(bad), "{bad:?}");
        }
        assert!(
            is_endpoint("[::1]:5") && !is_endpoint("::1:5") && !is_endpoint("host") && !is_endpoint(":5")
        );
    }

    proptest! {
        #[test]
        fn any_bytes_are_an_entry_or_not(bytes in proptest::collection::vec(any::<u8>(), 0..256)) {
            let _ = Entry::parse("node-7", &bytes);
        }
    }
}
