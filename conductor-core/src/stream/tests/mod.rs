//! The state machine, case by case. Random faults are in `tests/streams`.

mod adopt;
mod snapshots;

use alloc::vec;
use alloc::vec::Vec;
use core::time::Duration;

use te_core::Instant;

use super::*;

#[derive(Debug, PartialEq, Eq)]
enum Did {
    Apply(u64, u8),
    Fence(FenceReason),
    Serve(bool),
    Ask(u64),
}

use Did::{Apply, Ask, Fence, Serve};

#[derive(Default)]
struct Log(Vec<Did>);

impl Sink for Log {
    fn apply(&mut self, seq: u64, payload: &[u8]) -> bool {
        self.0.push(Apply(seq, payload[0]));
        payload[0] != 0xbd
    }

    fn fence(&mut self, reason: FenceReason) {
        self.0.push(Fence(reason));
    }

    fn serve(&mut self, served: bool) {
        self.0.push(Serve(served));
    }

    fn ask(&mut self, from: u64) {
        self.0.push(Ask(from));
    }
}

/// A stream under test; `run` is the byte of which every payload of a run of the publisher consists.
struct Case {
    stream: Stream,
    log: Log,
    now: Instant,
}

impl Case {
    fn new(replay: bool) -> Self {
        Self::resumed(replay, None)
    }

    fn resumed(replay: bool, position: Option<Position>) -> Self {
        let settings = Settings { replay, held_messages_max: 4, ..Settings::default() };
        Self { stream: Stream::new(settings, position), log: Log::default(), now: Instant::ZERO }
    }

    /// A stream that has applied the messages 0 to 2 of run 1 and is live.
    fn live(replay: bool) -> Self {
        let mut case = Self::new(replay);
        case.connect();
        if replay {
            (0..2).for_each(|seq| case.replay(seq, 1));
            case.end();
            // The first message shows that the connection and the replay are of one run.
            case.message(2, 1);
            (1..3).for_each(|seq| case.replay(seq, 1));
            case.end();
        } else {
            (0..3).for_each(|seq| case.message(seq, 1));
        }
        assert_eq!((case.stream.state(), case.stream.position().unwrap().next), (State::Live, 3));
        case.log.0.clear();
        case
    }

    fn connect(&mut self) {
        self.stream.connected(self.now, &mut self.log);
    }

    fn disconnect(&mut self) {
        self.stream.disconnected(self.now, &mut self.log);
    }

    fn message(&mut self, seq: u64, run: u8) {
        self.stream.live(self.now, seq, &[run, seq as u8], &mut self.log);
    }

    fn replay(&mut self, seq: u64, run: u8) {
        self.stream.replayed(self.now, seq, &[run, seq as u8], &mut self.log);
    }

    fn end(&mut self) {
        self.stream.replayed(self.now, REPLAY_END, &[], &mut self.log);
    }

    fn after(&mut self, time: Duration) {
        self.now = self.now + time;
        self.stream.tick(self.now, &mut self.log);
    }

    #[track_caller]
    fn did(&mut self, expected: &[Did]) {
        assert_eq!(self.log.0, expected, "{:?}", self.stream);
        self.log.0.clear();
    }
}

#[test]
fn a_new_stream_replays_everything_and_is_then_served() {
    let mut case = Case::new(true);
    case.connect();
    case.did(&[Ask(0)]);
    case.replay(0, 1);
    case.message(2, 1);
    case.replay(1, 1);
    case.replay(2, 1);
    case.did(&[Apply(0, 1), Apply(1, 1), Apply(2, 1)]);
    case.end();
    case.did(&[Serve(true)]);
    case.message(3, 1);
    case.did(&[Apply(3, 1)]);
    assert!(case.stream.is_whole());
}

#[test]
fn messages_of_a_connection_wait_until_a_replay_shows_their_run() {
    let mut case = Case::new(true);
    case.connect();
    (0..3).for_each(|seq| case.replay(seq, 1));
    case.end();
    case.message(3, 1);
    case.did(&[Ask(0), Apply(0, 1), Apply(1, 1), Apply(2, 1), Serve(true), Ask(2)]);
    case.replay(2, 1);
    case.replay(3, 1);
    case.end();
    case.message(4, 1);
    case.did(&[Apply(3, 1), Apply(4, 1)]);
    // The number fits, but the publisher was started anew in between.
    case.disconnect();
    case.connect();
    case.message(5, 2);
    case.did(&[Ask(4)]);
    case.replay(4, 2);
    case.did(&[Fence(FenceReason::Restarted), Serve(false), Ask(0)]);
    (0..6).for_each(|seq| case.replay(seq, 2));
    case.end();
    case.did(
        &[0, 1, 2, 3, 4, 5].map(|seq| Apply(seq, 2)).into_iter().chain([Serve(true)]).collect::<Vec<_>>(),
    );
}

