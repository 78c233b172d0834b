//! A fake libibverbs: tests of the arguments that the provider passes to a driver, and of how it handles the
//! results.
//!
//! One fake device per thread at a time. Its script is thread-local, because C functions have no other state.

use std::cell::RefCell;
use std::ffi::{c_char, c_int, c_void};
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::ptr::{NonNull, null_mut};

use te_core::{ErrorKind, MemSpan, Op};

use super::abi::*;
use super::context::Context;
use super::load::Library;
use super::provider::SystemVerbs;
use crate::sys::verbs::{
    AsyncEvent, Connecting, DeviceFeatures, MrAccess, Path, Qp, QpConfig, QpHandle, QpStep, Sge, Verbs as _,
    WcStatus, WorkCompletion, WorkRequest,
};

/// A request as the driver received it: id, flags, opcode, pieces, remote address, key.
type Seen = (u64, u32, u32, Vec<(u64, u32, u32)>, u64, u32);

/// A registration by dma-buf as the driver received it: offset, length, I/O address, descriptor, access.
type SeenDmabuf = (u64, usize, u64, c_int, c_int);

/// The results that the fake returns, and the arguments that it received.
#[derive(Default)]
struct Script {
    /// Objects that exist: contexts, domains, channels, queues, queue pairs, registrations.
    live: i32,
    /// errno of the next registration, creation or state change.
    refuse: Option<i32>,
    /// The most inline bytes that a queue pair takes.
    inline_max: u32,
    /// How many requests a doorbell takes, and the result for the next one.
    accept: Option<(usize, c_int)>,
    /// The chains that were posted.
    doorbells: Vec<Vec<Seen>>,
    completions: Vec<ibv_wc>,
    /// `poll_cq` fails.
    poll_fails: bool,
    steps: Vec<(ibv_qp_attr, c_int)>,
    /// Access flags of registrations, and whether by `ibv_reg_mr_iova2`.
    registrations: Vec<(u32, bool)>,
    dmabufs: Vec<SeenDmabuf>,
    events: Vec<(bool, u32)>,
    acknowledged: u32,
    last_qp: usize,
}

thread_local! {
    static SCRIPT: RefCell<Script> = RefCell::default();
}

fn script<T>(work: impl FnOnce(&mut Script) -> T) -> T {
    SCRIPT.with_borrow_mut(work)
}

fn set_errno(errno: i32) {
    // SAFETY: the address is this thread's own `errno`.
    unsafe { *libc::__errno_location() = errno };
}

/// A new object, zeroed and counted; null and `errno` when the script refuses.
fn make<T>() -> *mut T {
    if let Some(errno) = script(|s| s.refuse.take()) {
        set_errno(errno);
        return null_mut();
    }
    script(|s| s.live += 1);
    // SAFETY: all these structures are integers, pointers and options of functions: zero is valid for each.
    Box::into_raw(Box::new(unsafe { std::mem::zeroed() }))
}

/// # Safety
/// `object` came from `make` and was not freed.
unsafe fn free<T>(object: *mut T) -> c_int {
    script(|s| s.live -= 1);
    // SAFETY: the caller's promise.
    drop(unsafe { Box::from_raw(object) });
    0
}

unsafe extern "C" fn query_device(_: *mut ibv_context, attr: *mut ibv_device_attr) -> c_int {
    // SAFETY: the provider passes a structure to fill.
    let attr = unsafe { &mut *attr };
    (attr.max_mr_size, attr.max_qp_wr, attr.max_sge, attr.max_sge_rd) = (1 << 20, 100, 8, 4);
    (attr.max_cqe, attr.max_mr, attr.max_qp, attr.phys_port_cnt) = (50, 7, 9, 2);
    (attr.max_qp_rd_atom, attr.max_qp_init_rd_atom) = (16, 300);
    0
}

unsafe extern "C" fn query_port(_: *mut ibv_context, _: u8, attr: *mut ibv_port_attr) -> c_int {
    // SAFETY: as above.
    let attr = unsafe { &mut *attr };
    (attr.state, attr.active_mtu, attr.link_layer) = (4, 3, IBV_LINK_LAYER_ETHERNET);
    (attr.max_msg_sz, attr.gid_tbl_len) = (1 << 30, 4);
    0
}

