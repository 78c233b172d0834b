//! `/schedule` and the life of reservations.

use std::time::Duration;

use axum::body::Body;
use axum::extract::{Path, State};
use axum::response::{IntoResponse, Response};
use conductor_core::knowledge::Matches;
use conductor_core::scheduler::{Decision, Fetch, Reason, Refusal, ReservationId, Slo, Source};
use conductor_core::{BlockKey, InstanceId};
use serde::Serialize;

use super::forms::ProgressForm;
use super::query::{Prompt, find, prompt};
use super::{App, Refused, value};
use crate::directory::Directory;
use crate::placing::Request;

/// A decision as JSON. 64-bit numbers are texts.
#[derive(Debug, Serialize)]
struct Placed {
    reservation: String,
    prefill: Target,
    decode: Target,
    /// Tokens of the prompt that need not be computed.
    reused_tokens: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    fetch: Option<Fetched>,
    predicted_ttft_ms: f64,
    predicted_tbt_ms: f64,
    /// The part of the time to the first token in which the request waits.
    wait_ms: f64,
}

#[derive(Debug, Serialize)]
struct Target {
    instance_id: String,
    /// The rank that has most of the prompt.
    dp_rank: u32,
    #[serde(skip_serializing_if = "String::is_empty")]
    http: String,
}

#[derive(Debug, Serialize)]
struct Fetched {
    /// An instance, or `store`.
    from: String,
    tier: &'static str,
    first_token: u64,
    tokens: u64,
}

/// Places a request and reserves what it will use.
pub(super) async fn schedule(State(app): State<App>, body: Body) -> Result<Response, Refused> {
    let body = app.body(body).await?;
    let prompt = prompt(&app, &body).await;
    let prompt = app.counted(prompt)?;
    let mut matches = Matches::default();
    let mut coming = Matches::default();
    let keys = find(&app, &prompt, false, &mut matches);
    app.shared.knowledge.read().query(prompt.context, &keys, true, &mut coming);
    app.shared.hot().asked(app.shared.now(), &prompt.about.model, prompt.block_tokens, &keys, &matches);
    let decision = decide(&app, &prompt, (&matches, &coming), &keys)?;
    let rank = |id| coming.instances.iter().find(|it| it.instance == id).map_or(0, |it| it.dp_rank);
    let directory = app.shared.directory();
    let tokens = |blocks: u32| u64::from(blocks) * u64::from(prompt.block_tokens);
    let placed = Placed {
        reservation: decision.reservation.to_u64().to_string(),
        prefill: target(&directory, decision.prefill, rank(decision.prefill)),
        decode: target(&directory, decision.decode, rank(decision.decode)),
        reused_tokens: tokens(decision.reuse_blocks),
        fetch: decision.fetch.map(|fetch| fetched(&directory, &fetch, tokens)),
        predicted_ttft_ms: ms(decision.ttft),
        predicted_tbt_ms: ms(decision.tbt),
        wait_ms: ms(decision.wait),
    };
    Ok(value(&placed))
}

/// Decides, and assumes that the chosen instance will have the prompt's blocks.
fn decide(
    app: &App,
    prompt: &Prompt,
    (matches, coming): (&Matches, &Matches),
    keys: &[BlockKey],
) -> Result<Decision, Refused> {
    let config = &app.shared.config.schedule;
    let limit = |asked: Option<u32>, default: u32| match asked.unwrap_or(default) {
        0 => Duration::MAX,
        ms => Duration::from_millis(ms.into()),
    };
    let slo = Slo {
        ttft: limit(prompt.form.ttft_slo_ms, config.ttft_slo_ms),
        tbt: limit(prompt.form.tbt_slo_ms, config.tbt_slo_ms),
    };
    let avoid = app.shared.directory().named(&prompt.about.tenant, &prompt.form.avoid());
    let request = Request {
        tenant: &prompt.about.tenant,
        model: &prompt.about.model,
        tokens: prompt.tokens,
        block_tokens: prompt.block_tokens,
        expected_output: prompt.form.expected_output,
        slo,
        among: None,
        avoid: &avoid,
    };
    let decision = app.shared.place_request(prompt.context, &request, (matches, coming), keys);
    decision.map_err(|refusal| refused(&refusal))
}

fn refused(refusal: &Refusal) -> Refused {
    match refusal.reason {
        Reason::BadAsk | Reason::Stale => Refused::Bad(refusal.to_string()),
        Reason::NoPrefill | Reason::NoDecode => Refused::Busy(
            "no instance that can serve the request is up: register one, or wait until it is heard",
        ),
        _ => Refused::Later(refusal.to_string(), refusal.retry_after),
    }
}

fn target(directory: &Directory, id: InstanceId, dp_rank: u32) -> Target {
    let known = directory.instances.get(&id);
    Target {
        instance_id: known.map(|it| it.name.clone()).unwrap_or_default(),
        dp_rank,
        http: known.map(|it| it.http.clone()).unwrap_or_default(),
    }
}

