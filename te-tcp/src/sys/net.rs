//! Addresses: to and from the kernel's form, and those of this host.

use std::ffi::CStr;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

/// The kernel's form of an address, and its length.
pub(super) fn to_kernel(address: SocketAddr) -> (libc::sockaddr_storage, libc::socklen_t) {
    // SAFETY: `sockaddr_storage` is plain integers, for which all zeroes is a value.
    let mut storage: libc::sockaddr_storage = unsafe { std::mem::zeroed() };
    let len = match address {
        SocketAddr::V4(v4) => {
            let raw = libc::sockaddr_in {
                sin_family: libc::AF_INET as libc::sa_family_t,
                sin_port: v4.port().to_be(),
                sin_addr: libc::in_addr { s_addr: u32::from(*v4.ip()).to_be() },
                sin_zero: [0; 8],
            };
            // SAFETY: a `sockaddr_storage` is made to hold any socket address, size and alignment included.
            unsafe { (&raw mut storage).cast::<libc::sockaddr_in>().write(raw) };
            size_of::<libc::sockaddr_in>()
        }
        SocketAddr::V6(v6) => {
            let raw = libc::sockaddr_in6 {
                sin6_family: libc::AF_INET6 as libc::sa_family_t,
                sin6_port: v6.port().to_be(),
                sin6_flowinfo: v6.flowinfo(),
                sin6_addr: libc::in6_addr { s6_addr: v6.ip().octets() },
                sin6_scope_id: v6.scope_id(),
            };
            // SAFETY: as above.
            unsafe { (&raw mut storage).cast::<libc::sockaddr_in6>().write(raw) };
            size_of::<libc::sockaddr_in6>()
        }
    };
    (storage, len as libc::socklen_t)
}

/// The address in the kernel's form, if it is one of the internet's.
pub(super) fn from_kernel(storage: &libc::sockaddr_storage) -> Option<SocketAddr> {
    let raw = &raw const *storage;
    match i32::from(storage.ss_family) {
        libc::AF_INET => {
            // SAFETY: the family says that the storage holds this form.
            let v4 = unsafe { raw.cast::<libc::sockaddr_in>().read() };
            let ip = Ipv4Addr::from(u32::from_be(v4.sin_addr.s_addr));
            Some(SocketAddr::new(IpAddr::V4(ip), u16::from_be(v4.sin_port)))
        }
        libc::AF_INET6 => {
            // SAFETY: as above.
            let v6 = unsafe { raw.cast::<libc::sockaddr_in6>().read() };
            let ip = Ipv6Addr::from(v6.sin6_addr.s6_addr);
            Some(SocketAddr::new(IpAddr::V6(ip).to_canonical(), u16::from_be(v6.sin6_port)))
        }
        _ => None,
    }
}

/// Interfaces whose names begin so are made for containers and virtual machines of this host. Their addresses are the same
/// on many hosts, and lead elsewhere from there.
const VIRTUAL: [&[u8]; 12] = [
    b"docker", b"virbr", b"veth", b"br-", b"cni", b"flannel", b"cali", b"kube-", b"podman", b"lxcbr",
    b"lxdbr", b"vnet",
];

/// The addresses of this host's interfaces that are up, without loopback and link-local ones. Virtual interfaces count only
/// when there are no others.
pub(crate) fn host_addresses() -> Vec<IpAddr> {
    let mut first: *mut libc::ifaddrs = std::ptr::null_mut();
    // SAFETY: `first` lives across the call, which sets it on success.
    if unsafe { libc::getifaddrs(&raw mut first) } != 0 {
        return Vec::new();
    }
    let (mut found, mut others) = (Vec::new(), Vec::new());
    let mut at = first;
    while !at.is_null() {
        // SAFETY: `at` is an element of the list that `getifaddrs` made and that is freed only below.
        let entry = unsafe { &*at };
        at = entry.ifa_next;
        let up = entry.ifa_flags & libc::IFF_UP as u32 != 0;
        if entry.ifa_addr.is_null() || !up {
            continue;
        }
        // SAFETY: not null, so a socket address whose family is set.
        let family = i32::from(unsafe { (*entry.ifa_addr).sa_family });
        let len = match family {
            libc::AF_INET => size_of::<libc::sockaddr_in>(),
            libc::AF_INET6 => size_of::<libc::sockaddr_in6>(),
            _ => continue,
        };
        // SAFETY: all zeroes is a value of this type.
        let mut storage: libc::sockaddr_storage = unsafe { std::mem::zeroed() };
        // SAFETY: the family says how long the address is; the storage holds any.
        unsafe {
            std::ptr::copy_nonoverlapping(entry.ifa_addr.cast::<u8>(), (&raw mut storage).cast::<u8>(), len);
        }
        if let Some(address) = from_kernel(&storage)
            && is_reachable(address.ip())
        {
            // SAFETY: an element's name is a string of the list.
            let name = unsafe { CStr::from_ptr(entry.ifa_name) };
            if is_virtual(name.to_bytes()) { &mut others } else { &mut found }.push(address.ip());
        }
    }
    // SAFETY: the list that `getifaddrs` made, freed once.
    unsafe { libc::freeifaddrs(first) };
    if found.is_empty() {
        found = others;
    }
    found.sort_by_key(IpAddr::is_ipv6);
    found
}

fn is_reachable(ip: IpAddr) -> bool {
    match ip {
        IpAddr::V4(v4) => !v4.is_loopback() && !v4.is_link_local(),
        IpAddr::V6(v6) => !v6.is_loopback() && !v6.is_unicast_link_local(),
    }
}

fn is_virtual(name: &[u8]) -> bool {
    VIRTUAL.iter().any(|prefix| name.starts_with(prefix))
}

#[cfg(test)]
mod tests {
    use super::is_virtual;

    #[test]
    fn bridges_of_containers_are_not_exported() {
        for name in ["docker0", "virbr0", "veth12ab", "br-0123456789ab", "cni0", "flannel.1"] {
            assert!(is_virtual(name.as_bytes()), "{name}");
        }
        for name in ["eth0", "ens3f1", "bond0", "ib0", "enp1s0.100", "br0"] {
            assert!(!is_virtual(name.as_bytes()), "{name}");
        }
    }
}
