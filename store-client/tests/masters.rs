//! Several masters: clients and nodes find the one that leads, stay with it, and leave it when another one
//! leads.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener};
use std::thread;
use std::time::Duration;

use common::front::{Dies, Front, Mode};
use common::{MIB, eventually, master, master_with, pattern, with};
use store_client::{
    Client, ClientConfig, ErrorCode, Fabrics, Masters, Node, NodeConfig, PutOptions, PutRange, RpcConfig,
    RpcConnection, RpcError, Store as _,
};
use store_core::message::{Kind, Operation, ReadStats};
use store_core::{MasterConfig, Secret, TenantConfig};

const ONE: PutOptions = PutOptions::DEFAULT;

/// A call of this configuration that is not answered, or not repeated in time, fails long after the test.
fn patient() -> RpcConfig {
    with(RpcConfig::default(), |rpc| (rpc.call_ms_max, rpc.failover_ms_max) = (120_000, 120_000))
}

fn list(addrs: &[SocketAddr]) -> Masters {
    let texts: Vec<String> = addrs.iter().map(ToString::to_string).collect();
    texts.join(",").parse().unwrap()
}

/// An address at which nothing listens.
fn nowhere() -> SocketAddr {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap()
}

fn follows(leader: Option<String>) -> Mode {
    Mode::Follows { lineage: 1, term: 1, leader }
}

fn objects(rpc: &mut RpcConnection) -> Result<u64, RpcError> {
    rpc.call::<ReadStats>(&(), std::iter::empty()).map(|(stats, _)| stats.objects)
}

fn client_of(masters: Masters) -> Client {
    Client::connect(with(ClientConfig::new(masters), |config| config.rpc = patient())).unwrap()
}

fn node_of(name: &str, masters: Masters) -> Node {
    Node::start(with(NodeConfig::new(name, masters, 32 * MIB), |config| config.rpc = patient())).unwrap()
}

#[test]
fn the_one_that_leads_is_found_among_dead_hanging_and_following_ones() {
    let master = master();
    let (hangs, knows_none) = (Front::new(Mode::Silent), Front::new(follows(None)));
    let masters = list(&[nowhere(), hangs.addr, knows_none.addr, master.rpc_addr(), nowhere()]);
    let mut rpc = RpcConnection::connect(masters, patient()).unwrap();
    assert_eq!(rpc.address().to_string(), master.rpc_addr().to_string());
    assert_eq!(objects(&mut rpc).unwrap(), 0);
    rpc.disconnect();
    assert_eq!(objects(&mut rpc).unwrap(), 0);
}

#[test]
fn the_leader_that_a_master_names_is_followed_though_it_is_not_listed() {
    let master = master();
    let names_it = Front::new(follows(Some(master.rpc_addr().to_string())));
    for masters in [list(&[names_it.addr]), list(&[names_it.addr, nowhere()])] {
        let mut rpc = RpcConnection::connect(masters, patient()).unwrap();
        assert_eq!(rpc.address().to_string(), master.rpc_addr().to_string());
        assert_eq!(objects(&mut rpc).unwrap(), 0);
    }
    // One that leads at first, and then says on the same connection that another one does.
    let front = Front::leads(master.rpc_addr(), 1);
    let mut rpc = RpcConnection::connect(list(&[front.addr]), patient()).unwrap();
    front.set(follows(Some(master.rpc_addr().to_string())));
    assert_eq!(objects(&mut rpc).unwrap(), 0);
    assert_eq!((rpc.connects_total(), rpc.address().to_string()), (2, master.rpc_addr().to_string()));
}

#[test]
fn where_no_master_leads_the_error_says_so() {
    let (a, b) = (Front::new(follows(None)), Front::new(follows(None)));
    let quick = with(RpcConfig::default(), |rpc| rpc.connect_ms_max = 100);
    let error = RpcConnection::connect(list(&[a.addr, b.addr]), quick).unwrap_err();
    assert_eq!(error.code(), ErrorCode::NotLeader);
    assert!(error.is_transient() && error.to_string().contains(&b.addr.to_string()), "{error}");
    let error = RpcConnection::connect(list(&[a.addr]), quick).unwrap_err();
    assert!(matches!(error, RpcError::NotLeader { .. }), "{error:?}");
    let error = RpcConnection::connect(list(&[nowhere(), nowhere()]), quick).unwrap_err();
    assert_eq!(error.code(), ErrorCode::RpcFail);
}

