//! Connect, and the commands of admin queues.

use te_core::Access;
use zerocopy::FromBytes;

use super::connection::{Connection, Controller, Phase};
use super::{Parsed, Stop, Target, identity_of, respond, respond_with, skip};
use crate::command::{
    AT_SUBSYSTEM, CC_ENABLE, CC_SHUTDOWN, CONNECT_NO_FLOW_CONTROL, CONTROLLER_ANY, CSTS_READY,
    CSTS_SHUT_DOWN, ConnectData, Cqe, DISCOVERY_NQN, FEATURE_EVENTS, FEATURE_KEEP_ALIVE, FEATURE_QUEUES,
    LOG_DISCOVERY, NO_FLOW_CONTROL, RESET_AT_ONCE, Sqe, Status, admin, fabrics, nqn_of, property,
};
use crate::config::{DEPTH_MAX, QUEUES_MAX};
use crate::context::Context;
use crate::identify::{
    self, Controller as Identity, DISCOVERY_ENTRY_BYTES, DiscoveryEntry, IDENTIFY_BYTES, Namespace, cns,
};
use crate::pdu;

/// Async Event Requests that one controller keeps.
const EVENTS_MAX: u8 = 4;
/// CAP: queues of `DEPTH_MAX` entries, contiguous, enabled within 5 s, the NVM command set.
const CAP: u64 = (DEPTH_MAX as u64 - 1) | 1 << 16 | 10 << 24 | 1 << 37;
/// VS: 2.1.
const VS: u64 = 0x0002_0100;
/// Data within a command that every I/O queue takes.
const IN_CAPSULE_BYTES_MIN: u32 = 256;
/// The types of reservations: all but those that persist through a power loss.
const RESERVATIONS: u8 = 0x7e;
/// IATTR and IPO of a refused Connect: a wrong host, or controller in the data.
const AT_HOST: u64 = 1 << 16;
const AT_CONTROLLER: u64 = 1 << 16 | 16;

/// The answer to a command without data: status and dwords 0 and 1.
type Answer = (Status, u64);

impl Target {
    /// Connect: the connection becomes a queue.
    pub(super) fn connect(
        &mut self,
        connection: &mut Connection,
        index: u32,
        (sqe, data, used): Parsed,
        cx: &mut Context<'_>,
    ) -> Result<bool, Stop> {
        let cid = sqe.cid.get();
        let is_connect = sqe.opcode == admin::FABRICS && sqe.fabrics_type() == fabrics::CONNECT;
        if !is_connect || data.len as usize != size_of::<ConnectData>() {
            respond(connection, cid, if is_connect { Status::SGL_LENGTH } else { Status::SEQUENCE }, 0, cx);
            return Err(Stop::Finish);
        }
        let Some((bytes, intact, whole)) = connection.stream.collected(used, data) else { return Ok(false) };
        let request = ConnectData::read_from_bytes(bytes).ok().filter(|_| intact);
        connection.stream.take(used + whole);
        let admitted = match request {
            Some(request) => self.admit_queue(connection, index, &sqe, &request, cx),
            None => Err((Status::TRANSIENT_TRANSPORT, 0)),
        };
        match admitted {
            Ok(controller) => {
                connection.phase = Phase::Queue(controller);
                connection.deadline = None;
                connection.fetched();
                let id = self.controllers.get(controller).map_or(0, |controller| controller.id);
                let sqhd = if connection.no_flow_control { NO_FLOW_CONTROL } else { connection.sqhd };
                let head =
                    pdu::response(Cqe::new(cid, Status::SUCCESS, sqhd, id.into()), connection.stream.agreed);
                connection.stream.push(head.bytes());
                cx.stats.served += 1;
                Ok(true)
            }
            Err((status, result)) => {
                respond(connection, cid, status, result, cx);
                Err(Stop::Finish)
            }
        }
    }

