//! Our ZMTP against libzmq 4.3, through pyzmq: every kind of socket that is used, with the peer connecting
//! and with the peer binding.
//!
//! `PYZMQ_PYTHON` names a Python that has pyzmq. Without it, pyzmq is installed into a virtual environment in
//! `target/pyzmq`; where that is not possible, the tests are reported as ignored.
#![allow(clippy::unwrap_used, reason = "a test that fails reports the line")]

use std::io::{BufRead as _, BufReader, ErrorKind, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, ExitCode, Stdio};
use std::sync::OnceLock;
use std::time::Duration;

use conductor_core::zmtp::{Connection, Event, Kind, Limits, Sent};
use libtest_mimic::{Arguments, Completion, Trial};
use te_core::Instant;

/// The time for which a read waits.
const READ_MS: u64 = 20;
/// Reads until a test gives up.
const READS_MAX: u64 = 1_500;

type Test = fn(&mut End, &mut Peer);
const TESTS: [(Kind, &str, Test); 6] = [
    (Kind::Sub, "PUB", subscribes),
    (Kind::Pub, "SUB", publishes),
    (Kind::Dealer, "ROUTER", asks),
    (Kind::Req, "ROUTER", asks),
    (Kind::Router, "DEALER", answers),
    (Kind::Router, "REQ", answers),
];

fn main() -> ExitCode {
    let arguments = Arguments::from_args();
    let trials = TESTS.iter().flat_map(|&(ours, theirs, test)| {
        [true, false].map(|binds| {
            let how = if binds { "binds" } else { "connects" };
            Trial::ignorable_test(format!("our_{ours}_and_a_{theirs}_that_{how}"), move || {
                if let Err(missing) = python() {
                    eprintln!("ignored: {missing}");
                    return Ok(Completion::ignored_with(missing.clone()));
                }
                let (mut end, mut peer) = if binds { to_peer(ours, theirs) } else { from_peer(ours, theirs) };
                test(&mut end, &mut peer);
                Ok(Completion::Completed)
            })
        })
    });
    libtest_mimic::run(&arguments, trials.collect()).exit_code()
}

/// Messages of one topic arrive whole and in order, of any length, and the connection outlives heartbeats.
fn subscribes(end: &mut End, _: &mut Peer) {
    let mut next = None;
    for _ in 0..300 {
        let parts = end.message();
        assert_eq!((parts.len(), &parts[0][..]), (3, &b"kv@1"[..]));
        let seq = u64::from_be_bytes(parts[1][..].try_into().unwrap());
        assert!(next.is_none_or(|next| next == seq), "{seq} instead of {next:?}");
        assert_eq!(parts[2], vec![seq as u8; seq as usize % 3 * 70_000]);
        next = Some(seq + 1);
    }
}

/// libzmq gets what it subscribed to, and nothing else.
fn publishes(end: &mut End, peer: &mut Peer) {
    end.until(|event| matches!(event, Event::Subscribed(b"kv")).then_some(()));
    assert_eq!(end.connection.send(&[b"other", b"x"]), Sent::NotSubscribed);
    for seq in 0..3_u8 {
        assert_eq!(end.connection.send(&[b"kv", &[seq; 8], &vec![seq; 1_000]]), Sent::Queued);
    }
    end.step();
    for seq in 0..3_u8 {
        let line = format!("6b76 {} {}", hex(&[seq; 8]), hex(&vec![seq; 1_000]));
        assert_eq!(peer.line(), line);
    }
    // For longer than the peer waits for an answer to its heartbeats.
    (0..100).for_each(|_| end.step());
    assert_eq!(end.connection.send(&[b"kv"]), Sent::Queued);
    end.step();
    assert_eq!(peer.line(), "6b76");
}

/// A replay, asked for as the Conductor does.
fn asks(end: &mut End, peer: &mut Peer) {
    end.until(|event| matches!(event, Event::Ready { .. }).then_some(()));
    assert_eq!(end.connection.send(&[b"", &7_u64.to_be_bytes()]), Sent::Queued);
    for seq in 7..10_u64 {
        assert_eq!(end.message(), [&b""[..], b"kv", &seq.to_be_bytes(), &[seq as u8; 300]]);
    }
    assert_eq!(end.message(), [&b""[..], b"kv", &[0xff; 8], b""]);
    assert_eq!(peer.line(), "- 0000000000000007");
}

/// A replay, answered as a publisher does. A REQ socket takes the first answer.
fn answers(end: &mut End, peer: &mut Peer) {
    assert_eq!(end.message(), [&b""[..], &5_u64.to_be_bytes()]);
    assert_eq!(end.connection.send(&[b"", &5_u64.to_be_bytes(), b"payload"]), Sent::Queued);
    end.step();
    let line = peer.line();
    assert_eq!(line.trim_start_matches("- "), format!("0000000000000005 {}", hex(b"payload")));
}

