//! `/query` and `/query_by_hash`: how much of a prompt each instance has.

use axum::body::Body;
use axum::extract::{Query, State};
use axum::response::Response;
use conductor_core::hash::{self, Root};
use conductor_core::knowledge::Matches;
use conductor_core::{BlockKey, ContextId, EngineHash};
use serde::Deserialize;

use super::answer::{Answer, Shape};
use super::forms::{About, QueryForm};
use super::{App, Refused, json, numbers};
use crate::discovery;
use crate::shared::Counts;

/// Names of the array of token ids.
const TOKENS: [&str; 3] = ["token_ids", "prompt_token_ids", "tokens_ids"];
/// Names of the array of hashes.
const HASHES: [&str; 5] = ["seq_hashes", "block_hash", "block_hashes", "sequence_hashes", "hashes"];

/// Options in the query string.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Options {
    shape: Option<Shape>,
    /// Count blocks that decisions are assumed to have brought.
    assumed: bool,
}

/// What a request asks about.
pub(super) struct Prompt {
    pub(super) form: QueryForm,
    pub(super) about: About,
    pub(super) context: ContextId,
    pub(super) block_tokens: u32,
    /// Tokens of the prompt; of a prompt by hashes, those of its full blocks.
    pub(super) tokens: u32,
    pub(super) keys: Keys,
}

/// The blocks of a prompt.
pub(super) enum Keys {
    /// By the Conductor's chain.
    Own(Vec<BlockKey>),
    /// By whatever the client has: standard hashes, which are the Conductor's, or those of an engine.
    Given(Vec<u64>),
}

/// `/query` and `/query_by_hash`: the body says which it is.
pub(super) async fn query(
    State(app): State<App>,
    Query(options): Query<Options>,
    body: Body,
) -> Result<Response, Refused> {
    let body = app.body(body).await?;
    let prompt = prompt(&app, &body).await;
    answer(&app, &options, &app.counted(prompt)?)
}

fn answer(app: &App, options: &Options, prompt: &Prompt) -> Result<Response, Refused> {
    let mut matches = Matches::default();
    let keys = find(app, prompt, options.assumed, &mut matches);
    app.shared.hot().asked(app.shared.now(), &prompt.about.model, prompt.block_tokens, &keys, &matches);
    let counts = &app.shared.counts;
    let asked = u64::from(prompt.tokens / prompt.block_tokens) * u64::from(prompt.block_tokens);
    let best = matches.instances.iter().map(|it| it.disk).max().unwrap_or_default().max(matches.store);
    Counts::add(&counts.queries, 1);
    Counts::add(&counts.tokens, asked);
    Counts::add(&counts.hit_tokens, u64::from(best) * u64::from(prompt.block_tokens));
    let answer = Answer {
        shape: prompt.form.shape(options.shape),
        tenant: &prompt.about.tenant,
        model: &prompt.about.model,
        instance: prompt.about.instance.as_deref(),
        block_tokens: prompt.block_tokens,
        matches: &matches,
    };
    Ok(json(answer.write(&app.shared.directory())))
}

/// Looks a prompt up. Returns the keys of its blocks, as far as they are known.
pub(super) fn find(app: &App, prompt: &Prompt, assumed: bool, matches: &mut Matches) -> Vec<BlockKey> {
    let knowledge = app.shared.knowledge.read();
    match &prompt.keys {
        Keys::Own(keys) => {
            knowledge.query(prompt.context, keys, assumed, matches);
            keys.clone()
        }
        Keys::Given(hashes) => {
            let standard: Vec<BlockKey> = hashes.iter().map(|hash| BlockKey(*hash)).collect();
            knowledge.query(prompt.context, &standard, assumed, matches);
            if !matches.instances.is_empty() || matches.store > 0 {
                return standard;
            }
            let hashes: Vec<EngineHash> = hashes.iter().map(|hash| EngineHash(*hash)).collect();
            let mut keys = Vec::new();
            knowledge.keys_of(prompt.context, &hashes, &mut keys);
            knowledge.query(prompt.context, &keys, assumed, matches);
            keys
        }
    }
}

