//! Connections between members.
//!
//! ```text
//!   accepting member                                connecting member
//!   ── magic, versions, challenge ────────────────────────────────▶
//!   ◀───────────── magic, versions, challenge, who it is, proof ──
//!   ── verdict, proof ────────────────────────────────────────────▶
//!   ◀──────────────────────────────── length, message, length, … ──
//! ```
//!
//! A member writes to the connections that it has made, and reads from those that it has accepted: so there
//! are two between two members, and neither waits for the other. A message is written by the serving thread,
//! if it can be written at once; otherwise a thread of the connection does it. A thread also greets who
//! connects; from then on the serving thread reads. Both sides prove the cluster secret. What cannot be sent
//! is dropped: the protocol sends it again.

use std::collections::{HashMap, VecDeque};
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, ToSocketAddrs as _};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use store_core::command_log::BEHAVIOUR;
use store_core::ha::{MESSAGES_VERSION, MemberId, Message};
use store_core::{CHALLENGE_BYTES, PROOF_BYTES, Role, Secret};
use tracing::{debug, info, warn};

use super::Inputs;
use super::arbiter::{Address, MEMBERS_MAX};
use super::incoming::{Counted, Incoming};
use crate::log_limit::LogLimit;

const MAGIC: [u8; 8] = *b"SNOWHA\x00\x01";
/// Messages that wait to be sent to one member, bytes. Further ones are dropped.
const OUTBOX_BYTES_MAX: usize = 64 << 20;
/// Longest description of a member, bytes.
const ADDRESS_BYTES_MAX: usize = 4 << 10;
/// How long connecting, and all of the greeting, may take.
const GREETING_MAX: Duration = Duration::from_millis(500);
/// How long the other side may take nothing of a message.
const STALL_MAX: Duration = Duration::from_secs(2);
/// Pause after a connection was not made: at first, and at most.
const PAUSE_MIN: Duration = Duration::from_millis(10);
const PAUSE_MAX: Duration = Duration::from_millis(500);
/// Most connections that are accepted at a time.
const ACCEPTED_MAX: usize = 4 * MEMBERS_MAX;

/// What the threads of all connections share.
#[derive(Debug)]
struct Common {
    cluster: String,
    secret: Secret,
    me: Address,
    stop: AtomicBool,
    accepted: Arc<AtomicUsize>,
    /// Messages that were dropped because too many waited.
    dropped: AtomicU64,
}

/// Connections to and from other members. Dropping it closes them.
#[derive(Debug)]
pub(super) struct Links {
    common: Arc<Common>,
    listen: SocketAddr,
    outboxes: HashMap<MemberId, Arc<Outbox>>,
}

/// What waits to be sent to one member.
#[derive(Debug, Default)]
struct Outbox {
    waiting: Mutex<Waiting>,
    more: Condvar,
}

#[derive(Debug, Default)]
struct Waiting {
    messages: VecDeque<Vec<u8>>,
    bytes: usize,
    address: String,
    stop: bool,
    /// The connection that the thread has made, and to which address.
    made: Option<(TcpStream, String)>,
    /// The thread is writing.
    writes: bool,
    /// The first message is the rest of one, whose beginning was sent.
    rest: bool,
}

impl Waiting {
    /// Sends a message without the thread, as far as it can be sent at this moment and nothing is before it:
    /// waking the thread takes longer than sending. Returns how much of it was sent.
    fn send_now(&mut self, bytes: &[u8]) -> usize {
        if self.writes || !self.messages.is_empty() {
            return 0;
        }
        let made = self.made.as_ref().filter(|(_, address)| *address == self.address);
        match made.map(|(stream, _)| crate::sys::send_now(stream, bytes)) {
            Some(Ok(sent)) => sent,
            Some(Err(error)) if error.kind() == io::ErrorKind::WouldBlock => 0,
            // The thread finds out why.
            Some(Err(_)) => {
                self.made = None;
                0
            }
            None => 0,
        }
    }
}

