//! One of several masters: a [`Member`] behind sockets.
//!
//! ```text
//!   serving thread                   threads of links              thread of the arbiter
//!     Member ── Send ──▶ socket
//!            ── when it is full ────▶ one per other master
//!            ◀─ socket
//!            ◀── inputs ───────────── connections that were greeted
//!            ── Ask ────────────────────────────────────────────▶ etcd, or a directory
//!            ◀── inputs ──────────────────────────────────────── record, addresses
//! ```
//!
//! Everything that decides is in [`store_core::ha`]. The serving thread never waits for another master or for
//! the arbiter. It reads what masters send itself, because two more threads that wake each other would take
//! longer than the rest; everything else comes through one bounded channel, and wakes it.

mod arbiter;
#[cfg(all(test, feature = "etcd"))]
mod etcd_testkit;
pub(crate) mod http;
mod incoming;
#[cfg(feature = "kubernetes")]
mod kubernetes;
mod links;
pub(crate) mod metrics;
#[cfg(feature = "redis")]
mod publish;

use std::collections::BTreeMap;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use mio::{Registry, Waker};
use store_core::command_log::Lsn;
use store_core::ha::{
    Action, HandOverError, Limits, Member, MemberId, NotLeading, Reign, Rules, Status, Timing, Told,
};
use store_core::message::{NotLeader, encode_not_leader};
use store_core::{Frame, Kind, Master, Session};
use tracing::{info, warn};

use crate::config::{Config, HaConfig};
use crate::error::{BindError, ConfigError};
use arbiter::{Address, Arbiter, Asker, FileArbiter};
use incoming::{AllIncoming, Incoming};
use links::Links;

/// What other threads may have said that was not heard yet. Connections wait when it is full.
const INPUTS_MAX: usize = 256;
/// What is heard before requests are served again.
const INPUTS_PER_TURN: usize = 512;
/// Least time between two snapshots for other masters: the master stands still meanwhile.
const SNAPSHOT_PAUSE: Duration = Duration::from_secs(1);

/// What another thread says.
#[derive(Debug)]
pub(crate) enum Input {
    /// Another member has connected.
    Incoming(Incoming),
    /// An answer of the arbiter.
    Told(u64, Told),
    /// Where members are reached.
    Members(Vec<Address>),
}

/// Where other threads say something. All of its methods return whether anyone hears it.
#[derive(Clone, Debug)]
pub(crate) struct Inputs {
    sender: SyncSender<Input>,
    waker: Arc<Waker>,
}

impl Inputs {
    pub(crate) fn new(waker: Arc<Waker>) -> (Self, Receiver<Input>) {
        let (sender, receiver) = sync_channel(INPUTS_MAX);
        (Self { sender, waker }, receiver)
    }

    fn say(&self, input: Input) -> bool {
        self.sender.send(input).is_ok() && self.waker.wake().is_ok()
    }

    fn incoming(&self, incoming: Incoming) -> bool {
        self.say(Input::Incoming(incoming))
    }

    fn told(&self, number: u64, told: Told) -> bool {
        self.say(Input::Told(number, told))
    }

    fn members(&self, members: Vec<Address>) -> bool {
        self.say(Input::Members(members))
    }
}

/// What is needed to be a member, before the master serves.
#[derive(Debug)]
pub(crate) struct Joining {
    listener: TcpListener,
    arbiter: Box<dyn Named>,
    #[cfg(feature = "redis")]
    view: Option<te_metadata::LeaderView>,
    me: Address,
}

/// An arbiter whose name can be printed.
trait Named: Arbiter + std::fmt::Debug {}
impl<T: Arbiter + std::fmt::Debug> Named for T {}

impl Joining {
    /// Opens everything that can fail. `rpc` is the address at which this master listens.
    pub(crate) fn bind(config: &Config, rpc: SocketAddr) -> Result<Self, BindError> {
        let of = &config.ha;
        let listen = |source| BindError::Listen { field: "ha.listen", addr: of.listen.to_string(), source };
        let listener = TcpListener::bind(of.listen).map_err(listen)?;
        let link = listener.local_addr().map_err(listen)?;
        let rpc = if of.advertise.is_empty() { rpc.to_string() } else { of.advertise.clone() };
        let link = if of.link.is_empty() { with_port(&rpc, link.port()) } else { of.link.clone() };
        let id = if of.member_id == 0 { number_of(&rpc) } else { of.member_id };
        let arbiter = open_arbiter(of)?;
        #[cfg(not(feature = "redis"))]
        if !of.publish.is_empty() {
            let need = "names Redis, which this build lacks: build it with the feature `redis`";
            return Err(BindError::Config(ConfigError { field: "ha.publish", need }));
        }
        Ok(Self {
            listener,
            arbiter,
            #[cfg(feature = "redis")]
            view: publish::open(of)?,
            me: Address { id, rpc, link },
        })
    }

