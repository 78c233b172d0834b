//! Whether memory and descriptors of processes grow.
//!
//! The second half of a soak is judged, when caches are full. A straight line (least squares) is fitted to
//! the samples of a slot; its rise over that half is the growth. Samples of a process that is younger than
//! ten seconds do not count, because it is still filling its buffers. Flat means: at most 4 MiB or a tenth of
//! the mean, whichever is more, and at most four descriptors. With fewer than ten samples there is no result,
//! and the table says so.

use super::process::Role;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs;
use std::time::Duration;

const YOUNG: Duration = Duration::from_secs(10);
const SAMPLES_MIN: usize = 10;
/// Time within which closed connections of attackers must be noticed.
const SETTLED: Duration = Duration::from_secs(12);
const MIB: f64 = 1_048_576.0;
const RSS_MIB_MAX: f64 = 4.0;
const RSS_SHARE_MAX: f64 = 0.1;
const DESCRIPTORS_MAX: f64 = 4.0;

pub(super) struct Flat {
    from: Duration,
    /// Beginning and end of the attack, if there is one.
    attack: Option<(Duration, Duration)>,
    slots: BTreeMap<Role, Samples>,
}

#[derive(Default)]
struct Samples {
    pids: Vec<u32>,
    /// Seconds, bytes, descriptors.
    points: Vec<(f64, f64, f64)>,
    /// Numbers of descriptors before an attack, and after it.
    before: Vec<f64>,
    after: Vec<f64>,
}

/// The result for one slot.
#[derive(Clone, Debug)]
pub(super) struct Growth {
    role: Role,
    lives: usize,
    samples: usize,
    rss_mib: f64,
    rss_mib_grew: f64,
    descriptors: f64,
    descriptors_grew: f64,
}

impl Flat {
    /// For a soak of this length, with an attack in the given interval, if any.
    pub(super) fn new(length: Duration, attack: Option<(Duration, Duration)>) -> Self {
        Self { from: length / 2, attack, slots: BTreeMap::new() }
    }

    pub(super) fn sample(&mut self, at: Duration, role: Role, pid: u32, age: Duration) {
        let slot = self.slots.entry(role).or_default();
        if slot.pids.last() != Some(&pid) {
            slot.pids.push(pid);
        }
        // A process that has just ended has nothing to read.
        let Some((rss, descriptors)) = look(pid).filter(|_| age >= YOUNG) else { return };
        let (begins, ends) = self.attack.unwrap_or((Duration::MAX, Duration::MAX));
        if at >= self.from && at < ends {
            slot.points.push((at.as_secs_f64(), rss, descriptors));
        }
        if at < begins {
            slot.before.push(descriptors);
        } else if ends.checked_add(SETTLED).is_some_and(|settled| at >= settled) {
            slot.after.push(descriptors);
        }
    }

    pub(super) fn growths(&self) -> Vec<Growth> {
        let attacked = self.attack.is_some();
        self.slots.iter().map(|(role, samples)| samples.growth(*role, attacked)).collect()
    }
}

impl Samples {
    fn growth(&self, role: Role, attacked: bool) -> Growth {
        let (rss, rss_grew) = line(self.points.iter().map(|(at, rss, _)| (*at, *rss)));
        let (mut descriptors, mut descriptors_grew) =
            line(self.points.iter().map(|(at, _, count)| (*at, *count)));
        let mut samples = self.points.len();
        if attacked {
            let mean = |counts: &[f64]| counts.iter().sum::<f64>() / counts.len().max(1) as f64;
            (descriptors, descriptors_grew) = (mean(&self.after), mean(&self.after) - mean(&self.before));
            samples = samples.min(self.before.len()).min(self.after.len());
        }
        Growth {
            role,
            lives: self.pids.len(),
            samples,
            rss_mib: rss / MIB,
            rss_mib_grew: rss_grew / MIB,
            descriptors,
            descriptors_grew,
        }
    }
}

impl Growth {
    pub(super) fn role(&self) -> String {
        self.role.to_string()
    }

    pub(super) fn is_flat(&self) -> bool {
        !self.says_something()
            || (self.rss_mib_grew <= self.rss_mib_max() && self.descriptors_grew <= DESCRIPTORS_MAX)
    }

    pub(super) fn row(&self) -> Vec<String> {
        let verdict = match (self.says_something(), self.is_flat()) {
            (false, _) => "too few samples",
            (_, true) => "flat",
            (_, false) => "GROWS",
        };
        vec![
            self.role(),
            format!("{:.1}", self.rss_mib),
            format!("{:+.2}", self.rss_mib_grew),
            format!("{:.1}", self.rss_mib_max()),
            format!("{:.1}", self.descriptors),
            format!("{:+.2}", self.descriptors_grew),
            self.lives.to_string(),
            verdict.to_owned(),
        ]
    }

