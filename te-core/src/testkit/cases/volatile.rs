//! L7, as far as it can be observed from outside: registered memory is the memory and not a copy of it, and
//! both ends reach it through volatile spans while it is registered.

use alloc::vec;

use super::super::buffer::GUARD_BYTES;
use super::super::rig::{REGION_BYTES, Rig, Skip, broken};
use crate::{Features, Op};

pub(super) fn what_a_peer_writes_shows_through_a_volatile_span(rig: &mut Rig<'_>) -> Result<(), Skip> {
    rig.need(Features::WRITE)?;
    for round in 0..16 {
        rig.scramble();
        let slice = rig.slice(Op::Write, round * 100, round * 333, 1234);
        rig.transfer(&[slice]);
        let mut seen = vec![0; slice.len as usize];
        // The region is still registered: the peer could write again at this moment.
        let read = rig.remote.volatile()?.read(GUARD_BYTES as u64 + slice.remote.offset, &mut seen);
        if read.is_err() || seen != rig.local.read(slice.local.offset as usize, seen.len()) {
            broken!(rig.law, "an applied WRITE does not show in the target's registered memory");
        }
        rig.fence_for_sure();
    }
    Ok(())
}

pub(super) fn a_peer_reads_what_was_written_through_a_volatile_span(rig: &mut Rig<'_>) -> Result<(), Skip> {
    rig.need(Features::READ)?;
    for round in 0..16u8 {
        let slice = rig.slice(Op::Read, REGION_BYTES - 500, usize::from(round) * 777, 500);
        let bytes = vec![round ^ 0x55; slice.len as usize];
        let wrote = rig.remote.volatile()?.write(GUARD_BYTES as u64 + slice.remote.offset, &bytes);
        rig.transfer(&[slice]);
        if wrote.is_err() || rig.local.read(slice.local.offset as usize, bytes.len()) != bytes {
            broken!(rig.law, "a READ brought other bytes than the target's registered memory holds");
        }
    }
    Ok(())
}
