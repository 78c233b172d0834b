//! What is the case on this machine. No judgement here: `checks` has that.

use std::fs::read_to_string;
use std::io::{self, Read as _, Write as _};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use crate::sys;

/// What was found; `None` where this machine does not say.
#[derive(Clone, Debug, Default)]
pub(super) struct Facts {
    /// `uname -r`.
    pub(super) kernel: Option<String>,
    /// CPUs this process may use.
    pub(super) cpus: usize,
    /// NUMA nodes.
    pub(super) numa_nodes: Option<usize>,
    /// The kernel's clock.
    pub(super) clock_source: Option<String>,
    /// Bytes of memory: all, and what can still be taken.
    pub(super) memory: Option<(u64, u64)>,
    /// Open files: soft and hard limit.
    pub(super) files: Option<(u64, u64)>,
    /// Locked memory: soft limit, bytes; `u64::MAX` is none.
    pub(super) memlock: Option<u64>,
    /// Huge pages reserved, free, and bytes of one.
    pub(super) huge_pages: Option<(u64, u64, u64)>,
    /// `always`, `madvise`, `never`.
    pub(super) transparent_huge_pages: Option<String>,
    /// Bytes free in /dev/shm.
    pub(super) shm_bytes: Option<u64>,
    /// errno, when memory files are refused.
    pub(super) memfd: Option<Result<(), i32>>,
    /// TCP congestion control in force, and those on offer.
    pub(super) congestion: Option<String>,
    pub(super) congestion_available: Vec<String>,
    /// Largest socket buffers that may be asked for, bytes.
    pub(super) rmem_max: Option<u64>,
    pub(super) wmem_max: Option<u64>,
    /// How far the kernel grows buffers by itself, bytes.
    pub(super) tcp_rmem_max: Option<u64>,
    pub(super) tcp_wmem_max: Option<u64>,
    /// errno, when rings are refused.
    pub(super) io_uring: Option<Result<(), i32>>,
    /// Each port, and why it is not free.
    pub(super) ports: Vec<(u16, Result<(), String>)>,
    /// Median round trip of one byte over loopback.
    pub(super) loopback: Option<Result<Duration, String>>,
    /// The master's address, and its round trip or why there is none.
    pub(super) master: Option<(String, Result<Duration, String>)>,
}

/// Looks. Takes a fraction of a second, unless the master does not answer.
pub(super) fn gather(ports: &[u16], master: Option<&str>) -> Facts {
    let sysctl = |path: &str| line(&format!("/proc/sys/{path}"));
    let last_number = |path: &str| sysctl(path)?.split_whitespace().last()?.parse().ok();
    let meminfo = read_to_string("/proc/meminfo").unwrap_or_default();
    let mem = |name: &str| meminfo_bytes(&meminfo, name);
    let errno = |result: io::Result<()>| Some(result.map_err(|error| error.raw_os_error().unwrap_or(0)));
    Facts {
        kernel: sysctl("kernel/osrelease"),
        cpus: std::thread::available_parallelism().map_or(1, usize::from),
        numa_nodes: numa_nodes(),
        clock_source: line("/sys/devices/system/clocksource/clocksource0/current_clocksource"),
        memory: mem("MemTotal").zip(mem("MemAvailable")),
        files: sys::limit(libc::RLIMIT_NOFILE),
        memlock: sys::limit(libc::RLIMIT_MEMLOCK).map(|(soft, _)| soft),
        huge_pages: huge_pages(&meminfo),
        transparent_huge_pages: line("/sys/kernel/mm/transparent_hugepage/enabled")
            .as_deref()
            .and_then(bracketed),
        shm_bytes: sys::available_bytes("/dev/shm"),
        memfd: errno(sys::try_memfd()),
        congestion: sysctl("net/ipv4/tcp_congestion_control"),
        congestion_available: sysctl("net/ipv4/tcp_available_congestion_control")
            .map(|names| names.split_whitespace().map(str::to_owned).collect())
            .unwrap_or_default(),
        rmem_max: last_number("net/core/rmem_max"),
        wmem_max: last_number("net/core/wmem_max"),
        tcp_rmem_max: last_number("net/ipv4/tcp_rmem"),
        tcp_wmem_max: last_number("net/ipv4/tcp_wmem"),
        io_uring: errno(sys::try_io_uring()),
        ports: ports
            .iter()
            .map(|&port| (port, port_is_free(port).map_err(|error| error.to_string())))
            .collect(),
        loopback: Some(loopback_round_trip().map_err(|error| error.to_string())),
        master: master.map(|address| (address.to_owned(), master_round_trip(address))),
    }
}

