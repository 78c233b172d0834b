//! The checks: tables of pure functions from facts to findings, one table per area.

mod cxl;
mod disks;
mod fabrics;
mod gpu;
mod machine;
mod memory;
mod network;
mod rdma;

use std::fmt::Display;

use serde::Serialize;

use super::facts::Facts;

/// The result of a check, from best to worst.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Verdict {
    /// Unknown on this machine, or not relevant here.
    Skip,
    /// Nothing to change.
    Ok,
    /// Works, but slower or with restrictions.
    Warn,
    /// Something does not work.
    Fail,
}

impl Verdict {
    /// The word that is printed.
    pub(super) const fn word(self) -> &'static str {
        match self {
            Self::Skip => "skip",
            Self::Ok => "ok",
            Self::Warn => "warn",
            Self::Fail => "fail",
        }
    }
}

/// The finding of one check.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Finding {
    /// The area of the check.
    pub(super) area: &'static str,
    /// Name of the check, which stays the same from release to release.
    pub(super) check: &'static str,
    /// The verdict.
    pub(super) verdict: Verdict,
    /// What was found.
    pub(super) found: String,
    /// Why it matters.
    pub(super) why: &'static str,
    /// What to do about it; `None` for `Ok` and `Skip`.
    #[serde(flatten)]
    pub(super) fix: Option<Fix>,
}

/// How to fix a finding.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Fix {
    /// Instructions.
    #[serde(rename = "fix")]
    pub(super) words: String,
    /// A command, if a single one is enough.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) command: Option<String>,
}

impl From<&str> for Fix {
    fn from(words: &str) -> Self {
        Self { words: words.to_owned(), command: None }
    }
}

impl<C: Into<String>> From<(&str, C)> for Fix {
    fn from((words, command): (&str, C)) -> Self {
        Self { words: words.to_owned(), command: Some(command.into()) }
    }
}

/// A finding without the name of its check.
struct Judgement {
    verdict: Verdict,
    found: String,
    fix: Option<Fix>,
}

/// One check.
struct Check {
    name: &'static str,
    /// Why it matters, in one sentence.
    why: &'static str,
    judge: fn(&Facts) -> Judgement,
}

/// All checks but those of the registry's fabrics, in the order in which they are printed.
const AREAS: [(&str, &[Check]); 7] = [
    ("machine", machine::CHECKS),
    ("memory", memory::CHECKS),
    ("disks", disks::CHECKS),
    ("network", network::CHECKS),
    ("rdma", rdma::CHECKS),
    ("gpu", gpu::CHECKS),
    ("cxl", cxl::CHECKS),
];

/// Runs every check.
pub(super) fn run(facts: &Facts) -> Vec<Finding> {
    let checks = AREAS.iter().flat_map(|(area, checks)| checks.iter().map(move |check| (area, check)));
    let judged = checks.map(|(area, check)| {
        let Judgement { verdict, found, fix } = (check.judge)(facts);
        Finding { area, check: check.name, verdict, found, why: check.why, fix }
    });
    fabrics::findings("fabrics", facts).chain(judged).collect()
}

fn ok(found: impl Into<String>) -> Judgement {
    Judgement { verdict: Verdict::Ok, found: found.into(), fix: None }
}

fn skip(found: impl Into<String>) -> Judgement {
    Judgement { verdict: Verdict::Skip, found: found.into(), fix: None }
}

fn warn(found: impl Into<String>, fix: impl Into<Fix>) -> Judgement {
    Judgement { verdict: Verdict::Warn, found: found.into(), fix: Some(fix.into()) }
}

fn fail(found: impl Into<String>, fix: impl Into<Fix>) -> Judgement {
    Judgement { verdict: Verdict::Fail, found: found.into(), fix: Some(fix.into()) }
}

/// The first few items, and the number of the others.
fn list<T: Display>(items: impl IntoIterator<Item = T>) -> String {
    const SHOWN: usize = 6;
    let items: Vec<String> = items.into_iter().map(|item| item.to_string()).collect();
    let shown = items[..items.len().min(SHOWN)].join(", ");
    if items.len() > SHOWN { format!("{shown} and {} more", items.len() - SHOWN) } else { shown }
}

fn count(number: u64) -> String {
    if number == u64::MAX { "no limit".to_owned() } else { crate::output::thousands(number) }
}

