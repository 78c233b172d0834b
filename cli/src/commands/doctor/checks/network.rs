//! TCP, its ports, and the connection to the master.

use super::{Check, Judgement, count, errno_text, fail, list, ok, skip, warn};
use crate::commands::doctor::facts::Facts;
use crate::size::ByteSize;

pub(super) const CHECKS: &[Check] = &[
    Check {
        name: "tcp congestion control",
        why: "It decides how fast a stream may send, and some algorithms are made for the internet.",
        judge: congestion,
    },
    Check {
        name: "socket buffers",
        why: "A stream has at most one buffer of bytes in flight.",
        judge: socket_buffers,
    },
    Check {
        name: "listen backlog",
        why: "When many clients connect at once, connections beyond the backlog are dropped and retried a \
            second later.",
        judge: backlog,
    },
    Check { name: "io_uring", why: "It saves the TCP fabric most of its system calls.", judge: io_uring },
    Check { name: "ports", why: "A master and a node listen on them.", judge: ports },
    Check {
        name: "ephemeral ports",
        why: "Outgoing connections use ports of this range, possibly the port of a master that is not \
            running yet.",
        judge: ephemeral,
    },
    Check {
        name: "tcp sockets",
        why: "A client without free ports cannot connect, and a closed connection keeps its port for a \
            minute.",
        judge: sockets,
    },
    Check {
        name: "connection tracking",
        why: "When the firewall's table is full it drops the packets of new connections.",
        judge: conntrack,
    },
    Check {
        name: "firewall",
        why: "A peer behind a firewall that drops packets looks like a dead peer.",
        judge: firewall,
    },
    Check {
        name: "tcp over loopback",
        why: "Without it, no process of the store can reach another.",
        judge: loopback,
    },
    Check { name: "master", why: "Clients and nodes connect to it first.", judge: master },
];

fn congestion(facts: &Facts) -> Judgement {
    let Some(name) = facts.congestion.as_deref() else { return skip("unknown") };
    let cubic = facts.congestion_available.iter().any(|offered| offered == "cubic");
    match name {
        "bbr" if cubic => warn(
            name,
            (
                "bbr paces packets, which costs throughput in fast local networks (TCP transfers within one \
                host use cubic in any case): use cubic, or dctcp with switches that mark packets",
                "sudo sysctl net.ipv4.tcp_congestion_control=cubic",
            ),
        ),
        "bbr" => warn(
            name,
            (
                "bbr paces packets, which costs up to half of the throughput over loopback: use cubic",
                "sudo modprobe tcp_cubic && sudo sysctl net.ipv4.tcp_congestion_control=cubic",
            ),
        ),
        _ => ok(name),
    }
}

fn socket_buffers(facts: &Facts) -> Judgement {
    const WANTED: u64 = 4 << 20;
    let (Some(read), Some(write)) = (facts.tcp_rmem_max, facts.tcp_wmem_max) else {
        return skip("the kernel does not report it here");
    };
    let show = |bytes| ByteSize(bytes).approximate();
    let core = |max: Option<u64>| max.map_or("unknown".to_owned(), show);
    let found = format!(
        "grow automatically to {} (read) and {} (write); on request to {} and {}",
        show(read),
        show(write),
        core(facts.rmem_max),
        core(facts.wmem_max)
    );
    if read.min(write) < WANTED {
        return warn(
            found,
            (
                "one stream cannot fill a fast link: raise the limits",
                "sudo sysctl net.ipv4.tcp_rmem='4096 131072 16777216' net.ipv4.tcp_wmem='4096 65536 16777216' \
                 net.core.rmem_max=16777216 net.core.wmem_max=16777216",
            ),
        );
    }
    ok(found)
}

fn backlog(facts: &Facts) -> Judgement {
    match facts.somaxconn {
        None => skip("the kernel does not report it here"),
        Some(n) if n < 1024 => {
            warn(n.to_string(), ("raise the limit", "sudo sysctl net.core.somaxconn=4096"))
        }
        Some(n) => ok(n.to_string()),
    }
}

fn io_uring(facts: &Facts) -> Judgement {
    match facts.io_uring {
        None => skip("unknown"),
        Some(Ok(())) => ok("allowed"),
        Some(Err(libc::ENOSYS)) => {
            warn("not in this kernel", "epoll is used instead; Linux 5.15 or newer has io_uring")
        }
        Some(Err(errno)) => warn(
            format!("refused ({})", errno_text(errno)),
            (
                "epoll is used instead; to allow io_uring, permit io_uring_setup in the container's seccomp \
                profile, and:",
                "sudo sysctl kernel.io_uring_disabled=0",
            ),
        ),
    }
}

