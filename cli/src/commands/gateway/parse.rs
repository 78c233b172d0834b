//! Parsing of a request's parts other than its body: the key in its path, its query, its range. Independent
//! of HTTP libraries.

/// Decodes percent-encoding (RFC 3986, 2.1) into any bytes, not only text. `+` stands for itself.
///
/// # Errors
/// A `%` without two hexadecimal digits after it.
pub(crate) fn percent_decode(text: &str) -> Result<Vec<u8>, &'static str> {
    let mut bytes = text.bytes();
    let mut out = Vec::with_capacity(text.len());
    while let Some(byte) = bytes.next() {
        if byte != b'%' {
            out.push(byte);
            continue;
        }
        let mut digit = || bytes.next().and_then(|byte| char::from(byte).to_digit(16));
        match (digit(), digit()) {
            (Some(high), Some(low)) => out.push((high << 4 | low) as u8),
            _ => {
                return Err(
                    "a % in a URL must be followed by two hexadecimal digits; write a literal % as %25",
                );
            }
        }
    }
    Ok(out)
}

/// Encodes all bytes that a path segment cannot contain, including `/`; [`percent_decode`] reverses it.
pub(crate) fn percent_encode(bytes: &[u8]) -> String {
    let mut out = String::with_capacity(bytes.len());
    for &byte in bytes {
        if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) {
            out.push(char::from(byte));
        } else {
            out.push('%');
            for nibble in [byte >> 4, byte & 15] {
                out.push(char::from(b"0123456789ABCDEF"[usize::from(nibble)]));
            }
        }
    }
    out
}

/// A name and its value.
pub(crate) type Pair = (Vec<u8>, Vec<u8>);

/// The pairs of a query. A name without `=` has an empty value.
///
/// # Errors
/// As [`percent_decode`].
pub(crate) fn query_pairs(query: &str) -> Result<Vec<Pair>, &'static str> {
    let pairs = query.split('&').filter(|pair| !pair.is_empty());
    pairs
        .map(|pair| {
            let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
            Ok((percent_decode(name)?, percent_decode(value)?))
        })
        .collect()
}

/// The result of a `Range` header (RFC 9110, 14.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wanted {
    /// The whole object: there is no range, or one of a kind that a server may ignore.
    All,
    /// Bytes from the first to the last, both included.
    Part(u64, u64),
    /// A range outside of the object.
    Nothing,
}

/// The part of `len` bytes that a `Range` header requests. Several ranges at once are not supported: the
/// whole object is sent then.
pub(crate) fn wanted_range(header: &str, len: u64) -> Wanted {
    let Some(set) = header.trim().strip_prefix("bytes=") else { return Wanted::All };
    let Some((first, last)) = set.trim().split_once('-') else { return Wanted::All };
    let number = |text: &str| {
        let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
        // A number that does not fit into u64 is beyond the end of any object.
        digits.then(|| text.parse().unwrap_or(u64::MAX))
    };
    match (first, last, number(first), number(last)) {
        ("", _, _, Some(0)) => Wanted::Nothing,
        ("", _, _, Some(suffix)) => Wanted::Part(len.saturating_sub(suffix), len.saturating_sub(1)),
        (_, "", Some(first), _) if first < len => Wanted::Part(first, len - 1),
        (_, _, Some(first), Some(last)) if first > last => Wanted::All,
        (_, _, Some(first), Some(last)) if first < len => Wanted::Part(first, last.min(len - 1)),
        (_, "", Some(_), _) | (_, _, Some(_), Some(_)) => Wanted::Nothing,
        _ => Wanted::All,
    }
}

/// Whether a list of entity tags (`If-None-Match`) contains this one, by weak comparison (RFC 9110, 8.8.3.2).
pub(crate) fn has_tag(list: &str, tag: &str) -> bool {
    list.split(',').map(str::trim).any(|one| one == "*" || one.strip_prefix("W/").unwrap_or(one) == tag)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_bytes_survive_percent_encoding() {
        let bytes: Vec<u8> = (0..=255).collect();
        assert_eq!(percent_decode(&percent_encode(&bytes)).unwrap(), bytes);
        assert_eq!(percent_encode(b"kv/a b~c"), "kv%2Fa%20b~c");
        assert_eq!(percent_decode("a+b%2f%2F").unwrap(), b"a+b//");
        for wrong in ["%", "%1", "%zz", "a%2", "%%41", "% 1", "%+1", "%é"] {
            assert!(percent_decode(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn queries_are_pairs() {
        let pairs = query_pairs("a=1&b&&c=%26%3D&=x").unwrap();
        let pairs: Vec<_> = pairs.iter().map(|(name, value)| (&name[..], &value[..])).collect();
        assert_eq!(pairs, [(&b"a"[..], &b"1"[..]), (b"b", b""), (b"c", b"&="), (b"", b"x")]);
        assert!(query_pairs("a=%").is_err());
    }

    #[test]
    fn ranges_are_those_of_rfc_9110() {
        // These are the examples of 14.1.2, for a representation of 10,000 bytes.
        for (header, wanted) in [
            ("bytes=0-499", Wanted::Part(0, 499)),
            ("bytes=500-999", Wanted::Part(500, 999)),
            ("bytes=-500", Wanted::Part(9500, 9999)),
            ("bytes=9500-", Wanted::Part(9500, 9999)),
            ("bytes=9999-9999", Wanted::Part(9999, 9999)),
            ("bytes=9000-20000", Wanted::Part(9000, 9999)),
            ("bytes=-20000", Wanted::Part(0, 9999)),
            ("bytes=10000-", Wanted::Nothing),
            ("bytes=10000-10001", Wanted::Nothing),
            ("bytes=99999999999999999999-", Wanted::Nothing),
            ("bytes=0-99999999999999999999", Wanted::Part(0, 9999)),
            ("bytes=-0", Wanted::Nothing),
            // Not understood or not supported: the whole object.
            ("bytes=0-0,-1", Wanted::All),
            ("bytes=5-2", Wanted::All),
            ("bytes=-", Wanted::All),
            ("bytes=", Wanted::All),
            ("bytes=a-b", Wanted::All),
            ("bytes=+1-2", Wanted::All),
            ("lines=1-2", Wanted::All),
            ("", Wanted::All),
        ] {
            assert_eq!(wanted_range(header, 10_000), wanted, "{header}");
        }
    }

    #[test]
    fn tags_are_compared_weakly() {
        assert!(has_tag("\"a\", W/\"b\"", "\"b\""));
        assert!(has_tag("*", "\"b\""));
        assert!(!has_tag("\"a\"", "\"b\""));
        assert!(!has_tag("", "\"b\""));
    }
}
