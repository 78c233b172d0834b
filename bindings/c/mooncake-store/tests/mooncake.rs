//! Mooncake's own test of its Rust bindings (`mooncake-store/rust`, `minimal_smoke`, feature `dlopen`),
//! unchanged, against `libmooncake_store` and a Snowskin master. It is ignored without the checkout that
//! `MOONCAKE_SRC` names.
#![allow(clippy::unwrap_used, reason = "a test that fails reports the line")]

#[path = "../../testkit/rust.rs"]
mod rust;
#[path = "../../testkit/mod.rs"]
mod testkit;

use std::process::ExitCode;

use libtest_mimic::Arguments;
use rust::Crate;
use store_master::{Config, MasterServer};
use testkit::{Library, Prefix, run, trial};

const LIBRARY: Library =
    Library { name: "mooncake_store", header: "store_c.h", dir: env!("CARGO_MANIFEST_DIR") };

fn main() -> ExitCode {
    let needs = || Crate::copy("mooncake-store/rust");
    let trials = vec![trial("the_rust_bindings_minimal_smoke", needs, |mooncake| {
        let prefix = Prefix::new(LIBRARY);
        let config =
            Config { rpc_listen: "127.0.0.1:0".parse().unwrap(), http_listen: None, ..Config::default() };
        let master = MasterServer::bind(config).unwrap().spawn().unwrap();
        let mut test = mooncake.cargo("test");
        test.args(["--no-default-features", "--features", "dlopen", "--test", "minimal_smoke"])
            .args(["--", "--nocapture", "--exact", "smoke_round_trip"])
            .env("MC_RUST_STORE_RUN_INTEGRATION", "1")
            .env("MC_METADATA_SERVER", "P2PHANDSHAKE")
            .env("MC_RUST_STORE_MASTER_ADDR", master.rpc_addr().to_string())
            .env("MOONCAKE_STORE_LIBRARY", prefix.path("lib/libmooncake_store.so"));
        let printed = run(&mut test);
        assert!(printed.contains("1 passed") && !printed.contains("skipping"), "{printed}");
        master.stop().unwrap();
    })];
    libtest_mimic::run(&Arguments::from_args(), trials).exit_code()
}
