//! `snowskin get`: fetch an object.

use std::io::Write as _;
use std::ops::Bound;
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::Context as _;
use serde::Serialize;
use store_client::{Client, ErrorCode, Get, LocalClient, Store, StoreError};

use crate::commands::local::{self, LocalArg};
use crate::commands::waiting::WaitArg;
use crate::commands::{available_memory, check_key, refused_in};
use crate::config::{FlagsOfClient, Origin};
use crate::exit::{EXIT_CODES, Exit, Failure};
use crate::global::Global;
use crate::output::{brief, rounded};
use crate::progress::Bar;
use crate::size::ByteSize;
use crate::{Outcome, fail, output};

const AFTER_HELP: &str = "Examples:
  snowskin get greeting
  snowskin get model/layer0 -o layer0.bin
  snowskin get model/layer0 --offset 1MiB --length 64KiB | xxd | head
  snowskin get model/layer0 --local auto --length 4KiB
  snowskin get greeting >/dev/null || echo \"not cached\"";

/// Fetch an object and verify every byte
///
/// The object goes to stdout or into a file, complete or not at all. The exit code is 4 for a damaged object
/// and 3 for a missing one, and nothing is written then. With --offset or --length, only that part is read,
/// and verified like the whole.
#[derive(Debug, clap::Args)]
#[command(after_help = format!("{AFTER_HELP}\n\n{EXIT_CODES}"))]
pub(crate) struct Args {
    /// Key of the object.
    key: String,
    /// Write to this file instead of stdout, completely or not at all.
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Skip this many bytes at the beginning.
    #[arg(long, value_name = "SIZE", default_value_t = ByteSize(0))]
    offset: ByteSize,
    /// Fetch this many bytes; without it, all bytes to the end.
    #[arg(long, value_name = "SIZE")]
    length: Option<ByteSize>,
    #[command(flatten)]
    flags: FlagsOfClient,
    #[command(flatten)]
    local: LocalArg,
    #[command(flatten)]
    wait: WaitArg,
    /// Print one JSON object that describes the result; needs --output for the bytes.
    #[arg(long, requires = "output")]
    json: bool,
}

#[derive(Serialize)]
struct Fetched<'a> {
    key: &'a str,
    bytes: u64,
    seconds: f64,
    file: &'a Path,
}

/// Offset and end of the requested part; without an end, the part ends with the object.
type Part = (Bound<u64>, Bound<u64>);

pub(crate) fn run(args: &Args, global: Global) -> Outcome {
    check_key(&args.key)?;
    let part = requested_part(args)?;
    let master = &args.flags.settings().cluster.master;
    if args.local.is_given() {
        let client = args.local.connect(master, local::ARENA_BYTES, args.wait)?;
        let started = Instant::now();
        return deliver(args, &get_local(args, client, part)?, started);
    }
    let mut config = args.flags.settings().client.clone();
    if *args.flags.loaded.origin("client.value_bytes_max") == Origin::Default {
        config.value_bytes_max = available_memory().unwrap_or(u64::MAX) / 2;
    }
    let what = format_args!("a master at {master}, which does not listen yet");
    let connect = || Client::connect(config.clone());
    let mut client = args.wait.for_listener(what, connect).map_err(crate::commands::no_start)?;
    let started = Instant::now();
    let read = {
        let _bar = Bar::spinner("fetching", global.quiet);
        read(&mut client, args.key.as_bytes(), part)
    };
    let value = read.map_err(|error| match part_failure(args, &error) {
        Some(failure) => failure.into(),
        None => refused_in(&client, &args.key, &error),
    })?;
    let Some(value) = value else { return fail(miss(args, &client)) };
    deliver(args, &value, started)
}

/// Fetches through the node on this machine.
fn get_local(args: &Args, mut client: LocalClient, part: Option<Part>) -> anyhow::Result<Vec<u8>> {
    let key = args.key.as_bytes();
    let value = match read(&mut client, key, part) {
        // The bytes have to fit the arena. A shorter arena than the bytes is the longest that the node gives.
        Err(StoreError::ArenaFull { wanted, arena_bytes, .. }) if wanted <= arena_bytes => {
            drop(client);
            let master = &args.flags.settings().cluster.master;
            read(&mut args.local.connect(master, local::arena_for(wanted), args.wait)?, key, part)
        }
        value => value,
    };
    match value {
        Ok(Some(value)) => Ok(value),
        Ok(None) => fail(not_found(args)),
        Err(error) => {
            let failure = part_failure(args, &error);
            Err(failure.unwrap_or_else(|| local::failure(&args.key, &error)).into())
        }
    }
}

