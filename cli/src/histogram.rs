//! Latency histogram with logarithmic buckets: fixed memory, no allocation when recording, 0.8 % error.

/// Log2 of the buckets per power of two. With 64 of them, a bucket is at most 1/64 of its value wide.
const SUB_BITS: u32 = 6;
const SUB: usize = 1 << SUB_BITS;
const BUCKETS: usize = (64 - SUB_BITS as usize + 1) * SUB;

/// A histogram of durations in nanoseconds, with exact minimum, maximum and sum.
#[derive(Clone, Debug)]
pub struct Histogram {
    buckets: Box<[u64]>,
    count: u64,
    sum_ns: u128,
    min_ns: u64,
    max_ns: u64,
}

impl Histogram {
    /// An empty histogram.
    #[must_use]
    pub fn new() -> Self {
        Self { buckets: vec![0; BUCKETS].into(), count: 0, sum_ns: 0, min_ns: u64::MAX, max_ns: 0 }
    }

    /// Records one duration, nanoseconds.
    pub fn record_ns(&mut self, ns: u64) {
        self.buckets[bucket_of(ns)] += 1;
        self.count += 1;
        self.sum_ns += u128::from(ns);
        self.min_ns = self.min_ns.min(ns);
        self.max_ns = self.max_ns.max(ns);
    }

    /// Records one duration.
    pub fn record(&mut self, duration: std::time::Duration) {
        self.record_ns(u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX));
    }

    /// Adds the counts of another histogram.
    pub fn merge(&mut self, other: &Self) {
        for (mine, theirs) in self.buckets.iter_mut().zip(&other.buckets) {
            *mine += theirs;
        }
        self.count += other.count;
        self.sum_ns += other.sum_ns;
        self.min_ns = self.min_ns.min(other.min_ns);
        self.max_ns = self.max_ns.max(other.max_ns);
    }

    /// Number of recorded durations.
    #[must_use]
    pub const fn count(&self) -> u64 {
        self.count
    }

    /// Sum of all recorded durations, seconds.
    #[must_use]
    pub fn sum_s(&self) -> f64 {
        self.sum_ns as f64 / 1e9
    }

    /// The `q` quantile (`q` from 0 to 1), microseconds; 0 when the histogram is empty.
    #[must_use]
    pub fn quantile_us(&self, q: f64) -> f64 {
        if self.count == 0 {
            return 0.0;
        }
        if q <= 0.0 || q >= 1.0 {
            return if q <= 0.0 { self.min_ns } else { self.max_ns } as f64 / 1e3;
        }
        let rank = ((q * self.count as f64).ceil() as u64).max(1);
        let mut seen = 0;
        for (index, count) in self.buckets.iter().enumerate() {
            seen += count;
            if seen >= rank {
                return middle_of(index).clamp(self.min_ns, self.max_ns) as f64 / 1e3;
            }
        }
        self.max_ns as f64 / 1e3
    }
}

impl Default for Histogram {
    fn default() -> Self {
        Self::new()
    }
}

/// The bucket of a value: values below `SUB` have a bucket each; above that, each power of two is divided
/// into `SUB` buckets.
const fn bucket_of(ns: u64) -> usize {
    if ns < SUB as u64 {
        return ns as usize;
    }
    let shift = 63 - ns.leading_zeros() - SUB_BITS;
    (shift as usize + 1) * SUB + ((ns >> shift) as usize & (SUB - 1))
}

const fn middle_of(bucket: usize) -> u64 {
    if bucket < SUB {
        return bucket as u64;
    }
    let shift = (bucket / SUB - 1) as u32;
    let low = ((SUB + bucket % SUB) as u64) << shift;
    low + (1u64 << shift) / 2
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_stay_within_one_percent() {
        let mut histogram = Histogram::new();
        for us in 1..=100_000u64 {
            histogram.record_ns(us * 1_000);
        }
        for (q, exact) in [(0.5, 50_000.0), (0.99, 99_000.0), (0.999, 99_900.0)] {
            let found = histogram.quantile_us(q);
            assert!((found / exact - 1.0).abs() < 0.01, "p{q}: {found}, exact {exact}");
        }
        assert_eq!((histogram.quantile_us(0.0), histogram.quantile_us(1.0)), (1.0, 100_000.0));
    }

    #[test]
    fn every_value_has_a_bucket_and_buckets_rise() {
        let mut last = 0;
        for bits in 0..64 {
            for ns in [1u64 << bits, (1u64 << bits) + ((1u64 << bits) >> 1), u64::MAX >> (63 - bits)] {
                let bucket = bucket_of(ns);
                assert!(bucket < BUCKETS);
                assert!(bucket >= last, "{ns}");
                last = bucket;
                let error = middle_of(bucket).abs_diff(ns) as f64 / ns as f64;
                assert!(error < 1.0 / SUB as f64, "{ns}: {error}");
            }
        }
    }

    #[test]
    fn merging_equals_counting_together() {
        let (mut a, mut b, mut both) = (Histogram::new(), Histogram::new(), Histogram::new());
        for ns in [5, 70, 900, 12_345] {
            a.record_ns(ns);
            both.record_ns(ns);
        }
        for ns in [1, 1_000_000, u64::MAX] {
            b.record_ns(ns);
            both.record_ns(ns);
        }
        a.merge(&b);
        assert_eq!((a.count(), a.sum_s()), (both.count(), both.sum_s()));
        assert_eq!(a.quantile_us(0.5), both.quantile_us(0.5));
    }

    #[test]
    fn an_empty_one_answers_zero() {
        assert_eq!(Histogram::new().quantile_us(0.99), 0.0);
    }
}
