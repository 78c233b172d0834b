//! Every setting with its key, as the structs declare it: name, type, default, documentation.
//!
//! The documentation is read from the sources, which are compiled in, so a field has one description only.
//! The old name of a renamed field is read from its `#[serde(alias = "…")]`.

use std::collections::HashMap;
use std::sync::OnceLock;

use serde_json::Value;

use super::Settings;
use crate::size::ByteSize;

/// The sources of the structs: a crate's name as it is written in types, and the file. A struct that is
/// nested in one of these and lives in another file needs a line here; a test fails when it is missing.
const SOURCES: [(&str, &str); 13] = [
    ("cli", include_str!("mod.rs")),
    (
        "conductor",
        concat!(
            include_str!("../../../conductor/src/config.rs"),
            include_str!("../../../conductor/src/config/gateway.rs"),
            include_str!("../../../conductor/src/config/kubernetes.rs"),
            include_str!("../../../conductor/src/config/store.rs")
        ),
    ),
    (
        "store_master",
        concat!(
            include_str!("../../../store-master/src/config.rs"),
            include_str!("../../../store-master/src/kv_events/mod.rs")
        ),
    ),
    (
        "store_core",
        concat!(
            include_str!("../../../store-core/src/config.rs"),
            include_str!("../../../store-core/src/read_rates.rs"),
            include_str!("../../../store-core/src/tasks.rs"),
            include_str!("../../../store-core/src/tenant.rs")
        ),
    ),
    (
        "store_client",
        concat!(
            include_str!("../../../store-client/src/config.rs"),
            include_str!("../../../store-client/src/config/extents.rs"),
            include_str!("../../../store-client/src/config/storage.rs"),
            include_str!("../../../store-client/src/rpc.rs"),
            include_str!("../../../store-client/src/stage/config.rs")
        ),
    ),
    ("te_engine", include_str!("../../../te-engine/src/config.rs")),
    ("te_cxl", include_str!("../../../te-cxl/src/config.rs")),
    ("te_gpu", include_str!("../../../te-gpu/src/config.rs")),
    ("te_host", include_str!("../../../te-host/src/shm/mod.rs")),
    ("te_nvlink", include_str!("../../../te-nvlink/src/config.rs")),
    ("te_nvmeof", include_str!("../../../te-nvmeof/src/config.rs")),
    ("te_rdma", include_str!("../../../te-rdma/src/config.rs")),
    ("te_tcp", include_str!("../../../te-tcp/src/config.rs")),
];

/// Short flags for settings with long names. `-h` lists these; `--help` lists all.
const FLAGS: [(&str, &str); 46] = [
    ("cluster.master", "master"),
    ("cluster.tenant", "tenant"),
    ("cluster.tenant_secret", "tenant-secret"),
    ("cluster.tenant_secret_file", "tenant-secret-file"),
    ("cluster.admin_secret", "admin-secret"),
    ("cluster.admin_secret_file", "admin-secret-file"),
    ("cluster.cluster_secret", "cluster-secret"),
    ("cluster.cluster_secret_file", "cluster-secret-file"),
    ("log.format", "log-format"),
    ("log.filter", "log"),
    ("master.rpc_listen", "listen"),
    ("master.rpc_unix", "unix"),
    ("master.http_listen", "http"),
    ("master.journal", "journal"),
    ("master.ha.arbiter", "ha"),
    ("master.ha.cluster_id", "cluster-id"),
    ("master.ha.member_id", "member-id"),
    ("master.ha.advertise", "advertise"),
    ("master.store.lease_ttl_ms", "lease-ms"),
    ("master.store.eviction_high_watermark", "evict-above"),
    ("master.store.eviction", "eviction"),
    ("master.store.allocator", "allocator"),
    ("master.store.allocation_strategy", "allocation-strategy"),
    ("master.store.slow_start_ms", "slow-start-ms"),
    ("master.store.soft_pin_ttl_ms", "soft-pin-ttl-ms"),
    ("master.store.node_ttl_ms", "node-ttl-ms"),
    ("node.http_listen", "http"),
    ("node.capacity_bytes", "memory"),
    ("node.name", "name"),
    ("node.engine.listen", "listen"),
    ("node.engine.advertise_host", "advertise"),
    ("node.engine.fabrics", "fabric"),
    ("node.engine.metadata.source", "metadata"),
    ("node.engine.metadata.name", "segment"),
    ("node.local", "local"),
    ("node.gateway", "gateway"),
    ("node.takeover", "takeover"),
    ("node.disks", "disk"),
    ("node.shared", "shared"),
    ("client.engine.fabrics", "fabric"),
    ("conductor.listen", "listen"),
    ("conductor.snapshot", "snapshot"),
    ("conductor.peer", "peer"),
    ("conductor.schedule.policy", "policy"),
    ("conductor.schedule.ttft_slo_ms", "ttft-slo-ms"),
    ("conductor.schedule.tbt_slo_ms", "tbt-slo-ms"),
];

