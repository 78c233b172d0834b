//! A process in the image's file system, as a container engine would start it: process 1 of its own names of processes, a root
//! that cannot be written to, the image's user, and nothing of the host but /dev and the network that it was started in.
//!
//! It is `unshare`, `mount` and `chroot`, run as root or in a user's own namespace. Not here: capabilities, memory limits and
//! system call filters, which are the engine's.

use crate::cmd::Cmd;
use anyhow::{Context as _, Result, bail};
use nix::sys::signal::{Signal, kill};
use nix::unistd::{Pid, geteuid};
use std::fs::{self, File};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// Whom the image runs as: `USER` in the Dockerfile.
const USER: &str = "65532:65532";
/// What the containers share: a network, and numbers of processes, so that none outlives the process that started them.
pub(super) const OWN_NETWORK: [&str; 5] = ["--net", "--pid", "--fork", "--kill-child", "--mount-proc"];
/// Mounts what an engine mounts, and becomes the program.
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
        "namespaces may not be made here: run as root, or allow unprivileged user namespaces".to_owned()
    })
}

/// Ready to run in namespaces of its own; a user's without rights, where we are not root.
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
    /// Starts `/usr/bin/snowskin` with `args` in the file system at `root`. What it says goes to the file `log`.
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

    /// SIGTERM, as an engine sends it.
    ///
    /// # Errors
    /// When it does not end within `limit`, or badly.
    pub(super) fn stop(mut self, limit: Duration) -> Result<()> {
        kill(self.program().context("it has ended before it was told to")?, Signal::SIGTERM)?;
        let deadline = Instant::now() + limit;
        while Instant::now() < deadline {
            match self.child.try_wait()? {
                Some(status) if status.success() => return Ok(()),
                Some(status) => bail!("ended with {status} when it was told to"),
                None => std::thread::sleep(Duration::from_millis(20)),
            }
        }
        bail!("did not end within {limit:?}")
    }

    /// The program: the only child of `unshare`, which hands no signals on.
    fn program(&self) -> Option<Pid> {
        let own = self.child.id();
        let children = fs::read_to_string(format!("/proc/{own}/task/{own}/children")).ok()?;
        children.split_whitespace().next()?.parse().ok().map(Pid::from_raw)
    }
}

impl Drop for Container {
    fn drop(&mut self) {
        // One that has ended cannot be killed. Changing its user made the program forget whose end is its own.
        if let Some(program) = self.program() {
            let _ = kill(program, Signal::SIGKILL);
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Runs `/usr/bin/snowskin` with `args` to its end and gives what it printed.
///
/// # Errors
/// When it fails: with what it said.
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
    // An image has no variables but its own.
    command.env_clear().env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin");
    command
}
