//! `cargo xtask wheel`: the Python wheels, checked, and tested on request.
//!
//! ```text
//!   a Python ≥ 3.11 ──▶ target/wheel/tools (venv): maturin
//!   cargo build -p cli ──▶ snowskin.data/scripts/snowskin ─┐
//!   maturin build ─────────────────────────────────────────┴─▶ snowskin-….whl        ──▶ size, tag, contents
//!   pip wheel bindings/mooncake ───────────────────────────────▶ snowskin_mooncake-….whl
//!   --test: target/wheel/clean (venv, made anew) ◀── both wheels ──▶ pytest
//! ```
//!
//! The last two lines of its output are the paths of the two wheels.

mod inspect;
mod python;

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail, ensure};

use crate::cmd::Cmd;
use crate::host;
use python::Python;

/// Largest wheel, bytes.
const WHEEL_BYTES_MAX: u64 = 15_000_000;
/// Oldest maturin that sets what pyo3 reads to build an extension module.
const MATURIN: &str = "maturin>=1.9.4,<2";
/// What the tests of the wheels need.
const TEST_PACKAGES: &str = "aiohttp mypy>=1.10 numpy>=1.24 pytest>=7 requests";

/// Options of `cargo xtask wheel`.
#[derive(clap::Args, Default)]
pub(crate) struct Args {
    /// Install the wheels into a clean virtual environment and run their tests there.
    #[arg(long)]
    test: bool,
    /// Further arguments for pytest, with `--test`.
    #[arg(long, value_name = "ARGUMENTS", allow_hyphen_values = true, default_value = "")]
    pytest: String,
    /// Directory for the wheels. Default: `target/wheel/dist`.
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// The Python that runs the tools and the tests, at least 3.11. Default: the first that is found.
    #[arg(long, value_name = "PROGRAM")]
    python: Option<String>,
    /// Build for this interpreter alone, without the stable ABI: for `python3.14t`, which has none.
    #[arg(long, value_name = "PROGRAM")]
    interpreter: Option<String>,
    /// Link with zig, for systems with an older C library: `manylinux_2_28`, `manylinux2014`.
    #[arg(long, value_name = "POLICY")]
    zig: Option<String>,
}

impl Args {
    /// As CI builds and tests the wheels.
    pub(crate) fn tested() -> Self {
        Self { test: true, ..Self::default() }
    }
}

/// Why wheels cannot be built here; `None`: they can.
pub(crate) fn obstacle() -> Option<String> {
    python::find(None).err().map(|error| format!("{error:#}"))
}

/// Builds, checks and tests the wheels.
///
/// # Errors
/// A tool is missing or fails, a wheel breaks a rule, a test fails.
pub(crate) fn run(args: &Args) -> Result<()> {
    let wheels = build(args)?;
    if args.test {
        test(args, &wheels)?;
    }
    wheels.iter().for_each(|wheel| println!("{}", wheel.display()));
    Ok(())
}

/// Builds and checks the wheels: the one with the native module, and the one of the package `mooncake`.
///
/// # Errors
/// A tool is missing or fails, a wheel breaks a rule.
pub(crate) fn build(args: &Args) -> Result<[PathBuf; 2]> {
    let root = host::workspace_root();
    let dir = target_dir(&root)?.join("wheel");
    let out = args.out.clone().unwrap_or_else(|| dir.join("dist"));
    fs::create_dir_all(&out).with_context(|| format!("cannot create {}", out.display()))?;
    let python = python::find(args.python.as_deref())?;
    println!("    {python}");

    let tools = python.environment(&dir.join("tools"), false)?;
    let mut packages = vec![MATURIN, "setuptools>=61", "wheel"];
    if args.zig.is_some() {
        packages.push("ziglang");
    }
    tools.install(&root, &packages)?;

    let native = build_native(args, &root, &out, &tools)?;
    inspect::check(&tools, &root, &native, WHEEL_BYTES_MAX)?;
    Ok([native, build_mooncake(&root, &out, &tools)?])
}

