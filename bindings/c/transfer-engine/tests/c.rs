//! `libtransfer_engine` and its header, as C programs see them. Tests whose tools are not installed are
//! ignored, with a reason.
#![allow(clippy::unwrap_used, reason = "a test that fails reports the line")]

#[path = "../../testkit/mod.rs"]
mod testkit;

use std::process::{Command, ExitCode};

use libtest_mimic::{Arguments, Trial};
use testkit::{
    Library, Prefix, check_pkg_config, check_symbols, compiler, cxx_compiler, functions, pkg_config, run,
    trial,
};

const LIBRARY: Library =
    Library { name: "transfer_engine", header: "transfer_engine_c.h", dir: env!("CARGO_MANIFEST_DIR") };

fn main() -> ExitCode {
    let mut trials: Vec<Trial> = vec![
        trial("the_library_exports_its_header_and_nothing_else", || Ok(()), |()| check_symbols(LIBRARY)),
        trial("the_header_declares_what_mooncakes_callers_use", || Ok(()), |()| declared()),
        trial("pkg_config_describes_the_installation", pkg_config, |cc| {
            check_pkg_config(LIBRARY, &cc, "errors.c");
        }),
        trial("the_layout_is_mooncakes_in_cxx17", cxx_compiler, |cxx| layout(&cxx, "c++17")),
        trial("nixls_calls_with_the_static_library", compiler, |cc| {
            let prefix = Prefix::new(LIBRARY);
            succeed(&prefix.compile_static(&cc, "nixl.c"));
        }),
    ];
    for standard in ["c99", "c11"] {
        trials.push(trial(format!("the_layout_is_mooncakes_in_{standard}"), compiler, move |cc| {
            layout(&cc, standard);
        }));
    }
    for (name, source) in [
        ("nixls_calls_in_their_order", "nixl.c"),
        ("tensorrt_llms_calls_in_their_order", "tensorrt_llm.c"),
        ("what_must_be_an_error_is_one", "errors.c"),
    ] {
        trials.push(trial(name, compiler, move |cc| {
            let prefix = Prefix::new(LIBRARY);
            succeed(&prefix.compile(&cc, source, "c99"));
        }));
    }
    libtest_mimic::run(&Arguments::from_args(), trials).exit_code()
}

fn layout(compiler: &str, standard: &str) {
    let prefix = Prefix::new(LIBRARY);
    prefix.compile(compiler, "layout.c", standard);
}

fn succeed(program: &std::path::Path) {
    assert_eq!(run(&mut Command::new(program)), "ok\n");
}

fn declared() {
    let declared = functions(&LIBRARY.header_text());
    let expected = [
        "allocateBatchID",
        "closeSegment",
        "createTransferEngine",
        "destroyTransferEngine",
        "discoverTopology",
        "enableGracefulShutdown",
        "freeBatchID",
        "freeNotifsMsgBuf",
        "genNotifyInEngine",
        "getLocalIpAndPort",
        "getNicLoadStats",
        "getNotifsFromEngine",
        "getTransferStatus",
        "installTransport",
        "openSegment",
        "openSegmentNoCache",
        "registerLocalMemory",
        "registerLocalMemoryBatch",
        "removeLocalSegment",
        "showLinks",
        "submitTransfer",
        "submitTransferWithNotify",
        "syncSegmentCache",
        "uninstallTransport",
        "unregisterLocalMemory",
        "unregisterLocalMemoryBatch",
        "warmupEfaSegment",
    ];
    assert_eq!(declared.iter().map(String::as_str).collect::<Vec<_>>(), expected);
}
