//! The copy routines: the only instructions that touch a pool. Where the memory fails under one of them
//! (SIGBUS), the handler of [`super::signal`] continues at its fixup, and it returns how much is left.
//!
//! A routine keeps the number of bytes that are left in `rdx` at every instruction that can fault, changes it
//! after the bytes have moved, and pushes nothing. Bytes that are left may have moved. The handler leaves the
//! cause in `r8`.

/// How a routine ended.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct Ended {
    /// The bytes that were not copied; 0 when all were.
    pub(super) left: usize,
    /// 0, or what the handler has left: the address that failed in the upper 56 bits, the code of the signal
    /// in the lower 8.
    pub(super) cause: usize,
}

#[cfg(target_arch = "x86_64")]
pub(super) use x86_64::{can_flush, copy, flush, nt_copy};

#[cfg(target_arch = "x86_64")]
mod x86_64 {
    use std::arch::global_asm;
    use std::arch::x86_64::{__cpuid, __cpuid_count};
    use std::sync::atomic::{AtomicU8, Ordering};

    use super::Ended;

    global_asm!(
        ".pushsection .text.te_cxl_copies,\"ax\",@progbits",
        ".p2align 6",
        ".hidden te_cxl_copies_begin",
        ".globl te_cxl_copies_begin",
        "te_cxl_copies_begin:",
        // Stores past the cache, 64 bytes at a time: rdi to (aligned to 16), rsi from, rdx bytes (of 64).
        ".hidden te_cxl_nt_copy",
        ".globl te_cxl_nt_copy",
        "te_cxl_nt_copy:",
        "test rdx, rdx",
        "jz 9f",
        ".p2align 5",
        "2:",
        "movdqu xmm0, [rsi]",
        "movdqu xmm1, [rsi + 16]",
        "movdqu xmm2, [rsi + 32]",
        "movdqu xmm3, [rsi + 48]",
        "movntdq [rdi], xmm0",
        "movntdq [rdi + 16], xmm1",
        "movntdq [rdi + 32], xmm2",
        "movntdq [rdi + 48], xmm3",
        "add rsi, 64",
        "add rdi, 64",
        "sub rdx, 64",
        "jnz 2b",
        "jmp 9f",
        // Through the cache: rdi to, rsi from, rdx bytes.
        ".hidden te_cxl_copy",
        ".globl te_cxl_copy",
        ".p2align 5",
        "te_cxl_copy:",
        "cmp rdx, 64",
        "jb 4f",
        ".p2align 5",
        "3:",
        "movups xmm0, [rsi]",
        "movups xmm1, [rsi + 16]",
        "movups xmm2, [rsi + 32]",
        "movups xmm3, [rsi + 48]",
        "movups [rdi], xmm0",
        "movups [rdi + 16], xmm1",
        "movups [rdi + 32], xmm2",
        "movups [rdi + 48], xmm3",
        "add rsi, 64",
        "add rdi, 64",
        "sub rdx, 64",
        "cmp rdx, 64",
        "jae 3b",
        "4:",
        "cmp rdx, 8",
        "jb 5f",
        "mov rax, [rsi]",
        "mov [rdi], rax",
        "add rsi, 8",
        "add rdi, 8",
        "sub rdx, 8",
        "jmp 4b",
        "5:",
        "test rdx, rdx",
        "jz 9f",
        "mov al, [rsi]",
        "mov [rdi], al",
        "inc rsi",
        "inc rdi",
        "dec rdx",
        "jmp 5b",
        // The lines of rdi, 64 bytes each, rdx bytes (of 64).
        ".hidden te_cxl_flush_opt",
        ".globl te_cxl_flush_opt",
        ".p2align 5",
        "te_cxl_flush_opt:",
        "test rdx, rdx",
        "jz 9f",
        "6:",
        "clflushopt [rdi]",
        "add rdi, 64",
        "sub rdx, 64",
        "jnz 6b",
        "jmp 9f",
        ".hidden te_cxl_flush_plain",
        ".globl te_cxl_flush_plain",
        ".p2align 5",
        "te_cxl_flush_plain:",
        "test rdx, rdx",
        "jz 9f",
        "7:",
        "clflush [rdi]",
        "add rdi, 64",
        "sub rdx, 64",
        "jnz 7b",
        "9:",
        "xor eax, eax",
        "xor edx, edx",
        "ret",
        // Through the cache, for processors with AVX.
        ".hidden te_cxl_copies_avx",
        ".globl te_cxl_copies_avx",
        "te_cxl_copies_avx:",
        ".hidden te_cxl_copy_avx",
        ".globl te_cxl_copy_avx",
        ".p2align 5",
        "te_cxl_copy_avx:",
        "cmp rdx, 128",
        "jb te_cxl_copy",
        ".p2align 5",
        "8:",
        "vmovups ymm0, [rsi]",
        "vmovups ymm1, [rsi + 32]",
        "vmovups ymm2, [rsi + 64]",
        "vmovups ymm3, [rsi + 96]",
        "vmovups [rdi], ymm0",
        "vmovups [rdi + 32], ymm1",
        "vmovups [rdi + 64], ymm2",
        "vmovups [rdi + 96], ymm3",
        "add rsi, 128",
        "add rdi, 128",
        "sub rdx, 128",
        "cmp rdx, 128",
        "jae 8b",
        "vzeroupper",
        "jmp te_cxl_copy",
        // Stores past the cache, for processors with AVX: of 16 KiB, a line of each of its four pages at a
        // time, which are at different parts of the memory. `rdx` changes after all of the 16 KiB.
        ".hidden te_cxl_nt_copy_avx",
        ".globl te_cxl_nt_copy_avx",
        ".p2align 5",
        "te_cxl_nt_copy_avx:",
        "cmp rdx, 16384",
        "jb te_cxl_nt_copy",
        "22:",
        "mov ecx, 64",
        ".p2align 5",
        "23:",
        "vmovdqu ymm0, [rsi]",
        "vmovdqu ymm1, [rsi + 32]",
        "vmovdqu ymm2, [rsi + 4096]",
        "vmovdqu ymm3, [rsi + 4128]",
        "vmovdqu ymm4, [rsi + 8192]",
        "vmovdqu ymm5, [rsi + 8224]",
        "vmovdqu ymm6, [rsi + 12288]",
        "vmovdqu ymm7, [rsi + 12320]",
        "vmovntdq [rdi], ymm0",
        "vmovntdq [rdi + 32], ymm1",
        "vmovntdq [rdi + 4096], ymm2",
        "vmovntdq [rdi + 4128], ymm3",
        "vmovntdq [rdi + 8192], ymm4",
        "vmovntdq [rdi + 8224], ymm5",
        "vmovntdq [rdi + 12288], ymm6",
        "vmovntdq [rdi + 12320], ymm7",
        "add rsi, 64",
        "add rdi, 64",
        "dec ecx",
        "jnz 23b",
        "add rsi, 12288",
        "add rdi, 12288",
        "sub rdx, 16384",
        "cmp rdx, 16384",
        "jae 22b",
        "vzeroupper",
        "jmp te_cxl_nt_copy",
        ".hidden te_cxl_copies_end",
        ".globl te_cxl_copies_end",
        "te_cxl_copies_end:",
        // Where a routine continues whose memory failed.
        ".hidden te_cxl_fixup",
        ".globl te_cxl_fixup",
        "te_cxl_fixup:",
        "mov rax, rdx",
        "mov rdx, r8",
        "ret",
        ".hidden te_cxl_fixup_avx",
        ".globl te_cxl_fixup_avx",
        "te_cxl_fixup_avx:",
        "vzeroupper",
        "jmp te_cxl_fixup",
        ".popsection",
    );

