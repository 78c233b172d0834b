//! A bucket, as packs need it: list, read a range, put, delete; each call waits for its answer.
//!
//! This is the seam: what is below it knows nothing about packs, and what is above nothing about HTTP. A put
//! can be conditional: that there is no such object yet, or that it is the one that was read.

use std::error::Error as _;
use std::fmt;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Bytes of an object, which are shared by the tries to write them.
pub(crate) use object_store::PutPayload as Payload;
use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey, S3ConditionalPut};
use object_store::path::Path as Key;
use object_store::{
    Error, ObjectStore, ObjectStoreExt as _, PutMode, PutOptions, PutResult, RetryConfig, UpdateVersion,
};

use super::http::{Connector, NoAnswer, wait_for};
use crate::disk::packs::address::BucketAddress;
use crate::disk::packs::answers::Refusal;
use crate::disk::packs::fault::BucketFault;

type Result<T> = std::result::Result<T, BucketFault>;

/// A directory in a bucket: keys that begin with the same prefix and a slash.
#[derive(Clone)]
pub(crate) struct BucketDirectory {
    store: Arc<dyn ObjectStore>,
    prefix: String,
    path: PathBuf,
}

/// Which version of an object was read or written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Version(Option<String>);

/// When an object is put.
#[derive(Clone, Debug)]
pub(crate) enum Put {
    /// In any case.
    Always,
    /// Where there is none of its name.
    New,
    /// In place of the one that was read.
    Over(Version),
}

/// What is in a directory.
#[derive(Debug, Default)]
pub(crate) struct Listing {
    /// Names and bytes of objects.
    pub(crate) objects: Vec<(String, u64)>,
    /// Names of directories.
    pub(crate) directories: Vec<String>,
}

impl BucketDirectory {
    /// The directory at an address. The settings are those of the environment. No request is sent.
    pub(crate) fn open(path: &Path) -> Result<Self> {
        let settings = |why: String| BucketFault::Settings(why);
        let BucketAddress { bucket, prefix } =
            BucketAddress::parse(path).map_err(|error| settings(error.to_string()))?;
        // Repeating is for those who know what it is for.
        let retry = RetryConfig { max_retries: 0, ..RetryConfig::default() };
        let store = AmazonS3Builder::from_env()
            .with_bucket_name(bucket)
            // Some stores do not have it, and it saves nothing here.
            .with_config(AmazonS3ConfigKey::DisableBulkDelete, "true")
            // Nothing here would be safe without.
            .with_conditional_put(S3ConditionalPut::ETagMatch)
            .with_http_connector(Connector::from_env().map_err(settings)?)
            .with_retry(retry)
            .build()
            .map_err(|error| settings(error.to_string()))?;
        Ok(Self { store: Arc::new(store), prefix, path: path.to_owned() })
    }

    /// A directory of another store: for tests.
    #[cfg(test)]
    pub(crate) fn of(store: Arc<dyn ObjectStore>, path: &Path) -> Result<Self> {
        let address = BucketAddress::parse(path).map_err(|error| BucketFault::Settings(error.to_string()))?;
        Ok(Self { store, prefix: address.prefix, path: path.to_owned() })
    }

    /// The same store, at another address of the same bucket.
    pub(crate) fn at(&self, path: &Path) -> Result<Self> {
        let address = BucketAddress::parse(path).map_err(|error| BucketFault::Settings(error.to_string()))?;
        Ok(Self { store: Arc::clone(&self.store), prefix: address.prefix, path: path.to_owned() })
    }

