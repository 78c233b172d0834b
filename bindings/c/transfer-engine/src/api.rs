//! The functions of `transfer_engine_c.h`.
//!
//! Each checks what C passes (NULL, lengths, numbers), runs under [`guard`], and returns a number. What the
//! addresses have to satisfy is in the header; it is the contract of every `unsafe` block below.
#![allow(unsafe_code, reason = "the functions of a C interface take addresses")]
#![allow(non_snake_case, reason = "the names are those of Mooncake's header")]
#![allow(unreachable_pub, reason = "the functions are exported to C by their names")]
#![allow(clippy::missing_safety_doc, reason = "the header states what the caller has to promise")]

use std::ffi::{c_char, c_int, c_void};
use std::mem::MaybeUninit;
use std::ptr;

use snowskin_compat::codes::{OK, engine as code, status};
use snowskin_compat::engine::{
    EngineError, Notice, RegionSpan, Request, SegmentNumber, Session, Setup, State,
};
use snowskin_compat::env::Env;
use snowskin_compat::ffi::{array, array_out, bytes, guard, log_to_stderr, text, text_out};
use te_core::Op;

/// An engine, as callers hold it.
type Engine = *mut c_void;

const INVALID_BATCH: u64 = u64::MAX;
/// Protocols that Mooncake can install (`TE/src/multi_transport.cpp`).
const PROTOCOLS: [&str; 19] = [
    "tcp",
    "rdma",
    "efa",
    "cxi",
    "nvmeof",
    "nvlink",
    "nvlink_intra",
    "musa",
    "hip",
    "barex",
    "cxl",
    "ascend",
    "ub",
    "ubshmem",
    "maca",
    "sunrise_link",
    "shm",
    "nccl",
    "local",
];
/// Length of the name in `nic_load_stat_t`, bytes.
const DEVICE_NAME_BYTES: usize = 64;

#[repr(C)]
#[derive(Clone, Copy)]
pub struct TransferRequest {
    opcode: c_int,
    source: *mut c_void,
    target_id: i32,
    target_offset: u64,
    length: u64,
}

