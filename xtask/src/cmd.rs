//! One external command: printed as in a shell, run, and checked.

use anyhow::{Context as _, Result, bail};
use std::fmt;
use std::path::Path;
use std::process::{Command, Stdio};

/// A command line with additions to the environment.
#[derive(Clone, Debug, Default)]
pub(crate) struct Cmd {
    env: Vec<(String, String)>,
    words: Vec<String>,
}

impl Cmd {
    /// The command in `line`, split at spaces; for words with spaces use [`Self::arg`].
    pub(crate) fn new(line: &str) -> Self {
        Self { env: Vec::new(), words: line.split_whitespace().map(str::to_owned).collect() }
    }

    /// Adds one word.
    pub(crate) fn arg(mut self, word: impl Into<String>) -> Self {
        self.words.push(word.into());
        self
    }

    /// Adds the words in `line`, split at spaces.
    pub(crate) fn words(mut self, line: &str) -> Self {
        self.words.extend(line.split_whitespace().map(str::to_owned));
        self
    }

    /// Adds one variable.
    pub(crate) fn env(mut self, key: &str, value: impl Into<String>) -> Self {
        self.env.push((key.to_owned(), value.into()));
        self
    }

    /// The command, ready to be spawned in `dir`.
    pub(crate) fn command(&self, dir: &Path) -> Command {
        let mut command = Command::new(&self.words[0]);
        command.args(&self.words[1..]).current_dir(dir);
        command.envs(self.env.iter().map(|(key, value)| (key, value)));
        // `cargo run` sets variables that describe this package; the cargo that is started must not read
        // them.
        for (key, _) in std::env::vars() {
            if key.starts_with("CARGO_PKG_") || key.starts_with("CARGO_MANIFEST_") || key == "CARGO" {
                command.env_remove(key);
            }
        }
        command
    }

    /// Runs it with inherited stdout and stderr. With a limit, and coreutils' `timeout`, it ends after
    /// `limit_s`.
    ///
    /// # Errors
    /// It cannot start, fails, or exceeds its limit.
    pub(crate) fn run(&self, dir: &Path, limit_s: Option<u64>) -> Result<()> {
        let limited = match limit_s {
            Some(limit_s) => {
                let mut words: Vec<String> =
                    ["timeout", "-k", "10"].iter().map(|word| (*word).to_owned()).collect();
                words.push(limit_s.to_string());
                words.extend(self.words.iter().cloned());
                Self { env: self.env.clone(), words }
            }
            None => self.clone(),
        };
        let status = limited
            .command(dir)
            .stdin(Stdio::null())
            .status()
            .with_context(|| format!("cannot start `{}`: is it installed?", self.words[0]))?;
        match (status.code(), limit_s) {
            (Some(0), _) => Ok(()),
            (Some(124 | 137), Some(limit_s)) => bail!("exceeded its limit of {limit_s} s"),
            (Some(code), _) => bail!("exit code {code}"),
            (None, _) => bail!("{status}"),
        }
    }

    /// Runs it silently and returns its stdout; `None` when it cannot start or fails.
    pub(crate) fn stdout(&self, dir: &Path) -> Option<String> {
        let output = self.command(dir).stdin(Stdio::null()).stderr(Stdio::null()).output().ok()?;
        output.status.success().then(|| String::from_utf8_lossy(&output.stdout).into_owned())
    }
}

impl fmt::Display for Cmd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let quote = |word: &str| {
            let plain = |c: char| c.is_ascii_alphanumeric() || "-_=+./:,@%".contains(c);
            if !word.is_empty() && word.chars().all(plain) { word.to_owned() } else { format!("'{word}'") }
        };
        for (key, value) in &self.env {
            write!(f, "{key}={} ", quote(value))?;
        }
        f.write_str(&self.words.iter().map(|word| quote(word)).collect::<Vec<_>>().join(" "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_is_shown_as_a_person_would_type_it() {
        let cmd = Cmd::new("cargo test -p te-core").arg("two words").env("RUSTFLAGS", "--cfg loom");
        assert_eq!(cmd.to_string(), "RUSTFLAGS='--cfg loom' cargo test -p te-core 'two words'");
    }

    #[test]
    fn a_command_that_fails_tells_its_exit_code() {
        let error = Cmd::new("false").run(Path::new("."), None).expect_err("false fails");
        assert_eq!(error.to_string(), "exit code 1");
    }
}
