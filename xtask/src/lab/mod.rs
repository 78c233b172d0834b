//! The lab: real kernel drivers on a machine without the hardware.
//!
//! ```text
//!   cargo xtask lab list                       the profiles
//!   cargo xtask lab run PROFILE [-- CMD…]      boots the guests, runs CMD in guest a; the exit code is CMD's
//!   cargo xtask lab shell PROFILE              a prompt in guest a
//!
//!        this machine                     guest a                     guest b
//!   ┌───────────────────────┐    ┌──────────────────────┐    ┌──────────────────────┐
//!   │ xtask                 │◄───┤ virtio port: output, │    │                      │
//!   │   target/lab/…        │    │ verdict              │    │ an agent, or nothing │
//!   │   / (read-only, 9p) ──┼───►│ rail0 rxe0 node 0 ───┼────┼─── rail0 rxe0        │
//!   │   run's directory ────┼───►│ rail1 rxe1 node 1 ───┼────┼─── rail1 rxe1        │
//!   └───────────────────────┘    │ mgmt ────────────────┼────┼─── mgmt              │
//!                                └──────────────────────┘    └──────────────────────┘
//! ```
//!
//! Guests run in QEMU under software emulation with Debian's kernel. Their root is this machine's own,
//! read-only, so programs that were built here run there unchanged. `/run/lab` is the run's directory,
//! `target/lab/logs/…`; files that a job writes there are kept. Rail R of guest a is `10.77.R.1` and
//! `fd77:R::1`, of guest b `….2`; `10.77.9.N` is a management network that faults on a rail do not affect.
//!
//! The lab tests correctness and recovery. It does not measure speed: everything in it is emulated, on as
//! little as two cores.

mod initramfs;
mod kernel;
mod profile;
mod qemu;
mod session;
mod tools;

pub(crate) use tools::missing_packages;

use crate::host::Host;
use anyhow::{Context as _, Result, ensure};
use profile::{PROFILES, Profile};
use session::{Job, Session};
use std::path::PathBuf;
use std::time::Duration;

/// Options of `cargo xtask lab`.
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    setup: Setup,
    #[command(subcommand)]
    task: Task,
}

/// How to get what the lab needs.
#[derive(clap::Args, Clone, Default)]
pub(crate) struct Setup {
    /// Install missing packages with apt-get (needs root). Without it, they are only listed.
    #[arg(long, global = true)]
    pub(crate) install: bool,
    /// A kernel package of Debian, instead of the one that apt downloads.
    #[arg(long, global = true, value_name = "FILE")]
    kernel_deb: Option<PathBuf>,
}

#[derive(clap::Subcommand)]
enum Task {
    /// List the profiles.
    List,
    /// Boot the guests of a profile, run a command in guest a, and end with its exit code.
    Run {
        /// See `cargo xtask lab list`.
        profile: String,
        /// Wall time for everything, seconds.
        #[arg(long, default_value_t = 600, value_name = "SECONDS")]
        limit_s: u64,
        /// A shell command that guest b runs in the meantime. It is ended when guest a is done.
        #[arg(long, value_name = "COMMAND")]
        peer: Option<String>,
        /// The command for guest a. Without it, the devices are listed.
        #[arg(last = true)]
        command: Vec<String>,
    },
    /// Boot the guests of a profile and open a shell in guest a.
    Shell {
        /// See `cargo xtask lab list`.
        profile: String,
    },
}

/// Carries out `cargo xtask lab`.
///
/// # Errors
/// Packages are missing, a guest does not boot, or the command fails.
pub(crate) fn run(args: &Args) -> Result<()> {
    match &args.task {
        Task::List => {
            for profile in &PROFILES {
                println!("{:<8} {}", profile.name, profile.what);
            }
            Ok(())
        }
        Task::Run { profile, limit_s, peer, command } => {
            let command = if command.is_empty() { look_around() } else { command.clone() };
            let peer = peer.as_ref().map(|line| shell(line));
            run_job(profile, &args.setup, &Job { command, peer, limit: Duration::from_secs(*limit_s) })?;
            Ok(())
        }
        Task::Shell { profile } => {
            let profile = named(profile)?;
            let lab_dir = lab_dir()?;
            prepare(&args.setup)?;
            let kernel = kernel::get(&lab_dir, args.setup.kernel_deb.as_deref())?;
            Session::new(profile, &kernel, &lab_dir)?.shell()
        }
    }
}

/// Runs `command` in guest a of a profile, with `peer` in guest b. Returns the run's directory, which is
/// `/run/lab` in the guests.
///
/// # Errors
/// As [`run`].
pub(crate) fn run_in(
    profile: &str,
    setup: &Setup,
    command: Vec<String>,
    peer: Option<Vec<String>>,
    limit: Duration,
) -> Result<PathBuf> {
    run_job(profile, setup, &Job { command, peer, limit })
}

/// Number of guests of a profile.
///
/// # Errors
/// There is no such profile.
pub(crate) fn guests(profile: &str) -> Result<usize> {
    Ok(named(profile)?.guests)
}

/// The names of the profiles.
pub(crate) fn names() -> impl Iterator<Item = &'static str> {
    PROFILES.iter().map(|profile| profile.name)
}

fn run_job(profile: &str, setup: &Setup, job: &Job) -> Result<PathBuf> {
    let profile = named(profile)?;
    ensure!(job.peer.is_none() || profile.guests > 1, "profile {} has one guest", profile.name);
    let lab_dir = lab_dir()?;
    prepare(setup)?;
    let kernel = kernel::get(&lab_dir, setup.kernel_deb.as_deref())?;
    let session = Session::new(profile, &kernel, &lab_dir)?;
    let dir = session.dir().to_owned();
    session.run(job)?;
    Ok(dir)
}

fn named(name: &str) -> Result<&'static Profile> {
    let known = || names().collect::<Vec<_>>().join(", ");
    profile::find(name).with_context(|| format!("no profile `{name}`; there are: {}", known()))
}

fn lab_dir() -> Result<PathBuf> {
    Ok(Host::probe()?.target_dir.join("lab"))
}

/// Makes sure that everything that the lab needs is present.
///
/// # Errors
/// Something is missing and is not to be installed, or cannot be.
pub(crate) fn prepare(setup: &Setup) -> Result<()> {
    let lab_dir = &lab_dir()?;
    std::fs::create_dir_all(lab_dir).with_context(|| format!("cannot create {}", lab_dir.display()))?;
    if setup.install { tools::install(lab_dir) } else { tools::require() }
}

fn look_around() -> Vec<String> {
    shell("ip -br addr; rdma link; ls /sys/devices/system/node; ls /dev/nvme* /dev/dax* 2> /dev/null; true")
}

fn shell(line: &str) -> Vec<String> {
    ["sh", "-c", line].map(str::to_owned).into()
}
