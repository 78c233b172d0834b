//! Regular expressions that strangers send: what they cost is known before they run.
//!
//! A search takes time in proportion to the key's length times the size of what the pattern compiled to, in the worst case.
//! Both are limited, and the larger the pattern, the fewer bytes of keys it is run on in one call. What can be written down in
//! 4 KiB of program runs as a lazy automaton, some ns a byte; the worst that fits 16 KiB was found to take 12 µs a byte, so it
//! is given one longest key a call.

use alloc::boxed::Box;

use regex::bytes::{Regex, RegexBuilder};

use crate::ErrorCode;
use crate::wire::KEY_BYTES_MAX;

/// Longest pattern, bytes.
pub(crate) const PATTERN_BYTES_MAX: usize = 1_024;
/// Memory that a search may take besides, bytes.
const CACHE_BYTES_MAX: usize = 64 << 10;
/// Nested groups and repetitions.
const NEST_MAX: u32 = 32;
/// What a pattern may compile to, bytes, and on how many bytes of keys it is run in one call then: on one key at least, or
/// nobody would get anywhere.
const CLASSES: [(usize, usize); 2] = [(4 << 10, 32 << 10), (16 << 10, KEY_BYTES_MAX)];

/// A compiled pattern.
#[derive(Debug)]
pub(crate) struct Pattern {
    text: Box<str>,
    regex: Regex,
    key_bytes_max: usize,
}

impl Pattern {
    /// # Errors
    /// `InvalidParams`: it is too long, is no regular expression, or compiles to too much.
    pub(crate) fn new(text: &str) -> Result<Self, ErrorCode> {
        if text.len() > PATTERN_BYTES_MAX {
            return Err(ErrorCode::InvalidParams);
        }
        let built = CLASSES.iter().find_map(|(bytes_max, key_bytes_max)| {
            let mut builder = RegexBuilder::new(text);
            builder
                .unicode(false)
                .size_limit(*bytes_max)
                .dfa_size_limit(CACHE_BYTES_MAX)
                .nest_limit(NEST_MAX);
            Some((builder.build().ok()?, *key_bytes_max))
        });
        let (regex, key_bytes_max) = built.ok_or(ErrorCode::InvalidParams)?;
        Ok(Self { text: text.into(), regex, key_bytes_max })
    }

    pub(crate) fn text(&self) -> &str {
        &self.text
    }

    pub(crate) fn matches(&self, key: &[u8]) -> bool {
        self.regex.is_match(key)
    }

    /// Bytes of keys that one call may run it on.
    pub(crate) fn key_bytes_max(&self) -> usize {
        self.key_bytes_max
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_are_about_bytes_and_match_anywhere() {
        let pattern = |text: &str| Pattern::new(text).unwrap();
        assert!(pattern("b").matches(b"abc") && !pattern("^b").matches(b"abc"));
        assert!(pattern(r"^kv/llama-3/\d+/layer(0|1[0-9])$").matches(b"kv/llama-3/77/layer12"));
        assert!(pattern(r"\xff").matches(&[0, 0xff]), "a key need not be text");
        assert!(pattern("(?i)KEY").matches(b"key"));
    }

    #[test]
    fn what_is_too_much_is_refused_at_once() {
        let nested = |depth: usize| "(".repeat(depth) + "a" + &")".repeat(depth);
        for text in [
            &*"a".repeat(1_025),
            "(a{1000}){1000}",
            "((a{30}){30}){30}",
            &nested(200),
            "(",
            "a**{",
            r"(a)\1",
            "(?=a)",
            r"\p{Greek}",
        ] {
            assert_eq!(Pattern::new(text).err(), Some(ErrorCode::InvalidParams), "{text:.20}");
        }
        assert!(Pattern::new(&"a|".repeat(100)).is_ok());
    }

    #[test]
    fn the_larger_a_pattern_the_fewer_bytes_it_sees() {
        let small = Pattern::new("^kv/.*[0-9]$").unwrap();
        let large = Pattern::new(&"(x+x+)+y".repeat(20)).unwrap();
        assert!(small.key_bytes_max() > large.key_bytes_max());
    }
}
