//! The discovery service of our target, and its users.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod common;

use std::io::{ErrorKind, Read, Write};
use std::net::TcpListener;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use te_nvmeof::{Config, discover};

const PATIENCE: Duration = Duration::from_secs(5);

#[test]
fn a_target_tells_its_subsystem() {
    let mut target = common::node(Config::default(), 4_096);
    let (address, nqn) = (target.transport.local_address(), target.transport.nqn());
    let done = AtomicBool::new(false);
    let found = std::thread::scope(|scope| {
        let asking = scope.spawn(|| {
            let found = discover(address, PATIENCE);
            done.store(true, Ordering::Relaxed);
            found
        });
        common::eventually("the answer", || {
            target.poll();
            done.load(Ordering::Relaxed)
        });
        asking.join().unwrap()
    });
    let found = found.unwrap();
    assert_eq!(found.len(), 1);
    assert_eq!((found[0].nqn.clone(), found[0].transport, found[0].kind), (nqn, 3, 2));
    assert_eq!((found[0].address.as_str(), found[0].port.clone()), ("127.0.0.1", address.port().to_string()));
}

#[test]
fn a_service_that_speaks_something_else_is_an_error() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let server = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let mut request = [0; 128];
        stream.read_exact(&mut request).unwrap();
        let _ = stream.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n");
    });
    assert_eq!(discover(address, PATIENCE).map_err(|error| error.kind()), Err(ErrorKind::InvalidData));
    server.join().unwrap();
    assert!(discover(address, PATIENCE).is_err(), "no service at all");
}
