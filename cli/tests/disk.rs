//! `snowskin disk`: format, inspect, verify and bench, and what they refuse.

mod common;

use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::process::Stdio;

use common::{assert_exit, json, run, signal, snowskin, stderr, stdout, wait};

/// The flag that these tests need where the temporary directory has no direct I/O.
fn cache_flag(directory: &Path) -> &'static [&'static str] {
    let probe = directory.join("probe");
    let output = run(&["disk", "format", probe.to_str().expect("a path in UTF-8"), "--size", "16MiB"]);
    let _ = std::fs::remove_file(&probe);
    if output.status.success() { &[] } else { &["--buffered"] }
}

fn format(path: &Path, size: &str, flags: &[&str]) -> serde_json::Value {
    let args = ["disk", "format", path.to_str().expect("a path in UTF-8"), "--size", size, "--json"];
    let output = run(&[&args[..], flags].concat());
    assert_exit(&output, 0);
    json(&output)
}

#[test]
fn a_disk_is_formatted_measured_inspected_and_verified() {
    let directory = tempfile::tempdir().unwrap();
    let flags = cache_flag(directory.path());
    let path = directory.path().join("disk");
    let name = path.to_str().unwrap();
    let formatted = format(&path, "256MiB", flags);
    assert_eq!((&formatted["extent_bytes"], &formatted["extents"]), (&(4 << 20).into(), &63.into()));
    assert_eq!(std::fs::metadata(&path).unwrap().len(), 256 << 20);

    let bench = ["disk", "bench", name, "--value", "64KiB", "--duration", "0.1", "--depth", "8", "--verify"];
    let output = run(&[&bench[..], &["--bytes", "16MiB", "--json"], flags].concat());
    assert_exit(&output, 0);
    let rows = json(&output);
    assert_eq!((&rows[0]["op"], &rows[0]["objects"]), (&"demote".into(), &256.into()));
    assert_eq!((&rows[1]["op"], &rows[1]["depth"]), (&"stage".into(), &8.into()));
    assert!(rows[0]["write_amplification"].as_f64().unwrap() < 1.03, "{rows}");
    assert!(rows[1]["gib_s"].as_f64().unwrap() > 0.0, "{rows}");

    let again = run(&[&bench[..], flags].concat());
    assert_exit(&again, 1);
    assert!(stderr(&again).contains("256 objects") && stderr(&again).contains("--yes"), "{}", stderr(&again));

    let inspected = run(&[&["disk", "inspect", name, "--json"][..], flags].concat());
    assert_exit(&inspected, 0);
    let report = json(&inspected);
    assert_eq!((&report["objects"], &report["uuid"]), (&256.into(), &formatted["uuid"]));
    assert_eq!(report["object_bytes"], 16 << 20);
    let people = run(&[&["disk", "inspect", name][..], flags].concat());
    assert!(stdout(&people).contains("256"), "{}", stdout(&people));

    let verified = run(&[&["disk", "verify", name, "--json"][..], flags].concat());
    assert_exit(&verified, 0);
    let report = json(&verified);
    assert_eq!((&report["verified"], &report["damaged"]), (&256.into(), &0.into()));

    // One byte of the data of the first object of the first extent.
    let file = std::fs::OpenOptions::new().read(true).write(true).open(&path).unwrap();
    let at = (1 << 20) + 64 * 1_024;
    let mut byte = [0];
    file.read_exact_at(&mut byte, at).unwrap();
    file.write_all_at(&[!byte[0]], at).unwrap();
    let verified = run(&[&["disk", "verify", name, "--json"][..], flags].concat());
    assert_exit(&verified, 4);
    let report = json(&verified);
    assert_eq!((&report["damaged"], &report["damage"][0]["kind"]), (&1.into(), &"object".into()));
    let people = run(&[&["disk", "verify", name][..], flags].concat());
    assert_exit(&people, 4);
    assert!(stdout(&people).contains("1 damaged"), "{}", stdout(&people));
    assert!(stderr(&people).contains("bench/"), "{}", stderr(&people));
}

