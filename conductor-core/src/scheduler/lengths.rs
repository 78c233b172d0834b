//! How long outputs are: a decayed histogram per model.

use alloc::boxed::Box;
use alloc::vec;

/// Bins per doubling of the length.
const PER_OCTAVE: u32 = 8;
/// Bins: lengths up to 2^24.
const BINS: usize = 24 * PER_OCTAVE as usize;
/// Outputs that count: each new one fades the former by this part.
const MEMORY: f64 = 2_000.0;

/// Lengths of output of every model.
#[derive(Clone, Debug)]
pub(super) struct Lengths {
    models: Box<[Histogram]>,
    first: u32,
    quantile: f64,
}

#[derive(Clone, Debug)]
struct Histogram {
    bins: [f32; BINS],
    total: f64,
    expected: u32,
}

impl Lengths {
    /// For models `0..models`; before the first output of a model, `first` tokens are expected.
    pub(super) fn new(models: u32, first: u32, quantile: f64) -> Self {
        let histogram = Histogram { bins: [0.0; BINS], total: 0.0, expected: first };
        Self { models: vec![histogram; models.max(1) as usize].into_boxed_slice(), first, quantile }
    }

    /// The output that is expected of a request of `model`, in tokens.
    pub(super) fn expected(&self, model: u32) -> u32 {
        self.models[self.index(model)].expected.max(1)
    }

    /// A request of `model` ended after `tokens` of output.
    pub(super) fn learn(&mut self, model: u32, tokens: u32) {
        let (index, quantile, first) = (self.index(model), self.quantile, self.first);
        let histogram = &mut self.models[index];
        histogram.bins.iter_mut().for_each(|bin| *bin *= 1.0 - 1.0 / MEMORY as f32);
        histogram.bins[bin_of(tokens)] += 1.0;
        histogram.total = histogram.total * (1.0 - 1.0 / MEMORY) + 1.0;
        histogram.expected = histogram.quantile(quantile).unwrap_or(first);
    }

    /// What was learnt of a model is forgotten.
    pub(super) fn forget(&mut self, model: u32) {
        let (index, expected) = (self.index(model), self.first);
        self.models[index] = Histogram { bins: [0.0; BINS], total: 0.0, expected };
    }

    fn index(&self, model: u32) -> usize {
        (model as usize).min(self.models.len() - 1)
    }
}

impl Histogram {
    fn quantile(&self, q: f64) -> Option<u32> {
        let total: f64 = self.bins.iter().map(|&bin| f64::from(bin)).sum();
        let mut sum = 0.0;
        let bin = self.bins.iter().position(|&bin| {
            sum += f64::from(bin);
            bin > 0.0 && sum >= q * total
        });
        bin.map(middle_of)
    }
}

/// Lengths below `PER_OCTAVE` have a bin each; then there are `PER_OCTAVE` bins per doubling.
fn bin_of(tokens: u32) -> usize {
    if tokens < PER_OCTAVE {
        return tokens as usize;
    }
    let shift = tokens.ilog2() - PER_OCTAVE.ilog2();
    let bin = (shift + 1) * PER_OCTAVE + ((tokens >> shift) - PER_OCTAVE);
    (bin as usize).min(BINS - 1)
}

/// A length in the middle of a bin.
fn middle_of(bin: usize) -> u32 {
    let bin = bin as u32;
    if bin < 2 * PER_OCTAVE {
        return bin;
    }
    let shift = bin / PER_OCTAVE - 1;
    ((PER_OCTAVE + bin % PER_OCTAVE) << shift) + (1 << shift >> 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bin_contains_its_middle_and_the_middle_is_within_a_sixteenth() {
        for tokens in (0..5_000).chain([1 << 20, (1 << 24) - 1]) {
            let middle = middle_of(bin_of(tokens));
            assert_eq!(bin_of(middle), bin_of(tokens), "{tokens}");
            assert!(middle.abs_diff(tokens) <= tokens / 16 + 1, "{tokens}: {middle}");
        }
        assert_eq!(bin_of(u32::MAX), BINS - 1);
    }

    #[test]
    fn the_expected_length_is_the_quantile_and_follows_a_change() {
        let mut lengths = Lengths::new(2, 100, 0.5);
        assert_eq!(lengths.expected(0), 100);
        (0..1_000).for_each(|i| lengths.learn(0, i));
        assert!(lengths.expected(0).abs_diff(500) < 60, "{}", lengths.expected(0));
        assert_eq!(lengths.expected(1), 100);
        (0..4_000).for_each(|_| lengths.learn(0, 50));
        assert!(lengths.expected(0).abs_diff(50) < 4, "{}", lengths.expected(0));
        // Models above the limit share the last entry.
        lengths.learn(77, 8);
        assert_eq!(lengths.expected(1), 8);
        lengths.forget(0);
        assert_eq!((lengths.expected(0), lengths.expected(1)), (100, 8));
    }
}
