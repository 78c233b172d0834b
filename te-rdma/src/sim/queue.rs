//! The send queue of one queue pair: a ring of work requests, each from its posting until its completion was
//! polled.

use te_core::Op;

use crate::sys::verbs::{QpConfig, Sge, WorkRequest};

/// Packet numbers have 24 bits.
pub(super) const PSN_MASK: u32 = 0xff_ffff;

/// By how many packets `a` is ahead of `b`; negative: behind.
#[inline]
pub(super) fn psn_diff(a: u32, b: u32) -> i32 {
    (a.wrapping_sub(b) << 8) as i32 >> 8
}

/// A work request in the queue.
#[derive(Clone, Copy, Debug)]
pub(super) struct Wqe {
    pub(super) id: u64,
    pub(super) remote_addr: u64,
    pub(super) remote_key: u32,
    pub(super) len: u32,
    /// Its packet numbers are `first_psn .. first_psn + packets` (for a READ: those of its responses).
    pub(super) first_psn: u32,
    pub(super) packets: u32,
    /// Packets acknowledged (WRITE) or received (READ).
    pub(super) done_packets: u32,
    pub(super) sges: u32,
    pub(super) op: Op,
    pub(super) signaled: bool,
    pub(super) inline: bool,
}

/// Positions count up without limit; slot = position modulo the ring's length.
///
/// ```text
///   released ≤ done ≤ sent ≤ tail
///   │ completed,     │ under  │ waiting │
///   │ not yet polled │ way    │         │
/// ```
#[derive(Debug)]
pub(super) struct SendQueue {
    config: QpConfig,
    mask: u64,
    wqes: Box<[Wqe]>,
    sges: Box<[Sge]>,
    inline: Box<[u8]>,
    pub(super) released: u64,
    pub(super) done: u64,
    pub(super) sent: u64,
    pub(super) tail: u64,
    /// Packets of the request at `sent` that have left.
    pub(super) sent_packets: u32,
}

impl SendQueue {
    pub(super) fn new(config: QpConfig) -> Self {
        let slots = if config.depth == 0 { 0 } else { (config.depth as usize).next_power_of_two() };
        let wqe = Wqe {
            id: 0,
            remote_addr: 0,
            remote_key: 0,
            len: 0,
            first_psn: 0,
            packets: 0,
            done_packets: 0,
            sges: 0,
            op: Op::Write,
            signaled: false,
            inline: false,
        };
        Self {
            config,
            mask: (slots as u64).wrapping_sub(1),
            wqes: vec![wqe; slots].into(),
            sges: vec![Sge { addr: 0, len: 0, local_key: 0 }; slots * config.sges as usize].into(),
            inline: vec![0; slots * config.inline_bytes as usize].into(),
            released: 0,
            done: 0,
            sent: 0,
            tail: 0,
            sent_packets: 0,
        }
    }

    /// The queue of a destroyed queue pair.
    pub(super) fn empty() -> Self {
        Self::new(QpConfig { depth: 0, sges: 0, inline_bytes: 0 })
    }

    pub(super) fn config(&self) -> QpConfig {
        self.config
    }

    pub(super) fn is_full(&self) -> bool {
        self.tail - self.released >= u64::from(self.config.depth)
    }

    /// Whether packets were sent that are not acknowledged.
    pub(super) fn is_under_way(&self) -> bool {
        self.done < self.sent || self.sent_packets > self.done_packets()
    }

    fn done_packets(&self) -> u32 {
        if self.done < self.tail { self.at(self.done).done_packets } else { 0 }
    }

    #[inline]
    fn slot(&self, position: u64) -> usize {
        (position & self.mask) as usize
    }

    #[inline]
    pub(super) fn at(&self, position: u64) -> &Wqe {
        &self.wqes[self.slot(position)]
    }

    #[inline]
    pub(super) fn at_mut(&mut self, position: u64) -> &mut Wqe {
        let slot = self.slot(position);
        &mut self.wqes[slot]
    }

    #[inline]
    pub(super) fn sges_at(&self, position: u64) -> &[Sge] {
        let first = self.slot(position) * self.config.sges as usize;
        &self.sges[first..first + self.at(position).sges as usize]
    }

    /// The bytes of an inline request.
    #[inline]
    pub(super) fn inline_at(&self, position: u64) -> &[u8] {
        let first = self.slot(position) * self.config.inline_bytes as usize;
        &self.inline[first..first + self.at(position).len as usize]
    }

    /// Appends a request that fits (the caller has checked fullness and limits). The caller fills in inline
    /// bytes.
    #[inline]
    pub(super) fn push(
        &mut self,
        request: &WorkRequest,
        len: u32,
        sges: &[Sge],
        first_psn: u32,
        packets: u32,
    ) {
        let position = self.tail;
        let first = self.slot(position) * self.config.sges as usize;
        *self.at_mut(position) = Wqe {
            id: request.id,
            remote_addr: request.remote_addr,
            remote_key: request.remote_key,
            len,
            first_psn,
            packets,
            done_packets: 0,
            sges: if request.inline { 0 } else { sges.len() as u32 },
            op: request.op,
            signaled: request.signaled,
            inline: request.inline,
        };
        if !request.inline {
            self.sges[first..first + sges.len()].copy_from_slice(sges);
        }
        self.tail += 1;
    }

    /// Where the inline bytes of the newest request go.
    pub(super) fn newest_inline(&mut self) -> &mut [u8] {
        let position = self.tail - 1;
        let (first, len) =
            (self.slot(position) * self.config.inline_bytes as usize, self.at(position).len as usize);
        &mut self.inline[first..first + len]
    }

    /// Sends again from the first packet on that is not acknowledged.
    pub(super) fn go_back(&mut self) {
        self.sent = self.done;
        self.sent_packets = self.done_packets();
    }

    /// After acknowledgements: packets that were acknowledged are not sent again.
    pub(super) fn catch_up(&mut self) {
        if self.sent < self.done {
            self.sent = self.done;
            self.sent_packets = 0;
        }
        if self.sent == self.done {
            self.sent_packets = self.sent_packets.max(self.done_packets());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packet_numbers_wrap_at_24_bits() {
        assert_eq!(psn_diff(5, 3), 2);
        assert_eq!(psn_diff(3, 5), -2);
        assert_eq!(psn_diff(1, PSN_MASK), 2);
        assert_eq!(psn_diff(PSN_MASK, 1), -2);
        assert_eq!(psn_diff(0x80_0000, 0), -0x80_0000);
    }
}
