//! `--version --verbose`: which build this is.

/// The version and the build information, one item per line.
pub(crate) fn text() -> String {
    format!(
        "snowskin {}\ncommit: {}\nfeatures: {}\ntarget: {}\nprofile: {}\nrustc: {}\n",
        env!("CARGO_PKG_VERSION"),
        env!("SNOWSKIN_BUILD_COMMIT"),
        env!("SNOWSKIN_BUILD_FEATURES"),
        env!("SNOWSKIN_BUILD_TARGET"),
        env!("SNOWSKIN_BUILD_PROFILE"),
        env!("SNOWSKIN_BUILD_RUSTC"),
    )
}

/// Whether these arguments (without the program's name) request that: `--version` and `--verbose` in any
/// order and nothing else. With `--version` alone, clap prints the version and ends.
pub(crate) fn is_asked(arguments: impl Iterator<Item = std::ffi::OsString>) -> bool {
    let (mut version, mut verbose) = (false, false);
    for argument in arguments {
        match argument.to_str() {
            Some("--version" | "-V") => version = true,
            Some("--verbose" | "-v" | "-vv" | "-vvv") => verbose = true,
            Some("-Vv" | "-vV") => (version, verbose) = (true, true),
            _ => return false,
        }
    }
    version && verbose
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_asked_for_by_both_flags_in_any_order_and_by_nothing_else() {
        let asked = |text: &str| is_asked(text.split_whitespace().map(Into::into));
        for text in ["--version --verbose", "-v -V", "-Vv", "--verbose --version"] {
            assert!(asked(text), "{text}");
        }
        for text in ["", "--version", "-v", "-v master --version", "put --version -v"] {
            assert!(!asked(text), "{text}");
        }
    }
}
