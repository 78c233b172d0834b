//! The checker of histories, against histories that are known to be valid or invalid; `tests/simulation`
//! records real ones.
#![allow(clippy::unwrap_used, reason = "tests")]
#![allow(dead_code, reason = "the simulation uses the rest")]

mod checker;

use checker::{CONFIGURATIONS_MAX, History, RUNNING_MAX, Reason, Request, Response};

const GET: Request = Request::Get;
const REMOVE: Request = Request::Remove { force: false };

/// One operation of a history about one key: begin, end, request and response.
type Line = (u64, u64, Request, Response);

/// Puts are started in the order of their numbers.
fn history(lines: &[Line], losses: &[u64]) -> History {
    let mut history = History::default();
    for (who, (called, answered, request, answer)) in lines.iter().enumerate() {
        let id = history.called(who, b"k", *request, *called);
        if let Request::Put(put) | Request::Upsert(put) = request {
            history.started(*put, *put);
        }
        if *answer != Response::NotKnown {
            history.answered(id, *answer, *answered);
        }
    }
    losses.iter().for_each(|at| history.lost(b"k", *at));
    history
}

fn put(from: u64, to: u64, put: u64) -> Line {
    (from, to, Request::Put(put), Response::Done)
}

fn upsert(from: u64, to: u64, put: u64) -> Line {
    (from, to, Request::Upsert(put), Response::Done)
}

fn hit(from: u64, to: u64, put: u64) -> Line {
    (from, to, GET, Response::Object(Some(put)))
}

fn miss(from: u64, to: u64) -> Line {
    (from, to, GET, Response::NotFound)
}

fn removed(from: u64, to: u64) -> Line {
    (from, to, REMOVE, Response::Done)
}

#[track_caller]
fn good(lines: &[Line], losses: &[u64]) {
    if let Err(refusal) = history(lines, losses).check() {
        panic!("{refusal}");
    }
}

#[track_caller]
fn bad(reason: Reason, lines: &[Line], losses: &[u64]) {
    assert_eq!(history(lines, losses).check().map_err(|refusal| refusal.reason), Err(reason));
}

#[test]
fn a_quiet_life_is_explained() {
    good(&[miss(0, 1), put(2, 3, 1), hit(4, 5, 1), hit(6, 7, 1), removed(8, 9), miss(10, 11)], &[]);
    good(
        &[put(0, 1, 1), (2, 3, Request::Exists, Response::Found), removed(4, 5), put(6, 7, 2), hit(8, 9, 2)],
        &[],
    );
}

#[test]
fn what_runs_at_once_may_be_in_any_order() {
    // The put takes effect between the two gets, or before both, or after.
    good(&[put(0, 10, 1), miss(1, 2), hit(3, 4, 1)], &[]);
    good(&[put(0, 10, 1), hit(1, 2, 1), hit(3, 4, 1)], &[]);
    good(&[put(0, 10, 1), removed(0, 10), miss(20, 21)], &[]);
    // Operations that meet at an instant are not ordered: one that ends at 3 and one that begins there run at
    // once.
    good(&[put(0, 3, 1), miss(3, 4), hit(4, 5, 1)], &[]);
}

#[test]
fn a_miss_after_a_put_is_explained_by_a_loss_only() {
    bad(Reason::NoOrder, &[put(0, 1, 1), miss(2, 3)], &[]);
    good(&[put(0, 1, 1), miss(4, 5)], &[3]);
    // Not by a loss that came before the put was present, or after the miss.
    bad(Reason::NoOrder, &[put(2, 3, 1), miss(4, 5)], &[1]);
    bad(Reason::NoOrder, &[put(2, 3, 1), miss(4, 5)], &[6]);
}

#[test]
fn an_object_after_its_loss_is_refused() {
    bad(Reason::NoOrder, &[put(0, 1, 1), hit(3, 4, 1)], &[2]);
    good(&[put(0, 1, 1), hit(1, 4, 1)], &[2]);
}

#[test]
fn a_stale_read_is_refused() {
    bad(Reason::NoOrder, &[put(0, 1, 1), removed(2, 3), put(4, 5, 2), hit(6, 7, 1)], &[]);
}

#[test]
fn an_object_that_comes_back_after_its_remove_is_refused() {
    bad(Reason::NoOrder, &[put(0, 1, 1), removed(2, 3), hit(4, 5, 1)], &[]);
    bad(Reason::NoOrder, &[put(0, 1, 1), removed(2, 3), miss(4, 5), hit(6, 7, 1)], &[]);
    // Nor after a response that there is no object.
    bad(Reason::NoOrder, &[put(0, 9, 1), hit(1, 2, 1), miss(3, 4), hit(5, 6, 1)], &[]);
}