#[test]
fn a_refusal_for_good_ends_the_search_when_every_master_has_refused() {
    let (one, two) = (master(), master());
    let mut identity = store_client::Identity::default();
    identity.tenant = "unknown".into();
    let masters = list(&[one.rpc_addr(), two.rpc_addr()]);
    let forever = with(patient(), |rpc| rpc.connect_ms_max = u32::MAX);
    let error = RpcConnection::connect_as(masters, forever, identity.clone()).unwrap_err();
    assert!(matches!(error, RpcError::Tenant { .. }), "{error:?}");
    // One that refuses does not hide one that does not.
    let tenant_default = Some(TenantConfig::default());
    let admin_secret = Secret::new(b"secret");
    let config =
        MasterConfig { multi_tenants: true, tenant_default, admin_secret, ..MasterConfig::default() };
    let open = master_with(config);
    let masters = list(&[one.rpc_addr(), open.rpc_addr()]);
    let rpc = RpcConnection::connect_as(masters, forever, identity);
    assert_eq!(rpc.unwrap().address().to_string(), open.rpc_addr().to_string());
}

#[test]
fn a_welcome_of_an_earlier_term_or_lineage_is_refused() {
    let master = master();
    let (a, b) = (Front::leads(master.rpc_addr(), 2), Front::new(Mode::Dead));
    let quick = with(patient(), |rpc| rpc.failover_ms_max = 200);
    let mut rpc = RpcConnection::connect(list(&[a.addr, b.addr]), quick).unwrap();
    a.set(Mode::Dead);
    b.set(Mode::Leads { master: master.rpc_addr(), term: 1 });
    let error = objects(&mut rpc).unwrap_err();
    assert_eq!(error.code(), ErrorCode::NotLeader);
    let RpcError::NoLeader { last, .. } = &error else { panic!("{error:?}") };
    assert!(matches!(**last, RpcError::Outdated { .. }) && error.to_string().contains("term 2"), "{error}");
    // A later one, and that one again.
    for term in [3, 3] {
        b.set(Mode::Leads { master: master.rpc_addr(), term });
        assert_eq!(objects(&mut rpc).unwrap(), 0);
        assert_eq!(rpc.welcome().term, term);
        rpc.disconnect();
    }
    // A master that is alone, too: its lineage is that of a store which was lost.
    let older = master_with(MasterConfig { epoch: 1, ..MasterConfig::default() });
    b.set(Mode::Leads { master: older.rpc_addr(), term: 9 });
    assert_eq!(objects(&mut rpc).unwrap_err().code(), ErrorCode::NotLeader);
}

#[test]
fn a_leader_that_stops_answering_is_left_for_the_one_that_leads_now() {
    let master = master();
    let (a, b) = (Front::leads(master.rpc_addr(), 1), Front::new(follows(None)));
    let _node = node_of("n", list(&[a.addr, b.addr]));
    let mut client = client_of(list(&[a.addr, b.addr]));
    assert!(client.put(b"k", b"value", &ONE).unwrap());
    // The connection stays, as that to a process that was stopped.
    a.set(Mode::Silent);
    b.set(Mode::Leads { master: master.rpc_addr(), term: 2 });
    assert_eq!(client.get(b"k").unwrap().as_deref(), Some(&b"value"[..]));
    assert!(client.put(b"k2", b"value", &ONE).unwrap());
    assert!(a.seen(Kind::Get) == 1 && b.seen(Kind::Get) == 1, "the same get, at both");
}

#[test]
fn one_that_is_slow_keeps_its_request_while_no_other_leads() {
    let master = master();
    let (a, b) = (Front::leads(master.rpc_addr(), 1), Front::new(follows(None)));
    let mut rpc = RpcConnection::connect(list(&[a.addr, b.addr]), patient()).unwrap();
    a.set(Mode::Silent);
    let asked = b.seen(Kind::Hello);
    let called = thread::spawn(move || objects(&mut rpc).map(|_| rpc.connects_total()));
    eventually("the other one is asked, more than once", || b.seen(Kind::Hello) >= asked + 3);
    assert!(!called.is_finished());
    // Its request was read while it did not answer: it is sent again when the connection breaks.
    a.set(Mode::Dead);
    b.set(Mode::Leads { master: master.rpc_addr(), term: 2 });
    assert_eq!(called.join().unwrap().unwrap(), 2);
}

/// Bytes that the engine of a client has moved.
fn moved(client: &Client) -> u64 {
    client.engine_stats().rails.iter().map(|rail| rail.bytes).sum()
}

