//! How long work takes: prefill, decode steps, transfers; fitted from what engines report.
//!
//! ```text
//!   prefill(n, p) = c0 + c1 (n - p) + c2 (n² - p²) + c3 p      n tokens, p of them reused
//!   decode step   = s0 + d1 b + k K                            b sequences, K tokens of context in all
//!
//!   points of a benchmark ──▶ fit ──▶ CostModel ──▶ OnlineFit ◀── times that engines report
//!                                                      │
//!                                                      ▼
//!                                             predictions, and their error
//! ```
//!
//! Only additions, multiplications and divisions of `f64` are used: the same inputs give the same bits on
//! every machine. This module knows no instance and no queue ([`crate::scheduler`] does).

mod error;
mod fit;
mod online;

pub use error::ErrorHistogram;
pub use fit::{FitError, fit, fit_decode, fit_prefill};
pub use online::{OnlineFit, OnlineFitConfig, PrefillCounters, PrefillFit, PrefillWindow, StepFit};

use core::time::Duration;

/// Prefills as quantities that add up: the time of several prefills is the time of their sum.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PrefillWork {
    /// Prompts.
    pub prompts: f64,
    /// Tokens to compute: the sum of `n - p`.
    pub uncached: f64,
    /// The sum of `n² - p²`.
    pub squares: f64,
    /// Tokens whose KV is reused: the sum of `p`.
    pub reused: f64,
}

impl PrefillWork {
    /// One prompt of `tokens`, the first `reused` of which have their KV; more than `tokens` counts as
    /// `tokens`.
    #[must_use]
    pub fn of(tokens: u32, reused: u32) -> Self {
        let (n, p) = (f64::from(tokens), f64::from(reused.min(tokens)));
        Self { prompts: 1.0, uncached: n - p, squares: n * n - p * p, reused: p }
    }

    /// This work and `other`.
    #[must_use]
    pub fn plus(self, other: Self) -> Self {
        Self {
            prompts: self.prompts + other.prompts,
            uncached: self.uncached + other.uncached,
            squares: self.squares + other.squares,
            reused: self.reused + other.reused,
        }
    }

    /// This work, `factor` times.
    #[must_use]
    pub fn times(self, factor: f64) -> Self {
        Self {
            prompts: self.prompts * factor,
            uncached: self.uncached * factor,
            squares: self.squares * factor,
            reused: self.reused * factor,
        }
    }

    pub(crate) const fn features(self) -> [f64; 4] {
        [self.prompts, self.uncached, self.squares, self.reused]
    }
}

/// The coefficients of `prefill(n, p)`, in seconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PrefillCost {
    /// `c0`: seconds per prompt.
    pub per_prompt: f64,
    /// `c1`: seconds per token that is computed.
    pub per_token: f64,
    /// `c2`: seconds per token² (attention).
    pub per_square: f64,
    /// `c3`: seconds per reused token (its KV is loaded).
    pub per_reused: f64,
}

impl PrefillCost {
    /// From `[c0, c1, c2, c3]`.
    #[must_use]
    pub const fn from_coefficients(c: [f64; 4]) -> Self {
        Self { per_prompt: c[0], per_token: c[1], per_square: c[2], per_reused: c[3] }
    }

    /// `[c0, c1, c2, c3]`.
    #[must_use]
    pub const fn coefficients(&self) -> [f64; 4] {
        [self.per_prompt, self.per_token, self.per_square, self.per_reused]
    }

    /// Seconds for `work`.
    #[must_use]
    pub fn seconds(&self, work: &PrefillWork) -> f64 {
        self.per_prompt * work.prompts
            + self.per_token * work.uncached
            + self.per_square * work.squares
            + self.per_reused * work.reused
    }

    /// The time of a prompt of `tokens` of which the first `reused` have their KV.
    #[must_use]
    pub fn time(&self, tokens: u32, reused: u32) -> Duration {
        duration(self.seconds(&PrefillWork::of(tokens, reused)))
    }
}

/// The coefficients of a decode step, in seconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DecodeCost {
    /// `s0`: seconds per step (the weights are read once).
    pub per_step: f64,
    /// `d1`: seconds per sequence of the batch.
    pub per_sequence: f64,
    /// `k`: seconds per token of context, over all sequences (their KV is read).
    pub per_context_token: f64,
}