    /// Its address.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    fn key(&self, name: &str) -> Key {
        if self.prefix.is_empty() { Key::from(name) } else { Key::from(format!("{}/{name}", self.prefix)) }
    }

    /// Bytes of an object.
    ///
    /// # Errors
    /// `Short` where it ends before.
    pub(crate) fn read(&self, name: &str, range: Range<u64>) -> Result<impl AsRef<[u8]> + use<>> {
        let expected = range.end - range.start;
        let bytes = wait_for(self.store.get_range(&self.key(name), range));
        let bytes = bytes.map_err(|error| fault(&error).unless_short(expected))?;
        let found = bytes.len() as u64;
        if found == expected { Ok(bytes) } else { Err(BucketFault::Short { expected, found }) }
    }

    /// An object of at most so many bytes, and its version.
    pub(crate) fn read_all(&self, name: &str, bytes_max: u64) -> Result<(Vec<u8>, Version)> {
        wait_for(async {
            let got = self.store.get(&self.key(name)).await.map_err(|error| fault(&error))?;
            if got.meta.size > bytes_max {
                return Err(BucketFault::Odd(format!("{} has {} bytes", self.key(name), got.meta.size)));
            }
            let version = Version(got.meta.e_tag.clone());
            let bytes = got.bytes().await.map_err(|error| fault(&error))?;
            Ok((bytes.into(), version))
        })
    }

    /// Writes an object as a whole. Readers see all of it or nothing.
    pub(crate) fn put(&self, name: &str, bytes: impl Into<Payload>, when: &Put) -> Result<Version> {
        let mode = match when {
            Put::Always => PutMode::Overwrite,
            Put::New => PutMode::Create,
            Put::Over(version) => PutMode::Update(UpdateVersion { e_tag: version.0.clone(), version: None }),
        };
        let put = wait_for(self.store.put_opts(&self.key(name), bytes.into(), PutOptions::from(mode)));
        let PutResult { e_tag, .. } = put.map_err(|error| fault(&error))?;
        Ok(Version(e_tag))
    }

    /// Whether the store does what conditions of puts say. The object exists.
    ///
    /// # Errors
    /// `NoConditions`, or the store refuses.
    pub(crate) fn try_conditions(&self, name: &str, bytes: &[u8]) -> Result<()> {
        let other = Version(Some("\"00000000000000000000000000000000\"".to_owned()));
        for (when, expected) in [(Put::New, BucketFault::Exists), (Put::Over(other), BucketFault::Changed)] {
            match self.put(name, bytes.to_vec(), &when) {
                Err(fault) if fault == expected => {}
                Err(fault) => return Err(fault),
                Ok(_) => return Err(BucketFault::NoConditions),
            }
        }
        Ok(())
    }

    /// Deletes an object, if there is one.
    pub(crate) fn delete(&self, name: &str) -> Result<()> {
        match wait_for(self.store.delete(&self.key(name))) {
            Err(Error::NotFound { .. }) | Ok(()) => Ok(()),
            Err(error) => Err(fault(&error)),
        }
    }

    /// What is in the directory.
    pub(crate) fn list(&self) -> Result<Listing> {
        let prefix = (!self.prefix.is_empty()).then(|| Key::from(self.prefix.as_str()));
        let found = wait_for(self.store.list_with_delimiter(prefix.as_ref()));
        let found = found.map_err(|error| fault(&error))?;
        let name = |key: &Key| key.filename().map(str::to_owned);
        let objects = found.objects.iter().filter_map(|it| Some((name(&it.location)?, it.size)));
        Ok(Listing {
            objects: objects.collect(),
            directories: found.common_prefixes.iter().filter_map(name).collect(),
        })
    }
}

impl fmt::Debug for BucketDirectory {
    /// Without its settings.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("BucketDirectory").field(&self.path).finish()
    }
}

impl BucketFault {
    /// A range that begins behind the end of an object is one that is too short.
    fn unless_short(self, expected: u64) -> Self {
        match self {
            Self::Server(416, _) => Self::Short { expected, found: 0 },
            other => other,
        }
    }
}

/// What an error of `object_store` means.
fn fault(error: &Error) -> BucketFault {
    let mut source: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(cause) = source {
        if let Some(refusal) = cause.downcast_ref::<Refusal>() {
            return refusal.fault();
        }
        if let Some(none) = cause.downcast_ref::<NoAnswer>() {
            return match none {
                NoAnswer::Timeout => BucketFault::Timeout,
                NoAnswer::Broken(why) => BucketFault::Unreachable(why.clone()),
                // Which says nothing about the object.
                NoAnswer::Short(..) => BucketFault::Unreachable(format!("the answer ended early: {none}")),
            };
        }
        source = cause.source();
    }
    match error {
        Error::NotFound { .. } => BucketFault::Missing,
        Error::AlreadyExists { .. } => BucketFault::Exists,
        Error::Precondition { .. } => BucketFault::Changed,
        Error::PermissionDenied { .. } => BucketFault::Denied("status 403".into()),
        Error::Unauthenticated { .. } => BucketFault::Credentials("status 401".into()),
        other => BucketFault::Odd(other.source().map_or_else(|| other.to_string(), ToString::to_string)),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use object_store::memory::InMemory;

    use super::*;

    #[test]
    fn objects_are_put_on_conditions_listed_and_read_in_parts() {
        let path = Path::new("s3://kv-cache/p/default");
        let directory = BucketDirectory::of(Arc::new(InMemory::new()), path).unwrap();
        assert_eq!(directory.read_all("a", 10).unwrap_err(), BucketFault::Missing);
        let first = directory.put("a", b"0123456789".to_vec(), &Put::New).unwrap();
        assert_eq!(directory.put("a", vec![], &Put::New).unwrap_err(), BucketFault::Exists);
        assert_eq!(directory.read("a", 2..5).unwrap().as_ref(), b"234");
        let short = directory.read("a", 8..12).map(|_| ()).unwrap_err();
        assert_eq!(short, BucketFault::Short { expected: 4, found: 2 });
        let second = directory.put("a", b"abc".to_vec(), &Put::Over(first.clone())).unwrap();
        assert_ne!(first, second);
        assert_eq!(directory.put("a", vec![], &Put::Over(first)).unwrap_err(), BucketFault::Changed);
        assert_eq!(directory.read_all("a", 3).unwrap(), (b"abc".to_vec(), second));
        assert!(matches!(directory.read_all("a", 2), Err(BucketFault::Odd(_))));
        directory.at(&path.join("0-1")).unwrap().put("b", vec![1], &Put::Always).unwrap();
        let listing = directory.list().unwrap();
        assert_eq!(listing.objects, [("a".to_owned(), 3)]);
        assert_eq!(listing.directories, ["0-1"]);
        directory.delete("a").unwrap();
        directory.delete("a").unwrap();
        assert_eq!(directory.read_all("a", 3).unwrap_err(), BucketFault::Missing);
    }
}
