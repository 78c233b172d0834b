//! Coefficients that follow what engines report: recursive least squares with forgetting.
//!
//! The sums of the normal equations are kept, each report fades the former ones a little, and the
//! coefficients are solved again: with four of them this costs about a microsecond, keeps every coefficient
//! at zero or above exactly, and has no covariance matrix that rounding could ruin.

use core::time::Duration;

use super::error::ErrorHistogram;
use super::fit::Normal;
use super::{DecodeCost, PrefillCost, PrefillWork};

/// How an [`OnlineFit`] learns.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct OnlineFitConfig {
    /// Observations that count: each one fades the former by `1 / memory`. At least 1.
    pub memory: u32,
    /// How many observations the prior coefficients count as; they never fade.
    pub prior_weight: f64,
    /// A relative error beyond this multiple of the usual one is cut to it. At least 1.
    pub clip: f64,
}

impl Default for OnlineFitConfig {
    fn default() -> Self {
        Self { memory: 1_000, prior_weight: 0.1, clip: 4.0 }
    }
}

/// The usual relative error is never taken to be below this.
const USUAL_ERROR_MIN: f64 = 0.02;
/// The usual relative error before anything was observed.
const USUAL_ERROR_FIRST: f64 = 1.0;
/// The first observations, which are not cut: how far the prior is off is not known yet.
const UNCUT_FIRST: u32 = 32;
/// Observations over which the usual relative error is averaged.
const USUAL_ERROR_MEMORY: f64 = 32.0;

/// `y = x·c` with `c >= 0`, fitted to relative errors, the newest observations weighing most.
#[derive(Clone, Debug)]
pub struct OnlineFit<const N: usize> {
    config: OnlineFitConfig,
    prior: [f64; N],
    sums: Normal<N>,
    coefficients: [f64; N],
    usual_error: f64,
    errors: ErrorHistogram,
    observed: u32,
    clipped: u64,
}

impl<const N: usize> OnlineFit<N> {
    /// Begins with the coefficients `prior`; those that are negative or not finite count as zero.
    #[must_use]
    pub fn new(prior: [f64; N], config: OnlineFitConfig) -> Self {
        let prior = prior.map(|c| if c.is_finite() && c > 0.0 { c } else { 0.0 });
        Self {
            config,
            prior,
            sums: Normal::ZERO,
            coefficients: prior,
            usual_error: USUAL_ERROR_FIRST,
            errors: ErrorHistogram::new(config.memory),
            observed: 0,
            clipped: 0,
        }
    }

    /// `x` took `y` (seconds, or any one unit). Ignored, with `false`, unless all is finite, `x` is not
    /// negative and `y` is positive.
    pub fn observe(&mut self, x: &[f64; N], y: f64) -> bool {
        if !y.is_finite() || y <= 0.0 || !x.iter().all(|x| x.is_finite() && *x >= 0.0) {
            return false;
        }
        let predicted = self.predict(x);
        self.errors.record(predicted, y);
        // Errors are relative to the prediction: relative to the observation, low ones would weigh more.
        let scale = if predicted > 0.0 { predicted } else { y };
        let error = (y - predicted) / scale;
        self.observed = self.observed.saturating_add(1);
        let limit = self.config.clip.max(1.0) * self.usual_error;
        let cut = if self.observed <= UNCUT_FIRST { error } else { error.clamp(-limit, limit) };
        self.clipped += u64::from(cut.to_bits() != error.to_bits());
        self.usual_error += (cut.abs().min(limit) - self.usual_error) / USUAL_ERROR_MEMORY;
        self.usual_error = self.usual_error.max(USUAL_ERROR_MIN);
        self.sums.scale(1.0 - 1.0 / f64::from(self.config.memory.max(1)));
        let learnt = predicted + cut * scale;
        // A prediction that was far too low must not make its observation outweigh all others.
        let scale = scale.max(learnt / 2.0);
        self.sums.add(x, learnt, 1.0 / (scale * scale));
        let mut normal = self.sums;
        for (i, &prior) in self.prior.iter().enumerate() {
            if prior > 0.0 {
                normal.a[i][i] += self.config.prior_weight / (prior * prior);
                normal.b[i] += self.config.prior_weight / prior;
            }
        }
        if let Some(coefficients) = normal.solve() {
            self.coefficients = coefficients;
        }
        true
    }

