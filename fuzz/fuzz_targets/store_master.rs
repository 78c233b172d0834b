//! A client that says anything at all to a master: every request has exactly one answer, and the master lives.
//!
//! Input: `step u8 | kind u8 | len u8 | body`, again and again. `step` moves the clock, 100 ms each.
#![no_main]

use libfuzzer_sys::fuzz_target;
use std::time::Duration;
use store_core::{Frame, Header, Master, MasterConfig, Session};
use te_core::Instant;

fuzz_target!(|bytes: &[u8]| {
    let mut master = Master::new(MasterConfig::default()).expect("the defaults are valid");
    let mut session = Session::default();
    let mut now = Instant::ZERO;
    let mut rest = bytes;
    let mut request_id = 0;
    while let [step, kind, len, tail @ ..] = rest {
        let (body, tail) = tail.split_at(usize::from(*len).min(tail.len()));
        rest = tail;
        now = now + Duration::from_millis(100) * u32::from(*step);
        if master.poll_timeout().is_some_and(|due| due <= now) {
            master.handle_timeout(now);
        }
        request_id += 1;
        let header = Header { kind: *kind, response: false, request_id, status: 0 };
        let mut out = Vec::new();
        master.handle(now, &mut session, &Frame { header, body }, &mut out);
        let (answer, answer_len) = Frame::parse(&out).expect("a frame").expect("a whole frame");
        assert_eq!(answer_len, out.len(), "one answer");
        assert!(answer.header.response);
        assert_eq!(answer.header.request_id, request_id);
    }
});
