//! One read or write: the pieces of memory that the kernel is given, and what has to be copied.
//!
//! Direct I/O wants every piece aligned: its address to what the device's DMA needs, its length to the
//! logical block. An object in memory has an aligned beginning in the normal case, and a tail that fills no
//! block. So the whole blocks of an object are written from where they are, and its tail goes through a
//! bounce buffer, together with headers and padding:
//!
//! ```text
//!   pieces     [header][object ............... |tail][0][object ............... |tail][0]
//!   the kernel [bounce][object ............... ][bounce][object ............... ][bounce]
//! ```

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

use te_core::{MemSpan, copy_bytes};

use super::{AlignedBuffer, Alignment};
use crate::disk::driver::{Completion, Destination, Io, IoWork, Part};

/// Most pieces that the kernel takes in one call (`UIO_MAXIOV`).
const PIECES_MAX: usize = 1_024;

/// A read or write that is being carried out. It owns or shares everything that the kernel is given.
pub(in crate::disk) struct Transfer {
    io: Io,
    pieces: Vec<libc::iovec>,
    bounce: Option<AlignedBuffer>,
    bytes: u32,
}

// SAFETY: the pieces point to the bounce buffer, and to memory whose owner `io` shares.
unsafe impl Send for Transfer {}

/// What becomes of a part of a write.
enum Step<'a> {
    Direct(MemSpan),
    Copy(&'a [u8]),
    CopyLent(MemSpan),
    Zeros(usize),
}

impl Transfer {
    /// Prepares a read or write. A sync has no pieces.
    pub(in crate::disk) fn new(io: Io, alignment: Alignment) -> Self {
        let mut transfer = Self { bytes: io.work.bytes(), io, pieces: Vec::new(), bounce: None };
        match &transfer.io.work {
            IoWork::Write(parts) => {
                let (pieces, bounce) = gather(parts, alignment);
                (transfer.pieces, transfer.bounce) = (pieces, bounce);
            }
            IoWork::Read(Destination::Buffer(buffer)) => transfer.pieces = vec![piece(buffer.span())],
            IoWork::Read(Destination::Lent { memory, offset, bytes }) => {
                let span = memory.span().part(u64::from(*offset), u64::from(*bytes));
                let aligned = |span: &MemSpan| span.as_ptr().addr().is_multiple_of(alignment.memory as usize);
                match span.ok().filter(aligned) {
                    Some(span) => transfer.pieces = vec![piece(span)],
                    None => {
                        let bounce = AlignedBuffer::new(*bytes as usize);
                        transfer.pieces = vec![piece(bounce.span())];
                        transfer.bounce = Some(bounce);
                    }
                }
            }
            IoWork::Sync => {}
        }
        transfer
    }

    /// A read of bytes that do not come from a file: they are put into [`Self::received_bytes`], and copied
    /// to where they belong at the end.
    #[cfg(feature = "s3")]
    pub(in crate::disk) fn received(io: Io) -> Self {
        let bytes = io.work.bytes();
        Self { io, pieces: Vec::new(), bounce: Some(AlignedBuffer::new(bytes as usize)), bytes }
    }

    /// As many bytes as were ordered.
    #[cfg(feature = "s3")]
    pub(in crate::disk) fn received_bytes(&mut self) -> &mut [u8] {
        self.bounce.as_deref_mut().unwrap_or_default()
    }

    /// What it does.
    #[cfg(all(feature = "uring", target_os = "linux"))]
    pub(in crate::disk) const fn io(&self) -> &Io {
        &self.io
    }

    /// The pieces of the first call. They stay where they are, and valid, until the transfer is ended.
    #[cfg(all(feature = "uring", target_os = "linux"))]
    pub(in crate::disk) fn first_pieces(&self) -> &[libc::iovec] {
        &self.pieces[..self.pieces.len().min(PIECES_MAX)]
    }

    /// Carries it out on the calling thread. Returns the bytes that were read or written, 0 for a sync.
    pub(in crate::disk) fn run(&self, file: &File) -> io::Result<u32> {
        if matches!(self.io.work, IoWork::Sync) {
            return super::sync_data(file).map(|()| 0);
        }
        let mut done = 0_u64;
        for pieces in self.pieces.chunks(PIECES_MAX) {
            let wanted: usize = pieces.iter().map(|piece| piece.iov_len).sum();
            match self.call(file, pieces, self.io.offset + done) {
                Ok(bytes) => done += bytes as u64,
                // The rest is ordered again, and fails then.
                Err(_) if done > 0 => break,
                Err(error) => return Err(error),
            }
            if done < wanted as u64 {
                break;
            }
        }
        Ok(u32::try_from(done).unwrap_or(self.bytes).min(self.bytes))
    }

