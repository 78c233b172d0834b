//! A caller of the driver besides us: an application with streams and events of its own.

use std::ffi::{c_int, c_void};

use te_core::MemSpan;

use super::Fake;

/// A stream and events of an application.
pub(crate) struct Caller<'a> {
    fake: &'a Fake,
    stream: usize,
}

type Out = unsafe extern "C" fn(*mut usize, u32) -> c_int;
type Two = unsafe extern "C" fn(usize, usize) -> c_int;

impl Fake {
    fn call<F: Copy>(&self, name: &str) -> F {
        let symbol = self.find(name);
        assert_eq!(size_of::<F>(), size_of::<*mut c_void>());
        // SAFETY: the caller names the type of the function.
        unsafe { std::mem::transmute_copy(&symbol) }
    }

    /// Runs something while the context of device 0 is current for this thread.
    pub(crate) fn within<R>(&self, run: impl FnOnce() -> R) -> R {
        self.start();
        let retain: unsafe extern "C" fn(*mut usize, c_int) -> c_int = self.call("cuDevicePrimaryCtxRetain");
        let release: unsafe extern "C" fn(c_int) -> c_int = self.call("cuDevicePrimaryCtxRelease_v2");
        let push: unsafe extern "C" fn(usize) -> c_int = self.call("cuCtxPushCurrent_v2");
        let pop: unsafe extern "C" fn(*mut usize) -> c_int = self.call("cuCtxPopCurrent_v2");
        let mut context = 0;
        // SAFETY: functions of the fake driver with their signatures.
        unsafe {
            assert_eq!(retain(&raw mut context, 0) | push(context), 0);
            let result = run();
            assert_eq!(pop(&raw mut context) | release(0), 0);
            result
        }
    }

    /// Makes a device current for this thread, as an application on HIP does.
    pub(crate) fn set_current(&self, device: i32) {
        let init: unsafe extern "C" fn(u32) -> c_int = self.call("hipInit");
        let set: unsafe extern "C" fn(c_int) -> c_int = self.call("hipSetDevice");
        // SAFETY: as above.
        assert_eq!(unsafe { init(0) | set(device) }, 0);
    }

    fn start(&self) {
        let init: unsafe extern "C" fn(u32) -> c_int = self.call("cuInit");
        // SAFETY: as above.
        assert_eq!(unsafe { init(0) }, 0);
    }

    pub(crate) fn caller(&self) -> Caller<'_> {
        self.start();
        let create: unsafe extern "C" fn(*mut usize, u32, c_int) -> c_int =
            self.call("cuStreamCreateWithPriority");
        let mut stream = 0;
        // SAFETY: as above.
        self.within(|| assert_eq!(unsafe { create(&raw mut stream, 1, 0) }, 0));
        Caller { fake: self, stream }
    }

    /// An address range into which memory was mapped piece by piece.
    pub(crate) fn map_chunks(&self, count: usize, bytes: usize) -> MemSpan {
        self.map_chunks_with(count, bytes, 1)
    }

    /// The same, with these types of handles: 1, file descriptors; 8, fabric handles.
    pub(crate) fn map_chunks_with(&self, count: usize, bytes: usize, types: u32) -> MemSpan {
        self.start();
        let create: unsafe extern "C" fn(*mut u64, usize, *const [u32; 8], u64) -> c_int =
            self.call("cuMemCreate");
        let reserve: unsafe extern "C" fn(*mut u64, usize, usize, u64, u64) -> c_int =
            self.call("cuMemAddressReserve");
        let map: unsafe extern "C" fn(u64, usize, usize, u64, u64) -> c_int = self.call("cuMemMap");
        let mut base = 0;
        // SAFETY: as above; the properties are those of pinned memory of device 0.
        unsafe {
            assert_eq!(reserve(&raw mut base, count * bytes, 0, 0, 0), 0);
            for nth in 0..count {
                let mut handle = 0;
                assert_eq!(create(&raw mut handle, bytes, &[1, types, 1, 0, 0, 0, 0, 0], 0), 0);
                assert_eq!(map(base + (nth * bytes) as u64, bytes, 0, handle, 0), 0);
            }
        }
        let ptr = std::ptr::with_exposed_provenance_mut(base as usize);
        MemSpan::new(ptr, count * bytes).at(self.location())
    }
}

impl Caller<'_> {
    pub(crate) fn stream(&self) -> usize {
        self.stream
    }

    /// Records a new event in the stream.
    pub(crate) fn record(&self) -> usize {
        let create: Out = self.fake.call("cuEventCreate");
        let record: Two = self.fake.call("cuEventRecord");
        let mut event = 0;
        // SAFETY: functions of the fake driver with their signatures.
        self.fake.within(|| unsafe {
            assert_eq!(create(&raw mut event, 2), 0);
            assert_eq!(record(event, self.stream), 0);
        });
        event
    }

    /// Records a new event, in streams that do nothing until `stalled` is 0 again.
    pub(crate) fn record_behind_a_stall(&self) -> usize {
        self.fake.set("stalled", 1);
        self.record()
    }
}
