//! How a command ends: exit codes that scripts can test, and errors that state what to do.

use std::fmt;
use std::io::Write as _;

/// The section on exit codes that ends every `--help`.
pub(crate) const EXIT_CODES: &str = "Exit codes:\n  0  ok\n  1  failed; stderr says why and what to do\n  2  wrong usage\n  \
     3  not found: no such key\n  4  bytes differ from what was stored\n  130  interrupted (Ctrl-C)   143  terminated";

/// How a command ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Exit {
    /// The command did what was requested.
    Ok,
    /// The command failed.
    Failed,
    /// The command line or a setting is wrong.
    Usage,
    /// The key does not exist.
    NotFound,
    /// Bytes differ from what was stored.
    Verification,
    /// Ended by Ctrl-C.
    Interrupted,
    /// Ended by SIGTERM.
    Terminated,
}

impl Exit {
    /// The exit code of the process.
    pub(crate) const fn code(self) -> u8 {
        match self {
            Self::Ok => 0,
            Self::Failed => 1,
            Self::Usage => 2,
            Self::NotFound => 3,
            Self::Verification => 4,
            Self::Interrupted => 130,
            Self::Terminated => 143,
        }
    }
}

/// An error with its exit code and, where possible, a hint on what to do next.
#[derive(Debug)]
pub(crate) struct Failure {
    exit: Exit,
    message: String,
    hint: Option<String>,
}

impl Failure {
    /// An error that ends the command with `exit`. An empty `message` prints nothing.
    pub(crate) fn new(exit: Exit, message: impl Into<String>) -> Self {
        Self { exit, message: message.into(), hint: None }
    }

    /// An error with exit code 1.
    pub(crate) fn failed(message: impl Into<String>) -> Self {
        Self::new(Exit::Failed, message)
    }

    /// Wrong usage that clap cannot detect.
    pub(crate) fn usage(message: impl Into<String>) -> Self {
        Self::new(Exit::Usage, message)
    }

    /// Ends without a message: the reader of stdout has closed it, or the user knows already.
    pub(crate) fn silent(exit: Exit) -> Self {
        Self::new(exit, "")
    }

    /// Adds a hint on what to do about it.
    pub(crate) fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Failure {}

/// Prints `error` on stderr and returns the exit code.
pub(crate) fn report(error: &anyhow::Error) -> Exit {
    let failure = error.downcast_ref::<Failure>();
    let text = describe(error, failure.and_then(|failure| failure.hint.as_deref()));
    if !text.is_empty() {
        // A failed write is ignored: with stderr closed, there is no other place for the message.
        let _ = std::io::stderr().write_all(text.as_bytes());
    }
    failure.map_or(Exit::Failed, |failure| failure.exit)
}

fn describe(error: &anyhow::Error, hint: Option<&str>) -> String {
    let message = message(error);
    if message.is_empty() {
        return String::new();
    }
    let hint = hint.map(|hint| format!("  hint: {hint}\n")).unwrap_or_default();
    format!("snowskin: {message}\n{hint}")
}

/// The error's text, followed by the text of each cause that adds something: many errors quote their cause
/// already.
fn message(error: &anyhow::Error) -> String {
    let mut message = error.to_string();
    for cause in error.chain().skip(1).map(ToString::to_string) {
        if !message.contains(&cause) {
            message += ": ";
            message += &cause;
        }
    }
    message
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::Context as _;

    #[test]
    fn a_failure_keeps_its_code_and_hint_under_added_context() {
        let failure = Failure::new(Exit::NotFound, "no object `a`").hint("put it first");
        let error = Err::<(), _>(failure).context("get").unwrap_err();
        assert_eq!(error.downcast_ref::<Failure>().map(|f| f.exit), Some(Exit::NotFound));
        assert_eq!(
            describe(&error, Some("put it first")),
            "snowskin: get: no object `a`\n  hint: put it first\n"
        );
    }

    #[test]
    fn a_cause_that_its_error_quotes_is_said_once() {
        #[derive(Debug)]
        struct Quoting(std::io::Error);
        impl fmt::Display for Quoting {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "127.0.0.1:1: {}: choose another port", self.0)
            }
        }
        impl std::error::Error for Quoting {
            fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
                Some(&self.0)
            }
        }
        let error = anyhow::Error::from(Quoting(std::io::Error::other("in use"))).context("--gateway");
        assert_eq!(describe(&error, None), "snowskin: --gateway: 127.0.0.1:1: in use: choose another port\n");
    }

    #[test]
    fn a_silent_end_prints_nothing() {
        let error = anyhow::Error::from(Failure::silent(Exit::Ok));
        assert_eq!(describe(&error, None), "");
    }
}
