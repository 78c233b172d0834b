//! The commands, one file each, and what several of them share.

pub(crate) mod admin;
pub(crate) mod bench;
pub(crate) mod cluster;
pub(crate) mod completions;
pub(crate) mod conductor;
pub(crate) mod config;
#[cfg(feature = "cxl")]
pub(crate) mod cxl;
pub(crate) mod disk;
pub(crate) mod doctor;
pub(crate) mod gateway;
pub(crate) mod get;
pub(crate) mod health;
pub(crate) mod local;
pub(crate) mod ls;
pub(crate) mod master;
mod metadata;
pub(crate) mod mock_engine;
pub(crate) mod node;
pub(crate) mod put;
pub(crate) mod replay;
pub(crate) mod rm;
pub(crate) mod stat;
pub(crate) mod top;
pub(crate) mod topology;
pub(crate) mod up;
pub(crate) mod waiting;

use std::ffi::OsStr;
use std::time::{Duration, Instant};

use clap::Arg;
use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use store_client::{Client, ConnectError, Masters, RpcConfig, RpcConnection, RpcError, StoreError};
use store_core::message::ReadStats;
use store_core::wire::KEY_BYTES_MAX;
use store_core::{ErrorCode, EvictionPolicy};
use te_engine::Fabrics;

use crate::args::{Cli, Command};
use crate::config::FlagsOfRpc;
use crate::exit::{Exit, Failure};
use crate::{Outcome, fail};

/// Runs the command.
pub(crate) fn run(cli: Cli) -> Outcome {
    let global = cli.global;
    match &cli.command {
        Command::Up(args) => up::run(args, global),
        Command::Master(args) => master::run(args),
        Command::Node(args) => node::run(args, global),
        Command::Gateway(args) => gateway::run(args),
        Command::Put(args) => put::run(args, global),
        Command::Get(args) => get::run(args, global),
        Command::Rm(args) => rm::run(args),
        Command::Ls(args) => ls::run(args),
        Command::Stat(args) => stat::run(args),
        Command::Top(args) => top::run(args),
        Command::Config(args) => config::run(args, cli.config.as_deref()),
        Command::Admin(args) => admin::run(args),
        Command::Replay(args) => replay::run(args, global),
        Command::Bench(args) => bench::run(args, global),
        Command::Conductor(args) => conductor::run(args),
        Command::MockEngine(args) => mock_engine::run(args),
        #[cfg(feature = "cxl")]
        Command::Cxl(args) => cxl::run(args),
        Command::Disk(args) => disk::run(args, global),
        Command::Topology(args) => topology::run(args),
        Command::Doctor(args) => doctor::run(args, global),
        Command::Health(args) => health::run(args),
        Command::Completions(args) => completions::run(args),
        Command::Man(args) => completions::man(args),
    }
}

/// The master to send requests to.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct MasterArg {
    #[command(flatten)]
    flags: FlagsOfRpc,
}

impl MasterArg {
    /// Where the master is, or the masters are.
    pub(crate) fn address(&self) -> &Masters {
        &self.flags.settings().cluster.master
    }

    /// The secret for administration.
    pub(crate) fn admin_secret(&self) -> &store_core::Secret {
        &self.flags.settings().cluster.admin_secret
    }

    /// Opens a connection for requests that move no objects.
    pub(crate) fn connect(&self) -> anyhow::Result<RpcConnection> {
        let settings = self.flags.settings();
        let identity = settings.cluster.identity();
        RpcConnection::connect_as(self.address().clone(), settings.client.rpc, identity).map_err(no_master)
    }

    /// Opens a connection that acts for another tenant, for an administrator.
    pub(crate) fn connect_to(&self, tenant: &str) -> anyhow::Result<RpcConnection> {
        let settings = self.flags.settings();
        let mut identity = settings.cluster.identity();
        identity.tenant = tenant.to_owned();
        RpcConnection::connect_as(self.address().clone(), settings.client.rpc, identity).map_err(no_master)
    }
}

/// Adds a hint on how to reach a master when none answers.
pub(crate) fn no_master(error: RpcError) -> anyhow::Error {
    let away = matches!(error, RpcError::Connect { .. } | RpcError::NoLeader { .. });
    let failure = Failure::failed(error.to_string());
    if away {
        failure.hint("start one with `snowskin master`, or name yours with --master HOST:PORT").into()
    } else {
        failure.into()
    }
}

/// Explains which regular expressions are accepted when the master has refused one.
pub(crate) fn bad_pattern(error: RpcError) -> anyhow::Error {
    if !matches!(error, RpcError::Refused(ErrorCode::InvalidPattern)) {
        return no_master(error);
    }
    Failure::usage(
        "--regex: not a valid regular expression, or one that is too large or too expensive to search \
        with".to_owned(),
    )
    .hint("a pattern has at most 1,024 bytes, ASCII classes and no look-around; simplify it, anchor it with ^, or give a prefix instead")
    .into()
}

