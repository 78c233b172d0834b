//! The one place where a caller's promise about memory enters the crate.

use te_core::{Access, Error, MemSpan, Memory, RegionId, RemoteRegionId};

use super::Pinned;
use crate::NvmeofTransport;

impl Memory for NvmeofTransport {
    unsafe fn register(&mut self, id: RegionId, span: MemSpan, access: Access) -> Result<(), Error> {
        // SAFETY: the caller keeps `span` mapped and unborrowed until `deregister` returns `Ok`, which it
        // does only when no operation, own or a host's, holds the memory or a part of it. Memory that is not
        // the host's is refused, and then the value is dropped unused.
        let memory = unsafe { Pinned::new(span) };
        self.register_memory(id, span, access, memory)
    }

    fn deregister(&mut self, id: RegionId) -> Result<(), Error> {
        self.deregister_memory(id)
    }

    fn export(&self, id: RegionId, out: &mut [u8]) -> Result<usize, Error> {
        self.export_memory(id, out)
    }

    fn attach(&mut self, id: RemoteRegionId, blob: &[u8]) -> Result<(), Error> {
        self.attach_remote(id, blob)
    }

    fn detach(&mut self, id: RemoteRegionId) -> Result<(), Error> {
        self.detach_remote(id)
    }
}
