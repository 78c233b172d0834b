//! Addresses of device memory in the interfaces that know nothing but addresses, with the fake driver of
//! te-gpu. No GPU is behind it, and a CPU that touches its memory faults.
#![cfg(feature = "cuda")]
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
#![allow(unsafe_code, reason = "the tests keep the memory that they pass")]

#[path = "../../../te-gpu/tests/common/mod.rs"]
mod fake;

use fake::Fake;
use snowskin_compat::clients::{Clients, ClientsError, Lent, Place, Span};
use store_client::{ClientConfig, Get, MemSpan, Node, NodeConfig, Put, PutOptions, Store as _};
use store_master::{Config, MasterHandle, MasterServer};
use te_core::testkit::pattern;

fn clients(fake: &Fake) -> (MasterHandle, Node, Clients) {
    let config =
        Config { rpc_listen: "127.0.0.1:0".parse().unwrap(), http_listen: None, ..Config::default() };
    let master = MasterServer::bind(config).unwrap().spawn().unwrap();
    let node = Node::start(NodeConfig::new("a", master.rpc_addr().into(), 32 << 20)).unwrap();
    let mut config = ClientConfig::new(master.rpc_addr().into());
    config.engine.gpu = fake.config();
    (config.engine.gpu.slot_bytes, config.engine.gpu.ring_bytes) = (64 << 10, 512 << 10);
    (master, node, Clients::connect(config).unwrap())
}

fn at(span: MemSpan, offset: u64, len: u64) -> Span {
    Span { addr: span.as_ptr().addr() as u64 + offset, len }
}

/// Stores one object and reads it back into other memory.
fn there_and_back(worker: &mut Lent<'_>, key: &[u8], from: &[Span], into: &[Span]) {
    // SAFETY: the caller's memory outlives the clients.
    unsafe { worker.lend_devices([from, into]) }.unwrap();
    let (source, sink) = (Place::of(worker, from), Place::of(worker, into));
    // SAFETY: as above, and nothing else refers to it.
    let (slices, mut sinks) = unsafe { (source.slices(), sink.slices_mut()) };
    let mut put = [Put::new(key, source.source(&slices))];
    assert!(worker.client.batch_put(&mut put, &PutOptions::default()).is_complete(), "{put:?}");
    let mut get = [Get::new(key, sink.sink(&mut sinks))];
    assert!(worker.client.batch_get(&mut get).is_complete(), "{get:?}");
    worker.end_lending();
}

#[test]
fn addresses_of_a_device_are_registered_for_a_call_or_ahead() {
    let fake = Fake::cuda();
    let (master, node, clients) = clients(&fake);
    let device = fake.allocate(4 << 20);
    let value = pattern(1, 300_000);
    fake.fill(device.part(5, 300_000).unwrap(), &value);
    let mut host = vec![0_u8; 300_000];
    let host_span =
        |bytes: &mut [u8]| Span { addr: bytes.as_mut_ptr().addr() as u64, len: bytes.len() as u64 };
    {
        let mut worker = clients.lend().unwrap();
        // From the device to the host, and back to the device, in a part of each kind.
        there_and_back(&mut worker, b"a", &[at(device, 5, 300_000)], &[host_span(&mut host)]);
        assert!(host == value);
        assert_eq!(worker.find(at(device, 5, 1).addr, 1), None, "the registration ended with the call");
        let mut tail = vec![0_u8; 100_000];
        let into = [at(device, 1 << 20, 200_000), host_span(&mut tail)];
        there_and_back(&mut worker, b"b", &[host_span(&mut host)], &into);
        assert!(fake.bytes(device.part(1 << 20, 200_000).unwrap()) == value[..200_000]);
        assert!(tail == value[200_000..]);
    }
    let whole = at(device, 0, 4 << 20);
    // SAFETY: the memory outlives the clients.
    unsafe { clients.add_buffer(whole.addr, whole.len) }.unwrap();
    {
        let mut worker = clients.lend().unwrap();
        assert!(worker.find(at(device, 5, 1).addr, 1).is_some());
        there_and_back(&mut worker, b"c", &[at(device, 5, 300_000)], &[at(device, 2 << 20, 300_000)]);
    }
    assert!(fake.bytes(device.part(2 << 20, 300_000).unwrap()) == value);
    clients.remove_buffer(whole.addr, || {}).unwrap();

    // Memory that leaves its allocation.
    // SAFETY: it is refused.
    let refused = unsafe { clients.add_buffer(whole.addr, whole.len + (1 << 20)) };
    assert!(matches!(refused, Err(ClientsError::NoMemory { .. })), "{refused:?}");
    {
        let mut worker = clients.lend().unwrap();
        let beyond = [at(device, 4_000_000, 1 << 20)];
        // SAFETY: as above.
        let refused = unsafe { worker.lend_devices([&beyond[..]]) }.unwrap_err();
        assert!(refused.to_string().contains("one allocation"), "{refused}");
    }
    drop(clients);
    node.stop();
    master.stop().unwrap();
}