#[test]
fn two_puts_that_both_won_are_refused() {
    bad(Reason::NoOrder, &[put(0, 5, 1), put(0, 5, 2)], &[]);
    good(&[put(0, 5, 1), put(0, 5, 2)], &[3]);
}

#[test]
fn a_read_of_what_is_not_finished_is_refused() {
    bad(Reason::NoOrder, &[put(5, 6, 1), hit(0, 1, 1)], &[]);
    let failed = (0, 1, Request::Put(1), Response::Failed);
    bad(Reason::Unfinished, &[failed, hit(2, 3, 1)], &[]);
}

#[test]
fn bytes_of_no_put_are_refused() {
    bad(Reason::ForeignBytes, &[put(0, 1, 1), (2, 3, GET, Response::Object(None))], &[]);
    // Bytes of a put of another key as well.
    bad(Reason::ForeignBytes, &[put(0, 1, 1), hit(2, 3, 2)], &[]);
}

#[test]
fn a_put_without_an_answer_may_be_there_or_not_but_comes_only_once() {
    let unknown = (0, 0, Request::Put(1), Response::NotKnown);
    good(&[unknown, miss(2, 3), hit(4, 5, 1)], &[]);
    good(&[unknown, miss(2, 3), miss(4, 5)], &[]);
    bad(Reason::NoOrder, &[unknown, hit(2, 3, 1), removed(4, 5), hit(6, 7, 1)], &[]);
    // A put that was never started cannot be committed.
    let mut nowhere = History::default();
    nowhere.called(0, b"k", Request::Put(1), 0);
    let get = nowhere.called(1, b"k", GET, 1);
    nowhere.answered(get, Response::Object(Some(1)), 2);
    assert_eq!(nowhere.check().map_err(|refusal| refusal.reason), Err(Reason::Unfinished));
}

#[test]
fn a_put_that_was_overtaken_never_comes_back() {
    // The first put was started before the second, which is committed and removed again.
    let unknown = (0, 0, Request::Put(1), Response::NotKnown);
    bad(Reason::NoOrder, &[unknown, put(2, 3, 2), removed(4, 5), hit(6, 7, 1)], &[]);
    good(&[put(0, 1, 1), removed(2, 3), put(4, 5, 2), hit(6, 7, 2)], &[]);
}

#[test]
fn an_upsert_replaces_whatever_is_there_and_only_from_its_effect_on() {
    good(&[upsert(0, 1, 1), hit(2, 3, 1), upsert(4, 5, 2), hit(6, 7, 2)], &[]);
    // The old object is served while the upsert runs, and the new one after it.
    good(&[put(0, 1, 1), upsert(2, 9, 2), hit(3, 4, 1), hit(5, 6, 2)], &[]);
    bad(Reason::NoOrder, &[put(0, 1, 1), upsert(2, 9, 2), hit(3, 4, 2), hit(5, 6, 1)], &[]);
    bad(Reason::NoOrder, &[put(0, 1, 1), upsert(2, 3, 2), hit(4, 5, 1)], &[]);
    // It is never absent in between.
    bad(Reason::NoOrder, &[put(0, 1, 1), upsert(2, 9, 2), miss(3, 4)], &[]);
    good(&[put(0, 1, 1), upsert(2, 9, 2), miss(3, 4), hit(5, 6, 2)], &[3]);
}

#[test]
fn upserts_that_run_at_once_take_effect_in_any_order_each_once() {
    good(&[upsert(0, 9, 1), upsert(0, 9, 2), hit(10, 11, 1)], &[]);
    good(&[upsert(0, 9, 1), upsert(0, 9, 2), hit(10, 11, 2)], &[]);
    let twice = [upsert(0, 9, 1), upsert(0, 9, 2), hit(1, 2, 1), hit(3, 4, 2), hit(5, 6, 1)];
    bad(Reason::NoOrder, &twice, &[]);
    // One that was started before another put may take effect after it.
    good(&[upsert(0, 9, 1), put(1, 2, 2), hit(3, 4, 2), hit(5, 6, 1)], &[]);
}

#[test]
fn an_upsert_that_failed_has_no_effect_and_one_without_an_answer_at_most_one() {
    let failed = (2, 3, Request::Upsert(2), Response::Failed);
    good(&[put(0, 1, 1), failed, hit(4, 5, 1)], &[]);
    bad(Reason::Unfinished, &[put(0, 1, 1), failed, hit(4, 5, 2)], &[]);
    let unknown = (2, 2, Request::Upsert(2), Response::NotKnown);
    good(&[put(0, 1, 1), unknown, hit(4, 5, 1), hit(6, 7, 2), hit(8, 9, 2)], &[]);
    bad(Reason::NoOrder, &[put(0, 1, 1), unknown, hit(4, 5, 2), hit(6, 7, 1)], &[]);
    bad(Reason::NoOrder, &[unknown, hit(3, 4, 2), removed(5, 6), hit(7, 8, 2)], &[]);
}