    unsafe extern "sysv64" {
        fn te_cxl_nt_copy(to: *mut u8, from: *const u8, len: usize) -> Ended;
        fn te_cxl_nt_copy_avx(to: *mut u8, from: *const u8, len: usize) -> Ended;
        fn te_cxl_copy(to: *mut u8, from: *const u8, len: usize) -> Ended;
        fn te_cxl_copy_avx(to: *mut u8, from: *const u8, len: usize) -> Ended;
        fn te_cxl_flush_opt(at: *mut u8, unused: usize, len: usize) -> Ended;
        fn te_cxl_flush_plain(at: *mut u8, unused: usize, len: usize) -> Ended;
    }

    /// What the processor has, after it was asked once.
    static FOUND: AtomicU8 = AtomicU8::new(0);
    const ASKED: u8 = 1;
    const AVX: u8 = 2;
    const FLUSH: u8 = 4;
    const FLUSH_OPT: u8 = 8;
    /// The bytes that `te_cxl_nt_copy_avx` stores side by side.
    const BLOCK: usize = 16 << 10;

    fn found() -> u8 {
        match FOUND.load(Ordering::Relaxed) {
            0 => ask(),
            found => found,
        }
    }

    #[cold]
    fn ask() -> u8 {
        let mut found = ASKED;
        // Every x86_64 processor answers these leaves, or a lower largest leaf.
        let (most, one) = (__cpuid(0).eax, __cpuid(1));
        if std::is_x86_feature_detected!("avx") {
            found |= AVX;
        }
        // The length of a line that `clflush` drops, in units of 8 bytes.
        if one.edx & 1 << 19 != 0 && one.ebx >> 8 & 0xff == 8 {
            found |= FLUSH;
        }
        if most >= 7 && __cpuid_count(7, 0).ebx & 1 << 23 != 0 {
            found |= FLUSH_OPT;
        }
        FOUND.store(found, Ordering::Relaxed);
        found
    }

