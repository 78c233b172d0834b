//! stub
use crate::Outcome;
/// Stub.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {}
pub(crate) fn run(_: &Args) -> Outcome {
    Ok(crate::exit::Exit::Ok)
}