fn errno_text(errno: i32) -> String {
    std::io::Error::from_raw_os_error(errno).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;
    use te_engine::Fabrics;

    /// Facts that only a running machine reports. `tests/doctor.rs` breaks the files one by one.
    fn healthy() -> Facts {
        let (probe, report) = disks::healthy();
        Facts {
            disks: vec![("/mnt".into(), Ok(probe), Some(64 << 30))],
            arbiter: Some(("etcd://m:1".into(), Ok(report))),
            cpus: 16,
            shm_bytes: Some(32 << 30),
            memfd: Some(Ok(())),
            io_uring: Some(Ok(())),
            loopback: Some(Ok(Duration::from_micros(12))),
            master: Some(("m:1".into(), Ok(Duration::from_micros(80)))),
            ..Facts::default()
        }
    }

    #[test]
    fn a_machine_that_says_nothing_is_skipped_over() {
        let findings = run(&Facts { cpus: 4, ..Facts::default() });
        assert!(findings.iter().all(|f| f.verdict <= Verdict::Ok && f.fix.is_none()), "{findings:?}");
    }

    /// Changes one fact for the worse.
    type Break = fn(&mut Facts);

    /// Each change affects the verdict of its own check only, and the finding has a fix that names the
    /// solution. Fabrics that cannot start refer to that check.
    #[test]
    fn each_broken_setting_is_found_and_comes_with_its_fix() {
        let broken: &[(&str, Verdict, &str, Break)] = &[
            ("/dev/shm", Verdict::Warn, "--shm-size", |f| f.shm_bytes = Some(1 << 20)),
            ("memfd", Verdict::Warn, "seccomp", |f| f.memfd = Some(Err(libc::EPERM))),
            ("io_uring", Verdict::Warn, "io_uring_disabled", |f| f.io_uring = Some(Err(libc::EPERM))),
            ("io_uring", Verdict::Warn, "5.15", |f| f.io_uring = Some(Err(libc::ENOSYS))),
            ("tcp over loopback", Verdict::Fail, "lo up", |f| f.loopback = Some(Err("unreachable".into()))),
            ("tcp over loopback", Verdict::Warn, "busy", |f| f.loopback = Some(Ok(Duration::from_millis(1)))),
            ("direct I/O", Verdict::Warn, "ext4", |f| f.disks[0].1.as_mut().unwrap().direct = None),
            ("sync", Verdict::Warn, "power-loss", |f| {
                f.disks[0].1.as_mut().unwrap().sync =
                    Some((Duration::from_millis(30), Duration::from_secs(1)))
            }),
            ("disk space", Verdict::Warn, "another", |f| f.disks[0].2 = Some(1 << 20)),
            ("arbiter", Verdict::Fail, "etcd", |f| {
                f.arbiter = Some(("etcd://m:1".into(), Err("refused".into())))
            }),
            ("arbiter", Verdict::Warn, "near", |f| {
                f.arbiter.as_mut().unwrap().1.as_mut().unwrap().answers_in = Duration::from_millis(300)
            }),
            ("master", Verdict::Fail, "snowskin master", |f| {
                f.master = Some(("m:1".into(), Err("refused".into())))
            }),
        ];
        let before = run(&healthy());
        for (check, verdict, fix, break_it) in broken {
            let mut facts = healthy();
            break_it(&mut facts);
            for (finding, before) in run(&facts).iter().zip(&before) {
                let refers = finding.area == "fabrics" && finding.verdict == Verdict::Skip;
                if finding.check != *check {
                    let same = finding.verdict == before.verdict || refers && finding.found.contains(check);
                    assert!(same, "{check} also broke {finding:?}");
                    continue;
                }
                assert_eq!((before.verdict, finding.verdict), (Verdict::Ok, *verdict), "{finding:?}");
                let way_out = serde_json::to_string(finding).unwrap();
                assert!(finding.fix.is_some() && way_out.contains(fix), "{finding:?}");
            }
        }
    }

    #[test]
    fn a_named_fabric_without_shared_memory_is_a_failure_of_the_check_alone() {
        let facts = Facts { fabrics: Fabrics::SHM, memfd: Some(Err(libc::EPERM)), ..healthy() };
        let failed: Vec<_> = run(&facts).into_iter().filter(|f| f.verdict == Verdict::Fail).collect();
        assert_eq!(failed.iter().map(|finding| finding.check).collect::<Vec<_>>(), ["memfd"]);
    }

    #[test]
    fn a_place_for_a_disk_that_is_not_there_is_one_failure() {
        let mut facts = healthy();
        facts.disks[0].1 = Err("no such directory".into());
        let findings = run(&facts);
        let failed: Vec<_> = findings.iter().filter(|finding| finding.verdict == Verdict::Fail).collect();
        assert_eq!(failed.len(), 1, "{failed:?}");
        let fix = failed[0].fix.as_ref().unwrap();
        assert!(failed[0].check == "direct I/O" && fix.words.contains("mkdir"), "{failed:?}");
    }

    #[test]
    fn names_are_unique_and_every_check_has_a_sentence_on_why_it_matters() {
        let findings = run(&Facts::default());
        for (i, finding) in findings.iter().enumerate() {
            assert!(findings[..i].iter().all(|other| other.check != finding.check), "{}", finding.check);
            assert!(
                finding.why.ends_with('.') && !finding.why[..finding.why.len() - 1].contains(". "),
                "{finding:?}"
            );
        }
    }

    #[test]
    fn long_lists_are_cut() {
        assert_eq!(list(["a", "b"]), "a, b");
        assert_eq!(list(1..=9), "1, 2, 3, 4, 5, 6 and 3 more");
    }
}