    fn call(&self, file: &File, pieces: &[libc::iovec], offset: u64) -> io::Result<usize> {
        let fd = file.as_raw_fd();
        let (count, at) = (pieces.len() as libc::c_int, offset as libc::off_t);
        loop {
            // SAFETY: the pieces lie in the bounce buffer, which `self` owns, or in memory whose owner
            // `self.io` shares. They can be read, and written for a read, until the call returns; nothing
            // else refers to them meanwhile.
            let result = unsafe {
                match self.io.work {
                    IoWork::Write(_) => libc::pwritev2(fd, pieces.as_ptr(), count, at, 0),
                    _ => libc::preadv2(fd, pieces.as_ptr(), count, at, 0),
                }
            };
            if let Ok(bytes) = usize::try_from(result) {
                return Ok(bytes);
            }
            let error = io::Error::last_os_error();
            if error.kind() != io::ErrorKind::Interrupted {
                return Err(error);
            }
        }
    }

    /// Ends it: what was read through the bounce buffer is copied to where it belongs, and everything that
    /// was borrowed is given back before this returns.
    pub(in crate::disk) fn end(self, result: io::Result<u32>) -> Completion {
        let Self { io, bounce, .. } = self;
        let mut data = None;
        match io.work {
            IoWork::Read(Destination::Buffer(buffer)) => data = Some(buffer),
            IoWork::Read(Destination::Lent { memory, offset, .. }) => {
                if let (Some(bounce), Ok(bytes)) = (bounce, &result)
                    && let Ok(to) = memory.span().part(offset.into(), (*bytes).into())
                {
                    // SAFETY: the bounce buffer has as many bytes as were ordered, and no more were read. The
                    // lent memory is writable and kept by its owner; it does not overlap a buffer of ours.
                    unsafe { copy_bytes(bounce.span().as_ptr(), to.as_ptr(), to.len()) };
                }
            }
            IoWork::Write(_) | IoWork::Sync => {}
        }
        Completion { op: io.op, result: result.map_err(Into::into), data }
    }
}

fn piece(span: MemSpan) -> libc::iovec {
    libc::iovec { iov_base: span.as_ptr().cast(), iov_len: span.len() }
}

/// The pieces of a write, and the buffer for those that are not aligned.
fn gather(parts: &[Part], alignment: Alignment) -> (Vec<libc::iovec>, Option<AlignedBuffer>) {
    let mut copied = 0;
    steps(parts, alignment, |step| match step {
        Step::Direct(_) => {}
        Step::Copy(bytes) => copied += bytes.len(),
        Step::CopyLent(span) => copied += span.len(),
        Step::Zeros(bytes) => copied += bytes,
    });
    let mut bounce = AlignedBuffer::new(copied);
    let mut pieces: Vec<libc::iovec> = Vec::new();
    let (mut at, base) = (0, bounce.span().as_ptr());
    // Whether the last piece is the end of the bounce buffer.
    let mut open = false;
    steps(parts, alignment, |step| {
        let bytes = match step {
            Step::Direct(span) => {
                pieces.push(piece(span));
                open = false;
                return;
            }
            Step::Copy(from) => {
                bounce[at..at + from.len()].copy_from_slice(from);
                from.len()
            }
            Step::CopyLent(from) => {
                let to = &mut bounce[at..at + from.len()];
                // SAFETY: the lent memory can be read, and is kept by its owner; it does not overlap a buffer
                // of ours.
                unsafe { copy_bytes(from.as_ptr(), to.as_mut_ptr(), to.len()) };
                from.len()
            }
            // The buffer is new.
            Step::Zeros(bytes) => bytes,
        };
        match pieces.last_mut().filter(|_| open) {
            Some(last) => last.iov_len += bytes,
            None => pieces.push(libc::iovec { iov_base: base.wrapping_add(at).cast(), iov_len: bytes }),
        }
        open = true;
        at += bytes;
    });
    (pieces, (copied > 0).then_some(bounce))
}

/// Divides the parts of a write into what the kernel can take from where it is, and what is copied.
fn steps<'a>(parts: &'a [Part], alignment: Alignment, mut step: impl FnMut(Step<'a>)) {
    let (block, memory) = (alignment.block as usize, alignment.memory as usize);
    let mut at = 0_usize;
    for part in parts {
        match part {
            Part::Bytes(bytes, from) => {
                let bytes = bytes.get(*from as usize..).unwrap_or_default();
                step(Step::Copy(bytes));
                at += bytes.len();
            }
            Part::Zeros(bytes) => {
                step(Step::Zeros(*bytes as usize));
                at += *bytes as usize;
            }
            Part::Lent { memory: lent, offset, bytes } => {
                let (offset, bytes) = (u64::from(*offset), u64::from(*bytes));
                let Ok(span) = lent.span().part(offset, bytes) else { continue };
                let mut whole = span.len() / block * block;
                if !at.is_multiple_of(block) || !span.as_ptr().addr().is_multiple_of(memory) {
                    whole = 0;
                }
                let rest = (span.len() - whole) as u64;
                if whole > 0
                    && let Ok(direct) = span.part(0, whole as u64)
                {
                    step(Step::Direct(direct));
                }
                if rest > 0
                    && let Ok(tail) = span.part(whole as u64, rest)
                {
                    step(Step::CopyLent(tail));
                }
                at += span.len();
            }
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
#[path = "transfer_tests.rs"]
mod tests;
