//! `snowskin conductor serve`: the process that knows which engine has which blocks.

use std::time::Duration;

use conductor::{Conductor, StartError};
use serde::Serialize;

use crate::commands::master::announce;
use crate::config::FlagsOfConductor;
use crate::exit::{EXIT_CODES, Exit, Failure};
use crate::{Outcome, sys};

const AFTER_HELP: &str = "Examples:
  snowskin conductor serve                               for engines of this machine, which register by HTTP
  snowskin conductor serve --config /etc/snowskin.toml   with engines as [[conductor.engines]]
  snowskin conductor serve --listen 10.0.0.5:13333 --admin-secret-file secret --snapshot /var/lib/snowskin/index
  curl localhost:13333/register -d '{\"endpoint\":\"tcp://10.0.0.7:5557\",\"replay_endpoint\":\"tcp://10.0.0.7:5558\",
    \"type\":\"vLLM\",\"modelname\":\"m\",\"instance_id\":\"a\",\"block_size\":16}'
  curl localhost:13333/services; curl localhost:13333/metrics";

/// How often the end of the Conductor is looked for.
const ENDED_CHECK: Duration = Duration::from_millis(200);

/// Run the Conductor, which knows which engine has which blocks
///
/// Reads the KV events of vLLM, SGLang, Mooncake's store and this project's, and answers over HTTP how much
/// of a prompt each engine has (`/query`), and where to run a request (`/schedule`). Runs in the foreground
/// until Ctrl-C or SIGTERM, and then stops in order (exit code 0).
#[derive(Debug, clap::Args)]
#[command(after_help = format!("{AFTER_HELP}\n\n{EXIT_CODES}"))]
pub(crate) struct Args {
    #[command(flatten)]
    flags: FlagsOfConductor,
    /// Print the address as one line of JSON.
    #[arg(long)]
    json: bool,
}

/// The line that a Conductor prints when it serves.
#[derive(Serialize)]
struct Ready {
    ready: &'static str,
    http: String,
}

pub(crate) fn run(args: &Args) -> Outcome {
    sys::catch_interrupts();
    sys::lift_file_limit();
    let bound = Conductor::bind(args.flags.settings().conductor.clone()).map_err(no_start)?;
    let serving = bound.spawn().map_err(no_start)?;
    let ready = Ready { ready: "conductor", http: serving.addr().to_string() };
    announce(args.json, &ready, || format!("Conductor ready at http://{}/\n", ready.http));
    while !serving.has_ended() && sys::wait_for_interrupt(Some(ENDED_CHECK)).is_none() {}
    if serving.has_ended() {
        return Err(Failure::failed("the Conductor has ended").hint("its log says why").into());
    }
    tracing::info!("stopping");
    serving.stop();
    Ok(Exit::Ok)
}

/// Why it does not start, and what to do about it.
pub(super) fn no_start(error: StartError) -> anyhow::Error {
    let failure = Failure::failed(error.to_string());
    match error {
        StartError::Listen(_, source) if source.kind() == std::io::ErrorKind::AddrInUse => failure
            .hint("stop the process that listens there, or choose another address with --listen")
            .into(),
        StartError::Config(_) => Failure::usage(error.to_string()).into(),
        _ => failure.into(),
    }
}
