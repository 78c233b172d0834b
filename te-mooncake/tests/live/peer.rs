//! The process of a Mooncake engine, and the Python that it needs.

use std::io::{BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::OnceLock;

use serde_json::Value;

/// What is installed where `MOONCAKE_PYTHON` is not set.
const WHEEL: &str = "mooncake-transfer-engine-non-cuda";

/// A Python with the wheel, or why there is none.
pub(crate) fn python() -> &'static Result<PathBuf, String> {
    static PYTHON: OnceLock<Result<PathBuf, String>> = OnceLock::new();
    PYTHON.get_or_init(|| match std::env::var_os("MOONCAKE_PYTHON") {
        Some(path) => check(&PathBuf::from(path)),
        None => installed(),
    })
}

fn check(python: &Path) -> Result<PathBuf, String> {
    let imported = Command::new(python).args(["-c", "import mooncake.engine"]).output();
    match imported {
        Ok(output) if output.status.success() => Ok(python.into()),
        Ok(output) => {
            let last = String::from_utf8_lossy(&output.stderr).lines().last().unwrap_or_default().to_owned();
            Err(format!("{} has no mooncake.engine: {last}", python.display()))
        }
        Err(error) => Err(format!("{}: {error}", python.display())),
    }
}

/// The environment in the target directory, which other tests and benches use, too.
fn installed() -> Result<PathBuf, String> {
    let test = std::env::current_exe().map_err(|error| error.to_string())?;
    // target/PROFILE/deps/TEST
    let target = test.ancestors().nth(3).ok_or("the test is not in a target directory")?;
    let environment = target.join("peers");
    let python = environment.join("bin/python");
    if check(&python).is_ok() {
        return Ok(python);
    }
    run(Command::new("python3").args(["-m", "venv"]).arg(&environment))?;
    run(Command::new(&python).args([
        "-m",
        "pip",
        "install",
        "-q",
        "--retries",
        "1",
        "--timeout",
        "20",
        WHEEL,
    ]))?;
    check(&python)
}

fn run(command: &mut Command) -> Result<(), String> {
    let output = command.stdin(Stdio::null()).output().map_err(|error| format!("{command:?}: {error}"))?;
    if output.status.success() {
        return Ok(());
    }
    let last = String::from_utf8_lossy(&output.stderr).lines().last().unwrap_or_default().to_owned();
    Err(format!("{command:?}: {last}"))
}

/// A Mooncake engine with one registered buffer, killed when dropped.
pub(crate) struct Peer {
    /// The name of its segment.
    pub(crate) name: String,
    /// The address of its buffer.
    pub(crate) base: u64,
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Peer {
    pub(crate) fn start(host: &str, metadata: &str, bytes: u64) -> Self {
        Self::start_with(host, metadata, bytes, &[])
    }

    /// With variables of Mooncake's in its environment.
    pub(crate) fn start_with(host: &str, metadata: &str, bytes: u64, variables: &[(&str, &str)]) -> Self {
        let python = python().as_ref().unwrap();
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/live/peer.py");
        let mut child = Command::new(python)
            .arg(script)
            .args([host, metadata, &bytes.to_string()])
            .envs(variables.iter().copied())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let (input, output) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        let mut this = Self { name: String::new(), base: 0, child, input, output: BufReader::new(output) };
        let ready = this.answer();
        this.name = ready[0].as_str().unwrap().into();
        this.base = ready[1].as_u64().unwrap();
        this
    }

    /// Calls a function of the script.
    pub(crate) fn call(&mut self, call: Value) -> Value {
        writeln!(self.input, "{call}").unwrap();
        self.answer()
    }

    pub(crate) fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    fn answer(&mut self) -> Value {
        let mut line = String::new();
        self.output.read_line(&mut line).unwrap();
        assert!(!line.is_empty(), "the Mooncake engine has ended: {:?}", self.child.try_wait());
        serde_json::from_str(&line).unwrap()
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The CRC-32 of zlib.
pub(crate) fn crc32(bytes: &[u8]) -> u32 {
    static TABLE: OnceLock<[u32; 256]> = OnceLock::new();
    let table = TABLE.get_or_init(|| {
        std::array::from_fn(|byte| {
            (0..8).fold(byte as u32, |crc, _| if crc & 1 == 1 { crc >> 1 ^ 0xedb8_8320 } else { crc >> 1 })
        })
    });
    !bytes.iter().fold(!0, |crc, byte| crc >> 8 ^ table[(crc as u8 ^ byte) as usize])
}
