//! `snowskin up`, and commands that run while their servers are still starting.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Output, Stdio};

use common::{Daemon, PATIENCE, assert_exit, json, run, snowskin, stderr, stdout};
use te_core::testkit::pattern;

/// An address at which no process listens now.
fn free_address() -> String {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string()
}

/// Starts a command that waits for servers.
fn start(args: &[&str]) -> Child {
    snowskin(args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

/// Waits until a child reports on stderr that it waits; returns what it has written.
fn has_said_that_it_waits(child: &mut Child) -> String {
    let (mut said, mut byte) = (Vec::new(), [0]);
    let stderr = child.stderr.as_mut().unwrap();
    while !said.ends_with(b"\n") && stderr.read(&mut byte).unwrap() == 1 {
        said.push(byte[0]);
    }
    String::from_utf8(said).unwrap()
}

fn end(child: Child) -> Output {
    child.wait_with_output().unwrap()
}

fn get(address: &str, path: &str) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    write!(stream, "GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

#[test]
fn up_serves_all_kinds_of_clients_and_leaves_nothing_behind() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("local.sock");
    let any = "127.0.0.1:0";
    let up = ["up", "--memory", "16MiB", "--nodes", "2", "--listen", any, "--http", any, "--gateway", any];
    let up = Daemon::start(&[&up[..], &["--local", socket.to_str().unwrap(), "--json"]].concat());
    let (master, gateway) = (up.text("rpc"), up.text("gateway"));
    assert_eq!(up.ready["nodes"].as_array().unwrap().len(), 2);
    let store = |args: &[&str]| run(&[args, &["--master", &master]].concat());
    let file = dir.path().join("in");
    std::fs::write(&file, "hello\n").unwrap();

    assert_exit(&store(&["put", "greeting", file.to_str().unwrap(), "--replicas", "2"]), 0);
    assert_eq!(stdout(&store(&["get", "greeting"])), "hello\n");
    assert_eq!(stdout(&store(&["get", "greeting", "--local", socket.to_str().unwrap()])), "hello\n");
    assert!(get(&gateway, "/v1/objects/greeting").ends_with("\r\n\r\nhello\n"));
    assert!(get(&up.text("http"), "/metrics").contains("snowskin_master_objects"));
    assert_eq!(json(&store(&["stat", "--json"]))["segments"], 2);

    assert_eq!(up.terminate(), Some(0));
    assert!(!socket.exists(), "the socket is removed");
    assert!(TcpStream::connect(&master).is_err() && TcpStream::connect(&gateway).is_err());
}

#[test]
fn up_names_an_address_in_use_and_its_flag_once() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let taken = taken.local_addr().unwrap().to_string();
    for flag in ["--listen", "--http", "--gateway"] {
        let others =
            ["--listen", "--http", "--gateway", "--local"].into_iter().filter(|other| *other != flag);
        let others = others.flat_map(|other| match other {
            "--listen" => [other, "127.0.0.1:0"],
            other => [other, "none"],
        });
        let mut args = vec!["up", "--memory", "1MiB", flag, &taken];
        args.extend(others);
        let output = run(&args);
        assert_exit(&output, 1);
        let text = stderr(&output);
        assert!(text.contains(&taken) && text.contains(flag), "{text}");
        assert_eq!(text.matches("already in use").count(), 1, "{text}");
    }
}

#[test]
fn a_put_waits_for_servers_that_are_starting() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("in");
    std::fs::write(&file, "hello\n").unwrap();
    let address = free_address();
    let put = start(&["put", "greeting", file.to_str().unwrap(), "--master", &address]);
    let _master = Daemon::start(&["master", "--listen", &address, "--http", "none", "--json"]);
    let mut put = put;
    let said = has_said_that_it_waits(&mut put);
    assert!(said.contains("waiting up to") && said.contains("--wait"), "{said}");
    let _node = Daemon::start(&["node", "--master", &address, "--memory", "16MiB", "--json"]);
    let output = end(put);
    assert_exit(&output, 0);
    assert_eq!(stdout(&run(&["get", "greeting", "--master", &address])), "hello\n");
}

#[test]
fn a_put_without_a_node_reports_that_it_waits_unless_it_must_not_wait() {
    let master = Daemon::start(&["master", "--listen", "127.0.0.1:0", "--http", "none", "--json"]);
    let address = master.text("rpc");
    let args = ["put", "k", "/proc/self/status", "--master", &address, "--wait"];
    let waited = run(&[&args[..], &["0.6"]].concat());
    assert_exit(&waited, 1);
    let text = stderr(&waited);
    assert_eq!(text.matches("waiting up to 0.6 s for a first node").count(), 1, "{text}");
    assert!(text.contains("snowskin node"), "{text}");
    let at_once = run(&[&args[..], &["0"]].concat());
    assert_exit(&at_once, 1);
    assert!(!stderr(&at_once).contains("waiting"), "{}", stderr(&at_once));
    assert_exit(&run(&[&args[..], &["soon"]].concat()), 2);
}

