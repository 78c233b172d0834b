//! A stream of an engine on its way to a client, and what happens when the engine dies in the middle.
//!
//! What a client got is never repeated, and nothing is left out:
//!
//! * Only whole events are passed on; what an engine began to write is not.
//! * Before the first token the request is sent again.
//! * After it the output is continued: another engine gets the prompt and the tokens so far, which the proxy
//!   knows because it asked the engine for ids. Its chunks get the form, the id and the counts of the stream
//!   that the client reads. With greedy sampling this is the output that the first engine would have made;
//!   with random sampling it is a valid output with the same beginning.
//! * Where that is not possible (ids are not told; several choices, tools, a grammar, stop strings or
//!   penalties on the output), the stream ends with an error event and without `[DONE]`.

use std::borrow::Cow;
use std::fmt::Write as _;
use std::ops::Range;

use hyper::body::Bytes;
use serde_json::value::RawValue;
use serde_json::{Value, json};

use super::body::Sink;
use super::counters::Counters;
use super::place::{Place, Progress};
use super::session::{Asked, Attempt, Failed, Session, Stop, ended};
use super::sse::{Chunk, Splitter, data, events};

/// A stream on its way.
#[derive(Debug)]
pub(crate) struct Relay<P: Place> {
    session: Session<P>,
    splitter: Splitter,
    /// Ids of the output so far.
    output: Vec<u32>,
    /// Tokens so far.
    sent: u32,
    /// All of them are in `output`.
    exact: bool,
    /// The role of a chat was sent.
    role_sent: bool,
    /// A chunk said why the output ended.
    is_last: bool,
    /// The stream's end was seen.
    is_done: bool,
    /// What chunks of this stream have in common.
    common: Option<Common>,
    /// How chunks of another engine become chunks of this stream.
    rewrite: Option<Rewrite>,
}

#[derive(Clone, Debug)]
struct Common {
    id: Value,
    created: Value,
    model: Value,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Rewrite {
    /// They are of the same kind.
    Same,
    /// They are chunks of a text, and become chunks of a chat.
    TextToChat,
}

/// Why an engine's stream ended too early, and the error event that the engine sent, if any.
type Broken = (Failed, Option<Bytes>);

impl<P: Place> Relay<P> {
    pub(crate) fn new(session: Session<P>) -> Self {
        Self {
            session,
            splitter: Splitter::default(),
            output: Vec::new(),
            sent: 0,
            exact: true,
            role_sent: false,
            is_last: false,
            is_done: false,
            common: None,
            rewrite: None,
        }
    }

    /// Passes an answer on, from as many engines as it takes.
    pub(crate) async fn run(mut self, mut attempt: Attempt<P>, sink: Sink) {
        loop {
            let (failed, said) = match self.pump(&mut attempt, &sink).await {
                Ok(()) => {
                    Counters::add(&self.session.core.counters.done, 1);
                    attempt.exchange.finish(&attempt.placed.decode.pool);
                    attempt.reserved.done();
                    return;
                }
                Err(broken) => broken,
            };
            // Ends the reservation and closes the connection, before anything else is reserved.
            drop(attempt);
            self.session.failed(&failed);
            if self.is_last {
                Counters::add(&self.session.core.counters.done, 1);
                sink.send(self.closing(false)).await;
                return;
            }
            attempt = match self.resume().await {
                Ok(Some(attempt)) => attempt,
                Ok(None) => {
                    Counters::add(&self.session.core.counters.done, 1);
                    sink.send(self.closing(true)).await;
                    return;
                }
                Err(stop) => {
                    Counters::add(&self.session.core.counters.broken, 1);
                    sink.send(said.unwrap_or_else(|| error_event(&failed, &stop))).await;
                    return;
                }
            };
        }
    }

