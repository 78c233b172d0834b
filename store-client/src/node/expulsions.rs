//! Writers that the master wants cut off: their puts were given up, and what they may still write to is wanted.
//!
//! The master cannot know whether a writer that is silent has stopped for good, or will go on where it was; the node can see to
//! it. Once its engine has *expelled* a writer, nothing of that writer can land here any more, and it is refused from then on.

use store_core::ErrorCode;
use store_core::message::{
    EndExpulsions, Expulsion as Order, ExpulsionEnd, FetchRequest, FetchExpulsions, NodeProof,
};
use te_engine::{Expulsion, TransferEngine};

use super::tasks::Mounted;
use crate::error::RpcError;
use crate::rpc::RpcConnection;

/// Orders at a time; the others are in the next answer.
const ORDERS_MAX: u32 = 256;

/// What is under way.
#[derive(Default)]
pub(super) struct Expulsions {
    orders: Vec<Order>,
}

impl Expulsions {
    pub(super) fn is_empty(&self) -> bool {
        self.orders.is_empty()
    }

    /// Asks whom to cut off. What is not ordered any more is not wanted any more.
    pub(super) fn fetch(&mut self, rpc: &mut RpcConnection, mounted: &Mounted) -> Result<(), RpcError> {
        let Mounted { node, key, incarnation, .. } = *mounted;
        let ask = FetchRequest { node, incarnation, count_max: ORDERS_MAX, key };
        match rpc.call::<FetchExpulsions>(&ask, std::iter::empty()) {
            Ok((_, orders)) => self.orders = orders.take(ORDERS_MAX as usize).collect(),
            // It cuts nobody off, then.
            Err(RpcError::Refused(ErrorCode::NotSupported)) => self.orders.clear(),
            Err(error) => return Err(error),
        }
        Ok(())
    }

    /// Goes on with what is under way, and tells what has ended.
    pub(super) fn go_on(
        &mut self,
        engine: &TransferEngine,
        rpc: &mut RpcConnection,
        mounted: &Mounted,
    ) -> Result<(), RpcError> {
        let mut ends = Vec::new();
        self.orders.retain(|order| match expel(engine, order) {
            Some(gone) => {
                ends.push(ExpulsionEnd { ticket: order.ticket, gone });
                false
            }
            None => true,
        });
        if !ends.is_empty() {
            let proof = NodeProof { node: mounted.node, key: mounted.key };
            // Should the answer be lost, the orders come again, and end again as before.
            rpc.call::<EndExpulsions>(&proof, ends.into_iter())?;
        }
        Ok(())
    }
}

/// Whether the writer is gone; `None`: it is being cut off.
fn expel(engine: &TransferEngine, order: &Order) -> Option<bool> {
    match engine.expel(order.writer, order.force) {
        Ok(Expulsion::Gone) => {
            let forced = if order.force { ", which did not answer for long" } else { "" };
            log::info!("writer {:016x}{forced} is cut off: its space is free", order.writer);
            Some(true)
        }
        Ok(Expulsion::Underway) => None,
        Ok(Expulsion::Connected) => Some(false),
        Ok(Expulsion::Unsupported) => {
            log::warn!(
                "writer {:016x} cannot be cut off: a fabric of this node cannot tell one client from another; its space \
                 comes back when the node is mounted anew",
                order.writer
            );
            Some(false)
        }
        Err(error) => {
            log::warn!(
                "writer {:016x} cannot be cut off: {error}; its space comes back when the node is mounted anew",
                order.writer
            );
            Some(false)
        }
    }
}
