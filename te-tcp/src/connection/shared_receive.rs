//! Receives for several connections of one table, to be run in one system call.

use std::io;

use te_fabric::Slab;

use super::name::Name;
use super::{Connection, Destination, Reading};
use crate::sys::Job;

/// The connections that one side has, by name.
type Connections<R, const SIDE: u32> = Slab<Connection<R>, Name<SIDE>>;

/// The next receive of each connection in `names` that is in this table and `can_read`, with the connection's
/// name. `indexes` is scratch space with room for as many connections.
pub(crate) fn receives<'a, R, const SIDE: u32>(
    connections: &'a mut Connections<R, SIDE>,
    names: &[u64],
    indexes: &'a mut [u32],
    can_read: impl Fn(&Connection<R>) -> bool,
) -> impl Iterator<Item = (u64, Job<'a, Destination>)> {
    let known = names.iter().filter_map(|&raw| connections.index(Name::of(raw)?));
    let count = indexes.iter_mut().zip(known).map(|(to, index)| *to = index).count();
    let connections = connections.each_mut(&mut indexes[..count]).map(|(_, connection)| connection);
    connections
        .filter(move |connection| can_read(connection))
        .map(|connection| (connection.name, connection.inbox.job(&connection.socket)))
}

/// Takes in the result of a receive that had room for `offered` bytes. `None`: the connection has ended.
pub(crate) fn arrived<R, const SIDE: u32>(
    connections: &mut Connections<R, SIDE>,
    name: Name<SIDE>,
    offered: usize,
    result: io::Result<usize>,
) -> Option<Reading> {
    let connection = connections.get_mut(connections.index(name)?)?;
    Some(Reading::Arrived(connection.inbox.arrived(offered, result)))
}

/// Notes that the peer has finished sending on this connection.
pub(crate) fn set_finished<R, const SIDE: u32>(connections: &mut Connections<R, SIDE>, name: Name<SIDE>) {
    if let Some(connection) = connections.index(name).and_then(|index| connections.get_mut(index)) {
        connection.finished = true;
    }
}