unsafe extern "C" fn query_gid(_: *mut ibv_context, _: u8, _: c_int, _: *mut [u8; 16]) -> c_int {
    libc::EINVAL
}

unsafe extern "C" fn query_gid_ex(
    _: *mut ibv_context,
    _: u32,
    index: u32,
    entry: *mut ibv_gid_entry,
    _: u32,
    size: usize,
) -> c_int {
    assert_eq!(size, 32);
    // SAFETY: as above.
    let entry = unsafe { &mut *entry };
    match index {
        0 => {
            (entry.gid, entry.gid_type) = ([7; 16], IBV_GID_TYPE_ROCE_V2);
            0
        }
        1 => libc::ENODATA,
        _ => libc::EINVAL,
    }
}

unsafe extern "C" fn alloc_pd(_: *mut ibv_context) -> *mut ibv_pd {
    make()
}

unsafe extern "C" fn reg_mr(_: *mut ibv_pd, _: *mut c_void, _: usize, access: c_int) -> *mut ibv_mr {
    let mr: *mut ibv_mr = make();
    if !mr.is_null() {
        script(|s| s.registrations.push((access as u32, false)));
    }
    mr
}

unsafe extern "C" fn reg_mr_iova2(
    _: *mut ibv_pd,
    addr: *mut c_void,
    _: usize,
    iova: u64,
    access: u32,
) -> *mut ibv_mr {
    assert_eq!(addr.addr() as u64, iova, "its own address");
    script(|s| s.registrations.push((access, true)));
    make()
}

unsafe extern "C" fn reg_dmabuf_mr(
    _: *mut ibv_pd,
    offset: u64,
    len: usize,
    iova: u64,
    fd: c_int,
    access: c_int,
) -> *mut ibv_mr {
    if fd < 0 {
        set_errno(libc::EBADF);
        return null_mut();
    }
    script(|s| s.dmabufs.push((offset, len, iova, fd, access)));
    make()
}

unsafe extern "C" fn create_channel(context: *mut ibv_context) -> *mut ibv_comp_channel {
    let channel: *mut ibv_comp_channel = make();
    // SAFETY: made above.
    unsafe { ((*channel).context, (*channel).fd) = (context, libc::eventfd(0, 0)) };
    channel
}

unsafe extern "C" fn destroy_channel(channel: *mut ibv_comp_channel) -> c_int {
    // SAFETY: the provider destroys what it made, once.
    unsafe {
        libc::close((*channel).fd);
        free(channel)
    }
}

unsafe extern "C" fn create_cq(
    context: *mut ibv_context,
    cqe: c_int,
    _: *mut c_void,
    channel: *mut ibv_comp_channel,
    _: c_int,
) -> *mut ibv_cq {
    let cq: *mut ibv_cq = make();
    // SAFETY: made above.
    unsafe { ((*cq).context, (*cq).channel, (*cq).cqe) = (context, channel, cqe) };
    cq
}

unsafe extern "C" fn create_qp(_: *mut ibv_pd, attr: *mut ibv_qp_init_attr) -> *mut ibv_qp {
    // SAFETY: the provider passes its attributes, and a completion queue that it made.
    let (cap, context) = unsafe { (&mut (*attr).cap, (*(*attr).send_cq).context) };
    if cap.max_inline_data > script(|s| s.inline_max) {
        set_errno(libc::EINVAL);
        return null_mut();
    }
    cap.max_send_wr = cap.max_send_wr.next_power_of_two();
    let qp: *mut ibv_qp = make();
    if !qp.is_null() {
        // SAFETY: made above.
        unsafe { ((*qp).context, (*qp).qp_num) = (context, 0x77) };
        script(|s| s.last_qp = qp.expose_provenance());
    }
    qp
}

unsafe extern "C" fn modify_qp(_: *mut ibv_qp, attr: *mut ibv_qp_attr, mask: c_int) -> c_int {
    // SAFETY: the provider passes its attributes.
    script(|s| s.steps.push((unsafe { *attr }, mask)));
    script(|s| s.refuse.take()).unwrap_or(0)
}

