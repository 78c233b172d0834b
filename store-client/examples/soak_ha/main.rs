//! The clients of `cargo xtask soak --ha` and `--disk`, in one process: they put, replace, read and remove
//! all the time, know what was acknowledged, and are told by lines on standard input when to audit it.
//!
//! ```text
//!   writer   one per client: a ledger of what was acknowledged, and the audit of it     ledger, content
//!   probers  how long nothing was answered, and whether anything was out of date        prober
//!   churn    fills memory and disks                                                     churn
//!   flips    damages what is on disks            deposed   a leader that was stopped
//! ```
//!
//! It ends when its standard input ends. Words of the command line: `masters=A,B seed=N clients=N pinned=N
//! cold=N pace_us=N probe_us=N fill_bytes=N churn_bytes_per_s=N nodes_die=0|1 lie=N`.

mod churn;
mod content;
mod deposed;
mod flips;
mod ledger;
mod prober;
mod shared;
mod writer;

use std::collections::BTreeMap;
use std::env;
use std::io::BufRead as _;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use flips::{Flipped, Flips};
use ledger::Ledger;
use prober::{Probers, Times};
use shared::{Shared, say};
use store_client::{Client, ClientConfig, Fabrics, Masters, RpcConnection};
use te_core::testkit::Rng;
use writer::{Audited, Expected, Load, Order, Scope, Writer};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

/// How long an outage may last whose end is waited for.
const GAP_MAX: Duration = Duration::from_secs(60);

fn main() -> Result<()> {
    let words: BTreeMap<String, String> = env::args()
        .skip(1)
        .filter_map(|word| word.split_once('=').map(|(name, value)| (name.to_owned(), value.to_owned())))
        .collect();
    let word = |name: &str| words.get(name).map(String::as_str).ok_or(format!("say {name}=…"));
    let number = |name: &str| -> Result<u64> { Ok(word(name)?.parse()?) };
    let masters: Masters = word("masters")?.parse()?;
    let load = Load {
        pinned: number("pinned")? as usize,
        cold: number("cold")? as usize,
        pace: Duration::from_micros(number("pace_us")?),
        nodes_die: number("nodes_die")? != 0,
        lie: number("lie")?,
    };
    let mut clients = Clients::start(&masters, number("clients")?, number("seed")?, load, &number)?;
    say("ready");
    for line in std::io::stdin().lock().lines() {
        let line = line?;
        let words: Vec<&str> = line.split(' ').collect();
        if let Err(error) = clients.obey(&words) {
            say(&format!("refused {line}: {error}"));
        }
    }
    clients.end();
    Ok(())
}

/// The threads, and what is needed to ask them.
struct Clients {
    shared: Arc<Shared>,
    writers: Vec<Sender<Order>>,
    probers: Vec<Probers>,
    threads: Vec<JoinHandle<()>>,
    deposed: Option<RpcConnection>,
}

fn connect(masters: &Masters, which: u64) -> Result<Client> {
    let mut config = ClientConfig::new(masters.clone());
    // There are more threads than cores.
    config.rpc.spin_us = 0;
    config.engine.spin_us = 0;
    config.bounce_bytes = 1 << 20;
    if which % 2 == 1 {
        config = config.fabrics(Fabrics::TCP);
    }
    Ok(Client::connect(config)?)
}

impl Clients {
    fn start(
        masters: &Masters,
        clients: u64,
        seed: u64,
        load: Load,
        number: &dyn Fn(&str) -> Result<u64>,
    ) -> Result<Self> {
        let shared = Arc::new(Shared::default());
        let (mut writers, mut probers, mut threads) = (Vec::new(), Vec::new(), Vec::new());
        let pace = Duration::from_micros(number("probe_us")?);
        for who in 0..clients {
            let (sender, orders) = channel();
            let writer = Writer {
                who,
                client: connect(masters, who)?,
                rng: Rng::new(seed.wrapping_add(who)),
                load,
                shared: Arc::clone(&shared),
                ledger: Ledger::default(),
                cold_at: Instant::now(),
            };
            threads.push(thread::spawn(move || writer.run(&orders)));
            writers.push(sender);
            let three = [connect(masters, who)?, connect(masters, who)?, connect(masters, who)?];
            probers.push(Probers::start(who, three, pace, &shared));
        }
        let bytes_per_s = number("churn_bytes_per_s")?;
        if bytes_per_s > 0 {
            let (client, shared) = (connect(masters, 0)?, Arc::clone(&shared));
            let (rng, fill) = (Rng::new(!seed), number("fill_bytes")?);
            threads.push(thread::spawn(move || churn::run(client, rng, fill, bytes_per_s, &shared)));
        }
        let counting = Arc::clone(&shared);
        threads.push(thread::spawn(move || {
            while !counting.is_over() {
                counting.say_counts();
                thread::sleep(Duration::from_secs(1));
            }
        }));
        Ok(Self { shared, writers, probers, threads, deposed: None })
    }

