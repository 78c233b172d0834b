//! Segments by name, with the master as the metadata directory.

mod common;

use common::{Daemon, assert_exit, json, run, snowskin, stderr};

#[test]
fn a_target_is_found_by_its_registered_name() {
    let mut master = Daemon::start(&["master", "--listen", "127.0.0.1:0", "--http", "127.0.0.1:0", "--json"]);
    let metadata = format!("http://{}/metadata", master.ready["http"].as_str().unwrap());
    let segment = ["--metadata", &metadata, "--segment", "decode/1"];
    let target = Daemon::start(&[&["bench", "target", "--memory", "1MiB", "--json"], &segment[..]].concat());
    let small =
        ["--fabric", "shm", "--op", "read", "--block", "4KiB", "--batch", "1", "--duration", "0.1", "--json"];
    let bench =
        |name| [&["bench", "transfer", "--target", name, "--metadata", &metadata], &small[..]].concat();
    let found = run(&bench("decode/1"));
    assert_exit(&found, 0);
    assert!(json(&found)[0]["batches"].as_u64().unwrap() > 0);
    let unknown = run(&bench("decode/2"));
    assert_exit(&unknown, 1);
    let text = stderr(&unknown);
    assert!(text.contains("no segment \"decode/2\" is registered"), "{text}");
    assert!(text.contains("check the name"), "{text}");
    // A later target could take the name. A target without a metadata server fails instead of serving without
    // a name.
    drop(target);
    let _ = master.child.kill();
    let _ = master.child.wait();
    let alone = run(&[&["bench", "target", "--memory", "1MiB", "--json"], &segment[..]].concat());
    assert_exit(&alone, 1);
    assert!(stderr(&alone).contains("check that it runs"), "{}", stderr(&alone));
}

#[test]
fn a_password_is_in_no_message() {
    for url in ["redis://u:hunter2@nowhere", "redis://u:hunter2@127.0.0.1:1/0"] {
        for output in [
            run(&["bench", "target", "--metadata", url, "--segment", "a", "--memory", "1MiB"]),
            snowskin(&["bench", "target", "--segment", "a", "--memory", "1MiB"])
                .env("SNOWSKIN_METADATA", url)
                .output()
                .unwrap(),
            snowskin(&["bench", "target", "--help"]).env("SNOWSKIN_METADATA", url).output().unwrap(),
        ] {
            let all = format!("{output:?}");
            assert!(!all.contains("hunter2"), "{all}");
        }
    }
}
