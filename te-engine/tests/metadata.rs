//! Segment names with real servers: the store's master over HTTP, `redis-server`, `etcd`. Each test starts a
//! server on a free port, with an empty directory, and kills it at the end. Tests of a server that is not
//! installed are ignored, with a reason.
#![allow(clippy::unwrap_used, reason = "a test that fails reports the line")]

mod common;
#[path = "metadata/servers.rs"]
mod servers;

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use common::{bytes, eventually, pattern, request};
use libtest_mimic::{Arguments, Completion, Trial};
use servers::{Kind, PASSWORD, Server};
use te_core::{Access, Op};
use te_engine::metadata::{Entry, KeyValue};
use te_engine::{
    Config, Directory, Fabrics, Liveness, MetadataConfig, MetadataError, MetadataSource, Registration,
    SegmentError, TransferEngine,
};

const ROLE: &str = "TE_ENGINE_TEST_METADATA_ROLE";
const TIMEOUT: Duration = Duration::from_secs(5);
const LONG: Duration = Duration::from_secs(60);
const HOUR_MS: u32 = 3_600_000;

type Test = fn(Kind);
const OF_ALL: [(&str, Test); 13] = [
    ("a_segment_is_found_by_its_name_until_its_owner_stops", found_by_name),
    ("the_name_of_a_killed_owner_expires", killed_owner),
    ("an_owner_that_restarts_takes_its_name_at_once", restarted_owner),
    ("an_entry_of_an_earlier_incarnation_is_refused", earlier_incarnation),
    ("an_older_owner_does_not_take_the_name_of_a_newer", older_owner),
    ("of_many_owners_at_once_the_newest_has_the_name", race),
    ("after_a_restart_of_the_server_names_are_registered_again", server_restarts),
    ("a_server_that_hangs_is_a_timeout_and_delays_no_transfer", server_hangs),
    ("what_is_not_an_entry_is_reported_and_not_overwritten", garbage),
    ("values_beyond_an_entrys_length_are_reported", huge_values),
    ("a_server_that_does_not_run_is_named_in_the_error", no_server),
    ("an_address_is_not_looked_up", addresses),
    ("plain_keys_are_put_read_and_deleted", plain_keys),
];
const OF_REDIS: [(&str, Test); 2] = [
    ("a_wrong_password_is_reported_and_not_shown", wrong_password),
    ("a_key_of_another_type_is_reported", another_type),
];
const OF_ETCD: [(&str, Test); 2] = [
    ("the_next_server_is_used_when_the_first_does_not_run", next_server),
    ("a_server_of_another_kind_is_reported", another_kind),
];

fn main() -> ExitCode {
    match std::env::var(ROLE).as_deref() {
        Ok("server") => servers::serve(),
        Ok("owner") => own(),
        _ => {}
    }
    let arguments = Arguments::from_args();
    let mut trials = Vec::new();
    for kind in Kind::ALL {
        let of_kind: &[(&str, Test)] = match kind {
            Kind::Http => &[],
            Kind::Redis => &OF_REDIS,
            Kind::Etcd => &OF_ETCD,
        };
        for &(name, test) in OF_ALL.iter().chain(of_kind) {
            trials.push(Trial::ignorable_test(format!("{}::{name}", kind.name()), move || {
                if let Some(missing) = kind.missing() {
                    eprintln!("ignored: {missing}");
                    return Ok(Completion::ignored_with(missing));
                }
                test(kind);
                Ok(Completion::Completed)
            }));
        }
    }
    libtest_mimic::run(&arguments, trials).exit_code()
}

