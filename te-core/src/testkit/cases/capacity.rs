//! L4: no allocation on the data path, and a full transport returns a short count.

use alloc::vec::Vec;

use super::super::counting::is_counting;
use super::super::rig::{REGION_BYTES, Rig, Skip, broken};
use crate::Slice;

/// Buffers may grow in the first batches of a transport, but not later.
const WARM_UP_ROUNDS: usize = 100;
const ROUNDS: usize = 300;

pub(super) fn submit_and_poll_do_not_allocate(rig: &mut Rig<'_>) -> Result<(), Skip> {
    if !is_counting() {
        return Err(Skip::because("the test's global allocator is not testkit::CountingAlloc"));
    }
    let mut cold = 0;
    for round in 0..WARM_UP_ROUNDS + ROUNDS {
        if round == WARM_UP_ROUNDS {
            (cold, rig.allocated) = (rig.allocated, 0);
        }
        let slices = rig.random_slices(64, None);
        rig.submit_all(&slices);
        rig.settle();
    }
    if rig.allocated > 0 {
        let warm = rig.allocated;
        broken!(
            rig.law,
            "submit and poll allocated {warm} times in {ROUNDS} batches (and {cold} times while warming up)"
        );
    }
    Ok(())
}

pub(super) fn a_full_transport_accepts_a_prefix_and_the_rest_later(rig: &mut Rig<'_>) -> Result<(), Skip> {
    rig.scramble();
    let count = (rig.caps.inflight_max as usize).saturating_mul(2).saturating_add(7).min(8192);
    let ops = rig.ops();
    let cell = rig.granule_down(REGION_BYTES / count);
    if cell == 0 {
        return Err(Skip(::alloc::format!(
            "{count} slices need more granules than {REGION_BYTES} bytes have"
        )));
    }
    let slices: Vec<Slice> =
        (0..count).map(|i| rig.slice(ops[i % ops.len()], i * cell, i * cell, 1 + i % cell)).collect();
    rig.transfer(&slices);
    slices.iter().for_each(|slice| rig.check_content(slice));
    Ok(())
}

pub(super) fn no_more_than_inflight_max_are_accepted(rig: &mut Rig<'_>) -> Result<(), Skip> {
    let most = rig.caps.inflight_max as usize;
    if most > 1 << 16 {
        return Err(Skip(::alloc::format!("inflight_max is {most}; the suite fills up to 65536")));
    }
    let ops = rig.ops();
    let slices: Vec<Slice> = (0..=most).map(|i| rig.slice(ops[i % ops.len()], i, i, 1)).collect();
    match rig.submit(&slices) {
        Ok(accepted) if accepted > most => {
            broken!(rig.law, "{accepted} slices were accepted, more than inflight_max = {most}")
        }
        Ok(_) => {}
        Err(error) => broken!(rig.law, "a batch longer than inflight_max was refused, not cut: {error}"),
    }
    // Still full, before any poll: not an error either.
    let more: Vec<Slice> = (0..4).map(|i| rig.slice(ops[0], i, i, 1)).collect();
    if let Err(error) = rig.submit(&more) {
        broken!(rig.law, "being full was reported as an error: {error}");
    }
    if rig.in_flight() > most {
        broken!(rig.law, "{} slices are in flight, more than inflight_max = {most}", rig.in_flight());
    }
    rig.settle();
    rig.still_works();
    Ok(())
}
