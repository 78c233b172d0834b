//! Several masters as processes, with etcd or a directory as their arbiter: one dies, is stopped, or hands
//! over, and no acknowledged change is lost.
//!
//! `SNOWSKIN_HA_ROUNDS=100 cargo test --release -p store-master --features etcd --test ha -- --nocapture`
//! measures how long clients are not served.
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a test fails by panicking")]

mod common;

use std::env;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use common::followers::{Follower, Socket};
use common::{Answer, hello, read_answer, with};
use conductor_core::zmtp::Kind;
use store_core::message::{
    Beat, Commit, Get, Greeting, Heartbeat, Hello, LeaseWanted, Mount, MountSegment, NewObject, NodeStatus,
    NotLeader, Operation, PutEnd, PutOptions, PutRequest, PutStart, Removal, Remove, Welcome,
};
use store_core::{ErrorCode, Incarnation, Key, NodeId};
use store_master::{Config, MasterServer};
use te_fabric::testkit::eventually;

/// The settings of the master that this process is to be, in JSON.
const CHILD: &str = "SNOWSKIN_TEST_MASTER";
const ROUNDS: &str = "SNOWSKIN_HA_ROUNDS";
const OBJECT: u64 = 1_000;
const NODE: u64 = 0xa;

fn rounds(usually: usize) -> usize {
    env::var(ROUNDS).ok().and_then(|text| text.parse().ok()).unwrap_or(usually)
}

/// This is not a test: the other tests start this binary again, to be a master.
#[test]
fn a_master() {
    let Ok(text) = env::var(CHILD) else { return };
    let parent = std::os::unix::process::parent_id();
    thread::spawn(move || {
        // It does not outlive its test.
        while std::os::unix::process::parent_id() == parent {
            thread::sleep(Duration::from_millis(100)); // timing: only how soon an orphan ends
        }
        std::process::exit(1);
    });
    let config: Config = serde_json::from_str(&text).unwrap();
    MasterServer::bind(config).unwrap().run().unwrap();
}

/// A master in a process of its own.
struct Master {
    config: Config,
    child: Child,
}

impl Master {
    fn start(config: &Config) -> Self {
        let mut command = Command::new(env::current_exe().unwrap());
        command.args(["a_master", "--exact", "--nocapture"]);
        command.env(CHILD, serde_json::to_string(config).unwrap());
        if env::var_os("SNOWSKIN_HA_TALK").is_none() {
            command.stdout(Stdio::null()).stderr(Stdio::null());
        }
        Self { config: config.clone(), child: command.spawn().unwrap() }
    }

    fn rpc(&self) -> SocketAddr {
        self.config.rpc_listen
    }

    fn http(&self) -> SocketAddr {
        self.config.http_listen.unwrap()
    }

    /// Sends a signal.
    fn signal(&self, name: &str) {
        let pid = self.child.id().to_string();
        assert!(Command::new("kill").args([name, &pid]).status().unwrap().success());
    }

    fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// What it says of the masters; `None`: it does not answer.
    fn masters(&self) -> Option<serde_json::Value> {
        let text = http(self.http(), "GET /api/v1/masters HTTP/1.1\r\nhost: localhost\r\n", "")?;
        serde_json::from_str(text.split_once("\r\n\r\n")?.1).ok()
    }

    fn leads(&self) -> bool {
        self.masters().is_some_and(|says| says["role"] == "leading" && says["serving"] == true)
    }

    /// How many masters may take over, as the leader says.
    fn in_sync(&self) -> usize {
        let Some(says) = self.masters().filter(|says| says["role"] == "leading") else { return 0 };
        let masters = says["masters"].as_array().unwrap();
        masters.iter().filter(|master| master["in_sync"] == true).count()
    }
}

impl Drop for Master {
    fn drop(&mut self) {
        self.kill();
    }
}

fn http(addr: SocketAddr, head: &str, body: &str) -> Option<String> {
    let mut stream = TcpStream::connect_timeout(&addr, Duration::from_millis(300)).ok()?;
    stream.set_read_timeout(Some(Duration::from_secs(1))).ok()?;
    let length = if body.is_empty() { String::new() } else { format!("content-length: {}\r\n", body.len()) };
    write!(stream, "{head}{length}connection: close\r\n\r\n{body}").ok()?;
    let mut text = String::new();
    stream.read_to_string(&mut text).ok()?;
    Some(text)
}