    fn admit_queue(
        &mut self,
        connection: &mut Connection,
        index: u32,
        sqe: &Sqe,
        request: &ConnectData,
        cx: &mut Context<'_>,
    ) -> Result<u32, Answer> {
        let (format, qid) = (sqe.dword(10) as u16, (sqe.dword(10) >> 16) as u16);
        let (entries, attributes) = (sqe.dword(11) as u16, (sqe.dword(11) >> 16) as u8);
        if format != 0 {
            return Err((Status::CONNECT_FORMAT, 0));
        }
        let subsystem = nqn_of(&request.subsystem).ok_or((Status::CONNECT_PARAMETERS, AT_SUBSYSTEM))?;
        let discovery = subsystem == DISCOVERY_NQN;
        if !discovery && subsystem != self.nqn {
            return Err((Status::CONNECT_PARAMETERS, AT_SUBSYSTEM));
        }
        let identity = identity_of(&request.host_id);
        if nqn_of(&request.host).is_none() || identity == 0 {
            return Err((Status::CONNECT_PARAMETERS, AT_HOST));
        }
        if self.expelled.contains(identity) {
            return Err((Status::CONNECT_HOST, AT_HOST));
        }
        if entries == 0 || entries >= DEPTH_MAX || qid > QUEUES_MAX.into() {
            return Err((Status::CONNECT_PARAMETERS, 42));
        }
        let of_host = self.controllers().filter(|controller| controller.host == request.host_id);
        let connections: usize = of_host.map(|controller| controller.connections.len()).sum();
        if connections > cx.config.connections_max as usize / 2 {
            return Err((Status::CONNECT_BUSY, 0));
        }
        let controller = match qid {
            0 => self.new_controller(request, discovery, sqe.dword(12), cx)?,
            _ => self.controller_for_queue(request, qid)?,
        };
        if let Some(of) = self.controllers.get_mut(controller) {
            of.connections.push(index);
        }
        connection.qid = qid;
        connection.entries = entries + 1;
        connection.no_flow_control = attributes & CONNECT_NO_FLOW_CONTROL != 0;
        connection.transfers = vec![None; usize::from(connection.entries)].into();
        Ok(controller)
    }

    fn new_controller(
        &mut self,
        request: &ConnectData,
        discovery: bool,
        keep_alive_ms: u32,
        cx: &mut Context<'_>,
    ) -> Result<u32, Answer> {
        if request.controller.get() != CONTROLLER_ANY {
            return Err((Status::CONNECT_PARAMETERS, AT_CONTROLLER));
        }
        let instance_random = te_fabric::net::random_u64().map_err(|_| (Status::INTERNAL, 0))?;
        let (last, lives) = self.controller_id;
        self.controller_id = if last >= 0xffef { (1, lives.wrapping_add(1)) } else { (last + 1, lives) };
        let (id, instance) = self.controller_id;
        if self.controllers().any(|controller| controller.id == id) {
            return Err((Status::CONNECT_BUSY, 0));
        }
        let (index, _) = self.controllers.reserve();
        self.controllers.put(
            index,
            Controller {
                id,
                // 0 means that the controller does not say.
                instance: instance.wrapping_add(1).max(1),
                instance_random,
                host: request.host_id,
                discovery,
                configuration: 0,
                connections: Vec::new(),
                granted: Vec::new(),
                keep_alive_ms,
                last_seen: cx.now(),
                events: 0,
            },
        );
        cx.timers.changed();
        Ok(index)
    }

    /// The controller that gets an I/O queue.
    fn controller_for_queue(&self, request: &ConnectData, qid: u16) -> Result<u32, Answer> {
        let wrong = (Status::CONNECT_PARAMETERS, AT_CONTROLLER);
        let is_it = |controller: &Controller| {
            controller.id == request.controller.get() && controller.host == request.host_id
        };
        let found = (0..self.controllers.bound()).find(|at| self.controllers.get(*at).is_some_and(is_it));
        let index = found.ok_or(wrong)?;
        let controller = self.controllers.get(index).ok_or(wrong)?;
        if controller.discovery || !controller.is_enabled() {
            return Err((Status::SEQUENCE, 0));
        }
        let has_qid = |of: &u32| self.connections.get(*of).is_some_and(|connection| connection.qid == qid);
        if controller.connections.iter().any(has_qid) {
            return Err((Status::CONNECT_PARAMETERS, 42));
        }
        Ok(index)
    }

