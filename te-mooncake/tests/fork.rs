//! A child after a fork has the parent's sockets and none of its threads: it changes nothing for the parent.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]
#![allow(unsafe_code, reason = "exports memory")]

mod common;

use common::{ALL, config, connect, exchange, service};
use te_core::{ErrorKind, Memory as _, Op, Transport as _};
use te_fabric::testkit::{Block, REMOTE, finish, fork_and, read};
use te_mooncake::header::Status;
use te_mooncake::{ExportError, WithdrawError};

#[test]
fn a_child_refuses_everything_and_its_end_leaves_the_parent_serving() {
    let (service, block) = (service(), Block::new(4096));
    let span = block.span();
    let addr = span.as_ptr().addr() as u64;
    // SAFETY: the block is read and written through volatile copies alone, and withdrawn before it is freed.
    unsafe { service.export(span, ALL) }.unwrap();
    let segment = service.client().descriptor(service.name()).unwrap();
    let blob = common::export(service.data_port(), addr, 4096, segment.version, ALL);
    let mut node = common::rail(&config(), None, 4096, &blob);
    node.submit(&[read(1, 0, 0, 100)]);
    assert!(finish(&mut [&mut node], 1).result.is_ok());
    let mut own = (service, node);
    fork_and(
        "a child",
        || {
            let (service, node) = &mut own;
            // SAFETY: refused before the memory is touched.
            let exported = unsafe { service.export(span, ALL) };
            let submitted = node.transport.submit(&[read(2, 0, 0, 100)]).map_err(|error| error.kind);
            let checks = [
                (exported == Err(ExportError::Forked), "export"),
                (service.withdraw(addr) == Err(WithdrawError::Forked), "withdraw"),
                (service.republish().is_ok() && service.take_notifications().is_empty(), "metadata"),
                (submitted == Err(ErrorKind::Forked), "submit"),
                (node.poll() == 0, "poll"),
                (
                    node.transport.detach(REMOTE).map_err(|error| error.kind) == Err(ErrorKind::Forked),
                    "detach",
                ),
            ];
            if let Some((_, what)) = checks.iter().find(|(good, _)| !good) {
                return Err(format!("{what} is not refused"));
            }
            // SAFETY: the values are not used again in this process, which ends.
            unsafe {
                drop(std::ptr::read(service));
                drop(std::ptr::read(&raw const node.transport));
            }
            Ok(())
        },
        || (),
    );
    let (service, mut node) = own;
    let mut stream = connect(service.data_port());
    assert_eq!(exchange(&mut stream, Op::Read, addr, &mut [0; 100]), Some(Status::Done));
    node.submit(&[read(3, 0, 0, 100)]);
    assert!(finish(&mut [&mut node], 3).result.is_ok());
    assert!(service.client().probe(service.name()).is_ok());
    service.withdraw(addr).unwrap();
    drop(block);
}
