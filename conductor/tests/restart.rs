//! What survives a restart of the Conductor, and two Conductors beside each other.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use common::{
    BLOCK_TOKENS, config, engine, eventually, get, matched, metric, post, publisher, start, stored,
};
use serde_json::json;

const BLOCK: u64 = BLOCK_TOKENS as u64;

#[test]
fn a_restart_goes_on_with_the_snapshot_and_what_was_said_meanwhile() {
    let dir = tempfile::tempdir().unwrap();
    let with_snapshot = || conductor::Config { snapshot: Some(dir.path().join("index")), ..config() };
    // It keeps two messages: a Conductor without the snapshot could not know the first ones.
    let publisher = conductor::Publisher::start("127.0.0.1:0".parse().unwrap(), 0, 2).unwrap();
    let first = start(with_snapshot());
    let addr = first.addr();
    let register = json!({
        "endpoint": publisher.endpoint(), "replay_endpoint": publisher.replay_endpoint(), "type": "vllm",
        "modelname": "m", "instance_id": "a", "block_size": BLOCK_TOKENS,
    });
    assert_eq!(post(addr, "/register", &register).0, 200);
    // Before that it asks for the first messages, of which two would be kept.
    eventually("its stream is live", || get(addr, "/services").1["services"][0]["served"] == true);
    for at in 0..4 {
        publisher.publish(&stored(1, at, at + 1)).unwrap();
    }
    eventually("four blocks are found", || matched(addr, "a", 1, 9) == 4 * BLOCK);
    first.stop();
    publisher.publish(&stored(1, 4, 5)).unwrap();

    let second = start(with_snapshot());
    let addr = second.addr();
    eventually("five blocks are found", || matched(addr, "a", 1, 9) == 5 * BLOCK);
    assert_eq!(get(addr, "/services").1["services"][0]["instance_id"], "a", "who registered is known");
}

#[test]
fn a_snapshot_of_another_run_of_an_engine_is_not_served() {
    let dir = tempfile::tempdir().unwrap();
    let with_snapshot = || conductor::Config { snapshot: Some(dir.path().join("index")), ..config() };
    let before = publisher();
    let first = start(conductor::Config { engines: vec![engine("a", &before)], ..with_snapshot() });
    before.publish(&stored(1, 0, 3)).unwrap();
    eventually("it is found", || matched(first.addr(), "a", 1, 9) == 3 * BLOCK);
    first.stop();
    let (events, replays) = (before.endpoint(), before.replay_endpoint());
    drop(before);
    let at = |endpoint: &str| endpoint.trim_start_matches("tcp://").parse().unwrap();
    let after = conductor::Publisher::start_at(at(&events), at(&replays), 0, 100).unwrap();
    after.publish(&stored(60, 0, 2)).unwrap();
    let second = start(conductor::Config { engines: vec![engine("a", &after)], ..with_snapshot() });
    let addr = second.addr();
    eventually("what the new run has is found", || matched(addr, "a", 60, 9) == 2 * BLOCK);
    assert_eq!(matched(addr, "a", 1, 9), 0, "what the former run had is served");
}

#[test]
fn a_damaged_snapshot_is_left_and_the_conductor_begins_empty() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("index");
    for bytes in
        [&b""[..], b"SNOWCND1", b"SNOWCND1\x02\0\0\0{}", b"SNOWCND1\x0e\0\0\0{\"engines\":[]}garbage"]
    {
        std::fs::write(&path, bytes).unwrap();
        let conductor = start(conductor::Config { snapshot: Some(path.clone()), ..config() });
        assert_eq!(get(conductor.addr(), "/health").0, 200);
    }
}

#[test]
fn what_differs_from_the_other_conductor_is_read_anew_from_its_engine() {
    // Without replays, and as only one is subscribed from the beginning, the second one cannot know it.
    let publisher = publisher();
    let one = start(conductor::Config { engines: vec![engine("a", &publisher)], ..config() });
    eventually("the first is subscribed", || publisher.subscribers() == 1);
    publisher.publish(&stored(1, 0, 3)).unwrap();
    eventually("the first has it", || matched(one.addr(), "a", 1, 9) == 3 * BLOCK);
    let without_replay =
        conductor::EngineConfig { replay_endpoint: String::new(), ..engine("a", &publisher) };
    let two = start(conductor::Config {
        engines: vec![without_replay],
        peer: one.addr().to_string(),
        peer_ms: 100,
        ..config()
    });
    eventually("both are subscribed", || publisher.subscribers() == 2);
    publisher.publish(&stored(60, 0, 2)).unwrap();
    eventually("the second has what came later", || matched(two.addr(), "a", 60, 9) == 2 * BLOCK);
    let connections =
        "snowskin_conductor_stream_connections_total{tenant=\"default\",instance=\"a\",dp_rank=\"0\"}";
    eventually("they differ", || metric(two.addr(), "snowskin_conductor_peer_differences_total") >= 1.0);
    eventually("it is read anew", || metric(two.addr(), connections) >= 2.0);
    assert_eq!(metric(one.addr(), "snowskin_conductor_peer_differences_total"), 0.0);
    assert_eq!(matched(one.addr(), "a", 1, 9), 3 * BLOCK, "the first loses nothing");
}

#[test]
fn two_conductors_that_read_the_same_engine_agree_and_count_their_rounds() {
    let publisher = publisher();
    let one = start(conductor::Config { engines: vec![engine("a", &publisher)], ..config() });
    let two = start(conductor::Config {
        engines: vec![engine("a", &publisher)],
        peer: one.addr().to_string(),
        peer_ms: 100,
        ..config()
    });
    eventually("both are subscribed", || publisher.subscribers() == 2);
    publisher.publish(&stored(1, 0, 3)).unwrap();
    publisher.lose(&stored(1, 3, 5)).unwrap();
    publisher.publish(&stored(1, 5, 6)).unwrap();
    let digests = |addr| get(addr, "/digest").1["digests"].clone();
    eventually("both have everything", || {
        [&one, &two].into_iter().all(|it| matched(it.addr(), "a", 1, 9) == 6 * BLOCK)
    });
    assert_eq!(digests(one.addr()), digests(two.addr()));
    eventually("they were compared", || metric(two.addr(), "snowskin_conductor_peer_rounds_total") >= 4.0);
    assert_eq!(metric(two.addr(), "snowskin_conductor_peer_differences_total"), 0.0);
}
