//! Our rule.

use super::super::view::{Estimate, Placement, View};
use super::Policy;

/// The least cost over every instance and everybody who has blocks:
///
/// ```text
///   max(queue, transfer) + prefill + wait of the KV for the NIC     what the request waits for
///   + prefill × price of the GPUs + transfer × price of the NICs    what it costs those who come later
/// ```
///
/// against the same with what the instance has itself. Prices follow from how busy the prefill instances and
/// the two NICs are: a request takes no more of what is scarce than it saves of the other. Without them each
/// request is best for itself, and a cluster whose NICs are nearly busy ships blocks to no end. Among equals,
/// the instance that was given less work recently.
#[derive(Clone, Copy, Debug)]
pub struct Cost {
    /// Whether transfers wait for those that are booked on the same NICs, and have a price. Without, they take
    /// bytes / bandwidth.
    pub booked: bool,
}

impl Policy for Cost {
    fn place(&mut self, view: &View<'_>) -> Option<Placement> {
        let price = if self.booked { view.prefill_price() } else { 0.0 };
        let mut best: Option<((u64, u64), Placement)> = None;
        let mut least = u64::MAX;
        for (i, candidate) in view.candidates().iter().enumerate() {
            let own = view.own(candidate);
            let mut consider = |estimate: &Estimate, others: f64, fetch| {
                let ship_wait = if self.booked { view.ship_wait(candidate, estimate.total) } else { 0 };
                let others = (others + price * estimate.prefill as f64) as u64;
                let cost = estimate.total.saturating_add(ship_wait).saturating_add(others);
                let key = (cost, candidate.recent_ns);
                if best.as_ref().is_none_or(|(least, _)| key < *least) {
                    best = Some((key, Placement { candidate: i, fetch }));
                    least = cost;
                }
            };
            consider(&own, 0.0, None);
            for (h, holder) in view.holders().iter().enumerate() {
                if holder.blocks <= own.blocks {
                    break;
                }
                if holder.instance == Some(candidate.id) {
                    continue;
                }
                for fetched in view.fetches(candidate, &own, holder, self.booked).into_iter().flatten() {
                    let others = if self.booked {
                        view.fetch_price(candidate, holder)
                            * view.fetch_span(candidate, &own, holder, fetched.blocks)
                    } else {
                        0.0
                    };
                    consider(&fetched, others, Some((h, fetched.blocks)));
                }
            }
        }
        best.map(|(_, placement)| placement)
    }
}
