//! The `snowskin` binary. Everything it does is in the library beside it, where tests and fuzz targets reach it too.

fn main() -> std::process::ExitCode {
    cli::main()
}
