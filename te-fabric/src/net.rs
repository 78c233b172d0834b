//! Sockets that do not block, over IPv4 and IPv6, and the addresses and random numbers of the system.

use std::ffi::OsString;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use nix::errno::Errno;
use nix::sys::socket::{
    AddressFamily, Backlog, SockFlag, SockType, SockaddrIn, SockaddrIn6, bind, connect, listen, setsockopt,
    sockopt,
};
use te_core::{Error, ErrorKind, Instant};

use crate::export::EXPORT_ADDRESSES_MAX;

/// How long a listener is paused when connections cannot be accepted, in milliseconds.
const PAUSE_MS: u64 = 100;
/// The number of connections that the kernel keeps until they are accepted.
const BACKLOG: i32 = 1_024;

/// A TCP socket that does not block and can [connect](start_connect) to addresses of this family.
///
/// # Errors
/// The error of the system.
pub fn socket(address: SocketAddr) -> io::Result<TcpStream> {
    Ok(TcpStream::from(open(address)?))
}

/// Starts to connect. The socket becomes writable when the attempt ends; `take_error` then reports whether it
/// failed.
///
/// # Errors
/// The error of the system.
pub fn start_connect(socket: &TcpStream, address: SocketAddr) -> io::Result<()> {
    let fd = socket.as_raw_fd();
    let result = match address {
        SocketAddr::V4(v4) => connect(fd, &SockaddrIn::from(v4)),
        SocketAddr::V6(v6) => connect(fd, &SockaddrIn6::from(v6)),
    };
    match result {
        Ok(()) | Err(Errno::EINPROGRESS) => Ok(()),
        Err(errno) => Err(errno.into()),
    }
}

/// Makes the kernel detect a dead peer: it probes an idle connection, and ends a connection whose sent bytes
/// are not acknowledged.
///
/// # Errors
/// The error of the system.
pub fn set_liveness(socket: &impl AsFd, silence_ms: u32) -> io::Result<()> {
    set_probes(socket, silence_ms, silence_ms.saturating_mul(4))
}

/// Makes the kernel probe an idle connection every `every_ms`, and end one whose peer was silent for
/// `silence_ms`.
///
/// # Errors
/// The error of the system.
pub fn set_probes(socket: &impl AsFd, every_ms: u32, silence_ms: u32) -> io::Result<()> {
    let seconds = (every_ms / 1_000).clamp(1, 3_600);
    // The kernel ends it after so many probes, where it does not follow the time.
    let count = (silence_ms / (seconds * 1_000)).saturating_sub(1).clamp(1, 127);
    setsockopt(socket, sockopt::KeepAlive, &true)?;
    setsockopt(socket, sockopt::TcpKeepIdle, &seconds)?;
    setsockopt(socket, sockopt::TcpKeepInterval, &seconds)?;
    setsockopt(socket, sockopt::TcpKeepCount, &count)?;
    setsockopt(socket, sockopt::TcpUserTimeout, &silence_ms.min(1 << 30))?;
    Ok(())
}

/// Chooses the congestion control of a connection, or of those that a listener accepts.
///
/// # Errors
/// The error of the system, for example when it does not have this algorithm.
pub fn set_congestion(socket: &impl AsFd, algorithm: &str) -> io::Result<()> {
    Ok(setsockopt(socket, sockopt::TcpCongestion, &OsString::from(algorithm))?)
}

/// Sets the sizes of a socket's buffers, in bytes; the kernel keeps tuning those that are `None`.
///
/// # Errors
/// The error of the system.
pub fn set_buffers(socket: &impl AsFd, send: Option<u32>, receive: Option<u32>) -> io::Result<()> {
    if let Some(bytes) = send {
        setsockopt(socket, sockopt::SndBuf, &(bytes as usize))?;
    }
    if let Some(bytes) = receive {
        setsockopt(socket, sockopt::RcvBuf, &(bytes as usize))?;
    }
    Ok(())
}

/// Makes the close that follows discard unsent bytes and reset the connection. A failure leaves an ordinary
/// close, which is correct too.
pub fn reset_on_close(socket: &impl AsFd) {
    let _ = setsockopt(socket, sockopt::Linger, &libc::linger { l_onoff: 1, l_linger: 0 });
}

