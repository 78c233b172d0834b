//! One request: from its fields to an engine that answers, as often as it takes.
//!
//! ```text
//!   begin ──▶ decide ──▶ prefill (vLLM: before; SGLang: beside) ──▶ decode: its head
//!               ▲            │ failed                                 │ failed
//!               └── avoid ◀──┴────────────────────────────────────────┘   at most `attempts_max` times
//! ```

use std::borrow::Cow;
use std::sync::Arc;
use std::time::Duration;

use conductor_core::InstanceId;
use hyper::StatusCode;
use hyper::body::Bytes;
use hyper::header::{HeaderMap, HeaderValue};
use serde::Deserialize;
use serde_json::value::RawValue;
use tokio::task::JoinHandle;
use tokio::time::Instant;

use super::client::{Exchange, Message};
use super::counters::Counters;
use super::place::{Ask, Engine, Handover, Placed, Progress, Refused, Reservation};
use super::request::{Fields, Prompt};
use super::{Core, Place};

/// Longest answer of a prefill engine, bytes; it has one token.
const PREFILL_BYTES_MAX: usize = 16 << 20;
/// Longest error of an engine that is passed on, bytes.
const ERROR_BYTES_MAX: usize = 1 << 20;

/// Tokens that `/v1/completions` generates where a request does not say how many (OpenAI, vLLM, SGLang).
const OUTPUT_TOKENS: u32 = 16;

/// What a request asks for, as far as the proxy has to know.
#[derive(Clone, Debug)]
pub(crate) struct Wanted {
    pub(crate) model: String,
    pub(crate) is_chat: bool,
    pub(crate) stream: bool,
    pub(crate) with_usage: bool,
    /// The client asked for token ids itself.
    pub(crate) with_ids: bool,
    pub(crate) output_tokens_max: Option<u32>,
    pub(crate) salt: String,
    /// Its output can be continued from its tokens alone.
    pub(crate) continuable: bool,
}

/// Fields without which the rest of an output does not follow from the tokens before it, with the values that
/// do no harm.
const OBSTACLES: [(&str, &[&str]); 17] = [
    ("n", &["1"]),
    ("best_of", &["1"]),
    ("echo", &["false"]),
    ("logprobs", &["false"]),
    ("top_logprobs", &["0"]),
    ("prompt_logprobs", &["0"]),
    ("stop", &["[]"]),
    ("tools", &["[]"]),
    ("response_format", &["{\"type\":\"text\"}"]),
    ("structured_outputs", &[]),
    ("guided_json", &[]),
    ("guided_regex", &[]),
    ("guided_choice", &[]),
    ("guided_grammar", &[]),
    ("presence_penalty", &["0", "0.0"]),
    ("frequency_penalty", &["0", "0.0"]),
    ("use_beam_search", &["false"]),
];

#[derive(Default, Deserialize)]
#[serde(default)]
struct StreamOptions {
    include_usage: bool,
}

impl Wanted {
    /// Reads the fields that matter.
    ///
    /// # Errors
    /// One of them is missing or has another type than it should.
    pub(crate) fn parse(fields: &Fields, is_chat: bool) -> Result<Self, String> {
        let model = fields.parsed("model")?.ok_or("send the field `model`")?;
        let mut output = match fields.parsed("max_completion_tokens")? {
            None => fields.parsed("max_tokens")?,
            some => some,
        };
        if output.is_none() && !is_chat {
            output = Some(OUTPUT_TOKENS);
        }
        if output == Some(0) {
            return Err("max_tokens: send at least 1".to_owned());
        }
        let options: StreamOptions = fields.parsed("stream_options")?.unwrap_or_default();
        let harmless =
            |(name, values): &(&str, &[&str])| fields.get(name).is_none_or(|value| values.contains(&value));
        Ok(Self {
            model,
            is_chat,
            stream: fields.parsed("stream")?.unwrap_or(false),
            with_usage: options.include_usage,
            with_ids: fields.parsed("return_token_ids")?.unwrap_or(false),
            output_tokens_max: output,
            salt: fields.parsed("cache_salt")?.unwrap_or_default(),
            continuable: OBSTACLES.iter().all(harmless),
        })
    }

    pub(crate) fn path(&self) -> &'static str {
        if self.is_chat { "/v1/chat/completions" } else { "/v1/completions" }
    }
}

