//! The Transfer Engine: `snowskin_engine_*`, `snowskin_peer_*`, `snowskin_transfer_*`.
#![allow(unsafe_code, reason = "the functions of a C interface take addresses")]
#![allow(unreachable_pub, reason = "the functions are exported to C by their names")]
#![allow(clippy::missing_safety_doc, reason = "the header states what the caller has to promise")]

use std::collections::{BTreeMap, VecDeque};
use std::ffi::{CString, c_char, c_void};
use std::ptr;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use snowskin_compat::ffi::array;
use te_core::{Access, MemSpan, Op, RegionId};
use te_engine::{Config, LocalAddr, RegisterError, SegmentHandle, TransferEngine, TransferRequest};

use crate::fault::{Code, Fault, answer, fabrics, free, object, of_status, option, options, place};
use crate::store::listen;

/// What `snowskin_engine *` points to.
pub struct Engine {
    engine: TransferEngine,
    name: CString,
    /// Registered memory by first address.
    regions: Mutex<BTreeMap<u64, RegionId>>,
    /// Notifications that were taken from the engine and not yet by the caller.
    taken: Mutex<VecDeque<te_engine::Notification>>,
}

/// What `snowskin_peer *` points to.
pub struct Peer {
    engine: TransferEngine,
    segment: SegmentHandle,
}

/// What `snowskin_transfer *` points to.
pub struct Transfer(te_engine::Transfer);

