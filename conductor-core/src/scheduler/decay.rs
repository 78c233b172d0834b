//! Sums that forget: they halve in a given time.

/// A sum, and when it was computed.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Decayed {
    sum: f64,
    at: u64,
}

impl Decayed {
    /// The sum at `now`, nanoseconds, when it halves every `half_life` nanoseconds.
    pub(super) fn at(&self, now: u64, half_life: u64) -> f64 {
        if self.sum == 0.0 { 0.0 } else { self.sum * half_to_the(now.saturating_sub(self.at), half_life) }
    }

    pub(super) fn add(&mut self, value: f64, now: u64, half_life: u64) {
        self.sum = self.at(now, half_life) + value;
        self.at = self.at.max(now);
    }

    /// The part of the time that the spans which were added take, if they came evenly: their rate.
    pub(super) fn utilisation(&self, now: u64, half_life: u64) -> f64 {
        self.at(now, half_life) * LN_2 / half_life.max(1) as f64
    }
}

const LN_2: f64 = core::f64::consts::LN_2;

/// `2^-(elapsed / half_life)`: exact at whole numbers, and within 2e-5 between them by the series of the
/// exponential function, so that every machine computes the same.
fn half_to_the(elapsed: u64, half_life: u64) -> f64 {
    let half_life = half_life.max(1);
    let halvings = elapsed / half_life;
    if halvings >= 64 {
        return 0.0;
    }
    let x = (elapsed % half_life) as f64 / half_life as f64 * LN_2;
    let series =
        1.0 - x * (1.0 - x / 2.0 * (1.0 - x / 3.0 * (1.0 - x / 4.0 * (1.0 - x / 5.0 * (1.0 - x / 6.0)))));
    series / (1_u64 << halvings) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sum_halves_in_its_half_life_however_often_it_is_looked_at() {
        for tenths in 0..200_u32 {
            let exact = 0.5_f64.powf(f64::from(tenths) / 10.0);
            assert!((half_to_the(u64::from(tenths), 10) - exact).abs() < 2e-5, "{tenths}");
        }
        let mut sum = Decayed::default();
        sum.add(1_024.0, 0, 1_000);
        (1..=3_000).for_each(|at| sum.add(0.0, at, 1_000));
        assert!((sum.at(3_000, 1_000) - 128.0).abs() < 2.0, "{sum:?}");
        assert_eq!(sum.at(u64::MAX, 1_000), 0.0);
    }

    #[test]
    fn even_spans_are_their_rate() {
        let mut sum = Decayed::default();
        (0..10_000).for_each(|i| sum.add(30.0, i * 100, 5_000));
        assert!((sum.utilisation(1_000_000, 5_000) - 0.3).abs() < 0.01);
    }
}
