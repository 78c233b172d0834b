//! Settings: one typed struct, filled from its defaults, a TOML file, the environment and flags, each
//! overriding the one before.
//!
//! ```text
//!   Settings::default() ──▶ file (--config, SNOWSKIN_CONFIG) ──▶ SNOWSKIN_* ──▶ flags ──▶ checked Settings
//!          │                                                                                 │
//!          └── keys: every leaf, with its documentation ──▶ flags, variables, reference      └── origin of each value
//! ```
//!
//! A setting is a field of [`Settings`] or of a struct in it: its key in the file, its variable, its flag and
//! its row in `docs/reference/config.md` follow from the field's name, type, default and documentation.
//! `FLAGS` in [`keys`] gives some of them shorter flags.

mod file;
mod flags;
pub(crate) mod keys;
pub(crate) mod reference;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::Value;

pub(crate) use flags::{
    FlagsOfClient, FlagsOfConductor, FlagsOfLog, FlagsOfMaster, FlagsOfNode, FlagsOfRpc, FlagsOfUp, Given,
};
use keys::Key;

use crate::size::ByteSize;

/// All settings. One file may configure all processes of a cluster; each process reads its own sections.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct Settings {
    /// Log messages of every command.
    pub(crate) log: LogSettings,
    /// Settings that nodes and clients share.
    pub(crate) cluster: ClusterSettings,
    /// `snowskin master`.
    pub(crate) master: store_master::Config,
    /// `snowskin node`.
    pub(crate) node: NodeSettings,
    /// Clients: `put`, `get` and other commands that send requests to a master.
    pub(crate) client: store_client::ClientConfig,
    /// `snowskin conductor serve`.
    pub(crate) conductor: conductor::Config,
}

/// Log messages on stderr.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct LogSettings {
    /// `text` for people, `json` for log collectors (one object per line).
    pub(crate) format: LogFormat,
    /// Which messages are logged: a level, or `target=level` separated by commas, as `tracing` reads them.
    /// Empty: `RUST_LOG`, or else the level that `--verbose` selects.
    pub(crate) filter: String,
}

/// Format of log messages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum LogFormat {
    #[default]
    Text,
    Json,
}

/// Settings of every process of a cluster except the master.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct ClusterSettings {
    /// Address of the master: host:port or unix:/path/of/socket. Of several masters: all addresses, separated
    /// by commas, or etcd://host:port[,host:port]/CLUSTER, where the one that leads is published (in builds
    /// with the feature etcd).
    pub(crate) master: store_client::Masters,
    /// The tenant that commands act for, if the master has tenants.
    pub(crate) tenant: String,
    /// The tenant's secret, if it has one. Prefer a variable or a file to the flag: other users of the
    /// machine can see flags.
    pub(crate) tenant_secret: store_core::Secret,
    /// A file that holds the tenant's secret, instead.
    pub(crate) tenant_secret_file: Option<PathBuf>,
    /// The secret for administration. It is also the master's, unless `master.store.admin_secret` is set.
    pub(crate) admin_secret: store_core::Secret,
    /// A file that holds the admin secret, instead.
    pub(crate) admin_secret_file: Option<PathBuf>,
    /// The secret that all processes of a cluster share (the master, nodes, and clients that move objects),
    /// so that no other process can lend memory or reach the memory of nodes. Empty: any process that reaches
    /// their ports can.
    pub(crate) cluster_secret: store_core::Secret,
    /// A file that holds the cluster secret, instead.
    pub(crate) cluster_secret_file: Option<PathBuf>,
}

impl ClusterSettings {
    pub(crate) fn identity(&self) -> store_client::Identity {
        let mut identity = store_client::Identity::default();
        identity.tenant = self.tenant.clone();
        identity.secret = self.tenant_secret.clone();
        identity.admin = self.admin_secret.clone();
        identity.cluster = self.cluster_secret.clone();
        identity
    }
}

impl Default for ClusterSettings {
    fn default() -> Self {
        Self {
            master: store_client::Masters::default(),
            tenant: store_core::DEFAULT_TENANT.to_owned(),
            tenant_secret: store_core::Secret::default(),
            tenant_secret_file: None,
            admin_secret: store_core::Secret::default(),
            admin_secret_file: None,
            cluster_secret: store_core::Secret::default(),
            cluster_secret_file: None,
        }
    }
}

