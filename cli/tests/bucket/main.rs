//! `snowskin disk inspect` and `verify` of packs in a bucket: the program, and a real S3 server on the
//! loopback.
//!
//! The settings of a store are in the environment of a process, so that this binary starts the server, sets
//! its environment, and runs its tests one after the other.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "../common/mod.rs"]
mod common;
#[path = "../../../store-client/tests/bucket/server.rs"]
#[allow(clippy::unwrap_used, dead_code, reason = "a test fails by panicking; others use the rest")]
mod server;

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::process::{ExitCode, Output};
use std::sync::LazyLock;

use common::{PATIENCE, assert_exit, json, run, snowskin, stderr, stdout};
use libtest_mimic::{Arguments, Trial};
use server::{Fault, KEY_ID, SECRET, Server};
use store_client::disk::{
    Demote, DiskEvent, DiskOptions, DiskService, PackBucket, PackDirectory, PackNames, image_of,
};
use store_core::disk::format::Stream;

const MIB: u64 = 1 << 20;
const OBJECT: usize = 200 << 10;
const OBJECTS: u64 = 23;

static SERVER: LazyLock<Server> = LazyLock::new(Server::new);

/// Tests by name.
const TESTS: &[(&str, fn())] = &[
    (
        "packs_in_a_bucket_are_inspected_and_verified_like_a_directory_and_not_changed",
        packs_in_a_bucket_are_inspected_and_verified_like_a_directory_and_not_changed,
    ),
    ("damaged_truncated_and_foreign_packs_are_named", damaged_truncated_and_foreign_packs_are_named),
    ("a_prefix_stands_for_its_only_directory", a_prefix_stands_for_its_only_directory),
    (
        "what_a_store_refuses_is_no_damage_and_says_what_to_do",
        what_a_store_refuses_is_no_damage_and_says_what_to_do,
    ),
];

fn main() -> ExitCode {
    let mut arguments = Arguments::from_args();
    arguments.test_threads = Some(1);
    if !arguments.list {
        let endpoint = format!("http://{}", SERVER.address());
        for (name, value) in [
            ("AWS_ENDPOINT_URL", endpoint.as_str()),
            ("AWS_ALLOW_HTTP", "true"),
            ("AWS_REGION", "us-east-1"),
            ("AWS_ACCESS_KEY_ID", KEY_ID),
            ("AWS_SECRET_ACCESS_KEY", SECRET),
        ] {
            // SAFETY: this is the only thread of the process so far.
            unsafe { std::env::set_var(name, value) };
        }
        SERVER.start();
    }
    let run = |test: fn()| {
        move || {
            test();
            Ok(())
        }
    };
    let trials = TESTS.iter().map(|(name, test)| Trial::test(*name, run(*test))).collect();
    libtest_mimic::run(&arguments, trials).exit_code()
}

/// Writes objects, of which the last ones are in an extent that stays open.
fn fill(disk: DiskService) {
    let next = || disk.wait_event(PATIENCE).expect("the disk answers");
    assert!(matches!(next(), DiskEvent::Ready));
    for id in 1..=OBJECTS {
        let (crc32c, source) = image_of(&vec![id as u8; OBJECT]);
        let key = format!("object-{id}").into_bytes().into();
        let (len, stream) = (OBJECT as u64, Stream::Trial);
        disk.demote(Demote { id, tenant: 1, key, generation: id, len, crc32c, stream, source }).unwrap();
        assert!(matches!(next(), DiskEvent::Demoted { .. }));
    }
    assert!(disk.close(PATIENCE));
}

fn bucket(name: &str, cluster: &str) -> PathBuf {
    let cluster = SERVER.bucket(name).join(cluster);
    let packs = PackBucket::create(&cluster, 64 * MIB, Some(1 << 20), "a").unwrap();
    let path = packs.path().to_owned();
    fill(DiskService::format_bucket(packs, DiskOptions::default(), 1).unwrap());
    path
}

fn disk(what: &str, path: &Path, flags: &[&str]) -> Output {
    run(&[&["disk", what, path.to_str().unwrap()][..], flags].concat())
}

/// Everything in a directory of the bucket.
fn contents(path: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = fs::read_dir(SERVER.files(path)).unwrap().map(|entry| entry.unwrap());
    entries.map(|entry| (entry.file_name().into_string().unwrap(), fs::read(entry.path()).unwrap())).collect()
}

