//! `snowskin put`: stores a file or stdin.

use std::io::{IsTerminal as _, Read as _};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use serde::Serialize;
use store_client::{
    Client, Existing, LocalClient, Placement, PutOptions, RpcConnection, Store as _, StoreError,
};
use store_core::Key;
use store_core::message::{DiskCopy, FindReplicas, Pin, Retention};
use store_core::placement::NAMED_MAX;

use crate::commands::local::{self, LocalArg};
use crate::commands::waiting::WaitArg;
use crate::commands::{available_memory, check_key, is_no_segment, no_master, refused_in};
use crate::config::FlagsOfClient;
use crate::exit::{EXIT_CODES, Exit, Failure};
use crate::global::Global;
use crate::output::{brief, printable, rounded};
use crate::progress::Bar;
use crate::size::ByteSize;
use crate::{Outcome, fail, output};

const AFTER_HELP: &str = "Examples:
  snowskin put greeting hello.txt
  echo hello | snowskin put greeting
  snowskin put model/layer0 layer0.bin --replicas 2 --replace
  snowskin put system-prompt prompt.kv --hard-pin
  snowskin put chat/7/0 block.kv --group chat/7 --ttl-ms 600000
  snowskin put hot hot.kv --replicas 2 --distinct-nodes --exclude-segment node-3";

/// Store a file or stdin under a key
///
/// When the command has succeeded, the object is readable as a whole. When it has failed, nothing is stored.
#[derive(Debug, clap::Args)]
#[command(after_help = format!("{AFTER_HELP}\n\n{EXIT_CODES}"))]
pub(crate) struct Args {
    /// Key of the object, 1 to 1024 bytes.
    key: String,
    /// The file to store; `-` is stdin.
    #[arg(default_value = "-")]
    file: PathBuf,
    /// Number of replicas, each on another segment; fewer are stored when there are fewer segments.
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = clap::value_parser!(u8).range(1..=8))]
    replicas: u8,
    /// Try this segment first; several are tried in order. `snowskin stat` lists the names.
    #[arg(long, value_name = "SEGMENT", conflicts_with = "local")]
    prefer_segment: Vec<String>,
    /// Do not use this segment; may be given several times.
    #[arg(long, value_name = "SEGMENT", conflicts_with = "local")]
    exclude_segment: Vec<String>,
    /// For every replica, try the node of this segment first.
    #[arg(long, value_name = "SEGMENT", conflicts_with = "local")]
    same_node: Option<String>,
    /// Store at most one replica per node, even if there are fewer replicas then.
    #[arg(long, conflicts_with = "local")]
    distinct_nodes: bool,
    /// Evict other objects first, as long as this one is read from time to time.
    #[arg(long, conflicts_with = "hard_pin")]
    soft_pin: bool,
    /// Never evict it.
    #[arg(long)]
    hard_pin: bool,
    /// Remove the object after this time, milliseconds.
    #[arg(long, value_name = "MS", value_parser = clap::value_parser!(u32).range(1..))]
    ttl_ms: Option<u32>,
    /// Evict the object together with all others of this group, or not at all; any name.
    #[arg(long, value_name = "NAME")]
    group: Option<String>,
    /// Whether it is copied to a disk of a node: before it is evicted, never, or as soon as it is stored. An
    /// object with a pin, a time to live or a group has no copy.
    #[arg(
        long,
        value_enum,
        default_value_t = DiskCopyArg::Auto,
        value_name = "WHEN",
        conflicts_with_all = ["soft_pin", "hard_pin", "ttl_ms", "group"]
    )]
    disk_copy: DiskCopyArg,
    /// Replace an existing object under this key. It can be read until the new one is stored, and stays if
    /// that fails.
    #[arg(long)]
    replace: bool,
    #[command(flatten)]
    flags: FlagsOfClient,
    #[command(flatten)]
    local: LocalArg,
    #[command(flatten)]
    wait: WaitArg,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, Debug, clap::ValueEnum)]
enum DiskCopyArg {
    Auto,
    Never,
    Now,
}

#[derive(Serialize)]
struct Stored<'a> {
    key: &'a str,
    bytes: u64,
    replicas: usize,
    replicas_wanted: u8,
    seconds: f64,
}

pub(crate) fn run(args: &Args, global: Global) -> Outcome {
    check_key(&args.key)?;
    let value = read_value(args)?;
    let bytes = value.len() as u64;
    let settings = args.flags.settings();
    if args.local.is_given() {
        let client = args.local.connect(&settings.cluster.master, local::arena_for(bytes), args.wait)?;
        return put_local(args, client, &value);
    }
    let master = &settings.cluster.master;
    let connect = || Client::connect(settings.client.clone());
    let what = format_args!("a master at {master}, which does not listen yet");
    let mut client = args.wait.for_listener(what, connect).map_err(crate::commands::no_start)?;
    let bar = Bar::spinner(format!("storing {}", ByteSize(bytes).approximate()), global.quiet);
    let started = Instant::now();
    let placement = placement(args, &mut client)?;
    let (retention, existing) = (retention(args), existing(args));
    let options = PutOptions { replicas: args.replicas, placement, retention, existing };
    let stored = args.wait.for_node(
        &mut client,
        |client| client.put(args.key.as_bytes(), &value, &options),
        |error| is_no_segment(error.code()),
        |client| client.master().stats().map_or(true, |stats| stats.segments > 0),
    );
    let stored = stored.map_err(|error| refused_in(&client, &args.key, &error))?;
    if !stored {
        return fail(taken(args));
    }
    let elapsed = started.elapsed();
    drop(bar);
    let copies = match args.replicas {
        1 => 1,
        _ => client.master().replicas(args.key.as_bytes()).map_or(0, |replicas| replicas.len()),
    };
    report(args, bytes, elapsed, copies)
}

