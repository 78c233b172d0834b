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
    /// The instances to which it may be sent; `None`: all.
    pub(crate) among: Option<&'a [InstanceId]>,
    /// Instances that failed it before.
    pub(crate) avoid: &'a [InstanceId],
}

impl Shared {
    /// Decides, and assumes from then on that the chosen instances will have the prompt's blocks. `matches`
    /// is what instances have now, `coming` what they will have, with what was assumed after former
    /// decisions.
    ///
    /// # Errors
    /// See [`Refusal`].
    pub(crate) fn place_request(
        &self,
        context: ContextId,
        request: &Request<'_>,
        (matches, coming): (&Matches, &Matches),
        keys: &[BlockKey],
    ) -> Result<Decision, Refusal> {
        let now = self.now();
        let mut schedule = self.schedule();
        // A model that no engine serves any more has no number, and that of no instance is as good.
        let model = schedule.kinds.model(request.tenant, request.model).unwrap_or(u32::MAX);
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
        let may = |id| request.among.is_none_or(|among| among.contains(&id));
        let decision = match (request.among, request.avoid) {
            (None, []) => schedule.scheduler.decide_with(now, &ask, &coming.instances)?,
            (_, avoid) => schedule.scheduler.decide_among(now, &ask, &coming.instances, may, avoid)?,
        };
        schedule.decided(now, &decision);
        // A decision asks for one copy at most, of the beginning of its own prompt.
        let copy = schedule.scheduler.next_replicate();
        drop(schedule);
        if let Some(copy) = copy {
            self.replicas.ask(context, &copy, keys);
        }
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