unsafe extern "C" fn post_send(_: *mut ibv_qp, first: *mut ibv_send_wr, bad: *mut *mut ibv_send_wr) -> c_int {
    let (mut wr, mut seen) = (first, Vec::new());
    let accept = script(|s| s.accept);
    // SAFETY: the provider passes a chain that ends with a null, and its pieces exist.
    unsafe {
        while let Some(request) = wr.as_ref() {
            if let Some((count, result)) = accept
                && seen.len() == count
            {
                *bad = wr;
                script(|s| s.doorbells.push(seen));
                return result;
            }
            let pieces = if request.num_sge == 0 {
                Vec::new()
            } else {
                std::slice::from_raw_parts(request.sg_list, request.num_sge as usize)
                    .iter()
                    .map(|sge| (sge.addr, sge.length, sge.lkey))
                    .collect()
            };
            let (flags, opcode) = (request.send_flags, request.opcode);
            seen.push((request.wr_id, flags, opcode, pieces, request.remote_addr, request.rkey));
            wr = request.next;
        }
    }
    script(|s| s.doorbells.push(seen));
    0
}

unsafe extern "C" fn poll_cq(_: *mut ibv_cq, room: c_int, out: *mut ibv_wc) -> c_int {
    script(|s| {
        if s.poll_fails {
            return -1;
        }
        let count = s.completions.len().min(room as usize);
        for (index, wc) in s.completions.drain(..count).enumerate() {
            // SAFETY: there is room for `room`.
            unsafe { *out.add(index) = wc };
        }
        count as c_int
    })
}

unsafe extern "C" fn req_notify_cq(_: *mut ibv_cq, solicited_only: c_int) -> c_int {
    assert_eq!(solicited_only, 0);
    0
}

unsafe extern "C" fn get_async_event(_: *mut ibv_context, event: *mut ibv_async_event) -> c_int {
    script(|s| {
        let Some((ours, event_type)) = s.events.pop() else { return -1 };
        let element = if ours { std::ptr::with_exposed_provenance_mut(s.last_qp) } else { null_mut() };
        // SAFETY: the provider passes a structure to fill.
        unsafe { *event = ibv_async_event { element, event_type } };
        0
    })
}

unsafe extern "C" fn ack_async_event(_: *mut ibv_async_event) {
    script(|s| s.acknowledged += 1);
}

unsafe extern "C" fn no_cq_event(
    _: *mut ibv_comp_channel,
    _: *mut *mut ibv_cq,
    _: *mut *mut c_void,
) -> c_int {
    -1
}

unsafe extern "C" fn ack_cq_events(_: *mut ibv_cq, _: u32) {}
unsafe extern "C" fn no_list(_: *mut c_int) -> *mut *mut ibv_device {
    null_mut()
}
unsafe extern "C" fn free_list(_: *mut *mut ibv_device) {}
unsafe extern "C" fn no_name(_: *mut ibv_device) -> *const c_char {
    c"fake".as_ptr()
}
unsafe extern "C" fn no_open(_: *mut ibv_device) -> *mut ibv_context {
    null_mut()
}
unsafe extern "C" fn close_device(context: *mut ibv_context) -> c_int {
    // SAFETY: the provider closes the context that `open` below made, once.
    unsafe {
        libc::close((*context).async_fd);
        free(context)
    }
}
unsafe extern "C" fn dealloc_pd(pd: *mut ibv_pd) -> c_int {
    // SAFETY: the provider destroys each object that it made once; so below.
    unsafe { free(pd) }
}
unsafe extern "C" fn dereg_mr(mr: *mut ibv_mr) -> c_int {
    if let Some(errno) = script(|s| s.refuse.take()) {
        return errno;
    }
    // SAFETY: as above.
    unsafe { free(mr) }
}
unsafe extern "C" fn destroy_cq(cq: *mut ibv_cq) -> c_int {
    // SAFETY: as above.
    unsafe { free(cq) }
}
unsafe extern "C" fn destroy_qp(qp: *mut ibv_qp) -> c_int {
    if let Some(errno) = script(|s| s.refuse.take()) {
        return errno;
    }
    // SAFETY: as above.
    unsafe { free(qp) }
}

