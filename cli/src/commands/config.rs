//! `snowskin config`: shows, checks and documents settings.

use std::path::{Path, PathBuf};

use serde::Serialize;

use crate::config::{Loaded, keys, reference};
use crate::exit::{EXIT_CODES, Exit, Failure};
use crate::output::{Align, Table, printable};
use crate::{Outcome, fail, output};

const AFTER_HELP: &str = "Examples:
  snowskin config show
  snowskin config check /etc/snowskin.toml && systemctl restart snowskin-master
  snowskin config reference | less";

const SHOW_HELP: &str = "Examples:
  snowskin config show
  snowskin config show --changed
  snowskin --config /etc/snowskin.toml config show master.store
  snowskin config show --json | jq '.[] | select(.origin != \"default\")'";

const CHECK_HELP: &str = "Examples:
  snowskin config check /etc/snowskin.toml
  SNOWSKIN_CONFIG=/etc/snowskin.toml snowskin config check";

const REFERENCE_HELP: &str = "Examples:
  snowskin config reference | grep lease";

/// Show, check and explain settings
#[derive(Debug, clap::Args)]
#[command(after_help = format!("{AFTER_HELP}\n\n{EXIT_CODES}"))]
pub(crate) struct Args {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, clap::Subcommand)]
enum What {
    /// Print the settings in force, and the origin of each
    ///
    /// Settings come from the file, variables and defaults; flags of other commands are not known here.
    /// Secrets are masked.
    #[command(after_help = format!("{SHOW_HELP}\n\n{EXIT_CODES}"))]
    Show {
        /// Only settings whose key begins with this prefix.
        #[arg(default_value = "")]
        prefix: String,
        /// Only settings that differ from their default.
        #[arg(long)]
        changed: bool,
        /// Print one JSON array.
        #[arg(long)]
        json: bool,
    },
    /// Check a settings file and the environment variables without starting anything
    ///
    /// Warns of settings that are given by an old name, and of those that are ignored.
    #[command(after_help = format!("{CHECK_HELP}\n\n{EXIT_CODES}"))]
    Check {
        /// The settings file; without it, the file of --config.
        file: Option<PathBuf>,
    },
    /// Print the reference of all settings, in Markdown
    #[command(after_help = format!("{REFERENCE_HELP}\n\n{EXIT_CODES}"))]
    Reference,
}

#[derive(Serialize)]
struct Row<'a> {
    key: &'a str,
    value: serde_json::Value,
    origin: String,
}

pub(crate) fn run(args: &Args, config: Option<&Path>) -> Outcome {
    match &args.what {
        What::Show { prefix, changed, json } => show(&load(config, &[])?, prefix, *changed, *json)?,
        What::Check { file } => {
            let file = file.as_deref().or(config);
            let loaded = load(file, &["log", "cluster", "master", "node", "client", "conductor"])?;
            let given = keys::all().iter().filter(|key| loaded.is_given(&key.path)).count();
            let name = file.map_or_else(|| "no file".to_owned(), |file| file.display().to_string());
            let mut text =
                format!("{name}: valid; {given} settings are set, the others have their defaults\n");
            for warning in loaded.warnings() {
                text += &format!("  warning: {}\n", printable(&warning));
            }
            output::print(&text)?;
        }
        What::Reference => output::print(&reference::page())?,
    }
    Ok(Exit::Ok)
}

fn load(file: Option<&Path>, sections: &[&str]) -> anyhow::Result<Loaded> {
    let text = |(name, text): (std::ffi::OsString, std::ffi::OsString)| {
        Some((name.into_string().ok()?, text.into_string().ok()?))
    };
    match Loaded::read(file, std::env::vars_os().filter_map(text), &[], sections) {
        Ok(loaded) => Ok(loaded),
        Err(problems) => fail(Failure::usage(problems.to_string())),
    }
}

fn show(loaded: &Loaded, prefix: &str, changed: bool, json: bool) -> anyhow::Result<()> {
    let rows: Vec<Row<'_>> = keys::all()
        .iter()
        .filter(|key| key.path.starts_with(prefix) && (!changed || loaded.is_given(&key.path)))
        .map(|key| Row {
            key: &key.path,
            value: loaded.value(key),
            origin: loaded.origin(&key.path).to_string(),
        })
        .collect();
    if json {
        return output::print_json(&rows);
    }
    let mut table = Table::new(&[("setting", Align::Left), ("value", Align::Left), ("from", Align::Left)]);
    for row in &rows {
        table.row([row.key.to_owned(), printable(&keys::shown(&row.value)), printable(&row.origin)]);
    }
    output::print(&table.render())
}
