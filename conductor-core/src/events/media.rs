//! The names that engines and stores give to tiers.

use crate::Tier;

use super::Dialect;

/// The tier of a medium. `None` for a medium that is not known: such an event is not used.
///
/// vLLM: `GPU`, `CPU`; until 0.26 `FS` and `OBJ`, since 0.27 `STORAGE`. `SGLang`: `StorageMedium` of
/// `kv_events.py`, and the names of before. Mooncake and RFC 1527: lower case, `G1` to `G3`.
pub(super) fn tier(dialect: Dialect, medium: &[u8]) -> Option<Tier> {
    let mut upper = [0; 16];
    let name = upper.get_mut(..medium.len())?;
    name.copy_from_slice(medium);
    name.make_ascii_uppercase();
    Some(match (&*name, dialect) {
        // A pool of the store is shared, whatever it is made of; a worker's own tiers have the worker's
        // names.
        (b"CPU" | b"MEMORY" | b"DRAM" | b"DISK" | b"SSD" | b"NVME" | b"NOF", Dialect::Mooncake) => {
            Tier::Store
        }
        (b"GPU" | b"DEVICE" | b"HBM" | b"G1", _) => Tier::Gpu,
        (b"CPU" | b"CPU_PINNED" | b"CPU_TIER1" | b"HOST" | b"G2", _) => Tier::Cpu,
        (b"CPU_TIER2" | b"DISK" | b"NVME" | b"FS" | b"STORAGE" | b"G3", _) => Tier::Disk,
        (b"EXTERNAL" | b"OBJ" | b"NETWORK" | b"REMOTE" | b"SHARED", _) => Tier::Store,
        _ => return None,
    })
}