const FUNCTIONS: Library = Library {
    ibv_get_device_list: no_list,
    ibv_free_device_list: free_list,
    ibv_get_device_name: no_name,
    ibv_open_device: no_open,
    ibv_close_device: close_device,
    ibv_query_device: query_device,
    ibv_query_port: query_port,
    ibv_query_gid: query_gid,
    ibv_get_async_event: get_async_event,
    ibv_ack_async_event: ack_async_event,
    ibv_alloc_pd: alloc_pd,
    ibv_dealloc_pd: dealloc_pd,
    ibv_reg_mr: reg_mr,
    ibv_dereg_mr: dereg_mr,
    ibv_create_comp_channel: create_channel,
    ibv_destroy_comp_channel: destroy_channel,
    ibv_create_cq: create_cq,
    ibv_destroy_cq: destroy_cq,
    ibv_get_cq_event: no_cq_event,
    ibv_ack_cq_events: ack_cq_events,
    ibv_create_qp: create_qp,
    ibv_modify_qp: modify_qp,
    ibv_destroy_qp: destroy_qp,
    reg_mr_iova2: Some(reg_mr_iova2),
    reg_dmabuf_mr: None,
    query_gid_ex: Some(query_gid_ex),
    is_fork_initialized: None,
};

static LIBRARY: Library = FUNCTIONS;
static LIBRARY_WITH_DMABUF: Library = Library { reg_dmabuf_mr: Some(reg_dmabuf_mr), ..FUNCTIONS };

fn open(inline_max: u32) -> SystemVerbs {
    open_with(&LIBRARY, inline_max)
}

fn open_with(library: &'static Library, inline_max: u32) -> SystemVerbs {
    script(|s| *s = Script { inline_max, ..Script::default() });
    let context: *mut ibv_context = make();
    // SAFETY: made above.
    unsafe {
        (*context).async_fd = libc::eventfd(0, 0);
        (*context).ops.post_send = Some(post_send);
        (*context).ops.poll_cq = Some(poll_cq);
        (*context).ops.req_notify_cq = Some(req_notify_cq);
    }
    // SAFETY: made above, and given away.
    let context = unsafe { Context::new(library, NonNull::new(context).unwrap()) }.unwrap();
    SystemVerbs::new(context, "fake", 2, Some(1)).unwrap()
}

const CONFIG: QpConfig = QpConfig { depth: 10, sges: 2, inline_bytes: 100 };

fn open_with_qp() -> (SystemVerbs, Qp) {
    let mut verbs = open(200);
    let qp = verbs.create_qp(CONFIG).unwrap();
    (verbs, qp)
}

fn request(id: u64, sges: u32) -> WorkRequest {
    WorkRequest {
        id,
        op: Op::Write,
        signaled: id.is_multiple_of(2),
        inline: false,
        sges,
        remote_addr: 1_000 + id,
        remote_key: 77,
    }
}

fn post(
    verbs: &mut SystemVerbs,
    qp: QpHandle,
    requests: &[WorkRequest],
    sges: &[Sge],
) -> (usize, Option<i32>) {
    // SAFETY: the fake reads no memory.
    let (taken, error) = unsafe { verbs.post(qp, requests, sges) };
    (taken, error.map(|error| error.code))
}

const SGE: Sge = Sge { addr: 5, len: 6, local_key: 7 };

#[test]
fn limits_are_the_tighter_ones() {
    let verbs = open(0);
    let info = verbs.info();
    assert_eq!((info.name.as_str(), info.port, info.numa_node), ("fake", 2, Some(1)));
    assert_eq!((info.sge_max, info.reads_max, info.cq_depth), (4, 16, 50));
    assert_eq!(
        (info.mr_bytes_max, info.mr_count_max, info.qp_count_max, info.qp_depth_max),
        (1 << 20, 7, 9, 100)
    );
    assert_eq!((info.message_bytes_max, info.features), (1 << 30, DeviceFeatures::RELAXED_ORDERING));
    assert!(verbs.port().unwrap().active);
    assert_eq!(verbs.gid(0).unwrap().unwrap().raw, [7; 16]);
    assert_eq!(verbs.gid(1), Ok(None), "an empty entry is not an error");
    assert_eq!(verbs.gid(2).map_err(|error| error.code), Err(libc::EINVAL));
}

