//! L5 and L6: the target's confirmation that an initiator can do nothing any more, and that it is refused
//! from then on.

use super::super::rig::{REGION_BYTES, Rig, Skip, broken};
use crate::{ErrorKind, ExpelMode, Features, Op, RemoteOffset, RemoteRegionId, Slice};

const OLD: u8 = 0x5A;
const NEW: u8 = 0xA5;

pub(super) fn nothing_of_an_expelled_initiator_lands(rig: &mut Rig<'_>) -> Result<(), Skip> {
    nothing_lands(rig, true)
}

pub(super) fn nothing_lands_of_an_initiator_that_was_expelled_while_it_was_stopped(
    rig: &mut Rig<'_>,
) -> Result<(), Skip> {
    nothing_lands(rig, false)
}

pub(super) fn an_expelled_initiator_is_refused_with_the_reason(rig: &mut Rig<'_>) -> Result<(), Skip> {
    let peer = rig.identity()?;
    rig.still_works();
    rig.expel(peer, true);
    rig.local.fill(OLD);
    rig.remote.fill(NEW);
    let remote_region = rig.remote_region();
    is_refused(rig, remote_region);
    // A new attachment must not help. It may be refused itself.
    let export = rig.export(rig.region());
    let again = RemoteRegionId::new(rig.fresh_index(), 1);
    match rig.initiator().attach(again, &export) {
        Ok(()) => is_refused(rig, again),
        Err(error) if error.kind == ErrorKind::Expelled => {}
        Err(error) => broken!(rig.law, "an expelled initiator was refused an attachment as {:?}", error.kind),
    }
    // It is expelled, and stays so however often it is expelled again.
    for mode in [ExpelMode::SpareConnected, ExpelMode::Force] {
        match rig.target().expel(peer, mode) {
            Ok(true) => {}
            other => broken!(rig.law, "expelling an expelled initiator again gave {other:?}"),
        }
    }
    Ok(())
}

pub(super) fn a_connected_initiator_is_left_alone_without_force(rig: &mut Rig<'_>) -> Result<(), Skip> {
    let peer = rig.identity()?;
    rig.still_works();
    if !rig.target().is_connected(peer) {
        broken!(rig.law, "an initiator that has just been served does not count as connected");
    }
    match rig.target().expel(peer, ExpelMode::SpareConnected).map_err(|error| error.kind) {
        Err(ErrorKind::Busy) => {}
        other => broken!(rig.law, "expelling a connected initiator without force gave {other:?}, not Busy"),
    }
    rig.some_steps(32);
    rig.still_works();
    Ok(())
}

pub(super) fn expelling_one_initiator_does_not_disturb_another(rig: &mut Rig<'_>) -> Result<(), Skip> {
    let peer = rig.identity()?;
    rig.scramble();
    for round in 0..4 {
        let slices = rig.random_slices(32, None);
        rig.submit_all(&slices);
        rig.some_steps(round + 1);
        rig.expel(peer ^ (1 << (round * 7 + 1)), true);
        rig.settle();
        for slice in &slices {
            match rig.completion(slice.token).result {
                Ok(()) => rig.check_content(slice),
                Err(error) if error.kind.is_retryable_elsewhere() => {}
                Err(error) => broken!(rig.law, "expelling another ended a slice in flight: {error}"),
            }
        }
        rig.still_works();
    }
    Ok(())
}

pub(super) fn the_identity_0_is_refused(rig: &mut Rig<'_>) -> Result<(), Skip> {
    let _ = rig.identity()?;
    rig.still_works();
    match rig.target().expel(0, ExpelMode::Force).map_err(|error| error.kind) {
        Err(ErrorKind::InvalidArgument) => {}
        other => broken!(rig.law, "expelling the identity 0 gave {other:?}, not InvalidArgument"),
    }
    if rig.target().is_connected(0) {
        broken!(rig.law, "the identity 0 counts as connected");
    }
    rig.still_works();
    Ok(())
}

/// Expels the initiator in the middle of WRITEs; with `polled`, it runs meanwhile.
fn nothing_lands(rig: &mut Rig<'_>, polled: bool) -> Result<(), Skip> {
    rig.need(Features::WRITE)?;
    let peer = rig.identity()?;
    rig.still_works();
    rig.fill_remote(0);
    rig.local.fill(OLD);
    // In waves: whenever the expulsion comes, some WRITEs have landed, and some are on the wire and not yet
    // received.
    let slices = rig.random_slices(64, Some(Op::Write));
    for wave in slices.chunks(16) {
        rig.submit_all(wave);
        rig.step();
    }
    rig.expel(peer, polled);
    // From here on the range has another owner.
    rig.remote.fill(NEW);
    rig.settle();
    rig.linger_for_late_writes();
    check_new(rig);
    let remote_region = rig.remote_region();
    is_refused(rig, remote_region);
    rig.linger_for_late_writes();
    check_new(rig);
    Ok(())
}

/// Checks that every operation is refused, with `Expelled` once the initiator has received the reason.
fn is_refused(rig: &mut Rig<'_>, remote_region: RemoteRegionId) {
    for op in rig.ops() {
        let give_up = rig.deadline();
        loop {
            let slice = Slice { remote: RemoteOffset::new(remote_region, 0), ..rig.slice(op, 0, 0, 4096) };
            let kind = match rig.run_one(slice).map(|end| end.result) {
                Ok(Ok(())) => broken!(rig.law, "a {op:?} of an expelled initiator was carried out"),
                Ok(Err(error)) | Err(error) => error.kind,
            };
            if kind == ErrorKind::Expelled {
                break;
            }
            if !kind.is_retryable_elsewhere() {
                broken!(rig.law, "a {op:?} of an expelled initiator was refused as {kind:?}, not Expelled");
            }
            rig.step_before(give_up, rig.law, "an initiator never saw that it was expelled");
        }
    }
    if rig.local.read(0, REGION_BYTES).iter().any(|&byte| byte != OLD) {
        broken!(rig.law, "a READ of an expelled initiator brought bytes");
    }
}

fn check_new(rig: &Rig<'_>) {
    if rig.remote.read(0, REGION_BYTES).iter().any(|&byte| byte != NEW) {
        broken!(rig.law, "a WRITE of an initiator landed after it had been expelled");
    }
    rig.check_guards("an expelled initiator's WRITE");
}