fn found_by_name(kind: Kind) {
    let server = Server::start(kind);
    let there = owner(&server, "prefill/3", HOUR_MS);
    let remote = there.alloc_shared(1 << 16, Access::all()).unwrap();
    let here = looker(server.source());
    assert_eq!(here.registration(), Registration::None);
    let segment = here.open_segment("prefill/3").unwrap();
    let local = here.alloc_shared(1 << 16, Access::LOCAL).unwrap();
    let content = pattern(3, 1 << 16);
    local.write(0, &content).unwrap();
    let write = request(Op::Write, (local.id(), 0), segment, remote.addr(), 1 << 16);
    here.submit(&[write], Some(LONG)).unwrap().wait(None).unwrap();
    assert!(bytes(&remote) == content);
    // Notifications and probes find the owner, too.
    here.notify(segment, "done", b"3").unwrap();
    assert_eq!(there.take_notifications()[0].message, b"3");
    let alive = Liveness::Alive { incarnation: there.incarnation() };
    assert_eq!(here.probe(segment, TIMEOUT).unwrap(), alive);
    let more = there.alloc_shared(4096, Access::all()).unwrap();
    here.refresh_segment(segment).unwrap();
    assert!(here.segment_regions(segment).unwrap().iter().any(|region| region.addr == more.addr()));
    here.open_segment(there.name()).expect("it opens by its address as well");
    drop((remote, more, there));
    match here.open_segment("prefill/3") {
        Err(SegmentError::Unknown { name, server }) => {
            assert_eq!((name.as_str(), server), ("prefill/3", kind_of(&here)))
        }
        other => panic!("{other:?}"),
    }
}

fn killed_owner(kind: Kind) {
    let server = Server::start(kind);
    let mut owner = Owner::start(&server, "node-7", 3_000);
    let here = looker(server.source());
    here.open_segment("node-7").unwrap();
    // A live owner keeps its name beyond the time to live.
    let until = Instant::now() + Duration::from_secs(7);
    while Instant::now() < until {
        assert!(server.directory().lookup("node-7").unwrap().is_some());
        std::thread::sleep(Duration::from_millis(50)); // timing: twice the time to live has to pass
    }
    owner.kill();
    eventually("the name is free", || match here.open_segment("node-7") {
        Err(SegmentError::Unknown { .. }) => true,
        Err(SegmentError::Unreachable { name, reason }) => {
            assert_eq!(name, "node-7");
            assert!(reason.contains("127.0.0.1"), "{reason}");
            false
        }
        other => panic!("{other:?}"),
    });
}

fn restarted_owner(kind: Kind) {
    let server = Server::start(kind);
    let mut first = Owner::start(&server, "node-7", HOUR_MS);
    let here = looker(server.source());
    let old = here.open_segment("node-7").unwrap();
    first.kill();
    let second = Owner::start(&server, "node-7", HOUR_MS);
    assert!(second.incarnation > first.incarnation);
    // No process answers at the old endpoint; the directory has the new one.
    let restarted = SegmentError::Restarted {
        name: "node-7".into(),
        expected: first.incarnation,
        found: second.incarnation,
    };
    assert_eq!(here.refresh_segment(old), Err(restarted));
    let new = here.open_segment("node-7").unwrap();
    assert_ne!(old, new);
    assert_eq!(here.probe(new, TIMEOUT).unwrap(), Liveness::Alive { incarnation: second.incarnation });
}

fn earlier_incarnation(kind: Kind) {
    let server = Server::start(kind);
    let there = looker(MetadataSource::default());
    let here = looker(server.source());
    let found = there.incarnation();
    let entry = Entry { name: "node-7".into(), endpoint: there.name().into(), incarnation: found - 1 };
    server.directory().publish(&entry, LONG).unwrap();
    let refused = here.open_segment("node-7").unwrap_err();
    assert_eq!(refused, SegmentError::Restarted { name: "node-7".into(), expected: found - 1, found });
    server.directory().publish(&Entry { incarnation: found, ..entry }, LONG).unwrap();
    here.open_segment("node-7").unwrap();
}

fn older_owner(kind: Kind) {
    let server = Server::start(kind);
    let newer = Entry { name: "node-7".into(), endpoint: "h:1".into(), incarnation: u64::MAX };
    server.directory().publish(&newer, LONG).unwrap();
    let config = config(server.source(), Some("node-7"), HOUR_MS);
    let older = TransferEngine::start(config).unwrap();
    match older.wait_registered(LONG) {
        Registration::Failed(error @ MetadataError::Superseded { .. }) => {
            let text = error.to_string();
            assert!(text.contains("node-7") && text.contains("h:1") && text.contains("stop one"), "{text}");
        }
        other => panic!("{other:?}"),
    }
    drop(older);
    assert_eq!(server.directory().lookup("node-7").unwrap(), Some(newer.clone()));
    // The name is free once the newer owner withdraws it.
    server.directory().withdraw(&newer).unwrap();
    assert_eq!(owner(&server, "node-7", HOUR_MS).registration(), Registration::Registered);
}

