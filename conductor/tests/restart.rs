//! What survives a restart of the Conductor, and two Conductors beside each other.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use common::{
    BLOCK_TOKENS, bytes, config, engine, eventually, get, hashes, matched, metric, post, publisher, removed,
    start, stored,
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
fn of_a_damaged_snapshot_nothing_is_used_and_the_streams_are_read_anew() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("index");
    let publisher = publisher();
    let with_engine = || conductor::Config {
        snapshot: Some(path.clone()),
        engines: vec![engine("a", &publisher)],
        ..config()
    };
    let first = start(with_engine());
    publisher.publish(&stored(1, 0, 5)).unwrap();
    publisher.publish(&stored(60, 0, 2)).unwrap();
    eventually("all blocks are found", || {
        matched(first.addr(), "a", 1, 9) == 5 * BLOCK && matched(first.addr(), "a", 60, 9) == 2 * BLOCK
    });
    first.stop();
    let whole = std::fs::read(&path).unwrap();
    let index = whole.windows(8).position(|bytes| bytes == b"snowknow").unwrap();
    let chains = whole.windows(8).position(|bytes| bytes == b"SNOWIDX\n").unwrap();
    let set = |at: usize, bytes: &[u8]| {
        let mut damaged = whole.clone();
        damaged[at..at + bytes.len()].copy_from_slice(bytes);
        damaged
    };
    let mut damaged: Vec<Vec<u8>> = vec![Vec::new(), b"SNOWCND1\0\0\0\0".to_vec()];
    // Cut within each part: head, names, checksum, index, the index of chains, learnt hashes, the last bytes.
    let middle = (index + chains) / 2;
    for end in
        [4, 10, 40, index - 4, index, index + 6, middle, chains + 20, whole.len() - 60, whole.len() - 1]
    {
        damaged.push(whole[..end].to_vec());
    }
    // Another bit in each part.
    for at in [9, 20, index - 3, index + 2, index + 9, middle, chains + 3, chains + 40, whole.len() - 3] {
        damaged.push(set(at, &[whole[at] ^ 4]));
    }
    // Other versions, and lengths of nothing and of everything: of the names, of instances, of the chains.
    damaged.push(set(7, b"3"));
    damaged.push(set(index + 8, &9u32.to_le_bytes()));
    for len in [0, u32::MAX] {
        damaged.extend([8, index + 20, chains - 8, chains + 12].map(|at| set(at, &len.to_le_bytes())));
    }
    damaged.push([&whole[..], b"more"].concat());
    for (at, bytes) in damaged.iter().enumerate() {
        std::fs::write(&path, bytes).unwrap();
        let conductor = start(with_engine());
        let addr = conductor.addr();
        eventually(&format!("case {at}: all blocks are found"), || {
            matched(addr, "a", 1, 9) == 5 * BLOCK && matched(addr, "a", 60, 9) == 2 * BLOCK
        });
        let applied = &get(addr, "/services").1["services"][0]["applied"];
        assert_eq!(*applied, 2, "case {at}: all came from the stream");
    }
    // The other way round: of a whole one, only what follows is read.
    std::fs::write(&path, &whole).unwrap();
    let conductor = start(with_engine());
    eventually("all blocks are found", || matched(conductor.addr(), "a", 1, 9) == 5 * BLOCK);
    assert_eq!(get(conductor.addr(), "/services").1["services"][0]["applied"], 0);
}

/// Without replays, and as only one is subscribed from the beginning, the second one cannot know it.
#[test]
fn what_only_the_other_conductor_has_heard_is_fetched_from_it() {
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
    eventually("the second has what came before", || matched(two.addr(), "a", 1, 9) == 3 * BLOCK);
    assert_eq!(metric(two.addr(), "snowskin_conductor_peer_adoptions_total"), 1.0);
    publisher.publish(&removed(1, 2, 3)).unwrap();
    publisher.publish(&stored(60, 2, 3)).unwrap();
    eventually("it goes on with what comes", || {
        matched(two.addr(), "a", 1, 9) == 2 * BLOCK && matched(two.addr(), "a", 60, 9) == 3 * BLOCK
    });
    let digests = |addr| get(addr, "/digest").1["digests"].clone();
    assert_eq!(digests(one.addr()), digests(two.addr()));
    assert_eq!(get(two.addr(), "/services").1["services"][0]["whole"], true);
}

