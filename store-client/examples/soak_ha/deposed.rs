//! A connection to a leader that is stopped and goes on when another one leads: it must not answer any more.

use std::net::SocketAddr;

use store_client::{RpcConfig, RpcConnection, RpcError};
use store_core::Key;
use store_core::message::{Get, LeaseWanted};

const REQUESTS: u64 = 10;

/// Connects to this master, if it leads.
pub(crate) fn connect(addr: SocketAddr) -> Result<RpcConnection, String> {
    let mut config = RpcConfig::default();
    config.call_ms_max = 2_000;
    let rpc = RpcConnection::connect(addr.into(), config).map_err(|error| error.to_string())?;
    if rpc.address().to_string() == addr.to_string() { Ok(rpc) } else { Err("it does not lead".into()) }
}

/// Sends requests that the master finds when it goes on.
pub(crate) fn send(rpc: &mut RpcConnection) -> Result<(), RpcError> {
    for _ in 0..REQUESTS {
        rpc.queue::<Get>(&LeaseWanted::Quick, [Key(b"nothing")].into_iter())?;
    }
    rpc.flush()
}

/// How many of them are answered. One that does not lead refuses them or closes the connection.
pub(crate) fn answers(rpc: &mut RpcConnection) -> u64 {
    let mut answers = 0;
    for _ in 0..REQUESTS {
        if rpc.recv().is_err() {
            break;
        }
        answers += 1;
    }
    answers
}
