//! Greetings of readers: a stage service answers them as a master does.

use store_core::message::{Greeting, Welcome};
use store_core::wire::VERSION;
use store_core::{CHALLENGE_BYTES, ErrorCode, PROOF_BYTES, Role, is_proved};
use te_core::Secret;

/// What a service knows of the reader on one connection.
pub(super) struct Door {
    challenge: [u8; CHALLENGE_BYTES],
    open: bool,
}

impl Door {
    /// # Errors
    /// The system has no random numbers.
    pub(super) fn new() -> Result<Self, te_core::Error> {
        Ok(Self { challenge: te_host::keys::random()?, open: false })
    }

    /// Whether the reader may send requests.
    pub(super) const fn is_open(&self) -> bool {
        self.open
    }

    /// Evaluates a greeting. One with a proof uses up the challenge. Proofs of a tenant or an admin are not
    /// for nodes, and are ignored.
    pub(super) fn greet(
        &mut self,
        greeting: &Greeting<'_>,
        cluster: &Secret,
        window_ms: u32,
    ) -> Result<Welcome, ErrorCode> {
        self.open = false;
        if greeting.version != VERSION {
            return Err(ErrorCode::InvalidVersion);
        }
        let proof = greeting.cluster_proof.0;
        if !matches!(proof.len(), 0 | PROOF_BYTES) {
            return Err(ErrorCode::InvalidParams);
        }
        let challenge = self.challenge;
        if greeting.has_proof() {
            self.challenge = te_host::keys::random().map_err(|_| ErrorCode::InternalError)?;
        }
        let proved = is_proved(cluster, proof, Role::Cluster, &challenge, greeting.tenant);
        if cluster.is_set() && !proof.is_empty() && !proved {
            return Err(ErrorCode::PermissionDenied);
        }
        self.open = proved || !cluster.is_set();
        Ok(Welcome {
            version: VERSION,
            lineage: 0,
            term: 0,
            keys_per_batch_max: super::serving::ITEMS_MAX as u32,
            key_bytes_max: 0,
            replicas_max: 0,
            lease_ms: window_ms,
            node_ttl_ms: 0,
            challenge: self.challenge,
        })
    }
}

#[cfg(test)]
mod tests {
    use store_core::{Key, prove};

    use super::*;

    #[test]
    fn a_door_opens_to_the_cluster_secret_once_per_challenge() {
        let secret = Secret::new(b"open sesame");
        let mut door = Door::new().unwrap();
        let bare = Greeting { tenant: "", ..Greeting::default() };
        let welcome = door.greet(&bare, &secret, 1).unwrap();
        assert!(!door.is_open(), "without a proof");
        let proof = prove(secret.bytes(), Role::Cluster, &welcome.challenge, "");
        let with = |proof| Greeting { cluster_proof: Key(proof), ..bare };
        let as_admin = prove(secret.bytes(), Role::Admin, &welcome.challenge, "");
        assert_eq!(door.greet(&with(&as_admin), &secret, 1), Err(ErrorCode::PermissionDenied));
        assert_eq!(door.greet(&with(&proof), &secret, 1), Err(ErrorCode::PermissionDenied), "used up");
        let welcome = door.greet(&bare, &secret, 1).unwrap();
        let proof = prove(secret.bytes(), Role::Cluster, &welcome.challenge, "");
        door.greet(&with(&proof), &secret, 1).unwrap();
        assert!(door.is_open());
        assert_eq!(door.greet(&with(&proof), &secret, 1), Err(ErrorCode::PermissionDenied), "used up");
        assert!(!door.is_open());
        assert_eq!(door.greet(&with(&[1; 31]), &secret, 1), Err(ErrorCode::InvalidParams));
        let old = Greeting { version: VERSION - 1, ..bare };
        assert_eq!(door.greet(&old, &secret, 1), Err(ErrorCode::InvalidVersion));
        assert!(door.greet(&bare, &Secret::default(), 1).is_ok() && door.is_open(), "no secret, no proof");
    }
}
