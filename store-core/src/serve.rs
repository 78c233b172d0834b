//! Frames in, frames out: the master's operations behind the wire.

mod tasks;

use alloc::vec::Vec;

use te_core::Instant;

use crate::master::{PAGE_ITEMS_MAX, Rights};
use crate::message::{
    self, Answer, Kind, Lease, ListPosition, MountAnswer, NodeStatus, Operation, PutWindow, Welcome,
    encode_failure,
};
use crate::proof::CHALLENGE_BYTES;
use crate::wire::{Frame, KEYS_PER_BATCH_MAX, VERSION, WireError};
use crate::{ErrorCode, FullKey, Key, Master, Place, Session, TenantNo};

/// Bytes of keys in one page of a listing; the rest goes to the next page.
const LIST_BYTES_MAX: usize = 1 << 20;

/// Keys of a batch that are looked up ahead, so that their cache misses overlap.
const WARM_KEYS: usize = 32;

impl Master {
    /// Carries out one request frame of a connection and appends exactly one response frame to `out`; none for
    /// [`ReturnLeases`](message::ReturnLeases). `session` is what the master keeps of the connection. `now` is a time that was
    /// read just before, not at the beginning of a longer turn: what a reader may count on is measured from it.
    ///
    /// A request that cannot be read, or is of no operation here, is answered with a status and changes nothing.
    pub fn handle(&mut self, now: Instant, session: &mut Session, frame: &Frame<'_>, out: &mut Vec<u8>) {
        let start = out.len();
        let result = match Kind::from_byte(frame.header.kind) {
            _ if frame.header.response => Err(ErrorCode::InvalidParams),
            None => Err(ErrorCode::NotSupported),
            Some(Kind::Hello) => self.hello(session, frame, out),
            Some(Kind::ReturnLeases) => return self.return_leases(now, session, frame),
            Some(kind) => {
                let rights = self.rights(session);
                self.permit(kind, rights)
                    .and_then(|tenant| self.serve(now, session, kind, tenant, rights, frame, out))
            }
        };
        if let Err(error) = result {
            out.truncate(start);
            encode_failure(out, frame.header.kind, frame.header.request_id, error);
        }
    }

    fn hello(
        &mut self,
        session: &mut Session,
        frame: &Frame<'_>,
        out: &mut Vec<u8>,
    ) -> Result<(), ErrorCode> {
        let (greeting, _) = message::Hello::decode_request(frame.body).map_err(WireError::code)?;
        self.greet(session, &greeting)?;
        let id = frame.header.request_id;
        message::Hello::encode_response(out, id, &self.welcome(session.challenge), core::iter::empty())
            .map_err(WireError::code)
    }

    /// Nobody waits for an answer. Of what cannot be read nothing is given back: it runs out.
    fn return_leases(&mut self, now: Instant, session: &mut Session, frame: &Frame<'_>) {
        let Ok((_, ranges)) = message::ReturnLeases::decode_request(frame.body) else { return };
        for range in ranges {
            session.leases.take(now, range.first, range.count, |granted| self.lease_returned(now, &granted));
        }
    }

    /// Whose objects a request is about, if the connection may ask it at all; what is about no object gets any number.
    fn permit(&self, kind: Kind, rights: Rights) -> Result<TenantNo, ErrorCode> {
        match kind {
            _ if !rights.known => Err(ErrorCode::TenantNotRegistered),
            Kind::Mount | Kind::Unmount | Kind::Beat | Kind::FetchExpulsions | Kind::EndExpulsions
                if !rights.node =>
            {
                Err(ErrorCode::PermissionDenied)
            }
            // Exports open everybody's memory: they are for tenants and nodes.
            Kind::Segments | Kind::QueryHosts if rights.tenant.is_none() && !rights.node => {
                Err(ErrorCode::TenantNotRegistered)
            }
            Kind::Mount
            | Kind::Unmount
            | Kind::Beat
            | Kind::FetchExpulsions
            | Kind::EndExpulsions
            | Kind::Segments
            | Kind::QueryHosts => Ok(0),
            Kind::TenantSet | Kind::TenantRemove if !rights.admin => Err(ErrorCode::PermissionDenied),
            Kind::TenantSet | Kind::TenantRemove => Ok(0),
            Kind::TenantList if rights.admin => Ok(0),
            Kind::ReadStats | Kind::ExplainEviction if rights.admin => Ok(rights.tenant.unwrap_or(0)),
            Kind::FetchTasks
            | Kind::EndTasks
            | Kind::OrderSegments
            | Kind::DrainStatus
            | Kind::ReadTaskReport => {
                if rights.node {
                    Ok(0)
                } else {
                    Err(ErrorCode::PermissionDenied)
                }
            }
            Kind::ReadConfig | Kind::EvictNow | Kind::ListNodes => {
                if rights.admin {
                    Ok(0)
                } else {
                    Err(ErrorCode::PermissionDenied)
                }
            }
            Kind::QueryTasks | Kind::ListTasks | Kind::CancelTasks | Kind::RetryTasks if rights.admin => {
                Ok(tasks::EVERYBODY)
            }
            // A node that is nobody's copies everybody's objects.
            Kind::ReportReplicas if rights.node && rights.tenant.is_none() => Ok(tasks::EVERYBODY),
            _ => rights.tenant.ok_or(ErrorCode::TenantNotRegistered),
        }
    }

