//! The terminal: the alternate screen while `top` runs, and its keys.

use std::time::Duration;

use crate::output::{self, clip};
use crate::sys::{self, KeyMode};

/// The alternate screen of the terminal, until it is dropped.
pub(super) struct Screen {
    keys: Option<KeyMode>,
    /// Columns and lines of the last frame.
    size: Option<(usize, usize)>,
}

/// The action that a key requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Key {
    Quit,
    Pause,
    Sort,
    Help,
    Next,
    Previous,
    Suspend,
}

impl Key {
    /// The actions of all keys that the terminal sent at once: keys may be typed faster than they are read.
    fn read_all(mut bytes: &[u8]) -> Vec<Self> {
        let mut keys = Vec::new();
        while !bytes.is_empty() {
            let len = match bytes {
                // An escape sequence ends with its first letter, or `~`.
                [0x1b, b'[' | b'O', rest @ ..] => {
                    rest.iter().position(|byte| (b'@'..=b'~').contains(byte)).map_or(bytes.len(), |at| at + 3)
                }
                _ => 1,
            };
            let (key, rest) = bytes.split_at(len);
            keys.extend(Self::read(key));
            bytes = rest;
        }
        keys
    }

    /// The action for the bytes of one key.
    fn read(bytes: &[u8]) -> Option<Self> {
        Some(match bytes {
            b"q" | b"Q" | b"\x1b" => Self::Quit,
            b"p" | b"P" | b" " => Self::Pause,
            b"s" | b"S" => Self::Sort,
            b"?" | b"h" => Self::Help,
            b"\t" | b"\x1b[C" | b"\x1b[B" | b"\x1bOC" | b"\x1bOB" => Self::Next,
            b"\x1b[Z" | b"\x1b[D" | b"\x1b[A" | b"\x1bOD" | b"\x1bOA" => Self::Previous,
            b"\x1a" => Self::Suspend,
            _ => return None,
        })
    }
}

impl Screen {
    pub(super) fn open() -> anyhow::Result<Self> {
        output::print("\u{1b}[?1049h\u{1b}[?25l")?;
        Ok(Self { keys: KeyMode::enter(), size: None })
    }

    /// Stops the process as Ctrl-Z does, with the terminal's modes restored until the shell continues it.
    pub(super) fn suspend(self) -> anyhow::Result<Self> {
        drop(self);
        sys::suspend();
        Self::open()
    }

    /// Whether the terminal's size has changed since the last frame.
    pub(super) fn is_resized(&self) -> bool {
        self.size != sys::terminal_size()
    }

    /// Sleeps until a key is pressed, a signal requests the end, or `timeout` is over. Returns the actions of
    /// the keys, in order.
    pub(super) fn wait(&self, timeout: Duration) -> Vec<Key> {
        let Some(keys) = &self.keys else {
            sys::wait_for_interrupt(Some(timeout));
            return Vec::new();
        };
        let mut bytes = [0; 64];
        let len = keys.wait(timeout, &mut bytes);
        Key::read_all(&bytes[..len])
    }

    /// Replaces the frame, cut to the size of the terminal; the last line then counts the lines that do not
    /// fit.
    pub(super) fn show(&mut self, text: impl Fn(usize) -> String) -> anyhow::Result<()> {
        self.size = sys::terminal_size();
        let (columns, lines) = self.size.unwrap_or((80, 24));
        let mut out = "\u{1b}[H".to_owned();
        for line in fit(&text(columns), lines.saturating_sub(1)) {
            out += &clip(&line, columns);
            out += "\u{1b}[K\r\n";
        }
        output::print(&(out + "\u{1b}[J"))
    }
}

/// At most `most` lines of the text: empty lines are left out first, then the last line counts the lines that
/// do not fit.
fn fit(text: &str, most: usize) -> Vec<String> {
    let mut lines: Vec<&str> = text.lines().collect();
    if lines.len() > most {
        lines.retain(|line| !line.is_empty());
    }
    let mut shown: Vec<String> = lines.iter().take(most).map(|line| (*line).to_owned()).collect();
    if let (Some(last), true) = (shown.last_mut(), lines.len() > most) {
        *last = format!("… {} more lines", lines.len() - most + 1);
    }
    shown
}

impl Drop for Screen {
    fn drop(&mut self) {
        // A failure cannot be reported here.
        let _ = output::print("\u{1b}[?25h\u{1b}[?1049l");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_known_by_what_terminals_send() {
        let known =
            [b"q".as_slice(), b"p", b"s", b"?", b"\t", b"\x1b[C", b"\x1b[D", b"\x1b[Z"].map(Key::read);
        let wanted =
            [Key::Quit, Key::Pause, Key::Sort, Key::Help, Key::Next, Key::Next, Key::Previous, Key::Previous];
        assert_eq!(known, wanted.map(Some));
        assert_eq!(Key::read(b"\x1a"), Some(Key::Suspend));
        let typed = [Key::Sort, Key::Next, Key::Sort, Key::Previous, Key::Quit];
        assert_eq!(Key::read_all(b"s\x1b[B\x1b[31~xs\x1bODq"), typed);
        assert_eq!(Key::read_all(b"\x1b"), [Key::Quit]);
        assert_eq!([Key::read(b"x"), Key::read(b""), Key::read(b"\x1b[31~")], [None; 3]);
    }

    #[test]
    fn what_does_not_fit_is_counted_and_empty_lines_go_first() {
        assert_eq!(fit("a\n\nb\n", 3), ["a", "", "b"]);
        assert_eq!(fit("a\n\nb\n", 2), ["a", "b"]);
        assert_eq!(fit("a\n\nb\nc\nd\n", 3), ["a", "b", "… 2 more lines"]);
        assert_eq!(fit("a\n", 0), [""; 0]);
    }
}