    /// Passes on what an engine sends until its stream ends.
    async fn pump(&mut self, attempt: &mut Attempt<P>, sink: &Sink) -> Result<(), Broken> {
        let engine = &attempt.placed.decode;
        let gone = |why: String| {
            let why = format!("{}: {why}", engine.pool.address());
            (Failed { engines: vec![engine.instance], is_gone: true, why, answer: None }, None)
        };
        self.splitter = Splitter::default();
        let limit = self.session.core.limits.idle_time_max;
        let mut is_first = true;
        loop {
            let next = tokio::select! {
                next = tokio::time::timeout(limit, attempt.exchange.next()) => next,
                prefilled = ended(&mut attempt.prefill) => {
                    attempt.prefill = None;
                    // When tokens come, the prefill has done its part, however it ended.
                    match prefilled {
                        Err(failed) if self.sent == 0 => return Err((failed, None)),
                        _ => attempt.reserved.report(Progress::Prefilled),
                    }
                    continue;
                }
            };
            let bytes = match next {
                Err(_) => return Err(gone(format!("nothing came for {limit:?}"))),
                Ok(None) if self.is_done || self.is_last => return Ok(()),
                Ok(None) => return Err(gone("the stream ended before the output did".into())),
                Ok(Some(Err(_))) if self.is_done => return Ok(()),
                Ok(Some(Err(error))) => return Err(gone(error.to_string())),
                Ok(Some(Ok(bytes))) => bytes,
            };
            let piece = self.splitter.push(bytes).map_err(|_| gone("an event is too long".into()))?;
            let before = self.sent;
            let (passed, error) = self.pass(piece);
            if self.sent > before {
                if before == 0 {
                    self.session.core.counters.first_token(&self.session, attempt);
                }
                if std::mem::take(&mut is_first) {
                    attempt.reserved.report(Progress::FirstToken);
                }
                attempt.reserved.report(Progress::Tokens(self.sent - before));
                let more = u64::from(self.sent - before);
                Counters::add(&self.session.core.counters.output_tokens, more);
            }
            if !passed.is_empty() {
                sink.send(passed).await;
            }
            if let Some(event) = error {
                let why = format!("an engine's error: {}", String::from_utf8_lossy(&event));
                let engines = vec![attempt.placed.decode.instance];
                return Err((Failed { engines, is_gone: false, why, answer: None }, Some(event)));
            }
        }
    }

    /// What of these events the client gets, and an error event, after which nothing is passed.
    fn pass(&mut self, piece: Bytes) -> (Bytes, Option<Bytes>) {
        // Made when the first event is not passed on as it is.
        let mut changed: Option<Vec<u8>> = None;
        let mut at = 0;
        for event in events(&piece) {
            let (begin, end) = (at, at + event.len());
            at = end;
            match self.pass_one(event) {
                Passed::AsIs => {
                    if let Some(changed) = &mut changed {
                        changed.extend_from_slice(event);
                    }
                }
                Passed::Changed(event) => {
                    changed.get_or_insert_with(|| piece[..begin].to_vec()).extend_from_slice(&event);
                }
                Passed::Error => {
                    let before = changed.map_or_else(|| piece.slice(..begin), Bytes::from);
                    return (before, Some(piece.slice(begin..end)));
                }
            }
        }
        (changed.map_or(piece, Bytes::from), None)
    }

    fn pass_one(&mut self, event: &[u8]) -> Passed {
        let Some(data) = data(event) else { return Passed::AsIs };
        if data[..] == *b"[DONE]" {
            self.is_done = true;
            return Passed::AsIs;
        }
        let Some(chunk) = Chunk::parse(&data) else { return Passed::AsIs };
        if chunk.error.is_some() {
            return Passed::Error;
        }
        let tokens = chunk.tokens(&mut self.output);
        if let Some(tokens) = tokens {
            self.sent += tokens.many;
            self.exact &= tokens.known;
        }
        self.is_last |= chunk.is_last();
        if let Some(rewrite) = self.rewrite {
            return Passed::Changed(self.rewritten(&data, rewrite, tokens.is_some()));
        }
        self.role_sent = true;
        if self.common.is_none() {
            let value = |raw: Option<&RawValue>| {
                raw.and_then(|raw| serde_json::from_str(raw.get()).ok()).unwrap_or(Value::Null)
            };
            let (id, created, model) = (value(chunk.id), value(chunk.created), value(chunk.model));
            self.common = Some(Common { id, created, model });
        }
        match (self.session.asks_for_ids(), &data) {
            (true, Cow::Borrowed(data)) => without_ids(event, data, &chunk),
            _ => Passed::AsIs,
        }
    }

