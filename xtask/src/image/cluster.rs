//! Services in containers: started in order, checked for health, used, and stopped.

use super::container::{self, Container};
use crate::deploy::compose::Compose;
use crate::deploy::scrape::Target;
use crate::deploy::units::Unit;
use anyhow::{Context as _, Result, bail, ensure};
use std::collections::BTreeMap;
use std::fs;
use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// The first bytes of the addresses in the network that the services share; each has its own address.
pub(super) const NETWORK: [u8; 3] = [10, 83, 0];
/// The directory in which container engines and systemd put secrets.
const SECRETS: &str = "/run/secrets";
const ANSWER_MAX: Duration = Duration::from_secs(10);
const HEALTH_EVERY: Duration = Duration::from_millis(200);
/// Longer than a lease with default settings.
const LEASED_MAX: Duration = Duration::from_secs(15);
/// The stop timeout of systemd for a unit that sets none.
const UNIT_STOPS_WITHIN: Duration = Duration::from_secs(90);

/// One service, with addresses filled in.
struct Plan {
    name: String,
    args: Vec<String>,
    health: Vec<String>,
    healthy_within: Duration,
    stops_within: Duration,
    after: Vec<String>,
}

impl Plan {
    /// Path of its log, beside the file system.
    fn log(&self, root: &Path) -> PathBuf {
        root.with_file_name(format!("{}.log", self.name))
    }
}

/// Addresses of a compose file's services, by name.
pub(super) fn addresses(compose: &Compose) -> BTreeMap<String, Ipv4Addr> {
    let [a, b, c] = NETWORK;
    let numbered = compose.services.keys().zip(2..);
    numbered.map(|(name, d)| (name.clone(), Ipv4Addr::new(a, b, c, d))).collect()
}

/// Starts the services of `compose` that run our program, fetches through the gateway what was put there, and
/// requests metrics from Prometheus' targets.
///
/// # Errors
/// A service does not become healthy, ends before it is stopped, or returns wrong results.
pub(super) fn compose(root: &Path, compose: &Compose, targets: &[Target]) -> Result<()> {
    let addresses = addresses(compose);
    let plans = compose.ours().map(|(name, service)| {
        let address = addresses[name].to_string();
        // All containers share a network here, where each would have its own.
        let place = |word: &String| word.replace("0.0.0.0", &address).replace("127.0.0.1", &address);
        Plan {
            name: name.clone(),
            args: service.command.iter().map(place).collect(),
            health: service.health.iter().skip(1).map(place).collect(),
            healthy_within: service.healthy_within,
            stops_within: service.stops_within,
            after: service.after.clone(),
        }
    });
    run(root, plans.collect(), || {
        let gateway = SocketAddr::from((*addresses.get("gateway").context("no service `gateway`")?, 9005));
        use_gateway(gateway, "gateway:9005")?;
        for target in targets {
            let address = SocketAddr::from((addresses[&target.service], target.port));
            let host = format!("{}:{}", target.service, target.port);
            let (status, body) = ask(address, &host, "GET", "/metrics", b"")?;
            let body = String::from_utf8_lossy(&body);
            ensure!(status == 200 && body.contains("snowskin_"), "http://{host}/metrics: status {status}");
        }
        Ok(())
    })
}

/// Starts the units' programs with systemd's specifiers filled in, and uses them likewise.
///
/// # Errors
/// As [`compose`].
pub(super) fn units(root: &Path, units: &[Unit]) -> Result<()> {
    let plans = units.iter().map(|unit| {
        let args = unit.command().into_iter().map(|word| {
            word.replace("%H", "host").replace("%i", "0").replace("${CREDENTIALS_DIRECTORY}", SECRETS)
        });
        let is = |what: &str| unit.name.contains(what);
        let (health, after): (Vec<&str>, Vec<&str>) = match () {
            () if is("master") => (vec!["health", "127.0.0.1:9003"], vec![]),
            // The node can mount its memory when the master is ready.
            () if is("node") => {
                (vec!["health", "--ready", "127.0.0.1:9003"], vec!["snowskin-master.service"])
            }
            () if is("conductor") => (vec!["health", "127.0.0.1:13333"], vec![]),
            () => (vec!["health", "127.0.0.1:9005"], vec!["snowskin-node@.service"]),
        };
        Plan {
            name: unit.name.clone(),
            args: args.collect(),
            health: health.into_iter().map(str::to_owned).collect(),
            healthy_within: Duration::from_secs(30),
            stops_within: UNIT_STOPS_WITHIN,
            after: after.into_iter().map(str::to_owned).collect(),
        }
    });
    run(root, plans.collect(), || {
        use_gateway(SocketAddr::from((Ipv4Addr::LOCALHOST, 9005)), "localhost:9005")
    })
}

