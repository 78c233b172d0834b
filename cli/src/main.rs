//! The `snowskin` binary. The implementation is in the library of this crate, where tests and fuzz targets
//! can use it.

fn main() -> std::process::ExitCode {
    cli::main()
}