fn ports(facts: &Facts) -> Judgement {
    if facts.ports.is_empty() {
        return skip("no ports given");
    }
    let mut shown = Vec::new();
    let mut foreign = Vec::new();
    for port in &facts.ports {
        match (&port.taken, &port.holder) {
            (None, _) => shown.push(format!("{} free", port.number)),
            (Some(_), Some((name, pid))) => {
                shown.push(format!("{} in use by {name} (process {pid})", port.number));
                if name != "snowskin" {
                    foreign.push(port.number);
                }
            }
            (Some(why), None) => {
                shown.push(format!("{} not free: {why}", port.number));
                foreign.push(port.number);
            }
        }
    }
    let found = list(shown);
    let Some(port) = foreign.first() else { return ok(found) };
    warn(
        found,
        (
            "correct if that is your master; otherwise stop that process, or choose other ports with \
            --listen and --http",
            format!("sudo ss -ltnp 'sport = :{port}'"),
        ),
    )
}

fn ephemeral(facts: &Facts) -> Judgement {
    const ENOUGH: u16 = 10_000;
    let Some(range) = &facts.ephemeral else { return skip("the kernel does not report it here") };
    let found = format!("{} to {}", range.start(), range.end());
    if range.end().saturating_sub(*range.start()) < ENOUGH {
        return warn(
            found,
            (
                "busy clients run out of ports: widen the range",
                "sudo sysctl net.ipv4.ip_local_port_range='20000 60999'",
            ),
        );
    }
    let exposed: Vec<u16> = facts
        .ports
        .iter()
        .map(|port| port.number)
        .filter(|port| range.contains(port) && !facts.reserved_ports.contains(&u32::from(*port)))
        .collect();
    if exposed.is_empty() {
        return ok(found);
    }
    let reserved: Vec<String> =
        facts.reserved_ports.iter().map(u32::to_string).chain(exposed.iter().map(u16::to_string)).collect();
    warn(
        format!("{found}, which includes {}", list(&exposed)),
        (
            "exclude the ports on which servers listen",
            format!("sudo sysctl net.ipv4.ip_local_reserved_ports={}", reserved.join(",")),
        ),
    )
}

fn sockets(facts: &Facts) -> Judgement {
    let (Some((open, closed)), Some(range)) = (facts.tcp_sockets, &facts.ephemeral) else {
        return skip("the kernel does not report it here");
    };
    let ports = u64::from(range.end().saturating_sub(*range.start())) + 1;
    let found = format!("{} open, {} closed, {} ports", count(open), count(closed), count(ports));
    if open.saturating_add(closed) < ports / 2 {
        return ok(found);
    }
    warn(
        found,
        (
            "find the process that opens them, and reuse connections in clients",
            "sudo ss -tanp | awk '{print $NF}' | sort | uniq -c | sort -n | tail",
        ),
    )
}

fn conntrack(facts: &Facts) -> Judgement {
    let Some((used, most)) = facts.conntrack else { return skip("not loaded, or not visible here") };
    let found = format!("{} of {}", count(used), count(most));
    // 0 means unlimited.
    if most == 0 || used < most / 5 * 4 {
        return ok(found);
    }
    warn(
        found,
        (
            "enlarge the table, or exclude the ports of the store from tracking",
            format!("sudo sysctl net.netfilter.nf_conntrack_max={}", most.saturating_mul(4).max(262_144)),
        ),
    )
}

fn firewall(facts: &Facts) -> Judgement {
    let ports = facts.ports.iter().map(|port| port.number);
    skip(format!(
        "cannot be checked from one host; allow TCP {} between hosts, and UDP 4791 for RoCE v2",
        list(ports)
    ))
}

fn loopback(facts: &Facts) -> Judgement {
    match &facts.loopback {
        None => skip("not measured"),
        Some(Err(why)) => {
            fail(why.clone(), ("bring the interface up, and check the firewall", "sudo ip link set lo up"))
        }
        Some(Ok(time)) => {
            let us = time.as_secs_f64() * 1e6;
            let found = format!("round trip {us:.0} µs");
            if us > 200.0 {
                return warn(
                    found,
                    (
                        "slow: the machine is busy, or its CPUs use deep sleep states",
                        "sudo cpupower idle-set -D 10",
                    ),
                );
            }
            ok(found)
        }
    }
}

fn master(facts: &Facts) -> Judgement {
    match &facts.master {
        None => skip("no master given; --master HOST:PORT checks one"),
        Some((address, Ok(time))) => ok(format!("{address} answers in {:.0} µs", time.as_secs_f64() * 1e6)),
        Some((address, Err(why))) => fail(
            format!("{address}: {why}"),
            ("start it, or check address, port and firewall", "snowskin master"),
        ),
    }
}
