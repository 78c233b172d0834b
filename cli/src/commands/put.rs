//! `snowskin put`: store a file, or stdin.

use std::io::Read as _;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use serde::Serialize;
use store_client::local::LocalError;
use store_client::{Client, LocalClient, Placement, PutOptions};
use store_core::message::{Pin, Retention};
use store_core::placement::NAMED_MAX;

use crate::args::Global;
use crate::commands::local::{self, LocalArg};
use crate::commands::{available_memory, refused_in};
use crate::config::FlagsOfClient;
use crate::exit::{EXIT_CODES, Exit, Failure};
use crate::output::{printable, rounded};
use crate::progress::Bar;
use crate::size::ByteSize;
use crate::{Outcome, fail, output};

const AFTER_HELP: &str = "Examples:
  snowskin put greeting hello.txt
  echo hello | snowskin put greeting
  snowskin put model/layer0 layer0.bin --replicas 2 --replace
  snowskin put system-prompt prompt.kv --hard-pin
  snowskin put chat/7/0 block.kv --group chat/7 --ttl-ms 600000
  snowskin put hot.kv --replicas 2 --distinct-nodes --exclude-segment node-3";

/// Store a file, or stdin, under a key
///
/// The object is readable when this returns, all of it or not at all.
#[derive(Debug, clap::Args)]
#[command(after_help = format!("{AFTER_HELP}\n\n{EXIT_CODES}"))]
pub(crate) struct Args {
    /// Its key, 1 to 1024 bytes.
    key: String,
    /// The file; `-` is stdin.
    #[arg(default_value = "-")]
    file: PathBuf,
    /// Copies to keep, each on another segment; fewer when there are not as many.
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = clap::value_parser!(u8).range(1..=8))]
    replicas: u8,
    /// Try this segment first; several are tried in order. `snowskin stat` names them.
    #[arg(long, value_name = "SEGMENT", conflicts_with = "local")]
    prefer_segment: Vec<String>,
    /// Do not use this segment; may be given several times.
    #[arg(long, value_name = "SEGMENT", conflicts_with = "local")]
    exclude_segment: Vec<String>,
    /// Try the node first that this segment is of, for every copy.
    #[arg(long, value_name = "SEGMENT", conflicts_with = "local")]
    same_node: Option<String>,
    /// Never two copies on one node, even if there are fewer then.
    #[arg(long, conflicts_with = "local")]
    distinct_nodes: bool,
    /// Spare it from eviction as long as there is anything else to evict, and somebody reads it now and then.
    #[arg(long, conflicts_with = "hard_pin")]
    soft_pin: bool,
    /// Never evict it.
    #[arg(long)]
    hard_pin: bool,
    /// Forget it after this time, milliseconds.
    #[arg(long, value_name = "MS", value_parser = clap::value_parser!(u32).range(1..))]
    ttl_ms: Option<u32>,
    /// Evict it together with all others of this group, or not at all; any name.
    #[arg(long, value_name = "NAME")]
    group: Option<String>,
    /// Remove what is stored under the key first.
    #[arg(long)]
    replace: bool,
    #[command(flatten)]
    flags: FlagsOfClient,
    #[command(flatten)]
    local: LocalArg,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Stored<'a> {
    key: &'a str,
    bytes: u64,
    seconds: f64,
}

pub(crate) fn run(args: &Args, global: Global) -> Outcome {
    let value = read_value(args)?;
    let bytes = value.len() as u64;
    let master = &args.flags.settings().cluster.master;
    if let Some(client) = args.local.connect(master, bytes)? {
        return put_local(args, client, &value);
    }
    let config = args.flags.settings().client.clone();
    let mut client = Client::connect(config).map_err(crate::commands::no_start)?;
    let bar = Bar::spinner(format!("storing {}", ByteSize(bytes).approximate()), global.quiet);
    let started = Instant::now();
    if args.replace {
        client.remove(args.key.as_bytes(), true).map_err(|error| refused_in(&client, &args.key, &error))?;
    }
    let placement = placement(args, &mut client)?;
    let options = PutOptions { replicas: args.replicas, placement, retention: retention(args) };
    match client.put(args.key.as_bytes(), &value, &options) {
        Ok(true) => {}
        Ok(false) => return fail(taken(args)),
        Err(error) if error.code().is_no_room() => {
            let failure = Failure::failed(format!("{}: {error}", printable(&args.key)));
            return fail(
                failure.hint("`snowskin stat` shows capacity; `snowskin node --memory SIZE` adds some"),
            );
        }
        Err(error) => return Err(refused_in(&client, &args.key, &error)),
    }
    let elapsed = started.elapsed();
    drop(bar);
    report(args, bytes, elapsed)
}

