//! Codes, errors with a sentence, and what all functions share.
#![allow(unsafe_code, reason = "the functions of a C interface take addresses")]
#![allow(unreachable_pub, reason = "the functions are exported to C by their names")]
#![allow(clippy::missing_safety_doc, reason = "the header states what the caller has to promise")]

use std::ffi::{CStr, CString, c_char, c_void};
use std::mem::MaybeUninit;
use std::panic::{AssertUnwindSafe, catch_unwind};

use snowskin_compat::clients::ClientsError;
use snowskin_compat::ffi::{array_out, message_of, text};
use store_client::{ConnectError, ErrorCode, StoreError};
use te_core::Status;
use te_engine::{Fabrics, RegisterError, SegmentError, StartError, TransferError};

/// `snowskin_code`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub enum Code {
    Ok = 0,
    InvalidArgument = 1,
    NotFound = 2,
    NoSpace = 3,
    Leased = 4,
    Unreachable = 5,
    TimedOut = 6,
    OutcomeUnknown = 7,
    Closed = 8,
    Forked = 9,
    Busy = 10,
    Denied = 11,
    Unsupported = 12,
    Internal = 13,
    BufferTooShort = 14,
    Pending = 15,
    Canceled = 16,
}

const NAMES: [&CStr; 17] = [
    c"OK",
    c"INVALID_ARGUMENT",
    c"NOT_FOUND",
    c"NO_SPACE",
    c"LEASED",
    c"UNREACHABLE",
    c"TIMED_OUT",
    c"OUTCOME_UNKNOWN",
    c"CLOSED",
    c"FORKED",
    c"BUSY",
    c"DENIED",
    c"UNSUPPORTED",
    c"INTERNAL",
    c"BUFFER_TOO_SHORT",
    c"PENDING",
    c"CANCELED",
];

/// What `snowskin_error *` points to, and what functions return inside.
#[derive(Debug)]
pub struct Fault {
    pub(crate) code: Code,
    message: CString,
}

impl Fault {
    pub(crate) fn new(code: Code, message: impl Into<Vec<u8>>) -> Self {
        let mut message: Vec<u8> = message.into();
        message.retain(|byte| *byte != 0);
        Self { code, message: CString::new(message).unwrap_or_default() }
    }

    pub(crate) fn argument(message: impl Into<Vec<u8>>) -> Self {
        Self::new(Code::InvalidArgument, message)
    }

    /// For an argument that is NULL, too long, or not UTF-8.
    pub(crate) fn null(what: &str) -> Self {
        Self::argument(format!("`{what}` is NULL, misaligned, too long or not UTF-8"))
    }
}

/// Runs `run`; an error, or a panic, becomes a code, and a description where the caller wants one.
pub(crate) fn answer(error: *mut *mut Fault, run: impl FnOnce() -> Result<Code, Fault>) -> Code {
    let result = catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(|panic| {
        let message = format!("a bug: the call panicked: {}", message_of(&*panic));
        Err(Fault::new(Code::Internal, message))
    });
    match result {
        Ok(code) => code,
        Err(fault) => {
            let code = fault.code;
            // SAFETY: the header asks for NULL or a place for an address.
            if let Some(place) = unsafe { place(error) } {
                place.write(Box::into_raw(Box::new(fault)));
            }
            code
        }
    }
}

/// A place for an output; `None` for NULL.
///
/// # Safety
/// `out` is NULL or writable, and nothing else accesses it during `'a`.
pub(crate) unsafe fn place<'a, T>(out: *mut T) -> Option<&'a mut MaybeUninit<T>> {
    // SAFETY: the caller's promise.
    unsafe { array_out(out, 1) }.and_then(<[_]>::first_mut)
}

/// The object behind a handle.
///
/// # Safety
/// `handle` is NULL, or was made by this library and is not freed during `'a`.
pub(crate) unsafe fn object<'a, T>(handle: *const T, what: &str) -> Result<&'a T, Fault> {
    // SAFETY: the caller's promise.
    unsafe { handle.as_ref() }.ok_or_else(|| Fault::null(what))
}

