//! The rows of the comparison, the programs that take part in each, and the ratios with bounds.

use super::Sample;
use std::fmt;

/// A program that can do the work of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Contestant {
    /// Snowskin over TCP.
    Tcp,
    /// Snowskin over shared memory.
    Shm,
    /// Snowskin through the package `mooncake`, as Mooncake's users call it: on one machine the bytes move
    /// through shared memory.
    Python,
    /// The same without shared memory.
    PythonTcp,
    /// Mooncake over TCP.
    Mooncake,
    /// NIXL with its UCX backend, over TCP.
    Nixl,
    /// `ucx_perftest` over TCP: no batches.
    Ucx,
    /// `redis-benchmark` over TCP.
    Redis,
    /// One stream of iperf3.
    Iperf,
    /// A copy within one process.
    Memcpy,
    /// Dynamo's indexer of KV blocks.
    Dynamo,
    /// The router of SGLang.
    Router,
}

impl Contestant {
    /// Whether it is Snowskin.
    pub(crate) fn is_ours(self) -> bool {
        matches!(self, Self::Tcp | Self::Shm) || self.is_our_package()
    }

    /// Whether it is Snowskin's package `mooncake`.
    pub(crate) fn is_our_package(self) -> bool {
        matches!(self, Self::Python | Self::PythonTcp)
    }

    /// The program's name.
    pub(crate) fn program(self) -> &'static str {
        match self {
            Self::Tcp | Self::Shm => "snowskin",
            Self::Python => "snowskin-python",
            Self::PythonTcp => "snowskin-python-tcp",
            Self::Mooncake => "mooncake",
            Self::Nixl => "nixl",
            Self::Ucx => "ucx",
            Self::Redis => "redis",
            Self::Iperf => "iperf3",
            Self::Memcpy => "memcpy",
            Self::Dynamo => "dynamo",
            Self::Router => "sglang-router",
        }
    }
}

impl fmt::Display for Contestant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Tcp => "snowskin tcp",
            Self::Shm => "snowskin shm",
            Self::Python => "snowskin python",
            Self::PythonTcp => "snowskin python tcp",
            other => other.program(),
        })
    }
}

