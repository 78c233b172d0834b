//! The HTTP interface of a mock engine: OpenAI's, vLLM's and SGLang's, and what mock engines ask each other.

use std::fmt::Write as _;
use std::sync::Arc;
use std::time::Duration;

use hyper::body::Bytes;
use hyper::header::{self, HeaderMap, HeaderValue};
use hyper::{Method, Response, StatusCode};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

use super::batch::{Kv, Output, Root, Work};
use super::config::{Flavor, Role};
use super::tokens::{detokenize, template, tokenize};
use super::{Shared, VOCABULARY};
use crate::proxy::{Answer, Asked, CollectError, Message, Sink, collect};

/// Longest body of a request, bytes.
const BODY_BYTES_MAX: usize = 16 << 20;
/// Longest answer of another mock engine, bytes.
const PEER_BYTES_MAX: usize = 64 << 10;
/// Tokens that are generated where a request does not say how many.
const OUTPUT_TOKENS: u32 = 16;
/// How long a decode engine waits for a prefill engine.
const HANDOVER_TIME_MAX: Duration = Duration::from_secs(30);

/// A prompt of `/v1/completions` and `/tokenize`.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Prompt {
    Text(String),
    Ids(Vec<u32>),
}

#[derive(Debug, Deserialize)]
struct ChatMessage {
    role: String,
    #[serde(default)]
    content: Value,
}

/// The fields of a request that a mock engine knows. It ignores the others, as engines do.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Fields {
    model: Option<String>,
    prompt: Option<Prompt>,
    messages: Option<Vec<ChatMessage>>,
    max_tokens: Option<u32>,
    max_completion_tokens: Option<u32>,
    stream: Option<bool>,
    stream_options: Option<StreamOptions>,
    return_token_ids: Option<bool>,
    cache_salt: Option<String>,
    kv_transfer_params: Option<KvTransferParams>,
    bootstrap_host: Option<String>,
    bootstrap_port: Option<u16>,
    bootstrap_room: Option<u64>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct StreamOptions {
    include_usage: bool,
}

/// vLLM's parameters of a handover (its NIXL connector).
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct KvTransferParams {
    do_remote_decode: bool,
    do_remote_prefill: bool,
    remote_engine_id: Option<String>,
    remote_block_ids: Option<Vec<u64>>,
    remote_host: Option<String>,
    remote_port: Option<u16>,
}

/// An error answer, in OpenAI's form.
struct Refusal(StatusCode, String);

type Answered = Result<Response<Answer>, Refusal>;

/// Answers one request.
pub(super) async fn answer(engine: Arc<Shared>, request: Asked) -> Response<Answer> {
    let path = request.uri().path().to_owned();
    let answered = match (request.method(), path.as_str()) {
        (&Method::GET, "/health" | "/ping") => Ok(Response::new(Answer::Whole(None))),
        (&Method::GET, "/v1/models") => Ok(json_answer(&models(&engine))),
        (&Method::GET, "/server_info" | "/get_server_info") => Ok(json_answer(&server_info(&engine))),
        (&Method::GET, "/metrics") => Ok(Response::new(Answer::whole(metrics(&engine)))),
        (&Method::GET, path) if path.starts_with("/mock/room/") => room(&engine, path).await,
        (&Method::POST, "/reset_prefix_cache" | "/flush_cache") => {
            engine.with_batch(|batch| batch.clear_cache());
            engine.wake.notify_one();
            Ok(Response::new(Answer::Whole(None)))
        }
        (&Method::POST, "/v1/completions") => generate(&engine, request, false).await,
        (&Method::POST, "/v1/chat/completions") => generate(&engine, request, true).await,
        (&Method::POST, "/tokenize") => tokens_of(request).await,
        (&Method::POST, "/mock/kv") => hand_over(&engine, request).await,
        _ => Err(Refusal(StatusCode::NOT_FOUND, format!("there is nothing at {path}"))),
    };
    answered.unwrap_or_else(|Refusal(status, message)| {
        let code = status.as_u16();
        let body = json!({"error": {"message": message, "type": "mock_error", "code": code}});
        let mut response = json_answer(&body);
        *response.status_mut() = status;
        response
    })
}

