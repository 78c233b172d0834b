//! Runs the work: Snowskin's benchmarks, those of the other programs, and processes of them that are kept for
//! the whole run.

use super::Sample;
use super::contest::{Contestant, Row, size};
use super::install::Peers;
use crate::bench_iperf;
use crate::cmd::Cmd;
use crate::host::Host;
use anyhow::{Context as _, Result, bail, ensure};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{BufRead as _, BufReader, Write as _};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

const GIB: f64 = (1u64 << 30) as f64;
/// Time for a process to start, and for its answer beyond the requested duration.
const PATIENCE: Duration = Duration::from_secs(90);
/// Time for a server to listen, milliseconds.
const LISTEN_MS_MAX: u64 = 10_000;
/// Mooncake's lease time, seconds: objects can be removed this long after they were read.
const MOONCAKE_LEASE_S: f64 = 0.5;
/// Memory of each store, bytes.
const STORE_BYTES: u64 = 1 << 30;
/// Number of objects by which the memory is divided.
const MEMORY_OBJECTS: u64 = 100_000;

const MOONCAKE: &str = include_str!("mooncake.py");
const NIXL: &str = include_str!("nixl.py");
const CONDUCTOR: &str = include_str!("conductor.py");
/// Blocks that the index of the Conductor is loaded with, and their number per message.
const INDEX_BLOCKS: u32 = 100_000;
const INDEX_BLOCKS_PER_MESSAGE: u32 = 32;
/// Queries that are timed.
const INDEX_QUERIES: u32 = 200;
/// Ports of the publishers of events.
const INDEX_PUBLISHERS: u16 = 4;

/// The running processes.
pub(super) struct Bench<'a> {
    host: &'a Host,
    peers: &'a Peers,
    snowskin: PathBuf,
    seconds: f64,
    logs: PathBuf,
    /// Engines of the package `mooncake`, Mooncake's and ours.
    engines: BTreeMap<Contestant, Ends>,
    /// Stores of that package.
    stores: BTreeMap<Contestant, PythonStore>,
    nixl: Option<Ends>,
    redis: Option<(u16, Server)>,
}

/// A pair of processes: the initiator and the target.
struct Ends {
    initiator: Worker,
    target: Worker,
}

impl Ends {
    /// Stops them until they are measured: the threads of their libraries poll for work, and there are few
    /// cores.
    fn paused(self) -> Result<Self> {
        self.signal("STOP")?;
        Ok(self)
    }

    fn signal(&self, signal: &str) -> Result<()> {
        for worker in [&self.target, &self.initiator] {
            Cmd::new(&format!("kill -{signal} {}", worker.child.id())).run(Path::new("/"), None)?;
        }
        Ok(())
    }
}

struct PythonStore {
    ends: Ends,
    master: Server,
}

impl<'a> Bench<'a> {
    pub(super) fn new(host: &'a Host, peers: &'a Peers, snowskin: PathBuf, seconds: f64) -> Self {
        let logs = host.target_dir.join("peers-logs");
        Self {
            host,
            peers,
            snowskin,
            seconds,
            logs,
            engines: BTreeMap::new(),
            stores: BTreeMap::new(),
            nixl: None,
            redis: None,
        }
    }

