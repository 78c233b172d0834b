//! RDMA: from the user-space library down to the link.
//!
//! A machine without RDMA passes, unless RDMA was requested. Devices that exist should work.

use std::collections::{BTreeMap, BTreeSet};

use super::{Check, Judgement, fail, list, ok, skip, warn};
use crate::commands::doctor::facts::rdma::{Device, PHYSICAL_ERRORS, Port};
use crate::commands::doctor::facts::{Facts, RDMA_DEVICE};

pub(super) const CHECKS: &[Check] = &[
    Check { name: "rdma devices", why: "Without a device, data goes over TCP.", judge: devices },
    Check {
        name: "libibverbs",
        why: "This program reaches the driver through this library.",
        judge: library,
    },
    Check {
        name: "rdma providers",
        why: "libibverbs ignores a device whose provider it cannot load.",
        judge: providers,
    },
    Check {
        name: "rdma device nodes",
        why: "A process that cannot open a device's node cannot use the device.",
        judge: device_nodes,
    },
    Check {
        name: "rdma cgroup",
        why: "Connections and registrations beyond the limit are refused.",
        judge: cgroup,
    },
    Check { name: "rdma port state", why: "Only a port in state ACTIVE carries packets.", judge: port_state },
    Check {
        name: "rdma gids",
        why: "Peers connect to a GID: ideally of RoCE v2 with a global address, or of InfiniBand.",
        judge: gids,
    },
    Check {
        name: "rdma duplicate gids",
        why: "A peer that connects to an address of two ports may reach either of them.",
        judge: duplicate_gids,
    },
    Check {
        name: "rdma subnets",
        why: "With two RoCE ports in one subnet, the kernel may answer and send through either, so rails \
            stay idle.",
        judge: subnets,
    },
    Check {
        name: "rdma partitions",
        why: "Two limited members of a partition cannot communicate.",
        judge: partitions,
    },
    Check {
        name: "rdma mtu",
        why: "Each packet has a fixed cost, so small packets reduce the bandwidth.",
        judge: mtu,
    },
    Check { name: "rdma rates", why: "A slow rail delays transfers that use all rails.", judge: rates },
    Check {
        name: "rdma errors",
        why: "After one lost packet, RDMA sends all later ones again.",
        judge: errors,
    },
    Check { name: "pcie links", why: "A NIC is not faster than its PCIe slot.", judge: pcie },
    Check {
        name: "iommu",
        why: "Translating the address of each DMA costs bandwidth and registration time.",
        judge: iommu,
    },
];

const NO_DEVICE: &str = "no RDMA device";
/// Why checks of RDMA are skipped when no fabric in use needs it.
pub(super) const NO_RDMA: &str = "the selected fabrics do not use RDMA";

/// The devices, or why the check is skipped.
fn cards(facts: &Facts) -> Result<&[Device], Judgement> {
    match facts.rdma.devices.as_slice() {
        _ if !facts.uses(RDMA_DEVICE) => Err(skip(NO_RDMA)),
        [] => Err(skip(NO_DEVICE)),
        devices => Ok(devices),
    }
}

/// The active ports, or why the check is skipped.
fn active_ports(facts: &Facts) -> Result<Vec<&Port>, Judgement> {
    let ports: Vec<&Port> =
        cards(facts)?.iter().flat_map(|device| &device.ports).filter(|port| port.is_active()).collect();
    if ports.is_empty() { Err(skip("no port is ACTIVE")) } else { Ok(ports) }
}

/// The judgement in either variant, so that checks can return early with `?`.
fn either(result: Result<Judgement, Judgement>) -> Judgement {
    result.unwrap_or_else(|early| early)
}