#[test]
fn a_local_get_waits_for_a_node_that_is_starting() {
    let dir = tempfile::tempdir().unwrap();
    let (file, socket) = (dir.path().join("in"), dir.path().join("n.sock"));
    std::fs::write(&file, "hello\n").unwrap();
    let (file, socket) = (file.to_str().unwrap(), socket.to_str().unwrap());
    let master = Daemon::start(&["master", "--listen", "127.0.0.1:0", "--http", "none", "--json"]);
    let address = master.text("rpc");
    let mut put = start(&["put", "k", file, "--master", &address, "--local", socket]);
    let said = has_said_that_it_waits(&mut put);
    assert!(said.contains(socket), "{said}");
    let node = ["node", "--master", &address, "--memory", "16MiB", "--local", socket, "--json"];
    let _node = Daemon::start(&node);
    assert_exit(&end(put), 0);
    assert_eq!(stdout(&run(&["get", "k", "--local", socket])), "hello\n");
}

#[test]
fn objects_of_any_length_are_put_and_fetched_through_the_local_server() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("n.sock");
    let socket = socket.to_str().unwrap();
    let master = Daemon::start(&["master", "--listen", "127.0.0.1:0", "--http", "none", "--json"]);
    let address = master.text("rpc");
    let node = ["node", "--master", &address, "--memory", "700MiB", "--populate", "false"];
    let _node = Daemon::start(&[&node[..], &["--local", socket, "--json"]].concat());
    let file = dir.path().join("in");
    for len in [1, 63, 64, 65, 100, 4_097, 14_039, 1_048_577, 300_000_001usize] {
        let bytes = pattern(1, len);
        std::fs::write(&file, &bytes).unwrap();
        let key = format!("k{len}");
        let put = run(&["put", &key, file.to_str().unwrap(), "--local", socket]);
        assert_exit(&put, 0);
        let out = dir.path().join("out");
        assert_exit(&run(&["get", &key, "--local", socket, "-o", out.to_str().unwrap()]), 0);
        assert!(std::fs::read(&out).unwrap() == bytes, "{len} bytes");
    }
}

#[test]
fn a_part_of_an_object_is_fetched_through_the_local_server() {
    let dir = tempfile::tempdir().unwrap();
    let (file, socket) = (dir.path().join("in"), dir.path().join("n.sock"));
    let (file, socket) = (file.to_str().unwrap(), socket.to_str().unwrap());
    let master = Daemon::start(&["master", "--listen", "127.0.0.1:0", "--http", "none", "--json"]);
    let address = master.text("rpc");
    let node = ["node", "--master", &address, "--memory", "16MiB", "--local", socket, "--json"];
    let _node = Daemon::start(&node);
    let bytes = pattern(1, 200_000);
    std::fs::write(file, &bytes).unwrap();
    assert_exit(&run(&["put", "k", file, "--local", socket]), 0);
    let get = |args: &[&str]| run(&[&["get", "k", "--local", socket], args].concat());
    for (args, part) in [
        (&["--offset", "70000"][..], 70_000..200_000),
        (&["--length", "1"], 0..1),
        (&["--offset", "64KiB", "--length", "1000"], 65_536..66_536),
        (&["--offset", "199999", "--length", "1"], 199_999..200_000),
    ] {
        let output = get(args);
        assert_exit(&output, 0);
        assert!(output.stdout == bytes[part], "{args:?}");
    }
    for args in [&["--offset", "1MiB"][..], &["--offset", "199999", "--length", "2"]] {
        let output = get(args);
        assert_exit(&output, 1);
        assert!(stderr(&output).contains("shorter than --offset plus --length"), "{}", stderr(&output));
        assert!(output.stdout.is_empty(), "{args:?}");
    }
    assert_exit(&get(&["--length", "0"]), 2);
    assert_exit(&run(&["get", "none", "--offset", "1", "--local", socket]), 3);
    // More than the node gives a local client. A machine with little memory has no room for such an arena.
    let output = get(&["--length", "1TiB"]);
    assert_exit(&output, 1);
    let text = stderr(&output);
    let of_node = ["use longer objects without --local", "left for arenas"];
    assert!(of_node.iter().any(|limit| text.contains(limit)), "{text}");
    assert!(!text.contains("this machine does not have"), "{text}");
}
