//! The doctor on hosts in directories: a healthy one, the same with one setting broken, one without any
//! files, one with garbage in its files; and on the host that runs the tests.

mod broken;
#[path = "../common/mod.rs"]
mod common;
mod host;

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use broken::{BROKEN, Break, NIC1, PORT0, PORT1, one_subnet};
use common::{assert_exit, json, run, stderr, stdout};
use host::Host;
use serde_json::Value;

fn text<'a>(finding: &'a Value, field: &str) -> &'a str {
    finding[field].as_str().unwrap_or("")
}

fn checks(report: &Value) -> &[Value] {
    report["checks"].as_array().expect("a list")
}

fn verdicts(report: &Value) -> BTreeMap<String, String> {
    checks(report).iter().map(|f| (text(f, "check").to_owned(), text(f, "verdict").to_owned())).collect()
}

/// Checks that need a running machine; `firewall` is never checked.
const NOT_IN_FILES: [&str; 12] = [
    "/dev/shm",
    "memfd",
    "io_uring",
    "firewall",
    "tcp over loopback",
    "master",
    "direct I/O",
    "sync",
    "disk space",
    "arbiter",
    "gpu library",
    "cxl pools",
];
/// The findings on the fabrics of the registry, which leave their needs to other checks.
const FABRICS: [&str; 7] = ["local", "shm", "nvlink", "cxl", "rdma", "tcp", "nvmeof"];
/// Those that `auto` leaves out.
const NOT_IN_AUTO: [&str; 3] = ["nvlink", "cxl", "nvmeof"];
/// A check that only informs, where nvlink is used: its unit tests have its verdicts.
const NVLINK_ONLY: &str = "imex channels";
/// A check that does not apply to a host with Ethernet only.
const INFINIBAND_ONLY: &str = "rdma partitions";

#[test]
fn a_healthy_host_has_nothing_to_fix() {
    let host = Host::healthy();
    for arguments in [&[][..], &["--fabric", "rdma"]] {
        let (report, code) = host.ask(arguments);
        assert_eq!(
            (code, &report["verdict"], &report["failed"], &report["warned"]),
            (Some(0), &"ok".into(), &0.into(), &0.into())
        );
        for finding in checks(&report) {
            let check = text(finding, "check");
            let other_fabric = text(finding, "area") == "fabrics" && !arguments.is_empty() && check != "rdma";
            let skipped =
                [&NOT_IN_FILES[..], &NOT_IN_AUTO, &[INFINIBAND_ONLY, NVLINK_ONLY]].concat().contains(&check);
            let skipped = skipped || other_fabric;
            let expected = if skipped { "skip" } else { "ok" };
            assert_eq!(text(finding, "verdict"), expected, "{finding}");
            assert!(finding.get("fix").is_none() && !text(finding, "why").is_empty(), "{finding}");
        }
    }
    let shown = stdout(&run(&["doctor", "--root", host.path().to_str().unwrap()]));
    assert!(shown.ends_with("Nothing to fix.\n"), "{shown}");
    assert!(shown.contains("mlx5_0/1 10.0.0.1, mlx5_1/1 10.0.1.1"), "{shown}");
    assert!(shown.contains("nearest: cpu:0 mlx5_0, cpu:1 mlx5_1, cuda:0 mlx5_0"), "{shown}");
}

