//! `snowskin master`: the process that knows where every object is.

use std::fmt::Display;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use store_core::{Secret, TenantConfig};
use store_master::{BindError, MasterHandle, MasterServer};

use crate::commands::cluster::MasterReady;
use crate::config::{FlagsOfMaster, Settings, keys};
use crate::exit::{EXIT_CODES, Exit, Failure};
use crate::size::ByteSize;
use crate::{Outcome, output, sys};

const AFTER_HELP: &str = "Examples:
  snowskin master                                        for this machine only
  snowskin master --listen 10.0.0.5:50051 --http 10.0.0.5:9003
  curl -s localhost:9003/health; curl -s localhost:9003/metrics
  snowskin master --lease-ms 2000 --evict-above 0.9
  snowskin master --journal /var/lib/snowskin            continues after a crash with all objects
  snowskin master --listen 10.0.0.5:50051 --ha etcd://10.0.0.9:2379 --ha-listen 10.0.0.5:50052
                                                         one of several: another one takes over
  snowskin master --tenants tenants.toml                 see also `snowskin admin tenants`
  snowskin master --config /etc/snowskin.toml            see `snowskin config reference`";

/// How often the end of the master is looked for.
const ENDED_CHECK: std::time::Duration = std::time::Duration::from_millis(200);

/// Run the master, which knows where every object is
///
/// Runs in the foreground until Ctrl-C or SIGTERM, and then stops in order (exit code 0). On SIGHUP it reads
/// its settings again and takes those that can be changed while it serves. The master keeps
/// only metadata, in memory and with --journal on disk; nodes lend the memory for objects (`snowskin node`).
#[derive(Debug, clap::Args)]
#[command(after_help = format!("{AFTER_HELP}\n\n{EXIT_CODES}"))]
pub(crate) struct Args {
    #[command(flatten)]
    flags: FlagsOfMaster,
    /// File that lists the tenants: TOML with a `[[tenants]]` section per tenant, or JSON with an array.
    /// Fields: name, quota_bytes, quota_objects, quota_disk_bytes, guaranteed_bytes, secret. Enables tenants:
    /// those of the file and those of the settings.
    #[arg(long, value_name = "FILE")]
    tenants: Option<PathBuf>,
    /// Print the addresses as one line of JSON.
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &Args) -> Outcome {
    sys::catch_interrupts();
    sys::catch_reloads();
    sys::lift_file_limit();
    let config = with_tenants(args.flags.settings().master.clone(), args)?;
    let mut started = config.clone();
    let server = bind(config)?;
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
    while !serving.has_ended() && sys::wait_for_interrupt(Some(ENDED_CHECK)).is_none() {
        if sys::takes_reload() {
            reload(args, &serving, &mut started);
        }
    }
    let ended = serving.has_ended();
    if !ended {
        tracing::info!("stopping");
    }
    let why = if ended { "the master has ended" } else { "the master did not stop in order" };
    serving.stop().context(why)?;
    Ok(Exit::Ok)
}

/// Adds the tenants of `--tenants`.
fn with_tenants(mut config: store_master::Config, args: &Args) -> anyhow::Result<store_master::Config> {
    let Some(path) = &args.tenants else { return Ok(config) };
    config.store.multi_tenants = true;
    config.store.tenants.extend(read_tenants(path)?);
    let wrong = |error: &dyn Display| Failure::usage(format!("--tenants {}: {error}", path.display()));
    config.store.validate().map_err(|error| wrong(&error))?;
    config.validate().map_err(|error| wrong(&error).hint("give --admin-secret-file, or a settings file"))?;
    Ok(config)
}

/// Reads the settings again. What is wrong with them is logged, and the master goes on as it was.
fn reload(args: &Args, serving: &MasterHandle, started: &mut store_master::Config) {
    let read = args.flags.read_again().map_err(|problems| anyhow::anyhow!("{problems}"));
    let next = match read.and_then(|loaded| with_tenants(loaded.settings.master, args)) {
        Ok(next) => next,
        Err(error) => {
            let error = format!("{error:#}");
            tracing::error!(%error, "SIGHUP: the settings cannot be used, and are as they were");
            return;
        }
    };
    let kept = not_changed(started, &next);
    if !kept.is_empty() {
        tracing::warn!(
            settings = ?kept,
            "SIGHUP: these settings are used when a master starts: restart it, or the others first and then \
             hand over to one of them"
        );
    }
    tracing::info!("SIGHUP: the settings were read again");
    serving.reload(next.store.clone());
    *started = next;
}

/// The settings that differ and cannot be changed while the master serves, by their keys.
fn not_changed(before: &store_master::Config, after: &store_master::Config) -> Vec<String> {
    let tree = |config: &store_master::Config| {
        let settings = Settings { master: config.clone(), ..Settings::default() };
        serde_json::to_value(settings).unwrap_or_default()
    };
    // The trees have no secrets.
    let secrets = [
        ("master.store.admin_secret", before.store.admin_secret != after.store.admin_secret),
        ("master.store.cluster_secret", before.store.cluster_secret != after.store.cluster_secret),
    ];
    let secrets = secrets.into_iter().filter(|(_, differs)| *differs).map(|(path, _)| path.to_owned());
    let (before, after) = (tree(before), tree(after));
    let differs = |key: &&keys::Key| {
        key.section() == "master" && before.pointer(&key.pointer()) != after.pointer(&key.pointer())
    };
    let changeable = |path: &str| {
        let name = path.strip_prefix("master.store.").unwrap_or_default();
        name == "tenants" || store_core::ConfigChanges::NAMES.contains(&name)
    };
    let paths = keys::all().iter().filter(differs).map(|key| key.path.clone());
    paths.filter(|path| !changeable(path)).chain(secrets).collect()
}