#[test]
fn a_gap_is_filled_by_a_replay_and_nothing_is_applied_out_of_order() {
    let mut case = Case::live(true);
    case.message(5, 1);
    case.message(6, 1);
    assert_eq!(case.stream.state(), State::Gap);
    case.did(&[Ask(2)]);
    (2..6).for_each(|seq| case.replay(seq, 1));
    case.end();
    case.did(&[3, 4, 5, 6].map(|seq| Apply(seq, 1)));
    assert!(case.stream.is_whole() && case.stream.is_served());
}

#[test]
fn a_replay_with_holes_is_asked_for_again_and_then_fenced() {
    let mut case = Case::live(true);
    case.message(7, 1);
    case.replay(2, 1);
    case.replay(3, 1);
    case.replay(5, 1);
    case.did(&[Ask(2), Apply(3, 1), Ask(3)]);
    case.replay(3, 1);
    for _ in 0..2 {
        case.replay(6, 1);
        case.did(&[Ask(3)]);
    }
    case.replay(6, 1);
    case.did(&[Fence(FenceReason::Lost), Serve(false), Ask(0)]);
    // It does not keep its first messages any more: that is believed the second time.
    case.replay(6, 1);
    case.did(&[Ask(0)]);
    case.replay(6, 1);
    case.replay(7, 1);
    case.end();
    case.did(&[Apply(6, 1), Apply(7, 1), Serve(true)]);
    assert!(!case.stream.is_whole());
}

#[test]
fn a_late_message_closes_the_gap_itself() {
    let mut case = Case::live(true);
    case.message(4, 1);
    case.message(3, 1);
    case.did(&[Ask(2), Apply(3, 1), Apply(4, 1)]);
    assert_eq!(case.stream.state(), State::Live);
    case.message(4, 1);
    case.message(1, 1);
    assert_eq!(case.stream.counters().duplicates, 2);
    case.did(&[]);
}

#[test]
fn numbers_that_go_back_are_a_restart() {
    let mut case = Case::live(true);
    case.message(0, 2);
    case.did(&[Fence(FenceReason::Restarted), Serve(false), Ask(0)]);
    case.replay(0, 2);
    case.end();
    case.did(&[Apply(0, 2), Serve(true)]);
    let mut case = Case::live(false);
    case.message(0, 2);
    case.did(&[Fence(FenceReason::Restarted), Apply(0, 2)]);
}

#[test]
fn without_replays_a_gap_and_a_new_connection_fence_in_the_same_call() {
    let mut case = Case::live(false);
    case.message(4, 1);
    case.did(&[Fence(FenceReason::NoReplay), Apply(4, 1)]);
    assert!(!case.stream.is_whole());
    case.disconnect();
    case.connect();
    case.did(&[Fence(FenceReason::Unverifiable)]);
    case.message(5, 1);
    case.did(&[Apply(5, 1)]);
    // Late ones are not a restart, unless there is no end of them.
    case.message(9, 1);
    case.did(&[Fence(FenceReason::NoReplay), Apply(9, 1)]);
    case.message(8, 1);
    case.message(7, 1);
    case.did(&[]);
    case.message(9, 2);
    case.did(&[Fence(FenceReason::Restarted), Apply(9, 2)]);
    case.message(30, 2);
    case.did(&[Fence(FenceReason::NoReplay), Apply(30, 2)]);
    (1..17).for_each(|seq| case.message(seq, 3));
    case.did(&[Fence(FenceReason::Restarted), Apply(16, 3)]);
}

#[test]
fn a_replay_that_does_not_answer_is_given_up_with_what_it_would_have_shown() {
    let mut case = Case::live(true);
    case.message(4, 1);
    let timeout = case.stream.settings.replay_timeout;
    for _ in 0..3 {
        case.did(&[Ask(2)]);
        assert_eq!(case.stream.tick_at(), Some(case.now + timeout));
        case.after(timeout);
    }
    case.did(&[Ask(2)]);
    case.after(timeout);
    case.did(&[Fence(FenceReason::NoReplay), Serve(false), Ask(0)]);
    for _ in 0..3 {
        case.stream.replay_failed(case.now, &mut case.log);
    }
    case.did(&[Ask(0), Ask(0), Ask(0)]);
    case.stream.replay_failed(case.now, &mut case.log);
    case.did(&[Serve(true), Apply(4, 1)]);
    case.message(5, 1);
    case.did(&[Apply(5, 1)]);
    assert!(!case.stream.is_whole());
}

