//! What bindgen needs of clang.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Where bindgen finds libclang, or that it does not.
pub(crate) fn libclang() -> Result<Option<PathBuf>, String> {
    if std::env::var_os("LIBCLANG_PATH").is_some() {
        return Ok(None);
    }
    let is_it = |entry: &fs::DirEntry| {
        let name = entry.file_name().to_string_lossy().into_owned();
        name.starts_with("libclang.so") || name.starts_with("libclang-") && name.contains(".so")
    };
    let versions =
        fs::read_dir("/usr/lib").into_iter().flatten().flatten().map(|entry| entry.path().join("lib"));
    let mut dirs = versions
        .chain(["/usr/lib64", "/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu"].map(PathBuf::from));
    let found = dirs.find(|dir| fs::read_dir(dir).into_iter().flatten().flatten().any(|entry| is_it(&entry)));
    found.map(Some).ok_or_else(|| "libclang is not installed, which bindgen needs: set LIBCLANG_PATH".into())
}

/// Where the C compiler's own headers are, for a libclang that comes without its own.
pub(crate) fn compiler_headers(cc: &str) -> Option<String> {
    let output = Command::new(cc).arg("-print-file-name=include").output().ok()?;
    let path = String::from_utf8(output.stdout).ok()?.trim().to_owned();
    Path::new(&path).is_dir().then_some(path)
}
