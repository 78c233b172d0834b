//! `snowskin node --shared`, and what the tools say about a directory of packs.
#![cfg(target_os = "linux")]

mod common;

use std::io::{BufRead as _, BufReader};
use std::process::{Child, Stdio};

use common::{PATIENCE, assert_exit, eventually, json, run, signal, snowskin, stderr, stdout, wait};

/// Starts a server; returns it with the address that it reports in `field`.
fn start(args: &[&str], field: &str) -> (Child, String) {
    let mut child = snowskin(args).stdout(Stdio::piped()).spawn().expect("it starts");
    let mut line = String::new();
    BufReader::new(child.stdout.take().expect("piped")).read_line(&mut line).expect("it speaks");
    let ready: serde_json::Value = serde_json::from_str(&line).unwrap_or_default();
    let address = ready[field].as_str().map(str::to_owned);
    (child, address.unwrap_or_else(|| panic!("it did not get ready: `{line}`")))
}

fn stop(mut child: Child) {
    signal(child.id(), "TERM");
    let ended = wait(&mut child).unwrap_or_else(|| panic!("it did not end within {PATIENCE:?}"));
    assert!(ended.success(), "{ended}");
}

#[test]
fn a_directory_of_packs_is_listed_inspected_and_verified() {
    let root = tempfile::tempdir().unwrap();
    let shared = format!("{}:64MiB", root.path().display());
    let (master, address) = start(&["master", "--listen", "127.0.0.1:0", "--http", "none", "--json"], "rpc");
    let args =
        ["node", "--master", &address, "--memory", "16MiB", "--name", "n1", "--shared", &shared, "--json"];
    let (node, _) = start(&args, "endpoint");
    let mut rows = serde_json::Value::Null;
    eventually("the directory is mounted", || {
        let listed = run(&["admin", "segments", "--master", &address, "--json"]);
        assert_exit(&listed, 0);
        rows = json(&listed);
        rows[1]["kind"] == "shared"
    });
    assert_eq!((&rows[0]["kind"], &rows[1]["kind"]), (&"memory".into(), &"shared".into()), "{rows}");
    let directory = rows[1]["name"].as_str().unwrap().to_owned();
    assert!(directory.starts_with(root.path().join("default").to_str().unwrap()), "{directory}");

    let inspected = run(&["disk", "inspect", &directory, "--json"]);
    assert_exit(&inspected, 0);
    assert_eq!((&json(&inspected)["in_use"], &json(&inspected)["objects"]), (&true.into(), &0.into()));
    let refused = run(&["disk", "verify", &directory]);
    assert_exit(&refused, 1);
    assert!(stderr(&refused).contains("node n1 writes"), "{}", stderr(&refused));
    stop(node);
    let verified = run(&["disk", "verify", &directory, "--json"]);
    assert_exit(&verified, 0);
    let people = run(&["disk", "inspect", &directory]);
    assert_exit(&people, 0);
    assert!(stdout(&people).contains("0 full, 0 open, 63 free"), "{}", stdout(&people));
    // A file that is no pack is named.
    std::fs::write(format!("{directory}/0000000000000009.pack"), vec![7; 5_000]).unwrap();
    let damaged = run(&["disk", "verify", &directory]);
    assert_exit(&damaged, 4);
    assert!(stderr(&damaged).contains("0000000000000009.pack: not used"), "{}", stderr(&damaged));
    stop(master);
}
