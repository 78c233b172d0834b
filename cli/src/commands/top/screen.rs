//! The terminal: another screen while `top` runs, and keys one by one.

use std::time::Duration;

use crate::output::{self, clip};
use crate::sys::{self, KeyMode};

/// The other screen of the terminal, until it is dropped.
pub(super) struct Screen {
    keys: Option<KeyMode>,
}

/// What a key asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Key {
    Quit,
    Pause,
    Sort,
    Help,
    Next,
    Previous,
}

impl Key {
    /// The key that the terminal sent these bytes for.
    fn read(bytes: &[u8]) -> Option<Self> {
        Some(match bytes {
            b"q" | b"Q" | b"\x1b" => Self::Quit,
            b"p" | b"P" | b" " => Self::Pause,
            b"s" | b"S" => Self::Sort,
            b"?" | b"h" => Self::Help,
            b"\t" | b"\x1b[C" | b"\x1b[B" | b"\x1bOC" | b"\x1bOB" => Self::Next,
            b"\x1b[Z" | b"\x1b[D" | b"\x1b[A" | b"\x1bOD" | b"\x1bOA" => Self::Previous,
            _ => return None,
        })
    }
}

impl Screen {
    pub(super) fn open() -> anyhow::Result<Self> {
        output::print("\u{1b}[?1049h\u{1b}[?25l")?;
        Ok(Self { keys: KeyMode::enter() })
    }

    /// Sleeps until a key is pressed, somebody asks us to end, or `timeout` is over.
    pub(super) fn wait(&self, timeout: Duration) -> Option<Key> {
        let Some(keys) = &self.keys else {
            sys::wait_for_interrupt(Some(timeout));
            return None;
        };
        let mut bytes = [0; 8];
        let len = keys.wait(timeout, &mut bytes);
        Key::read(&bytes[..len])
    }

    /// Writes over what is there, no more than fits.
    pub(super) fn show(&self, text: &str) -> anyhow::Result<()> {
        let (columns, lines) = sys::terminal_size().unwrap_or((80, 24));
        let mut out = "\u{1b}[H".to_owned();
        for line in text.lines().take(lines.saturating_sub(1)) {
            out += &clip(line, columns);
            out += "\u{1b}[K\r\n";
        }
        output::print(&(out + "\u{1b}[J"))
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        // There is nobody to tell that it failed.
        let _ = output::print("\u{1b}[?25h\u{1b}[?1049l");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_known_by_what_terminals_send() {
        let known = [b"q".as_slice(), b"p", b"s", b"?", b"\t", b"\x1b[C", b"\x1b[D", b"\x1b[Z"].map(Key::read);
        let wanted =
            [Key::Quit, Key::Pause, Key::Sort, Key::Help, Key::Next, Key::Next, Key::Previous, Key::Previous];
        assert_eq!(known, wanted.map(Some));
        assert_eq!([Key::read(b"x"), Key::read(b""), Key::read(b"\x1b[31~")], [None; 3]);
    }
}