/// Settings of a node, as this program runs it.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct NodeSettings {
    /// Where `/health`, `/ready` and `/metrics` are served, ADDR:PORT; `none`: not served.
    pub(crate) http_listen: Option<SocketAddr>,
    /// Path of a Unix socket for local clients of the same user on this machine, or `auto` for the path where
    /// they look by default; `none`: local clients are not served.
    pub(crate) local: Option<PathBuf>,
    /// Where the store is served over HTTP, without authentication, as `snowskin gateway` does; `none`: not
    /// served.
    pub(crate) gateway: Option<SocketAddr>,
    #[serde(flatten)]
    pub(crate) node: store_client::NodeConfig,
}

/// Where a setting's value comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Origin {
    /// The built-in default.
    Default,
    /// A line of the file.
    File {
        /// The file.
        path: PathBuf,
        /// The line, counted from 1; 0 stands for the file as a whole.
        line: usize,
    },
    /// An environment variable.
    Variable(String),
    /// A flag.
    Flag(String),
}

/// The settings, and the origin of each value.
#[derive(Clone, Debug)]
pub(crate) struct Loaded {
    /// Checked.
    pub(crate) settings: Settings,
    /// The same values as JSON, by key.
    tree: Value,
    /// Keys that are missing here have their default.
    origins: BTreeMap<&'static str, Origin>,
    /// Variables that look like settings but are not: a typing error, or an orchestrator's variable.
    pub(crate) unknown_variables: Vec<UnknownVariable>,
    /// Settings that were given by an old name.
    pub(crate) renamed: Vec<Renamed>,
    /// Fabrics that this build lacks and whose settings were given: they are ignored.
    pub(crate) not_built: BTreeSet<&'static str>,
}

