//! Least squares with coefficients that are not negative, by trying every set of coefficients that are zero:
//! there are four at most, so sixteen small systems, and no iteration that could fail to converge.

use core::fmt;

use super::{DecodeCost, PrefillCost, PrefillWork};

/// Why coefficients could not be fitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FitError {
    /// There are fewer usable points than coefficients.
    TooFewPoints {
        /// Usable points: finite, with a positive time.
        usable: usize,
        /// Coefficients.
        wanted: usize,
    },
    /// No set of coefficients that are not negative, and not all zero, describes the points.
    NoSolution,
}

impl fmt::Display for FitError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TooFewPoints { usable, wanted } => write!(
                f,
                "{usable} usable points cannot determine {wanted} coefficients: measure at least {wanted} \
                 different lengths"
            ),
            Self::NoSolution => f.write_str(
                "no coefficients of at least zero describe the points: check their units and their times",
            ),
        }
    }
}

impl core::error::Error for FitError {}

/// The coefficients `c >= 0` with the least sum of `((x·c - y) / y)²` over the points `(x, y)`: relative
/// errors, so that short prompts count as much as long ones. Points that are not finite, or whose `y` is not
/// positive, are left out.
///
/// # Errors
///
/// [`FitError::TooFewPoints`], [`FitError::NoSolution`].
pub fn fit<const N: usize>(points: impl IntoIterator<Item = ([f64; N], f64)>) -> Result<[f64; N], FitError> {
    let mut normal = Normal::ZERO;
    let mut usable = 0;
    for (x, y) in points {
        if y.is_finite() && y > 0.0 && x.iter().all(|x| x.is_finite()) {
            normal.add(&x, y, 1.0 / (y * y));
            usable += 1;
        }
    }
    if usable < N {
        return Err(FitError::TooFewPoints { usable, wanted: N });
    }
    normal.solve().filter(|c| c.iter().any(|&c| c > 0.0)).ok_or(FitError::NoSolution)
}

/// The cost of prefills from points `(tokens, reused tokens, seconds)`, as a benchmark of an engine gives
/// them.
///
/// # Errors
///
/// As [`fit`]; at least four points.
pub fn fit_prefill(points: impl IntoIterator<Item = (u32, u32, f64)>) -> Result<PrefillCost, FitError> {
    let rows = points.into_iter().map(|(n, p, time)| (PrefillWork::of(n, p).features(), time));
    fit(rows).map(PrefillCost::from_coefficients)
}

/// The cost of decode steps from points `(sequences, tokens of context in all, seconds per step)`.
///
/// # Errors
///
/// As [`fit`]; at least three points.
pub fn fit_decode(points: impl IntoIterator<Item = (u32, u64, f64)>) -> Result<DecodeCost, FitError> {
    let rows = points.into_iter().map(|(b, context, time)| ([1.0, f64::from(b), context as f64], time));
    fit(rows).map(DecodeCost::from_coefficients)
}

/// Sums of weighted points: `a = Σ w x xᵀ`, `b = Σ w x y`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Normal<const N: usize> {
    pub(super) a: [[f64; N]; N],
    pub(super) b: [f64; N],
}

impl<const N: usize> Normal<N> {
    pub(super) const ZERO: Self = Self { a: [[0.0; N]; N], b: [0.0; N] };

    pub(super) fn add(&mut self, x: &[f64; N], y: f64, weight: f64) {
        for i in 0..N {
            for j in 0..N {
                self.a[i][j] += weight * x[i] * x[j];
            }
            self.b[i] += weight * x[i] * y;
        }
    }

    pub(super) fn scale(&mut self, factor: f64) {
        self.a.iter_mut().flatten().for_each(|a| *a *= factor);
        self.b.iter_mut().for_each(|b| *b *= factor);
    }

    /// The `c >= 0` with the least `cᵀ a c - 2 bᵀ c`; `None` when every system is singular.
    pub(super) fn solve(&self) -> Option<[f64; N]> {
        // Columns are scaled to a diagonal of ones: their units differ by many orders of magnitude. The scale
        // of a column is a power of two, which is exact.
        let mut scale = [0.0; N];
        for (scale, i) in scale.iter_mut().zip(0..N) {
            *scale = power_of_two_near_root(self.a[i][i]);
        }
        let mut best: Option<([f64; N], f64)> = None;
        for active in 1..(1_u32 << N) {
            let Some(c) = self.solve_active(active, &scale) else { continue };
            let value = self.value(&c);
            if best.as_ref().is_none_or(|&(_, least)| value < least) {
                best = Some((c, value));
            }
        }
        best.map(|(c, _)| c)
    }

    fn value(&self, c: &[f64; N]) -> f64 {
        let mut value = 0.0;
        for i in 0..N {
            value -= 2.0 * self.b[i] * c[i];
            for j in 0..N {
                value += c[i] * self.a[i][j] * c[j];
            }
        }
        value
    }

