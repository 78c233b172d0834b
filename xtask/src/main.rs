//! Tasks on the project, so that CI and people run the same commands.
//!
//! ```text
//! cargo xtask ci            every check, with a table at the end
//! cargo xtask tidy          the house rules that no compiler checks
//! cargo xtask reference     writes the generated pages of docs/reference/
//! cargo xtask fuzz          libFuzzer on every parser of input from outside
//! cargo xtask deploy        checks the files in deploy/ against the program, systemd and promtool
//! cargo xtask device       packs the tests that need a GPU, for a host that has one
//! cargo xtask image         assembles and runs the container image without an engine, with compose file and units
//! cargo xtask bindgen       sizes and offsets of libibverbs' structures, from its headers
//! cargo xtask install-c     builds the C libraries, and installs them with headers and pkg-config files
//! cargo xtask lab           boots guests with emulated RDMA, NVMe over Fabrics, CXL and NUMA, and runs commands in them
//! cargo xtask hw-test       the tests that need hardware, here or in the lab
//! cargo xtask soak          runs a store under load while its processes are killed, stopped and restarted
//! cargo xtask mooncake-tests  runs Mooncake's own tests against Snowskin, from a checkout that MOONCAKE_SRC names
//! cargo xtask wheel         builds, checks and tests the Python wheels
//! cargo xtask bench-iperf   compares transfers with iperf3 and memcpy, in one run
//! cargo xtask bench-peers   compares transfers, store and master with Mooncake, NIXL, UCX, Redis, iperf3 and memcpy
//! ```
#![forbid(unsafe_code)]

mod bench_iperf;
mod bench_peers;
mod bindgen;
mod ci;
mod cmd;
mod deploy;
mod device;
mod fuzz;
mod host;
mod hw_test;
mod image;
mod install_c;
mod lab;
mod mooncake_tests;
mod reference;
mod soak;
mod stats;
mod tidy;
mod wheel;

use clap::{Parser, Subcommand};
use std::process::ExitCode;

/// Tasks of the Snowskin workspace.
#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
struct Cli {
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Run every check: formatting, lints, docs, tests, features, no_std, loom, benches, fuzzing, licences.
    Ci(ci::Args),
    /// Check the house rules that rustfmt and clippy do not cover.
    Tidy,
    /// Write the pages of docs/reference/ that are generated from the program.
    Reference,
    /// Fuzz the parsers with libFuzzer and AddressSanitizer (needs a nightly toolchain).
    Fuzz(fuzz::Args),
    /// Check the files in deploy/ against the program: flags, settings, services, units, jobs, variables of
    /// the dashboard.
    Deploy(deploy::Args),
    /// Pack the tests that need a GPU, for a host that has one.
    Device(device::Args),
    /// Assemble the container image and run it, including the services of the compose file and of the units.
    Image(image::Args),
    /// Write (or check) the sizes and offsets of libibverbs' structures, from the installed headers.
    Bindgen(bindgen::Args),
    /// Build the C libraries, and install them with headers and pkg-config files.
    InstallC(install_c::Args),
    /// Boot QEMU guests with emulated devices, and run a command in them.
    Lab(lab::Args),
    /// Run the tests that need hardware, on this host or in the lab.
    HwTest(hw_test::Args),
    /// Run a store for minutes while killing, stopping and restarting its processes; check every byte, memory
    /// and descriptors.
    Soak(soak::Args),
    /// Run Mooncake's own tests, unchanged, from a checkout that MOONCAKE_SRC names.
    MooncakeTests(mooncake_tests::Args),
    /// Build the Python wheels, check their size and their tag, and test them in a clean environment.
    Wheel(wheel::Args),
    /// Compare transfers with iperf3 and memcpy.
    BenchIperf(bench_iperf::Args),
    /// Compare transfers, store and master with Mooncake, NIXL, UCX, Redis, iperf3 and memcpy.
    BenchPeers(bench_peers::Args),
}

fn main() -> ExitCode {
    let run = match Cli::parse().task {
        Task::Ci(args) => ci::run(&args),
        Task::Tidy => tidy::run(),
        Task::Reference => reference::run(),
        Task::Fuzz(args) => fuzz::run(&args),
        Task::Deploy(args) => deploy::run(&args),
        Task::Device(args) => device::run(&args),
        Task::Image(args) => image::run(&args),
        Task::Bindgen(args) => bindgen::run(&args),
        Task::InstallC(args) => install_c::run(&args),
        Task::Lab(args) => lab::run(&args),
        Task::HwTest(args) => hw_test::run(&args),
        Task::Soak(args) => soak::run(&args),
        Task::MooncakeTests(args) => mooncake_tests::run(&args),
        Task::Wheel(args) => wheel::run(&args),
        Task::BenchIperf(args) => bench_iperf::run(&args),
        Task::BenchPeers(args) => bench_peers::run(&args),
    };
    match run {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("xtask: {error:#}");
            ExitCode::FAILURE
        }
    }
}
