//! A fake driver for a test: a copy of the library, so that each test has a driver of its own.
#![allow(dead_code, reason = "each test uses a part")]
#![allow(unsafe_code, reason = "loads a library and calls its functions")]

mod caller;

use std::ffi::{CString, c_char, c_int, c_void};
use std::path::{Path, PathBuf};

use te_core::device::{Hop, HopDirection, HopEnd, Stager};
use te_core::testkit::{ByPointer, PeekPoke};
use te_core::{Error, GpuVendor, Location, MemSpan, Token};
use te_gpu::{Config, Gpu};

/// A loaded fake driver, and how it is told what to do.
pub(crate) struct Fake {
    directory: tempfile::TempDir,
    vendor: GpuVendor,
    handle: *mut c_void,
}

// SAFETY: the library locks its state.
unsafe impl Send for Fake {}
// SAFETY: as above.
unsafe impl Sync for Fake {}

/// A copy of the library of this vendor, which is not loaded.
pub(crate) fn copy_of(vendor: GpuVendor) -> (tempfile::TempDir, PathBuf) {
    let name = if vendor == GpuVendor::Amd { "libhip.so" } else { "libcuda.so" };
    let tests = std::env::current_exe().unwrap();
    let built = tests.parent().unwrap().parent().unwrap().join("examples").join(name);
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join(name);
    std::fs::copy(&built, &path).unwrap_or_else(|error| {
        panic!(
            "{} was not built ({error}): run `cargo test -p te-gpu`, or build the examples",
            built.display()
        )
    });
    (directory, path)
}

impl Fake {
    pub(crate) fn cuda() -> Self {
        Self::load(GpuVendor::Nvidia)
    }

    pub(crate) fn hip() -> Self {
        Self::load(GpuVendor::Amd)
    }

    fn load(vendor: GpuVendor) -> Self {
        let (directory, path) = copy_of(vendor);
        let name = CString::new(path.to_str().unwrap()).unwrap();
        // SAFETY: a library of this crate.
        let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        assert!(!handle.is_null(), "the fake driver cannot be loaded from {}", path.display());
        Self { directory, vendor, handle }
    }

    pub(crate) fn vendor(&self) -> GpuVendor {
        self.vendor
    }

    pub(crate) fn path(&self) -> PathBuf {
        let name = if self.vendor == GpuVendor::Amd { "libhip.so" } else { "libcuda.so" };
        self.directory.path().join(name)
    }

    /// Settings for tests: small, and without measurements.
    pub(crate) fn config(&self) -> Config {
        config_of(self.vendor, &self.path())
    }

    /// The devices with these settings.
    pub(crate) fn gpu(&self, config: Config) -> Gpu {
        match self.vendor {
            GpuVendor::Amd => Gpu::hip(config).unwrap(),
            _ => Gpu::cuda(config).unwrap(),
        }
    }

    /// The location of the only device.
    pub(crate) fn location(&self) -> Location {
        Location::Device(self.vendor, 0)
    }

    fn find(&self, name: &str) -> *mut c_void {
        let name = CString::new(name).unwrap();
        // SAFETY: a library that is never closed.
        let symbol = unsafe { libc::dlsym(self.handle, name.as_ptr()) };
        assert!(!symbol.is_null(), "the fake driver has no {name:?}");
        symbol
    }

    pub(crate) fn set(&self, name: &str, value: i64) -> &Self {
        let text = CString::new(name).unwrap();
        // SAFETY: the signature is that of `control.rs`.
        let set = unsafe {
            std::mem::transmute::<*mut c_void, unsafe extern "C" fn(*const c_char, i64) -> c_int>(
                self.find("fake_set"),
            )
        };
        // SAFETY: a C string.
        assert_eq!(unsafe { set(text.as_ptr(), value) }, 0, "{name}");
        self
    }

    pub(crate) fn fail(&self, name: &str, nth: u64, code: i32) -> &Self {
        let text = CString::new(name).unwrap();
        // SAFETY: the signature is that of `control.rs`.
        let fail = unsafe {
            std::mem::transmute::<*mut c_void, unsafe extern "C" fn(*const c_char, u64, c_int)>(
                self.find("fake_fail"),
            )
        };
        // SAFETY: a C string.
        unsafe { fail(text.as_ptr(), nth, code) };
        self
    }

