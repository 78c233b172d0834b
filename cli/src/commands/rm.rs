//! `snowskin rm`: forget objects.

use serde::Serialize;
use store_core::message::{Removal, Remove};
use store_core::{ErrorCode, Key};

use crate::commands::{MasterArg, no_master};
use crate::exit::{EXIT_CODES, Exit};
use crate::{Outcome, output};

const AFTER_HELP: &str = "Examples:
  snowskin rm greeting
  snowskin rm --force a b c
  snowskin ls kv/ --json | jq -r .key | xargs snowskin rm";

/// Remove objects
///
/// Without --force an object that somebody may be reading (lease) or writing is left alone.
#[derive(Debug, clap::Args)]
#[command(after_help = format!("{AFTER_HELP}\n\n{EXIT_CODES}"))]
pub(crate) struct Args {
    /// Keys to remove.
    #[arg(required = true, value_name = "KEY")]
    keys: Vec<String>,
    /// Even while it is read or written.
    #[arg(short, long)]
    force: bool,
    #[command(flatten)]
    master: MasterArg,
    /// Print one JSON object a key.
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
    let mut rpc = args.master.connect()?;
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
                eprintln!("snowskin: {}: {code}", output::printable(key));
                worst = match (worst, code) {
                    (Exit::Ok, ErrorCode::ObjectNotFound) => Exit::NotFound,
                    (Exit::NotFound, ErrorCode::ObjectNotFound) => Exit::NotFound,
                    _ => Exit::Failed,
                };
            }
        }
    }
    Ok(worst)
}