fn deliver(args: &Args, value: &[u8], started: Instant) -> Outcome {
    let seconds = rounded(started.elapsed().as_secs_f64());
    let Some(file) = &args.output else {
        output::print_bytes(value)?;
        return Ok(Exit::Ok);
    };
    write_whole(file, value)?;
    if args.json {
        output::print_json(&Fetched { key: &args.key, bytes: value.len() as u64, seconds, file })?;
    }
    Ok(Exit::Ok)
}

/// The part that --offset and --length select; `None` is the whole object.
fn requested_part(args: &Args) -> anyhow::Result<Option<Part>> {
    let offset = args.offset.bytes();
    let end = match args.length {
        None if offset == 0 => return Ok(None),
        None => Bound::Unbounded,
        Some(length) => match offset.checked_add(length.bytes()) {
            Some(end) if end > offset => Bound::Excluded(end),
            Some(_) => return fail(Failure::usage("--length must be at least 1")),
            None => {
                let message = "--offset plus --length is more than an object can have";
                return fail(Failure::usage(message).hint("`snowskin stat KEY` shows the object's length"));
            }
        },
    };
    Ok(Some((Bound::Included(offset), end)))
}

/// The whole object, or a part of it; `None` if there is no such object.
fn read(store: &mut impl Store, key: &[u8], part: Option<Part>) -> Result<Option<Vec<u8>>, StoreError> {
    let Some(part) = part else { return store.get(key) };
    let mut value = Vec::new();
    let read = store.get_with(Get::new(key, &mut value).range(part))?;
    Ok(read.map(|_| value))
}

/// The failure of a request whose --offset or --length does not fit the object or this machine.
fn part_failure(args: &Args, error: &StoreError) -> Option<Failure> {
    let message = match error {
        _ if args.offset.bytes() == 0 && args.length.is_none() => return None,
        // Refused before the request was sent: this process cannot hold an object of this length. An arena
        // that is too short for the part (`ArenaFull`) is a limit of the node's instead.
        StoreError::TooLong { .. } => {
            format!("--length {}: this machine does not have that much memory", args.length?)
        }
        error if error.code() == ErrorCode::InvalidParams => {
            format!("{}: the object is shorter than --offset plus --length", brief(&args.key))
        }
        _ => return None,
    };
    Some(Failure::failed(message).hint("`snowskin stat KEY` shows the object's length"))
}

/// Why the client reported a miss: it does not distinguish the causes.
fn miss(args: &Args, client: &Client) -> Failure {
    let key = brief(&args.key);
    let counters = client.counters();
    if counters.checksum_mismatches > 0 {
        return Failure::new(Exit::Verification, format!("{key}: the stored bytes are damaged"))
            .hint("put it again with --replace");
    }
    if counters.disk_misses > 0 {
        return Failure::failed(format!("{key}: the disk that has it did not deliver it in time, or failed"))
            .hint("try again, or with a longer --disk-deadline-ms");
    }
    if counters.transfer_misses > 0 {
        let failure = Failure::failed(format!(
            "{key}: no node that has it could be read over fabric {}",
            args.flags.settings().client.engine.fabrics
        ));
        if let Some(why) = client.why_unreached() {
            return failure.hint(format!("a node cannot be reached: {why}"));
        }
        return failure.hint("`snowskin stat KEY` lists its nodes; check them, and --fabric on both sides");
    }
    if counters.lease_misses > 0 {
        return Failure::failed(format!("{key}: reading it took longer than its lease"))
            .hint("raise the master's --lease-ms");
    }
    not_found(args)
}

fn not_found(args: &Args) -> Failure {
    let key = brief(&args.key);
    Failure::new(Exit::NotFound, format!("{key}: no such object")).hint("`snowskin ls` lists keys")
}

/// Writes a new file beside `file` and renames it, so that a reader never sees a partial file.
fn write_whole(file: &Path, value: &[u8]) -> anyhow::Result<()> {
    let context = || format!("cannot write {}", file.display());
    // A pipe or a device is written to, not replaced.
    if std::fs::metadata(file).is_ok_and(|meta| !meta.is_file()) {
        return std::fs::write(file, value).with_context(context);
    }
    let mut temporary = file.as_os_str().to_owned();
    temporary.push(format!(".snowskin-{}", std::process::id()));
    let temporary = PathBuf::from(temporary);
    let written = std::fs::File::create(&temporary)
        .and_then(|mut out| out.write_all(value).and_then(|()| out.sync_all()))
        .and_then(|()| std::fs::rename(&temporary, file));
    if written.is_err() {
        let _ = std::fs::remove_file(&temporary);
    }
    written.with_context(context)
}