fn fetched(directory: &Directory, fetch: &Fetch, tokens: impl Fn(u32) -> u64) -> Fetched {
    let from = match fetch.from {
        Source::Instance(id) => directory.instances.get(&id).map(|it| it.name.clone()).unwrap_or_default(),
        Source::Store => "store".to_owned(),
    };
    Fetched {
        from,
        tier: fetch.tier.name(),
        first_token: tokens(fetch.first_block),
        tokens: tokens(fetch.blocks),
    }
}

/// A reservation's number.
fn reservation(id: &str) -> Result<ReservationId, Refused> {
    let number =
        id.parse().map_err(|_| Refused::Missing(format!("{id:?} is not the number of a reservation")))?;
    Ok(ReservationId::from_u64(number))
}

fn stale<T>(result: Result<(), T>) -> Result<Response, Refused> {
    match result {
        Ok(()) => Ok(axum::http::StatusCode::NO_CONTENT.into_response()),
        Err(_) => Err(Refused::Missing("the reservation has ended, or was placed anew".to_owned())),
    }
}

/// The prefill began.
pub(super) async fn prefill_started(
    State(app): State<App>,
    Path(id): Path<String>,
) -> Result<Response, Refused> {
    let id = reservation(&id)?;
    stale(app.shared.schedule().scheduler.prefill_started(app.shared.now(), id))
}

/// The prefill ended.
pub(super) async fn prefill_complete(
    State(app): State<App>,
    Path(id): Path<String>,
) -> Result<Response, Refused> {
    let id = reservation(&id)?;
    stale(app.shared.schedule().scheduler.prefill_done(app.shared.now(), id))
}

/// The first token was seen.
pub(super) async fn first_token(State(app): State<App>, Path(id): Path<String>) -> Result<Response, Refused> {
    let (id, now) = (reservation(&id)?, app.shared.now());
    let mut schedule = app.shared.schedule();
    schedule.first_token(now, id);
    stale(schedule.scheduler.first_token(now, id))
}

/// More tokens were seen: those that the body names, or one block (Dynamo's `output_block`).
pub(super) async fn output_block(
    State(app): State<App>,
    Path(id): Path<String>,
    body: Body,
) -> Result<Response, Refused> {
    const BLOCK_TOKENS: u32 = 16;
    let id = reservation(&id)?;
    let body = app.body(body).await?;
    let form: ProgressForm = match body.is_empty() {
        true => ProgressForm::default(),
        false => serde_json::from_slice(&body).map_err(|error| Refused::Bad(error.to_string()))?,
    };
    let now = app.shared.now();
    let mut schedule = app.shared.schedule();
    let output = schedule.more_output(now, id, form.tokens.unwrap_or(BLOCK_TOKENS));
    stale(schedule.scheduler.output_tokens(now, id, output))
}

/// The request ended.
pub(super) async fn end(State(app): State<App>, Path(id): Path<String>) -> Result<Response, Refused> {
    let (id, now) = (reservation(&id)?, app.shared.now());
    let mut schedule = app.shared.schedule();
    let output = schedule.ended(id);
    stale(match output {
        // Nothing was reported of it: nothing is learnt from it.
        0 => schedule.scheduler.release(now, id),
        output => schedule.scheduler.done(now, id, output),
    })
}

#[derive(Serialize)]
struct Reservations {
    reservations: u32,
}

/// How many reservations there are.
pub(super) async fn list(State(app): State<App>) -> Response {
    let reservations = app.shared.schedule().scheduler.reservations();
    value(&Reservations { reservations })
}

/// The load of an instance, as it is booked.
#[derive(Debug, Serialize)]
pub(super) struct Load {
    tenant_id: String,
    instance_id: String,
    model: String,
    role: &'static str,
    heard: bool,
    queued_requests: u32,
    /// Until its queue has drained.
    queue_ms: f64,
    decoding_requests: u64,
    decoding_tokens: u64,
}

/// Loads of all instances.
pub(super) fn all_loads(app: &App) -> Vec<Load> {
    let now = app.shared.now();
    let directory = app.shared.directory();
    let schedule = app.shared.schedule();
    let engines = directory.instances.iter().filter(|(_, it)| !it.is_store);
    let load = |(id, it): (&InstanceId, &crate::directory::Instance)| {
        let (queued_requests, wait_ns) = schedule.scheduler.queue(*id, now).unwrap_or_default();
        let (decoding_requests, decoding_tokens) = schedule.scheduler.decoding(*id, now).unwrap_or_default();
        Load {
            tenant_id: it.tenant.clone(),
            instance_id: it.name.clone(),
            model: it.model.clone(),
            role: it.role.name(),
            heard: directory.is_heard(*id),
            queued_requests,
            queue_ms: ms(Duration::from_nanos(wait_ns)),
            decoding_requests,
            decoding_tokens,
        }
    };
    engines.map(load).collect()
}

/// `GET /loads`.
pub(super) async fn loads(State(app): State<App>) -> Response {
    value(&all_loads(&app))
}

pub(super) fn ms(time: Duration) -> f64 {
    (time.as_secs_f64() * 1e6).round() / 1e3
}
