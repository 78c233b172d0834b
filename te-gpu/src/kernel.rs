//! The copy kernel: its text, which the driver compiles when it is loaded, and the shape of a launch.
//!
//! The text is PTX, so no compiler of GPU code is needed to build this crate, and one text serves every
//! device from compute capability 7.0 on.
//!
//! A launch has a ring of descriptors `{to, from, len}` in page-locked memory. Warps of 32 threads share them
//! out: with many descriptors each warp copies whole ones, with few ones `split` warps share each. A warp
//! copies tiles of four loads and stores per thread, so that it has 2 KiB under way. The entry `copy16` moves
//! 16 bytes per load: source and destination have the same address modulo 16, and the bytes before and after
//! the multiples of 16 are copied one by one. The entry `copy1` moves single bytes, for everything else.
//!
//! At the end each block counts itself in a ticket in device memory. The last one resets it, and then stores
//! the sequence number of the launch to the completion word in host memory, with release semantics: the
//! stores of all blocks are visible before the word is.

/// Threads of a block.
pub(crate) const THREADS: u32 = 1_024;
const WARP: u32 = 32;
/// Bytes of a tile: 32 threads with four loads of 16 bytes.
const TILE_BYTES: u64 = 2_048;

/// The name of the entry that moves 16 bytes per load.
pub(crate) const COPY16: &std::ffi::CStr = c"copy16";
/// The name of the entry that moves single bytes.
pub(crate) const COPY1: &std::ffi::CStr = c"copy1";

/// How a launch is laid out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Shape {
    pub(crate) blocks: u32,
    /// Warps that share a descriptor.
    pub(crate) split: u32,
}

impl Shape {
    /// The shape for `count` descriptors that together have `bytes`, with at most `blocks_max` blocks.
    pub(crate) fn of(count: u32, bytes: u64, blocks_max: u32) -> Self {
        let count = count.max(1);
        let tiles = (bytes / u64::from(count)).div_ceil(TILE_BYTES).clamp(1, u64::from(blocks_max * THREADS));
        let wanted = u64::from(count) * tiles;
        let per_block = THREADS / WARP;
        let blocks = wanted.div_ceil(u64::from(per_block)).min(u64::from(blocks_max)).max(1) as u32;
        let split = u64::from(blocks * per_block / count).clamp(1, tiles) as u32;
        Self { blocks, split }
    }
}

/// Parameters, and which descriptor and part of it this warp begins with.
/// r10: channel. r13: descriptor. r14: part. r15: descriptors to the next one.
macro_rules! head {
    ($name:literal) => {
        concat!(
            ".visible .entry ",
            $name,
            "(
    .param .u64 descriptors,
    .param .u32 first,
    .param .u32 mask,
    .param .u32 count,
    .param .u32 split,
    .param .u64 ticket,
    .param .u64 word,
    .param .u64 sequence
)
.maxntid 1024, 1, 1
{
    .reg .pred %p<12>;
    .reg .b32 %r<64>;
    .reg .b64 %d<32>;
    ld.param.u64 %d0, [descriptors];
    ld.param.u32 %r0, [first];
    ld.param.u32 %r1, [mask];
    ld.param.u32 %r2, [count];
    ld.param.u32 %r3, [split];
    mov.u32 %r4, %ctaid.x;
    mov.u32 %r5, %ntid.x;
    mov.u32 %r6, %tid.x;
    mov.u32 %r7, %nctaid.x;
    shr.u32 %r8, %r5, 5;
    shr.u32 %r9, %r6, 5;
    and.b32 %r10, %r6, 31;
    mad.lo.u32 %r11, %r4, %r8, %r9;
    mul.lo.u32 %r12, %r7, %r8;
    div.u32 %r13, %r11, %r3;
    rem.u32 %r14, %r11, %r3;
    div.u32 %r15, %r12, %r3;
    setp.ge.u32 %p0, %r13, %r15;
    @%p0 bra DONE;
NEXT:
    setp.ge.u32 %p0, %r13, %r2;
    @%p0 bra DONE;
    add.u32 %r16, %r0, %r13;
    and.b32 %r16, %r16, %r1;
    mul.wide.u32 %d1, %r16, 24;
    add.u64 %d1, %d0, %d1;
    ld.global.u64 %d2, [%d1];
    ld.global.u64 %d3, [%d1+8];
    ld.global.u32 %r17, [%d1+16];
    add.u32 %r13, %r13, %r15;
"
        )
    };
}

/// Counts the block, and publishes the sequence number if it is the last one.
macro_rules! tail {
    () => {
        "
DONE:
    ld.param.u64 %d20, [word];
    setp.eq.u64 %p8, %d20, 0;
    @%p8 bra END;
    membar.sys;
    bar.sync 0;
    setp.ne.u32 %p9, %r6, 0;
    @%p9 bra END;
    ld.param.u64 %d21, [ticket];
    atom.global.add.u32 %r50, [%d21], 1;
    sub.u32 %r51, %r7, 1;
    setp.ne.u32 %p10, %r50, %r51;
    @%p10 bra END;
    mov.u32 %r52, 0;
    st.global.u32 [%d21], %r52;
    membar.sys;
    ld.param.u64 %d22, [sequence];
    st.release.sys.global.u64 [%d20], %d22;
END:
    ret;
}
"
    };
}