/// A variable that is not a setting, and the one that is probably meant.
pub(crate) type UnknownVariable = (String, Option<&'static str>);

/// The old name (a path of the file or a variable) by which a setting was given, and its key.
pub(crate) type Renamed = (String, &'static Key);

/// What is wrong with one value, and where the value was given.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Problem {
    at: Origin,
    key: String,
    what: String,
}

/// All problems that were found; never empty.
#[derive(Clone, Debug)]
pub(crate) struct Problems(pub(crate) Vec<Problem>);

/// A value as it was given, before it is typed.
struct Entry {
    key: &'static Key,
    at: Origin,
    /// The values that the text may mean, the likeliest first.
    readings: Vec<Value>,
    /// Whether a name was used that the setting had before it was renamed. The new name overrides it within a
    /// layer.
    by_old_name: bool,
}

impl Loaded {
    /// Reads all layers, and checks the limits of `sections`.
    ///
    /// # Errors
    /// Everything that is wrong with the file, the variables and the flags, each with its origin.
    pub(crate) fn read(
        file: Option<&Path>,
        variables: impl Iterator<Item = (String, String)>,
        flags: &[Given],
        sections: &[&str],
    ) -> Result<Self, Problems> {
        let (mut problems, mut renamed, mut not_built) = (Vec::new(), Vec::new(), BTreeSet::new());
        let mut entries = match file {
            Some(path) => file::entries(path, &mut problems, &mut renamed, &mut not_built),
            None => Vec::new(),
        };
        let (from_variables, unknown_variables) = variables_of(variables, &mut renamed, &mut not_built);
        entries.extend(from_variables);
        entries.extend(flags.iter().map(|given| Entry {
            key: given.key,
            at: Origin::Flag(format!("--{}", given.key.flag)),
            readings: readings(given.key, &given.text, true),
            // Clap refuses a flag that is given by both of its names.
            by_old_name: false,
        }));
        let mut loaded = Self {
            settings: Settings::default(),
            tree: serde_json::to_value(Settings::default()).unwrap_or_default(),
            origins: BTreeMap::new(),
            unknown_variables,
            renamed,
            not_built,
        };
        for entry in entries {
            if let Err(problem) = loaded.set(entry) {
                problems.push(problem);
            }
        }
        loaded.read_secrets(&mut problems);
        loaded.complete();
        if problems.is_empty() {
            problems.extend(sections.iter().filter_map(|section| loaded.out_of_limits(section)));
        }
        if problems.is_empty() { Ok(loaded) } else { Err(Problems(problems)) }
    }

    /// Where a key's value comes from.
    pub(crate) fn origin(&self, key: &str) -> &Origin {
        self.origins.get(key).unwrap_or(&Origin::Default)
    }

    /// Whether the file, a variable or a flag sets the key.
    pub(crate) fn is_given(&self, key: &str) -> bool {
        self.origins.contains_key(key)
    }

    /// What the user should know of settings that are valid or ignored.
    pub(crate) fn warnings(&self) -> Vec<String> {
        let unknown = self.unknown_variables.iter().map(|(name, near)| match near {
            Some(near) => format!("{name} is not a setting and is ignored: did you mean {near}?"),
            None => format!(
                "{name} looks like a setting but is not one, and is ignored: \
                 `snowskin config reference` lists all settings"
            ),
        });
        let not_built = self.not_built.iter().map(|fabric| {
            format!(
                "the settings of {fabric} are ignored: this build lacks it; build with --features {fabric}"
            )
        });
        let renamed = self.renamed.iter().map(|(old, key)| {
            format!("{old} is the old name of {} ({}): use the new one", key.path, key.variable)
        });
        unknown.chain(not_built).chain(renamed).collect()
    }

    /// A key's value as JSON; secrets are masked.
    pub(crate) fn value(&self, key: &Key) -> Value {
        if key.is_secret() && self.is_given(&key.path) {
            return Value::from("***");
        }
        // Serialised from the structs, because those leave out secrets that are part of a value.
        let tree = serde_json::to_value(&self.settings).unwrap_or_default();
        tree.pointer(&key.pointer()).cloned().unwrap_or_default()
    }

    /// A key's value for people; secrets are masked.
    pub(crate) fn shown(&self, key: &Key) -> String {
        keys::shown(&self.value(key))
    }

    fn set(&mut self, entry: Entry) -> Result<(), Problem> {
        let mut error = None;
        for reading in entry.readings {
            let mut tree = self.tree.clone();
            if let Some(leaf) = tree.pointer_mut(&entry.key.pointer()) {
                *leaf = with_sizes(reading);
            }
            match serde_json::from_value(tree.clone()) {
                Ok(settings) => {
                    (self.settings, self.tree) = (settings, tree);
                    self.origins.insert(entry.key.path.as_str(), entry.at);
                    return Ok(());
                }
                Err(refused) => error = Some(refused),
            }
        }
        let reason = error.map(|error| error.to_string()).unwrap_or_default();
        let what = match reason.contains("write ") {
            true => reason,
            false => format!("{reason}; write {}", entry.key.kind()),
        };
        Err(Problem { at: entry.at, key: entry.key.path.clone(), what })
    }

    /// Reads the secrets that are given as files. A trailing newline is not part of the secret.
    fn read_secrets(&mut self, problems: &mut Vec<Problem>) {
        let cluster = &mut self.settings.cluster;
        for (secret, file, key) in [
            (&mut cluster.tenant_secret, &cluster.tenant_secret_file, "cluster.tenant_secret"),
            (&mut cluster.admin_secret, &cluster.admin_secret_file, "cluster.admin_secret"),
            (&mut cluster.cluster_secret, &cluster.cluster_secret_file, "cluster.cluster_secret"),
        ] {
            let Some(path) = file else { continue };
            let of_file = format!("{key}_file");
            let at = self.origins.get(of_file.as_str()).cloned().unwrap_or(Origin::Default);
            let read = match self.origins.contains_key(key) {
                true => Err(format!("{key} is given as well: leave one of them out")),
                false => secret_in(path),
            };
            match read {
                Ok(read) => *secret = read,
                Err(what) => problems.push(Problem { at, key: of_file, what }),
            }
        }
    }

    /// Sets values that follow from other settings, or from this process.
    fn complete(&mut self) {
        let settings = &mut self.settings;
        settings.node.node.master = settings.cluster.master.clone();
        settings.client.master = settings.cluster.master.clone();
        settings.client.identity = settings.cluster.identity();
        settings.node.node.identity.admin = settings.cluster.admin_secret.clone();
        settings.node.node.identity.cluster = settings.cluster.cluster_secret.clone();
        if settings.node.node.name.is_empty() {
            settings.node.node.name = process_name();
        }
        let cluster = &settings.cluster;
        settings.conductor.admin_secret = cluster.admin_secret.clone();
        settings.conductor.store_identity = cluster.identity();
        let store = &mut settings.master.store;
        for (own, shared) in [
            (&mut store.admin_secret, &cluster.admin_secret),
            (&mut store.cluster_secret, &cluster.cluster_secret),
        ] {
            if own.is_empty() {
                own.clone_from(shared);
            }
        }
        for engine in [&mut settings.node.node.engine, &mut settings.client.engine] {
            engine.cluster_secret = cluster.cluster_secret.clone();
        }
    }

    /// The first value of a section that is out of its limits.
    fn out_of_limits(&self, section: &str) -> Option<Problem> {
        use store_client::ConnectError;
        let engine = |engine: &te_engine::Config| {
            let error = engine.validate().err()?;
            Some(match error.setting() {
                Some((field, need)) => (format!("engine.{field}"), need),
                None => ("engine".to_owned(), error.to_string()),
            })
        };
        let client = |checked: Result<(), ConnectError>| match checked {
            Err(ConnectError::Config { field, need }) => Some((field.to_owned(), need.to_owned())),
            Err(error) => Some((String::new(), error.to_string())),
            Ok(()) => None,
        };
        let settings = &self.settings;
        let (field, what) = match section {
            "master" => {
                let own = settings.master.validate().err().map(|e| (e.field.to_owned(), e.need.to_owned()));
                let store = || {
                    let error = settings.master.store.validate().err()?;
                    let (text, name) = (error.to_string(), error.setting);
                    let what =
                        text.strip_prefix(name).map_or(text.as_str(), |rest| rest.trim_start_matches(": "));
                    Some((format!("store.{name}"), what.to_owned()))
                };
                own.or_else(store)
            }
            "node" => client(settings.node.node.validate()).or_else(|| engine(&settings.node.node.engine)),
            "cluster" => {
                let tenant = &settings.cluster.tenant;
                let right = (1..=store_core::TENANT_BYTES_MAX).contains(&tenant.len());
                let need = format!("a tenant's name has 1 to {} bytes", store_core::TENANT_BYTES_MAX);
                (!right).then(|| ("tenant".to_owned(), need))
            }
            "client" => client(settings.client.validate()).or_else(|| engine(&settings.client.engine)),
            "conductor" => settings.conductor.validate().err().map(|error| (error.field, error.need)),
            _ => None,
        }?;
        let key = format!("{section}.{field}");
        let value = keys::find(&key).map(|key| format!("{} ", self.shown(key))).unwrap_or_default();
        let at = self.origin(&key).clone();
        Some(Problem { at, key, what: format!("{value}is out of its limits: {what}") })
    }
}

/// The secret in a file.
fn secret_in(path: &Path) -> Result<store_core::Secret, String> {
    let fail = |what: &dyn fmt::Display| format!("{}: {what}", path.display());
    let file = std::fs::File::open(path).map_err(|error| fail(&error))?;
    let mut text = String::new();
    // One byte more than the longest secret and its newline: a longer one is then refused by its limits.
    let limit = store_core::SECRET_BYTES_MAX as u64 + 3;
    std::io::Read::read_to_string(&mut std::io::Read::take(file, limit), &mut text)
        .map_err(|error| fail(&error))?;
    let text = text.strip_suffix('\n').unwrap_or(&text);
    let text = text.strip_suffix('\r').unwrap_or(text);
    match text.len() {
        0 => Err(fail(&"is empty: write the secret into it")),
        1..=store_core::SECRET_BYTES_MAX => Ok(text.to_owned().into()),
        _ => Err(fail(&format_args!("a secret has at most {} bytes", store_core::SECRET_BYTES_MAX))),
    }
}

/// The default name of a node: host name, process id and a random number. In containers the process id is
/// often 1, and several containers may share a host name.
fn process_name() -> String {
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let host = host.trim();
    let random = std::hash::BuildHasher::hash_one(&std::hash::RandomState::new(), 0u8) as u32;
    format!("{}-{}-{random:08x}", if host.is_empty() { "node" } else { host }, std::process::id())
}

/// The settings among environment variables, and the variables that only look like settings.
fn variables_of(
    variables: impl Iterator<Item = (String, String)>,
    renamed: &mut Vec<Renamed>,
    not_built: &mut BTreeSet<&'static str>,
) -> (Vec<Entry>, Vec<UnknownVariable>) {
    let (mut entries, mut unknown) = (Vec::new(), Vec::new());
    let of_file = renamed.len();
    for (name, text) in variables.filter(|(name, _)| name.starts_with("SNOWSKIN_")) {
        let wanted = |key: &&Key| key.variable == name || key.variable_short == Some(name.as_str());
        let own = keys::all().iter().find(wanted);
        let by_old_name = own.is_none();
        match own.or_else(|| keys::find_renamed_variable(&name)) {
            Some(key) => {
                if by_old_name {
                    renamed.push((name.clone(), key));
                }
                let readings = readings(key, &text, true);
                entries.push(Entry { key, at: Origin::Variable(name), readings, by_old_name });
            }
            None if keys::OTHER_VARIABLES.contains(&name.as_str()) => {}
            None => match (fabric_not_built(&name), keys::nearest_variable(&name)) {
                (Some(fabric), _) => _ = not_built.insert(fabric),
                (None, near @ Some(_)) => unknown.push((name, near)),
                (None, None) if keys::looks_like_setting(&name) => unknown.push((name, None)),
                (None, None) => {}
            },
        }
    }
    // The later entry of a setting wins, whatever the order of the environment is: the variable that follows
    // from the path, then the shorter one, then those of old names.
    let rank = |entry: &Entry| match &entry.at {
        Origin::Variable(name) if *name == entry.key.variable => 2,
        _ => u8::from(!entry.by_old_name),
    };
    entries.sort_by_cached_key(|entry| (entry.key.path.as_str(), rank(entry), entry.at.to_string()));
    renamed[of_file..].sort_by(|(a, _), (b, _)| a.cmp(b));
    (entries, unknown)
}

/// The fabric that this variable is a setting of, if this build lacks it.
fn fabric_not_built(variable: &str) -> Option<&'static str> {
    let path = variable.strip_prefix("SNOWSKIN_")?.to_lowercase().replace('_', ".");
    keys::fabric_not_built(&path)
}

