//! The arbiter: one record that is read, and replaced only at the version that was read. A thread of its own
//! asks it, because it may be slow or away.

use std::fmt;
use std::fs::{self, File};
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use store_core::ha::{Ask, MemberId, Record, Reign, Told, Versioned};
use tracing::{info, warn};

use super::Inputs;
use crate::log_limit::LogLimit;

/// Version of the stored record.
const FORMAT: u32 = 1;
/// Longest record and address, bytes.
pub(super) const BYTES_MAX: u64 = 64 << 10;
/// Most members of one cluster.
pub(super) const MEMBERS_MAX: usize = 16;
/// How often the addresses of members are read.
const REFRESH: Duration = Duration::from_secs(2);
/// Pause after the arbiter has not answered: at first, and at most.
const PAUSE_MIN: Duration = Duration::from_millis(20);
const PAUSE_MAX: Duration = Duration::from_millis(500);

/// Where a member is reached.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Address {
    /// The member.
    pub(crate) id: u64,
    /// By clients and nodes.
    pub(crate) rpc: String,
    /// By other members.
    pub(crate) link: String,
}

/// Why the arbiter was no help. A swap may have been carried out, or may be later.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ArbiterError(pub(super) String);

impl fmt::Display for ArbiterError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Stores the record and the addresses of members.
pub(crate) trait Arbiter: Send {
    /// Kind and address.
    fn name(&self) -> String;
    /// The record; version 0 if there is none.
    fn read(&mut self) -> Result<Versioned, ArbiterError>;
    /// Replaces the record if it still has this version. Clients that look masters up there find the leader
    /// among the `known` ones.
    fn swap(&mut self, version: u64, record: &Record, known: &[Address]) -> Result<Told, ArbiterError>;
    /// Stores where a member is reached.
    fn announce(&mut self, address: &Address) -> Result<(), ArbiterError>;
    /// Where members are reached.
    fn members(&mut self) -> Result<Vec<Address>, ArbiterError>;
}

/// The record as it is stored.
#[derive(Serialize, Deserialize)]
pub(super) struct Stored {
    format: u32,
    /// Of a file, which has no version of its own.
    #[serde(default)]
    version: u64,
    lineage: u64,
    term: u64,
    leader: u64,
    in_sync: Vec<u64>,
    /// Where clients reach the leader.
    #[serde(default)]
    leader_endpoint: String,
    #[serde(default)]
    members: Vec<StoredMember>,
}

/// Where clients reach a member.
#[derive(Serialize, Deserialize)]
struct StoredMember {
    id: u64,
    endpoint: String,
}

impl Stored {
    pub(super) fn of(version: u64, record: &Record, known: &[Address]) -> Self {
        let Record { reign: Reign { lineage, term }, leader, in_sync } = record;
        let member = |address: &Address| StoredMember { id: address.id, endpoint: address.rpc.clone() };
        Self {
            format: FORMAT,
            version,
            lineage: *lineage,
            term: *term,
            leader: leader.0,
            in_sync: in_sync.iter().map(|id| id.0).collect(),
            leader_endpoint: endpoint_of(*leader, known).into(),
            members: known.iter().map(member).collect(),
        }
    }

    pub(super) fn to_bytes(&self) -> Result<Vec<u8>, ArbiterError> {
        serde_json::to_vec(self).map_err(|error| ArbiterError(error.to_string()))
    }

    pub(super) fn parse(bytes: &[u8]) -> Result<(u64, Record), ArbiterError> {
        let wrong = |why: String| {
            ArbiterError(format!("the record of the masters is none ({why}): remove it when no master runs"))
        };
        let stored: Self = serde_json::from_slice(bytes).map_err(|error| wrong(error.to_string()))?;
        if stored.format != FORMAT {
            return Err(wrong(format!("it has format {}, and this release reads {FORMAT}", stored.format)));
        }
        let mut in_sync: Vec<MemberId> = stored.in_sync.into_iter().map(MemberId).collect();
        in_sync.sort_unstable();
        in_sync.dedup();
        let reign = Reign { lineage: stored.lineage, term: stored.term };
        Ok((stored.version, Record { reign, leader: MemberId(stored.leader), in_sync }))
    }
}

pub(super) fn endpoint_of(leader: MemberId, known: &[Address]) -> &str {
    known.iter().find(|address| address.id == leader.0).map_or("", |address| &address.rpc)
}

/// An arbiter in a directory, for masters of one host: it is not there when the host is not.
#[derive(Debug)]
pub(crate) struct FileArbiter {
    dir: PathBuf,
}

