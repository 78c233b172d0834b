//! Servers that tests start, break and kill.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::{Duration, Instant};

use store_master::MasterServer;
use te_engine::{Directory, MetadataSource};
use tempfile::TempDir;

use super::ROLE;
use super::common::eventually;

/// The password of Redis.
pub(crate) const PASSWORD: &str = "s3cret@home";

/// Whether every thread of a process has stopped.
fn is_stopped(pid: u32) -> bool {
    let Ok(threads) = std::fs::read_dir(format!("/proc/{pid}/task")) else { return true };
    // The state follows the name, which is in parentheses.
    let is_stopped = |stat: String| stat.rsplit(") ").next().is_some_and(|rest| rest.starts_with('T'));
    threads.flatten().all(|thread| std::fs::read_to_string(thread.path().join("stat")).is_ok_and(is_stopped))
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Http,
    Redis,
    Etcd,
}

impl Kind {
    pub(crate) const ALL: [Self; 3] = [Self::Http, Self::Redis, Self::Etcd];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Http => "http",
            Self::Redis => "redis",
            Self::Etcd => "etcd",
        }
    }

    /// Why a server of this kind cannot be started here.
    pub(crate) fn missing(self) -> Option<&'static str> {
        let found = |program: &str| {
            let path = std::env::var_os("PATH").unwrap_or_default();
            std::env::split_paths(&path).any(|dir| dir.join(program).is_file())
        };
        match self {
            Self::Http => None,
            Self::Redis if cfg!(not(feature = "redis")) => Some("built without the feature `redis`"),
            Self::Redis => {
                (!found("redis-server")).then_some("no redis-server: `apt-get install redis-server`")
            }
            Self::Etcd if cfg!(not(feature = "etcd")) => Some("built without the feature `etcd`"),
            Self::Etcd => (!found("etcd")).then_some("no etcd: `apt-get install etcd-server`"),
        }
    }
}

/// A server process, killed when dropped.
pub(crate) struct Server {
    kind: Kind,
    port: u16,
    dir: TempDir,
    child: Child,
}

impl Server {
    /// Starts a server on a free port, and waits until it serves.
    pub(crate) fn start(kind: Kind) -> Self {
        let dir = tempfile::tempdir().unwrap();
        // Another process may take the port first.
        for _ in 0..5 {
            let port = free_port();
            let mut child = spawn(kind, port, dir.path());
            if serves(&mut child, kind, port) {
                return Self { kind, port, dir, child };
            }
            let _ = child.kill();
            let _ = child.wait();
        }
        panic!(
            "{} does not start: see {}",
            kind.name(),
            std::fs::read_to_string(dir.path().join("log")).unwrap_or_default()
        );
    }

    pub(crate) fn place(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }

    /// The connection string, with the password.
    pub(crate) fn connection_string(&self) -> String {
        connection_string(self.kind, self.port)
    }

    pub(crate) fn source(&self) -> MetadataSource {
        self.connection_string().parse().unwrap()
    }

    pub(crate) fn directory(&self) -> Directory {
        Directory::open(&self.source(), super::TIMEOUT).unwrap().unwrap()
    }

    pub(crate) fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Starts it again on the same port and directory.
    pub(crate) fn restart(&mut self) {
        for _ in 0..5 {
            self.child = spawn(self.kind, self.port, self.dir.path());
            if serves(&mut self.child, self.kind, self.port) {
                return;
            }
            self.kill();
        }
        panic!("{} does not start again", self.kind.name());
    }

    /// Sends a signal; after `STOP`, waits until all threads are stopped.
    pub(crate) fn signal(&self, signal: &str) {
        let pid = self.child.id();
        let sent = Command::new("kill").arg(format!("-{signal}")).arg(pid.to_string()).status();
        assert!(sent.unwrap().success());
        eventually("the server is stopped", || signal != "STOP" || is_stopped(pid));
    }

