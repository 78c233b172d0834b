//! Requests about many objects at once: clients list, find and remove many keys, and clear replicas. The
//! responses are compared with the objects that existed.
//!
//! A listing takes several pages, between which the store continues. It may show what existed at some moment
//! during the listing, and has to show, once, what existed all the time. A removal must leave exactly what it
//! reports as left, and nothing else may be gone.

use std::collections::{BTreeMap, BTreeSet};

use store_core::message::{
    ChangeRetention, ClearReplicas, Find, FindQuery, List, ListPosition, ListQuery, Listed, Operation,
    RemoveMany, RemoveMode, RemoveQuery, RemovedPage, ReplicaState, RetentionChange,
};
use store_core::{ErrorCode, Frame, FullKey, Items, Key, Kind, SegmentNo, TenantNo};
use te_core::Instant;
use te_core::testkit::Rng;

use crate::checker::{Request, Response};
use crate::client::Client;
use crate::common::{Core, Party};
use crate::scenario::{Lies, TENANTS, full_key, split_key};
use crate::shadow::Violation;

/// Prefixes that clients list, with equal probability.
const PREFIXES: [&[u8]; 4] = [b"", b"key-", b"key-2", b"3"];

/// Whether a key matches.
type Matches = fn(&[u8]) -> bool;

/// Patterns that clients search for, and the keys that they match, determined without a regular expression.
const PATTERNS: [(&str, Matches); 5] = [
    ("^key-1", |key| key.starts_with(b"key-1")),
    ("(-long){12}$", |key| key.ends_with(b"-long")),
    ("^key-[0-4]$", |key| key.len() == 5 && key.starts_with(b"key-") && key[4] <= b'4'),
    ("7", |key| key.contains(&b'7')),
    (r"^\d5-", |key| key[0].is_ascii_digit() && key[1..].starts_with(b"5-")),
];

/// The keys that a request is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wanted {
    Prefix(&'static [u8]),
    /// Index in [`PATTERNS`].
    Pattern(usize),
}

impl Wanted {
    const ALL: Self = Self::Prefix(b"");

    fn random_prefix(rng: &mut Rng) -> Self {
        Self::Prefix(PREFIXES[rng.index(PREFIXES.len())])
    }

    fn random_pattern(rng: &mut Rng) -> Self {
        Self::Pattern(rng.index(PATTERNS.len()))
    }

    fn matches(self, key: &[u8]) -> bool {
        match self {
            Self::Prefix(prefix) => key.starts_with(prefix),
            Self::Pattern(at) => PATTERNS[at].1(key),
        }
    }

    /// The keys that match a request's pattern.
    fn of_pattern(text: Option<&str>) -> Self {
        let at = text.map(|text| PATTERNS.iter().position(|(known, _)| *known == text).unwrap());
        at.map_or(Self::ALL, Self::Pattern)
    }

    fn pattern(self) -> Option<&'static str> {
        if let Self::Pattern(at) = self { Some(PATTERNS[at].0) } else { None }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Aim {
    /// List the keys, so many per page.
    See {
        limit: u32,
    },
    Remove {
        force: bool,
    },
}

/// A listing or a removal of many objects that a client is carrying out.
pub(crate) struct Bulk {
    wanted: Wanted,
    aim: Aim,
    /// The request id of its latest page.
    request_id: u64,
    began: Instant,
    /// The objects that existed when it began and are wanted, with their generations.
    there: BTreeMap<Vec<u8>, u64>,
    /// Keys of readable objects that were listed, in their order.
    shown: Vec<Vec<u8>>,
    /// Objects that the master reported as left because they are leased.
    leased: u64,
}

impl Client {
    /// Begins to list keys or to remove them.
    pub(crate) fn start_bulk(&mut self, core: &mut Core, rng: &mut Rng, removes: bool) {
        let (wanted, aim) = if removes {
            let wanted = if rng.below(16) == 0 { Wanted::ALL } else { Wanted::random_pattern(rng) };
            (wanted, Aim::Remove { force: rng.below(2) == 0 })
        } else {
            let find = rng.below(2) == 0;
            let wanted = if find { Wanted::random_pattern(rng) } else { Wanted::random_prefix(rng) };
            (wanted, Aim::See { limit: 1 + rng.below(12) as u32 })
        };
        let there = core.there(self.tenant(core), wanted);
        let bulk = Bulk { wanted, aim, request_id: 0, began: core.now, there, shown: Vec::new(), leased: 0 };
        self.bulk = Some(bulk);
        self.ask_page(core, 0);
    }