/// The values that a text may mean for this key. Text from a shell has no quotes that distinguish a number
/// from a text.
fn readings(key: &Key, text: &str, from_shell: bool) -> Vec<Value> {
    let mut readings = Vec::new();
    if key.optional && text == "none" {
        readings.push(Value::Null);
    }
    readings.push(Value::from(text));
    if from_shell && let Some(value) = file::literal(text) {
        readings.push(value);
    }
    if key.is_size()
        && let Ok(size) = text.parse::<ByteSize>()
    {
        readings.push(Value::from(size.bytes()));
    }
    readings
}

/// Converts sizes with units within tables, such as those of tenants.
fn with_sizes(mut value: Value) -> Value {
    match &mut value {
        Value::Array(values) => values.iter_mut().for_each(|value| *value = with_sizes(value.take())),
        Value::Object(fields) => {
            for (name, value) in fields {
                if keys::is_size_name(name)
                    && let Some(size) = value.as_str().and_then(|text| text.parse::<ByteSize>().ok())
                {
                    *value = Value::from(size.bytes());
                }
            }
        }
        _ => {}
    }
    value
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Default => f.write_str("default"),
            Self::File { path, line: 0 } => write!(f, "{}", path.display()),
            Self::File { path, line } => write!(f, "{}:{line}", path.display()),
            Self::Variable(name) => f.write_str(name),
            Self::Flag(name) => f.write_str(name),
        }
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: ", self.at)?;
        if !self.key.is_empty() {
            write!(f, "{}: ", self.key)?;
        }
        f.write_str(&self.what)
    }
}

impl fmt::Display for Problems {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for problem in &self.0 {
            writeln!(f, "{problem}")?;
        }
        f.write_str("  hint: `snowskin config reference` lists every setting and what it may be")
    }
}

impl std::error::Error for Problems {}

#[cfg(test)]
mod tests;
