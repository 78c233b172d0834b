//! What the proxy asks of the Conductor.

use std::sync::Arc;
use std::time::Duration;

use conductor_core::InstanceId;
use conductor_core::hash::{self, Root};
use conductor_core::knowledge::Matches;
use conductor_core::scheduler::{Reason, ReservationId, Slo};

use crate::config::EngineKind;
use crate::directory::Instance;
use crate::placing::Request;
use crate::proxy::{self, Ask, Engine, Handover, Place, Placed, Progress, Refused, Reservation};
use crate::shared::{Counts, Shared};

/// How long an engine that did not answer gets no requests, unless its events say that it lives.
const SUSPECT_FOR: Duration = Duration::from_secs(5);

/// Tokens of a prompt whose length is not known, because no engine tells its tokens.
const PROMPT_TOKENS_UNKNOWN: u32 = 1_024;

impl Place for Shared {
    fn decide(&self, ask: &Ask<'_>) -> Result<Placed, Refused> {
        let tenant = if ask.tenant.is_empty() { "default" } else { ask.tenant };
        let size = self.directory().block_sizes(tenant, ask.model).first().copied();
        let block_tokens = size.ok_or(Refused::NoModel)?;
        let mut keys = Vec::new();
        let root = Root::of(self.config.seed, Some(ask.lora), Some(ask.salt));
        hash::keys(ask.tokens, block_tokens, &root, &mut keys);
        let (mut matches, mut coming) = (Matches::default(), Matches::default());
        let knowledge = self.knowledge.read();
        let context = knowledge.context(tenant, ask.model, block_tokens).ok_or(Refused::NoModel)?;
        knowledge.query(context, &keys, false, &mut matches);
        knowledge.query(context, &keys, true, &mut coming);
        drop(knowledge);
        self.hot().asked(self.now(), ask.model, block_tokens, &keys, &matches);
        let limit = |ms: u32| match ms {
            0 => Duration::MAX,
            ms => Duration::from_millis(ms.into()),
        };
        let ttft = limit(self.config.schedule.ttft_slo_ms);
        let among = ask.among.map(|addresses| self.directory().at(addresses));
        let request = Request {
            tenant,
            model: ask.model,
            tokens: self.prompt_tokens(ask.tokens),
            block_tokens,
            expected_output: ask.output_tokens_max,
            slo: Slo {
                ttft: if ttft == Duration::MAX { ttft } else { ttft.saturating_sub(ask.waited) },
                tbt: limit(self.config.schedule.tbt_slo_ms),
            },
            among: among.as_deref(),
            avoid: ask.avoid,
        };
        let decision = self.place_request(context, &request, (&matches, &coming), &keys).map_err(
            |refusal| match refusal.reason {
                Reason::NoPrefill | Reason::NoDecode => Refused::NoEngine,
                _ => Refused::Overloaded { retry_after: refusal.retry_after },
            },
        )?;
        let engine = |id| self.directory().instances.get(&id).and_then(|it| engine_of(id, it));
        match (engine(decision.prefill), engine(decision.decode)) {
            (Some(prefill), Some(decode)) => Ok(Placed {
                reservation: decision.reservation.to_u64(),
                prefill,
                decode,
                ttft: decision.ttft,
                reused_tokens: decision.reuse_blocks.saturating_mul(block_tokens),
            }),
            // It has no HTTP address, or has just been taken out.
            _ => {
                self.report(decision.reservation.to_u64(), Progress::Failed);
                Err(Refused::NoEngine)
            }
        }
    }

    fn report(&self, reservation: Reservation, progress: Progress) {
        let (id, now) = (ReservationId::from_u64(reservation), self.now());
        let mut schedule = self.schedule();
        // A reservation that has ended meanwhile is no error: it took longer than `reservation_ms_max`.
        let _ = match progress {
            Progress::Prefilled => schedule.scheduler.prefill_done(now, id),
            Progress::FirstToken => {
                schedule.first_token(now, id);
                schedule.scheduler.first_token(now, id)
            }
            Progress::Tokens(more) => {
                let output = schedule.more_output(now, id, more);
                schedule.scheduler.output_tokens(now, id, output)
            }
            Progress::Done => {
                let output = schedule.ended(id);
                schedule.scheduler.done(now, id, output)
            }
            Progress::Failed => {
                schedule.ended(id);
                schedule.scheduler.release(now, id)
            }
        };
    }

    fn suspect(&self, instance: InstanceId) {
        self.set_up(instance, false);
        self.look_again(instance, self.now() + SUSPECT_FOR);
    }

    fn tokenizer(&self, model: &str) -> Option<Engine> {
        let directory = self.directory();
        let mut serving = directory.instances.iter().filter(|(_, it)| it.model == model && !it.is_store);
        serving.find_map(|(id, it)| engine_of(*id, it))
    }

    fn models(&self) -> Vec<String> {
        let directory = self.directory();
        let mut models: Vec<String> =
            directory.instances.values().filter(|it| !it.is_store).map(|it| it.model.clone()).collect();
        models.sort_unstable();
        models.dedup();
        models
    }

    fn counters(&self) -> Arc<proxy::Counters> {
        Arc::clone(&self.proxy)
    }
}

impl Shared {
    /// The length by which a prompt is placed. One whose tokens no engine tells is counted, and placed like
    /// one of [`PROMPT_TOKENS_UNKNOWN`]; one beyond the limit like one at the limit, as the engine decides
    /// what is too long for its model.
    pub(crate) fn prompt_tokens(&self, tokens: &[u32]) -> u32 {
        if tokens.is_empty() {
            Counts::add(&self.counts.unknown_prompts, 1);
            return PROMPT_TOKENS_UNKNOWN.min(self.config.limits.tokens_max);
        }
        u32::try_from(tokens.len()).unwrap_or(u32::MAX).min(self.config.limits.tokens_max)
    }
}

/// An engine with an HTTP address, as the proxy sees it.
fn engine_of(instance: InstanceId, it: &Instance) -> Option<Engine> {
    let handover = match it.kind {
        EngineKind::Sglang => {
            let (host, _) = crate::config::host_port(&it.http)?;
            Handover::Bootstrap { host: Arc::from(host), port: it.bootstrap_port }
        }
        _ => Handover::KvTransferParams,
    };
    Some(Engine { instance, pool: it.pool.clone()?, handover })
}
