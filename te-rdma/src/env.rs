//! The parts that both the initiator and the target work with.

use te_fabric::Timers;

use crate::config::Config;
use crate::io::Io;
use crate::memory::LocalMemory;
use crate::sys::verbs::Verbs;

/// The shared parts, lent to the initiator or the target for one call.
pub(crate) struct Env<'a, V: Verbs> {
    pub(crate) io: &'a mut Io<V>,
    pub(crate) memory: &'a mut LocalMemory,
    pub(crate) timers: &'a mut Timers,
    pub(crate) config: &'a Config,
}