/// The result of [`Listener::accept`].
#[derive(Debug)]
pub enum Accepted {
    /// A connection, whose socket does not block.
    Connection(TcpStream),
    /// A connection that has ended already, or whose network is down. There may be more.
    Gone,
    /// No connection waits.
    Empty,
    /// The system cannot accept at the moment. Trying again at once would fail again:
    /// [pause](Listener::pause) the listener.
    Failed(io::Error),
}

/// A listening socket that can be paused while the system has no file descriptors left.
#[derive(Debug)]
pub struct Listener {
    socket: TcpListener,
    paused: Option<Instant>,
    /// The last attempt to accept failed, and the failure has been logged.
    reported: bool,
}

impl Listener {
    /// Listens on `address`.
    ///
    /// # Errors
    /// The error of the system.
    pub fn bind(address: SocketAddr) -> io::Result<Self> {
        let socket = open(address)?;
        setsockopt(&socket, sockopt::ReuseAddr, &true)?;
        match address {
            SocketAddr::V4(v4) => bind(socket.as_raw_fd(), &SockaddrIn::from(v4))?,
            SocketAddr::V6(v6) => bind(socket.as_raw_fd(), &SockaddrIn6::from(v6))?,
        }
        listen(&socket, Backlog::new(BACKLOG)?)?;
        Ok(Self { socket: TcpListener::from(socket), paused: None, reported: false })
    }

    /// The address that it listens on.
    ///
    /// # Errors
    /// The error of the system.
    pub fn local_address(&self) -> io::Result<SocketAddr> {
        self.socket.local_addr().map(canonical)
    }

