//! What an operating system or a boot loader would provide: an entry point, an exit, a heap, memory
//! functions.

use core::alloc::{GlobalAlloc, Layout};
use core::sync::atomic::{AtomicUsize, Ordering};

#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
core::arch::global_asm!(
    ".globl _start",
    "_start: and rsp, -16",
    "call {main}",
    "mov edi, eax",
    "mov eax, 60", // exit
    "syscall",
    main = sym main,
);

// memcpy and similar functions; a bare-metal target has them in compiler_builtins.
#[cfg(target_os = "linux")]
#[link(name = "c")]
unsafe extern "C" {}

extern "C" fn main() -> i32 {
    i32::from(super::move_a_block() != Ok(true))
}

#[cfg(target_os = "none")]
#[unsafe(no_mangle)]
extern "C" fn _start() -> ! {
    main();
    loop {
        core::hint::spin_loop();
    }
}

/// The crates below may have been built to unwind; this program aborts, so these are never called.
#[unsafe(no_mangle)]
extern "C" fn rust_eh_personality() {}

#[cfg(target_os = "linux")]
#[unsafe(no_mangle)]
extern "C" fn _Unwind_Resume() {}

#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    loop {
        core::hint::spin_loop();
    }
}

/// A heap that only grows: te-core allocates when objects are made, not when they are used.
struct Bump(AtomicUsize);

const HEAP_BYTES: usize = 1 << 20;
static mut HEAP: [u128; HEAP_BYTES / 16] = [0; HEAP_BYTES / 16];

#[global_allocator]
static ALLOC: Bump = Bump(AtomicUsize::new(0));

// SAFETY: every call returns a part of HEAP that no other call returned, aligned as requested, or null.
unsafe impl GlobalAlloc for Bump {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let bytes = layout.size() + layout.align();
        let at = self.0.fetch_add(bytes, Ordering::Relaxed);
        if at + bytes > HEAP_BYTES {
            return core::ptr::null_mut();
        }
        let start = (&raw mut HEAP).cast::<u8>().wrapping_add(at);
        start.wrapping_add(start.align_offset(layout.align()))
    }
    unsafe fn dealloc(&self, _: *mut u8, _: Layout) {}
}