#[test]
fn a_put_that_an_upsert_has_overtaken_never_comes_back() {
    let unknown = (0, 0, Request::Put(1), Response::NotKnown);
    bad(Reason::NoOrder, &[unknown, upsert(2, 3, 2), removed(4, 5), hit(6, 7, 1)], &[]);
}

#[test]
fn a_remove_without_an_answer_may_strike_at_any_later_time_but_once() {
    let unknown = (0, 0, REMOVE, Response::NotKnown);
    good(&[unknown, put(1, 2, 1), hit(3, 4, 1), miss(5, 6)], &[]);
    bad(Reason::NoOrder, &[unknown, put(1, 2, 1), miss(3, 4), put(5, 6, 2), miss(7, 8)], &[]);
}

#[test]
fn a_remove_that_was_refused_says_what_it_saw() {
    let leased = |from, to| (from, to, REMOVE, Response::Found);
    good(&[put(0, 1, 1), leased(2, 3), hit(4, 5, 1)], &[]);
    bad(Reason::NoOrder, &[leased(0, 1), put(2, 3, 1)], &[]);
    bad(Reason::NoOrder, &[put(0, 1, 1), (2, 3, REMOVE, Response::NotReady)], &[]);
    bad(Reason::NoOrder, &[removed(0, 1)], &[]);
    let forced = (0, 1, Request::Remove { force: true }, Response::Done);
    good(&[forced, put(2, 3, 1)], &[]);
}

#[test]
fn exists_is_held_to_its_word() {
    bad(Reason::NoOrder, &[put(0, 1, 1), (2, 3, Request::Exists, Response::NotFound)], &[]);
    bad(Reason::NoOrder, &[(2, 3, Request::Exists, Response::Found)], &[]);
}

#[test]
fn keys_do_not_know_of_each_other() {
    let mut history = History::default();
    for (who, key) in [b"a", b"b"].iter().enumerate() {
        let id = history.called(who, *key, Request::Put(who as u64), 0);
        history.started(who as u64, 1);
        history.answered(id, Response::Done, 1);
    }
    let get = history.called(0, b"a", GET, 2);
    history.answered(get, Response::Object(Some(0)), 3);
    history.check().unwrap();
    // The bytes of one put are not those of the other.
    let get = history.called(0, b"a", GET, 4);
    history.answered(get, Response::Object(Some(1)), 5);
    let refusal = history.check().unwrap_err();
    assert_eq!((refusal.key.as_str(), refusal.reason), ("a", Reason::ForeignBytes));
    assert!(refusal.to_string().contains("→ 4–5"), "{refusal}");
}

#[test]
fn a_history_over_the_limits_is_refused_with_that_reason() {
    let crowd: Vec<Line> =
        (0..=RUNNING_MAX as u64).map(|n| (0, 0, Request::Put(n + 1), Response::NotKnown)).collect();
    bad(Reason::TooComplex, &crowd, &[]);
    let maze: Vec<Line> = (0..40).map(|_| (0, 0, REMOVE, Response::NotKnown)).chain([put(1, 2, 1)]).collect();
    assert!(1_u64 << 40 > CONFIGURATIONS_MAX as u64);
    bad(Reason::TooComplex, &maze, &[]);
}

/// Every history that a correct store could have produced is explained: one is generated with known instants
/// of effect, then only the requests and responses are kept.
#[test]
fn what_a_real_store_answers_is_always_explained() {
    let mut rng = te_core::testkit::Rng::new(1);
    for _ in 0..300 {
        let mut object = None;
        let mut puts = 0;
        let mut lines = Vec::new();
        let mut losses = Vec::new();
        for step in 0..60 {
            let at = step * 10 + 50;
            let (from, to) = (at - rng.below(40), at + rng.below(40));
            match rng.below(8) {
                0 => {
                    object = None;
                    losses.push(at);
                }
                1 | 2 if object.is_none() => {
                    puts += 1;
                    object = Some(puts);
                    let unknown = rng.below(4) == 0;
                    lines.push((
                        from,
                        to,
                        Request::Put(puts),
                        if unknown { Response::NotKnown } else { Response::Done },
                    ));
                }
                3 if rng.below(2) == 0 => {
                    puts += 1;
                    object = Some(puts);
                    lines.push((from, to, Request::Upsert(puts), Response::Done));
                }
                3 if object.is_some() => {
                    object = None;
                    lines.push((from, to, REMOVE, Response::Done));
                }
                _ => {
                    let answer = object.map_or(Response::NotFound, |put| Response::Object(Some(put)));
                    lines.push((from, to, GET, answer));
                }
            }
        }
        good(&lines, &losses);
    }
}
