//! Verdicts: a table of pure functions from facts to findings.

use serde::Serialize;

use super::facts::Facts;
use crate::size::ByteSize;

/// How good a finding is; the worst is the greatest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Verdict {
    /// This machine does not say, or it does not matter here.
    Skip,
    /// As it should be.
    Ok,
    /// Works, but slower, or with less.
    Warn,
    /// Something will not work.
    Fail,
}

impl Verdict {
    /// As printed.
    pub(super) const fn word(self) -> &'static str {
        match self {
            Self::Skip => "skip",
            Self::Ok => "ok",
            Self::Warn => "warn",
            Self::Fail => "fail",
        }
    }
}

/// What one check found.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Finding {
    /// Which check.
    pub(super) check: &'static str,
    /// How good it is.
    pub(super) verdict: Verdict,
    /// What is the case.
    pub(super) found: String,
    /// What to do about it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) fix: Option<String>,
}

/// A judgement before it knows its name.
struct Judgement(Verdict, String, Option<String>);

type Check = fn(&Facts) -> Judgement;

const CHECKS: &[(&str, Check)] = &[
    ("kernel", kernel),
    ("cpus", cpus),
    ("numa", numa),
    ("clock", clock),
    ("memory", memory),
    ("open files", files),
    ("locked memory", memlock),
    ("huge pages", huge_pages),
    ("/dev/shm", dev_shm),
    ("memfd", memfd),
    ("tcp congestion control", congestion),
    ("socket buffers", socket_buffers),
    ("io_uring", io_uring),
    ("ports", ports),
    ("tcp over loopback", loopback),
    ("master", master),
];

/// Runs every check.
pub(super) fn run(facts: &Facts) -> Vec<Finding> {
    CHECKS
        .iter()
        .map(|(check, judge)| {
            let Judgement(verdict, found, fix) = judge(facts);
            Finding { check, verdict, found, fix }
        })
        .collect()
}

fn ok(found: impl Into<String>) -> Judgement {
    Judgement(Verdict::Ok, found.into(), None)
}

fn skip(found: impl Into<String>) -> Judgement {
    Judgement(Verdict::Skip, found.into(), None)
}

fn warn(found: impl Into<String>, fix: impl Into<String>) -> Judgement {
    Judgement(Verdict::Warn, found.into(), Some(fix.into()))
}

fn fail(found: impl Into<String>, fix: impl Into<String>) -> Judgement {
    Judgement(Verdict::Fail, found.into(), Some(fix.into()))
}

fn kernel(facts: &Facts) -> Judgement {
    let Some(release) = &facts.kernel else { return skip("unknown") };
    let mut numbers =
        release.split(|c: char| !c.is_ascii_digit()).map(|part| part.parse::<u32>().unwrap_or(0));
    let version = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
    match version {
        v if v < (4, 14) => {
            fail(release, "memfd, TCP_ULP and epoll as used here need Linux 4.14; run 5.15 or newer")
        }
        v if v < (5, 15) => {
            warn(release, "io_uring is young here: the epoll path is used; Linux 5.15 or newer is better")
        }
        _ => ok(release),
    }
}

fn cpus(facts: &Facts) -> Judgement {
    match facts.cpus {
        0 | 1 => warn(
            "1",
            "client and node share one CPU: latencies include context switches; give it two or more",
        ),
        n => ok(n.to_string()),
    }
}

fn numa(facts: &Facts) -> Judgement {
    match facts.numa_nodes {
        None | Some(0) => skip("the kernel shows no nodes"),
        Some(1) => ok("1 node"),
        Some(n) => warn(
            format!("{n} nodes"),
            "memory on the other node is slower: start one `snowskin node` for each, under \
             `numactl --cpunodebind=N --membind=N`",
        ),
    }
}

fn clock(facts: &Facts) -> Judgement {
    match facts.clock_source.as_deref() {
        None => skip("unknown"),
        Some(name @ ("tsc" | "kvm-clock" | "arch_sys_counter" | "hyperv_clocksource_tsc_page")) => ok(name),
        Some(name) => warn(
            name,
            "reading this clock is a system call, which costs in every batch; if the kernel offers tsc: \
             `echo tsc | sudo tee /sys/devices/system/clocksource/clocksource0/current_clocksource`",
        ),
    }
}

