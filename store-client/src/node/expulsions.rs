//! Expulsions: the master orders a node to cut off a writer whose put was given up, so that the put's space
//! can be reused.
//!
//! The master cannot know whether a silent writer has stopped for good or will continue its write. Once the
//! node's engine has *expelled* a writer, nothing of that writer can land here any more, and it is refused
//! from then on.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use store_core::ErrorCode;
use store_core::message::{
    EndExpulsions, Expulsion as Order, ExpulsionEnd, FetchExpulsions, FetchRequest, NodeProof,
};
use te_core::ExpelMode;
use te_engine::{Expulsion, TransferEngine};

use super::tasks::Mounted;
use crate::error::RpcError;
use crate::rpc::RpcConnection;

/// Most orders at a time; the others are in the next answer.
const ORDERS_MAX: u32 = 256;

/// Expulsions that are under way.
#[derive(Default)]
pub(super) struct Expulsions {
    orders: Vec<Order>,
    /// Since when writers count as connected that orders without force are about, by ticket.
    connected: HashMap<u64, Instant>,
}

impl Expulsions {
    pub(super) fn is_empty(&self) -> bool {
        self.orders.is_empty()
    }

    /// Fetches the orders. An order that is not repeated is dropped.
    pub(super) fn fetch(&mut self, rpc: &mut RpcConnection, mounted: &Mounted) -> Result<(), RpcError> {
        let Mounted { node, key, incarnation, .. } = *mounted;
        let ask = FetchRequest { node, incarnation, count_max: ORDERS_MAX, key };
        match rpc.call::<FetchExpulsions>(&ask, std::iter::empty()) {
            Ok((_, orders)) => self.orders = orders.take(ORDERS_MAX as usize).collect(),
            // This master orders no expulsions.
            Err(RpcError::Refused(ErrorCode::NotSupported)) => self.orders.clear(),
            Err(error) => return Err(error),
        }
        Ok(())
    }

    /// Continues the expulsions that are under way, and reports those that have ended.
    pub(super) fn go_on(
        &mut self,
        engine: &TransferEngine,
        rpc: &mut RpcConnection,
        mounted: &Mounted,
    ) -> Result<(), RpcError> {
        let mut ends = Vec::new();
        let patience = silence(engine);
        let connected = &mut self.connected;
        self.orders.retain(|order| match expel(engine, order) {
            // Through a pool, only its silence tells that a writer has ended.
            Some(false)
                if !order.force
                    && connected.entry(order.ticket).or_insert_with(Instant::now).elapsed() < patience =>
            {
                true
            }
            Some(gone) => {
                ends.push(ExpulsionEnd { ticket: order.ticket, gone });
                false
            }
            None => true,
        });
        self.connected.retain(|ticket, _| self.orders.iter().any(|order| order.ticket == *ticket));
        if !ends.is_empty() {
            let proof = NodeProof { node: mounted.node, key: mounted.key };
            // If the answer is lost, the same orders are repeated and end as before.
            rpc.call::<EndExpulsions>(&proof, ends.into_iter())?;
        }
        Ok(())
    }
}

/// How long a writer that has ended may count as connected: not at all, but for peers in a CXL pool, which
/// have no connection.
fn silence(engine: &TransferEngine) -> Duration {
    #[cfg(feature = "cxl")]
    if !engine.pools().is_empty() {
        return Duration::from_millis(u64::from(engine.config().cxl.peer_silence_ms_max) + 1_000);
    }
    let _ = engine;
    Duration::ZERO
}

/// Returns whether the writer is expelled; `None`: the expulsion is under way.
fn expel(engine: &TransferEngine, order: &Order) -> Option<bool> {
    let mode = if order.force { ExpelMode::Force } else { ExpelMode::SpareConnected };
    match engine.expel(order.writer, mode) {
        Ok(Expulsion::Gone) => {
            let forced = if order.force { ", which did not respond," } else { "" };
            log::info!(
                "writer {:016x}{forced} was expelled: the space of its puts is released",
                order.writer
            );
            Some(true)
        }
        Ok(Expulsion::Underway) => None,
        Ok(Expulsion::Connected) => Some(false),
        // Unsupported, or a state that this release does not know.
        Ok(_) => {
            log::warn!(
                "writer {:016x} cannot be expelled: a fabric of this node cannot distinguish clients; the space of its \
 puts is released when the node is mounted anew",
                order.writer
            );
            Some(false)
        }
        Err(error) => {
            log::warn!(
                "writer {:016x} cannot be expelled: {error}; the space of its puts is released when the node is mounted \
 anew",
                order.writer
            );
            Some(false)
        }
    }
}