    /// Lets `contestant` do the work of `row` once.
    pub(super) fn sample(&mut self, row: &Row, contestant: Contestant) -> Result<Sample> {
        fs::create_dir_all(&self.logs)?;
        let uses_store = |row: &Row| matches!(row, Row::Store { .. } | Row::Master { .. });
        if !matches!(row, Row::Python { work, .. } if uses_store(work)) && !uses_store(row) {
            // Its background threads would disturb the measurement. It cannot be stopped temporarily, because
            // it would lose its nodes.
            self.stores.clear();
        }
        match (row, contestant) {
            (Row::Transfer { op, block, batch }, who) => match who {
                Contestant::Mooncake => self.engine(who)?.transfer(op, *block, *batch),
                Contestant::Nixl => self.nixl()?.transfer(op, *block, *batch),
                Contestant::Ucx => self.ucx(op, *block),
                Contestant::Iperf => self.iperf(*op == "read"),
                Contestant::Memcpy => self.our_transfer("memcpy", op, *block, *batch),
                Contestant::Shm => self.our_transfer("shm", op, *block, *batch),
                Contestant::Tcp => self.our_transfer("tcp", op, *block, *batch),
                Contestant::Redis => bail!("Redis moves objects only"),
                other => bail!("{other} moves no blocks of memory"),
            },
            (Row::Store { op, value, batch, plain }, who) => match who {
                Contestant::Tcp => self.our_store("tcp", op, &size(*value), *batch, *plain),
                Contestant::Shm => self.our_store("shm", op, &size(*value), *batch, *plain),
                Contestant::Mooncake => self.objects(who, op, *value, *batch, *plain),
                Contestant::Redis => self.redis(op, *value, *batch),
                other => bail!("{other} has no store"),
            },
            (Row::Master { op, batch }, Contestant::Tcp) => self.our_master(op, *batch),
            (Row::Master { op, batch }, Contestant::Mooncake) => self.mooncake_master(op, *batch),
            (Row::Master { .. }, other) => bail!("{other} has no master"),
            (Row::Conductor { op: "index" }, who) => self.index(who),
            (Row::Conductor { .. }, who) => self.proxy(who),
            (Row::Python { work, .. }, who) => match work {
                Row::Transfer { op, block, batch } => self.engine(who)?.transfer(op, *block, *batch),
                Row::Store { op, value, batch, plain } => self.objects(who, op, *value, *batch, *plain),
                other => bail!("no function of the package does this: {}", other.name()),
            },
        }
    }

    /// Ends the processes of a contestant that has failed: the next row starts new ones.
    pub(super) fn forget(&mut self, contestant: Contestant) {
        match contestant {
            Contestant::Mooncake | Contestant::Python | Contestant::PythonTcp => {
                self.engines.remove(&contestant);
                self.stores.remove(&contestant);
            }
            Contestant::Nixl => self.nixl = None,
            Contestant::Redis => self.redis = None,
            _ => {}
        }
    }

    /// The first row that a command of ours prints.
    fn ours(&self, options: &str) -> Result<Value> {
        self.our_rows(options)?.first().cloned().with_context(|| format!("`{options}` gave no row"))
    }

    fn our_rows(&self, options: &str) -> Result<Vec<Value>> {
        let mut cmd = Cmd::default().arg(self.snowskin.display().to_string());
        for word in options.split_whitespace() {
            cmd = cmd.arg(word);
        }
        let output =
            cmd.stdout(&self.host.root).with_context(|| format!("`{cmd}` failed: run it by hand"))?;
        serde_json::from_str(&output).with_context(|| format!("`{cmd}` gave no JSON rows"))
    }

    fn our_transfer(&self, fabric: &str, op: &str, block: u64, batch: u32) -> Result<Sample> {
        let row = self.ours(&format!(
            "bench transfer --fabric {fabric} --op {op} --block {} --batch {batch} --duration {} --json",
            size(block),
            self.seconds
        ))?;
        let gb_s = number(&row, "gb_s")?;
        Ok(Sample {
            gb_s,
            items_s: gb_s * 1e9 / block as f64,
            p50_us: number(&row, "p50_us")?,
            cpu_s_per_gib: number(&row, "cpu_s_per_gib")?,
            ..Sample::default()
        })
    }

    fn our_store(&self, fabric: &str, op: &str, value: &str, batch: u32, plain: bool) -> Result<Sample> {
        let row = self.ours(&format!(
            "bench store --fabric {fabric} --op {op} --value {value} --batch {batch} --memory {STORE_BYTES} \
             --duration {} --json{}",
            self.seconds,
            if plain { " --plain" } else { "" }
        ))?;
        let misses = number(&row, "misses")?;
        ensure!(misses == 0.0, "{misses} objects were not found");
        Ok(Sample {
            gb_s: number(&row, "gb_s")?,
            items_s: number(&row, "ops_s")? * number(&row, "batch")?,
            p50_us: number(&row, "p50_us")?,
            cpu_s_per_gib: number(&row, "cpu_s_per_gib")?,
            ..Sample::default()
        })
    }

    /// One caller that waits for each answer, as Mooncake's client does.
    fn our_master(&self, op: &str, batch: u32) -> Result<Sample> {
        if op == "put" {
            return self.our_store("tcp", "batch-put", "1B", batch, false);
        }
        let row = self.ours(&format!(
            "bench master --op exists --batch {batch} --clients 1 --depth 1 --objects {MEMORY_OBJECTS} \
             --duration {} --json",
            self.seconds
        ))?;
        Ok(Sample {
            items_s: number(&row, "keys_s")?,
            p50_us: number(&row, "p50_us")?,
            bytes_per_object: row["bytes_per_object"].as_f64().unwrap_or(0.0),
            ..Sample::default()
        })
    }