#[test]
fn puts_under_way_when_the_leader_dies_end_well_and_no_byte_is_written_again() {
    const LEN: usize = 300_000;
    // What one put of this length moves, its checksums included.
    let undisturbed = {
        let master = master();
        let _node = node_of("n", list(&[master.rpc_addr()]));
        let mut client = client_of(list(&[master.rpc_addr()]));
        assert!(client.put(b"k", &pattern(1, LEN), &ONE).unwrap());
        moved(&client)
    };
    assert!(undisturbed >= LEN as u64);
    let starts = [Dies::Before(Kind::PutStart), Dies::After(Kind::PutStart)];
    let ends = [Dies::Before(Kind::PutEnd), Dies::After(Kind::PutEnd)];
    for dies in starts.into_iter().chain(ends) {
        let master = master();
        let (a, b) = (Front::leads(master.rpc_addr(), 1), Front::new(follows(None)));
        let masters = list(&[a.addr, b.addr]);
        let node = node_of("n", masters.clone());
        let mut client = client_of(masters);
        a.dies(dies);
        let takes_over = {
            let at = master.rpc_addr();
            thread::scope(|scope| {
                let watch = scope.spawn(|| {
                    eventually("the leader dies", || a.is_dead());
                    b.set(Mode::Leads { master: at, term: 2 });
                });
                let put = client.put(b"k", &pattern(1, LEN), &ONE);
                watch.join().unwrap();
                put
            })
        };
        assert!(takes_over.unwrap(), "{dies:?}");
        assert_eq!(moved(&client), undisturbed, "{dies:?}");
        assert_eq!(client.counters().written_bytes, LEN as u64);
        assert_eq!(client.get(b"k").unwrap(), Some(pattern(1, LEN)));
        eventually("the node has found the leader", || b.seen(Kind::Beat) > 0);
        let mounts = client.master().stats().unwrap().mounts_total;
        assert_eq!((node.status().mounts, mounts), (1, 1), "{dies:?}");
    }
}

#[test]
fn open_puts_continue_under_another_leader() {
    let master = master();
    let (a, b) = (Front::leads(master.rpc_addr(), 1), Front::new(follows(None)));
    let _node = node_of("n", list(&[a.addr, b.addr]));
    let mut client = client_of(list(&[a.addr, b.addr]));
    let value = pattern(3, 200_000);
    assert!(client.start_puts(&[(b"open", 200_000)], &ONE)[0].is_ok());
    assert!(client.write_puts(&[PutRange::new(b"open", 0, &value[..120_000])])[0].is_ok());
    let before = moved(&client);
    a.set(Mode::Dead);
    b.set(Mode::Leads { master: master.rpc_addr(), term: 2 });
    assert!(client.write_puts(&[PutRange::new(b"open", 120_000, &value[120_000..])])[0].is_ok());
    assert!(client.end_puts(&[b"open"])[0].is_ok());
    assert_eq!(client.get(b"open").unwrap(), Some(value));
    assert!(moved(&client) < before + 80_000 + 4_096 + 200_000 + 4_096, "the rest, and the read");
}

#[test]
fn a_node_hears_no_orders_of_a_leader_when_it_has_met_a_later_one() {
    let master = master_with(MasterConfig { node_ttl_ms: 600, ..MasterConfig::default() });
    let (a, b) = (Front::leads(master.rpc_addr(), 1), Front::new(Mode::Dead));
    let node = node_of("n", list(&[a.addr, b.addr]));
    eventually("its heartbeats arrive", || a.seen(Kind::Beat) > 1);
    // The former leader has not learned of the later one, and still answers on the connections that it has.
    a.refuse_new_connections();
    b.set(Mode::Leads { master: master.rpc_addr(), term: 2 });
    // A connection of its own, over which the node meets the later one.
    node.drain(Duration::ZERO).unwrap();
    eventually("its heartbeats go to the later one", || b.seen(Kind::Beat) > 0);
    let (heard_by_a, heard_by_b) = (a.seen(Kind::Beat), b.seen(Kind::Beat));
    eventually("and go on", || b.seen(Kind::Beat) >= heard_by_b + 3);
    assert_eq!((a.seen(Kind::Beat), node.status().mounts), (heard_by_a, 1));
}

#[test]
fn memory_is_mounted_anew_only_for_another_lineage() {
    let ttl = |epoch| MasterConfig { epoch, node_ttl_ms: 600, ..MasterConfig::default() };
    let (first, second) = (master_with(ttl(5)), master_with(ttl(6)));
    let (a, b) = (Front::leads(first.rpc_addr(), 7), Front::new(follows(None)));
    let node = node_of("n", list(&[a.addr, b.addr]));
    let mut client = client_of(list(&[a.addr, b.addr]));
    assert!(client.put(b"k", b"value", &ONE).unwrap());
    a.set(follows(Some(b.addr.to_string())));
    b.set(Mode::Leads { master: first.rpc_addr(), term: 8 });
    eventually("it is heard under the next term", || b.seen(Kind::Beat) > 2);
    assert_eq!(client.get(b"k").unwrap().as_deref(), Some(&b"value"[..]));
    assert_eq!(node.status().mounts, 1);
    b.set(follows(Some(a.addr.to_string())));
    a.set(Mode::Leads { master: second.rpc_addr(), term: 1 });
    eventually("it mounts for the next lineage", || node.status().mounts == 2);
    assert_eq!(client.get(b"k").unwrap(), None);
    assert!(client.put(b"k", b"other", &ONE).unwrap());
}