    /// Asks another engine for the rest. `None`: there is no rest.
    async fn resume(&mut self) -> Result<Option<Attempt<P>>, Stop> {
        let impossible = |why: &str| Stop::own(hyper::StatusCode::BAD_GATEWAY, why);
        if self.session.attempts >= self.session.core.limits.attempts_max {
            return Err(impossible("too many engines failed"));
        }
        self.rewrite = self.common.is_some().then_some(Rewrite::Same);
        if self.sent == 0 {
            let asked = Asked { path: self.session.wanted.path(), changes: Vec::new() };
            return self.session.attempt(&asked, &[]).await.map(Some);
        }
        let Some(prompt) = self.session.tokens.clone() else {
            return Err(impossible("the prompt's tokens are not known"));
        };
        if !self.exact || !self.session.wanted.continuable || !self.session.core.limits.continues {
            return Err(impossible("this output cannot be continued by another engine"));
        }
        let most = self.session.wanted.output_tokens_max.or_else(|| {
            let all = self.session.core.tokenizer.model_tokens_max(&self.session.wanted.model)?;
            Some(all.saturating_sub(prompt.len() as u32))
        });
        let Some(most) = most else { return Err(impossible("the longest output is not known")) };
        if self.sent >= most {
            return Ok(None);
        }
        if self.session.wanted.is_chat {
            self.rewrite = Some(Rewrite::TextToChat);
        }
        let mut ids = String::with_capacity((prompt.len() + self.output.len()) * 6);
        ids.push('[');
        for id in prompt.iter().chain(&self.output) {
            let _ = write!(ids, "{id},");
        }
        ids.pop();
        ids.push(']');
        let mut changes = vec![
            ("prompt", Some(ids.into())),
            ("max_tokens", Some((most - self.sent).to_string().into())),
            ("return_token_ids", Some("true".into())),
        ];
        if let Some(least) = self.session.fields.parsed::<u32>("min_tokens").ok().flatten() {
            changes.push(("min_tokens", Some(least.saturating_sub(self.sent).to_string().into())));
        }
        changes.extend(CHAT_ONLY.map(|name| (name, None)));
        let asked = Asked { path: "/v1/completions", changes };
        Counters::add(&self.session.core.counters.continued, 1);
        self.session.attempt(&asked, &self.output).await.map(Some)
    }

    /// An event of another engine as an event of this stream; empty when the client has it already.
    fn rewritten(&mut self, data: &[u8], rewrite: Rewrite, has_tokens: bool) -> Vec<u8> {
        let Ok(Value::Object(mut chunk)) = serde_json::from_slice(data) else { return Vec::new() };
        let has_usage = chunk.get("usage").is_some_and(|usage| !usage.is_null());
        let nothing_new = !has_tokens && !self.is_last && !has_usage;
        if nothing_new && self.role_sent {
            return Vec::new();
        }
        if let Some(common) = &self.common {
            chunk.insert("id".into(), common.id.clone());
            chunk.insert("created".into(), common.created.clone());
            chunk.insert("model".into(), common.model.clone());
        }
        if has_usage {
            chunk.insert("usage".into(), self.usage());
        }
        if rewrite == Rewrite::TextToChat {
            chunk.insert("object".into(), "chat.completion.chunk".into());
        }
        if !self.session.wanted.with_ids {
            chunk.remove("prompt_token_ids");
        }
        for choice in chunk.get_mut("choices").and_then(Value::as_array_mut).into_iter().flatten() {
            let Some(choice) = choice.as_object_mut() else { continue };
            if !self.session.wanted.with_ids {
                choice.remove("token_ids");
            }
            if rewrite == Rewrite::TextToChat {
                let text = choice.remove("text").unwrap_or(Value::Null);
                choice.insert("delta".into(), json!({"content": text}));
            }
        }
        let mut event = b"data: ".to_vec();
        // A map of values can always be written.
        let _ = serde_json::to_writer(&mut event, &chunk);
        event.extend_from_slice(b"\n\n");
        event
    }

