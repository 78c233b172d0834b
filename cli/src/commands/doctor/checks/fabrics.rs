//! The fabrics of the engine's registry: whether each is used, and whether the host has what it needs.
//!
//! A fabric gets its finding from its entry in the registry. A need that another check examines in detail is
//! left to that check, which the finding names: without it the fabric is skipped, and that check says why.

use te_engine::{FabricEntry, HostNeed};

use super::{Finding, Fix, Judgement, Verdict, fail, list, memory, ok, skip};
use crate::commands::doctor::facts::Facts;

const WHY: &str = "Data moves over the nearest fabric that both ends have.";

/// One finding per entry of the registry.
pub(super) fn findings(area: &'static str, facts: &Facts) -> impl Iterator<Item = Finding> {
    te_engine::fabrics().iter().map(move |entry| {
        let Judgement { verdict, found, fix } = judge(entry, facts);
        Finding { area, check: entry.name, verdict, found, why: WHY, fix }
    })
}

fn judge(entry: &FabricEntry<'_>, facts: &Facts) -> Judgement {
    if !entry.is_built() {
        return skip("not part of this build");
    }
    if !facts.fabrics.uses(entry) {
        return skip(format!("not used with --fabric {}", facts.fabrics));
    }
    let missing =
        facts.missing.iter().find(|(need, _)| entry.needs.contains(need) && check_of(need).is_none());
    match missing {
        Some((need, what)) if facts.fabrics.named().any(|named| named.name == entry.name) => {
            fail(what.clone(), fix_of(need))
        }
        Some((_, what)) => skip(what.clone()),
        None => {
            let unmet: Vec<_> =
                entry.needs.iter().filter(|need| is_unmet(need, facts)).filter_map(check_of).collect();
            if !unmet.is_empty() {
                return skip(format!("cannot start on this host: see {}", list(unmet)));
            }
            let checks: Vec<_> = entry.needs.iter().filter_map(check_of).collect();
            let see = if checks.is_empty() { String::new() } else { format!(" (see {})", list(checks)) };
            ok(format!("{}{see}", entry.about))
        }
    }
}

/// Whether the host lacks this, as far as known.
fn is_unmet(need: &HostNeed, facts: &Facts) -> bool {
    match need {
        HostNeed::Network => matches!(facts.loopback, Some(Err(_))),
        HostNeed::SharedMemory => matches!(facts.memfd, Some(Err(_))),
        HostNeed::LockedMemory => memory::memlock(facts).verdict == Verdict::Fail,
        HostNeed::Pools => {
            facts.cxl.pools.is_empty() || facts.cxl.pools.iter().any(|(_, pool)| pool.is_err())
        }
        need => facts.missing.iter().any(|(missing, _)| missing == need),
    }
}

/// The check that examines a need in detail, if there is one.
fn check_of(need: &HostNeed) -> Option<&'static str> {
    match need {
        HostNeed::Network => Some("tcp over loopback"),
        HostNeed::SharedMemory => Some("memfd"),
        HostNeed::LockedMemory => Some("locked memory"),
        HostNeed::Library("libibverbs.so.1") => Some("libibverbs"),
        HostNeed::DeviceClass("infiniband") => Some("rdma devices"),
        HostNeed::Pools => Some("cxl pools"),
        _ => None,
    }
}

fn fix_of(need: &HostNeed) -> Fix {
    match need {
        HostNeed::Library(name) => Fix::from(format!("install the package that contains {name}").as_str()),
        _ => Fix::from("check that the device is present and its driver is loaded"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::commands::doctor::facts::RDMA_DEVICE;

    #[test]
    fn every_fabric_of_the_registry_has_a_finding_and_its_checks_exist() {
        let facts = Facts::default();
        let found: Vec<Finding> = findings("fabrics", &facts).collect();
        assert_eq!(found.len(), te_engine::fabrics().len());
        let all = super::super::run(&facts);
        for entry in te_engine::fabrics() {
            for check in entry.needs.iter().filter_map(check_of) {
                assert!(all.iter().any(|finding| finding.check == check), "{check}");
            }
        }
    }

    #[test]
    fn a_fabric_without_a_need_that_has_a_check_is_skipped_and_names_the_check() {
        let lacks: [(&str, HostNeed, Facts); 4] = [
            ("tcp", HostNeed::Network, Facts { loopback: Some(Err("down".into())), ..Facts::default() }),
            ("shm", HostNeed::SharedMemory, Facts { memfd: Some(Err(libc::EPERM)), ..Facts::default() }),
            ("rdma", HostNeed::LockedMemory, Facts { memlock: Some(65_536), ..Facts::default() }),
            ("rdma", RDMA_DEVICE, Facts { missing: vec![(RDMA_DEVICE, "none".into())], ..Facts::default() }),
        ];
        for (name, need, facts) in lacks {
            let entry = te_engine::fabrics().iter().find(|entry| entry.name == name).unwrap();
            assert!(entry.needs.contains(&need), "{name}");
            if !entry.is_built() {
                continue;
            }
            let facts = Facts { fabrics: name.parse().unwrap(), ..facts };
            let judged = judge(entry, &facts);
            assert_eq!(judged.verdict, Verdict::Skip, "{name}: {}", judged.found);
            assert!(judged.found.ends_with(check_of(&need).unwrap()), "{}", judged.found);
        }
    }

    #[test]
    fn a_missing_need_fails_a_named_fabric_and_is_skipped_for_auto() {
        const NEEDS: &[HostNeed] = &[HostNeed::DeviceClass("toy")];
        let mut entry = te_engine::fabrics()[0];
        entry.needs = NEEDS;
        let missing = vec![(NEEDS[0], "no device in /sys/class/toy".to_owned())];
        let named = Facts { fabrics: entry.name.parse().unwrap(), missing, ..Facts::default() };
        assert_eq!(judge(&entry, &named).verdict, Verdict::Fail);
        let auto = Facts { fabrics: te_engine::Fabrics::default(), ..named.clone() };
        assert_eq!(judge(&entry, &auto).verdict, Verdict::Skip);
        assert_eq!(judge(&entry, &Facts { missing: Vec::new(), ..named }).verdict, Verdict::Ok);
    }
}
