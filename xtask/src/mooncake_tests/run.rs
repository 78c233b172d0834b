//! Runs one script with the processes that it needs.

use super::Outcome;
use super::count::Count;
use super::environment::Environment;
use super::scripts::{How, P2P, Script, Service, Side};
use anyhow::{Context as _, Result, bail, ensure};
use std::fs::File;
use std::io::{Read as _, Seek as _};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// How long a process may take until it listens.
const START_MAX: Duration = Duration::from_secs(20);
/// How long a process may take to end.
const STOP_MAX: Duration = Duration::from_secs(10);
/// How often a condition is asked for.
const POLL: Duration = Duration::from_millis(20);
/// Lines of output that are shown when a script fails.
const SHOWN_LINES: usize = 60;
const MASTER_PORT: u16 = 50_051;
const METRICS_PORT: u16 = 9_003;
const METADATA_PORT: u16 = 8_080;
const CLIENT_PORT: u16 = 50_052;

/// Runs a script as a program after the packages of this repository have been imported, so that a script that
/// puts its own checkout first in the path tests ours. Modules that only the checkout has are added, as
/// Mooncake's own test configuration does. A script of Mooncake's build tree imports `store` without its
/// package.
const RUNNER: &str = "import runpy, sys
import mooncake, mooncake.mooncake_config, mooncake.http_metadata_server, mooncake.store
sys.argv = sys.argv[1:]
mooncake.__path__.append(sys.argv.pop(0))
sys.modules['store'] = mooncake.store
runpy.run_path(sys.argv[0], run_name='__main__')";

/// Runs the target of a pairing, and prints when it serves its memory: `serves PORT`, with its port for
/// handshakes, which the script does not print and without a metadata server is part of the target's name.
const TARGET: &str = "import sys, threading, time
script = {'__name__': '__main__'}
def report():
    while not script.get('buffer_addr'):
        time.sleep(0.02)
    print('serves', script['target'].get_rpc_port(), flush=True)
threading.Thread(target=report, daemon=True).start()
sys.argv = sys.argv[1:]
exec(compile(open(sys.argv[0]).read(), sys.argv[0], 'exec'), script)";

/// A process whose output goes to a file. It is killed when it is dropped.
struct Running {
    child: Child,
    log: File,
}

impl Running {
    fn start(mut command: Command) -> Result<Self> {
        let log = tempfile()?;
        command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log.try_clone()?);
        let child = command.spawn().with_context(|| format!("cannot start {:?}", command.get_program()))?;
        Ok(Self { child, log })
    }

    /// Waits until it listens on these ports.
    fn listening(mut self, ports: &[u16]) -> Result<Self> {
        let until = Instant::now() + START_MAX;
        for port in ports {
            let address = SocketAddr::from(([127, 0, 0, 1], *port));
            while TcpStream::connect_timeout(&address, POLL).is_err() {
                if let Some(status) = self.child.try_wait()? {
                    bail!("a process that should listen on port {port} ended: {status}\n{}", self.output());
                }
                ensure!(Instant::now() < until, "nothing listens on port {port}\n{}", self.output());
                std::thread::sleep(POLL);
            }
        }
        Ok(self)
    }

    /// Waits until it is the target of a pairing, and returns its port for handshakes.
    fn serving(&mut self) -> Result<u16> {
        let until = Instant::now() + START_MAX;
        loop {
            let output = self.output();
            let port = output.lines().find_map(|line| line.strip_prefix("serves ")?.trim().parse().ok());
            if let Some(port) = port {
                return Ok(port);
            }
            if let Some(status) = self.child.try_wait()? {
                bail!("the target ended: {status}\n{output}");
            }
            ensure!(Instant::now() < until, "the target does not serve\n{output}");
            std::thread::sleep(POLL);
        }
    }

    /// Waits for the end. `None`: it did not end in time.
    fn ended(&mut self, limit: Duration) -> Result<Option<bool>> {
        let until = Instant::now() + limit;
        loop {
            if let Some(status) = self.child.try_wait()? {
                return Ok(Some(status.success()));
            }
            if Instant::now() >= until {
                return Ok(None);
            }
            std::thread::sleep(POLL);
        }
    }

    fn output(&mut self) -> String {
        let mut bytes = Vec::new();
        if self.log.rewind().and_then(|()| self.log.read_to_end(&mut bytes)).is_err() {
            return "its output cannot be read".to_owned();
        }
        String::from_utf8_lossy(&bytes).into_owned()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // A process that has ended already is an error of both, which changes nothing.
        let pid = self.child.id().to_string();
        let asked = Command::new("kill").arg(pid).stderr(Stdio::null()).status();
        if !asked.is_ok_and(|status| status.success()) || !matches!(self.ended(STOP_MAX), Ok(Some(_))) {
            let _ = self.child.kill();
        }
        let _ = self.child.wait();
    }
}

/// A file without a name. It is read while processes write: each write goes to its end, wherever the last
/// read was.
fn tempfile() -> Result<File> {
    let path = std::env::temp_dir().join(format!("snowskin-mooncake-tests-{}", std::process::id()));
    let file = File::options().read(true).append(true).create(true).open(&path)?;
    std::fs::remove_file(&path)?;
    Ok(file)
}

/// Runs a script and compares its counts with those it should have.
pub(super) fn script(environment: &Environment, script: &Script) -> Outcome {
    match counted(environment, script) {
        Ok((count, _)) if count == script.wanted => Outcome::Passed(String::new()),
        Ok((count, output)) => {
            let lines: Vec<&str> = output.lines().collect();
            println!("{}", lines[lines.len().saturating_sub(SHOWN_LINES)..].join("\n"));
            Outcome::Failed(count.to_string())
        }
        Err(error) => {
            println!("{error:#}");
            Outcome::Failed(error.to_string().lines().next().unwrap_or_default().to_owned())
        }
    }
}

