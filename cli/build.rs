//! Compiles build information into the binary, for `snowskin --version --verbose`. Fetches nothing from the
//! network and works without git.

use std::path::Path;
use std::process::Command;

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-env-changed=SNOWSKIN_COMMIT");
    let say = |name: &str, value: &str| println!("cargo:rustc-env=SNOWSKIN_BUILD_{name}={value}");
    say("COMMIT", &commit());
    say("FEATURES", &features());
    for (name, variable) in [("TARGET", "TARGET"), ("PROFILE", "PROFILE")] {
        say(name, &std::env::var(variable).unwrap_or_default());
    }
    let rustc = std::env::var("RUSTC").unwrap_or_else(|_| "rustc".to_owned());
    say("RUSTC", &output(Command::new(rustc).arg("--version")).unwrap_or_else(|| "unknown".to_owned()));
}

/// The commit of this source tree: `SNOWSKIN_COMMIT` if it is set (for builds without git), otherwise what
/// git reports.
fn commit() -> String {
    if let Ok(commit) = std::env::var("SNOWSKIN_COMMIT")
        && !commit.is_empty()
        && commit.bytes().all(|byte| byte.is_ascii_graphic())
    {
        return commit;
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let git = |args: &[&str]| output(Command::new("git").arg("-C").arg(&root).args(args));
    // A source tree that was unpacked inside another git repository is not one of that repository's commits.
    let top = git(&["rev-parse", "--show-toplevel"]).and_then(|top| std::fs::canonicalize(top).ok());
    if top.is_none() || top != std::fs::canonicalize(&root).ok() {
        return "unknown".to_owned();
    }
    // This file changes with each commit and checkout, in linked work trees as well.
    if let Some(log) = git(&["rev-parse", "--path-format=absolute", "--git-path", "logs/HEAD"]) {
        println!("cargo:rerun-if-changed={log}");
    }
    git(&["rev-parse", "--short=12", "HEAD"]).unwrap_or_else(|| "unknown".to_owned())
}

/// The features of this crate that are enabled.
fn features() -> String {
    let mut features: Vec<String> = std::env::vars()
        .filter_map(|(name, _)| Some(name.strip_prefix("CARGO_FEATURE_")?.to_lowercase().replace('_', "-")))
        .filter(|name| name != "default")
        .collect();
    features.sort();
    if features.is_empty() { "none".to_owned() } else { features.join(" ") }
}

/// The first line of the command's output, if the command succeeded.
fn output(command: &mut Command) -> Option<String> {
    let output = command.output().ok().filter(|output| output.status.success())?;
    let text = String::from_utf8(output.stdout).ok()?;
    text.lines().next().map(str::to_owned)
}
