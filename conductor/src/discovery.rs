//! What engines say of themselves over HTTP: where they publish, and the tokens of a text.
//!
//! - SGLang: `GET /server_info` has `kv_events` with `endpoint_port_base`, `replay_port_base`, `block_size`,
//!   `dp_size` and `topic` (`srt/disaggregation/kv_events.py`, 0.5.23).
//! - vLLM and SGLang: `POST /tokenize` with `model` and `prompt` answers `tokens`.

use std::fmt;
use std::time::Duration;

use axum::body::Bytes;
use axum::http::{HeaderMap, StatusCode};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::config::{EngineConfig, host_port};
use crate::http::numbers;
use crate::proxy::{CollectError, Message, Pool, SendError};

/// Longest answer about an engine, bytes.
const ANSWER_BYTES_MAX: usize = 4 << 20;
/// Longest wait for the beginning of an answer.
const ANSWER_TIME_MAX: Duration = Duration::from_secs(5);

/// Why an engine could not be asked.
#[derive(Debug)]
pub(crate) enum AskError {
    /// The address cannot be used.
    Address(String),
    /// It does not answer.
    Send(String, SendError),
    /// Its answer broke off, or is too long.
    Body(String, CollectError),
    /// It answered with this status.
    Status(String, StatusCode),
    /// Its answer lacks this, or says something that cannot be.
    Answer(String, String),
}

impl fmt::Display for AskError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Address(address) => write!(f, "{address:?} is not HOST:PORT of an engine"),
            Self::Send(what, error) => write!(f, "{what}: {error}"),
            Self::Body(what, error) => write!(f, "{what}: {error:?}"),
            Self::Status(what, status) => write!(f, "{what} answers {status}"),
            Self::Answer(what, need) => write!(f, "{what}: {need}"),
        }
    }
}

impl std::error::Error for AskError {}

