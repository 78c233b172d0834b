//! Server-sent events of engines: where they end, and what they say.

use std::borrow::Cow;

use hyper::body::Bytes;
use serde::Deserialize;
use serde_json::value::RawValue;

/// Longest event, bytes.
const EVENT_BYTES_MAX: usize = 4 << 20;

/// Gives whole events of a stream that is cut anywhere.
#[derive(Debug, Default)]
pub(crate) struct Splitter {
    /// The beginning of an event whose end has not come.
    rest: Vec<u8>,
    /// Bytes of `rest` in which no event ends.
    scanned: usize,
}

/// An event is too long.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TooLong;

impl Splitter {
    /// Adds bytes, and returns all events that are complete now, in one piece; it may be empty.
    ///
    /// # Errors
    /// An event is longer than any engine's.
    pub(crate) fn push(&mut self, bytes: Bytes) -> Result<Bytes, TooLong> {
        let (mut all, mut scanned) = match self.rest.is_empty() {
            true => (bytes, 0),
            false => {
                self.rest.extend_from_slice(&bytes);
                (Bytes::from(std::mem::take(&mut self.rest)), self.scanned)
            }
        };
        let mut end = 0;
        while let Some(next) = end_of_event(&all, &mut scanned) {
            end = next;
            scanned = next;
        }
        let complete = all.split_to(end);
        if all.len() > EVENT_BYTES_MAX {
            return Err(TooLong);
        }
        self.scanned = scanned - end;
        self.rest = all.into();
        Ok(complete)
    }
}

/// The events in a piece that a [`Splitter`] returned.
pub(crate) fn events(mut piece: &[u8]) -> impl Iterator<Item = &[u8]> {
    std::iter::from_fn(move || {
        let end = end_of_event(piece, &mut 0).unwrap_or(piece.len());
        let (event, rest) = piece.split_at(end);
        piece = rest;
        (!event.is_empty()).then_some(event)
    })
}

/// Where the first event ends whose end is at `scanned` or later; `scanned` then is where to go on when more
/// bytes have come. An event ends with an empty line; lines end with LF, CR LF, or CR.
fn end_of_event(bytes: &[u8], scanned: &mut usize) -> Option<usize> {
    let mut at = *scanned;
    while let Some(found) = bytes[at..].iter().position(|&byte| byte == b'\n' || byte == b'\r') {
        at += found;
        match bytes[at..] {
            [b'\n', b'\n', ..] | [b'\r', b'\r', ..] => return Some(at + 2),
            [b'\n', b'\r', b'\n', ..] => return Some(at + 3),
            // More has to come before it is known.
            [_] | [b'\n', b'\r'] => {
                *scanned = at;
                return None;
            }
            _ => at += 1,
        }
    }
    *scanned = bytes.len();
    None
}

/// The data of an event; `None` when it has none (a comment, for example).
pub(crate) fn data(event: &[u8]) -> Option<Cow<'_, [u8]>> {
    let lines = event.split(|&byte| byte == b'\n' || byte == b'\r');
    let mut values = lines.filter_map(|line| {
        let value = line.strip_prefix(b"data")?;
        match value {
            [] => Some(value),
            [b':', b' ', value @ ..] | [b':', value @ ..] => Some(value),
            _ => None,
        }
    });
    let first = values.next()?;
    let Some(second) = values.next() else { return Some(Cow::Borrowed(first)) };
    let mut all = first.to_vec();
    for value in std::iter::once(second).chain(values) {
        all.push(b'\n');
        all.extend_from_slice(value);
    }
    Some(Cow::Owned(all))
}

/// What the proxy has to know of a chunk of a completion.
#[derive(Debug, Default, Deserialize)]
pub(crate) struct Chunk<'a> {
    #[serde(borrow, default)]
    pub(crate) choices: Option<Vec<Choice<'a>>>,
    #[serde(borrow, default)]
    pub(crate) error: Option<&'a RawValue>,
    #[serde(borrow, default)]
    pub(crate) prompt_token_ids: Option<&'a RawValue>,
    #[serde(borrow, default)]
    pub(crate) id: Option<&'a RawValue>,
    #[serde(borrow, default)]
    pub(crate) created: Option<&'a RawValue>,
    #[serde(borrow, default)]
    pub(crate) model: Option<&'a RawValue>,
}

#[derive(Debug, Default, Deserialize)]
pub(crate) struct Choice<'a> {
    #[serde(borrow, default)]
    pub(crate) token_ids: Option<&'a RawValue>,
    #[serde(borrow, default)]
    pub(crate) text: Option<&'a RawValue>,
    #[serde(borrow, default)]
    pub(crate) delta: Option<Delta<'a>>,
    #[serde(borrow, default)]
    pub(crate) finish_reason: Option<&'a RawValue>,
}

#[derive(Debug, Default, Deserialize)]
pub(crate) struct Delta<'a> {
    #[serde(borrow, default)]
    pub(crate) content: Option<&'a RawValue>,
    #[serde(borrow, default)]
    pub(crate) reasoning_content: Option<&'a RawValue>,
    #[serde(borrow, default)]
    pub(crate) tool_calls: Option<&'a RawValue>,
}

