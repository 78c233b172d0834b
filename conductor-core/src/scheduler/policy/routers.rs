//! The rules of other routers, as published; sources per type.

use super::super::view::{Candidate, Placement, View};
use super::Policy;

/// Dynamo's KV router (`dynamo-kv-router` 1.6.1, `scheduling/selector/reference.rs`): blocks to prefill,
/// those that wait included, plus (or, with `lmetric`, times) blocks that decode. Temperature 0.
#[derive(Clone, Copy, Debug)]
pub struct Dynamo {
    lmetric: bool,
}

impl Dynamo {
    /// Blocks in the host's memory count this much of those in the GPU's.
    const HOST_WEIGHT: f64 = 0.75;

    /// The sum, or the product.
    #[must_use]
    pub const fn new(lmetric: bool) -> Self {
        Self { lmetric }
    }
}

impl Policy for Dynamo {
    fn place(&mut self, view: &View<'_>) -> Option<Placement> {
        let block_tokens = f64::from(view.block_tokens());
        let mut best: Option<(f64, usize)> = None;
        for (i, candidate) in view.candidates().iter().enumerate() {
            let credit =
                f64::from(candidate.gpu) + Self::HOST_WEIGHT * f64::from(candidate.disk - candidate.gpu);
            let active = candidate.queued_tokens as f64 / block_tokens;
            let prefill = (active + f64::from(view.blocks()) - credit).max(0.0);
            let decode = candidate.decode_tokens as f64 / block_tokens;
            let cost = if self.lmetric { prefill * (decode + 1.0) } else { prefill + decode };
            if best.is_none_or(|(least, _)| cost < least) {
                best = Some((cost, i));
            }
        }
        best.map(|(_, candidate)| Placement { candidate, fetch: None })
    }
}

/// Whether loads differ by more than `difference` and by more than `factor`.
fn is_imbalanced(view: &View<'_>, difference: u32, factor: f64) -> bool {
    let requests = || view.candidates().iter().map(|candidate| candidate.requests);
    let (min, max) = (requests().min().unwrap_or(0), requests().max().unwrap_or(0));
    max - min > difference && f64::from(max) > factor * f64::from(min)
}

fn longest(view: &View<'_>) -> u32 {
    view.candidates().iter().map(|candidate| candidate.disk).max().unwrap_or(0)
}

/// Dynamo's two-tier selection, which is `cache_aware_zmq` of the SGLang router: when loads are balanced and
/// more than half of the prompt is cached, the least loaded of those that have most; else the least loaded.
#[derive(Clone, Copy, Debug)]
pub struct TwoTier;

impl Policy for TwoTier {
    fn place(&mut self, view: &View<'_>) -> Option<Placement> {
        let most = longest(view);
        if !is_imbalanced(view, 32, 1.1) && 2 * u64::from(most) > u64::from(view.blocks()) {
            return view.least(|candidate| (candidate.disk != most, candidate.requests));
        }
        view.least(|candidate| candidate.requests)
    }
}

/// `cache_aware` of the SGLang gateway: when loads are imbalanced the shortest queue; else the longest prefix
/// if it is more than 0.3 of the prompt; else the smallest tree.
#[derive(Clone, Copy, Debug)]
pub struct CacheAware;

impl Policy for CacheAware {
    fn place(&mut self, view: &View<'_>) -> Option<Placement> {
        if is_imbalanced(view, 64, 1.5) {
            return view.least(|candidate| candidate.requests);
        }
        let most = longest(view);
        if f64::from(most) > 0.3 * f64::from(view.blocks()) {
            return view.least(|candidate| candidate.disk != most);
        }
        view.least(|candidate| candidate.cached_tokens)
    }
}

/// Preble's E2: when more of the prompt is cached than not, the least loaded of those that have most; else
/// the least sum of recent load, of what is evicted for the prompt, and of the prompt itself.
#[derive(Clone, Copy, Debug)]
pub struct Preble;

impl Policy for Preble {
    fn place(&mut self, view: &View<'_>) -> Option<Placement> {
        let most = longest(view);
        if 2 * u64::from(most) > u64::from(view.blocks()) {
            return view.least(|candidate| (candidate.disk != most, candidate.recent_ns));
        }
        view.least(|candidate: &Candidate| {
            let prompt = view.prefill(candidate, candidate.disk);
            // What the prompt displaces would be computed again if it was asked for: as long as this prompt's
            // own new tokens take, in the part in which the cache was used before.
            let reused = f64::from(candidate.disk) / f64::from(view.blocks().max(1));
            let eviction = (prompt as f64 * reused) as u64;
            candidate.recent_ns.saturating_add(eviction).saturating_add(prompt)
        })
    }
}
