//! Tests of an asynchronous client whose thread is blocked, or dies, at a chosen moment.

use std::pin::Pin;
use std::sync::mpsc::channel;
use std::task::{Context, Poll, Waker};

use store_core::ErrorCode;
use store_master::{Config, MasterHandle, MasterServer};

use super::worker::Occupied;
use super::*;
use crate::{ClientConfig, Node, NodeConfig, Store as _, StoreError};

fn store() -> (MasterHandle, Node, AsyncClient) {
    let config =
        Config { rpc_listen: "127.0.0.1:0".parse().unwrap(), http_listen: None, ..Config::default() };
    let master = MasterServer::bind(config).unwrap().spawn().unwrap();
    let address = master.rpc_addr();
    let node = Node::start(NodeConfig::new("a", address.into(), 8 << 20)).unwrap();
    let client = Client::connect(ClientConfig::new(address.into())).unwrap();
    (master, node, AsyncClient::start(client).unwrap())
}

fn poll<T>(future: &mut Pending<T>) -> Poll<Result<T, StoreError>> {
    Pin::new(future).poll(&mut Context::from_waker(Waker::noop()))
}

/// Sends it; it must not be done yet.
fn begun<T>(mut future: Pending<T>) -> Pending<T> {
    assert!(poll(&mut future).is_pending());
    future
}

fn wait<T>(mut future: Pending<T>) -> Result<T, StoreError> {
    loop {
        match poll(&mut future) {
            Poll::Ready(result) => return result,
            Poll::Pending => thread::yield_now(),
        }
    }
}

impl AsyncClient {
    fn run(&self, run: impl FnOnce(&mut Client) + Send + 'static) -> Pending<()> {
        self.with(|client| {
            run(client);
            Ok(())
        })
    }

    /// Blocks the thread until the returned sender is dropped.
    fn busy(&self) -> (std::sync::mpsc::Sender<()>, Pending<()>) {
        let (release, released) = channel::<()>();
        let (entered, enters) = channel::<()>();
        let busy = begun(self.run(move |_| {
            drop(entered);
            let _ = released.recv();
        }));
        let _ = enters.recv();
        (release, busy)
    }
}

#[test]
fn when_the_thread_dies_all_waiting_tasks_get_an_error() {
    let (_master, _node, client) = store();
    let other = client.clone();
    let (release, busy) = client.busy();
    let waits = begun(client.get(b"k"));
    let panics = begun(client.run(|_| panic!("requested by the test")));
    let behind = begun(other.put(b"k", vec![1; 100], &PutOptions::default()));
    drop(release);
    wait(busy).unwrap();
    assert!(matches!(wait(panics), Err(StoreError::Stopped)));
    assert!(matches!(wait(waits), Err(StoreError::Stopped)));
    assert!(matches!(wait(behind), Err(StoreError::Stopped)));
    assert!(matches!(wait(other.get(b"k")), Err(StoreError::Stopped)));
    client.stop();
}

#[test]
fn a_future_that_is_dropped_before_its_operation_begins_undoes_it() {
    let (_master, _node, client) = store();
    let (release, busy) = client.busy();
    let options = PutOptions::default();
    drop(begun(client.put(b"dropped", vec![1; 100], &options)));
    let kept = begun(client.put(b"kept", vec![1; 100], &options));
    drop(release);
    wait(busy).unwrap();
    assert!(wait(kept).unwrap());
    assert!(wait(client.exists(b"kept")).unwrap());
    assert!(!wait(client.exists(b"dropped")).unwrap());
    client.stop();
}

#[test]
fn memory_of_a_dropped_allocation_is_given_back() {
    let (_master, _node, client) = store();
    let regions = || {
        let (sender, receiver) = channel();
        wait(client.run(move |client| sender.send(client.engine_stats().regions).unwrap())).unwrap();
        receiver.recv().unwrap()
    };
    let before = regions();
    let unclaimed = begun(client.alloc(4096));
    // Operations of this kind are carried out in their order.
    assert_eq!(regions(), before + 1);
    drop(unclaimed);
    assert_eq!(regions(), before);
    let claimed = wait(client.alloc(4096)).unwrap();
    assert_eq!(regions(), before + 1, "memory that was taken stays");
    wait(client.unregister(claimed)).unwrap();
    assert_eq!(regions(), before);
    client.stop();
}