#[test]
fn what_is_held_has_a_limit_and_a_replay_brings_the_rest() {
    let mut case = Case::live(true);
    (4..20).for_each(|seq| case.message(seq, 1));
    assert_eq!(case.stream.counters().overflows, 12);
    (2..6).for_each(|seq| case.replay(seq, 1));
    case.end();
    case.did(&[Ask(2), Apply(3, 1), Apply(4, 1), Apply(5, 1), Apply(6, 1), Apply(7, 1), Ask(7)]);
    (7..20).for_each(|seq| case.replay(seq, 1));
    case.end();
    assert_eq!((case.stream.state(), case.stream.position().unwrap().next), (State::Live, 20));
}

#[test]
fn a_publisher_that_stays_away_is_not_served_and_comes_back_whole() {
    let mut case = Case::live(true);
    case.disconnect();
    let stale_after = case.stream.settings.stale_after;
    case.after(stale_after - Duration::from_millis(1));
    case.did(&[]);
    assert_eq!(case.stream.tick_at(), Some(case.now + Duration::from_millis(1)));
    case.after(Duration::from_millis(1));
    case.did(&[Serve(false)]);
    assert_eq!((case.stream.state(), case.stream.tick_at()), (State::Stale, None));
    case.connect();
    (2..5).for_each(|seq| case.replay(seq, 1));
    case.end();
    case.did(&[Ask(2), Apply(3, 1), Apply(4, 1), Serve(true)]);
}

#[test]
fn a_snapshot_goes_on_where_it_was_only_if_the_run_is_the_same() {
    let position = Case::live(true).stream.position();
    let mut case = Case::resumed(true, position);
    assert!(!case.stream.is_served() && case.stream.is_whole());
    case.connect();
    (2..4).for_each(|seq| case.replay(seq, 1));
    case.end();
    case.did(&[Ask(2), Apply(3, 1), Serve(true)]);
    // A run that is shorter than the position has an empty answer, twice.
    let mut case = Case::resumed(true, position);
    case.connect();
    case.end();
    case.end();
    case.did(&[Ask(2), Ask(2), Fence(FenceReason::Restarted), Ask(0)]);
    let mut case = Case::resumed(false, position);
    case.connect();
    case.did(&[Fence(FenceReason::Unverifiable), Serve(true)]);
}

/// A stream that follows a publisher with snapshots, whose snapshot has the messages 100 to 102.
fn snapshot() -> Case {
    let settings = Settings { snapshots: true, held_messages_max: 4, ..Settings::default() };
    let mut case = Case { stream: Stream::new(settings, None), log: Log::default(), now: Instant::ZERO };
    case.connect();
    (100..103).for_each(|seq| case.replay(seq, 9));
    case.did(&[Ask(0), Apply(100, 9), Apply(101, 9), Apply(102, 9)]);
    case
}

#[test]
fn a_snapshot_in_place_of_a_replay_is_whole_and_messages_that_it_includes_are_not_applied() {
    let mut case = snapshot();
    // These were sent before the snapshot was made, and arrive during and behind it.
    case.message(101, 1);
    case.message(103, 1);
    case.did(&[]);
    case.end();
    case.did(&[Apply(103, 1), Serve(true)]);
    case.message(102, 1);
    case.message(104, 1);
    case.did(&[Apply(104, 1)]);
    assert!(case.stream.is_whole());
    assert_eq!((case.stream.counters().snapshots, case.stream.state()), (1, State::Live));
}

#[test]
fn a_message_that_a_snapshot_includes_is_not_taken_for_its_next_one() {
    let settings = Settings { snapshots: true, ..Settings::default() };
    let mut case = Case { stream: Stream::new(settings, None), log: Log::default(), now: Instant::ZERO };
    case.connect();
    case.replay(100, 9);
    case.message(101, 1);
    (101..103).for_each(|seq| case.replay(seq, 9));
    case.end();
    case.did(&[Ask(0), Apply(100, 9), Apply(101, 9), Apply(102, 9), Serve(true)]);
}

