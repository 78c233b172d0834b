//! Virtual memory management, and handles for other processes and NICs.

use std::ffi::{c_int, c_void};
use std::os::fd::{FromRawFd, IntoRawFd, OwnedFd};
use std::ptr;
use std::sync::Arc;

use crate::memory::{self, PAGE};
use crate::model::{
    INVALID_DEVICE, INVALID_VALUE, Mapping, NOT_PERMITTED, NOT_SUPPORTED, Origin, Physical, state,
};
use crate::vendor::put;

/// What lengths of allocations are multiples of.
const GRANULARITY: usize = 2 << 20;
const POSIX_FD: u32 = 1;
const FABRIC: u32 = 8;

/// `CUmemAllocationProp`, as far as it is read.
#[repr(C)]
pub(crate) struct Properties {
    kind: c_int,
    handle_types: u32,
    location: (c_int, c_int),
    meta: *mut c_void,
    compression: u8,
    gpu_direct: u8,
}

exports! {
    "cuMemGetAllocationGranularity" | "hipMemGetAllocationGranularity" fn granularity(
        out: *mut usize,
        properties: *const Properties,
        _option: c_int,
    ) {
        if properties.is_null() {
            return Err(INVALID_VALUE);
        }
        put(out, GRANULARITY)
    }

    "cuMemCreate" | "hipMemCreate" fn create(
        out: *mut u64,
        bytes: usize,
        properties: *const Properties,
        _flags: u64,
    ) {
        // SAFETY: properties of the caller.
        let properties = unsafe { &*properties };
        let mut state = state();
        if properties.handle_types & FABRIC != 0 && state.domain == 0 {
            // As without an IMEX channel, whatever the attribute says.
            return Err(NOT_PERMITTED);
        }
        if properties.kind != 1 || bytes == 0 || !bytes.is_multiple_of(GRANULARITY) {
            return Err(INVALID_VALUE);
        }
        if properties.location.1 < 0 || properties.location.1 >= state.devices {
            return Err(INVALID_DEVICE);
        }
        let (fd, block_id) = (memory::memory(bytes)?, state.id());
        let physical = Physical {
            bytes,
            fd,
            device: properties.location.1,
            handle_types: properties.handle_types,
            gpu_direct: properties.gpu_direct != 0,
            block_id,
            handles: 1,
        };
        state.physical.insert(block_id, physical);
        put(out, block_id)
    }

    "cuMemRelease" | "hipMemRelease" fn release(handle: u64) {
        let mut state = state();
        let physical = state.physical.get_mut(&handle).filter(|physical| physical.handles > 0);
        physical.ok_or(INVALID_VALUE)?.handles -= 1;
        memory::forget_unused(&mut state, handle);
        Ok(())
    }

    "cuMemAddressReserve" | "hipMemAddressReserve" fn address_reserve(
        out: *mut u64,
        bytes: usize,
        _alignment: usize,
        _address: u64,
        _flags: u64,
    ) {
        if bytes == 0 || !bytes.is_multiple_of(PAGE) {
            return Err(INVALID_VALUE);
        }
        let at = memory::reserve(bytes, 0)?;
        state().reservations.insert(at as u64, bytes);
        put(out, at as u64)
    }

    "cuMemAddressFree" | "hipMemAddressFree" fn address_free(at: u64, bytes: usize) {
        let mut state = state();
        let is_mapped = state.mappings.range(at..at + bytes as u64).next().is_some();
        if is_mapped || state.reservations.get(&at) != Some(&bytes) {
            return Err(INVALID_VALUE);
        }
        state.reservations.remove(&at);
        memory::unmap(at as usize, bytes);
        Ok(())
    }

    "cuMemMap" | "hipMemMap" fn mem_map(at: u64, bytes: usize, _offset: usize, handle: u64, _flags: u64) {
        let mut state = state();
        let reserved = state.reservations.range(..=at).next_back().map(|(base, len)| (*base, *len));
        let range = reserved.filter(|(base, len)| at + bytes as u64 <= base + *len as u64).ok_or(INVALID_VALUE)?;
        let physical = state.physical.get(&handle).filter(|physical| physical.bytes == bytes);
        let physical = physical.ok_or(INVALID_VALUE)?;
        let fd = Arc::clone(&physical.fd);
        memory::map(&fd, bytes, libc::PROT_NONE, Some(at as usize))?;
        let own = memory::map(&fd, bytes, libc::PROT_READ | libc::PROT_WRITE, None)?;
        let mapping = Mapping {
            bytes,
            own,
            fd,
            device: physical.device,
            range,
            is_legacy: false,
            is_managed: false,
            is_foreign: false,
            is_private: false,
            handle_types: physical.handle_types,
            gpu_direct: physical.gpu_direct,
            buffer_id: handle + (1 << 40),
            block_id: physical.block_id,
            origin: Origin::Own,
remote: (0, 0, 0),
            // Nothing may access it before `cuMemSetAccess`.
            is_writable: true,
        };
        state.mappings.insert(at, mapping);
        Ok(())
    }

    "cuMemUnmap" | "hipMemUnmap" fn mem_unmap(at: u64, bytes: usize) {
        let mut state = state();
        if !state.mappings.get(&at).is_some_and(|mapping| !mapping.is_legacy && mapping.bytes == bytes) {
            return Err(INVALID_VALUE);
        }
        let Some(mapping) = state.mappings.remove(&at) else { return Err(INVALID_VALUE) };
        memory::unmap(mapping.own, bytes);
        memory::forget_unused(&mut state, mapping.block_id);
        // The address stays reserved.
        memory::map(&mapping.fd, bytes, libc::PROT_NONE, Some(at as usize)).map(|_| ())
    }

    "cuMemSetAccess" | "hipMemSetAccess" fn set_access(
        at: u64,
        bytes: usize,
        rights: *const [c_int; 3],
        count: usize,
    ) {
        // SAFETY: one description of the caller: the kind and number of a location, and the rights.
        let rights = unsafe { rights.read() };
        let mut state = state();
        let mut end = at;
        for (base, mapping) in state.mappings.range_mut(at..at + bytes as u64) {
            if *base != end {
                return Err(INVALID_VALUE);
            }
            mapping.is_writable = rights[2] == 3;
            end = base + mapping.bytes as u64;
        }
        if end == at + bytes as u64 && count == 1 && rights[0] == 1 { Ok(()) } else { Err(INVALID_VALUE) }
    }

    "cuMemRetainAllocationHandle" | "hipMemRetainAllocationHandle" fn retain(out: *mut u64, at: u64) {
        let mut state = state();
        let (_, mapping) = memory::find(&state, at).filter(|(_, mapping)| !mapping.is_legacy).ok_or(INVALID_VALUE)?;
        let handle = mapping.block_id;
        state.physical.get_mut(&handle).ok_or(INVALID_VALUE)?.handles += 1;
        put(out, handle)
    }

    "cuMemImportFromShareableHandle" | "hipMemImportFromShareableHandle" fn import(
        out: *mut u64,
        from: usize,
        kind: u32,
    ) {
        let mut state = state();
        let fd = match kind {
            POSIX_FD => {
                // SAFETY: makes a descriptor, or fails.
                let fd = unsafe { libc::fcntl(from as c_int, libc::F_DUPFD_CLOEXEC, 3) };
                if fd < 0 {
                    return Err(INVALID_VALUE);
                }
                // SAFETY: the descriptor was just made.
                unsafe { OwnedFd::from_raw_fd(fd) }
            }
            // As without an IMEX channel.
            FABRIC if state.domain == 0 => return Err(NOT_PERMITTED),
            // SAFETY: a handle of the caller, 64 bytes.
            FABRIC => crate::ipc::open_fabric(state.domain, unsafe {
                &*ptr::with_exposed_provenance::<[u8; 64]>(from)
            })?,
            _ => return Err(INVALID_VALUE),
        };
        let bytes = crate::ipc::length(&fd).filter(|bytes| *bytes > 0).ok_or(INVALID_VALUE)?;
        let block_id = state.id();
        let physical = Physical {
            bytes,
            fd: Arc::new(fd),
            device: 0,
            handle_types: kind,
            gpu_direct: true,
            block_id,
            handles: 1,
        };
        state.physical.insert(block_id, physical);
        put(out, block_id)
    }

    "cuMemExportToShareableHandle" | "hipMemExportToShareableHandle" fn export(
        out: *mut c_int,
        handle: u64,
        kind: u32,
        _flags: u64,
    ) {
        let state = state();
        let physical = state.physical.get(&handle).ok_or(INVALID_VALUE)?;
        if physical.handle_types & kind == 0 {
            return Err(INVALID_VALUE);
        }
        if kind == FABRIC {
            return put(out.cast(), crate::ipc::fabric_handle(state.domain, &physical.fd)?);
        }
        put(out, physical.fd.try_clone().map_err(|_| INVALID_VALUE)?.into_raw_fd())
    }

    "cuMemGetHandleForAddressRange" | "hipMemGetHandleForAddressRange" fn range_handle(
        out: *mut c_int,
        at: u64,
        bytes: usize,
        kind: c_int,
        flags: u64,
    ) {
        let state = state();
        if state.attributes.get(&124) == Some(&0) {
            return Err(NOT_SUPPORTED);
        }
        let (base, mapping) = memory::find(&state, at).ok_or(INVALID_VALUE)?;
        let whole = mapping.bytes.next_multiple_of(PAGE);
        // The memfd begins with the mapping, and stands in for a dma-buf.
        if at != base || bytes > whole || !bytes.is_multiple_of(PAGE) || kind != 1 || flags != 0 {
            return Err(INVALID_VALUE);
        }
        put(out, mapping.fd.try_clone().map_err(|_| INVALID_VALUE)?.into_raw_fd())
    }

    "cuIpcGetMemHandle" | "hipIpcGetMemHandle" fn ipc_get(out: *mut [u8; 64], at: u64) {
        let state = state();
        let (_, mapping) = memory::find(&state, at).ok_or(INVALID_VALUE)?;
        if !mapping.is_legacy || mapping.is_private || mapping.origin != Origin::Own {
            return Err(INVALID_VALUE);
        }
        put(out, crate::ipc::handle(mapping))
    }
}
