//! GPUs, and whether NICs can reach their memory.

use te_engine::HostNeed;

use super::machine::version;
use super::rdma::NO_RDMA;
use super::{Check, Judgement, list, ok, skip, warn};
use crate::commands::doctor::facts::pci::Function;
use crate::commands::doctor::facts::{Facts, RDMA_DEVICE};
use crate::size::ByteSize;

pub(super) const CHECKS: &[Check] = &[
    Check { name: "gpu driver", why: "Without it no program can use the GPU.", judge: driver },
    Check {
        name: "gpu library",
        why: "Through it device memory is found, shared, and copied to host memory for fabrics that need that.",
        judge: library,
    },
    Check {
        name: "imex channels",
        why: "Through one, memory of GPUs is shared with other hosts of an NVLink domain (engine.nvlink.across_hosts).",
        judge: imex,
    },
    Check {
        name: "gpudirect",
        why: "Without it a NIC cannot reach the GPU's memory, and every byte is copied through host memory.",
        judge: gpudirect,
    },
    Check {
        name: "gpu window",
        why: "A NIC reaches only the part of the GPU's memory that its PCI window (BAR) covers.",
        judge: window,
    },
    Check {
        name: "gpu nic path",
        why: "Transfers between a GPU and a NIC of another socket run at half the speed or less.",
        judge: nic_path,
    },
    Check {
        name: "pcie acs",
        why: "It sends traffic between a GPU and a NIC up to the root complex and back.",
        judge: acs,
    },
];

const NO_GPU: &str = "no GPU";

fn gpus(facts: &Facts) -> Vec<&Function> {
    facts.pci.iter().filter(|function| function.is_gpu()).collect()
}

/// GPUs and the NICs that could reach them, or why the checks are skipped.
fn gpus_and_nics(facts: &Facts) -> Result<(Vec<&Function>, Vec<&Function>), Judgement> {
    let gpus = gpus(facts);
    let is_card = |function: &&Function| {
        facts.rdma.devices.iter().any(|device| device.pci.as_ref() == Some(&function.address))
    };
    let nics: Vec<_> = facts.pci.iter().filter(is_card).collect();
    match (gpus.is_empty(), nics.is_empty()) {
        (true, _) => Err(skip(NO_GPU)),
        _ if !facts.uses(RDMA_DEVICE) => Err(skip(NO_RDMA)),
        (_, true) => Err(skip("no RDMA NIC")),
        _ => Ok((gpus, nics)),
    }
}

fn driver(facts: &Facts) -> Judgement {
    let gpus = gpus(facts);
    if gpus.is_empty() {
        return skip(NO_GPU);
    }
    let (nvidia, amd): (Vec<&Function>, Vec<&Function>) = gpus.iter().partition(|gpu| gpu.is_nvidia());
    let loaded = |name: &str| facts.modules.iter().any(|module| module == name);
    if !nvidia.is_empty() && facts.nvidia.is_none() && !loaded("nvidia") {
        return warn(
            format!("no driver for the NVIDIA GPU at {}", list(nvidia.iter().map(|gpu| &gpu.address))),
            ("install the NVIDIA driver with the open kernel modules, or load it", "sudo modprobe nvidia"),
        );
    }
    if !amd.is_empty() && !loaded("amdgpu") {
        return warn(
            format!("no driver for the AMD GPU at {}", list(amd.iter().map(|gpu| &gpu.address))),
            ("install the ROCm driver, or load it", "sudo modprobe amdgpu"),
        );
    }
    let version = facts.nvidia.as_deref().and_then(nvidia_release);
    ok(version.map_or_else(|| "loaded".to_owned(), |release| format!("NVIDIA {release}")))
}

/// Devices that this build reaches. Those of a vendor whose GPUs are not there are not missed.
fn library(facts: &Facts) -> Judgement {
    let gpus = gpus(facts);
    let Some(reached) = &facts.gpus else { return skip("not known from the files of another machine") };
    let found: Vec<&String> =
        reached.iter().filter_map(|(_, devices)| devices.as_ref().ok()).flatten().collect();
    let is_of = |vendor: &str, gpu: &Function| gpu.is_nvidia() == (vendor == "CUDA");
    let failed = reached.iter().find_map(|(vendor, devices)| {
        let is_missed = gpus.iter().any(|gpu| is_of(vendor, gpu));
        devices.as_ref().err().filter(|_| is_missed).map(|why| format!("{vendor}: {why}"))
    });
    let lacking = gpus.iter().find(|gpu| !reached.iter().any(|(vendor, _)| is_of(vendor, gpu)));
    match (failed, lacking) {
        (Some(why), _) => warn(why, "install the driver's library, or leave device memory out of transfers"),
        (None, Some(gpu)) => warn(
            format!("this build reaches no memory of the GPU at {}", gpu.address),
            ("build with the feature of its vendor", "cargo build --release --features cuda,hip"),
        ),
        (None, None) if found.is_empty() => skip(NO_GPU),
        (None, None) => ok(list(found)),
    }
}

