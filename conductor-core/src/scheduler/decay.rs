//! Sums that forget: they halve in a given time, to be told apart from what is long ago.
//!
//! They fade by a constant factor per step of time, all of them at once: reading one costs nothing, and no
//! exponential function is needed whose last bit could differ between machines.

use te_core::Instant;

/// Nanoseconds per step.
const STEP_NS: u64 = 250_000_000;

/// Counts steps.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Steps(u64);

impl Steps {
    /// Steps since the last call.
    pub(super) fn until(&mut self, now: Instant) -> u64 {
        let step = now.as_nanos() / STEP_NS;
        let steps = step.saturating_sub(self.0);
        self.0 = self.0.max(step);
        steps
    }
}

/// How fast a sum fades: the factor per step.
#[derive(Clone, Copy, Debug)]
pub(super) struct Fading(f64);

impl Fading {
    /// Halves in 10 s: `2^(-1/40)`.
    pub(super) const TEN_SECONDS: Self = Self(0.982_820_598_545_251_1);
    /// Halves in a minute: `2^(-1/240)`.
    pub(super) const MINUTE: Self = Self(0.997_116_053_334_589_2);

    /// The factor after `steps`.
    pub(super) fn after(self, steps: u64) -> f64 {
        // Squares: a long silence costs no more than a short one.
        let (mut factor, mut power, mut steps) = (1.0, self.0, steps);
        while steps > 0 {
            if steps & 1 == 1 {
                factor *= power;
            }
            power *= power;
            steps >>= 1;
        }
        factor
    }

    /// The part of the time that spans take whose faded sum is `sum` nanoseconds, if they come evenly.
    pub(super) fn utilisation(self, sum: f64) -> f64 {
        sum * (1.0 - self.0) / STEP_NS as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn factors_halve_in_their_time() {
        assert!((Fading::TEN_SECONDS.after(40) - 0.5).abs() < 1e-12);
        assert!((Fading::MINUTE.after(240) - 0.5).abs() < 1e-12);
        assert_eq!(Fading::MINUTE.after(0), 1.0);
        assert_eq!(Fading::MINUTE.after(u64::MAX), 0.0);
    }

    #[test]
    fn even_spans_are_their_rate() {
        let (mut steps, mut sum) = (Steps::default(), 0.0);
        for i in 0..10_000_u64 {
            let passed = steps.until(Instant::from_millis(100 * i));
            sum = sum * Fading::TEN_SECONDS.after(passed) + 30e6;
        }
        let busy = Fading::TEN_SECONDS.utilisation(sum);
        assert!((busy - 0.3).abs() < 0.01, "{busy}");
    }
}
