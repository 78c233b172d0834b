//! [`Trace`]: which operation of a client a request belongs to.
//!
//! A get or a put is several requests, and a person who looks into one wants to find all of them in the logs of the client,
//! the master and the node. Nothing is sent for it: the upper bits of a request's id, which the asker chooses anyway, are the
//! operation's number, and the lower bits count its requests. The bytes themselves are moved one-sided, without the node being
//! asked, so there is no trace of that at the node; what a node asks (mounts, heartbeats) has its own.

use core::fmt;

/// The number of an operation: 48 bits, drawn at random by the connection for its first and counted up from there, so that
/// those of two clients are different as a rule. For people and logs; nothing depends on it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Trace(u64);

/// Bits of a request's id that count the requests of one operation. An operation with more runs into the next number.
const CALL_BITS: u32 = 16;

impl Trace {
    /// That of the request with this id.
    #[must_use]
    pub const fn of(request_id: u64) -> Self {
        Self(request_id >> CALL_BITS)
    }

    /// One of a connection that begins, from random bits.
    #[must_use]
    pub const fn random(bits: u64) -> Self {
        // Half of the range is left to count up in.
        Self(bits >> (CALL_BITS + 1))
    }

    /// The operation after this one.
    #[must_use]
    pub const fn next(self) -> Self {
        Self((self.0 + 1) & (u64::MAX >> CALL_BITS))
    }

    /// The id before its first request's. Never the last id there is, so that counting up does not wrap.
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
