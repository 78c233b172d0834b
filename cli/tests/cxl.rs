//! `snowskin cxl`: pools in files, as on a devdax device.
#![cfg(feature = "cxl")]

mod common;

use common::{assert_exit, json, run, stderr, stdout};

#[test]
fn a_pool_is_made_once_shown_and_only_overwritten_by_force() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("pool");
    std::fs::File::create(&path).unwrap().set_len(64 << 20).unwrap();
    let path = path.to_str().unwrap();
    let output = run(&["cxl", "format", path, "--extent", "4MiB", "--peers", "8", "--json"]);
    assert_exit(&output, 0);
    let made = json(&output);
    assert_eq!((&made["extent_bytes"], &made["peers_max"]), (&(4 << 20).into(), &8.into()), "{made}");
    let extents = made["extents"].as_u64().unwrap();
    assert!((14..=15).contains(&extents), "{made}: the records take a part of the first extent's size");

    let shown = json(&run(&["cxl", "inspect", path, "--json"]));
    assert_eq!((&shown["uuid"], &shown["damaged"]), (&made["uuid"], &0.into()), "{shown}");
    assert_eq!((&shown["owners"], &shown["peers"]), (&serde_json::json!([]), &serde_json::json!([])));

    let again = run(&["cxl", "format", path]);
    assert_exit(&again, 1);
    assert!(stderr(&again).contains("--force"), "{}", stderr(&again));
    let forced = run(&["cxl", "format", path, "--force"]);
    assert_exit(&forced, 0);
    assert!(stdout(&forced).contains("extents of 2MiB"), "{}", stdout(&forced));
    assert!(!stdout(&forced).contains(made["uuid"].as_str().unwrap()), "a new pool has a new name");
}

#[test]
fn extents_and_peers_are_shown_with_their_epochs() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("pool");
    std::fs::File::create(&path).unwrap().set_len(64 << 20).unwrap();
    te_cxl::Pool::format(&path, te_cxl::FormatOptions::default()).unwrap();
    let pool = te_cxl::Pool::open(&path, te_cxl::Coherence::Hardware, None).unwrap();
    pool.claim(te_cxl::Claim { first: 3, count: 4, incarnation: 0xab, epoch: 9, key: [1; 16] }).unwrap();
    let text = stdout(&run(&["cxl", "inspect", path.to_str().unwrap()]));
    assert!(text.contains("extents 3 to 6: owner 00000000000000ab, epoch 9"), "{text}");
    pool.release(3, 4, 9).unwrap();
    let text = stdout(&run(&["cxl", "inspect", path.to_str().unwrap()]));
    assert!(text.contains("extents 3 to 6: free; the last owner was 00000000000000ab, epoch 9"), "{text}");
}

#[test]
fn a_damaged_record_is_counted_and_numbers_of_64_bits_are_text() {
    use std::os::unix::fs::FileExt as _;
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("pool");
    let file = std::fs::File::create(&path).unwrap();
    file.set_len(64 << 20).unwrap();
    te_cxl::Pool::format(&path, te_cxl::FormatOptions::default()).unwrap();
    let pool = te_cxl::Pool::open(&path, te_cxl::Coherence::Hardware, None).unwrap();
    pool.claim(te_cxl::Claim { first: 0, count: 1, incarnation: u64::MAX, epoch: 1, key: [1; 16] }).unwrap();
    // The page of extent 1 follows that of extent 0, which follows the superblock's.
    file.write_all_at(&[0xff; 64], 2 * te_cxl::pool::PAGE).unwrap();
    let shown = json(&run(&["cxl", "inspect", path.to_str().unwrap(), "--json"]));
    assert_eq!(
        (&shown["damaged"], &shown["owners"][0]["incarnation"]),
        (&1.into(), &"ffffffffffffffff".into())
    );
    let text = stdout(&run(&["cxl", "inspect", path.to_str().unwrap()]));
    assert!(text.contains("1 owner record cannot be understood"), "{text}");
}

#[test]
fn what_is_no_pool_is_refused_with_the_reason() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    std::fs::write(path("short"), [0; 100]).unwrap();
    std::fs::write(path("zeros"), vec![0; 16 << 20]).unwrap();
    for (arguments, code, said) in [
        (&["inspect", "/no/such/device"][..], 1, "No such file"),
        (&["inspect", &path("zeros")], 1, "`snowskin cxl format` makes one"),
        (&["inspect", "/dev/null"], 1, "neither a DAX device nor a file"),
        (&["format", &path("short")], 1, "bytes"),
        (&["format", &path("zeros"), "--extent", "1MiB"], 2, "extent"),
        (&["format", &path("zeros"), "--peers", "0"], 2, "peers"),
        (&["format", &path("zeros"), "--peers", "1025"], 2, "peers"),
    ] {
        let output = run(&[&["cxl"], arguments].concat());
        assert_exit(&output, code);
        assert!(stderr(&output).contains(said), "{arguments:?}: {}", stderr(&output));
    }
}

#[test]
fn the_doctor_examines_a_pool_and_says_how_to_make_one() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("pool");
    std::fs::File::create(&path).unwrap().set_len(64 << 20).unwrap();
    let path = path.to_str().unwrap();
    let ask = || json(&run(&["doctor", "--fabric", "cxl", "--pool", path, "--json"]));
    let finding = |report: &serde_json::Value, check: &str| {
        let checks = report["checks"].as_array().unwrap();
        checks.iter().find(|finding| finding["check"] == check).unwrap().clone()
    };
    let report = ask();
    let pools = finding(&report, "cxl pools");
    assert_eq!(pools["verdict"], "fail", "{pools}");
    assert!(pools["command"].as_str().unwrap().contains(&format!("snowskin cxl format {path}")), "{pools}");
    assert_eq!(finding(&report, "cxl")["verdict"], "skip", "it refers to that");
    assert_exit(&run(&["cxl", "format", path]), 0);
    let report = ask();
    let pools = finding(&report, "cxl pools");
    assert_eq!(pools["verdict"], "ok", "{pools}");
    assert!(
        pools["found"].as_str().unwrap().contains("extents of 2MiB, of which 0 have an owner"),
        "{pools}"
    );
    assert_eq!(finding(&report, "cxl")["verdict"], "ok");
}