impl FileArbiter {
    pub(crate) fn open(dir: &Path, cluster: &str) -> io::Result<Self> {
        let dir = dir.join(cluster);
        fs::create_dir_all(dir.join("members"))?;
        Ok(Self { dir })
    }

    /// Calls `act` while no other process does.
    fn locked<T>(&self, act: impl FnOnce(&Path) -> Result<T, ArbiterError>) -> Result<T, ArbiterError> {
        let path = self.dir.join("lock");
        let open = File::options().create(true).truncate(false).write(true).mode(0o600).open(&path);
        let file = open.map_err(|error| failed(&path, &error))?;
        file.lock().map_err(|error| failed(&path, &error))?;
        act(&self.dir.join("record.json"))
    }

    fn stored(path: &Path) -> Result<Versioned, ArbiterError> {
        match fs::read(path) {
            Ok(bytes) => {
                let (version, record) = Stored::parse(&bytes)?;
                Ok(Versioned { version, record })
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Versioned::default()),
            Err(error) => Err(failed(path, &error)),
        }
    }

    fn replace(&self, path: &Path, bytes: &[u8]) -> Result<(), ArbiterError> {
        let new = path.with_extension("new");
        let write = || {
            let mut file = File::create(&new)?;
            file.write_all(bytes)?;
            file.sync_all()?;
            fs::rename(&new, path)?;
            File::open(&self.dir)?.sync_all()
        };
        write().map_err(|error| failed(path, &error))
    }
}

fn failed(path: &Path, error: &io::Error) -> ArbiterError {
    ArbiterError(format!("{}: {error}", path.display()))
}

impl Arbiter for FileArbiter {
    fn name(&self) -> String {
        format!("the directory {}", self.dir.display())
    }

    fn read(&mut self) -> Result<Versioned, ArbiterError> {
        self.locked(Self::stored)
    }

    fn swap(&mut self, version: u64, record: &Record, known: &[Address]) -> Result<Told, ArbiterError> {
        self.locked(|path| {
            let is = Self::stored(path)?;
            if is.version != version {
                return Ok(Told::Is(is));
            }
            self.replace(path, &Stored::of(version + 1, record, known).to_bytes()?)?;
            Ok(Told::Swapped { version: version + 1 })
        })
    }

    fn announce(&mut self, address: &Address) -> Result<(), ArbiterError> {
        let bytes = serde_json::to_vec(address).map_err(|error| ArbiterError(error.to_string()))?;
        let path = self.dir.join("members").join(format!("{}.json", address.id));
        self.locked(|_| self.replace(&path, &bytes))
    }

    fn members(&mut self) -> Result<Vec<Address>, ArbiterError> {
        let dir = self.dir.join("members");
        let list = fs::read_dir(&dir).map_err(|error| failed(&dir, &error))?;
        let paths = list.flatten().map(|entry| entry.path());
        let paths = paths.filter(|path| path.extension().is_some_and(|extension| extension == "json"));
        let small = paths.filter(|path| fs::metadata(path).is_ok_and(|of| of.len() <= BYTES_MAX));
        Ok(small
            .filter_map(|path| serde_json::from_slice(&fs::read(path).ok()?).ok())
            .take(MEMBERS_MAX)
            .collect())
    }
}

/// An arbiter on etcd: the record is under `snowskin/CLUSTER/masters`, and members are under
/// `snowskin/CLUSTER/masters/ID`. Where Mooncake's clients look for the leader, it is published as well.
#[cfg(feature = "etcd")]
#[derive(Debug)]
pub(crate) struct EtcdArbiter {
    registers: te_metadata::Registers,
    cluster: String,
    /// The reign whose leader was published.
    published: Reign,
}

#[cfg(feature = "etcd")]
impl EtcdArbiter {
    /// How long one server of etcd may take.
    const TIMEOUT: Duration = Duration::from_millis(1_000);

    pub(crate) fn open(
        source: &te_metadata::MetadataSource,
        cluster: &str,
    ) -> Result<Self, te_metadata::MetadataError> {
        let registers = te_metadata::Registers::open(source, Self::TIMEOUT)?;
        Ok(Self { registers, cluster: cluster.into(), published: Reign::default() })
    }

    fn key(&self) -> String {
        format!("snowskin/{}/masters", self.cluster)
    }

