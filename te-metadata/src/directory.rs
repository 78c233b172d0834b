//! [`Directory`]: how every kind of server is used.

use std::boxed::Box;
use std::string::String;
use std::time::Duration;
use std::vec::Vec;

use crate::backoff::{Fault, Guard};
use crate::entry::{Entry, key};
use crate::error::MetadataError;
use crate::source::{Kind, MetadataSource};

/// Maximum number of attempts to write a name that other writers change between read and write.
const RACES_MAX: u32 = 16;

/// A server that stores bytes under keys.
pub(crate) trait Backend: Send + Sync {
    /// Kind and address, without passwords.
    fn server(&self) -> String;
    /// What is stored under `key`.
    fn get(&self, key: &str) -> Result<Option<Stored>, Fault>;
    /// Stores `value` under `key` for `ttl`, if `old` is still stored there. False: it is not.
    fn swap(&self, key: &str, old: Option<&Stored>, value: &[u8], ttl: Duration) -> Result<bool, Fault>;
    /// Removes `key`, if `old` is still stored there. False: it is not.
    fn remove(&self, key: &str, old: &Stored) -> Result<bool, Fault>;
    /// Keeps `value` under `key` for another `ttl`. False: it is not stored there.
    fn renew(&self, key: &str, value: &[u8], ttl: Duration) -> Result<bool, Fault> {
        match self.get(key)? {
            Some(stored) if stored.value == value => self.swap(key, Some(&stored), value, ttl),
            _ => Ok(false),
        }
    }
}

/// A value, and the server's tag of this version of it.
#[derive(Debug)]
pub(crate) struct Stored {
    pub(crate) value: Vec<u8>,
    pub(crate) tag: String,
}

/// A server that stores the owners of segment names. Threads share it; each call opens another connection.
pub struct Directory {
    backend: Box<dyn Backend>,
    guard: Guard,
}

impl Directory {
    /// The server of `source`; `None` if names are addresses. Nothing is sent yet. `timeout` is for one
    /// request to one server.
    ///
    /// # Errors
    /// `Refused` when this build lacks that kind of server.
    pub fn open(source: &MetadataSource, timeout: Duration) -> Result<Option<Self>, MetadataError> {
        if let Some(missing) = source.missing_feature() {
            return Err(MetadataError::Refused { server: "this build".into(), reason: missing.into() });
        }
        let backend: Box<dyn Backend> = match &source.0 {
            Kind::PeerToPeer => return Ok(None),
            Kind::Http { server, path } => Box::new(crate::http::Http::new(server, path, timeout)),
            #[cfg(feature = "redis")]
            Kind::Redis(source) => Box::new(crate::redis::Redis::new(source, timeout)),
            #[cfg(feature = "etcd")]
            Kind::Etcd(servers) => Box::new(crate::etcd::Etcd::new(servers, timeout)),
            #[cfg(not(all(feature = "redis", feature = "etcd")))]
            _ => return Ok(None),
        };
        Ok(Some(Self::over(backend)))
    }

    pub(crate) fn over(backend: Box<dyn Backend>) -> Self {
        Self { guard: Guard::new(backend.server()), backend }
    }

    /// Kind and address of the server, without passwords: `redis at 10.0.0.5:6379`.
    #[must_use]
    pub fn server(&self) -> String {
        self.guard.server.clone()
    }

    /// The owner of `name`; `None`: the name is not registered.
    ///
    /// # Errors
    /// `Unreachable`, `Refused`, `Garbage`.
    pub fn lookup(&self, name: &str) -> Result<Option<Entry>, MetadataError> {
        Ok(self.read(name)?.map(|(entry, _)| entry))
    }

    /// Registers `entry` for `ttl`, unless an owner with a higher incarnation has the name.
    ///
    /// # Errors
    /// `Superseded` when one has; `Unreachable`, `Refused`, `Garbage`.
    pub fn publish(&self, entry: &Entry, ttl: Duration) -> Result<(), MetadataError> {
        let (key, value) = (key(&entry.name), entry.to_bytes());
        for _ in 0..RACES_MAX {
            let found = self.read(&entry.name)?;
            if let Some((owner, _)) = found.as_ref().filter(|(owner, _)| owner.outranks(entry)) {
                let Entry { name, endpoint, incarnation } = owner.clone();
                return Err(MetadataError::Superseded { name, endpoint, incarnation });
            }
            let old = found.as_ref().map(|(_, stored)| stored);
            if self.request(&key, |backend| backend.swap(&key, old, &value, ttl))? {
                return Ok(());
            }
        }
        let reason = "other engines keep writing the name: give each engine another one".into();
        Err(MetadataError::Refused { server: self.server(), reason })
    }

    /// Renews a published entry for another `ttl`. If it is gone, it is published again.
    ///
    /// # Errors
    /// As [`publish`](Self::publish).
    pub fn renew(&self, entry: &Entry, ttl: Duration) -> Result<(), MetadataError> {
        let key = key(&entry.name);
        if self.request(&key, |backend| backend.renew(&key, &entry.to_bytes(), ttl))? {
            return Ok(());
        }
        self.publish(entry, ttl)
    }

    /// Removes `entry`, if it is registered.
    ///
    /// # Errors
    /// `Unreachable`, `Refused`, `Garbage`.
    pub fn withdraw(&self, entry: &Entry) -> Result<(), MetadataError> {
        let key = key(&entry.name);
        if let Some((owner, stored)) = self.read(&entry.name)?
            && owner == *entry
        {
            // If another owner has taken the name since the read, there is nothing to remove.
            self.request(&key, |backend| backend.remove(&key, &stored))?;
        }
        Ok(())
    }