fn json_answer(value: &Value) -> Response<Answer> {
    json_bytes(value.to_string())
}

fn json_bytes(text: impl Into<Bytes>) -> Response<Answer> {
    let mut response = Response::new(Answer::whole(text));
    let json = HeaderValue::from_static("application/json");
    response.headers_mut().insert(header::CONTENT_TYPE, json);
    response
}

fn bad(message: impl Into<String>) -> Refusal {
    Refusal(StatusCode::BAD_REQUEST, message.into())
}

async fn read<T: for<'de> Deserialize<'de>>(request: Asked) -> Result<T, Refusal> {
    let bytes = collect(&mut request.into_body(), BODY_BYTES_MAX).await.map_err(|error| match error {
        CollectError::TooLong => {
            Refusal(StatusCode::PAYLOAD_TOO_LARGE, format!("the body has more than {BODY_BYTES_MAX} bytes"))
        }
        CollectError::Broken => bad("the body ended early"),
    })?;
    serde_json::from_slice(&bytes).map_err(|error| bad(format!("the body: {error}")))
}

fn models(engine: &Shared) -> Value {
    json!({"object": "list", "data": [{
        "id": engine.config.model, "object": "model", "owned_by": "snowskin",
        "max_model_len": engine.config.model_tokens_max,
    }]})
}

/// SGLang's `/server_info`, as far as it is of use to find the streams.
fn server_info(engine: &Shared) -> Value {
    let config = &engine.config;
    let port = |addr: Option<std::net::SocketAddr>| addr.map(|addr| addr.port());
    json!({
        "model_path": config.model,
        "served_model_name": config.model,
        "page_size": config.block_tokens,
        "dp_size": 1,
        "max_running_requests": config.running_max,
        "max_total_num_tokens": u64::from(config.gpu_blocks) * u64::from(config.block_tokens),
        "disaggregation_mode": match config.role {
            Role::Prefill => "prefill",
            Role::Decode => "decode",
            Role::Both => "null",
        },
        "disaggregation_bootstrap_port": engine.http.port(),
        "kv_events": {
            "publisher": "zmq",
            "endpoint_host": engine.http.ip().to_string(),
            "endpoint_port_base": port(engine.events),
            "replay_endpoint_port_base": port(engine.replay),
            "block_size": config.block_tokens,
            "dp_size": 1,
            "topic": config.topic,
            "load_topic": "load",
            "load_endpoint_port_base": port(engine.load),
        },
    })
}

/// The metrics that routers read, under vLLM's names.
fn metrics(engine: &Shared) -> String {
    let load = engine.with_batch(|batch| batch.load());
    let mut text = String::new();
    let usage = load.tokens as f64 / load.tokens_max.max(1) as f64;
    for (name, kind, value) in [
        ("num_requests_running", "gauge", f64::from(load.running)),
        ("num_requests_waiting", "gauge", f64::from(load.waiting)),
        ("kv_cache_usage_perc", "gauge", usage),
        ("prefix_cache_queries_total", "counter", (load.prefilled_total + load.reused_total) as f64),
        ("prefix_cache_hits_total", "counter", load.reused_total as f64),
        ("generation_tokens_total", "counter", load.generated_total as f64),
    ] {
        let _ = writeln!(text, "# TYPE vllm:{name} {kind}");
        let _ = writeln!(text, "vllm:{name}{{model_name={:?}}} {value}", engine.config.model);
    }
    text
}

async fn tokens_of(request: Asked) -> Answered {
    let fields: Fields = read(request).await?;
    let tokens = prompt_tokens(&fields)?;
    Ok(json_answer(&json!({"count": tokens.len(), "tokens": tokens, "max_model_len": u32::MAX})))
}

fn prompt_tokens(fields: &Fields) -> Result<Vec<u32>, Refusal> {
    match (&fields.prompt, &fields.messages) {
        (Some(Prompt::Text(text)), None) => Ok(tokenize(text)),
        (Some(Prompt::Ids(ids)), None) => match ids.iter().find(|&&id| id >= VOCABULARY << 8) {
            Some(id) => Err(bad(format!("token id {id} is out of the vocabulary"))),
            None => Ok(ids.clone()),
        },
        (None, Some(messages)) => {
            let contents: Vec<String> = messages.iter().map(content).collect();
            let each = messages.iter().zip(&contents);
            Ok(tokenize(&template(each.map(|(message, content)| (message.role.as_str(), content.as_str())))))
        }
        _ => Err(bad("send a prompt or messages")),
    }
}