    fn worker(&self, who: Contestant, name: &str, program: &str, args: &[String]) -> Result<Worker> {
        let name = &format!("{}-{name}", who.program());
        let script = self.logs.join(format!("{name}.py"));
        fs::write(&script, program)?;
        let mut cmd = Cmd::default()
            .arg(self.python(who)?.display().to_string())
            .arg(script.display().to_string())
            .env("UCX_TLS", "tcp,self")
            .env("UCX_LOG_LEVEL", "error")
            .env("NIXL_LOG_LEVEL", "ERROR")
            .env("GLOG_minloglevel", "2")
            .env("MC_LOG_LEVEL", "ERROR");
        if who == Contestant::PythonTcp {
            cmd = cmd.env("SNOWSKIN_MOONCAKE_FABRICS", "tcp");
        }
        for arg in args {
            cmd = cmd.arg(arg);
        }
        Worker::start(name, &cmd, &self.host.root, &self.logs.join(format!("{name}.log")))
    }

    /// The interpreter of the environment that has a contestant's package.
    fn python(&self, who: Contestant) -> Result<&Path> {
        match who {
            ours if ours.is_our_package() => {
                self.peers.our_python.as_deref().context("the wheels are not installed")
            }
            _ => Ok(&self.peers.python),
        }
    }

