//! What the tests of the C libraries share: an installation in a temporary directory, a C compiler, and the
//! symbols of a library. The tests of each crate include this file.
#![allow(clippy::unwrap_used, reason = "a test that fails reports the line")]
#![allow(dead_code, reason = "each of the tests uses a part")]

pub(crate) mod elf;

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use libtest_mimic::{Completion, Failed, Trial};
use tempfile::TempDir;

/// System libraries that a static library needs, as `rustc --print native-static-libs` lists them.
const NATIVE: [&str; 6] = ["-lgcc_s", "-lutil", "-lrt", "-lpthread", "-lm", "-ldl"];
/// What every program is compiled with.
const WARNINGS: [&str; 4] = ["-Wall", "-Wextra", "-Werror", "-pedantic"];

/// A library of this workspace.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Library {
    /// Its name, without `lib`.
    pub(crate) name: &'static str,
    /// Its header in `bindings/c/include`.
    pub(crate) header: &'static str,
    /// The crate's directory, as `CARGO_MANIFEST_DIR` has it.
    pub(crate) dir: &'static str,
}

/// A directory with the library as `cargo xtask install-c` installs it.
pub(crate) struct Prefix {
    library: Library,
    dir: TempDir,
}

/// The C compiler, or why there is none.
pub(crate) fn compiler() -> Result<String, String> {
    let cc = std::env::var("CC").unwrap_or_else(|_| "cc".into());
    match Command::new(&cc).arg("--version").output() {
        Ok(output) if output.status.success() => Ok(cc),
        _ => Err(format!("there is no C compiler `{cc}`: install one, or set CC")),
    }
}

/// The C++ compiler, or why there is none.
pub(crate) fn cxx_compiler() -> Result<String, String> {
    let cxx = std::env::var("CXX").unwrap_or_else(|_| "c++".into());
    match Command::new(&cxx).arg("--version").output() {
        Ok(output) if output.status.success() => Ok(cxx),
        _ => Err(format!("there is no C++ compiler `{cxx}`: install one, or set CXX")),
    }
}

/// A test that is ignored, with the reason, if `needs` returns one.
pub(crate) fn trial<N: Send + 'static>(
    name: impl Into<String>,
    needs: impl FnOnce() -> Result<N, String> + Send + 'static,
    test: impl FnOnce(N) + Send + 'static,
) -> Trial {
    Trial::ignorable_test(name, move || match needs() {
        Ok(needed) => {
            test(needed);
            Ok(Completion::Completed)
        }
        Err(missing) => {
            eprintln!("ignored: {missing}");
            Ok::<_, Failed>(Completion::ignored_with(missing))
        }
    })
}

/// Runs a command and returns its output.
///
/// # Panics
/// If it fails: with what it printed.
pub(crate) fn run(command: &mut Command) -> String {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(
        output.status.success(),
        "{command:?}: {}\n{}{}",
        output.status,
        text(&output.stdout),
        text(&output.stderr)
    );
    text(&output.stdout)
}

impl Library {
    /// Where cargo put the library when it built this test.
    pub(crate) fn built(&self, extension: &str) -> PathBuf {
        let test = std::env::current_exe().unwrap();
        test.parent().unwrap().join(format!("lib{}.{extension}", self.name))
    }

    /// A file below the crate's directory.
    pub(crate) fn file(&self, path: &str) -> PathBuf {
        Path::new(self.dir).join(path)
    }

    /// A file of `bindings/c`.
    fn shared_file(&self, path: &str) -> PathBuf {
        Path::new(self.dir).parent().unwrap().join(path)
    }

    pub(crate) fn header_text(&self) -> String {
        fs::read_to_string(self.shared_file("include").join(self.header)).unwrap()
    }
}