/// Stores through the node on this machine.
fn put_local(args: &Args, mut client: LocalClient, value: &[u8]) -> Outcome {
    let (retention, existing) = (retention(args), existing(args));
    let options = PutOptions { replicas: args.replicas, retention, existing, ..PutOptions::default() };
    let failed = |error: StoreError| local::failure(&args.key, &error);
    let started = Instant::now();
    let stored = args.wait.for_node(
        &mut client,
        |client| client.put(args.key.as_bytes(), value, &options),
        |error| is_no_segment(error.code()),
        // A local client cannot ask whether there is a node.
        |_| true,
    );
    let stored = stored.map_err(failed)?;
    if !stored {
        return fail(taken(args));
    }
    let elapsed = started.elapsed();
    let copies = match args.replicas {
        1 => 1,
        _ => copies(args)?,
    };
    report(args, value.len() as u64, elapsed, copies)
}

/// Number of replicas, from the master: a local client cannot request it.
fn copies(args: &Args) -> anyhow::Result<usize> {
    let settings = args.flags.settings();
    let (master, rpc) = (settings.cluster.master.clone(), settings.client.rpc);
    let mut rpc = RpcConnection::connect_as(master, rpc, settings.cluster.identity()).map_err(no_master)?;
    let keys = std::iter::once(Key(args.key.as_bytes()));
    let ((), mut found) = rpc.call::<FindReplicas>(&(), keys).map_err(no_master)?;
    Ok(found.next().and_then(Result::ok).map_or(0, |replicas| replicas.len()))
}

fn taken(args: &Args) -> Failure {
    let message = format!("{}: an object with this key exists already", brief(&args.key));
    Failure::failed(message).hint("--replace overwrites it, `snowskin rm` removes it")
}

fn report(args: &Args, bytes: u64, elapsed: Duration, copies: usize) -> Outcome {
    if copies < usize::from(args.replicas) {
        let key = brief(&args.key);
        eprintln!(
            "snowskin: {key}: stored {copies} of {} copies, because each goes to another segment: no other \
            segment has room for it or may be used; `snowskin stat` lists the segments",
            args.replicas
        );
    }
    if args.json {
        let seconds = rounded(elapsed.as_secs_f64());
        let stored =
            Stored { key: &args.key, bytes, replicas: copies, replicas_wanted: args.replicas, seconds };
        output::print_json(&stored)?;
    }
    Ok(Exit::Ok)
}

/// Resolves the names of segments to the master's numbers.
fn placement(args: &Args, client: &mut Client) -> anyhow::Result<Placement> {
    let mut placement = Placement { distinct_nodes: args.distinct_nodes, ..Placement::ANY };
    if args.prefer_segment.is_empty() && args.exclude_segment.is_empty() && args.same_node.is_none() {
        return Ok(placement);
    }
    let segments = client.master().segments()?;
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
    let group = args.group.as_deref().map(group_number);
    let disk = match args.disk_copy {
        DiskCopyArg::Auto => DiskCopy::Auto,
        DiskCopyArg::Never => DiskCopy::Never,
        DiskCopyArg::Now => DiskCopy::Now,
    };
    Retention { pin, ttl_ms: args.ttl_ms, group, disk, ..Retention::DEFAULT }
}

/// What happens to an object that has the key.
fn existing(args: &Args) -> Existing {
    if args.replace { Existing::REPLACE } else { Existing::Keep }
}

/// The number of a group: FNV-1a, 64 bits (Fowler, Noll and Vo), of its name, which any program can compute.
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
        if std::io::stdin().is_terminal() {
            eprintln!(
                "snowskin: reading the value from the terminal: Ctrl-D ends the input, Ctrl-C stores nothing"
            );
        }
        std::io::stdin().lock().take(limit + 1).read_to_end(&mut value).context("cannot read stdin")?;
    } else {
        name = args.file.display().to_string();
        let file = std::fs::File::open(&args.file).with_context(|| format!("cannot open {name}"))?;
        file.take(limit + 1).read_to_end(&mut value).with_context(|| format!("cannot read {name}"))?;
    }
    if value.len() as u64 > limit {
        return fail(Failure::failed(format!("{name} does not fit into the memory of this machine")));
    }
    if value.is_empty() {
        return fail(Failure::usage(format!("{name} is empty, but an object has at least one byte")));
    }
    Ok(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_groups_number_is_fnv_1a_of_its_name() {
        // From the test vectors of the authors.
        assert_eq!(group_number(""), 0xcbf2_9ce4_8422_2325);
        assert_eq!(group_number("foobar"), 0x8594_4171_f739_67e8);
    }
}