/// Additional variables, older or shorter than the name that follows from the path.
const VARIABLES: [(&str, &str); 10] = [
    ("cluster.master", "SNOWSKIN_MASTER"),
    ("cluster.tenant", "SNOWSKIN_TENANT"),
    ("cluster.tenant_secret", "SNOWSKIN_TENANT_SECRET"),
    ("cluster.tenant_secret_file", "SNOWSKIN_TENANT_SECRET_FILE"),
    ("cluster.admin_secret", "SNOWSKIN_ADMIN_SECRET"),
    ("cluster.admin_secret_file", "SNOWSKIN_ADMIN_SECRET_FILE"),
    ("cluster.cluster_secret", "SNOWSKIN_CLUSTER_SECRET"),
    ("cluster.cluster_secret_file", "SNOWSKIN_CLUSTER_SECRET_FILE"),
    ("log.filter", "SNOWSKIN_LOG"),
    ("node.engine.metadata.source", "SNOWSKIN_METADATA"),
];

/// Environment variables of single commands, which are not settings. A test compares this list with the
/// commands.
pub(crate) const OTHER_VARIABLES: [&str; 9] = [
    "SNOWSKIN_BENCH_MASTER",
    "SNOWSKIN_CONFIG",
    "SNOWSKIN_EVICTION",
    "SNOWSKIN_GATEWAY_LISTEN",
    "SNOWSKIN_HEALTH",
    "SNOWSKIN_LOCAL",
    "SNOWSKIN_QUIET",
    "SNOWSKIN_TRACE",
    "SNOWSKIN_WAIT",
];

/// One setting.
#[derive(Clone, Debug)]
pub(crate) struct Key {
    /// `master.store.lease_ttl_ms`.
    pub(crate) path: String,
    /// The type as the source has it.
    pub(crate) rust_type: String,
    /// Whether the value may be `none`.
    pub(crate) optional: bool,
    /// As JSON; null for `none`.
    pub(crate) default: Value,
    /// The documentation without the sentence on the default.
    pub(crate) doc: String,
    /// The flag without its leading dashes.
    pub(crate) flag: String,
    /// Flags that are accepted but not listed: the one that follows from the path, where `flag` is shorter,
    /// and those from before the setting was renamed.
    pub(crate) flags_hidden: Vec<String>,
    /// `SNOWSKIN_MASTER_STORE_LEASE_TTL_MS`.
    pub(crate) variable: String,
    /// A shorter variable, if there is one.
    pub(crate) variable_short: Option<&'static str>,
    /// Paths that the setting had before it was renamed; accepted for one release.
    pub(crate) renamed_from: Vec<String>,
    /// The values of an enumeration.
    pub(crate) choices: Vec<String>,
    /// The fields of a table, or of each table in a list of tables.
    pub(crate) parts: Vec<String>,
}

/// All keys, in the order of the structs.
pub(crate) fn all() -> &'static [Key] {
    static KEYS: OnceLock<Vec<Key>> = OnceLock::new();
    KEYS.get_or_init(|| {
        let sources = Sources::parse();
        let defaults = serde_json::to_value(Settings::default()).unwrap_or_default();
        let mut keys = Vec::new();
        sources.walk(("cli", "Settings"), &defaults, &[String::new()], &mut keys);
        for key in &mut keys {
            key.choices = choices(&defaults, key);
        }
        keys
    })
}

