//! What another Conductor knows, case by case.

use super::*;

/// Where a Conductor is that has applied the messages before `next` of a run.
fn position(run: u8, next: u64) -> Position {
    let digest = xxh3_64(&[run, (next - 1) as u8]);
    Position { begin: 0, next, digest }
}

impl Case {
    /// Offers what another Conductor knows, which records itself as the application of its last message.
    fn offer(&mut self, position: Position, fits: bool) -> Adoption {
        self.stream.adopt(self.now, position, &mut self.log, |log| {
            log.0.push(Apply(position.next - 1, 0xad));
            fits
        })
    }
}

#[test]
fn it_is_not_served_before_a_replay_shows_that_it_is_of_this_run() {
    let mut case = Case::live(true);
    assert!(case.stream.prepare(case.now));
    assert_eq!(case.offer(position(1, 8), true), Adoption::Adopted);
    case.did(&[Fence(FenceReason::Replaced), Apply(7, 0xad), Serve(false), Ask(7)]);
    case.message(9, 1);
    (7..10).for_each(|seq| case.replay(seq, 1));
    case.did(&[Apply(8, 1), Apply(9, 1)]);
    case.end();
    case.did(&[Serve(true)]);
    case.message(10, 1);
    case.did(&[Apply(10, 1)]);
    assert!(case.stream.is_whole());
    // Of another run, or ahead of the publisher.
    for run in [2, 1] {
        let mut case = Case::live(true);
        case.offer(position(run, if run == 2 { 3 } else { 9 }), true);
        case.log.0.clear();
        if run == 2 {
            case.replay(2, 1);
        } else {
            case.end();
            case.did(&[Ask(8)]);
            case.end();
        }
        case.did(&[Fence(FenceReason::Restarted), Ask(0)]);
    }
    // The publisher does not keep its last message any more.
    let mut case = Case::live(true);
    case.offer(position(1, 3), true);
    case.log.0.clear();
    (0..4).for_each(|_| case.replay(5, 1));
    case.did(&[Ask(2), Ask(2), Ask(2), Fence(FenceReason::Lost), Ask(0)]);
}

#[test]
fn without_a_connection_it_waits_unserved_as_after_a_restart() {
    let mut case = Case::live(true);
    case.disconnect();
    assert_eq!(case.offer(position(1, 8), true), Adoption::Adopted);
    case.did(&[Fence(FenceReason::Replaced), Apply(7, 0xad), Serve(false)]);
    case.connect();
    case.did(&[Ask(7)]);
}

#[test]
fn without_replays_it_follows_a_message_that_arrived_here() {
    let mut case = Case::live(false);
    assert_eq!(case.offer(position(1, 3), true), Adoption::Refused, "it was not prepared");
    for next in [3, 4, 5, 6] {
        let mut case = Case::live(false);
        assert!(case.stream.prepare(case.now));
        (3..6).for_each(|seq| case.message(seq, 1));
        case.message(5, 1);
        case.did(&[]);
        assert_eq!(case.offer(position(1, next), true), Adoption::Adopted);
        let held = (next..6).map(|seq| Apply(seq, 1));
        let did = [Fence(FenceReason::Replaced), Apply(next - 1, 0xad)].into_iter().chain(held);
        case.did(&did.collect::<Vec<_>>());
        case.message(6, 1);
        case.did(&[Apply(6, 1)]);
        assert!(case.stream.is_served() && case.stream.is_whole());
    }
}

#[test]
fn without_replays_what_cannot_be_tied_to_this_run_changes_nothing() {
    let all = [3, 4].map(|seq| Apply(seq, 1));
    // Too old: what followed was applied and is not kept. Of another run. Nothing before its end.
    let nothing = Position { begin: 0, next: 0, digest: 0 };
    let late = Position { begin: 9, ..position(1, 4) };
    for (refused, resumes) in
        [(position(1, 2), true), (position(2, 4), true), (nothing, false), (late, false)]
    {
        let mut case = Case::live(false);
        case.stream.prepare(case.now);
        (3..5).for_each(|seq| case.message(seq, 1));
        assert_eq!(case.offer(refused, true), Adoption::Refused, "{refused:?}");
        case.did(if resumes { &all } else { &[] });
        case.after(case.stream.settings.replay_timeout);
        case.did(if resumes { &[] } else { &all });
    }
    // Its last message has not arrived: it is offered again.
    let mut case = Case::live(false);
    case.stream.prepare(case.now);
    assert_eq!(case.offer(position(1, 5), true), Adoption::Later);
    (3..6).for_each(|seq| case.message(seq, 1));
    case.did(&[]);
    assert_eq!(case.offer(position(1, 5), true), Adoption::Adopted);
    case.did(&[Fence(FenceReason::Replaced), Apply(4, 0xad), Apply(5, 1)]);
    // A message is lost meanwhile: a gap is a gap.
    let mut case = Case::live(false);
    case.stream.prepare(case.now);
    case.message(3, 1);
    case.message(5, 1);
    case.did(&[Apply(3, 1), Fence(FenceReason::NoReplay), Apply(5, 1)]);
    assert_eq!(case.offer(position(1, 6), true), Adoption::Refused);
    // The time to wait has passed, or the connection was lost.
    let mut case = Case::live(false);
    case.stream.prepare(case.now);
    assert_eq!(case.stream.tick_at(), Some(case.now + case.stream.settings.replay_timeout));
    case.message(3, 1);
    case.after(case.stream.settings.replay_timeout);
    case.did(&[Apply(3, 1)]);
    case.stream.prepare(case.now);
    case.disconnect();
    case.connect();
    case.log.0.clear();
    assert_eq!(case.offer(position(1, 4), true), Adoption::Refused);
    case.did(&[]);
}

#[test]
fn what_cannot_be_recorded_is_forgotten_again() {
    let mut case = Case::live(true);
    assert_eq!(case.offer(position(1, 3), false), Adoption::Refused);
    let twice = [Fence(FenceReason::Replaced), Apply(2, 0xad), Fence(FenceReason::Replaced)];
    case.did(&twice.into_iter().chain([Serve(false), Ask(0)]).collect::<Vec<_>>());
    let mut case = Case::live(false);
    case.stream.prepare(case.now);
    case.message(3, 1);
    assert_eq!(case.offer(position(1, 4), false), Adoption::Refused);
    let twice = [Fence(FenceReason::Replaced), Apply(3, 0xad), Fence(FenceReason::Replaced)];
    case.did(&twice.into_iter().chain([Apply(3, 1)]).collect::<Vec<_>>());
}