#[test]
fn everything_is_destroyed_in_the_end() {
    let (mut verbs, qp) = open_with_qp();
    let other = verbs.create_qp(CONFIG).unwrap();
    let bytes = MemSpan::new(std::ptr::without_provenance_mut(4096), 64);
    // SAFETY: the fake touches no memory.
    unsafe { verbs.register(bytes, MrAccess::all()) }.unwrap();
    verbs.destroy_qp(other.handle).unwrap();
    assert_eq!(verbs.destroy_qp(other.handle).map_err(|error| error.code), Err(libc::EINVAL), "once");
    script(|s| s.refuse = Some(libc::EBUSY));
    assert_eq!(verbs.destroy_qp(qp.handle).map_err(|error| error.code), Err(libc::EBUSY));
    assert!(verbs.modify_qp(qp.handle, QpStep::Error).is_ok(), "it was not destroyed");
    assert!(script(|s| s.live) > 0);
    drop(verbs);
    assert_eq!(script(|s| s.live), 0);
}

#[test]
fn a_device_that_cannot_be_set_up_is_closed_again() {
    script(|s| *s = Script::default());
    let context = NonNull::new(make::<ibv_context>()).unwrap();
    script(|s| s.refuse = Some(libc::ENOMEM));
    // SAFETY: made above, and given away.
    let refused = unsafe { Context::new(&LIBRARY, context) };
    assert_eq!(refused.err().map(|error| error.code), Some(libc::ENOMEM));
    assert_eq!(script(|s| s.live), 0);
}

#[test]
fn one_doorbell_carries_the_whole_list() {
    let (mut verbs, qp) = open_with_qp();
    let read = WorkRequest { op: Op::Read, ..request(2, 2) };
    let inline = WorkRequest { inline: true, ..request(3, 1) };
    let other = Sge { addr: 8, len: 9, local_key: 10 };
    let requests = [request(0, 1), request(1, 0), read, inline];
    assert_eq!(post(&mut verbs, qp.handle, &requests, &[SGE, other, SGE, other]), (4, None));
    let (s, o) = ((5, 6, 7), (8, 9, 10));
    let chain = vec![
        (0, IBV_SEND_SIGNALED, IBV_WR_RDMA_WRITE, vec![s], 1_000, 77),
        (1, 0, IBV_WR_RDMA_WRITE, vec![], 1_001, 77),
        (2, IBV_SEND_SIGNALED, IBV_WR_RDMA_READ, vec![o, s], 1_002, 77),
        (3, IBV_SEND_INLINE, IBV_WR_RDMA_WRITE, vec![o], 1_003, 77),
    ];
    assert_eq!(script(|s| std::mem::take(&mut s.doorbells)), [chain]);

    // The chain is used again: a short list after a long one has its own end.
    assert_eq!(post(&mut verbs, qp.handle, &[request(9, 1)], &[SGE]), (1, None));
    assert_eq!(script(|s| s.doorbells[0].len()), 1);
    assert_eq!(post(&mut verbs, qp.handle, &[], &[]), (0, None));
    assert_eq!(script(|s| s.doorbells.len()), 1, "an empty list rings no doorbell");
}

#[test]
fn a_long_list_takes_several_doorbells() {
    let (mut verbs, qp) = open_with_qp();
    let requests: Vec<_> = (0..600).map(|id| request(id, 1)).collect();
    assert_eq!(post(&mut verbs, qp.handle, &requests, &vec![SGE; 600]), (600, None));
    let ids: Vec<u64> = script(|s| s.doorbells.iter().flatten().map(|wr| wr.0).collect());
    assert_eq!(ids, (0..600).collect::<Vec<_>>());
    assert_eq!(script(|s| s.doorbells.len()), 3);
}

