//! The QEMU command line of one guest.
//!
//! Networks between two guests are pairs of connected sockets that the guests inherit: no port is used, so
//! any number of labs run at the same time, and no other process on the machine can reach a guest.

use super::kernel::Kernel;
use super::profile::{CXL_BYTES, Nodes, Profile};
use crate::cmd::Cmd;
use anyhow::{Context as _, Result};
use nix::fcntl::{FcntlArg, FdFlag, fcntl};
use std::fs::File;
use std::os::fd::AsRawFd as _;
use std::os::unix::net::UnixStream;
use std::path::Path;

/// One guest's ends of the networks.
pub(super) struct Wires {
    /// Connections to the other guest's rails, in order; empty in a profile of one guest.
    rails: Vec<UnixStream>,
    /// Connection to the other guest's management interface.
    management: Option<UnixStream>,
}

impl Wires {
    /// The ends of both guests.
    ///
    /// # Errors
    /// The system provides no sockets.
    pub(super) fn pair(profile: &Profile) -> Result<[Self; 2]> {
        let mut ends =
            [Self { rails: Vec::new(), management: None }, Self { rails: Vec::new(), management: None }];
        for _ in 0..profile.rails {
            let (a, b) = UnixStream::pair().context("no socket pair")?;
            ends[0].rails.push(a);
            ends[1].rails.push(b);
        }
        let (a, b) = UnixStream::pair().context("no socket pair")?;
        ends[0].management = Some(a);
        ends[1].management = Some(b);
        Ok(ends)
    }

    /// The ends of a guest without another guest.
    pub(super) const fn alone() -> Self {
        Self { rails: Vec::new(), management: None }
    }

    fn netdev(&self, end: Option<&UnixStream>, id: &str) -> Result<String> {
        let Some(end) = end else { return Ok(format!("hubport,id={id},hubid=0")) };
        // QEMU inherits the socket: without this flag it would be closed when QEMU starts.
        fcntl(end, FcntlArg::F_SETFD(FdFlag::empty())).context("cannot pass a socket on")?;
        Ok(format!("socket,id={id},fd={}", end.as_raw_fd()))
    }
}

/// The parameters of one guest, besides its profile.
pub(super) struct Guest<'a> {
    /// `a` or `b`.
    pub(super) name: char,
    /// Number of the guest, from 1: the last part of its addresses.
    pub(super) number: usize,
    /// The run's directory, for logs and scripts.
    pub(super) dir: &'a Path,
    /// Whether its console is connected to this terminal (`lab shell`) instead of a log file.
    pub(super) interactive: bool,
}

/// QEMU's command line.
///
/// # Errors
/// A file or socket cannot be created.
pub(super) fn command(profile: &Profile, kernel: &Kernel, guest: &Guest<'_>, wires: &Wires) -> Result<Cmd> {
    let dir = guest.dir.display();
    // QEMU is killed when this process ends, for whatever reason.
    let mut words: Vec<String> =
        ["setpriv", "--pdeathsig", "KILL", "qemu-system-x86_64"].map(str::to_owned).to_vec();
    let mut push = |line: &str| words.extend(line.split_whitespace().map(str::to_owned));
    let machine = if profile.cxl { "q35,cxl=on" } else { "q35" };
    push(&format!(
        "-nodefaults -no-user-config -no-reboot -display none -machine {machine} -accel tcg -cpu max -smp 2"
    ));
    let maxmem = if profile.cxl { ",maxmem=8G,slots=8" } else { "" };
    push(&format!("-m {}M{maxmem}", profile.memory_mib));
    push(&numa(profile));
    push(&format!("-kernel {} -initrd {} -append", kernel.image.display(), kernel.initramfs.display()));
    // The last two: on a busy machine emulated timers are late, which must not cause a panic or a lockup
    // report.
    let quiet = "console=ttyS0 quiet loglevel=4 panic=-1 oops=panic mitigations=off net.ifnames=0 no_timer_check nowatchdog";
    words.push(format!("{quiet} lab.guest={} {}", guest.name, profile.kernel_line));

    let mut push = |line: &str| words.extend(line.split_whitespace().map(str::to_owned));
    push("-device virtio-serial-pci -device virtserialport,chardev=out,name=lab");
    if guest.interactive {
        push(&format!("-chardev file,id=out,path={dir}/output-{}.log -serial mon:stdio", guest.name));
    } else {
        push(&format!(
            "-chardev stdio,id=out,signal=off -serial file:{dir}/console-{}.log -monitor none",
            guest.name
        ));
    }
    push("-virtfs local,path=/,mount_tag=host,security_model=none,readonly=on,multidevs=remap");
    push(&format!("-virtfs local,path={dir},mount_tag=run,security_model=none"));

    for rail in 0..profile.rails {
        let id = format!("rail{rail}");
        let netdev = wires.netdev(wires.rails.get(rail), &id)?;
        let mac = format!("52:54:00:77:0{rail}:0{}", guest.number);
        push(&format!("-netdev {netdev}"));
        let bus = if profile.nodes == Nodes::One {
            "pcie.0".to_owned()
        } else {
            // Each rail has its own host bridge, on its own NUMA node.
            let number = 64 + 32 * rail;
            push(&format!("-device pxb-pcie,id=bridge{rail},bus=pcie.0,bus_nr={number},numa_node={rail}"));
            push(&format!("-device pcie-root-port,id=port{rail},bus=bridge{rail},chassis={}", rail + 1));
            format!("port{rail}")
        };
        // RDMA over Converged Ethernet with a path MTU of 4096 needs space for its headers.
        push(&format!("-device virtio-net-pci,bus={bus},netdev={id},mac={mac},host_mtu=4200,romfile="));
    }
    if wires.management.is_some() {
        let netdev = wires.netdev(wires.management.as_ref(), "mgmt")?;
        push(&format!("-netdev {netdev}"));
        push(&format!(
            "-device virtio-net-pci,bus=pcie.0,netdev=mgmt,mac=52:54:00:77:09:0{},romfile=",
            guest.number
        ));
    }
    if profile.cxl {
        push(&cxl(guest)?);
    }
    Ok(words.into_iter().fold(Cmd::default(), Cmd::arg))
}