    fn engine(&mut self, who: Contestant) -> Result<EndsFor<'_>> {
        if !self.engines.contains_key(&who) {
            let words = |words: &[&str]| words.iter().map(|&word| word.to_owned()).collect::<Vec<_>>();
            let port = free_port()?.to_string();
            let target = self.worker(who, "target", MOONCAKE, &words(&["engine-target", &port]))?;
            let peer = target.ready["peer"].as_str().context("the target gave no address")?.to_owned();
            let address = target.ready["address"].to_string();
            let port = free_port()?.to_string();
            let initiator =
                self.worker(who, "initiator", MOONCAKE, &words(&["engine", &port, &peer, &address]))?;
            let ends = Ends { initiator, target };
            self.engines.insert(who, if who.is_ours() { ends } else { ends.paused()? });
        }
        let ends = self.engines.get_mut(&who).context("it was just started")?;
        Ok(EndsFor { ends, seconds: self.seconds, is_paused: !who.is_ours() })
    }

    fn nixl(&mut self) -> Result<EndsFor<'_>> {
        if self.nixl.is_none() {
            let metadata = self.logs.join("nixl-metadata").display().to_string();
            let target =
                self.worker(Contestant::Nixl, "target", NIXL, &["target".to_owned(), metadata.clone()])?;
            let address = target.ready["address"].to_string();
            let initiator = self.worker(
                Contestant::Nixl,
                "initiator",
                NIXL,
                &["initiator".to_owned(), metadata, address],
            )?;
            self.nixl = Some(Ends { initiator, target }.paused()?);
        }
        let ends = self.nixl.as_mut().context("it was just started")?;
        Ok(EndsFor { ends, seconds: self.seconds, is_paused: true })
    }

    fn store(&mut self, who: Contestant) -> Result<&mut PythonStore> {
        if !self.stores.contains_key(&who) {
            let (rpc, metrics) = (free_port()?, free_port()?);
            let master = match who {
                ours if ours.is_our_package() => self.python(who)?.with_file_name("mooncake_master"),
                _ => self.peers.mooncake_master.clone(),
            };
            let cmd = Cmd::default()
                .arg(master.display().to_string())
                .arg(format!("--port={rpc}"))
                .arg(format!("--metrics_port={metrics}"))
                .arg(format!("--default_kv_lease_ttl={}", (MOONCAKE_LEASE_S * 1e3) as u64))
                .env("GLOG_minloglevel", "2");
            let mut master = Server::start(
                "mooncake_master",
                &cmd,
                &self.host.root,
                &self.logs.join(format!("{}-master.log", who.program())),
            )?;
            master.wait_for_listener(rpc)?;
            let master_address = format!("127.0.0.1:{rpc}");
            let args = |role: &str| {
                Ok::<_, anyhow::Error>(vec![
                    role.to_owned(),
                    free_port()?.to_string(),
                    master_address.clone(),
                ])
            };
            let mut node = args("node")?;
            node.push((2 * STORE_BYTES).to_string());
            let target = self.worker(who, "node", MOONCAKE, &node)?;
            let initiator = self.worker(who, "client", MOONCAKE, &args("client")?)?;
            self.stores.insert(who, PythonStore { ends: Ends { initiator, target }, master });
        }
        self.stores.get_mut(&who).context("it was just started")
    }

    /// Whole objects through the package `mooncake`.
    fn objects(&mut self, who: Contestant, op: &str, value: u64, batch: u32, plain: bool) -> Result<Sample> {
        let seconds = self.seconds;
        let objects = (STORE_BYTES / value).min(if op.ends_with("get") { 4096 } else { 50_000 });
        let host = self.host;
        let store = self.store(who)?;
        let before = store.master.cpu_s(host)? + store.ends.target.cpu_s()?;
        let answer = store.ends.initiator.ask(
            &json!({
                "do": "run", "op": op, "value": value, "batch": batch, "plain": plain, "seconds": seconds,
                "objects": objects, "lease_s": MOONCAKE_LEASE_S * 1.5,
            }),
            seconds,
        )?;
        let servers = store.master.cpu_s(host)? + store.ends.target.cpu_s()? - before;
        // The servers' CPU time includes filling and removing, the initiator's only the calls. It is divided
        // in proportion to the objects.
        let items = number(&answer, "items")?;
        let all = if op.ends_with("get") { items + objects as f64 } else { items };
        Sample::of(&answer, servers * items / all)
    }

    fn mooncake_master(&mut self, op: &str, batch: u32) -> Result<Sample> {
        match op {
            "put" => self.objects(Contestant::Mooncake, "batch-put", 1, batch, false),
            "exists" => self.objects(Contestant::Mooncake, "exists", 1, batch, false),
            _ => {
                let store = self.store(Contestant::Mooncake)?;
                let before = store.master.resident_bytes()?;
                let answer = store.ends.initiator.ask(
                    &json!({
                        "do": "run", "op": "batch-put", "value": 1, "batch": 512, "plain": false, "seconds": 120,
                        "objects": MEMORY_OBJECTS, "lease_s": 0, "keep": true,
                    }),
                    120.0,
                )?;
                let objects = number(&answer, "items")?;
                let grown = store.master.resident_bytes()? - before;
                Ok(Sample { bytes_per_object: grown / objects, ..Sample::of(&answer, 0.0)? })
            }
        }
    }

    /// Loads the index of a service by events, and asks it over HTTP. A new process each time.
    fn index(&self, who: Contestant) -> Result<Sample> {
        let (port, events) = (free_port()?, free_ports(INDEX_PUBLISHERS)?);
        let (kind, cmd) = match who {
            Contestant::Tcp => {
                let program = Cmd::default().arg(self.snowskin.display().to_string());
                ("snowskin", program.words("conductor serve --listen").arg(format!("127.0.0.1:{port}")))
            }
            Contestant::Dynamo => {
                let python = Cmd::default().arg(self.peers.python.display().to_string());
                ("dynamo", python.words("-m dynamo.indexer --threads 2 --port").arg(port.to_string()))
            }
            other => bail!("{other} has no index"),
        };
        let log = self.logs.join(format!("{kind}-index.log"));
        let mut server = Server::start("the index", &cmd, &self.host.root, &log)?;
        server.wait_for_listener(port)?;
        let script = self.logs.join("conductor.py");
        fs::write(&script, CONDUCTOR)?;
        let cmd = Cmd::default()
            .arg(self.peers.python.display().to_string())
            .arg(script.display().to_string())
            .words(&format!("{kind} {port} {} {events}", server.child.id()))
            .words(&format!("{INDEX_BLOCKS} {INDEX_BLOCKS_PER_MESSAGE} {INDEX_QUERIES}"));
        let output =
            cmd.stdout(&self.host.root).with_context(|| format!("`{cmd}` failed: run it by hand"))?;
        let answer: Value = serde_json::from_str(&output).with_context(|| format!("`{cmd}` gave no JSON"))?;
        Ok(Sample {
            items_s: number(&answer, "blocks_per_s")?,
            items_per_cpu_s: number(&answer, "blocks_per_cpu_s")?,
            p50_us: number(&answer, "query_p50_us")?,
            ..Sample::default()
        })
    }

    /// Requests through a proxy to mock engines; clients, proxy and engines share the cores.
    fn proxy(&self, who: Contestant) -> Result<Sample> {
        let milliseconds = (self.seconds * 1e3).max(10.0) as u64;
        let bench = format!("conductor bench-proxy --rounds 1 --ms {milliseconds} --json");
        let (way, rows) = match who {
            Contestant::Tcp => ("snowskin proxy", self.our_rows(&bench)?),
            Contestant::Router => {
                let (port, first, second) = (free_port()?, free_port()?, free_port()?);
                let cmd = Cmd::default()
                    .arg(self.peers.python.display().to_string())
                    .words("-m sglang_router.launch_router --host 127.0.0.1 --log-level error --port")
                    .arg(port.to_string())
                    .words(&format!("--worker-urls http://127.0.0.1:{first} http://127.0.0.1:{second}"));
                let log = self.logs.join("sglang-router.log");
                let _router = Server::start("sglang-router", &cmd, &self.host.root, &log)?;
                let engines = format!("--engine 127.0.0.1:{first} --engine 127.0.0.1:{second}");
                let rows = self.our_rows(&format!("{bench} --against 127.0.0.1:{port} {engines}"))?;
                ("other proxy", rows)
            }
            other => bail!("{other} has no proxy"),
        };
        let row = |what: &str| {
            rows.iter().find(|row| row["what"] == what).with_context(|| format!("no row of the {what}"))
        };
        let (itself, through) = (row("engine itself")?, row(way)?);
        let failed = number(through, "failed")?;
        ensure!(failed == 0.0, "{failed} requests failed");
        Ok(Sample {
            items_s: number(through, "per_s")?,
            p50_us: number(through, "ttft_us")? - number(itself, "ttft_us")?,
            ..Sample::default()
        })
    }

    fn redis(&mut self, op: &str, value: u64, batch: u32) -> Result<Sample> {
        if self.redis.is_none() {
            let port = free_port()?;
            let cmd =
                Cmd::new("redis-server --bind 127.0.0.1 --daemonize no --appendonly no --maxmemory 2gb")
                    .arg("--port")
                    .arg(port.to_string())
                    .arg("--save")
                    .arg("");
            let mut server =
                Server::start("redis-server", &cmd, &self.host.root, &self.logs.join("redis.log"))?;
            server.wait_for_listener(port)?;
            self.redis = Some((port, server));
        }
        let (port, server) = self.redis.as_ref().context("it was just started")?;
        let verb = if op.ends_with("get") { "get" } else { "set" };
        let run = |verb: &str, calls: u64| -> Result<(f64, f64)> {
            let cmd = Cmd::new(&format!(
                "redis-benchmark -h 127.0.0.1 -p {port} -c 1 -P {batch} -d {value} -n {calls} -t {verb} --csv"
            ));
            let output = cmd.stdout(&self.host.root).with_context(|| format!("`{cmd}` failed"))?;
            let line = output.lines().last().unwrap_or_default();
            let fields: Vec<f64> =
                line.split(',').skip(1).filter_map(|field| field.trim_matches('"').parse().ok()).collect();
            ensure!(fields.len() == 7, "`{cmd}` printed another table: {line}");
            Ok((fields[0], fields[3] * 1e3))
        };
        if verb == "get" {
            run("set", batch.into())?;
        }
        let (rate, _) = run(verb, u64::from(batch) * 50)?;
        let calls = ((rate * self.seconds) as u64).max(u64::from(batch) * 50);
        let before = server.cpu_s(self.host)? + bench_iperf::children_cpu_seconds(self.host)?;
        let (items_s, p50_us) = run(verb, calls)?;
        let used = server.cpu_s(self.host)? + bench_iperf::children_cpu_seconds(self.host)? - before;
        let bytes = calls as f64 * value as f64;
        Ok(Sample {
            gb_s: items_s * value as f64 / 1e9,
            items_s,
            p50_us,
            cpu_s_per_gib: used / (bytes / GIB),
            ..Sample::default()
        })
    }

    /// `ucp_get` for reads; for writes, throughput is from `ucp_put_bw`, and latency from `ucp_put_lat`,
    /// which measures round trips.
    fn ucx(&self, op: &str, block: u64) -> Result<Sample> {
        let run = |test: &str, calls: u64| -> Result<(f64, f64, f64)> {
            let port = free_port()?;
            let before = bench_iperf::children_cpu_seconds(self.host)?;
            let env = |cmd: Cmd| cmd.env("UCX_TLS", "tcp,self").env("UCX_LOG_LEVEL", "error");
            let server = env(Cmd::new(&format!("ucx_perftest -p {port}")));
            let log = self.logs.join("ucx.log");
            let mut server = Server::start("ucx_perftest", &server, &self.host.root, &log)?;
            server.wait_for_listener(port)?;
            let cmd = env(Cmd::new(&format!(
                "ucx_perftest 127.0.0.1 -p {port} -t {test} -s {block} -n {calls} -w 10 -f -v"
            )));
            let output = cmd.stdout(&self.host.root).with_context(|| format!("`{cmd}` failed"))?;
            drop(server);
            let line = output.lines().last().unwrap_or_default();
            let fields: Vec<f64> = line.split(',').filter_map(|field| field.trim().parse().ok()).collect();
            ensure!(fields.len() == 8, "`{cmd}` printed another table: {line}");
            // The overall bandwidth is in units of 2^20 bytes.
            let gb_s = fields[5] * (1u64 << 20) as f64 / 1e9;
            let cpu = bench_iperf::children_cpu_seconds(self.host)? - before;
            Ok((gb_s, fields[1], cpu))
        };
        let (bandwidth, latency) =
            if op == "read" { ("ucp_get", "ucp_get") } else { ("ucp_put_bw", "ucp_put_lat") };
        let (estimate, _, _) = run(bandwidth, 50)?;
        let calls = ((estimate * 1e9 * self.seconds / block as f64) as u64).clamp(50, 1_000_000);
        let (gb_s, mut p50_us, cpu_s) = run(bandwidth, calls)?;
        if latency != bandwidth {
            // It reports half a round trip, but writes of all other programs end when the target has
            // confirmed them.
            p50_us = 2.0 * run(latency, calls.min(20_000))?.1;
        }
        let bytes = calls as f64 * block as f64;
        Ok(Sample {
            gb_s,
            items_s: gb_s * 1e9 / block as f64,
            p50_us,
            cpu_s_per_gib: cpu_s / (bytes / GIB),
            ..Sample::default()
        })
    }

    fn iperf(&self, reverse: bool) -> Result<Sample> {
        let congestion = fs::read_to_string("/proc/sys/net/ipv4/tcp_congestion_control")?;
        let seconds = (self.seconds.ceil() as u32).max(1);
        let (gb_s, cpu_s_per_gib) = bench_iperf::iperf(self.host, seconds, congestion.trim(), reverse)?;
        Ok(Sample { gb_s, cpu_s_per_gib, ..Sample::default() })
    }
}