#[test]
fn the_length_of_a_prefix_that_a_driver_takes_is_returned() {
    let (mut verbs, qp) = open_with_qp();
    let requests: Vec<_> = (0..300).map(|id| request(id, 1)).collect();
    let sges = vec![SGE; 300];
    for (count, result) in [(0, libc::ENOMEM), (3, libc::ENOMEM), (299 - 256, -libc::ENOMEM)] {
        script(|s| s.accept = Some((count, result)));
        let list = &requests[..5.max(count + 1)];
        assert_eq!(post(&mut verbs, qp.handle, list, &sges), (count, Some(libc::ENOMEM)));
    }
    // The second doorbell fails: the requests of the first one count.
    script(|s| s.accept = Some((256, libc::ENOMEM)));
    assert_eq!(post(&mut verbs, qp.handle, &requests, &sges), (300, None), "neither list is longer");
    script(|s| s.accept = Some((200, libc::EINVAL)));
    assert_eq!(post(&mut verbs, qp.handle, &requests, &sges), (200, Some(libc::EINVAL)));
}

#[test]
fn a_list_of_pieces_that_is_too_short_stops_before_the_request() {
    let (mut verbs, qp) = open_with_qp();
    let requests = [request(0, 1), request(1, 2)];
    assert_eq!(post(&mut verbs, qp.handle, &requests, &[SGE, SGE]), (1, Some(libc::EINVAL)));
    assert_eq!(script(|s| s.doorbells.iter().map(Vec::len).collect::<Vec<_>>()), [1]);
    assert_eq!(post(&mut verbs, QpHandle(99), &requests, &[SGE; 3]), (0, Some(libc::EINVAL)));
}

#[test]
fn completions_come_out_in_order_whatever_the_room() {
    let (mut verbs, _) = open_with_qp();
    let wc =
        |id| ibv_wc { wr_id: id, status: if id == 3 { 12 } else { 0 }, qp_num: 0x77, ..ibv_wc::default() };
    script(|s| s.completions = (0..200).map(wc).collect());
    let mut out = [WorkCompletion { id: 0, qp_number: 0, status: WcStatus::Other, code: 0 }; 150];
    assert_eq!(verbs.poll_cq(&mut out[..2]), Ok(2));
    assert_eq!((out[0].id, out[1].id), (0, 1));
    assert_eq!(verbs.poll_cq(&mut out), Ok(150));
    assert_eq!((out[0].id, out[149].id, out[1].status), (2, 151, WcStatus::RetriesExceeded));
    assert_eq!(verbs.poll_cq(&mut out), Ok(48));
    assert_eq!(verbs.poll_cq(&mut out), Ok(0));
    assert_eq!(verbs.poll_cq(&mut []), Ok(0));
    script(|s| s.poll_fails = true);
    assert!(verbs.poll_cq(&mut out).is_err());
}

#[test]
fn inline_is_lowered_to_what_the_device_takes() {
    let mut verbs = open(30);
    let qp = verbs.create_qp(CONFIG).unwrap();
    assert_eq!((qp.number, qp.config.inline_bytes, qp.config.depth), (0x77, 25, 16));
    script(|s| s.refuse = Some(libc::EPERM));
    assert_eq!(verbs.create_qp(QpConfig { inline_bytes: 0, ..CONFIG }).map_err(|e| e.code), Err(libc::EPERM));
}

fn path() -> Path {
    Path {
        peer_qp: 1,
        peer_lid: 2,
        peer_gid: [3; 16],
        gid_index: 4,
        mtu_bytes: 2048,
        peer_psn: 5,
        psn: 6,
        reads_from_peer: 7,
        reads_to_peer: 8,
        traffic_class: 9,
        service_level: 10,
        timeout_exponent: 11,
        retries: 5,
        rnr_retries: 6,
    }
}

