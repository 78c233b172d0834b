//! Places for disks, and the arbiter of several masters.

use std::time::Duration;

use super::{Check, Judgement, fail, ok, skip, warn};
use crate::commands::doctor::facts::Facts;
use crate::size::ByteSize;

pub(super) const CHECKS: &[Check] = &[
    Check {
        name: "direct I/O",
        why: "Disks are read and written past the page cache, which would take the memory that nodes lend.",
        judge: direct,
    },
    Check {
        name: "sync",
        why: "A removal is confirmed, and a journal answers, when the disk has synced it.",
        judge: sync,
    },
    Check { name: "disk space", why: "A disk is allocated whole when it is formatted.", judge: space },
    Check {
        name: "arbiter",
        why: "Masters agree there on which of them leads, and none takes over without it.",
        judge: arbiter,
    },
];

const NONE: &str = "none named: `--disk PATH` examines a place for one";

/// What is found for each disk, with the worst verdict.
fn each(facts: &Facts, judge: impl Fn(usize) -> Judgement) -> Judgement {
    let judged = (0..facts.disks.len()).map(|index| {
        let Judgement { verdict, found, fix } = judge(index);
        Judgement { verdict, found: format!("{}: {found}", facts.disks[index].0), fix }
    });
    let all = judged.reduce(|one, other| {
        let found = format!("{}; {}", one.found, other.found);
        let worst = if other.verdict > one.verdict { other } else { one };
        Judgement { found, ..worst }
    });
    all.unwrap_or_else(|| skip(NONE))
}

fn direct(facts: &Facts) -> Judgement {
    each(facts, |index| match &facts.disks[index].1 {
        Err(error) => fail(
            error.clone(),
            "mount the disk, or mkdir the directory, and let the user of the node write there",
        ),
        Ok(probe) => match probe.direct {
            None => warn(
                "not supported",
                "use ext4 or XFS on the disk, or a block device; tmpfs has it from Linux 6.6 on",
            ),
            Some((_, block)) => ok(format!("blocks of {block} B")),
        },
    })
}

fn sync(facts: &Facts) -> Judgement {
    const SLOW: Duration = Duration::from_millis(20);
    each(facts, |index| match facts.disks[index].1.as_ref().ok().map(|probe| probe.sync) {
        None => skip("unknown"),
        Some(None) => skip("a block device, to which nothing is written here"),
        Some(Some((median, longest))) => {
            let found = format!("{median:.1?} (median), {longest:.1?} (longest)");
            if median > SLOW {
                warn(found, "use an SSD with power-loss protection, or one that is not shared")
            } else {
                ok(found)
            }
        }
    })
}

fn space(facts: &Facts) -> Judgement {
    /// Two extents of each stream, and the superblock.
    const LITTLE: u64 = 512 << 20;
    each(facts, |index| match &facts.disks[index] {
        (_, Ok(probe), Some(free)) if probe.sync.is_some() => {
            let found = format!("{} free", ByteSize(*free).approximate());
            match *free < LITTLE {
                true => warn(found, "a disk needs at least 512 MiB: free some, or name another place"),
                false => ok(found),
            }
        }
        _ => skip("not of a file system"),
    })
}

fn arbiter(facts: &Facts) -> Judgement {
    const SLOW: Duration = Duration::from_millis(100);
    let Some((url, said)) = &facts.arbiter else {
        return skip("none named: `--ha URL` asks one");
    };
    let report = match said {
        Ok(report) => report,
        Err(error) => {
            return fail(
                format!("{url}: {error}"),
                "start etcd, or correct the URL: `etcd://HOST:PORT[,HOST:PORT…]`, `k8s://NAMESPACE` or \
                `file:///DIRECTORY`, in a build with that feature",
            );
        }
    };
    let time = report.answers_in;
    let found = match report.led {
        false => format!("{url} answers in {time:.1?}; no master has led yet"),
        true => format!(
            "{url} answers in {time:.1?}; {} leads (lineage {}, term {}), {} of {} masters may take over",
            if report.leader.is_empty() { "a master" } else { &report.leader },
            report.reign.lineage,
            report.reign.term,
            report.in_sync.saturating_sub(1),
            report.members
        ),
    };
    if time > SLOW {
        return warn(found, "a failover waits for it: run it near the masters, on a disk that syncs fast");
    }
    ok(found)
}

/// For the tests of all checks.
#[cfg(test)]
pub(super) fn healthy() -> (store_client::disk::DiskProbe, store_master::ArbiterReport) {
    let dir = tempfile::tempdir().expect("a directory");
    let probe = store_client::disk::DiskProbe::of(dir.path()).expect("it is there");
    let (mut probe, url) = (probe, format!("file://{}", dir.path().display()));
    probe.direct = Some((512, 512));
    probe.sync = Some((Duration::from_micros(100), Duration::from_millis(1)));
    let mut report = store_master::ArbiterReport::ask(&url, "default").expect("it answers");
    report.answers_in = Duration::from_millis(1);
    (probe, report)
}
