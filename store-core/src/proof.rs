//! Proofs of secrets: who knows one shows that it does, and nobody on the way learns it.
//!
//! The master gives every connection a challenge, 32 random bytes. A proof is the HMAC-SHA256, under the secret, of what the
//! proof is for: the protocol, the role, the challenge and the tenant's name. So it is worth nothing on another connection,
//! in another role or for another tenant, and nothing once the challenge was used.

use hmac::{Hmac, KeyInit, Mac};
use sha2::{Digest, Sha256};

use crate::Secret;

/// Bytes of a challenge.
pub const CHALLENGE_BYTES: usize = 32;
/// Bytes of a proof.
pub const PROOF_BYTES: usize = 32;

/// Separates these proofs from all others that may be made with the same secret.
const CONTEXT: &[u8] = b"snowskin-rpc-2";

/// What is proved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Role {
    /// To be a tenant.
    Tenant = 1,
    /// To be an admin.
    Admin = 2,
    /// To be of the cluster: a node, or another server of it.
    Cluster = 3,
}

/// The proof that one knows `secret`, for a connection with this challenge on which one is `tenant`.
#[must_use]
pub fn prove(
    secret: &[u8],
    role: Role,
    challenge: &[u8; CHALLENGE_BYTES],
    tenant: &str,
) -> [u8; PROOF_BYTES] {
    mac(secret, role, challenge, tenant).finalize().into_bytes().into()
}

impl Secret {
    /// Whether these bytes prove that somebody knows the secret. Never for a secret that is not set. Takes as long for
    /// every wrong proof.
    #[must_use]
    pub fn is_proved_by(
        &self,
        proof: &[u8],
        role: Role,
        challenge: &[u8; CHALLENGE_BYTES],
        tenant: &str,
    ) -> bool {
        self.is_set() && mac(self.bytes(), role, challenge, tenant).verify_slice(proof).is_ok()
    }
}

/// The challenge after this one. Not secret: what is kept from being used twice is the proof.
pub(crate) fn next_challenge(challenge: &[u8; CHALLENGE_BYTES]) -> [u8; CHALLENGE_BYTES] {
    Sha256::new_with_prefix(CONTEXT).chain_update(challenge).finalize().into()
}

fn mac(secret: &[u8], role: Role, challenge: &[u8; CHALLENGE_BYTES], tenant: &str) -> Hmac<Sha256> {
    // A key of any length will do.
    #[expect(
        clippy::expect_used,
        reason = "HMAC takes keys of any length; the error type is shared with ciphers"
    )]
    let mac = Hmac::<Sha256>::new_from_slice(secret).expect("HMAC takes keys of any length");
    mac.chain_update(CONTEXT).chain_update([role as u8]).chain_update(challenge).chain_update(tenant)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_proof_holds_for_its_secret_role_challenge_and_tenant_alone() {
        let secret = Secret::new(b"open sesame");
        let challenge = [7; 32];
        let proof = prove(secret.bytes(), Role::Tenant, &challenge, "alice");
        assert!(secret.is_proved_by(&proof, Role::Tenant, &challenge, "alice"));
        assert!(!secret.is_proved_by(&proof, Role::Admin, &challenge, "alice"));
        assert!(!secret.is_proved_by(&proof, Role::Tenant, &next_challenge(&challenge), "alice"));
        assert!(!secret.is_proved_by(&proof, Role::Tenant, &challenge, "bob"));
        assert!(!secret.is_proved_by(&proof[..31], Role::Tenant, &challenge, "alice"));
        assert!(!secret.is_proved_by(&[], Role::Tenant, &challenge, "alice"));
        assert!(!Secret::new(b"open sesamf").is_proved_by(&proof, Role::Tenant, &challenge, "alice"));
        // Nobody can prove a secret that there is not, by leaving it out.
        let none = prove(b"", Role::Admin, &challenge, "");
        assert!(!Secret::default().is_proved_by(&none, Role::Admin, &challenge, ""));
    }

    #[test]
    fn the_proof_is_hmac_sha256_as_anybody_can_compute_it() {
        // printf 'snowskin-rpc-2\x02' + 32 zero bytes, `openssl dgst -sha256 -hmac secret`
        let proof = prove(b"secret", Role::Admin, &[0; 32], "");
        assert_eq!(proof[..4], [146, 136, 189, 172]);
    }
}
