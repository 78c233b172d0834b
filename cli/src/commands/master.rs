//! `snowskin master`: one process that knows where every object is.

use std::fmt::Display;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use store_core::TenantConfig;
use store_master::MasterServer;

use crate::commands::cluster::MasterReady;
use crate::config::FlagsOfMaster;
use crate::exit::{EXIT_CODES, Exit, Failure};
use crate::{Outcome, output, sys};

const AFTER_HELP: &str = "Examples:
  snowskin master                                        on this machine alone
  snowskin master --listen 10.0.0.5:50051 --http 10.0.0.5:9003
  curl -s localhost:9003/health; curl -s localhost:9003/metrics
  snowskin master --lease-ms 2000 --evict-above 0.9
  snowskin master --tenants tenants.toml                 see also `snowskin admin tenants`
  snowskin master --config /etc/snowskin.toml            see `snowskin config reference`";

/// Run the master: it knows where every object is
///
/// Runs in the foreground until Ctrl-C or SIGTERM, which stop it in order (exit code 0). It keeps metadata
/// only, in memory; nodes lend the bytes (`snowskin node`).
#[derive(Debug, clap::Args)]
#[command(after_help = format!("{AFTER_HELP}\n\n{EXIT_CODES}"))]
pub(crate) struct Args {
    #[command(flatten)]
    flags: FlagsOfMaster,
    /// A file that lists the tenants, TOML with a `[[tenants]]` for each, or JSON with an array: name, quota_bytes, quota_objects,
    /// guaranteed_bytes, secret. From then on there are tenants, these and those of the settings.
    #[arg(long, value_name = "FILE")]
    tenants: Option<PathBuf>,
    /// Say where it listens as one line of JSON.
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &Args) -> Outcome {
    sys::catch_interrupts();
    sys::lift_file_limit();
    let mut config = args.flags.settings().master.clone();
    if let Some(path) = &args.tenants {
        config.store.multi_tenants = true;
        config.store.tenants.extend(read_tenants(path)?);
        let wrong = |error: &dyn Display| Failure::usage(format!("--tenants {}: {error}", path.display()));
        config.store.validate().map_err(|error| wrong(&error))?;
        config
            .validate()
            .map_err(|error| wrong(&error).hint("give --store-admin-secret, or a settings file"))?;
    }
    let server = MasterServer::bind(config)?;
    let ready = MasterReady {
        ready: "master".to_owned(),
        rpc: server.rpc_addr().to_string(),
        http: server.http_addr().map(|addr| addr.to_string()),
    };
    let serving = server.spawn()?;
    announce(args.json, &ready, || {
        let http =
            ready.http.as_ref().map(|http| format!(", metrics at http://{http}/metrics")).unwrap_or_default();
        format!("master ready at {}{http}\n", ready.rpc)
    });
    wait_for_signal();
    tracing::info!("stopping");
    serving.stop().context("the master did not stop in order")?;
    Ok(Exit::Ok)
}

fn read_tenants(path: &Path) -> anyhow::Result<Vec<TenantConfig>> {
    #[derive(serde::Deserialize)]
    #[serde(deny_unknown_fields)]
    struct File {
        tenants: Vec<TenantConfig>,
    }
    let wrong = |error: &dyn Display| Failure::usage(format!("--tenants {}: {error}", path.display()));
    let text = std::fs::read_to_string(path).map_err(|error| wrong(&error))?;
    if path.extension().is_some_and(|extension| extension == "json") {
        return serde_json::from_str(&text).map_err(|error| wrong(&error).into());
    }
    toml::from_str::<File>(&text).map(|file| file.tenants).map_err(|error| wrong(&error).into())
}

/// Says that a daemon serves. That nobody listens is no reason to end.
pub(crate) fn announce(json: bool, ready: &impl serde::Serialize, text: impl FnOnce() -> String) {
    let said = if json { output::print_json(ready) } else { output::print(&text()) };
    if said.is_err() {
        tracing::info!("nobody reads stdout");
    }
}

/// Sleeps until Ctrl-C or SIGTERM.
pub(crate) fn wait_for_signal() {
    while sys::wait_for_interrupt(None).is_none() {}
}