/// The closed packs, oldest first.
fn packs(path: &Path) -> Vec<PathBuf> {
    let names = contents(path).into_keys().filter(|name| name.ends_with(".pack"));
    names.map(|name| SERVER.files(path).join(name)).collect()
}

fn packs_in_a_bucket_are_inspected_and_verified_like_a_directory_and_not_changed() {
    let path = bucket("cli-sound", "default");
    let root = tempfile::tempdir().unwrap();
    let packs = PackDirectory::create(root.path(), 64 * MIB, Some(1 << 20), "a").unwrap();
    let directory = packs.path().to_owned();
    fill(DiskService::format_packs(packs, DiskOptions::default(), 1).unwrap());
    let before = contents(&path);
    for what in ["inspect", "verify"] {
        let (here, there) = (disk(what, &directory, &["--json"]), disk(what, &path, &["--json"]));
        assert_exit(&here, 0);
        assert_exit(&there, 0);
        let (here, there) = (json(&here), json(&there));
        let names = |report: &serde_json::Value| -> Vec<String> {
            report.as_object().unwrap().keys().cloned().collect()
        };
        assert_eq!(names(&here), names(&there), "the same fields");
        for same in [
            "in_use",
            "version",
            "bytes",
            "block_bytes",
            "extent_bytes",
            "extents",
            "objects",
            "object_bytes",
            "objects_by_lineage",
            "newest_lineage",
            "removed",
            "tombstones",
            "bad_extents",
            "damage",
        ] {
            assert_eq!(here[same], there[same], "{what} {same}");
        }
        assert_eq!((&there["objects"], &there["path"]), (&OBJECTS.into(), &path.to_str().unwrap().into()));
        assert!(there["extents"]["closed"].as_u64().unwrap() >= 4, "{there}");
        assert_eq!(there["extents"]["open"], 1, "what was synced of it counts");
        if what == "verify" {
            assert_eq!((&there["verified"], &there["damaged"]), (&OBJECTS.into(), &0.into()));
            assert!(there["read_bytes"].as_u64().unwrap() >= OBJECTS * OBJECT as u64, "{there}");
        }
    }
    let people = disk("inspect", &path, &[]);
    assert!(stdout(&people).contains("23") && stderr(&people).is_empty(), "{}", stderr(&people));
    assert!(contents(&path) == before, "nothing was changed");
    let files: Vec<PathBuf> = fs::read_dir(&directory).unwrap().map(|entry| entry.unwrap().path()).collect();
    assert!(files.contains(&PackNames::pack(&directory, 1)), "{files:?}");
}

fn damaged_truncated_and_foreign_packs_are_named() {
    let path = bucket("cli-damaged", "default");
    let found = packs(&path);
    assert!(found.len() >= 4, "{found:?}");
    // One byte in the middle of an object.
    let file = fs::OpenOptions::new().read(true).write(true).open(&found[0]).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, 100_000).unwrap();
    file.write_all_at(&[!byte[0]], 100_000).unwrap();
    let verified = disk("verify", &path, &["--json"]);
    assert_exit(&verified, 4);
    let report = json(&verified);
    assert_eq!((&report["verified"], &report["damaged"]), (&OBJECTS.into(), &1.into()));
    let row = &report["damage"][0];
    assert_eq!(
        (&row["kind"], &row["key"], &row["tenant"]),
        (&"object".into(), &"object-1".into(), &1.into())
    );
    assert_exit(&disk("inspect", &path, &[]), 0);

    // The first header of another: its footer says the same, so that only verify reads it.
    let file = fs::OpenOptions::new().write(true).open(&found[1]).unwrap();
    file.write_all_at(&[0xff; 64], 8).unwrap();
    let report = json(&disk("verify", &path, &["--json"]));
    let kinds: Vec<&str> =
        report["damage"].as_array().unwrap().iter().map(|row| row["kind"].as_str().unwrap()).collect();
    assert_eq!(kinds, ["object", "header"], "{report}");

    // One is cut, one is of a later release, and one is something else.
    let file = fs::OpenOptions::new().write(true).open(&found[2]).unwrap();
    file.set_len(file.metadata().unwrap().len() / 2).unwrap();
    let directory = SERVER.files(&path);
    let mut later = vec![0; 8_192];
    later[..10].copy_from_slice(b"SnowBtch\x09\0");
    fs::write(directory.join("0000000000000061.pack"), later).unwrap();
    fs::write(directory.join("0000000000000062.pack"), vec![7; 8_192]).unwrap();
    for what in ["inspect", "verify"] {
        let output = disk(what, &path, &[]);
        assert_exit(&output, 4);
        let cut = found[2].file_name().unwrap().to_str().unwrap();
        for text in [
            &format!("{cut}: truncated or damaged"),
            "0000000000000061.pack: not used: the format has version 9",
            "0000000000000062.pack: not used: it is not a pack",
        ] {
            assert!(stderr(&output).contains(text), "{what}: {}", stderr(&output));
        }
    }
    // What is intact of the cut one is still counted.
    let report = json(&disk("inspect", &path, &["--json"]));
    let objects = report["objects"].as_u64().unwrap();
    assert!((OBJECTS - 3..OBJECTS).contains(&objects), "{report}");

    // The superblock is of a later release.
    let mut pages = fs::read(directory.join("superblock")).unwrap();
    for at in [8, 4_096 + 8] {
        pages[at] = 9;
    }
    fs::write(directory.join("superblock"), pages).unwrap();
    let output = disk("inspect", &path, &[]);
    assert_exit(&output, 1);
    assert!(stderr(&output).contains("the format has version 9"), "{}", stderr(&output));
}