    pub(super) fn json(&self) -> Value {
        json!({
            "process": self.role(),
            "lives": self.lives,
            "samples": self.samples,
            "rss_mib": self.rss_mib,
            "rss_mib_grew": self.rss_mib_grew,
            "rss_mib_grew_max": self.rss_mib_max(),
            "descriptors": self.descriptors,
            "descriptors_grew": self.descriptors_grew,
            "flat": self.is_flat(),
        })
    }

    fn says_something(&self) -> bool {
        self.samples >= SAMPLES_MIN
    }

    fn rss_mib_max(&self) -> f64 {
        RSS_MIB_MAX.max(self.rss_mib * RSS_SHARE_MAX)
    }
}

/// Resident memory, bytes, and number of open descriptors.
fn look(pid: u32) -> Option<(f64, f64)> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = status.lines().find(|line| line.starts_with("VmRSS:"))?;
    let kib: f64 = line.split_whitespace().nth(1)?.parse().ok()?;
    let descriptors = fs::read_dir(format!("/proc/{pid}/fd")).ok()?.count();
    Some((kib * 1024.0, descriptors as f64))
}

/// The mean, and the rise of the least-squares line from the first to the last point.
fn line(points: impl Iterator<Item = (f64, f64)> + Clone) -> (f64, f64) {
    let count = points.clone().count() as f64;
    if count == 0.0 {
        return (0.0, 0.0);
    }
    let mean_x = points.clone().map(|(x, _)| x).sum::<f64>() / count;
    let mean_y = points.clone().map(|(_, y)| y).sum::<f64>() / count;
    let spread: f64 = points.clone().map(|(x, _)| (x - mean_x).powi(2)).sum();
    let slope = if spread == 0.0 {
        0.0
    } else {
        points.clone().map(|(x, y)| (x - mean_x) * (y - mean_y)).sum::<f64>() / spread
    };
    let first = points.clone().map(|(x, _)| x).fold(f64::INFINITY, f64::min);
    let last = points.map(|(x, _)| x).fold(f64::NEG_INFINITY, f64::max);
    (mean_y, slope * (last - first))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn growth(rss: impl Fn(f64) -> f64, descriptors: impl Fn(f64) -> f64) -> Growth {
        let points = (0..60).map(f64::from).map(|at| (at, rss(at) * MIB, descriptors(at))).collect();
        Samples { pids: vec![1], points, ..Samples::default() }.growth(Role::Master, false)
    }

    #[test]
    fn descriptors_that_attackers_used_must_be_freed() {
        let attacked = |after: f64| {
            let points = (0..60).map(f64::from).map(|at| (at, MIB, at * 100.0)).collect();
            let samples = Samples { pids: vec![1], points, before: vec![20.0; 15], after: vec![after; 15] };
            samples.growth(Role::Master, true)
        };
        assert!(attacked(21.0).is_flat());
        assert!(!attacked(30.0).is_flat());
    }

    #[test]
    fn jitter_is_flat_and_a_rise_is_not() {
        let jitter = |at: f64| (at * 12.9898).sin() * 3.0;
        assert!(growth(|at| 50.0 + jitter(at), |at| 20.0 + jitter(at)).is_flat());
        assert!(!growth(|at| 50.0 + jitter(at) + at * 0.2, |_| 20.0).is_flat());
        assert!(!growth(|_| 50.0, |at| 20.0 + jitter(at) + at * 0.2).is_flat());
        // Shrinking is not growth.
        assert!(growth(|at| 50.0 - at * 0.5, |_| 20.0).is_flat());
    }

    #[test]
    fn a_line_is_found() {
        let (mean, rise) = line((0..11).map(|x| (f64::from(x), 3.0 + 2.0 * f64::from(x))));
        assert!((mean - 13.0).abs() < 1e-9 && (rise - 20.0).abs() < 1e-9, "{mean} {rise}");
        assert_eq!(line(std::iter::empty()), (0.0, 0.0));
        assert_eq!(line([(1.0, 7.0)].into_iter()), (7.0, 0.0));
    }

    #[test]
    fn this_process_can_be_measured() {
        let (rss, descriptors) = look(std::process::id()).expect("it lives");
        assert!(rss > MIB / 2.0 && descriptors >= 3.0, "{rss} {descriptors}");
        assert!(look(u32::MAX).is_none());
    }
}
