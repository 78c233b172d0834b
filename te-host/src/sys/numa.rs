//! The NUMA node of memory.

use std::{io, ptr};

use libc::{c_int, c_long, c_void};
use nix::errno::Errno;
use te_core::MemSpan;

/// Pages of a span whose node is queried.
const PAGES_MAX: usize = 16;
/// The smallest page size; the kernel accepts any address within a page.
const PAGE: usize = 4096;

/// The node that holds `span`: the node of those among up to 16 pages, spread evenly, that were touched
/// before. `None`: none of them was touched, or they are on several nodes.
///
/// # Errors
/// The system's error: `ENOSYS` on a kernel without NUMA, `EPERM` in a sandbox.
pub fn node_of(span: MemSpan) -> io::Result<Option<u16>> {
    let addr = span.as_ptr().addr();
    let (first, last) = (addr / PAGE, addr.saturating_add(span.len().saturating_sub(1)) / PAGE);
    let count = PAGES_MAX.min(last - first + 1);
    let mut pages = [ptr::null::<c_void>(); PAGES_MAX];
    for (nth, page) in pages[..count].iter_mut().enumerate() {
        let at = first + (last - first) / PAGES_MAX * nth + (last - first) % PAGES_MAX * nth / PAGES_MAX;
        *page = ptr::without_provenance(at * PAGE);
    }
    let mut nodes: [c_int; PAGES_MAX] = [-libc::ENOENT; PAGES_MAX];
    // SAFETY: move_pages(2): without an array of nodes it moves nothing and, for this process (pid 0), writes
    // the node or a negative errno of each of `count` pages to the last array; both arrays have as many
    // entries. It does not access the pages, so for addresses that are not mapped it reports an error and
    // does not fault.
    let asked = unsafe {
        libc::syscall(
            libc::SYS_move_pages,
            0 as c_long,
            count as c_long,
            pages.as_ptr(),
            ptr::null::<c_int>(),
            nodes.as_mut_ptr(),
            0 as c_long,
        )
    };
    Errno::result(asked)?;
    let mut touched = nodes[..count].iter().filter_map(|&node| u16::try_from(node).ok());
    let node = touched.next();
    Ok(node.filter(|node| touched.all(|other| other == *node)))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::sys::{AllocOptions, SharedMemory};

    #[test]
    fn memory_is_on_a_node_once_it_is_touched() {
        let memory = SharedMemory::new(1 << 20, AllocOptions::default()).unwrap();
        let fresh = node_of(memory.span());
        memory.view().write(700_000, &[1; 20_000]).unwrap();
        match node_of(memory.span()) {
            Ok(Some(node)) => {
                assert_eq!(fresh.unwrap(), None, "nowhere until then");
                assert!(Path::new(&format!("/sys/devices/system/node/node{node}")).exists(), "{node}");
                let page = memory.span().part(700_000, 1).unwrap();
                assert_eq!(node_of(page).unwrap(), Some(node), "a single byte will do");
            }
            // Kernels and sandboxes in which the call fails; it fails in the same way before and after.
            Err(error) => {
                let code = error.raw_os_error();
                assert!(matches!(code, Some(libc::ENOSYS | libc::EPERM)), "{error}");
                assert_eq!(fresh.unwrap_err().raw_os_error(), code);
            }
            Ok(None) => panic!("five pages in a row were touched"),
        }
    }

    #[test]
    fn addresses_that_are_not_mapped_are_nowhere() {
        for (addr, len) in [(0, 0), (0, 1), (8, 1 << 40), (usize::MAX, 1), (usize::MAX - 5, 100)] {
            let nowhere = node_of(MemSpan::new(ptr::without_provenance_mut(addr), len));
            assert!(!matches!(nowhere, Ok(Some(_))), "{nowhere:?}");
        }
    }
}
