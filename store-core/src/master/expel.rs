//! Writers that nodes have to cut off, and segments that clients cannot reach.

use alloc::vec::Vec;

use te_core::Instant;

use super::Master;
use crate::message::{Expulsion, ExpulsionEnd, FetchAsk};
use crate::{ErrorCode, SegmentNo};

impl Master {
    /// Which writers a node is to cut off.
    ///
    /// # Errors
    /// `ClientNotFound` when the node is not known under this incarnation, `IllegalClient` when the key is not its.
    pub fn fetch_expulsions(&mut self, _now: Instant, ask: &FetchAsk) -> Result<Vec<Expulsion>, ErrorCode> {
        self.check_node(ask.node, ask.key)?;
        Ok(Vec::new())
    }

    /// A node reports what became of one. Repeating it is harmless.
    ///
    /// # Errors
    /// `TaskNotFound`: there is no such order.
    pub fn end_expulsion(&mut self, _now: Instant, _node: u64, _end: &ExpulsionEnd) -> Result<(), ErrorCode> {
        Err(ErrorCode::TaskNotFound)
    }

    /// A client could not reach a segment. Nothing is dropped for it.
    ///
    /// # Errors
    /// `SegmentNotFound`.
    pub fn report_unreachable(&mut self, _now: Instant, no: SegmentNo) -> Result<(), ErrorCode> {
        self.segments.get(no).map(|_| ()).ok_or(ErrorCode::SegmentNotFound)
    }
}
