//! The master's operations behind the wire: one frame in, one frame out.
//!
//! The table `operations!` lists the needed right and the handler of every operation. A handler is called
//! only with a permitted request.

mod admin;
mod disks;
mod nodes;
mod objects;
mod pools;
mod tasks;
#[cfg(test)]
mod tests;

use alloc::vec::Vec;

use te_core::Instant;

use crate::codec::Items;
use crate::command_log::Effect;
use crate::master::Rights;
use crate::message::{self, Kind, Operation, ResponseWriter, encode_failure};
use crate::wire::Frame;
use crate::{ErrorCode, FullKey, Key, Master, Session, TenantNo};

/// Bytes of keys in one page of a listing; the rest goes to the next page.
const LIST_BYTES_MAX: usize = 1 << 20;

/// Number of keys of a batch that are looked up ahead, so that their cache misses overlap.
const WARM_KEYS: usize = 32;

/// Stands for a tenant when the request is about the objects of all tenants. No tenant has this number.
const ALL_TENANTS: TenantNo = TenantNo::MAX;

/// Generates the table of operations: the right that each needs ([`Right::of`]), what it does to the state of
/// the master ([`Kind::effect`]) and its handler (`Master::serve`). An operation without a row does not
/// compile.
macro_rules! operations {
    ($($kind:ident: $right:ident, $effect:ident, $handler:path;)*) => {
        impl Right {
            /// The right that an operation needs.
            const fn of(kind: Kind) -> Self {
                match kind {
                    $(Kind::$kind => Self::$right,)*
                }
            }
        }

        impl Kind {
            /// What a request does to the state of the master.
            #[must_use]
            pub const fn effect(self) -> Effect {
                match self {
                    $(Self::$kind => Effect::$effect,)*
                }
            }
        }

        impl Master {
            /// Carries out a permitted request.
            fn serve(&mut self, kind: Kind, call: Call<'_>) -> Result<(), ErrorCode> {
                match kind {
                    $(Kind::$kind => $handler(self, call),)*
                }
            }
        }
    };
}

operations! {
    // Operation      Right                Effect   Handler
    Hello:            Nothing,             Greets,  admin::hello;

    Mount:            Node,                Changes, nodes::mount;
    Unmount:          Node,                Changes, nodes::unmount;
    Beat:             Node,                Changes, nodes::beat;
    FetchExpulsions:  Node,                Changes, nodes::fetch_expulsions;
    EndExpulsions:    Node,                Changes, nodes::end_expulsions;
    ReportSegments:   Tenant,              Changes, nodes::report_segments;
    Segments:         TenantOrNode,        Asks,    nodes::segments;
    QueryHosts:       TenantOrNode,        Asks,    nodes::query_hosts;
    ListNodes:        Admin,               Asks,    nodes::list_nodes;

    PutStart:         Tenant,              Changes, objects::put_start;
    PutEnd:           Tenant,              Changes, objects::put_end;
    PutRevoke:        Tenant,              Changes, objects::put_revoke;
    Get:              Tenant,              Leases,  objects::get;
    Exists:           Tenant,              Asks,    objects::exists;
    ExistsLeased:     Tenant,              Leases,  objects::exists_leased;
    Prefetch:         Tenant,              Changes, objects::prefetch;
    ReturnLeases:     Nothing,             Changes, objects::return_leases;
    ChangeRetention:  Tenant,              Changes, objects::change_retention;
    Remove:           Tenant,              Changes, objects::remove;
    RemoveMany:       Tenant,              Changes, objects::remove_many;
    ClearReplicas:    Tenant,              Changes, objects::clear_replicas;
    List:             Tenant,              Asks,    objects::list;
    Find:             Tenant,              Asks,    objects::find;
    WhyKept:          Tenant,              Asks,    objects::why_kept;
    FindReplicas:     Tenant,              Asks,    objects::find_replicas;

    ReportReplicas:   TenantOrNodeForAll,  Changes, tasks::report_replicas;
    CreateTasks:      Tenant,              Changes, tasks::create;
    QueryTasks:       TenantOrAdminForAll, Asks,    tasks::query;
    ListTasks:        TenantOrAdminForAll, Asks,    tasks::list;
    CancelTasks:      TenantOrAdminForAll, Changes, tasks::cancel;
    RetryTasks:       TenantOrAdminForAll, Changes, tasks::retry;
    FetchTasks:       Node,                Changes, tasks::fetch;
    EndTasks:         Node,                Changes, tasks::end;
    OrderSegments:    Node,                Changes, tasks::order_segments;
    DrainStatus:      Node,                Asks,    tasks::drain_status;
    ReadTaskReport:   Node,                Asks,    tasks::read_report;

    MountDisks:       Node,                Changes, disks::mount;
    AdoptObjects:     Node,                Changes, disks::adopt;
    DiskReady:        Node,                Changes, disks::ready;
    FetchDiskOrders:  Node,                Changes, disks::fetch;
    EndDiskOrders:    Node,                Changes, disks::end;
    ReclaimExtents:   Node,                Changes, disks::reclaim;
    Stage:            TenantOrNode,        Asks,    disks::stage;
    ReleaseStaged:    TenantOrNode,        Asks,    disks::release_staged;
    LocateExtents:    TenantOrNode,        Asks,    disks::locate_extents;

    ClaimExtents:     Node,                Changes, pools::claim_extents;
    ReleaseExtents:   Node,                Changes, pools::release_extents;
    TakePage:         TenantOrNode,        Changes, pools::take_page;
    FreePage:         Admin,               Changes, pools::free_page;
    ListPools:        Admin,               Asks,    pools::list_pools;

    ReadStats:        TenantOrAdmin,       Asks,    admin::read_stats;
    ExplainEviction:  TenantOrAdmin,       Asks,    admin::explain_eviction;
    ReadConfig:       Admin,               Asks,    admin::read_config;
    ChangeConfig:     Admin,               Changes, admin::change_config;
    EvictNow:         Admin,               Changes, admin::evict_now;
    TenantList:       TenantOrAdmin,       Asks,    admin::tenant_list;
    TenantSet:        Admin,               Changes, admin::tenant_set;
    TenantRemove:     Admin,               Changes, admin::tenant_remove;
}

