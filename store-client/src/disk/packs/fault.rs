//! [`BucketFault`]: why a bucket did not do what was asked of it, and what to do.

use std::fmt;

/// Why a bucket did not do what was asked of it. No text has anything secret in it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum BucketFault {
    /// This program cannot reach buckets.
    NoFeature,
    /// The address, the settings in the environment, or the certificates cannot be used.
    Settings(String),
    /// There are no credentials, or the store does not know them.
    Credentials(String),
    /// The store refuses.
    Denied(String),
    /// There is no such bucket.
    NoBucket,
    /// The clocks of this host and of the store differ too much.
    Clock,
    /// The bucket is elsewhere: the status of a redirection.
    Elsewhere(u16),
    /// The store asks for fewer requests.
    Slow,
    /// There was no answer in time.
    Timeout,
    /// The store cannot be reached.
    Unreachable(String),
    /// The store reports an error: a status, and its code.
    Server(u16, String),
    /// There is no such object.
    Missing,
    /// There is an object of this name already.
    Exists,
    /// The object is not the one that was read.
    Changed,
    /// The store puts objects whatever the conditions say.
    NoConditions,
    /// The object is shorter than it should be.
    Short {
        /// Bytes that were asked for.
        expected: u64,
        /// Bytes that came.
        found: u64,
    },
    /// So many nodes in a row have begun to take a directory, and none has ended.
    Unfinished(usize),
    /// Another node has taken this directory of packs.
    Lost,
    /// The disk is being closed.
    Closed,
    /// What the store says has no meaning.
    Odd(String),
}

impl BucketFault {
    /// Whether the same request may succeed later, without a change by an operator.
    #[must_use]
    pub const fn is_passing(&self) -> bool {
        matches!(self, Self::Slow | Self::Timeout | Self::Unreachable(_) | Self::Server(500.., _))
    }
}

impl fmt::Display for BucketFault {
    // Long because: one text per fault.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoFeature => f.write_str(
                "this program was built without buckets: build it with the feature `s3` \
                 (cargo build --release --features s3)",
            ),
            Self::Settings(why) => write!(f, "the settings of the bucket cannot be used: {why}"),
            Self::Credentials(code) => write!(
                f,
                "the store does not accept the credentials ({code}): check AWS_ACCESS_KEY_ID, \
                 AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN in the environment of this process, or the role \
                 of this host"
            ),
            Self::Denied(code) => write!(
                f,
                "access denied ({code}): allow s3:ListBucket on the bucket, and s3:GetObject, s3:PutObject \
                 and s3:DeleteObject on the prefix; readers need s3:GetObject"
            ),
            Self::NoBucket => f.write_str(
                "there is no such bucket: make it, or check its name, AWS_REGION and AWS_ENDPOINT_URL",
            ),
            Self::Clock => f.write_str(
                "the clock of this host and that of the store differ too much: run an NTP client here",
            ),
            Self::Elsewhere(status) => write!(
                f,
                "the bucket is in another region or at another endpoint (status {status}): set AWS_REGION or \
                 AWS_ENDPOINT_URL"
            ),
            Self::Slow => f.write_str(
                "the store asks for fewer requests (slow down): it is asked again after a pause; where this \
                 persists, spread nodes over several prefixes",
            ),
            Self::Timeout => {
                f.write_str("no answer in time: look at the store, and at the network to AWS_ENDPOINT_URL")
            }
            Self::Unreachable(why) => write!(
                f,
                "the store cannot be reached ({why}): check AWS_ENDPOINT_URL, AWS_ALLOW_HTTP for an http:// \
                 endpoint, and AWS_CA_BUNDLE for certificates of your own"
            ),
            Self::Server(status, code) => {
                write!(f, "the store reports an error (status {status}, {code}): look at its log")
            }
            Self::Missing => f.write_str("there is no such object"),
            Self::Exists => f.write_str("there is an object of this name already"),
            Self::Changed => f.write_str("another process has changed the object"),
            Self::NoConditions => f.write_str(
                "the store ignores the conditions of puts (If-None-Match, If-Match), so that two nodes could \
                 write to one directory: use a store, or a release of it, that has them",
            ),
            Self::Short { expected, found } => {
                write!(f, "{found} of {expected} bytes are there: the object was truncated")
            }
            Self::Unfinished(count) => write!(
                f,
                "{count} nodes in a row have begun to take this directory of packs, and none has ended: look for \
                 errors of buckets in their logs; it can be deleted, with the objects in it"
            ),
            Self::Lost => f.write_str("another node has taken this directory of packs"),
            Self::Closed => f.write_str("the disk is being closed"),
            Self::Odd(what) => {
                write!(
                    f,
                    "the store answers what an S3-compatible one does not ({what}): check AWS_ENDPOINT_URL"
                )
            }
        }
    }
}

impl std::error::Error for BucketFault {}
