//! `libsnowskin` and its header, as C programs see them. Tests whose tools are not installed are ignored,
//! with a reason.
#![allow(clippy::unwrap_used, reason = "a test that fails reports the line")]

#[path = "../../testkit/mod.rs"]
mod testkit;

use std::path::Path;
use std::process::{Command, ExitCode};

use libtest_mimic::{Arguments, Trial};
use store_master::{Config, MasterServer};
use testkit::{
    Library, Prefix, check_pkg_config, check_symbols, compiler, cxx_compiler, pkg_config, run, trial,
};

const LIBRARY: Library = Library { name: "snowskin", header: "snowskin.h", dir: env!("CARGO_MANIFEST_DIR") };

fn main() -> ExitCode {
    let mut trials: Vec<Trial> = vec![
        trial("the_library_exports_its_header_and_nothing_else", || Ok(()), |()| check_symbols(LIBRARY)),
        trial("pkg_config_describes_the_installation", pkg_config, |cc| {
            check_pkg_config(LIBRARY, &cc, "layout.c");
        }),
        trial("the_layout_is_mooncakes_in_cxx17", cxx_compiler, |cxx| layout(&cxx, "c++17")),
        trial("engines_and_errors", compiler, |cc| {
            let prefix = Prefix::new(LIBRARY);
            assert_eq!(run(&mut Command::new(prefix.compile(&cc, "engine.c", "c11"))), "ok\n");
        }),
        trial("objects_and_errors", compiler, |cc| {
            let prefix = Prefix::new(LIBRARY);
            against_a_master(&prefix.compile(&cc, "store.c", "c99"));
        }),
        trial("objects_and_errors_with_the_static_library", compiler, |cc| {
            let prefix = Prefix::new(LIBRARY);
            against_a_master(&prefix.compile_static(&cc, "store.c"));
        }),
    ];
    for standard in ["c99", "c11"] {
        trials.push(trial(format!("the_layout_is_mooncakes_in_{standard}"), compiler, move |cc| {
            layout(&cc, standard);
        }));
    }
    libtest_mimic::run(&Arguments::from_args(), trials).exit_code()
}

fn layout(compiler: &str, standard: &str) {
    let prefix = Prefix::new(LIBRARY);
    prefix.compile(compiler, "layout.c", standard);
}

fn against_a_master(program: &Path) {
    let mut config =
        Config { rpc_listen: "127.0.0.1:0".parse().unwrap(), http_listen: None, ..Config::default() };
    // Longer than the program runs.
    config.store.lease_ttl_ms = 60_000;
    let master = MasterServer::bind(config).unwrap().spawn().unwrap();
    let printed = run(Command::new(program).arg(master.rpc_addr().to_string()));
    assert_eq!(printed, "ok\n");
    master.stop().unwrap();
}