/// Two ends, borrowed for a measurement.
struct EndsFor<'a> {
    ends: &'a mut Ends,
    seconds: f64,
    /// Whether the processes are stopped between measurements.
    is_paused: bool,
}

impl EndsFor<'_> {
    fn transfer(&mut self, op: &str, block: u64, batch: u32) -> Result<Sample> {
        if self.is_paused {
            self.ends.signal("CONT")?;
        }
        let before = number(&self.ends.target.ask(&json!({"do": "serve"}), 0.0)?, "cpu_s")?;
        let command = json!({"do": "run", "op": op, "block": block, "batch": batch, "seconds": self.seconds});
        let answer = self.ends.initiator.ask(&command, self.seconds)?;
        let after = number(&self.ends.target.ask(&json!({"do": "rest"}), 0.0)?, "cpu_s")?;
        if self.is_paused {
            self.ends.signal("STOP")?;
        }
        Sample::of(&answer, after - before)
    }
}

impl Sample {
    /// A sample from the answer of a worker; `servers_s` is the CPU time of all other processes.
    fn of(answer: &Value, servers_s: f64) -> Result<Self> {
        let (items, bytes) = (number(answer, "items")?, number(answer, "bytes")?);
        let seconds = number(answer, "seconds")?;
        ensure!(items > 0.0 && seconds > 0.0, "nothing was done in the time");
        Ok(Self {
            gb_s: bytes / seconds / 1e9,
            items_s: items / seconds,
            p50_us: number(answer, "p50_us")?,
            cpu_s_per_gib: (number(answer, "cpu_s")? + servers_s) / (bytes / GIB),
            ..Self::default()
        })
    }
}