/// A server that answers `/v3/kv/range` as etcd does.
fn etcd(values: &'static [(&'static str, String)]) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let addr = listener.local_addr().unwrap();
    thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let (mut read, mut bytes) = (Vec::new(), [0; 4096]);
            let body = loop {
                let len = stream.read(&mut bytes).unwrap_or(0);
                read.extend_from_slice(&bytes[..len]);
                let text = String::from_utf8_lossy(&read).into_owned();
                match text.split_once("\r\n\r\n") {
                    Some((_, body)) if body.ends_with('}') => break body.to_owned(),
                    _ if len == 0 => break String::new(),
                    _ => {}
                }
            };
            let found = values.iter().find(|(key, _)| body.contains(&base64(key.as_bytes())));
            let answer = found.map_or("{\"header\":{}}".to_owned(), |(_, value)| {
                format!("{{\"kvs\":[{{\"value\":\"{}\",\"mod_revision\":\"3\"}}]}}", base64(value.as_bytes()))
            });
            let head = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nconnection: close\r\n";
            let _ = write!(stream, "{head}content-length: {}\r\n\r\n{answer}", answer.len());
        }
    });
    addr
}

fn base64(bytes: &[u8]) -> String {
    const LETTERS: &[u8] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::new();
    for three in bytes.chunks(3) {
        let number = (0..3).fold(0, |number, at| number << 8 | usize::from(*three.get(at).unwrap_or(&0)));
        for at in 0..4 {
            let letter = char::from(LETTERS[number >> (18 - 6 * at) & 63]);
            text.push(if at <= three.len() { letter } else { '=' });
        }
    }
    text
}

#[test]
fn masters_are_found_in_etcd_and_the_later_ones_as_well() {
    let master = master();
    let lineage = RpcConnection::connect(list(&[master.rpc_addr()]), patient()).unwrap().welcome().lineage;
    let (a, b) = (Front::new(Mode::Dead), Front::leads(master.rpc_addr(), 2));
    let record = format!(
        r#"{{"lineage":{lineage},"term":2,"leader":1,"leader_endpoint":"{}","members":[{{"id":1,"endpoint":"{}"}},
        {{"id":2,"endpoint":"{}"}}],"in_sync":[1,2]}}"#,
        a.addr, a.addr, b.addr
    );
    let values =
        [("snowskin/ours/masters", record), ("mooncake-store/theirs/master_view", b.addr.to_string())];
    let etcd = etcd(Box::leak(Box::new(values)));
    for cluster in ["ours", "theirs"] {
        let masters: Masters = format!("etcd://{},{etcd}/{cluster}", nowhere()).parse().unwrap();
        let mut rpc = RpcConnection::connect(masters, patient()).unwrap();
        assert_eq!((objects(&mut rpc).unwrap(), rpc.address().to_string()), (0, b.addr.to_string()));
    }
    let quick = with(RpcConfig::default(), |rpc| rpc.connect_ms_max = 500);
    let masters: Masters = format!("etcd://{etcd}/unknown").parse().unwrap();
    let error = RpcConnection::connect(masters, quick).unwrap_err();
    assert!(error.to_string().contains("snowskin/unknown/masters"), "{error}");
    assert!(error.is_transient());
}

#[test]
fn clients_and_nodes_take_lists_over_every_fabric() {
    let master = master();
    let masters = list(&[nowhere(), master.rpc_addr()]);
    let config = NodeConfig::new("n", masters.clone(), 32 * MIB).fabrics(Fabrics::TCP);
    let _node = Node::start(config).unwrap();
    let mut client = Client::connect(ClientConfig::new(masters).fabrics(Fabrics::TCP)).unwrap();
    assert!(client.put(b"k", b"value", &ONE).unwrap());
    assert_eq!(client.get(b"k").unwrap().as_deref(), Some(&b"value"[..]));
}

mod timing {
    //! Real time: how long a call looks for a leader.

    use std::time::Instant;

    use super::*;

    /// The call may take 300 ms, the search alone would take two minutes.
    #[test]
    fn a_request_that_is_sent_again_has_no_more_time_than_it_had() {
        let master = master();
        let (a, b) = (Front::leads(master.rpc_addr(), 1), Front::new(follows(None)));
        let limited = with(patient(), |rpc| rpc.call_ms_max = 300);
        let mut rpc = RpcConnection::connect(list(&[a.addr, b.addr]), limited).unwrap();
        a.set(follows(None));
        let begun = Instant::now();
        assert!(objects(&mut rpc).is_err());
        let (id, out) = rpc.queue_raw();
        ReadStats::encode_request(out, id, &(), std::iter::empty()).unwrap();
        assert!(rpc.exchange(id).is_err());
        assert!(begun.elapsed() < Duration::from_secs(30));
    }
}