fn devices(facts: &Facts) -> Judgement {
    let found = match cards(facts) {
        Ok(devices) if devices.iter().all(Device::is_software) => {
            return warn(
                format!("{}: emulated by the kernel", list(devices.iter().map(|device| &device.name))),
                "good for tests, but slower than TCP: use a NIC with RDMA, or --fabric tcp",
            );
        }
        Ok(devices) => return ok(list(devices.iter().map(|device| &device.name))),
        Err(skipped) => skipped,
    };
    let idle: Vec<_> =
        facts.pci.iter().filter(|function| function.is_rdma_nic()).map(|f| &f.address).collect();
    match facts.requires(RDMA_DEVICE) {
        _ if !facts.uses(RDMA_DEVICE) => found,
        required if !idle.is_empty() => {
            let found = format!("none, although the NIC at {} supports RDMA", list(idle));
            let fix = ("load its RDMA driver", "sudo modprobe -a mlx5_ib ib_uverbs");
            if required { fail(found, fix) } else { warn(found, fix) }
        }
        true => fail(
            "none in /sys/class/infiniband",
            (
                "check for a NIC and its driver (`lspci -nn | grep -iE 'mellanox|infiniband'`, `sudo \
                modprobe -a mlx5_ib ib_uverbs`); in a container also `docker run --device=/dev/infiniband`; \
                for trials without such a NIC:",
                "sudo rdma link add rxe0 type rxe netdev eth0",
            ),
        ),
        false => skip("none; data goes over TCP and shared memory"),
    }
}

fn library(facts: &Facts) -> Judgement {
    if !facts.uses(RDMA_DEVICE) {
        return skip(NO_RDMA);
    }
    match &facts.rdma.library {
        None => skip("not checked"),
        Some(Ok(library)) => ok(library.name.clone()),
        Some(Err(_)) if !facts.requires(RDMA_DEVICE) && facts.rdma.devices.is_empty() => skip(NO_DEVICE),
        Some(Err(why)) => fail(
            why.clone(),
            (
                "install the libraries of rdma-core (Debian, Ubuntu: libibverbs1 and ibverbs-providers; \
                Fedora, RHEL, SUSE: libibverbs)",
                "sudo apt-get install libibverbs1 ibverbs-providers",
            ),
        ),
    }
}

fn providers(facts: &Facts) -> Judgement {
    either(cards(facts).map(|devices| {
        let fix = (
            "install the providers of rdma-core (Debian, Ubuntu: ibverbs-providers; Fedora, RHEL: \
            libibverbs), of the same release as libibverbs",
            "sudo apt-get install ibverbs-providers",
        );
        let Some(known) = &facts.rdma.providers else {
            if matches!(facts.rdma.library, Some(Ok(_))) {
                return skip("no /etc/libibverbs.d: this libibverbs keeps them elsewhere");
            }
            return skip("no libibverbs");
        };
        let wanted: BTreeSet<&str> = devices.iter().filter_map(Device::provider).collect();
        if wanted.is_empty() {
            return skip("unknown drivers");
        }
        let lost = |wanted: &&&str| !known.iter().any(|provider| provider.name == **wanted);
        let unlisted: Vec<_> = wanted.iter().filter(lost).collect();
        if !unlisted.is_empty() {
            return fail(format!("no provider for {} in /etc/libibverbs.d", list(unlisted)), fix);
        }
        let empty: Vec<_> = wanted
            .iter()
            .filter(|wanted| {
                known
                    .iter()
                    .any(|provider| provider.name == ***wanted && provider.is_installed == Some(false))
            })
            .collect();
        if !empty.is_empty() {
            return fail(format!("{} is listed, but its library is missing", list(empty)), fix);
        }
        ok(list(wanted))
    }))
}

