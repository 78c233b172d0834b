//! `snowskin rm`: removes objects.

use serde::Serialize;
use store_client::RpcConnection;
use store_core::message::{Removal, Remove, RemoveMany, RemoveQuery};
use store_core::{ErrorCode, Key};

use crate::commands::{MasterArg, bad_pattern, check_key, no_master};
use crate::exit::{EXIT_CODES, Exit, Failure};
use crate::output::thousands;
use crate::{Outcome, fail, output};

const AFTER_HELP: &str = "Examples:
  snowskin rm greeting
  snowskin rm --force a b c
  snowskin rm --regex '^kv/llama-2/'
  snowskin rm --all --tenant team-a
  snowskin ls kv/ --json | jq -r .key | xargs snowskin rm";

/// Remove objects
///
/// Without --force, an object that is leased to a reader or being written is not removed.
#[derive(Debug, clap::Args)]
#[command(after_help = format!("{AFTER_HELP}\n\n{EXIT_CODES}"))]
pub(crate) struct Args {
    /// Keys to remove.
    #[arg(required_unless_present_any = ["regex", "all"], value_name = "KEY")]
    keys: Vec<String>,
    /// Remove all keys that match this regular expression, at any position unless it is anchored.
    #[arg(long, value_name = "PATTERN", conflicts_with = "keys")]
    regex: Option<String>,
    /// Remove all keys of the tenant.
    #[arg(long, conflicts_with_all = ["keys", "regex"])]
    all: bool,
    /// Remove objects even while they are read or written.
    #[arg(short, long)]
    force: bool,
    #[command(flatten)]
    master: MasterArg,
    /// Print one JSON object per key.
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Removed<'a> {
    key: &'a str,
    removed: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<&'static str>,
}

pub(crate) fn run(args: &Args) -> Outcome {
    if args.regex.as_deref() == Some("") {
        let refused =
            Failure::usage("--regex \"\": an empty pattern matches every key; is a shell variable unset?");
        return fail(refused.hint("`snowskin rm --all` removes all objects"));
    }
    args.keys.iter().try_for_each(|key| check_key(key))?;
    let mut rpc = args.master.connect()?;
    if args.all || args.regex.is_some() {
        return run_many(args, &mut rpc);
    }
    let batch = rpc.welcome().keys_per_batch_max.max(1) as usize;
    let mut worst = Exit::Ok;
    for keys in args.keys.chunks(batch) {
        let items = keys.iter().map(|key| Removal { key: Key(key.as_bytes()), force: args.force });
        let ((), results) = rpc.call::<Remove>(&(), items).map_err(no_master)?;
        let results: Vec<_> = results.collect();
        for (key, result) in keys.iter().zip(results) {
            if args.json {
                output::print_json(&Removed {
                    key,
                    removed: result.is_ok(),
                    error: result.err().map(ErrorCode::name),
                })?;
            }
            if let Err(code) = result {
                let why = match code {
                    ErrorCode::KeyNotFound => "no such object".to_owned(),
                    code => code.to_string(),
                };
                eprintln!("snowskin: {}: {why}", output::brief(key));
                worst = match (worst, code) {
                    (Exit::Ok, ErrorCode::KeyNotFound) => Exit::NotFound,
                    (Exit::NotFound, ErrorCode::KeyNotFound) => Exit::NotFound,
                    _ => Exit::Failed,
                };
            }
        }
    }
    Ok(worst)
}

#[derive(Debug, Default, Serialize)]
struct RemovedMany {
    removed: u64,
    leased: u64,
    unfinished: u64,
}

fn run_many(args: &Args, rpc: &mut RpcConnection) -> Outcome {
    let mut sum = RemovedMany::default();
    let mut query = RemoveQuery { pattern: args.regex.as_deref(), cursor: 0, force: args.force };
    loop {
        let (page, _) = rpc.call::<RemoveMany>(&query, std::iter::empty()).map_err(bad_pattern)?;
        sum.removed += u64::from(page.removed);
        sum.leased += u64::from(page.leased);
        sum.unfinished += u64::from(page.unfinished);
        query.cursor = page.cursor;
        if page.cursor == 0 {
            break;
        }
    }
    if args.json {
        output::print_json(&sum)?;
    } else {
        output::print(&format!("{} removed\n", thousands(sum.removed)))?;
    }
    if sum.leased + sum.unfinished == 0 {
        return Ok(Exit::Ok);
    }
    eprintln!(
        "snowskin: {} not removed because they are being read, {} because they are being written: try again \
        later, or use --force",
        thousands(sum.leased),
        thousands(sum.unfinished)
    );
    Ok(Exit::Failed)
}