/// Whether memory can be shared with the other hosts of an NVLink domain, and how their processes are
/// watched.
fn imex(facts: &Facts) -> Judgement {
    if !gpus(facts).iter().any(|gpu| gpu.is_nvidia()) {
        return skip(NO_GPU);
    }
    if !facts.uses(HostNeed::NvidiaGpu) {
        return skip(format!("nvlink is not used with --fabric {}", facts.fabrics));
    }
    match facts.imex.is_empty() {
        true => skip("none in /dev/nvidia-caps-imex-channels: only processes of this host are reached"),
        false => ok(format!(
            "{}; processes of other hosts are not seen: when the connection of one ends, its copies count as ended \
             after engine.nvlink.quarantine_ms, and while its host is silent they do not",
            list(&facts.imex)
        )),
    }
}

/// `NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  550.54.15  Release …` → `550.54.15`.
fn nvidia_release(text: &str) -> Option<&str> {
    text.split_whitespace().find(|word| {
        word.contains('.')
            && word.split('.').all(|part| !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit()))
    })
}

fn gpudirect(facts: &Facts) -> Judgement {
    /// The first kernel whose RDMA subsystem imports dma-bufs, and the first NVIDIA driver that exports them.
    const KERNEL: (u32, u32) = (5, 12);
    const NVIDIA: u32 = 515;
    let (gpus, _) = match gpus_and_nics(facts) {
        Ok(both) => both,
        Err(early) => return early,
    };
    if let Some(module) =
        facts.modules.iter().find(|name| matches!(name.as_str(), "nvidia_peermem" | "nv_peer_mem"))
    {
        return ok(module.as_str());
    }
    let kernel = facts.kernel.as_deref().map_or((0, 0), version);
    let library = facts.rdma.library.as_ref().and_then(|library| library.as_ref().ok());
    let library_can = library.is_none_or(|library| library.dmabuf != Some(false));
    let driver_can = if gpus.iter().all(|gpu| gpu.is_nvidia()) {
        facts.nvidia.as_deref().is_some_and(|text| {
            let major =
                nvidia_release(text).and_then(|release| release.split('.').next()?.parse::<u32>().ok());
            text.contains("Open Kernel Module") && major >= Some(NVIDIA)
        })
    } else {
        facts.modules.iter().any(|module| module == "amdgpu")
    };
    if kernel >= KERNEL && library_can && driver_can {
        return ok("dma-buf");
    }
    let missing = match () {
        () if !driver_can => "no nvidia_peermem, and this GPU driver does not export dma-bufs",
        () if kernel < KERNEL => "no nvidia_peermem, and no dma-bufs before Linux 5.12",
        () => "no nvidia_peermem, and this libibverbs does not support dma-bufs",
    };
    warn(
        missing,
        (
            "load nvidia_peermem; or use dma-buf, which needs Linux 5.12, NVIDIA's open kernel modules from \
            515 on (or amdgpu), and rdma-core from 34 on",
            "sudo modprobe nvidia_peermem",
        ),
    )
}

fn window(facts: &Facts) -> Judgement {
    /// Size of the window of a GPU that is not configured to expose all of its memory.
    const SMALL: u64 = 256 << 20;
    let (gpus, _) = match gpus_and_nics(facts) {
        Ok(both) => both,
        Err(early) => return early,
    };
    let windows: Vec<_> = gpus.iter().filter_map(|gpu| Some((gpu, gpu.window?))).collect();
    let show = |bytes| ByteSize(bytes).approximate();
    let small: Vec<_> = windows.iter().filter(|(_, bytes)| *bytes <= SMALL).collect();
    match (windows.iter().map(|(_, bytes)| *bytes).min(), small.first()) {
        (None, _) => skip("the kernel does not report it"),
        (Some(least), None) => ok(show(least)),
        (_, Some((gpu, _))) => warn(
            list(small.iter().map(|(gpu, bytes)| format!("{} shows {}", gpu.address, show(*bytes)))),
            (
                "enable \"Above 4G decoding\" and \"Resizable BAR\" in the firmware (BIOS)",
                format!("sudo lspci -vv -s {} | grep -i -A3 'resizable bar'", gpu.address),
            ),
        ),
    }
}

fn nic_path(facts: &Facts) -> Judgement {
    let (gpus, nics) = match gpus_and_nics(facts) {
        Ok(both) => both,
        Err(early) => return early,
    };
    let far: Vec<_> = gpus
        .iter()
        .filter(|gpu| {
            !nics.iter().any(|nic| shared_bridges(gpu, nic) > 0 || gpu.node.is_some() && gpu.node == nic.node)
        })
        .map(|gpu| &gpu.address)
        .collect();
    if !far.is_empty() && facts.nodes.len() > 1 {
        return warn(
            format!("no NIC on the socket of the GPU at {}", list(far)),
            ("move a NIC to a slot below the same PCIe switch or socket", "lspci -tv"),
        );
    }
    let near = gpus.iter().filter(|gpu| nics.iter().any(|nic| shared_bridges(gpu, nic) > 1)).count();
    ok(format!("{near} of {} GPUs share a PCIe switch with a NIC", gpus.len()))
}