/// The error of a client or node that did not start, with a hint where there is one.
pub(crate) fn no_start(error: ConnectError) -> anyhow::Error {
    match error {
        ConnectError::Rpc(error) => no_master(error),
        error => error.into(),
    }
}

/// The error of an operation on `key`, with the operation's number in the master's log.
pub(crate) fn refused_in(client: &Client, key: &str, error: &StoreError) -> anyhow::Error {
    let failure = refusal(key, error);
    let failure = match client.why_unreached() {
        Some(why) if error.code() == ErrorCode::TransferFail => {
            failure.hint(format!("a node cannot be reached: {why}"))
        }
        _ => failure,
    };
    anyhow::Error::from(failure).context(format!("operation {}", client.trace()))
}

/// The error of an operation on `key` that the store refused.
pub(crate) fn refused(key: &str, error: &StoreError) -> anyhow::Error {
    refusal(key, error).into()
}

fn refusal(key: &str, error: &StoreError) -> Failure {
    let exit = match error.code() {
        ErrorCode::ObjectNotFound | ErrorCode::KeyNotFound => Exit::NotFound,
        ErrorCode::ChecksumMismatch => Exit::Verification,
        _ => Exit::Failed,
    };
    let failure = Failure::new(exit, format!("{}: {error}", crate::output::brief(key)));
    match error.code() {
        ErrorCode::NoSegment => failure.hint("`snowskin node --memory SIZE` lends memory"),
        ErrorCode::NoAvailableHandle => failure.hint(
            "`snowskin stat` shows how much space is not free yet, and why; `snowskin node --memory SIZE` \
            adds capacity",
        ),
        ErrorCode::ObjectTooLarge => failure.hint("`snowskin stat` lists the segments with their capacity"),
        ErrorCode::SegmentsClosed => failure.hint(
            "`snowskin admin segments` lists them; `snowskin admin drain SEGMENT --undo` puts one back into \
            use",
        ),
        _ => failure,
    }
}

/// Refuses a key of invalid length.
pub(crate) fn check_key(key: &str) -> anyhow::Result<()> {
    match key.len() {
        0 => fail(Failure::usage(
            "the key is empty, but keys have 1 to 1024 bytes; is a shell variable unset?",
        )),
        1..=KEY_BYTES_MAX => Ok(()),
        len => fail(Failure::usage(format!(
            "{}: the key has {len} bytes, but keys have 1 to {KEY_BYTES_MAX}",
            crate::output::brief(key)
        ))),
    }
}

/// Whether a put failed because no node lends memory.
pub(crate) fn is_no_segment(code: ErrorCode) -> bool {
    code == ErrorCode::NoSegment
}

/// Parses a choice of fabrics between processes, and lists those of this build in the help.
#[derive(Clone, Debug)]
pub(crate) struct FabricParser;

impl TypedValueParser for FabricParser {
    type Value = Fabrics;

    fn parse_ref(
        &self,
        command: &clap::Command,
        arg: Option<&Arg>,
        value: &OsStr,
    ) -> Result<Fabrics, clap::Error> {
        let parse = |text: &str| match text.parse()? {
            Fabrics::LOCAL => Err("fabric `local` does not reach other processes".into()),
            fabrics => Ok::<_, Box<dyn std::error::Error + Send + Sync>>(fabrics),
        };
        TypedValueParser::parse_ref(&parse, command, arg, value)
    }

    fn possible_values(&self) -> Option<Box<dyn Iterator<Item = PossibleValue> + '_>> {
        Some(Box::new(fabric_values().filter(|value| value.get_name() != "local")))
    }
}

/// The values of `--fabric`: `auto`, and the fabrics of this build.
pub(crate) fn fabric_values() -> impl Iterator<Item = PossibleValue> {
    let auto = PossibleValue::new("auto").help("The fastest of the fabrics that start on this host");
    let built = te_engine::fabrics().iter().filter(|entry| entry.is_built());
    [auto].into_iter().chain(built.map(|entry| PossibleValue::new(entry.name).help(entry.about)))
}

/// Parses the name of an eviction policy, and lists all policies in the help.
pub(crate) fn eviction_parser() -> impl TypedValueParser<Value = EvictionPolicy> {
    let names = EvictionPolicy::ALL.iter().map(|policy| policy.name());
    PossibleValuesParser::new(names).try_map(|name| name.parse())
}

/// Memory that is available on this machine, bytes.
pub(crate) fn available_memory() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.trim().trim_end_matches("kB").trim().parse::<u64>().ok().map(|kib| kib << 10)
}

/// Sends one request to a master; returns the round-trip time.
pub(crate) fn ping_master(address: &str) -> anyhow::Result<Duration> {
    let mut rpc = RpcConnection::connect(address.parse()?, RpcConfig::default())?;
    let started = Instant::now();
    rpc.call::<ReadStats>(&(), std::iter::empty())?;
    Ok(started.elapsed())
}