    fn ask_page(&mut self, core: &mut Core, cursor: u64) {
        let request_id = self.next_id();
        let Some(bulk) = &mut self.bulk else { return };
        bulk.request_id = request_id;
        let (mut out, none) = (Vec::new(), core::iter::empty());
        match (bulk.aim, bulk.wanted) {
            (Aim::Remove { force }, wanted) => {
                let query = RemoveQuery { pattern: wanted.pattern(), cursor, force };
                RemoveMany::encode_request(&mut out, request_id, &query, none)
            }
            (Aim::See { limit }, Wanted::Prefix(prefix)) => {
                let query = ListQuery { prefix: Key(prefix), cursor, limit };
                List::encode_request(&mut out, request_id, &query, none)
            }
            (Aim::See { limit }, Wanted::Pattern(at)) => {
                let query = FindQuery { pattern: PATTERNS[at].0, cursor, limit };
                Find::encode_request(&mut out, request_id, &query, none)
            }
        }
        .unwrap();
        core.send_call((self.index, self.life), self.speaks_as, request_id, out);
    }

    /// Whether it waits for the response to this request.
    pub(crate) fn asks_for_page(&self, request_id: u64) -> bool {
        self.bulk.as_ref().is_some_and(|bulk| bulk.request_id == request_id)
    }

    /// Processes a page; returns whether it was the last.
    pub(crate) fn page_came(&mut self, core: &mut Core, frame: &Frame<'_>) -> Result<bool, Violation> {
        let tenant = self.tenant(core);
        let Some(bulk) = &mut self.bulk else { return Ok(true) };
        let cursor = match bulk.aim {
            Aim::Remove { .. } => match RemoveMany::decode_response(frame) {
                Ok((page, _)) => {
                    bulk.leased += u64::from(page.leased);
                    page.cursor
                }
                Err(error) => {
                    assert_ne!(error, ErrorCode::InvalidPattern);
                    return Ok(true);
                }
            },
            Aim::See { .. } => {
                let page = decode_page(frame);
                assert!(!matches!(page, Err(ErrorCode::InvalidPattern)));
                let Ok((ListPosition { cursor }, listed)) = page else { return Ok(true) };
                let readable = listed.filter(|listed| listed.complete);
                bulk.shown.extend(readable.map(|listed| listed.key.0.to_vec()));
                if core.lies.contains(Lies::PAGE) { 0 } else { cursor }
            }
        };
        if cursor != 0 {
            self.ask_page(core, cursor);
            return Ok(false);
        }
        if core.lies.contains(Lies::FORMER) && matches!(bulk.aim, Aim::See { .. }) {
            let former = std::mem::replace(&mut self.former, bulk.shown.clone());
            let again = former.into_iter().filter(|key| bulk.wanted.matches(key));
            let again: Vec<_> = again.filter(|key| !bulk.shown.contains(key)).collect();
            bulk.shown.extend(again);
        }
        let found = bulk.judge(core, tenant);
        core.judge(found)?;
        Ok(true)
    }

    /// A page did not come in time.
    pub(crate) fn page_failed(&mut self, core: &Core) -> Result<(), Violation> {
        let tenant = self.tenant(core);
        let Some(bulk) = self.bulk.take() else { return Ok(()) };
        match bulk.aim {
            Aim::Remove { .. } if core.lies.contains(Lies::SWEEP) => {
                core.judge(bulk.judge_rest(core, tenant))
            }
            _ => Ok(()),
        }
    }

    /// Drops replicas of chosen keys, on one segment or on all of them.
    pub(crate) fn clear_replicas(&mut self, core: &mut Core, rng: &mut Rng) -> u64 {
        let request_id = self.next_id();
        let segment = match rng.below(4) {
            0 => None,
            1 => core.random_segment(rng),
            _ => core.source_of(self.tenant(core), &self.asked[0].key),
        };
        let mut out = Vec::new();
        let keys: Vec<_> = self.asked.iter().map(|asked| Key(&asked.key)).collect();
        ClearReplicas::encode_request(&mut out, request_id, &segment, keys.into_iter()).unwrap();
        core.send_call((self.index, self.life), self.speaks_as, request_id, out);
        request_id
    }

