//! Commands of I/O queues: Read, Write, Flush and reservations.

use te_core::Access;
use zerocopy::FromBytes;

use super::connection::{Connection, Transfer};
use super::reservation::{HostId, Keys};
use super::{Parsed, Stop, Target, discard, identity_of, respond, respond_with, skip};
use crate::command::{Place, Sqe, Status, io};
use crate::context::{Context, peer_begins, peer_ends};
use crate::pdu::{self, Data, Fatal, Kind};
use crate::stream::{Payload, Source, Stream};
use crate::sys::Pinned;

/// The tag of data that belongs to no transfer: it is discarded.
pub(super) const NO_TRANSFER: u16 = u16::MAX;

/// The memory that a Read or Write is about.
struct Range {
    region: u32,
    memory: Pinned,
}

impl Target {
    pub(super) fn io_command(
        &mut self,
        connection: &mut Connection,
        controller: u32,
        parsed: Parsed,
        cx: &mut Context<'_>,
    ) -> Result<bool, Stop> {
        let (sqe, data, used) = parsed;
        let cid = sqe.cid.get();
        match sqe.opcode {
            io::READ if data.len == 0 => {
                connection.stream.take(used);
                connection.fetched();
                self.read(connection, controller, &sqe, cx);
                Ok(true)
            }
            io::WRITE => {
                connection.fetched();
                self.write(connection, controller, parsed, cx)?;
                Ok(true)
            }
            io::FLUSH => {
                connection.fetched();
                skip(connection, parsed);
                let known = self.namespaces.contains_key(&sqe.nsid.get()) || sqe.nsid.get() == u32::MAX;
                let status = if known { Status::SUCCESS } else { Status::INVALID_NAMESPACE };
                respond(connection, cid, status, 0, cx);
                Ok(true)
            }
            io::RESERVATION_REGISTER | io::RESERVATION_ACQUIRE | io::RESERVATION_RELEASE => {
                self.reserve(connection, controller, parsed, cx)
            }
            io::RESERVATION_REPORT if data.len == 0 => {
                connection.stream.take(used);
                connection.fetched();
                self.report(connection, controller, &sqe, cx);
                Ok(true)
            }
            _ => {
                connection.fetched();
                skip(connection, parsed);
                respond(connection, cid, Status::INVALID_OPCODE, 0, cx);
                Ok(true)
            }
        }
    }

    /// The memory of a Read or Write, after all checks: nothing was moved before.
    fn range(
        &self,
        controller: u32,
        sqe: &Sqe,
        len: u32,
        write: bool,
        cx: &Context<'_>,
    ) -> Result<Range, Status> {
        let nsid = sqe.nsid.get();
        let served = self.namespaces.get(&nsid).ok_or(Status::INVALID_NAMESPACE)?;
        let controller = self.controllers.get(controller).ok_or(Status::INTERNAL)?;
        if !cx.config.open_to_hosts && !controller.is_granted(nsid) {
            return Err(Status::ACCESS_DENIED);
        }
        if !served.reservation.allows(&controller.host, write) {
            return Err(Status::RESERVATION_CONFLICT);
        }
        let region = cx.regions.get(served.region).ok_or(Status::INVALID_NAMESPACE)?;
        let memory = region.ext.memory.ok_or(Status::INVALID_NAMESPACE)?;
        if region.closing || region.ext.nsid != nsid {
            return Err(Status::INVALID_NAMESPACE);
        }
        let (needed, denied) = match write {
            false => (Access::REMOTE_READ, Status::ACCESS_DENIED),
            true => (Access::REMOTE_WRITE, Status::WRITE_PROTECTED),
        };
        if !region.access.contains(needed) {
            return Err(denied);
        }
        let block = u64::from(cx.config.granule_bytes);
        let blocks = u64::from(sqe.dword(12) & 0xffff) + 1;
        let end = sqe.qword(10).checked_add(blocks).ok_or(Status::LBA_OUT_OF_RANGE)?;
        if end > region.len / block {
            return Err(Status::LBA_OUT_OF_RANGE);
        }
        if blocks * block > cx.config.transfer_bytes_max.into() {
            return Err(Status::INVALID_FIELD);
        }
        if blocks * block != u64::from(len) {
            return Err(Status::SGL_LENGTH);
        }
        let memory =
            memory.part(sqe.qword(10) * block, blocks * block).map_err(|_| Status::LBA_OUT_OF_RANGE)?;
        Ok(Range { region: served.region, memory })
    }