impl Chunk<'_> {
    /// The chunk of an event's data.
    pub(crate) fn parse(data: &[u8]) -> Option<Chunk<'_>> {
        serde_json::from_slice(data).ok()
    }

    /// Tokens in it: the ids, if the engine says them, or one for any text.
    pub(crate) fn tokens(&self, ids: &mut Vec<u32>) -> Option<Tokens> {
        let choice = self.choices.as_ref()?.first()?;
        let is_text = |value: Option<&RawValue>| value.is_some_and(|value| value.get() != "\"\"");
        let delta = choice.delta.as_ref();
        let has_text = is_text(choice.text)
            || delta.is_some_and(|delta| {
                is_text(delta.content) || is_text(delta.reasoning_content) || delta.tool_calls.is_some()
            });
        let before = ids.len();
        let has_ids = choice.token_ids.is_some_and(|raw| match serde_json::from_str::<Vec<u32>>(raw.get()) {
            Ok(new) => {
                ids.extend(new);
                true
            }
            Err(_) => false,
        });
        match (has_ids, ids.len() - before) {
            (true, 0) if !has_text => None,
            (true, many) => Some(Tokens { many: many as u32, known: many > 0 }),
            (false, _) if has_text => Some(Tokens { many: 1, known: false }),
            (false, _) => None,
        }
    }

    /// Whether it says why the completion ended.
    pub(crate) fn is_last(&self) -> bool {
        let choices = self.choices.as_deref().unwrap_or_default();
        choices.iter().any(|choice| choice.finish_reason.is_some())
    }
}

/// Tokens of a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Tokens {
    /// How many; at least 1 where they are not known.
    pub(crate) many: u32,
    /// Their ids are known.
    pub(crate) known: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    const STREAM: &str =
        "data: {\"a\":1}\n\n: ping\n\ndata: x\r\n\r\nevent: e\ndata:y\ndata: z\n\ndata: [DONE]\r\r";

    fn whole(cuts: &[usize]) -> Vec<Vec<u8>> {
        let (mut splitter, mut found, mut from) = (Splitter::default(), Vec::new(), 0);
        for &cut in cuts.iter().chain(&[STREAM.len()]) {
            let piece = splitter.push(Bytes::copy_from_slice(&STREAM.as_bytes()[from..cut])).unwrap();
            found.extend(events(&piece).map(<[u8]>::to_vec));
            from = cut;
        }
        assert!(splitter.rest.is_empty());
        found
    }

    #[test]
    fn events_are_the_same_wherever_the_stream_is_cut() {
        let expected = whole(&[]);
        assert_eq!(expected.len(), 5);
        assert_eq!(expected.concat(), STREAM.as_bytes());
        for cut in 0..=STREAM.len() {
            assert_eq!(whole(&[cut]), expected, "cut at {cut}");
            for second in cut..=STREAM.len() {
                assert_eq!(whole(&[cut, second]), expected, "cut at {cut} and {second}");
            }
        }
        assert_eq!(whole(&(0..STREAM.len()).collect::<Vec<_>>()), expected);
    }

    #[test]
    fn the_data_of_events_is_found() {
        let all: Vec<_> = whole(&[]).iter().map(|event| data(event).map(Cow::into_owned)).collect();
        let text = |text: &str| Some(text.as_bytes().to_vec());
        assert_eq!(all, [text("{\"a\":1}"), None, text("x"), text("y\nz"), text("[DONE]")]);
    }

    #[test]
    fn an_event_without_an_end_is_refused() {
        let mut splitter = Splitter::default();
        let piece = Bytes::from(vec![b'x'; EVENT_BYTES_MAX / 2 + 1]);
        assert_eq!(splitter.push(piece.clone()), Ok(Bytes::new()));
        assert_eq!(splitter.push(piece), Err(TooLong));
    }

    #[test]
    fn tokens_of_chunks_are_counted_and_known_where_the_engine_says_them() {
        let tokens = |text: &str| {
            let mut ids = Vec::new();
            Chunk::parse(text.as_bytes()).unwrap().tokens(&mut ids).map(|tokens| (tokens, ids))
        };
        let known = |ids: &[u32]| Some((Tokens { many: ids.len() as u32, known: true }, ids.to_vec()));
        assert_eq!(tokens(r#"{"choices":[{"text":" a b","token_ids":[7,8]}]}"#), known(&[7, 8]));
        // A token that completes no character has no text, and counts.
        assert_eq!(tokens(r#"{"choices":[{"text":"","token_ids":[7]}]}"#), known(&[7]));
        let one = Some((Tokens { many: 1, known: false }, Vec::new()));
        assert_eq!(tokens(r#"{"choices":[{"delta":{"content":"a"}}]}"#), one);
        assert_eq!(tokens(r#"{"choices":[{"delta":{"role":"assistant","content":""}}]}"#), None);
        assert_eq!(tokens(r#"{"choices":[],"usage":{}}"#), None);
        assert_eq!(tokens(r#"{"choices":[{"text":"","token_ids":[]}]}"#), None);
    }
}