/// A process that answers with lines.
struct Worker {
    name: String,
    child: Child,
    stdin: ChildStdin,
    lines: Receiver<String>,
    log: PathBuf,
    ready: Value,
}

impl Worker {
    fn start(name: &str, cmd: &Cmd, dir: &Path, log: &Path) -> Result<Self> {
        let mut child = cmd
            .command(dir)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(File::create(log)?)
            .spawn()
            .with_context(|| format!("cannot start {name}"))?;
        let stdin = child.stdin.take().context("it has a stdin")?;
        let stdout = child.stdout.take().context("it has a stdout")?;
        let (sender, lines) = channel();
        std::thread::spawn(move || {
            for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                if sender.send(line).is_err() {
                    break;
                }
            }
        });
        let mut this =
            Self { name: name.to_owned(), child, stdin, lines, log: log.to_owned(), ready: Value::Null };
        this.ready = this.line("READY ", PATIENCE)?;
        Ok(this)
    }

    fn ask(&mut self, command: &Value, seconds: f64) -> Result<Value> {
        writeln!(self.stdin, "{command}").with_context(|| self.gone())?;
        self.line("ANSWER ", PATIENCE + Duration::from_secs_f64(seconds))
    }

    fn cpu_s(&mut self) -> Result<f64> {
        number(&self.ask(&json!({"do": "cpu"}), 0.0)?, "cpu_s")
    }

    /// The next line that begins with `prefix`; other lines come from libraries.
    fn line(&self, prefix: &str, patience: Duration) -> Result<Value> {
        let until = Instant::now() + patience;
        loop {
            match self.lines.recv_timeout(until.saturating_duration_since(Instant::now())) {
                Ok(line) => {
                    if let Some(json) = line.strip_prefix(prefix) {
                        return serde_json::from_str(json)
                            .with_context(|| format!("{} sent an invalid answer", self.name));
                    }
                }
                Err(RecvTimeoutError::Timeout) => {
                    bail!("{} does not answer; its log is {}", self.name, self.log.display())
                }
                Err(RecvTimeoutError::Disconnected) => bail!(self.gone()),
            }
        }
    }

    fn gone(&self) -> String {
        let log = fs::read_to_string(&self.log).unwrap_or_default();
        let last = log.lines().last().unwrap_or_default();
        format!("{} ended: {last} (the whole log is {})", self.name, self.log.display())
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // An error is ignored: the process may have ended by itself.
        let _already_gone = self.child.kill();
        let _reaped = self.child.wait();
    }
}

