//! Mooncake's commands, run as its documentation and its tests run them.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command, Stdio};

use common::{assert_exit, eventually, run, signal, snowskin, stderr, stdout, wait};

/// A process that is killed when dropped.
struct Process(Child);

impl Process {
    fn start(mut command: Command) -> Self {
        Self(command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap())
    }

    fn is_running(&mut self) -> bool {
        self.0.try_wait().unwrap().is_none()
    }

    /// Ends it with SIGTERM; its exit code and what it wrote to stderr.
    fn end(mut self) -> (Option<i32>, String) {
        signal(self.0.id(), "TERM");
        let code = wait(&mut self.0).expect("it ends").code();
        let mut said = String::new();
        self.0.stderr.take().unwrap().read_to_string(&mut said).unwrap();
        (code, said)
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A port that was free a moment ago.
fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

/// Status and body; `None`: no server answers.
fn http(method: &str, port: u16, path: &str, body: &str) -> Option<(u16, String)> {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).ok()?;
    let length = body.len();
    write!(stream, "{method} {path} HTTP/1.0\r\nHost: 127.0.0.1\r\nContent-Length: {length}\r\n\r\n{body}")
        .ok()?;
    let mut text = String::new();
    stream.read_to_string(&mut text).ok()?;
    let (head, body) = text.split_once("\r\n\r\n")?;
    Some((head.get(9..12)?.parse().ok()?, body.to_owned()))
}

#[test]
fn the_command_line_test_of_mooncakes_wheel_holds() {
    let dir = tempfile::tempdir().unwrap();
    let (rpc, metrics, port) = (free_port(), free_port(), free_port());
    let master = [
        "mooncake-master",
        &format!("--port={rpc}"),
        "--max_threads=2",
        &format!("--metrics_port={metrics}"),
    ];
    let mut master = Process::start(snowskin(&master));
    eventually("the master serves", || {
        http("GET", metrics, "/health", "").is_some_and(|(status, _)| status == 200)
    });
    assert_eq!(http("GET", metrics, "/get_all_segments", "").unwrap(), (200, String::new()));
    let client = [
        "mooncake-client",
        &format!("--master_server_address=127.0.0.1:{rpc}"),
        &format!("--port={port}"),
        "--global_segment_size=64MB",
    ];
    let mut command = snowskin(&client);
    command.env("XDG_RUNTIME_DIR", dir.path());
    let mut client = Process::start(command);
    let name = format!("127.0.0.1:{port}");
    eventually("its segment is mounted", || {
        http("GET", metrics, "/get_all_segments", "").is_some_and(|(_, names)| names == format!("{name}\n"))
    });
    // Clients of this machine find it by its port.
    let socket = dir.path().join("snowskin").join(format!("127-0-0-1-{port}.sock"));
    eventually("it serves local clients", || socket.exists());
    let put = run(&[
        "put",
        "greeting",
        "--local",
        socket.to_str().unwrap(),
        "--master",
        &format!("127.0.0.1:{rpc}"),
        "Cargo.toml",
    ]);
    assert_exit(&put, 0);
    let found = http("GET", metrics, "/query_key?key=greeting", "").unwrap();
    assert!(found.0 == 200 && found.1.contains(&format!("\"transport_endpoint_\":\"{name}\"")), "{found:?}");
    assert!(master.is_running() && client.is_running());
    assert_eq!(client.end().0, Some(0));
    assert_eq!(master.end().0, Some(0));
}

#[test]
fn a_master_serves_metadata_as_well_and_warns_about_what_it_lacks() {
    let (rpc, metrics, metadata) = (free_port(), free_port(), free_port());
    // Under the name of the program, as with a link to it.
    let mut command = snowskin(&[
        &format!("--rpc_port={rpc}"),
        "--metrics_port",
        &metrics.to_string(),
        "--enable_http_metadata_server=true",
        &format!("--http_metadata_server_port={metadata}"),
        "--default_kv_lease_ttl=500",
        "--enable_kv_events",
        &format!("--kv_events_bind_endpoint=tcp://127.0.0.1:{}", free_port()),
        "--kv_events_backend_id=pool",
        "--enable_cxl",
        "--no_such_flag=7",
    ]);
    command.arg0("mooncake_master");
    let mut master = Process::start(command);
    eventually("the metadata server answers", || {
        http("GET", metadata, "/health", "").is_some_and(|(status, _)| status == 200)
    });
    let key = "/metadata?key=mooncake%2Fram%2Fnode-7";
    assert_eq!(http("GET", metadata, key, "").unwrap().0, 404);
    assert_eq!(http("PUT", metadata, key, "{}").unwrap().0, 200);
    assert_eq!(http("GET", metadata, key, "").unwrap(), (200, "{}".into()));
    eventually("the master serves", || http("GET", metrics, "/health", "").is_some());
    let settings = http("GET", metrics, "/api/v1/config", "").unwrap().1;
    // The flag names how long an object stays: the time that readers have, and a guard for clocks that drift.
    assert!(settings.contains("\"lease_ttl_ms\":400,\"lease_guard_ms\":100"), "{settings}");
    assert!(
        http("GET", metrics, "/metrics", "").unwrap().1.contains("snowskin_master_kv_events_followers 0")
    );
    assert!(master.is_running());
    let (code, said) = master.end();
    assert_eq!(code, Some(0));
    assert!(said.contains("mooncake_master: warning: --no_such_flag is not a flag"), "{said}");
    assert!(said.contains("mooncake_master: warning: --enable_cxl=true has no effect"), "{said}");
}

#[test]
fn the_metadata_server_runs_by_itself() {
    let mut server =
        Process::start(snowskin(&["mooncake-http-metadata-server", "--port", "0", "--host", "127.0.0.1"]));
    let mut line = String::new();
    BufReader::new(server.0.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let port = line.split(':').next_back().unwrap().split('/').next().unwrap().parse().unwrap();
    let key = "/metadata?key=mooncake/rpc_meta/a";
    assert_eq!(http("PUT", port, key, "1").unwrap().0, 200);
    // The separate server refuses even the same value again.
    assert_eq!(http("PUT", port, key, "1").unwrap().0, 400);
    assert_eq!(http("GET", port, "/metadata", "").unwrap().0, 400);
    assert_eq!(server.end().0, Some(0));
}

#[test]
fn the_bench_finds_its_target() {
    let mut target = Process::start(snowskin(&[
        "mooncake-transfer-engine-bench",
        "--mode=target",
        "--metadata_server=P2PHANDSHAKE",
        "--protocol=tcp",
        "--buffer_size=16777216",
    ]));
    let mut line = String::new();
    BufReader::new(target.0.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let endpoint = line.strip_prefix("target ready at ").and_then(|rest| rest.split(": ").next()).unwrap();
    let bench = run(&[
        "mooncake-transfer-engine-bench",
        "--metadata_server=P2PHANDSHAKE",
        "--protocol=tcp",
        "--operation=write",
        "--threads=1",
        "--batch_size=4",
        "--duration=1",
        &format!("--segment_id={endpoint}"),
    ]);
    assert_exit(&bench, 0);
    assert!(stdout(&bench).contains("write"), "{}", stdout(&bench));
    assert_eq!(target.end().0, Some(0));
}

#[test]
fn help_lists_the_flags_and_a_wrong_value_is_wrong_usage() {
    let help = run(&["mooncake-master", "--help"]);
    assert_exit(&help, 0);
    let text = stdout(&help);
    assert!(text.contains("Usage: mooncake_master") && text.contains("--default_kv_lease_ttl"), "{text}");
    let wrong = run(&["mooncake-master", "--port=70000"]);
    assert_exit(&wrong, 2);
    assert!(stderr(&wrong).contains("--port=70000: write a port"), "{}", stderr(&wrong));
    // They are for those who know Mooncake: `--help` does not list them.
    assert!(!stdout(&run(&["--help"])).contains("mooncake"));
}
