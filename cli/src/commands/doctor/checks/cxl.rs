//! CXL memory and pools.

use super::{Check, Judgement, fail, list, ok, skip, warn};
use crate::commands::doctor::facts::Facts;
use crate::dax::{Dax, Mode};

pub(super) const CHECKS: &[Check] = &[
    Check {
        name: "cxl memory",
        why: "A pool needs devdax; CXL memory that is a NUMA node is used as any other memory of the host.",
        judge: memory,
    },
    Check {
        name: "cxl pools",
        why: "Hosts reach each other's memory through the pools that all of them map.",
        judge: pools,
    },
];

fn memory(facts: &Facts) -> Judgement {
    let cxl = &facts.cxl;
    let idle: Vec<&Dax> = cxl.dax.iter().filter(|dax| dax.mode == Mode::Unused).collect();
    if let Some(first) = idle.first() {
        return warn(
            list(cxl.dax.iter().map(Dax::text)),
            (
                "make it a device that processes can map",
                format!("sudo daxctl reconfigure-device --mode=devdax {}", first.name),
            ),
        );
    }
    match (cxl.dax.is_empty(), cxl.devices) {
        (false, _) => ok(list(cxl.dax.iter().map(Dax::text))),
        (true, 0) => skip("no CXL memory"),
        (true, devices) => warn(
            format!("{devices} CXL memory devices, and no region of them"),
            (
                "make a region of the memory, and a devdax device of it",
                "sudo cxl create-region -m -d decoder0.0 mem0",
            ),
        ),
    }
}

fn pools(facts: &Facts) -> Judgement {
    if facts.cxl.pools.is_empty() {
        return skip("none named: `--pool PATH` examines one");
    }
    let text = |(path, found): &(String, Result<String, String>)| match found {
        Ok(found) | Err(found) => format!("{path}: {found}"),
    };
    let found = list(facts.cxl.pools.iter().map(text));
    match facts.cxl.pools.iter().find(|(_, found)| found.is_err()) {
        None => ok(found),
        Some((path, _)) => fail(
            found,
            (
                "name a devdax device or a file that has a pool, or make one",
                format!("snowskin cxl format {path}"),
            ),
        ),
    }
}