/// Our end of a connection, over a socket.
struct End {
    connection: Connection,
    socket: TcpStream,
    now: Instant,
}

impl End {
    fn new(kind: Kind, socket: TcpStream) -> Self {
        socket.set_read_timeout(Some(Duration::from_millis(READ_MS))).unwrap();
        let limits = Limits {
            heartbeat_interval: Duration::from_millis(100),
            heartbeat_timeout: Duration::from_secs(5),
            ..Limits::default()
        };
        let mut connection = Connection::new(kind, limits, b"conductor", Instant::ZERO);
        if kind == Kind::Sub {
            connection.subscribe(b"kv");
        }
        Self { connection, socket, now: Instant::ZERO }
    }

    /// Writes what there is to write, and reads once.
    fn step(&mut self) {
        self.now = self.now + Duration::from_millis(READ_MS);
        self.connection.tick(self.now).unwrap();
        self.socket.write_all(self.connection.output()).unwrap();
        self.connection.wrote(usize::MAX);
        match self.socket.read(self.connection.space()) {
            Ok(0) => panic!("the peer closed the connection"),
            Ok(len) => self.connection.filled(self.now, len),
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {}
            Err(error) => panic!("{error}"),
        }
    }

    /// What `wanted` makes of the first event that it takes.
    fn until<T>(&mut self, wanted: impl Fn(Event<'_>) -> Option<T>) -> T {
        for _ in 0..READS_MAX {
            while let Some(event) = self.connection.next().unwrap() {
                if let Some(found) = wanted(event) {
                    return found;
                }
            }
            self.step();
        }
        panic!("nothing arrived");
    }

    fn message(&mut self) -> Vec<Vec<u8>> {
        self.until(|event| match event {
            Event::Message(message) => Some(message.iter().map(<[u8]>::to_vec).collect()),
            _ => None,
        })
    }
}

fn to_peer(ours: Kind, theirs: &str) -> (End, Peer) {
    let mut peer = Peer::start(theirs, "bind", "tcp://127.0.0.1");
    let port: u16 = peer.line().parse().unwrap();
    (End::new(ours, TcpStream::connect(("127.0.0.1", port)).unwrap()), peer)
}

fn from_peer(ours: Kind, theirs: &str) -> (End, Peer) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("tcp://{}", listener.local_addr().unwrap());
    let mut peer = Peer::start(theirs, "connect", &address);
    assert_eq!(peer.line(), "0");
    (End::new(ours, listener.accept().unwrap().0), peer)
}

/// A process with a socket of libzmq, killed when dropped.
struct Peer {
    child: Child,
    output: BufReader<ChildStdout>,
}

impl Peer {
    fn start(kind: &str, how: &str, address: &str) -> Self {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/libzmq/peer.py");
        let mut child = Command::new(python().as_ref().unwrap())
            .arg(script)
            .args([kind, how, address])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        Self { child, output }
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.output.read_line(&mut line).unwrap();
        line.trim_end().to_owned()
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// A Python with pyzmq, or why there is none.
fn python() -> &'static Result<PathBuf, String> {
    static PYTHON: OnceLock<Result<PathBuf, String>> = OnceLock::new();
    PYTHON.get_or_init(|| match std::env::var_os("PYZMQ_PYTHON") {
        Some(path) => run(Command::new(&path).args(["-c", "import zmq"])).map(|()| path.into()),
        None => installed(),
    })
}

fn installed() -> Result<PathBuf, String> {
    let test = std::env::current_exe().map_err(|error| error.to_string())?;
    // target/PROFILE/deps/TEST
    let target = test.ancestors().nth(3).ok_or("the test is not in a target directory")?;
    let environment = target.join("pyzmq");
    let python = environment.join("bin/python");
    let check = || run(Command::new(&python).args(["-c", "import zmq"]));
    if check().is_err() {
        run(Command::new("python3").args(["-m", "venv"]).arg(&environment))?;
        let options = ["-m", "pip", "install", "-q", "--retries", "1", "--timeout", "20", "pyzmq"];
        run(Command::new(&python).args(options))?;
        check()?;
    }
    Ok(python)
}

fn run(command: &mut Command) -> Result<(), String> {
    let output = command.stdin(Stdio::null()).output().map_err(|error| format!("{command:?}: {error}"))?;
    if output.status.success() {
        return Ok(());
    }
    let last = String::from_utf8_lossy(&output.stderr).lines().last().unwrap_or_default().to_owned();
    Err(format!("{command:?}: {last}"))
}