/// The key with this path.
pub(crate) fn find(path: &str) -> Option<&'static Key> {
    all().iter().find(|key| key.path == path)
}

/// The key that had this path before it was renamed.
pub(crate) fn find_renamed(path: &str) -> Option<&'static Key> {
    all().iter().find(|key| key.renamed_from.iter().any(|old| old == path))
}

/// The key that had this variable before it was renamed.
pub(crate) fn find_renamed_variable(variable: &str) -> Option<&'static Key> {
    all().iter().find(|key| key.renamed_from.iter().any(|old| variable_of(old) == variable))
}

/// The fabric that this path has the settings of, if this build lacks it: they are ignored, so that one file
/// serves builds with and without a fabric.
pub(crate) fn fabric_not_built(path: &str) -> Option<&'static str> {
    let (section, rest) = path.split_once(".engine.")?;
    let named = |entry: &&te_engine::FabricEntry<'_>| rest.split('.').next() == Some(entry.name);
    let fabric = te_engine::fabrics().iter().find(named)?;
    (!fabric.is_built() && is_section(&format!("{section}.engine."))).then_some(fabric.name)
}

/// Whether settings have, or had, paths that begin with this.
pub(crate) fn is_section(prefix: &str) -> bool {
    let begins = |path: &String| path.starts_with(prefix);
    all().iter().any(|key| begins(&key.path) || key.renamed_from.iter().any(begins))
}

/// The known path with the smallest spelling distance to `path`.
pub(crate) fn nearest(path: &str) -> Option<&'static str> {
    let close = all().iter().map(|key| (distance(path, &key.path), key.path.as_str()));
    let tail = path.rsplit('.').next().unwrap_or(path);
    let by_name =
        all().iter().filter(|key| key.path.ends_with(&format!(".{tail}"))).map(|key| (1, key.path.as_str()));
    by_name
        .chain(close)
        .min_by_key(|(far, _)| *far)
        .filter(|(far, _)| *far * 3 <= path.len())
        .map(|(_, path)| path)
}

/// Whether a variable has a name like a setting of this program.
pub(crate) fn looks_like_setting(variable: &str) -> bool {
    let sections = ["LOG_", "CLUSTER_", "MASTER_", "NODE_", "CLIENT_", "CONDUCTOR_"];
    variable
        .strip_prefix("SNOWSKIN_")
        .is_some_and(|rest| sections.iter().any(|section| rest.starts_with(section)))
}

/// The known variable that `variable`, which is unknown, is probably meant to be.
pub(crate) fn nearest_variable(variable: &str) -> Option<&'static str> {
    let settings = all().iter().flat_map(|key| key.variable_short.into_iter().chain([key.variable.as_str()]));
    let close = settings.chain(OTHER_VARIABLES).map(|known| (distance(variable, known), known));
    // At most two letters may differ, and at most a third of what follows the common prefix.
    let distance_max = (variable.len().saturating_sub("SNOWSKIN_".len()) / 3).min(2);
    close.min_by_key(|(far, _)| *far).filter(|(far, _)| *far <= distance_max).map(|(_, known)| known)
}

/// Whether a field of this name holds bytes, which may be written as `64MiB`.
pub(crate) fn is_size_name(name: &str) -> bool {
    name == "bytes" || name.ends_with("_bytes") || name.contains("_bytes_")
}

/// A value for people, in TOML syntax.
pub(crate) fn shown(value: &Value) -> String {
    match value {
        Value::Null => "none".to_owned(),
        value => value.to_string(),
    }
}

impl Key {
    /// The path for `serde_json::Value::pointer`.
    pub(crate) fn pointer(&self) -> String {
        format!("/{}", self.path.replace('.', "/"))
    }

    /// The section of the file that holds the setting.
    pub(crate) fn section(&self) -> &str {
        self.path.split('.').next().unwrap_or_default()
    }

    /// Whether `-h` lists it.
    pub(crate) fn is_common(&self) -> bool {
        FLAGS.iter().any(|(path, _)| *path == self.path)
    }

    /// Sizes may be written as `64MiB`.
    pub(crate) fn is_size(&self) -> bool {
        is_size_name(self.path.rsplit('.').next().unwrap_or_default())
    }