/// Starts all services, uses them, and stops them. After a failure, their logs are printed.
fn run(root: &Path, plans: Vec<Plan>, used: impl FnOnce() -> Result<()>) -> Result<()> {
    let logs: Vec<(String, PathBuf)> = plans.iter().map(|plan| (plan.name.clone(), plan.log(root))).collect();
    let ended = start_use_stop(root, plans, used);
    if ended.is_err() {
        for (name, log) in logs {
            let said = fs::read_to_string(log).unwrap_or_default();
            said.lines().for_each(|line| println!("      {name}: {line}"));
        }
    }
    ended
}

fn start_use_stop(root: &Path, mut waiting: Vec<Plan>, used: impl FnOnce() -> Result<()>) -> Result<()> {
    let mut running: Vec<(Plan, Container)> = Vec::new();
    while !waiting.is_empty() {
        let up = |name: &String| running.iter().any(|(plan, _)| plan.name == *name);
        let next = waiting.iter().position(|plan| plan.after.iter().all(up));
        let plan = waiting.remove(next.context("services wait for each other")?);
        let mut container = Container::start(root, &plan.args, &plan.log(root))?;
        wait_until_well(root, &plan, &mut container).with_context(|| plan.name.clone())?;
        running.push((plan, container));
    }
    used()?;
    // Users of a service are stopped before it, because they would report that it is missing.
    while let Some((plan, container)) = running.pop() {
        container.stop(plan.stops_within).with_context(|| plan.name.clone())?;
    }
    Ok(())
}

fn wait_until_well(root: &Path, plan: &Plan, container: &mut Container) -> Result<()> {
    let deadline = Instant::now() + plan.healthy_within;
    loop {
        let answer = container::run(root, &plan.health);
        if let Some(status) = container.has_ended()? {
            bail!("it ended with {status} instead of starting");
        }
        match answer {
            Ok(_) => return Ok(()),
            Err(error) if Instant::now() > deadline => {
                return Err(error.context("it does not become healthy"));
            }
            Err(_) => std::thread::sleep(HEALTH_EVERY),
        }
    }
}

fn use_gateway(gateway: SocketAddr, host: &str) -> Result<()> {
    let sent: Vec<u8> = (0..100_003_u32).map(|at| (at.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    let path = "/v1/objects/image/check";
    let (status, _) = ask(gateway, host, "PUT", path, &sent)?;
    ensure!((200..300).contains(&status), "a put through the gateway: status {status}");
    let (status, got) = ask(gateway, host, "GET", path, b"")?;
    ensure!(status == 200, "a get through the gateway: status {status}");
    ensure!(
        got == sent,
        "the gateway returned {} bytes that differ from the {} that were put",
        got.len(),
        sent.len()
    );
    // Removes the object, so that a node has nothing to move before it stops. It was just read, and is leased
    // for some time.
    let deadline = Instant::now() + LEASED_MAX;
    loop {
        match ask(gateway, host, "DELETE", path, b"")?.0 {
            200..300 => return Ok(()),
            409 if Instant::now() < deadline => std::thread::sleep(HEALTH_EVERY),
            status => bail!("a removal through the gateway: status {status}"),
        }
    }
}

/// Sends one HTTP/1.1 request; returns status and body. Chunked responses are not supported, because ours
/// have lengths.
fn ask(address: SocketAddr, host: &str, method: &str, path: &str, body: &[u8]) -> Result<(u16, Vec<u8>)> {
    let what = || format!("{method} http://{host}{path}");
    let mut stream = TcpStream::connect_timeout(&address, ANSWER_MAX).with_context(what)?;
    stream.set_read_timeout(Some(ANSWER_MAX))?;
    stream.set_write_timeout(Some(ANSWER_MAX))?;
    let length = body.len();
    let head = format!(
        "{method} {path} HTTP/1.1\r\nHost: {host}\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n"
    );
    stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(body)).with_context(what)?;
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).with_context(what)?;
    let end = answer.windows(4).position(|four| four == b"\r\n\r\n").with_context(what)?;
    let head = String::from_utf8_lossy(&answer[..end]).into_owned();
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).with_context(what)?;
    Ok((status, answer.split_off(end + 4)))
}
