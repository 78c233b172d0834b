//! Engines come, publish, lose messages, restart and go; what queries say of them.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use common::{
    BLOCK_TOKENS, config, engine, eventually, get, hashes, matched, metric, post, publisher, removed, start,
    stored, tokens,
};
use conductor::Publisher;
use serde_json::json;

const BLOCK: u64 = BLOCK_TOKENS as u64;

#[test]
fn what_an_engine_publishes_is_found_in_all_three_shapes_and_by_hash() {
    let publisher = publisher();
    let conductor = start(config());
    let addr = conductor.addr();
    let register = json!({
        "endpoint": publisher.endpoint(), "replay_endpoint": publisher.replay_endpoint(), "type": "vLLM",
        "modelname": "m", "instance_id": "a", "block_size": BLOCK_TOKENS, "dp_rank": 0,
    });
    let (status, answer) = post(addr, "/register", &register);
    assert_eq!((status, &answer["status"]), (200, &json!("registered successfully")), "{answer}");
    publisher.publish(&stored(100, 0, 8)).unwrap();
    eventually("eight blocks are found", || matched(addr, "a", 100, 10) == 8 * BLOCK);

    let ask = json!({"model": "m", "block_size": BLOCK_TOKENS, "token_ids": tokens(100, 10)});
    let (_, tenants) = post(addr, "/query", &ask);
    let expected =
        json!({"default": {"a": {"longest_matched": 32, "GPU": 32, "DP": {"0": 32}, "CPU": 32, "DISK": 32}}});
    assert_eq!(tenants, expected);
    let (_, instances) = post(addr, "/query?shape=instances", &ask);
    assert_eq!(instances["instances"]["a"]["longest_matched"], 32);
    let dynamo = json!({"model_name": "m", "block_size": BLOCK_TOKENS, "token_ids": tokens(100, 10)});
    let (_, dynamo) = post(addr, "/query", &dynamo);
    assert_eq!((&dynamo["scores"]["a"]["0"], &dynamo["instances"]["a"]["gpu"]), (&json!(32), &json!(32)));

    let given: Vec<u64> = hashes(100, 6).iter().map(|hash| hash.0).collect();
    let ask = json!({"model": "m", "block_size": BLOCK_TOKENS, "seq_hashes": given});
    let (_, by_hash) = post(addr, "/query_by_hash", &ask);
    assert_eq!(by_hash["default"]["a"]["longest_matched"], 6 * BLOCK);

    publisher.publish(&removed(100, 5, 8)).unwrap();
    eventually("three blocks are gone", || matched(addr, "a", 100, 10) == 5 * BLOCK);
    let (_, services) = get(addr, "/services");
    assert_eq!(
        (&services["services"][0]["state"], &services["services"][0]["whole"]),
        (&json!("live"), &json!(true))
    );
}

#[test]
fn messages_that_the_network_loses_are_replayed() {
    let publisher = publisher();
    let conductor = start(conductor::Config { engines: vec![engine("a", &publisher)], ..config() });
    let addr = conductor.addr();
    publisher.publish(&stored(1, 0, 2)).unwrap();
    eventually("the first is found", || matched(addr, "a", 1, 9) == 2 * BLOCK);
    publisher.lose(&stored(1, 2, 4)).unwrap();
    publisher.publish(&stored(1, 4, 6)).unwrap();
    eventually("all are found", || matched(addr, "a", 1, 9) == 6 * BLOCK);
    let labels = "{tenant=\"default\",instance=\"a\",dp_rank=\"0\"}";
    assert_eq!(metric(addr, &format!("snowskin_conductor_stream_gaps_total{labels}")), 1.0);
    assert_eq!(metric(addr, &format!("snowskin_conductor_stream_fences_total{labels}")), 0.0);
}

#[test]
fn an_engine_whose_messages_are_lost_for_good_is_fenced() {
    let publisher = publisher();
    let conductor = start(conductor::Config { engines: vec![engine("a", &publisher)], ..config() });
    let addr = conductor.addr();
    publisher.publish(&stored(1, 0, 2)).unwrap();
    eventually("the first is found", || matched(addr, "a", 1, 9) == 2 * BLOCK);
    // What was removed in between is not known.
    publisher.skip().unwrap();
    publisher.publish(&stored(50, 0, 3)).unwrap();
    eventually("what came after is found", || matched(addr, "a", 50, 9) == 3 * BLOCK);
    assert_eq!(matched(addr, "a", 1, 9), 0, "what was said before the gap is served");
    assert!(metric(addr, "snowskin_conductor_fences_total{reason=\"lost\"}") >= 1.0);
}