/// What `snowskin_notification *` points to.
pub struct Notification {
    name: CString,
    message: Vec<u8>,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct EngineOptions {
    size: usize,
    host: *const c_char,
    fabrics: *const c_char,
    cluster_secret: *const c_char,
    port: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct Copy {
    direction: u32,
    peer: *const Peer,
    local: *mut c_void,
    remote: u64,
    length: u64,
}

const _: () = {
    assert!(size_of::<EngineOptions>() == 40 && std::mem::offset_of!(EngineOptions, port) == 32);
    assert!(size_of::<Copy>() == 40 && std::mem::offset_of!(Copy, peer) == 8);
};

/// `SNOWSKIN_REMOTE_READ` and `SNOWSKIN_REMOTE_WRITE`.
const REMOTE_READ: u32 = 1;
const REMOTE_WRITE: u32 = 2;
/// How long a stop waits for transfers that were not freed before.
const STOP_MAX: Duration = Duration::from_secs(2);

#[unsafe(no_mangle)]
pub unsafe extern "C" fn snowskin_engine_start(
    given: *const EngineOptions,
    engine: *mut *mut Engine,
    error: *mut *mut Fault,
) -> Code {
    const DEFAULT: EngineOptions = EngineOptions {
        size: size_of::<EngineOptions>(),
        host: ptr::null(),
        fabrics: ptr::null(),
        cluster_secret: ptr::null(),
        port: 0,
    };
    answer(error, || {
        // SAFETY: the header asks for a place for a handle, and for NULL or options with texts.
        let (out, host, names, secret, port) = unsafe {
            let given = options(given, DEFAULT)?;
            let host = option(given.host, "host")?.unwrap_or("127.0.0.1");
            let secret = option(given.cluster_secret, "cluster_secret")?.unwrap_or_default();
            (place(engine), host, option(given.fabrics, "fabrics")?, secret, given.port)
        };
        let out = out.ok_or_else(|| Fault::null("engine"))?;
        let port = u16::try_from(port).map_err(|_| Fault::argument(format!("{port} is not a port")))?;
        let mut config = Config { fabrics: fabrics(names)?, ..Config::default() };
        (config.listen, config.advertise_host) = listen(host, port);
        config.cluster_secret = secret.into();
        let engine = TransferEngine::start(config)?;
        let name = CString::new(engine.name()).map_err(|_| Fault::argument("`host` has a NUL"))?;
        let (regions, taken) = (Mutex::default(), Mutex::default());
        out.write(Box::into_raw(Box::new(Engine { engine, name, regions, taken })));
        Ok(Code::Ok)
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn snowskin_engine_stop(engine: *mut Engine) {
    // SAFETY: the header asks for NULL or a handle that is not used any more.
    unsafe { free(engine) };
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn snowskin_engine_name(engine: *const Engine) -> *const c_char {
    // SAFETY: the header asks for NULL or a handle.
    unsafe { engine.as_ref() }.map_or(ptr::null(), |engine| engine.name.as_ptr())
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn snowskin_engine_register(
    engine: *mut Engine,
    memory: *mut c_void,
    length: usize,
    remote: u32,
    error: *mut *mut Fault,
) -> Code {
    answer(error, || {
        // SAFETY: the header asks for a handle.
        let engine = unsafe { object(engine, "engine")? };
        if remote & !(REMOTE_READ | REMOTE_WRITE) != 0 {
            return Err(Fault::argument(format!("{remote} is not a sum of SNOWSKIN_REMOTE_...")));
        }
        let mut access = Access::LOCAL;
        access.set(Access::REMOTE_READ, remote & REMOTE_READ != 0);
        access.set(Access::REMOTE_WRITE, remote & REMOTE_WRITE != 0);
        let addr = memory.addr() as u64;
        if addr == 0 || addr.checked_add(length as u64).is_none() || isize::try_from(length).is_err() {
            return Err(Fault::null("memory"));
        }
        let mut regions = engine.regions();
        // SAFETY: the header asks for memory that stays mapped until it is unregistered.
        let region = unsafe { engine.engine.register(MemSpan::new(memory.cast(), length), access)? };
        regions.insert(addr, region);
        Ok(Code::Ok)
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn snowskin_engine_unregister(
    engine: *mut Engine,
    memory: *mut c_void,
    error: *mut *mut Fault,
) -> Code {
    answer(error, || {
        // SAFETY: the header asks for a handle.
        let engine = unsafe { object(engine, "engine")? };
        let addr = memory.addr() as u64;
        let mut regions = engine.regions();
        let Some(&region) = regions.get(&addr) else {
            return Err(Fault::new(Code::NotFound, format!("no registered memory begins at {addr:#x}")));
        };
        engine.engine.unregister(region)?;
        regions.remove(&addr);
        Ok(Code::Ok)
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn snowskin_engine_open(
    engine: *mut Engine,
    name: *const c_char,
    peer: *mut *mut Peer,
    error: *mut *mut Fault,
) -> Code {
    answer(error, || {
        // SAFETY: the header asks for a handle, a text, and a place for a handle.
        let (engine, name, out) = unsafe { (object(engine, "engine")?, option(name, "name")?, place(peer)) };
        let (Some(name), Some(out)) = (name, out) else { return Err(Fault::null("name, or peer,")) };
        let segment = engine.engine.open_segment(name)?;
        out.write(Box::into_raw(Box::new(Peer { engine: engine.engine.clone(), segment })));
        Ok(Code::Ok)
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn snowskin_peer_refresh(peer: *mut Peer, error: *mut *mut Fault) -> Code {
    answer(error, || {
        // SAFETY: the header asks for a handle.
        let peer = unsafe { object(peer, "peer")? };
        peer.engine.refresh_segment(peer.segment)?;
        Ok(Code::Ok)
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn snowskin_peer_close(peer: *mut Peer) {
    // SAFETY: the header asks for NULL or a handle that is not used any more.
    unsafe { free(peer) };
}

impl Drop for Peer {
    fn drop(&mut self) {
        // A segment that transfers still use stays until the engine stops.
        let _ = self.engine.close_segment(self.segment);
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn snowskin_engine_submit(
    engine: *mut Engine,
    copies: *const Copy,
    count: usize,
    timeout_ms: u32,
    transfer: *mut *mut Transfer,
    error: *mut *mut Fault,
) -> Code {
    answer(error, || {
        // SAFETY: the header asks for a handle, an array of copies, and a place for a handle.
        let (engine, copies, out) =
            unsafe { (object(engine, "engine")?, array(copies, count), place(transfer)) };
        let (Some(copies), Some(out)) = (copies, out) else {
            return Err(Fault::null("copies, or transfer,"));
        };
        let request = |copy: &Copy| {
            let op = match copy.direction {
                0 => Op::Read,
                1 => Op::Write,
                other => {
                    return Err(Fault::argument(format!(
                        "{other} is not a direction: use SNOWSKIN_READ or SNOWSKIN_WRITE"
                    )));
                }
            };
            // SAFETY: the header asks for the handle of a peer in each copy.
            let segment = unsafe { object(copy.peer, "peer")? }.segment;
            let local = LocalAddr::from(copy.local.cast::<u8>());
            Ok(TransferRequest { op, local, segment, remote_addr: copy.remote, len: copy.length })
        };
        let requests = copies.iter().map(request).collect::<Result<Vec<_>, _>>()?;
        let timeout = (timeout_ms > 0).then(|| Duration::from_millis(timeout_ms.into()));
        let transfer = engine.engine.submit(&requests, timeout)?;
        out.write(Box::into_raw(Box::new(Transfer(transfer))));
        Ok(Code::Ok)
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn snowskin_transfer_poll(transfer: *const Transfer) -> Code {
    answer(ptr::null_mut(), || {
        // SAFETY: the header asks for a handle.
        let transfer = unsafe { object(transfer, "transfer")? };
        Ok(of_status(transfer.0.status()))
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn snowskin_transfer_wait(
    transfer: *mut Transfer,
    timeout_ms: u32,
    error: *mut *mut Fault,
) -> Code {
    answer(error, || {
        // SAFETY: the header asks for a handle.
        let transfer = unsafe { object(transfer, "transfer")? };
        let timeout = (timeout_ms != u32::MAX).then(|| Duration::from_millis(timeout_ms.into()));
        match transfer.0.wait(timeout) {
            Ok(_) => Ok(Code::Ok),
            Err(te_engine::TransferError::WaitTimedOut) => Ok(Code::Pending),
            Err(error) => Err(error.into()),
        }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn snowskin_transfer_cancel(transfer: *mut Transfer) {
    let _ = answer(ptr::null_mut(), || {
        // SAFETY: the header asks for NULL or a handle.
        unsafe { object(transfer, "transfer")? }.0.cancel();
        Ok(Code::Ok)
    });
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn snowskin_transfer_free(transfer: *mut Transfer) {
    let _ = answer(ptr::null_mut(), || {
        // SAFETY: the header asks for NULL or a handle that is not used any more.
        let Transfer(transfer) = unsafe { object(transfer, "transfer")? };
        transfer.cancel();
        // However it ended: it has.
        let _ = transfer.wait(None);
        Ok(Code::Ok)
    });
    // SAFETY: as above.
    unsafe { free(transfer) };
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn snowskin_peer_notify(
    peer: *mut Peer,
    name: *const c_char,
    message: *const c_void,
    length: usize,
    error: *mut *mut Fault,
) -> Code {
    answer(error, || {
        // SAFETY: the header asks for a handle, a text, and `length` readable bytes.
        let (peer, name, message) =
            unsafe { (object(peer, "peer")?, option(name, "name")?, array(message.cast::<u8>(), length)) };
        let (Some(name), Some(message)) = (name, message) else {
            return Err(Fault::null("name, or message,"));
        };
        peer.engine.notify(peer.segment, name, message)?;
        Ok(Code::Ok)
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn snowskin_engine_take_notification(engine: *mut Engine) -> *mut Notification {
    let mut oldest = None;
    let _ = answer(ptr::null_mut(), || {
        // SAFETY: the header asks for NULL or a handle.
        let engine = unsafe { object(engine, "engine")? };
        let mut taken = engine.taken.lock().unwrap_or_else(PoisonError::into_inner);
        if taken.is_empty() {
            taken.extend(engine.engine.take_notifications());
        }
        oldest = taken.pop_front();
        Ok(Code::Ok)
    });
    oldest.map_or(ptr::null_mut(), |oldest| {
        let mut name = oldest.name.into_bytes();
        name.retain(|byte| *byte != 0);
        let name = CString::new(name).unwrap_or_default();
        Box::into_raw(Box::new(Notification { name, message: oldest.message }))
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn snowskin_notification_name(notification: *const Notification) -> *const c_char {
    // SAFETY: the header asks for NULL or a handle.
    unsafe { notification.as_ref() }.map_or(c"".as_ptr(), |notification| notification.name.as_ptr())
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn snowskin_notification_message(
    notification: *const Notification,
    length: *mut usize,
) -> *const c_void {
    // SAFETY: the header asks for NULL or a handle, and for NULL or a place.
    let (message, out) = unsafe {
        let message = notification.as_ref().map_or(&[][..], |notification| notification.message.as_slice());
        (message, place(length))
    };
    if let Some(out) = out {
        out.write(message.len());
    }
    message.as_ptr().cast()
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn snowskin_notification_free(notification: *mut Notification) {
    // SAFETY: the header asks for NULL or a handle that is not used any more.
    unsafe { free(notification) };
}

/// Peers and transfers that the caller has not freed keep the engine running: the memory is unreachable from
/// here on nevertheless.
impl Drop for Engine {
    fn drop(&mut self) {
        let until = Instant::now() + STOP_MAX;
        let mut left = std::mem::take(&mut *self.regions());
        loop {
            left.retain(|_, region| {
                matches!(self.engine.unregister(*region), Err(RegisterError::Busy { .. }))
            });
            if left.is_empty() || Instant::now() >= until {
                break;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

impl Engine {
    fn regions(&self) -> MutexGuard<'_, BTreeMap<u64, RegionId>> {
        self.regions.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