/// The right that an operation needs, which also determines the tenant whose objects the request is about.
/// All but the first require that the connection has sent a greeting, if the master has tenants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Right {
    /// No right.
    Nothing,
    /// A tenant, for its own objects.
    Tenant,
    /// A tenant, for its own objects; or an admin, for totals and, if it is a tenant as well, for its own
    /// objects.
    TenantOrAdmin,
    /// A tenant, for its own objects; or an admin, for the objects of all tenants.
    TenantOrAdminForAll,
    /// A tenant, for its own objects; or a node without a tenant, for the objects of all tenants, which it
    /// copies.
    TenantOrNodeForAll,
    /// A tenant or a node, for no object: exports open the memory of all tenants.
    TenantOrNode,
    /// A node, for no tenant's objects.
    Node,
    /// An admin, for no tenant's objects.
    Admin,
}

impl Right {
    /// The tenant whose objects the request is about; any number if it is about no object.
    ///
    /// # Errors
    /// `TenantNotRegistered` for a connection that has to act for a tenant, or to send a greeting;
    /// `PermissionDenied` for one that needs the rights of a node or an admin.
    fn permit(self, rights: Rights) -> Result<TenantNo, ErrorCode> {
        let Rights { known, tenant, admin, node } = rights;
        let any = TenantNo::DEFAULT;
        let own = tenant.ok_or(ErrorCode::TenantNotRegistered);
        match self {
            Self::Nothing => Ok(any),
            _ if !known => Err(ErrorCode::TenantNotRegistered),
            Self::Tenant => own,
            Self::TenantOrAdmin if admin => Ok(tenant.unwrap_or(any)),
            Self::TenantOrAdminForAll if admin => Ok(ALL_TENANTS),
            Self::TenantOrNodeForAll if node && tenant.is_none() => Ok(ALL_TENANTS),
            Self::TenantOrAdmin | Self::TenantOrAdminForAll | Self::TenantOrNodeForAll => own,
            Self::TenantOrNode if node => Ok(any),
            Self::TenantOrNode => own.map(|_| any),
            Self::Node if node => Ok(any),
            Self::Admin if admin => Ok(any),
            Self::Node | Self::Admin => Err(ErrorCode::PermissionDenied),
        }
    }
}