    /// The index of the tenant that the master takes it for.
    fn tenant(&self, core: &Core) -> usize {
        core.tenant_of(Party::Client(self.speaks_as.0))
    }
}

impl Bulk {
    /// Checks an operation that has ended successfully.
    fn judge(&self, core: &mut Core, tenant: usize) -> Result<(), Violation> {
        if let Aim::Remove { .. } = self.aim {
            core.report.sweeps += 1;
            return self.judge_rest(core, tenant);
        }
        core.report.listings += 1;
        core.report.listed += self.shown.len() as u64;
        for key in &self.shown {
            let name = full_key(tenant, key);
            let was = core.visible.contains_key(&name)
                || core.gone.get(&name).is_some_and(|gone| *gone >= self.began);
            if !was || !self.wanted.matches(key) {
                return Err(Violation::Shown(format!("{}: {}", Key(key), self.describe(core, tenant))));
            }
        }
        for (key, generation) in &self.there {
            let stayed =
                core.visible.get(&full_key(tenant, key)).is_some_and(|it| it.generation == *generation);
            let times = self.shown.iter().filter(|shown| *shown == key).count();
            if stayed && times != 1 {
                let text = format!("{}, shown {times} times: {}", Key(key), self.describe(core, tenant));
                return Err(if times == 0 { Violation::Missed(text) } else { Violation::Shown(text) });
            }
        }
        Ok(())
    }

    /// The objects that existed when a removal began and exist after it are those that the master reported as
    /// left.
    fn judge_rest(&self, core: &Core, tenant: usize) -> Result<(), Violation> {
        let stays = |(key, generation): &(&Vec<u8>, &u64)| {
            core.visible.get(&full_key(tenant, key)).is_some_and(|it| it.generation == **generation)
        };
        let left = self.there.iter().filter(stays).count() as u64;
        let may = if self.aim == (Aim::Remove { force: true }) { 0 } else { self.leased };
        if left > may {
            return Err(Violation::Left(format!("{left} of {may}: {}", self.describe(core, tenant))));
        }
        Ok(())
    }

    fn describe(&self, core: &Core, tenant: usize) -> String {
        let Self { wanted, aim, began, .. } = self;
        format!("{aim:?} {wanted:?} by tenant {tenant} from {began:?} to {:?}", core.now)
    }
}

/// Where the objects of a request to clear replicas are: by key, in the order of the request.
pub(crate) type Places = Vec<(Vec<u8>, Vec<SegmentNo>)>;

impl Core {
    /// A tenant's readable objects that are wanted, without the tenant's name.
    fn there(&self, tenant: usize, wanted: Wanted) -> BTreeMap<Vec<u8>, u64> {
        let own = self.visible.iter().map(|(key, seen)| (split_key(key), seen.generation));
        let own = own.filter(|((whose, key), _)| *whose == tenant && wanted.matches(key));
        own.map(|((_, key), generation)| (key.to_vec(), generation)).collect()
    }

    /// An object is gone.
    pub(crate) fn vanish(&mut self, key: &[u8]) {
        if self.visible.remove(key).is_some() {
            self.gone.insert(key.to_vec(), self.now);
        }
    }

    /// An object is gone because of a request about many.
    fn removed(&mut self, from: Party, key: &[u8]) {
        self.vanish(key);
        let Party::Client(client) = from else { return };
        let now = self.now.as_nanos();
        let removal = self.history.called(client, key, Request::Remove { force: true }, now);
        self.history.answered(removal, Response::Done, now);
    }

    /// What was readable and is gone, for any reason.
    fn vanished(&self) -> BTreeSet<Vec<u8>> {
        let mut gone: BTreeSet<Vec<u8>> = self.visible.keys().cloned().collect();
        let query = ListQuery { prefix: Key(b""), cursor: 0, limit: 4096 };
        for tenant in 0..TENANTS.len() {
            self.master.list_of(self.shown(), TenantNo::new(tenant as u16 + 1), &query, |listed| {
                if listed.complete {
                    gone.remove(&full_key(tenant, listed.key.0));
                }
                true
            });
        }
        gone
    }