    /// Whether lines of 64 bytes can be dropped from the cache.
    pub(in super::super) fn can_flush() -> bool {
        found() & FLUSH != 0
    }

    /// # Safety
    /// `from` is readable and `to` writable for `len` bytes, or the handler is installed and they fail with
    /// SIGBUS. They do not overlap.
    pub(in super::super) unsafe fn copy(to: *mut u8, from: *const u8, len: usize) -> Ended {
        // SAFETY: the caller's promise; the processor has AVX where that is used.
        unsafe {
            match len >= 128 && found() & AVX != 0 {
                true => te_cxl_copy_avx(to, from, len),
                false => te_cxl_copy(to, from, len),
            }
        }
    }

    /// Stores past the cache.
    ///
    /// # Safety
    /// As [`copy`]; `to` and `len` are multiples of 64.
    pub(in super::super) unsafe fn nt_copy(to: *mut u8, from: *const u8, len: usize) -> Ended {
        // SAFETY: as in `copy`.
        unsafe {
            match len >= BLOCK && found() & AVX != 0 {
                true => te_cxl_nt_copy_avx(to, from, len),
                false => te_cxl_nt_copy(to, from, len),
            }
        }
    }

    /// Drops lines from the cache.
    ///
    /// # Safety
    /// As [`copy`], for `at`; `at` and `len` are multiples of 64.
    pub(in super::super) unsafe fn flush(at: *mut u8, len: usize) -> Ended {
        // SAFETY: the caller's promise; the processor has `clflushopt` where that is used.
        unsafe {
            match found() & FLUSH_OPT != 0 {
                true => te_cxl_flush_opt(at, 0, len),
                false => te_cxl_flush_plain(at, 0, len),
            }
        }
    }

    #[cfg(test)]
    mod tests {
        use super::*;

        #[derive(Clone, Copy)]
        #[repr(align(64))]
        struct Aligned([u8; 1024]);

