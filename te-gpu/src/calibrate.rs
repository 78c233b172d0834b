//! Measures which path is the fastest, where a device has a choice. Sans-IO: what is measured, and how the
//! time is kept, comes from outside.

use std::time::Duration;

use te_core::device::HopDirection;

use crate::plan::{COUNTS, Path, PathTable, Plan, SIZES};

/// The time of one group of copies; `None`: it failed, or its time cannot be known.
pub(crate) type Measure<'a> = dyn FnMut((HopDirection, Path), (u32, u32)) -> Option<Duration> + 'a;

/// Cells in the order in which they matter: those where paths are known to differ most come first, because
/// the time is limited.
const ORDER: [(usize, usize); SIZES.len() * COUNTS.len()] =
    [(0, 1), (1, 1), (2, 1), (0, 2), (1, 2), (3, 1), (0, 0), (1, 0), (2, 0), (3, 0), (2, 2), (3, 2)];

/// Fills the table of `plan` as far as `left` allows, which returns whether there is time for more. A cell
/// that was not measured keeps its path.
pub(crate) fn calibrate(plan: &Plan, measure: &mut Measure<'_>, left: &mut dyn FnMut() -> bool) -> PathTable {
    let mut table = plan.table();
    let paths: Vec<Path> = Path::ALL.into_iter().filter(|path| plan.offer().has(*path)).collect();
    if paths.len() < 2 {
        return table;
    }
    for (size, count) in ORDER {
        for direction in [HopDirection::ToDevice, HopDirection::ToHost] {
            let mut best: Option<(Duration, Path)> = None;
            for path in &paths {
                if !left() {
                    return table;
                }
                // A loop over many copies takes long, and is not the fastest.
                if *path == Path::Loop && COUNTS[count] > 64 && SIZES[size] < 64 << 10 {
                    continue;
                }
                let time = measure((direction, *path), (SIZES[size], COUNTS[count]));
                best = match (time, best) {
                    (Some(time), Some(best)) if time < best.0 => Some((time, *path)),
                    (Some(time), None) => Some((time, *path)),
                    _ => best,
                };
            }
            if let Some((_, path)) = best {
                table.set(direction, size, count, path);
            }
        }
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::Offer;

    const ALL: Offer = Offer { batch: true, kernel: true };

    #[test]
    fn the_fastest_path_of_each_cell_is_in_the_table() {
        // Batches have a cliff below 32 KiB, and kernels are slow towards the host.
        let mut measure = |(direction, path), (bytes, count): (u32, u32)| {
            let per_copy = match (path, direction) {
                (Path::Loop, _) => 5_000,
                (Path::Batch, _) if bytes < 32 << 10 => 2_000,
                (Path::Batch, _) => u64::from(bytes) / 50,
                (Path::Kernel, HopDirection::ToDevice) => u64::from(bytes) / 30,
                (Path::Kernel, HopDirection::ToHost) => u64::from(bytes),
            };
            Some(Duration::from_nanos(per_copy * u64::from(count)))
        };
        let table = calibrate(&Plan::new(PathTable::default(), ALL), &mut measure, &mut || true);
        for count in 0..COUNTS.len() {
            let of = |direction| [0, 1, 2, 3].map(|size| table.cell(direction, size, count));
            assert_eq!(of(HopDirection::ToDevice)[..3], [Path::Kernel, Path::Kernel, Path::Batch]);
            assert_eq!(of(HopDirection::ToHost)[..3], [Path::Batch, Path::Batch, Path::Batch]);
        }
    }

    #[test]
    fn what_was_not_measured_stays() {
        let plan = Plan::new(PathTable::default(), ALL);
        let mut left = 3;
        let mut time = || {
            left -= 1;
            left > 0
        };
        let table = calibrate(&plan, &mut |_, _| Some(Duration::ZERO), &mut time);
        assert_eq!(table, plan.table());
        let table = calibrate(&plan, &mut |_, _| None, &mut || true);
        assert_eq!(table, plan.table(), "measurements that fail say nothing");
        let alone = Plan::new(PathTable::default(), Offer::default());
        let table = calibrate(&alone, &mut |_, _| panic!("there is nothing to choose"), &mut || true);
        assert_eq!(table, alone.table());
    }
}
