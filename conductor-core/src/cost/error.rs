//! How wrong predictions are: a small histogram of relative errors that forgets.

/// Steps of the histogram: error 0 to [`STEP`], ..., the last one is everything above.
const STEPS: usize = 128;
/// The width of a step: 1 % of the observed value.
const STEP: f64 = 0.01;
/// Once the newest observation weighs this much, all weights are divided by it.
const WEIGHT_MAX: f64 = 1e6;

/// Relative errors `|predicted - observed| / observed`, in steps of 1 % up to 127 %; the newest weigh most.
#[derive(Clone, Debug)]
pub struct ErrorHistogram {
    weights: [f64; STEPS],
    total: f64,
    newest: f64,
    growth: f64,
    count: u64,
}

impl ErrorHistogram {
    /// Empty; about the last `memory` observations count (at least 1).
    #[must_use]
    pub fn new(memory: u32) -> Self {
        Self {
            weights: [0.0; STEPS],
            total: 0.0,
            newest: 1.0,
            growth: 1.0 + 1.0 / f64::from(memory.max(1)),
            count: 0,
        }
    }

    /// A prediction and what came of it, in one unit; ignored unless both are finite and `observed` is
    /// positive.
    pub fn record(&mut self, predicted: f64, observed: f64) {
        if !predicted.is_finite() || !observed.is_finite() || observed <= 0.0 {
            return;
        }
        let error = (predicted - observed).abs() / observed;
        let step = ((error / STEP) as usize).min(STEPS - 1);
        self.newest *= self.growth;
        if self.newest > WEIGHT_MAX {
            let scale = 1.0 / self.newest;
            self.weights.iter_mut().for_each(|weight| *weight *= scale);
            self.total *= scale;
            self.newest = 1.0;
        }
        self.weights[step] += self.newest;
        self.total += self.newest;
        self.count += 1;
    }

    /// Observations so far, forgotten ones included.
    #[must_use]
    pub const fn count(&self) -> u64 {
        self.count
    }

    /// The error that a fraction `q` (0 to 1) of the observations does not exceed, by the upper end of its
    /// step; `None` before the first observation. Errors of 127 % and more are infinite.
    #[must_use]
    pub fn quantile(&self, q: f64) -> Option<f64> {
        if self.count == 0 {
            return None;
        }
        let wanted = q * self.total;
        let mut sum = 0.0;
        let at = self.weights.iter().position(|weight| {
            sum += weight;
            sum >= wanted
        });
        match at {
            Some(step) if step < STEPS - 1 => Some((step as f64 + 1.0) * STEP),
            _ => Some(f64::INFINITY),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_those_of_the_observations() {
        let mut errors = ErrorHistogram::new(1_000_000);
        assert_eq!(errors.quantile(0.5), None);
        for percent in 0..100 {
            errors.record(100.0 + f64::from(percent) + 0.5, 100.0);
        }
        let p = |q| errors.quantile(q).expect("observations");
        assert!((p(0.5) - 0.50).abs() < 0.011, "{}", p(0.5));
        assert!((p(0.9) - 0.90).abs() < 0.011, "{}", p(0.9));
    }

    #[test]
    fn old_errors_are_forgotten() {
        let mut errors = ErrorHistogram::new(100);
        (0..10_000).for_each(|_| errors.record(2.0, 1.0));
        assert!(errors.quantile(0.5).is_some_and(|p50| p50 > 0.9));
        (0..500).for_each(|_| errors.record(1.051, 1.0));
        assert!(errors.quantile(0.9).is_some_and(|p90| p90 < 0.07));
        assert_eq!(errors.count(), 10_500);
    }

    #[test]
    fn what_cannot_be_compared_is_ignored() {
        let mut errors = ErrorHistogram::new(10);
        for (predicted, observed) in [(1.0, 0.0), (f64::NAN, 1.0), (1.0, f64::INFINITY), (1.0, -1.0)] {
            errors.record(predicted, observed);
        }
        assert_eq!(errors.count(), 0);
        errors.record(100.0, 1.0);
        assert_eq!(errors.quantile(0.5), Some(f64::INFINITY));
    }
}