/// The counts of a script, and its output.
fn counted(environment: &Environment, script: &Script) -> Result<(Count, String)> {
    let mut services = Vec::new();
    for service in script.services {
        services.push(start(environment, *service)?);
    }
    let limit = Duration::from_secs(script.limit_s);
    let one = |command: Command| -> Result<(Option<Count>, bool, String)> {
        let mut running = Running::start(command)?;
        let is_success = running.ended(limit)?;
        let output = running.output();
        let is_success =
            is_success.with_context(|| format!("exceeded its limit of {} s\n{output}", script.limit_s))?;
        Ok((Count::in_output(&output), is_success, output))
    };
    match script.how {
        How::Unittest | How::Pytest => {
            let (count, _, output) = one(command(environment, script, Side::Ours, script.path, &[]))?;
            Ok((count.with_context(|| format!("no counts\n{output}"))?, output))
        }
        How::Program => {
            let (_, is_success, output) = one(command(environment, script, Side::Ours, script.path, &[]))?;
            Ok((if is_success { script.wanted } else { Count::default() }, output))
        }
        How::Pair { initiator, target, metadata } => {
            let path = Path::new(script.path).with_file_name("transfer_engine_target.py");
            let set = |command: &mut Command| {
                command.env("MC_METADATA_SERVER", metadata).env("MC_FORCE_TCP", "true").env("CIRCLE", "1000");
            };
            let mut serving = Command::new(environment.python(target));
            serving.args(["-c", TARGET]).arg(environment.source.join(path));
            set(&mut serving);
            let mut target = Running::start(serving)?;
            let port = target.serving()?;
            let mut command = command(environment, script, initiator, script.path, &[]);
            set(&mut command);
            if metadata == P2P {
                command.env("TARGET_SERVER_NAME", format!("127.0.0.1:{port}"));
            }
            let (count, _, output) = one(command)?;
            drop(target);
            Ok((count.with_context(|| format!("no counts\n{output}"))?, output))
        }
        How::Twice([first, second]) => {
            let other = Running::start(command(environment, script, Side::Ours, script.path, &[second]))?;
            let (count, _, mut output) =
                one(command(environment, script, Side::Ours, script.path, &[first]))?;
            let mut other = other;
            other.ended(limit)?;
            output.push_str(&other.output());
            let counts = [count, Count::in_output(&other.output())];
            let passed = counts.into_iter().flatten().map(|count| count.passed).sum();
            Ok((Count::of(passed, 0), output))
        }
    }
}

fn command(environment: &Environment, script: &Script, side: Side, path: &str, more: &[&str]) -> Command {
    let path = environment.source.join(path);
    let mut command = Command::new(environment.python(side));
    match (script.how, side) {
        (How::Pytest, _) => {
            command.args(["-m", "pytest", "-q", "-p", "no:cacheprovider"]).arg(&path);
        }
        (_, Side::Ours) => {
            command.args(["-c", RUNNER]).arg(environment.source.join("mooncake-wheel/mooncake")).arg(&path);
        }
        (_, Side::Peer) => {
            command.arg(&path);
        }
    }
    command.args(script.args).args(more);
    let search = std::env::var_os("PATH").unwrap_or_default();
    let paths = std::iter::once(environment.scripts().to_path_buf()).chain(std::env::split_paths(&search));
    if let Ok(search) = std::env::join_paths(paths) {
        command.env("PATH", search);
    }
    command
        .env("DEFAULT_KV_LEASE_TTL", "500")
        .env("MC_METADATA_SERVER", "P2PHANDSHAKE")
        .env("LOCAL_HOSTNAME", "localhost")
        .env("MOONCAKE_MASTER", format!("127.0.0.1:{MASTER_PORT}"))
        .env("MOONCAKE_TE_META_DATA_SERVER", "P2PHANDSHAKE")
        .env("MOONCAKE_PROTOCOL", "tcp")
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .current_dir(std::env::temp_dir());
    command
}

/// Starts a process that a script needs, by the name that Mooncake gives it.
fn start(environment: &Environment, service: Service) -> Result<Running> {
    let program = |name: &str| Command::new(environment.scripts().join(name));
    let (command, ports): (Command, &[u16]) = match service {
        Service::Master { lease_ms } => {
            let mut command = program("mooncake_master");
            command.args([
                format!("--port={MASTER_PORT}"),
                format!("--metrics_port={METRICS_PORT}"),
                "--enable_http_metadata_server=true".to_owned(),
                format!("--http_metadata_server_port={METADATA_PORT}"),
                format!("--default_kv_lease_ttl={lease_ms}"),
                "--eviction_high_watermark_ratio=0.95".to_owned(),
            ]);
            (command, &[MASTER_PORT, METRICS_PORT, METADATA_PORT])
        }
        Service::Client => {
            let mut command = program("mooncake_client");
            command.args([
                format!("--master_server_address=127.0.0.1:{MASTER_PORT}"),
                format!("--port={CLIENT_PORT}"),
                "--metadata_server=P2PHANDSHAKE".to_owned(),
            ]);
            (command, &[CLIENT_PORT])
        }
        Service::Metadata => {
            let mut command = program("mooncake_http_metadata_server");
            command.args([format!("--port={METADATA_PORT}"), "--host=127.0.0.1".to_owned()]);
            (command, &[METADATA_PORT])
        }
    };
    Running::start(command)?.listening(ports).with_context(|| format!("{service:?}"))
}