fn device_nodes(facts: &Facts) -> Judgement {
    either(cards(facts).map(|devices| {
        let bare: Vec<_> =
            devices.iter().filter(|device| device.uverbs.is_none()).map(|device| &device.name).collect();
        if !bare.is_empty() {
            return fail(
                format!("{} has none", list(bare)),
                ("load the kernel module for libibverbs", "sudo modprobe ib_uverbs"),
            );
        }
        let nodes = devices.iter().filter_map(|device| device.uverbs.as_ref());
        let closed: Vec<_> = nodes
            .clone()
            .filter_map(|(name, opened)| Some((name, opened.as_ref().err()?)))
            .map(|(name, why)| format!("/dev/infiniband/{name}: {why}"))
            .collect();
        if closed.is_empty() {
            return ok(list(nodes.map(|(name, _)| name)));
        }
        fail(
            list(closed),
            (
                "give the container the devices (`docker run --device=/dev/infiniband`, or the RDMA device \
                plugin of Kubernetes); on the host, let the udev rules of rdma-core make them accessible to \
                all users",
                "sudo udevadm trigger --subsystem-match=infiniband_verbs --action=add",
            ),
        )
    }))
}

fn cgroup(facts: &Facts) -> Judgement {
    either(cards(facts).map(|devices| {
        let limits: Vec<_> = facts
            .rdma
            .limits
            .iter()
            .filter(|(name, ..)| devices.iter().any(|device| device.name == *name))
            .collect();
        if limits.is_empty() {
            return ok("no limit");
        }
        let show = |value: Option<u64>| value.map_or("any".to_owned(), |value| value.to_string());
        let found = list(limits.iter().map(|(name, handles, objects)| {
            format!("{name}: {} handles, {} objects", show(*handles), show(*objects))
        }));
        let fix = "raise the limit in rdma.max of the control group (see the kernel's cgroup-v2 document, \
            \"RDMA\")";
        let closed = limits.iter().any(|(_, handles, objects)| *handles == Some(0) || *objects == Some(0));
        if closed { fail(found, fix) } else { warn(found, fix) }
    }))
}

fn port_state(facts: &Facts) -> Judgement {
    either(cards(facts).map(|devices| {
        let ports: Vec<&Port> = devices.iter().flat_map(|device| &device.ports).collect();
        let (active, idle): (Vec<&Port>, Vec<&Port>) = ports.into_iter().partition(|port| port.is_active());
        if idle.is_empty() && !active.is_empty() {
            return ok(format!("{} ACTIVE", list(active.iter().map(|port| &port.name))));
        }
        let found =
            list(idle.iter().map(|port| format!("{} {} ({})", port.name, port.state.1, port.physical.1)));
        let Some(port) = idle.first() else {
            return fail("no port at all", "the driver has not started: see `dmesg | grep -i -E 'mlx|ib_'`");
        };
        let netdev = port.netdevs.first().map_or("NETDEV", |netdev| &netdev.name);
        let fix = match (port.is_infiniband(), port.physical.0) {
            (true, 5) => (
                "the link is up, but no subnet manager has configured it: start one on a switch or on a host",
                "sudo systemctl start opensm".to_owned(),
            ),
            (false, 3) => {
                ("its network interface is down: bring it up", format!("sudo ip link set {netdev} up"))
            }
            (true, _) => (
                "no signal: check cable, transceiver and switch port",
                format!("ibstat {}", port.name.replace('/', " ")),
            ),
            (false, _) => (
                "check cable, transceiver and switch port, and that its network interface is up",
                format!("sudo ip link set {netdev} up && ethtool {netdev}"),
            ),
        };
        if active.is_empty() { fail(found, fix) } else { warn(found, fix) }
    }))
}