/// The text of both entries, with a NUL at the end.
pub(crate) const PTX: &str = concat!(
    ".version 7.0\n.target sm_70\n.address_size 64\n\n",
    head!("copy16"),
    // r18: bytes before the first multiple of 16. r20: bytes from there. r21: units of 16. r22: bytes after.
    "    neg.s64 %d4, %d2;
    and.b64 %d4, %d4, 15;
    cvt.u32.u64 %r18, %d4;
    min.u32 %r18, %r18, %r17;
    sub.u32 %r20, %r17, %r18;
    shr.u32 %r21, %r20, 4;
    and.b32 %r22, %r20, 15;
    cvt.u64.u32 %d8, %r18;
    add.u64 %d9, %d2, %d8;
    add.u64 %d10, %d3, %d8;
    setp.eq.u32 %p1, %r14, 0;
    setp.lt.and.u32 %p2, %r10, %r18, %p1;
    @!%p2 bra REST;
    cvt.u64.u32 %d5, %r10;
    add.u64 %d6, %d3, %d5;
    add.u64 %d7, %d2, %d5;
    ld.global.nc.u8 %r19, [%d6];
    st.global.u8 [%d7], %r19;
REST:
    setp.lt.and.u32 %p3, %r10, %r22, %p1;
    @!%p3 bra TILES;
    sub.u32 %r23, %r20, %r22;
    add.u32 %r23, %r23, %r10;
    cvt.u64.u32 %d5, %r23;
    add.u64 %d6, %d10, %d5;
    add.u64 %d7, %d9, %d5;
    ld.global.nc.u8 %r19, [%d6];
    st.global.u8 [%d7], %r19;
TILES:
    shl.b32 %r24, %r14, 7;
    add.u32 %r24, %r24, %r10;
    shl.b32 %r25, %r3, 7;
TILE:
    setp.ge.u32 %p4, %r24, %r21;
    @%p4 bra NEXT;
    add.u32 %r26, %r24, 32;
    add.u32 %r27, %r24, 64;
    add.u32 %r28, %r24, 96;
    setp.lt.u32 %p5, %r26, %r21;
    setp.lt.u32 %p6, %r27, %r21;
    setp.lt.u32 %p7, %r28, %r21;
    mul.wide.u32 %d11, %r24, 16;
    add.u64 %d12, %d10, %d11;
    add.u64 %d13, %d9, %d11;
    ld.global.nc.v4.u32 {%r30, %r31, %r32, %r33}, [%d12];
    @%p5 ld.global.nc.v4.u32 {%r34, %r35, %r36, %r37}, [%d12+512];
    @%p6 ld.global.nc.v4.u32 {%r38, %r39, %r40, %r41}, [%d12+1024];
    @%p7 ld.global.nc.v4.u32 {%r42, %r43, %r44, %r45}, [%d12+1536];
    st.global.v4.u32 [%d13], {%r30, %r31, %r32, %r33};
    @%p5 st.global.v4.u32 [%d13+512], {%r34, %r35, %r36, %r37};
    @%p6 st.global.v4.u32 [%d13+1024], {%r38, %r39, %r40, %r41};
    @%p7 st.global.v4.u32 [%d13+1536], {%r42, %r43, %r44, %r45};
    add.u32 %r24, %r24, %r25;
    bra TILE;
",
    tail!(),
    "\n",
    head!("copy1"),
    "    shl.b32 %r24, %r14, 7;
    add.u32 %r24, %r24, %r10;
    shl.b32 %r25, %r3, 7;
TILE:
    setp.ge.u32 %p4, %r24, %r17;
    @%p4 bra NEXT;
    add.u32 %r26, %r24, 32;
    add.u32 %r27, %r24, 64;
    add.u32 %r28, %r24, 96;
    setp.lt.u32 %p5, %r26, %r17;
    setp.lt.u32 %p6, %r27, %r17;
    setp.lt.u32 %p7, %r28, %r17;
    cvt.u64.u32 %d11, %r24;
    add.u64 %d12, %d3, %d11;
    add.u64 %d13, %d2, %d11;
    ld.global.nc.u8 %r30, [%d12];
    @%p5 ld.global.nc.u8 %r31, [%d12+32];
    @%p6 ld.global.nc.u8 %r32, [%d12+64];
    @%p7 ld.global.nc.u8 %r33, [%d12+96];
    st.global.u8 [%d13], %r30;
    @%p5 st.global.u8 [%d13+32], %r31;
    @%p6 st.global.u8 [%d13+64], %r32;
    @%p7 st.global.u8 [%d13+96], %r33;
    add.u32 %r24, %r24, %r25;
    bra TILE;
",
    tail!(),
    "\0"
);

#[cfg(test)]
mod interpreter;
#[cfg(test)]
mod tests;