    /// Tells Mooncake's clients. It is a hint: what is there when this fails is an earlier leader.
    fn publish(&mut self, record: &Record, known: &[Address]) {
        let endpoint = endpoint_of(record.leader, known);
        if self.published == record.reign || endpoint.is_empty() {
            return;
        }
        let key = format!("mooncake-store/{}/master_view", self.cluster);
        match self.registers.put(&key, endpoint.as_bytes()) {
            Ok(()) => self.published = record.reign,
            Err(error) => warn!(%error, key, "the leader is not published"),
        }
    }
}

#[cfg(feature = "etcd")]
impl From<te_metadata::MetadataError> for ArbiterError {
    fn from(error: te_metadata::MetadataError) -> Self {
        Self(error.to_string())
    }
}

#[cfg(feature = "etcd")]
impl Arbiter for EtcdArbiter {
    fn name(&self) -> String {
        self.registers.server().to_owned()
    }

    fn read(&mut self) -> Result<Versioned, ArbiterError> {
        versioned(self.registers.read(&self.key())?)
    }

    fn swap(&mut self, version: u64, record: &Record, known: &[Address]) -> Result<Told, ArbiterError> {
        let bytes = Stored::of(0, record, known).to_bytes()?;
        match self.registers.swap(&self.key(), version, &bytes)? {
            te_metadata::Swapped::Yes(version) => {
                self.publish(record, known);
                Ok(Told::Swapped { version })
            }
            te_metadata::Swapped::No(register) => versioned(register).map(Told::Is),
        }
    }

    fn announce(&mut self, address: &Address) -> Result<(), ArbiterError> {
        let bytes = serde_json::to_vec(address).map_err(|error| ArbiterError(error.to_string()))?;
        Ok(self.registers.put(&format!("{}/{}", self.key(), address.id), &bytes)?)
    }

    fn members(&mut self) -> Result<Vec<Address>, ArbiterError> {
        let found = self.registers.list(&format!("{}/", self.key()))?;
        let addresses = found.iter().filter_map(|(_, value)| serde_json::from_slice(value).ok());
        Ok(addresses.take(MEMBERS_MAX).collect())
    }
}

#[cfg(feature = "etcd")]
fn versioned(register: te_metadata::Register) -> Result<Versioned, ArbiterError> {
    if register.version == 0 {
        return Ok(Versioned::default());
    }
    let (_, record) = Stored::parse(&register.value)?;
    Ok(Versioned { version: register.version, record })
}

/// Sends questions to the arbiter's thread. Dropping it ends the thread, after the question under way.
#[derive(Debug)]
pub(super) struct Asker {
    questions: Sender<(u64, Ask)>,
}

impl Asker {
    /// Begins to ask for the member at `me`, whose answers go to `inputs`.
    pub(super) fn start(arbiter: Box<dyn Arbiter>, me: Address, inputs: Inputs) -> io::Result<Self> {
        let (questions, asked) = channel();
        thread::Builder::new().name("snowskin-arbiter".into()).spawn(move || {
            let known = vec![me.clone()];
            Asking { arbiter, me, inputs, announced: false, known, log: LogLimit::default() }.serve(&asked);
        })?;
        Ok(Self { questions })
    }

    pub(super) fn ask(&self, number: u64, ask: Ask) {
        // The thread ends when this is dropped, and not before.
        let _ = self.questions.send((number, ask));
    }
}

struct Asking {
    arbiter: Box<dyn Arbiter>,
    me: Address,
    inputs: Inputs,
    announced: bool,
    known: Vec<Address>,
    log: LogLimit,
}

impl Asking {
    fn serve(&mut self, asked: &Receiver<(u64, Ask)>) {
        let mut pause = PAUSE_MIN;
        let mut refresh_at = Instant::now();
        loop {
            let wait = refresh_at.saturating_duration_since(Instant::now());
            match asked.recv_timeout(wait) {
                Ok((number, ask)) => {
                    let answer = match &ask {
                        Ask::Read => self.arbiter.read().map(Told::Is),
                        Ask::Swap { version, record } => self.arbiter.swap(*version, record, &self.known),
                    };
                    let told = match answer {
                        Ok(told) => {
                            pause = PAUSE_MIN;
                            told
                        }
                        Err(error) => {
                            self.complain(&error);
                            // The member asks again at once.
                            thread::sleep(pause);
                            pause = (pause * 2).min(PAUSE_MAX);
                            Told::Unknown
                        }
                    };
                    if !self.inputs.told(number, told) {
                        return;
                    }
                }
                Err(RecvTimeoutError::Timeout) => {
                    if !self.refresh() {
                        return;
                    }
                    refresh_at = Instant::now() + REFRESH;
                }
                Err(RecvTimeoutError::Disconnected) => return,
            }
        }
    }