    #[expect(clippy::too_many_arguments, reason = "one request, taken apart")]
    fn serve(
        &mut self,
        now: Instant,
        session: &mut Session,
        kind: Kind,
        tenant: TenantNo,
        rights: Rights,
        frame: &Frame<'_>,
        out: &mut Vec<u8>,
    ) -> Result<(), ErrorCode> {
        let (id, body) = (frame.header.request_id, frame.body);
        let done = match kind {
            // They are answered before.
            Kind::Hello | Kind::ReturnLeases => return Err(ErrorCode::InternalError),
            Kind::Mount => {
                let (segment, _) = message::Mount::decode_request(body).map_err(WireError::code)?;
                let no = self.session_no(session);
                let answer = self.mount_from(now, &segment, no)?;
                session.node |= matches!(answer, MountAnswer::Mounted(_));
                message::Mount::encode_response(out, id, &answer, core::iter::empty())
            }
            Kind::Unmount => {
                let (segment, _) = message::Unmount::decode_request(body).map_err(WireError::code)?;
                self.unmount(now, &segment)?;
                message::Unmount::encode_response(out, id, &(), core::iter::empty())
            }
            Kind::Beat => {
                let (beat, _) = message::Beat::decode_request(body).map_err(WireError::code)?;
                let no = self.session_no(session);
                let status = self.heartbeat_from(now, &beat, no)?;
                session.node |= status != NodeStatus::NeedRemount;
                message::Beat::encode_response(out, id, &status, core::iter::empty())
            }
            Kind::FetchExpulsions => {
                let (ask, _) = message::FetchExpulsions::decode_request(body).map_err(WireError::code)?;
                let orders = self.fetch_expulsions(now, &ask)?;
                message::FetchExpulsions::encode_response(out, id, &(), orders.into_iter())
            }
            Kind::EndExpulsions => {
                let (proof, ends) = message::EndExpulsions::decode_request(body).map_err(WireError::code)?;
                self.check_node(proof.node, proof.key)?;
                let ended = ends.map(|end| self.end_expulsion(now, proof.node, &end));
                message::EndExpulsions::encode_response(out, id, &(), ended)
            }
            Kind::ReportSegments => {
                let (_, reported) = message::ReportSegments::decode_request(body).map_err(WireError::code)?;
                let noted = reported.map(|no| self.report_unreachable(now, no));
                message::ReportSegments::encode_response(out, id, &(), noted)
            }
            Kind::PutStart => {
                let window_ms = self.config().put_start_discard_timeout_ms;
                let head = PutWindow { window_ms };
                let (_, items) = message::PutStart::decode_request(body).map_err(WireError::code)?;
                let (len, returning) = (items.len(), self.returning(items.map(|item| item.of(tenant))));
                let no = self.session_no(session);
                let done =
                    batch::<message::PutStart>(self, tenant, body, id, out, &head, |master, at, ask, new| {
                        let place = Place::new(at, len, returning);
                        session.writer = ask.writer;
                        master.put_start_from(now, new.of(tenant), new.len, &ask.item(at), place, no)
                    });
                session.puts = self.unfinished_of(no);
                done
            }
            Kind::PutEnd => {
                batch::<message::PutEnd>(self, tenant, body, id, out, &(), |master, at, (), item| {
                    master.check_handle(item.generation, item.handle)?;
                    master.put_end_in(now, item.of(tenant), item.generation, item.checksum, at > 0)
                })
                .inspect(|()| session.puts = self.unfinished_of(session.no))
            }
            Kind::PutRevoke => {
                batch::<message::PutRevoke>(self, tenant, body, id, out, &(), |master, _, (), item| {
                    master.check_handle(item.generation, item.handle)?;
                    master.put_revoke(now, item.of(tenant), item.generation, item.quiet)
                })
                .inspect(|()| session.puts = self.unfinished_of(session.no))
            }
            Kind::Get => {
                let head = Lease { lease_ms: self.config().lease_ttl_ms, first: session.leases.next() };
                let leases = &mut session.leases;
                batch::<message::Get>(self, tenant, body, id, out, &head, |master, at, (), key| {
                    master.get_for(now, key.of(tenant), at > 0, leases)
                })
            }
            Kind::Exists => {
                batch::<message::Exists>(self, tenant, body, id, out, &(), |master, _, (), key| {
                    master.exists(key.of(tenant))
                })
            }
            Kind::Remove => {
                batch::<message::Remove>(self, tenant, body, id, out, &(), |master, _, (), item| {
                    master.remove(now, item.of(tenant), item.force)
                })
            }
            Kind::List => {
                let (query, _) = message::List::decode_request(body).map_err(WireError::code)?;
                let mut page = Page::default();
                let cursor = self.list_of(now, tenant, &query, |listed| page.push(listed, listed.key));
                message::List::encode_response(out, id, &ListPosition { cursor }, page.items.into_iter())
            }
            Kind::Segments => {
                let (_, wanted) = message::Segments::decode_request(body).map_err(WireError::code)?;
                if wanted.is_empty() {
                    let all: Vec<_> = self.segments().map(Ok).collect();
                    message::Segments::encode_response(out, id, &(), all.into_iter())
                } else {
                    let found = wanted.map(|no| self.segment(no).ok_or(ErrorCode::SegmentNotFound));
                    message::Segments::encode_response(out, id, &(), found)
                }
            }
            Kind::ReadStats => {
                let all = rights.admin || !self.config().multi_tenants;
                let stats = if all { self.stats() } else { self.stats_of(tenant) };
                message::ReadStats::encode_response(out, id, &stats, core::iter::empty())
            }
            Kind::ExplainEviction => {
                let (limit, _) = message::ExplainEviction::decode_request(body).map_err(WireError::code)?;
                let limit = (limit.min(PAGE_ITEMS_MAX)) as usize;
                let mut next = Page::default();
                self.next_victims(now, tenant, |victim| {
                    next.items.len() < limit && next.push(victim, victim.key)
                });
                let report = if rights.admin || !self.config().multi_tenants {
                    self.eviction()
                } else {
                    self.eviction_of(tenant)
                };
                message::ExplainEviction::encode_response(out, id, &report, next.items.into_iter())
            }
            Kind::TenantList => {
                let (_, names) = message::TenantList::decode_request(body).map_err(WireError::code)?;
                let unknown = ErrorCode::TenantNotRegistered;
                if !rights.admin {
                    // There is no other as far as it can tell.
                    let own = self.usage_of(tenant);
                    let all = core::iter::repeat_n(Ok(own), usize::from(names.is_empty()));
                    let named = names.map(|name| if name == own.name { Ok(own) } else { Err(unknown) });
                    let answers: Vec<_> = all.chain(named).collect();
                    message::TenantList::encode_response(out, id, &(), answers.into_iter())
                } else if names.is_empty() {
                    let all: Vec<_> = self.tenants().take(KEYS_PER_BATCH_MAX).map(Ok).collect();
                    message::TenantList::encode_response(out, id, &(), all.into_iter())
                } else {
                    let named = names.map(|name| self.tenant(name).ok_or(unknown));
                    message::TenantList::encode_response(out, id, &(), named)
                }
            }
            Kind::TenantSet => {
                let (setting, _) = message::TenantSet::decode_request(body).map_err(WireError::code)?;
                self.set_tenant(&setting)?;
                message::TenantSet::encode_response(out, id, &(), core::iter::empty())
            }
            Kind::TenantRemove => {
                let (name, _) = message::TenantRemove::decode_request(body).map_err(WireError::code)?;
                self.remove_tenant(name)?;
                message::TenantRemove::encode_response(out, id, &(), core::iter::empty())
            }
            Kind::Find => {
                let (query, _) = message::Find::decode_request(body).map_err(WireError::code)?;
                let mut page = Page::default();
                let cursor = self.find(now, tenant, &query, |listed| page.push(listed, listed.key))?;
                message::Find::encode_response(out, id, &ListPosition { cursor }, page.items.into_iter())
            }
            Kind::RemoveMany => {
                let (query, _) = message::RemoveMany::decode_request(body).map_err(WireError::code)?;
                let page = self.remove_many(now, tenant, &query)?;
                message::RemoveMany::encode_response(out, id, &page, core::iter::empty())
            }
            Kind::QueryHosts => {
                let (_, asked) = message::QueryHosts::decode_request(body).map_err(WireError::code)?;
                message::QueryHosts::encode_response(out, id, &(), asked.map(|of| self.hosts(of)))
            }
            Kind::ClearReplicas => batch::<message::ClearReplicas>(
                self,
                tenant,
                body,
                id,
                out,
                &(),
                |master, _, segment, key| master.clear_replica(now, key.of(tenant), *segment),
            ),
            Kind::ReadConfig => {
                message::ReadConfig::encode_response(out, id, self.config(), core::iter::empty())
            }
            Kind::EvictNow => {
                let (leave, _) = message::EvictNow::decode_request(body).map_err(WireError::code)?;
                let evicted = self.evict_now(now, leave);
                message::EvictNow::encode_response(out, id, &evicted, core::iter::empty())
            }
            Kind::ListNodes => {
                let nodes: Vec<_> = self.nodes(now).take(KEYS_PER_BATCH_MAX).collect();
                message::ListNodes::encode_response(out, id, &(), nodes.into_iter())
            }
            Kind::WhyKept => {
                batch::<message::WhyKept>(self, tenant, body, id, out, &(), |master, _, (), key| {
                    master.kept(now, key.of(tenant))
                })
            }
            Kind::ReportReplicas
            | Kind::FindReplicas
            | Kind::CreateTasks
            | Kind::QueryTasks
            | Kind::ListTasks
            | Kind::CancelTasks
            | Kind::RetryTasks
            | Kind::FetchTasks
            | Kind::EndTasks
            | Kind::OrderSegments
            | Kind::DrainStatus
            | Kind::ReadTaskReport => return self.serve_tasks(now, kind, tenant, frame, out),
        };
        done.map_err(WireError::code)
    }