fn memory(facts: &Facts) -> Judgement {
    let Some((total, available)) = facts.memory else { return skip("unknown") };
    let found =
        format!("{} of {} available", ByteSize(available).approximate(), ByteSize(total).approximate());
    match available {
        a if a < 256 << 20 => {
            fail(found, "not even a small node fits: end something, or use a larger machine")
        }
        a if a < 2 << 30 => {
            warn(found, "start nodes with a small --memory, and replay with --capacity-blocks")
        }
        _ => ok(found),
    }
}

fn files(facts: &Facts) -> Judgement {
    let Some((soft, hard)) = facts.files else { return skip("unknown") };
    let found = if soft == hard { count(soft) } else { format!("{}, at most {}", count(soft), count(hard)) };
    match hard {
        h if h < 1024 => {
            fail(found, "a master needs a descriptor for each connection: `ulimit -Hn 65536` as root")
        }
        h if h < 16_384 => warn(
            found,
            "enough for a small cluster; for more: `LimitNOFILE=1048576` in the service, or /etc/security/limits.conf",
        ),
        _ => ok(found),
    }
}

fn memlock(facts: &Facts) -> Judgement {
    match facts.memlock {
        None => skip("unknown"),
        Some(u64::MAX) => ok("no limit"),
        Some(bytes) if bytes >= 1 << 30 => ok(ByteSize(bytes).approximate()),
        Some(bytes) => warn(
            ByteSize(bytes).approximate(),
            "TCP and shared memory do not lock memory; RDMA and fixed buffers of io_uring do: `ulimit -l unlimited`, or \
             `LimitMEMLOCK=infinity` in the service",
        ),
    }
}

fn huge_pages(facts: &Facts) -> Judgement {
    let reserved = facts.huge_pages.filter(|&(total, ..)| total > 0);
    let transparent = facts.transparent_huge_pages.as_deref();
    match (reserved, transparent) {
        (Some((total, free, bytes)), _) => {
            ok(format!("{free} of {total} free, {} each", ByteSize(bytes).approximate()))
        }
        (None, Some(mode @ ("always" | "madvise"))) => ok(format!("none reserved, transparent: {mode}")),
        (None, Some(mode)) => warn(
            format!("none reserved, transparent: {mode}"),
            "large pools walk more page tables than they need: \
             `echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled`",
        ),
        (None, None) => skip("the kernel does not offer them"),
    }
}

fn dev_shm(facts: &Facts) -> Judgement {
    match facts.shm_bytes {
        None => skip("not mounted; shared memory uses memory files and does without"),
        Some(bytes) if bytes < 64 << 20 => warn(
            format!("{} free", ByteSize(bytes).approximate()),
            "other software (NCCL, PyTorch loaders) wants more; in a container: `--shm-size=8g`",
        ),
        Some(bytes) => ok(format!("{} free", ByteSize(bytes).approximate())),
    }
}

fn memfd(facts: &Facts) -> Judgement {
    match facts.memfd {
        None => skip("unknown"),
        Some(Ok(())) => ok("allowed"),
        Some(Err(errno)) => warn(
            format!("refused ({})", errno_text(errno)),
            "transfers between processes of this host go over TCP instead of shared memory: allow memfd_create in the \
             container's seccomp profile",
        ),
    }
}

fn congestion(facts: &Facts) -> Judgement {
    let Some(name) = facts.congestion.as_deref() else { return skip("unknown") };
    let cubic = facts.congestion_available.iter().any(|offered| offered == "cubic");
    match name {
        "bbr" if cubic => warn(
            name,
            "bbr paces, which costs throughput in fast local networks (within one host, TCP transfers take cubic by \
             themselves): `sudo sysctl net.ipv4.tcp_congestion_control=cubic`, or dctcp where switches mark",
        ),
        "bbr" => warn(
            name,
            "bbr paces, which costs up to half of the throughput over loopback; `sudo modprobe tcp_cubic`, then \
             `sudo sysctl net.ipv4.tcp_congestion_control=cubic`",
        ),
        _ => ok(name),
    }
}

