//! Benchmarks of memory of GPUs, with the fake drivers of te-gpu. No GPU is behind them.
#![cfg(all(feature = "cuda", feature = "hip", feature = "tcp"))]
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::path::PathBuf;

use common::{assert_exit, json, run, stderr};

const SMALL: [&str; 7] = ["--block", "4KiB,100KiB", "--batch", "3", "--duration", "0.05", "--verify"];

/// The fake driver, which `cargo test --workspace` builds as an example of te-gpu.
fn fake(name: &str) -> String {
    let tests = std::env::current_exe().unwrap();
    let path: PathBuf = tests.parent().unwrap().parent().unwrap().join("examples").join(name);
    assert!(path.exists(), "{} was not built: run `cargo build -p te-gpu --examples`", path.display());
    path.to_str().unwrap().to_owned()
}

fn bench(args: &[&str]) -> std::process::Output {
    run(&[&["bench", "transfer", "--json"][..], args, &SMALL].concat())
}

#[test]
fn bytes_of_a_gpu_are_verified_at_either_end_and_the_driver_is_named() {
    for (here, there, library) in [
        ("cuda:0", None, fake("libcuda.so")),
        ("cuda:0", Some("host"), fake("libcuda.so")),
        ("host", Some("cuda:0"), fake("libcuda.so")),
        ("hip:0", None, fake("libhip.so")),
    ] {
        let mut args = vec!["--fabric", "tcp", "--memory", here, "--gpu-library", &library];
        args.extend(there.iter().flat_map(|there| ["--target-memory", there]));
        let output = bench(&args);
        assert_exit(&output, 0);
        let rows = json(&output);
        assert_eq!(rows.as_array().unwrap().len(), 4, "{rows}");
        for row in rows.as_array().unwrap() {
            assert_eq!(
                (&row["memory"], &row["target_memory"]),
                (&here.into(), &there.unwrap_or(here).into())
            );
            assert_eq!(row["gpu"]["library"], *library, "{row}");
            assert!(row["gpu"]["version"].as_i64().unwrap() > 0, "{row}");
            assert!(row["verified"] == true && row["gb_s"].as_f64().unwrap() > 0.0, "{row}");
        }
    }
}

#[test]
fn host_memory_is_the_default_and_names_no_driver() {
    let output = bench(&["--fabric", "shm"]);
    assert_exit(&output, 0);
    for row in json(&output).as_array().unwrap() {
        assert_eq!((&row["memory"], &row["target_memory"]), (&"host".into(), &"host".into()));
        assert!(row["gpu"].is_null(), "{row}");
    }
}

#[test]
fn what_cannot_work_is_said_before_the_measurement() {
    let library = fake("libcuda.so");
    for (args, code, hints) in [
        // Fabrics that move host memory alone.
        (
            &["--fabric", "shm", "--memory", "cuda:0", "--gpu-library", &library][..],
            1,
            &["--fabric shm", "cuda:0", "tcp moves it"][..],
        ),
        (&["--fabric", "local", "--memory", "cuda:0", "--gpu-library", &library], 1, &["--fabric local"]),
        (
            &["--fabric", "tcp,shm", "--target-memory", "cuda:0", "--gpu-library", &library],
            1,
            &["--fabric shm"],
        ),
        (&["--fabric", "memcpy", "--memory", "cuda:0"], 2, &["memcpy", "--memory host"]),
        // Devices that are not there.
        (
            &["--fabric", "tcp", "--memory", "cuda:7", "--gpu-library", &library],
            1,
            &["cuda:7 is not there", "cuda:0"],
        ),
        (
            &["--fabric", "tcp", "--memory", "cuda:0", "--gpu-library", "/nonexistent/libcuda.so"],
            1,
            &["no CUDA device here", "/nonexistent/libcuda.so"],
        ),
        (&["--memory", "tpu:0"], 2, &["host, or cuda:0 or hip:0"]),
        (&["--memory", "xpu:0"], 2, &["host, or cuda:0 or hip:0"]),
    ] {
        let output = bench(args);
        assert_exit(&output, code);
        for hint in hints {
            assert!(stderr(&output).contains(hint), "{args:?}: {}", stderr(&output));
        }
    }
    let target = run(&["bench", "target", "--place", "cuda:0", "--gpu-library", "/nonexistent/libcuda.so"]);
    assert_exit(&target, 1);
    assert!(stderr(&target).contains("no CUDA device here"), "{}", stderr(&target));
}
