//! te-core inside another data mover: a DMA engine with one queue becomes a `Transport`, and a batch runs
//! over it.
//!
//! Without std, main or start-up files (`embed/bare.rs` has what is missing):
//! `cargo rustc -p te-core --example embed --no-default-features -- -Cpanic=abort -Clink-arg=-nostartfiles`
//! With them: `cargo run -p te-core --example embed`. Both end with exit code 0 when the bytes have arrived.
#![cfg_attr(not(feature = "std"), no_std, no_main)]

extern crate alloc;

use alloc::collections::VecDeque;
use alloc::vec::Vec;
use te_core::{
    Access, BatchTable, Capabilities, Completion, Error, ErrorKind, Features, Instant, MemSpan, Memory,
    MemoryKinds, Op, RegionId, RegionOffset, RemoteOffset, RemoteRegionId, Slice, Slicer, Status, Token,
    TransferRequest, Transport, copy_bytes,
};

/// The engine: 16 descriptors deep, one copy per poll. Remote regions are regions of the same machine.
struct Dma {
    regions: Vec<(RegionId, MemSpan)>,
    remote_regions: Vec<(RemoteRegionId, MemSpan)>,
    queue: VecDeque<(Completion, MemSpan, MemSpan)>,
}

fn find<I: PartialEq + Copy>(table: &[(I, MemSpan)], id: I) -> Result<MemSpan, Error> {
    Ok(table.iter().find(|(known, _)| *known == id).ok_or(ErrorKind::NotFound)?.1)
}

impl Memory for Dma {
    unsafe fn register(&mut self, id: RegionId, span: MemSpan, _: Access) -> Result<(), Error> {
        span.require(MemoryKinds::HOST)?;
        self.regions.push((id, span));
        Ok(())
    }
    fn deregister(&mut self, id: RegionId) -> Result<(), Error> {
        if !self.queue.is_empty() {
            return Err(ErrorKind::Busy.into());
        }
        self.regions.retain(|(known, _)| *known != id);
        Ok(())
    }
    fn export(&self, id: RegionId, out: &mut [u8]) -> Result<usize, Error> {
        out.get_mut(..8).ok_or(ErrorKind::OutOfRange)?.copy_from_slice(&id.to_bits().to_le_bytes());
        Ok(8)
    }
    fn attach(&mut self, id: RemoteRegionId, blob: &[u8]) -> Result<(), Error> {
        let bits = u64::from_le_bytes(blob.try_into().map_err(|_| ErrorKind::InvalidArgument)?);
        let span = find(&self.regions, RegionId::from_bits(bits))?;
        self.remote_regions.push((id, span));
        Ok(())
    }
    fn detach(&mut self, id: RemoteRegionId) -> Result<(), Error> {
        self.remote_regions.retain(|(known, _)| *known != id);
        Ok(())
    }
}

impl Transport for Dma {
    fn name(&self) -> &'static str {
        "dma"
    }
    fn capabilities(&self) -> Capabilities {
        Capabilities::new(Features::READ | Features::WRITE)
            .with_slice_bytes(4096, 1 << 20)
            .with_inflight_max(16)
            .with_export_bytes_max(8)
    }
    fn submit(&mut self, batch: &[Slice]) -> Result<usize, Error> {
        for (accepted, slice) in batch.iter().enumerate() {
            if self.queue.len() == 16 {
                return Ok(accepted);
            }
            let near =
                find(&self.regions, slice.local.region)?.part(slice.local.offset, u64::from(slice.len))?;
            let far = find(&self.remote_regions, slice.remote.region)?
                .part(slice.remote.offset, u64::from(slice.len))?;
            let (from, to) = if slice.op == Op::Write { (near, far) } else { (far, near) };
            self.queue.push_back((Completion::applied(slice.token), from, to));
        }
        Ok(batch.len())
    }
    fn poll(&mut self, _now: Instant, out: &mut [Completion]) -> usize {
        let (Some(place), Some((done, from, to))) = (out.first_mut(), self.queue.pop_front()) else {
            return 0;
        };
        // SAFETY: both spans are parts of registered memory, which stays mapped; the regions do not overlap.
        unsafe { copy_bytes(from.as_ptr(), to.as_ptr(), from.len()) };
        *place = done;
        1
    }
    fn poll_at(&self) -> Option<Instant> {
        None
    }
    fn cancel(&mut self, token: Token) -> Result<(), Error> {
        match self.queue.iter_mut().find(|(done, ..)| done.token == token) {
            Some((done, from, to)) => {
                *done = Completion::not_applied(token, ErrorKind::Canceled.into());
                (*from, *to) = (MemSpan::new(from.as_ptr(), 0), MemSpan::new(to.as_ptr(), 0));
                Ok(())
            }
            None => Err(ErrorKind::NotFound.into()),
        }
    }
    fn fence(&mut self, token: Token, _: RemoteRegionId) -> Result<(), Error> {
        let nothing = MemSpan::new(core::ptr::dangling_mut(), 0);
        self.queue.push_back((Completion::applied(token), nothing, nothing));
        Ok(())
    }
}

/// Copies 100,000 bytes with one batch, and returns whether they arrived.
fn move_a_block() -> Result<bool, Error> {
    const BYTES: u64 = 100_000;
    let (mut source, mut sink) = (alloc::vec![7u8; BYTES as usize], alloc::vec![0u8; BYTES as usize]);
    let (near, far, there) = (RegionId::new(0, 1), RegionId::new(1, 1), RemoteRegionId::new(0, 1));
    let mut dma = Dma { regions: Vec::new(), remote_regions: Vec::new(), queue: VecDeque::with_capacity(17) };
    // SAFETY: the vectors stay where they are, and no reference to their bytes is made until both regions are
    // deregistered.
    unsafe {
        dma.register(near, MemSpan::new(source.as_mut_ptr(), source.len()), Access::LOCAL)?;
        dma.register(far, MemSpan::new(sink.as_mut_ptr(), sink.len()), Access::REMOTE_WRITE)?;
    }
    let mut blob = [0; 8];
    dma.export(far, &mut blob)?;
    dma.attach(there, &blob)?;

    let mut table = BatchTable::new(1, 1);
    let request = TransferRequest {
        op: Op::Write,
        local: RegionOffset::new(near, 0),
        remote: RemoteOffset::new(there, 0),
        len: BYTES,
    };
    let batch = table.create([request].into_iter(), Slicer::new(4096))?;
    let mut slices = [Slice {
        token: Token(0),
        local: RegionOffset::new(near, 0),
        remote: RemoteOffset::new(there, 0),
        len: 0,
        op: Op::Read,
    }; 8];
    let mut ends = [Completion::applied(Token(0)); 8];
    while !table.progress(batch)?.status.is_terminal() {
        let cut = table.next(batch, &mut slices)?;
        let accepted = dma.submit(&slices[..cut])?;
        table.accepted(&slices[..accepted]);
        let ended = dma.poll(Instant::ZERO, &mut ends);
        for end in &ends[..ended] {
            table.complete(end);
        }
    }
    let completed = table.progress(batch)?.status == Status::Completed;
    dma.deregister(near)?;
    dma.deregister(far)?;
    Ok(completed && sink == source)
}

#[cfg(feature = "std")]
fn main() {
    assert_eq!(move_a_block(), Ok(true));
    println!("100000 bytes moved");
}

#[cfg(not(feature = "std"))]
#[path = "embed/bare.rs"]
mod bare;
