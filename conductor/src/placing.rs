//! Decisions: from a prompt and who has how much of it to a place, for HTTP and for the proxy.

use std::time::Duration;

use conductor_core::knowledge::Matches;
use conductor_core::scheduler::{Ask, Decision, Refusal, Slo};
use conductor_core::{BlockKey, ContextId, InstanceId};

use crate::shared::Shared;

/// A request to place.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Request<'a> {
    pub(crate) tenant: &'a str,
    pub(crate) model: &'a str,
    pub(crate) tokens: u32,
    pub(crate) block_tokens: u32,
    pub(crate) expected_output: Option<u32>,
    pub(crate) slo: Slo,
}

impl Shared {
    /// Decides, and assumes from then on that the chosen instances will have the prompt's blocks. `matches`
    /// is what instances have now, `coming` what they will have, with what was assumed after former
    /// decisions. `among`: the instances to which the request may be sent.
    ///
    /// # Errors
    /// See [`Refusal`].
    pub(crate) fn place_request(
        &self,
        context: ContextId,
        request: &Request<'_>,
        (matches, coming): (&Matches, &Matches),
        keys: &[BlockKey],
        among: Option<&[InstanceId]>,
    ) -> Result<Decision, Refusal> {
        let now = self.now();
        let mut schedule = self.schedule();
        let model = schedule.model(request.tenant, request.model);
        let ask = Ask {
            model,
            tokens: request.tokens,
            block_tokens: request.block_tokens,
            matches: &matches.instances,
            store_blocks: matches.store,
            keys,
            expected_output: request.expected_output,
            slo: request.slo,
        };
        let decision = match among {
            None => schedule.scheduler.decide_with(now, &ask, &coming.instances)?,
            Some(among) => {
                schedule.scheduler.decide_among(now, &ask, &coming.instances, |id| among.contains(&id))?
            }
        };
        schedule.decided(now, &decision);
        drop(schedule);
        let until = now + Duration::from_millis(self.config.schedule.assumed_ms.into());
        let best = |id| coming.instances.iter().find(|it| it.instance == id).map_or(0, |it| it.dp_rank);
        let mut knowledge = self.knowledge.write();
        knowledge.assume(context, decision.prefill, best(decision.prefill), keys, until);
        if decision.decode != decision.prefill {
            knowledge.assume(context, decision.decode, best(decision.decode), keys, until);
        }
        Ok(decision)
    }
}