/// The text of a message: a string, or parts of which some have a text.
fn content(message: &ChatMessage) -> String {
    match &message.content {
        Value::String(text) => text.clone(),
        Value::Array(parts) => parts.iter().filter_map(|part| part.get("text")?.as_str()).collect(),
        _ => String::new(),
    }
}

/// One request on its way.
struct Run {
    engine: Arc<Shared>,
    is_chat: bool,
    /// Whether chunks carry token ids.
    with_ids: bool,
    with_usage: bool,
    id: u64,
    prompt_tokens: usize,
    output_tokens: u32,
    held: Option<u64>,
    /// vLLM's decode engine is told where the blocks are.
    tells_where: bool,
    outputs: UnboundedReceiver<Output>,
}

async fn generate(engine: &Arc<Shared>, request: Asked, is_chat: bool) -> Answered {
    let fields: Fields = read(request).await?;
    let config = &engine.config;
    if fields.model.as_ref().is_some_and(|model| *model != config.model) {
        return Err(Refusal(StatusCode::NOT_FOUND, format!("this engine serves {:?}", config.model)));
    }
    let tokens = prompt_tokens(&fields)?;
    let output_tokens = fields.max_completion_tokens.or(fields.max_tokens).unwrap_or(OUTPUT_TOKENS);
    let whole = tokens.len() as u64 + u64::from(output_tokens);
    if tokens.is_empty() || output_tokens == 0 || whole > u64::from(config.model_tokens_max) {
        let most = config.model_tokens_max;
        return Err(bad(format!("prompt and output have {whole} tokens: send from 1 + 1 to {most}")));
    }
    let kv = handover(engine, &fields, tokens.len()).await?;
    // A prefill engine of SGLang gets the whole request and computes the prompt only.
    let is_in_room = matches!(kv, Kv::Held(number) if number & ROOM != 0);
    let output_tokens = if is_in_room { 1 } else { output_tokens };
    let (out, outputs) = unbounded_channel();
    let prompt_tokens = tokens.len();
    let root = Root { lora: None, salt: fields.cache_salt.as_deref().map(Arc::from) };
    if !engine.with_batch(|batch| batch.submit(Work { tokens, root, output_tokens, kv, out })) {
        return Err(Refusal(StatusCode::SERVICE_UNAVAILABLE, "too many requests wait".into()));
    }
    engine.wake.notify_one();
    let run = Run {
        engine: Arc::clone(engine),
        is_chat,
        with_ids: fields.return_token_ids.unwrap_or(false) && config.flavor != Flavor::Sglang,
        with_usage: fields.stream_options.is_some_and(|options| options.include_usage),
        id: engine.number(),
        prompt_tokens,
        output_tokens,
        held: if let Kv::Held(number) = kv { Some(number) } else { None },
        tells_where: config.flavor != Flavor::Sglang,
        outputs,
    };
    if fields.stream.unwrap_or(false) {
        let mut response = Response::new(Answer::streamed(|sink| run.stream(sink)));
        let kind = HeaderValue::from_static("text/event-stream; charset=utf-8");
        response.headers_mut().insert(header::CONTENT_TYPE, kind);
        Ok(response)
    } else {
        run.collect().await
    }
}

