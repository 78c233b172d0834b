//! Flags in the forms of gflags: `--name=value`, `--name value`, `-name=value`, `--name` and `--noname` for
//! switches. Dashes within a name are underscores. The last value of a name counts.

/// A flag that a command of Mooncake has.
#[derive(Clone, Copy, Debug)]
pub(super) struct Flag {
    pub(super) name: &'static str,
    /// It is on or off, and takes the next argument only if that is a value.
    is_switch: bool,
    here: Here,
}

/// What a flag means to this program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Here {
    /// It is translated.
    Used,
    /// It chooses how something is done that is done in another way here, or belongs to another flag: nothing
    /// to say.
    Moot,
    /// It asks for something that is lacking, unless it has this value.
    Lacks(&'static str),
    /// What it asks for is chosen elsewhere here: the words say where. Unless it has this value.
    Elsewhere(&'static str, &'static str),
}

impl Flag {
    /// A flag that is translated.
    pub(super) const fn used(name: &'static str) -> Self {
        Self { name, is_switch: false, here: Here::Used }
    }

    /// A switch that is translated.
    pub(super) const fn switch(name: &'static str) -> Self {
        Self { name, is_switch: true, here: Here::Used }
    }

    pub(super) const fn moot(name: &'static str) -> Self {
        Self { name, is_switch: false, here: Here::Moot }
    }

    pub(super) const fn moot_switch(name: &'static str) -> Self {
        Self { name, is_switch: true, here: Here::Moot }
    }

    /// A flag for something that is lacking, unless its value is empty.
    pub(super) const fn lacking(name: &'static str) -> Self {
        Self { name, is_switch: false, here: Here::Lacks("") }
    }

    /// A switch for something that is lacking, unless it is off.
    pub(super) const fn lacking_switch(name: &'static str) -> Self {
        Self { name, is_switch: true, here: Here::Lacks("false") }
    }

    /// A flag for something that is chosen elsewhere, unless its value is empty.
    pub(super) const fn elsewhere(name: &'static str, how: &'static str) -> Self {
        Self { name, is_switch: false, here: Here::Elsewhere("", how) }
    }

    /// A switch for something that is chosen elsewhere, unless it is off.
    pub(super) const fn elsewhere_switch(name: &'static str, how: &'static str) -> Self {
        Self { name, is_switch: true, here: Here::Elsewhere("false", how) }
    }

    pub(super) fn is_used(&self) -> bool {
        self.here == Here::Used
    }
}

/// Flags of the logging library of all of Mooncake's programs.
static LOGGING: [Flag; 16] = [
    Flag::used("v"),
    Flag::moot("minloglevel"),
    Flag::moot_switch("logtostderr"),
    Flag::moot_switch("alsologtostderr"),
    Flag::moot_switch("colorlogtostderr"),
    Flag::moot("stderrthreshold"),
    Flag::moot("log_dir"),
    Flag::moot("log_link"),
    Flag::moot("log_backtrace_at"),
    Flag::moot_switch("log_prefix"),
    Flag::moot("logbuflevel"),
    Flag::moot("logbufsecs"),
    Flag::moot("logemaillevel"),
    Flag::moot("max_log_size"),
    Flag::moot_switch("stop_logging_if_full_disk"),
    Flag::moot("vmodule"),
];