    fn welcome(&self, challenge: [u8; CHALLENGE_BYTES]) -> Welcome {
        let config = self.config();
        Welcome {
            version: VERSION,
            epoch: config.epoch.into(),
            keys_per_batch_max: KEYS_PER_BATCH_MAX as u32,
            key_bytes_max: config.key_bytes_max,
            replicas_max: config.replicas_max,
            lease_ms: config.lease_ttl_ms,
            node_ttl_ms: config.node_ttl_ms,
            challenge,
        }
    }
}

/// Items with a key, as many as fit an answer.
struct Page<T> {
    items: Vec<T>,
    key_bytes: usize,
}

impl<T> Default for Page<T> {
    fn default() -> Self {
        Self { items: Vec::new(), key_bytes: 0 }
    }
}

impl<T> Page<T> {
    /// Whether it fitted.
    fn push(&mut self, item: T, key: Key<'_>) -> bool {
        self.key_bytes += key.0.len();
        let fits = self.key_bytes <= LIST_BYTES_MAX;
        if fits {
            self.items.push(item);
        }
        fits
    }
}

/// One answer for each item asked, appended as they are found.
fn batch<O: Operation>(
    master: &mut Master,
    tenant: TenantNo,
    body: &[u8],
    id: u64,
    out: &mut Vec<u8>,
    head: &O::Answer<'_>,
    mut each: impl FnMut(&mut Master, usize, &O::Ask<'_>, O::AskItem<'_>) -> O::AnswerItem<'static>,
) -> Result<(), WireError>
where
    for<'a> O::AskItem<'a>: Keyed<'a> + Copy,
{
    let (ask, mut items) = O::decode_request(body)?;
    let mut answer = Answer::begin::<O>(out, id, head, items.len())?;
    if items.len() == 1 {
        for item in items {
            answer.item(&each(master, 0, &ask, item))?;
        }
        return answer.finish();
    }
    let mut at = 0;
    let mut some = Vec::with_capacity(items.len().min(WARM_KEYS));
    while !items.is_empty() {
        some.extend(items.by_ref().take(WARM_KEYS));
        master.warm(some.iter().map(|item: &O::AskItem<'_>| item.of(tenant)));
        for item in some.drain(..) {
            answer.item(&each(master, at, &ask, item))?;
            at += 1;
        }
    }
    answer.finish()
}

/// An item that is about one key.
trait Keyed<'a> {
    fn key(self) -> Key<'a>;

    fn of(self, tenant: TenantNo) -> FullKey<'a>
    where
        Self: Sized,
    {
        FullKey { tenant, key: self.key().0 }
    }
}

impl<'a> Keyed<'a> for Key<'a> {
    fn key(self) -> Key<'a> {
        self
    }
}

macro_rules! keyed {
    ($($item:ident),*) => {$(
        impl<'a> Keyed<'a> for message::$item<'a> {
            fn key(self) -> Key<'a> {
                self.key
            }
        }
    )*};
}

keyed!(NewObject, Commit, Revocation, Removal, NewTask, BadReplica);