fn gids(facts: &Facts) -> Judgement {
    either(active_ports(facts).map(|ports| {
        let (mut none, mut old, mut local) = (Vec::new(), Vec::new(), Vec::new());
        for port in &ports {
            let usable: Vec<_> = port.gids.iter().filter(|gid| gid.is_v2 || !port.is_ethernet()).collect();
            if port.gids.is_empty() {
                none.push(*port);
            } else if usable.is_empty() {
                old.push(*port);
            } else if port.is_ethernet() && usable.iter().all(|gid| gid.is_link_local()) {
                local.push(*port);
            }
        }
        let names = |ports: &[&Port]| list(ports.iter().map(|port| &port.name));
        let netdev = |ports: &[&Port]| {
            ports[0].netdevs.first().map_or("NETDEV".to_owned(), |netdev| netdev.name.clone())
        };
        if !none.is_empty() {
            return fail(
                format!("{} has none", names(&none)),
                (
                    "give its network interface an address, in the network namespace of this process",
                    format!("sudo ip addr add 10.0.0.1/24 dev {}", netdev(&none)),
                ),
            );
        }
        if !old.is_empty() {
            let (device, number) = old[0].name.split_once('/').unwrap_or((&old[0].name, "1"));
            return warn(
                format!("{} has none of RoCE v2", names(&old)),
                (
                    "RoCE v1 does not cross routers and reaches only peers that use it: switch the port to \
                    RoCE v2 (also in the NIC's firmware: `mlxconfig … set ROCE_CONTROL=2`)",
                    format!("sudo cma_roce_mode -d {device} -p {number} -m 2"),
                ),
            );
        }
        if !local.is_empty() {
            return warn(
                format!("{} has only link-local GIDs", names(&local)),
                (
                    "peers behind a router cannot reach it: give its network interface an address",
                    format!("sudo ip addr add 10.0.0.1/24 dev {}", netdev(&local)),
                ),
            );
        }
        let best = |port: &Port| {
            let wanted = port.gids.iter().filter(|gid| gid.is_v2 || !port.is_ethernet());
            let best =
                wanted.max_by_key(|gid| (gid.address.to_ipv4_mapped().is_some(), !gid.is_link_local()));
            best.map_or_else(String::new, |gid| {
                gid.address.to_ipv4_mapped().map_or_else(|| gid.address.to_string(), |v4| v4.to_string())
            })
        };
        ok(list(ports.iter().map(|port| format!("{} {}", port.name, best(port)))))
    }))
}

fn duplicate_gids(facts: &Facts) -> Judgement {
    either(cards(facts).map(|devices| {
        let mut homes: BTreeMap<_, BTreeSet<&str>> = BTreeMap::new();
        for port in devices.iter().flat_map(|device| &device.ports) {
            // On Ethernet, the same link-local address may be used on several links; on InfiniBand,
            // link-local GIDs are the usual ones.
            for gid in port.gids.iter().filter(|gid| !port.is_ethernet() || !gid.is_link_local()) {
                homes.entry(gid.address).or_default().insert(&port.name);
            }
        }
        let shared: Vec<_> = homes.iter().filter(|(_, ports)| ports.len() > 1).collect();
        if shared.is_empty() {
            return ok("none");
        }
        warn(
            list(shared.iter().map(|(gid, ports)| {
                let gid = gid.to_ipv4_mapped().map_or_else(|| gid.to_string(), |v4| v4.to_string());
                format!("{gid} on {}", list(ports.iter()))
            })),
            (
                "give each port its own address, and do not configure soft-RoCE on a NIC with RDMA",
                "rdma link; ip addr",
            ),
        )
    }))
}

fn subnets(facts: &Facts) -> Judgement {
    either(active_ports(facts).map(|ports| {
        let netdevs: BTreeMap<&str, _> = ports
            .iter()
            .filter(|port| port.is_ethernet())
            .flat_map(|port| &port.netdevs)
            .map(|netdev| (netdev.name.as_str(), netdev))
            .collect();
        let mut shared: BTreeMap<(u32, u32), BTreeSet<&str>> = BTreeMap::new();
        for (name, address, mask) in &facts.subnets {
            if netdevs.contains_key(name.as_str()) {
                shared.entry((*address, *mask)).or_default().insert(name);
            }
        }
        shared.retain(|_, names| names.len() > 1);
        let names: BTreeSet<&str> = shared.into_values().flatten().collect();
        if names.is_empty() {
            return ok("one per rail");
        }
        let found = format!("{} share a subnet", list(&names));
        let careful = names.iter().filter_map(|name| netdevs.get(name)).all(|netdev| {
            netdev.arp_ignore >= 1 && netdev.arp_announce >= 2 && netdev.rp_filter != 1
        });
        if careful {
            return ok(format!("{found}, but each answers for its own address only"));
        }
        warn(
            found,
            (
                "give each rail its own subnet; or let each port answer for its own address only, with a \
                routing table per source address",
                "sudo sysctl net.ipv4.conf.all.arp_ignore=1 net.ipv4.conf.all.arp_announce=2 net.ipv4.conf.all.rp_filter=2",
            ),
        )
    }))
}