#[test]
fn a_snapshot_voids_what_was_applied_wherever_its_numbers_begin() {
    // Behind what was asked for, and before it: then it has more messages than were missed.
    for first in [108, 90] {
        let mut case = snapshot();
        case.end();
        case.message(103, 1);
        case.message(109, 1);
        case.did(&[Serve(true), Apply(103, 1), Ask(103)]);
        (first..110).for_each(|seq| case.replay(seq, 8));
        case.end();
        let applied = (first..110).map(|seq| Apply(seq, 8));
        case.did(&[Fence(FenceReason::Lost)].into_iter().chain(applied).collect::<Vec<_>>());
        assert!(case.stream.is_whole() && case.stream.is_served());
    }
    // Exactly there: the message is another one, and everything is asked for.
    let mut case = snapshot();
    case.end();
    case.disconnect();
    case.connect();
    case.did(&[Serve(true), Ask(102)]);
    case.replay(102, 8);
    case.did(&[Fence(FenceReason::Restarted), Serve(false), Ask(0)]);
    (102..104).for_each(|seq| case.replay(seq, 8));
    case.end();
    case.did(&[Apply(102, 8), Apply(103, 8), Serve(true)]);
}

#[test]
fn a_snapshot_that_breaks_off_is_asked_for_again() {
    let mut case = snapshot();
    case.replay(105, 9);
    case.did(&[Ask(102)]);
    // What it applied last is not what the publisher keeps under that number.
    case.replay(102, 1);
    case.did(&[Fence(FenceReason::Restarted), Ask(0)]);
    case.replay(200, 9);
    case.end();
    case.did(&[Apply(200, 9), Serve(true)]);
    // Without snapshots, an answer that begins elsewhere is a hole, or repeats.
    let mut case = Case::live(true);
    case.message(5, 1);
    case.replay(1, 1);
    case.replay(4, 1);
    case.did(&[Ask(2), Ask(2)]);
}

#[test]
fn a_position_that_cannot_be_verified_is_void() {
    let position = Position { begin: 0, next: 0, digest: 7 };
    let mut case = Case::resumed(true, Some(position));
    case.connect();
    case.replay(0, 1);
    case.end();
    case.did(&[Fence(FenceReason::Unverifiable), Ask(0), Apply(0, 1), Serve(true)]);
}

#[test]
fn a_dead_publisher_is_fenced_at_once_and_an_unreadable_message_makes_the_rest_partial() {
    let mut case = Case::live(true);
    case.stream.died(case.now, &mut case.log);
    case.did(&[Fence(FenceReason::Dead), Serve(false), Ask(0)]);
    let mut case = Case::live(false);
    case.message(3, 0xbd);
    case.message(4, 1);
    case.did(&[Apply(3, 0xbd), Apply(4, 1)]);
    assert!(!case.stream.is_whole());
    assert_eq!(case.stream.counters().fences[FenceReason::Unreadable as usize], 1);
}

#[test]
fn hostile_numbers_and_answers_end() {
    let mut case = Case::new(true);
    case.message(1, 1);
    case.replay(1, 1);
    assert_eq!(case.stream.counters().unexpected, 2);
    case.connect();
    case.message(REPLAY_END, 1);
    case.message(REPLAY_END - 1, 1);
    // Two runs that both pretend to be the one: the connection wins in the end.
    for _ in 0..100 {
        case.replay(REPLAY_END - 1, 2);
    }
    case.message(0, 1);
    for _ in 0..100 {
        case.end();
    }
    assert_eq!(case.stream.state(), State::Live);
    assert!(case.stream.counters().replays < 30, "{:?}", case.stream.counters());
}

#[test]
fn a_history_keeps_the_last_messages() {
    let mut history = History::new(1, 3, 10);
    let seqs: Vec<u64> = (0..5).map(|i| history.push(&[i])).collect();
    assert_eq!(seqs, [1, 2, 3, 4, 5]);
    let since =
        |history: &History, from| history.since(from).map(|(seq, p)| (seq, p.to_vec())).collect::<Vec<_>>();
    assert_eq!(since(&history, 0), [(3, vec![2]), (4, vec![3]), (5, vec![4])]);
    assert_eq!(since(&history, 5), [(5, vec![4])]);
    assert_eq!(since(&history, 6), []);
    assert_eq!(since(&history, u64::MAX), []);
    history.push(&[0; 10]);
    assert_eq!(since(&history, 0).len(), 1);
    history.skip();
    assert_eq!((since(&history, 0).len(), history.next()), (0, 8));
}
