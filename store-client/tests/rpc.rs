//! The bare connection to the master, with valid and invalid masters.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::thread;

use common::{master, master_at, master_config, own_host, with};
use store_client::{Address, ErrorCode, RpcConfig, RpcConnection, RpcError};
use store_core::message::{Exists, Operation, ReadStats};
use store_core::wire::HEADER_BYTES;
use store_core::{Key, MasterConfig};
use store_master::{Config, MasterServer};

fn quick() -> RpcConfig {
    with(RpcConfig::default(), |config| {
        config.call_ms_max = 200;
        config.connect_ms_max = 500;
        config.reconnect_ms_max = 100;
        config.spin_us = 20;
    })
}

#[test]
fn answers_to_a_pipeline_carry_the_ids_of_their_requests() {
    let master = master();
    let mut rpc = RpcConnection::connect(master.rpc_addr().into(), RpcConfig::default()).unwrap();
    let mut sent = Vec::new();
    for i in 0..1000 {
        let key = format!("k{i}");
        sent.push(rpc.queue::<Exists>(&(), [Key(key.as_bytes())].into_iter()).unwrap());
    }
    let received: Vec<u64> = (0..1000)
        .map(|_| {
            let frame = rpc.recv().unwrap();
            let (_, found) = Exists::decode_response(&frame).unwrap();
            assert_eq!(found.collect::<Vec<_>>(), [false]);
            frame.header.request_id
        })
        .collect();
    assert_eq!(received, sent);
    assert!(rpc.try_recv().unwrap().is_none());
}

#[test]
fn a_pipeline_larger_than_every_buffer_does_not_deadlock() {
    let master = master();
    let mut rpc = RpcConnection::connect(master.rpc_addr().into(), RpcConfig::default()).unwrap();
    let keys = vec![Key(b"a key of some length that is usual"); 4096];
    // Tens of megabytes of requests before the first answer is read.
    for _ in 0..200 {
        rpc.queue::<Exists>(&(), keys.iter().copied()).unwrap();
    }
    for _ in 0..200 {
        let frame = rpc.recv().unwrap();
        assert_eq!(Exists::decode_response(&frame).unwrap().1.len(), 4096);
    }
}

#[test]
fn a_unix_socket_works_as_well() {
    let path = std::env::temp_dir().join(format!("snowskin-rpc-{}.sock", std::process::id()));
    let config = Config { rpc_unix: Some(path.clone()), ..master_config() };
    let _master = MasterServer::bind(config).unwrap().spawn().unwrap();
    let address: Address = format!("unix:{}", path.display()).parse().unwrap();
    let mut rpc = RpcConnection::connect(address.into(), RpcConfig::default()).unwrap();
    assert_eq!(rpc.call::<ReadStats>(&(), std::iter::empty()).unwrap().0.objects, 0);
}

#[test]
fn a_call_continues_with_a_restarted_master() {
    let first = master_at(own_host(13), MasterConfig::default());
    let addr = first.rpc_addr();
    let mut rpc = RpcConnection::connect(addr.into(), RpcConfig::default()).unwrap();
    let lineage = rpc.welcome().lineage;
    first.stop().unwrap();
    let _second = master_at(addr, MasterConfig::default());
    rpc.call::<ReadStats>(&(), std::iter::empty()).unwrap();
    assert_eq!(rpc.connects_total(), 2);
    assert!(rpc.welcome().lineage > lineage);
}

#[test]
fn an_address_without_a_listener_is_named_in_the_error() {
    let addr = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let error = RpcConnection::connect(addr.into(), quick()).unwrap_err();
    assert!(matches!(error, RpcError::Connect { .. }), "{error:?}");
    assert!(error.to_string().contains(&addr.to_string()));
    assert_eq!(error.code(), ErrorCode::RpcFail);
}

/// Listens, and calls `act` with each connection.
fn impostor(act: impl Fn(TcpStream) + Send + 'static) -> Address {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let addr = listener.local_addr().unwrap();
    thread::spawn(move || {
        for stream in listener.incoming() {
            act(stream.unwrap());
        }
    });
    addr.into()
}

#[test]
fn a_server_that_is_not_a_master_is_recognised() {
    let address = impostor(|mut stream| {
        let _ = stream.write_all(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n");
        let _ = stream.read(&mut [0; 4096]);
    });
    let error = RpcConnection::connect(address.into(), RpcConfig::default()).unwrap_err();
    assert!(error.to_string().contains("not a Snowskin store"), "{error}");
}

#[test]
fn a_master_of_another_version_is_recognised() {
    let address = impostor(|mut stream| {
        let mut hello = [0; HEADER_BYTES];
        let _ = stream.read_exact(&mut hello);
        hello[4] = 99;
        hello[7] = 1;
        hello[20..24].fill(0);
        let _ = stream.write_all(&hello);
        let _ = stream.read(&mut [0; 4096]);
    });
    let error = RpcConnection::connect(address.into(), RpcConfig::default()).unwrap_err();
    assert!(matches!(error, RpcError::Version { theirs: 99 }), "{error:?}");
    assert_eq!(error.code(), ErrorCode::InvalidVersion);
}

#[test]
fn a_master_that_closes_every_connection_is_an_error_not_a_loop() {
    let error = RpcConnection::connect(impostor(drop).into(), quick()).unwrap_err();
    assert!(matches!(error, RpcError::Lost { .. }), "{error:?}");
}

mod timing {
    //! Real time: how long a call waits for a master.

    use std::time::{Duration, Instant};

    use super::*;

    #[test]
    fn a_master_that_never_answers_is_given_up_in_time() {
        // It reads until the client gives up and closes the connection.
        let address = impostor(|mut stream| while stream.read(&mut [0; 4096]).is_ok_and(|len| len > 0) {});
        let begun = Instant::now();
        let error = RpcConnection::connect(address.into(), quick()).unwrap_err();
        assert!(matches!(error, RpcError::TimedOut { .. }), "{error:?}");
        // The limits sum up to less than a second; the rest is for a busy machine.
        assert!(begun.elapsed() < Duration::from_secs(4));
    }
}
