//! `snowskin ls`: lists keys.

use serde::Serialize;
use store_core::Key;
use store_core::message::{Find, FindQuery, List, ListQuery};

use crate::commands::{MasterArg, bad_pattern, no_master};
use crate::exit::{EXIT_CODES, Exit};
use crate::output::{Align, LiveTable};
use crate::size::ByteSize;
use crate::{Outcome, output};

const AFTER_HELP: &str = "Examples:
  snowskin ls
  snowskin ls kv/llama-3/ --limit 20
  snowskin ls --regex '^kv/.*/layer1[0-9]$'
  snowskin ls --json | jq -r 'select(.bytes > 1048576) | .key'";

/// List keys, with sizes, copies and state
///
/// Keys come in no particular order. Keys that are stored or removed during the listing may or may not
/// appear.
#[derive(Debug, clap::Args)]
#[command(after_help = format!("{AFTER_HELP}\n\n{EXIT_CODES}"))]
pub(crate) struct Args {
    /// Only keys that begin with this prefix.
    #[arg(default_value = "", hide_default_value = true)]
    prefix: String,
    /// Only keys that match this regular expression, at any position unless it is anchored.
    #[arg(long, value_name = "PATTERN", conflicts_with = "prefix")]
    regex: Option<String>,
    /// List at most this many keys [default: all].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    limit: Option<u64>,
    #[command(flatten)]
    master: MasterArg,
    /// Print one JSON object per line.
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Row {
    key: String,
    bytes: u64,
    replicas: u8,
    complete: bool,
    leased: bool,
}

pub(crate) fn run(args: &Args) -> Outcome {
    let mut rpc = args.master.connect()?;
    let page = rpc.welcome().keys_per_batch_max.clamp(1, 1024);
    let mut left = args.limit.unwrap_or(u64::MAX);
    let mut table = LiveTable::new(&[
        ("size", Align::Right),
        ("copies", Align::Right),
        ("state", Align::Left),
        ("key", Align::Left),
    ]);
    let mut cursor = 0;
    loop {
        let query = ListQuery {
            prefix: Key(args.prefix.as_bytes()),
            cursor,
            limit: page.min(u32::try_from(left).unwrap_or(u32::MAX)),
        };
        let (position, listed) = match &args.regex {
            None => rpc.call::<List>(&query, std::iter::empty()).map_err(no_master)?,
            Some(pattern) => {
                let query = FindQuery { pattern, cursor, limit: query.limit };
                rpc.call::<Find>(&query, std::iter::empty()).map_err(bad_pattern)?
            }
        };
        cursor = position.cursor;
        let rows: Vec<Row> = listed
            .map(|listed| Row {
                key: String::from_utf8_lossy(listed.key.0).into_owned(),
                bytes: listed.len,
                replicas: listed.replicas,
                complete: listed.complete,
                leased: listed.leased,
            })
            .collect();
        for row in rows.iter().take(usize::try_from(left).unwrap_or(usize::MAX)) {
            if args.json {
                output::print_json(row)?;
            } else {
                let state = match (row.complete, row.leased) {
                    (false, _) => "writing",
                    (true, true) => "leased",
                    (true, false) => "ready",
                };
                table.row(&[
                    ByteSize(row.bytes).approximate(),
                    row.replicas.to_string(),
                    state.to_owned(),
                    output::printable(&row.key),
                ])?;
            }
        }
        left = left.saturating_sub(rows.len() as u64);
        if cursor == 0 || left == 0 {
            return Ok(Exit::Ok);
        }
    }
}