#[test]
fn what_cannot_be_a_disk_is_refused_with_what_to_do() {
    let directory = tempfile::tempdir().unwrap();
    let flags = cache_flag(directory.path());
    let at = |name: &str| directory.path().join(name).to_str().unwrap().to_owned();
    std::fs::write(at("letter"), "Dear reader").unwrap();
    format(Path::new(&at("disk")), "16MiB", flags);
    format(Path::new(&at("short")), "16MiB", flags);
    let short = std::fs::OpenOptions::new().write(true).open(at("short")).unwrap();
    short.set_len(9 << 20).unwrap();
    for (args, code, said) in [
        (vec!["format", &at("new")], 2, "--size"),
        (vec!["format", &at("new"), "--size", "0"], 2, "0 bytes"),
        (vec!["format", &at("new"), "--size", "1MiB"], 2, "extents"),
        (vec!["format", &at("new"), "--size", "64TiB"], 1, "no room"),
        (vec!["format", &at("new"), "--size", "1GiB", "--extent", "5000"], 2, "extent"),
        (vec!["format", &at("new"), "--size", "16MiB", "--extent", "8GiB"], 2, "1GiB"),
        (vec!["format", &at("new"), "--size", "4XB"], 2, "64KiB"),
        (vec!["format", &at("letter"), "--size", "16MiB"], 1, "--force"),
        (vec!["format", &at("")], 1, "neither a regular file nor a block device"),
        (vec!["format", "/dev/null", "--size", "16MiB"], 1, "neither a regular file nor a block device"),
        (vec!["format", "s3://kv-cache/kv", "--size", "16MiB"], 2, "--shared"),
        (vec!["inspect", "s3://k"], 1, if cfg!(feature = "s3") { "3 to 63" } else { "--features s3" }),
        (vec!["verify", "s3://k"], 1, if cfg!(feature = "s3") { "3 to 63" } else { "--features s3" }),
        (vec!["inspect", &at("new")], 1, "no such file"),
        (vec!["inspect", &at("letter")], 1, "not a disk"),
        (vec!["verify", &at("short")], 1, "truncated"),
        (vec!["verify", &at("")], 1, "not a disk"),
        (vec!["bench", &at("letter")], 1, "not a disk"),
        (vec!["bench", &at("disk"), "--value", "1GiB"], 2, "--value"),
        (vec!["bench", &at("disk"), "--value", "1KiB"], 2, "--value"),
        (vec!["bench", &at("disk"), "--depth", "0"], 2, "1..=1024"),
    ] {
        let output = run(&[&["disk"][..], &args, flags].concat());
        assert_exit(&output, code);
        assert!(stderr(&output).contains(said), "{args:?}: {}", stderr(&output));
    }
    assert!(!Path::new(&at("new")).exists());
    assert_eq!(std::fs::read(at("letter")).unwrap(), b"Dear reader");
    let forced = run(&[&["disk", "format", &at("letter"), "--size", "16MiB", "--force"][..], flags].concat());
    assert_exit(&forced, 0);
}

#[test]
fn a_disk_in_use_is_inspected_but_not_verified_and_an_interrupt_ends_in_order() {
    let directory = tempfile::tempdir().unwrap();
    let flags = cache_flag(directory.path());
    let path = directory.path().join("disk");
    let name = path.to_str().unwrap();
    format(&path, "64MiB", flags);
    let bench = ["disk", "bench", name, "--value", "16KiB", "--duration", "60", "--bytes", "4MiB", "--json"];
    let mut child = snowskin(&[&bench[..], flags].concat())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let end = std::time::Instant::now() + common::PATIENCE;
    loop {
        let inspected = run(&[&["disk", "inspect", name, "--json"][..], flags].concat());
        let in_use = json(&inspected)["in_use"].as_bool().unwrap();
        assert_exit(&inspected, 0);
        if in_use {
            break;
        }
        assert!(std::time::Instant::now() < end && child.try_wait().unwrap().is_none(), "it never opened it");
    }
    let verify = run(&[&["disk", "verify", name][..], flags].concat());
    assert_exit(&verify, 1);
    assert!(stderr(&verify).contains("in use"), "{}", stderr(&verify));
    let second = run(&[&bench[..], flags].concat());
    assert_exit(&second, 1);
    assert!(stderr(&second).contains("in use"), "{}", stderr(&second));
    signal(child.id(), "INT");
    assert_eq!(wait(&mut child).expect("it ends").code(), Some(130));
    let verify = run(&[&["disk", "verify", name][..], flags].concat());
    assert_exit(&verify, 0);
}