#[test]
fn each_broken_setting_changes_its_own_check_alone_and_its_fix_names_the_knob() {
    let before = Host::healthy().verdicts(&[]);
    let mut wrong = Vec::new();
    for (check, verdict, found, fix, break_it) in BROKEN {
        let host = Host::healthy();
        break_it(&host);
        let (report, code) = host.ask(&[]);
        let finding = checks(&report).iter().find(|f| text(f, "check") == *check).unwrap();
        let way_out = format!("{}\n{}", text(finding, "fix"), text(finding, "command"));
        let expected = text(finding, "verdict") == *verdict
            && text(finding, "found").contains(found)
            && way_out.contains(fix)
            && code == Some(i32::from(*verdict == "fail"));
        if !expected {
            wrong.push(format!("{check}: not `{verdict}` with `{found}` and `{fix}`, but {finding}"));
        }
        for finding in checks(&report) {
            let (other, verdict) = (text(finding, "check"), text(finding, "verdict"));
            // A fabric that cannot start is skipped and refers to the check that says why.
            let refers =
                FABRICS.contains(&other) && verdict == "skip" && text(finding, "found").contains(check);
            if other != *check && verdict != before[other] && !refers {
                wrong.push(format!("{check} ({found}) also made {other} {verdict}"));
            }
        }
    }
    for check in before.keys() {
        let elsewhere = [&NOT_IN_FILES[..], &FABRICS, &["rdma devices", INFINIBAND_ONLY, NVLINK_ONLY]]
            .concat()
            .contains(&check.as_str());
        if !elsewhere && !BROKEN.iter().any(|(name, ..)| name == check) {
            wrong.push(format!("nothing breaks {check}"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn an_old_kernel_has_no_dma_bufs_either() {
    let host = Host::healthy();
    host.set("proc/modules", "nvidia 62 3 - Live 0x0\n");
    host.set(
        "proc/driver/nvidia/version",
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  550.54.15\n",
    );
    assert_eq!(host.verdicts(&[])["gpudirect"], "ok");
    host.set("proc/sys/kernel/osrelease", "5.10.0-28-amd64");
    let (report, _) = host.ask(&[]);
    let finding = checks(&report).iter().find(|f| text(f, "check") == "gpudirect").unwrap();
    assert!(text(finding, "found").contains("before Linux 5.12"), "{finding}");
    assert_eq!(report["warned"], 2, "the kernel's own version is the other");
}

#[test]
fn what_looks_broken_but_works_is_left_alone() {
    let fine: &[(&str, &str, Break)] = &[
        ("locked memory", "CAP_IPC_LOCK", |h| {
            h.set(
                "proc/self/limits",
                "Max open files  1024  1048576  files\nMax locked memory  65536  65536  bytes\n",
            );
            h.set("proc/self/status", "CapEff:\t0000000000004000\n");
        }),
        ("ports", "in use by snowskin", |h| {
            h.set("proc/net/tcp", "  0: 00000000:C383 00000000:0000 0A 0:0 0:0 0 0 0 4242 1\n");
            h.link("proc/77/fd/5", "socket:[4242]");
            h.set("proc/77/comm", "snowskin");
        }),
        ("rdma subnets", "answers for its own address only", |h| {
            one_subnet(h);
            h.set("proc/sys/net/ipv4/conf/all/arp_ignore", "1");
            h.set("proc/sys/net/ipv4/conf/all/arp_announce", "2");
            h.set("proc/sys/net/ipv4/conf/all/rp_filter", "2");
        }),
        ("gpudirect", "dma-buf", |h| {
            h.set("proc/modules", "nvidia 62 3 - Live 0x0\n");
            h.set(
                "proc/driver/nvidia/version",
                "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  550.54.15\n",
            );
        }),
        ("rdma gids", "2001:db8::1", |h| {
            h.remove(&format!("{PORT0}/gids/2"));
            h.set(&format!("{PORT0}/gids/3"), "2001:0db8:0000:0000:0000:0000:0000:0001");
        }),
        ("rdma providers", "mlx5", |h| {
            h.set(
                "etc/libibverbs.d/mlx5.driver",
                "# vendor's\ndriver /usr/lib/x86_64-linux-gnu/libibverbs/libmlx5\n",
            );
        }),
        // Ports of different models may differ.
        ("rdma rates", "25 Gb/s", |h| {
            h.set(&format!("{NIC1}/device"), "0x1017");
            h.set(&format!("{PORT1}/rate"), "25 Gb/sec (1X EDR)");
        }),
    ];
    let before = Host::healthy().verdicts(&[]);
    for (check, found, change) in fine {
        let host = Host::healthy();
        change(&host);
        let (report, _) = host.ask(&[]);
        let finding = checks(&report).iter().find(|f| text(f, "check") == *check).unwrap();
        assert!(text(finding, "found").contains(found), "{finding}");
        assert_eq!(verdicts(&report), before);
    }
}

#[test]
fn infiniband_is_judged_by_its_own_rules() {
    let host = Host::healthy();
    for port in [PORT0, PORT1] {
        host.set(&format!("{port}/link_layer"), "InfiniBand");
        host.remove(&format!("{port}/gids"));
        host.remove(&format!("{port}/gid_attrs"));
    }
    host.set(&format!("{PORT0}/gids/0"), "fe80:0000:0000:0000:e8eb:d303:0012:3456");
    host.set(&format!("{PORT1}/gids/0"), "fe80:0000:0000:0000:e8eb:d303:0012:789a");
    host.set(&format!("{PORT0}/gids/1"), "fe80:0000:0000:0000:0000:0000:0000:0000");
    host.set(&format!("{PORT1}/gids/1"), "fe80:0000:0000:0000:0000:0000:0000:0000");
    let (report, code) = host.ask(&["--fabric", "rdma"]);
    assert_eq!((code, &report["warned"]), (Some(0), &0.into()), "{report}");
    let found = verdicts(&report);
    assert_eq!([&found["rdma gids"], &found["rdma partitions"], &found["rdma mtu"]], ["ok", "ok", "skip"]);

    host.set(&format!("{PORT1}/pkeys/0"), "0x7fff");
    let (report, _) = host.ask(&[]);
    let finding = checks(&report).iter().find(|f| text(f, "check") == INFINIBAND_ONLY).unwrap();
    assert_eq!((text(finding, "verdict"), &report["warned"]), ("warn", &1.into()), "{finding}");
    assert!(text(finding, "fix").contains("partitions.conf") && text(finding, "found").contains("mlx5_1/1"));

    host.set(&format!("{PORT1}/gids/0"), "fe80:0000:0000:0000:e8eb:d303:0012:3456");
    assert_eq!(host.verdicts(&[])["rdma duplicate gids"], "warn");
}

/// Removes everything about RDMA from a host.
fn without_rdma() -> Host {
    let host = Host::healthy();
    for path in [
        "sys/class/infiniband",
        "sys/class/infiniband_verbs",
        "dev/infiniband",
        "etc/libibverbs.d",
        "usr/lib/x86_64-linux-gnu",
        "sys/bus/pci/devices",
        "proc/driver",
    ] {
        host.remove(path);
    }
    host.set("sys/devices/system/node/has_cpu", "0");
    host
}

#[test]
fn a_host_without_rdma_has_no_fault_unless_rdma_was_requested() {
    let host = without_rdma();
    let (report, code) = host.ask(&[]);
    assert_eq!((code, &report["failed"], &report["warned"]), (Some(0), &0.into(), &0.into()), "{report}");
    for finding in checks(&report).iter().filter(|f| ["rdma", "gpu"].contains(&text(f, "area"))) {
        assert_eq!(text(finding, "verdict"), "skip", "{finding}");
    }
    for arguments in [&[][..], &["--fabric", "rdma"]] {
        let (report, _) = host.ask(arguments);
        let fabric = checks(&report).iter().find(|f| text(f, "check") == "rdma").unwrap();
        let said = (text(fabric, "verdict"), text(fabric, "found"));
        assert_eq!(said, ("skip", "cannot start on this host: see libibverbs, rdma devices"));
    }
    assert_eq!(host.verdicts(&[])["tcp"], "ok");
    let shown = stdout(&run(&["doctor", "--root", host.path().to_str().unwrap()]));
    let rdma = shown.split("rdma\n").nth(1).unwrap().split("\n\n").next().unwrap();
    assert_eq!(rdma.lines().count(), 2, "{shown}");

    let (report, code) = host.ask(&["--fabric", "rdma"]);
    assert_eq!(code, Some(1));
    let failed: Vec<_> = checks(&report).iter().filter(|f| text(f, "verdict") == "fail").collect();
    let names: Vec<_> = failed.iter().map(|f| text(f, "check")).collect();
    assert_eq!(names, ["rdma devices", "libibverbs"]);
    for (finding, way_out) in failed.iter().zip(["rdma link add rxe0", "apt-get install libibverbs1"]) {
        assert!(text(finding, "command").contains(way_out), "{finding}");
    }
}

#[test]
fn a_nic_whose_driver_is_not_loaded_is_seen() {
    let host = Host::healthy();
    host.remove("sys/class/infiniband");
    let (report, code) = host.ask(&[]);
    let finding = checks(&report).iter().find(|f| text(f, "check") == "rdma devices").unwrap();
    assert_eq!((text(finding, "verdict"), code), ("warn", Some(0)), "{finding}");
    assert!(text(finding, "found").contains("0000:14:00.0") && text(finding, "command").contains("mlx5_ib"));
    assert_eq!(host.ask(&["--fabric", "rdma"]).1, Some(1));
    assert_eq!(host.verdicts(&["--fabric", "tcp"])["rdma devices"], "skip");
}

#[test]
fn broken_rdma_is_skipped_for_tcp() {
    let host = Host::healthy();
    for path in
        ["usr/lib/x86_64-linux-gnu/libibverbs.so.1", "dev/infiniband/uverbs0", "etc/libibverbs.d/mlx5.driver"]
    {
        host.remove(path);
    }
    host.set(
        "proc/self/limits",
        "Max open files  1024  1048576  files\nMax locked memory  65536  65536  bytes\n",
    );
    assert_eq!(host.ask(&[]).1, Some(1));
    let (report, code) = host.ask(&["--fabric", "tcp"]);
    assert_eq!(code, Some(0), "{report}");
    for finding in checks(&report).iter().filter(|f| text(f, "area") == "rdma") {
        assert_eq!(text(finding, "verdict"), "skip", "{finding}");
    }
}

#[test]
fn soft_roce_works_and_is_reported_as_emulated() {
    let host = without_rdma();
    for (path, content) in [
        ("state", "4: ACTIVE"),
        ("phys_state", "5: LinkUp"),
        ("link_layer", "Ethernet"),
        ("rate", "2.5 Gb/sec (1X SDR)"),
        ("gids/0", "0000:0000:0000:0000:0000:ffff:0a00:0001"),
        ("gid_attrs/types/0", "RoCE v2"),
        ("gid_attrs/ndevs/0", "eth0"),
    ] {
        host.set(&format!("sys/class/infiniband/rxe0/ports/1/{path}"), content);
    }
    for (path, content) in [
        ("sys/class/infiniband/rxe0/parent", "eth0"),
        ("sys/class/net/eth0/mtu", "4200"),
        ("sys/class/infiniband_verbs/uverbs0/ibdev", "rxe0"),
        ("dev/infiniband/uverbs0", ""),
        ("usr/lib64/libibverbs.so.1", ""),
        ("usr/lib64/libibverbs/librxe-rdmav34.so", ""),
        ("etc/libibverbs.d/rxe.driver", "driver rxe"),
    ] {
        host.set(path, content);
    }
    let (report, code) = host.ask(&["--fabric", "rdma"]);
    assert_eq!((code, &report["warned"]), (Some(0), &1.into()), "{report}");
    let found = verdicts(&report);
    assert_eq!(found["rdma devices"], "warn");
    for check in
        ["libibverbs", "rdma providers", "rdma device nodes", "rdma port state", "rdma gids", "rdma mtu"]
    {
        assert_eq!(found[check], "ok", "{check}");
    }
}

#[test]
fn all_ports_down_is_a_failure_and_the_rest_is_not_judged() {
    let host = Host::healthy();
    for port in [PORT0, PORT1] {
        host.set(&format!("{port}/state"), "1: DOWN");
        host.set(&format!("{port}/phys_state"), "2: Polling");
    }
    let (report, code) = host.ask(&[]);
    let found = verdicts(&report);
    assert_eq!((code, found["rdma port state"].as_str()), (Some(1), "fail"));
    for check in ["rdma gids", "rdma mtu", "rdma rates", "rdma subnets"] {
        assert_eq!(found[check], "skip", "{check}");
    }
}

#[test]
fn people_read_the_worst_first_and_below_it_why_and_what_to_do() {
    let host = Host::healthy();
    host.set("sys/class/net/ens1np0/mtu", "1500");
    host.set("proc/sys/vm/zone_reclaim_mode", "1");
    host.remove("dev/infiniband/uverbs1");
    let output = run(&["doctor", "--root", host.path().to_str().unwrap()]);
    assert_exit(&output, 1);
    let shown = stdout(&output);
    let lines: Vec<&str> = shown.lines().collect();
    let failure = [
        "rdma",
        "  fail  rdma device nodes       /dev/infiniband/uverbs1: entity not found",
        "        A process that cannot open a device's node cannot use the device.",
    ];
    assert_eq!(lines[..3], failure, "{shown}");
    assert!(lines[3].starts_with("        fix: ") && lines[4].starts_with("          $ sudo "), "{shown}");
    assert!(lines[5].starts_with("  warn  rdma mtu"), "{shown}");
    let areas: Vec<&str> =
        lines.iter().copied().filter(|line| line.starts_with(char::is_lowercase)).collect();
    assert_eq!(areas, ["rdma", "machine", "fabrics", "memory", "network", "gpu", "cxl", "disks"]);
    assert_eq!(lines.last(), Some(&"1 failed, 2 warned."));
    println!("{shown}");
}

#[test]
fn a_host_without_files_is_skipped() {
    let (report, code) = Host::empty().ask(&[]);
    assert_eq!((code, &report["failed"], &report["warned"]), (Some(0), &0.into(), &0.into()), "{report}");
}

/// Each file of a healthy host in turn, and then all of them, contain garbage. Any verdict is accepted, but
/// there must be one.
#[test]
fn garbage_in_the_kernels_files_is_survived() {
    fn files(dir: &Path, found: &mut Vec<std::path::PathBuf>) {
        for entry in fs::read_dir(dir).unwrap().flatten() {
            let kind = entry.file_type().unwrap();
            if kind.is_dir() {
                files(&entry.path(), found);
            } else if kind.is_file() {
                found.push(entry.path());
            }
        }
    }
    let garbage: [&[u8]; 6] = [
        b"",
        b"\xff\xfe\x00\x1b[2J\x07\n\x80",
        b"-1\n18446744073709551616: 99999999999999999999 kB [ 0-4294967295,",
        b"4294967295: \xf0\x9f\x8c\x91 NaN inf Gb/sec 0x 0.0 GT/s ::::/:::/../../..",
        b"0::/../../../../etc\n1:memory,rdma:\n::\n",
        &[b'9'; 100_000],
    ];
    let sound = |host: &Host| {
        let output = run(&["doctor", "--json", "--fabric", "rdma", "--root", host.path().to_str().unwrap()]);
        assert!(matches!(output.status.code(), Some(0 | 1)), "{}", stderr(&output));
        assert_eq!(stderr(&output), "");
        assert!(checks(&json(&output)).len() > 40);
    };
    for (i, bytes) in garbage.iter().enumerate() {
        let host = Host::healthy();
        let mut all = Vec::new();
        files(host.path(), &mut all);
        all.sort();
        assert!(all.len() > 100);
        // All at once, and every sixth alone: over the six kinds of garbage, each file has its turn.
        for path in all.iter().skip(i).step_by(garbage.len()) {
            let good = fs::read(path).unwrap();
            fs::write(path, bytes).unwrap();
            sound(&host);
            fs::write(path, good).unwrap();
        }
        for path in &all {
            fs::write(path, bytes).unwrap();
        }
        sound(&host);
        let shown = stdout(&run(&["doctor", "--root", host.path().to_str().unwrap()]));
        assert!(
            shown.chars().all(|c| c == '\n' || !c.is_control()),
            "a terminal must not be driven by {bytes:?}"
        );
    }
}

#[test]
fn names_that_lead_nowhere_are_survived() {
    let host = Host::healthy();
    host.link("sys/class/infiniband/mlx5_2", "mlx5_2");
    host.set("sys/class/infiniband/mlx5_3", "a file");
    host.set("sys/class/infiniband/mlx5_4/ports", "a file");
    fs::create_dir_all(host.path().join("sys/class/infiniband/mlx5_5/ports/x")).unwrap();
    host.link("sys/bus/pci/devices/0000:ff:00.0", "../../nowhere");
    host.link("proc/99/fd/1", "/");
    host.set("sys/class/infiniband_verbs/uverbs9/ibdev", "../../../../etc/passwd");
    let (report, _) = host.ask(&[]);
    assert_eq!(checks(&report).len(), Host::healthy().verdicts(&[]).len());
}

#[test]
fn this_host_can_be_judged_and_the_report_has_its_form() {
    for fabric in ["auto", "rdma", "tcp"] {
        let output = run(&["doctor", "--json", "--fabric", fabric]);
        assert!(matches!(output.status.code(), Some(0 | 1)), "{}", stderr(&output));
        let report = json(&output);
        let worst = |verdict: &str| checks(&report).iter().filter(|f| text(f, "verdict") == verdict).count();
        assert_eq!(report["failed"].as_u64(), Some(worst("fail") as u64));
        assert_eq!(report["warned"].as_u64(), Some(worst("warn") as u64));
        assert_eq!(output.status.code(), Some(i32::from(worst("fail") > 0)));
        for finding in checks(&report) {
            let fixable = matches!(text(finding, "verdict"), "warn" | "fail");
            assert_eq!(fixable, !text(finding, "fix").is_empty(), "{finding}");
            for field in ["area", "check", "found", "why"] {
                assert!(!text(finding, field).is_empty(), "{finding}");
            }
        }
    }
}

#[test]
fn a_root_that_is_no_directory_is_wrong_usage() {
    let output = run(&["doctor", "--root", "/no/such/place"]);
    assert_exit(&output, 2);
    assert!(stderr(&output).contains("/no/such/place"), "{}", stderr(&output));
}

#[test]
fn places_for_disks_and_an_arbiter_are_examined_when_they_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().to_str().unwrap();
    let url = format!("file://{path}");
    let report = json(&run(&["doctor", "--disk", path, "--ha", &url, "--json"]));
    let found = |name: &str| {
        let finding = checks(&report).iter().find(|finding| text(finding, "check") == name).unwrap();
        text(finding, "found").to_owned()
    };
    assert!(found("sync").contains(path) && found("sync").contains("median"), "{report}");
    assert!(found("disk space").contains("free"), "{report}");
    assert!(found("arbiter").contains("no master has led yet"), "{report}");
    let none = format!("{path}/none");
    let output = run(&["doctor", "--disk", &none, "--ha", &format!("file://{none}"), "--json"]);
    assert_exit(&output, 1);
    assert_eq!(json(&output)["failed"], 2, "{}", stdout(&output));
}