fn partitions(facts: &Facts) -> Judgement {
    /// The bit of a full member (InfiniBand Architecture Specification 1, 10.9.1.1).
    const FULL: u32 = 0x8000;
    either(active_ports(facts).map(|ports| {
        let ports: Vec<_> = ports.into_iter().filter(|port| port.is_infiniband()).collect();
        if ports.is_empty() {
            return skip("no InfiniBand port");
        }
        let limited: Vec<_> =
            ports.iter().filter(|port| port.pkeys.iter().all(|key| key & FULL == 0)).collect();
        if limited.is_empty() {
            return ok("full member");
        }
        warn(
            format!(
                "{} is only a limited member of its partitions",
                list(limited.iter().map(|port| &port.name))
            ),
            "make its port a full member in the subnet manager's partitions.conf (`ALL=full`)",
        )
    }))
}

/// The path MTU that RoCE derives from an interface's MTU: the largest that fits with the longest headers
/// (`iboe_get_mtu` of Linux).
fn roce_mtu(netdev_mtu: u32) -> u32 {
    const HEADERS: u32 = 96;
    let room = netdev_mtu.saturating_sub(HEADERS);
    [4096, 2048, 1024, 512, 256].into_iter().find(|mtu| *mtu <= room).unwrap_or(256)
}

fn mtu(facts: &Facts) -> Judgement {
    const BEST: u32 = 4096;
    either(active_ports(facts).map(|ports| {
        let mut good = BTreeSet::new();
        let mut small = Vec::new();
        for port in ports.iter().filter(|port| port.is_ethernet()) {
            let smallest = port.netdevs.iter().filter_map(|netdev| Some((netdev.mtu?, &netdev.name))).min();
            let Some((mtu, netdev)) = smallest else { continue };
            if roce_mtu(mtu) < BEST {
                small.push((format!("{} {} ({netdev} has {mtu})", port.name, roce_mtu(mtu)), netdev));
            } else {
                good.insert(mtu);
            }
        }
        match (small.first(), good.is_empty()) {
            (Some((_, netdev)), _) => warn(
                list(small.iter().map(|(text, _)| text)),
                (
                    "raise it to 4200 or 9000, on all hosts and on the switches between them",
                    format!("sudo ip link set {netdev} mtu 4200"),
                ),
            ),
            (None, false) => ok(format!("{BEST} (interfaces have {})", list(good))),
            (None, true) => skip("not reported in sysfs; `ibv_devinfo` shows active_mtu"),
        }
    }))
}

fn rates(facts: &Facts) -> Judgement {
    either(cards(facts).map(|devices| {
        let model = |device: &Device| {
            let pci = facts.pci.iter().find(|function| Some(&function.address) == device.pci.as_ref());
            pci.map(|function| (function.vendor, function.device))
        };
        // Different NICs may differ; ports of the same model should not.
        let mut fastest = BTreeMap::new();
        let mut all = Vec::new();
        for device in devices {
            for port in device.ports.iter().filter(|port| port.is_active()) {
                let Some(rate) = port.rate else { continue };
                all.push((model(device), port, rate));
                if let Some(model) = model(device) {
                    let most = fastest.entry(model).or_insert(rate);
                    *most = rate.max(*most);
                }
            }
        }
        if all.is_empty() {
            return skip("no port is ACTIVE");
        }
        let slow: Vec<_> = all
            .iter()
            .filter_map(|(model, port, rate)| {
                let most = *fastest.get(model.as_ref()?)?;
                (*rate < most)
                    .then(|| (port, format!("{} {rate} Gb/s, others of its model {most}", port.name)))
            })
            .collect();
        let Some((port, _)) = slow.first() else {
            return ok(list(all.iter().map(|(_, port, rate)| format!("{} {rate} Gb/s", port.name))));
        };
        let command = match port.netdevs.first() {
            Some(netdev) => format!("ethtool {}", netdev.name),
            None => format!("ibstat {}", port.name.replace('/', " ")),
        };
        warn(
            list(slow.iter().map(|(_, text)| text)),
            (
                "it negotiated less than others of its model: check cable, transceiver and the speed of the \
                switch port",
                command,
            ),
        )
    }))
}

