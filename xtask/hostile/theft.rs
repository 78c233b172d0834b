//! Attempts on names, nodes and puts of other processes. The attacker knows everything that the master
//! reports, but none of its secrets.

use super::raw::Raw;
use super::{Result, Turn};
use std::io;
use std::net::SocketAddr;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use store_core::message::{
    Beat, Commit, FetchRequest, FetchTasks, Heartbeat, List, ListQuery, Mount, MountResponse, MountSegment,
    NewObject, NodeStatus, Operation as _, PutEnd, PutOptions, PutRequest, PutRevoke, PutStart, Revocation,
    Segments, Unmount, UnmountSegment,
};
use store_core::{Incarnation, Key, NodeId};

const ROUND: Duration = Duration::from_millis(500);
/// Generations that are tried on either side of its own.
const NEIGHBOURS: u64 = 8;
/// Unfinished keys that are examined per round.
const KEYS_MAX: u32 = 512;

/// Heartbeats, unmounts and mounts in the names of nodes.
pub(crate) fn thief(turn: &mut Turn, master: SocketAddr) -> Result<()> {
    turn.rounds(ROUND, "thief_connections_lost", |turn| Ok(steal(turn, master)?));
    Ok(())
}

fn steal(turn: &mut Turn, master: SocketAddr) -> io::Result<()> {
    let mut raw = Raw::dial(master)?;
    let answer = raw.ask::<Segments>(&(), std::iter::empty())?;
    let frame = answer.frame()?;
    let Ok((_, found)) = Segments::decode_response(&frame) else { return Ok(()) };
    for segment in found.flatten() {
        let wall = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_millis() as u64;
        let own = segment.incarnation;
        let after = own.next().unwrap_or(own);
        for incarnation in [own, after, Incarnation::new(wall), Incarnation::MAX] {
            let beat = Heartbeat { node: segment.node, incarnation, key: turn.random() };
            let answer = raw.ask::<Beat>(&beat, std::iter::empty())?;
            turn.count("theft_tries", 1);
            // Any status but `Unknown` is for the node alone; `Unknown` reveals nothing and changes nothing.
            if let Ok((status, _)) = Beat::decode_response(&answer.frame()?)
                && matches!(status, NodeStatus::Ok | NodeStatus::Work)
            {
                turn.wrong(&format!("theft: the attacker sent a heartbeat for {}", segment.name));
            }
            let mount = MountSegment {
                node: NodeId::new(turn.random()),
                incarnation,
                name: segment.name,
                endpoint: "127.0.0.1:1",
                len: segment.len,
                key: turn.random(),
                ..MountSegment::default()
            };
            let answer = raw.ask::<Mount>(&mount, std::iter::empty())?;
            turn.count("theft_tries", 1);
            if let Ok((MountResponse::Mounted(_), _)) = Mount::decode_response(&answer.frame()?) {
                turn.wrong(&format!("theft: the attacker mounted the name {}", segment.name));
            }
        }
        let away = UnmountSegment {
            node: segment.node,
            incarnation: segment.incarnation,
            segment: segment.segment,
            key: turn.random(),
        };
        let answer = raw.ask::<Unmount>(&away, std::iter::empty())?;
        turn.count("theft_tries", 1);
        if Unmount::decode_response(&answer.frame()?).is_ok() {
            turn.wrong(&format!("theft: the attacker unmounted {}", segment.name));
        }
        let fetch = FetchRequest {
            node: segment.node,
            incarnation: segment.incarnation,
            count_max: 16,
            key: turn.random(),
        };
        let answer = raw.ask::<FetchTasks>(&fetch, std::iter::empty())?;
        turn.count("theft_tries", 1);
        if FetchTasks::decode_response(&answer.frame()?).is_ok() {
            turn.wrong(&format!("theft: the attacker received the tasks of {}", segment.name));
        }
    }
    Ok(())
}

/// Ends and revokes puts of other processes.
pub(crate) fn guess(turn: &mut Turn, master: SocketAddr) -> Result<()> {
    turn.rounds(ROUND, "guess_connections_lost", |turn| Ok(guess_once(turn, master)?));
    Ok(())
}

fn guess_once(turn: &mut Turn, master: SocketAddr) -> io::Result<()> {
    let mut raw = Raw::dial(master)?;
    let own = format!("guess/{:x}", turn.random()).into_bytes();
    let new = NewObject { key: Key(&own), len: 64 };
    let answer = raw.ask::<PutStart>(
        &PutRequest { writer: 1, ..PutRequest::once(PutOptions::DEFAULT) },
        [new].into_iter(),
    )?;
    let frame = answer.frame()?;
    let Ok((_, mut allocations)) = PutStart::decode_response(&frame) else { return Ok(()) };
    let Some(Ok(mine)) = allocations.next() else { return Ok(()) };

    let query = ListQuery { prefix: Key(b""), cursor: 0, limit: KEYS_MAX };
    let listed = raw.ask::<List>(&query, std::iter::empty())?;
    let frame = listed.frame()?;
    let Ok((_, keys)) = List::decode_response(&frame) else { return Ok(()) };
    let others: Vec<Vec<u8>> = keys
        .filter(|listed| !listed.complete && listed.key.0 != own)
        .map(|listed| listed.key.0.to_vec())
        .collect();
    for key in &others {
        for near in 1..=NEIGHBOURS {
            let generation = mine.generation.wrapping_sub(near);
            for handle in [0, mine.handle, mine.handle.wrapping_sub(near), turn.random()] {
                let revocation = Revocation { key: Key(key), generation, handle, quiet: true };
                let answer = raw.ask::<PutRevoke>(&(), [revocation].into_iter())?;
                turn.count("guesses", 1);
                if let Ok((_, mut ends)) = PutRevoke::decode_response(&answer.frame()?)
                    && matches!(ends.next(), Some(Ok(())))
                {
                    turn.wrong(&format!("guess: the attacker revoked the put of {}", key.escape_ascii()));
                }
                let commit = Commit { key: Key(key), generation, handle, checksum: 0 };
                let answer = raw.ask::<PutEnd>(&(), [commit].into_iter())?;
                turn.count("guesses", 1);
                if let Ok((_, mut ends)) = PutEnd::decode_response(&answer.frame()?)
                    && matches!(ends.next(), Some(Ok(())))
                {
                    turn.wrong(&format!("guess: the attacker ended the put of {}", key.escape_ascii()));
                }
            }
        }
    }
    // The attacker wrote nothing there, so the space may be given out at once.
    let revocation =
        Revocation { key: Key(&own), generation: mine.generation, handle: mine.handle, quiet: true };
    raw.ask::<PutRevoke>(&(), [revocation].into_iter())?;
    Ok(())
}