    pub(super) fn admin_command(
        &mut self,
        connection: &mut Connection,
        controller: u32,
        parsed: Parsed,
        cx: &mut Context<'_>,
    ) -> Result<bool, Stop> {
        let (sqe, _, _) = parsed;
        let cid = sqe.cid.get();
        connection.fetched();
        skip(connection, parsed);
        let (status, result) = match (sqe.opcode, sqe.fabrics_type()) {
            (admin::FABRICS, fabrics::PROPERTY_GET) => self.property_get(controller, &sqe),
            (admin::FABRICS, fabrics::PROPERTY_SET) => self.property_set(controller, connection, &sqe, cx),
            (admin::FABRICS, _) => (Status::INVALID_FIELD, 0),
            (admin::IDENTIFY, _) => {
                match self.identify(controller, &sqe, cx) {
                    Ok(bytes) => respond_with(connection, &sqe, &bytes[..], cx),
                    Err(status) => respond(connection, cid, status, 0, cx),
                }
                return Ok(true);
            }
            (admin::GET_LOG_PAGE, _) => {
                match self.log_page(controller, &sqe, cx) {
                    Ok(bytes) => respond_with(connection, &sqe, &bytes, cx),
                    Err(status) => respond(connection, cid, status, 0, cx),
                }
                return Ok(true);
            }
            (admin::SET_FEATURES, _) => self.set_feature(controller, &sqe, cx),
            (admin::GET_FEATURES, _) => self.get_feature(controller, &sqe),
            (admin::KEEP_ALIVE, _) => (Status::SUCCESS, 0),
            // Bit 0: the command was not aborted. It will end by itself.
            (admin::ABORT, _) => (Status::SUCCESS, 1),
            (admin::ASYNC_EVENT, _) => match self.controllers.get_mut(controller) {
                Some(of) if of.events < EVENTS_MAX => {
                    of.events += 1;
                    return Ok(true);
                }
                _ => (Status::EVENT_LIMIT, 0),
            },
            (admin::CROSS_CONTROLLER_RESET, _) => self.reset_other(controller, &sqe, cx),
            (admin::PRESENT_KEY, _) => self.present_key(controller, &sqe, cx),
            _ => (Status::INVALID_OPCODE, 0),
        };
        respond(connection, cid, status, result, cx);
        Ok(true)
    }

    fn property_get(&self, controller: u32, sqe: &Sqe) -> Answer {
        let Some(of) = self.controllers.get(controller) else { return (Status::INTERNAL, 0) };
        let shut_down = of.configuration & CC_SHUTDOWN != 0;
        let value = match (sqe.dword(11), sqe.dword(10) & 7) {
            (property::CAP, 1) => CAP,
            (property::VS, 0) => VS,
            (property::CC, 0) => of.configuration.into(),
            (property::CSTS, 0) if shut_down => CSTS_SHUT_DOWN.into(),
            (property::CSTS, 0) if of.is_enabled() => CSTS_READY.into(),
            (property::CSTS, 0) => 0,
            _ => return (Status::INVALID_FIELD, 0),
        };
        (Status::SUCCESS, value)
    }

    /// A controller that is disabled or shut down has lost its I/O queues, with what was unread in their
    /// connections, when the response is sent.
    fn property_set(
        &mut self,
        controller: u32,
        connection: &Connection,
        sqe: &Sqe,
        cx: &mut Context<'_>,
    ) -> Answer {
        let Some(of) = self.controllers.get_mut(controller) else { return (Status::INTERNAL, 0) };
        if sqe.dword(11) != property::CC || sqe.dword(10) & 7 != 0 {
            return (Status::INVALID_FIELD, 0);
        }
        let value = sqe.dword(12);
        let ends = of.is_enabled() && value & CC_ENABLE == 0 || value & CC_SHUTDOWN != 0;
        of.configuration = value;
        of.last_seen = cx.now();
        if ends {
            // The admin queue is taken out of the slab, and so stays.
            let io: Vec<u32> = of
                .connections
                .iter()
                .copied()
                .filter(|index| self.connections.get(*index).is_some_and(|other| other.qid != connection.qid))
                .collect();
            of.connections.retain(|index| !io.contains(index));
            for index in io {
                if let Some(mut closed) = self.connections.take(index) {
                    super::release(&mut closed, cx);
                    self.connections.release(index);
                }
            }
        }
        (Status::SUCCESS, 0)
    }

