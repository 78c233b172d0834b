//! In place of reads from namespaces, in a build without the feature `nvmeof`.

use std::io;
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::Duration;

use super::{NotDirect, Settings, Shared};
use crate::packs::PackEnd;
use crate::stage::Exported;

pub(super) fn start(_: Settings, _: Sender<PackEnd>) -> io::Result<Arc<Shared>> {
    Err(io::ErrorKind::Unsupported.into())
}

pub(super) fn check(_: &Exported, _: Duration) -> Result<(), NotDirect> {
    Err(NotDirect::Unreachable)
}