fn race(kind: Kind) {
    const OWNERS: u64 = 6;
    let server = Server::start(kind);
    let start = Arc::new(Barrier::new(OWNERS as usize + 1));
    let racers: Vec<_> = (1..=OWNERS)
        .map(|incarnation| {
            let (start, directory) = (start.clone(), server.directory());
            let endpoint = format!("h:{incarnation}");
            let entry = Entry { name: "node-7".into(), endpoint, incarnation };
            std::thread::spawn(move || {
                start.wait();
                directory.publish(&entry, LONG)
            })
        })
        .collect();
    let directory = server.directory();
    start.wait();
    let mut seen = 0;
    while seen < OWNERS {
        let now = directory.lookup("node-7").unwrap().map_or(0, |entry| entry.incarnation);
        assert!(now >= seen, "{now} has overwritten {seen}");
        seen = now;
    }
    for (racer, incarnation) in racers.into_iter().zip(1..) {
        match racer.join().unwrap() {
            Ok(()) => {}
            Err(MetadataError::Superseded { incarnation: by, .. }) => assert!(by > incarnation),
            Err(error) => panic!("{error}"),
        }
    }
    assert_eq!(directory.lookup("node-7").unwrap().unwrap().incarnation, OWNERS);
}

fn server_restarts(kind: Kind) {
    let mut server = Server::start(kind);
    let there = owner(&server, "node-7", 1500);
    let remote = there.alloc_shared(4096, Access::all()).unwrap();
    let here = looker(server.source());
    let segment = here.open_segment("node-7").unwrap();
    server.kill();
    match here.open_segment("node-7") {
        Err(SegmentError::Metadata(MetadataError::Unreachable { .. })) => {}
        other => panic!("{other:?}"),
    }
    eventually("its owner has noticed", || matches!(there.registration(), Registration::Failed(_)));
    // Open segments stay open.
    let local = here.alloc_shared(4096, Access::LOCAL).unwrap();
    let read = request(Op::Read, (local.id(), 0), segment, remote.addr(), 4096);
    here.submit(&[read], Some(LONG)).unwrap().wait(None).unwrap();
    here.refresh_segment(segment).unwrap();
    server.restart();
    eventually("the name is registered again", || there.registration() == Registration::Registered);
    eventually("the name is found again", || here.open_segment("node-7").is_ok_and(|found| found == segment));
}

fn server_hangs(kind: Kind) {
    let server = Server::start(kind);
    let mut patient = config(server.source(), None, HOUR_MS);
    // Long enough for a server that answers.
    patient.metadata.timeout_ms = 2_000;
    let there = owner(&server, "node-7", HOUR_MS);
    let remote = there.alloc_shared(4096, Access::all()).unwrap();
    let here = TransferEngine::start(patient.clone()).unwrap();
    let segment = here.open_segment("node-7").unwrap();
    server.signal("STOP");
    let error = here.open_segment("node-7").unwrap_err();
    match &error {
        SegmentError::Metadata(MetadataError::Unreachable { reason, .. }) => assert_eq!(reason, "timed out"),
        other => panic!("{other:?}"),
    }
    assert!(error.to_string().contains(&kind_of(&here)), "{error}");
    let local = here.alloc_shared(4096, Access::LOCAL).unwrap();
    let read = request(Op::Read, (local.id(), 0), segment, remote.addr(), 4096);
    here.submit(&[read], Some(LONG)).unwrap().wait(None).unwrap();
    // An engine starts and ends without the server.
    patient.metadata.name = Some("node-8".into());
    let started = TransferEngine::start(patient).unwrap();
    assert!(matches!(started.wait_registered(LONG), Registration::Failed(MetadataError::Unreachable { .. })));
    drop(started);
    server.signal("CONT");
    eventually("it answers again", || here.open_segment("node-7").is_ok());
}

fn garbage(kind: Kind) {
    let server = Server::start(kind);
    for value in [&b"{}"[..], b"\xff\xfe\x00", b"", br#"{"v":9,"zone":"b"}"#] {
        server.put("snowskin/segment/node-7", value);
        let directory = server.directory();
        let entry = Entry { name: "node-7".into(), endpoint: "h:1".into(), incarnation: 1 };
        for error in [
            directory.lookup("node-7").unwrap_err(),
            directory.publish(&entry, LONG).unwrap_err(),
            looker(server.source()).open_segment("node-7").map_err(metadata_error).unwrap_err(),
        ] {
            assert!(matches!(error, MetadataError::Garbage { .. }), "{value:?}: {error:?}");
            assert!(error.to_string().contains("snowskin/segment/node-7"), "{error}");
        }
    }
    let elsewhere = Entry { name: "node-7".into(), endpoint: "h:1".into(), incarnation: 1 };
    server.put("snowskin/segment/node-8", &elsewhere.to_bytes());
    assert!(matches!(server.directory().lookup("node-8"), Err(MetadataError::Garbage { .. })));
}