    /// `x·c` with the present coefficients.
    #[must_use]
    pub fn predict(&self, x: &[f64; N]) -> f64 {
        x.iter().zip(&self.coefficients).map(|(x, c)| x * c).sum()
    }

    /// The present coefficients, none negative.
    #[must_use]
    pub const fn coefficients(&self) -> &[f64; N] {
        &self.coefficients
    }

    /// The relative errors of the predictions, each made before its observation was learnt from.
    #[must_use]
    pub const fn errors(&self) -> &ErrorHistogram {
        &self.errors
    }

    /// Observations that were cut as outliers.
    #[must_use]
    pub const fn clipped(&self) -> u64 {
        self.clipped
    }
}

/// The cost of prefills on one kind of instance, fitted online.
#[derive(Clone, Debug)]
pub struct PrefillFit(OnlineFit<4>);

impl PrefillFit {
    /// Begins with `prior`.
    #[must_use]
    pub fn new(prior: &PrefillCost, config: OnlineFitConfig) -> Self {
        Self(OnlineFit::new(prior.coefficients(), config))
    }

    /// `work` took `time` on an instance that did nothing else; `false` when unusable.
    pub fn observe(&mut self, work: &PrefillWork, time: Duration) -> bool {
        self.0.observe(&work.features(), time.as_secs_f64())
    }

    /// The present coefficients.
    #[must_use]
    pub const fn cost(&self) -> PrefillCost {
        PrefillCost::from_coefficients(*self.0.coefficients())
    }

    /// The fit itself.
    #[must_use]
    pub const fn fit(&self) -> &OnlineFit<4> {
        &self.0
    }
}

/// The cost of decode steps on one kind of instance, fitted online.
#[derive(Clone, Debug)]
pub struct StepFit(OnlineFit<3>);

impl StepFit {
    /// Begins with `prior`.
    #[must_use]
    pub fn new(prior: &DecodeCost, config: OnlineFitConfig) -> Self {
        Self(OnlineFit::new(prior.coefficients(), config))
    }

    /// A step of `sequences` with `context` tokens in all took `time`; `false` when unusable.
    pub fn observe(&mut self, sequences: u32, context: u64, time: Duration) -> bool {
        self.0.observe(&[1.0, f64::from(sequences), context as f64], time.as_secs_f64())
    }

    /// The present coefficients.
    #[must_use]
    pub const fn cost(&self) -> DecodeCost {
        DecodeCost::from_coefficients(*self.0.coefficients())
    }

    /// The fit itself.
    #[must_use]
    pub const fn fit(&self) -> &OnlineFit<3> {
        &self.0
    }
}

/// Counters of an engine since its start (`total_prefill_uncached_tokens` and `total_prefill_busy_us` of
/// SGLang's `LoadStat`, 0.5.23).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PrefillCounters {
    /// Tokens whose KV was computed.
    pub uncached_tokens: u64,
    /// Microseconds in which prefills ran.
    pub busy_us: u64,
}

/// What happened on one instance between two values of its counters: pairs the time that they count with the
/// prefills that we know of.
#[derive(Clone, Copy, Debug, Default)]
pub struct PrefillWindow {
    begin: Option<PrefillCounters>,
    known: PrefillWork,
}

impl PrefillWindow {
    /// Tokens of the counters and of known prefills may differ by this part when nothing is in progress.
    const MISMATCH_IDLE: f64 = 0.02;
    /// ... and when prefills are in progress, of which a part is counted.
    const MISMATCH_BUSY: f64 = 0.25;
    /// Prompts after which a window of a busy instance is used: the part in progress is then small.
    const PROMPTS_BUSY_MIN: f64 = 16.0;

    /// A prefill of `work` ended on the instance.
    pub fn done(&mut self, work: &PrefillWork) {
        self.known = self.known.plus(*work);
    }

