//! TCP, its ports, and the way to the master.

use super::{Check, Judgement, count, errno_text, fail, list, ok, skip, warn};
use crate::commands::doctor::facts::Facts;
use crate::size::ByteSize;

pub(super) const CHECKS: &[Check] = &[
    Check {
        name: "tcp congestion control",
        why: "It decides how fast a stream may go, and some are made for the internet.",
        judge: congestion,
    },
    Check {
        name: "socket buffers",
        why: "A stream has at most a buffer's worth of bytes in flight.",
        judge: socket_buffers,
    },
    Check {
        name: "listen backlog",
        why: "When many clients start at once, connections beyond the backlog are dropped and come back a second later.",
        judge: backlog,
    },
    Check { name: "io_uring", why: "It saves TCP most of its system calls.", judge: io_uring },
    Check { name: "ports", why: "A master and a node listen on them.", judge: ports },
    Check {
        name: "ephemeral ports",
        why: "Outgoing connections take ports of this range, also the one that a master is about to listen on.",
        judge: ephemeral,
    },
    Check {
        name: "tcp sockets",
        why: "A client that has used up its ports cannot connect, and closed connections keep theirs for a minute.",
        judge: sockets,
    },
    Check {
        name: "connection tracking",
        why: "When the firewall's table is full it drops the packets of new connections.",
        judge: conntrack,
    },
    Check { name: "firewall", why: "What a firewall drops looks like a peer that is dead.", judge: firewall },
    Check { name: "tcp over loopback", why: "Nothing works when even this does not.", judge: loopback },
    Check { name: "master", why: "Clients and nodes ask it first.", judge: master },
];

fn congestion(facts: &Facts) -> Judgement {
    let Some(name) = facts.congestion.as_deref() else { return skip("unknown") };
    let cubic = facts.congestion_available.iter().any(|offered| offered == "cubic");
    match name {
        "bbr" if cubic => warn(
            name,
            (
                "bbr paces, which costs throughput in fast local networks (within one host, TCP transfers take cubic by \
                 themselves): take cubic, or dctcp where switches mark",
                "sudo sysctl net.ipv4.tcp_congestion_control=cubic",
            ),
        ),
        "bbr" => warn(
            name,
            (
                "bbr paces, which costs up to half of the throughput over loopback: take cubic",
                "sudo modprobe tcp_cubic && sudo sysctl net.ipv4.tcp_congestion_control=cubic",
            ),
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
            (
                "one stream cannot fill a fast link: let buffers grow",
                "sudo sysctl net.ipv4.tcp_rmem='4096 131072 16777216' net.ipv4.tcp_wmem='4096 65536 16777216' \
                 net.core.rmem_max=16777216 net.core.wmem_max=16777216",
            ),
        );
    }
    ok(found)
}

fn backlog(facts: &Facts) -> Judgement {
    match facts.somaxconn {
        None => skip("the kernel does not say here"),
        Some(n) if n < 1024 => {
            warn(n.to_string(), ("let more connections wait", "sudo sysctl net.core.somaxconn=4096"))
        }
        Some(n) => ok(n.to_string()),
    }
}

fn io_uring(facts: &Facts) -> Judgement {
    match facts.io_uring {
        None => skip("unknown"),
        Some(Ok(())) => ok("allowed"),
        Some(Err(libc::ENOSYS)) => warn("not in this kernel", "epoll is used; Linux 5.15 or newer has it"),
        Some(Err(errno)) => warn(
            format!("refused ({})", errno_text(errno)),
            (
                "epoll is used; to allow it, let a container's seccomp profile pass io_uring_setup, and:",
                "sudo sysctl kernel.io_uring_disabled=0",
            ),
        ),
    }
}

fn ports(facts: &Facts) -> Judgement {
    if facts.ports.is_empty() {
        return skip("none asked for");
    }
    let mut shown = Vec::new();
    let mut foreign = Vec::new();
    for port in &facts.ports {
        match (&port.taken, &port.holder) {
            (None, _) => shown.push(format!("{} free", port.number)),
            (Some(_), Some((name, pid))) => {
                shown.push(format!("{} held by {name} (process {pid})", port.number));
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
            "fine when that is your master; otherwise end it, or choose another port with --listen and --http",
            format!("sudo ss -ltnp 'sport = :{port}'"),
        ),
    )
}

fn ephemeral(facts: &Facts) -> Judgement {
    const ENOUGH: u16 = 10_000;
    let Some(range) = &facts.ephemeral else { return skip("the kernel does not say here") };
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
        format!("{found}, which holds {}", list(&exposed)),
        (
            "keep the ports that servers listen on out of it",
            format!("sudo sysctl net.ipv4.ip_local_reserved_ports={}", reserved.join(",")),
        ),
    )
}

fn sockets(facts: &Facts) -> Judgement {
    let (Some((open, closed)), Some(range)) = (facts.tcp_sockets, &facts.ephemeral) else {
        return skip("the kernel does not say here");
    };
    let ports = u64::from(range.end().saturating_sub(*range.start())) + 1;
    let found = format!("{} open, {} closed, {} ports", count(open), count(closed), count(ports));
    if open.saturating_add(closed) < ports / 2 {
        return ok(found);
    }
    warn(
        found,
        (
            "find who opens so many, and have clients keep their connections",
            "sudo ss -tanp | awk '{print $NF}' | sort | uniq -c | sort -n | tail",
        ),
    )
}

fn conntrack(facts: &Facts) -> Judgement {
    let Some((used, most)) = facts.conntrack else { return skip("not loaded, or not shown here") };
    let found = format!("{} of {}", count(used), count(most));
    // 0 is no limit.
    if most == 0 || used < most / 5 * 4 {
        return ok(found);
    }
    warn(
        found,
        (
            "make the table larger, or leave the ports of the store out of it",
            format!("sudo sysctl net.netfilter.nf_conntrack_max={}", most.saturating_mul(4).max(262_144)),
        ),
    )
}

fn firewall(facts: &Facts) -> Judgement {
    let ports = facts.ports.iter().map(|port| port.number);
    skip(format!(
        "cannot be seen from one side; TCP {} must pass between hosts, and UDP 4791 for RoCE v2",
        list(ports)
    ))
}

fn loopback(facts: &Facts) -> Judgement {
    match &facts.loopback {
        None => skip("not tried"),
        Some(Err(why)) => {
            fail(why.clone(), ("bring it up, and look at the firewall", "sudo ip link set lo up"))
        }
        Some(Ok(time)) => {
            let us = time.as_secs_f64() * 1e6;
            let found = format!("round trip {us:.0} µs");
            if us > 200.0 {
                return warn(
                    found,
                    ("slow: the machine is busy, or its CPUs sleep deep", "sudo cpupower idle-set -D 10"),
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
            ("start it, or check address, port and firewall", "snowskin master"),
        ),
    }
}