    /// A page must show only what exists at this moment.
    pub(crate) fn observe_page(
        &self,
        from: Party,
        request: &Frame<'_>,
        response: &Frame<'_>,
    ) -> Result<(), Violation> {
        let Ok((_, listed)) = decode_page(response) else { return Ok(()) };
        let find = request.header.kind == Kind::Find as u8;
        let find = find.then(|| Find::decode_request(request.body).unwrap().0);
        let matches = |key: &[u8]| match find {
            Some(query) => Wanted::of_pattern(Some(query.pattern)).matches(key),
            None => key.starts_with(List::decode_request(request.body).unwrap().0.prefix.0),
        };
        for item in listed {
            let seen = self.visible.get(&full_key(self.tenant_of(from), item.key.0));
            let len = seen.and_then(|seen| self.shadow.puts.get(&seen.generation)).map(|put| put.len);
            let right = item.complete == seen.is_some() && len.is_none_or(|len| len == item.len);
            if !right || item.replicas == 0 || !matches(item.key.0) {
                return Err(Violation::Shown(format!("{item:?} to {from:?} at {:?}: {seen:?}", self.now)));
            }
        }
        Ok(())
    }

    /// What a request has removed must be wanted, and what it has left must be leased.
    pub(crate) fn observe_sweep(
        &mut self,
        from: Party,
        request: &Frame<'_>,
        response: &Frame<'_>,
    ) -> Result<(), Violation> {
        let (query, _) = RemoveMany::decode_request(request.body).unwrap();
        let Ok((page, _)) = RemoveMany::decode_response(response) else { return Ok(()) };
        let RemovedPage { removed, leased, .. } = page;
        let (tenant, wanted) = (self.tenant_of(from), Wanted::of_pattern(query.pattern));
        let before = self.there(tenant, wanted);
        let vanished = self.vanished();
        let story = || format!("{query:?} of tenant {tenant} at {:?}: {page:?}", self.now);
        // Without force, a removal spares what a reader may still be reading.
        for key in vanished.iter().filter(|_| !query.force) {
            if let Some(lease) = self.shadow.lease_on(self.now, self.visible[key].generation) {
                let text = format!("{} under {lease:?}: {}", Key(key), story());
                return Err(Violation::RemovedWhileLeased(text));
            }
        }
        let meant = |key: &&Vec<u8>| {
            let (whose, name) = split_key(key);
            whose == tenant && before.contains_key(name)
        };
        if let Some(other) = vanished.iter().find(|key| !meant(key)) {
            return Err(Violation::Swept(format!("{} went, too: {}", Key(other), story())));
        }
        let gone = vanished.len();
        // With force, objects that are being written are removed as well.
        if gone > removed as usize || (gone < removed as usize && !query.force) {
            return Err(Violation::Swept(format!("{gone} went: {}", story())));
        }
        let left = before.len() - gone;
        if (query.cursor, page.cursor) == (0, 0) && left != if query.force { 0 } else { leased as usize } {
            return Err(Violation::Left(format!("{left} are there: {}", story())));
        }
        self.report.swept += gone as u64;
        self.report.spared += u64::from(leased);
        vanished.iter().for_each(|key| self.removed(from, key));
        Ok(())
    }

    /// Where the objects of a request are, if it is one to clear replicas.
    pub(crate) fn places_of(&self, from: Party, request: &Frame<'_>) -> Places {
        if request.header.kind != Kind::ClearReplicas as u8 {
            return Places::new();
        }
        let (_, keys) = ClearReplicas::decode_request(request.body).unwrap();
        keys.map(|key| (key.0.to_vec(), self.segments_of(self.tenant_of(from), key.0))).collect()
    }

    /// The segments on which an object has readable replicas.
    fn segments_of(&self, tenant: usize, key: &[u8]) -> Vec<SegmentNo> {
        let found = self
            .master
            .find_replicas(FullKey { tenant: TenantNo::new(tenant as u16 + 1), key })
            .unwrap_or_default();
        let readable = found.iter().filter(|replica| replica.state == ReplicaState::Complete);
        let mut segments: Vec<_> = readable.map(|replica| replica.segment).collect();
        segments.sort_unstable();
        segments
    }

