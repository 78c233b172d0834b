//! The `snowskin` command line: start a cluster, use it, replay a trace against it, measure it, and diagnose
//! it.
//!
//! ```text
//!   args ──▶ commands ─┬─ up                          a whole store in one process
//!                      ├─ master · node · gateway     servers, one process each
//!                      ├─ put get rm ls stat          one request against a master
//!                      ├─ replay ──▶ cluster ──▶ process   a master and N nodes as children
//!                      ├─ bench transfer|store|master|target
//!                      ├─ conductor                   sim: the paper's figures in a simulated cluster
//!                      ├─ mock-engine                 an engine without a GPU, for the Conductor
//!                      ├─ disk                        format, inspect, verify, bench of a disk
//!                      ├─ cxl                         format, inspect of a CXL pool
//!                      ├─ topology                    sysfs ──▶ picture, JSON, dot
//!                      ├─ doctor                      facts ──▶ checks ──▶ verdicts
//!                      └─ health · completions · man  for scripts, shells and readers
//!   mooncake: mooncake_master, mooncake_client, … ──▶ arguments of the commands above
//!
//!   config: defaults ◀ file ◀ environment ◀ flags, one struct
//!   shared:  trace · workload (requests)   content (verifiable block contents)   histogram
//!            size · output · progress · exit (codes)   sys (the only unsafe code)
//! ```
//!
//! The modules that parse or count are public, so that fuzz targets and benchmarks can use them:
//!
//! ```
//! use cli::{content::Content, histogram::Histogram, trace::Request};
//!
//! let line = br#"{"timestamp": 0, "input_length": 900, "output_length": 3, "hash_ids": [0, 7]}"#;
//! let request = Request::parse(line, &Default::default())?;
//! assert_eq!(request.hash_ids, [0, 7]);
//!
//! let content = Content::new(42);
//! let mut block = vec![0; 4096];
//! content.fill(7, &mut block);
//! assert!(content.verify(7, &block).is_ok() && content.verify(8, &block).is_err());
//!
//! let mut latency = Histogram::new();
//! latency.record_ns(20_000);
//! assert_eq!(latency.quantile_us(0.5).round(), 20.0);
//! # Ok::<(), cli::trace::LineError>(())
//! ```

#![deny(unsafe_code)]

mod args;
mod commands;
mod config;
pub mod content;
mod dax;
mod exit;
mod global;
pub mod histogram;
mod http;
mod mooncake;
mod nvme;
mod output;
mod process;
mod progress;
pub mod size;
mod svg;
mod sys;
pub mod trace;
mod version;
pub mod workload;

use std::ffi::OsString;
use std::process::ExitCode;

use clap::Parser;

use crate::args::Cli;
use crate::exit::{Exit, Failure};
use crate::mooncake::Next;

/// Parses the arguments, runs the command, and returns its exit code.
#[must_use]
pub fn main() -> ExitCode {
    if version::is_asked(std::env::args_os().skip(1)) {
        let exit = output::print(&version::text()).map_or_else(|error| exit::report(&error), |()| Exit::Ok);
        return ExitCode::from(exit.code());
    }
    let args: Vec<OsString> = std::env::args_os().collect();
    let cli = match mooncake::named(&args).map(|(command, rest)| mooncake::start(command, rest)) {
        None => Cli::parse(),
        Some(Next::Run(native)) => Cli::parse_from(native),
        Some(Next::Ended(outcome)) => {
            let exit = outcome.unwrap_or_else(|error| exit::report(&error));
            return ExitCode::from(exit.code());
        }
    };
    let exit = match cli.start_logging().map_err(Into::into).and_then(|()| commands::run(cli)) {
        Ok(exit) => exit,
        Err(error) => exit::report(&error),
    };
    ExitCode::from(exit.code())
}

/// The result of a command: its exit code, or why it failed.
type Outcome = anyhow::Result<Exit>;

/// Returns a failure with its own exit code as an error.
fn fail<T>(failure: Failure) -> anyhow::Result<T> {
    Err(failure.into())
}
