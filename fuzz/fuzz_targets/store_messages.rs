//! Bodies of the store's RPC, both directions: what decodes, encodes again, and from then on to the same bytes.
#![no_main]

use libfuzzer_sys::fuzz_target;
use store_core::message::{
    Beat, CancelTasks, ClearReplicas, CreateTasks, DrainStatus, EndTasks, EvictNow, Exists, ExplainEviction, FetchTasks, Find, FindReplicas, Get, Hello, List, ListNodes, ListTasks, Mount, OrderSegments, PutEnd, PutRevoke, PutStart, QueryHosts, QueryTasks, ReadConfig, ReadStats, ReadTaskReport, Remove, RemoveMany, ReportReplicas, RetryTasks, Segments, TenantList, TenantRemove, TenantSet, Unmount, WhyKept,
};
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

fuzz_target!(|bytes: &[u8]| {
    let Some((&kind, body)) = bytes.split_first() else { return };
    match Kind::from_byte(kind) {
        Some(Kind::Hello) => both::<Hello>(body),
        Some(Kind::Mount) => both::<Mount>(body),
        Some(Kind::Unmount) => both::<Unmount>(body),
        Some(Kind::Beat) => both::<Beat>(body),
        Some(Kind::PutStart) => both::<PutStart>(body),
        Some(Kind::PutEnd) => both::<PutEnd>(body),
        Some(Kind::PutRevoke) => both::<PutRevoke>(body),
        Some(Kind::Get) => both::<Get>(body),
        Some(Kind::Exists) => both::<Exists>(body),
        Some(Kind::Remove) => both::<Remove>(body),
        Some(Kind::List) => both::<List>(body),
        Some(Kind::Segments) => both::<Segments>(body),
        Some(Kind::ReadStats) => both::<ReadStats>(body),
        Some(Kind::ExplainEviction) => both::<ExplainEviction>(body),
        Some(Kind::ReadConfig) => both::<ReadConfig>(body),
        Some(Kind::EvictNow) => both::<EvictNow>(body),
        Some(Kind::ListNodes) => both::<ListNodes>(body),
        Some(Kind::WhyKept) => both::<WhyKept>(body),
        Some(Kind::TenantList) => both::<TenantList>(body),
        Some(Kind::TenantSet) => both::<TenantSet>(body),
        Some(Kind::TenantRemove) => both::<TenantRemove>(body),
        Some(Kind::Find) => both::<Find>(body),
        Some(Kind::RemoveMany) => both::<RemoveMany>(body),
        Some(Kind::QueryHosts) => both::<QueryHosts>(body),
        Some(Kind::ClearReplicas) => both::<ClearReplicas>(body),
        Some(Kind::ReportReplicas) => both::<ReportReplicas>(body),
        Some(Kind::FindReplicas) => both::<FindReplicas>(body),
        Some(Kind::CreateTasks) => both::<CreateTasks>(body),
        Some(Kind::QueryTasks) => both::<QueryTasks>(body),
        Some(Kind::ListTasks) => both::<ListTasks>(body),
        Some(Kind::CancelTasks) => both::<CancelTasks>(body),
        Some(Kind::RetryTasks) => both::<RetryTasks>(body),
        Some(Kind::FetchTasks) => both::<FetchTasks>(body),
        Some(Kind::EndTasks) => both::<EndTasks>(body),
        Some(Kind::OrderSegments) => both::<OrderSegments>(body),
        Some(Kind::DrainStatus) => both::<DrainStatus>(body),
        Some(Kind::ReadTaskReport) => both::<ReadTaskReport>(body),
        _ => {}
    }
});