/// An answer that ends a request before its stream begins.
#[derive(Debug)]
pub(crate) enum Stop {
    /// The proxy's own.
    Own {
        /// Its status.
        status: StatusCode,
        /// What to tell the client.
        message: String,
        /// When to try again.
        retry_after: Option<Duration>,
    },
    /// An engine's, which is passed on.
    Engine { status: StatusCode, content_type: Option<HeaderValue>, body: Bytes },
}

impl Stop {
    pub(crate) fn own(status: StatusCode, message: impl Into<String>) -> Self {
        Self::Own { status, message: message.into(), retry_after: None }
    }
}

/// A reservation, which ends exactly once: [`done`](Self::done), or otherwise when it is dropped.
#[derive(Debug)]
pub(crate) struct Reserved<P: Place> {
    place: Arc<P>,
    reservation: Reservation,
    /// What is reported at the end.
    ending: Progress,
}

impl<P: Place> Reserved<P> {
    fn new(place: &Arc<P>, reservation: Reservation) -> Self {
        Self { place: Arc::clone(place), reservation, ending: Progress::Failed }
    }

    pub(crate) fn report(&self, progress: Progress) {
        self.place.report(self.reservation, progress);
    }

    pub(crate) fn done(mut self) {
        self.ending = Progress::Done;
    }
}

impl<P: Place> Drop for Reserved<P> {
    fn drop(&mut self) {
        self.place.report(self.reservation, self.ending);
    }
}

/// A task that ends with this.
#[derive(Debug)]
pub(crate) struct Task<T>(JoinHandle<T>);

impl<T> Drop for Task<T> {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// An engine that answers.
#[derive(Debug)]
pub(crate) struct Attempt<P: Place> {
    pub(crate) reserved: Reserved<P>,
    pub(crate) placed: Placed,
    pub(crate) exchange: Exchange,
    /// SGLang's prefill, beside the decode; `None` once it has ended well.
    pub(crate) prefill: Option<Prefill>,
    /// When the decision was made.
    pub(crate) decided: Instant,
}

/// An engine did not do what it should.
#[derive(Debug)]
pub(crate) struct Failed {
    pub(crate) engines: Vec<InstanceId>,
    /// It is not reachable, rather than busy or wrong.
    pub(crate) is_gone: bool,
    pub(crate) why: String,
    /// What it answered.
    pub(crate) answer: Option<Box<Stop>>,
}

/// One request.
#[derive(Debug)]
pub(crate) struct Session<P: Place> {
    pub(crate) core: Arc<Core<P>>,
    pub(crate) fields: Fields,
    pub(crate) wanted: Wanted,
    /// The prompt's tokens; `None` when no engine tells them.
    pub(crate) tokens: Option<Arc<[u32]>>,
    pub(crate) headers: HeaderMap,
    pub(crate) tenant: String,
    pub(crate) began: Instant,
    /// When all of it was there.
    pub(crate) received: Instant,
    pub(crate) avoid: Vec<InstanceId>,
    pub(crate) attempts: u32,
    /// Time that engines took; the rest is the proxy's own.
    pub(crate) with_engines: Duration,
}

/// What is asked of the engines: the request itself, or the rest of it.
pub(crate) struct Asked<'a> {
    pub(crate) path: &'static str,
    pub(crate) changes: Vec<(&'a str, Option<Cow<'a, str>>)>,
}

impl<P: Place> Session<P> {
    /// A request that began then and has just arrived.
    pub(crate) fn new(
        core: &Arc<Core<P>>,
        (fields, wanted): (Fields, Wanted),
        headers: HeaderMap,
        tenant: String,
        began: Instant,
    ) -> Self {
        Self {
            core: Arc::clone(core),
            fields,
            wanted,
            tokens: None,
            headers,
            tenant,
            began,
            received: Instant::now(),
            avoid: Vec::new(),
            attempts: 0,
            with_engines: Duration::ZERO,
        }
    }