fn numa(profile: &Profile) -> String {
    let mib = profile.memory_mib;
    let (near, far) = match profile.nodes {
        Nodes::One => return String::new(),
        Nodes::Two => (mib / 2, 0),
        Nodes::TwoAndFarMemory => (mib / 3, mib - 2 * (mib / 3)),
    };
    let mut line = String::new();
    for node in 0..2 {
        line += &format!("-object memory-backend-ram,id=memory{node},size={near}M ");
        line += &format!("-numa node,nodeid={node},cpus={node},memdev=memory{node} ");
    }
    line += "-numa dist,src=0,dst=1,val=21 ";
    if far > 0 {
        line +=
            &format!("-object memory-backend-ram,id=memory2,size={far}M -numa node,nodeid=2,memdev=memory2 ");
        line += "-numa dist,src=0,dst=2,val=24 -numa dist,src=1,dst=2,val=31 ";
    }
    line
}

/// A memory device whose memory is a file that the guests of a run share. Each guest has its own labels.
///
/// The host bridge has a second, empty port: Linux programs no decoder for a bridge with one port, and QEMU
/// before 8.0 then drops every access.
fn cxl(guest: &Guest<'_>) -> Result<String> {
    let (dir, name) = (guest.dir.display(), guest.name);
    for (file, bytes) in [("cxl-memory".to_owned(), CXL_BYTES), (format!("cxl-labels-{name}"), 1 << 20)] {
        let path = guest.dir.join(&file);
        let file = File::options().create(true).truncate(false).write(true).open(&path);
        let file = file.with_context(|| format!("cannot create {}", path.display()))?;
        file.set_len(bytes).with_context(|| format!("cannot size {}", path.display()))?;
    }
    Ok(format!(
        "-object memory-backend-file,id=cxl-memory,share=on,mem-path={dir}/cxl-memory,size={}M \
         -object memory-backend-file,id=cxl-labels,share=on,mem-path={dir}/cxl-labels-{name},size=1M \
         -device pxb-cxl,id=cxl,bus=pcie.0,bus_nr=52 \
         -device cxl-rp,id=cxl-port,bus=cxl,port=0,chassis=9,slot=2 \
         -device cxl-rp,id=cxl-empty,bus=cxl,port=1,chassis=9,slot=3 \
         -device cxl-type3,bus=cxl-port,memdev=cxl-memory,lsa=cxl-labels,id=cxl-device \
         -M cxl-fmw.0.targets.0=cxl,cxl-fmw.0.size=4G",
        CXL_BYTES >> 20
    ))
}

#[cfg(test)]
mod tests {
    use super::super::profile::PROFILES;
    use super::*;

    #[test]
    fn every_profile_makes_a_command_line_with_its_devices() {
        let dir = tempfile::tempdir().expect("a directory");
        let kernel = Kernel {
            version: "6.1".into(),
            image: "image".into(),
            initramfs: "initramfs".into(),
            modules: "modules".into(),
        };
        for profile in &PROFILES {
            let wires = if profile.guests == 2 {
                Wires::pair(profile).expect("sockets")
            } else {
                [Wires::alone(), Wires::alone()]
            };
            for (index, wires) in wires.iter().enumerate().take(profile.guests) {
                let guest =
                    Guest { name: ['a', 'b'][index], number: index + 1, dir: dir.path(), interactive: false };
                let line = command(profile, &kernel, &guest, wires).expect("a command").to_string();
                assert!(line.contains("-accel tcg"), "never kvm: {line}");
                let nics = profile.rails + usize::from(profile.guests == 2);
                assert_eq!(line.matches("virtio-net-pci").count(), nics, "{}: {line}", profile.name);
                assert_eq!(line.contains("cxl-type3"), profile.cxl, "{}", profile.name);
                assert_eq!(line.contains("numa_node=1"), profile.nodes != Nodes::One, "{}", profile.name);
            }
        }
    }
}
