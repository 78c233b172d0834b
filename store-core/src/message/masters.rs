//! What a master that does not lead answers.

use alloc::vec::Vec;

use serde::{Deserialize, Serialize};

use super::{NAME_BYTES_MAX, encode_failure};
use crate::ErrorCode;
use crate::codec::{self, Short};
use crate::ha::Reign;
use crate::wire::{Frame, FrameWriter, Header};

/// Most masters of one store.
pub const MASTERS_MAX: usize = 16;

/// The body of a response with the status [`ErrorCode::NotLeader`]: what the master knows of the one that
/// leads. It is the response to any request, a greeting included, and the request has changed nothing. A
/// request without a response is dropped.
///
/// It is a hint: the sender may be the one that lags behind. A client that follows it still compares the
/// [`Welcome`](super::Welcome) that it gets there with what it has seen.
///
/// ```
/// use store_core::{Frame, message::{NotLeader, encode_not_leader}};
///
/// let mut says = NotLeader { lineage: 3, term: 7, leader: Some("10.0.0.2:50051"), ..NotLeader::default() };
/// let _ = says.members.push("10.0.0.1:50051");
/// let mut out = Vec::new();
/// encode_not_leader(&mut out, 8, 21, &says);
/// let (frame, _) = Frame::parse(&out)?.expect("complete");
/// assert_eq!(NotLeader::of(&frame), Some(says));
/// # Ok::<(), store_core::WireError>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NotLeader<'a> {
    /// The latest lineage that the master knows; 0: none.
    pub lineage: u64,
    /// The latest term of it.
    pub term: u64,
    /// Where the leader of that term is reached, `host:port`; `None` if it is not known. At most
    /// [`NAME_BYTES_MAX`] bytes.
    #[serde(borrow)]
    pub leader: Option<&'a str>,
    /// Where the masters of the store are reached, as far as they are known. At most [`NAME_BYTES_MAX`] bytes
    /// each.
    #[serde(borrow)]
    pub members: Short<&'a str, MASTERS_MAX>,
}

impl<'a> NotLeader<'a> {
    /// What a response says; `None` for a response with another status, and for one whose body does not
    /// decode or is over the limits: then it says nothing about the leader.
    #[must_use]
    pub fn of(frame: &Frame<'a>) -> Option<Self> {
        if !frame.header.response || frame.header.result() != Err(ErrorCode::NotLeader) {
            return None;
        }
        let (says, rest): (Self, _) = codec::take(frame.body).ok()?;
        (rest.is_empty() && says.fits()).then_some(says)
    }

    /// The latest reign that the master knows.
    #[must_use]
    pub const fn reign(&self) -> Reign {
        Reign { lineage: self.lineage, term: self.term }
    }

    fn fits(&self) -> bool {
        self.leader.iter().chain(self.members.iter()).all(|name| name.len() <= NAME_BYTES_MAX)
    }
}

/// Appends the response of a master that does not lead. An address over the limit is left out with all
/// others: the response then has the status alone.
pub fn encode_not_leader(out: &mut Vec<u8>, kind: u8, request_id: u64, says: &NotLeader<'_>) {
    let status = ErrorCode::NotLeader.code();
    if !says.fits() {
        return encode_failure(out, kind, request_id, ErrorCode::NotLeader);
    }
    let mut frame = FrameWriter::begin(out, &Header { kind, response: true, request_id, status });
    // Short names fit, and always encode.
    let _ = codec::put(frame.body(), says).and_then(|()| frame.finish());
}

#[cfg(test)]
mod tests {
    use alloc::string::String;

    use super::*;
    use crate::message::{Hello, Kind, Operation};

    fn frame(out: &[u8]) -> Frame<'_> {
        Frame::parse(out).unwrap().unwrap().0
    }

    #[test]
    fn what_a_master_says_of_the_leader_arrives_with_the_status() {
        let name: String = core::iter::repeat_n('m', NAME_BYTES_MAX).collect();
        let mut says = NotLeader { lineage: u64::MAX, term: 2, leader: Some(&name), ..NotLeader::default() };
        while says.members.push(&name).is_ok() {}
        let mut out = Vec::new();
        encode_not_leader(&mut out, Kind::Hello as u8, 5, &says);
        let frame = frame(&out);
        assert_eq!((frame.header.request_id, frame.header.kind), (5, Kind::Hello as u8));
        assert_eq!(NotLeader::of(&frame), Some(says));
        assert_eq!(Hello::decode_response(&frame).unwrap_err(), ErrorCode::NotLeader);
    }

    #[test]
    fn what_is_over_a_limit_says_nothing_of_the_leader() {
        let long: String = core::iter::repeat_n('m', NAME_BYTES_MAX + 1).collect();
        let mut out = Vec::new();
        encode_not_leader(&mut out, 8, 5, &NotLeader { leader: Some(&long), ..NotLeader::default() });
        assert_eq!(frame(&out).body.len(), 0);
        assert_eq!(
            (frame(&out).header.result(), NotLeader::of(&frame(&out))),
            (Err(ErrorCode::NotLeader), None)
        );

        // From a peer that keeps no limit: a long name, one member too many, and bytes behind the message.
        let named = NotLeader { leader: Some(&long), ..NotLeader::default() };
        let many = (1_u64, 1_u64, None::<&str>, [""; MASTERS_MAX + 1].as_slice().to_vec());
        let mut bodies = [Vec::new(), Vec::new(), Vec::new()];
        codec::put(&mut bodies[0], &named).unwrap();
        codec::put(&mut bodies[1], &many).unwrap();
        codec::put(&mut bodies[2], &(NotLeader::default(), 1_u8)).unwrap();
        for body in bodies {
            let status = ErrorCode::NotLeader.code();
            let header = Header { kind: 8, response: true, request_id: 1, status };
            assert_eq!(NotLeader::of(&Frame { header, body: &body }), None);
        }
        let fine = Header { kind: 8, response: true, request_id: 1, status: 0 };
        assert_eq!(NotLeader::of(&Frame { header: fine, body: &[0, 0, 0, 0] }), None);
    }
}