    /// Begins to be a member.
    pub(crate) fn start(self, config: &Config, waker: Arc<Waker>) -> io::Result<Ha> {
        #[cfg(feature = "redis")]
        let publisher =
            self.view.map(|view| publish::Publisher::start(view, self.me.rpc.clone())).transpose()?;
        let Self { listener, arbiter, me, .. } = self;
        let of = &config.ha;
        info!(
            master = me.id,
            rpc = %me.rpc,
            link = %me.link,
            cluster = %of.cluster_id,
            arbiter = %arbiter.name(),
            "one of several masters"
        );
        if !of.listen.ip().is_loopback() && !config.store.cluster_secret.is_set() {
            warn!(
                listen = %of.listen,
                "every process that reaches this address can become one of the masters: set a cluster secret"
            );
        }
        let (inputs, receiver) = Inputs::new(Arc::clone(&waker));
        let secret = config.store.cluster_secret.clone();
        let links = Links::start(listener, &of.cluster_id, secret, me.clone(), inputs.clone())?;
        let arbiter: Box<dyn Arbiter> = arbiter;
        let asker = Asker::start(arbiter, me.clone(), inputs)?;
        let wall = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        // Another number for each start: a random number that the clock cannot repeat.
        let life = (wall.as_micros() as u64) & ((1 << 44) - 1);
        let settings = |error: store_core::ConfigError| io::Error::other(error.to_string());
        let now = store_core::Instant::ZERO;
        let member =
            Member::new(now, MemberId(me.id), life, config.store.clone(), rules(of)).map_err(settings)?;
        let idle = Master::new(config.store.clone()).map_err(settings)?;
        Ok(Ha {
            member,
            idle,
            inputs: receiver,
            links,
            incoming: AllIncoming::default(),
            waker,
            asker,
            #[cfg(feature = "redis")]
            publisher,
            addresses: BTreeMap::from([(me.id, me.clone())]),
            me,
            snapshot_at: Instant::now(),
        })
    }
}

fn rules(of: &HaConfig) -> Rules {
    let ms = |ms: u32| Duration::from_millis(ms.into());
    let timing = Timing {
        beat: ms(of.beat_ms),
        silent: ms(of.silent_ms),
        lease: ms(of.lease_ms),
        take_over: ms(of.take_over_ms),
        unclean: (of.new_lineage_s > 0).then(|| Duration::from_secs(of.new_lineage_s.into())),
        ..Timing::default()
    };
    let limits = Limits {
        history_bytes: u64::from(of.history_mib) << 20,
        snapshot_bytes: u64::from(of.snapshot_mib_max) << 20,
        ..Limits::default()
    };
    Rules { timing, limits, crc32c: ::crc32c::crc32c }
}

impl HaConfig {
    /// Checks the settings of a master that is one of several.
    pub(crate) fn check(&self) -> Result<(), ConfigError> {
        let wrong = |field, need| Err(ConfigError { field, need });
        if self.arbiter.is_empty() {
            return Ok(());
        }
        let rules = rules(self);
        if let Some(need) = rules.timing.fault() {
            return wrong("ha.beat_ms, silent_ms, lease_ms, take_over_ms, new_lineage_s", need);
        }
        if rules.limits.fault().is_some() {
            return wrong("ha.history_mib", "must be at least 8");
        }
        let named = |text: &str| !text.is_empty() && text.len() <= 128 && !text.contains('/') && text != "..";
        if !named(&self.cluster_id) {
            return wrong("ha.cluster_id", "must be 1 to 128 bytes without `/`");
        }
        if self.advertise.len() > 255 || self.link.len() > 255 {
            return wrong("ha.advertise", "must be at most 255 bytes, as ha.link");
        }
        Ok(())
    }

    /// Whether this master is one of several.
    #[must_use]
    pub fn is_on(&self) -> bool {
        !self.arbiter.is_empty()
    }
}