    /// A request to clear replicas must have cleared exactly the replicas that it reported. It may refuse
    /// what was just written or read, although nothing is leased; `tests/leases.rs` tests for how long.
    pub(crate) fn observe_clearing(
        &mut self,
        from: Party,
        request: &Frame<'_>,
        response: &Frame<'_>,
    ) -> Result<(), Violation> {
        let places = std::mem::take(&mut self.places);
        let (segment, _) = ClearReplicas::decode_request(request.body).unwrap();
        let Ok((_, answers)) = ClearReplicas::decode_response(response) else { return Ok(()) };
        let tenant = self.tenant_of(from);
        let mut meant = BTreeSet::new();
        for ((key, before), answer) in places.iter().zip(answers) {
            let after = self.segments_of(tenant, key);
            let mut expected = before.clone();
            if answer.is_ok() {
                expected.retain(|no| segment.is_some_and(|cleared| *no != cleared));
            }
            if after != expected || (answer.is_ok() && after == *before) {
                let text = format!("{} on {segment:?} of {before:?}: {answer:?}, {after:?}", Key(key));
                return Err(Violation::Cleared(format!("{text} at {:?}", self.now)));
            }
            self.report.cleared += u64::from(answer.is_ok());
            if answer.is_ok() && after.is_empty() {
                meant.insert(full_key(tenant, key));
            }
        }
        let vanished = self.vanished();
        if let Some(other) = vanished.symmetric_difference(&meant).next() {
            return Err(Violation::Cleared(format!("{} at {:?}", Key(other), self.now)));
        }
        self.report.cleared_last += vanished.len() as u64;
        vanished.iter().for_each(|key| self.removed(from, key));
        Ok(())
    }

    /// The request that the driver of the master passes on instead of this one, if it lies.
    pub(crate) fn falsified(&self, from: Party, request: &Frame<'_>) -> Option<Vec<u8>> {
        if request.header.kind == Kind::ChangeRetention as u8 && self.lies.contains(Lies::UNPINNED) {
            let (_, keys) = ChangeRetention::decode_request(request.body).unwrap();
            let (mut out, nothing) = (Vec::new(), RetentionChange::default());
            ChangeRetention::encode_request(&mut out, request.header.request_id, &nothing, keys).unwrap();
            return Some(out);
        }
        if request.header.kind != Kind::RemoveMany as u8 || !self.lies.contains(Lies::SPARE) {
            return None;
        }
        let (query, _) = RemoveMany::decode_request(request.body).unwrap();
        let wanted = self.there(self.tenant_of(from), Wanted::of_pattern(query.pattern));
        // Where nothing is leased, force would be noticed by what it does to unfinished puts.
        wanted.values().find_map(|generation| self.shadow.lease_on(self.now, *generation))?;
        let (mut out, forced) = (Vec::new(), RemoveQuery { force: true, ..query });
        RemoveMany::encode_request(&mut out, request.header.request_id, &forced, core::iter::empty())
            .unwrap();
        Some(out)
    }

    /// The driver of the master does more than was requested, if it lies.
    pub(crate) fn overdo(&mut self, from: Party, request: &Frame<'_>) {
        let kind = Kind::from_byte(request.header.kind);
        let now = self.shown();
        if kind == Some(Kind::RemoveMany) && self.lies.contains(Lies::BROOM) {
            let (query, _) = RemoveMany::decode_request(request.body).unwrap();
            let wanted = Wanted::of_pattern(query.pattern);
            let other = self.visible.keys().map(|key| split_key(key)).find(|(_, key)| !wanted.matches(key));
            if let Some((tenant, key)) = other {
                // The object may be leased.
                let _ = self.master.remove(
                    now,
                    FullKey { tenant: TenantNo::new(tenant as u16 + 1), key },
                    RemoveMode::IfUnused,
                );
            }
        }
        if kind == Some(Kind::ClearReplicas) && self.lies.contains(Lies::CLEAR) {
            let (segment, _) = ClearReplicas::decode_request(request.body).unwrap();
            let tenant = self.tenant_of(from) as u16 + 1;
            for (key, segments) in &self.places {
                let other = segments.iter().copied().find(|no| Some(*no) != segment);
                // The object may be leased.
                let _ = self.master.clear_replica(now, FullKey { tenant: TenantNo::new(tenant), key }, other);
            }
        }
    }
}

/// A page of a listing or of a search: both have the same form.
fn decode_page<'a>(frame: &Frame<'a>) -> Result<(ListPosition, Items<'a, Listed<'a>>), ErrorCode> {
    List::decode_response(frame).or_else(|_| Find::decode_response(frame))
}
