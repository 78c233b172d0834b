//! Hit rates without moving data: runs the requests of a trace against the master's own state machine, once
//! per policy and capacity.
//!
//! It is the code of a master, not a model of it: a [`Master`] with one segment that holds as many minimal
//! objects as the pool has blocks. Each request looks up its prefix, then gets the blocks that exist and puts
//! those that are missing, block by block in the order of the prefix; a lease expires before the next
//! request.
//!
//! A real client puts in batches, so that a block that it writes is not evicted for a later one of the same
//! batch. That makes a difference for SIEVE (with small pools it hits up to three percentage points more
//! often), and hardly any for the other policies.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use serde::Serialize;
use store_core::allocator::GRAIN_BYTES;
use store_core::chunks::stored_len;
use store_core::message::{MountSegment, PutOptions, PutRequest};
use store_core::{
    BatchOrder, ErrorCode, EvictionPolicy, Incarnation, Instant, Key, Master, MasterConfig, NodeId, Place,
};

use super::belady;
use super::disks::Shape;
use super::simulated_disk::SimulatedDisk;
use crate::exit::Failure;
use crate::fail;
use crate::output::{Align, Table, rounded, thousands};
use crate::progress::Bar;
use crate::sys;
use crate::trace::Request;

/// Tokens per block, as in the published traces.
pub(super) const BLOCK_TOKENS: u64 = 512;

/// A number of tokens: `3.0M` is three million.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Tokens(u64);

impl Tokens {
    pub(super) const fn of_blocks(blocks: u64) -> Self {
        Self(blocks * BLOCK_TOKENS)
    }

    /// Number of blocks that fit; at least one.
    pub(super) fn blocks(self) -> u64 {
        (self.0 / BLOCK_TOKENS).max(1)
    }

    pub(super) const fn of(tokens: u64) -> Self {
        Self(tokens)
    }

    pub(super) const fn count(self) -> u64 {
        self.0
    }
}

impl std::fmt::Display for Tokens {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (unit, suffix) = match self.0 {
            1_000_000_000.. => (1e9, "G"),
            1_000_000.. => (1e6, "M"),
            1_000.. => (1e3, "k"),
            _ => return self.0.fmt(f),
        };
        let text = format!("{:.2}", self.0 as f64 / unit);
        write!(f, "{}{suffix}", text.trim_end_matches('0').trim_end_matches('.'))
    }
}

impl std::str::FromStr for Tokens {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("{text:?} is not a number of tokens: write it as 3.0M, 512k or 1500000");
        let (number, unit) = match text.trim().char_indices().last() {
            Some((at, 'k' | 'K')) => (&text.trim()[..at], 1e3),
            Some((at, 'M')) => (&text.trim()[..at], 1e6),
            Some((at, 'G')) => (&text.trim()[..at], 1e9),
            _ => (text.trim(), 1.0),
        };
        let tokens = number.parse::<f64>().map_err(|_| wrong())? * unit;
        // With more, minimal objects no longer fit into a segment.
        if (1.0..=1e15).contains(&tokens) { Ok(Self(tokens.round() as u64)) } else { Err(wrong()) }
    }
}

/// The runs to compute.
#[derive(Clone, Debug)]
pub(super) struct Plan {
    pub(super) policies: Vec<EvictionPolicy>,
    /// Empty: shares of the trace's blocks.
    pub(super) capacities: Vec<Tokens>,
    /// Disks under each pool, in addition to no disk.
    pub(super) disks: Vec<Tokens>,
    /// How disks are used.
    pub(super) tier: Tier,
    pub(super) quiet: bool,
}

/// How disks are used.
#[derive(Clone, Copy, Debug)]
pub(super) struct Tier {
    /// Nodes that share the pool and the disks.
    pub(super) nodes: u16,
    pub(super) block_bytes: u64,
    /// Most blocks that are written per block reference; [`f64::MAX`]: as many as there are.
    pub(super) writes_max: f64,
}