fn socket_buffers(facts: &Facts) -> Judgement {
    const WANTED: u64 = 4 << 20;
    let (Some(read), Some(write)) = (facts.tcp_rmem_max, facts.tcp_wmem_max) else {
        return skip("the kernel does not say here");
    };
    let show = |bytes| ByteSize(bytes).approximate();
    let core = |max: Option<u64>| max.map_or("unknown".to_owned(), show);
    let found = format!(
        "grow to {} (read) and {} (write); on request to {} and {}",
        show(read),
        show(write),
        core(facts.rmem_max),
        core(facts.wmem_max)
    );
    if read.min(write) < WANTED {
        return warn(
            found,
            "one stream cannot fill a fast link: `sudo sysctl net.ipv4.tcp_rmem='4096 131072 16777216' \
             net.ipv4.tcp_wmem='4096 65536 16777216' net.core.rmem_max=16777216 net.core.wmem_max=16777216`",
        );
    }
    ok(found)
}

fn io_uring(facts: &Facts) -> Judgement {
    match facts.io_uring {
        None => skip("unknown"),
        Some(Ok(())) => ok("allowed"),
        Some(Err(libc::ENOSYS)) => warn("not in this kernel", "epoll is used; Linux 5.15 or newer has it"),
        Some(Err(errno)) => warn(
            format!("refused ({})", errno_text(errno)),
            "epoll is used; to allow it: `sudo sysctl kernel.io_uring_disabled=0`, and a seccomp profile that lets \
             io_uring_setup pass",
        ),
    }
}

fn ports(facts: &Facts) -> Judgement {
    if facts.ports.is_empty() {
        return skip("none asked for");
    }
    let list = |ports: Vec<u16>| ports.iter().map(u16::to_string).collect::<Vec<_>>().join(", ");
    let taken: Vec<u16> =
        facts.ports.iter().filter(|(_, free)| free.is_err()).map(|(port, _)| *port).collect();
    if taken.is_empty() {
        return ok(format!("{} free", list(facts.ports.iter().map(|(port, _)| *port).collect())));
    }
    let reason = facts.ports.iter().find_map(|(_, free)| free.as_ref().err()).cloned().unwrap_or_default();
    warn(
        format!("{} not free: {reason}", list(taken)),
        "fine when that is your master; otherwise `ss -ltnp` shows who listens, and --listen and --http choose others",
    )
}

fn loopback(facts: &Facts) -> Judgement {
    match &facts.loopback {
        None => skip("not tried"),
        Some(Err(why)) => {
            fail(why.clone(), "nothing works without loopback: `ip link set lo up`, and look at the firewall")
        }
        Some(Ok(time)) => {
            let us = time.as_secs_f64() * 1e6;
            let found = format!("round trip {us:.0} µs");
            if us > 200.0 {
                return warn(
                    found,
                    "slow: the machine is busy, or a power governor sleeps deep (`cpupower frequency-set -g performance`)",
                );
            }
            ok(found)
        }
    }
}

fn master(facts: &Facts) -> Judgement {
    match &facts.master {
        None => skip("none asked for; --master HOST:PORT looks"),
        Some((address, Ok(time))) => ok(format!("{address} answers in {:.0} µs", time.as_secs_f64() * 1e6)),
        Some((address, Err(why))) => fail(
            format!("{address}: {why}"),
            "start it (`snowskin master`), or check address, port and firewall",
        ),
    }
}

fn count(number: u64) -> String {
    if number == u64::MAX { "no limit".to_owned() } else { crate::output::thousands(number) }
}