/// A prompt by token ids, by hashes, or by text, whichever the body has.
pub(super) async fn prompt(app: &App, body: &[u8]) -> Result<Prompt, Refused> {
    let max = app.shared.config.limits.tokens_max as usize;
    let (mut tokens, mut rest) = (Vec::<u32>::new(), Vec::new());
    let given = numbers::take(body, &TOKENS, max, &mut tokens, &mut rest)
        .map_err(|error| Refused::Bad(format!("token_ids: {error}")))?;
    if given {
        let form = parse(&rest)?;
        return by_own_keys(app, form, &tokens);
    }
    let (mut hashes, mut rest) = (Vec::<u64>::new(), Vec::new());
    let given = numbers::take(body, &HASHES, max, &mut hashes, &mut rest)
        .map_err(|error| Refused::Bad(format!("seq_hashes: {error}")))?;
    let form = parse(&rest)?;
    if given {
        let about = form.about().map_err(Refused::Bad)?;
        let (context, block_tokens) = context(app, &about)?;
        let in_blocks = u32::try_from(hashes.len()).unwrap_or(u32::MAX).saturating_mul(block_tokens);
        let tokens = form.tokens.unwrap_or(in_blocks);
        return Ok(Prompt { form, about, context, block_tokens, tokens, keys: Keys::Given(hashes) });
    }
    let Some(text) = &form.text else {
        return Err(Refused::Bad(
            "send `token_ids`, `seq_hashes`, or `text` for an engine to tokenise".to_owned(),
        ));
    };
    let tokens = tokenize(app, &form.about().map_err(Refused::Bad)?, text).await?;
    by_own_keys(app, form, &tokens)
}

fn by_own_keys(app: &App, form: QueryForm, tokens: &[u32]) -> Result<Prompt, Refused> {
    let about = form.about().map_err(Refused::Bad)?;
    let (context, block_tokens) = context(app, &about)?;
    let root = Root::of(app.shared.config.seed, Some(&about.lora), Some(&about.salt));
    let mut keys = Vec::new();
    hash::keys(tokens, block_tokens, &root, &mut keys);
    let tokens = u32::try_from(tokens.len()).unwrap_or(u32::MAX);
    Ok(Prompt { form, about, context, block_tokens, tokens, keys: Keys::Own(keys) })
}

fn parse(rest: &[u8]) -> Result<QueryForm, Refused> {
    serde_json::from_slice(rest).map_err(|error| Refused::Bad(error.to_string()))
}

/// The table for a request, and its tokens per block.
fn context(app: &App, about: &About) -> Result<(ContextId, u32), Refused> {
    let sizes = || app.shared.directory().block_sizes(&about.tenant, &about.model);
    let size = match about.block_size {
        Some(size) => size,
        None => match sizes()[..] {
            [size] => size,
            [] => return Err(unknown(about)),
            ref several => {
                return Err(Refused::Bad(format!(
                    "send `block_size`: engines have {several:?} tokens per block"
                )));
            }
        },
    };
    match app.shared.knowledge.read().context(&about.tenant, &about.model, size) {
        Some(context) => Ok((context, size)),
        None if about.block_size.is_some() && !sizes().is_empty() => Err(Refused::Missing(format!(
            "no engine that serves {} has {size} tokens per block, but {:?}",
            about.model,
            sizes()
        ))),
        None => Err(unknown(about)),
    }
}

fn unknown(about: &About) -> Refused {
    Refused::Missing(format!(
        "no engine of tenant {} serves {}: register one (`POST /register`)",
        about.tenant, about.model
    ))
}

/// Token ids of a text, from an engine that serves the model.
async fn tokenize(app: &App, about: &About, text: &str) -> Result<Vec<u32>, Refused> {
    let engine = tokenizer(app, about)?;
    let max = app.shared.config.limits.tokens_max as usize;
    let tokens = discovery::tokenize(&engine, &about.model, text, max).await;
    tokens.map_err(|error| Refused::Engine(error.to_string()))
}

/// The address of an engine that serves the model.
fn tokenizer(app: &App, about: &About) -> Result<String, Refused> {
    let directory = app.shared.directory();
    let engines = directory.serving(&about.tenant, &about.model);
    let mut addresses = engines.map(|(_, it)| &it.http).filter(|address| !address.is_empty());
    addresses.next().cloned().ok_or_else(|| {
        Refused::Missing(format!(
            "no engine that serves {} has an HTTP address: send `token_ids`, or register one with `http`",
            about.model
        ))
    })
}
