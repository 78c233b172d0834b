//! Our rule.

use super::super::view::{Candidate, Estimate, Placement, View};
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
    /// Whether transfers wait for those that are booked on the same NICs, and have a price. Without, they
    /// take bytes / bandwidth.
    pub booked: bool,
}

impl Policy for Cost {
    fn place(&mut self, view: &View<'_>) -> Option<Placement> {
        let price = if self.booked { view.prefill_price() } else { 0.0 };
        let mut best = Best { key: (u64::MAX, u64::MAX), placement: None };
        let mut soonest = (u64::MAX, 0);
        for (candidate, i) in view.candidates().iter().zip(0..) {
            let own = view.own(candidate);
            best.consider(self.cost(view, candidate, &own, price, 0.0), candidate.recent_ns, i, None);
            soonest = soonest.min((candidate.wait, i));
        }
        // The shortest queue first: what it achieves excludes most of the others at a glance.
        self.fetch(view, price, soonest.1, &mut best);
        for i in 0..view.candidates().len() {
            if i != soonest.1 {
                self.fetch(view, price, i, &mut best);
            }
        }
        best.placement
    }
}

impl Cost {
    /// Considers what candidate `i` could fetch.
    #[inline]
    fn fetch(&self, view: &View<'_>, price: f64, i: usize, best: &mut Best) {
        let candidate = &view.candidates()[i];
        let mut own = None;
        for (holder, h) in view.holders().iter().zip(0..) {
            // Holders come by falling blocks: what this one cannot do without any transfer, no later one can.
            let prefill = view.prefill(candidate, holder.blocks);
            let least =
                candidate.wait.saturating_add(prefill).saturating_add((price * prefill as f64) as u64);
            if least >= best.key.0 {
                break;
            }
            let own = own.get_or_insert_with(|| view.own(candidate));
            if holder.blocks <= own.blocks {
                break;
            }
            if holder.instance == Some(candidate.id) {
                continue;
            }
            let fetch_price = if self.booked { view.fetch_price(candidate, holder) } else { 0.0 };
            let others = |blocks| fetch_price * view.fetch_span(candidate, own, holder, blocks);
            // Prefill and prices are concave in the cut: their sum is least with everything or with nothing.
            let nothing = candidate.wait.saturating_add(own.prefill);
            let nothing = nothing.saturating_add((price * own.prefill as f64) as u64);
            if nothing.min(least.saturating_add(others(holder.blocks) as u64)) >= best.key.0 {
                continue;
            }
            for fetched in view.fetches(candidate, own, holder, self.booked).into_iter().flatten() {
                let cost = self.cost(view, candidate, &fetched, price, others(fetched.blocks));
                best.consider(cost, candidate.recent_ns, i, Some((h, fetched.blocks)));
            }
        }
    }

    #[inline]
    fn cost(
        &self,
        view: &View<'_>,
        candidate: &Candidate,
        estimate: &Estimate,
        price: f64,
        others: f64,
    ) -> u64 {
        let ship_wait = if self.booked { view.ship_wait(candidate, estimate.total) } else { 0 };
        let others = (others + price * estimate.prefill as f64) as u64;
        estimate.total.saturating_add(ship_wait).saturating_add(others)
    }
}

/// The least cost so far.
struct Best {
    key: (u64, u64),
    placement: Option<Placement>,
}

impl Best {
    fn consider(&mut self, cost: u64, recent_ns: u64, candidate: usize, fetch: Option<(usize, u32)>) {
        if (cost, recent_ns) < self.key {
            *self = Self { key: (cost, recent_ns), placement: Some(Placement { candidate, fetch }) };
        }
    }
}
