//! An etcd of a test's own.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::net::TcpListener;
use std::process::{Child, Command, Stdio};

use te_fabric::testkit::eventually;

/// Killed when it is dropped.
pub(crate) struct Etcd {
    child: Child,
    port: u16,
    _dir: tempfile::TempDir,
}

impl Etcd {
    /// `None`: it is not installed.
    pub(crate) fn start() -> Option<Self> {
        let dir = tempfile::tempdir().unwrap();
        let free = || TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let (port, peers) = (free(), free());
        let (clients, peers) = (format!("http://127.0.0.1:{port}"), format!("http://127.0.0.1:{peers}"));
        let mut command = Command::new("etcd");
        command.args(["--name", "t", "--data-dir"]).arg(dir.path().join("etcd"));
        command.args(["--listen-client-urls", &clients, "--advertise-client-urls", &clients]);
        command.args(["--listen-peer-urls", &peers, "--initial-advertise-peer-urls", &peers]);
        command.args(["--initial-cluster", &format!("t={peers}")]);
        let spawned = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn();
        let Ok(child) = spawned else {
            eprintln!("skipped: no etcd: `apt-get install etcd-server`");
            return None;
        };
        let this = Self { child, port, _dir: dir };
        let source: te_metadata::MetadataSource = this.url().parse().unwrap();
        let registers = te_metadata::Registers::open(&source, std::time::Duration::from_secs(1)).unwrap();
        eventually("etcd answers", || registers.read("ready").is_ok());
        Some(this)
    }

    pub(crate) fn url(&self) -> String {
        format!("etcd://127.0.0.1:{}", self.port)
    }
}

impl Drop for Etcd {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