    /// Stores a value without the code under test.
    pub(crate) fn put(&self, key: &str, value: &[u8]) {
        match self.kind {
            Kind::Http => {
                let status = self.http("PUT", &format!("/metadata?key={key}"), value);
                assert!(status.starts_with("HTTP/1.1 200"), "{status}");
            }
            Kind::Redis => self.redis(&[b"SET", key.as_bytes(), value]),
            Kind::Etcd => {
                let body = format!(r#"{{"key":"{}","value":"{}"}}"#, base64(key.as_bytes()), base64(value));
                let status = self.http("POST", "/v3/kv/put", body.as_bytes());
                assert!(status.starts_with("HTTP/1.1 200"), "{status}");
            }
        }
    }

    /// Sends a command to Redis after a login.
    pub(crate) fn redis(&self, command: &[&[u8]]) {
        let mut out = Vec::new();
        for command in [&[b"AUTH" as &[u8], PASSWORD.as_bytes()], &[b"SELECT", b"2"], command] {
            out.extend(format!("*{}\r\n", command.len()).bytes());
            for part in command {
                out.extend(format!("${}\r\n", part.len()).bytes());
                out.extend_from_slice(part);
                out.extend(b"\r\n");
            }
        }
        let mut stream = TcpStream::connect(self.place()).unwrap();
        stream.write_all(&out).unwrap();
        stream.shutdown(std::net::Shutdown::Write).unwrap();
        let mut reply = String::new();
        stream.read_to_string(&mut reply).unwrap();
        assert!(reply.starts_with("+OK\r\n") && !reply.contains('-'), "{reply}");
    }

    fn http(&self, method: &str, path: &str, body: &[u8]) -> String {
        let mut stream = TcpStream::connect(self.place()).unwrap();
        let length = body.len();
        let head = format!(
            "{method} {path} HTTP/1.1\r\nhost: h\r\nconnection: close\r\ncontent-length: {length}\r\n\r\n"
        );
        stream.write_all(&[head.as_bytes(), body].concat()).unwrap();
        let mut reply = Vec::new();
        stream.read_to_end(&mut reply).unwrap();
        String::from_utf8_lossy(&reply).into_owned()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The process of [`Kind::Http`]: the store's master, until it is killed or its standard input is closed.
pub(crate) fn serve() -> ! {
    let config = store_master::Config {
        rpc_listen: "127.0.0.1:0".parse().unwrap(),
        http_listen: Some(std::env::var("LISTEN").unwrap().parse().unwrap()),
        ..store_master::Config::default()
    };
    let _master = MasterServer::bind(config).unwrap().spawn().unwrap();
    let _ = std::io::stdin().read_line(&mut String::new());
    std::process::exit(0)
}

fn connection_string(kind: Kind, port: u16) -> String {
    match kind {
        Kind::Http => format!("http://127.0.0.1:{port}/metadata"),
        Kind::Redis => format!("redis://default:{}@127.0.0.1:{port}/2", PASSWORD.replace('@', "%40")),
        Kind::Etcd => format!("etcd://127.0.0.1:{port}"),
    }
}

fn spawn(kind: Kind, port: u16, dir: &Path) -> Child {
    let log = std::fs::File::create(dir.join("log")).unwrap();
    let place = format!("127.0.0.1:{port}");
    let mut command = match kind {
        Kind::Http => {
            let mut command = Command::new(std::env::current_exe().unwrap());
            command.env(ROLE, "server").env("LISTEN", place);
            command
        }
        Kind::Redis => {
            let mut command = dying_with_parent("redis-server");
            let port = port.to_string();
            let kept = ["--save", "", "--appendonly", "yes", "--requirepass", PASSWORD];
            command
                .args(["--port", &port, "--bind", "127.0.0.1", "--daemonize", "no", "--dir"])
                .arg(dir)
                .args(kept);
            command
        }
        Kind::Etcd => {
            let mut command = dying_with_parent("etcd");
            let client = format!("http://{place}");
            let peer = format!("http://127.0.0.1:{}", free_port());
            command.arg("--data-dir").arg(dir.join("etcd"));
            command.args([
                "--name",
                "test",
                "--listen-client-urls",
                &client,
                "--advertise-client-urls",
                &client,
            ]);
            command.args(["--listen-peer-urls", &peer]);
            if !dir.join("etcd").exists() {
                command.args(["--initial-advertise-peer-urls", &peer]);
                command.args(["--initial-cluster", &format!("test={peer}")]);
            }
            command
        }
    };
    command.stdin(Stdio::piped()).stdout(log.try_clone().unwrap()).stderr(log).spawn().unwrap()
}

/// A command that the kernel kills when the test process dies, if `setpriv` is installed.
fn dying_with_parent(program: &str) -> Command {
    if !Path::new("/usr/bin/setpriv").exists() {
        return Command::new(program);
    }
    let mut command = Command::new("/usr/bin/setpriv");
    command.args(["--pdeathsig", "KILL", program]);
    command
}

/// Waits until the server answers. False: its process has ended.
fn serves(child: &mut Child, kind: Kind, port: u16) -> bool {
    let source = connection_string(kind, port).parse().unwrap();
    let give_up = Instant::now() + super::LONG;
    while child.try_wait().unwrap().is_none() {
        assert!(Instant::now() < give_up, "{} does not serve within a minute", kind.name());
        let directory = Directory::open(&source, super::TIMEOUT).unwrap().unwrap();
        if directory.lookup("ready").is_ok() {
            return true;
        }
        std::thread::sleep(Duration::from_millis(20)); // timing: a process starts
    }
    false
}

/// A free port below those that the kernel assigns to connections, so that a server can use it again after a
/// restart.
fn free_port() -> u16 {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    let start = (std::process::id() * 37 % 8000) as u16;
    loop {
        let port = 20_000 + (start + NEXT.fetch_add(1, Ordering::Relaxed)) % 12_000;
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
}

fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut out = String::new();
    for chunk in bytes.chunks(3) {
        let bits =
            chunk.iter().fold(0u32, |bits, &byte| bits << 8 | u32::from(byte)) << (8 * (3 - chunk.len()));
        for i in 0..4 {
            let digit = char::from(DIGITS[(bits >> (18 - 6 * i) & 63) as usize]);
            out.push(if i <= chunk.len() { digit } else { '=' });
        }
    }
    out
}
