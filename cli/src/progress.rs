//! A bar on stderr while long work runs; nothing when stderr is not a terminal or nobody wants it.

use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// A bar that clears itself when dropped, so that no way out leaves half of it on the screen.
#[derive(Debug)]
pub(crate) struct Bar {
    bar: ProgressBar,
}

impl Bar {
    /// Counts up to `total` of `what`. indicatif hides it by itself when stderr is not a terminal.
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

    /// Waits for something whose length nobody knows.
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

    /// `done` so far.
    pub(crate) fn set(&self, done: u64) {
        self.bar.set_position(done);
    }

    /// What is going on.
    pub(crate) fn message(&self, text: impl Into<String>) {
        if !self.bar.is_hidden() {
            self.bar.set_message(text.into());
        }
    }

    /// Prints a line on stderr above the bar, which may be hidden.
    pub(crate) fn note(&self, text: &str) {
        self.bar.suspend(|| eprintln!("snowskin: {text}"));
    }

    /// Runs `print` while the bar is off the screen.
    pub(crate) fn suspend<T>(&self, print: impl FnOnce() -> T) -> T {
        self.bar.suspend(print)
    }
}

/// Where it is drawn, if anywhere: a process in the background of a shell leaves the screen to the one in the foreground.
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
