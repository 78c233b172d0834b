//! What the FAST'25 paper and the first drafts of the system say.

use super::super::view::{Placement, View};
use super::Policy;

/// Algorithm 1: the longest prefix is fetched whole where it exceeds the own one by the threshold.
#[derive(Clone, Copy, Debug)]
pub struct Algorithm1 {
    /// `kvcache_balancing_threshold`.
    pub threshold: f64,
}

impl Policy for Algorithm1 {
    fn place(&mut self, view: &View<'_>) -> Option<Placement> {
        let longest = view.holders().first();
        let mut best: Option<(u64, Placement)> = None;
        for (i, candidate) in view.candidates().iter().enumerate() {
            let own = view.own(candidate);
            let others = longest.filter(|holder| {
                // 0 / 0 is not above any threshold; x / 0 is above every one.
                holder.blocks > own.blocks
                    && (own.blocks == 0 || f64::from(holder.blocks) / f64::from(own.blocks) > self.threshold)
            });
            let (total, fetch) = match others {
                None => (own.total, None),
                Some(holder) => {
                    let fetched = view.fetched(candidate, &own, holder, holder.blocks, true);
                    // Transfer, queue and prefill are added up, as in the paper.
                    let total = candidate.wait.saturating_add(fetched.ready).saturating_add(fetched.prefill);
                    (total, Some((0, fetched.blocks)))
                }
            };
            if best.as_ref().is_none_or(|&(least, _)| total < least) {
                best = Some((total, Placement { candidate: i, fetch }));
            }
        }
        best.map(|(_, placement)| placement)
    }
}

/// Algorithm 1 without transfers: queue and prefill with what the instance has itself.
#[derive(Clone, Copy, Debug)]
pub struct Local;

impl Policy for Local {
    fn place(&mut self, view: &View<'_>) -> Option<Placement> {
        view.least(|candidate| view.own(candidate).total)
    }
}

/// The score of the first drafts: `alpha × cached / total + beta × (1 - load)`, the load being the queue over
/// the longest queue.
#[derive(Clone, Copy, Debug)]
pub struct AlphaBeta {
    /// Weight of the part that is reused.
    pub alpha: f64,
    /// Weight of idleness.
    pub beta: f64,
}

impl Policy for AlphaBeta {
    fn place(&mut self, view: &View<'_>) -> Option<Placement> {
        let longest = view.candidates().iter().map(|candidate| candidate.wait).max()?.max(1);
        let score = |wait: u64, blocks: u32| {
            let reuse = f64::from(blocks) / f64::from(view.blocks().max(1));
            self.alpha * reuse + self.beta * (1.0 - wait as f64 / longest as f64)
        };
        let mut best: Option<(f64, usize)> = None;
        for (i, candidate) in view.candidates().iter().enumerate() {
            let score = score(candidate.wait, candidate.disk);
            if best.is_none_or(|(most, _)| score > most) {
                best = Some((score, i));
            }
        }
        best.map(|(_, candidate)| Placement { candidate, fetch: None })
    }
}