/// Where the prompt's KV comes from. A decode engine fetches it here.
async fn handover(engine: &Arc<Shared>, fields: &Fields, prompt_tokens: usize) -> Result<Kv, Refusal> {
    let blocks = (prompt_tokens / engine.config.block_tokens.max(1) as usize).max(1) as u64;
    let config = &engine.config;
    let params = fields.kv_transfer_params.as_ref();
    if let Some(params) = params.filter(|params| params.do_remote_prefill) {
        let (Some(host), Some(port), Some(id), Some(ids)) =
            (&params.remote_host, params.remote_port, &params.remote_engine_id, &params.remote_block_ids)
        else {
            return Err(bad("kv_transfer_params: do_remote_prefill needs remote_host, remote_port, \
                remote_engine_id and remote_block_ids"));
        };
        let ask = json!({"engine_id": id, "block_ids": ids}).to_string().into();
        fetch(engine, host, port, "/mock/kv", Some(ask), prompt_tokens).await?;
        return Ok(Kv::Fetched);
    }
    if params.is_some_and(|params| params.do_remote_decode) {
        return Ok(Kv::Held(engine.numbers(blocks)));
    }
    match (fields.bootstrap_room, config.role) {
        (Some(room), Role::Prefill) => Ok(Kv::Held(room | ROOM)),
        (Some(room), Role::Decode) => {
            let (Some(host), Some(port)) = (&fields.bootstrap_host, fields.bootstrap_port) else {
                return Err(bad("bootstrap_room needs bootstrap_host and bootstrap_port"));
            };
            fetch(engine, host, port, &format!("/mock/room/{room}"), None, prompt_tokens).await?;
            Ok(Kv::Fetched)
        }
        _ => Ok(Kv::Own),
    }
}

/// Numbers of rooms, apart from those of blocks.
const ROOM: u64 = 1 << 63;

/// Fetches the KV of a prompt from another mock engine: a question, and the time that the bytes take.
async fn fetch(
    engine: &Arc<Shared>,
    host: &str,
    port: u16,
    path: &str,
    body: Option<Bytes>,
    tokens: usize,
) -> Result<(), Refusal> {
    let failed = |why: String| {
        let message = format!("KV transfer from {host}:{port} failed: {why}");
        Refusal(StatusCode::INTERNAL_SERVER_ERROR, message)
    };
    let pool = engine.peer(&format!("{host}:{port}")).ok_or_else(|| failed("no such host".into()))?;
    let headers = HeaderMap::new();
    let message = Message { path, body: body.as_ref(), headers: &headers };
    let mut exchange =
        pool.send(message, HANDOVER_TIME_MAX).await.map_err(|error| failed(error.to_string()))?;
    let status = exchange.status();
    exchange.collect(PEER_BYTES_MAX).await.map_err(|error| failed(format!("{error:?}")))?;
    exchange.finish(&pool);
    if status != StatusCode::OK {
        return Err(failed(status.to_string()));
    }
    let bytes = tokens as f64 * engine.config.cost.kv_bytes_per_token as f64;
    engine.spend(Duration::from_secs_f64(bytes / engine.config.transfer_bytes_per_s.max(1.0))).await;
    Ok(())
}

/// vLLM's side: blocks are named by the answer to the prefill request.
async fn hand_over(engine: &Arc<Shared>, request: Asked) -> Answered {
    #[derive(Deserialize)]
    struct Wanted {
        engine_id: String,
        block_ids: Vec<u64>,
    }
    let wanted: Wanted = read(request).await?;
    let number = wanted.block_ids.first().copied().unwrap_or(ROOM);
    let found = wanted.engine_id == engine.id
        && number & ROOM == 0
        && engine.with_batch(|batch| batch.release_held(number));
    if !found {
        return Err(Refusal(StatusCode::NOT_FOUND, "these blocks are not held here".into()));
    }
    Ok(json_bytes("{}"))
}

/// SGLang's side: waits until the prefill of a room is done.
async fn room(engine: &Arc<Shared>, path: &str) -> Answered {
    let room: u64 = path.rsplit('/').next().and_then(|room| room.parse().ok()).ok_or_else(|| bad("room"))?;
    let wait = async {
        loop {
            let changed = engine.held_changed.notified();
            if engine.with_batch(|batch| batch.release_held(room | ROOM)) {
                return;
            }
            changed.await;
        }
    };
    match tokio::time::timeout(HANDOVER_TIME_MAX, wait).await {
        Ok(()) => Ok(json_bytes("{}")),
        Err(_) => Err(Refusal(StatusCode::NOT_FOUND, format!("nothing came into room {room}"))),
    }
}