    fn identify(
        &self,
        controller: u32,
        sqe: &Sqe,
        cx: &Context<'_>,
    ) -> Result<Box<[u8; IDENTIFY_BYTES]>, Status> {
        let mut bytes = Box::new([0; IDENTIFY_BYTES]);
        let of = self.controllers.get(controller).ok_or(Status::INTERNAL)?;
        let nsid = sqe.nsid.get();
        let is_visible = |nsid: &u32| cx.config.open_to_hosts || of.is_granted(*nsid);
        match sqe.dword(10) as u8 {
            cns::CONTROLLER => {
                let nqn = if of.discovery { DISCOVERY_NQN } else { &self.nqn };
                identity(of, cx).write(nqn, &mut bytes);
            }
            cns::ACTIVE_NAMESPACES => {
                let visible = self.namespaces.keys().copied().filter(is_visible);
                identify::write_active(visible, nsid, &mut bytes);
            }
            // A namespace that is not there, or that the host may not see, is all zeros.
            cns::NAMESPACE if !is_visible(&nsid) => {}
            cns::NAMESPACE => {
                if let Some(namespace) = self.namespace(nsid, cx) {
                    namespace.write(&mut bytes);
                }
            }
            cns::DESCRIPTORS => {
                let namespace = self.namespace(nsid, cx).filter(|_| is_visible(&nsid));
                identify::write_identity(namespace.ok_or(Status::INVALID_NAMESPACE)?.nguid, &mut bytes);
            }
            _ => return Err(Status::INVALID_FIELD),
        }
        Ok(bytes)
    }

    fn namespace(&self, nsid: u32, cx: &Context<'_>) -> Option<Namespace> {
        let served = self.namespaces.get(&nsid)?;
        let region = cx.regions.get(served.region).filter(|region| region.ext.nsid == nsid)?;
        Some(Namespace {
            blocks: region.len / u64::from(cx.config.granule_bytes),
            block_bytes: cx.config.granule_bytes,
            metadata_bytes: 0,
            nguid: crate::export::nguid(self.incarnation, nsid, region.generation),
            write_protected: !region.access.contains(Access::REMOTE_WRITE),
            reservations: RESERVATIONS,
        })
    }

    fn log_page(&self, controller: u32, sqe: &Sqe, cx: &Context<'_>) -> Result<Vec<u8>, Status> {
        let of = self.controllers.get(controller).ok_or(Status::INTERNAL)?;
        let dwords = u64::from(sqe.dword(10) >> 16) | u64::from(sqe.dword(11) & 0xffff) << 16;
        let (len, from) = ((dwords + 1) * 4, sqe.qword(12));
        if len > 64 << 10 || !from.is_multiple_of(4) {
            return Err(Status::INVALID_FIELD);
        }
        let page = match sqe.dword(10) as u8 {
            LOG_DISCOVERY if of.discovery => self.discovery_log(cx),
            // Errors, health, firmware slots: nothing to report.
            1..=3 if !of.discovery => vec![0; 4096],
            _ => return Err(Status::INVALID_LOG_PAGE),
        };
        let from = usize::try_from(from).map_err(|_| Status::INVALID_FIELD)?;
        let mut part = page.get(from..).unwrap_or_default().to_vec();
        part.resize(len as usize, 0);
        Ok(part)
    }

    fn discovery_log(&self, cx: &Context<'_>) -> Vec<u8> {
        let mut page = vec![0; DISCOVERY_ENTRY_BYTES];
        page[0] = 1;
        let Ok(bound) = self.listener.local_address() else { return page };
        for address in te_fabric::net::advertised(cx.config.advertise, bound.ip()) {
            let entry = DiscoveryEntry {
                transport: 3,
                kind: 2,
                address: address.to_string(),
                port: bound.port().to_string(),
                nqn: self.nqn.clone(),
            };
            let mut bytes = [0; DISCOVERY_ENTRY_BYTES];
            entry.write(&mut bytes);
            page.extend_from_slice(&bytes);
            page[8] += 1;
        }
        page
    }

