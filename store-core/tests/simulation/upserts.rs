//! What the driver of the master does to objects that upserts are to replace, and to leases, if it lies.

use store_core::message::{
    Commit, Existing, LeaseRange, Operation, PutEnd, PutRevoke, PutStart, RemoveMode, ReturnLeases,
};
use store_core::{Frame, FullKey, Kind, Session, TenantNo};

use crate::common::{Core, Party};
use crate::scenario::{Lies, split_key};

impl Core {
    /// The driver does more than an upsert requests.
    pub(crate) fn overdo_upsert(&mut self, from: Party, request: &Frame<'_>) {
        match Kind::from_byte(request.header.kind) {
            Some(Kind::PutStart) if self.lies.contains(Lies::IN_PLACE) => {
                let (put, asked) = PutStart::decode_request(request.body).unwrap();
                let tenant = self.tenant_of(from) as u16 + 1;
                for new in asked.filter(|_| put.options.existing != Existing::Keep) {
                    self.drop_quietly(tenant, new.key.0);
                }
            }
            Some(Kind::PutRevoke) if self.lies.contains(Lies::UNDONE) => {
                let (_, asked) = PutRevoke::decode_request(request.body).unwrap();
                let claims = asked.filter_map(|revocation| self.shadow.claims.get(&revocation.generation));
                let upserts = claims.filter(|claim| claim.replaces).map(|claim| claim.key.clone());
                for key in upserts.collect::<Vec<_>>() {
                    let (tenant, key) = split_key(&key);
                    self.drop_quietly(tenant as u16 + 1, key);
                }
            }
            Some(Kind::PutEnd) if self.lies.contains(Lies::RECALL) => {
                let (_, asked) = PutEnd::decode_request(request.body).unwrap();
                let claims =
                    asked.filter_map(|commit: Commit<'_>| self.shadow.claims.get(&commit.generation));
                let replaced =
                    claims.filter(|claim| claim.replaces).map(|claim| self.visible.get(&claim.key));
                let replaced: Vec<u64> = replaced.flatten().map(|seen| seen.generation).collect();
                replaced.into_iter().for_each(|generation| self.recall(generation));
            }
            _ => {}
        }
    }

    fn drop_quietly(&mut self, tenant: u16, key: &[u8]) {
        let now = self.shown();
        let key = FullKey { tenant: TenantNo::new(tenant), key };
        // There may be no object.
        let _ = self.master.remove(now, key, RemoveMode::IfUnused);
    }

    /// Returns the clients' leases on an object, in the name of their holders.
    fn recall(&mut self, generation: u64) {
        let now = self.shown();
        for (client, life, first) in self.shadow.readers_of(generation) {
            let Some(session) = self.sessions.get_mut(&(Party::Client(client), life)) else { continue };
            let request = returned(LeaseRange { first, count: 1 });
            let (frame, _) = Frame::parse(&request).unwrap().unwrap();
            self.master.handle(now, session, &frame, &mut Vec::new());
        }
    }

    /// The driver returns the leases of a request whose client does not read, if it lies.
    pub(crate) fn forget_leases(&mut self, request: &Frame<'_>, session: &mut Session) {
        if request.header.kind == Kind::ExistsLeased as u8 && self.lies.contains(Lies::GLANCE) {
            let (request, now) = (returned(LeaseRange { first: 1, count: u32::MAX }), self.shown());
            let (frame, _) = Frame::parse(&request).unwrap().unwrap();
            self.master.handle(now, session, &frame, &mut Vec::new());
        }
    }
}

/// A request that returns leases of a connection.
fn returned(leases: LeaseRange) -> Vec<u8> {
    let mut out = Vec::new();
    ReturnLeases::encode_request(&mut out, 1, &(), std::iter::once(leases)).unwrap();
    out
}