/// The number of bridges, from the host bridge down, that two functions have in common.
fn shared_bridges(a: &Function, b: &Function) -> usize {
    a.path.iter().zip(&b.path).take_while(|(a, b)| a == b).count()
}

fn acs(facts: &Facts) -> Judgement {
    /// Request redirect, completion redirect, egress control: the bits that Linux's p2pdma checks, too.
    const REDIRECTS: u16 = 1 << 2 | 1 << 3 | 1 << 5;
    let (gpus, nics) = match gpus_and_nics(facts) {
        Ok(both) => both,
        Err(early) => return early,
    };
    let above: Vec<_> = facts
        .pci
        .iter()
        .filter(|bridge| {
            bridge.is_bridge() && gpus.iter().chain(&nics).any(|end| end.path.contains(&bridge.address))
        })
        .collect();
    let redirecting: Vec<_> = above
        .iter()
        .filter(|bridge| bridge.acs.is_some_and(|control| control & REDIRECTS != 0))
        .map(|bridge| &bridge.address)
        .collect();
    let Some(first) = redirecting.first() else {
        let known = above.iter().any(|bridge| bridge.acs.is_some());
        return if known { ok("off") } else { skip("visible to root only, or no bridge has it") };
    };
    let command = format!("sudo setpci -s {first} ECAP_ACS+6.w=0000");
    warn(
        format!("redirects at {}", list(redirecting)),
        (
            "on bare metal, switch it off on each of these bridges after each start, or permanently in the \
            firmware (BIOS); in virtual machines, keep it and use NICs with ATS",
            command,
        ),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::commands::doctor::checks::Verdict;

    #[test]
    fn a_library_is_missed_where_there_is_a_gpu_of_its_vendor() {
        let facts = |vendor: Option<u32>, gpus| Facts {
            pci: vendor
                .into_iter()
                .map(|vendor| Function { vendor, class: 0x03_02_00, ..nothing() })
                .collect(),
            gpus,
            ..Facts::default()
        };
        let cuda = |found| Some(vec![("CUDA", found)]);
        let (nvidia, amd) = (Some(0x10de), Some(0x1002));
        let found = || Ok(vec!["cuda:0 at 0000:17:00.0".to_owned()]);
        for (facts, verdict, said) in [
            (facts(None, None), Verdict::Skip, "another machine"),
            (facts(None, cuda(Err("no library".into()))), Verdict::Skip, NO_GPU),
            (
                facts(amd, cuda(Err("no library".into()))),
                Verdict::Warn,
                "no memory of the GPU at 0000:17:00.0",
            ),
            (facts(nvidia, cuda(Err("no library".into()))), Verdict::Warn, "CUDA: no library"),
            (facts(nvidia, cuda(found())), Verdict::Ok, "cuda:0 at 0000:17:00.0"),
            (facts(nvidia, Some(Vec::new())), Verdict::Warn, "no memory of the GPU at 0000:17:00.0"),
        ] {
            let judged = library(&facts);
            assert!(judged.verdict == verdict && judged.found.contains(said), "{said}: {}", judged.found);
        }
    }

    #[test]
    fn channels_are_looked_for_where_nvlink_is_used() {
        let facts = |fabrics: &str, vendor, imex: &[&str]| Facts {
            fabrics: fabrics.parse().unwrap(),
            pci: vec![Function { vendor, class: 0x03_02_00, ..nothing() }],
            imex: imex.iter().map(|&name| name.to_owned()).collect(),
            ..Facts::default()
        };
        for (facts, verdict, said) in [
            (facts("nvlink", 0x1002, &["channel0"]), Verdict::Skip, NO_GPU),
            (facts("tcp", 0x10de, &["channel0"]), Verdict::Skip, "not used with --fabric tcp"),
            (facts("nvlink", 0x10de, &[]), Verdict::Skip, "only processes of this host"),
            (facts("nvlink", 0x10de, &["channel0"]), Verdict::Ok, "channel0; processes of other hosts"),
        ] {
            let judged = imex(&facts);
            assert!(judged.verdict == verdict && judged.found.contains(said), "{said}: {}", judged.found);
        }
    }

    fn nothing() -> Function {
        Function {
            address: "0000:17:00.0".into(),
            vendor: 0,
            device: 0,
            class: 0,
            node: None,
            path: Vec::new(),
            link: None,
            window: None,
            acs: None,
        }
    }

    #[test]
    fn releases_of_the_driver_are_found_in_its_description() {
        for (text, release) in [
            (
                "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  550.54.15  Release Build",
                Some("550.54.15"),
            ),
            (
                "NVRM version: NVIDIA UNIX x86_64 Kernel Module  470.82.01  Wed Oct 27 21:21:55 UTC 2021",
                Some("470.82.01"),
            ),
            ("...  . garbage 1..2", None),
        ] {
            assert_eq!(nvidia_release(text), release);
        }
    }
}
