//! L8: a transport touches memory of the kinds that it declares, in multiples of its granule.
#![allow(unsafe_code, reason = "registers memory that the transport must refuse")]

use alloc::format;

use super::super::Side;
use super::super::rig::{Rig, Skip, broken};
use crate::{Access, ErrorKind, GpuVendor, Location, MemSpan, RegionId, RemoteOffset, Slice};

const LOCATIONS: [Location; 5] = [
    Location::Host,
    Location::Device(GpuVendor::Nvidia, 0),
    Location::Device(GpuVendor::Amd, 1),
    Location::Device(GpuVendor::Intel, 0),
    Location::Pool,
];

/// The last 4 MiB of the address space, which no process has mapped: a load or a store there faults.
const TRAP: usize = usize::MAX << 22;
const TRAP_BYTES: usize = 1 << 20;

pub(super) fn memory_of_another_kind_is_refused_before_it_is_touched(rig: &mut Rig<'_>) -> Result<(), Skip> {
    let mut refused = 0;
    for side in [Side::Initiator, Side::Target] {
        // The two ends may have different devices.
        let declared = rig.end(side).capabilities().memory;
        if declared.is_empty() {
            broken!(rig.law, "the transport declares no kind of memory, and moves bytes");
        }
        for location in LOCATIONS.into_iter().filter(|location| !declared.contains(location.kind())) {
            let id = RegionId::new(rig.fresh_index(), 1);
            let span = MemSpan::new(core::ptr::without_provenance_mut(TRAP), TRAP_BYTES).at(location);
            for access in [Access::LOCAL, Access::all()] {
                let end = rig.end(side);
                // SAFETY: no transport may touch it: it must be refused because of its location.
                match unsafe { end.register(id, span, access) }.map_err(|error| error.kind) {
                    Err(ErrorKind::Unsupported) => {}
                    other => broken!(
                        rig.law,
                        "registering memory at {location}, which is not of the kinds {declared:?}, gave {other:?}, \
                         not Unsupported"
                    ),
                }
            }
            nothing_is_left(rig, side, id);
            refused += 1;
        }
    }
    rig.still_works();
    match refused {
        0 => Err(Skip(format!("the transport touches memory of every kind: {:?}", rig.caps.memory))),
        _ => Ok(()),
    }
}

/// Checks that the id is unknown, and free.
fn nothing_is_left(rig: &mut Rig<'_>, side: Side, id: RegionId) {
    let mut blob = [0; 1024];
    let exported = rig.end(side).export(id, &mut blob).map(drop);
    let deregistered = rig.end(side).deregister(id);
    for (what, result) in [("export", exported), ("deregister", deregistered)] {
        match result.map_err(|error| error.kind) {
            Err(ErrorKind::NotFound | ErrorKind::Stale) => {}
            other => broken!(rig.law, "{what} of a region that was refused gave {other:?}, not NotFound"),
        }
    }
    let buffer = rig.allocate(side, 4096);
    let buffers = core::mem::take(&mut rig.more);
    let registered = rig.register_at(side, id, &buffers[buffer], Access::LOCAL);
    rig.more = buffers;
    if let Err(error) = registered {
        broken!(rig.law, "the id of a region that was refused is not free: {error}");
    }
}

pub(super) fn a_slice_off_the_granule_is_refused_before_a_byte_moves(rig: &mut Rig<'_>) -> Result<(), Skip> {
    let granule = rig.caps.granule_bytes;
    if !granule.is_power_of_two() {
        broken!(rig.law, "granule_bytes is {granule}, not a power of two");
    }
    if granule == 1 {
        return Err(Skip::because("the transport takes slices at any offset and of any length"));
    }
    for op in rig.ops() {
        rig.scramble();
        let good = rig.slice(op, 0, 0, 2 * granule as usize);
        for off in [1, granule / 2, granule - 1] {
            let offset = Slice { remote: RemoteOffset::new(good.remote.region, u64::from(off)), ..good };
            rig.refused(offset, &[ErrorKind::InvalidArgument], "a slice at an offset off the granule");
            let length = Slice { len: good.len - off, ..good };
            rig.refused(length, &[ErrorKind::InvalidArgument], "a slice of a length off the granule");
        }
        rig.still_works();
    }
    Ok(())
}
