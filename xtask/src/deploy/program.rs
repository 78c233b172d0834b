//! The flags of the built program's commands, from its help.

use anyhow::{Context as _, Result, ensure};
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

/// The program, and the flags of the commands that have been needed so far.
pub(crate) struct Program {
    path: PathBuf,
    flags: RefCell<BTreeMap<String, BTreeSet<String>>>,
}

impl Program {
    pub(crate) fn new(path: &Path) -> Result<Self> {
        let path = path
            .canonicalize()
            .with_context(|| format!("{} is not there: build the program first", path.display()))?;
        Ok(Self { path, flags: RefCell::default() })
    }

    /// Runs it with `args` and returns its stdout.
    ///
    /// # Errors
    /// It cannot start, or fails.
    pub(crate) fn run(&self, args: &[&str]) -> Result<String> {
        let output = Command::new(&self.path).args(args).env_clear().output()?;
        let said = String::from_utf8_lossy(&output.stderr);
        let said = said.lines().next().unwrap_or_default();
        ensure!(output.status.success(), "`snowskin {}`: {}: {said}", args.join(" "), output.status);
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// What is wrong with a command line: a command or flags that do not exist.
    pub(crate) fn judge(&self, line: &[String]) -> Vec<String> {
        // A command may have a second word, as `conductor serve` has.
        let words: Vec<&str> =
            line.iter().map(String::as_str).take_while(|word| !word.starts_with('-')).collect();
        let (Some(first), second) = (words.first(), words.get(1)) else {
            return vec!["no command".to_owned()];
        };
        let command = match second.filter(|_| *first == "conductor") {
            Some(second) => format!("{first} {second}"),
            None => (*first).to_owned(),
        };
        let command = command.as_str();
        let known = match self.flags_of(command) {
            Ok(known) => known,
            Err(error) => return vec![format!("no command `{command}`: {error:#}")],
        };
        let flags = line[1..].iter().filter(|word| word.starts_with('-') && *word != "-");
        let names = flags.map(|word| word.split('=').next().unwrap_or(word));
        let unknown = names.filter(|name| !known.contains(*name));
        unknown.map(|name| format!("`snowskin {command}` has no flag `{name}`")).collect()
    }

    fn flags_of(&self, command: &str) -> Result<BTreeSet<String>> {
        if let Some(known) = self.flags.borrow().get(command) {
            return Ok(known.clone());
        }
        let words: Vec<&str> = command.split(' ').chain(["--help"]).collect();
        let flags = flags(&self.run(&words)?);
        self.flags.borrow_mut().insert(command.to_owned(), flags.clone());
        Ok(flags)
    }
}

/// Flags in a help text of clap: at the beginning of a line, with a comma between the short and the long
/// form. An optional value follows in brackets.
fn flags(help: &str) -> BTreeSet<String> {
    let lines = help.lines().map(str::trim_start).filter(|line| line.starts_with('-'));
    let words = lines.flat_map(|line| {
        line.split([' ', ','])
            .take_while(|word| word.is_empty() || word.starts_with('-'))
            .map(|word| word.split(['[', '=']).next().unwrap_or(word).trim_end_matches("...").to_owned())
    });
    words.filter(|word| !word.is_empty()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_are_those_at_the_beginning_of_lines() {
        let help = concat!(
            "Run it\n\nOptions:\n      --listen <ADDR:PORT>\n          not as --flag\n",
            "  -v, --verbose...  Say --more\n      --drain[=<SECONDS>]\n"
        );
        let found: Vec<String> = flags(help).into_iter().collect();
        assert_eq!(found, ["--drain", "--listen", "--verbose", "-v"]);
    }
}
