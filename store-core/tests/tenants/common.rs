//! A master with tenants, and sessions with it.

use store_core::message::*;
use store_core::{
    ErrorCode, Frame, FullKey, Incarnation, Instant, Key, Master, MasterConfig, NodeId, Peer, Role, Session,
    TenantConfig, TenantNo, prove,
};

/// Sends a request with one item; returns the response's item.
macro_rules! one {
    ($master:expr, $session:expr, $operation:ty, $head:expr, $item:expr) => {{
        let mut request = Vec::new();
        <$operation>::encode_request(&mut request, 1, &$head, [$item].into_iter()).unwrap();
        let answer = call($master, $session, &request);
        let frame = Frame::parse(&answer).unwrap().unwrap().0;
        <$operation>::decode_response(&frame).map(|(_, mut items)| items.next().unwrap())
    }};
}

pub(crate) use one;

pub(crate) const GRAIN: u64 = 64;

pub(crate) fn at(ms: u64) -> Instant {
    Instant::from_millis(ms)
}

pub(crate) fn tenant(name: &str) -> TenantConfig {
    TenantConfig { name: name.into(), ..TenantConfig::default() }
}

/// Room for `objects` objects of one grain.
pub(crate) fn master_with(objects: u64, config: MasterConfig) -> Master {
    let mut master = Master::new(config).unwrap();
    let segment = MountSegment {
        node: NodeId::new(1),
        incarnation: Incarnation::new(1),
        name: "n1",
        endpoint: "n1:1",
        len: objects * GRAIN,
        ..MountSegment::default()
    };
    master.mount(at(0), &segment).unwrap();
    master
}

pub(crate) fn config(tenants: &[TenantConfig]) -> MasterConfig {
    MasterConfig { multi_tenants: true, tenants: tenants.to_vec(), ..MasterConfig::default() }
}

/// One request of a session; returns the response.
pub(crate) fn call(master: &mut Master, session: &mut Session, request: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    master.handle(at(1), session, &Frame::parse(request).unwrap().unwrap().0, &mut out);
    out
}

pub(crate) fn greet(
    master: &mut Master,
    session: &mut Session,
    greeting: &Greeting<'_>,
) -> Result<(), ErrorCode> {
    let mut request = Vec::new();
    Hello::encode_request(&mut request, 1, greeting, std::iter::empty()).unwrap();
    let answer = call(master, session, &request);
    Hello::decode_response(&Frame::parse(&answer).unwrap().unwrap().0).map(|_| ())
}

/// Greets twice, as clients with secrets do: once for the challenge, then with proofs.
pub(crate) fn greet_with(
    master: &mut Master,
    session: &mut Session,
    tenant: &str,
    secret: &str,
    admin: &str,
) -> Result<(), ErrorCode> {
    let mut request = Vec::new();
    let anonymous = Greeting { tenant: "", ..Greeting::default() };
    Hello::encode_request(&mut request, 1, &anonymous, std::iter::empty()).unwrap();
    let answer = call(master, session, &request);
    let welcome = Hello::decode_response(&Frame::parse(&answer).unwrap().unwrap().0).unwrap().0;
    let proof = |secret: &str, role| match secret {
        "" => Vec::new(),
        _ => prove(secret.as_bytes(), role, &welcome.challenge, tenant).to_vec(),
    };
    let (secret, admin) = (proof(secret, Role::Tenant), proof(admin, Role::Admin));
    let (tenant_proof, admin_proof) = (Key(&secret), Key(&admin));
    greet(master, session, &Greeting { tenant, tenant_proof, admin_proof, ..Greeting::default() })
}

pub(crate) fn session(master: &mut Master, tenant: &str) -> Session {
    let mut session = Session::new(Peer::Remote, [0; 32]);
    greet(master, &mut session, &Greeting { tenant, ..Greeting::default() }).unwrap();
    session
}

pub(crate) fn exists(master: &mut Master, session: &mut Session, key: &[u8]) -> Result<bool, ErrorCode> {
    one!(master, session, Exists, (), Key(key))
}

/// The number of a tenant's objects, as a session sees it.
pub(crate) fn objects_of(master: &mut Master, session: &mut Session, name: &str) -> Result<u64, ErrorCode> {
    let mut request = Vec::new();
    TenantList::encode_request(&mut request, 1, &(), [name].into_iter()).unwrap();
    let answer = call(master, session, &request);
    let frame = Frame::parse(&answer).unwrap().unwrap().0;
    TenantList::decode_response(&frame)?.1.next().unwrap().map(|usage| usage.objects)
}

/// Puts a key of a tenant completely.
pub(crate) fn store(
    master: &mut Master,
    ms: u64,
    tenant: u16,
    key: &str,
    options: &PutOptions,
) -> Result<u64, ErrorCode> {
    let key = FullKey { tenant: TenantNo::new(tenant), key: key.as_bytes() };
    let put = master.put_start(at(ms), key, GRAIN, options)?;
    master.put_end(at(ms), key, put.generation, 0)?;
    Ok(put.generation)
}

pub(crate) fn present(master: &mut Master, tenant: u16, keys: &[&str]) -> Vec<bool> {
    keys.iter()
        .map(|key| master.exists(FullKey { tenant: TenantNo::new(tenant), key: key.as_bytes() }))
        .collect()
}

pub(crate) const PLAIN: PutOptions = PutOptions::DEFAULT;
pub(crate) const HARD: PutOptions =
    PutOptions { retention: Retention { pin: Pin::Hard, ..Retention::DEFAULT }, ..PutOptions::DEFAULT };

pub(crate) fn limited(name: &str, bytes: Option<u64>, objects: Option<u32>) -> TenantConfig {
    TenantConfig { quota_bytes: bytes, quota_objects: objects, ..tenant(name) }
}

pub(crate) fn usage<'m>(master: &'m Master, name: &str) -> TenantUsage<'m> {
    master.tenant(name).unwrap()
}

pub(crate) fn put(master: &mut Master, session: &mut Session, key: &[u8]) -> Result<Allocation, ErrorCode> {
    let new = NewObject { key: Key(key), len: GRAIN };
    let started = one!(master, session, PutStart, PutRequest { writer: 1, ..PutRequest::default() }, new)??;
    let commit =
        Commit { key: Key(key), generation: started.generation, handle: started.handle, checksum: 1 };
    one!(master, session, PutEnd, (), commit)??;
    Ok(started)
}
