//! Addresses of buckets: `s3://BUCKET/PREFIX`, and the same with a cluster and a directory behind it.
//!
//! They are paths like those of shared directories, so that settings, the master and metrics treat them
//! alike. An address has no credentials, no endpoint and no options: these are in the environment of each
//! process, and never in a message.

use std::fmt;
use std::path::{Component, Path};

const SCHEME: &str = "s3:";
/// Longest prefix, bytes: keys of a store have at most 1,024.
const PREFIX_BYTES_MAX: usize = 512;

/// A bucket and the prefix of keys in it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct BucketAddress {
    pub(crate) bucket: String,
    /// Without a slash at either end; empty: the whole bucket.
    pub(crate) prefix: String,
}

/// A text begins as the address of a bucket does, and is none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NotABucket;

impl fmt::Display for NotABucket {
    /// Without the text: credentials that were written into it do not belong into a log.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(
            "not an address of a bucket: write s3://BUCKET or s3://BUCKET/PREFIX, with a bucket of 3 to 63 \
             of a-z, 0-9, `.` and `-`, and a prefix of at most 512 of A-Z, a-z, 0-9 and `._-/`. Credentials \
             and the endpoint belong into the environment: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, \
             AWS_ENDPOINT_URL",
        )
    }
}

impl std::error::Error for NotABucket {}

impl BucketAddress {
    /// Whether a path is meant to be the address of a bucket.
    pub(crate) fn is_meant(path: &Path) -> bool {
        path.to_str().is_some_and(|text| text.starts_with("s3://"))
    }

    pub(crate) fn parse(path: &Path) -> Result<Self, NotABucket> {
        if !Self::is_meant(path) {
            return Err(NotABucket);
        }
        let mut parts = Vec::new();
        for component in path.components() {
            match component {
                Component::Normal(part) => parts.push(part.to_str().ok_or(NotABucket)?),
                _ => return Err(NotABucket),
            }
        }
        let [SCHEME, bucket, prefix @ ..] = parts.as_slice() else { return Err(NotABucket) };
        let of_bucket =
            |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || matches!(byte, b'.' | b'-');
        let of_prefix = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'-' | b'_');
        let prefix_is_valid = prefix.iter().all(|part| part.bytes().all(of_prefix));
        let prefix = prefix.join("/");
        let valid = (3..=63).contains(&bucket.len())
            && bucket.bytes().all(of_bucket)
            && bucket.starts_with(|first: char| first.is_ascii_alphanumeric())
            && prefix_is_valid
            && prefix.len() <= PREFIX_BYTES_MAX;
        valid.then(|| Self { bucket: (*bucket).to_owned(), prefix }).ok_or(NotABucket)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_buckets_and_prefixes_and_nothing_else() {
        let of = |text: &str| BucketAddress::parse(Path::new(text)).map(|it| (it.bucket, it.prefix));
        let is = |bucket: &str, prefix: &str| Ok((bucket.to_owned(), prefix.to_owned()));
        assert_eq!(of("s3://kv-cache"), is("kv-cache", ""));
        assert_eq!(of("s3://kv-cache/"), is("kv-cache", ""));
        assert_eq!(of("s3://kv.1/a/b_c/default/0-1"), is("kv.1", "a/b_c/default/0-1"));
        let joined = Path::new("s3://kv-cache/p").join("default").join("0123");
        assert_eq!(of(joined.to_str().unwrap()), is("kv-cache", "p/default/0123"));
        for wrong in [
            "/mnt/kv",
            "s3:/kv-cache",
            "s3://",
            "s3://ab",
            "s3://KV-cache",
            "s3://-kv",
            "s3://key:secret@kv-cache",
            "s3://kv-cache/../other",
            "s3://kv-cache/a?region=x",
            "s3://kv-cache/a b",
            "http://kv-cache/a",
        ] {
            assert_eq!(of(wrong), Err(NotABucket), "{wrong}");
        }
        assert_eq!(of(&format!("s3://kv-cache/{}", "a".repeat(513))), Err(NotABucket));
        assert!(!NotABucket.to_string().contains("secret@"));
    }
}
