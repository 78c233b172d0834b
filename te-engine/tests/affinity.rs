//! The penalties of rails for memory on a NUMA node, from the topology of the host or from a configured
//! matrix.
#![allow(clippy::unwrap_used, reason = "a test that fails reports the line")]

#[path = "../../te-host/tests/sysfs/mod.rs"]
mod sysfs;

use std::fs;

use sysfs::Sysfs;
use te_core::Location;
use te_engine::{Affinity, Config, Engine, StartError, TopologySource};
use te_host::topology::read_sysfs;

#[test]
fn an_engine_uses_a_matrix_and_refuses_to_start_with_an_invalid_one() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("matrix.json");
    fs::write(&path, r#"{"cpu:1": [["mlx5_1"], ["mlx5_0"]]}"#).unwrap();
    let source = TopologySource::File(path.clone());
    let affinity = Affinity::open(&source).expect("a matrix");
    let nics = ["", "mlx5_0:1", "mlx5_1"].map(String::from);
    assert_eq!(affinity.penalties(Location::Numa(1), &nics), Some(vec![100, 300, 100]));
    assert_eq!(affinity.penalties(Location::Numa(0), &nics), None, "no row, no preference");
    assert_eq!(
        affinity.penalties(Location::Numa(1), &[String::new(), String::new()]),
        None,
        "no NICs, no choice"
    );
    drop(Engine::start(Config { topology: source.clone(), ..Config::default() }).expect("it starts"));

    fs::write(&path, "[]").unwrap();
    let error = Engine::start(Config { topology: source, ..Config::default() }).unwrap_err();
    assert!(matches!(error, StartError::Topology(_)) && error.to_string().contains("auto"), "{error}");
}

#[test]
fn penalties_of_a_dgx_follow_the_memory() {
    let affinity = Affinity::Found(read_sysfs(Sysfs::named("dgx").path()).expect("it reads").topology);
    let nics = ["mlx5_0:1", "mlx5_7:1"].map(String::from);
    assert_eq!(affinity.penalties(Location::Numa(1), &nics), Some(vec![315, 150]));
    assert_eq!(affinity.penalties(Location::Host, &nics), None);
}