/// By way of the node on this machine.
fn put_local(args: &Args, mut client: LocalClient, value: &[u8]) -> Outcome {
    let options = PutOptions { replicas: args.replicas, retention: retention(args), ..PutOptions::default() };
    let failed = |error: LocalError| local::failure(&args.key, &error);
    let started = Instant::now();
    if args.replace {
        client.remove(args.key.as_bytes(), true).map_err(failed)?;
    }
    match client.put(args.key.as_bytes(), value, &options).map_err(failed)? {
        true => report(args, value.len() as u64, started.elapsed()),
        false => fail(taken(args)),
    }
}

fn taken(args: &Args) -> Failure {
    let message = format!("{}: there is an object under this key already", printable(&args.key));
    Failure::failed(message).hint("--replace overwrites it, `snowskin rm` removes it")
}

fn report(args: &Args, bytes: u64, elapsed: Duration) -> Outcome {
    if args.json {
        let seconds = rounded(elapsed.as_secs_f64());
        output::print_json(&Stored { key: &args.key, bytes, seconds })?;
    }
    Ok(Exit::Ok)
}

/// Names as the master's numbers.
fn placement(args: &Args, client: &mut Client) -> anyhow::Result<Placement> {
    let mut placement = Placement { distinct_nodes: args.distinct_nodes, ..Placement::ANY };
    if args.prefer_segment.is_empty() && args.exclude_segment.is_empty() && args.same_node.is_none() {
        return Ok(placement);
    }
    let segments = client.segments()?;
    let find = |name: &String| {
        segments.iter().find(|segment| segment.name == *name).ok_or_else(|| {
            Failure::failed(format!("{}: no such segment", printable(name)))
                .hint("`snowskin stat` lists them")
        })
    };
    for (flag, names, list) in [
        ("--prefer-segment", &args.prefer_segment, &mut placement.preferred),
        ("--exclude-segment", &args.exclude_segment, &mut placement.excluded),
    ] {
        for name in names {
            let full = |_| Failure::usage(format!("{flag}: at most {NAMED_MAX} segments"));
            list.push(find(name)?.segment).map_err(full)?;
        }
    }
    placement.near = args.same_node.as_ref().map(find).transpose()?.map(|segment| segment.node);
    Ok(placement)
}

fn retention(args: &Args) -> Retention {
    let pin = match (args.soft_pin, args.hard_pin) {
        (_, true) => Pin::Hard,
        (true, false) => Pin::Soft,
        (false, false) => Pin::None,
    };
    Retention { pin, ttl_ms: args.ttl_ms, group: args.group.as_deref().map(group_number) }
}

/// FNV-1a, 64 bits (Fowler, Noll and Vo): any program can compute it for the same name.
pub(crate) fn group_number(name: &str) -> u64 {
    name.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

fn read_value(args: &Args) -> anyhow::Result<Vec<u8>> {
    let limit = available_memory().unwrap_or(u64::MAX) / 2;
    let mut value = Vec::new();
    let name;
    if args.file.as_os_str() == "-" {
        name = "stdin".to_owned();
        std::io::stdin().lock().take(limit + 1).read_to_end(&mut value).context("cannot read stdin")?;
    } else {
        name = args.file.display().to_string();
        let file = std::fs::File::open(&args.file).with_context(|| format!("cannot open {name}"))?;
        file.take(limit + 1).read_to_end(&mut value).with_context(|| format!("cannot read {name}"))?;
    }
    if value.len() as u64 > limit {
        return fail(Failure::failed(format!("{name} is longer than this machine can hold in memory")));
    }
    if value.is_empty() {
        return fail(Failure::usage(format!("{name} is empty; an object has one byte at least")));
    }
    Ok(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_groups_number_is_fnv_1a_of_its_name() {
        // From the authors' list of test vectors.
        assert_eq!(group_number(""), 0xcbf2_9ce4_8422_2325);
        assert_eq!(group_number("foobar"), 0x8594_4171_f739_67e8);
    }
}
