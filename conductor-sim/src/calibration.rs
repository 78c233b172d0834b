//! What the simulation takes from the paper: figure 14, and one number from figure 15.

use conductor_core::cost::{CostModel, DecodeCost, FitError, fit, fit_prefill};

use crate::paper::FIGURE_14;

/// Time per sequence of a decode step, seconds. Figure 14 measures single sequences only, so that this is
/// the one number taken from figure 15: with it the largest relative error of its seven times between
/// tokens is least.
pub const PER_SEQUENCE_S: f64 = 0.004;
/// Bytes of KV per token of LLaMA3-70B: 80 layers of 8 heads of 128 numbers of 2 bytes, for keys and values.
pub const KV_BYTES_PER_TOKEN: u64 = 320 * 1024;

/// The costs of the paper's nodes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Calibration {
    /// Prefills and decode steps.
    pub cost: CostModel,
    /// What the NICs of a node send per second, bytes.
    pub nic_bytes_per_s: f64,
    /// Time per token to load KV from a node's memory into its GPUs, seconds.
    pub load_s_per_token: f64,
    /// Time to place a request and to dispatch it, seconds.
    pub decision_s: f64,
}

impl Calibration {
    /// Fits the costs to the ten columns of figure 14.
    ///
    /// # Errors
    /// The columns determine no costs. They do as they are.
    pub fn of_paper() -> Result<Self, FitError> {
        let columns = FIGURE_14.iter();
        let prefill =
            fit_prefill(columns.clone().map(|column| (column.tokens, column.reused, column.prefill)))?;
        // The context of a column's 128 steps is, on average, its prompt and half of the answer.
        let steps =
            columns.clone().map(|column| ([1.0, f64::from(column.tokens + 64)], column.decode_128 / 128.0));
        let [single, per_context_token] = fit(steps)?;
        let decode =
            DecodeCost { per_step: single - PER_SEQUENCE_S, per_sequence: PER_SEQUENCE_S, per_context_token };
        let per_token = |seconds: f64, column: &crate::paper::Breakdown| seconds / f64::from(column.tokens);
        let count = FIGURE_14.len() as f64;
        let transfer = columns.clone().map(|column| per_token(column.transfer, column)).sum::<f64>() / count;
        Ok(Self {
            cost: CostModel { prefill, decode, kv_bytes_per_token: KV_BYTES_PER_TOKEN },
            nic_bytes_per_s: KV_BYTES_PER_TOKEN as f64 / transfer,
            load_s_per_token: columns.clone().map(|column| per_token(column.load, column)).sum::<f64>()
                / count,
            decision_s: columns.map(|column| column.schedule).sum::<f64>() / count,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prefills_are_within_four_percent_of_every_column_of_figure_14() {
        let calibration = Calibration::of_paper().unwrap();
        assert!(calibration.cost.is_physical(), "{calibration:?}");
        for column in FIGURE_14 {
            let ours = calibration.cost.prefill.time(column.tokens, column.reused).as_secs_f64();
            let ratio = ours / column.prefill;
            assert!((0.96..=1.04).contains(&ratio), "{column:?}: {ours}");
        }
    }
}