        /// The same, for lengths with whole blocks.
        #[test]
        fn blocks_are_stored_side_by_side_and_whole() {
            if found() & AVX == 0 {
                return;
            }
            let bytes: Vec<u8> = (0..5 * BLOCK + 64).map(|at| (at % 251) as u8).collect();
            for len in [BLOCK - 64, BLOCK, BLOCK + 64, 2 * BLOCK, 3 * BLOCK + 4_096, 4 * BLOCK + 192] {
                for (from_at, lines) in [(0, 0), (1, 3), (63, 64)] {
                    let mut to = vec![Aligned([0xEE; 1024]); 6 * BLOCK / 1024];
                    let to_at = lines * 64;
                    // SAFETY: both ranges lie in their arrays, and the place is one of whole lines.
                    let ended = unsafe {
                        let to = to.as_mut_ptr().cast::<u8>().add(to_at);
                        te_cxl_nt_copy_avx(to, bytes.as_ptr().add(from_at), len)
                    };
                    assert_eq!((ended.left, ended.cause), (0, 0));
                    let to: Vec<u8> = to.iter().flat_map(|part| part.0).collect();
                    assert!(to[to_at..to_at + len] == bytes[from_at..from_at + len], "{len} bytes");
                    let others = to[..to_at].iter().chain(&to[to_at + len..]);
                    assert!(others.into_iter().all(|byte| *byte == 0xEE), "{len} bytes");
                }
            }
        }

        type Routine = unsafe extern "sysv64" fn(*mut u8, *const u8, usize) -> Ended;

        /// Copies `len` bytes between these offsets, and checks that no others change.
        fn check(copy: Routine, from_at: usize, to_at: usize, len: usize) {
            let mut from = Aligned([0; 1024]);
            (0..).zip(&mut from.0).for_each(|(at, byte): (usize, _)| *byte = (at % 251) as u8);
            let mut to = Aligned([0xEE; 1024]);
            let mut expected = to.0;
            expected[to_at..to_at + len].copy_from_slice(&from.0[from_at..from_at + len]);
            // SAFETY: both ranges lie in their arrays.
            let ended = unsafe { copy(to.0.as_mut_ptr().add(to_at), from.0.as_ptr().add(from_at), len) };
            assert_eq!((ended.left, ended.cause), (0, 0));
            assert_eq!(to.0, expected, "{len} bytes from {from_at} to {to_at}");
        }

        #[test]
        fn every_routine_copies_what_it_is_told_and_nothing_else() {
            let mut routines: Vec<Routine> = vec![te_cxl_copy];
            if found() & AVX != 0 {
                routines.push(te_cxl_copy_avx);
            }
            for copy in routines {
                for len in (0..300).chain([511, 512, 640, 700]) {
                    for (from_at, to_at) in [(0, 0), (1, 0), (0, 3), (17, 31)] {
                        check(copy, from_at, to_at, len);
                    }
                }
            }
            for len in (0..=640).step_by(64) {
                for (from_at, to_at) in [(0, 0), (1, 64), (63, 128)] {
                    check(te_cxl_nt_copy, from_at, to_at, len);
                }
            }
        }

        #[test]
        fn a_flush_changes_no_byte() {
            let mut flushes = vec![te_cxl_flush_plain as unsafe extern "sysv64" fn(_, _, _) -> _];
            if found() & FLUSH_OPT != 0 {
                flushes.push(te_cxl_flush_opt);
            }
            for flush in flushes {
                for len in [0, 64, 1024] {
                    let mut bytes = Aligned([7; 1024]);
                    // SAFETY: the lines lie in the array.
                    let ended = unsafe { flush(bytes.0.as_mut_ptr(), 0, len) };
                    assert_eq!((ended.left, ended.cause, bytes.0), (0, 0, [7; 1024]));
                }
            }
            assert!(can_flush() || found() & FLUSH == 0);
        }
    }
}
