//! Settings: one typed struct, filled from its defaults, a TOML file, the environment and flags, each over the one before.
//!
//! ```text
//!   Settings::default() ──▶ file (--config, SNOWSKIN_CONFIG) ──▶ SNOWSKIN_* ──▶ flags ──▶ checked Settings
//!          │                                                                                 │
//!          └── keys: every leaf, with its documentation ──▶ flags, variables, reference      └── where each came from
//! ```
//!
//! A setting is a field of [`Settings`] or of a struct in it, and nothing else: its key in the file, its variable, its flag and its
//! row in `docs/reference/config.md` follow from the field's name, type, default and documentation. `FLAGS` in [`keys`] gives
//! a few of them shorter flags.

mod file;
mod flags;
pub(crate) mod keys;
pub(crate) mod reference;

use std::collections::BTreeMap;
use std::fmt;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::Value;

pub(crate) use flags::{FlagsOfClient, FlagsOfLog, FlagsOfMaster, FlagsOfNode, FlagsOfRpc, FlagsOfUp, Given};
use keys::Key;

use crate::size::ByteSize;

/// Everything that can be set. One file may configure all processes of a cluster; each reads its own sections.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct Settings {
    /// Messages of every command.
    pub(crate) log: LogSettings,
    /// What nodes and clients share.
    pub(crate) cluster: ClusterSettings,
    /// `snowskin master`.
    pub(crate) master: store_master::Config,
    /// `snowskin node`.
    pub(crate) node: NodeSettings,
    /// Clients: `put`, `get`, and what asks a master.
    pub(crate) client: store_client::ClientConfig,
}

/// What goes to stderr.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct LogSettings {
    /// `text` for people, `json` for collectors: one object a line.
    pub(crate) format: LogFormat,
    /// Which messages: a level, or `target=level` with commas between them, as `tracing` reads them. Empty: `RUST_LOG`, else what
    /// `--verbose` asks for.
    pub(crate) filter: String,
}

/// How messages are written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum LogFormat {
    #[default]
    Text,
    Json,
}

/// What every process of a cluster but the master needs to know.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct ClusterSettings {
    /// The master, as host:port or unix:/path/of/socket.
    pub(crate) master: store_client::Address,
    /// The tenant whose objects commands are about, where the master has tenants.
    pub(crate) tenant: String,
    /// The tenant's secret, if it has one. A variable or a file is a better place than a flag, which others on the machine see.
    pub(crate) tenant_secret: store_core::Secret,
    /// A file with it, instead.
    pub(crate) tenant_secret_file: Option<PathBuf>,
    /// The admin's secret, for who administers. The master has it from here, too, unless `master.store.admin_secret` says another.
    pub(crate) admin_secret: store_core::Secret,
    /// A file with it, instead.
    pub(crate) admin_secret_file: Option<PathBuf>,
    /// What all processes of a cluster share, so that no other can lend memory, or reach that of nodes: for the master, nodes, and what
    /// moves objects. Empty: whoever reaches their ports can.
    pub(crate) cluster_secret: store_core::Secret,
    /// A file with it, instead.
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
            master: store_client::Address::default(),
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

/// A node, as this program runs it.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct NodeSettings {
    /// Where `/health`, `/ready` and `/metrics` are served, ADDR:PORT; `none`: not at all.
    pub(crate) http_listen: Option<SocketAddr>,
    /// The path of a Unix socket for light clients on this machine, for this user alone, or `auto` for where they look by
    /// themselves; `none`: they are not served.
    pub(crate) local: Option<PathBuf>,
    /// Where the store is served over HTTP, without authentication, as `snowskin gateway` does; `none`: it is not.
    pub(crate) gateway: Option<SocketAddr>,
    #[serde(flatten)]
    pub(crate) node: store_client::NodeConfig,
}

/// Where a setting's value came from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Origin {
    /// Nobody said anything.
    Default,
    /// A line of the file.
    File {
        /// Which file.
        path: PathBuf,
        /// From 1; 0: the file as a whole.
        line: usize,
    },
    /// An environment variable.
    Variable(String),
    /// A flag.
    Flag(String),
}

/// Settings, and where each came from.
#[derive(Clone, Debug)]
pub(crate) struct Loaded {
    /// Checked.
    pub(crate) settings: Settings,
    /// The same by key.
    tree: Value,
    /// Keys that are not there have their default.
    origins: BTreeMap<&'static str, Origin>,
    /// Variables that look like settings and are none: a slip of the pen, or an orchestrator's.
    pub(crate) strange_variables: Vec<Strange>,
}

/// A variable that is no setting, and the one that it is probably meant to be.
pub(crate) type Strange = (String, Option<&'static str>);

/// What is wrong with one value, and where it stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Problem {
    at: Origin,
    key: String,
    what: String,
}

/// Everything that is wrong; never empty.
#[derive(Clone, Debug)]
pub(crate) struct Problems(pub(crate) Vec<Problem>);

/// A value that was given, before it is typed.
struct Entry {
    key: &'static Key,
    at: Origin,
    /// What it may mean, the likeliest first.
    readings: Vec<Value>,
}

