//! The store serves when the device for its logs is full. (Its processes write nothing else to a disk.)
#![cfg(target_os = "linux")]

mod common;

use std::fs::File;
use std::io::{BufRead as _, BufReader};
use std::process::{Child, Stdio};

use common::{PATIENCE, assert_exit, signal, snowskin, wait};

/// Starts a server that logs everything to a full device; returns it with the address that it reports in
/// `field`.
fn start(args: &[&str], field: &str) -> (Child, String) {
    let full = File::options().write(true).open("/dev/full").expect("every Linux has it");
    let mut child = snowskin(args)
        .env("RUST_LOG", "trace")
        .stdout(Stdio::piped())
        .stderr(Stdio::from(full))
        .spawn()
        .expect("it starts");
    let mut line = String::new();
    BufReader::new(child.stdout.take().expect("piped")).read_line(&mut line).expect("it speaks");
    let ready: serde_json::Value = serde_json::from_str(&line).unwrap_or_default();
    let address = ready[field].as_str().map(str::to_owned);
    (child, address.unwrap_or_else(|| panic!("it did not get ready: `{line}`")))
}

#[test]
fn a_master_and_a_node_whose_logs_cannot_be_written_still_serve() {
    let (mut master, address) =
        start(&["master", "--listen", "127.0.0.1:0", "--http", "none", "--json"], "rpc");
    let node = ["node", "--master", &address, "--memory", "16MiB", "--name", "n1", "--json"];
    let (mut node, _) = start(&node, "endpoint");
    let file = std::env::temp_dir().join(format!("snowskin-disk-full-{}", std::process::id()));
    std::fs::write(&file, b"some bytes").expect("this disk is not full");
    let path = file.to_str().expect("plain");
    let ran = |args: &[&str]| {
        let output = snowskin(args).env("SNOWSKIN_MASTER", &address).output().expect("it starts");
        assert_exit(&output, 0);
        output.stdout
    };
    ran(&["put", "key", path]);
    assert_eq!(ran(&["get", "key"]), b"some bytes");
    std::fs::remove_file(&file).expect("it is there");
    for daemon in [&mut node, &mut master] {
        signal(daemon.id(), "TERM");
        let ended = wait(daemon).unwrap_or_else(|| panic!("it did not end within {PATIENCE:?}"));
        assert!(ended.success(), "{ended}");
    }
}
