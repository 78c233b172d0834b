//! Counts calls, and makes calls fail.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::ffi::c_int;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::model::{CAPTURE_UNSUPPORTED, NOT_INITIALIZED, state};

#[derive(Default)]
struct Calls {
    count: u64,
    /// The call that fails, counted down, and its code.
    fails: Option<(u64, c_int)>,
    /// All calls fail with this.
    always: Option<c_int>,
}

static CALLS: Mutex<BTreeMap<String, Calls>> = Mutex::new(BTreeMap::new());
static BLOCKING: AtomicU64 = AtomicU64::new(0);
static WRONG: AtomicU64 = AtomicU64::new(0);
static FREED_WHILE_OPEN: AtomicU64 = AtomicU64::new(0);

thread_local! {
    /// The call that runs works, and returns this error of earlier work.
    static LATE: Cell<c_int> = const { Cell::new(0) };
    /// Calls of this thread that may have waited.
    static BLOCKING_HERE: Cell<u64> = const { Cell::new(0) };
}

fn calls() -> MutexGuard<'static, BTreeMap<String, Calls>> {
    CALLS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Functions that wait for the device or the kernel, or may.
const BLOCKING_CALLS: &[&str] = &[
    "MemAlloc_v2",
    "Malloc",
    "MemFree_v2",
    "Free",
    "MemHostRegister_v2",
    "HostRegister",
    "MemHostUnregister",
    "HostUnregister",
    "ModuleLoadDataEx",
    "ModuleUnload",
    "StreamCreateWithPriority",
    "StreamDestroy_v2",
    "StreamDestroy",
    "EventCreate",
    "EventCreateWithFlags",
    "EventDestroy_v2",
    "EventDestroy",
    "MemcpyHtoD_v2",
    "MemcpyHtoD",
    "MemcpyDtoH_v2",
    "MemcpyDtoH",
    "MemCreate",
    "MemRelease",
    "MemAddressReserve",
    "MemAddressFree",
    "MemMap",
    "MemUnmap",
    "MemSetAccess",
    "MemExportToShareableHandle",
    "MemGetHandleForAddressRange",
    "FlushGPUDirectRDMAWrites",
    "IpcGetMemHandle",
    "IpcOpenMemHandle_v2",
    "IpcCloseMemHandle",
    "MemImportFromShareableHandle",
    "MemRetainAllocationHandle",
    "DeviceCanAccessPeer",
    "DevicePrimaryCtxRetain",
    "DevicePrimaryCtxRelease_v2",
    "Init",
];

/// Functions that give something back: when they fail on request, they have worked.
const GIVING_BACK: &[&str] = &[
    "MemFree_v2",
    "Free",
    "MemHostUnregister",
    "HostUnregister",
    "ModuleUnload",
    "StreamDestroy_v2",
    "StreamDestroy",
    "EventDestroy_v2",
    "EventDestroy",
    "MemRelease",
    "MemAddressFree",
    "MemUnmap",
    "IpcCloseMemHandle",
    "DevicePrimaryCtxRelease_v2",
];

/// Functions that have worked when they fail on request with this code.
const SOMETIMES: &[&str] = &["CtxPushCurrent_v2", "CtxPopCurrent_v2", "SetDevice"];
const LATE_CODE: c_int = 304;

/// Functions that a capture forbids to threads whose mode is not relaxed.
const UNSAFE_IN_CAPTURES: &[&str] =
    &["MemAlloc_v2", "Malloc", "MemHostRegister_v2", "HostRegister", "StreamQuery", "EventQuery"];

/// Functions that may be called before the driver was started.
const EARLY: &[&str] = &["Init", "DriverGetVersion", "GetProcAddress_v2", "GetErrorName", "DrvGetErrorName"];

/// Functions that work in a context that has ended, too.
const AFTERWARDS: &[&str] = &[
    "CtxPushCurrent_v2",
    "CtxPopCurrent_v2",
    "CtxGetCurrent",
    "ThreadExchangeStreamCaptureMode",
    "DevicePrimaryCtxRelease_v2",
    "GetDevice",
    "SetDevice",
];

/// Counts a call.
///
/// # Errors
/// What the call fails with.
pub(crate) fn enter(name: &str) -> Result<(), c_int> {
    let bare = name.trim_start_matches("cu").trim_start_matches("hip");
    if BLOCKING_CALLS.contains(&bare) {
        may_block();
    }
    let mut calls = calls();
    let entry = calls.entry(name.to_owned()).or_default();
    entry.count += 1;
    if let Some(code) = entry.always {
        return Err(code);
    }
    if let Some((left, code)) = &mut entry.fails {
        *left -= 1;
        if *left == 0 {
            let code = *code;
            entry.fails = None;
            if GIVING_BACK.contains(&bare) || (code == LATE_CODE && SOMETIMES.contains(&bare)) {
                LATE.set(code);
                return Ok(());
            }
            return Err(code);
        }
    }
    drop(calls);
    let state = state();
    if state.is_capturing && UNSAFE_IN_CAPTURES.contains(&bare) && crate::calls::CAPTURE_MODE.get() != 2 {
        return Err(CAPTURE_UNSUPPORTED);
    }
    match state.is_initialized || EARLY.contains(&bare) {
        true if state.sticky != 0 && !EARLY.contains(&bare) && !AFTERWARDS.contains(&bare) => {
            Err(state.sticky)
        }
        true => Ok(()),
        false => Err(NOT_INITIALIZED),
    }
}

/// The code that a call returns.
pub(crate) fn leave(name: &str, result: Result<(), c_int>) -> c_int {
    let bare = name.trim_start_matches("cu").trim_start_matches("hip");
    if result.is_err() && (GIVING_BACK.contains(&bare) || bare == "CtxPopCurrent_v2") {
        WRONG.fetch_add(1, Ordering::SeqCst);
    }
    let late = LATE.replace(0);
    result.err().unwrap_or(late)
}

/// Calls that gave back what was not there.
pub(crate) fn wrong() -> u64 {
    WRONG.load(Ordering::SeqCst)
}

/// Memory was freed while another process had it open.
pub(crate) fn freed_while_open() {
    FREED_WHILE_OPEN.fetch_add(1, Ordering::SeqCst);
}

pub(crate) fn freed_while_open_so_far() -> u64 {
    FREED_WHILE_OPEN.load(Ordering::SeqCst)
}

/// A call may wait.
pub(crate) fn may_block() {
    BLOCKING.fetch_add(1, Ordering::SeqCst);
    BLOCKING_HERE.set(BLOCKING_HERE.get() + 1);
}

pub(crate) fn blocking_here() -> u64 {
    BLOCKING_HERE.get()
}

pub(crate) fn blocking() -> u64 {
    BLOCKING.load(Ordering::SeqCst)
}

pub(crate) fn fail(name: &str, nth: u64, code: c_int) {
    let mut calls = calls();
    let entry = calls.entry(name.to_owned()).or_default();
    (entry.fails, entry.always) = match nth {
        0 => (None, (code != 0).then_some(code)),
        _ => (Some((nth, code)), None),
    };
}

/// How often a function was called, and whether its failure is still to come.
pub(crate) fn count(name: &str) -> u64 {
    calls().get(name).map_or(0, |calls| calls.count)
}

/// The name of the function at this place of all that were called.
pub(crate) fn name(nth: usize) -> Option<String> {
    calls().iter().filter(|(_, calls)| calls.count > 0).nth(nth).map(|(name, _)| name.clone())
}
