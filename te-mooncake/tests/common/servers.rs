//! Metadata servers that tests start: one over HTTP as Mooncake's, in this process; `redis-server`; `etcd`.

#![allow(dead_code, reason = "each test uses a part")]

use std::collections::BTreeMap;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};

use te_fabric::testkit::eventually;
use te_mooncake::MetadataString;
use tempfile::TempDir;

use super::common::HERE;

/// The password of Redis.
const PASSWORD: &str = "s3cret@home";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
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
        match self {
            Self::Http => None,
            Self::Redis => {
                (!is_installed("redis-server")).then_some("no redis-server: `apt-get install redis-server`")
            }
            Self::Etcd => (!is_installed("etcd")).then_some("no etcd: `apt-get install etcd-server`"),
        }
    }
}

fn is_installed(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|dir| dir.join(program).is_file())
}

/// A server; one that is a process is killed when the value drops.
pub(crate) struct Server {
    pub(crate) kind: Kind,
    port: u16,
    child: Option<Child>,
    http: Http,
    _dir: TempDir,
}

impl Server {
    pub(crate) fn start(kind: Kind) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let http = Http::default();
        if kind == Kind::Http {
            let port = http.start();
            return Self { kind, port, child: None, http, _dir: dir };
        }
        // Another process may take the port first.
        for _ in 0..5 {
            let port = TcpListener::bind((HERE, 0)).unwrap().local_addr().unwrap().port();
            let mut child = spawn(kind, port, dir.path());
            let mut ended = false;
            eventually("the server listens", || {
                ended = child.try_wait().unwrap().is_some();
                ended || TcpStream::connect((HERE, port)).is_ok()
            });
            if !ended {
                return Self { kind, port, child: Some(child), http, _dir: dir };
            }
        }
        panic!(
            "{} does not start: {}",
            kind.name(),
            std::fs::read_to_string(dir.path().join("log")).unwrap_or_default()
        );
    }

    /// The connection string as Mooncake's programs write it.
    pub(crate) fn string(&self) -> String {
        let Self { port, .. } = self;
        match self.kind {
            Kind::Http => format!("http://127.0.0.1:{port}/metadata"),
            Kind::Redis => format!("redis://127.0.0.1:{port}"),
            Kind::Etcd => format!("etcd://127.0.0.1:{port}"),
        }
    }

    pub(crate) fn metadata(&self) -> MetadataString {
        MetadataString::parse(&self.string()).unwrap().with_login("", PASSWORD, 3).unwrap()
    }

    /// The value under a key, without the code under test. `None`: there is none.
    pub(crate) fn get(&self, key: &str) -> Option<String> {
        match self.kind {
            Kind::Http => self
                .http
                .values
                .lock()
                .unwrap()
                .get(key)
                .map(|value| String::from_utf8(value.clone()).unwrap()),
            Kind::Redis => self.redis(&["GET", key]).map(|(_, value)| value),
            Kind::Etcd => {
                let out = self.etcdctl(&["get", "--print-value-only", key]);
                (!out.is_empty()).then(|| out.trim_end_matches('\n').into())
            }
        }
    }

    /// Stores a value without the code under test.
    pub(crate) fn put(&self, key: &str, value: &str) {
        match self.kind {
            Kind::Http => drop(self.http.values.lock().unwrap().insert(key.into(), value.into())),
            Kind::Redis => drop(self.redis(&["SET", key, value])),
            Kind::Etcd => drop(self.etcdctl(&["put", key, value])),
        }
    }

    /// What was requested over HTTP: method, path, status.
    pub(crate) fn requests(&self) -> Vec<String> {
        std::mem::take(&mut *self.http.requests.lock().unwrap())
    }

    /// No request is answered any more.
    pub(crate) fn break_down(&mut self) {
        self.http.broken();
        if let Some(mut child) = self.child.take() {
            child.kill().unwrap();
            child.wait().unwrap();
        }
    }

    /// The kind of a reply of Redis and its text.
    fn redis(&self, command: &[&str]) -> Option<(char, String)> {
        let mut stream = TcpStream::connect((HERE, self.port)).unwrap();
        let mut replies = BufReader::new(stream.try_clone().unwrap());
        let mut last = None;
        for command in [&["AUTH", PASSWORD][..], &["SELECT", "3"], command] {
            let mut out = format!("*{}\r\n", command.len());
            command.iter().for_each(|part| out += &format!("${}\r\n{part}\r\n", part.len()));
            stream.write_all(out.as_bytes()).unwrap();
            let mut line = String::new();
            replies.read_line(&mut line).unwrap();
            let (kind, rest) = line.trim_end().split_at(1);
            last = match (kind, rest.parse::<i64>()) {
                ("$", Ok(len)) if len >= 0 => {
                    let mut value = vec![0; len as usize + 2];
                    replies.read_exact(&mut value).unwrap();
                    value.truncate(len as usize);
                    Some(('$', String::from_utf8(value).unwrap()))
                }
                ("$", _) => None,
                ("-", _) => panic!("{line}"),
                _ => Some(('+', rest.into())),
            };
        }
        last
    }

    fn etcdctl(&self, words: &[&str]) -> String {
        let body = |words: &[&str]| match words {
            ["get", _, key] => ("range", format!(r#"{{"key":"{}"}}"#, base64(key))),
            ["put", key, value] => {
                ("put", format!(r#"{{"key":"{}","value":"{}"}}"#, base64(key), base64(value)))
            }
            _ => panic!("{words:?}"),
        };
        let (call, body) = body(words);
        let reply = http(self.port, "POST", &format!("/v3/kv/{call}"), body.as_bytes());
        let json: serde_json::Value = serde_json::from_str(reply.split("\r\n\r\n").nth(1).unwrap()).unwrap();
        json["kvs"][0]["value"].as_str().map(from_base64).unwrap_or_default()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if let Some(child) = &mut self.child {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn spawn(kind: Kind, port: u16, dir: &Path) -> Child {
    let log = std::fs::File::create(dir.join("log")).unwrap();
    let program = if kind == Kind::Redis { "redis-server" } else { "etcd" };
    let mut command = match Path::new("/usr/bin/setpriv").exists() {
        // The kernel kills the server when the test process dies.
        true => {
            let mut command = Command::new("/usr/bin/setpriv");
            command.args(["--pdeathsig", "KILL", program]);
            command
        }
        false => Command::new(program),
    };
    match kind {
        Kind::Http => {}
        Kind::Redis => {
            command.args([
                "--port",
                &port.to_string(),
                "--bind",
                "127.0.0.1",
                "--daemonize",
                "no",
                "--save",
                "",
            ]);
            command.args(["--requirepass", PASSWORD, "--dir"]).arg(dir);
        }
        Kind::Etcd => {
            let client = format!("http://127.0.0.1:{port}");
            let free = TcpListener::bind((HERE, 0)).unwrap().local_addr().unwrap().port();
            let peer = format!("http://127.0.0.1:{free}");
            command.arg("--data-dir").arg(dir.join("etcd"));
            command.args([
                "--name",
                "test",
                "--listen-client-urls",
                &client,
                "--advertise-client-urls",
                &client,
            ]);
            command.args(["--listen-peer-urls", &peer, "--initial-advertise-peer-urls", &peer]);
            command.args(["--initial-cluster", &format!("test={peer}")]);
        }
    }
    command.stdin(Stdio::null()).stdout(log.try_clone().unwrap()).stderr(log).spawn().unwrap()
}

/// Keys and values over HTTP, with the statuses of Mooncake's own server.
#[derive(Clone, Default)]
struct Http {
    values: Arc<Mutex<BTreeMap<String, Vec<u8>>>>,
    requests: Arc<Mutex<Vec<String>>>,
    is_broken: Arc<Mutex<bool>>,
}

impl Http {
    fn start(&self) -> u16 {
        let listener = TcpListener::bind((HERE, 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        let this = self.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                if !*this.is_broken.lock().unwrap() {
                    this.answer(stream.unwrap());
                }
            }
        });
        port
    }

    fn broken(&self) {
        *self.is_broken.lock().unwrap() = true;
    }

    fn answer(&self, mut stream: TcpStream) {
        let mut input = BufReader::new(stream.try_clone().unwrap());
        let mut lines = Vec::new();
        loop {
            let mut line = String::new();
            if input.read_line(&mut line).unwrap_or(0) == 0 {
                return;
            }
            match line.trim_end() {
                "" => break,
                line => lines.push(line.to_owned()),
            }
        }
        let header = |name: &str| {
            let found = lines
                .iter()
                .filter_map(|line| line.split_once(": "))
                .find(|(key, _)| key.eq_ignore_ascii_case(name));
            found.map(|(_, value)| value.to_owned())
        };
        let mut body = vec![0; header("content-length").map_or(0, |length| length.parse().unwrap())];
        input.read_exact(&mut body).unwrap();
        let [method, path, ..] = lines[0].split(' ').collect::<Vec<_>>()[..] else { return };
        let key = percent_decoded(path.split_once("?key=").unwrap().1);
        let mut values = self.values.lock().unwrap();
        let (status, reply) = match method {
            "GET" => {
                values.get(&key).map_or((404, b"metadata not found".to_vec()), |value| (200, value.clone()))
            }
            "PUT" if header("content-type").as_deref() != Some("application/json") => (415, Vec::new()),
            "PUT" => {
                values.insert(key, body);
                (200, b"metadata updated".to_vec())
            }
            _ => (if values.remove(&key).is_some() { 200 } else { 404 }, Vec::new()),
        };
        self.requests.lock().unwrap().push(format!("{method} {path} {status}"));
        let head =
            format!("HTTP/1.1 {status} X\r\ncontent-length: {}\r\nconnection: close\r\n\r\n", reply.len());
        let _ = stream.write_all(&[head.as_bytes(), &reply].concat());
    }
}

fn http(port: u16, method: &str, path: &str, body: &[u8]) -> String {
    let mut stream = TcpStream::connect((HERE, port)).unwrap();
    let length = body.len();
    let head = format!(
        "{method} {path} HTTP/1.1\r\nhost: h\r\nconnection: close\r\ncontent-length: {length}\r\n\r\n"
    );
    stream.write_all(&[head.as_bytes(), body].concat()).unwrap();
    let mut reply = String::new();
    stream.read_to_string(&mut reply).unwrap();
    assert!(reply.starts_with("HTTP/1.1 200"), "{reply}");
    reply
}

fn percent_decoded(text: &str) -> String {
    let mut bytes = Vec::new();
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        let mut digit = || char::from(rest.next().unwrap()).to_digit(16).unwrap() as u8;
        bytes.push(if byte == b'%' { digit() << 4 | digit() } else { byte });
    }
    String::from_utf8(bytes).unwrap()
}

const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

fn base64(text: &str) -> String {
    let mut out = String::new();
    for chunk in text.as_bytes().chunks(3) {
        let bits =
            chunk.iter().fold(0_u32, |bits, &byte| bits << 8 | u32::from(byte)) << (8 * (3 - chunk.len()));
        for i in 0..4 {
            let digit = char::from(DIGITS[(bits >> (18 - 6 * i) & 63) as usize]);
            out.push(if i <= chunk.len() { digit } else { '=' });
        }
    }
    out
}

fn from_base64(text: &str) -> String {
    let mut bytes = Vec::new();
    for chunk in text.trim_end_matches('=').as_bytes().chunks(4) {
        let digit = |byte: &u8| DIGITS.iter().position(|digit| digit == byte).unwrap() as u32;
        let bits = chunk.iter().fold(0, |bits, byte| bits << 6 | digit(byte)) << (6 * (4 - chunk.len()));
        bytes.extend(&bits.to_be_bytes()[1..chunk.len()]);
    }
    String::from_utf8(bytes).unwrap()
}
