//! stub
use crate::{Outcome, args::Global};
/// Stub.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {}
pub(crate) fn run(_: &Args, _: Global) -> Outcome {
    Ok(crate::exit::Exit::Ok)
}