impl Prefix {
    pub(crate) fn new(library: Library) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let this = Self { library, dir };
        fs::create_dir_all(this.path("lib/pkgconfig")).unwrap();
        fs::create_dir(this.path("include")).unwrap();
        let name = format!("lib{}.so", library.name);
        let version = env!("CARGO_PKG_VERSION");
        fs::copy(library.built("so"), this.path(&format!("lib/{name}.{version}"))).unwrap();
        fs::copy(library.built("a"), this.path(&format!("lib/lib{}.a", library.name))).unwrap();
        for link in [format!("lib/{name}.0"), format!("lib/{name}")] {
            std::os::unix::fs::symlink(format!("{name}.{version}"), this.path(&link)).unwrap();
        }
        fs::write(this.path("include").join(library.header), library.header_text()).unwrap();
        let pc = format!("{}.pc", library.name);
        let template = fs::read_to_string(library.shared_file(&format!("pkgconfig/{pc}.in"))).unwrap();
        let prefix = this.dir.path().to_str().unwrap();
        let text = template.replace("@PREFIX@", prefix).replace("@VERSION@", version);
        fs::write(this.path("lib/pkgconfig").join(pc), text).unwrap();
        this
    }

    pub(crate) fn path(&self, path: &str) -> PathBuf {
        self.dir.path().join(path)
    }

    /// Compiles a program of the crate's `tests/c` against the shared library.
    pub(crate) fn compile(&self, cc: &str, source: &str, standard: &str) -> PathBuf {
        let lib = self.path("lib");
        let link = [
            "-L".into(),
            lib.clone().into_os_string(),
            format!("-l{}", self.library.name).into(),
            format!("-Wl,-rpath,{}", lib.display()).into(),
        ];
        self.compile_with(cc, source, standard, link)
    }

    /// Compiles a program of the crate's `tests/c` against the static library.
    pub(crate) fn compile_static(&self, cc: &str, source: &str) -> PathBuf {
        let archive = self.path(&format!("lib/lib{}.a", self.library.name)).into_os_string();
        let link = std::iter::once(archive).chain(NATIVE.map(Into::into));
        self.compile_with(cc, source, "c99", link)
    }

    pub(crate) fn compile_with(
        &self,
        compiler: &str,
        source: &str,
        standard: &str,
        link: impl IntoIterator<Item = impl AsRef<OsStr>>,
    ) -> PathBuf {
        let program = self.path(&format!("{}-{standard}", source.replace('.', "-")));
        let mut command = Command::new(compiler);
        if standard.starts_with("c++") {
            command.args(["-x", "c++"]);
        }
        let mut command = &mut command;
        command = command.arg(format!("-std={standard}")).args(WARNINGS).arg("-I").arg(self.path("include"));
        command.arg(self.library.file("tests/c").join(source));
        if standard.starts_with("c++") {
            command.args(["-x", "none"]);
        }
        run(command.args(link).arg("-o").arg(&program));
        program
    }
}

/// The functions that a header declares.
pub(crate) fn functions(header: &str) -> BTreeSet<String> {
    let mut text = String::new();
    let mut rest = header;
    while let Some(at) = rest.find("/*") {
        text.push_str(&rest[..at]);
        rest = rest[at..].split_once("*/").unwrap().1;
    }
    text.push_str(rest);
    let code: String =
        text.lines().filter(|line| !line.trim_start().starts_with('#')).collect::<Vec<_>>().join("\n");
    let code = code.replace("extern \"C\" {", "");
    // Bodies of structures and enumerations hold no functions.
    let mut depth = 0;
    let flat: String = code
        .chars()
        .filter(|c| {
            depth += i32::from(*c == '{');
            let keep = depth <= 0;
            depth -= i32::from(*c == '}');
            keep
        })
        .collect();
    let declared = flat.split(';').filter(|statement| !statement.trim_start().starts_with("typedef"));
    declared
        .filter_map(|statement| {
            let (before, _) = statement.split_once('(')?;
            let name = before.rsplit(|c: char| !c.is_alphanumeric() && c != '_').next()?;
            (!name.is_empty()).then(|| name.to_owned())
        })
        .collect()
}

/// Checks that the shared library exports what its header declares and nothing else, and depends on nothing
/// but libc.
pub(crate) fn check_symbols(library: Library) {
    let elf = elf::Elf::read(&library.built("so"));
    let declared = functions(&library.header_text());
    assert!(declared.len() > 10, "{declared:?}");
    assert_eq!(elf.exported(), declared);
    assert_eq!(elf.soname().as_deref(), Some(format!("lib{}.so.0", library.name).as_str()));
    for needed in elf.needed() {
        let of_system =
            ["libc.so.", "libm.so.", "libgcc_s.so.", "ld-linux", "libdl.so.", "libpthread.so.", "librt.so."];
        assert!(of_system.iter().any(|known| needed.starts_with(known)), "it needs {needed}");
    }
}

/// Checks that pkg-config describes the installation so that a program builds with it.
pub(crate) fn check_pkg_config(library: Library, cc: &str, source: &str) {
    let prefix = Prefix::new(library);
    let flags = run(Command::new("pkg-config").env("PKG_CONFIG_PATH", prefix.path("lib/pkgconfig")).args([
        "--cflags",
        "--libs",
        library.name,
    ]));
    let rpath = format!("-Wl,-rpath,{}", prefix.path("lib").display());
    let program = prefix.compile_with(cc, source, "c11", flags.split_whitespace().chain([rpath.as_str()]));
    run(&mut Command::new(program));
}

/// pkg-config and a C compiler, or what is missing.
pub(crate) fn pkg_config() -> Result<String, String> {
    match Command::new("pkg-config").arg("--version").output() {
        Ok(output) if output.status.success() => compiler(),
        _ => Err("pkg-config is not installed".into()),
    }
}