    /// Finds the prompt's tokens.
    pub(crate) async fn tokenize(&mut self) -> Result<(), Stop> {
        let bad = |message: String| Stop::own(StatusCode::BAD_REQUEST, message);
        if !self.wanted.is_chat {
            let prompt = self.fields.get("prompt").ok_or_else(|| bad("send the field `prompt`".into()))?;
            if let Prompt::Ids(ids) = Prompt::parse(prompt).map_err(|why| bad(format!("prompt: {why}")))? {
                self.tokens = Some(ids.into());
                return Ok(());
            }
        } else if self.fields.get("messages").is_none_or(|messages| !messages.starts_with('[')) {
            return Err(bad("send the field `messages`, an array".into()));
        }
        let Some(engine) = self.core.place.tokenizer(&self.wanted.model) else { return Ok(()) };
        let begun = Instant::now();
        let limit = self.core.limits.tokenize_time_max;
        let tokenizer = &self.core.tokenizer;
        self.tokens = tokenizer.tokens(&self.fields, &self.wanted.model, &engine, &self.headers, limit).await;
        self.with_engines += begun.elapsed();
        Ok(())
    }

    /// Asks engines until one begins to answer. `output`: tokens that were generated so far.
    pub(crate) async fn attempt(&mut self, asked: &Asked<'_>, output: &[u32]) -> Result<Attempt<P>, Stop> {
        let prompt = self.tokens.clone().unwrap_or_default();
        let tokens: Cow<'_, [u32]> = match output.is_empty() {
            true => Cow::Borrowed(&prompt),
            false => Cow::Owned([&prompt, output].concat()),
        };
        loop {
            let failed = match self.attempt_once(asked, &tokens).await? {
                Ok(attempt) => return Ok(attempt),
                Err(failed) => failed,
            };
            let stop = Stop::own(StatusCode::BAD_GATEWAY, format!("no engine answered: {}", failed.why));
            self.failed(&failed);
            if self.attempts >= self.core.limits.attempts_max {
                return Err(failed.answer.map_or(stop, |answer| *answer));
            }
        }
    }

    /// Remembers what failed.
    pub(crate) fn failed(&mut self, failed: &Failed) {
        tracing::debug!(why = failed.why, "a request goes elsewhere");
        Counters::add(&self.core.counters.retries, 1);
        for &engine in &failed.engines {
            if failed.is_gone {
                self.core.place.suspect(engine);
            }
            if !self.avoid.contains(&engine) {
                self.avoid.push(engine);
            }
        }
    }

    async fn attempt_once(
        &mut self,
        asked: &Asked<'_>,
        tokens: &[u32],
    ) -> Result<Result<Attempt<P>, Failed>, Stop> {
        self.attempts += 1;
        let (placed, reserved) = self.decide(tokens, None)?;
        let decided = Instant::now();
        let answered = match (&placed.prefill.handover, placed.prefill.instance == placed.decode.instance) {
            (_, true) => self.send(&placed.decode, asked, &[]).await.map(|exchange| (exchange, None)),
            (Handover::KvTransferParams, _) => {
                self.hand_over(&placed, asked, &reserved).await.map(|exchange| (exchange, None))
            }
            (Handover::Bootstrap { host, port }, _) => self.bootstrap(&placed, asked, host, *port).await,
        };
        self.with_engines += decided.elapsed();
        let (mut exchange, prefill) = match answered {
            Ok(answered) => answered,
            Err(failed) => return Ok(Err(failed)),
        };
        let status = exchange.status();
        if status.is_success() {
            return Ok(Ok(Attempt { reserved, placed, exchange, prefill, decided }));
        }
        let body = exchange.collect(ERROR_BYTES_MAX).await.unwrap_or_default();
        let content_type = exchange.headers().get(hyper::header::CONTENT_TYPE).cloned();
        exchange.finish(&placed.decode.pool);
        let answer = Stop::Engine { status, content_type, body };
        if status.is_server_error() || status == StatusCode::TOO_MANY_REQUESTS {
            let engines = vec![placed.decode.instance];
            let why = format!("an engine answered {status}");
            return Ok(Err(Failed { engines, is_gone: false, why, answer: Some(Box::new(answer)) }));
        }
        // The request itself is wrong, which no other engine will see otherwise.
        reserved.done();
        Err(answer)
    }

    /// Chooses engines, and reserves room on them. `among`: addresses of the engines that may get the
    /// request.
    pub(crate) fn decide(
        &self,
        tokens: &[u32],
        among: Option<&[String]>,
    ) -> Result<(Placed, Reserved<P>), Stop> {
        let ask = Ask {
            tenant: &self.tenant,
            model: &self.wanted.model,
            lora: "",
            salt: &self.wanted.salt,
            tokens,
            output_tokens_max: self.wanted.output_tokens_max,
            waited: self.began.elapsed(),
            avoid: &self.avoid,
            among,
        };
        let place = &self.core.place;
        let placed = place.decide(&ask).map_err(|refused| self.refusal(refused))?;
        let reserved = Reserved::new(place, placed.reservation);
        Ok((placed, reserved))
    }

    fn refusal(&self, refused: Refused) -> Stop {
        match refused {
            Refused::NoModel => {
                let models = self.core.place.models().join(", ");
                let message = format!("no engine serves {:?}; there are: {models}", self.wanted.model);
                Stop::own(StatusCode::NOT_FOUND, message)
            }
            Refused::NoEngine => Stop::Own {
                status: StatusCode::SERVICE_UNAVAILABLE,
                message: format!("no engine of {:?} can be used now", self.wanted.model),
                retry_after: Some(Duration::from_secs(1)),
            },
            Refused::Overloaded { retry_after } => Stop::Own {
                status: StatusCode::TOO_MANY_REQUESTS,
                message: "the objective cannot be met now: try again later".to_owned(),
                retry_after: Some(retry_after),
            },
        }
    }

    /// Sends what is asked to one engine, with further changes.
    async fn send(
        &self,
        engine: &Engine,
        asked: &Asked<'_>,
        changes: &[(&str, Option<Cow<'_, str>>)],
    ) -> Result<Exchange, Failed> {
        let body = self.body(asked, changes);
        let message = Message { path: asked.path, body: Some(&body), headers: &self.headers };
        post(engine, message, self.core.limits.head_time_max).await
    }

    /// The client's fields, with the changes of all requests, those of this one, and further ones. The last
    /// change of a field counts.
    fn body(&self, asked: &Asked<'_>, changes: &[(&str, Option<Cow<'_, str>>)]) -> Bytes {
        let mut all: Vec<(&str, Option<Cow<'_, str>>)> = Vec::with_capacity(16);
        for (name, value) in changes.iter().chain(&asked.changes).chain(&self.changes_of_all()) {
            if !all.iter().any(|(other, _)| other == name) {
                all.push((name, value.clone()));
            }
        }
        self.fields.with(&all)
    }

    /// Fields that no client may set for an engine, and the ids that make a continuation possible.
    fn changes_of_all(&self) -> Vec<(&'static str, Option<Cow<'static, str>>)> {
        let mut changes: Vec<(&'static str, Option<Cow<'static, str>>)> =
            ["kv_transfer_params", "bootstrap_host", "bootstrap_port", "bootstrap_room"]
                .map(|name| (name, None))
                .into();
        if self.asks_for_ids() {
            changes.push(("return_token_ids", Some("true".into())));
        }
        changes
    }

    /// Whether the proxy asks for ids that the client did not ask for.
    pub(crate) fn asks_for_ids(&self) -> bool {
        self.wanted.stream && self.wanted.continuable && !self.wanted.with_ids && self.core.limits.continues
    }

    /// vLLM: one token of the prefill engine, whose answer says where the blocks are.
    async fn hand_over(
        &self,
        placed: &Placed,
        asked: &Asked<'_>,
        reserved: &Reserved<P>,
    ) -> Result<Exchange, Failed> {
        #[derive(Deserialize)]
        struct Prefilled<'a> {
            #[serde(borrow, default)]
            kv_transfer_params: Option<&'a RawValue>,
        }
        let one = |name: &'static str| (name, Some(Cow::Borrowed("1")));
        let ask = "{\"do_remote_decode\":true,\"do_remote_prefill\":false,\"remote_engine_id\":null,\
            \"remote_block_ids\":null,\"remote_host\":null,\"remote_port\":null}";
        let mut changes = vec![
            ("stream", Some("false".into())),
            ("stream_options", None),
            ("return_token_ids", None),
            ("min_tokens", None),
            one("max_tokens"),
            ("kv_transfer_params", Some(ask.into())),
        ];
        if self.fields.get("max_completion_tokens").is_some() {
            changes.push(one("max_completion_tokens"));
        }
        let mut exchange = self.send(&placed.prefill, asked, &changes).await?;
        let status = exchange.status();
        let body = whole(&mut exchange, &placed.prefill, self.core.limits.head_time_max).await?;
        let content_type = exchange.headers().get(hyper::header::CONTENT_TYPE).cloned();
        if status.is_client_error() && status != StatusCode::TOO_MANY_REQUESTS {
            // The decode engine will say the same, and its answer is passed on.
            tracing::debug!(%status, "a prefill engine refused a request");
            exchange.finish(&placed.prefill.pool);
            return self.send(&placed.decode, asked, &[]).await;
        }
        let failed = |why: String, answer| Failed {
            engines: vec![placed.prefill.instance],
            is_gone: false,
            why,
            answer,
        };
        if !status.is_success() {
            let why = format!("a prefill engine answered {status}");
            return Err(failed(why, Some(Box::new(Stop::Engine { status, content_type, body }))));
        }
        let prefilled: Prefilled<'_> = serde_json::from_slice(&body)
            .map_err(|error| failed(format!("a prefill engine's answer: {error}"), None))?;
        exchange.finish(&placed.prefill.pool);
        reserved.report(Progress::Prefilled);
        // Without parameters there is nothing to fetch: the prompt is shorter than a block.
        let params = prefilled.kv_transfer_params.map(|params| Cow::Borrowed(params.get()));
        self.send(&placed.decode, asked, &[("kv_transfer_params", params)]).await
    }

    /// SGLang: the same request to both, which meet in a room.
    async fn bootstrap(
        &self,
        placed: &Placed,
        asked: &Asked<'_>,
        host: &str,
        port: u16,
    ) -> Result<(Exchange, Option<Prefill>), Failed> {
        let host = serde_json::to_string(host).unwrap_or_default();
        let changes = [
            ("bootstrap_host", Some(host.into())),
            ("bootstrap_port", Some(port.to_string().into())),
            ("bootstrap_room", Some(self.core.room().to_string().into())),
        ];
        let body = self.body(asked, &changes);
        let (engine, path, limits) = (placed.prefill.clone(), asked.path, self.core.limits);
        let (prefill_body, headers) = (body.clone(), self.headers.clone());
        let mut prefill = Some(Task(tokio::spawn(async move {
            let message = Message { path, body: Some(&prefill_body), headers: &headers };
            let mut exchange = post(&engine, message, limits.head_time_max).await?;
            let status = exchange.status();
            whole(&mut exchange, &engine, limits.head_time_max).await?;
            exchange.finish(&engine.pool);
            match status.is_success() {
                true => Ok(()),
                false => Err(Failed {
                    engines: vec![engine.instance],
                    is_gone: false,
                    why: format!("a prefill engine answered {status}"),
                    answer: None,
                }),
            }
        })));
        let message = Message { path, body: Some(&body), headers: &self.headers };
        let mut decode = std::pin::pin!(post(&placed.decode, message, limits.head_time_max));
        loop {
            tokio::select! {
                sent = decode.as_mut() => return Ok((sent?, prefill)),
                ended = ended(&mut prefill) => {
                    prefill = None;
                    ended?;
                }
            }
        }
    }
}