impl Loaded {
    /// Reads all layers and checks `sections` for what types do not say.
    ///
    /// # Errors
    /// Everything that is wrong with the file, the variables and the flags, each with its place.
    pub(crate) fn read(
        file: Option<&Path>,
        variables: impl Iterator<Item = (String, String)>,
        flags: &[Given],
        sections: &[&str],
    ) -> Result<Self, Problems> {
        let mut problems = Vec::new();
        let mut entries = match file {
            Some(path) => file::entries(path, &mut problems),
            None => Vec::new(),
        };
        let (from_variables, strange_variables) = variables_of(variables);
        entries.extend(from_variables);
        entries.extend(flags.iter().map(|given| Entry {
            key: given.key,
            at: Origin::Flag(format!("--{}", given.key.flag)),
            readings: readings(given.key, &given.text, true),
        }));
        let mut loaded = Self {
            settings: Settings::default(),
            tree: serde_json::to_value(Settings::default()).unwrap_or_default(),
            origins: BTreeMap::new(),
            strange_variables,
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

    /// Where a key's value came from.
    pub(crate) fn origin(&self, key: &str) -> &Origin {
        self.origins.get(key).unwrap_or(&Origin::Default)
    }

    /// Whether anybody said anything.
    pub(crate) fn is_given(&self, key: &str) -> bool {
        self.origins.contains_key(key)
    }

    /// A key's value, for programs; secrets are masked.
    pub(crate) fn value(&self, key: &Key) -> Value {
        if key.is_secret() && self.is_given(&key.path) {
            return Value::from("***");
        }
        // As the structs have it, not as it was written: they leave out secrets within a value.
        let tree = serde_json::to_value(&self.settings).unwrap_or_default();
        tree.pointer(&key.pointer()).cloned().unwrap_or_default()
    }

    /// A key's value, for people; secrets are masked.
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

    /// Reads secrets that stand in files of their own: a trailing newline is none of theirs.
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

    /// Fills in what follows from other settings, or from this process.
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
            engine.cluster_secret = te_engine::Secret::new(cluster.cluster_secret.bytes());
        }
    }

    /// The first value of a section that its owner refuses.
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
            _ => None,
        }?;
        let key = format!("{section}.{field}");
        let value = keys::find(&key).map(|key| format!("{} ", self.shown(key))).unwrap_or_default();
        let at = self.origin(&key).clone();
        Some(Problem { at, key, what: format!("{value}is out of its limits: {what}") })
    }
}

/// The secret that a file holds.
fn secret_in(path: &Path) -> Result<store_core::Secret, String> {
    let fail = |what: &dyn fmt::Display| format!("{}: {what}", path.display());
    let file = std::fs::File::open(path).map_err(|error| fail(&error))?;
    let mut text = String::new();
    // One more than a secret may have: what is longer is refused by its limits.
    let limit = store_core::SECRET_BYTES_MAX as u64 + 3;
    std::io::Read::read_to_string(&mut std::io::Read::take(file, limit), &mut text)
        .map_err(|error| fail(&error))?;
    let text = text.strip_suffix('\n').unwrap_or(&text);
    let text = text.strip_suffix('\r').unwrap_or(text);
    match text.len() {
        0 => Err(fail(&"is empty: write the secret into it")),
        1..=store_core::SECRET_BYTES_MAX => Ok(text.to_owned().into()),
        _ => Err(fail(&format_args!("a secret has {} bytes at most", store_core::SECRET_BYTES_MAX))),
    }
}

/// For a node that was given no name: host, process id and a random number. In containers the process id is often 1, and the
/// host's name may be that of another.
fn process_name() -> String {
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let host = host.trim();
    let random = std::hash::BuildHasher::hash_one(&std::hash::RandomState::new(), 0u8) as u32;
    format!("{}-{}-{random:08x}", if host.is_empty() { "node" } else { host }, std::process::id())
}

/// The settings among environment variables, and those that only look like some.
fn variables_of(variables: impl Iterator<Item = (String, String)>) -> (Vec<Entry>, Vec<Strange>) {
    let (mut entries, mut strange) = (Vec::new(), Vec::new());
    for (name, text) in variables.filter(|(name, _)| name.starts_with("SNOWSKIN_")) {
        let wanted = |key: &&Key| key.variable == name || key.variable_short == Some(name.as_str());
        match keys::all().iter().find(wanted) {
            Some(key) => {
                let readings = readings(key, &text, true);
                entries.push(Entry { key, at: Origin::Variable(name), readings });
            }
            None if keys::OTHER_VARIABLES.contains(&name.as_str()) => {}
            None => match keys::nearest_variable(&name) {
                near @ Some(_) => strange.push((name, near)),
                None if keys::looks_like_one(&name) => strange.push((name, None)),
                None => {}
            },
        }
    }
    entries.sort_by_key(|entry| entry.key.path.as_str());
    (entries, strange)
}

/// What a text may mean for this key. A text from a shell has no quotes to tell a number from a text.
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

/// Sizes within tables, such as those of tenants, may be written as everywhere.
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
