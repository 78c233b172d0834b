//! L1: an accepted slice yields exactly one completion, a slice that was not accepted yields none.

use alloc::vec::Vec;
use core::time::Duration;

use super::super::rig::{Rig, Skip, broken};
use crate::{ErrorKind, RegionId, Slice};

pub(super) fn every_accepted_slice_completes_exactly_once(rig: &mut Rig<'_>) -> Result<(), Skip> {
    for round in 0..24 {
        let count = 1 + rig.rng.index(64);
        let slices = rig.random_slices(count, None);
        rig.submit_all(&slices);
        rig.some_steps(8);
        if round % 3 == 2 {
            for slice in &slices {
                if rig.rng.chance_ppm(200_000) {
                    let _done_or_not = rig.initiator().cancel(slice.token);
                }
            }
        }
        if round % 2 == 0 {
            rig.settle();
        }
    }
    rig.settle();
    rig.linger_for_late_writes();
    rig.check_guards("a random batch");
    Ok(())
}

pub(super) fn a_slice_that_was_not_accepted_never_completes(rig: &mut Rig<'_>) -> Result<(), Skip> {
    for bad in 1..4 {
        let mut slices = rig.random_slices(5, None);
        slices[bad].local.region = RegionId::new(77, 1);
        match rig.submit(&slices) {
            Ok(accepted) if accepted > bad => {
                broken!(rig.law, "a slice of a region that does not exist was accepted")
            }
            // The rig knows which slices were accepted; any other completion is a violation.
            Ok(_) => rig.settle(),
            Err(error) => {
                broken!(
                    rig.law,
                    "slice {bad} is not valid, and the call failed although the slices before it are: {error}"
                )
            }
        }
    }
    rig.linger(Duration::from_millis(50));
    Ok(())
}

pub(super) fn a_refused_batch_leaves_nothing_behind(rig: &mut Rig<'_>) -> Result<(), Skip> {
    let mut slices = rig.random_slices(4, None);
    slices[0].local.region = RegionId::new(77, 1);
    let give_up = rig.deadline();
    loop {
        match rig.submit(&slices) {
            Ok(0) => rig.step_before(
                give_up,
                rig.law,
                "a first slice that is not valid is neither refused nor accepted",
            ),
            Ok(_) => broken!(rig.law, "a slice of a region that does not exist was accepted"),
            Err(error) if matches!(error.kind, ErrorKind::NotFound | ErrorKind::Stale) => break,
            Err(error) => broken!(rig.law, "an unknown region was refused as {:?}", error.kind),
        }
    }
    rig.linger(Duration::from_millis(50));
    rig.still_works();
    Ok(())
}

pub(super) fn poll_with_no_room_loses_nothing(rig: &mut Rig<'_>) -> Result<(), Skip> {
    for _ in 0..4 {
        let slices = rig.random_slices(32, None);
        rig.submit_all(&slices);
        for _ in 0..100 {
            rig.step_with_room(0);
        }
        rig.settle();
    }
    Ok(())
}

pub(super) fn completions_come_one_at_a_time_if_asked(rig: &mut Rig<'_>) -> Result<(), Skip> {
    let slices: Vec<Slice> = rig.random_slices(48, None);
    rig.submit_all(&slices);
    let give_up = rig.deadline();
    while rig.in_flight() > 0 {
        if rig.step_with_room(1) == 0 && rig.now > give_up.0 {
            broken!(rig.law, "{} slices never completed", rig.in_flight());
        }
    }
    Ok(())
}

pub(super) fn an_idle_transport_completes_nothing(rig: &mut Rig<'_>) -> Result<(), Skip> {
    rig.linger(Duration::from_millis(50));
    rig.still_works();
    rig.linger(Duration::from_millis(50));
    Ok(())
}