impl Links {
    pub(super) fn start(
        listener: TcpListener,
        cluster: &str,
        secret: Secret,
        me: Address,
        inputs: Inputs,
    ) -> io::Result<Self> {
        let listen = listener.local_addr()?;
        let common = Arc::new(Common {
            cluster: cluster.into(),
            secret,
            me,
            stop: AtomicBool::new(false),
            accepted: Arc::default(),
            dropped: AtomicU64::new(0),
        });
        let theirs = Arc::clone(&common);
        let accept = move || accept(&listener, &theirs, &inputs);
        thread::Builder::new().name("snowskin-links".into()).spawn(accept)?;
        Ok(Self { common, listen, outboxes: HashMap::new() })
    }

    /// Messages that were dropped because too many waited.
    pub(super) fn dropped(&self) -> u64 {
        self.common.dropped.load(Ordering::Relaxed)
    }

    /// Sends a message to a member at this address, or drops it.
    pub(super) fn send(&mut self, address: &Address, message: &Message) {
        let id = MemberId(address.id);
        let outbox = match self.outboxes.get(&id) {
            Some(outbox) => outbox,
            None if self.outboxes.len() >= MEMBERS_MAX => return,
            None => {
                let outbox = Arc::new(Outbox::default());
                let (common, theirs) = (Arc::clone(&self.common), Arc::clone(&outbox));
                let write = move || write(&common, &theirs, id);
                if let Err(error) = thread::Builder::new().name("snowskin-link".into()).spawn(write) {
                    warn!(%error, "no thread for a connection to another master");
                    return;
                }
                self.outboxes.entry(id).or_insert(outbox)
            }
        };
        let mut bytes = vec![0; 4];
        message.encode(&mut bytes);
        let len = u32::try_from(bytes.len() - 4).unwrap_or(u32::MAX);
        bytes[..4].copy_from_slice(&len.to_le_bytes());
        let mut waiting = lock(&outbox.waiting);
        if waiting.bytes + bytes.len() > OUTBOX_BYTES_MAX {
            self.common.dropped.fetch_add(1, Ordering::Relaxed);
            return;
        }
        if waiting.address != address.link {
            waiting.address.clone_from(&address.link);
        }
        let sent = waiting.send_now(&bytes);
        if sent == bytes.len() {
            return;
        }
        bytes.drain(..sent);
        waiting.rest |= sent > 0;
        waiting.bytes += bytes.len();
        waiting.messages.push_back(bytes);
        outbox.more.notify_one();
    }
}