impl Tier {
    /// One node, and blocks like those of a small model, so that what belongs to the format is as rare as it
    /// is in truth.
    pub(super) const DEFAULT: Self = Self { nodes: 1, block_bytes: 1 << 20, writes_max: f64::MAX };

    /// The disk of each node, if all together have so many tokens.
    pub(super) fn shape(&self, disks: Tokens) -> anyhow::Result<Shape> {
        Shape::of_blocks(disks.blocks().div_ceil(self.nodes.into()), self.block_bytes)
    }
}

/// The results. Field names are those of the JSON output.
#[derive(Clone, Debug, Default, Serialize)]
pub(super) struct Simulation {
    /// Always true: no data was moved.
    pub(super) simulated: bool,
    pub(super) requests: u64,
    pub(super) block_refs: u64,
    pub(super) distinct_blocks: u64,
    pub(super) block_tokens: u64,
    /// Hit rate with unlimited capacity.
    pub(super) hit_rate_unlimited: f64,
    pub(super) capacities_tokens: Vec<u64>,
    pub(super) rows: Vec<Row>,
    pub(super) interrupted: bool,
}

/// One policy, with one disk or none, at every capacity.
#[derive(Clone, Debug, Default, Serialize)]
pub(super) struct Row {
    pub(super) policy: &'static str,
    /// Capacity of the disk; none without a disk.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) disk_tokens: Option<u64>,
    /// Hits in memory or on the disk.
    pub(super) hit_rates: Vec<f64>,
    /// Of these, hits in memory; only with a disk.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) memory_hit_rates: Vec<f64>,
    /// Blocks written to the disk, per block reference; only with a disk.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) disk_writes_per_ref: Vec<f64>,
}

impl Row {
    /// The name of the row in tables and plots.
    pub(super) fn label(&self) -> String {
        let name = if self.policy == BELADY { "belady (bound)" } else { self.policy };
        match self.disk_tokens {
            None => name.to_owned(),
            Some(tokens) => format!("{name} + disk {}", Tokens::of(tokens)),
        }
    }
}

/// One run.
#[derive(Clone, Copy, Debug)]
struct Job {
    /// `None`: Belady's bound.
    policy: Option<EvictionPolicy>,
    disk: Option<Tokens>,
    capacity: Tokens,
}

/// What one run has counted, in blocks.
#[derive(Clone, Copy, Debug, Default)]
struct Counts {
    hits: u64,
    memory_hits: u64,
    disk_writes: u64,
}

/// The name of Belady's row.
pub(super) const BELADY: &str = "belady";

/// Runs all combinations, on all cores.
pub(super) fn run(
    requests: impl Iterator<Item = anyhow::Result<Request>>,
    plan: &Plan,
) -> anyhow::Result<Simulation> {
    // Before the time that it takes to read the trace.
    plan.disks.iter().try_for_each(|disks| plan.tier.shape(*disks).map(drop))?;
    let trace = Trace::read(requests, plan.quiet)?;
    let capacities = if plan.capacities.is_empty() { trace.capacities() } else { plan.capacities.clone() };
    let mut jobs: Vec<Job> = Vec::new();
    for policy in plan.policies.iter().copied().map(Some).chain([None]) {
        // No schedule is known to be the best one for two tiers.
        let disks = if policy.is_some() { &*plan.disks } else { &[] };
        for disk in std::iter::once(None).chain(disks.iter().copied().map(Some)) {
            jobs.extend(capacities.iter().map(|capacity| Job { policy, disk, capacity: *capacity }));
        }
    }
    let results = run_jobs(&trace, &jobs, plan)?;
    let rate = |hits: u64| rounded(hits as f64 / trace.block_refs.max(1) as f64);
    let rows = results
        .chunks(capacities.len())
        .zip(jobs.chunks(capacities.len()))
        .map(|(counts, jobs)| {
            let of_disk = |count: fn(&Counts) -> u64| match jobs[0].disk {
                None => Vec::new(),
                Some(_) => counts.iter().map(|counts| rate(count(counts))).collect(),
            };
            Row {
                policy: jobs[0].policy.map_or(BELADY, EvictionPolicy::name),
                disk_tokens: jobs[0].disk.map(Tokens::count),
                hit_rates: counts.iter().map(|counts| rate(counts.hits)).collect(),
                memory_hit_rates: of_disk(|counts| counts.memory_hits),
                disk_writes_per_ref: of_disk(|counts| counts.disk_writes),
            }
        })
        .collect();
    Ok(Simulation {
        simulated: true,
        requests: trace.requests.len() as u64,
        block_refs: trace.block_refs,
        distinct_blocks: trace.distinct as u64,
        block_tokens: BLOCK_TOKENS,
        hit_rate_unlimited: rate(belady::hits(&trace.requests, trace.distinct, usize::MAX, || true)),
        capacities_tokens: capacities.iter().map(|tokens| tokens.count()).collect(),
        rows,
        interrupted: sys::interrupted().is_some(),
    })
}

