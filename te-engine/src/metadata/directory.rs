//! [`Directory`]: the rules that every kind of server is used by.

use std::boxed::Box;
use std::string::String;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};
use std::vec::Vec;

use super::entry::{Entry, is_segment_name, key};
use super::error::MetadataError;
use super::source::{Kind, MetadataSource};
use super::{Located, Metadata};
use crate::error::SegmentError;

/// How long a server that did not answer is left alone, at first and at last.
const PAUSE_MIN: Duration = Duration::from_millis(50);
const PAUSE_MAX: Duration = Duration::from_secs(2);
/// Times that somebody else may write a name between our read and our write.
const RACES_MAX: u32 = 16;

/// A server that keeps bytes under keys: what the rules need of it, and no more.
pub(super) trait Backend: Send + Sync {
    /// Kind and address, without passwords.
    fn server(&self) -> String;
    /// What is there.
    fn get(&self, key: &str) -> Result<Option<Stored>, Fault>;
    /// Puts `value` there for `ttl`, if what is there is `old` still. False: it is not.
    fn swap(&self, key: &str, old: Option<&Stored>, value: &[u8], ttl: Duration) -> Result<bool, Fault>;
    /// Takes away what is there, if it is `old` still. False: it is not.
    fn remove(&self, key: &str, old: &Stored) -> Result<bool, Fault>;
    /// Keeps `value` there for another `ttl`. False: it is not there.
    fn renew(&self, key: &str, value: &[u8], ttl: Duration) -> Result<bool, Fault> {
        match self.get(key)? {
            Some(stored) if stored.value == value => self.swap(key, Some(&stored), value, ttl),
            _ => Ok(false),
        }
    }
}

/// A value, and what the server calls this version of it.
#[derive(Debug)]
pub(super) struct Stored {
    pub(super) value: Vec<u8>,
    pub(super) tag: String,
}

/// Why a server did not do what it was asked.
#[derive(Debug)]
pub(super) enum Fault {
    Unreachable(String),
    Refused(String),
    Garbage(&'static str),
}

/// A server that knows who owns which name. Threads share it; each call is a connection of its own.
pub struct Directory {
    backend: Box<dyn Backend>,
    trouble: Mutex<Trouble>,
}

/// The server did not answer: what whoever asks before `until` is told.
#[derive(Default)]
struct Trouble {
    pause: Duration,
    told: Option<(Instant, MetadataError)>,
}

impl Directory {
    /// The server that `source` names; `None` when it names none. Nothing is sent yet. `timeout` is for one request to one
    /// server.
    ///
    /// # Errors
    /// `Refused` when this build lacks the kind of server.
    pub fn open(source: &MetadataSource, timeout: Duration) -> Result<Option<Self>, MetadataError> {
        if let Some(missing) = source.missing_feature() {
            return Err(MetadataError::Refused { server: "this build".into(), reason: missing.into() });
        }
        let backend: Box<dyn Backend> = match &source.0 {
            Kind::PeerToPeer => return Ok(None),
            Kind::Http { server, path } => Box::new(super::http::Http::new(server, path, timeout)),
            #[cfg(feature = "redis")]
            Kind::Redis(source) => Box::new(super::redis::Redis::new(source, timeout)),
            #[cfg(feature = "etcd")]
            Kind::Etcd(servers) => Box::new(super::etcd::Etcd::new(servers, timeout)),
            #[cfg(not(all(feature = "redis", feature = "etcd")))]
            _ => return Ok(None),
        };
        Ok(Some(Self::over(backend)))
    }

    pub(super) fn over(backend: Box<dyn Backend>) -> Self {
        Self { backend, trouble: Mutex::default() }
    }

    /// Kind and address of the server, without passwords: `redis at 10.0.0.5:6379`.
    #[must_use]
    pub fn server(&self) -> String {
        self.backend.server()
    }

    /// Who owns `name`; `None`: nobody.
    ///
    /// # Errors
    /// `Unreachable`, `Refused`, `Garbage`.
    pub fn lookup(&self, name: &str) -> Result<Option<Entry>, MetadataError> {
        Ok(self.read(name)?.map(|(entry, _)| entry))
    }

    /// Gives `entry.name` to `entry` for `ttl`, unless somebody with a higher incarnation has it.
    ///
    /// # Errors
    /// `Superseded` when somebody has; `Unreachable`, `Refused`, `Garbage`.
    pub fn publish(&self, entry: &Entry, ttl: Duration) -> Result<(), MetadataError> {
        let (key, value) = (key(&entry.name), entry.to_bytes());
        for _ in 0..RACES_MAX {
            let found = self.read(&entry.name)?;
            if let Some((owner, _)) = found.as_ref().filter(|(owner, _)| owner.outranks(entry)) {
                let Entry { name, endpoint, incarnation } = owner.clone();
                return Err(MetadataError::Superseded { name, endpoint, incarnation });
            }
            let old = found.as_ref().map(|(_, stored)| stored);
            if self.ask(&key, |backend| backend.swap(&key, old, &value, ttl))? {
                return Ok(());
            }
        }
        Err(MetadataError::Refused { server: self.server(), reason: "others keep writing the name".into() })
    }

    /// Gives what was published another `ttl`. When it is gone, it is published again.
    ///
    /// # Errors
    /// As [`publish`](Self::publish).
    pub fn renew(&self, entry: &Entry, ttl: Duration) -> Result<(), MetadataError> {
        let key = key(&entry.name);
        if self.ask(&key, |backend| backend.renew(&key, &entry.to_bytes(), ttl))? {
            return Ok(());
        }
        self.publish(entry, ttl)
    }