/// A process that listens on a port.
struct Server {
    name: &'static str,
    child: Child,
}

impl Server {
    fn start(name: &'static str, cmd: &Cmd, dir: &Path, log: &Path) -> Result<Self> {
        let output = File::create(log)?;
        let child = cmd
            .command(dir)
            .stdin(Stdio::null())
            .stdout(output.try_clone()?)
            .stderr(output)
            .spawn()
            .with_context(|| format!("cannot start {name}"))?;
        Ok(Self { name, child })
    }

    fn wait_for_listener(&mut self, port: u16) -> Result<()> {
        bench_iperf::wait_for_listener(port, &mut self.child, LISTEN_MS_MAX).with_context(|| self.name)
    }

    /// CPU time used so far, seconds.
    fn cpu_s(&self, host: &Host) -> Result<f64> {
        bench_iperf::cpu_seconds_of(host, self.child.id())
    }

    fn resident_bytes(&self) -> Result<f64> {
        let status = fs::read_to_string(format!("/proc/{}/status", self.child.id()))?;
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).context("no VmRSS")?;
        let kib: f64 = line.trim().trim_end_matches(" kB").parse().context("VmRSS is not a number")?;
        Ok(kib * 1024.0)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _already_gone = self.child.kill();
        let _reaped = self.child.wait();
    }
}

fn number(value: &Value, name: &str) -> Result<f64> {
    value[name].as_f64().with_context(|| format!("no number `{name}` in {value}"))
}

fn free_port() -> Result<u16> {
    Ok(TcpListener::bind(("127.0.0.1", 0))?.local_addr()?.port())
}

/// The first of so many free ports in a row.
fn free_ports(many: u16) -> Result<u16> {
    for _ in 0..100 {
        let first = free_port()?;
        let Some(last) = first.checked_add(many - 1) else { continue };
        let bound: std::io::Result<Vec<_>> =
            (first..=last).map(|port| TcpListener::bind(("127.0.0.1", port))).collect();
        if bound.is_ok() {
            return Ok(first);
        }
    }
    bail!("no {many} free ports in a row")
}
