//! A progress bar on stderr for long operations; hidden when stderr is not a terminal or with --quiet.

use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// A bar that is erased when dropped, so that no return path leaves part of it on the screen.
#[derive(Debug)]
pub(crate) struct Bar {
    bar: ProgressBar,
}

impl Bar {
    /// A bar that counts `what` up to `total`. indicatif hides it when stderr is not a terminal.
    pub(crate) fn new(total: u64, what: &'static str, quiet: bool) -> Self {
        let target = target(quiet);
        let bar = ProgressBar::with_draw_target(Some(total), target);
        let template = format!(
            "{{elapsed_precise}} {{wide_bar}} {{human_pos}}/{{human_len}} {what}  {{msg}}  eta {{eta}}"
        );
        if let Ok(style) = ProgressStyle::with_template(&template) {
            bar.set_style(style);
        }
        Self { bar }
    }

    /// A spinner, for an operation of unknown length.
    pub(crate) fn spinner(what: impl Into<String>, quiet: bool) -> Self {
        let target = target(quiet);
        let bar = ProgressBar::with_draw_target(None, target);
        if let Ok(style) = ProgressStyle::with_template("{spinner} {elapsed} {msg}") {
            bar.set_style(style);
        }
        bar.set_message(what.into());
        bar.enable_steady_tick(Duration::from_millis(100));
        Self { bar }
    }

    /// Sets the count to `done`.
    pub(crate) fn set(&self, done: u64) {
        self.bar.set_position(done);
    }

    /// Shows `text` beside the bar.
    pub(crate) fn message(&self, text: impl Into<String>) {
        if !self.bar.is_hidden() {
            self.bar.set_message(text.into());
        }
    }

    /// Prints a line on stderr above the bar, even when the bar is hidden.
    pub(crate) fn note(&self, text: &str) {
        self.bar.suspend(|| eprintln!("snowskin: {text}"));
    }

    /// Runs `print` with the bar removed from the screen.
    pub(crate) fn suspend<T>(&self, print: impl FnOnce() -> T) -> T {
        self.bar.suspend(print)
    }
}

/// Where the bar is drawn. A process in the background of a shell draws none, because the foreground process
/// has the screen.
fn target(quiet: bool) -> ProgressDrawTarget {
    match quiet || crate::sys::is_in_background() {
        true => ProgressDrawTarget::hidden(),
        false => ProgressDrawTarget::stderr_with_hz(10),
    }
}

impl Drop for Bar {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}
