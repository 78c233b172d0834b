//! The fabrics of the engine's registry: whether each is used, and whether the host has what it needs.
//!
//! A fabric gets its finding from its entry in the registry. A need that another check examines in detail is
//! left to that check, which the finding names.

use te_engine::{FabricEntry, HostNeed};

use super::{Finding, Fix, Judgement, fail, list, ok, skip};
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
            let checks: Vec<_> = entry.needs.iter().filter_map(check_of).collect();
            let see = if checks.is_empty() { String::new() } else { format!(" (see {})", list(checks)) };
            ok(format!("{}{see}", entry.about))
        }
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
    use crate::commands::doctor::checks::Verdict;

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