#[test]
fn an_engine_that_restarts_has_an_empty_cache() {
    let first = publisher();
    let conductor = start(conductor::Config { engines: vec![engine("a", &first)], ..config() });
    let addr = conductor.addr();
    first.publish(&stored(1, 0, 2)).unwrap();
    eventually("the first is found", || matched(addr, "a", 1, 9) == 2 * BLOCK);
    let (events, replays) = (first.endpoint(), first.replay_endpoint());
    drop(first);
    let at = |endpoint: &str| endpoint.trim_start_matches("tcp://").parse().unwrap();
    let second = Publisher::start_at(at(&events), at(&replays), 0, 100).unwrap();
    second.publish(&stored(70, 0, 5)).unwrap();
    eventually("what the second one has is found", || matched(addr, "a", 70, 9) == 5 * BLOCK);
    assert_eq!(matched(addr, "a", 1, 9), 0, "what the first one had is served");
}

#[test]
fn an_engine_that_is_away_for_long_is_not_part_of_answers() {
    let publisher = publisher();
    let conductor = start(conductor::Config { engines: vec![engine("a", &publisher)], ..config() });
    let addr = conductor.addr();
    publisher.publish(&stored(1, 0, 2)).unwrap();
    eventually("the first is found", || matched(addr, "a", 1, 9) == 2 * BLOCK);
    assert_eq!(get(addr, "/ready").0, 200);
    drop(publisher);
    eventually("it is not served", || matched(addr, "a", 1, 9) == 0);
    assert_eq!(get(addr, "/ready").0, 503);
    let (status, answer) = post(addr, "/schedule", &json!({"model": "m", "token_ids": tokens(1, 3)}));
    assert_eq!(status, 503, "{answer}");
}

#[test]
fn an_engine_that_is_taken_out_is_forgotten_and_may_come_again() {
    let publisher = publisher();
    let conductor = start(conductor::Config { engines: vec![engine("a", &publisher)], ..config() });
    let addr = conductor.addr();
    publisher.publish(&stored(1, 0, 2)).unwrap();
    eventually("the first is found", || matched(addr, "a", 1, 9) == 2 * BLOCK);
    let (status, answer) = post(addr, "/unregister", &json!({"instance_id": "a", "dp_rank": 0}));
    assert_eq!((status, &answer["removed_instances"]), (200, &json!(["a|default|0"])), "{answer}");
    assert_eq!(matched(addr, "a", 1, 9), 0);
    assert_eq!(get(addr, "/services").1["services"], json!([]));
    assert_eq!(post(addr, "/unregister", &json!({"instance_id": "a"})).0, 404);
    let again = json!({
        "endpoint": publisher.endpoint(), "replay_endpoint": publisher.replay_endpoint(), "type": "vllm",
        "modelname": "m", "instance_id": "a", "block_size": BLOCK_TOKENS,
    });
    assert_eq!(post(addr, "/register", &again).0, 200);
    eventually("the replay brings it back", || matched(addr, "a", 1, 9) == 2 * BLOCK);
    // The same again changes nothing; another model under the same name is a mistake.
    assert_eq!(post(addr, "/register", &again).0, 200);
    let mut other = again;
    other["modelname"] = json!("other");
    assert_eq!(post(addr, "/register", &other).0, 409);
}

#[test]
fn an_engine_that_connects_by_itself_is_listened_for() {
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let mut entry = engine("a", &publisher());
    entry.endpoint = format!("tcp://{free}");
    entry.replay_endpoint = String::new();
    entry.bind = true;
    let conductor = start(conductor::Config { engines: vec![entry], ..config() });
    let addr = conductor.addr();
    let mut connected = None;
    eventually("the Conductor listens", || {
        connected = Publisher::connect(free, 0, 100).ok();
        connected.is_some()
    });
    let publisher = connected.unwrap();
    eventually("it is subscribed to", || publisher.subscribers() == 1);
    publisher.publish(&stored(1, 0, 2)).unwrap();
    eventually("its blocks are found", || matched(addr, "a", 1, 9) == 2 * BLOCK);
}