#[repr(C)]
pub struct TransferStatus {
    status: c_int,
    transferred_bytes: u64,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct NotifyMsg {
    name: *mut c_char,
    msg: *mut c_char,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct BufferEntry {
    addr: *mut c_void,
    length: usize,
}

#[repr(C)]
pub struct NicLoadStat {
    device_name: [u8; DEVICE_NAME_BYTES],
    inflight_bytes: u64,
    ewma_bandwidth_bps: f64,
}

const _: () = {
    assert!(size_of::<TransferRequest>() == 40);
    assert!(std::mem::offset_of!(TransferRequest, source) == 8);
    assert!(std::mem::offset_of!(TransferRequest, target_id) == 16);
    assert!(std::mem::offset_of!(TransferRequest, target_offset) == 24);
    assert!(std::mem::offset_of!(TransferRequest, length) == 32);
    assert!(
        size_of::<TransferStatus>() == 16 && std::mem::offset_of!(TransferStatus, transferred_bytes) == 8
    );
    assert!(size_of::<NotifyMsg>() == 16 && std::mem::offset_of!(NotifyMsg, msg) == 8);
    assert!(size_of::<BufferEntry>() == 16 && std::mem::offset_of!(BufferEntry, length) == 8);
    assert!(size_of::<NicLoadStat>() == 80);
    assert!(std::mem::offset_of!(NicLoadStat, inflight_bytes) == 64);
    assert!(std::mem::offset_of!(NicLoadStat, ewma_bandwidth_bps) == 72);
};

#[unsafe(no_mangle)]
pub unsafe extern "C" fn createTransferEngine(
    metadata_conn_string: *const c_char,
    local_server_name: *const c_char,
    _ip_or_host_name: *const c_char,
    rpc_port: u64,
    _auto_discover: c_int,
) -> Engine {
    guard(ptr::null_mut(), || {
        log_to_stderr();
        // SAFETY: the header asks for texts that end with a NUL.
        let (metadata, name) = unsafe { (text(metadata_conn_string), text(local_server_name)) };
        let (Some(metadata), Some(name)) = (metadata, name) else {
            log::error!("createTransferEngine: the metadata string or the local name is NULL or not UTF-8");
            return ptr::null_mut();
        };
        let env = Env::of_process();
        let legacy = env.legacy_rpc_port;
        let session = Setup::of(name, metadata, "", "", env).and_then(|mut setup| {
            if legacy && setup.rpc_port.is_none() {
                setup.rpc_port = u16::try_from(rpc_port).ok().filter(|port| *port != 0);
            }
            Session::start(setup)
        });
        match session {
            Ok(session) => Box::into_raw(Box::new(session)).cast(),
            Err(error) => {
                log::error!("createTransferEngine: {error}");
                ptr::null_mut()
            }
        }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn destroyTransferEngine(engine: Engine) {
    guard((), || {
        if !engine.is_null() {
            // SAFETY: the header asks for a handle of `createTransferEngine` that is not in use any more.
            drop(unsafe { Box::from_raw(engine.cast::<Session>()) });
        }
    });
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn getLocalIpAndPort(engine: Engine, buf_out: *mut c_char, buf_len: usize) -> c_int {
    // SAFETY: the header asks for a valid handle, and for `buf_len` writable bytes.
    with(engine, "getLocalIpAndPort", |session| unsafe { put_text(&session.address(), buf_out, buf_len) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn discoverTopology(engine: Engine) -> c_int {
    // SAFETY: the header asks for a valid handle.
    with(engine, "discoverTopology", |_| Ok(()))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn installTransport(
    engine: Engine,
    proto: *const c_char,
    args: *mut *mut c_void,
) -> *mut c_void {
    guard(ptr::null_mut(), || {
        // SAFETY: the header asks for a valid handle, a text, and NULL or an array whose first item is NULL
        // or a text.
        let (proto, matrix) = unsafe {
            let matrix = if args.is_null() { ptr::null_mut() } else { *args };
            (text(proto), (!matrix.is_null()).then(|| text(matrix.cast())))
        };
        let known = proto.is_some_and(|proto| PROTOCOLS.contains(&proto));
        if engine.is_null() || !known {
            log::error!("installTransport: the engine is NULL, or {proto:?} is not a protocol");
            return ptr::null_mut();
        }
        let Some(matrix) = matrix else { return engine };
        match te_host::topology::parse_matrix(matrix.unwrap_or_default()) {
            Ok(_) => {
                log::warn!(
                    "installTransport: the engine has started, and uses the priority matrix only as the file that \
                     MC_CUSTOM_TOPO_JSON names"
                );
                engine
            }
            Err(error) => {
                log::error!("installTransport: the priority matrix: {error}");
                ptr::null_mut()
            }
        }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn uninstallTransport(engine: Engine, proto: *const c_char) -> c_int {
    with(engine, "uninstallTransport", |_| if proto.is_null() { Err(null("protocol")) } else { Ok(()) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn enableGracefulShutdown(_engine: Engine) {}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn registerLocalMemory(
    engine: Engine,
    addr: *mut c_void,
    length: usize,
    location: *const c_char,
    remote_accessible: c_int,
) -> c_int {
    with(engine, "registerLocalMemory", |session| {
        // SAFETY: the header asks for NULL or a text, and for memory that stays mapped until
        // `unregisterLocalMemory`.
        unsafe {
            session.register(addr.addr() as u64, length as u64, place(location)?, remote_accessible != 0)
        }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn unregisterLocalMemory(engine: Engine, addr: *mut c_void) -> c_int {
    with(engine, "unregisterLocalMemory", |session| session.unregister(addr.addr() as u64))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn registerLocalMemoryBatch(
    engine: Engine,
    buffer_list: *mut BufferEntry,
    buffer_len: usize,
    location: *const c_char,
) -> c_int {
    with(engine, "registerLocalMemoryBatch", |session| {
        // SAFETY: the header asks for an array of `buffer_len` entries.
        let entries = unsafe { array(buffer_list, buffer_len) }.ok_or_else(|| null("list of buffers"))?;
        let span =
            |entry: &BufferEntry| RegionSpan { addr: entry.addr.addr() as u64, len: entry.length as u64 };
        let spans: Vec<RegionSpan> = entries.iter().map(span).collect();
        // SAFETY: as in `registerLocalMemory`.
        unsafe { session.register_all(&spans, place(location)?) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn unregisterLocalMemoryBatch(
    engine: Engine,
    addr_list: *mut *mut c_void,
    addr_len: usize,
) -> c_int {
    with(engine, "unregisterLocalMemoryBatch", |session| {
        // SAFETY: the header asks for an array of `addr_len` addresses.
        let addrs = unsafe { array(addr_list, addr_len) }.ok_or_else(|| null("list of addresses"))?;
        let addrs: Vec<u64> = addrs.iter().map(|addr| addr.addr() as u64).collect();
        session.unregister_all(&addrs)
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn openSegment(engine: Engine, segment_name: *const c_char) -> i32 {
    // SAFETY: the header asks for a text.
    opened(engine, "openSegment", |session| session.open_segment(unsafe { name_of(segment_name)? }))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn openSegmentNoCache(engine: Engine, segment_name: *const c_char) -> i32 {
    // SAFETY: the header asks for a text.
    opened(engine, "openSegmentNoCache", |session| session.reopen_segment(unsafe { name_of(segment_name)? }))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn closeSegment(engine: Engine, segment_id: i32) -> c_int {
    with(engine, "closeSegment", |session| session.close_segment(number_of(segment_id)?))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn syncSegmentCache(engine: Engine) -> c_int {
    with(engine, "syncSegmentCache", |session| {
        if let Err(error) = session.refresh_segments() {
            // A peer that is gone must not fail a call about all of them; its next use reports it.
            log::warn!("syncSegmentCache: {error}");
        }
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn removeLocalSegment(engine: Engine, segment_name: *const c_char) -> c_int {
    // SAFETY: the header asks for a text.
    with(engine, "removeLocalSegment", |_| unsafe { name_of(segment_name) }.map(drop))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn warmupEfaSegment(engine: Engine, segment_name: *const c_char) -> c_int {
    // SAFETY: the header asks for a text.
    with(engine, "warmupEfaSegment", |_| unsafe { name_of(segment_name) }.map(drop))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn allocateBatchID(engine: Engine, batch_size: usize) -> u64 {
    guard(INVALID_BATCH, || {
        // SAFETY: the header asks for a valid handle.
        let Some(session) = (unsafe { session_of(engine) }) else { return INVALID_BATCH };
        session.allocate_batch(batch_size).unwrap_or_else(|error| {
            log::error!("allocateBatchID: {error}");
            INVALID_BATCH
        })
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn submitTransfer(
    engine: Engine,
    batch_id: u64,
    entries: *mut TransferRequest,
    count: usize,
) -> c_int {
    // SAFETY: the header asks for an array of `count` requests, whose local memory stays mapped until
    // `getTransferStatus` has reported their ends.
    with_batch(engine, "submitTransfer", |session| unsafe { submit(session, batch_id, entries, count, None) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn submitTransferWithNotify(
    engine: Engine,
    batch_id: u64,
    entries: *mut TransferRequest,
    count: usize,
    notify_msg: NotifyMsg,
) -> c_int {
    with_batch(engine, "submitTransferWithNotify", |session| {
        // SAFETY: as in `submitTransfer`, and two texts.
        unsafe { submit(session, batch_id, entries, count, Some(notice_of(notify_msg)?)) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn getTransferStatus(
    engine: Engine,
    batch_id: u64,
    task_id: usize,
    status: *mut TransferStatus,
) -> c_int {
    with_batch(engine, "getTransferStatus", |session| {
        // SAFETY: the header asks for a place for one status.
        let out = unsafe { array_out(status, 1) }.and_then(<[_]>::first_mut);
        let out: &mut MaybeUninit<TransferStatus> = out.ok_or_else(|| null("status"))?;
        let known = session.task_status(batch_id, task_id)?;
        let status = match known.state {
            State::Waiting => 0,
            State::Pending => 1,
            State::Completed => 4,
            // Callers take every other number for success.
            _ => 6,
        };
        out.write(TransferStatus { status, transferred_bytes: known.bytes });
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn freeBatchID(engine: Engine, batch_id: u64) -> c_int {
    with_batch(engine, "freeBatchID", |session| session.free_batch(batch_id))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn genNotifyInEngine(engine: Engine, target_id: u64, notify_msg: NotifyMsg) -> c_int {
    with(engine, "genNotifyInEngine", |session| {
        let target = i32::try_from(target_id).map_err(|_| unknown_segment(target_id))?;
        // SAFETY: the header asks for two texts.
        let Notice { name, message } = unsafe { notice_of(notify_msg)? };
        session.notify(number_of(target)?, &name, &message)
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn getNotifsFromEngine(engine: Engine, size: *mut c_int) -> *mut NotifyMsg {
    guard(ptr::null_mut(), || {
        // SAFETY: the header asks for a valid handle, and for a place for one number.
        let (session, size) = unsafe { (session_of(engine), array_out(size, 1)) };
        let Some(size) = size.and_then(<[_]>::first_mut) else { return ptr::null_mut() };
        size.write(0);
        let Some(session) = session else { return ptr::null_mut() };
        let taken = session.take_notifications();
        let Ok(count @ 1..) = c_int::try_from(taken.len()) else { return ptr::null_mut() };
        // SAFETY: `malloc` and its result, which is checked. Every item is written before it is counted, and
        // `freeNotifsMsgBuf` frees what was counted.
        unsafe {
            let list = libc::malloc(taken.len() * size_of::<NotifyMsg>()).cast::<NotifyMsg>();
            if list.is_null() {
                return ptr::null_mut();
            }
            for (index, message) in taken.iter().enumerate() {
                let (name, msg) = (copy_text(message.name.as_bytes()), copy_text(&message.message));
                list.add(index).write(NotifyMsg { name, msg });
            }
            size.write(count);
            list
        }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn freeNotifsMsgBuf(msg: *mut NotifyMsg, size: c_int) -> c_int {
    guard(code::INVALID_ARGUMENT, || {
        // SAFETY: the header asks for what `getNotifsFromEngine` returned, which came from `malloc`; `free`
        // ignores NULL.
        unsafe {
            for message in array(msg, usize::try_from(size).unwrap_or(0)).unwrap_or_default() {
                libc::free(message.name.cast());
                libc::free(message.msg.cast());
            }
            libc::free(msg.cast());
        }
        OK
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn getNicLoadStats(
    engine: Engine,
    stats: *mut NicLoadStat,
    count: *mut usize,
) -> c_int {
    with(engine, "getNicLoadStats", |session| {
        if stats.is_null() || count.is_null() {
            return Err(null("list, or its length,"));
        }
        // SAFETY: the header asks for a number, and for an array of as many items.
        let (count, out) = unsafe { (&mut *count, array_out(stats, *count)) };
        let loads = session.rail_loads();
        for (place, load) in out.ok_or_else(|| null("list"))?.iter_mut().zip(&loads) {
            let mut device_name = [0; DEVICE_NAME_BYTES];
            for (place, byte) in device_name[..DEVICE_NAME_BYTES - 1].iter_mut().zip(load.name.bytes()) {
                *place = byte;
            }
            let (inflight_bytes, ewma_bandwidth_bps) = (load.inflight_bytes, load.bits_per_s);
            place.write(NicLoadStat { device_name, inflight_bytes, ewma_bandwidth_bps });
        }
        *count = loads.len();
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn showLinks(
    engine: Engine,
    buf_out: *mut c_char,
    buf_len: usize,
    json: c_int,
) -> c_int {
    with(engine, "showLinks", |session| {
        // SAFETY: the header asks for `buf_len` writable bytes.
        unsafe { put_text(&session.links(json != 0), buf_out, buf_len) }
    })
}

/// The session of a handle.
///
/// # Safety
/// `engine` is NULL, or a handle that is not destroyed during `'a`.
unsafe fn session_of<'a>(engine: Engine) -> Option<&'a Session> {
    // SAFETY: the caller's promise: handles come from `Box::into_raw`.
    unsafe { engine.cast::<Session>().as_ref() }
}

/// Runs `run` on the session of a handle, and returns 0 or a negative number.
fn with(engine: Engine, what: &str, run: impl FnOnce(&Session) -> Result<(), EngineError>) -> c_int {
    run_on(engine, what, code::INVALID_ARGUMENT, EngineError::code, run)
}

/// Runs `run` on the session of a handle, and returns 0 or a positive number.
fn with_batch(engine: Engine, what: &str, run: impl FnOnce(&Session) -> Result<(), EngineError>) -> c_int {
    run_on(engine, what, status::INVALID_ARGUMENT, EngineError::status, run)
}

fn run_on(
    engine: Engine,
    what: &str,
    invalid: c_int,
    number: fn(&EngineError) -> i32,
    run: impl FnOnce(&Session) -> Result<(), EngineError>,
) -> c_int {
    guard(invalid, || {
        // SAFETY: every function of the header asks for a valid handle.
        let Some(session) = (unsafe { session_of(engine) }) else {
            log::error!("{what}: the engine is NULL");
            return invalid;
        };
        match run(session) {
            Ok(()) => OK,
            Err(error) => {
                log::warn!("{what}: {error}");
                number(&error)
            }
        }
    })
}

fn opened(
    engine: Engine,
    what: &str,
    open: impl FnOnce(&Session) -> Result<SegmentNumber, EngineError>,
) -> i32 {
    let mut number = code::INVALID_ARGUMENT;
    let result = with(engine, what, |session| {
        number = open(session)?.to_raw();
        Ok(())
    });
    if result == OK { number } else { result }
}

/// Adds requests to a batch.
///
/// # Safety
/// `entries` is NULL or an array of `count` requests, whose local memory stays mapped until they are over.
unsafe fn submit(
    session: &Session,
    batch: u64,
    entries: *const TransferRequest,
    count: usize,
    notice: Option<Notice>,
) -> Result<(), EngineError> {
    // SAFETY: the caller's promise.
    let entries = unsafe { array(entries, count) }.ok_or_else(|| null("list of requests"))?;
    let requests = entries.iter().map(request_of).collect::<Result<Vec<_>, _>>()?;
    // SAFETY: the caller's promise.
    unsafe { session.submit(batch, &requests, notice.as_ref()) }
}

fn request_of(entry: &TransferRequest) -> Result<Request, EngineError> {
    let op = match entry.opcode {
        0 => Op::Read,
        1 => Op::Write,
        other => {
            return Err(EngineError::Argument(format!(
                "{other} is not an opcode: use 0 (READ) or 1 (WRITE)"
            )));
        }
    };
    Ok(Request {
        op,
        local: entry.source.addr() as u64,
        segment: number_of(entry.target_id)?,
        remote: entry.target_offset,
        len: entry.length,
    })
}

/// The texts of a message.
///
/// # Safety
/// Both are NULL or texts that end with a NUL.
unsafe fn notice_of(message: NotifyMsg) -> Result<Notice, EngineError> {
    // SAFETY: the caller's promise.
    let (name, message) = unsafe { (text(message.name), bytes(message.msg)) };
    let name = name.ok_or_else(|| null("name of the notification"))?;
    let message = message.ok_or_else(|| null("text of the notification"))?;
    Ok(Notice { name: name.to_owned(), message: message.to_vec() })
}

fn number_of(segment: i32) -> Result<SegmentNumber, EngineError> {
    SegmentNumber::from_raw(segment).ok_or_else(|| unknown_segment(segment))
}

fn unknown_segment(number: impl std::fmt::Display) -> EngineError {
    EngineError::Argument(format!("{number} is not the id of a segment: open it first"))
}

/// The name of a segment.
///
/// # Safety
/// `name` is NULL or a text that ends with a NUL and outlives `'a`.
unsafe fn name_of<'a>(name: *const c_char) -> Result<&'a str, EngineError> {
    // SAFETY: the caller's promise.
    unsafe { text(name) }.ok_or_else(|| null("name of the segment"))
}

/// The location of memory; NULL stands for any.
///
/// # Safety
/// `location` is NULL or a text that ends with a NUL and outlives `'a`.
unsafe fn place<'a>(location: *const c_char) -> Result<&'a str, EngineError> {
    if location.is_null() {
        return Ok("*");
    }
    // SAFETY: the caller's promise.
    unsafe { text(location) }.ok_or_else(|| null("location"))
}

/// Writes a text to a buffer.
///
/// # Safety
/// `out` is NULL or the address of `len` writable bytes.
unsafe fn put_text(text: &str, out: *mut c_char, len: usize) -> Result<(), EngineError> {
    // SAFETY: the caller's promise.
    if unsafe { text_out(text, out, len) } {
        return Ok(());
    }
    Err(EngineError::Argument(format!(
        "the buffer of {len} bytes is NULL or too short for {} bytes",
        text.len() + 1
    )))
}

/// A copy of a text up to its first NUL, from `malloc`. NULL if there is no memory.
fn copy_text(text: &[u8]) -> *mut c_char {
    let text = text.split(|byte| *byte == 0).next().unwrap_or_default();
    // SAFETY: `malloc` and its result, which is checked and has room for the text and its NUL.
    unsafe {
        let copy = libc::malloc(text.len() + 1).cast::<u8>();
        if !copy.is_null() {
            ptr::copy_nonoverlapping(text.as_ptr(), copy, text.len());
            copy.add(text.len()).write(0);
        }
        copy.cast()
    }
}

fn null(what: &str) -> EngineError {
    EngineError::Argument(format!("the {what} is NULL, misaligned, too long or not UTF-8"))
}