fn line(path: &str) -> Option<String> {
    read_to_string(path).ok().map(|text| text.trim().to_owned())
}

/// `name:  123 kB` in bytes; plain numbers as they are.
fn meminfo_bytes(meminfo: &str, name: &str) -> Option<u64> {
    let rest = meminfo.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
    let mut words = rest.split_whitespace();
    let number: u64 = words.next()?.parse().ok()?;
    Some(if words.next() == Some("kB") { number << 10 } else { number })
}

fn huge_pages(meminfo: &str) -> Option<(u64, u64, u64)> {
    let value = |name| meminfo_bytes(meminfo, name);
    Some((value("HugePages_Total")?, value("HugePages_Free")?, value("Hugepagesize")?))
}

/// `always [madvise] never` → `madvise`.
fn bracketed(text: &str) -> Option<String> {
    Some(text.split_once('[')?.1.split_once(']')?.0.to_owned())
}

fn numa_nodes() -> Option<usize> {
    let entries = std::fs::read_dir("/sys/devices/system/node").ok()?;
    let is_node = |name: &str| name.strip_prefix("node").is_some_and(|rest| rest.parse::<u32>().is_ok());
    Some(entries.flatten().filter(|entry| entry.file_name().to_str().is_some_and(is_node)).count())
}

fn port_is_free(port: u16) -> io::Result<()> {
    TcpListener::bind((Ipv4Addr::LOCALHOST, port)).map(drop)
}

fn loopback_round_trip() -> io::Result<Duration> {
    const ROUNDS: usize = 101;
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let mut near = TcpStream::connect(listener.local_addr()?)?;
    let (mut far, _) = listener.accept()?;
    for stream in [&near, &far] {
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(Duration::from_secs(2)))?;
    }
    let echo = std::thread::spawn(move || {
        let mut byte = [0];
        while far.read_exact(&mut byte).and_then(|()| far.write_all(&byte)).is_ok() {}
    });
    let mut times = Vec::with_capacity(ROUNDS);
    for _ in 0..ROUNDS {
        let start = Instant::now();
        near.write_all(&[1])?;
        near.read_exact(&mut [0])?;
        times.push(start.elapsed());
    }
    drop(near);
    let _ = echo.join();
    times.sort_unstable();
    Ok(times[ROUNDS / 2])
}

fn master_round_trip(address: &str) -> Result<Duration, String> {
    super::resolve(address).map_err(|error| error.to_string())?;
    crate::commands::ping_master(address).map_err(|error| format!("{error:#}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_files_are_understood() {
        let text = "MemTotal:       24675112 kB\nHugePages_Total:       3\nHugePages_Free:        2\nHugepagesize:       2048 kB\n";
        assert_eq!(meminfo_bytes(text, "MemTotal"), Some(24_675_112 << 10));
        assert_eq!(meminfo_bytes(text, "Mem"), None);
        assert_eq!(huge_pages(text), Some((3, 2, 2 << 20)));
        assert_eq!(bracketed("always [madvise] never").as_deref(), Some("madvise"));
        assert_eq!(bracketed("never"), None);
    }

    #[test]
    fn this_machine_can_be_looked_at() {
        let facts = gather(&[], None);
        assert!(facts.cpus >= 1 && facts.files.is_some() && facts.kernel.is_some());
        assert!(facts.loopback.unwrap().is_ok());
    }

    #[test]
    fn a_port_in_use_is_not_free() {
        let holder = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        assert!(port_is_free(holder.local_addr().unwrap().port()).is_err());
    }
}