/// One row: work that several programs do.
#[derive(Clone, Debug)]
pub(crate) enum Row {
    /// Blocks from or to another process's memory.
    Transfer { op: &'static str, block: u64, batch: u32 },
    /// Whole objects of the store.
    Store { op: &'static str, value: u64, batch: u32, plain: bool },
    /// Requests to the master.
    Master { op: &'static str, batch: u32 },
    /// `index`: blocks of engines' events, and queries with a long prompt. `proxy`: requests through a proxy
    /// to engines that answer at once; its latency is what the proxy adds to the time to the first token.
    Conductor { op: &'static str },
    /// The work of another row through this function of the package `mooncake`: the same script, with one
    /// package or the other.
    Python { call: &'static str, work: &'static Row },
}

impl Row {
    /// The name of the row, also for `--only`.
    pub(crate) fn name(&self) -> String {
        match *self {
            Self::Transfer { op, block, batch } => format!("transfer {op} {} x {batch}", size(block)),
            Self::Store { op, value, batch, plain } => {
                let buffers = if plain { "plain" } else { "registered" };
                format!("store {op} {} x {batch} {buffers}", size(value))
            }
            Self::Master { op, batch } => format!("master {op} x {batch}"),
            Self::Conductor { op } => format!("conductor {op}"),
            Self::Python { call, work: Self::Transfer { block: bytes, batch, .. } }
            | Self::Python { call, work: Self::Store { value: bytes, batch, .. } } => {
                format!("python {call} {} x {batch}", size(*bytes))
            }
            Self::Python { call, work } => format!("python {call}: {}", work.name()),
        }
    }

    /// The programs that take part.
    pub(crate) fn contestants(&self) -> Vec<Contestant> {
        use Contestant::{
            Dynamo, Iperf, Memcpy, Mooncake, Nixl, Python, PythonTcp, Redis, Router, Shm, Tcp, Ucx,
        };
        match *self {
            Self::Transfer { block, batch, .. } => {
                let mut all = vec![Tcp, Mooncake, Nixl];
                all.extend((batch == 1).then_some(Ucx));
                all.extend((block == 1 << 20 && batch == 16).then_some(Iperf));
                all.push(Shm);
                all.extend((batch == 1).then_some(Memcpy));
                all
            }
            Self::Store { plain: true, .. } => vec![Tcp, Redis, Shm, Mooncake],
            Self::Store { plain: false, .. } => vec![Tcp, Mooncake, Shm],
            Self::Master { .. } => vec![Tcp, Mooncake],
            Self::Conductor { op: "index" } => vec![Tcp, Dynamo],
            Self::Conductor { .. } => vec![Tcp, Router],
            Self::Python { .. } => vec![Python, Mooncake, PythonTcp],
        }
    }

    /// The ratios of this row with bounds.
    pub(crate) fn bounds(&self) -> Vec<Bound> {
        use Contestant::{Dynamo, Mooncake, Nixl, Python, PythonTcp, Redis, Router, Shm, Tcp, Ucx};
        let gb_s: Figure = ("GB/s", |sample| sample.gb_s);
        let p50: Figure = ("p50", |sample| sample.p50_us);
        let cpu: Figure = ("CPU-s/GiB", |sample| sample.cpu_s_per_gib);
        let items: Figure = ("items/s", |sample| sample.items_s);
        let at_least = |ours, theirs, of, bound| Bound { ours, theirs, of, at_least: true, bound };
        let at_most = |ours, theirs, of, bound| Bound { ours, theirs, of, at_least: false, bound };
        match *self {
            Self::Transfer { block: 4096, batch: 128, .. } => {
                vec![at_least(Tcp, Mooncake, gb_s, 10.0), at_most(Tcp, Mooncake, cpu, 0.5)]
            }
            Self::Transfer { block: 4096, batch: 1, .. } => {
                vec![at_most(Tcp, Nixl, p50, 1.0), at_most(Tcp, Ucx, p50, 1.0)]
            }
            Self::Transfer { block: 4096, .. } => vec![],
            Self::Transfer { batch, .. } => {
                let mut all = vec![
                    at_least(Tcp, Mooncake, gb_s, 2.0),
                    at_most(Tcp, Mooncake, cpu, 0.5),
                    at_least(Tcp, Nixl, gb_s, 1.5),
                ];
                all.extend((batch == 1).then_some(at_least(Tcp, Ucx, gb_s, 1.5)));
                all
            }
            Self::Store { op: "get" | "put", value: 4096, plain: false, .. } => {
                vec![at_most(Tcp, Mooncake, p50, 1.0 / 3.0)]
            }
            Self::Store { op: "get", value: 4096, plain: true, .. } => {
                vec![at_most(Tcp, Redis, p50, 1.5), at_most(Shm, Redis, p50, 0.5)]
            }
            Self::Store { op: "batch-get", value: 4096, plain, .. } => match plain {
                true => vec![at_least(Tcp, Redis, items, 1.0)],
                false => vec![at_least(Tcp, Mooncake, items, 10.0)],
            },
            Self::Store { op: "batch-put", value: 4096, plain: false, .. } => {
                vec![at_least(Tcp, Mooncake, items, 10.0)]
            }
            Self::Store { op, value: 0x10_0000, plain, .. } => match (op, plain) {
                ("get", false) => vec![at_least(Tcp, Mooncake, gb_s, 2.0)],
                ("get" | "put", true) => {
                    vec![at_least(Tcp, Redis, gb_s, 1.5), at_least(Shm, Redis, gb_s, 1.5)]
                }
                _ => vec![],
            },
            Self::Store { .. } => vec![],
            Self::Master { op: "memory", .. } => {
                vec![at_most(Tcp, Mooncake, ("bytes/object", |sample| sample.bytes_per_object), 0.5)]
            }
            Self::Master { .. } => vec![at_least(Tcp, Mooncake, items, 3.0)],
            Self::Conductor { op: "index" } => {
                let per_cpu_s: Figure = ("items/CPU-s", |sample| sample.items_per_cpu_s);
                vec![at_least(Tcp, Dynamo, per_cpu_s, 3.0), at_most(Tcp, Dynamo, p50, 0.5)]
            }
            Self::Conductor { .. } => {
                vec![at_least(Tcp, Router, items, 1.0), at_most(Tcp, Router, p50, 1.0)]
            }
            Self::Python { work, .. } => {
                let bound = |ours| match work {
                    Self::Transfer { .. } => at_least(ours, Mooncake, gb_s, 3.0),
                    Self::Store { batch: 1, value: 4096, .. } => at_most(ours, Mooncake, p50, 0.5),
                    Self::Store { batch: 1, .. } => at_least(ours, Mooncake, gb_s, 2.0),
                    _ => at_least(ours, Mooncake, items, 5.0),
                };
                [Python, PythonTcp].map(bound).into()
            }
        }
    }
}

type Figure = (&'static str, fn(&Sample) -> f64);

/// A ratio of ours to theirs, with its bound.
pub(crate) struct Bound {
    pub(crate) ours: Contestant,
    pub(crate) theirs: Contestant,
    pub(crate) of: Figure,
    at_least: bool,
    bound: f64,
}

impl Bound {
    /// Whether a ratio is within the bound.
    pub(crate) fn holds(&self, ratio: f64) -> bool {
        if self.at_least { ratio >= self.bound } else { ratio <= self.bound }
    }
}

impl fmt::Display for Bound {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let sign = if self.at_least { ">=" } else { "<=" };
        write!(f, "{sign} {}", (self.bound * 100.0).round() / 100.0)
    }
}

/// Every row.
pub(crate) fn rows() -> Vec<Row> {
    const BLOCKS: [u64; 4] = [4 << 10, 64 << 10, 1 << 20, 16 << 20];
    let mut rows = Vec::new();
    for block in BLOCKS {
        for batch in [1, 16, 128] {
            for op in ["read", "write"] {
                rows.push(Row::Transfer { op, block, batch });
            }
        }
    }
    for value in BLOCKS {
        for plain in [false, true] {
            for (op, batch) in [("get", 1), ("put", 1), ("batch-get", 32), ("batch-put", 32)] {
                rows.push(Row::Store {
                    op,
                    value,
                    batch: if value > 1 << 20 { batch.min(8) } else { batch },
                    plain,
                });
            }
        }
    }
    rows.push(Row::Master { op: "exists", batch: 128 });
    rows.push(Row::Master { op: "put", batch: 128 });
    rows.push(Row::Master { op: "memory", batch: 128 });
    rows.extend(["index", "proxy"].map(|op| Row::Conductor { op }));
    rows.extend(PYTHON.map(|(call, work)| Row::Python { call, work }));
    rows
}

/// The functions of the package `mooncake` that are compared.
const PYTHON: [(&str, &Row); 6] = [
    ("get", &Row::Store { op: "get", value: 4 << 10, batch: 1, plain: true }),
    ("put", &Row::Store { op: "put", value: 4 << 10, batch: 1, plain: true }),
    ("batch_get_into", &Row::Store { op: "batch-get", value: 4 << 10, batch: 32, plain: false }),
    ("batch_put_from", &Row::Store { op: "batch-put", value: 4 << 10, batch: 32, plain: false }),
    ("get_into", &Row::Store { op: "get", value: 1 << 20, batch: 1, plain: false }),
    ("batch_transfer_sync_write", &Row::Transfer { op: "write", block: 64 << 10, batch: 128 }),
];

/// A size such as `4KiB`, as the options of `snowskin` accept it.
pub(crate) fn size(bytes: u64) -> String {
    match bytes {
        0..1024 => format!("{bytes}B"),
        1024..0x10_0000 => format!("{}KiB", bytes >> 10),
        _ => format!("{}MiB", bytes >> 20),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_bound_compares_two_participants() {
        for row in rows() {
            for bound in row.bounds() {
                let all = row.contestants();
                assert!(all.contains(&bound.ours) && all.contains(&bound.theirs), "{}", row.name());
                assert!(bound.ours.is_ours() && !bound.theirs.is_ours(), "{}", row.name());
            }
        }
    }

    #[test]
    fn rows_have_names_of_their_own() {
        let mut names: Vec<_> = rows().iter().map(Row::name).collect();
        let count = names.len();
        names.sort();
        names.dedup();
        assert_eq!(names.len(), count);
    }

    #[test]
    fn a_bound_holds_on_its_own_side() {
        let of: Figure = ("GB/s", |sample| sample.gb_s);
        let bound =
            |at_least| Bound { ours: Contestant::Tcp, theirs: Contestant::Redis, of, at_least, bound: 2.0 };
        assert!(bound(true).holds(2.0) && !bound(true).holds(1.9));
        assert!(bound(false).holds(2.0) && !bound(false).holds(2.1));
    }
}