impl DecodeCost {
    /// From `[s0, d1, k]`.
    #[must_use]
    pub const fn from_coefficients(c: [f64; 3]) -> Self {
        Self { per_step: c[0], per_sequence: c[1], per_context_token: c[2] }
    }

    /// `[s0, d1, k]`.
    #[must_use]
    pub const fn coefficients(&self) -> [f64; 3] {
        [self.per_step, self.per_sequence, self.per_context_token]
    }

    /// Seconds per step of `sequences` with `context` tokens in all.
    #[must_use]
    pub fn seconds(&self, sequences: f64, context: f64) -> f64 {
        self.per_step + self.per_sequence * sequences + self.per_context_token * context
    }

    /// The time of a step of `sequences` with `context` tokens in all.
    #[must_use]
    pub fn time(&self, sequences: u32, context: u64) -> Duration {
        duration(self.seconds(f64::from(sequences), context as f64))
    }
}

/// What work costs on one kind of instance.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CostModel {
    /// Prefills.
    pub prefill: PrefillCost,
    /// Decode steps.
    pub decode: DecodeCost,
    /// Bytes of KV per token, over all layers and ranks.
    pub kv_bytes_per_token: u64,
}

impl CostModel {
    /// LLaMA3-70B on 8 A800, fitted to figure 14 of the FAST'25 paper (prefill) and to its figure 15
    /// (decode); KV of 320 KiB per token (section 4.1).
    pub const LLAMA3_70B_A800: Self = Self {
        prefill: PrefillCost {
            per_prompt: 0.0680,
            per_token: 1.0975e-4,
            per_square: 7.4276e-10,
            per_reused: 2.557e-6,
        },
        decode: DecodeCost { per_step: 0.0231, per_sequence: 4.2e-3, per_context_token: 3.47e-8 },
        kv_bytes_per_token: 320 * 1024,
    };

    /// Whether every coefficient is finite and not negative, and a prefill and a step take some time.
    #[must_use]
    pub fn is_physical(&self) -> bool {
        let (prefill, decode) = (self.prefill.coefficients(), self.decode.coefficients());
        prefill.iter().chain(&decode).all(|&c| c.is_finite() && c >= 0.0)
            && prefill.iter().any(|&c| c > 0.0)
            && decode.iter().any(|&c| c > 0.0)
    }
}

/// Nanoseconds of `seconds`: 0 when negative or not a number, [`u64::MAX`] when too large.
pub(crate) fn nanos(seconds: f64) -> u64 {
    (seconds * 1e9) as u64
}

/// Seconds of `nanos`.
pub(crate) fn seconds(nanos: u64) -> f64 {
    nanos as f64 / 1e9
}

fn duration(seconds: f64) -> Duration {
    Duration::from_nanos(nanos(seconds))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_calibrated_prefill_is_within_four_percent_of_figure_14() {
        let cost = CostModel::LLAMA3_70B_A800.prefill;
        let lengths = [8_192, 16_384, 32_768, 65_536, 131_072];
        let cold = [1.002, 2.056, 4.479, 10.587, 27.512];
        let warm = [0.135, 0.226, 0.407, 0.881, 2.328];
        for (i, &n) in lengths.iter().enumerate() {
            let p = n * 95 / 100;
            for (reused, paper) in [(0, cold[i]), (p, warm[i])] {
                let ours = cost.time(n, reused).as_secs_f64();
                assert!(
                    (ours - paper).abs() <= 0.04 * paper,
                    "{n} tokens, {reused} reused: {ours} against {paper}"
                );
            }
        }
    }

    #[test]
    fn the_time_of_a_sum_is_the_sum_of_the_times() {
        let cost = CostModel::LLAMA3_70B_A800.prefill;
        let (a, b) = (PrefillWork::of(10_000, 4_000), PrefillWork::of(500, 0));
        let sum = cost.seconds(&a) + cost.seconds(&b);
        assert!((cost.seconds(&a.plus(b)) - sum).abs() < 1e-12);
        assert_eq!(PrefillWork::of(10, 20), PrefillWork::of(10, 10));
    }

    #[test]
    fn what_is_not_a_time_is_zero_or_the_longest() {
        assert_eq!(
            (nanos(f64::NAN), nanos(-1.0), nanos(f64::INFINITY), nanos(1.0)),
            (0, 0, u64::MAX, 1_000_000_000)
        );
    }
}