/// Frees the object behind a handle.
///
/// # Safety
/// `handle` is NULL, or was made by `Box::into_raw` and is not used any more.
pub(crate) unsafe fn free<T>(handle: *mut T) {
    if !handle.is_null() {
        // SAFETY: the caller's promise. A panic in a drop must not reach C.
        let dropped = catch_unwind(AssertUnwindSafe(|| drop(unsafe { Box::from_raw(handle) })));
        // There is nowhere to report it.
        drop(dropped);
    }
}

/// A text of options; `None` for NULL.
///
/// # Safety
/// `given` is NULL or a text that ends with a NUL and outlives `'a`.
pub(crate) unsafe fn option<'a>(given: *const c_char, what: &str) -> Result<Option<&'a str>, Fault> {
    if given.is_null() {
        return Ok(None);
    }
    // SAFETY: the caller's promise.
    unsafe { text(given) }.map(Some).ok_or_else(|| Fault::null(what))
}

/// Options of a caller whose header may be older or newer: fields that it does not have are as in `default`.
///
/// # Safety
/// `given` is NULL, or the address of options that begin with their size and have as many bytes. All fields
/// are valid for any bytes.
pub(crate) unsafe fn options<T: Copy>(given: *const T, default: T) -> Result<T, Fault> {
    if given.is_null() {
        return Ok(default);
    }
    if !given.is_aligned() {
        return Err(Fault::null("options"));
    }
    // SAFETY: the caller's promise: the size is the first field.
    let size = unsafe { given.cast::<usize>().read() };
    if !(size_of::<usize>()..=4096).contains(&size) {
        return Err(Fault::argument(format!(
            "the options have {size} bytes: initialise them with their _INIT macro"
        )));
    }
    let mut options = default;
    // SAFETY: both have as many bytes, and any bytes are valid.
    unsafe {
        std::ptr::copy_nonoverlapping(
            given.cast::<u8>(),
            (&raw mut options).cast::<u8>(),
            size.min(size_of::<T>()),
        );
    }
    Ok(options)
}

/// The fabrics that a text names.
pub(crate) fn fabrics(given: Option<&str>) -> Result<Fabrics, Fault> {
    match given {
        None => Ok(Fabrics::AUTO),
        Some(names) => names.parse().map_err(|error| Fault::argument(format!("`fabrics`: {error}"))),
    }
}

fn of_code(code: ErrorCode) -> Code {
    match code {
        code if code.is_no_room() => Code::NoSpace,
        ErrorCode::MetadataFull
        | ErrorCode::TooManyPuts
        | ErrorCode::TenantQuotaExceeded
        | ErrorCode::KeysUltraLimit => Code::NoSpace,
        ErrorCode::ObjectNotFound | ErrorCode::KeyNotFound => Code::NotFound,
        ErrorCode::ObjectHasLease => Code::Leased,
        ErrorCode::ReplicaIsNotReady => Code::Busy,
        ErrorCode::BufferOverflow => Code::BufferTooShort,
        ErrorCode::InvalidKey | ErrorCode::InvalidParams | ErrorCode::InvalidPattern => Code::InvalidArgument,
        ErrorCode::RpcFail
        | ErrorCode::RpcTimeout
        | ErrorCode::NotLeader
        | ErrorCode::UnavailableInCurrentStatus => Code::Unreachable,
        ErrorCode::TransferFail | ErrorCode::PutIsOver => Code::OutcomeUnknown,
        ErrorCode::TenantNotRegistered | ErrorCode::PermissionDenied => Code::Denied,
        ErrorCode::InvalidVersion | ErrorCode::NotSupported => Code::Unsupported,
        ErrorCode::Forked => Code::Forked,
        ErrorCode::Expelled => Code::Closed,
        _ => Code::Internal,
    }
}

impl From<&StoreError> for Fault {
    fn from(error: &StoreError) -> Self {
        let code = match error {
            StoreError::TooLong { .. } => Code::BufferTooShort,
            StoreError::Held => Code::OutcomeUnknown,
            StoreError::Stopped => Code::Closed,
            error => of_code(error.code()),
        };
        Self::new(code, error.to_string())
    }
}

