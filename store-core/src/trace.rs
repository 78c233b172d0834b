//! [`Trace`]: the operation of a client to which a request belongs.
//!
//! A get or a put is several requests, and an operator who examines one wants to find all of them in the logs
//! of the client, the master and the node. Nothing extra is sent for it: the upper bits of a request's id,
//! which the client chooses anyway, are the number of the operation, and the lower bits count its requests.
//! The payload is moved one-sided, without the node taking part, so the node logs nothing about it; requests
//! that a node sends (mounts, heartbeats) have traces of their own.

use core::fmt;

/// The number of an operation: 48 bits, drawn at random by the connection for its first operation and counted
/// up from there, so that the numbers of two clients usually differ. Only for logs and their readers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Trace(u64);

/// Bits of a request's id that count the requests of one operation. An operation with more requests runs into
/// the next number.
const CALL_BITS: u32 = 16;

impl Trace {
    /// The trace of the request with this id.
    #[must_use]
    pub const fn of(request_id: u64) -> Self {
        Self(request_id >> CALL_BITS)
    }

    /// The first trace of a connection, from random bits.
    #[must_use]
    pub const fn random(bits: u64) -> Self {
        // Half of the range is left to count up in.
        Self(bits >> (CALL_BITS + 1))
    }

    /// The next operation.
    #[must_use]
    pub const fn next(self) -> Self {
        Self((self.0 + 1) & (u64::MAX >> CALL_BITS))
    }

    /// The id before that of its first request. Never the last possible id, so that counting up does not
    /// wrap.
    #[must_use]
    pub const fn base(self) -> u64 {
        self.0 << CALL_BITS
    }
}

impl fmt::Display for Trace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:012x}", self.0)
    }
}

#[cfg(test)]
mod tests {
    use alloc::string::ToString;

    use super::*;

    #[test]
    fn every_request_of_an_operation_tells_its_number_and_no_other() {
        let trace = Trace::random(0xfedc_ba98_7654_3210);
        for call in [1, 2, 0xffff] {
            assert_eq!(Trace::of(trace.base() + call), trace);
            assert_ne!(Trace::of(trace.next().base() + call), trace);
        }
        assert_eq!(trace.to_string(), "7f6e5d4c3b2a");
        assert_eq!(Trace::of(u64::MAX).next(), Trace::default(), "the last is followed by the first");
    }
}