    fn read(&self, name: &str) -> Result<Option<(Entry, Stored)>, MetadataError> {
        let key = key(name);
        let read = |backend: &dyn Backend| {
            let Some(stored) = backend.get(&key)? else { return Ok(None) };
            Ok(Some((Entry::parse(name, &stored.value).map_err(Fault::Garbage)?, stored)))
        };
        self.request(&key, read)
    }

    /// Makes a request, unless the server is in backoff.
    fn request<T>(
        &self,
        key: &str,
        request: impl FnOnce(&dyn Backend) -> Result<T, Fault>,
    ) -> Result<T, MetadataError> {
        self.guard.request(key, || request(&*self.backend))
    }
}

impl std::fmt::Debug for Directory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Directory").field(&self.server()).finish()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;
    use std::sync::{Arc, Mutex};

    use super::*;

    const TTL: Duration = Duration::from_secs(10);

    /// A server in memory. A rival may come between a read and the write after it.
    #[derive(Default)]
    struct Memory {
        keys: Mutex<HashMap<String, Vec<u8>>>,
        rival: Mutex<Option<Entry>>,
    }

    impl Memory {
        fn put(&self, entry: &Entry) {
            self.keys.lock().unwrap().insert(key(&entry.name), entry.to_bytes());
        }
    }

    impl Backend for Arc<Memory> {
        fn server(&self) -> String {
            "memory".into()
        }

        fn get(&self, key: &str) -> Result<Option<Stored>, Fault> {
            let found = self.keys.lock().unwrap().get(key).cloned();
            if let Some(rival) = self.rival.lock().unwrap().take() {
                self.put(&rival);
            }
            Ok(found.map(|value| Stored { value, tag: String::new() }))
        }

        fn swap(&self, key: &str, old: Option<&Stored>, value: &[u8], _: Duration) -> Result<bool, Fault> {
            let mut keys = self.keys.lock().unwrap();
            let same = keys.get(key) == old.map(|old| &old.value);
            if same {
                keys.insert(key.into(), value.into());
            }
            Ok(same)
        }

        fn remove(&self, key: &str, old: &Stored) -> Result<bool, Fault> {
            let mut keys = self.keys.lock().unwrap();
            let same = keys.get(key) == Some(&old.value);
            if same {
                keys.remove(key);
            }
            Ok(same)
        }
    }

    fn directory() -> (Arc<Memory>, Directory) {
        let memory = Arc::new(Memory::default());
        (memory.clone(), Directory::over(Box::new(memory)))
    }

    fn entry(incarnation: u64) -> Entry {
        Entry { name: "node-7".into(), endpoint: std::format!("h:{incarnation}"), incarnation }
    }

    #[test]
    fn a_higher_incarnation_takes_the_name_and_a_lower_one_does_not() {
        let (_, directory) = directory();
        directory.publish(&entry(5), TTL).unwrap();
        directory.publish(&entry(5), TTL).unwrap();
        directory.publish(&entry(7), TTL).unwrap();
        let expected =
            MetadataError::Superseded { name: "node-7".into(), endpoint: "h:7".into(), incarnation: 7 };
        assert_eq!(directory.publish(&entry(5), TTL), Err(expected.clone()));
        assert_eq!(directory.renew(&entry(5), TTL), Err(expected));
        directory.withdraw(&entry(5)).unwrap();
        assert_eq!(directory.lookup("node-7"), Ok(Some(entry(7))));
        let twin = Entry { endpoint: "other:7".into(), ..entry(7) };
        assert!(matches!(directory.publish(&twin, TTL), Err(MetadataError::Superseded { .. })));
        directory.withdraw(&entry(7)).unwrap();
        assert_eq!(directory.lookup("node-7"), Ok(None));
    }

    #[test]
    fn a_writer_that_comes_between_read_and_write_is_seen() {
        for (rival, wins) in [(4, true), (9, false)] {
            let (memory, directory) = directory();
            *memory.rival.lock().unwrap() = Some(entry(rival));
            assert_eq!(directory.publish(&entry(5), TTL).is_ok(), wins);
            assert_eq!(directory.lookup("node-7").unwrap().unwrap().incarnation, rival.max(5));
        }
    }

    #[test]
    fn what_was_lost_is_published_again_when_it_is_renewed() {
        let (memory, directory) = directory();
        directory.publish(&entry(5), TTL).unwrap();
        memory.keys.lock().unwrap().clear();
        directory.renew(&entry(5), TTL).unwrap();
        assert_eq!(directory.lookup("node-7"), Ok(Some(entry(5))));
    }

    #[test]
    fn garbage_is_neither_read_nor_overwritten() {
        let (memory, directory) = directory();
        memory.keys.lock().unwrap().insert(key("node-7"), b"{}".to_vec());
        for error in [
            directory.lookup("node-7").unwrap_err(),
            directory.publish(&entry(5), TTL).unwrap_err(),
            directory.renew(&entry(5), TTL).unwrap_err(),
            directory.withdraw(&entry(5)).unwrap_err(),
        ] {
            assert!(matches!(error, MetadataError::Garbage { .. }), "{error}");
        }
        assert_eq!(memory.keys.lock().unwrap()[&key("node-7")], b"{}");
    }
}
