//! `cargo xtask mooncake-tests`: Mooncake's own tests, unchanged, against Snowskin.
//!
//! The tests come from a checkout of Mooncake that the variable `MOONCAKE_SRC` names; nothing of it is part
//! of this repository. They run in a virtual environment with the two wheels of this repository, against a
//! master and other processes that are started by the names that Mooncake gives them. A row of the table that
//! cannot run says why, and is ignored, not passed.

mod count;
mod environment;
mod run;
mod scripts;

use crate::host::Host;
use crate::stats;
use anyhow::{Result, bail, ensure};
use environment::Environment;
use scripts::{SCRIPTS, Script};
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// The commit whose tests the table counts.
const COMMIT: &str = "3b5a5941";

/// Options of `cargo xtask mooncake-tests`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Run only these rows (repeat the option, or separate them with commas).
    #[arg(long, value_delimiter = ',', value_name = "ROW")]
    only: Vec<String>,
    /// List the rows without running them.
    #[arg(long)]
    list: bool,
    /// Python of an environment in which both wheels are installed. Without it, they are built and installed
    /// into `target/mooncake-tests`.
    #[arg(long, value_name = "PROGRAM")]
    python: Option<PathBuf>,
    /// Python of an environment with Mooncake's own wheel, for the pairings with it. Without it, that of
    /// `cargo xtask bench-peers` is used, if there is one.
    #[arg(long, value_name = "PROGRAM")]
    peer_python: Option<PathBuf>,
}

/// The result of a row.
enum Outcome {
    /// As many passed and were skipped as there should be.
    Passed(String),
    Failed(String),
    Ignored(String),
}

/// Runs the rows that `args` select, and prints a table.
///
/// # Errors
/// A row failed; `args` name a row that does not exist; there is no environment to run them in.
pub(crate) fn run(args: &Args) -> Result<()> {
    for name in &args.only {
        let known = || SCRIPTS.iter().map(|script| script.name).collect::<Vec<_>>().join(", ");
        ensure!(SCRIPTS.iter().any(|script| script.name == name), "no row `{name}`; there are: {}", known());
    }
    if args.list {
        SCRIPTS.iter().for_each(|script| println!("{}: {}", script.name, script.path));
        return Ok(());
    }
    let chosen: Vec<&Script> = SCRIPTS
        .iter()
        .filter(|script| args.only.is_empty() || args.only.iter().any(|name| name == script.name))
        .collect();
    let Some(source) = std::env::var_os("MOONCAKE_SRC").map(PathBuf::from) else {
        let why = format!("MOONCAKE_SRC does not name a checkout of Mooncake at {COMMIT}");
        let rows = chosen.iter().map(|script| (*script, Outcome::Ignored(why.clone()), Duration::ZERO));
        print_table(&rows.collect::<Vec<_>>());
        return Ok(());
    };
    let host = Host::probe()?;
    let environment = Environment::prepare(&host, source, args.python.clone(), args.peer_python.clone())?;
    let mut rows = Vec::new();
    for script in chosen {
        println!("\n==> {}: {}", script.name, script.path);
        let began = Instant::now();
        let outcome = match environment.missing(script) {
            Some(why) => Outcome::Ignored(why),
            None => run::script(&environment, script),
        };
        rows.push((script, outcome, began.elapsed()));
    }
    print_table(&rows);
    let failed: Vec<&str> = rows
        .iter()
        .filter(|(_, outcome, _)| matches!(outcome, Outcome::Failed(_)))
        .map(|(script, ..)| script.name)
        .collect();
    if failed.is_empty() {
        return Ok(());
    }
    bail!("failed: {0}; repeat with `cargo xtask mooncake-tests --only {0}`", failed.join(","))
}

fn print_table(rows: &[(&Script, Outcome, Duration)]) {
    let mut table = vec![["row", "result", "wanted", "time", "note"].map(str::to_owned).to_vec()];
    for (script, outcome, took) in rows {
        let (result, note) = match outcome {
            Outcome::Passed(note) => ("ok", note),
            Outcome::Failed(note) => ("FAILED", note),
            Outcome::Ignored(note) => ("ignored", note),
        };
        table.push(vec![
            script.name.to_owned(),
            result.to_owned(),
            script.wanted.to_string(),
            stats::duration(*took),
            note.clone(),
        ]);
    }
    println!("\n{}", stats::table(&table));
}