fn huge_values(kind: Kind) {
    let server = Server::start(kind);
    server.put("snowskin/segment/node-7", &vec![b'7'; 700_000]);
    let error = server.directory().lookup("node-7").unwrap_err();
    assert!(
        matches!(error, MetadataError::Garbage { what, .. } if what.contains("more bytes than")),
        "{error}"
    );
    let over = owner_config(&server, "node-7", HOUR_MS);
    let engine = TransferEngine::start(over).unwrap();
    assert!(matches!(engine.wait_registered(LONG), Registration::Failed(MetadataError::Garbage { .. })));
}

fn no_server(kind: Kind) {
    let mut server = Server::start(kind);
    server.kill();
    let here = looker(server.source());
    let text = here.open_segment("node-7").unwrap_err().to_string();
    assert!(text.contains("refused") && text.contains("check that it runs"), "{text}");
    assert!(text.contains(&kind_of(&here)) && !text.contains(PASSWORD), "{text}");
}

fn addresses(kind: Kind) {
    let mut server = Server::start(kind);
    server.kill();
    let there = looker(MetadataSource::default());
    looker(server.source()).open_segment(there.name()).unwrap();
    let unnamed = looker(MetadataSource::default()).open_segment("node-7").unwrap_err();
    assert_eq!(unnamed, SegmentError::Name("node-7".into()));
}

fn plain_keys(kind: Kind) {
    let mut server = Server::start(kind);
    let keys = KeyValue::open(&server.source(), TIMEOUT).unwrap();
    assert_eq!(keys.server(), server.directory().server());
    let key = "mooncake/ram/10.0.0.7:15000";
    assert_eq!((keys.get(key, 100).unwrap(), keys.delete(key).unwrap()), (None, false));
    for value in [&b"{\"name\":\"a\"}"[..], b"", &[0, 0xff, b'\n', b'"'], &pattern(7, 300_000)] {
        keys.put(key, value).unwrap();
        assert_eq!(keys.get(key, 300_000).unwrap().as_deref(), Some(value), "{} bytes", value.len());
    }
    // A reader accepts as much as it asks for.
    let error = keys.get(key, 299_999).unwrap_err();
    assert!(
        matches!(error, MetadataError::Garbage { what, .. } if what.contains("more bytes than")),
        "{error}"
    );
    // Characters that a URL or a protocol could take for its own.
    let odd = "a b/%2F?&=#\u{e9}\"'";
    keys.put(odd, b"odd").unwrap();
    assert_eq!(keys.get(odd, 9).unwrap().as_deref(), Some(&b"odd"[..]));
    assert_eq!(keys.get("a b", 9).unwrap(), None);
    assert!(keys.delete(odd).unwrap() && keys.delete(key).unwrap());
    assert_eq!((keys.get(key, 9).unwrap(), keys.get(odd, 9).unwrap()), (None, None));
    server.kill();
    let error = keys.get(key, 9).unwrap_err();
    assert!(matches!(error, MetadataError::Unreachable { .. }), "{error}");
    assert!(!format!("{error} {keys:?}").contains(PASSWORD));
}

fn wrong_password(kind: Kind) {
    let server = Server::start(kind);
    let place = server.place();
    for (source, said) in [
        (format!("redis://default:hunter2@{place}/0"), "WRONGPASS"),
        (format!("redis://:hunter2@{place}/0"), "WRONGPASS"),
        (format!("redis://{place}/0"), "NOAUTH"),
    ] {
        let here = looker(source.parse().unwrap());
        let error = here.open_segment("node-7").map_err(metadata_error).unwrap_err();
        let shown = format!("{error} {error:?} {:?} {here:?}", here.config());
        assert!(
            matches!(&error, MetadataError::Refused { reason, .. } if reason.contains(said) || reason.contains("assword authentication failed")),
            "{error}"
        );
        assert!(!shown.contains("hunter2") && !shown.contains(PASSWORD), "{shown}");
    }
    let beyond = format!("redis://default:{PASSWORD}@{place}/99");
    let error = looker(beyond.parse().unwrap()).open_segment("node-7").map_err(metadata_error).unwrap_err();
    assert!(matches!(error, MetadataError::Refused { .. }), "{error}");
}