    /// The default, for people.
    pub(crate) fn default_shown(&self) -> String {
        match self.default.as_u64() {
            Some(bytes) if self.is_size() => ByteSize(bytes).to_string(),
            _ => shown(&self.default),
        }
    }

    /// Whether the value is never shown.
    pub(crate) fn is_secret(&self) -> bool {
        // A connection string may have a password.
        let words = ["secret", "token", "password", "hash_seed", "ha.publish"];
        let named = words.iter().any(|word| self.path.contains(word));
        // A path to a secret is not a secret.
        (named || self.rust_type == "Secret") && !self.rust_type.contains("PathBuf")
    }

    /// The values that the setting accepts, for people.
    pub(crate) fn kind(&self) -> String {
        let inner = self.rust_type.trim_start_matches("Option<").trim_end_matches('>');
        let kind = match inner.rsplit("::").next().unwrap_or(inner) {
            "bool" => "true or false".to_owned(),
            "u8" | "u16" | "u32" | "u64" | "usize" if self.is_size() => {
                "a number of bytes, or a size such as \"64KiB\"".to_owned()
            }
            "u8" | "u16" | "u32" | "u64" | "usize" => "a whole number".to_owned(),
            "f64" | "f32" => "a number".to_owned(),
            "String" | "Secret" => "a text".to_owned(),
            "PathBuf" => "a path".to_owned(),
            "SocketAddr" => "ADDR:PORT".to_owned(),
            "Masters" => {
                "HOST:PORT[,HOST:PORT], unix:PATH, or etcd://HOST:PORT[,HOST:PORT]/CLUSTER".to_owned()
            }
            "Fabrics" => {
                let names: Vec<&str> = te_engine::fabrics().iter().map(|entry| entry.name).collect();
                format!("auto, or some of {}", names.join(","))
            }
            "MetadataSource" => "p2p, http://HOST:PORT/metadata, and in builds with these features \
                                 redis://[USER:PASSWORD@]HOST:PORT[/DB] and etcd://HOST:PORT[,HOST:PORT]"
                .to_owned(),
            "TopologySource" => "auto, off, or {file = \"PATH\"}".to_owned(),
            "DiskList" => "PATH[:SIZE], several separated by commas".to_owned(),
            "DiskExportList" => {
                "PATH=nvme://ADDR:PORT/NQN/NSID[+OFFSET], several separated by commas".to_owned()
            }
            "NamespacePlace" => "nvme://ADDR:PORT/NQN/NSID[+OFFSET]".to_owned(),
            "Nguid" => "32 hexadecimal digits".to_owned(),
            "Vec<String" | "Vec<String>" => "a list of texts".to_owned(),
            "Vec<PathBuf" | "Vec<PathBuf>" => "a list of paths".to_owned(),
            _ if !self.choices.is_empty() => self.choices.join(", "),
            _ if !self.parts.is_empty() => format!("a table with {}", self.parts.join(", ")),
            other => other.to_owned(),
        };
        let kind = match self.rust_type.starts_with("Vec<") && !self.parts.is_empty() {
            true => kind.replacen("a table", "a list of tables", 1),
            false => kind,
        };
        if self.optional { format!("{kind}, or none") } else { kind }
    }
}

/// A field of a struct, as its source declares it.
#[derive(Debug)]
struct Field {
    name: String,
    rust_type: String,
    doc: String,
    flattened: bool,
    /// Old names, from `#[serde(alias = "…")]`.
    aliases: Vec<String>,
}