/// Asks once, on a connection of its own.
///
/// # Errors
/// See [`AskError`].
pub(crate) async fn ask(
    address: &str,
    path: &str,
    body: Option<Bytes>,
    headers: &HeaderMap,
    bytes_max: usize,
) -> Result<Bytes, AskError> {
    let what = || format!("http://{address}{path}");
    let pool = Pool::new(address).map_err(|_| AskError::Address(address.to_owned()))?;
    let message = Message { path, body: body.as_ref(), headers };
    let sent = pool.send(message, ANSWER_TIME_MAX).await;
    let mut exchange = sent.map_err(|error| AskError::Send(what(), error))?;
    if exchange.status() != StatusCode::OK {
        return Err(AskError::Status(what(), exchange.status()));
    }
    exchange.collect(bytes_max).await.map_err(|error| AskError::Body(what(), error))
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct ServerInfo {
    kv_events: Option<KvEvents>,
    page_size: Option<u32>,
    dp_size: Option<u32>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct KvEvents {
    endpoint_port_base: Option<u16>,
    replay_port_base: Option<u16>,
    replay_endpoint_port_base: Option<u16>,
    block_size: Option<u32>,
    dp_size: Option<u32>,
    topic: Option<String>,
}

/// An entry with what was left to the engine. Without anything of that kind, the engine is not asked.
///
/// # Errors
/// The engine does not answer, or does not say it.
pub(crate) async fn complete(engine: EngineConfig) -> Result<EngineConfig, AskError> {
    let asks = engine.block_tokens == 0 || engine.dp_ranks == 0;
    if !asks {
        return Ok(engine);
    }
    let address = engine.http_address().to_owned();
    let answer = ask(&address, "/server_info", None, &HeaderMap::new(), ANSWER_BYTES_MAX).await?;
    filled(engine, &address, &answer)
}

fn filled(mut engine: EngineConfig, address: &str, answer: &[u8]) -> Result<EngineConfig, AskError> {
    let wrong = |need: &str| AskError::Answer(format!("http://{address}/server_info"), need.to_owned());
    let info: ServerInfo = serde_json::from_slice(answer).map_err(|error| wrong(&error.to_string()))?;
    let events = info.kv_events.unwrap_or_default();
    let (host, _) = host_port(address).ok_or_else(|| AskError::Address(address.to_owned()))?;
    let at = |port: Option<u16>| port.map(|port| format!("tcp://{host}:{port}")).unwrap_or_default();
    if engine.endpoint.is_empty() {
        engine.endpoint = at(events.endpoint_port_base);
    }
    if engine.replay_endpoint.is_empty() {
        engine.replay_endpoint = at(events.replay_port_base.or(events.replay_endpoint_port_base));
    }
    if engine.topic.is_empty() {
        engine.topic = events.topic.unwrap_or_default();
    }
    if engine.block_tokens == 0 {
        let size = events.block_size.or(info.page_size).filter(|size| *size > 0);
        engine.block_tokens = size.ok_or_else(|| wrong("says no block size: give `block_size`"))?;
    }
    if engine.dp_ranks == 0 {
        engine.dp_ranks = events.dp_size.or(info.dp_size).unwrap_or(1).max(1);
    }
    engine.validate().map_err(|error| wrong(&format!("its {} {}", error.field, error.need)))?;
    Ok(engine)
}

/// Token ids of a text, from an engine.
///
/// # Errors
/// The engine does not answer, or not with tokens.
pub(crate) async fn tokenize(
    address: &str,
    model: &str,
    text: &str,
    tokens_max: usize,
) -> Result<Vec<u32>, AskError> {
    let body = json!({"model": model, "prompt": text}).to_string();
    let bytes_max = tokens_max.saturating_mul(12).saturating_add(ANSWER_BYTES_MAX);
    let answer = ask(address, "/tokenize", Some(body.into()), &HeaderMap::new(), bytes_max).await?;
    let wrong = |need: String| AskError::Answer(format!("http://{address}/tokenize"), need);
    let (mut tokens, mut rest) = (Vec::new(), Vec::new());
    let found = numbers::take(&answer, &["tokens"], tokens_max, &mut tokens, &mut rest);
    let found = found.map_err(|error| wrong(error.to_string()))?;
    let is_json = serde_json::from_slice::<Value>(&rest).is_ok();
    match found && is_json {
        true => Ok(tokens),
        false => Err(wrong("the answer has no `tokens`".to_owned())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn engine() -> EngineConfig {
        EngineConfig {
            instance: "a".into(),
            model: "m".into(),
            http: "10.0.0.7:30000".into(),
            block_tokens: 0,
            dp_ranks: 0,
            ..EngineConfig::default()
        }
    }

    #[test]
    fn what_was_left_to_an_engine_of_sglang_is_what_it_says() {
        let answer =
            br#"{"kv_events":{"publisher":"zmq","endpoint_port_base":5557,"block_size":64,"dp_size":2,
            "topic":"kv"},"dp_size":9,"more":[{}]}"#;
        let filled = filled(engine(), "10.0.0.7:30000", answer).unwrap();
        assert_eq!((filled.endpoint.as_str(), filled.replay_endpoint.as_str()), ("tcp://10.0.0.7:5557", ""));
        assert_eq!((filled.block_tokens, filled.dp_ranks, filled.topic.as_str()), (64, 2, "kv"));
    }

    #[test]
    fn what_an_engine_says_is_checked_like_a_setting() {
        for answer in [
            "",
            "{}",
            "[]",
            r#"{"kv_events":{"block_size":0}}"#,
            r#"{"kv_events":{"block_size":99999999}}"#,
            r#"{"kv_events":{"block_size":16,"dp_size":4000000000}}"#,
            r#"{"kv_events":{"block_size":16,"endpoint_port_base":65535,"dp_size":9}}"#,
            r#"{"kv_events":{"block_size":-1}}"#,
        ] {
            assert!(filled(engine(), "10.0.0.7:30000", answer.as_bytes()).is_err(), "{answer}");
        }
    }
}