    pub(crate) fn calls(&self, name: &str) -> u64 {
        let text = CString::new(name).unwrap();
        // SAFETY: the signature is that of `control.rs`.
        let calls = unsafe {
            std::mem::transmute::<*mut c_void, unsafe extern "C" fn(*const c_char) -> u64>(
                self.find("fake_calls"),
            )
        };
        // SAFETY: a C string.
        unsafe { calls(text.as_ptr()) }
    }

    /// The functions that were called.
    pub(crate) fn names(&self) -> Vec<String> {
        // SAFETY: the signature is that of `control.rs`.
        let name = unsafe {
            std::mem::transmute::<*mut c_void, unsafe extern "C" fn(usize, *mut u8) -> usize>(
                self.find("fake_name"),
            )
        };
        let one = |nth| {
            let mut text = [0; 64];
            // SAFETY: 64 bytes.
            let len = unsafe { name(nth, text.as_mut_ptr()) };
            (len > 0).then(|| String::from_utf8_lossy(&text[..len]).into_owned())
        };
        (0..).map_while(one).collect()
    }

    fn number(&self, name: &str) -> u64 {
        // SAFETY: the signature is that of `control.rs`.
        let get =
            unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C" fn() -> u64>(self.find(name)) };
        // SAFETY: no arguments.
        unsafe { get() }
    }

    /// Calls that may have waited.
    pub(crate) fn blocking(&self) -> u64 {
        self.number("fake_blocking")
    }

    /// Counts calls of the calling thread that may have waited, without an allocation.
    pub(crate) fn blocking_here(&self) -> unsafe extern "C" fn() -> u64 {
        // SAFETY: the signature is that of `control.rs`.
        unsafe {
            std::mem::transmute::<*mut c_void, unsafe extern "C" fn() -> u64>(self.find("fake_blocking_here"))
        }
    }

    /// Memory that was freed while another process had it open.
    pub(crate) fn freed_while_open(&self) -> u64 {
        self.number("fake_freed_while_open")
    }

    /// The thread's current context.
    pub(crate) fn context(&self) -> u64 {
        self.number("fake_context")
    }

    /// Calls that gave back what was not there.
    pub(crate) fn wrong(&self) -> u64 {
        self.number("fake_wrong")
    }

    /// How the thread's calls act on captures: 0, globally.
    pub(crate) fn capture_mode(&self) -> u64 {
        self.number("fake_capture_mode")
    }

    /// Objects that were not given back.
    pub(crate) fn live(&self) -> u64 {
        self.number("fake_live")
    }

    /// Memory that a caller allocated; at `location`.
    pub(crate) fn allocate_at(&self, ordinal: i32, bytes: usize, location: Location) -> MemSpan {
        let base = self.allocate_raw(ordinal, bytes, false);
        MemSpan::new(std::ptr::with_exposed_provenance_mut(base), bytes).at(location)
    }

    pub(crate) fn allocate(&self, bytes: usize) -> MemSpan {
        self.allocate_at(0, bytes, self.location())
    }

    pub(crate) fn allocate_raw(&self, ordinal: i32, bytes: usize, is_managed: bool) -> usize {
        // SAFETY: the signature is that of `control.rs`.
        let allocate = unsafe {
            std::mem::transmute::<*mut c_void, unsafe extern "C" fn(c_int, usize, c_int) -> u64>(
                self.find("fake_allocate"),
            )
        };
        // SAFETY: numbers.
        let base = unsafe { allocate(ordinal, bytes, is_managed.into()) };
        assert!(base != 0, "the fake driver has no memory");
        base as usize
    }

    pub(crate) fn free(&self, span: MemSpan) {
        // SAFETY: the signature is that of `control.rs`.
        let free = unsafe {
            std::mem::transmute::<*mut c_void, unsafe extern "C" fn(u64) -> c_int>(self.find("fake_free"))
        };
        // SAFETY: memory of the fake driver, which no hop uses.
        assert_eq!(unsafe { free(span.as_ptr().addr() as u64) }, 0);
    }

