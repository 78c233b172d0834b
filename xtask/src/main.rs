//! What the project does to itself, so that CI and people run the same commands.
//!
//! ```text
//! cargo xtask ci            every check, one table at the end
//! cargo xtask tidy          the house rules that no compiler checks
//! cargo xtask reference     writes docs/reference/ from what the program says
//! cargo xtask fuzz          libFuzzer over every parser that a peer can reach
//! cargo xtask deploy        what deploy/ says, against what the program and systemd understand
//! cargo xtask image         the container image, assembled and run without an engine, compose file and units included
//! cargo xtask bindgen       sizes and offsets of libibverbs' structures, from its headers
//! cargo xtask lab           guests with emulated RDMA, NVMe over Fabrics, CXL and NUMA, and what runs in them
//! cargo xtask hw-test       the tests that need hardware, here or in the lab
//! cargo xtask soak          a store under load for minutes, while its processes are killed, stopped and restarted
//! cargo xtask bench-iperf   our transfers beside iperf3 and memcpy, in one run
//! cargo xtask bench-peers   transfers, store and master beside Mooncake, NIXL, UCX, Redis, iperf3 and memcpy, in one run
//! ```
#![forbid(unsafe_code)]

mod bench_iperf;
mod bench_peers;
mod bindgen;
mod ci;
mod cmd;
mod deploy;
mod fuzz;
mod host;
mod hw_test;
mod image;
mod lab;
mod reference;
mod soak;
mod stats;
mod tidy;

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
    /// Check the house rules that neither rustfmt nor clippy know.
    Tidy,
    /// Write the pages of docs/reference/ that are generated from the program.
    Reference,
    /// Fuzz the parsers with libFuzzer and AddressSanitizer (needs a nightly toolchain).
    Fuzz(fuzz::Args),
    /// Check the files of deploy/ against the program: flags, settings, services, units, jobs, variables of the dashboard.
    Deploy(deploy::Args),
    /// Assemble the container image and run it, and the services of the compose file and of the units in it.
    Image(image::Args),
    /// Write down (or check) the sizes and offsets of libibverbs' structures, from the installed headers.
    Bindgen(bindgen::Args),
    /// Boot QEMU guests that have the devices this machine lacks, emulated, and run something in them.
    Lab(lab::Args),
    /// Run the tests that need hardware: on what this host really has, or in the lab.
    HwTest(hw_test::Args),
    /// Run a store for minutes, kill, stop and restart its processes, and check every byte, memory and descriptors.
    Soak(soak::Args),
    /// Run our transfers beside iperf3 and memcpy and print the ratios.
    BenchIperf(bench_iperf::Args),
    /// Run transfers, store and master beside Mooncake, NIXL, UCX, Redis, iperf3 and memcpy and print the ratios.
    BenchPeers(bench_peers::Args),
}

fn main() -> ExitCode {
    let run = match Cli::parse().task {
        Task::Ci(args) => ci::run(&args),
        Task::Tidy => tidy::run(),
        Task::Reference => reference::run(),
        Task::Fuzz(args) => fuzz::run(&args),
        Task::Deploy(args) => deploy::run(&args),
        Task::Image(args) => image::run(&args),
        Task::Bindgen(args) => bindgen::run(&args),
        Task::Lab(args) => lab::run(&args),
        Task::HwTest(args) => hw_test::run(&args),
        Task::Soak(args) => soak::run(&args),
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