impl Simulation {
    /// The table for people.
    pub(super) fn table(&self) -> String {
        let mut columns = vec![("hit rate, %", Align::Left)];
        columns.extend(self.capacities_tokens.iter().map(|_| ("", Align::Right)));
        let mut table = Table::new(&columns);
        let label = |tokens: &u64| format!("{} tokens", Tokens::of(*tokens));
        table.row([String::new()].into_iter().chain(self.capacities_tokens.iter().map(label)));
        for row in &self.rows {
            let percent = |rate: &f64| format!("{:.1}", rate * 100.0);
            table.row([row.label()].into_iter().chain(row.hit_rates.iter().map(percent)));
            if row.disk_tokens.is_some() {
                let in_memory = "  of it in memory".to_owned();
                table.row([in_memory].into_iter().chain(row.memory_hit_rates.iter().map(percent)));
                let writes = row.disk_writes_per_ref.iter().map(|writes| format!("{writes:.2}"));
                table.row(["  disk writes per reference".to_owned()].into_iter().chain(writes));
            }
        }
        let cut = if self.interrupted { "\nInterrupted: these figures are incomplete." } else { "" };
        format!(
            "{}\nSimulated: {} requests, {} block references, {} distinct blocks of {} tokens; {:.1} % with \
            unlimited capacity.{cut}\n",
            table.render(),
            thousands(self.requests),
            thousands(self.block_refs),
            thousands(self.distinct_blocks),
            self.block_tokens,
            self.hit_rate_unlimited * 100.0,
        )
    }
}

/// Requests with their blocks numbered from 0.
#[derive(Debug)]
struct Trace {
    requests: Vec<Vec<u32>>,
    distinct: usize,
    block_refs: u64,
}

impl Trace {
    fn read(requests: impl Iterator<Item = anyhow::Result<Request>>, quiet: bool) -> anyhow::Result<Self> {
        let _bar = Bar::spinner("reading the trace", quiet);
        let mut numbers: HashMap<u64, u32> = HashMap::new();
        let mut trace = Self { requests: Vec::new(), distinct: 0, block_refs: 0 };
        for request in requests {
            let request = request?;
            let mut blocks = Vec::with_capacity(request.hash_ids.len());
            for id in request.hash_ids {
                let Ok(next) = u32::try_from(numbers.len()) else {
                    return fail(Failure::failed("the trace has more than 4 billion blocks"));
                };
                blocks.push(*numbers.entry(id).or_insert(next));
            }
            trace.block_refs += blocks.len() as u64;
            trace.requests.push(blocks);
            if let Some(exit) = sys::interrupted() {
                return fail(Failure::silent(exit));
            }
        }
        trace.distinct = numbers.len();
        if trace.block_refs == 0 {
            return fail(
                Failure::failed("the trace has no blocks")
                    .hint("write one JSON object per line; see `snowskin replay --help`"),
            );
        }
        Ok(trace)
    }

    /// Capacities from 1/32 of the trace's blocks to all of them.
    fn capacities(&self) -> Vec<Tokens> {
        (0..6).rev().map(|halvings| Tokens::of_blocks((self.distinct as u64 >> halvings).max(1))).collect()
    }
}

