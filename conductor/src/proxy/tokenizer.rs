//! Token ids of texts: asked of an engine's `/tokenize`, and remembered.

use std::borrow::Cow;
use std::collections::HashMap;
use std::collections::hash_map::RandomState;
use std::hash::BuildHasher as _;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use hyper::StatusCode;
use hyper::header::HeaderMap;
use serde::Deserialize;

use super::client::Message;
use super::place::Engine;
use super::request::{Fields, IDS_MAX};

/// Longest answer of `/tokenize`, bytes.
const ANSWER_BYTES_MAX: usize = 16 * IDS_MAX;
/// Most models whose longest prompt is known.
const MODELS_MAX: usize = 1_024;

/// Texts and their tokens. Two generations: what is used moves to the newer one, and when that is full the
/// older one is forgotten.
#[derive(Debug)]
pub(crate) struct Tokenizer {
    remembered: Mutex<Generations>,
    /// Two keyed hashes of a text are its name, so that a client cannot make two texts that share one.
    hashers: (RandomState, RandomState),
    /// Most ids of a generation.
    ids_max: usize,
}

#[derive(Debug, Default)]
struct Generations {
    new: HashMap<(u64, u64), Arc<[u32]>>,
    new_ids: usize,
    old: HashMap<(u64, u64), Arc<[u32]>>,
    /// Longest prompt with its output, by model.
    model_tokens_max: HashMap<String, u32>,
}

#[derive(Deserialize)]
struct Answer {
    tokens: Vec<u32>,
    #[serde(default)]
    max_model_len: Option<u32>,
}

impl Tokenizer {
    /// Remembers texts with at most so many tokens in all.
    pub(crate) fn new(ids_max: usize) -> Self {
        let hashers = (RandomState::new(), RandomState::new());
        Self { remembered: Mutex::default(), hashers, ids_max: ids_max / 2 }
    }

    /// The tokens of a request's prompt or messages, by an engine's tokenizer; `None` when it does not tell.
    pub(crate) async fn tokens(
        &self,
        fields: &Fields,
        model: &str,
        engine: &Engine,
        headers: &HeaderMap,
        time_max: Duration,
    ) -> Option<Arc<[u32]>> {
        let relevant = ["prompt", "messages", "tools", "chat_template", "chat_template_kwargs"];
        let texts: Vec<(&str, &str)> =
            relevant.iter().filter_map(|&name| Some((name, fields.get(name)?))).collect();
        let key = (self.hashers.0.hash_one((model, &texts)), self.hashers.1.hash_one((model, &texts)));
        if let Some(tokens) = self.remembered(key) {
            return Some(tokens);
        }
        let quoted = serde_json::to_string(model).ok()?;
        let mut changes = vec![("model", Some(Cow::Owned(quoted)))];
        changes.extend(texts.iter().map(|&(name, text)| (name, Some(Cow::Borrowed(text)))));
        let body = Fields::parse("{}".into()).ok()?.with(&changes);
        let message = Message { path: "/tokenize", body: Some(&body), headers };
        let mut exchange = engine.pool.send(message, time_max).await.ok()?;
        if exchange.status() != StatusCode::OK {
            return None;
        }
        let answer = tokio::time::timeout(time_max, exchange.collect(ANSWER_BYTES_MAX)).await.ok()?.ok()?;
        exchange.finish(&engine.pool);
        let answer: Answer = serde_json::from_slice(&answer).ok()?;
        let tokens: Arc<[u32]> = answer.tokens.into();
        let mut remembered = self.remembered.lock().unwrap_or_else(PoisonError::into_inner);
        remembered.add(key, &tokens, self.ids_max);
        if let Some(most) = answer.max_model_len
            && remembered.model_tokens_max.len() < MODELS_MAX
        {
            remembered.model_tokens_max.insert(model.to_owned(), most);
        }
        Some(tokens)
    }

    /// Longest prompt with its output, if an engine has told.
    pub(crate) fn model_tokens_max(&self, model: &str) -> Option<u32> {
        let remembered = self.remembered.lock().unwrap_or_else(PoisonError::into_inner);
        remembered.model_tokens_max.get(model).copied()
    }

    fn remembered(&self, key: (u64, u64)) -> Option<Arc<[u32]>> {
        let mut remembered = self.remembered.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(tokens) = remembered.new.get(&key) {
            return Some(Arc::clone(tokens));
        }
        let tokens = remembered.old.remove(&key)?;
        remembered.add(key, &tokens, self.ids_max);
        Some(tokens)
    }
}

impl Generations {
    fn add(&mut self, key: (u64, u64), tokens: &Arc<[u32]>, ids_max: usize) {
        // An entry itself is not for nothing.
        let cost = tokens.len() + 32;
        if cost > ids_max {
            return;
        }
        if self.new_ids + cost > ids_max {
            self.old = std::mem::take(&mut self.new);
            self.new_ids = 0;
        }
        self.new_ids += cost;
        self.new.insert(key, Arc::clone(tokens));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_remembered_has_a_limit_and_what_is_used_stays() {
        let tokenizer = Tokenizer::new(2_000);
        let tokens: Arc<[u32]> = vec![1; 68].into();
        let remember = |key, tokens: &Arc<[u32]>| {
            tokenizer.remembered.lock().unwrap().add(key, tokens, tokenizer.ids_max);
        };
        remember((0, 0), &tokens);
        for key in 1..100 {
            remember((key, key), &tokens);
            assert!(tokenizer.remembered((0, 0)).is_some(), "after {key}");
            let remembered = tokenizer.remembered.lock().unwrap();
            assert!(remembered.new.len() + remembered.old.len() <= 20);
        }
        assert!(tokenizer.remembered((1, 1)).is_none());
        remember((7, 8), &vec![1; 1_001].into());
        assert!(tokenizer.remembered((7, 8)).is_none(), "too long to be remembered");
    }
}
