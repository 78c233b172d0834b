//! Bodies of the store's RPC, in both directions: a body that decodes can be encoded again, and its encoding
//! is stable.
#![no_main]

use libfuzzer_sys::fuzz_target;
use store_core::message;
use store_core::{Frame, Header, Kind, Operation};

fn request<O: Operation>(body: &[u8]) -> Option<Vec<u8>> {
    let (ask, items) = O::decode_request(body).ok()?;
    let mut out = Vec::new();
    O::encode_request(&mut out, 7, &ask, items).expect("what was decoded fits");
    Some(body_of(&out).to_vec())
}

fn response<O: Operation>(body: &[u8]) -> Option<Vec<u8>> {
    let header = Header { kind: O::KIND as u8, response: true, request_id: 7, status: 0 };
    let frame = Frame { header, body };
    let (answer, items) = O::decode_response(&frame).ok()?;
    let mut out = Vec::new();
    O::encode_response(&mut out, 7, &answer, items).expect("what was decoded fits");
    Some(body_of(&out).to_vec())
}

fn body_of(bytes: &[u8]) -> &[u8] {
    let (frame, len) = Frame::parse(bytes).expect("our own frame").expect("complete");
    assert_eq!(len, bytes.len());
    assert_eq!(frame.header.request_id, 7);
    frame.body
}

fn both<O: Operation>(body: &[u8]) {
    for again in [request::<O>, response::<O>] {
        if let Some(first) = again(body) {
            let second = again(&first).expect("our own encoding decodes");
            assert_eq!(first, second, "{:?}", O::KIND);
        }
    }
}

/// One arm per operation.
macro_rules! each {
    ($kind:expr, $body:expr, $($operation:ident)*) => {
        match $kind {
            $(Kind::$operation => both::<message::$operation>($body),)*
            missing => panic!("{missing:?} is not fuzzed: name it below"),
        }
    };
}

fuzz_target!(|bytes: &[u8]| {
    let Some((&kind, body)) = bytes.split_first() else { return };
    let Some(kind) = Kind::from_byte(kind) else { return };
    each!(
        kind, body,
        Hello Mount Unmount Beat PutStart PutEnd PutRevoke Get
        Exists ExistsLeased Prefetch ChangeRetention Remove List Segments ReadStats ExplainEviction ReadConfig EvictNow
        ListNodes WhyKept TenantList TenantSet TenantRemove Find RemoveMany QueryHosts
        ClearReplicas ReportReplicas FindReplicas CreateTasks QueryTasks ListTasks CancelTasks RetryTasks
        FetchTasks EndTasks OrderSegments DrainStatus ReadTaskReport ReturnLeases ReportSegments FetchExpulsions
        EndExpulsions MountDisks AdoptObjects DiskReady FetchDiskOrders EndDiskOrders ReclaimExtents
        Stage ReleaseStaged LocateExtents ChangeConfig ClaimExtents ReleaseExtents TakePage FreePage ListPools
    );
});