#[test]
fn state_changes_set_the_attributes_that_the_manual_page_requires() {
    let (mut verbs, qp) = open_with_qp();
    let access = MrAccess::REMOTE_READ | MrAccess::RELAXED_ORDERING;
    verbs.modify_qp(qp.handle, QpStep::Init(access)).unwrap();
    let path = path();
    verbs.modify_qp(qp.handle, QpStep::Connect(path)).unwrap();
    verbs.modify_qp(qp.handle, QpStep::Error).unwrap();
    let steps = script(|s| std::mem::take(&mut s.steps));
    let [(init, init_mask), (rtr, rtr_mask), (rts, rts_mask), (error, error_mask)] = steps[..] else {
        panic!("{} steps", steps.len())
    };
    // ibv_modify_qp(3), the table of RC.
    assert_eq!((init.qp_state, init_mask), (1, 1 | 1 << 4 | 1 << 5 | 1 << 3));
    assert_eq!((init.port_num, init.pkey_index, init.qp_access_flags), (2, 0, IBV_ACCESS_REMOTE_READ));
    assert_eq!((rtr.qp_state, rtr_mask), (2, 1 | 1 << 7 | 1 << 8 | 1 << 20 | 1 << 12 | 1 << 17 | 1 << 15));
    assert_eq!((rtr.path_mtu, rtr.dest_qp_num, rtr.rq_psn, rtr.max_dest_rd_atomic), (4, 1, 5, 7));
    let ah = rtr.ah_attr;
    assert_eq!((ah.dlid, ah.sl, ah.is_global, ah.port_num), (2, 10, 1, 2));
    assert_eq!((ah.grh.dgid, ah.grh.sgid_index, ah.grh.traffic_class), ([3; 16], 4, 9));
    assert_eq!((rts.qp_state, rts_mask), (3, 1 | 1 << 9 | 1 << 10 | 1 << 11 | 1 << 16 | 1 << 13));
    assert_eq!((rts.sq_psn, rts.timeout, rts.retry_cnt, rts.rnr_retry, rts.max_rd_atomic), (6, 11, 5, 6, 8));
    assert_eq!((error.qp_state, error_mask), (6, 1));

    let odd = Path { mtu_bytes: 1500, ..path };
    assert_eq!(verbs.modify_qp(qp.handle, QpStep::Connect(odd)).map_err(|e| e.code), Err(libc::EINVAL));
    // When the driver refuses the first call, the second is not made.
    script(|s| (s.refuse, s.steps) = (Some(libc::ETIMEDOUT), Vec::new()));
    assert_eq!(verbs.modify_qp(qp.handle, QpStep::Connect(path)).map_err(|e| e.code), Err(libc::ETIMEDOUT));
    assert_eq!(script(|s| s.steps.len()), 1);
}

#[test]
fn relaxed_ordering_takes_the_newer_call_and_nothing_else_does() {
    let verbs = open(0);
    let bytes = MemSpan::new(std::ptr::without_provenance_mut(4096), 64);
    for (access, seen) in [
        (MrAccess::LOCAL_WRITE, (1, false)),
        (MrAccess::LOCAL_WRITE | MrAccess::RELAXED_ORDERING, (1 | 1 << 20, true)),
        (MrAccess::REMOTE_READ, (4, false)),
    ] {
        // SAFETY: the fake touches no memory.
        unsafe { verbs.register(bytes, access) }.unwrap();
        assert_eq!(script(|s| s.registrations.pop()), Some(seen));
    }
    script(|s| s.refuse = Some(libc::ENOMEM));
    // SAFETY: as above.
    let refused = unsafe { verbs.register(bytes, MrAccess::LOCAL_WRITE) };
    assert_eq!(refused.map_err(|error| (error.kind, error.code)), Err((ErrorKind::System, libc::ENOMEM)));
}