/// The wheel with the native module and the program.
fn build_native(args: &Args, root: &Path, out: &Path, tools: &Python) -> Result<PathBuf> {
    let package = root.join("bindings/python");
    // The same function as for `pip install .`.
    let place =
        "import sys; sys.path.insert(0, 'build'); import snowskin_build; snowskin_build.place_program()";
    run_in(&package, tools.cmd().arg("-c").arg(place))?;
    let mut maturin = tools.cmd().words("-m maturin build --locked --auditwheel check --out");
    maturin = maturin.arg(out.display().to_string());
    match &args.interpreter {
        Some(interpreter) => maturin = maturin.arg("--interpreter").arg(interpreter),
        None => maturin = maturin.arg("--interpreter").arg(tools.program()),
    }
    if let Some(policy) = &args.zig {
        maturin = maturin.arg("--zig").arg("--compatibility").arg(policy);
    }
    remove_wheels(out, "snowskin-")?;
    run_in(&package, maturin)?;
    only_wheel(out, "snowskin-")
}

/// The wheel of the package `mooncake`, which is pure Python.
fn build_mooncake(root: &Path, out: &Path, tools: &Python) -> Result<PathBuf> {
    remove_wheels(out, "snowskin_mooncake-")?;
    let wheel = tools.cmd().words("-m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir");
    run_in(root, wheel.arg(out.display().to_string()).arg("./bindings/mooncake"))?;
    only_wheel(out, "snowskin_mooncake-")
}

/// Installs the wheels where nothing else is, and runs their tests.
fn test(args: &Args, wheels: &[PathBuf]) -> Result<()> {
    let root = host::workspace_root();
    let clean =
        python::find(args.python.as_deref())?.environment(&target_dir(&root)?.join("wheel/clean"), true)?;
    let mut packages: Vec<String> = TEST_PACKAGES.split(' ').map(str::to_owned).collect();
    packages.extend(wheels.iter().map(|wheel| wheel.display().to_string()));
    clean.install(&root, &packages.iter().map(String::as_str).collect::<Vec<_>>())?;
    let mut failed = Vec::new();
    for tests in ["bindings/python/tests", "bindings/mooncake/tests"] {
        let pytest = clean.cmd().words("-m pytest --quiet -p no:cacheprovider").words(&args.pytest);
        if let Err(error) = run_in(&root, pytest.arg(tests)) {
            failed.push(format!("{tests}: {error:#}"));
        }
    }
    ensure!(failed.is_empty(), "{}", failed.join("; "));
    Ok(())
}

fn target_dir(root: &Path) -> Result<PathBuf> {
    let metadata = Cmd::new("cargo metadata --no-deps --format-version 1 --quiet")
        .stdout(root)
        .context("`cargo metadata` failed: run it by hand to see why")?;
    let metadata: serde_json::Value = serde_json::from_str(&metadata)?;
    Ok(metadata["target_directory"].as_str().context("no target_directory")?.into())
}

fn run_in(dir: &Path, cmd: Cmd) -> Result<()> {
    println!("    $ {cmd}");
    cmd.run(dir, None).with_context(|| format!("`{cmd}` failed"))
}

fn wheels(dir: &Path, prefix: &str) -> Result<Vec<PathBuf>> {
    let entries = fs::read_dir(dir).with_context(|| format!("cannot read {}", dir.display()))?;
    let paths = entries.filter_map(|entry| Some(entry.ok()?.path()));
    let is_wheel = |path: &PathBuf| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        name.starts_with(prefix) && name.ends_with(".whl")
    };
    Ok(paths.filter(is_wheel).collect())
}

/// Wheels of earlier builds would hide which one is new.
fn remove_wheels(dir: &Path, prefix: &str) -> Result<()> {
    for wheel in wheels(dir, prefix)? {
        fs::remove_file(&wheel).with_context(|| format!("cannot remove {}", wheel.display()))?;
    }
    Ok(())
}

fn only_wheel(dir: &Path, prefix: &str) -> Result<PathBuf> {
    match wheels(dir, prefix)?.as_slice() {
        [wheel] => Ok(wheel.clone()),
        found => bail!("{} wheels named {prefix}*.whl in {}, not one", found.len(), dir.display()),
    }
}
