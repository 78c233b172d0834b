//! The driver, as an application uses it: memory of cudaMalloc, and synchronous copies.

use std::ffi::{CString, c_int, c_void};
use std::path::PathBuf;

use te_core::{Location, MemSpan};
use te_gpu::{Config, Gpu};

/// Another library than the driver's.
fn library() -> Option<PathBuf> {
    std::env::var_os("SNOWSKIN_CUDA_LIBRARY").map(PathBuf::from)
}

/// The devices of this machine. `SNOWSKIN_CUDA_KERNEL`, with any value, allows the copy kernel.
pub(crate) fn gpu() -> Gpu {
    let kernel = std::env::var_os("SNOWSKIN_CUDA_KERNEL").is_some();
    Gpu::cuda(Config { cuda_library: library(), kernel, ..Config::default() }).unwrap()
}

type Alloc = unsafe extern "C" fn(*mut u64, usize) -> c_int;
type CopyIn = unsafe extern "C" fn(u64, *const c_void, usize) -> c_int;
type CopyOut = unsafe extern "C" fn(*mut c_void, u64, usize) -> c_int;
type Push = unsafe extern "C" fn(*mut c_void) -> c_int;
type Pop = unsafe extern "C" fn(*mut *mut c_void) -> c_int;
type Init = unsafe extern "C" fn(u32) -> c_int;
type Retain = unsafe extern "C" fn(*mut *mut c_void, c_int) -> c_int;

pub(crate) struct Cuda {
    alloc: Alloc,
    copy_in: CopyIn,
    copy_out: CopyOut,
    push: Push,
    pop: Pop,
    context: *mut c_void,
}

impl Cuda {
    /// The driver, and the primary context of the first device.
    pub(crate) fn load() -> Self {
        let name = library().unwrap_or_else(|| PathBuf::from("libcuda.so.1"));
        let name = CString::new(name.to_str().unwrap()).unwrap();
        // SAFETY: loads the driver's library.
        let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW) };
        let find = |name: &str| {
            let name = CString::new(name).unwrap();
            // SAFETY: a library that is never closed.
            let symbol = unsafe { libc::dlsym(handle, name.as_ptr()) };
            assert!(!symbol.is_null(), "the driver has no {name:?}");
            symbol
        };
        // SAFETY: functions of the driver with the signatures of its header.
        unsafe {
            let init = std::mem::transmute::<*mut c_void, Init>(find("cuInit"));
            let retain = std::mem::transmute::<*mut c_void, Retain>(find("cuDevicePrimaryCtxRetain"));
            let mut context = std::ptr::null_mut();
            assert_eq!(init(0) | retain(&raw mut context, 0), 0);
            Self {
                alloc: std::mem::transmute::<*mut c_void, Alloc>(find("cuMemAlloc_v2")),
                copy_in: std::mem::transmute::<*mut c_void, CopyIn>(find("cuMemcpyHtoD_v2")),
                copy_out: std::mem::transmute::<*mut c_void, CopyOut>(find("cuMemcpyDtoH_v2")),
                push: std::mem::transmute::<*mut c_void, Push>(find("cuCtxPushCurrent_v2")),
                pop: std::mem::transmute::<*mut c_void, Pop>(find("cuCtxPopCurrent_v2")),
                context,
            }
        }
    }

    fn within<R>(&self, run: impl FnOnce() -> R) -> R {
        // SAFETY: a context that stays retained.
        assert_eq!(unsafe { (self.push)(self.context) }, 0);
        let result = run();
        let mut popped = std::ptr::null_mut();
        // SAFETY: pops what was pushed.
        assert_eq!(unsafe { (self.pop)(&raw mut popped) }, 0);
        result
    }

    /// Memory that is never freed.
    pub(crate) fn allocate(&self, bytes: usize, location: Location) -> MemSpan {
        let mut at = 0;
        // SAFETY: writes one address.
        self.within(|| assert_eq!(unsafe { (self.alloc)(&raw mut at, bytes) }, 0));
        MemSpan::new(std::ptr::without_provenance_mut(at as usize), bytes).at(location)
    }

    /// Writes memory of a device or of the host.
    pub(crate) fn write(&self, span: MemSpan, bytes: &[u8]) {
        if span.location() == Location::Host {
            // SAFETY: memory under test, which nothing else uses now.
            unsafe { te_core::VolatileSpan::new(span) }.write(0, bytes).unwrap();
            return;
        }
        let at = span.as_ptr().addr() as u64;
        // SAFETY: device memory of that length; reading it waits for the copy.
        self.within(|| assert_eq!(unsafe { (self.copy_in)(at, bytes.as_ptr().cast(), bytes.len()) }, 0));
        self.read(span.part(span.len() as u64 - 1, 1).unwrap());
    }

    /// Reads memory of a device or of the host.
    pub(crate) fn read(&self, span: MemSpan) -> Vec<u8> {
        let mut out = vec![0; span.len()];
        if span.location() == Location::Host {
            // SAFETY: as above.
            unsafe { te_core::VolatileSpan::new(span) }.read(0, &mut out).unwrap();
            return out;
        }
        let at = span.as_ptr().addr() as u64;
        // SAFETY: device memory of that length.
        self.within(|| assert_eq!(unsafe { (self.copy_out)(out.as_mut_ptr().cast(), at, out.len()) }, 0));
        out
    }
}
