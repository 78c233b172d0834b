//! The commands of one queue: their identifiers, and how far their data is. No I/O.

use te_core::Error;

use crate::controller::Admin;
use crate::pdu::{self, Fatal};
use crate::sys::Pinned;

/// What a command is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// The association itself; its data is collected.
    Admin(Admin),
    Read,
    Write,
}

/// Data that the target has asked for and that was not handed to the socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Wanted {
    pub(crate) ttag: u16,
    pub(crate) end: u32,
}

/// A command without a response.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Command {
    pub(crate) purpose: Purpose,
    /// The operation that it is a piece of.
    pub(crate) slot: u32,
    /// The local memory; `None` once the operation has ended.
    pub(crate) memory: Option<Pinned>,
    pub(crate) len: u32,
    /// Of a READ: bytes that have arrived. Of a WRITE: bytes that were handed to the socket.
    pub(crate) moved: u32,
    pub(crate) wanted: Option<Wanted>,
    /// The target has asked for data of it.
    pub(crate) was_asked: bool,
    /// Its operation has not ended. One that was abandoned keeps its identifier until its response.
    pub(crate) live: bool,
    /// When it was abandoned, on the clock of fences. Of a command of the association: the number of the
    /// region that it is about.
    pub(crate) stamp: u64,
    /// Its data was damaged on its route.
    pub(crate) error: Option<Error>,
}

impl Command {
    pub(crate) const fn new(purpose: Purpose, slot: u32, memory: Option<Pinned>, len: u32) -> Self {
        Self {
            purpose,
            slot,
            memory,
            len,
            moved: 0,
            wanted: None,
            was_asked: false,
            live: true,
            stamp: 0,
            error: None,
        }
    }

    /// A command of the association, about the region with this number.
    pub(crate) const fn of_association(what: Admin, sequence: u64, len: u32) -> Self {
        let mut command = Self::new(Purpose::Admin(what), 0, None, len);
        command.stamp = sequence;
        command
    }

    /// Where the data of a C2HData PDU belongs, and whether it is the last.
    ///
    /// # Errors
    /// The error that ends the connection: data that the command does not expect.
    pub(crate) fn incoming(&self, offset: u32, len: u32) -> Result<Option<Pinned>, Fatal> {
        if !matches!(self.purpose, Purpose::Read) {
            return Err(Fatal::Field(8));
        }
        let end = offset.checked_add(len).ok_or(Fatal::OutOfRange(pdu::LEN_AT))?;
        if offset != self.moved {
            return Err(Fatal::OutOfRange(pdu::OFFSET_AT));
        }
        if end > self.len {
            return Err(Fatal::OutOfRange(pdu::LEN_AT));
        }
        Ok(self.memory.and_then(|memory| memory.part(offset.into(), len.into()).ok()))
    }

    /// Takes in an R2T.
    ///
    /// # Errors
    /// The error that ends the connection: a request for data that the command does not have, or more
    /// requests than one at a time.
    pub(crate) fn asked(&mut self, ttag: u16, offset: u32, len: u32) -> Result<(), Fatal> {
        if matches!(self.purpose, Purpose::Read) {
            return Err(Fatal::Field(8));
        }
        if self.wanted.is_some() {
            return Err(Fatal::Limit);
        }
        let end = offset.checked_add(len).ok_or(Fatal::OutOfRange(pdu::LEN_AT))?;
        if offset != self.moved {
            return Err(Fatal::OutOfRange(pdu::OFFSET_AT));
        }
        if len == 0 || end > self.len {
            return Err(Fatal::OutOfRange(pdu::LEN_AT));
        }
        (self.wanted, self.was_asked) = (Some(Wanted { ttag, end }), true);
        Ok(())
    }
}

/// Bytes that are kept, and where they begin in their command's data.
type Kept = (u32, Box<[u8]>);

/// The commands of one queue, by their identifiers: an index, and a generation that changes with each use.
#[derive(Debug)]
pub(crate) struct Commands {
    slots: Box<[Option<Command>]>,
    generations: Box<[u16]>,
    /// What is left to send of abandoned WRITEs, and where it begins in the command's data.
    copies: Box<[Option<Kept>]>,
    free: Vec<u16>,
    bits: u32,
}

impl Commands {
    /// Room for `depth` commands.
    pub(crate) fn new(depth: u16) -> Self {
        let depth = usize::from(depth.max(1));
        Self {
            slots: vec![None; depth].into(),
            generations: vec![0; depth].into(),
            copies: (0..depth).map(|_| None).collect(),
            free: (0..depth as u16).rev().collect(),
            bits: depth.next_power_of_two().ilog2().max(1),
        }
    }

    /// The number of commands that there is room for.
    pub(crate) const fn depth(&self) -> u16 {
        self.slots.len() as u16
    }

    pub(crate) fn has_room(&self) -> bool {
        !self.free.is_empty()
    }

    /// Commands that there still is room for.
    pub(crate) fn room(&self) -> usize {
        self.free.len()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.free.len() == self.slots.len()
    }

    /// Stores a command; returns its index and its identifier.
    pub(crate) fn insert(&mut self, command: Command) -> Option<(u16, u16)> {
        let index = self.free.pop()?;
        let at = usize::from(index);
        self.slots[at] = Some(command);
        // The largest identifier, 0xffff, is never used: the largest generation is left out.
        let generations = (1_u16 << (16 - self.bits)) - 1;
        self.generations[at] = (self.generations[at] + 1) % generations.max(1);
        Some((index, self.id(index)))
    }