#[test]
fn a_dmabuf_is_registered_by_its_descriptor_where_the_library_can() {
    let file = tempfile::tempfile().unwrap();
    let register =
        |verbs: &SystemVerbs| verbs.register_dmabuf(file.as_fd(), 4_096, 64, 0x1000, MrAccess::LOCAL_WRITE);
    let refused = register(&open(0));
    assert_eq!(refused.map_err(|error| error.kind), Err(ErrorKind::Unsupported));

    let verbs = open_with(&LIBRARY_WITH_DMABUF, 0);
    assert!(verbs.info().features.contains(DeviceFeatures::DMABUF));
    let mr = register(&verbs).unwrap();
    assert_eq!(script(|s| s.dmabufs.pop()), Some((4_096, 64, 0x1000, file.as_raw_fd(), 1)));
    verbs.deregister(mr).unwrap();
    drop(verbs);
    assert_eq!(script(|s| s.live), 0);
}

#[test]
fn deregistering_can_be_repeated_when_the_driver_refuses() {
    let verbs = open(0);
    let bytes = MemSpan::new(std::ptr::without_provenance_mut(4096), 64);
    // SAFETY: the fake touches no memory.
    let mr = unsafe { verbs.register(bytes, MrAccess::LOCAL_WRITE) }.unwrap();
    script(|s| s.refuse = Some(libc::EBUSY));
    assert_eq!(verbs.deregister(mr).map_err(|error| error.code), Err(libc::EBUSY));
    assert_eq!(verbs.deregister(mr), Ok(()));
    assert_eq!(verbs.deregister(mr).map_err(|error| error.code), Err(libc::EINVAL));
}

#[test]
fn every_event_is_acknowledged_and_queue_pairs_are_named() {
    let (mut verbs, _) = open_with_qp();
    script(|s| s.events = vec![(false, 9), (true, 3), (false, 3)]);
    let events: Vec<_> = std::iter::from_fn(|| verbs.next_event()).collect();
    assert_eq!(events, [AsyncEvent::Other(3), AsyncEvent::QpError(0x77), AsyncEvent::PortActive]);
    assert_eq!(script(|s| s.acknowledged), 3);
}

#[test]
fn the_handle_of_a_destroyed_queue_pair_stays_invalid() {
    let (mut verbs, first) = open_with_qp();
    verbs.destroy_qp(first.handle).expect("it was made");
    let config = QpConfig { depth: 4, sges: 1, inline_bytes: 0 };
    let mut handles = vec![first.handle];
    for _ in 0..100 {
        let qp = verbs.create_qp(config).expect("a queue pair");
        assert!(!handles.contains(&qp.handle));
        assert!(handles.iter().all(|&old| verbs.destroy_qp(old).is_err()));
        verbs.destroy_qp(qp.handle).expect("it was made");
        handles.push(qp.handle);
    }
    // All of them used one slot.
    assert!(handles.iter().all(|handle| handle.0 as u32 == first.handle.0 as u32));
    assert!(verbs.destroy_qp(QpHandle(u64::MAX)).is_err());
}

#[test]
fn a_queue_pair_that_is_being_connected_is_neither_modified_nor_destroyed() {
    let (mut verbs, qp) = open_with_qp();
    let connect = |verbs: &mut SystemVerbs| match verbs.connect_qp(qp.handle, path()) {
        Ok(Connecting::Later(job)) => job,
        Ok(Connecting::Done) => panic!("on Ethernet the neighbour has to be resolved"),
        Err(error) => panic!("{error}"),
    };
    verbs.modify_qp(qp.handle, QpStep::Init(MrAccess::empty())).unwrap();
    for run in [false, true] {
        let job = connect(&mut verbs);
        let busy = Err(libc::EBUSY);
        assert_eq!(verbs.modify_qp(qp.handle, QpStep::Error).map_err(|error| error.code), busy);
        assert_eq!(verbs.destroy_qp(qp.handle).map_err(|error| error.code), busy);
        assert!(verbs.connect_qp(qp.handle, path()).is_err_and(|error| error.code == libc::EBUSY));
        script(|s| s.steps.clear());
        if run {
            job().unwrap();
            assert_eq!(script(|s| s.steps.iter().map(|(attr, _)| attr.qp_state).collect::<Vec<_>>()), [2, 3]);
        } else {
            drop(job);
            assert_eq!(script(|s| s.steps.len()), 0, "no call was made");
        }
    }
    verbs.destroy_qp(qp.handle).unwrap();
}