fn free_port() -> SocketAddr {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap()
}

/// etcd, if it is installed and this build has it; otherwise a directory.
struct Arbiter {
    dir: tempfile::TempDir,
    etcd: Option<(Child, SocketAddr)>,
}

impl Arbiter {
    fn start() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let etcd = cfg!(feature = "etcd").then(|| start_etcd(dir.path())).flatten();
        if etcd.is_none() {
            println!("no etcd (`apt-get install etcd-server`, and the feature `etcd`): a directory decides");
        }
        Self { dir, etcd }
    }

    fn url(&self) -> String {
        match &self.etcd {
            Some((_, addr)) => format!("etcd://{addr}"),
            None => format!("file://{}", self.dir.path().display()),
        }
    }
}

fn start_etcd(dir: &Path) -> Option<(Child, SocketAddr)> {
    let (addr, peers) = (free_port(), format!("http://{}", free_port()));
    let clients = format!("http://{addr}");
    let mut command = Command::new("etcd");
    command.args(["--name", "t", "--data-dir"]).arg(dir.join("etcd"));
    command.args(["--listen-client-urls", &clients, "--advertise-client-urls", &clients]);
    command.args(["--listen-peer-urls", &peers, "--initial-advertise-peer-urls", &peers]);
    command.args(["--initial-cluster", &format!("t={peers}")]);
    let child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().ok()?;
    eventually("etcd answers", || TcpStream::connect(addr).is_ok());
    Some((child, addr))
}

