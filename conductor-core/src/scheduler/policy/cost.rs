//! Our rule.

use super::super::view::{Placement, View};
use super::Policy;

/// The least predicted time to the first token, over every instance and everybody who has blocks:
/// `max(queue, transfer) + prefill`, against `queue + prefill` with what the instance has itself. Among equals,
/// the instance that was given less work recently.
#[derive(Clone, Copy, Debug)]
pub struct Cost {
    /// Whether transfers wait for those that are booked on the same NICs.
    pub booked: bool,
}

impl Policy for Cost {
    fn place(&mut self, view: &View<'_>) -> Option<Placement> {
        let mut best: Option<((u64, u64), Placement)> = None;
        for (i, candidate) in view.candidates().iter().enumerate() {
            let own = view.own(candidate);
            let ship_wait = |end| if self.booked { view.ship_wait(candidate, end) } else { 0 };
            let mut consider = |end: u64, fetch| {
                let key = (end.saturating_add(ship_wait(end)), candidate.recent_ns);
                if best.as_ref().is_none_or(|(least, _)| key < *least) {
                    best = Some((key, Placement { candidate: i, fetch }));
                }
                best.as_ref().map_or(u64::MAX, |&((end, _), _)| end)
            };
            let mut least = consider(own.total, None);
            for (h, holder) in view.holders().iter().enumerate() {
                if holder.blocks <= own.blocks {
                    break;
                }
                // Holders come by falling blocks: if this one could not help without any transfer, no later can.
                if candidate.wait.saturating_add(view.prefill(candidate, holder.blocks)) >= least {
                    break;
                }
                if holder.instance == Some(candidate.id) {
                    continue;
                }
                let fetched = view.best_fetch(candidate, &own, holder, self.booked);
                if fetched.total < own.total {
                    least = consider(fetched.total, Some((h, fetched.blocks)));
                }
            }
        }
        best.map(|(_, placement)| placement)
    }
}