fn open_arbiter(of: &HaConfig) -> Result<Box<dyn Named>, BindError> {
    const NEED: &str = "must be etcd://HOST:PORT[,HOST:PORT…], k8s://NAMESPACE[/LEASE] or file:///DIRECTORY";
    let wrong = |need| BindError::Config(ConfigError { field: "ha.arbiter", need });
    if let Some(dir) = of.arbiter.strip_prefix("file://").filter(|dir| dir.starts_with('/')) {
        let opened = FileArbiter::open(Path::new(dir), &of.cluster_id);
        return match opened {
            Ok(arbiter) => Ok(Box::new(arbiter)),
            Err(source) => Err(BindError::Arbiter { arbiter: of.arbiter.clone(), source }),
        };
    }
    #[cfg(feature = "kubernetes")]
    if let Some(opened) = kubernetes::KubernetesArbiter::open(&of.arbiter, &of.cluster_id) {
        let refused =
            |why| BindError::Arbiter { arbiter: of.arbiter.clone(), source: io::Error::other::<String>(why) };
        return opened.map_err(refused).map(|arbiter| Box::new(arbiter) as Box<dyn Named>);
    }
    #[cfg(not(feature = "kubernetes"))]
    if of.arbiter.starts_with("k8s") {
        return Err(wrong(
            "names Kubernetes, which this build lacks: build it with the feature `kubernetes`",
        ));
    }
    #[cfg(feature = "etcd")]
    if of.arbiter.starts_with("etcd://") {
        let source = of.arbiter.parse().map_err(|_| wrong(NEED))?;
        let arbiter = arbiter::EtcdArbiter::open(&source, &of.cluster_id).map_err(|_| wrong(NEED))?;
        return Ok(Box::new(arbiter));
    }
    #[cfg(not(feature = "etcd"))]
    if of.arbiter.starts_with("etcd://") {
        return Err(wrong("names etcd, which this build lacks: build it with the feature `etcd`"));
    }
    Err(wrong(NEED))
}

/// What the masters of a cluster agree on, as an arbiter says it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ArbiterReport {
    /// The median time of an answer, of 5.
    pub answers_in: Duration,
    /// Whether a master has ever led.
    pub led: bool,
    /// Where clients reach the leader; empty if it is not known.
    pub leader: String,
    /// Lineage and term of the leader.
    pub reign: Reign,
    /// Masters that have said where they are reached.
    pub members: usize,
    /// Masters that may take over, the leader included.
    pub in_sync: usize,
}

impl ArbiterReport {
    /// Asks the arbiter (see [`HaConfig::arbiter`]) about a cluster, and changes nothing.
    ///
    /// # Errors
    /// The settings are wrong, or the arbiter does not answer: what is wrong, and what to do.
    pub fn ask(arbiter: &str, cluster_id: &str) -> Result<Self, String> {
        const ASKED: usize = 5;
        let (arbiter, cluster_id) = (arbiter.to_owned(), cluster_id.to_owned());
        let of = HaConfig { arbiter, cluster_id, ..HaConfig::default() };
        if let Some(dir) = of.arbiter.strip_prefix("file://").filter(|dir| !Path::new(dir).is_dir()) {
            return Err(format!("there is no directory {dir}"));
        }
        let mut arbiter = open_arbiter(&of).map_err(|error| error.to_string())?;
        let (mut times, mut record) = (Vec::new(), store_core::ha::Versioned::default());
        for _ in 0..ASKED {
            let begin = std::time::Instant::now();
            record = arbiter.read().map_err(|error| error.to_string())?;
            times.push(begin.elapsed());
        }
        times.sort_unstable();
        let known = arbiter.members().map_err(|error| error.to_string())?;
        let record_of = record.record;
        Ok(Self {
            answers_in: times[ASKED / 2],
            led: record.version != 0,
            leader: arbiter::endpoint_of(record_of.leader, &known).to_owned(),
            reign: record_of.reign,
            members: known.len(),
            in_sync: record_of.in_sync.len(),
        })
    }
}

/// An address with another port.
fn with_port(addr: &str, port: u16) -> String {
    let host = addr.rsplit_once(':').map_or(addr, |(host, _)| host);
    format!("{host}:{port}")
}

/// A number for the member that is reached there: the same after each start.
fn number_of(addr: &str) -> u64 {
    // FNV-1a. Two members with the same number refuse each other's connections.
    let hash = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
    addr.as_bytes().iter().fold(0xcbf2_9ce4_8422_2325, hash) | 1
}