fn a_prefix_stands_for_its_only_directory() {
    let path = bucket("cli-prefix", "default");
    let prefix = Path::new("s3://cli-prefix/kv");
    for address in [prefix, &prefix.join("default"), Path::new("s3://cli-prefix/kv/")] {
        let output = disk("inspect", address, &["--json"]);
        assert_exit(&output, 0);
        assert_eq!(json(&output)["path"], path.to_str().unwrap());
    }
    let other = bucket("cli-prefix", "blue");
    let output = disk("verify", prefix, &[]);
    assert_exit(&output, 2);
    for named in [&path, &other] {
        assert!(stderr(&output).contains(named.to_str().unwrap()), "{}", stderr(&output));
    }
    assert_exit(&disk("verify", &prefix.join("blue"), &[]), 0);
    let output = disk("inspect", &prefix.join("green"), &[]);
    assert_exit(&output, 1);
    assert!(stderr(&output).contains("s3://BUCKET/PREFIX/CLUSTER/UUID"), "{}", stderr(&output));
}

fn what_a_store_refuses_is_no_damage_and_says_what_to_do() {
    let path = bucket("cli-refused", "default");
    for (fault, said) in [
        (Fault::Refuse(403, "AccessDenied"), "s3:ListBucket"),
        (Fault::Refuse(404, "NoSuchBucket"), "there is no such bucket"),
        (Fault::Refuse(301, "PermanentRedirect"), "AWS_REGION"),
        (Fault::Refuse(503, "SlowDown"), "fewer requests"),
        (Fault::Break, "AWS_ENDPOINT_URL"),
    ] {
        SERVER.set_fault("cli-refused", Some(fault));
        for what in ["inspect", "verify"] {
            let output = disk(what, &path, &[]);
            assert_exit(&output, 1);
            let text = stderr(&output);
            assert!(text.contains(said) && !text.contains(SECRET), "{what} {fault:?}: {text}");
        }
    }
    SERVER.set_fault("cli-refused", None);
    let output = disk("inspect", Path::new("s3://cli-nowhere/kv"), &[]);
    assert_exit(&output, 1);
    assert!(stderr(&output).contains("there is no such"), "{}", stderr(&output));
    let mut wrong = snowskin(&["disk", "inspect", path.to_str().unwrap()]);
    let output = wrong.env("AWS_SECRET_ACCESS_KEY", "another").output().unwrap();
    assert_exit(&output, 1);
    assert!(stderr(&output).contains("AWS_SECRET_ACCESS_KEY"), "{}", stderr(&output));
    let output = disk("inspect", Path::new("s3://key:hidden@cli-refused/kv"), &[]);
    assert_exit(&output, 1);
    assert!(!stderr(&output).contains("hidden"), "{}", stderr(&output));
    for what in ["format", "bench"] {
        let output = disk(what, &path, &[]);
        assert_exit(&output, 2);
        assert!(stderr(&output).contains("snowskin node --shared"), "{}", stderr(&output));
    }
    assert_exit(&disk("verify", &path, &[]), 0);
}