impl From<StoreError> for Fault {
    fn from(error: StoreError) -> Self {
        Self::from(&error)
    }
}

impl From<ConnectError> for Fault {
    fn from(error: ConnectError) -> Self {
        let code = match &error {
            ConnectError::Config { .. } => Code::InvalidArgument,
            ConnectError::Rpc(error) => of_code(error.code()),
            ConnectError::Forked => Code::Forked,
            ConnectError::Held { .. } => Code::Busy,
            _ => Code::Internal,
        };
        Self::new(code, error.to_string())
    }
}

impl From<ClientsError> for Fault {
    fn from(error: ClientsError) -> Self {
        match error {
            ClientsError::Connect(error) => error.into(),
            ClientsError::Closed => Self::new(Code::Closed, error.to_string()),
            ClientsError::NotRegistered { .. } => Self::new(Code::NotFound, error.to_string()),
            ClientsError::Busy { .. } => Self::new(Code::Busy, error.to_string()),
            error => Self::argument(error.to_string()),
        }
    }
}

impl From<StartError> for Fault {
    fn from(error: StartError) -> Self {
        let code = match error {
            StartError::Config { .. }
            | StartError::Setting { .. }
            | StartError::Gpu(_)
            | StartError::Listen { .. } => Code::InvalidArgument,
            StartError::Fabric { .. } => Code::Unsupported,
            _ => Code::Internal,
        };
        Self::new(code, error.to_string())
    }
}

impl From<RegisterError> for Fault {
    fn from(error: RegisterError) -> Self {
        let code = match error {
            RegisterError::NotFound => Code::NotFound,
            RegisterError::Busy { .. } => Code::Busy,
            RegisterError::Forked => Code::Forked,
            RegisterError::Closed => Code::Closed,
            RegisterError::Full { .. } => Code::NoSpace,
            RegisterError::Rails(_) => Code::Unsupported,
            _ => Code::InvalidArgument,
        };
        Self::new(code, error.to_string())
    }
}

impl From<SegmentError> for Fault {
    fn from(error: SegmentError) -> Self {
        let code = match error {
            SegmentError::NotFound | SegmentError::Unknown { .. } => Code::NotFound,
            SegmentError::Name(_) => Code::InvalidArgument,
            SegmentError::Unreachable { .. } | SegmentError::Metadata(_) => Code::Unreachable,
            SegmentError::Restarted { .. } | SegmentError::Closed => Code::Closed,
            SegmentError::Full { .. } => Code::NoSpace,
            SegmentError::Busy => Code::Busy,
            SegmentError::Refused { .. } => Code::Denied,
            SegmentError::Forked => Code::Forked,
            _ => Code::Unsupported,
        };
        Self::new(code, error.to_string())
    }
}

impl From<TransferError> for Fault {
    fn from(error: TransferError) -> Self {
        let message = error.to_string();
        let code = match error {
            TransferError::Request { .. } | TransferError::BatchLength { .. } => Code::InvalidArgument,
            TransferError::Segment { source, .. } => Self::from(source).code,
            TransferError::Full | TransferError::Busy => Code::Busy,
            TransferError::NotFound => Code::NotFound,
            TransferError::WaitTimedOut => Code::Pending,
            TransferError::Ended { status, .. } => of_status(status),
            TransferError::Forked => Code::Forked,
            TransferError::Closed => Code::Closed,
            _ => Code::Internal,
        };
        Self::new(code, message)
    }
}

