//! The parts that the initiator and the target both work with, and that neither owns.

use te_fabric::Timers;

use crate::config::Config;
use crate::io::Io;
use crate::memory::LocalMemory;
use crate::sys::verbs::Verbs;

/// What a step of the initiator or of the target works with, lent for one call.
pub(crate) struct Env<'a, V: Verbs> {
    pub(crate) io: &'a mut Io<V>,
    pub(crate) memory: &'a mut LocalMemory,
    pub(crate) timers: &'a mut Timers,
    pub(crate) config: &'a Config,
}