/// What each job has counted, in the order of the jobs.
fn run_jobs(trace: &Trace, jobs: &[Job], plan: &Plan) -> anyhow::Result<Vec<Counts>> {
    let bar = Bar::new((trace.requests.len() * jobs.len()) as u64, "requests", plan.quiet);
    let (next, done) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let each = || {
        let done = done.fetch_add(1, Ordering::Relaxed) + 1;
        if done.is_multiple_of(1024) {
            bar.set(done as u64);
        }
        sys::interrupted().is_none()
    };
    let work = || -> anyhow::Result<Vec<(usize, Counts)>> {
        let mut results = Vec::new();
        loop {
            let job = next.fetch_add(1, Ordering::Relaxed);
            let Some(Job { policy, disk, capacity }) = jobs.get(job) else { return Ok(results) };
            let blocks = capacity.blocks();
            let counts = match policy {
                Some(policy) => {
                    Pool::new(*policy, blocks, disk.map(|disk| (plan.tier, disk)))?.run(trace, each)?
                }
                None => {
                    let hits = belady::hits(&trace.requests, trace.distinct, blocks as usize, each);
                    Counts { hits, memory_hits: hits, disk_writes: 0 }
                }
            };
            results.push((job, counts));
        }
    };
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(jobs.len());
    let parts = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        threads.into_iter().map(|thread| thread.join()).collect::<Vec<_>>()
    });
    let mut counts = vec![Counts::default(); jobs.len()];
    for part in parts {
        let part = part
            .map_err(|_| Failure::failed("a simulation panicked; please report the trace that caused it"))?;
        part?.into_iter().for_each(|(job, of_job)| counts[job] = of_job);
    }
    Ok(counts)
}

/// A master with a pool of this many blocks, perhaps disks, and a single client.
struct Pool {
    master: Master,
    /// The disk of each node, if there are disks.
    disks: Vec<SimulatedDisk>,
    /// Most blocks that all disks together write per block reference.
    writes_max: f64,
    /// Bytes of a block.
    block_bytes: u64,
    now: Instant,
    present: Vec<bool>,
    missing: Vec<[u8; 4]>,
}

impl Pool {
    /// Longer than any lease below.
    const BETWEEN_REQUESTS: Duration = Duration::from_millis(2);

    fn new(policy: EvictionPolicy, blocks: u64, disks: Option<(Tier, Tokens)>) -> anyhow::Result<Self> {
        let tier = disks.map_or(Tier { block_bytes: 1, ..Tier::DEFAULT }, |(tier, _)| tier);
        let nodes = u64::from(tier.nodes);
        let len = blocks.div_ceil(nodes) * stored_len(tier.block_bytes).next_multiple_of(GRAIN_BYTES);
        let config = MasterConfig {
            eviction: policy,
            eviction_high_watermark: 1.0,
            eviction_ratio: 0.0,
            lease_ttl_ms: 1,
            lease_guard_ms: 0,
            segment_bytes_max: len.max(MasterConfig::default().segment_bytes_max),
            ..MasterConfig::default()
        };
        let mut this = Self {
            master: Master::new(config)?,
            disks: Vec::new(),
            writes_max: tier.writes_max,
            block_bytes: tier.block_bytes,
            now: Instant::from_millis(1),
            present: Vec::new(),
            missing: Vec::new(),
        };
        for node in (1..=nodes).map(NodeId::new) {
            // A segment with the name of another one takes its place.
            let name = format!("simulated-{node}");
            let segment = MountSegment {
                node,
                incarnation: Incarnation::new(1),
                name: &name,
                endpoint: "nowhere:0",
                len,
                ..MountSegment::default()
            };
            this.master.mount(this.now, &segment)?;
            if let Some((tier, disks)) = disks {
                let disk = SimulatedDisk::new(&mut this.master, this.now, node, tier.shape(disks)?)?;
                this.disks.push(disk);
            }
        }
        Ok(this)
    }

