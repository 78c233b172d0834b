//! Changes of settings while a master serves: `admin config set`, and SIGHUP after a change of the file.
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use std::fs;
use std::time::{Duration, Instant};

use common::{Daemon, PATIENCE, assert_exit, json, signal, snowskin, stderr, stdout};
use serde_json::Value;

struct Master {
    daemon: Daemon,
    address: String,
    dir: tempfile::TempDir,
}

impl Master {
    fn start(settings: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("snowskin.toml");
        fs::write(&file, settings).unwrap();
        let daemon = Daemon::start(&[
            "master",
            "--config",
            file.to_str().unwrap(),
            "--listen",
            "127.0.0.1:0",
            "--http",
            "none",
            "--json",
        ]);
        Self { address: daemon.text("rpc"), daemon, dir }
    }

    fn admin(&self, args: &[&str]) -> std::process::Output {
        let all = [&["admin", "config"], args].concat();
        snowskin(&all).env("SNOWSKIN_MASTER", &self.address).output().unwrap()
    }

    fn value(&self, pointer: &str) -> Value {
        json(&self.admin(&["--json"])).pointer(pointer).cloned().unwrap_or_default()
    }

    /// Changes the file and waits until a setting has a value.
    fn reload(&self, settings: &str, pointer: &str, value: &Value) {
        fs::write(self.dir.path().join("snowskin.toml"), settings).unwrap();
        signal(self.daemon.child.id(), "HUP");
        let deadline = Instant::now() + PATIENCE;
        while self.value(pointer) != *value {
            assert!(Instant::now() < deadline, "{pointer} is {}", self.value(pointer));
            std::thread::sleep(Duration::from_millis(10)); // timing: the master takes the signal when it can
        }
    }
}

#[test]
fn settings_are_set_while_the_master_serves_and_taken_back() {
    let master = Master::start("[master.store]\ndemote_ahead = 0.2\n");
    let set = master.admin(&["set", "demote_ahead=0.3", "metadata_bytes_max=2GiB", "eviction=lru"]);
    assert_exit(&set, 0);
    assert!(stdout(&set).contains("demote_ahead") && stdout(&set).contains("0.3"), "{}", stdout(&set));
    assert_eq!(master.value("/metadata_bytes_max"), 2_u64 << 30);
    assert_eq!(master.value("/eviction"), "lru");
    let shown = stdout(&master.admin(&[]));
    let line = shown.lines().find(|line| line.contains("demote_ahead")).unwrap();
    assert!(line.contains("set while it served"), "{line}");

    // Nothing is changed when one of them is wrong.
    let wrong = master.admin(&["set", "disk_away_ms=7", "eviction_high_watermark=7"]);
    assert_exit(&wrong, 2);
    assert!(
        stderr(&wrong).contains("eviction_high_watermark: the value must be between"),
        "{}",
        stderr(&wrong)
    );
    assert_ne!(master.value("/disk_away_ms"), 7);
    let fixed = master.admin(&["set", "node_ttl_ms=7"]);
    assert_exit(&fixed, 2);
    assert!(stderr(&fixed).contains("switchover"), "{}", stderr(&fixed));

    let unset = master.admin(&["unset", "demote_ahead", "--json"]);
    let row = json(&unset);
    assert_eq!((&row["before"], &row["after"]), (&Value::from(0.3), &Value::from(0.2)));
}

#[test]
fn a_master_reads_its_settings_again_on_sighup() {
    let master = Master::start("[master.store]\ndemote_ahead = 0.2\n");
    assert_exit(&master.admin(&["set", "disk_away_ms=7"]), 0);
    let file = "[master.store]\ndemote_ahead = 0.4\ndisk_away_ms = 8\nnode_ttl_ms = 9\n";
    master.reload(file, "/demote_ahead", &Value::from(0.4));
    assert_eq!(master.value("/disk_away_ms"), 7, "it was set");
    assert_eq!(master.value("/node_ttl_ms"), 10_000, "it needs a start");
    assert_exit(&master.admin(&["unset", "disk_away_ms"]), 0);
    assert_eq!(master.value("/disk_away_ms"), 8, "what the file says by now");
    // A file that cannot be used changes nothing and ends nothing.
    fs::write(master.dir.path().join("snowskin.toml"), "[master.store]\ndemote_ahead = 7\n").unwrap();
    signal(master.daemon.child.id(), "HUP");
    master.reload("[master.store]\ndemote_ahead = 0.1\n", "/demote_ahead", &Value::from(0.1));
    assert_eq!(master.daemon.terminate(), Some(0));
}

#[test]
fn secrets_stay_those_of_the_start_when_the_file_has_others() {
    let master = Master::start("[master.store]\nadmin_secret = \"first\"\n");
    let set = |secret: &str| {
        let mut command = snowskin(&["admin", "config", "set", "disk_away_ms=7"]);
        command.env("SNOWSKIN_MASTER", &master.address).env("SNOWSKIN_ADMIN_SECRET", secret);
        command.output().unwrap()
    };
    fs::write(
        master.dir.path().join("snowskin.toml"),
        "[master.store]\nadmin_secret = \"second\"\ndemote_ahead = 0.4\n",
    )
    .unwrap();
    signal(master.daemon.child.id(), "HUP");
    common::eventually("the settings are read again", || {
        let mut show = snowskin(&["admin", "config", "--json"]);
        show.env("SNOWSKIN_MASTER", &master.address).env("SNOWSKIN_ADMIN_SECRET", "first");
        json(&show.output().unwrap()).pointer("/demote_ahead") == Some(&Value::from(0.4))
    });
    assert_exit(&set("first"), 0);
    let refused = set("second");
    assert_ne!(refused.status.code(), Some(0), "{}", stdout(&refused));
    assert!(stderr(&refused).contains("secret"), "{}", stderr(&refused));
}