    pub(crate) fn bytes(&self, span: MemSpan) -> Vec<u8> {
        let mut bytes = vec![0; span.len()];
        // SAFETY: memory of the fake driver.
        unsafe { self.peek(span, &mut bytes) };
        bytes
    }

    pub(crate) fn fill(&self, span: MemSpan, bytes: &[u8]) {
        // SAFETY: memory of the fake driver.
        unsafe { self.poke(span, bytes) };
    }
}

pub(crate) fn config_of(vendor: GpuVendor, path: &Path) -> Config {
    let path = Some(path.to_owned());
    let (cuda_library, hip_library) = if vendor == GpuVendor::Amd { (None, path) } else { (path, None) };
    Config {
        cuda_library,
        hip_library,
        slot_bytes: 16 << 10,
        ring_bytes: 128 << 10,
        hops_max: 64,
        kernel: true,
        calibrate_ms_max: 0,
        sysfs: PathBuf::from("/nonexistent"),
        ..Config::default()
    }
}

impl PeekPoke for Fake {
    unsafe fn peek(&self, span: MemSpan, out: &mut [u8]) {
        if span.location().kind() != self.vendor.kind() {
            // SAFETY: the caller's promise, passed on.
            return unsafe { ByPointer.peek(span, out) };
        }
        // SAFETY: the signature is that of `control.rs`.
        let peek = unsafe {
            std::mem::transmute::<*mut c_void, unsafe extern "C" fn(u64, *mut u8, usize) -> c_int>(
                self.find("fake_peek"),
            )
        };
        // SAFETY: `out` has that length.
        let code = unsafe { peek(span.as_ptr().addr() as u64, out.as_mut_ptr(), out.len()) };
        assert_eq!(code, 0, "{span:?} is not memory of the device");
    }

    unsafe fn poke(&self, span: MemSpan, bytes: &[u8]) {
        if span.location().kind() != self.vendor.kind() {
            // SAFETY: the caller's promise, passed on.
            return unsafe { ByPointer.poke(span, bytes) };
        }
        // SAFETY: the signature is that of `control.rs`.
        let poke = unsafe {
            std::mem::transmute::<*mut c_void, unsafe extern "C" fn(u64, *const u8, usize) -> c_int>(
                self.find("fake_poke"),
            )
        };
        // SAFETY: `bytes` has that length.
        let code = unsafe { poke(span.as_ptr().addr() as u64, bytes.as_ptr(), bytes.len()) };
        assert_eq!(code, 0, "{span:?} is not memory of the device");
    }
}

pub(crate) const NO_END: HopEnd = HopEnd { token: Token(u64::MAX), result: Ok(()) };

/// Polls until `count` hops have ended.
pub(crate) fn ends(stager: &mut dyn Stager, count: usize) -> Vec<HopEnd> {
    let (mut ended, mut out) = (Vec::new(), [NO_END; 16]);
    // timing: hops run in threads of the fake driver; nothing else says when they end
    let start = std::time::Instant::now();
    while ended.len() < count {
        let polled = stager.poll(&mut out);
        ended.extend_from_slice(&out[..polled]);
        if polled == 0 {
            std::thread::yield_now();
        }
        // timing: only a hang takes as long
        assert!(start.elapsed().as_secs() < 60, "{} of {count} hops ended", ended.len());
    }
    ended
}

/// Starts all hops and waits for them, in any number of calls.
pub(crate) fn run(stager: &mut dyn Stager, hops: &[Hop]) -> Vec<HopEnd> {
    let (mut begun, mut ended) = (0, Vec::new());
    while begun < hops.len() {
        begun += stager.start(&hops[begun..]).unwrap();
        let mut out = [NO_END; 16];
        let polled = stager.poll(&mut out);
        ended.extend_from_slice(&out[..polled]);
    }
    let left = hops.len() - ended.len();
    ended.extend(ends(stager, left));
    ended
}

pub(crate) fn hop(token: u64, slot: u32, offset: u32, device: MemSpan, direction: HopDirection) -> Hop {
    Hop { token: Token(token), slot, offset, device, direction }
}

pub(crate) fn all_are_ok(ends: &[HopEnd]) -> Result<(), Error> {
    ends.iter().try_for_each(|end| end.result)
}
