//! Results that Mooncake has published for its allocator and its allocation strategies.
//!
//! From its documentation, "Allocator Performance" (`OffsetAllocator`, after optimisation) and
//! "AllocationStrategy Performance". They give an orientation only: they come from another machine, and for
//! the strategies from another unit of work.

use serde::Serialize;
use store_core::AllocationStrategy;

/// One published result.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(super) struct Published {
    /// Bytes of live objects divided by bytes of the pool, average.
    pub(super) utilisation: f64,
    /// Average time of an allocation, nanoseconds.
    pub(super) ns: f64,
}

const fn result(utilisation: f64, ns: u32) -> Published {
    Published { utilisation, ns: ns as f64 }
}

/// Objects of one length, in bytes.
pub(super) const UNIFORM: &[(u64, Published)] = &[
    (32, result(1.0, 544)),
    (128, result(1.0, 417)),
    (512, result(1.0, 174)),
    (2_048, result(1.0, 406)),
    (8_192, result(1.0, 180)),
    (32_768, result(1.0, 133)),
    (131_072, result(1.0, 109)),
    (524_288, result(1.0, 100)),
    (2_097_152, result(1.0, 99)),
    (8_388_608, result(1.0, 99)),
    (33_554_432, result(1.0, 98)),
];

/// A power of two minus 17, and plus 17.
pub(super) const UNEVEN: &[(u64, Published)] = &[
    (15, result(1.0, 568)),
    (111, result(0.991_071, 441)),
    (495, result(0.966_797, 178)),
    (2_031, result(0.991_699, 418)),
    (8_175, result(0.997_925, 170)),
    (32_751, result(0.999_481, 133)),
    (131_055, result(0.999_87, 109)),
    (524_271, result(0.999_968, 100)),
    (2_097_135, result(0.999_992, 99)),
    (8_388_591, result(0.999_998, 98)),
    (33_554_415, result(0.999_999, 99)),
    (49, result(0.942_308, 508)),
    (145, result(0.906_249, 372)),
    (529, result(0.918_399, 172)),
    (2_065, result(0.896_267, 403)),
    (8_209, result(0.890_73, 174)),
    (32_785, result(0.889_347, 131)),
    (131_089, result(0.888_97, 105)),
    (524_305, result(0.888_701, 102)),
    (2_097_169, result(0.888_679, 100)),
    (8_388_625, result(0.886_721, 100)),
    (33_554_449, result(0.875, 100)),
];

/// A power of two × 0.9, and × 1.1.
pub(super) const SCALED: &[(u64, Published)] = &[
    (28, result(1.0, 543)),
    (115, result(0.958_333, 418)),
    (460, result(0.958_332, 189)),
    (1_843, result(0.959_896, 418)),
    (7_372, result(0.959_895, 197)),
    (29_491, result(0.959_993, 135)),
    (117_964, result(0.959_979, 111)),
    (471_859, result(0.959_985, 100)),
    (1_887_436, result(0.959_765, 99)),
    (7_549_747, result(0.959_766, 99)),
    (30_198_988, result(0.956_25, 99)),
    (35, result(0.972_222, 531)),
    (140, result(0.972_222, 397)),
    (563, result(0.977_427, 180)),
    (2_252, result(0.977_43, 389)),
    (9_011, result(0.977_752, 183)),
    (36_044, result(0.977_752, 133)),
    (144_179, result(0.977_739, 106)),
    (576_716, result(0.977_538, 103)),
    (2_306_867, result(0.977_539, 99)),
    (9_227_468, result(0.975_391, 99)),
    (36_909_875, result(0.962_5, 100)),
];

/// Random lengths from 1 KiB to 64 MiB.
pub(super) const RANDOM: Published = Published { utilisation: 0.841_576, ns: 145.6 };

/// Bytes of a KV-cache block, and of the index block that belongs to it.
pub(super) const KV_BYTES: u64 = 3_274_752;
pub(super) const INDEX_BYTES: u64 = 658_432;

/// The published result for a strategy; `None` if there is none for this number of segments and replicas.
pub(super) fn strategy(
    strategy: AllocationStrategy,
    paired: bool,
    skewed: bool,
    segments: usize,
    replicas: u8,
) -> Option<Published> {
    let random = strategy == AllocationStrategy::Random;
    Some(match (paired, skewed, random, segments, replicas) {
        (false, false, true, 1, 1) => result(0.960_935, 953),
        (false, false, true, 16, 1) => result(0.960_935, 1_409),
        (false, false, true, 16, 3) => result(0.960_935, 3_074),
        (false, false, false, 1, 1) => result(0.960_935, 1_096),
        (false, false, false, 16, 1) => result(0.960_935, 1_720),
        (false, false, false, 16, 3) => result(0.960_935, 3_941),
        (false, true, true, 16, 1) => result(0.960_936, 1_438),
        (false, true, true, 16, 3) => result(0.960_936, 3_133),
        (false, true, false, 16, 1) => result(0.960_936, 1_712),
        (false, true, false, 16, 3) => result(0.960_936, 3_924),
        (true, false, true, 1, 1) => result(0.952_437, 1_049),
        (true, false, true, 16, 1) => result(0.952_395, 1_517),
        (true, false, true, 16, 3) => result(0.952_423, 3_156),
        (true, false, false, 1, 1) => result(0.952_437, 1_183),
        (true, false, false, 16, 1) => result(0.952_436, 1_797),
        (true, false, false, 16, 3) => result(0.952_453, 4_088),
        (true, true, true, 16, 1) => result(0.952_375, 1_521),
        (true, true, true, 16, 3) => result(0.952_447, 3_261),
        (true, true, false, 16, 1) => result(0.952_796, 1_814),
        (true, true, false, 16, 3) => result(0.952_614, 4_134),
        _ => return None,
    })
}