    /// The end of a stream whose engine did not write it.
    fn closing(&self, with_reason: bool) -> Bytes {
        let chat = self.session.wanted.is_chat;
        let object = if chat { "chat.completion.chunk" } else { "text_completion" };
        let mut chunk = json!({"object": object, "choices": []});
        if let Some(common) = &self.common {
            chunk["id"] = common.id.clone();
            chunk["created"] = common.created.clone();
            chunk["model"] = common.model.clone();
        }
        let mut text = String::new();
        if with_reason {
            let content = if chat { ("delta", json!({})) } else { ("text", json!("")) };
            let mut last = chunk.clone();
            last["choices"] = json!([{"index": 0, content.0: content.1, "finish_reason": "length"}]);
            let _ = write!(text, "data: {last}\n\n");
        }
        if self.session.wanted.with_usage {
            chunk["usage"] = self.usage();
            let _ = write!(text, "data: {chunk}\n\n");
        }
        text.push_str("data: [DONE]\n\n");
        text.into()
    }

    fn usage(&self) -> Value {
        let prompt = self.session.tokens.as_ref().map_or(0, |tokens| tokens.len() as u64);
        json!({
            "prompt_tokens": prompt,
            "completion_tokens": self.sent,
            "total_tokens": prompt + u64::from(self.sent),
        })
    }
}

/// What of an event is passed on.
enum Passed {
    AsIs,
    /// This, or nothing.
    Changed(Vec<u8>),
    Error,
}

/// Fields of a chat that `/v1/completions` does not know, or that were used when its text was made.
const CHAT_ONLY: [&str; 12] = [
    "messages",
    "max_completion_tokens",
    "chat_template",
    "chat_template_kwargs",
    "add_generation_prompt",
    "continue_final_message",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "documents",
    "reasoning_effort",
    "top_logprobs",
];

/// The event with null for ids that the client did not ask for.
fn without_ids(event: &[u8], data: &[u8], chunk: &Chunk<'_>) -> Passed {
    let choices = chunk.choices.as_deref().unwrap_or_default();
    let ids = choices.iter().filter_map(|choice| choice.token_ids).chain(chunk.prompt_token_ids);
    let start = |part: &[u8]| part.as_ptr() as usize;
    // Both borrow from the event, so that a place is a difference of addresses.
    let offset = start(data) - start(event);
    let mut cuts: Vec<Range<usize>> = ids
        .map(|raw| {
            let begin = offset + start(raw.get().as_bytes()) - start(data);
            begin..begin + raw.get().len()
        })
        .collect();
    if cuts.is_empty() {
        return Passed::AsIs;
    }
    cuts.sort_by_key(|cut| cut.start);
    let (mut out, mut at) = (Vec::with_capacity(event.len()), 0);
    for cut in cuts {
        out.extend_from_slice(&event[at..cut.start]);
        out.extend_from_slice(b"null");
        at = cut.end;
    }
    out.extend_from_slice(&event[at..]);
    Passed::Changed(out)
}

/// The end of a stream that could not be continued.
fn error_event(failed: &Failed, stop: &Stop) -> Bytes {
    let why = match stop {
        Stop::Own { message, .. } => message.clone(),
        Stop::Engine { status, .. } => format!("an engine answered {status}"),
    };
    let message = format!("{}; {why}", failed.why);
    let error = json!({"error": {"message": message, "type": "engine_error", "code": 502}});
    format!("data: {error}\n\n").into()
}
