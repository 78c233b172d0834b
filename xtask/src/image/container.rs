//! A process in the image's file system, as a container engine would start it: process 1 of its own process
//! namespace, a read-only root, the image's user, and nothing of the host except /dev and the network in
//! which it was started.
//!
//! It uses `unshare`, `mount` and `chroot`, as root or in a user namespace. Capabilities, memory limits and
//! system call filters are left to the engine.

use crate::cmd::Cmd;
use anyhow::{Context as _, Result, bail};
use nix::sys::signal::{Signal, kill};
use nix::unistd::{Pid, geteuid};
use std::fs::{self, File};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// The user of the image: `USER` in the Dockerfile.
const USER: &str = "65532:65532";
/// What the containers share: a network, and a process namespace, so that none outlives the process that
/// started them.
pub(super) const OWN_NETWORK: [&str; 5] = ["--net", "--pid", "--fork", "--kill-child", "--mount-proc"];
/// Mounts what an engine mounts, and executes the program.
const INSIDE: &str = r#"
root=$1; user=$2; shift 2
mount --bind "$root" "$root"
mount --rbind /dev "$root/dev"
mount -t proc proc "$root/proc"
mount -t tmpfs tmpfs "$root/tmp"
mount -o remount,ro,bind "$root"
[ -z "$user" ] || exec chroot --userspec="$user" "$root" "$@"
exec chroot "$root" "$@"
"#;

/// Why no container can be started here; `None` when one can.
pub(super) fn obstacle() -> Option<String> {
    for tool in ["unshare --version", "chroot --version", "ip -V"] {
        if Cmd::new(tool).stdout(Path::new("/")).is_none() {
            let name = tool.split(' ').next().unwrap_or_default();
            return Some(format!("{name} is not installed: `apt-get install util-linux coreutils iproute2`"));
        }
    }
    let allowed = unshare(&OWN_NETWORK).arg("true").output();
    let allowed = allowed.is_ok_and(|output| output.status.success());
    (!allowed).then(|| {
        "namespaces cannot be created here: run as root, or allow unprivileged user namespaces".to_owned()
    })
}

/// A command that runs in its own namespaces; without root, in a user namespace.
pub(super) fn unshare(namespaces: &[&str]) -> Command {
    let mut command = Command::new("unshare");
    command.args(namespaces);
    if !geteuid().is_root() {
        command.args(["--user", "--map-root-user"]);
    }
    command.stdin(Stdio::null());
    command
}

/// A running container. Dropping it kills it.
pub(super) struct Container {
    child: Child,
}

impl Container {
    /// Starts `/usr/bin/snowskin` with `args` in the file system at `root`. Its output goes to the file
    /// `log`.
    pub(super) fn start(root: &Path, args: &[String], log: &Path) -> Result<Self> {
        let log = File::create(log).with_context(|| format!("cannot write {}", log.display()))?;
        let child = command(root, args)
            .stdout(log.try_clone()?)
            .stderr(log)
            .spawn()
            .with_context(|| format!("cannot start `snowskin {}`", args.join(" ")))?;
        Ok(Self { child })
    }

    pub(super) fn has_ended(&mut self) -> Result<Option<ExitStatus>> {
        Ok(self.child.try_wait()?)
    }

    /// Sends SIGTERM, as an engine does, and waits.
    ///
    /// # Errors
    /// It does not end within `limit`, or with an error.
    pub(super) fn stop(mut self, limit: Duration) -> Result<()> {
        kill(self.program().context("it has ended before it was stopped")?, Signal::SIGTERM)?;
        let deadline = Instant::now() + limit;
        while Instant::now() < deadline {
            match self.child.try_wait()? {
                Some(status) if status.success() => return Ok(()),
                Some(status) => bail!("ended with {status} when it was stopped"),
                None => std::thread::sleep(Duration::from_millis(20)),
            }
        }
        bail!("did not end within {limit:?}")
    }

    /// The program's process: the only child of `unshare`, which does not forward signals.
    fn program(&self) -> Option<Pid> {
        let own = self.child.id();
        let children = fs::read_to_string(format!("/proc/{own}/task/{own}/children")).ok()?;
        children.split_whitespace().next()?.parse().ok().map(Pid::from_raw)
    }
}

impl Drop for Container {
    fn drop(&mut self) {
        // A process that has ended cannot be killed. The program changed its user, so it does not die with
        // its parent.
        if let Some(program) = self.program() {
            let _ = kill(program, Signal::SIGKILL);
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Runs `/usr/bin/snowskin` with `args` to its end and returns its stdout.
///
/// # Errors
/// It fails; the error has its output.
pub(super) fn run(root: &Path, args: &[String]) -> Result<String> {
    let output = command(root, args).output()?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        bail!("`snowskin {}` in the image: {}: {}", args.join(" "), output.status, said.trim());
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

fn command(root: &Path, args: &[String]) -> Command {
    let mut command = unshare(&["--mount", "--pid", "--fork"]);
    let user = if geteuid().is_root() { USER } else { "" };
    command.args(["sh", "-euc", INSIDE, "sh"]).arg(root).args([user, "/usr/bin/snowskin"]).args(args);
    // An image has its own variables only.
    command.env_clear().env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin");
    command
}