    fn set_feature(&mut self, controller: u32, sqe: &Sqe, cx: &mut Context<'_>) -> Answer {
        match sqe.dword(10) as u8 {
            FEATURE_QUEUES => {
                let (submission, completion) = (sqe.dword(11) & 0xffff, sqe.dword(11) >> 16);
                if submission == 0xffff || completion == 0xffff {
                    return (Status::INVALID_FIELD, 0);
                }
                let queues = u64::from(submission.min(completion).min(u32::from(QUEUES_MAX) - 1));
                (Status::SUCCESS, queues | queues << 16)
            }
            FEATURE_EVENTS => (Status::SUCCESS, 0),
            FEATURE_KEEP_ALIVE => {
                if let Some(of) = self.controllers.get_mut(controller) {
                    of.keep_alive_ms = sqe.dword(11);
                    cx.timers.changed();
                }
                (Status::SUCCESS, 0)
            }
            _ => (Status::INVALID_FIELD, 0),
        }
    }

    fn get_feature(&self, controller: u32, sqe: &Sqe) -> Answer {
        match sqe.dword(10) as u8 {
            FEATURE_QUEUES => {
                let queues = u64::from(QUEUES_MAX) - 1;
                (Status::SUCCESS, queues | queues << 16)
            }
            FEATURE_KEEP_ALIVE => {
                (Status::SUCCESS, self.controllers.get(controller).map_or(0, |of| of.keep_alive_ms.into()))
            }
            _ => (Status::INVALID_FIELD, 0),
        }
    }

    /// Cross-Controller Reset (TP8028): another controller of the same host is closed, with all that is
    /// unread in its connections, before the response is sent. A controller that is gone already has been
    /// closed in the same manner.
    fn reset_other(&mut self, controller: u32, sqe: &Sqe, cx: &mut Context<'_>) -> Answer {
        let Some(of) = self.controllers.get(controller) else { return (Status::INTERNAL, 0) };
        let (id, instance) = (sqe.dword(10) as u16, (sqe.dword(10) >> 16) as u8);
        let (host, random) = (of.host, sqe.qword(12));
        if id == of.id {
            return (Status::INVALID_FIELD, 0);
        }
        let found = (0..self.controllers.bound())
            .find(|index| self.controllers.get(*index).is_some_and(|other| other.id == id));
        let is_meant = |other: &Controller| {
            other.host == host && other.instance == instance && other.instance_random == random
        };
        if let Some(index) = found.filter(|index| self.controllers.get(*index).is_some_and(is_meant)) {
            self.close_controller(index, cx);
        }
        cx.stats.resets_served += 1;
        (Status::SUCCESS, RESET_AT_ONCE.into())
    }

    /// The host states the key of a namespace, and the incarnation that it means.
    fn present_key(&mut self, controller: u32, sqe: &Sqe, cx: &mut Context<'_>) -> Answer {
        let nsid = sqe.nsid.get();
        if sqe.qword(12) != self.incarnation {
            return (Status::OTHER_INCARNATION, 0);
        }
        let Some(served) = self.namespaces.get(&nsid) else { return (Status::INVALID_NAMESPACE, 0) };
        let region = cx.regions.get(served.region).filter(|region| region.ext.nsid == nsid);
        let Some(region) = region.filter(|region| !region.closing) else {
            return (Status::INVALID_NAMESPACE, 0);
        };
        if region.key != sqe.qword(10) || !region.access.is_remote() {
            return (Status::ACCESS_DENIED, 0);
        }
        if let Some(of) = self.controllers.get_mut(controller) {
            of.grant(nsid);
        }
        (Status::SUCCESS, 0)
    }
}

fn identity(of: &Controller, cx: &Context<'_>) -> Identity {
    Identity {
        id: of.id,
        transfer_bytes_max: Some(cx.config.transfer_bytes_max),
        // The keys of reservations always fit.
        in_capsule_bytes: (cx.config.in_capsule_bytes_max / 16 * 16).max(IN_CAPSULE_BYTES_MIN),
        instance: of.instance,
        instance_random: of.instance_random,
        resets_max: 4,
        quiesce_ms: 1,
        keep_alive_granularity_ms: 100,
        traffic_keep_alive: true,
        reservations: true,
        commands_max: DEPTH_MAX,
        discovery: of.discovery,
    }
}