/// Sends a message to an engine.
async fn post(engine: &Engine, message: Message<'_>, time_max: Duration) -> Result<Exchange, Failed> {
    let sent = engine.pool.send(message, time_max).await;
    sent.map_err(|error| gone(engine, &error.to_string()))
}

/// The whole answer of a prefill engine.
async fn whole(exchange: &mut Exchange, engine: &Engine, time_max: Duration) -> Result<Bytes, Failed> {
    match tokio::time::timeout(time_max, exchange.collect(PREFILL_BYTES_MAX)).await {
        Ok(Ok(body)) => Ok(body),
        Ok(Err(error)) => Err(gone(engine, &format!("its answer: {error:?}"))),
        Err(_) => Err(gone(engine, "its answer did not end in time")),
    }
}

fn gone(engine: &Engine, why: &str) -> Failed {
    let why = format!("{}: {why}", engine.pool.address());
    Failed { engines: vec![engine.instance], is_gone: true, why, answer: None }
}

/// SGLang's prefill, beside the decode.
pub(crate) type Prefill = Task<Result<(), Failed>>;

/// How a prefill ended; never, when there is none.
pub(crate) async fn ended(prefill: &mut Option<Prefill>) -> Result<(), Failed> {
    match prefill {
        None => std::future::pending().await,
        Some(task) => (&mut task.0).await.unwrap_or_else(|error| {
            let why = format!("the prefill: {error}");
            Err(Failed { engines: Vec::new(), is_gone: false, why, answer: None })
        }),
    }
}
