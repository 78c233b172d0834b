//! Mooncake's own test of its Rust bindings (`mooncake-transfer-engine/rust`, `minimal_smoke`), unchanged,
//! against `libtransfer_engine` and its header. It is ignored without the checkout that `MOONCAKE_SRC` names,
//! and without libclang, which its build script needs.
#![allow(clippy::unwrap_used, reason = "a test that fails reports the line")]

#[path = "../../testkit/clang.rs"]
mod clang;
#[path = "../../testkit/rust.rs"]
mod rust;
#[path = "../../testkit/mod.rs"]
mod testkit;

use std::fs;
use std::process::ExitCode;

use clang::{compiler_headers, libclang};
use libtest_mimic::Arguments;
use rust::Crate;
use testkit::{Library, Prefix, compiler, run, trial};

const LIBRARY: Library =
    Library { name: "transfer_engine", header: "transfer_engine_c.h", dir: env!("CARGO_MANIFEST_DIR") };
/// What Mooncake's build script links besides: parts of its own library, and libraries of the system that
/// Snowskin does not need. Empty archives stand for them.
const OTHERS: [&str; 10] =
    ["base", "asio", "stdc++", "ibverbs", "glog", "gflags", "jsoncpp", "numa", "curl", "yaml-cpp"];
/// System libraries of the static library.
const NATIVE: &str = "-lgcc_s -lutil -lrt -lpthread -lm -ldl";

fn main() -> ExitCode {
    let needs = || {
        let cc = compiler()?;
        let clang = libclang()?;
        Ok((Crate::copy("mooncake-transfer-engine/rust")?, clang, cc))
    };
    let trials = vec![trial("the_rust_bindings_minimal_smoke", needs, |(mooncake, clang, cc)| {
        let prefix = Prefix::new(LIBRARY);
        // The static library alone: the build script asks for it by `static=`.
        for name in ["libtransfer_engine.so", "libtransfer_engine.so.0"] {
            fs::remove_file(prefix.path("lib").join(name)).unwrap();
        }
        for name in OTHERS {
            fs::write(prefix.path(&format!("lib/lib{name}.a")), "!<arch>\n").unwrap();
        }
        let mut test = mooncake.cargo("test");
        test.args(["--test", "minimal_smoke", "--", "--nocapture", "--exact", "tcp_loopback_write_and_read"])
            .env("MOONCAKE_TE_LIB_DIR", prefix.path("lib"))
            .env("MOONCAKE_TE_INCLUDE_DIR", prefix.path("include"))
            .env("MC_RUST_TE_RUN_INTEGRATION", "1")
            .env("MC_METADATA_SERVER", "P2PHANDSHAKE")
            .env(
                "RUSTFLAGS",
                NATIVE.split(' ').map(|flag| format!("-Clink-arg={flag}")).collect::<Vec<_>>().join(" "),
            );
        if let Some(clang) = clang {
            test.env("LIBCLANG_PATH", clang);
        }
        if let Some(headers) = compiler_headers(&cc) {
            test.env("BINDGEN_EXTRA_CLANG_ARGS", format!("-I{headers}"));
        }
        let printed = run(&mut test);
        assert!(printed.contains("1 passed") && !printed.contains("skipping"), "{printed}");
    })];
    libtest_mimic::run(&Arguments::from_args(), trials).exit_code()
}