    fn obey(&mut self, words: &[&str]) -> Result<()> {
        match *words {
            ["audit", which] => self.audit(which),
            ["expect"] => self.expect(),
            ["node-down", node] => {
                let node = node.parse()?;
                self.ask(|done| Order::NodeDown { node, done }, |(), ()| ());
                say("down");
            }
            ["node-up", node] => {
                let node = node.parse()?;
                self.tell(|| Order::NodeUp(node));
            }
            ["void-disks"] => self.tell(|| Order::VoidDisks),
            ["flip", count, ref paths @ ..] => {
                let count = count.parse::<usize>()?.div_ceil(self.writers.len().max(1));
                let flips = Flips { count, paths: paths.iter().map(PathBuf::from).collect() };
                let order = |done| Order::Flip { flips: flips.clone(), done };
                let sum = self.ask(order, |sum: &mut Flipped, one| {
                    sum.flips += one.flips;
                    sum.detected += one.detected;
                    sum.served += one.served;
                    sum.undetermined += one.undetermined;
                });
                let Flipped { flips, detected, served, undetermined } = sum;
                say(&format!(
                    "flipped flips={flips} detected={detected} served={served} undetermined={undetermined}"
                ));
            }
            ["window", from, to] => self.window(from.parse()?, to.parse()?, false),
            ["window-begun", from, to] => self.window(from.parse()?, to.parse()?, true),
            ["deposed", addr] => {
                let connected = deposed::connect(addr.parse()?);
                if let Err(error) = &connected {
                    say(&format!("note no connection to {addr} before it is stopped: {error}"));
                }
                self.deposed = connected.ok();
                say(&format!("deposed connected={}", u8::from(self.deposed.is_some())));
            }
            ["deposed-send"] => {
                if let Some(error) = self.deposed.as_mut().and_then(|rpc| deposed::send(rpc).err()) {
                    say(&format!("note nothing was sent to the master that is stopped: {error}"));
                }
                say("deposed");
            }
            ["deposed-read"] => {
                let answers = self.deposed.take().map_or(0, |mut rpc| deposed::answers(&mut rpc));
                say(&format!("deposed answers={answers}"));
            }
            _ => return Err("there is no such order".into()),
        }
        Ok(())
    }

    fn audit(&self, which: &str) {
        let scope = match which {
            "quick" => Scope::Quick,
            "live" => Scope::Live,
            _ => Scope::Full,
        };
        let sum = self.ask(
            |done| Order::Audit { scope, done },
            |sum: &mut Audited, one| {
                sum.read += one.read;
                sum.removed += one.removed;
                sum.lost += one.lost;
                sum.cold_lost += one.cold_lost;
                sum.resurrected += one.resurrected;
                sum.wrong += one.wrong;
                sum.gone += one.gone;
                sum.late += one.late;
                sum.failed += one.failed;
                sum.cold += one.cold;
            },
        );
        let Audited { read, removed, lost, cold_lost, resurrected, wrong, gone, late, failed, cold } = sum;
        say(&format!(
            "audited read={read} removed={removed} lost={lost} cold_lost={cold_lost} \
             resurrected={resurrected} wrong={wrong} gone={gone} late={late} failed={failed} cold={cold}"
        ));
    }

    fn expect(&self) {
        let sum = self.ask(
            |done| Order::Expect { done },
            |sum: &mut Expected, one| {
                sum.live += one.live;
                sum.must += one.must;
                sum.on_disk += one.on_disk;
            },
        );
        say(&format!("expected live={} must={} on_disk={}", sum.live, sum.must, sum.on_disk));
    }

    /// Gives every writer an order; returns the sum of the answers.
    fn ask<T: Default>(&self, order: impl Fn(Sender<T>) -> Order, add: impl Fn(&mut T, T)) -> T {
        let (done, results) = channel();
        self.writers.iter().for_each(|writer| drop(writer.send(order(done.clone()))));
        drop(done);
        let mut sum = T::default();
        results.iter().for_each(|one| add(&mut sum, one));
        sum
    }

    fn tell(&self, order: impl Fn() -> Order) {
        self.writers.iter().for_each(|writer| drop(writer.send(order())));
    }

    /// Prints the longest time without an answer, of each prober, µs.
    fn window(&self, from: u64, to: u64, begun: bool) {
        let deadline = Instant::now() + GAP_MAX;
        let gap = |times: &Times| loop {
            match times.longest_gap(from, to, begun) {
                Some(gap) => break gap,
                None if Instant::now() >= deadline => break GAP_MAX.as_nanos() as u64,
                None => thread::sleep(Duration::from_millis(10)),
            }
        };
        let list =
            |all: Vec<u64>| all.iter().map(|ns| (ns / 1_000).to_string()).collect::<Vec<_>>().join(",");
        let puts = list(self.probers.iter().map(|pair| gap(&pair.puts)).collect());
        let gets = list(self.probers.iter().map(|pair| gap(&pair.gets)).collect());
        say(&format!("gaps put={puts} get={gets}"));
    }

    fn end(self) {
        self.shared.end();
        self.probers.into_iter().for_each(Probers::join);
        self.threads.into_iter().for_each(|thread| drop(thread.join()));
        self.shared.say_counts();
        say("ended");
    }
}