    /// Takes `entry` away, if it is there.
    ///
    /// # Errors
    /// `Unreachable`, `Refused`, `Garbage`.
    pub fn withdraw(&self, entry: &Entry) -> Result<(), MetadataError> {
        let key = key(&entry.name);
        if let Some((owner, stored)) = self.read(&entry.name)?
            && owner == *entry
        {
            // Not ours any more since we looked: as good.
            self.ask(&key, |backend| backend.remove(&key, &stored))?;
        }
        Ok(())
    }

    fn read(&self, name: &str) -> Result<Option<(Entry, Stored)>, MetadataError> {
        let key = key(name);
        let read = |backend: &dyn Backend| {
            let Some(stored) = backend.get(&key)? else { return Ok(None) };
            Ok(Some((Entry::parse(name, &stored.value).map_err(Fault::Garbage)?, stored)))
        };
        self.ask(&key, read)
    }

    /// Asks the server, unless it has just not answered.
    fn ask<T>(
        &self,
        key: &str,
        ask: impl FnOnce(&dyn Backend) -> Result<T, Fault>,
    ) -> Result<T, MetadataError> {
        if let Some((until, error)) = &self.trouble().told
            && Instant::now() < *until
        {
            return Err(error.clone());
        }
        let answer = ask(&*self.backend);
        let server = self.server();
        let mut trouble = self.trouble();
        let error = match answer {
            Err(Fault::Unreachable(reason)) => MetadataError::Unreachable { server, reason },
            answered => {
                *trouble = Trouble::default();
                return answered.map_err(|fault| match fault {
                    Fault::Garbage(what) => MetadataError::Garbage { server, key: key.into(), what },
                    Fault::Refused(reason) | Fault::Unreachable(reason) => {
                        MetadataError::Refused { server, reason }
                    }
                });
            }
        };
        trouble.pause = (trouble.pause * 2).clamp(PAUSE_MIN, PAUSE_MAX);
        trouble.told = Some((Instant::now() + trouble.pause, error.clone()));
        Err(error)
    }

    fn trouble(&self) -> std::sync::MutexGuard<'_, Trouble> {
        self.trouble.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Metadata for Directory {
    fn locate(&self, name: &str) -> Result<Located, SegmentError> {
        if name.contains(':') {
            return Ok(Located { endpoint: name.into(), incarnation: None });
        }
        if !is_segment_name(name) {
            return Err(SegmentError::Name(name.into()));
        }
        match self.lookup(name).map_err(SegmentError::Metadata)? {
            Some(entry) => Ok(Located { endpoint: entry.endpoint, incarnation: Some(entry.incarnation) }),
            None => Err(SegmentError::Unknown { name: name.into(), server: self.server() }),
        }
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
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    const TTL: Duration = Duration::from_secs(10);

    /// A server in memory. `faults` is how many requests from now on are not answered; a rival may come between a read and
    /// the write after it.
    #[derive(Default)]
    struct Memory {
        keys: Mutex<HashMap<String, Vec<u8>>>,
        faults: AtomicU32,
        asked: AtomicU32,
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
            self.asked.fetch_add(1, Ordering::Relaxed);
            if self.faults.load(Ordering::Relaxed) > 0 {
                self.faults.fetch_sub(1, Ordering::Relaxed);
                return Err(Fault::Unreachable("gone".into()));
            }
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

    #[test]
    fn a_server_that_does_not_answer_is_left_alone_for_a_while() {
        let (memory, directory) = directory();
        memory.faults.store(u32::MAX, Ordering::Relaxed);
        let first = directory.lookup("node-7").unwrap_err();
        assert_eq!(first.to_string(), "memory does not answer (gone): is it running, and the address right?");
        // Pretend that the pause is long: the test asks no clock.
        directory.trouble().told.as_mut().unwrap().0 = Instant::now() + Duration::from_secs(3600);
        for _ in 0..100 {
            assert_eq!(directory.lookup("node-7"), Err(first.clone()));
        }
        assert_eq!(memory.asked.load(Ordering::Relaxed), 1);
        // The pause grows, up to its limit, and the first answer ends it.
        for _ in 0..8 {
            directory.trouble().told.as_mut().unwrap().0 = Instant::now();
            directory.lookup("node-7").unwrap_err();
        }
        assert_eq!((directory.trouble().pause, memory.asked.load(Ordering::Relaxed)), (PAUSE_MAX, 9));
        memory.faults.store(0, Ordering::Relaxed);
        directory.trouble().told.as_mut().unwrap().0 = Instant::now();
        assert_eq!(directory.lookup("node-7"), Ok(None));
        assert_eq!(directory.trouble().pause, Duration::ZERO);
    }

    #[test]
    fn names_with_a_colon_are_addresses_and_nobody_is_asked() {
        let (memory, directory) = directory();
        let located = directory.locate("10.0.0.7:7400").unwrap();
        assert_eq!(located, Located { endpoint: "10.0.0.7:7400".into(), incarnation: None });
        assert_eq!(directory.locate("a b"), Err(SegmentError::Name("a b".into())));
        assert_eq!(memory.asked.load(Ordering::Relaxed), 0);
        let unknown = directory.locate("node-7").unwrap_err();
        assert!(matches!(unknown, SegmentError::Unknown { .. }), "{unknown}");
        memory.put(&entry(5));
        assert_eq!(directory.locate("node-7").unwrap().incarnation, Some(5));
    }
}