fn find(flags: &'static [Flag], name: &str) -> Option<&'static Flag> {
    flags.iter().chain(&LOGGING).find(|flag| flag.name == name)
}

/// The values that were given, by the names of the flags.
#[derive(Debug, Default)]
pub(super) struct Values(Vec<(&'static str, String)>);

impl Values {
    /// The value of a flag; `None`: it was not given, or is empty.
    pub(super) fn text(&self, name: &str) -> Option<&str> {
        let given = self.0.iter().rev().find(|(given, _)| *given == name)?;
        Some(given.1.as_str()).filter(|value| !value.trim().is_empty())
    }

    /// Whether a switch is on.
    pub(super) fn is_on(&self, name: &str) -> bool {
        self.text(name).and_then(switch).unwrap_or(false)
    }

    /// How much is to be logged: `-v=N`, as this program counts it.
    pub(super) fn verbosity(&self) -> Option<String> {
        let level = self.text("v")?.parse::<usize>().ok().filter(|level| *level > 0)?;
        Some(format!("-{}", "v".repeat(level.min(3))))
    }

    /// Adds the settings of a file, which flags override. Returns the warnings.
    pub(super) fn add_below(
        &mut self,
        flags: &'static [Flag],
        settings: Vec<(String, String)>,
        path: &str,
    ) -> Vec<String> {
        let mut warnings = Vec::new();
        let mut below = Vec::new();
        for (name, value) in settings {
            match find(flags, &name) {
                Some(flag) => below.push((flag.name, value)),
                None => warnings.push(format!("{path}: {name} is not a setting, and is ignored")),
            }
        }
        below.append(&mut self.0);
        self.0 = below;
        warnings
    }

    /// A warning for each flag that asks for something that this program lacks.
    pub(super) fn without_effect(&self, flags: &[Flag]) -> Vec<String> {
        let lacks = |flag: &&Flag| match flag.here {
            Here::Lacks(harmless) | Here::Elsewhere(harmless, _) => {
                self.text(flag.name).is_some_and(|value| {
                    let value = if flag.is_switch { switch_text(value) } else { value };
                    value != harmless
                })
            }
            _ => false,
        };
        let text = |flag: &Flag| {
            let value = self.text(flag.name).unwrap_or_default();
            let why = match flag.here {
                Here::Elsewhere(_, how) => how,
                _ => "this program does not offer it",
            };
            format!("--{}={value} has no effect: {why}", flag.name)
        };
        flags.iter().filter(lacks).map(text).collect()
    }
}

/// On or off, in the words of gflags.
fn switch(text: &str) -> Option<bool> {
    match text.trim().to_ascii_lowercase().as_str() {
        "1" | "t" | "true" | "y" | "yes" => Some(true),
        "0" | "f" | "false" | "n" | "no" => Some(false),
        _ => None,
    }
}

fn switch_text(text: &str) -> &'static str {
    if switch(text) == Some(true) { "true" } else { "false" }
}

/// Reads the arguments of a command with these flags. What is not a flag of it becomes a warning, and is
/// otherwise ignored.
pub(super) fn parse(flags: &'static [Flag], args: Vec<String>) -> (Values, Vec<String>) {
    let (mut values, mut warnings) = (Values::default(), Vec::new());
    let mut args = args.into_iter().peekable();
    while let Some(arg) = args.next() {
        if arg == "--" {
            break;
        }
        let Some(flag) =
            arg.strip_prefix("--").or_else(|| arg.strip_prefix('-')).filter(|flag| !flag.is_empty())
        else {
            warnings.push(format!("{arg:?} is not a flag, and is ignored"));
            continue;
        };
        let (name, value) = match flag.split_once('=') {
            Some((name, value)) => (name.replace('-', "_"), Some(value.to_owned())),
            None => (flag.replace('-', "_"), None),
        };
        let off = || name.strip_prefix("no").and_then(|name| find(flags, name)).filter(|flag| flag.is_switch);
        match (find(flags, &name), value) {
            (Some(flag), Some(value)) => {
                if flag.is_switch && switch(&value).is_none() {
                    warnings.push(format!("--{name}={value} is neither true nor false, and counts as false"));
                }
                values.0.push((flag.name, value));
            }
            (Some(flag), None) if flag.is_switch => {
                let value = args.next_if(|next| switch(next).is_some()).unwrap_or_else(|| "true".to_owned());
                values.0.push((flag.name, value));
            }
            (Some(flag), None) => match args.next_if(|next| !looks_like_flag(next)) {
                Some(value) => values.0.push((flag.name, value)),
                None => warnings.push(format!("--{name} has no value, and is ignored")),
            },
            (None, None) if off().is_some() => {
                values.0.extend(off().map(|flag| (flag.name, "false".to_owned())));
            }
            (None, value) => {
                warnings.push(format!("--{name} is not a flag of this command, and is ignored"));
                if value.is_none() {
                    // Most flags have a value.
                    let _ = args.next_if(|next| !next.starts_with('-'));
                }
            }
        }
    }
    (values, warnings)
}

/// A value may begin with a dash only if it is a number.
fn looks_like_flag(arg: &str) -> bool {
    arg.starts_with('-') && arg.parse::<f64>().is_err()
}