fn another_type(kind: Kind) {
    let server = Server::start(kind);
    server.redis(&[b"RPUSH", b"snowskin/segment/node-7", b"a"]);
    let error = server.directory().lookup("node-7").unwrap_err();
    assert!(matches!(error, MetadataError::Garbage { what, .. } if what.contains("not a string")), "{error}");
}

fn next_server(kind: Kind) {
    let mut gone = Server::start(kind);
    gone.kill();
    let server = Server::start(kind);
    let both: MetadataSource = format!("etcd://{},{}", gone.place(), server.place()).parse().unwrap();
    let _there = owner(&server, "node-7", HOUR_MS);
    looker(both).open_segment("node-7").unwrap();
}

fn another_kind(kind: Kind) {
    let (etcd, http) = (Server::start(kind), Server::start(Kind::Http));
    for source in [format!("etcd://{}", http.place()), format!("http://{}", etcd.place())] {
        let directory = Directory::open(&source.parse().unwrap(), TIMEOUT).unwrap().unwrap();
        let entry = Entry { name: "node-7".into(), endpoint: "h:1".into(), incarnation: 1 };
        let error = directory.publish(&entry, LONG).unwrap_err();
        assert!(matches!(error, MetadataError::Refused { .. }), "{source}: {error}");
    }
}

fn metadata_error(error: SegmentError) -> MetadataError {
    match error {
        SegmentError::Metadata(error) => error,
        other => panic!("{other:?}"),
    }
}

fn config(source: MetadataSource, name: Option<&str>, ttl_ms: u32) -> Config {
    let name = name.map(Into::into);
    let mut metadata = MetadataConfig::default();
    (metadata.source, metadata.name) = (source, name);
    (metadata.ttl_ms, metadata.timeout_ms) = (ttl_ms, TIMEOUT.as_millis() as u32);
    Config { fabrics: Fabrics::SHM, metadata, ..Config::default() }
}

fn owner_config(server: &Server, name: &str, ttl_ms: u32) -> Config {
    config(server.source(), Some(name), ttl_ms)
}

/// An engine with a name, registered.
fn owner(server: &Server, name: &str, ttl_ms: u32) -> TransferEngine {
    let engine = TransferEngine::start(owner_config(server, name, ttl_ms)).unwrap();
    assert_eq!(engine.wait_registered(LONG), Registration::Registered);
    engine
}

/// An engine without a name.
fn looker(source: MetadataSource) -> TransferEngine {
    TransferEngine::start(config(source, None, HOUR_MS)).unwrap()
}

/// Kind and address of its directory.
fn kind_of(engine: &TransferEngine) -> String {
    let source = &engine.config().metadata.source;
    Directory::open(source, TIMEOUT).unwrap().unwrap().server()
}

/// An engine with a name, in a process that can be killed.
struct Owner {
    child: Child,
    incarnation: u64,
}

impl Owner {
    fn start(server: &Server, name: &str, ttl_ms: u32) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .env(ROLE, "owner")
            .env("SOURCE", server.connection_string())
            .env("NAME", name)
            .env("TTL_MS", ttl_ms.to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let incarnation = line.trim().parse().unwrap_or_else(|_| panic!("the owner printed {line:?}"));
        Self { child, incarnation }
    }

    fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The process of an [`Owner`]: runs until its standard input is closed.
fn own() -> ! {
    let variable = |name| std::env::var(name).unwrap();
    let source = variable("SOURCE").parse().unwrap();
    let config = config(source, Some(&variable("NAME")), variable("TTL_MS").parse().unwrap());
    let engine = TransferEngine::start(config).unwrap();
    let _memory = engine.alloc_shared(4096, Access::all()).unwrap();
    assert_eq!(engine.wait_registered(LONG), Registration::Registered);
    println!("{}", engine.incarnation());
    std::io::stdout().flush().unwrap();
    let _ = std::io::stdin().read_line(&mut String::new());
    std::process::exit(0)
}
