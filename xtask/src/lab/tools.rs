//! The programs that the lab needs, and their packages. Nothing is installed unless that was requested.

use crate::cmd::Cmd;
use anyhow::{Context as _, Result, ensure};
use std::path::{Path, PathBuf};

/// A program and its Debian package.
struct Tool {
    program: &'static str,
    package: &'static str,
}

const TOOLS: [Tool; 15] = [
    Tool { program: "qemu-system-x86_64", package: "qemu-system-x86" },
    Tool { program: "busybox", package: "busybox-static" },
    Tool { program: "modprobe", package: "kmod" },
    Tool { program: "setpriv", package: "util-linux" },
    Tool { program: "dpkg-deb", package: "dpkg" },
    Tool { program: "ip", package: "iproute2" },
    Tool { program: "rdma", package: "iproute2" },
    Tool { program: "tc", package: "iproute2" },
    Tool { program: "ibv_rc_pingpong", package: "ibverbs-utils" },
    Tool { program: "nvme", package: "nvme-cli" },
    Tool { program: "cxl", package: "ndctl" },
    Tool { program: "ndctl", package: "ndctl" },
    Tool { program: "daxctl", package: "daxctl" },
    Tool { program: "dmsetup", package: "dmsetup" },
    Tool { program: "fio", package: "fio" },
];
/// A package without a program: the libibverbs provider for soft-RoCE.
const PROVIDERS: (&str, &str) = ("libibverbs/librxe-rdmav34.so", "ibverbs-providers");

/// The packages that are missing, each once.
pub(crate) fn missing_packages() -> Vec<&'static str> {
    let mut packages: Vec<&str> =
        TOOLS.iter().filter(|tool| which(tool.program).is_none()).map(|tool| tool.package).collect();
    if library(PROVIDERS.0).is_none() {
        packages.push(PROVIDERS.1);
    }
    // The lab's first stage has no dynamic linker, but `busybox` of the package without `-static` needs one.
    if which("busybox").is_some_and(|path| is_dynamic(&path)) {
        packages.push("busybox-static");
    }
    packages.dedup();
    packages
}

/// Checks that everything is installed.
///
/// # Errors
/// Something is missing; the error lists the packages.
pub(super) fn require() -> Result<()> {
    let missing = missing_packages();
    ensure!(
        missing.is_empty(),
        "the lab needs programs that are not installed here. Install them with\n    apt-get install --no-install-recommends {}\n\
        or let `cargo xtask lab --install …` do it",
        missing.join(" ")
    );
    Ok(())
}

/// Installs the missing packages with apt-get.
///
/// # Errors
/// apt-get fails.
pub(super) fn install(dir: &Path) -> Result<()> {
    let missing = missing_packages();
    let kernel_known = super::kernel::package_name().is_some();
    if missing.is_empty() && kernel_known {
        return Ok(());
    }
    let apt = |line: &str| {
        Cmd::new(&format!("apt-get -qq {line}")).env("DEBIAN_FRONTEND", "noninteractive").run(dir, Some(300))
    };
    // The package lists may be old or missing.
    apt("update").context("apt-get update failed")?;
    if missing.is_empty() {
        return Ok(());
    }
    println!("lab: installing {}", missing.join(" "));
    apt(&format!("install -y --no-install-recommends {}", missing.join(" ")))
        .context("apt-get install failed")?;
    require()
}

/// Path of a program in `PATH` or in the directories for administration.
pub(super) fn which(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let dirs = std::env::split_paths(&path).chain(["/usr/sbin", "/sbin"].map(PathBuf::from));
    dirs.map(|dir| dir.join(program)).find(|path| path.is_file())
}

fn library(name: &str) -> Option<PathBuf> {
    ["/usr/lib/x86_64-linux-gnu", "/usr/lib64", "/usr/lib"]
        .iter()
        .map(|dir| Path::new(dir).join(name))
        .find(|path| path.exists())
}

/// Whether an ELF file needs a dynamic linker: it has a program header of type `PT_INTERP` (elf(5)).
fn is_dynamic(path: &Path) -> bool {
    const PT_INTERP: u64 = 3;
    let Ok(bytes) = std::fs::read(path) else { return false };
    let number = |at: u64, len: usize| -> Option<u64> {
        let at = usize::try_from(at).ok()?;
        let field = bytes.get(at..at.checked_add(len)?)?;
        Some(field.iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte)))
    };
    let headers = || {
        let (first, size, count) = (number(32, 8)?, number(54, 2)?, number(56, 2)?);
        Some((0..count).any(|index| number(first + index * size, 4) == Some(PT_INTERP)))
    };
    headers().unwrap_or(false)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_program_needs_a_dynamic_linker_and_a_text_file_does_not() {
        assert!(is_dynamic(&std::env::current_exe().expect("we run")));
        assert!(!is_dynamic(Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml"))));
    }
}
