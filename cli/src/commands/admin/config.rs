//! `snowskin admin config`: shows and changes the settings of the running master.

use store_client::RpcError;
use store_core::message::{ChangeConfig, ReadConfig};
use store_core::{ChangeHow, ConfigChange, ConfigChanges, ErrorCode, MasterConfig};

use crate::commands::{MasterArg, no_master};
use crate::exit::{EXIT_CODES, Exit, Failure};
use crate::output::{Align, Table, printable};
use crate::size::ByteSize;
use crate::{Outcome, output};

const AFTER_HELP: &str = "Examples:
  snowskin admin config
  snowskin admin config --json | jq .eviction
  snowskin admin config set eviction_high_watermark=0.95 tasks.per_node_max=16
  snowskin admin config unset eviction_high_watermark";

const SET_HELP: &str = "Examples:
  snowskin admin config set eviction_high_watermark=0.95
  snowskin admin config set metadata_bytes_max=8GiB tasks.per_node_max=16 replication.mode=enforce";

const UNSET_HELP: &str = "Examples:
  snowskin admin config unset eviction_high_watermark tasks.per_node_max";

/// Show or change the settings of the running master
///
/// Secrets are left out.
#[derive(Debug, clap::Args)]
#[command(after_help = format!("{AFTER_HELP}\n\n{EXIT_CODES}"), args_conflicts_with_subcommands = true)]
pub(crate) struct Args {
    #[command(subcommand)]
    what: Option<What>,
    #[command(flatten)]
    master: MasterArg,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

#[derive(Debug, clap::Subcommand)]
enum What {
    Set(Box<Set>),
    Unset(Box<Unset>),
}

/// Change settings while the master serves
///
/// They stay as they are set here, whatever a settings file says, over restarts of a master with a journal
/// and when another master takes over, until `unset`. All of them are changed, or none.
#[derive(Debug, clap::Args)]
#[command(after_help = format!("{SET_HELP}\n\n{}\n\n{EXIT_CODES}", changeable()))]
struct Set {
    /// Settings with their new values, named as `snowskin admin config` prints them. Sizes may have units.
    #[arg(value_name = "NAME=VALUE", required = true)]
    changes: Vec<String>,
    #[command(flatten)]
    master: MasterArg,
    /// Print one JSON object per setting.
    #[arg(long)]
    json: bool,
}

/// Let settings be again as the master was started
///
/// Or as they were when it read its settings last (SIGHUP).
#[derive(Debug, clap::Args)]
#[command(after_help = format!("{UNSET_HELP}\n\n{EXIT_CODES}"))]
struct Unset {
    /// Names of settings.
    #[arg(value_name = "NAME", required = true)]
    names: Vec<String>,
    #[command(flatten)]
    master: MasterArg,
    /// Print one JSON object per setting.
    #[arg(long)]
    json: bool,
}

/// One setting that was changed.
#[derive(Debug, PartialEq, serde::Serialize)]
struct Row {
    setting: String,
    before: serde_json::Value,
    after: serde_json::Value,
}

fn changeable() -> String {
    format!("Settings that can be changed: {}", ConfigChanges::NAMES.join(", "))
}

pub(crate) fn run(args: &Args) -> Outcome {
    match &args.what {
        None => show(args),
        Some(What::Set(args)) => {
            let changes = changes_of(&args.changes)?;
            change(&args.master, args.json, |_| Ok(ConfigChange { how: ChangeHow::Set, changes }))
        }
        Some(What::Unset(args)) => change(&args.master, args.json, |config| {
            // Any value says that the setting is meant: its own is of its type.
            let mut rows = Vec::new();
            flatten("", &serde_json::to_value(config)?, &mut rows);
            let value = |name: &String| rows.iter().find(|(path, _)| path == name).map(|(_, value)| value);
            let named =
                args.names.iter().map(|name| (name.clone(), value(name).cloned().unwrap_or_default()));
            Ok(ConfigChange { how: ChangeHow::Unset, changes: typed(named.collect())? })
        }),
    }
}

fn show(args: &Args) -> Outcome {
    let mut rpc = args.master.connect()?;
    let config: MasterConfig = rpc.call::<ReadConfig>(&(), std::iter::empty()).map_err(no_master)?.0;
    if args.json {
        output::print_json(&config)?;
        return Ok(Exit::Ok);
    }
    // No change: the answer says what is set.
    let nothing = ConfigChange::default();
    let set: Vec<_> = match rpc.call::<ChangeConfig>(&nothing, std::iter::empty()) {
        Ok((set, _)) => set.names().collect(),
        Err(error) => return Err(no_master(error)),
    };
    let mut table = Table::new(&[("setting", Align::Left), ("value", Align::Left), ("", Align::Left)]);
    let mut rows = Vec::new();
    flatten("", &serde_json::to_value(&config)?, &mut rows);
    for (name, value) in rows {
        let note = if set.contains(&name.as_str()) { "set while it served" } else { "" };
        table.row([name, printable(&value.to_string()), note.to_owned()]);
    }
    output::print(&table.render())?;
    Ok(Exit::Ok)
}

fn change(
    master: &MasterArg,
    json: bool,
    how: impl FnOnce(&MasterConfig) -> anyhow::Result<ConfigChange>,
) -> Outcome {
    let mut rpc = master.connect()?;
    let before: MasterConfig = rpc.call::<ReadConfig>(&(), std::iter::empty()).map_err(no_master)?.0;
    let change = how(&before)?;
    if change.how == ChangeHow::Set {
        let mut after = before.clone();
        change.changes.apply(&mut after);
        // The master checks it as well, and its answer is a number only.
        after.validate().map_err(|error| Failure::usage(error.to_string()))?;
    }
    rpc.call::<ChangeConfig>(&change, std::iter::empty()).map_err(|error| match error {
        RpcError::Refused(ErrorCode::InvalidParams) => Failure::failed("the master refuses these values")
            .hint("another change came in between: try again")
            .into(),
        error => no_master(error),
    })?;
    let after: MasterConfig = rpc.call::<ReadConfig>(&(), std::iter::empty()).map_err(no_master)?.0;
    let rows = rows_of(&change.changes, &before, &after)?;
    if json {
        rows.iter().try_for_each(output::print_json)?;
        return Ok(Exit::Ok);
    }
    let mut table = Table::new(&[("setting", Align::Left), ("before", Align::Left), ("now", Align::Left)]);
    for row in rows {
        table.row([row.setting, printable(&row.before.to_string()), printable(&row.after.to_string())]);
    }
    output::print(&table.render())?;
    Ok(Exit::Ok)
}

fn rows_of(which: &ConfigChanges, before: &MasterConfig, after: &MasterConfig) -> anyhow::Result<Vec<Row>> {
    let (mut old, mut new) = (Vec::new(), Vec::new());
    flatten("", &serde_json::to_value(before)?, &mut old);
    flatten("", &serde_json::to_value(after)?, &mut new);
    let value = |of: &[(String, serde_json::Value)], name: &str| {
        of.iter().find(|(path, _)| path == name).map(|(_, value)| value.clone()).unwrap_or_default()
    };
    let row =
        |name: &str| Row { setting: name.to_owned(), before: value(&old, name), after: value(&new, name) };
    Ok(which.names().map(row).collect())
}

/// The values of `NAME=VALUE`.
fn changes_of(texts: &[String]) -> anyhow::Result<ConfigChanges> {
    let mut values = serde_json::Map::new();
    for text in texts {
        let Some((name, value)) = text.split_once('=') else {
            return Err(Failure::usage(format!("{}: write NAME=VALUE", printable(text))).into());
        };
        let size = name.contains("bytes").then(|| value.parse::<ByteSize>().ok()).flatten();
        let value = match (size, serde_json::from_str(value)) {
            (Some(size), _) => size.bytes().into(),
            (None, Ok(value)) => value,
            (None, Err(_)) => value.into(),
        };
        if values.insert(name.to_owned(), value).is_some() {
            return Err(Failure::usage(format!("{} is given twice", printable(name))).into());
        }
    }
    typed(values)
}

fn typed(values: serde_json::Map<String, serde_json::Value>) -> anyhow::Result<ConfigChanges> {
    let mut all = Vec::new();
    flatten("", &serde_json::to_value(MasterConfig::default())?, &mut all);
    for (name, value) in &values {
        if ConfigChanges::NAMES.contains(&name.as_str()) {
            let one = serde_json::Map::from_iter([(name.clone(), value.clone())]);
            serde_json::from_value::<ConfigChanges>(one.into())
                .map_err(|error| Failure::usage(format!("{name}={value}: {error}")))?;
            continue;
        }
        let known = all.iter().any(|(path, _)| path == name);
        let error = match known {
            true => Failure::usage(format!("{name} cannot be changed while the master serves")).hint(
                "put it into the master's settings and restart it; of several masters, restart the others \
                 first and hand over with `snowskin admin switchover`",
            ),
            false => Failure::usage(format!("{} is not a setting", printable(name))).hint(changeable()),
        };
        return Err(error.into());
    }
    Ok(serde_json::from_value(values.into())?)
}

/// Adds a row with path (`a.b.c`) and value for every leaf.
fn flatten(path: &str, value: &serde_json::Value, rows: &mut Vec<(String, serde_json::Value)>) {
    match value {
        serde_json::Value::Object(fields) => {
            for (name, value) in fields {
                let path = if path.is_empty() { name.clone() } else { format!("{path}.{name}") };
                flatten(&path, value, rows);
            }
        }
        value => rows.push((path.to_owned(), value.clone())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_are_listed_by_their_path() {
        let value = serde_json::json!({ "a": 1, "b": { "c": "x", "d": [1, 2] } });
        let mut rows = Vec::new();
        flatten("", &value, &mut rows);
        let rows: Vec<_> = rows.iter().map(|(name, value)| (name.as_str(), value.to_string())).collect();
        assert_eq!(rows, [("a", "1".into()), ("b.c", "\"x\"".into()), ("b.d", "[1,2]".into())]);
    }

    #[test]
    fn every_setting_that_can_be_changed_is_one_of_the_master() {
        let mut rows = Vec::new();
        flatten("", &serde_json::to_value(MasterConfig::default()).unwrap(), &mut rows);
        for name in ConfigChanges::NAMES {
            assert!(rows.iter().any(|(path, _)| path == name), "{name}");
        }
    }

    #[test]
    fn values_are_read_by_the_type_of_their_setting() {
        let set =
            |texts: &[&str]| changes_of(&texts.iter().map(|text| (*text).to_owned()).collect::<Vec<_>>());
        let changes = set(&["eviction=lru", "metadata_bytes_max=2GiB", "tasks.attempts_max=4"]).unwrap();
        assert_eq!(changes.metadata_bytes_max, Some(2 << 30));
        assert!(changes.names().eq(["eviction", "metadata_bytes_max", "tasks.attempts_max"]));
        for (texts, says) in [
            (vec!["eviction"], "NAME=VALUE"),
            (vec!["eviction=best"], "eviction=\"best\""),
            (vec!["demote_ahead=1", "demote_ahead=2"], "twice"),
            (vec!["hash_seed=1"], "cannot be changed while"),
            (vec!["nonsense=1"], "is not a setting"),
            (vec!["lease_ttl_ms=-1"], "lease_ttl_ms=-1"),
        ] {
            let error = set(&texts).unwrap_err().to_string();
            assert!(error.contains(says), "{texts:?}: {error}");
        }
    }
}