/// Fields of each struct, by crate and struct name.
struct Sources(HashMap<(&'static str, String), Vec<Field>>);

impl Sources {
    fn parse() -> Self {
        let mut structs = HashMap::new();
        for (krate, text) in SOURCES {
            let mut lines = text.lines();
            while let Some(line) = lines.next() {
                let named =
                    ["pub struct ", "pub(crate) struct "].iter().find_map(|start| line.strip_prefix(start));
                if let Some(name) = named.and_then(|rest| rest.strip_suffix(" {")) {
                    structs.insert((krate, name.to_owned()), fields(&mut lines));
                }
            }
        }
        Self(structs)
    }

    /// Adds a key for every leaf of `value`, which is of the named struct. `prefixes` are the path of the
    /// struct, followed by the paths that it had before it was renamed.
    fn walk(
        &self,
        (krate, name): (&'static str, &str),
        value: &Value,
        prefixes: &[String],
        keys: &mut Vec<Key>,
    ) {
        for field in self.0.get(&(krate, name.to_owned())).map_or(&[][..], Vec::as_slice) {
            let nested = self.resolve(krate, &field.rust_type);
            if field.flattened {
                if let Some(nested) = nested {
                    self.walk(nested, value, prefixes, keys);
                }
                continue;
            }
            // Fields that serde skips are not settings.
            let Some(value) = value.get(&field.name) else { continue };
            let names = || std::iter::once(&field.name).chain(&field.aliases);
            let under = |prefix: &String| names().map(|name| format!("{prefix}{name}")).collect::<Vec<_>>();
            let mut paths: Vec<String> = prefixes.iter().flat_map(under).collect();
            match nested.filter(|_| value.is_object()) {
                Some(nested) => {
                    paths.iter_mut().for_each(|path| path.push('.'));
                    self.walk(nested, value, &paths, keys);
                }
                None => {
                    let inner = field.rust_type.trim_start_matches("Option<").trim_start_matches("Vec<");
                    let parts = self.resolve(krate, inner.trim_end_matches('>'));
                    let parts = parts.and_then(|(krate, name)| self.0.get(&(krate, name.to_owned())));
                    let parts = parts.into_iter().flatten().map(|part| part.name.clone()).collect();
                    keys.push(Key { parts, ..key(paths, field, value) });
                }
            }
        }
    }

    /// The struct that a type names: `te_engine::Config`, or one of the same crate.
    fn resolve(&self, krate: &'static str, rust_type: &str) -> Option<(&'static str, &str)> {
        let (from, name) = match rust_type.rsplit_once("::") {
            Some((path, name)) => (path.split("::").next().unwrap_or_default(), name),
            None => (krate, rust_type),
        };
        self.0.keys().find(|(k, n)| *k == from && n == name).map(|(k, n)| (*k, n.as_str()))
    }
}

/// Reads the fields up to the end of the struct.
fn fields<'a>(lines: &mut impl Iterator<Item = &'a str>) -> Vec<Field> {
    let (mut fields, mut doc, mut flattened) = (Vec::new(), String::new(), false);
    let mut aliases = Vec::new();
    for line in lines.take_while(|line| *line != "}") {
        let line = line.trim();
        if let Some(text) = line.strip_prefix("///") {
            doc.push_str(text);
        } else if line.starts_with("#[") {
            flattened |= line.contains("flatten");
            let names = line.split("alias = \"").skip(1).filter_map(|rest| rest.split('"').next());
            aliases.extend(names.map(str::to_owned));
        } else if let Some((name, rust_type)) = line.strip_suffix(',').and_then(|line| line.split_once(": "))
        {
            let name = name.rsplit(' ').next().unwrap_or(name).to_owned();
            let doc = readable(&std::mem::take(&mut doc));
            let aliases = std::mem::take(&mut aliases);
            fields.push(Field { name, rust_type: rust_type.to_owned(), doc, flattened, aliases });
            flattened = false;
        }
    }
    fields
}

/// The flag that follows from a path.
fn flag_of(path: &str) -> String {
    let (section, rest) = path.split_once('.').unwrap_or(("", path));
    if section == "log" { path } else { rest }.replace(['.', '_'], "-")
}

/// The variable that follows from a path.
fn variable_of(path: &str) -> String {
    format!("SNOWSKIN_{}", path.replace('.', "_").to_uppercase())
}

/// The key with these paths: its own, then the old ones.
fn key(mut paths: Vec<String>, field: &Field, default: &Value) -> Key {
    let path = paths.remove(0);
    let by_rule = flag_of(&path);
    let short = FLAGS.iter().find(|(key, _)| *key == path).map(|(_, flag)| (*flag).to_owned());
    let flag = short.unwrap_or_else(|| by_rule.clone());
    let flags_hidden = std::iter::once(by_rule).chain(paths.iter().map(|old| flag_of(old)));
    let flags_hidden = flags_hidden.filter(|hidden| *hidden != flag).collect();
    Key {
        rust_type: field.rust_type.clone(),
        optional: field.rust_type.starts_with("Option<"),
        default: default.clone(),
        doc: field.doc.clone(),
        flag,
        flags_hidden,
        variable: variable_of(&path),
        variable_short: VARIABLES.iter().find(|(key, _)| *key == path).map(|(_, name)| *name),
        renamed_from: paths,
        choices: Vec::new(),
        parts: Vec::new(),
        path,
    }
}

/// Documentation as plain text: without links, with neighbouring fields by name, and without the sentence on
/// the default, which the reference shows in its own column.
fn readable(doc: &str) -> String {
    let mut text = String::new();
    let mut rest = doc.trim();
    while let Some(open) = rest.find('[') {
        let Some(close) = rest[open..].find(']').map(|at| open + at) else { break };
        text.push_str(&rest[..open]);
        text.push_str(&rest[open + 1..close]);
        rest = &rest[close + 1..];
        if rest.starts_with('(')
            && let Some(end) = rest.find(')')
        {
            rest = &rest[end + 1..];
        }
    }
    text.push_str(rest);
    let text = text.replace("Self::", "");
    match text.rfind("Default ") {
        Some(at) if text[at..].trim_end_matches('.').find(". ").is_none() => text[..at].trim_end().to_owned(),
        _ => text,
    }
}

/// The values that serde lists when it refuses another.
fn choices(defaults: &Value, key: &Key) -> Vec<String> {
    let mut tree = defaults.clone();
    let Some(leaf) = tree.pointer_mut(&key.pointer()) else { return Vec::new() };
    *leaf = Value::from("\u{1}");
    let Err(error) = serde_json::from_value::<Settings>(tree) else { return Vec::new() };
    let error = error.to_string();
    match error.split_once("unknown variant").and_then(|(_, rest)| rest.split_once("expected ")) {
        Some((_, expected)) => expected.split('`').skip(1).step_by(2).map(str::to_owned).collect(),
        None => Vec::new(),
    }
}

/// Levenshtein distance: letters to change, add or leave out.
fn distance(a: &str, b: &str) -> usize {
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, from) in a.bytes().enumerate() {
        let mut diagonal = std::mem::replace(&mut row[0], i + 1);
        for (j, to) in b.bytes().enumerate() {
            let changed = diagonal + usize::from(from != to);
            diagonal = row[j + 1];
            row[j + 1] = changed.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_old_names_of_a_renamed_setting_and_of_its_section_are_read_from_its_aliases() {
        let source = "    /// New.\n    #[serde(alias = \"old_max\", alias = \"older_max\")]\n    pub \
            new_max: u32,\n\
                      \n    /// Other.\n    pub other: u32,\n}\n";
        let parsed = fields(&mut source.lines());
        let names: Vec<_> = parsed.iter().map(|field| (field.name.as_str(), field.aliases.len())).collect();
        assert_eq!(names, [("new_max", 2), ("other", 0)]);

        let sources = Sources(HashMap::from([(("cli", "Part".to_owned()), parsed)]));
        let value = serde_json::json!({"new_max": 1, "other": 2});
        let mut keys = Vec::new();
        let prefixes = ["node.part.".to_owned(), "node.piece.".to_owned()];
        sources.walk(("cli", "Part"), &value, &prefixes, &mut keys);
        assert_eq!(keys[0].path, "node.part.new_max");
        assert_eq!(keys[0].renamed_from.len(), 5, "{:?}", keys[0].renamed_from);
        assert!(keys[0].flags_hidden.contains(&"part-old-max".to_owned()));
        assert!(keys[0].flags_hidden.contains(&"piece-new-max".to_owned()));
        assert_eq!(keys[1].renamed_from, ["node.piece.other"]);
    }

    #[test]
    fn no_old_name_is_the_name_of_another_setting() {
        let names = |key: &Key| [key.path.clone(), key.variable.clone()];
        let known: Vec<String> = all().iter().flat_map(names).collect();
        for old in all().iter().flat_map(|key| &key.renamed_from) {
            assert!(!known.contains(old) && !known.contains(&variable_of(old)), "{old}");
        }
    }
}
