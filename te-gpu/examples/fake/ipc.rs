//! The older interface by which a process opens an allocation of another one. A handle names the memfd of
//! the allocation by its process and descriptor. The last page of the memfd lists the processes that have
//! it open. Fabric handles name memory in the same way, and are opened by processes of the same domain.

use std::fs::{File, OpenOptions};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::Arc;

use crate::memory::{self, PAGE};
use crate::model::{INVALID_VALUE, Mapping, Origin, State};

/// Processes that may have an allocation open.
const OPEN_MAX: usize = 64;

/// The handle of a whole allocation.
pub(crate) fn handle(mapping: &Mapping) -> [u8; 64] {
    let mut handle = [0; 64];
    handle[..4].copy_from_slice(&std::process::id().to_le_bytes());
    handle[4..8].copy_from_slice(&mapping.fd.as_raw_fd().to_le_bytes());
    handle[8..16].copy_from_slice(&mapping.range.0.to_le_bytes());
    handle[16..24].copy_from_slice(&mapping.buffer_id.to_le_bytes());
    handle[24..32].copy_from_slice(&(mapping.bytes as u64).to_le_bytes());
    handle
}

/// The fabric handle of memory of `cuMemCreate`.
pub(crate) fn fabric_handle(domain: u64, fd: &OwnedFd) -> Result<[u8; 64], i32> {
    let inode = inode(fd).ok_or(INVALID_VALUE)?;
    let mut handle = [0; 64];
    handle[..4].copy_from_slice(&std::process::id().to_le_bytes());
    handle[4..8].copy_from_slice(&fd.as_raw_fd().to_le_bytes());
    handle[8..16].copy_from_slice(&domain.to_le_bytes());
    handle[16..24].copy_from_slice(&inode.to_le_bytes());
    Ok(handle)
}

/// Opens memory by its fabric handle. Memory that was freed, and of another domain, is refused.
pub(crate) fn open_fabric(domain: u64, handle: &[u8; 64]) -> Result<OwnedFd, i32> {
    let (pid, fd) = (word(handle, 0) as u32, (word(handle, 0) >> 32) as u32);
    if word(handle, 8) != domain {
        return Err(INVALID_VALUE);
    }
    let file = OpenOptions::new().read(true).write(true).open(format!("/proc/{pid}/fd/{fd}"));
    let file: OwnedFd = file.map_err(|_| INVALID_VALUE)?.into();
    // Another file may have the number by now.
    if inode(&file) == Some(word(handle, 16)) { Ok(file) } else { Err(INVALID_VALUE) }
}

fn inode(fd: &OwnedFd) -> Option<u64> {
    let file = fd.try_clone().map(File::from).ok()?;
    Some(file.metadata().ok()?.ino())
}

fn word(handle: &[u8; 64], at: usize) -> u64 {
    let mut bytes = [0; 8];
    bytes.copy_from_slice(&handle[at..at + 8]);
    u64::from_le_bytes(bytes)
}

/// Opens an allocation of another process, or of another loaded copy of this library. Memory that is open
/// already is counted, and has one address.
pub(crate) fn open(state: &mut State, device: i32, handle: &[u8; 64]) -> Result<u64, i32> {
    let (base, serial, bytes) = (word(handle, 8), word(handle, 16), word(handle, 24) as usize);
    let (pid, fd) = (word(handle, 0) as u32, (word(handle, 0) >> 32) as u32);
    let is_own = |mapping: &Mapping| mapping.range.0 == base && mapping.buffer_id == serial;
    if state.mappings.get(&base).is_some_and(|own| own.origin == Origin::Own && is_own(own)) {
        // A process cannot open its own memory.
        return Err(201);
    }
    let file = OpenOptions::new().read(true).write(true).open(format!("/proc/{pid}/fd/{fd}"));
    let file = file.map_err(|_| INVALID_VALUE)?;
    let whole = bytes.next_multiple_of(PAGE);
    let long = file.metadata().map_err(|_| INVALID_VALUE)?.len() as usize;
    if bytes == 0 || long != whole + PAGE {
        return Err(INVALID_VALUE);
    }
    let known = state.mappings.iter_mut().find(|(_, mapping)| {
        matches!(mapping.origin, Origin::Opened(_)) && mapping.remote == (pid, base, serial)
    });
    if let Some((at, mapping)) = known {
        if let Origin::Opened(count) = &mut mapping.origin {
            *count += 1;
        }
        return Ok(*at);
    }
    let fd: Arc<OwnedFd> = Arc::new(file.into());
    let at = memory::reserve(whole + PAGE, 0)?;
    memory::map(&fd, whole, libc::PROT_NONE, Some(at))?;
    let own = memory::map(&fd, whole, libc::PROT_READ | libc::PROT_WRITE, None)?;
    note(&fd, whole, 0, std::process::id());
    let (buffer_id, block_id) = (state.id(), state.id());
    let mapping = Mapping {
        bytes,
        own,
        fd,
        device,
        range: (at as u64, bytes),
        is_legacy: true,
        is_managed: false,
        is_foreign: false,
        is_private: false,
        handle_types: 0,
        gpu_direct: true,
        buffer_id,
        block_id,
        origin: Origin::Opened(1),
        remote: (pid, base, serial),
        is_writable: true,
    };
    state.mappings.insert(at as u64, mapping);
    Ok(at as u64)
}

/// Closes what was opened.
pub(crate) fn close(state: &mut State, at: u64) -> Result<(), i32> {
    let mapping = state.mappings.get_mut(&at).ok_or(INVALID_VALUE)?;
    let Origin::Opened(count) = &mut mapping.origin else { return Err(INVALID_VALUE) };
    *count -= 1;
    if *count > 0 {
        return Ok(());
    }
    let Some(mapping) = state.mappings.remove(&at) else { return Err(INVALID_VALUE) };
    let whole = mapping.bytes.next_multiple_of(PAGE);
    note(&mapping.fd, whole, std::process::id(), 0);
    memory::unmap(mapping.own, whole);
    memory::unmap(at as usize, whole + PAGE);
    Ok(())
}

/// Replaces one entry of the list of processes.
fn note(fd: &OwnedFd, whole: usize, before: u32, after: u32) {
    let Ok(file) = fd.try_clone().map(File::from) else { return };
    if length(fd) != Some(whole + PAGE) {
        return;
    }
    for nth in 0..OPEN_MAX {
        let (mut entry, at) = ([0; 4], (whole + nth * 4) as u64);
        if file.read_exact_at(&mut entry, at).is_ok() && u32::from_le_bytes(entry) == before {
            let _full = file.write_all_at(&after.to_le_bytes(), at);
            return;
        }
    }
}

/// Whether a process that lives has the allocation open.
pub(crate) fn is_open(fd: &OwnedFd, whole: usize) -> bool {
    let Ok(file) = fd.try_clone().map(File::from) else { return false };
    let mut list = [0; OPEN_MAX * 4];
    if file.read_exact_at(&mut list, whole as u64).is_err() {
        return false;
    }
    let mut pids =
        list.chunks_exact(4).map(|entry| u32::from_le_bytes([entry[0], entry[1], entry[2], entry[3]]));
    pids.any(|pid| pid != 0 && is_running(pid))
}

fn is_running(pid: u32) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // Behind the name, which may have any characters, comes the state.
    status.rsplit_once(") ").is_some_and(|(_, rest)| !rest.starts_with(['Z', 'X']))
}

/// The length of a file.
pub(crate) fn length(fd: &OwnedFd) -> Option<usize> {
    let file = fd.try_clone().map(File::from).ok()?;
    Some(file.metadata().ok()?.len() as usize)
}
