//! The master's tenants: who they are, and which sessions are theirs.

use alloc::string::String;
use alloc::vec::Vec;

use foldhash::quality::FixedState;
use hashbrown::HashMap;

use super::Master;
use crate::message::Greeting;
use crate::tenant::{DEFAULT_TENANT, SECRET_BYTES_MAX, TENANT_BYTES_MAX};
use crate::wire::VERSION;
use crate::{ErrorCode, MasterConfig, Peer, Secret, Session, TenantConfig, TenantNo};

/// What a connection may: whose objects its requests are about, and what else.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Rights {
    /// It need not say more before it asks.
    pub(crate) known: bool,
    pub(crate) tenant: Option<TenantNo>,
    pub(crate) admin: bool,
    /// It may contribute memory.
    pub(crate) node: bool,
}

/// All tenants, by number. The default tenant has number 0, always.
#[derive(Debug)]
pub(crate) struct Tenants {
    list: Vec<Tenant>,
    names: HashMap<String, TenantNo, FixedState>,
}

#[derive(Debug)]
struct Tenant {
    secret: Secret,
    /// Which of those that had the number.
    life: u32,
    /// Clients may be its.
    open: bool,
}

impl Tenants {
    pub(crate) fn new(config: &MasterConfig) -> Self {
        let names = HashMap::with_hasher(FixedState::with_seed(config.hash_seed));
        let mut this = Self { list: Vec::new(), names };
        this.list.push(Tenant { secret: Secret::default(), life: 0, open: !config.multi_tenants });
        this.names.insert(DEFAULT_TENANT.into(), 0);
        config.tenants.iter().for_each(|tenant| {
            this.set(tenant);
        });
        this
    }

    /// Adds a tenant, or changes it; gives its number.
    fn set(&mut self, config: &TenantConfig) -> TenantNo {
        let next = self.list.len() as TenantNo;
        let no = *self.names.entry_ref(config.name.as_str()).or_insert(next);
        if no == next {
            self.list.push(Tenant { secret: Secret::default(), life: 0, open: true });
        }
        let tenant = &mut self.list[usize::from(no)];
        (tenant.secret, tenant.open) = (config.secret.clone(), true);
        no
    }

    fn named(&self, name: &str) -> Option<TenantNo> {
        self.names.get(name).copied().filter(|no| self.list[usize::from(*no)].open)
    }

    /// Whether the tenant with this number is still the same.
    fn is(&self, no: TenantNo, life: u32) -> bool {
        self.list.get(usize::from(no)).is_some_and(|tenant| tenant.open && tenant.life == life)
    }
}

impl Master {
    /// Who a connection is, from what it says first. A session that is refused has no tenant.
    pub(crate) fn greet(&mut self, session: &mut Session, greeting: &Greeting<'_>) -> Result<(), ErrorCode> {
        *session = Session::new(session.peer);
        if greeting.version != VERSION {
            return Err(ErrorCode::InvalidVersion);
        }
        let (secret, admin) = (greeting.secret.0, greeting.admin.0);
        if greeting.tenant.len() > TENANT_BYTES_MAX || secret.len().max(admin.len()) > SECRET_BYTES_MAX {
            return Err(ErrorCode::InvalidParams);
        }
        // A master without an admin's secret does not need to hear one.
        let is_admin = self.config.admin_secret.is_set() && !admin.is_empty();
        if is_admin && !self.config.admin_secret.matches(admin) {
            return Err(ErrorCode::PermissionDenied);
        }
        if !greeting.tenant.is_empty() {
            let no = match self.tenants.named(greeting.tenant) {
                Some(no) => no,
                None => self.create_tenant(greeting.tenant)?,
            };
            let tenant = &self.tenants.list[usize::from(no)];
            if tenant.secret.is_set() && !tenant.secret.matches(secret) && !is_admin {
                return Err(ErrorCode::TenantNotRegistered);
            }
            session.tenant = Some((no, tenant.life));
        }
        (session.greeted, session.admin) = (true, is_admin);
        Ok(())
    }

    pub(crate) fn rights(&self, session: &Session) -> Rights {
        let config = &self.config;
        let secret = config.admin_secret.is_set();
        let tenant = match session.tenant {
            Some((no, life)) => self.tenants.is(no, life).then_some(no),
            None => (!config.multi_tenants).then_some(0),
        };
        Rights {
            known: session.greeted || !config.multi_tenants,
            tenant,
            admin: session.admin || (!secret && !config.multi_tenants && session.peer == Peer::Local),
            // Nodes hold everybody's bytes.
            node: session.admin || !(secret && config.multi_tenants),
        }
    }

    fn create_tenant(&mut self, name: &str) -> Result<TenantNo, ErrorCode> {
        let Some(like) = self.config.tenant_default.as_ref().filter(|_| self.config.multi_tenants) else {
            return Err(ErrorCode::TenantNotRegistered);
        };
        if self.tenants.list.len() >= self.config.tenants_max as usize {
            return Err(ErrorCode::TenantNotRegistered);
        }
        let tenant = TenantConfig { name: name.into(), ..like.clone() };
        Ok(self.tenants.set(&tenant))
    }
}