/// A request with its connection's session and rights.
struct Call<'c> {
    now: Instant,
    /// The master's state of the connection.
    session: &'c mut Session,
    /// Default rights for an operation that needs none.
    rights: Rights,
    /// The tenant whose objects it is about, as [`Right::permit`] returned it.
    tenant: TenantNo,
    request: Request<'c>,
}

/// A request's number and body, and the buffer that its response is appended to.
struct Request<'c> {
    id: u64,
    body: &'c [u8],
    out: &'c mut Vec<u8>,
}

/// A decoded request: its head and its items.
type Decoded<'c, O> = (<O as Operation>::Request<'c>, Items<'c, <O as Operation>::RequestItem<'c>>);

impl<'c> Request<'c> {
    fn read<O: Operation>(&self) -> Result<Decoded<'c, O>, ErrorCode> {
        Ok(O::decode_request(self.body)?)
    }

    fn respond<'a, O: Operation>(
        self,
        head: &O::Response<'_>,
        items: impl ExactSizeIterator<Item = O::ResponseItem<'a>>,
    ) -> Result<(), ErrorCode> {
        Ok(O::encode_response(self.out, self.id, head, items)?)
    }

    /// Appends a response without items.
    fn respond_head<O: Operation>(self, head: &O::Response<'_>) -> Result<(), ErrorCode> {
        self.respond::<O>(head, core::iter::empty())
    }
}

impl Master {
    /// Carries out one request frame of a connection and appends exactly one response frame to `out`; none
    /// for [`ReturnLeases`](message::ReturnLeases). `session` is the master's state of the connection. `now`
    /// is a time that was read just before, not at the beginning of a longer turn: leases are measured from
    /// it.
    ///
    /// A request that does not decode, or belongs to no known operation, gets a response with a status and
    /// changes nothing.
    pub fn handle(&mut self, now: Instant, session: &mut Session, frame: &Frame<'_>, out: &mut Vec<u8>) {
        let start = out.len();
        if let Err(error) = self.carry_out(now, session, frame, out) {
            out.truncate(start);
            encode_failure(out, frame.header.kind, frame.header.request_id, error);
        }
    }

    fn carry_out(
        &mut self,
        now: Instant,
        session: &mut Session,
        frame: &Frame<'_>,
        out: &mut Vec<u8>,
    ) -> Result<(), ErrorCode> {
        if frame.header.response {
            return Err(ErrorCode::InvalidParams);
        }
        let kind = Kind::from_byte(frame.header.kind).ok_or(ErrorCode::NotSupported)?;
        let right = Right::of(kind);
        // Rights are not looked up for operations that need none.
        let rights = if right == Right::Nothing { Rights::default() } else { self.rights(session) };
        let tenant = right.permit(rights)?;
        let request = Request { id: frame.header.request_id, body: frame.body, out };
        self.serve(kind, Call { now, session, rights, tenant, request })
    }
}

/// Items with a key, as many as fit into a response.
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
    /// Returns whether the item fits.
    fn push(&mut self, item: T, key: Key<'_>) -> bool {
        self.key_bytes += key.0.len();
        let fits = self.key_bytes <= LIST_BYTES_MAX;
        if fits {
            self.items.push(item);
        }
        fits
    }
}

/// Appends one response item per request item, as they are computed.
fn batch<O: Operation>(
    master: &mut Master,
    tenant: TenantNo,
    request: Request<'_>,
    head: &O::Response<'_>,
    mut each: impl FnMut(&mut Master, usize, &O::Request<'_>, O::RequestItem<'_>) -> O::ResponseItem<'static>,
) -> Result<(), ErrorCode>
where
    for<'a> O::RequestItem<'a>: Keyed<'a> + Copy,
{
    let (head_of_request, mut items) = request.read::<O>()?;
    let mut response = ResponseWriter::begin::<O>(request.out, request.id, head, items.len())?;
    if items.len() == 1 {
        for item in items {
            response.item(&each(master, 0, &head_of_request, item))?;
        }
        return Ok(response.finish()?);
    }
    let mut at = 0;
    let mut some = Vec::with_capacity(items.len().min(WARM_KEYS));
    while !items.is_empty() {
        some.extend(items.by_ref().take(WARM_KEYS));
        master.warm(some.iter().map(|item: &O::RequestItem<'_>| item.of(tenant)));
        for item in some.drain(..) {
            response.item(&each(master, at, &head_of_request, item))?;
            at += 1;
        }
    }
    Ok(response.finish()?)
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
