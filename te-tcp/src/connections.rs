//! The table of connections. While one is being worked on it is taken out; its slot stays reserved.

use core::ops::{Deref, DerefMut};

use te_fabric::Slab;

use crate::initiator::OutLane;
use crate::lane::Lane;
use crate::target::InLane;

/// A connection, by who opened it.
#[derive(Debug)]
pub(crate) enum Connection {
    /// We did: our operations.
    Out(Box<Lane<OutLane>>),
    /// A peer did: its operations.
    In(Box<Lane<InLane>>),
}

/// Connections by index: a slab that tells them apart by who opened them. The name of a slot is what its events carry.
#[derive(Debug, Default)]
pub(crate) struct Connections(Slab<Connection>);

impl Deref for Connections {
    type Target = Slab<Connection>;

    fn deref(&self) -> &Self::Target {
        &self.0
    }
}

impl DerefMut for Connections {
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut self.0
    }
}

impl Connections {
    pub(crate) fn take_out(&mut self, index: u32) -> Option<Box<Lane<OutLane>>> {
        match self.take(index)? {
            Connection::Out(lane) => Some(lane),
            other => {
                self.put(index, other);
                None
            }
        }
    }

    pub(crate) fn take_in(&mut self, index: u32) -> Option<Box<Lane<InLane>>> {
        match self.take(index)? {
            Connection::In(lane) => Some(lane),
            other => {
                self.put(index, other);
                None
            }
        }
    }

    pub(crate) fn out(&self, index: u32) -> Option<&Lane<OutLane>> {
        match self.get(index)? {
            Connection::Out(lane) => Some(lane),
            Connection::In(_) => None,
        }
    }

    pub(crate) fn in_mut(&mut self, index: u32) -> Option<&mut Lane<InLane>> {
        match self.get_mut(index)? {
            Connection::In(lane) => Some(lane),
            Connection::Out(_) => None,
        }
    }
}