/// The code for the state of a transfer.
pub(crate) const fn of_status(status: Status) -> Code {
    match status {
        Status::Waiting | Status::Pending => Code::Pending,
        Status::Completed => Code::Ok,
        Status::TimedOut => Code::TimedOut,
        Status::Canceled => Code::Canceled,
        Status::Failed => Code::OutcomeUnknown,
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn snowskin_abi() -> u32 {
    0
}

#[unsafe(no_mangle)]
pub extern "C" fn snowskin_version() -> *const c_char {
    const VERSION: &CStr =
        match CStr::from_bytes_with_nul(concat!(env!("CARGO_PKG_VERSION"), "\0").as_bytes()) {
            Ok(version) => version,
            Err(_) => c"",
        };
    VERSION.as_ptr()
}

#[unsafe(no_mangle)]
pub extern "C" fn snowskin_code_name(code: i32) -> *const c_char {
    let name = usize::try_from(code).ok().and_then(|code| NAMES.get(code));
    name.copied().unwrap_or(c"UNKNOWN").as_ptr()
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn snowskin_error_code(error: *const Fault) -> Code {
    // SAFETY: the header asks for NULL or an error of this library.
    unsafe { error.as_ref() }.map_or(Code::Ok, |fault| fault.code)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn snowskin_error_message(error: *const Fault) -> *const c_char {
    // SAFETY: the header asks for NULL or an error of this library.
    unsafe { error.as_ref() }.map_or(c"".as_ptr(), |fault| fault.message.as_ptr())
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn snowskin_error_free(error: *mut Fault) {
    // SAFETY: the header asks for NULL or an error of this library that is not used any more.
    unsafe { free(error) };
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn snowskin_free(memory: *mut c_void) {
    // SAFETY: the header asks for NULL or memory that this library allocated with `malloc`.
    unsafe { libc::free(memory) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_has_its_name() {
        let name = |code: Code| {
            // SAFETY: names are constants.
            unsafe { CStr::from_ptr(snowskin_code_name(code as i32)) }.to_str().unwrap()
        };
        assert_eq!(name(Code::Ok), "OK");
        assert_eq!(name(Code::NoSpace), "NO_SPACE");
        assert_eq!(name(Code::Canceled), "CANCELED");
        for unknown in [-1, NAMES.len() as i32, i32::MAX, i32::MIN] {
            // SAFETY: as above.
            assert_eq!(unsafe { CStr::from_ptr(snowskin_code_name(unknown)) }, c"UNKNOWN");
        }
    }

    #[test]
    fn every_code_of_the_store_is_one_of_these_and_reasons_for_no_room_are_one() {
        for &code in ErrorCode::ALL {
            assert!(!matches!(of_code(code), Code::Ok | Code::Pending), "{code:?}");
            assert_eq!(of_code(code) == Code::NoSpace, code.is_no_room() || is_quota(code), "{code:?}");
        }
        assert_eq!(of_code(ErrorCode::ObjectHasLease), Code::Leased);
        fn is_quota(code: ErrorCode) -> bool {
            matches!(
                code,
                ErrorCode::MetadataFull
                    | ErrorCode::TooManyPuts
                    | ErrorCode::TenantQuotaExceeded
                    | ErrorCode::KeysUltraLimit
            )
        }
    }

    #[test]
    fn options_of_an_older_header_keep_the_defaults_of_the_fields_that_it_lacks() {
        #[repr(C)]
        #[derive(Clone, Copy)]
        struct Newer {
            size: usize,
            a: u32,
            b: u32,
        }
        let default = Newer { size: 16, a: 1, b: 2 };
        let read = |size: usize| {
            let given = Newer { size, a: 7, b: 9 };
            // SAFETY: `given` has at least as many bytes as it says, or its size is refused.
            unsafe { options(&raw const given, default) }.map(|read| (read.a, read.b))
        };
        assert_eq!(read(12).unwrap(), (7, 2));
        assert_eq!(read(16).unwrap(), (7, 9));
        assert!(read(0).is_err() && read(7).is_err() && read(usize::MAX).is_err());
        // SAFETY: NULL stands for the defaults.
        assert_eq!(unsafe { options(std::ptr::null(), default) }.unwrap().b, 2);
    }

    #[test]
    fn a_panic_is_a_code_and_a_sentence() {
        let mut error = std::ptr::null_mut();
        assert_eq!(answer(&raw mut error, || panic!("on purpose")), Code::Internal);
        // SAFETY: `answer` has made it.
        unsafe {
            assert_eq!(snowskin_error_code(error), Code::Internal);
            let message = CStr::from_ptr(snowskin_error_message(error)).to_str().unwrap();
            assert!(message.contains("on purpose"), "{message}");
            snowskin_error_free(error);
        }
        assert_eq!(answer(std::ptr::null_mut(), || Err(Fault::null("x"))), Code::InvalidArgument);
    }
}