fn errors(facts: &Facts) -> Judgement {
    either(cards(facts).map(|devices| {
        let ports = devices.iter().flat_map(|device| &device.ports);
        let errors: Vec<_> = ports
            .flat_map(|port| port.errors.iter().map(move |(name, value)| (port, name, *value)))
            .collect();
        let Some((port, ..)) = errors.first() else { return ok("none") };
        let on_the_wire = errors.iter().any(|(_, name, _)| PHYSICAL_ERRORS.contains(&name.as_str()));
        let words = if on_the_wire {
            "counted since the driver started; if they increase, clean or replace cable and transceiver"
        } else {
            "counted since the driver started; if they increase, packets are dropped: configure PFC or ECN \
            on switches and NICs"
        };
        warn(
            list(errors.iter().map(|(port, name, value)| format!("{} {name} {value}", port.name))),
            (
                words,
                format!(
                    "watch -d 'grep . /sys/class/infiniband/{}/*counters/*'",
                    port.name.replace('/', "/ports/")
                ),
            ),
        )
    }))
}

fn pcie(facts: &Facts) -> Judgement {
    either(cards(facts).map(|devices| {
        let nics: Vec<_> = facts
            .pci
            .iter()
            .filter(|function| devices.iter().any(|device| device.pci.as_ref() == Some(&function.address)))
            .filter_map(|function| Some((function, function.link?)))
            .collect();
        if nics.is_empty() {
            return skip("the kernel does not report it (usual in virtual machines)");
        }
        let slow: Vec<_> = nics.iter().filter(|(_, [now, most])| now.0 < most.0 || now.1 < most.1).collect();
        let show = |(speed, lanes): (f64, u32)| format!("{speed} GT/s x{lanes}");
        let Some((nic, _)) = slow.first() else {
            return ok(list(nics.iter().map(|(_, [now, _])| show(*now)).collect::<BTreeSet<_>>()));
        };
        warn(
            list(
                slow.iter().map(|(nic, [now, most])| {
                    format!("{} has {} of {}", nic.address, show(*now), show(*most))
                }),
            ),
            (
                "reseat the card, or move it to a slot with enough lanes; check the slot's speed in the \
                firmware (BIOS)",
                format!("sudo lspci -vv -s {} | grep -E 'LnkCap|LnkSta'", nic.address),
            ),
        )
    }))
}

fn iommu(facts: &Facts) -> Judgement {
    either(cards(facts).map(|devices| {
        let translated: Vec<_> = devices
            .iter()
            .filter(|device| device.iommu.as_deref().is_some_and(|kind| kind.starts_with("DMA")))
            .map(|device| &device.name)
            .collect();
        if translated.is_empty() {
            return ok("off, or in passthrough mode");
        }
        warn(
            format!("translates addresses for {}", list(translated)),
            (
                "use passthrough mode for devices of the host: `iommu=pt` on the kernel's command line \
                (Debian, Ubuntu: GRUB_CMDLINE_LINUX in /etc/default/grub, then `update-grub`; Fedora, RHEL: \
                as below), then restart",
                "sudo grubby --update-kernel=ALL --args=iommu=pt",
            ),
        )
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mtu_of_roce_leaves_room_for_headers() {
        assert_eq!(
            [9000, 4200, 4192, 4191, 2200, 1500, 1000, 576, 0].map(roce_mtu),
            [4096, 4096, 4096, 2048, 2048, 1024, 512, 256, 256]
        );
    }
}