/// What has happened in a turn.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Turned {
    /// The member no longer leads: its connections are to be closed, before anything else.
    pub(crate) deposed: bool,
    /// The member leads from here on.
    pub(crate) leads: Option<Reign>,
    /// Another master has said something.
    pub(crate) heard: bool,
}

/// What a member shows of itself, and where the others are.
#[derive(Clone, Debug, Default)]
pub(crate) struct HaStats {
    pub(crate) id: u64,
    pub(crate) status: Status,
    pub(crate) serving: bool,
    /// Where clients and nodes reach members, by their number.
    pub(crate) rpc: BTreeMap<u64, String>,
    pub(crate) links_dropped: u64,
}

impl HaStats {
    /// Where the leader is reached, if it is known.
    pub(crate) fn leader(&self) -> Option<(u64, &str)> {
        let record = self.status.record.as_ref()?;
        let id = record.leader.0;
        Some((id, self.rpc.get(&id).map_or("", String::as_str)))
    }
}

/// See the module's documentation.
#[derive(Debug)]
pub(crate) struct Ha {
    member: Member,
    /// Shown while the member has no state.
    idle: Master,
    inputs: Receiver<Input>,
    links: Links,
    incoming: AllIncoming,
    waker: Arc<Waker>,
    asker: Asker,
    #[cfg(feature = "redis")]
    publisher: Option<publish::Publisher>,
    addresses: BTreeMap<u64, Address>,
    me: Address,
    /// The earliest time of the next snapshot.
    snapshot_at: Instant,
}

impl Ha {
    /// The first token of connections of other masters.
    pub(crate) const TOKENS: usize = AllIncoming::FIRST;

    /// Takes settings for the time when it leads.
    pub(crate) fn set_config(&mut self, config: &store_core::MasterConfig) {
        self.member.set_config(config);
    }

    /// The master as this member has it.
    pub(crate) fn master(&self) -> &Master {
        self.member.master().unwrap_or(&self.idle)
    }

    pub(crate) fn master_mut(&mut self) -> &mut Master {
        self.member.master_mut().unwrap_or(&mut self.idle)
    }

    pub(crate) fn is_serving(&self) -> bool {
        self.member.is_serving()
    }

    pub(crate) fn leads(&self) -> bool {
        self.member.leads().is_some()
    }

    /// The master's time.
    pub(crate) fn master_time(&mut self, now: store_core::Instant) -> store_core::Instant {
        self.member.master_time(now).unwrap_or(store_core::Instant::ZERO)
    }

    pub(crate) fn changed(&self) -> Lsn {
        self.member.changed()
    }

    /// Up to which command answers may be given now. A member that does not lead has only answers that say
    /// so.
    pub(crate) fn ready(&mut self, now: store_core::Instant) -> Option<Lsn> {
        if self.leads() { self.member.ready(now) } else { Some(Lsn::MAX) }
    }

    /// Answers a frame, also if the member does not lead: then the connection is to be closed. Returns the
    /// command that the answer depends on.
    pub(crate) fn handle(
        &mut self,
        now: store_core::Instant,
        session: &mut Session,
        frame: &Frame<'_>,
        out: &mut Vec<u8>,
    ) -> Result<Lsn, NotLeading> {
        let handled = self.member.handle(now, session, frame, out);
        if handled.is_err() {
            self.refuse(frame, out);
        }
        handled
    }

    fn refuse(&self, frame: &Frame<'_>, out: &mut Vec<u8>) {
        if frame.header.kind == Kind::ReturnLeases as u8 {
            // It has no response.
            return;
        }
        let status = self.member.status();
        let record = status.record.as_ref();
        let leader = record.map(|record| record.leader.0).filter(|id| *id != self.me.id || self.is_serving());
        let leader = leader.and_then(|id| self.addresses.get(&id)).map(|address| address.rpc.as_str());
        let reign = record.map_or(status.reign, |record| record.reign.max(status.reign));
        let Reign { lineage, term } = reign;
        let mut says = NotLeader { lineage, term, leader, ..NotLeader::default() };
        for address in self.addresses.values() {
            let _ = says.members.push(&address.rpc);
        }
        encode_not_leader(out, frame.header.kind, frame.header.request_id, &says);
    }

