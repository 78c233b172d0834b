//! Connections to stage services, made on threads of their own: a reader never waits for a node that does
//! not answer.

use std::sync::mpsc::{Receiver, TryRecvError, channel};
use std::thread;
use std::time::{Duration, Instant};

use crate::error::RpcError;
use crate::rpc::{Address, Identity, RpcConfig, RpcConnection};

/// The connection to one service.
pub(super) enum Link {
    /// None is needed.
    Closed,
    /// None is made before this time, because the latest failed.
    Shunned(Instant),
    Dialing(Receiver<Result<RpcConnection, RpcError>>),
    Open(Box<RpcConnection>),
}

impl Link {
    /// Begins to connect, on a thread that ends with the connection.
    pub(super) fn dial(address: &str, rpc: RpcConfig, identity: Identity) -> Result<Self, RpcError> {
        let address: Address = address.parse()?;
        let (send, receive) = channel();
        let dial = move || {
            // A receiver that is gone needs no connection.
            let _ = send.send(RpcConnection::connect_as(address.into(), rpc, identity));
        };
        let spawned = thread::Builder::new().name("snowskin-dial".into()).spawn(dial);
        spawned.map_err(|source| RpcError::Lost { source })?;
        Ok(Self::Dialing(receive))
    }

    /// Notices a connection that has been made; an error: it could not be made.
    pub(super) fn notice(&mut self, wait: Duration) -> Result<(), RpcError> {
        let Self::Dialing(receive) = self else { return Ok(()) };
        let made = match receive.try_recv() {
            Err(TryRecvError::Empty) if wait.is_zero() => return Ok(()),
            Err(TryRecvError::Empty) => match receive.recv_timeout(wait) {
                Ok(made) => made,
                Err(_) => return Ok(()),
            },
            Ok(made) => made,
            Err(TryRecvError::Disconnected) => Err(RpcError::Disconnected),
        };
        *self = Self::Open(Box::new(made?));
        Ok(())
    }
}