impl Drop for Links {
    fn drop(&mut self) {
        self.common.stop.store(true, Ordering::Release);
        for outbox in self.outboxes.values() {
            lock(&outbox.waiting).stop = true;
            outbox.more.notify_one();
        }
        // The thread that accepts sees that it is to stop.
        let _ = TcpStream::connect_timeout(&self.listen, GREETING_MAX);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Writes messages to a member, and connects to it as often as it has to.
fn write(common: &Common, outbox: &Outbox, id: MemberId) {
    let mut stream: Option<(TcpStream, String)> = None;
    let mut pause = PAUSE_MIN;
    let mut log = LogLimit::default();
    loop {
        let (mut messages, address, rest) = {
            let mut waiting = lock(&outbox.waiting);
            waiting.writes = false;
            while waiting.messages.is_empty() && !waiting.stop {
                waiting = outbox.more.wait(waiting).unwrap_or_else(PoisonError::into_inner);
            }
            if waiting.stop {
                return;
            }
            (waiting.bytes, waiting.writes) = (0, true);
            let rest = std::mem::take(&mut waiting.rest);
            (std::mem::take(&mut waiting.messages), waiting.address.clone(), rest)
        };
        if stream.as_ref().is_none_or(|(_, connected)| *connected != address) {
            match connect(common, &address, id) {
                Ok(connected) => {
                    pause = PAUSE_MIN;
                    lock(&outbox.waiting).made =
                        connected.try_clone().ok().map(|clone| (clone, address.clone()));
                    stream = Some((connected, address));
                    if rest {
                        // Its beginning was sent on another connection.
                        messages.pop_front();
                    }
                }
                Err(error) => {
                    if let Some(suppressed) = log.may(Instant::now()) {
                        info!(master = id.0, %address, %error, suppressed, "another master is not reached");
                    }
                    thread::sleep(pause);
                    pause = (pause * 2).min(PAUSE_MAX);
                    continue;
                }
            }
        }
        if let Some((connected, _)) = &mut stream
            && let Err(error) = messages.iter().try_for_each(|message| connected.write_all(message))
        {
            debug!(master = id.0, %error, "the connection to another master has ended");
            lock(&outbox.waiting).made = None;
            stream = None;
        }
    }
}

fn connect(common: &Common, address: &str, id: MemberId) -> io::Result<TcpStream> {
    let found = address.to_socket_addrs()?.next();
    let found = found.ok_or_else(|| io::Error::other("the host has no address"))?;
    let mut stream = TcpStream::connect_timeout(&found, GREETING_MAX)?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(GREETING_MAX))?;
    stream.set_write_timeout(Some(STALL_MAX))?;
    greet(&mut stream, common, id)?;
    Ok(stream)
}

/// What a proof is for: nothing that one side proves is of use to the other, or for another member.
fn purpose(side: &str, cluster: &str, from: u64, to: u64) -> String {
    format!("ha/{side}/{cluster}/{from}/{to}")
}

fn prove(secret: &Secret, challenge: &[u8; CHALLENGE_BYTES], purpose: &str) -> [u8; PROOF_BYTES] {
    store_core::prove(secret.bytes(), Role::Cluster, challenge, purpose)
}

/// A cluster without a secret accepts every proof.
fn is_proved(secret: &Secret, proof: &[u8], challenge: &[u8; CHALLENGE_BYTES], purpose: &str) -> bool {
    !secret.is_set() || store_core::is_proved(secret, proof, Role::Cluster, challenge, purpose)
}

fn versions() -> [u8; 14] {
    let mut bytes = [0; 14];
    bytes[..8].copy_from_slice(&MAGIC);
    bytes[8..10].copy_from_slice(&MESSAGES_VERSION.to_le_bytes());
    bytes[10..].copy_from_slice(&BEHAVIOUR.to_le_bytes());
    bytes
}

fn other_release(theirs: &[u8; 14]) -> io::Error {
    let text = match theirs.starts_with(&MAGIC) {
        true => "it is of another release: use the same release on all masters",
        false => "no master listens there: check its ha.listen and ha.link",
    };
    io::Error::other(text)
}

/// The greeting of the side that connects.
fn greet(stream: &mut (impl Read + Write), common: &Common, to: MemberId) -> io::Result<()> {
    let (mut theirs, mut challenge) = ([0; 14], [0; CHALLENGE_BYTES]);
    stream.read_exact(&mut theirs)?;
    if theirs != versions() {
        return Err(other_release(&theirs));
    }
    stream.read_exact(&mut challenge)?;
    let mine = random()?;
    let me = serde_json::to_vec(&(&common.cluster, &common.me)).map_err(io::Error::other)?;
    let len = u16::try_from(me.len()).map_err(io::Error::other)?;
    let mut hello = versions().to_vec();
    hello.extend_from_slice(&mine);
    hello.extend_from_slice(&len.to_le_bytes());
    hello.extend_from_slice(&me);
    let from = common.me.id;
    let connects = purpose("connects", &common.cluster, from, to.0);
    hello.extend_from_slice(&prove(&common.secret, &challenge, &connects));
    stream.write_all(&hello)?;
    let (mut verdict, mut proof) = ([0; 1], [0; PROOF_BYTES]);
    stream.read_exact(&mut verdict)?;
    match verdict[0] {
        ACCEPTED => {}
        OTHER_CLUSTER => return Err(io::Error::other("it belongs to another cluster: check ha.cluster_id")),
        _ => return Err(io::Error::other("it has another cluster secret: give all masters the same")),
    }
    stream.read_exact(&mut proof)?;
    let accepts = purpose("accepts", &common.cluster, to.0, from);
    if is_proved(&common.secret, &proof, &mine, &accepts) {
        return Ok(());
    }
    Err(io::Error::other(
        "it does not prove the cluster secret, or is another master than it was announced as",
    ))
}

const ACCEPTED: u8 = 0;
const OTHER_CLUSTER: u8 = 1;
const WRONG_SECRET: u8 = 2;

/// The greeting of the side that accepts. Returns who connects.
fn welcome(stream: &mut (impl Read + Write), common: &Common) -> io::Result<Address> {
    let challenge = random()?;
    let mut hello = versions().to_vec();
    hello.extend_from_slice(&challenge);
    stream.write_all(&hello)?;
    let (mut theirs, mut their_challenge, mut len) = ([0; 14], [0; CHALLENGE_BYTES], [0; 2]);
    stream.read_exact(&mut theirs)?;
    if theirs != versions() {
        return Err(other_release(&theirs));
    }
    stream.read_exact(&mut their_challenge)?;
    stream.read_exact(&mut len)?;
    let len = usize::from(u16::from_le_bytes(len));
    if len > ADDRESS_BYTES_MAX {
        return Err(io::Error::other("it describes itself with too many bytes"));
    }
    let mut bytes = vec![0; len];
    stream.read_exact(&mut bytes)?;
    let mut proof = [0; PROOF_BYTES];
    stream.read_exact(&mut proof)?;
    let (cluster, from): (String, Address) = serde_json::from_slice(&bytes).map_err(io::Error::other)?;
    let me = common.me.id;
    if cluster != common.cluster {
        stream.write_all(&[OTHER_CLUSTER])?;
        return Err(io::Error::other(format!("it belongs to the cluster {cluster:?}")));
    }
    let connects = purpose("connects", &cluster, from.id, me);
    if from.id == me || !is_proved(&common.secret, &proof, &challenge, &connects) {
        stream.write_all(&[WRONG_SECRET])?;
        return Err(io::Error::other(
            "it does not prove the cluster secret, or has the number of this master",
        ));
    }
    let mut verdict = vec![ACCEPTED];
    let accepts = purpose("accepts", &cluster, me, from.id);
    verdict.extend_from_slice(&prove(&common.secret, &their_challenge, &accepts));
    stream.write_all(&verdict)?;
    Ok(from)
}

fn random() -> io::Result<[u8; CHALLENGE_BYTES]> {
    let mut bytes = [0; CHALLENGE_BYTES];
    getrandom::fill(&mut bytes).map_err(io::Error::other)?;
    Ok(bytes)
}

fn accept(listener: &TcpListener, common: &Arc<Common>, inputs: &Inputs) {
    loop {
        let accepted = listener.accept();
        if common.stop.load(Ordering::Acquire) {
            return;
        }
        let stream = match accepted {
            Ok((stream, _)) => stream,
            Err(error) => {
                warn!(%error, "connections of other masters cannot be accepted");
                thread::sleep(PAUSE_MAX);
                continue;
            }
        };
        let Some(counted) = Counted::enter(&common.accepted, ACCEPTED_MAX) else {
            debug!("a connection of another master was refused: there are too many");
            continue;
        };
        let (theirs, inputs) = (Arc::clone(common), inputs.clone());
        let greet = move || {
            if let Err(error) = greeted(stream, counted, &theirs, &inputs)
                && !theirs.stop.load(Ordering::Acquire)
            {
                info!(%error, "a connection to this master's ha.listen was refused");
            }
        };
        if let Err(error) = thread::Builder::new().name("snowskin-link".into()).spawn(greet) {
            warn!(%error, "no thread for a connection of another master");
        }
    }
}

/// Greets who connects, and gives the connection to the serving thread.
fn greeted(mut stream: TcpStream, counted: Counted, common: &Common, inputs: &Inputs) -> io::Result<()> {
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(GREETING_MAX))?;
    stream.set_write_timeout(Some(GREETING_MAX))?;
    let from = welcome(&mut stream, common)?;
    let incoming = Incoming::new(MemberId(from.id), stream, counted)?;
    if inputs.members(vec![from]) {
        inputs.incoming(incoming);
    }
    Ok(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;
    use crate::ha::Input;

    struct Place {
        links: Links,
        me: Address,
        inputs: std::sync::mpsc::Receiver<Input>,
        incoming: Vec<Incoming>,
        _poll: mio::Poll,
    }

    fn place(id: u64, cluster: &str, secret: &[u8]) -> Place {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let link = listener.local_addr().unwrap().to_string();
        let poll = mio::Poll::new().unwrap();
        let waker = Arc::new(mio::Waker::new(poll.registry(), mio::Token(0)).unwrap());
        let (inputs, receiver) = Inputs::new(waker);
        let me = Address { id, rpc: format!("h{id}:1"), link };
        let links = Links::start(listener, cluster, Secret::new(secret), me.clone(), inputs).unwrap();
        Place { links, me, inputs: receiver, incoming: Vec::new(), _poll: poll }
    }

    fn message_within(place: &mut Place, ms: u64) -> Option<(MemberId, Message)> {
        let end = Instant::now() + Duration::from_millis(ms);
        let mut found = None;
        while found.is_none() && Instant::now() < end {
            // timing: it waits for what threads do.
            match place.inputs.recv_timeout(Duration::from_millis(1)) {
                Ok(Input::Incoming(incoming)) => place.incoming.push(incoming),
                Ok(_) => continue,
                Err(_) => {}
            }
            place.incoming.retain_mut(|incoming| {
                let heard = incoming.hear(Instant::now(), |from, message| {
                    found = Some((from, message));
                    false
                });
                heard.is_ok()
            });
        }
        found
    }

    #[test]
    fn members_that_know_the_secret_hear_each_other_and_others_do_not() {
        let (mut a, mut b) = (place(1, "c", b"secret"), place(2, "c", b"secret"));
        let long = Message::Append {
            reign: store_core::ha::Reign { lineage: 1, term: 2 },
            after: 3,
            commands: vec![7; 1 << 20],
            beat: 4,
            digest: None,
        };
        a.links.send(&b.me, &Message::Empty { version: 9 });
        a.links.send(&b.me, &long);
        assert_eq!(message_within(&mut b, 10_000), Some((MemberId(1), Message::Empty { version: 9 })));
        assert_eq!(message_within(&mut b, 10_000), Some((MemberId(1), long)));

        for (id, cluster, secret) in [(3, "c", &b"other"[..]), (4, "d", b"secret"), (5, "c", b"")] {
            let mut intruder = place(id, cluster, secret);
            intruder.links.send(&b.me, &Message::Empty { version: 1 });
            assert_eq!(message_within(&mut b, 300), None, "{id}");
            // It does not listen to us either.
            a.links.send(&intruder.me, &Message::Empty { version: 1 });
            assert_eq!(message_within(&mut intruder, 300), None, "{id}");
        }
    }

    #[test]
    fn a_member_that_comes_back_at_another_address_is_reached() {
        let (mut a, mut b) = (place(1, "c", b"s"), place(2, "c", b"s"));
        a.links.send(&b.me, &Message::Empty { version: 1 });
        assert!(message_within(&mut b, 10_000).is_some());
        drop(b);
        let mut b = place(2, "c", b"s");
        a.links.send(&b.me, &Message::Empty { version: 2 });
        assert_eq!(message_within(&mut b, 10_000), Some((MemberId(1), Message::Empty { version: 2 })));
    }

    #[test]
    fn a_member_with_another_number_than_it_was_announced_with_is_not_taken_for_it() {
        let (mut a, mut b) = (place(1, "c", b"s"), place(2, "c", b"s"));
        let wrong = Address { id: 9, ..b.me.clone() };
        a.links.send(&wrong, &Message::Empty { version: 1 });
        assert_eq!(message_within(&mut b, 300), None);
    }
}