    /// The solution in which only the coefficients of the bits of `active` are not zero; `None` when one of
    /// them is negative or the system is singular.
    fn solve_active(&self, active: u32, scale: &[f64; N]) -> Option<[f64; N]> {
        let mut index = [0; N];
        let mut size = 0;
        for i in 0..N {
            if active >> i & 1 == 1 {
                index[size] = i;
                size += 1;
            }
        }
        let mut a = [[0.0; N]; N];
        let mut b = [0.0; N];
        for row in 0..size {
            let i = index[row];
            for column in 0..size {
                let j = index[column];
                a[row][column] = self.a[i][j] * scale[i] * scale[j];
            }
            b[row] = self.b[i] * scale[i];
        }
        let solution = eliminate(&mut a, &mut b, size)?;
        let mut c = [0.0; N];
        for row in 0..size {
            let value = solution[row] * scale[index[row]];
            if !value.is_finite() || value < 0.0 {
                return None;
            }
            c[index[row]] = value;
        }
        Some(c)
    }
}

/// A power of two near `1 / √x`; 1 when `x` is not positive.
fn power_of_two_near_root(x: f64) -> f64 {
    if !x.is_finite() || x <= f64::MIN_POSITIVE {
        return 1.0;
    }
    let exponent = (x.to_bits() >> 52 & 0x7ff) as i64 - 1023;
    f64::from_bits(((1023 - exponent.div_euclid(2)) as u64) << 52)
}

/// Gaussian elimination with pivots on the diagonal (the matrix is symmetric and not negative).
fn eliminate<const N: usize>(a: &mut [[f64; N]; N], b: &mut [f64; N], size: usize) -> Option<[f64; N]> {
    /// Below this part of its former value a pivot is the rounding error of a singular system.
    const PIVOT_MIN: f64 = 1e-11;
    let mut diagonal = [0.0; N];
    for i in 0..size {
        diagonal[i] = a[i][i];
    }
    for k in 0..size {
        if a[k][k] <= PIVOT_MIN * diagonal[k] || a[k][k] <= 0.0 {
            return None;
        }
        let (pivot, pivot_b) = (a[k], b[k]);
        for row in k + 1..size {
            let factor = a[row][k] / pivot[k];
            for column in k..size {
                a[row][column] -= factor * pivot[column];
            }
            b[row] -= factor * pivot_b;
        }
    }
    let mut x = [0.0; N];
    for row in (0..size).rev() {
        let mut sum = b[row];
        for column in row + 1..size {
            sum -= a[row][column] * x[column];
        }
        x[row] = sum / a[row][row];
    }
    Some(x)
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec::Vec;

    #[test]
    fn figure_14_gives_the_published_coefficients() {
        let lengths = [8_000, 16_000, 32_000, 64_000, 128_000];
        let cold = [1.002, 2.056, 4.479, 10.587, 27.512];
        let warm = [0.135, 0.226, 0.407, 0.881, 2.328];
        let points: Vec<_> = (0..5)
            .flat_map(|i| [(lengths[i], 0, cold[i]), (lengths[i], lengths[i] / 100 * 95, warm[i])])
            .collect();
        let cost = fit_prefill(points.iter().copied()).expect("ten points");
        for (n, p, paper) in points {
            let ours = cost.time(n, p).as_secs_f64();
            assert!((ours - paper).abs() <= 0.05 * paper, "{n}, {p}: {ours} against {paper} with {cost:?}");
        }
    }

    #[test]
    fn exact_points_give_back_their_coefficients() {
        let truth = PrefillCost { per_prompt: 0.05, per_token: 8e-5, per_square: 5e-10, per_reused: 1e-6 };
        let points =
            [(1_000, 0), (5_000, 1_000), (20_000, 0), (60_000, 50_000), (100_000, 3_000), (7_000, 6_500)]
                .map(|(n, p)| (n, p, truth.seconds(&PrefillWork::of(n, p))));
        let cost = fit_prefill(points).expect("six points");
        for (ours, truth) in cost.coefficients().into_iter().zip(truth.coefficients()) {
            assert!((ours - truth).abs() <= 1e-6 * truth, "{ours} against {truth}");
        }
    }

    #[test]
    fn coefficients_are_never_negative() {
        // A straight line that goes through zero at two sequences: its constant would be negative.
        let points = [(4, 2.0), (6, 4.0), (8, 6.0), (10, 8.0)].map(|(b, y)| (b, 1_000 * u64::from(b * b), y));
        let cost = fit_decode(points).expect("four points");
        assert!(cost.coefficients().iter().all(|&c| c >= 0.0), "{cost:?}");
    }

    #[test]
    fn too_few_points_and_hostile_ones_are_an_error() {
        assert_eq!(fit_prefill([(1, 0, 1.0)]), Err(FitError::TooFewPoints { usable: 1, wanted: 4 }));
        let bad = [(1, 0, f64::NAN), (2, 0, -1.0), (3, 0, 0.0), (4, 0, f64::INFINITY), (5, 0, 1.0)];
        assert_eq!(fit_prefill(bad), Err(FitError::TooFewPoints { usable: 1, wanted: 4 }));
        // One point again and again determines one coefficient, not four; it is still described exactly.
        let cost = fit_prefill([(1_000, 0, 2.0); 8]).expect("describes the point");
        assert!((cost.time(1_000, 0).as_secs_f64() - 2.0).abs() < 1e-6);
        assert_eq!(fit([([0.0; 2], 1.0); 4]), Err(FitError::NoSolution));
    }
}