    fn id(&self, index: u16) -> u16 {
        self.generations[usize::from(index)] << self.bits | index
    }

    /// The index of the command with this identifier, which is outstanding.
    pub(crate) fn find(&self, id: u16) -> Option<u16> {
        let index = id & ((1 << self.bits) - 1);
        let outstanding = self.slots.get(usize::from(index))?.is_some();
        (outstanding && self.id(index) == id).then_some(index)
    }

    pub(crate) fn identifier(&self, index: u16) -> u16 {
        self.id(index)
    }

    pub(crate) fn get_mut(&mut self, index: u16) -> Option<&mut Command> {
        self.slots.get_mut(usize::from(index))?.as_mut()
    }

    pub(crate) fn get(&self, index: u16) -> Option<&Command> {
        self.slots.get(usize::from(index))?.as_ref()
    }

    pub(crate) fn remove(&mut self, index: u16) -> Option<Command> {
        let at = usize::from(index);
        let command = self.slots.get_mut(at)?.take()?;
        self.copies[at] = None;
        self.free.push(index);
        Some(command)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (u16, &Command)> {
        let slots = self.slots.iter().enumerate();
        slots.filter_map(|(index, command)| Some((index as u16, command.as_ref()?)))
    }

    /// Keeps a copy of the data of an abandoned WRITE from `from` on.
    pub(crate) fn keep_copy(&mut self, index: u16, from: u32, bytes: Box<[u8]>) {
        if let Some(copy) = self.copies.get_mut(usize::from(index)) {
            *copy = Some((from, bytes));
        }
    }

    /// Bytes of the copy, by their place in the command's data.
    pub(crate) fn copy(&self, index: u16, offset: u32, len: u32) -> Option<&[u8]> {
        let (from, bytes) = self.copies.get(usize::from(index))?.as_ref()?;
        let at = offset.checked_sub(*from)? as usize;
        bytes.get(at..at.checked_add(len as usize)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(len: u32) -> Command {
        Command::new(Purpose::Write, 0, None, len)
    }

    #[test]
    fn an_identifier_is_of_one_command_alone() {
        for depth in [1, 2, 3, 127, 1_024] {
            let mut all = Commands::new(depth);
            let mut before = None;
            for _ in 0..200 {
                let (index, id) = all.insert(write(1)).expect("room");
                assert!(id != 0xffff && Some(id) != before, "depth {depth}");
                assert_eq!((all.find(id), all.identifier(index)), (Some(index), id));
                assert_eq!(before.and_then(|before| all.find(before)), None, "a former use");
                assert!(all.remove(index).is_some() && all.remove(index).is_none());
                assert_eq!(all.find(id), None);
                before = Some(id);
            }
            let taken: Vec<_> = (0..depth).filter_map(|_| all.insert(write(1))).collect();
            assert!(taken.len() == usize::from(depth) && all.insert(write(1)).is_none() && !all.has_room());
            assert_eq!(all.find(0xffff), None);
        }
    }

    #[test]
    fn data_beyond_a_command_is_refused() {
        let mut read = Command::new(Purpose::Read, 0, Some(Pinned::leaked(vec![0; 8])), 8);
        assert!(read.incoming(0, 8).is_ok_and(|memory| memory.is_some_and(|memory| memory.len() == 8)));
        assert_eq!(read.incoming(0, 9).err(), Some(Fatal::OutOfRange(16)));
        assert_eq!(read.incoming(4, 4).err(), Some(Fatal::OutOfRange(12)), "out of order");
        read.moved = 4;
        assert_eq!(read.incoming(0, 4).err(), Some(Fatal::OutOfRange(12)), "twice");
        assert_eq!(read.incoming(4, u32::MAX).err(), Some(Fatal::OutOfRange(16)));
        assert_eq!(write(8).incoming(0, 8).err(), Some(Fatal::Field(8)));
        assert_eq!(read.asked(0, 4, 4), Err(Fatal::Field(8)));
    }

    #[test]
    fn a_request_beyond_a_command_is_refused() {
        for (offset, len, error) in [
            (0, 9, Fatal::OutOfRange(16)),
            (0, 0, Fatal::OutOfRange(16)),
            (1, 1, Fatal::OutOfRange(12)),
            (0, u32::MAX, Fatal::OutOfRange(16)),
        ] {
            assert_eq!(write(8).asked(3, offset, len), Err(error), "{offset} {len}");
        }
        let mut one = write(8);
        assert_eq!(one.asked(3, 0, 4), Ok(()));
        assert_eq!(one.asked(4, 0, 4), Err(Fatal::Limit), "one at a time");
        (one.moved, one.wanted) = (4, None);
        assert_eq!(one.asked(4, 4, 4), Ok(()));
        assert_eq!(one.wanted, Some(Wanted { ttag: 4, end: 8 }));
    }

    #[test]
    fn a_copy_is_found_by_its_place_in_the_command() {
        let mut all = Commands::new(4);
        let (index, _) = all.insert(write(8)).expect("room");
        all.keep_copy(index, 4, Box::new([5, 6, 7, 8]));
        assert_eq!(all.copy(index, 5, 2), Some(&[6, 7][..]));
        assert_eq!(
            (all.copy(index, 3, 1), all.copy(index, 5, 4), all.copy(index, 5, u32::MAX)),
            (None, None, None)
        );
    }
}