    /// Reads the addresses. Returns whether the member is still there.
    fn refresh(&mut self) -> bool {
        if !self.announced {
            match self.arbiter.announce(&self.me) {
                Ok(()) => self.announced = true,
                Err(error) => self.complain(&error),
            }
        }
        let members = self.arbiter.members().map(|mut members| {
            if members.iter().all(|member| member.id != self.me.id) {
                members.push(self.me.clone());
            }
            members.sort_by_key(|member| member.id);
            members
        });
        match members {
            Ok(members) if members == self.known => true,
            Ok(members) => {
                info!(masters = members.len(), arbiter = self.arbiter.name(), "the masters of this cluster");
                self.known.clone_from(&members);
                self.inputs.members(members)
            }
            Err(error) => {
                self.complain(&error);
                true
            }
        }
    }

    fn complain(&mut self, error: &ArbiterError) {
        if let Some(suppressed) = self.log.may(Instant::now()) {
            warn!(%error, suppressed, "the arbiter does not help: no other master can take over meanwhile");
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
pub(super) mod tests {
    use super::*;

    /// What every arbiter must do.
    pub(in crate::ha) fn is_an_arbiter(arbiter: &mut dyn Arbiter, other: &mut dyn Arbiter) {
        assert_eq!(arbiter.read().unwrap(), Versioned::default());
        let record = |term| Record {
            reign: Reign { lineage: u64::from(u32::MAX), term },
            leader: MemberId(u64::MAX),
            in_sync: vec![MemberId(1), MemberId(u64::MAX)],
        };
        let address = |id| Address { id, rpc: format!("h{id}:1"), link: format!("h{id}:2") };
        let known = [address(u64::MAX)];
        let Told::Swapped { version } = arbiter.swap(0, &record(1), &known).unwrap() else {
            panic!("the first")
        };
        assert_eq!(other.read().unwrap(), Versioned { version, record: record(1) });
        let is = Told::Is(Versioned { version, record: record(1) });
        assert_eq!(other.swap(0, &record(2), &known), Ok(is.clone()), "there is a record");
        assert_eq!(other.swap(version + 1, &record(2), &known), Ok(is), "it has another version");
        let Told::Swapped { version: later } = other.swap(version, &record(2), &known).unwrap() else {
            panic!("it has this version")
        };
        assert!(later > version);
        assert_eq!(arbiter.read().unwrap(), Versioned { version: later, record: record(2) });

        assert_eq!(arbiter.members().unwrap(), []);
        arbiter.announce(&address(1)).unwrap();
        other.announce(&address(u64::MAX)).unwrap();
        other.announce(&address(u64::MAX)).unwrap();
        let mut members = arbiter.members().unwrap();
        members.sort_by_key(|member| member.id);
        assert_eq!(members, [address(1), address(u64::MAX)]);
    }

    #[test]
    fn a_directory_is_an_arbiter() {
        let dir = tempfile::tempdir().unwrap();
        let open = || FileArbiter::open(dir.path(), "c").unwrap();
        is_an_arbiter(&mut open(), &mut open());
        fs::write(dir.path().join("c/record.json"), "{}").unwrap();
        let error = open().read().unwrap_err().to_string();
        assert!(error.contains("remove it when no master runs"), "{error}");
    }

    #[cfg(feature = "etcd")]
    #[test]
    fn etcd_is_an_arbiter() {
        let Some(etcd) = super::super::etcd_testkit::Etcd::start() else { return };
        let source: te_metadata::MetadataSource = etcd.url().parse().unwrap();
        let open = || EtcdArbiter::open(&source, "c").unwrap();
        is_an_arbiter(&mut open(), &mut open());
        // Clients find the leader in both ways.
        let registers = te_metadata::Registers::open(&source, Duration::from_secs(5)).unwrap();
        let record = registers.read("snowskin/c/masters").unwrap().value;
        let record: serde_json::Value = serde_json::from_slice(&record).unwrap();
        let endpoint = format!("h{}:1", u64::MAX);
        assert_eq!(record["leader_endpoint"], *endpoint);
        assert_eq!(record["members"][0]["endpoint"], *endpoint);
        assert_eq!(registers.read("mooncake-store/c/master_view").unwrap().value, endpoint.as_bytes());
        // One that is away is no arbiter, and says so.
        drop(etcd);
        let error = open().read().unwrap_err().to_string();
        assert!(error.contains("does not answer"), "{error}");
    }
}
