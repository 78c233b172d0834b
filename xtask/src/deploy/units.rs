//! Checks `deploy/systemd`: the program accepts the command lines, and systemd accepts the units and rates
//! them as restricted.

use super::program::Program;
use crate::cmd::Cmd;
use anyhow::{Context as _, Result, ensure};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Highest exposure that `systemd-analyze security` may report: 2.0 of 10, in tenths.
const EXPOSURE_MAX: u32 = 20;

/// One unit file.
pub(crate) struct Unit {
    /// File name: `snowskin-master.service`.
    pub(crate) name: String,
    path: PathBuf,
    text: String,
}

/// All units of a directory, by name.
///
/// # Errors
/// A unit cannot be read, or there is none.
pub(crate) fn read(dir: &Path) -> Result<Vec<Unit>> {
    let mut units = Vec::new();
    for entry in fs::read_dir(dir).with_context(|| format!("cannot read {}", dir.display()))? {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "service") {
            let name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
            let text = fs::read_to_string(&path)?;
            units.push(Unit { name, path, text });
        }
    }
    units.sort_by(|a, b| a.name.cmp(&b.name));
    ensure!(!units.is_empty(), "no unit in {}", dir.display());
    Ok(units)
}

impl Unit {
    /// Its command line, without the program's path.
    pub(crate) fn command(&self) -> Vec<String> {
        let line = self.text.lines().find_map(|line| line.strip_prefix("ExecStart=/usr/bin/snowskin "));
        line.unwrap_or_default().split_whitespace().map(str::to_owned).collect()
    }

    /// What is wrong with the command line.
    pub(super) fn judge(&self, program: &Program) -> Vec<String> {
        let findings = program.judge(&self.command());
        findings.into_iter().map(|what| format!("{}: {what}", self.name)).collect()
    }
}

/// What systemd reports about the units and the files beside them; `None` when it is not installed.
///
/// # Errors
/// It cannot be run.
pub(super) fn judge_by_systemd(dir: &Path, units: &[Unit], scratch: &Path) -> Result<Option<Vec<String>>> {
    if Cmd::new("systemd-analyze --version").stdout(dir).is_none() {
        return Ok(None);
    }
    let root = scratch.join("systemd");
    prepare(&root, units)?;
    let at_root = format!("--root={}", root.display());
    let mut findings = Vec::new();

    // It only warns about unknown keys, and still succeeds.
    let mut verify = Command::new("systemd-analyze");
    verify.args(["verify", "--man=no", &at_root]).args(units.iter().map(|unit| unit.name.replace('@', "@0")));
    findings.extend(said(&mut verify)?.1);
    for (tool, file) in [("systemd-sysusers", "sysusers.conf"), ("systemd-tmpfiles", "tmpfiles.conf")] {
        let mut command = Command::new(tool);
        command.arg(&at_root).args((tool == "systemd-tmpfiles").then_some("--create")).arg(dir.join(file));
        let (worked, lines) = said(&mut command)?;
        if !worked {
            findings.push(format!("{file}: {}", lines.join(" ")));
        }
    }
    for unit in units {
        let mut security = Command::new("systemd-analyze");
        security.args(["security", "--offline=true", "--no-pager", &format!("--threshold={EXPOSURE_MAX}")]);
        let (held_in, lines) = said(security.arg(&unit.path))?;
        let verdict =
            lines.last().map(|line| line.trim_start_matches(['→', ' ']).to_owned()).unwrap_or_default();
        println!("      {verdict}");
        if !held_in {
            findings.push(format!("{}: more exposed than {EXPOSURE_MAX} of 100: {verdict}", unit.name));
        }
    }
    Ok(Some(findings))
}

/// Creates a root directory with the host's units, ours, and a program with our name.
fn prepare(root: &Path, units: &[Unit]) -> Result<()> {
    let ours = root.join("etc/systemd/system");
    for dir in [&ours, &root.join("usr/bin"), &root.join("usr/lib/systemd/system"), &root.join("run")] {
        fs::create_dir_all(dir)?;
    }
    for unit in units {
        fs::copy(&unit.path, ours.join(&unit.name))?;
    }
    // Any program: systemd only checks that it exists.
    fs::copy("/bin/true", root.join("usr/bin/snowskin"))?;
    // As hosts have it, for units that are reloaded by a signal.
    fs::create_dir_all(root.join("bin"))?;
    fs::copy("/bin/true", root.join("bin/kill"))?;
    for entry in fs::read_dir("/usr/lib/systemd/system").context("this host has no units of systemd")? {
        let path = entry?.path();
        if let (true, Some(name)) = (path.is_file(), path.file_name()) {
            fs::copy(&path, root.join("usr/lib/systemd/system").join(name))?;
        }
    }
    Ok(())
}

/// Whether it succeeded, and the lines of its stdout and stderr.
fn said(command: &mut Command) -> Result<(bool, Vec<String>)> {
    let output = command.stdin(Stdio::null()).output()?;
    let text = [output.stdout, output.stderr].concat();
    let text = String::from_utf8_lossy(&text).into_owned();
    let lines = text.lines().filter(|line| !line.trim().is_empty()).map(str::to_owned).collect();
    Ok((output.status.success(), lines))
}

/// Checks a file of kernel settings: each line is a comment or `name = value`, and the kernel has that name.
pub(super) fn judge_sysctl(path: &Path) -> Result<Vec<String>> {
    let text = fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    let lines = text.lines().filter(|line| !line.is_empty() && !line.starts_with('#'));
    let wrong = lines.filter_map(|line| match line.split_once(" = ") {
        None => Some(format!("sysctl.conf: `{line}` is not a setting")),
        Some((name, _)) => {
            let there = Path::new("/proc/sys").join(name.replace('.', "/")).exists();
            // A kernel may be built without some settings: those of containers and small machines lack NUMA.
            let optional = name.contains("numa") || name.contains("zone");
            (!there && !optional).then(|| format!("sysctl.conf: the kernel has no `{name}`"))
        }
    });
    Ok(wrong.collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_typing_error_in_a_unit_is_found_where_systemd_is_installed() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("bad.service");
        let text = "[Service]\nExecStart=/usr/bin/snowskin master --listen x\nProtectHoem=yes\n";
        fs::write(&path, text).expect("written");
        for file in ["sysusers.conf", "tmpfiles.conf"] {
            fs::write(dir.path().join(file), "").expect("written");
        }
        let units = read(dir.path()).expect("one unit");
        assert_eq!(units[0].command(), ["master", "--listen", "x"]);
        match judge_by_systemd(dir.path(), &units, dir.path()).expect("it runs") {
            None => println!("not tried: systemd-analyze is not installed"),
            Some(findings) => {
                assert!(findings.iter().any(|finding| finding.contains("ProtectHoem")), "{findings:?}");
                assert!(findings.iter().any(|finding| finding.contains("more exposed")), "{findings:?}");
            }
        }
    }
}
