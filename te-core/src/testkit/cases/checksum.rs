//! L2: a checksum that a completion reports is right, or absent.

use super::super::rig::{REGION_BYTES, Rig, Skip, broken};
use crate::crc32c::crc32c_slowly;
use crate::{Completion, Op, Slice};

pub(super) fn a_reported_checksum_is_that_of_the_bytes_that_arrived(rig: &mut Rig<'_>) -> Result<(), Skip> {
    const LENGTHS: [usize; 9] = [1, 7, 63, 64, 4097, 12_345, 32_767, 32_768, 100_001];
    for op in rig.ops() {
        rig.initiator().set_checksums(true);
        rig.scramble();
        for len in LENGTHS {
            let (local, remote) = (rig.rng.index(REGION_BYTES - len), rig.rng.index(REGION_BYTES - len));
            let slice = rig.slice(op, local, remote, len);
            rig.transfer_and_tell(&[slice], check);
        }
        // Many slices at a time: each completion has the checksum of its own slice.
        let slices = rig.random_slices(32, Some(op));
        rig.transfer_and_tell(&slices, check);
        rig.initiator().set_checksums(false);
        let slices = rig.random_slices(8, Some(op));
        rig.transfer_and_tell(&slices, check);
    }
    Ok(())
}

/// Checks that the checksum of an applied slice is that of the bytes at its destination.
fn check(rig: &Rig<'_>, slice: &Slice, end: &Completion) {
    rig.check_content(slice);
    let Some(reported) = end.crc32c else { return };
    let len = slice.len as usize;
    let bytes = match slice.op {
        Op::Read => rig.local.read(slice.local.offset as usize, len),
        Op::Write => rig.remote.read(slice.remote.offset as usize, len),
    };
    let found = crc32c_slowly(&bytes);
    if reported.get() != found {
        broken!(
            rig.law,
            "a {:?} of {len} bytes reported the checksum {reported:?}; that of the bytes that arrived is {found:08x}",
            slice.op
        );
    }
}