/// Binds all addresses of a master. The error for an address in use names the flag that chooses another.
pub(crate) fn bind(config: store_master::Config) -> anyhow::Result<MasterServer> {
    let open = config.store.admin_secret.is_empty() && config.store.cluster_secret.is_empty();
    if open && !config.rpc_listen.ip().is_loopback() {
        tracing::warn!(
            "the master listens at {} without a secret: any process that reaches it can lend memory, take \
            over nodes and remove objects. Give it and all nodes a --cluster-secret-file, or let it listen \
            on loopback only",
            config.rpc_listen
        );
    }
    MasterServer::bind(config).map_err(|error| match error {
        BindError::Listen { field, addr, source } => {
            let key = format!("master.{field}");
            let flag = keys::find(&key).map_or(key.clone(), |key| format!("--{}", key.flag));
            let taken = source.kind() == std::io::ErrorKind::AddrInUse;
            let failure = Failure::failed(format!("cannot listen at {addr}: {source}"));
            let hint = match taken {
                true => format!("stop the process that listens there, or choose another address with {flag}"),
                false => format!("{flag} sets the address"),
            };
            failure.hint(hint).into()
        }
        error => error.into(),
    })
}

fn read_tenants(path: &Path) -> anyhow::Result<Vec<TenantConfig>> {
    let wrong = |error: &dyn Display| Failure::usage(format!("--tenants {}: {error}", path.display()));
    let text = std::fs::read_to_string(path).map_err(|error| wrong(&error))?;
    let json = path.extension().is_some_and(|extension| extension == "json");
    tenants_in(&text, json).map_err(|error| wrong(&error).into())
}

/// The tenants that a file lists. Sizes may have units.
fn tenants_in(text: &str, json: bool) -> Result<Vec<TenantConfig>, String> {
    #[derive(serde::Deserialize)]
    #[serde(deny_unknown_fields)]
    struct File {
        tenants: Vec<Tenant>,
    }
    let tenants = match json {
        true => serde_json::from_str(text).map_err(|error| error.to_string())?,
        // The TOML error shows the line.
        false => {
            toml::from_str::<File>(text).map_err(|error| error.to_string().trim_end().to_owned())?.tenants
        }
    };
    Ok(tenants.into_iter().map(TenantConfig::from).collect())
}

/// A tenant, as a file lists it.
#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct Tenant {
    name: String,
    #[serde(default)]
    quota_bytes: Option<ByteSize>,
    #[serde(default)]
    quota_objects: Option<u32>,
    #[serde(default)]
    quota_disk_bytes: Option<ByteSize>,
    #[serde(default)]
    guaranteed_bytes: Option<ByteSize>,
    #[serde(default)]
    secret: Option<Secret>,
}

impl From<Tenant> for TenantConfig {
    fn from(tenant: Tenant) -> Self {
        // All fields are named, so that a new field of `TenantConfig` cannot be forgotten here.
        Self {
            name: tenant.name,
            quota_bytes: tenant.quota_bytes.map(ByteSize::bytes),
            quota_objects: tenant.quota_objects,
            quota_disk_bytes: tenant.quota_disk_bytes.map(ByteSize::bytes),
            guaranteed_bytes: tenant.guaranteed_bytes.map_or(0, ByteSize::bytes),
            secret: tenant.secret.unwrap_or_default(),
        }
    }
}

/// Reports on stdout that a server is ready. A closed stdout does not end the server.
pub(crate) fn announce(json: bool, ready: &impl serde::Serialize, text: impl FnOnce() -> String) {
    let said = if json { output::print_json(ready) } else { output::print(&text()) };
    if said.is_err() {
        tracing::info!("stdout is closed");
    }
}

/// Sleeps until Ctrl-C or SIGTERM, or until the master has ended: one that cannot write its journal does.
pub(crate) fn wait_for_end(master: &MasterHandle) {
    while sys::wait_for_interrupt(Some(ENDED_CHECK)).is_none() && !master.has_ended() {}
}

/// Sleeps until Ctrl-C or SIGTERM.
pub(crate) fn wait_for_signal() {
    while sys::wait_for_interrupt(None).is_none() {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_of_tenants_may_have_units() {
        let toml =
            "[[tenants]]\nname = \"a\"\nquota_bytes = \"64MiB\"\nguaranteed_bytes = 4096\nsecret = \"s\"\n";
        let tenants = tenants_in(toml, false).unwrap();
        assert_eq!((tenants[0].quota_bytes, tenants[0].guaranteed_bytes), (Some(64 << 20), 4096));
        assert_eq!(tenants[0].secret, Secret::from("s".to_owned()));
        let tenants = tenants_in("[{\"name\": \"b\", \"quota_bytes\": \"1.5GiB\"}]", true).unwrap();
        assert_eq!((tenants[0].quota_bytes, tenants[0].quota_objects), (Some(3 << 29), None));

        let wrong = tenants_in(&toml.replace("64MiB", "64 apples"), false).unwrap_err();
        assert!(
            wrong.contains("line 3") && wrong.contains("64 apples") && wrong.contains("64KiB"),
            "{wrong}"
        );
        assert!(
            tenants_in(&toml.replace("quota_bytes", "quota"), false).unwrap_err().contains("quota_bytes")
        );
    }
}