impl Drop for Arbiter {
    fn drop(&mut self) {
        if let Some((child, _)) = &mut self.etcd {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn config(arbiter: &Arbiter) -> Config {
    with(Config::default(), |config| {
        config.rpc_listen = free_port();
        config.http_listen = Some(free_port());
        config.ha.arbiter = arbiter.url();
        config.ha.listen = free_port();
        config.store.cluster_secret = store_core::Secret::default();
    })
}

/// Two masters in sync.
fn pair(arbiter: &Arbiter) -> Vec<Master> {
    let masters = vec![Master::start(&config(arbiter)), Master::start(&config(arbiter))];
    eventually("both masters are in sync", || masters.iter().any(|master| master.in_sync() == 2));
    masters
}

fn leader_of(masters: &[Master]) -> usize {
    let mut leader = None;
    eventually("a master leads", || {
        leader = masters.iter().position(Master::leads);
        leader.is_some()
    });
    leader.unwrap()
}

/// Asks whichever master leads.
struct Client {
    masters: Vec<SocketAddr>,
    current: usize,
    stream: Option<TcpStream>,
    number: u64,
    welcome: Option<Welcome>,
    /// Requests that were sent again.
    repeated: u64,
}

impl Client {
    fn new(masters: &[Master]) -> Self {
        let masters = masters.iter().map(Master::rpc).collect();
        Self { masters, current: 0, stream: None, number: 0, welcome: None, repeated: 0 }
    }

    fn connect(&mut self) -> Option<()> {
        let addr = self.masters[self.current];
        let mut stream = TcpStream::connect_timeout(&addr, Duration::from_millis(200)).ok()?;
        stream.set_nodelay(true).ok()?;
        stream.set_read_timeout(Some(Duration::from_millis(300))).ok()?;
        stream.write_all(&hello(1)).ok()?;
        let answer = read_answer(&mut stream).ok()?;
        let (welcome, _) = Hello::decode_response(&answer.frame()).ok()?;
        if let Some(before) = &self.welcome {
            assert_eq!(welcome.lineage, before.lineage, "everything was lost");
            if welcome.reign() < before.reign() {
                return None;
            }
        }
        self.welcome = Some(welcome);
        self.stream = Some(stream);
        Some(())
    }

    fn try_call(&mut self, request: &[u8]) -> Option<Answer> {
        if self.stream.is_none() {
            self.connect()?;
        }
        let stream = self.stream.as_mut()?;
        stream.write_all(request).ok()?;
        let answer = read_answer(stream).ok()?;
        (NotLeader::of(&answer.frame()).is_none()).then_some(answer)
    }

    /// The answer of the master that leads; the request may have been carried out several times.
    fn call(&mut self, encode: impl Fn(&mut Vec<u8>, u64)) -> Answer {
        let began = Instant::now();
        loop {
            self.number += 1;
            let mut request = Vec::new();
            encode(&mut request, self.number);
            if let Some(answer) = self.try_call(&request) {
                assert_eq!(answer.header.request_id, self.number);
                return answer;
            }
            self.repeated += 1;
            self.stream = None;
            self.current = (self.current + 1) % self.masters.len();
            assert!(began.elapsed() < Duration::from_secs(30), "no master leads"); // timing: gives up
            thread::sleep(Duration::from_millis(2)); // timing: a pause between tries
        }
    }

    fn put(&mut self, key: &[u8]) {
        let nonce = getrandom::u32().unwrap() | 1;
        let start = self.call(|out, number| {
            let head = PutRequest { nonce, options: PutOptions::DEFAULT, writer: 1 };
            let new = NewObject { key: Key(key), len: OBJECT };
            PutStart::encode_request(out, number, &head, [new].into_iter()).unwrap();
        });
        let start = start.frame();
        let allocation = PutStart::decode_response(&start).unwrap().1.next().unwrap().unwrap();
        let (generation, handle) = (allocation.generation, allocation.handle);
        let end = self.call(|out, number| {
            let commit = Commit { key: Key(key), generation, handle, checksum: 1 };
            PutEnd::encode_request(out, number, &(), [commit].into_iter()).unwrap();
        });
        PutEnd::decode_response(&end.frame()).unwrap().1.next().unwrap().unwrap();
    }

    fn has(&mut self, key: &[u8]) -> bool {
        let got = self.call(|out, number| {
            Get::encode_request(out, number, &LeaseWanted::Quick, [Key(key)].into_iter()).unwrap()
        });
        match Get::decode_response(&got.frame()).unwrap().1.next().unwrap() {
            Ok(object) => {
                assert_eq!(object.len, OBJECT);
                true
            }
            Err(ErrorCode::ObjectNotFound) => false,
            Err(error) => panic!("{error}"),
        }
    }

    fn remove(&mut self, key: &[u8]) {
        let removed = self.call(|out, number| {
            let item = Removal { key: Key(key), force: true };
            Remove::encode_request(out, number, &(), [item].into_iter()).unwrap();
        });
        match Remove::decode_response(&removed.frame()).unwrap().1.next().unwrap() {
            // The first try had no answer.
            Ok(()) | Err(ErrorCode::KeyNotFound) => {}
            Err(error) => panic!("{error}"),
        }
    }

    fn mount(&mut self) {
        self.call(|out, number| {
            Hello::encode_request(out, number, &Greeting::default(), std::iter::empty()).unwrap();
        });
        let lineage = self.welcome.as_ref().unwrap().lineage;
        let mounted = self.call(|out, number| {
            let segment = MountSegment {
                node: NodeId::new(NODE),
                incarnation: Incarnation::new(1),
                name: "n",
                endpoint: "n:1",
                len: 256 << 20,
                lineage,
                key: 5,
                ..MountSegment::default()
            };
            Mount::encode_request(out, number, &segment, std::iter::empty()).unwrap();
        });
        assert_eq!(mounted.header.status, 0);
    }

    fn beat(&mut self) {
        let answer = self.call(|out, number| {
            let beat = Heartbeat { node: NodeId::new(NODE), incarnation: Incarnation::new(1), key: 5 };
            Beat::encode_request(out, number, &beat, std::iter::empty()).unwrap();
        });
        let (status, _) = Beat::decode_response(&answer.frame()).unwrap();
        assert!(!matches!(status, NodeStatus::NeedRemount), "the node was forgotten");
    }
}

/// Clients that put and remove objects all the time.
struct Load {
    stop: Arc<AtomicBool>,
    done: Arc<AtomicU64>,
    /// They return the keys that are there, and those that were removed.
    writers: Vec<JoinHandle<[Vec<Vec<u8>>; 2]>>,
    node: JoinHandle<()>,
}

impl Load {
    fn start(masters: &[Master]) -> Self {
        let (stop, done) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        Client::new(masters).mount();
        let writer = |no: usize| {
            let (mut client, stop, done) = (Client::new(masters), Arc::clone(&stop), Arc::clone(&done));
            thread::spawn(move || {
                let (mut kept, mut removed) = (Vec::new(), Vec::new());
                for count in 0.. {
                    if stop.load(Ordering::Relaxed) {
                        break;
                    }
                    let key = format!("{no}-{count}").into_bytes();
                    client.put(&key);
                    if count % 4 == 0 {
                        client.remove(&key);
                        removed.push(key);
                    } else {
                        kept.push(key);
                    }
                    done.fetch_add(1, Ordering::Relaxed);
                    // The machine is shared, and what is stored is bounded.
                    thread::sleep(Duration::from_millis(1)); // timing: the load, not what is checked
                }
                [kept, removed]
            })
        };
        let writers = (0..2).map(writer).collect();
        let (mut client, stops) = (Client::new(masters), Arc::clone(&stop));
        let node = thread::spawn(move || {
            while !stops.load(Ordering::Relaxed) {
                client.beat();
                thread::sleep(Duration::from_millis(200)); // timing: the pace of heartbeats
            }
        });
        Self { stop, done, writers, node }
    }

    /// Waits until more was done.
    fn goes_on(&self) -> Duration {
        let (before, began) = (self.done.load(Ordering::Relaxed), Instant::now());
        eventually("puts end", || self.done.load(Ordering::Relaxed) > before + 4);
        began.elapsed() // timing: measured, and not judged
    }

    /// Ends, and checks that everything is as it was acknowledged.
    fn check(self, masters: &[Master]) -> usize {
        self.stop.store(true, Ordering::Relaxed);
        let mut client = Client::new(masters);
        let mut checked = 0;
        for writer in self.writers {
            let [kept, removed] = writer.join().unwrap();
            for key in &kept {
                assert!(client.has(key), "{} is lost", String::from_utf8_lossy(key));
            }
            for key in &removed {
                assert!(!client.has(key), "{} is back", String::from_utf8_lossy(key));
            }
            checked += kept.len() + removed.len();
        }
        self.node.join().unwrap();
        checked
    }
}

fn show(what: &str, mut times: Vec<Duration>) {
    times.sort_unstable();
    let at = |share: usize| times[(times.len() - 1) * share / 100];
    println!("{what}: p50 {:?}, p99 {:?}, max {:?} ({} times)", at(50), at(99), at(100), times.len());
}

#[test]
fn when_the_leader_is_killed_under_load_nothing_acknowledged_is_lost() {
    let arbiter = Arbiter::start();
    let mut masters = pair(&arbiter);
    let load = Load::start(&masters);
    let mut outages = Vec::new();
    for _ in 0..rounds(3) {
        load.goes_on();
        let leader = leader_of(&masters);
        eventually("the other one is in sync", || masters[leader].in_sync() == 2);
        masters[leader].kill();
        outages.push(load.goes_on());
        let config = masters[leader].config.clone();
        masters[leader] = Master::start(&config);
    }
    assert!(load.check(&masters) > 100);
    show("no put ends after the leader was killed", outages);
}

#[test]
fn a_leader_that_was_stopped_answers_nothing_when_it_goes_on() {
    let arbiter = Arbiter::start();
    let masters = pair(&arbiter);
    let load = Load::start(&masters);
    let mut outages = Vec::new();
    for _ in 0..rounds(1) {
        load.goes_on();
        let old = leader_of(&masters);
        eventually("the other one is in sync", || masters[old].in_sync() == 2);
        let mut waiting = Client::new(&masters[old..=old]);
        assert!(!waiting.has(b"nothing"));
        masters[old].signal("-STOP");
        outages.push(load.goes_on());
        // It finds these requests when it goes on.
        let stream = waiting.stream.as_mut().unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        for number in 0..10 {
            let mut request = Vec::new();
            let key = [Key(b"nothing")].into_iter();
            Get::encode_request(&mut request, 100 + number, &LeaseWanted::Quick, key).unwrap();
            stream.write_all(&request).unwrap();
        }
        masters[old].signal("-CONT");
        while let Ok(answer) = read_answer(stream) {
            let frame = answer.frame();
            assert!(NotLeader::of(&frame).is_some(), "an answer of an earlier term: {:?}", frame.header);
        }
        eventually("it is in sync again", || masters[1 - old].in_sync() == 2);
    }
    load.check(&masters);
    show("no put ends after the leader was stopped", outages);
}

#[test]
fn a_leader_hands_over_under_load() {
    let arbiter = Arbiter::start();
    let masters = pair(&arbiter);
    let load = Load::start(&masters);
    let mut outages = Vec::new();
    for round in 0..rounds(2) {
        load.goes_on();
        let old = leader_of(&masters);
        eventually("the other one is in sync", || masters[old].in_sync() == 2);
        let head =
            "POST /api/v1/switchover HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n";
        let answer = http(masters[old].http(), head, "{}").unwrap();
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
        outages.push(load.goes_on());
        eventually("the other one leads", || masters[1 - old].leads());
        let follower = http(masters[old].http(), head, "{}").unwrap();
        assert!(
            follower.starts_with("HTTP/1.1 409") && follower.contains("does not lead"),
            "{round} {follower}"
        );
    }
    load.check(&masters);
    show("no put ends after a switchover began", outages);
}

#[test]
fn followers_of_kv_events_follow_a_new_leader() {
    let arbiter = Arbiter::start();
    let mut masters: Vec<Master> = (0..2)
        .map(|_| {
            Master::start(&with(config(&arbiter), |config| {
                config.kv_events.listen = Some(free_port());
                config.kv_events.replay_listen = Some(free_port());
            }))
        })
        .collect();
    let leader = leader_of(&masters);
    eventually("the other master has it all", || masters[leader].in_sync() == 2);
    let mut client = Client::new(&masters);
    client.mount();
    // Keys that are numbers are hashes of blocks.
    (1..=10).for_each(|key: u32| client.put(key.to_string().as_bytes()));
    let told = |master: &Master| {
        let replays = master.config.kv_events.replay_listen.unwrap();
        let mut follower = Follower::default();
        Socket::connect(replays, Kind::Dealer).replay(0).iter().for_each(|message| follower.take(message));
        follower
    };
    let before = told(&masters[leader]);
    assert_eq!((before.found.len(), before.cleared), (10, 1));
    // Of the master that follows nothing is found.
    let other = 1 - leader;
    assert_eq!((told(&masters[other]).found.len(), told(&masters[other]).cleared), (0, 1));
    let listen = masters[other].config.kv_events.listen.unwrap();
    let (mut live, mut socket) = (Follower::default(), Socket::connect(listen, Kind::Sub));
    masters[leader].kill();
    while live.found.len() < 10 {
        live.take(&socket.receive());
    }
    assert_eq!((&live.found, live.cleared), (&before.found, 1));
    assert!(live.next > before.next, "the numbers of the later epoch are higher");
}

#[test]
fn a_master_that_follows_says_who_leads() {
    let arbiter = Arbiter::start();
    let masters = pair(&arbiter);
    let (leader, follower) = (leader_of(&masters), 1 - leader_of(&masters));
    let mut stream = common::connect(masters[follower].rpc());
    stream.write_all(&hello(7)).unwrap();
    let answer = read_answer(&mut stream).unwrap();
    let frame = answer.frame();
    let says = NotLeader::of(&frame).unwrap();
    assert_eq!((says.leader, answer.header.request_id), (Some(&*masters[leader].rpc().to_string()), 7));
    let mut members: Vec<&str> = says.members.iter().copied().collect();
    let mut all: Vec<String> = masters.iter().map(|master| master.rpc().to_string()).collect();
    members.sort_unstable();
    all.sort_unstable();
    assert_eq!(members, all);

    let of = |master: &Master, path: &str| {
        let text = http(master.http(), &format!("GET {path} HTTP/1.1\r\nhost: localhost\r\n"), "").unwrap();
        text.split_once("\r\n\r\n").unwrap().1.to_owned()
    };
    assert_eq!(of(&masters[leader], "/role").trim(), "leader");
    assert_eq!(of(&masters[follower], "/role").trim(), "standby");
    assert!(of(&masters[follower], "/leader").contains(&masters[leader].rpc().to_string()));
    let metrics = of(&masters[leader], "/metrics");
    for line in ["ha_role{role=\"leading\"} 1", "ha_in_sync 2", "ha_takeovers_total 1", "ha_serving 1"] {
        assert!(metrics.lines().any(|text| text.ends_with(line)), "{line} in {metrics}");
    }
}

#[test]
fn an_arbiter_that_cannot_be_used_is_named_with_the_reason() {
    let config = with(Config::default(), |config| {
        config.rpc_listen = "127.0.0.1:0".parse().unwrap();
        config.ha.listen = "127.0.0.1:0".parse().unwrap();
        config.ha.arbiter = "file:///proc/none".into();
    });
    let error = MasterServer::bind(config).map(drop).unwrap_err();
    let text = error.to_string();
    assert!(matches!(error, store_master::BindError::Arbiter { .. }), "{text}");
    assert!(text.contains("ha.arbiter file:///proc/none"), "{text}");
}

/// Redis, in a directory of its own.
struct Redis {
    child: Child,
    addr: SocketAddr,
    _dir: tempfile::TempDir,
}

impl Redis {
    /// `None`: it is not installed.
    fn start() -> Option<Self> {
        let (addr, dir) = (free_port(), tempfile::tempdir().unwrap());
        let mut command = Command::new("redis-server");
        command.args(["--bind", "127.0.0.1", "--save", "", "--port", &addr.port().to_string(), "--dir"]);
        let child = command.arg(dir.path()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().ok()?;
        eventually("redis answers", || TcpStream::connect(addr).is_ok());
        Some(Self { child, addr, _dir: dir })
    }

    /// The fields that Mooncake's clients read, as they ask for them: nothing if the key is not there.
    fn view(&self, cluster: &str) -> Vec<String> {
        let mut stream = TcpStream::connect(self.addr).unwrap();
        let key = format!("mooncake-store/{{{cluster}}}/master_view");
        let words = ["HMGET", &key, "leader_address", "view_version", "owner_token"];
        let mut command = format!("*{}\r\n", words.len());
        words.iter().for_each(|word| command += &format!("${}\r\n{word}\r\n", word.len()));
        stream.write_all(command.as_bytes()).unwrap();
        stream.shutdown(std::net::Shutdown::Write).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        // `*3`, then a line with the length and one with the value for each.
        answer.lines().skip(2).step_by(2).map(str::to_owned).collect()
    }
}

impl Drop for Redis {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn the_leader_is_published_on_redis_and_the_next_one_with_a_higher_version() {
    let Some(redis) = Redis::start() else {
        println!("SKIPPED: no redis-server (`apt-get install redis-server`)");
        return;
    };
    let arbiter = Arbiter::start();
    let mut masters = [1, 2].map(|_| {
        Master::start(&with(config(&arbiter), |config| {
            config.ha.publish = format!("redis://{}", redis.addr);
            config.ha.cluster_id = "kv{1}".into();
        }))
    });
    eventually("two in sync", || masters.iter().any(|master| master.in_sync() == 2));
    let view = || redis.view("kv_1_");
    let first = masters.iter().position(Master::leads).unwrap();
    let address = |master: &Master| master.config.rpc_listen.to_string();
    eventually("the leader is published", || view().first() == Some(&address(&masters[first])));
    let before: u64 = view()[1].parse().unwrap();
    assert!(!view()[2].is_empty());
    masters[first].kill();
    let other = 1 - first;
    eventually("the next leader is published", || view().first() == Some(&address(&masters[other])));
    assert!(view()[1].parse::<u64>().unwrap() > before);
    masters[other].kill();
    eventually("it is forgotten when none leads", || view().first().is_none_or(|line| line == "$-1"));
}
