//! The command tree, and the log that every command starts.

use std::path::PathBuf;

use clap::builder::styling::{AnsiColor, Styles};
use clap::{Parser, Subcommand};

use crate::commands::{
    admin, bench, completions, conductor, config, disk, doctor, gateway, get, health, ls, master,
    mock_engine, node, put, replay, rm, stat, top, topology, up,
};
use crate::config::{FlagsOfLog, LogFormat};
use crate::exit::{EXIT_CODES, Failure};
use crate::global::Global;

const STYLES: Styles = Styles::styled()
    .header(AnsiColor::Cyan.on_default().bold())
    .usage(AnsiColor::Cyan.on_default().bold())
    .literal(AnsiColor::Green.on_default())
    .placeholder(AnsiColor::Yellow.on_default());

const AFTER_HELP: &str = "Try it on this machine, without any setup:
  snowskin replay                          a cluster of processes, a multi-turn workload, a table
  snowskin replay --trace requests.jsonl   the same with your own trace

Run a store, here in the foreground:
  snowskin up                              master, node, gateway and local server in one process
  snowskin put greeting hello.txt && snowskin get greeting

Run a cluster, each process on its own machine:
  snowskin master --listen 10.0.0.5:50051
  snowskin node --memory 64GiB --master 10.0.0.5:50051 --listen 10.0.0.7:0

When something is slow or does not start:
  snowskin doctor";

/// Moves and stores KV-cache blocks: memory of a cluster behind one master, in one binary.
#[derive(Debug, Parser)]
#[command(name = "snowskin", version, styles = STYLES, propagate_version = true, max_term_width = 100)]
#[command(after_help = format!("{AFTER_HELP}\n\n{EXIT_CODES}"))]
pub(crate) struct Cli {
    /// Options of every command.
    #[command(flatten)]
    pub(crate) global: Global,
    /// Settings file in TOML; see `snowskin config reference`. Variables SNOWSKIN_* and flags override it.
    #[arg(
        long,
        global = true,
        env = "SNOWSKIN_CONFIG",
        hide_env_values = true,
        value_name = "FILE",
        display_order = 899
    )]
    pub(crate) config: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) log: FlagsOfLog,
    /// The command to run.
    #[command(subcommand)]
    pub(crate) command: Command,
}

impl Cli {
    /// Sends logs to stderr, at the level that the flags and settings select.
    ///
    /// # Errors
    /// The log filter is not valid.
    pub(crate) fn start_logging(&self) -> Result<(), Failure> {
        use tracing_subscriber::EnvFilter;
        let log = &self.log.settings().log;
        let level = match (self.global.verbose, &self.command) {
            // The master's log reports which nodes and clients connect and leave.
            (0, Command::Master(_)) => "warn,store_master=info",
            // These report which node's memory is unreachable, and why: their own clients cannot see that.
            (0, Command::Gateway(_) | Command::Node(_) | Command::Up(_)) => {
                "warn,store_client::segments=info"
            }
            (verbose, _) => ["warn", "info", "debug", "trace"][usize::from(verbose.min(3))],
        };
        let filter = match log.filter.as_str() {
            "" => EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(level)),
            filter => EnvFilter::try_new(filter).map_err(|error| {
                let origin = self.log.loaded.origin("log.filter");
                Failure::usage(format!("{origin}: log.filter: {error}"))
                    .hint("write a level such as `debug`, or `info,store_master=debug`")
            })?,
        };
        // Messages that cannot be written are lost. Reporting that on stderr would panic, because stderr is
        // what cannot be written.
        let subscriber = tracing_subscriber::fmt()
            .with_env_filter(filter)
            .with_writer(std::io::stderr)
            .log_internal_errors(false);
        match log.format {
            LogFormat::Text => {
                let terminal = std::io::IsTerminal::is_terminal(&std::io::stderr());
                subscriber.with_ansi(terminal).init();
            }
            LogFormat::Json => subscriber.json().flatten_event(true).with_current_span(false).init(),
        }
        for warning in self.log.loaded.warnings() {
            tracing::warn!("{warning}");
        }
        Ok(())
    }
}

/// The commands. Each command's arguments document it.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    Up(up::Args),
    Master(master::Args),
    Node(node::Args),
    Gateway(gateway::Args),
    Put(put::Args),
    Get(get::Args),
    Rm(rm::Args),
    Ls(ls::Args),
    Stat(stat::Args),
    Top(top::Args),
    Config(config::Args),
    Admin(admin::Args),
    Replay(replay::Args),
    Bench(bench::Args),
    Conductor(conductor::Args),
    MockEngine(mock_engine::Args),
    #[cfg(feature = "cxl")]
    Cxl(crate::commands::cxl::Args),
    Disk(disk::Args),
    Topology(topology::Args),
    Doctor(doctor::Args),
    Health(health::Args),
    Completions(completions::Completions),
    Man(completions::Man),
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::config::keys;
    use clap::CommandFactory as _;

    #[test]
    fn the_command_tree_is_sound() {
        Cli::command().debug_assert();
    }

    #[test]
    fn every_variable_of_a_command_is_known_where_typing_errors_are_looked_for() {
        fn walk(command: &clap::Command, found: &mut BTreeSet<String>) {
            let variables = command.get_arguments().filter_map(clap::Arg::get_env);
            found.extend(variables.map(|name| name.to_string_lossy().into_owned()));
            command.get_subcommands().for_each(|sub| walk(sub, found));
        }
        let mut found = BTreeSet::new();
        walk(&Cli::command(), &mut found);
        let settings = keys::all().iter().filter_map(|key| key.variable_short);
        found.retain(|name| settings.clone().all(|setting| setting != name));
        assert_eq!(found, BTreeSet::from(keys::OTHER_VARIABLES.map(str::to_owned)));
    }

    #[test]
    fn every_command_teaches_with_examples_and_exit_codes() {
        fn walk(command: &clap::Command, path: &str) {
            let path = format!("{path} {}", command.get_name());
            let text = command.clone().render_long_help().to_string();
            assert!(text.contains("Exit codes:"), "{path} does not document its exit codes");
            assert!(command.get_about().is_some(), "{path} has no description");
            let leaf = command.get_subcommands().next().is_none();
            assert!(!leaf || text.contains("Examples:"), "{path} has no examples");
            for argument in command.get_arguments() {
                assert!(argument.get_help().is_some(), "{path}: {} has no help", argument.get_id());
            }
            // A paragraph is one line, so that the terminal's width alone decides where it wraps.
            let after = command.get_after_help().map(ToString::to_string).unwrap_or_default();
            let is_text = |line: &str| !line.is_empty() && !line.starts_with(' ') && !line.ends_with(':');
            let broken = after.lines().zip(after.lines().skip(1)).find(|(a, b)| is_text(a) && is_text(b));
            assert_eq!(broken, None, "{path}: a paragraph of several lines");
            for sub in command.get_subcommands() {
                walk(sub, &path);
            }
        }
        walk(&Cli::command(), "");
    }
}
