//! The table of connections: an index that the poller keeps and a generation that makes late events harmless.

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

#[derive(Debug)]
struct Slot {
    generation: u32,
    reserved: bool,
    connection: Option<Connection>,
}

/// Connections by index. While one is being worked on it is taken out; its slot stays reserved.
#[derive(Debug, Default)]
pub(crate) struct Connections {
    slots: Vec<Slot>,
    free: Vec<u32>,
}

impl Connections {
    /// Slots in use.
    pub(crate) fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Slots there ever were: the bound for a walk over all indexes.
    pub(crate) fn bound(&self) -> u32 {
        self.slots.len() as u32
    }

    /// Reserves a slot; gives its index and the name that its events carry.
    pub(crate) fn reserve(&mut self) -> (u32, u64) {
        let index = self.free.pop().unwrap_or_else(|| {
            self.slots.push(Slot { generation: 0, reserved: false, connection: None });
            self.slots.len() as u32 - 1
        });
        let slot = &mut self.slots[index as usize];
        slot.reserved = true;
        (index, u64::from(slot.generation) << 32 | u64::from(index))
    }

    /// The name that events of slot `index` carry.
    pub(crate) fn name(&self, index: u32) -> u64 {
        let generation = self.slots.get(index as usize).map_or(0, |slot| slot.generation);
        u64::from(generation) << 32 | u64::from(index)
    }

    /// The index behind an event's name, unless the connection is gone.
    pub(crate) fn index(&self, name: u64) -> Option<u32> {
        let index = name as u32;
        let slot = self.slots.get(index as usize)?;
        (slot.reserved && u64::from(slot.generation) == name >> 32).then_some(index)
    }

    pub(crate) fn put(&mut self, index: u32, connection: Connection) {
        if let Some(slot) = self.slots.get_mut(index as usize) {
            slot.connection = Some(connection);
        }
    }

    pub(crate) fn take(&mut self, index: u32) -> Option<Connection> {
        self.slots.get_mut(index as usize)?.connection.take()
    }

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

    pub(crate) fn get(&self, index: u32) -> Option<&Connection> {
        self.slots.get(index as usize)?.connection.as_ref()
    }

    #[cfg(feature = "uring")]
    pub(crate) fn get_mut(&mut self, index: u32) -> Option<&mut Connection> {
        self.slots.get_mut(index as usize)?.connection.as_mut()
    }

    pub(crate) fn out(&self, index: u32) -> Option<&Lane<OutLane>> {
        match self.get(index)? {
            Connection::Out(lane) => Some(lane),
            Connection::In(_) => None,
        }
    }

    pub(crate) fn in_mut(&mut self, index: u32) -> Option<&mut Lane<InLane>> {
        match self.slots.get_mut(index as usize)?.connection.as_mut()? {
            Connection::In(lane) => Some(lane),
            Connection::Out(_) => None,
        }
    }

    /// Frees a slot whose connection has been taken out and is gone.
    pub(crate) fn release(&mut self, index: u32) {
        if let Some(slot) = self.slots.get_mut(index as usize)
            && slot.reserved
        {
            slot.reserved = false;
            slot.connection = None;
            slot.generation = slot.generation.wrapping_add(1);
            self.free.push(index);
        }
    }
}