#[test]
fn reads_into_the_same_memory_do_not_spoil_each_other() {
    let (_master, _node, client) = store();
    let options = PutOptions::default();
    let region = wait(client.alloc(300_000)).unwrap();
    for key in [1_u8, 2] {
        assert!(wait(client.put([key], vec![key; 300_000], &options)).unwrap());
    }
    let (release, busy) = client.busy();
    let reads: Vec<_> = (0..20)
        .map(|i| {
            let part = SharedPart::part(&region, i % 3 * 1000, 300_000 - i % 3 * 1000);
            let bad = i % 3 != 0;
            (bad, begun(client.get_into([1 + (i % 2) as u8], .., vec![part])))
        })
        .collect();
    drop(release);
    wait(busy).unwrap();
    for (bad, read) in reads {
        match wait(read) {
            Ok(found) => assert_eq!((found, bad), (Some(300_000), false)),
            Err(error) => assert_eq!((error.code(), bad), (ErrorCode::BufferOverflow, true)),
        }
    }
    let counters = wait(client.counters()).unwrap();
    assert_eq!((counters.misses, counters.checksum_mismatches), (0, 0));
    client.stop();
}

#[test]
fn operations_that_wait_when_the_client_is_stopped_are_carried_out_first() {
    let (_master, _node, client) = store();
    let (release, busy) = client.busy();
    let put = begun(client.put(b"k", vec![1; 100], &PutOptions::default()));
    let other = client.clone();
    let stopping = thread::spawn(move || client.stop());
    drop(release);
    stopping.join().unwrap();
    wait(busy).unwrap();
    assert!(wait(put).unwrap());
    assert!(matches!(wait(other.exists(b"k")), Err(StoreError::Stopped)));
}

#[test]
fn code_runs_with_the_client_unless_its_future_was_dropped_before() {
    let (_master, _node, client) = store();
    let options = PutOptions::default();
    let stats = wait(client.with(move |client| {
        client.put(b"k", b"value".as_slice(), &options)?;
        client.master().stats()
    }));
    assert_eq!(stats.unwrap().objects, 1);
    let refused = client.with(|client| client.master().task(store_core::TaskId::new(1)).map(drop));
    assert_eq!(wait(refused).map_err(|error| error.code()), Err(ErrorCode::TaskNotFound));
    let (release, busy) = client.busy();
    let dropped = begun(client.with(|client| client.remove(b"k", RemoveMode::Force)));
    drop(dropped);
    let wanted = begun(client.with(|client| client.exists(b"k")));
    drop(release);
    wait(busy).unwrap();
    assert!(wait(wanted).unwrap(), "nothing was removed");
    let mut blocking = client.blocking();
    assert!(blocking.with(|client| client.exists(b"k")).unwrap());
    assert_eq!(blocking.get(b"k").unwrap().as_deref(), Some(b"value".as_slice()));
    client.stop();
    let stopped = blocking.with(|client| client.exists(b"k"));
    assert!(matches!(stopped, Err(StoreError::Stopped)));
}

#[test]
fn memory_of_another_client_is_refused() {
    let (master, _node, client) = store();
    let mut other = Client::connect(ClientConfig::new(master.rpc_addr().into())).unwrap();
    let (own, foreign) = (wait(client.alloc(4096)).unwrap(), other.alloc(4096).unwrap());
    assert!(wait(client.put(b"k", vec![SharedPart::all(&own)], &PutOptions::default())).unwrap());
    let code = |error: StoreError| error.code();
    let put = wait(client.put(b"l", vec![SharedPart::all(&foreign)], &PutOptions::default()));
    assert_eq!(put.map_err(code), Err(ErrorCode::InvalidParams));
    let get = wait(client.get_into(b"k", .., vec![SharedPart::all(&foreign)]));
    assert_eq!(get.map_err(code), Err(ErrorCode::InvalidParams));
    assert_eq!(wait(client.unregister(foreign)).map_err(code), Err(ErrorCode::InvalidParams));
    wait(client.unregister(own.clone())).unwrap();
    let get = wait(client.get_into(b"k", .., vec![SharedPart::all(&own)]));
    assert_eq!(get.map_err(code), Err(ErrorCode::InvalidParams));
    client.stop();
}

#[test]
fn occupied_memory_is_told_from_free() {
    let (_master, _node, client) = store();
    let region = wait(client.alloc(4096)).unwrap();
    let part = |offset, len| BufferRange::part(&region, offset, len);
    let mut occupied = Occupied::default();
    assert!(occupied.add(&[part(100, 100), part(300, 100), part(350, 0)]));
    for (offset, len, free) in [
        (0, 101, false),
        (199, 1, false),
        (150, 10, false),
        (0, 4096, false),
        (399, 1, false),
        (100, 1, false),
    ] {
        assert_eq!(occupied.add(&[part(offset, len)]), free, "{offset}+{len}");
    }
    assert!(occupied.add(&[part(0, 100), part(200, 100), part(400, 10)]));
    client.stop();
}