fn errno_text(errno: i32) -> String {
    std::io::Error::from_raw_os_error(errno).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn healthy() -> Facts {
        Facts {
            kernel: Some("6.8.0-45-generic".into()),
            cpus: 16,
            numa_nodes: Some(1),
            clock_source: Some("tsc".into()),
            memory: Some((64 << 30, 60 << 30)),
            files: Some((1024, 1 << 20)),
            memlock: Some(u64::MAX),
            huge_pages: Some((0, 0, 2 << 20)),
            transparent_huge_pages: Some("madvise".into()),
            shm_bytes: Some(32 << 30),
            memfd: Some(Ok(())),
            congestion: Some("cubic".into()),
            congestion_available: vec!["reno".into(), "cubic".into()],
            rmem_max: Some(16 << 20),
            wmem_max: Some(16 << 20),
            tcp_rmem_max: Some(16 << 20),
            tcp_wmem_max: Some(16 << 20),
            io_uring: Some(Ok(())),
            ports: vec![(50051, Ok(())), (9003, Ok(()))],
            loopback: Some(Ok(Duration::from_micros(12))),
            master: Some(("m:1".into(), Ok(Duration::from_micros(80)))),
        }
    }

    #[test]
    fn a_healthy_machine_has_nothing_to_fix() {
        for finding in run(&healthy()) {
            assert_eq!((finding.verdict, &finding.fix), (Verdict::Ok, &None), "{finding:?}");
        }
    }

    #[test]
    fn a_machine_that_says_nothing_is_skipped_over() {
        let findings = run(&Facts { cpus: 4, ..Facts::default() });
        assert!(findings.iter().all(|f| f.verdict <= Verdict::Ok && f.fix.is_none()), "{findings:?}");
    }

    /// Breaks one setting.
    type Break = fn(&mut Facts);

    /// Each broken setting changes the verdict of its own check alone, and comes with a fix that names the way out.
    #[test]
    fn each_broken_setting_is_found_and_comes_with_its_fix() {
        let broken: &[(&str, Verdict, &str, Break)] = &[
            ("kernel", Verdict::Fail, "5.15", |f| f.kernel = Some("3.10.0-1160.el7".into())),
            ("kernel", Verdict::Warn, "5.15", |f| f.kernel = Some("5.4.0".into())),
            ("cpus", Verdict::Warn, "two", |f| f.cpus = 1),
            ("numa", Verdict::Warn, "numactl", |f| f.numa_nodes = Some(2)),
            ("clock", Verdict::Warn, "tsc", |f| f.clock_source = Some("hpet".into())),
            ("memory", Verdict::Warn, "--memory", |f| f.memory = Some((4 << 30, 1 << 30))),
            ("memory", Verdict::Fail, "larger", |f| f.memory = Some((4 << 30, 1 << 20))),
            ("open files", Verdict::Warn, "LimitNOFILE", |f| f.files = Some((1024, 4096))),
            ("open files", Verdict::Fail, "ulimit", |f| f.files = Some((256, 256))),
            ("locked memory", Verdict::Warn, "ulimit -l", |f| f.memlock = Some(64 << 10)),
            ("huge pages", Verdict::Warn, "madvise", |f| f.transparent_huge_pages = Some("never".into())),
            ("/dev/shm", Verdict::Warn, "--shm-size", |f| f.shm_bytes = Some(1 << 20)),
            ("memfd", Verdict::Warn, "seccomp", |f| f.memfd = Some(Err(libc::EPERM))),
            ("tcp congestion control", Verdict::Warn, "cubic", |f| f.congestion = Some("bbr".into())),
            ("tcp congestion control", Verdict::Warn, "modprobe", |f| {
                f.congestion = Some("bbr".into());
                f.congestion_available = vec!["bbr".into()];
            }),
            ("socket buffers", Verdict::Warn, "tcp_wmem", |f| f.tcp_wmem_max = Some(212_992)),
            ("io_uring", Verdict::Warn, "io_uring_disabled", |f| f.io_uring = Some(Err(libc::EPERM))),
            ("io_uring", Verdict::Warn, "epoll", |f| f.io_uring = Some(Err(libc::ENOSYS))),
            ("ports", Verdict::Warn, "ss -ltnp", |f| f.ports[0].1 = Err("address in use".into())),
            ("tcp over loopback", Verdict::Fail, "lo up", |f| f.loopback = Some(Err("unreachable".into()))),
            ("tcp over loopback", Verdict::Warn, "busy", |f| f.loopback = Some(Ok(Duration::from_millis(1)))),
            ("master", Verdict::Fail, "snowskin master", |f| {
                f.master = Some(("m:1".into(), Err("refused".into())))
            }),
        ];
        for (check, verdict, fix, break_it) in broken {
            let mut facts = healthy();
            break_it(&mut facts);
            for finding in run(&facts) {
                if finding.check == *check {
                    assert_eq!(finding.verdict, *verdict, "{finding:?}");
                    assert!(finding.fix.as_ref().is_some_and(|text| text.contains(fix)), "{finding:?}");
                } else {
                    assert_eq!(finding.verdict, Verdict::Ok, "{check} also broke {finding:?}");
                }
            }
        }
        for (check, _) in CHECKS {
            assert!(broken.iter().any(|(name, ..)| name == check), "nothing breaks {check}");
        }
    }
}