#[test]
fn a_conductor_that_starts_late_fetches_what_engines_keep_no_more() {
    let publisher = conductor::Publisher::start("127.0.0.1:0".parse().unwrap(), 0, 2).unwrap();
    let one = start(conductor::Config { engines: vec![engine("a", &publisher)], ..config() });
    eventually("the first is subscribed", || get(one.addr(), "/services").1["services"][0]["served"] == true);
    for at in 0..8 {
        publisher.publish(&stored(1, at, at + 1)).unwrap();
    }
    eventually("the first has it", || matched(one.addr(), "a", 1, 9) == 8 * BLOCK);
    let late = |peer: std::net::SocketAddr| conductor::Config {
        engines: vec![engine("a", &publisher)],
        peer: peer.to_string(),
        peer_ms: 100,
        ..config()
    };
    let two = start(late(one.addr()));
    eventually("the second has everything", || matched(two.addr(), "a", 1, 9) == 8 * BLOCK);
    publisher.publish(&removed(1, 5, 8)).unwrap();
    eventually("and follows", || matched(two.addr(), "a", 1, 9) == 5 * BLOCK);
    // A peer that says something else than it promised: nothing of it is served.
    let digest = get(one.addr(), "/digest").1.to_string();
    let said = bytes(one.addr(), "/snapshot?publisher=0");
    publisher.publish(&removed(1, 4, 5)).unwrap();
    publisher.publish(&removed(1, 3, 4)).unwrap();
    publisher.publish(&removed(1, 2, 3)).unwrap();
    publisher.publish(&stored(60, 0, 1)).unwrap();
    eventually("the first goes on", || matched(one.addr(), "a", 1, 9) == 2 * BLOCK);
    let mut flipped = said.clone();
    let middle = flipped.len() / 2;
    flipped[middle] ^= 1;
    for lie in [said.clone(), flipped, said[..said.len() / 2].to_vec(), b"<html>".to_vec(), Vec::new()] {
        let peer = common::Liar::start(digest.clone(), lie);
        let three = start(late(peer.addr()));
        let addr = three.addr();
        eventually("it was asked", || peer.asked() >= 2);
        eventually("what it keeps is found", || matched(addr, "a", 60, 9) == BLOCK);
        assert_eq!(matched(addr, "a", 1, 9), 0, "what the peer said is served");
    }
}

#[test]
fn a_snapshot_over_http_is_the_file_and_a_dump_has_the_shape_of_dynamos() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("index");
    let publisher = publisher();
    let one = start(conductor::Config { engines: vec![engine("7", &publisher)], ..config() });
    publisher.publish(&stored(1, 0, 3)).unwrap();
    publisher.publish(&stored(60, 0, 1)).unwrap();
    eventually("it is found", || matched(one.addr(), "7", 60, 9) == BLOCK);
    let dump = get(one.addr(), "/dump").1;
    assert_eq!(dump["m:default"]["block_size"], BLOCK_TOKENS);
    let events = dump["m:default"]["events"].as_array().unwrap();
    let of = |hash: u64| {
        let first =
            |event: &&serde_json::Value| event["event"]["data"]["stored"]["blocks"][0]["block_hash"] == hash;
        events.iter().find(first).unwrap()
    };
    let (long, short) = (of(hashes(1, 1)[0].0), of(hashes(60, 1)[0].0));
    assert_eq!((events.len(), &long["worker_id"], &long["storage_tier"]), (2, &json!(7), &json!("device")));
    let stored = &long["event"]["data"]["stored"];
    assert_eq!(long["event"]["dp_rank"], 0);
    assert_eq!((&stored["parent_hash"], &stored["start_position"]), (&json!(null), &json!(null)));
    let found: Vec<u64> =
        stored["blocks"].as_array().unwrap().iter().map(|it| it["block_hash"].as_u64().unwrap()).collect();
    assert_eq!(found, hashes(1, 3).iter().map(|hash| hash.0).collect::<Vec<_>>());
    assert_eq!(stored["blocks"][0]["mm_extra_info"], json!(null));
    assert!(stored["blocks"][0]["tokens_hash"].is_u64());
    assert_eq!(short["event"]["data"]["stored"]["blocks"].as_array().unwrap().len(), 1);
    std::fs::write(&path, bytes(one.addr(), "/snapshot")).unwrap();
    assert_eq!(get(one.addr(), "/snapshot?publisher=9").0, 404);
    drop(one);
    let two = start(conductor::Config { snapshot: Some(path), ..config() });
    eventually("what it had is found", || matched(two.addr(), "7", 1, 9) == 3 * BLOCK);
    let secret = conductor::Config { admin_secret: "secret".into(), ..config() };
    let three = start(secret);
    assert_eq!([get(three.addr(), "/dump").0, get(three.addr(), "/snapshot").0], [401, 401]);
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
