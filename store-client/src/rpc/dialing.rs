//! Connecting to a master, and greeting it.

use std::time::{Duration, Instant};

use store_core::message::{Greeting, Hello, NotLeader, Operation, Welcome};
use store_core::wire::VERSION;
use store_core::{ErrorCode, Key, Role, Secret, prove};

use super::search::Search;
use super::stream::Stream;
use super::{Address, LeaderHint, RpcConnection, take};
use crate::error::RpcError;

impl RpcConnection {
    /// Connects to the master, or to the one that leads.
    pub(super) fn dial(&mut self, until: Instant) -> Result<(), RpcError> {
        self.check_process()?;
        self.disconnect();
        if let Some(successor) = self.successor.take() {
            return self.adopt(*successor);
        }
        if self.search.is_none()
            && let Some(address) = self.masters.lone().cloned()
        {
            match self.dial_at(address, true) {
                Err(RpcError::NotLeader { hint }) if hint.helps() => self.search().learn(*hint),
                result => return result,
            }
        }
        let mut backoff = self.backoff;
        let found = self.search().run(&mut backoff, until);
        self.backoff = backoff;
        self.adopt(*found?)
    }

    /// Connects to this address alone. `lone`: no other master is known.
    pub(super) fn dial_at(&mut self, address: Address, lone: bool) -> Result<(), RpcError> {
        self.disconnect();
        let deadline = Instant::now() + Duration::from_millis(self.dialer.config.connect_ms_max.into());
        self.stream = Some(Stream::connect(&address, deadline)?);
        self.address = address;
        let greeting = self.greet(deadline).and_then(|welcome| {
            self.dialer.standing.meet(welcome.reign(), lone)?;
            Ok(welcome)
        });
        if greeting.is_err() {
            self.disconnect();
        }
        self.welcomed(greeting?);
        Ok(())
    }

    /// Continues with a connection that the search has made.
    fn adopt(&mut self, mut made: Self) -> Result<(), RpcError> {
        self.dialer.standing.check(made.welcome.reign(), &mut 0)?;
        self.stream = made.stream.take();
        self.input = std::mem::take(&mut made.input);
        self.address = made.address.clone();
        self.welcomed(made.welcome);
        Ok(())
    }

    fn welcomed(&mut self, welcome: Welcome) {
        self.welcome = welcome;
        self.is_welcome = true;
        self.checked = 0;
        self.connects_total += 1;
    }

    /// The search for the leader, from here on.
    pub(super) fn search(&mut self) -> &mut Search {
        let (masters, dialer) = (&self.masters, &self.dialer);
        self.search.get_or_insert_with(|| Box::new(Search::new(masters.clone(), dialer.clone())))
    }

    /// Notices what the other masters say, while this one does not answer, and before that, if it `asks`,
    /// asks them whether one of them leads by now.
    ///
    /// # Errors
    /// `Superseded`: one does, and the next connection is that to it.
    pub(super) fn probe(&mut self, asks: bool) -> Result<(), RpcError> {
        let (address, reign) = (self.address.clone(), self.welcome.reign());
        match self.search().probe(&address, reign, asks) {
            Some(successor) => {
                self.successor = Some(successor);
                Err(RpcError::Superseded)
            }
            None => Ok(()),
        }
    }

    /// Checks the answer at the front before the caller gets it: whether it is of a master that leads.
    ///
    /// # Errors
    /// `NotLeader`, `Outdated`: the connection is closed.
    pub(super) fn check_front(&mut self) -> Result<(), RpcError> {
        let front = self.input.peek_frame().map_err(super::unreadable)?;
        let refused = front.filter(|(frame, _)| frame.header.status == ErrorCode::NotLeader.code());
        if let Some((frame, _)) = refused {
            let hint: LeaderHint = NotLeader::of(&frame).map(Into::into).unwrap_or_default();
            self.disconnect();
            if self.is_one_of_several() {
                self.search().learn(hint.clone());
            }
            return Err(RpcError::NotLeader { hint: Box::new(hint) });
        }
        if self.is_welcome {
            let checked = self.dialer.standing.check(self.welcome.reign(), &mut self.checked);
            if let Err(outdated) = checked {
                self.disconnect();
                return Err(outdated);
            }
            self.backoff = super::BACKOFF_MIN;
        }
        Ok(())
    }

    /// Identifies this side. With a secret, it first requests the challenge and then sends proofs: secrets
    /// are not sent.
    fn greet(&mut self, deadline: Instant) -> Result<Welcome, RpcError> {
        let identity = self.dialer.identity.clone();
        let (tenant, seen) = (identity.tenant.as_str(), self.dialer.standing.latest());
        let bare = Greeting { tenant, seen, ..Greeting::default() };
        if !identity.has_secrets() {
            return self.hello(&bare, deadline);
        }
        let challenge = self.hello(&Greeting { tenant: "", ..bare }, deadline)?.challenge;
        let proof =
            |secret: &Secret, role| secret.is_set().then(|| prove(secret.bytes(), role, &challenge, tenant));
        let proofs = [
            proof(&identity.secret, Role::Tenant),
            proof(&identity.admin, Role::Admin),
            proof(&identity.cluster, Role::Cluster),
        ];
        let [tenant_proof, admin_proof, cluster_proof] =
            proofs.each_ref().map(|proof| Key(proof.as_ref().map_or(&[], |proof| proof.as_slice())));
        let greeting = Greeting { tenant_proof, admin_proof, cluster_proof, ..bare };
        self.hello(&greeting, deadline).map_err(|error| match error {
            RpcError::Refused(ErrorCode::PermissionDenied) => RpcError::Secret,
            error => error,
        })
    }

    fn hello(&mut self, greeting: &Greeting<'_>, deadline: Instant) -> Result<Welcome, RpcError> {
        let (id, out) = {
            self.id += 1;
            (self.id, &mut self.out)
        };
        Hello::encode_request(out, id, greeting, std::iter::empty()).map_err(RpcError::Wire)?;
        self.flush()?;
        self.wait_for(id, deadline)?;
        let frame = take(&mut self.input)?;
        let tenant = &self.dialer.identity.tenant;
        let welcome = Hello::decode_response(&frame).map_err(|code| refused(code, tenant))?.0;
        if welcome.version == VERSION {
            Ok(welcome)
        } else {
            Err(RpcError::Version { theirs: welcome.version })
        }
    }
}

/// The error for a greeting that the master refused.
fn refused(code: ErrorCode, tenant: &str) -> RpcError {
    match code {
        ErrorCode::TenantNotRegistered => RpcError::Tenant { tenant: tenant.to_owned() },
        code => RpcError::Refused(code),
    }
}