    /// New counters; `idle` when no prefill that we know of is in progress. Returns work and the time it took
    /// once they can be paired, and begins anew. Counters that went back (a restart), and tokens that no
    /// prefill we know of asked for, begin anew without a pair.
    pub fn report(&mut self, counters: PrefillCounters, idle: bool) -> Option<(PrefillWork, Duration)> {
        let known = self.known;
        let Some(begin) = self.begin else {
            *self = Self { begin: Some(counters), known: PrefillWork::default() };
            return None;
        };
        let delta = (
            counters.uncached_tokens.checked_sub(begin.uncached_tokens),
            counters.busy_us.checked_sub(begin.busy_us),
        );
        let (Some(tokens), Some(busy_us)) = delta else {
            *self = Self { begin: Some(counters), known: PrefillWork::default() };
            return None;
        };
        if known.prompts < Self::PROMPTS_BUSY_MIN && !idle || known.uncached <= 0.0 && tokens == 0 {
            return None;
        }
        *self = Self { begin: Some(counters), known: PrefillWork::default() };
        let ratio = tokens as f64 / known.uncached;
        let allowed = if idle { Self::MISMATCH_IDLE } else { Self::MISMATCH_BUSY };
        let usable = busy_us > 0 && (ratio - 1.0).abs() <= allowed;
        usable.then(|| (known.times(ratio), Duration::from_micros(busy_us)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cost::CostModel;
    use te_core::testkit::Rng;

    /// Uniform in `-1..1`.
    fn noise(rng: &mut Rng) -> f64 {
        rng.below(2_000_001) as f64 / 1e6 - 1.0
    }

    fn prompt(rng: &mut Rng) -> PrefillWork {
        let n = 200 + rng.below(30_000) as u32;
        PrefillWork::of(n, if rng.chance_ppm(600_000) { rng.below(u64::from(n)) as u32 } else { 0 })
    }

    const TRUTH: PrefillCost =
        PrefillCost { per_prompt: 0.021, per_token: 4.1e-5, per_square: 2.9e-10, per_reused: 6.0e-7 };

    #[test]
    fn prefills_of_unknown_cost_are_predicted_within_ten_percent_after_500_requests() {
        for seed in 0..20 {
            let mut rng = Rng::new(seed);
            let mut fit = PrefillFit::new(&CostModel::LLAMA3_70B_A800.prefill, OnlineFitConfig::default());
            for _ in 0..500 {
                let work = prompt(&mut rng);
                let time = TRUTH.seconds(&work) * (1.0 + 0.1 * noise(&mut rng));
                assert!(fit.observe(&work, Duration::from_secs_f64(time)));
            }
            // Against the truth without noise: what is left is the error of the fit alone.
            let mut errors = ErrorHistogram::new(10_000);
            for _ in 0..1_000 {
                let work = prompt(&mut rng);
                errors.record(fit.cost().seconds(&work), TRUTH.seconds(&work));
            }
            assert!(
                errors.quantile(0.5).is_some_and(|p50| p50 <= 0.02),
                "seed {seed}: {:?}",
                errors.quantile(0.5)
            );
            assert!(
                errors.quantile(0.9).is_some_and(|p90| p90 <= 0.05),
                "seed {seed}: {:?}",
                errors.quantile(0.9)
            );
            assert!(fit.fit().errors().quantile(0.5).is_some_and(|p50| p50 <= 0.10));
        }
    }

    #[test]
    fn one_wild_time_in_twenty_does_not_move_the_fit() {
        let mut rng = Rng::new(7);
        let mut fit = PrefillFit::new(&CostModel::LLAMA3_70B_A800.prefill, OnlineFitConfig::default());
        for i in 0..1_000 {
            let work = prompt(&mut rng);
            let wild = if i % 20 == 19 { 30.0 } else { 1.0 };
            let time = wild * TRUTH.seconds(&work) * (1.0 + 0.1 * noise(&mut rng));
            fit.observe(&work, Duration::from_secs_f64(time));
        }
        let work = PrefillWork::of(12_000, 4_000);
        let (ours, truth) = (fit.cost().seconds(&work), TRUTH.seconds(&work));
        assert!((ours - truth).abs() < 0.08 * truth, "{ours} against {truth}");
        assert!(fit.fit().clipped() >= 45, "{}", fit.fit().clipped());
    }

    #[test]
    fn the_fit_follows_an_engine_that_became_slower() {
        let mut rng = Rng::new(3);
        let config = OnlineFitConfig { memory: 200, ..OnlineFitConfig::default() };
        let mut fit = PrefillFit::new(&TRUTH, config);
        let slower = PrefillCost::from_coefficients(TRUTH.coefficients().map(|c| 2.5 * c));
        for i in 0..1_500 {
            let work = prompt(&mut rng);
            let truth = if i < 500 { TRUTH } else { slower };
            fit.observe(&work, Duration::from_secs_f64(truth.seconds(&work) * (1.0 + 0.1 * noise(&mut rng))));
        }
        let work = PrefillWork::of(12_000, 4_000);
        let (ours, truth) = (fit.cost().seconds(&work), slower.seconds(&work));
        assert!((ours - truth).abs() < 0.05 * truth, "{ours} against {truth}");
    }

    #[test]
    fn decode_steps_of_unknown_cost_are_predicted() {
        let mut rng = Rng::new(11);
        let truth = DecodeCost { per_step: 0.012, per_sequence: 9.0e-4, per_context_token: 1.1e-8 };
        let mut fit = StepFit::new(&CostModel::LLAMA3_70B_A800.decode, OnlineFitConfig::default());
        for _ in 0..500 {
            let b = 1 + rng.below(60) as u32;
            let context = u64::from(b) * (500 + rng.below(20_000));
            let time = truth.seconds(f64::from(b), context as f64) * (1.0 + 0.1 * noise(&mut rng));
            fit.observe(b, context, Duration::from_secs_f64(time));
        }
        let (ours, truth) = (fit.cost().seconds(20.0, 2e5), truth.seconds(20.0, 2e5));
        assert!((ours - truth).abs() < 0.03 * truth, "{ours} against {truth}");
    }

    #[test]
    fn coefficients_stay_at_zero_or_above_whatever_is_reported() {
        let mut rng = Rng::new(5);
        let mut fit = PrefillFit::new(&TRUTH, OnlineFitConfig { memory: 1, ..OnlineFitConfig::default() });
        for _ in 0..2_000 {
            let work = prompt(&mut rng);
            let magnitude = rng.below(60);
            fit.observe(&work, Duration::from_nanos(rng.below(1 << magnitude)));
            assert!(fit.cost().coefficients().iter().all(|c| c.is_finite() && *c >= 0.0), "{:?}", fit.cost());
        }
        assert!(!fit.observe(&PrefillWork::of(10, 0), Duration::ZERO));
        assert!(
            !fit.observe(
                &PrefillWork { prompts: f64::NAN, ..PrefillWork::default() },
                Duration::from_secs(1)
            )
        );
    }

    #[test]
    fn counters_of_an_engine_fit_its_cost() {
        let mut rng = Rng::new(9);
        let mut fit = PrefillFit::new(&CostModel::LLAMA3_70B_A800.prefill, OnlineFitConfig::default());
        let (mut counters, mut window) = (PrefillCounters::default(), PrefillWindow::default());
        window.report(counters, true);
        let mut pairs = 0;
        for i in 0..600 {
            let work = prompt(&mut rng);
            counters.uncached_tokens += work.uncached as u64;
            counters.busy_us += (1e6 * TRUTH.seconds(&work) * (1.0 + 0.1 * noise(&mut rng))) as u64;
            window.done(&work);
            if let Some((work, time)) = window.report(counters, i % 3 == 0) {
                pairs += usize::from(fit.observe(&work, time));
            }
        }
        assert_eq!(pairs, 200);
        let work = PrefillWork::of(12_000, 4_000);
        let (ours, truth) = (fit.cost().seconds(&work), TRUTH.seconds(&work));
        assert!((ours - truth).abs() < 0.05 * truth, "{ours} against {truth}");
    }

    #[test]
    fn counters_that_went_back_or_count_strange_prefills_are_not_used() {
        let work = PrefillWork::of(1_000, 0);
        let mut window = PrefillWindow::default();
        assert_eq!(window.report(PrefillCounters { uncached_tokens: 500, busy_us: 500 }, true), None);
        window.done(&work);
        assert_eq!(window.report(PrefillCounters { uncached_tokens: 400, busy_us: 600 }, true), None);
        window.done(&work);
        assert_eq!(window.report(PrefillCounters { uncached_tokens: 9_400, busy_us: 900 }, true), None);
        window.done(&work);
        let pair = window.report(PrefillCounters { uncached_tokens: 10_400, busy_us: 1_000 }, true);
        assert_eq!(pair, Some((work, Duration::from_micros(100))));
        assert_eq!(window.report(PrefillCounters { uncached_tokens: 10_400, busy_us: 1_000 }, true), None);
    }
}
