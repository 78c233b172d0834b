//! Slots and hops, over a device that is not there.