    fn run(&mut self, trace: &Trace, mut each: impl FnMut() -> bool) -> anyhow::Result<Counts> {
        let mut counts = Counts::default();
        for request in &trace.requests {
            let (hits, memory_hits) = self.request(request)?;
            counts.hits += hits;
            counts.memory_hits += memory_hits;
            let allowed = self.writes_max * request.len() as f64 / self.disks.len().max(1) as f64;
            for disk in &mut self.disks {
                disk.allow(allowed);
                disk.work(&mut self.master, self.now)?;
            }
            if !each() {
                break;
            }
        }
        counts.disk_writes = self.disks.iter().map(|disk| disk.written).sum();
        Ok(counts)
    }

    /// Serves one request; returns the length of its cached prefix, and how many of its blocks were in
    /// memory.
    fn request(&mut self, blocks: &[u32]) -> anyhow::Result<(u64, u64)> {
        self.now = self.now + Self::BETWEEN_REQUESTS;
        let (master, now) = (&mut self.master, self.now);
        let keys = || blocks.iter().map(|block| block.to_le_bytes());
        self.present.clear();
        self.present.extend(keys().map(|key| master.exists(&key)));
        let prefix = self.present.iter().take_while(|present| **present).count();
        // The answer that a batch of the missing blocks would get.
        self.missing.clear();
        self.missing.extend(keys().zip(&self.present).filter(|(_, present)| !**present).map(|(key, _)| key));
        let returning = master.returning(self.missing.iter().map(|key| Key(key)));
        let disks = &self.disks;
        let is_disk = |no| disks.iter().any(|disk| disk.no() == no);
        let (mut put, mut in_memory) = (0, 0);
        for (at, key) in keys().enumerate() {
            if self.present[at] {
                // A block that was evicted for another block of the same request is put again.
                if let Ok(object) = master.get_in(now, &key, BatchOrder::of(at)) {
                    let is_on_disk = object.replicas.iter().any(|replica| is_disk(replica.segment));
                    in_memory += u64::from(at < prefix && !is_on_disk);
                    continue;
                }
            }
            let place = Place::new(put, self.missing.len(), returning);
            let place = Place { follows: at > 0, ..place };
            put += 1;
            match master.put_start_in(
                now,
                &key,
                self.block_bytes,
                &PutRequest::once(PutOptions::DEFAULT),
                place,
            ) {
                Ok(allocation) => {
                    master.put_end_in(now, &key, allocation.generation, 0, BatchOrder::of(at))?
                }
                // All other blocks are leased, or the request contains a block twice.
                Err(ErrorCode::ObjectAlreadyExists) => {}
                Err(code) if code.is_no_room() => {}
                Err(code) => return Err(code.into()),
            }
        }
        Ok((prefix as u64, in_memory))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn trace(requests: &[&[u64]]) -> impl Iterator<Item = anyhow::Result<Request>> {
        let request = |ids: &&[u64]| Ok(Request { hash_ids: ids.to_vec(), ..Request::default() });
        requests.iter().map(request).collect::<Vec<_>>().into_iter()
    }

    fn simulate(requests: &[&[u64]], blocks: u64) -> Simulation {
        let plan = Plan {
            policies: EvictionPolicy::ALL.to_vec(),
            capacities: vec![Tokens::of_blocks(blocks)],
            disks: Vec::new(),
            tier: Tier::DEFAULT,
            quiet: true,
        };
        run(trace(requests), &plan).unwrap()
    }

    fn rate(simulation: &Simulation, policy: &str) -> f64 {
        simulation.rows.iter().find(|row| row.policy == policy).unwrap().hit_rates[0]
    }

    #[test]
    fn each_policy_hits_what_can_be_counted_by_hand() {
        // Room for three. 0 is read again before the pool is full, then 3 and 4 evict others.
        let requests: &[&[u64]] = &[&[0], &[0], &[1], &[2], &[3], &[4], &[0], &[2]];
        let simulation = simulate(requests, 3);
        // First in, first out: 3 evicts 0, 4 evicts 1, 0 evicts 2.
        assert_eq!(rate(&simulation, "fifo"), 0.125);
        // Least recently used: 3 evicts 0, 4 evicts 1, 0 evicts 2.
        assert_eq!(rate(&simulation, "lru"), 0.125);
        // The hand passes 0 and evicts 1 for 3 and 2 for 4: 0 hits again, 2 does not.
        assert_eq!(rate(&simulation, "sieve"), 0.25);
        // 0 has been used again: 3 evicts 1, 4 evicts 2.
        assert_eq!(rate(&simulation, "trial"), 0.25);
        // 3 evicts 1, 4 evicts 3.
        assert_eq!(rate(&simulation, "belady"), 0.375);
        assert_eq!(simulation.hit_rate_unlimited, 0.375);
        assert_eq!((simulation.requests, simulation.block_refs, simulation.distinct_blocks), (8, 8, 5));
    }

    #[test]
    fn only_the_longest_cached_prefix_counts() {
        let requests: &[&[u64]] = &[&[1, 2, 3], &[1, 9, 3], &[8, 1, 2], &[1, 2, 3, 4]];
        let simulation = simulate(requests, 100);
        for policy in EvictionPolicy::ALL {
            assert_eq!(rate(&simulation, policy.name()), rounded((1 + 3) as f64 / 13.0), "{policy}");
        }
    }

    #[test]
    fn a_request_longer_than_the_pool_does_no_harm() {
        let long: Vec<u64> = (0..50).collect();
        let simulation = simulate(&[&long, &long, &[0]], 8);
        assert!(simulation.rows.iter().all(|row| row.hit_rates[0] < 0.4), "{simulation:?}");
    }

    /// The workload chooses by recency, which favours LRU.
    #[test]
    fn where_recency_rules_trial_stays_near_lru_and_no_policy_passes_belady() {
        let plan = Plan {
            policies: EvictionPolicy::ALL.to_vec(),
            capacities: vec![Tokens::of_blocks(300), Tokens::of_blocks(1_000)],
            disks: Vec::new(),
            tier: Tier::DEFAULT,
            quiet: true,
        };
        let workload = crate::workload::Workload::new(7, Default::default()).map(Ok).take(3_000);
        let simulation = run(workload, &plan).unwrap();
        let rates = |name| &simulation.rows.iter().find(|row| row.policy == name).unwrap().hit_rates;
        for at in 0..2 {
            assert!(rates("trial")[at] > rates("lru")[at] - 0.02, "{simulation:?}");
            assert!(rates("trial")[at] > rates("fifo")[at] && rates("trial")[at] > rates("sieve")[at]);
            assert!(EvictionPolicy::ALL.iter().all(|policy| rates(policy.name())[at] <= rates(BELADY)[at]));
        }
    }

    #[test]
    fn prefixes_that_come_back_survive_prompts_that_do_not() {
        // 20 prefixes of 5 blocks recur forever, and between any two of them comes a prompt of 10 blocks that
        // never recurs: a prefix recurs after 300 blocks, with room for 200. LRU and FIFO have always just
        // evicted it.
        let mut requests = Vec::new();
        for number in 0..1_000u64 {
            requests.push((0..5).map(|block| number % 20 * 5 + block).collect::<Vec<u64>>());
            requests.push((0..10).map(|block| 1_000 + number * 10 + block).collect());
        }
        let requests: Vec<&[u64]> = requests.iter().map(Vec::as_slice).collect();
        let simulation = simulate(&requests, 200);
        assert_eq!((rate(&simulation, "lru"), rate(&simulation, "fifo")), (0.0, 0.0));
        // All blocks of the prefixes, except in the first rounds.
        let most = 1.0 / 3.0;
        assert!(
            rate(&simulation, "trial") > 0.9 * most && rate(&simulation, "trial") < most,
            "{simulation:?}"
        );
    }

    /// 1,000 blocks, of which requests for 10 come in turn, four times: more than fit into memory, so that no
    /// policy that goes by recency hits.
    fn simulate_with_disk(tier: Tier, policies: &[EvictionPolicy]) -> Simulation {
        let plan = Plan {
            policies: policies.to_vec(),
            capacities: vec![Tokens::of_blocks(200)],
            disks: vec![Tokens::of_blocks(6_000)],
            tier,
            quiet: true,
        };
        let requests = (0..400).map(|number| (0..10).map(|block| number % 100 * 10 + block).collect());
        let request = |hash_ids: Vec<u64>| Ok(Request { hash_ids, ..Request::default() });
        run(requests.map(request), &plan).unwrap()
    }

    #[test]
    fn what_no_longer_fits_into_memory_is_hit_on_the_disk_and_each_run_gives_the_same() {
        let simulation = simulate_with_disk(Tier::DEFAULT, EvictionPolicy::ALL);
        for policy in EvictionPolicy::ALL {
            let mut rows = simulation.rows.iter().filter(|row| row.policy == policy.name());
            let (without, with) = (rows.next().unwrap(), rows.next().unwrap());
            assert_eq!((without.disk_tokens, with.disk_tokens), (None, Some(6_000 * BLOCK_TOKENS)));
            assert!(without.hit_rates[0] < 0.2 && without.memory_hit_rates.is_empty(), "{without:?}");
            // All but the first of four rounds; TRIAL does not copy the last block of a request.
            assert!((0.6..=0.75).contains(&with.hit_rates[0]), "{with:?}");
            assert!(with.memory_hit_rates[0] < 0.5 && with.disk_writes_per_ref[0] < 0.4, "{with:?}");
        }
        let text = |simulation: &Simulation| {
            format!("{}{}", serde_json::to_string(simulation).unwrap(), simulation.table())
        };
        let again = simulate_with_disk(Tier::DEFAULT, EvictionPolicy::ALL);
        assert_eq!(text(&simulation), text(&again));
        assert!(simulation.table().contains("lru + disk 3.07M"), "{}", simulation.table());
    }

    #[test]
    fn nodes_share_the_pool_and_the_disks() {
        let tier = Tier { nodes: 3, block_bytes: 4_096, ..Tier::DEFAULT };
        let simulation = simulate_with_disk(tier, &[EvictionPolicy::Lru]);
        assert!(simulation.rows[1].hit_rates[0] > 0.7, "{simulation:?}");
    }

    #[test]
    fn a_limit_on_writes_is_kept_and_costs_hits() {
        let tier = Tier { writes_max: 0.1, ..Tier::DEFAULT };
        let limited = &simulate_with_disk(tier, &[EvictionPolicy::Lru]).rows[1];
        assert!((0.05..=0.1).contains(&limited.disk_writes_per_ref[0]), "{limited:?}");
        assert!(limited.hit_rates[0] < 0.5, "{limited:?}");
        let none = Tier { writes_max: 0.0, ..Tier::DEFAULT };
        let none = &simulate_with_disk(none, &[EvictionPolicy::Lru]).rows[1];
        assert_eq!((none.disk_writes_per_ref[0], none.hit_rates[0]), (0.0, 0.0), "{none:?}");
    }

    #[test]
    fn tokens_are_read_and_printed_with_units() {
        for (text, tokens, printed) in [
            ("3.0M", 3_000_000, "3M"),
            ("5.12M", 5_120_000, "5.12M"),
            ("512k", 512_000, "512k"),
            ("700", 700, "700"),
            ("1.5G", 1_500_000_000, "1.5G"),
        ] {
            let parsed: Tokens = text.parse().unwrap();
            assert_eq!((parsed.count(), parsed.to_string().as_str()), (tokens, printed));
        }
        assert_eq!("3.0M".parse::<Tokens>().unwrap().blocks(), 5_859);
        for wrong in ["", "M", "-3M", "0", "nanM", "1e300", "3.0MiB"] {
            assert!(wrong.parse::<Tokens>().unwrap_err().contains("3.0M"), "{wrong}");
        }
    }
}
