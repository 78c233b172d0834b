//! Nodes as an operator runs them: how they stop, and what they warn about.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::io::{Read as _, Write as _};
use std::process::Stdio;

use common::{Daemon, assert_exit, eventually, json, run, signal, snowskin, stdout, wait};

struct Cluster {
    master: Daemon,
    address: String,
}

impl Cluster {
    fn start() -> Self {
        let master = Daemon::start(&["master", "--listen", "127.0.0.1:0", "--http", "none", "--json"]);
        Self { address: master.text("rpc"), master }
    }

    fn node(&self, name: &str, more: &[&str]) -> Daemon {
        let args = ["node", "--master", &self.address, "--memory", "16MiB", "--name", name, "--json"];
        Daemon::start(&[&args[..], more].concat())
    }

    fn run(&self, args: &[&str]) -> std::process::Output {
        run(&[args, &["--master", &self.address]].concat())
    }
}

#[test]
fn a_node_that_drains_when_it_is_stopped_loses_nothing() {
    let cluster = Cluster::start();
    let first = cluster.node("n1", &["--drain-on-stop"]);
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("in");
    std::fs::write(&file, vec![7; 10_000]).unwrap();
    for key in ["a", "b", "c", "d"] {
        assert_exit(&cluster.run(&["put", key, file.to_str().unwrap()]), 0);
    }
    let _second = cluster.node("n2", &[]);
    assert_eq!(first.terminate(), Some(0));
    assert_eq!(stdout(&cluster.run(&["ls", "--json"])).lines().count(), 4);
    let moved = json(&cluster.run(&["stat", "a", "--json"]));
    assert_eq!(moved["replicas"][0]["segment"], "n2");
    assert_eq!(cluster.run(&["get", "d"]).stdout, vec![7; 10_000]);
    drop(cluster.master);
}

#[test]
fn a_node_that_cannot_drain_reports_what_is_lost_and_ends() {
    let cluster = Cluster::start();
    let args = ["node", "--master", &cluster.address, "--memory", "16MiB", "--name", "n1", "--json"];
    let mut node = snowskin(&[&args[..], &["--drain-on-stop=5"]].concat())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    eventually("a node", || json(&cluster.run(&["stat", "--json"]))["segments"] == 1);
    assert_exit(&cluster.run(&["put", "a", "/proc/self/status"]), 0);
    signal(node.id(), "TERM");
    let status = wait(&mut node).expect("it ends");
    let mut text = String::new();
    node.stderr.take().unwrap().read_to_string(&mut text).unwrap();
    assert_eq!(status.code(), Some(1), "{text}");
    assert!(text.contains("not drained") && text.contains("do not fit on other nodes"), "{text}");
}

#[test]
fn a_node_that_only_this_machine_can_reach_is_warned_about_when_the_master_is_reachable_from_others() {
    // An address of this machine other than loopback: the one from which packets to other hosts are sent.
    let socket = std::net::UdpSocket::bind("0.0.0.0:0").unwrap();
    let Some(ip) = socket.connect("192.0.2.1:9").ok().and_then(|()| socket.local_addr().ok()) else {
        eprintln!("skipped: this machine has no address but loopback");
        return;
    };
    let listen = format!("{}:0", ip.ip());
    let master = Daemon::start(&["master", "--listen", &listen, "--http", "none", "--json"]);
    let address = master.text("rpc");
    let said_by = |more: &[&str]| {
        let args = ["node", "--master", &address, "--memory", "1MiB", "--json"];
        let mut node = snowskin(&[&args[..], more].concat())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut byte = [0];
        // The ready line comes after the warnings about the address; the node logs the rest before it ends.
        while node.stdout.as_mut().unwrap().read(&mut byte).unwrap() == 1 && byte != *b"\n" {}
        signal(node.id(), "TERM");
        assert_eq!(wait(&mut node).expect("it ends").code(), Some(0));
        let mut text = String::new();
        node.stderr.take().unwrap().read_to_string(&mut text).unwrap();
        text
    };
    let warned = said_by(&[]);
    assert!(warned.contains("--advertise") && warned.contains(&address), "{warned}");
    let open = said_by(&["--listen", &listen]);
    assert!(open.contains("without a cluster secret") && !open.contains("--advertise"), "{open}");
    assert_eq!(said_by(&["--listen", &listen, "--cluster-secret", "sesame"]), "");
}

#[test]
fn servers_are_started_in_any_order() {
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    let start = |args: &[&str]| {
        let args = [args, &["--master", &free, "--json"]].concat();
        snowskin(&args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let mut servers = [start(&["node", "--memory", "1MiB"]), start(&["gateway", "--listen", "127.0.0.1:0"])];
    // None of them has reached a master when it logs that it waits.
    for server in &mut servers {
        let (mut byte, stderr) = ([0], server.stderr.as_mut().unwrap());
        while stderr.read(&mut byte).unwrap() == 1 && byte != *b"\n" {}
        assert!(server.try_wait().unwrap().is_none(), "it waits");
    }
    let _master = Daemon::start(&["master", "--listen", &free, "--http", "none", "--json"]);
    for mut server in servers {
        let mut line = Vec::new();
        let (mut byte, stdout) = ([0], server.stdout.as_mut().unwrap());
        while stdout.read(&mut byte).unwrap() == 1 && byte != *b"\n" {
            line.push(byte[0]);
        }
        assert!(String::from_utf8_lossy(&line).contains("ready"), "{}", String::from_utf8_lossy(&line));
        signal(server.id(), "TERM");
        assert_eq!(wait(&mut server).expect("it ends").code(), Some(0));
    }
}

#[test]
fn a_node_that_waits_for_its_master_can_be_stopped() {
    let mut node = snowskin(&["node", "--memory", "1MiB", "--master", "127.0.0.1:9", "--json"])
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut byte = [0];
    while node.stderr.as_mut().unwrap().read(&mut byte).unwrap() == 1 && byte != *b"\n" {}
    signal(node.id(), "TERM");
    assert_eq!(wait(&mut node).expect("it ends").code(), Some(143));
}

#[test]
fn a_node_exports_the_metrics_of_its_gateway_and_local_clients() {
    let cluster = Cluster::start();
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("n.sock");
    let socket = socket.to_str().unwrap();
    let any = "127.0.0.1:0";
    let node = cluster.node("n1", &["--http", any, "--gateway", any, "--local", socket]);
    assert_exit(&run(&["put", "k", "/proc/self/status", "--local", socket]), 0);
    assert_exit(&run(&["get", "k", "--local", socket]), 0);
    let ask = |address: &str, path: &str| {
        let mut stream = std::net::TcpStream::connect(address).unwrap();
        write!(stream, "GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).unwrap();
        text
    };
    ask(&node.text("gateway"), "/v1/objects/k");
    let metrics = ask(&node.text("http"), "/metrics");
    for line in ["snowskin_client_puts_total 1", "snowskin_client_hits_total 2", "snowskin_node_mounted 1"] {
        assert!(metrics.contains(line), "{line}: {metrics}");
    }
    assert_eq!(metrics.matches("# EOF").count(), 1);
}
