//! Makes flags from keys, and settings from flags: a command that flattens one of these types gets its
//! settings, read and checked.

use std::marker::PhantomData;
use std::path::PathBuf;

use clap::error::ErrorKind;
use clap::{Arg, ArgMatches, Command, FromArgMatches};

use super::keys::{self, Key};
use super::{Loaded, Problems, Settings};

/// A flag on the command line.
#[derive(Clone, Debug)]
pub(crate) struct Given {
    pub(crate) key: &'static Key,
    pub(crate) text: String,
}

/// Which settings a command has.
pub(crate) trait Scope {
    /// Sections whose settings are flags of the command, and which are checked.
    const SECTIONS: &'static [&'static str];
    /// Whether `--help` lists the flags that `-h` leaves out.
    const HELPS_WITH_ALL: bool;
    /// Settings of other sections that are flags of the command as well.
    const MORE: &'static [&'static str];
    /// Whether every command has these flags.
    const GLOBAL: bool = false;
}

/// The settings of a command: file, environment, flags.
#[derive(Clone, Debug)]
pub(crate) struct Flags<S> {
    pub(crate) loaded: Loaded,
    file: Option<PathBuf>,
    given: Vec<Given>,
    scope: PhantomData<S>,
}

macro_rules! scopes {
    ($($(#[$doc:meta])* $name:ident $flags:ident { $sections:expr, $more:expr, $helps:expr, $global:expr })*) => {$(
        #[derive(Clone, Copy, Debug)]
        pub(crate) enum $name {}
        impl Scope for $name {
            const SECTIONS: &'static [&'static str] = &$sections;
            const MORE: &'static [&'static str] = &$more;
            const HELPS_WITH_ALL: bool = $helps;
            const GLOBAL: bool = $global;
        }
        $(#[$doc])*
        pub(crate) type $flags = Flags<$name>;
    )*};
}

/// Secrets of the `[cluster]` section that the master uses too.
const SECRETS_OF_MASTER: [&str; 4] = [
    "cluster.admin_secret",
    "cluster.admin_secret_file",
    "cluster.cluster_secret",
    "cluster.cluster_secret_file",
];

/// Secrets of the `[cluster]` section that the Conductor uses too.
const SECRETS_OF_CONDUCTOR: [&str; 2] = ["cluster.admin_secret", "cluster.admin_secret_file"];

scopes! {
    /// Flags of every command.
    OfLog FlagsOfLog { ["log"], [], true, true }
    /// `snowskin master`.
    OfMaster FlagsOfMaster { ["master"], SECRETS_OF_MASTER, true, false }
    /// `snowskin up`, which defines its own flags: these settings come from the file and variables only.
    OfUp FlagsOfUp { [], SECRETS_OF_MASTER, false, false }
    /// `snowskin node`.
    OfNode FlagsOfNode { ["node", "cluster"], [], true, false }
    /// `snowskin conductor serve`.
    OfConductor FlagsOfConductor { ["conductor"], SECRETS_OF_CONDUCTOR, true, false }
    /// Commands that move objects.
    OfClient FlagsOfClient { ["client", "cluster"], [], false, false }
    /// Commands that only send requests to the master.
    OfRpc FlagsOfRpc { ["cluster"], [], false, false }
}

impl<S> Flags<S> {
    /// All settings.
    pub(crate) fn settings(&self) -> &Settings {
        &self.loaded.settings
    }
}

impl<S: Scope> Flags<S> {
    /// The settings as they are now, after a change of the file.
    ///
    /// # Errors
    /// Everything that is wrong with them.
    pub(crate) fn read_again(&self) -> Result<Loaded, Problems> {
        Loaded::read(self.file.as_deref(), variables(), &self.given, S::SECTIONS)
    }
}

/// The environment, as far as it is text.
fn variables() -> impl Iterator<Item = (String, String)> {
    std::env::vars_os().filter_map(|(name, text)| Some((name.into_string().ok()?, text.into_string().ok()?)))
}

fn keys_of<S: Scope>() -> impl Iterator<Item = &'static Key> {
    let more = |key: &Key| S::MORE.contains(&key.path.as_str());
    keys::all().iter().filter(move |key| S::SECTIONS.contains(&key.section()) || more(key))
}

impl<S: Scope> clap::Args for Flags<S> {
    fn augment_args(mut command: Command) -> Command {
        for key in keys_of::<S>() {
            command = command.arg(arg::<S>(key));
        }
        command
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl<S: Scope> FromArgMatches for Flags<S> {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let given = |key: &'static Key| {
            let text = matches.try_get_one::<String>(&key.path).ok().flatten()?;
            Some(Given { key, text: text.clone() })
        };
        let flags: Vec<Given> = keys_of::<S>().filter_map(given).collect();
        let file = matches.try_get_one::<PathBuf>("config").ok().flatten();
        match Loaded::read(file.map(PathBuf::as_path), variables(), &flags, S::SECTIONS) {
            Ok(loaded) => Ok(Self { loaded, file: file.cloned(), given: flags, scope: PhantomData }),
            Err(problems) => Err(clap::Error::raw(ErrorKind::ValueValidation, format!("{problems}"))),
        }
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

fn arg<S: Scope>(key: &'static Key) -> Arg {
    let rare = !key.is_common();
    let mut arg = Arg::new(key.path.as_str())
        .long(key.flag.as_str())
        .value_name(value_name(key))
        .help(help(key))
        .global(S::GLOBAL)
        .allow_hyphen_values(true)
        .hide_short_help(rare)
        .hide(rare && !S::HELPS_WITH_ALL);
    if key.rust_type == "bool" && S::HELPS_WITH_ALL {
        // A flag without a value means true. These commands have no positional argument that the flag could
        // take for its value.
        arg = arg.num_args(0..=1).allow_hyphen_values(false).default_missing_value("true");
    }
    if S::GLOBAL {
        arg = arg.display_order(902);
    } else if rare {
        arg = arg.display_order(500);
    }
    arg.aliases(key.flags_hidden.iter().map(String::as_str))
}

fn help(key: &Key) -> String {
    let default = key.default_shown();
    let default = match default.trim_matches('"') {
        "" => String::new(),
        default => format!(" [default: {default}]"),
    };
    let choices = match (key.choices.is_empty(), key.rust_type.ends_with("Fabrics")) {
        (_, true) => format!(" [{}]", key.kind()),
        (true, _) => String::new(),
        (false, _) => format!(" [{}]", key.choices.join(", ")),
    };
    format!("{}{choices}{default}", key.doc)
}

fn value_name(key: &Key) -> &'static str {
    let inner = key.rust_type.trim_start_matches("Option<").trim_end_matches('>');
    match inner.rsplit("::").next().unwrap_or(inner) {
        _ if key.is_size() => "SIZE",
        _ if key.path.contains("_ms") => "MS",
        _ if key.path.ends_with("_us") => "µs",
        "SocketAddr" => "ADDR:PORT",
        "Masters" => "HOST:PORT[,…]",
        "MetadataSource" => "URL",
        "PathBuf" => "PATH",
        "DiskList" => "PATH[:SIZE],…",
        "DiskExportList" => "PATH=nvme://…,…",
        "NamespacePlace" => "nvme://…",
        "Nguid" => "HEX",
        "bool" => "BOOL",
        "f64" => "SHARE",
        "u8" | "u16" | "u32" | "u64" => "N",
        _ => "TEXT",
    }
}