    fn read(&mut self, connection: &mut Connection, controller: u32, sqe: &Sqe, cx: &mut Context<'_>) {
        let cid = sqe.cid.get();
        let len = match sqe.place() {
            Some(Place::Transport(len)) => len,
            _ => return respond(connection, cid, Status::SGL_TYPE, 0, cx),
        };
        let Range { region, memory } = match self.range(controller, sqe, len, false, cx) {
            Ok(range) => range,
            Err(status) => return respond(connection, cid, status, 0, cx),
        };
        let flags = match connection.no_flow_control {
            true => pdu::FLAG_LAST | pdu::FLAG_SUCCESS,
            false => pdu::FLAG_LAST,
        };
        let agreed = connection.stream.agreed;
        connection.stream.push(pdu::transfer(Kind::C2hData, flags, cid, 0, (0, len), agreed).bytes());
        connection.stream.push_memory(memory, Source::Region(region));
        peer_begins(cx.regions, region);
        cx.stats.bytes_served += u64::from(len);
        match connection.no_flow_control {
            true => cx.stats.served += 1,
            false => respond(connection, cid, Status::SUCCESS, 0, cx),
        }
    }

    fn write(
        &mut self,
        connection: &mut Connection,
        controller: u32,
        parsed: Parsed,
        cx: &mut Context<'_>,
    ) -> Result<(), Stop> {
        let (sqe, data, used) = parsed;
        let cid = sqe.cid.get();
        let (len, by_transfer) = match sqe.place() {
            Some(Place::InCapsule(len)) if len == data.len && len <= cx.config.in_capsule_bytes_max => {
                (len, false)
            }
            Some(Place::Transport(len)) if data.len == 0 => (len, true),
            _ => return refuse_write(connection, parsed, Status::SGL_TYPE, cx),
        };
        let Range { region, memory } = match self.range(controller, &sqe, len, true, cx) {
            Ok(range) => range,
            Err(status) => return refuse_write(connection, parsed, status, cx),
        };
        let transfer = Transfer {
            cid,
            nsid: sqe.nsid.get(),
            region,
            memory: Some(memory),
            len,
            received: 0,
            status: Status::SUCCESS,
            by_transfer,
        };
        // A host that has more commands in flight than the queue has entries breaks the protocol.
        let tag = connection.begin(transfer).ok_or(Fatal::Limit)?;
        peer_begins(cx.regions, region);
        connection.stream.take(used);
        if by_transfer {
            let agreed = connection.stream.agreed;
            connection.stream.push(pdu::transfer(Kind::R2t, 0, cid, tag, (0, len), agreed).bytes());
        } else {
            connection.stream.announce(Payload::new(Some(memory), data, tag));
        }
        Ok(())
    }

    fn reserve(
        &mut self,
        connection: &mut Connection,
        controller: u32,
        parsed: Parsed,
        cx: &mut Context<'_>,
    ) -> Result<bool, Stop> {
        let (sqe, data, used) = parsed;
        if data.len == 0 || !Stream::can_collect(data.len) {
            connection.fetched();
            skip(connection, parsed);
            respond(connection, sqe.cid.get(), Status::SGL_TYPE, 0, cx);
            return Ok(true);
        }
        let Some((bytes, intact, whole)) = connection.stream.collected(used, data) else { return Ok(false) };
        let mut keys = [0; 16];
        let len = bytes.len().min(16);
        keys[..len].copy_from_slice(&bytes[..len]);
        let enough = bytes.len() >= if sqe.opcode == io::RESERVATION_RELEASE { 8 } else { 16 };
        connection.stream.take(used + whole);
        connection.fetched();
        let status = match (intact, enough, Keys::read_from_bytes(&keys)) {
            (false, ..) => Status::TRANSIENT_TRANSPORT,
            (true, true, Ok(keys)) => self.change_reservation(connection, controller, &sqe, keys, cx),
            _ => Status::SGL_LENGTH,
        };
        respond(connection, sqe.cid.get(), status, 0, cx);
        Ok(true)
    }

    fn change_reservation(
        &mut self,
        connection: &mut Connection,
        controller: u32,
        sqe: &Sqe,
        keys: Keys,
        cx: &mut Context<'_>,
    ) -> Status {
        let nsid = sqe.nsid.get();
        let Some(controller) = self.controllers.get(controller) else { return Status::INTERNAL };
        let host = controller.host;
        if !cx.config.open_to_hosts && !controller.is_granted(nsid) {
            return Status::ACCESS_DENIED;
        }
        let Some(served) = self.namespaces.get_mut(&nsid) else { return Status::INVALID_NAMESPACE };
        let dword = sqe.dword(10);
        match sqe.opcode {
            io::RESERVATION_REGISTER => served.reservation.register(host, dword, keys),
            io::RESERVATION_RELEASE => served.reservation.release(host, dword, keys.current.get()),
            _ => match served.reservation.acquire(host, dword, keys) {
                Ok(gone) if dword & 7 == 2 => {
                    self.abort_writes(connection, nsid, &gone, cx);
                    Status::SUCCESS
                }
                Ok(_) => Status::SUCCESS,
                Err(status) => status,
            },
        }
    }