impl Run {
    /// An answer in one piece.
    async fn collect(mut self) -> Answered {
        let mut ids = Vec::new();
        loop {
            match self.outputs.recv().await {
                Some(Output::Token(id)) => ids.push(id),
                Some(Output::Prefilled { .. }) => {}
                Some(Output::Ended) => break,
                None => return Err(Refusal(StatusCode::INTERNAL_SERVER_ERROR, "the engine died".into())),
            }
        }
        let text = detokenize(&ids);
        let mut choice = json!({"index": 0, "logprobs": null, "finish_reason": "length"});
        match self.is_chat {
            true => choice["message"] = json!({"role": "assistant", "content": text}),
            false => choice["text"] = text.into(),
        }
        if self.with_ids {
            choice["token_ids"] = ids.clone().into();
        }
        let mut whole = json!({
            "id": self.name(), "object": if self.is_chat { "chat.completion" } else { "text_completion" },
            "created": 0, "model": self.engine.config.model, "choices": [choice],
            "usage": self.usage(ids.len()),
        });
        if self.tells_where && self.held.is_some() {
            whole["kv_transfer_params"] = self.whereabouts();
        }
        Ok(json_answer(&whole))
    }

    /// An answer as server-sent events, one per token.
    async fn stream(mut self, sink: Sink) {
        let model = serde_json::to_string(&self.engine.config.model).unwrap_or_default();
        let object = if self.is_chat { "chat.completion.chunk" } else { "text_completion" };
        let head = format!(
            "data: {{\"id\":\"{}\",\"object\":\"{object}\",\"created\":0,\"model\":{model},\"choices\":[",
            self.name()
        );
        if self.is_chat {
            let role = "{\"index\":0,\"delta\":{\"role\":\"assistant\",\"content\":\"\"},\
                \"logprobs\":null,\"finish_reason\":null}";
            sink.send(format!("{head}{role}]}}\n\n").into()).await;
        }
        let mut generated = 0;
        let mut events = String::new();
        loop {
            let output = match self.outputs.try_recv() {
                Ok(output) => Some(output),
                Err(_) if events.is_empty() => self.outputs.recv().await,
                // Everything that is there goes out in one piece.
                Err(_) => {
                    sink.send(std::mem::take(&mut events).into()).await;
                    continue;
                }
            };
            match output {
                Some(Output::Token(id)) => {
                    generated += 1;
                    let reason = if generated == self.output_tokens { "\"length\"" } else { "null" };
                    self.event(&mut events, &head, id, reason);
                }
                Some(Output::Prefilled { .. }) => {}
                Some(Output::Ended) => break,
                None => return,
            }
        }
        if self.with_usage {
            let usage = self.usage(generated as usize);
            let _ = write!(events, "{head}],\"usage\":{usage}}}\n\n");
        }
        events.push_str("data: [DONE]\n\n");
        sink.send(events.into()).await;
    }

    fn event(&self, events: &mut String, head: &str, id: u32, reason: &str) {
        let text = serde_json::to_string(&detokenize(&[id])).unwrap_or_default();
        let _ = match self.is_chat {
            true => write!(events, "{head}{{\"index\":0,\"delta\":{{\"content\":{text}}}"),
            false => write!(events, "{head}{{\"index\":0,\"text\":{text}"),
        };
        let _ = write!(events, ",\"logprobs\":null,\"finish_reason\":{reason}");
        if self.with_ids {
            let _ = write!(events, ",\"token_ids\":[{id}]");
        }
        events.push_str("}]}\n\n");
    }

    fn name(&self) -> String {
        format!("{}-{}-{}", if self.is_chat { "chatcmpl" } else { "cmpl" }, self.engine.id, self.id)
    }

    fn usage(&self, generated: usize) -> Value {
        json!({
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": generated,
            "total_tokens": self.prompt_tokens + generated,
        })
    }

    /// What vLLM's decode engine has to know.
    fn whereabouts(&self) -> Value {
        let first = self.held.unwrap_or(0);
        let blocks = (self.prompt_tokens / self.engine.config.block_tokens.max(1) as usize).max(1) as u64;
        json!({
            "do_remote_prefill": true, "do_remote_decode": false,
            "remote_engine_id": self.engine.id,
            "remote_block_ids": (first..first + blocks).collect::<Vec<_>>(),
            "remote_host": self.engine.http.ip().to_string(),
            "remote_port": self.engine.http.port(),
            "tp_size": 1,
        })
    }
}
