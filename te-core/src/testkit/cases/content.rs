//! L1: all bytes of a slice arrive, in place, and no others change.

use alloc::vec;
use alloc::vec::Vec;

use super::super::Side;
use super::super::rig::{REGION_BYTES, Rig, Skip, broken};
use crate::{Access, ErrorKind, Features, Op, RegionId, RegionOffset, RemoteOffset, RemoteRegionId, Slice};

pub(super) fn a_write_puts_the_bytes_there_at_odd_offsets_and_lengths(rig: &mut Rig<'_>) -> Result<(), Skip> {
    rig.need(Features::WRITE)?;
    odd_offsets_and_lengths(rig, Op::Write);
    Ok(())
}

pub(super) fn a_read_brings_the_bytes_at_odd_offsets_and_lengths(rig: &mut Rig<'_>) -> Result<(), Skip> {
    rig.need(Features::READ)?;
    odd_offsets_and_lengths(rig, Op::Read);
    Ok(())
}

pub(super) fn overlapping_reads_agree(rig: &mut Rig<'_>) -> Result<(), Skip> {
    rig.need(Features::READ)?;
    rig.scramble();
    let slices: Vec<Slice> = (0..16).map(|i| rig.slice(Op::Read, i * 4096, 1000 + i * 13, 4000)).collect();
    rig.transfer(&slices);
    slices.iter().for_each(|slice| rig.check_content(slice));
    Ok(())
}

pub(super) fn a_slice_of_the_longest_length_arrives_whole(rig: &mut Rig<'_>) -> Result<(), Skip> {
    let longest = (rig.caps.slice_bytes_max as usize).min(4 << 20);
    let granule = rig.caps.granule_bytes;
    let (here, there) = (rig.allocate(Side::Initiator, longest + 1), rig.allocate(Side::Target, longest + 1));
    let id = RegionId::new(rig.fresh_index(), 1);
    let remote_region = RemoteRegionId::new(id.index, 1);
    let buffers = core::mem::take(&mut rig.more);
    let registered = rig.register_at(Side::Initiator, id, &buffers[here], Access::LOCAL).and_then(|()| {
        rig.register_at(Side::Target, id, &buffers[there], Access::REMOTE_READ | Access::REMOTE_WRITE)
    });
    rig.more = buffers;
    if let Err(error) = registered {
        broken!(rig.law, "registering {longest} bytes failed: {error}");
    }
    let blob = rig.export(id);
    if let Err(error) = rig.initiator().attach(remote_region, &blob) {
        broken!(rig.law, "attaching a region of {longest} bytes failed: {error}");
    }
    for op in rig.ops() {
        let mut bytes = vec![0; longest + 1];
        for buffer in [here, there] {
            rig.rng.fill(&mut bytes);
            rig.more[buffer].write(0, &bytes);
        }
        let token = rig.fresh_token();
        let slice = Slice {
            token,
            local: RegionOffset::new(id, 1),
            remote: RemoteOffset::new(remote_region, 0),
            len: longest as u32,
            op,
        };
        rig.transfer(&[slice]);
        if rig.more[here].read(1, longest) != rig.more[there].read(0, longest) {
            broken!(rig.law, "{op:?} of {longest} bytes was applied, but the two ends differ");
        }
        if longest as u64 == u64::from(rig.caps.slice_bytes_max) {
            let token = rig.fresh_token();
            let longer =
                Slice { token, local: RegionOffset::new(id, 0), len: longest as u32 + granule, ..slice };
            let kinds = [ErrorKind::InvalidArgument, ErrorKind::OutOfRange];
            rig.refused(longer, &kinds, "a slice longer than slice_bytes_max");
        }
    }
    for buffer in [here, there] {
        if !rig.more[buffer].guards_intact() {
            broken!(rig.law, "a long slice changed bytes beside its region");
        }
    }
    Ok(())
}

pub(super) fn what_was_written_is_read_back(rig: &mut Rig<'_>) -> Result<(), Skip> {
    rig.need(Features::READ.union(Features::WRITE))?;
    rig.scramble();
    let half = REGION_BYTES / 2;
    let first = rig.local.read(0, half);
    let cells: Vec<usize> = (0..8).map(|i| i * half / 8).collect();
    let writes: Vec<Slice> = cells.iter().map(|&at| rig.slice(Op::Write, at, at, half / 8)).collect();
    rig.transfer(&writes);
    let reads: Vec<Slice> = cells.iter().map(|&at| rig.slice(Op::Read, half + at, at, half / 8)).collect();
    rig.transfer(&reads);
    if rig.local.read(half, half) != first {
        broken!(rig.law, "a READ did not return the bytes of an earlier WRITE");
    }
    rig.check_guards("a write and a read");
    Ok(())
}

fn odd_offsets_and_lengths(rig: &mut Rig<'_>, op: Op) {
    const LENGTHS: [usize; 15] = [1, 2, 3, 7, 8, 9, 63, 64, 65, 511, 4095, 4096, 4097, 8191, 12_345];
    rig.scramble();
    for &len in &LENGTHS {
        let (local, remote) = (rig.rng.index(REGION_BYTES - len), rig.rng.index(REGION_BYTES - len));
        let slice = rig.slice(op, local, remote, len);
        let (local, remote, len) =
            (slice.local.offset as usize, slice.remote.offset as usize, slice.len as usize);
        let (before_here, before_there) = (rig.local.read(0, REGION_BYTES), rig.remote.read(0, REGION_BYTES));
        rig.transfer(&[slice]);
        rig.check_content(&slice);
        let (mut here, mut there) = (before_here.clone(), before_there.clone());
        match op {
            Op::Read => here[local..local + len].copy_from_slice(&before_there[remote..remote + len]),
            Op::Write => there[remote..remote + len].copy_from_slice(&before_here[local..local + len]),
        }
        if here != rig.local.read(0, REGION_BYTES) || there != rig.remote.read(0, REGION_BYTES) {
            broken!(
                rig.law,
                "{op:?} of {len} bytes from {local} to {remote} changed other bytes than its own"
            );
        }
    }
    for _ in 0..4 {
        let slices = rig.random_slices(32, Some(op));
        rig.transfer(&slices);
        slices.iter().for_each(|slice| rig.check_content(slice));
    }
    // The first and the last byte, and the whole region at both ends.
    let ends = [(0, 0, 1), (REGION_BYTES - 1, REGION_BYTES - 1, 1), (0, REGION_BYTES - 100, 100)];
    for (local, remote, len) in ends {
        let slice = rig.slice(op, local, remote, len);
        rig.transfer(&[slice]);
        rig.check_content(&slice);
    }
    rig.check_guards("a transfer at an odd place");
}