    /// Preempt and abort: the WRITEs of these hosts to the namespace take no further byte.
    fn abort_writes(&mut self, current: &mut Connection, nsid: u32, hosts: &[HostId], cx: &mut Context<'_>) {
        let mut abort = |connection: &mut Connection| {
            for tag in 0..connection.transfers.len() as u16 {
                discard(connection, tag, cx, |transfer| (transfer.nsid == nsid).then_some(Status::PREEMPTED));
            }
        };
        for index in 0..self.controllers.bound() {
            let Some(controller) = self.controllers.get(index) else { continue };
            if !hosts.iter().any(|host| identity_of(host) == identity_of(&controller.host)) {
                continue;
            }
            for of in &controller.connections {
                if let Some(connection) = self.connections.get_mut(*of) {
                    abort(connection);
                }
            }
            if matches!(current.phase, super::Phase::Queue(of) if of == index) {
                abort(current);
            }
        }
    }

    fn report(&mut self, connection: &mut Connection, controller: u32, sqe: &Sqe, cx: &mut Context<'_>) {
        let cid = sqe.cid.get();
        let granted = self.controllers.get(controller).is_some_and(|of| of.is_granted(sqe.nsid.get()));
        let served = self.namespaces.get(&sqe.nsid.get());
        let Some(served) = served.filter(|_| granted || cx.config.open_to_hosts) else {
            return respond(connection, cid, Status::INVALID_NAMESPACE, 0, cx);
        };
        let wanted = (u64::from(sqe.dword(10)) + 1) * 4;
        // Host identifiers have 128 bits here, so only the extended structure exists.
        if sqe.dword(11) & 1 == 0 {
            return respond(connection, cid, Status::HOST_ID_INCONSISTENT, 0, cx);
        }
        if wanted > 64 << 10 {
            return respond(connection, cid, Status::INVALID_FIELD, 0, cx);
        }
        let mut bytes = served.reservation.report();
        bytes.resize(wanted as usize, 0);
        respond_with(connection, sqe, &bytes, cx);
    }
}

/// Refuses a WRITE. The response to one with its data in the capsule follows that data, which is discarded:
/// the host may still be sending it from the memory that the response gives back.
fn refuse_write(
    connection: &mut Connection,
    parsed: Parsed,
    status: Status,
    cx: &mut Context<'_>,
) -> Result<(), Stop> {
    let (sqe, data, used) = parsed;
    connection.stream.take(used);
    if data.len == 0 {
        respond(connection, sqe.cid.get(), status, 0, cx);
        return Ok(());
    }
    let (cid, nsid, len) = (sqe.cid.get(), sqe.nsid.get(), data.len);
    let refused =
        Transfer { cid, nsid, region: 0, memory: None, len, received: 0, status, by_transfer: false };
    let tag = connection.begin(refused).ok_or(Fatal::Limit)?;
    connection.stream.announce(Payload::new(None, data, tag));
    Ok(())
}

/// Where the data of an H2CData PDU goes.
pub(super) fn transfer_data(
    connection: &mut Connection,
    cid: u16,
    tag: u16,
    (offset, len): (u32, u32),
    last: bool,
    data: Data,
) -> Result<Payload, Fatal> {
    let transfer = connection.transfer(tag).filter(|transfer| transfer.by_transfer);
    let transfer = transfer.filter(|transfer| transfer.cid == cid).ok_or(Fatal::Field(10))?;
    let end = offset.checked_add(len).ok_or(Fatal::OutOfRange(pdu::LEN_AT))?;
    if offset != transfer.received {
        return Err(Fatal::OutOfRange(pdu::OFFSET_AT));
    }
    if end > transfer.len {
        return Err(Fatal::OutOfRange(pdu::LEN_AT));
    }
    if last != (end == transfer.len) {
        return Err(Fatal::Field(1));
    }
    let memory = transfer.memory.and_then(|memory| memory.part(offset.into(), len.into()).ok());
    Ok(Payload::new(memory, data, tag))
}

/// Takes in the end of data.
pub(super) fn data_arrived(
    connection: &mut Connection,
    payload: Payload,
    intact: bool,
    cx: &mut Context<'_>,
) {
    let Some(transfer) = connection.transfer(payload.user) else { return };
    transfer.received += payload.len;
    if !intact && transfer.status == Status::SUCCESS {
        transfer.status = Status::TRANSIENT_TRANSPORT;
    }
    if transfer.memory.is_some() {
        cx.stats.bytes_served += u64::from(payload.len);
    }
    if transfer.received < transfer.len {
        return;
    }
    if let Some(transfer) = connection.end(payload.user) {
        if transfer.memory.is_some() {
            peer_ends(cx.regions, transfer.region);
        }
        respond(connection, transfer.cid, transfer.status, 0, cx);
    }
}
