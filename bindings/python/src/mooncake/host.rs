//! Memory of the host: `MooncakeHostMemAllocator`, functions for allocators of other libraries, NUMA.
#![allow(unsafe_code, reason = "maps memory and gives out its address")]

use std::collections::HashMap;
use std::ffi::c_void;
use std::fs;
use std::num::NonZeroUsize;
use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};

use nix::sched::{CpuSet, sched_setaffinity};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::mman::{MapFlags, ProtFlags, mmap, munmap};
use nix::unistd::{Pid, ftruncate};
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;

use super::signature::{Arguments, Call, Parameter, Signature, default_of, python_methods};

/// Most bytes of one allocation.
const BYTES_MAX: u64 = 1 << 46;
/// Prefer a node, and use others when it has no memory (`MPOL_PREFERRED`, linux/mempolicy.h).
const MPOL_PREFERRED: libc::c_int = 1;
/// Most nodes of a host.
const NODES_MAX: i32 = 1024;

/// What was allocated and not freed: lengths by address.
static ALLOCATED: LazyLock<Mutex<HashMap<usize, usize>>> = LazyLock::new(Mutex::default);

fn allocated() -> MutexGuard<'static, HashMap<usize, usize>> {
    ALLOCATED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Maps memory that a process which gets the descriptor could share.
fn allocate(bytes: u64) -> Result<usize, String> {
    let len = usize::try_from(bytes).ok().filter(|_| bytes <= BYTES_MAX).and_then(NonZeroUsize::new);
    let len = len.ok_or_else(|| format!("{bytes} bytes cannot be allocated: 1 to {BYTES_MAX} can"))?;
    let failed = |error: nix::Error| format!("{bytes} bytes cannot be allocated: {error}");
    let file: OwnedFd = memfd_create(c"mooncake-host-memory", MFdFlags::MFD_CLOEXEC).map_err(failed)?;
    ftruncate(&file, len.get() as i64).map_err(failed)?;
    let rights = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
    // SAFETY: the kernel chooses the address, so nothing that exists is replaced.
    let addr = unsafe { mmap(None, len, rights, MapFlags::MAP_SHARED, &file, 0) }.map_err(failed)?;
    let addr = addr.as_ptr() as usize;
    allocated().insert(addr, len.get());
    Ok(addr)
}

/// Unmaps memory of [`allocate`]. `false`: there is none at this address.
fn free(addr: usize) -> bool {
    let Some(len) = allocated().remove(&addr) else { return false };
    let Some(addr) = NonNull::new(addr as *mut c_void) else { return false };
    // SAFETY: mapped by `allocate` with this length, and taken out of the table by this call alone. The
    // caller has said that it does not use the memory any more.
    match unsafe { munmap(addr, len) } {
        Ok(()) => true,
        Err(error) => {
            log::error!("memory at {addr:?} is not unmapped: {error}");
            false
        }
    }
}

/// Memory of the host, in whole pages, for buffers that are registered with a store.
///
/// __init__(self) -> None
#[pyclass(module = "mooncake.store", frozen)]
pub(super) struct MooncakeHostMemAllocator;

type This<'py> = Bound<'py, MooncakeHostMemAllocator>;

fn alloc(slf: &This<'_>, given: &Arguments<'_, '_>) -> PyResult<usize> {
    let bytes = given.uint(0)?;
    slf.py().detach(|| allocate(bytes)).map_err(PyRuntimeError::new_err)
}

fn release(slf: &This<'_>, given: &Arguments<'_, '_>) -> PyResult<i32> {
    let addr = given.uint(0)?;
    let is_free = slf.py().detach(|| usize::try_from(addr).is_ok_and(free));
    if !is_free {
        log::error!("no memory of this allocator is at {addr:#x}");
    }
    Ok(if is_free { 0 } else { -1 })
}

python_methods! {
    impl MooncakeHostMemAllocator as "mooncake.store.MooncakeHostMemAllocator" {
        #[new]
        const fn new() -> Self {
            Self
        }
    }

    /// Allocates memory, and returns its address. Raises RuntimeError when there is none.
    fn alloc(size: "int") -> "int" => alloc;

    /// Frees memory of `alloc`. Returns 0, or -1 when there is none at this address.
    fn free(ptr: "int") -> "int" => release;
}

/// For allocators of other libraries: a function `void *(size_t)`.
extern "C" fn alloc_function(size: usize) -> *mut c_void {
    allocate(size as u64).map_or(std::ptr::null_mut(), |addr| addr as *mut c_void)
}

/// For allocators of other libraries: a function `void (void *)`.
extern "C" fn free_function(addr: *mut c_void) {
    free(addr as usize);
}

/// get_alloc_func_addr() -> int
///
/// The address of a function `void *(size_t)` that allocates memory in whole pages, or returns NULL.
#[pyfunction]
fn get_alloc_func_addr() -> usize {
    alloc_function as extern "C" fn(usize) -> *mut c_void as usize
}

/// get_free_func_addr() -> int
///
/// The address of the function `void (void *)` that frees memory of `get_alloc_func_addr`.
#[pyfunction]
fn get_free_func_addr() -> usize {
    free_function as extern "C" fn(*mut c_void) as usize
}

/// bind_to_numa_node(node: int) -> None
///
/// Has the calling thread run on the processors of a NUMA node, and prefer its memory. Where that is not
/// possible, the log says so and nothing changes.
#[pyfunction]
fn bind_to_numa_node(node: i32) {
    if let Err(why) = bind(node) {
        log::warn!("the thread is not bound to NUMA node {node}: {why}");
    }
}

fn bind(node: i32) -> Result<(), String> {
    let number = u32::try_from(node).ok().filter(|_| node < NODES_MAX);
    let number = number.ok_or_else(|| format!("nodes have the numbers 0 to {}", NODES_MAX - 1))?;
    let path = format!("/sys/devices/system/node/node{number}/cpulist");
    let list = fs::read_to_string(&path).map_err(|error| format!("{path}: {error}"))?;
    let mut set = CpuSet::new();
    for cpu in cpus_of(&list).ok_or_else(|| format!("{path} has {list:?}"))? {
        set.set(cpu).map_err(|error| format!("processor {cpu}: {error}"))?;
    }
    sched_setaffinity(Pid::from_raw(0), &set).map_err(|error| error.to_string())?;
    let mut mask = [0_u64; (NODES_MAX / 64) as usize];
    mask[number as usize / 64] = 1 << (number % 64);
    // SAFETY: the kernel reads `NODES_MAX` bits at the address of `mask`, which lives across the call.
    let set = unsafe { libc::syscall(libc::SYS_set_mempolicy, MPOL_PREFERRED, mask.as_ptr(), NODES_MAX) };
    if set == 0 { Ok(()) } else { Err(std::io::Error::last_os_error().to_string()) }
}

/// The numbers in a list such as `0-3,8`.
fn cpus_of(list: &str) -> Option<Vec<usize>> {
    let mut cpus = Vec::new();
    for part in list.trim().split(',').filter(|part| !part.is_empty()) {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last): (usize, usize) = (first.parse().ok()?, last.parse().ok()?);
        if last < first || last > 1 << 16 {
            return None;
        }
        cpus.extend(first..=last);
    }
    (!cpus.is_empty()).then_some(cpus)
}

/// Adds the class and the functions to the module.
pub(super) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<MooncakeHostMemAllocator>()?;
    module.add_function(wrap_pyfunction!(get_alloc_func_addr, module)?)?;
    module.add_function(wrap_pyfunction!(get_free_func_addr, module)?)?;
    module.add_function(wrap_pyfunction!(bind_to_numa_node, module)?)
}
