//! Asks the discovery service of a target which subsystems it has. A control call that blocks, for tools.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use zerocopy::IntoBytes;

use crate::command::{
    CC_ENABLED, CONTROLLER_ANY, DISCOVERY_NQN, LOG_DISCOVERY, Place, Sqe, Status, admin, connect_data,
    property,
};
use crate::export::{host_id, host_nqn};
use crate::identify::{DISCOVERY_ENTRY_BYTES, DiscoveryEntry};
use crate::pdu::{self, Agreed, Data, End, Kind, Pdu, Step};

/// Entries of the log page that are read.
const ENTRIES_MAX: u64 = 256;
/// Answers that are read for one command.
const ANSWERS_MAX: usize = 64;

/// The subsystems that the discovery service at `address` knows. Each step may take up to `patience`.
///
/// # Errors
/// The error of the system, `ConnectionRefused` when the service refuses this host, `InvalidData` when it
/// does not speak NVMe/TCP.
pub fn discover(address: SocketAddr, patience: Duration) -> io::Result<Vec<DiscoveryEntry>> {
    let stream = TcpStream::connect_timeout(&address, patience)?;
    stream.set_read_timeout(Some(patience))?;
    stream.set_write_timeout(Some(patience))?;
    let mut session = Session { stream, bytes: Vec::new() };
    session.stream.write_all(pdu::initialize(Kind::IcReq, 0, (false, false), 0).as_bytes())?;
    if !matches!(session.next()?.0, Pdu::IcResp(_)) {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let identity = te_fabric::net::random_u64()?.max(1);
    let data = connect_data(host_id(identity), CONTROLLER_ANY, DISCOVERY_NQN, &host_nqn(identity));
    session.command(Sqe::connect(1, 0, 32, 0), data.as_bytes())?;
    session.command(Sqe::property_set(2, property::CC, CC_ENABLED), &[])?;
    let header = session.command(log_page(3, 0, DISCOVERY_ENTRY_BYTES), &[])?;
    let count = header.get(8..16).and_then(|bytes| bytes.try_into().ok()).map_or(0, u64::from_le_bytes);
    let mut entries = Vec::new();
    for at in 1..=count.min(ENTRIES_MAX) {
        let page =
            session.command(log_page(4, at * DISCOVERY_ENTRY_BYTES as u64, DISCOVERY_ENTRY_BYTES), &[])?;
        let entry = <&[u8; DISCOVERY_ENTRY_BYTES]>::try_from(page.as_slice()).ok();
        entries.extend(entry.and_then(DiscoveryEntry::parse));
    }
    Ok(entries)
}

fn log_page(cid: u16, from: u64, len: usize) -> Sqe {
    let dwords = (len / 4 - 1) as u32;
    Sqe::new(admin::GET_LOG_PAGE, cid, 0).with_data(Place::Transport(len as u32)).with_dwords(&[
        u32::from(LOG_DISCOVERY) | dwords << 16,
        dwords >> 16,
        from as u32,
        (from >> 32) as u32,
    ])
}

struct Session {
    stream: TcpStream,
    bytes: Vec<u8>,
}

impl Session {
    /// Sends a command and returns its data.
    fn command(&mut self, sqe: Sqe, data: &[u8]) -> io::Result<Vec<u8>> {
        let head = pdu::command(sqe, data.len() as u32, Agreed::default());
        self.stream.write_all(&[head.bytes(), data].concat())?;
        let mut collected = Vec::new();
        for _ in 0..ANSWERS_MAX {
            let (pdu, bytes) = self.next()?;
            let (cid, ended) = match pdu {
                Pdu::C2hData(header, _) => {
                    collected.extend_from_slice(&bytes);
                    (header.cid.get(), header.common.flags & pdu::FLAG_SUCCESS != 0)
                }
                Pdu::Response(cqe) if cqe.status() != Status::SUCCESS => {
                    let what = format!("the discovery service answers with status {:#x}", cqe.status().0);
                    return Err(io::Error::new(io::ErrorKind::ConnectionRefused, what));
                }
                Pdu::Response(cqe) => (cqe.cid.get(), true),
                _ => return Err(io::ErrorKind::InvalidData.into()),
            };
            if cid != sqe.cid.get() {
                return Err(io::ErrorKind::InvalidData.into());
            }
            if ended {
                return Ok(collected);
            }
        }
        Err(io::ErrorKind::InvalidData.into())
    }

    /// The next PDU, and its data.
    fn next(&mut self) -> io::Result<(Pdu, Vec<u8>)> {
        loop {
            let parsed = pdu::parse(&self.bytes, End::Controller, Agreed::default(), 1 << 20);
            let parsed = parsed.map_err(|fatal| io::Error::new(io::ErrorKind::InvalidData, fatal))?;
            if let Step::Frame(pdu, used) = parsed {
                let data = if let Pdu::C2hData(_, data) = pdu { data } else { Data::default() };
                let whole = used + data.len as usize;
                if self.bytes.len() >= whole {
                    let taken: Vec<u8> = self.bytes.drain(..whole).collect();
                    return Ok((pdu, taken[used..].to_vec()));
                }
            }
            let mut more = [0; 4_096];
            match self.stream.read(&mut more)? {
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                count => self.bytes.extend_from_slice(&more[..count]),
            }
        }
    }
}