    /// Takes the next connection.
    pub fn accept(&mut self) -> Accepted {
        match self.socket.accept().and_then(|(stream, _)| stream.set_nonblocking(true).map(|()| stream)) {
            Ok(stream) => {
                self.reported = false;
                Accepted::Connection(stream)
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Accepted::Empty,
            Err(error) if is_remote_failure(&error) => Accepted::Gone,
            Err(error) => Accepted::Failed(error),
        }
    }

    /// Pauses the listener because accepting failed with `error`, and returns when the pause ends. Logs the
    /// first of several failures in a row. `connections_max` is the number of connections that the fabric
    /// would take.
    pub fn pause(&mut self, now: Instant, error: &io::Error, connections_max: u32) -> Instant {
        if !std::mem::replace(&mut self.reported, true) {
            log::warn!(
                "cannot accept connections for the moment: {error}; raise the limit of open files (LimitNOFILE, ulimit -n) \
                 above {connections_max}"
            );
        }
        let until = now + core::time::Duration::from_millis(PAUSE_MS);
        self.paused = Some(until);
        until
    }

    /// When the pause ends; `None` when the listener is not paused.
    #[must_use]
    pub const fn paused_until(&self) -> Option<Instant> {
        self.paused
    }

    /// Whether a pause has ended. The caller then watches the listener again and calls [`Self::resume`].
    #[must_use]
    pub fn is_pause_over(&self, now: Instant) -> bool {
        self.paused.is_some_and(|until| now >= until)
    }

    /// Notes that the listener is watched again.
    pub const fn resume(&mut self) {
        self.paused = None;
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// The address in its shortest form: an IPv4 address that was mapped to IPv6 is IPv4 again.
#[must_use]
pub fn canonical(address: SocketAddr) -> SocketAddr {
    SocketAddr::new(address.ip().to_canonical(), address.port())
}

/// The [`Error`] for an error of a socket.
#[must_use]
pub fn error_of(error: &io::Error) -> Error {
    let code = error.raw_os_error().unwrap_or(0);
    let kind = match error.kind() {
        io::ErrorKind::UnexpectedEof
        | io::ErrorKind::WriteZero
        | io::ErrorKind::ConnectionReset
        | io::ErrorKind::ConnectionRefused
        | io::ErrorKind::ConnectionAborted
        | io::ErrorKind::BrokenPipe
        | io::ErrorKind::TimedOut
        | io::ErrorKind::HostUnreachable
        | io::ErrorKind::NetworkUnreachable => ErrorKind::PeerDead,
        _ => ErrorKind::System,
    };
    Error::with_code(kind, code)
}

/// The same error, or `PeerDead` in place of `System`: an error of a connection counts against the peer, not
/// against the rail.
#[must_use]
pub const fn peer_dead(error: Error) -> Error {
    match error.kind {
        ErrorKind::System => Error::with_code(ErrorKind::PeerDead, error.code),
        _ => error,
    }
}

/// A number that a peer cannot guess.
///
/// # Errors
/// The error of the system.
pub fn random_u64() -> io::Result<u64> {
    getrandom::u64().map_err(|error| io::Error::other(error.to_string()))
}

/// The addresses that exports carry: `advertise`; without it, `bound`; where that is unspecified, those of
/// this host's interfaces.
#[must_use]
pub fn advertised(advertise: Option<IpAddr>, bound: IpAddr) -> Vec<IpAddr> {
    if let Some(address) = advertise {
        return vec![address];
    }
    if !bound.is_unspecified() {
        return vec![bound];
    }
    let mut found = host_addresses();
    found.retain(|address| address.is_ipv4() || bound.is_ipv6());
    found.truncate(EXPORT_ADDRESSES_MAX);
    if found.is_empty() {
        found.push(if bound.is_ipv4() { Ipv4Addr::LOCALHOST.into() } else { Ipv6Addr::LOCALHOST.into() });
    }
    found
}

/// Prefixes of the names of interfaces that are made for containers and virtual machines of this host. Many
/// hosts have the same addresses on them, so a peer would reach another process there.
const VIRTUAL: [&str; 12] =
    ["docker", "virbr", "veth", "br-", "cni", "flannel", "cali", "kube-", "podman", "lxcbr", "lxdbr", "vnet"];

/// The addresses of this host's interfaces that are up, IPv4 first, without loopback and link-local ones.
/// Addresses of virtual interfaces are returned only when there are no others.
#[must_use]
pub fn host_addresses() -> Vec<IpAddr> {
    let Ok(interfaces) = nix::ifaddrs::getifaddrs() else { return Vec::new() };
    let (mut found, mut others) = (Vec::new(), Vec::new());
    for interface in interfaces {
        let up = interface.flags.contains(nix::net::if_::InterfaceFlags::IFF_UP);
        let Some(address) = interface.address.filter(|_| up) else { continue };
        let ip = match (address.as_sockaddr_in(), address.as_sockaddr_in6()) {
            (Some(v4), _) => IpAddr::V4(v4.ip()),
            (_, Some(v6)) => IpAddr::V6(v6.ip()).to_canonical(),
            _ => continue,
        };
        if is_reachable(ip) {
            let list = if is_virtual(&interface.interface_name) { &mut others } else { &mut found };
            list.push(ip);
        }
    }
    if found.is_empty() {
        found = others;
    }
    found.sort_by_key(IpAddr::is_ipv6);
    found
}

fn open(address: SocketAddr) -> io::Result<OwnedFd> {
    let family = if address.is_ipv4() { AddressFamily::Inet } else { AddressFamily::Inet6 };
    let flags = SockFlag::SOCK_NONBLOCK | SockFlag::SOCK_CLOEXEC;
    Ok(nix::sys::socket::socket(family, SockType::Stream, flags, None)?)
}

/// Whether accepting failed because of the connection or its network rather than because of this host
/// (accept(2)).
fn is_remote_failure(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error(),
        Some(
            libc::ECONNABORTED
                | libc::EINTR
                | libc::EPROTO
                | libc::EPERM
                | libc::ENETDOWN
                | libc::ENOPROTOOPT
                | libc::EHOSTDOWN
                | libc::ENONET
                | libc::EHOSTUNREACH
                | libc::EOPNOTSUPP
                | libc::ENETUNREACH
        )
    )
}

const fn is_reachable(ip: IpAddr) -> bool {
    match ip {
        IpAddr::V4(v4) => !v4.is_loopback() && !v4.is_link_local(),
        IpAddr::V6(v6) => !v6.is_loopback() && !v6.is_unicast_link_local(),
    }
}

fn is_virtual(name: &str) -> bool {
    VIRTUAL.iter().any(|prefix| name.starts_with(prefix))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bridges_of_containers_are_not_exported() {
        for name in ["docker0", "virbr0", "veth12ab", "br-0123456789ab", "cni0", "flannel.1"] {
            assert!(is_virtual(name), "{name}");
        }
        for name in ["eth0", "ens3f1", "bond0", "ib0", "enp1s0.100", "br0"] {
            assert!(!is_virtual(name), "{name}");
        }
    }

    #[test]
    fn exports_carry_addresses_that_lead_here() {
        let (any, one) = (IpAddr::from([0, 0, 0, 0]), IpAddr::from([10, 0, 0, 1]));
        assert_eq!(advertised(Some(one), any), [one]);
        assert_eq!(advertised(None, one), [one]);
        let found = advertised(None, any);
        assert!(!found.is_empty() && found.len() <= EXPORT_ADDRESSES_MAX);
        assert!(found.iter().all(|ip| ip.is_ipv4() && !ip.is_unspecified()), "{found:?}");
    }

    #[test]
    fn a_connection_that_broke_speaks_against_the_peer() {
        use io::ErrorKind::{BrokenPipe, ConnectionRefused, PermissionDenied, UnexpectedEof, WriteZero};
        for kind in [UnexpectedEof, WriteZero, ConnectionRefused, BrokenPipe] {
            assert_eq!(error_of(&kind.into()).kind, ErrorKind::PeerDead, "{kind}");
        }
        let denied = error_of(&PermissionDenied.into());
        assert_eq!((denied.kind, peer_dead(denied).kind), (ErrorKind::System, ErrorKind::PeerDead));
        let reset = error_of(&io::Error::from_raw_os_error(libc::ECONNRESET));
        assert_eq!(reset, Error::with_code(ErrorKind::PeerDead, libc::ECONNRESET));
        assert_eq!(peer_dead(ErrorKind::Protocol.into()).kind, ErrorKind::Protocol);
    }

    #[test]
    fn only_failures_of_this_host_pause_a_listener() {
        for errno in [libc::EMFILE, libc::ENFILE, libc::ENOBUFS, libc::ENOMEM] {
            assert!(!is_remote_failure(&io::Error::from_raw_os_error(errno)), "errno {errno}");
        }
        for errno in [libc::ECONNABORTED, libc::EPROTO, libc::ENETDOWN, libc::EINTR] {
            assert!(is_remote_failure(&io::Error::from_raw_os_error(errno)), "errno {errno}");
        }
    }

    #[test]
    fn a_listener_accepts_connections_and_can_be_paused() {
        let mut listener = Listener::bind(SocketAddr::from(([127, 0, 0, 1], 0))).expect("a free port");
        let address = listener.local_address().expect("it is bound");
        assert!(matches!(listener.accept(), Accepted::Empty));
        let stream = socket(address).expect("a socket");
        start_connect(&stream, address).expect("it listens");
        set_liveness(&stream, 2_000).expect("options that every kernel has");
        set_buffers(&stream, Some(16_384), None).expect("options that every kernel has");
        reset_on_close(&stream);
        let mut accepted = None;
        crate::testkit::eventually("the connection over loopback is accepted", || {
            if let Accepted::Connection(stream) = listener.accept() {
                accepted = Some(stream);
            }
            accepted.is_some()
        });
        let accepted = accepted.expect("just seen");
        assert_eq!(accepted.peer_addr().ok(), stream.local_addr().ok());

        let now = Instant::from_millis(50);
        let until = listener.pause(now, &io::Error::from_raw_os_error(libc::EMFILE), 8);
        assert_eq!((until, listener.paused_until()), (Instant::from_millis(150), Some(until)));
        assert!(!listener.is_pause_over(now) && listener.is_pause_over(until));
        listener.resume();
        assert!(!listener.is_pause_over(until) && listener.paused_until().is_none());
    }

    #[test]
    fn random_numbers_differ() {
        assert_ne!(random_u64().ok(), random_u64().ok());
    }
}