    pub(crate) fn set_wall_ms(&mut self, now: store_core::Instant, wall_ms: u64) {
        self.member.set_wall_ms(now, wall_ms);
    }

    pub(crate) fn session_ended(&mut self, now: store_core::Instant, session: Session) {
        self.member.session_ended(now, session);
    }

    /// When [`Self::turn`] is due next.
    pub(crate) fn due(&self) -> store_core::Instant {
        self.member.poll_timeout()
    }

    pub(crate) fn hand_over(
        &mut self,
        now: store_core::Instant,
        to: Option<MemberId>,
    ) -> Result<MemberId, HandOverError> {
        let to = self.member.hand_over(now, to)?;
        info!(to = to.0, "a switchover begins");
        Ok(to)
    }

    pub(crate) fn stats(&self) -> HaStats {
        HaStats {
            id: self.me.id,
            status: self.member.status(),
            serving: self.is_serving(),
            rpc: self.addresses.iter().map(|(id, address)| (*id, address.rpc.clone())).collect(),
            links_dropped: self.links.dropped(),
        }
    }

    /// Hears what other threads have said, does what is due, and sends what is to be sent. `sessions` are all
    /// open connections. `registry`: where connections of other masters are registered.
    pub(crate) fn turn<'a>(
        &mut self,
        now: store_core::Instant,
        registry: &Registry,
        sessions: impl Iterator<Item = &'a Session>,
    ) -> Turned {
        let mut turned = Turned::default();
        for _ in 0..INPUTS_PER_TURN {
            match self.inputs.try_recv() {
                Ok(Input::Incoming(incoming)) => self.incoming.add(registry, incoming),
                Ok(Input::Told(number, told)) => self.member.handle_told(now, number, told),
                Ok(Input::Members(members)) => self.learn(members),
                Err(_) => break,
            }
            self.act(&mut turned);
            if turned.deposed {
                return turned;
            }
        }
        self.hear(now, &mut turned);
        if turned.deposed {
            return turned;
        }
        if self.member.poll_timeout() <= now {
            self.member.handle_timeout(now);
        }
        self.member.flush(now);
        if self.member.wants_snapshot() && Instant::now() >= self.snapshot_at {
            let began = Instant::now();
            self.member.take_snapshot(now, sessions);
            let took = began.elapsed();
            self.snapshot_at = Instant::now() + SNAPSHOT_PAUSE.max(10 * took);
            info!(took_ms = took.as_millis() as u64, "a snapshot for another master");
        }
        self.act(&mut turned);
        turned
    }

    /// Another master has sent something. `closed`: it is the last.
    pub(crate) fn readable(&mut self, token: usize, closed: bool) {
        self.incoming.ready(token, closed);
    }

    /// Hears what other masters have sent, until this one does not lead any more.
    fn hear(&mut self, now: store_core::Instant, turned: &mut Turned) {
        let mut incoming = std::mem::take(&mut self.incoming);
        let more = incoming.hear(Instant::now(), |from, message| {
            self.member.handle_message(now, from, message);
            self.act(turned);
            turned.heard = true;
            !turned.deposed
        });
        self.incoming = incoming;
        if more {
            // After requests were served.
            let _ = self.waker.wake();
        }
    }

    fn learn(&mut self, members: Vec<Address>) {
        for member in members {
            let known =
                self.addresses.contains_key(&member.id) || self.addresses.len() < arbiter::MEMBERS_MAX;
            if member.id != self.me.id && known {
                self.addresses.insert(member.id, member);
            }
        }
    }

    fn act(&mut self, turned: &mut Turned) {
        while let Some(action) = self.member.poll_action() {
            match action {
                Action::Send(to, message) => {
                    if let Some(address) = self.addresses.get(&to.0) {
                        self.links.send(address, &message);
                    }
                }
                Action::Ask(number, ask) => self.asker.ask(number, ask),
                Action::Leads(reign) => {
                    info!(lineage = reign.lineage, term = reign.term, "this master leads");
                    #[cfg(feature = "redis")]
                    self.publisher.iter().for_each(|publisher| publisher.leads(Some(reign)));
                    turned.leads = Some(reign);
                }
                Action::Deposed => {
                    warn!("this master does not lead any more: its connections are closed");
                    #[cfg(feature = "redis")]
                    self.publisher.iter().for_each(|publisher| publisher.leads(None));
                    (turned.leads, turned.deposed) = (None, true);
                }
            }
        }
    }
}
