//! Proofs of secrets: a peer that knows a secret proves it, and no observer of the connection learns the
//! secret.
//!
//! The master sends every connection a challenge, 32 random bytes. A proof is the HMAC-SHA256, keyed with the
//! secret, of its purpose: the protocol, the role, the challenge and the tenant's name. So a proof is
//! worthless on another connection, in another role or for another tenant, and worthless once the challenge
//! was used.

use hmac::{Hmac, KeyInit, Mac};
use sha2::{Digest, Sha256};
use te_core::Secret;

/// Bytes of a challenge.
pub const CHALLENGE_BYTES: usize = 32;
/// Bytes of a proof.
pub const PROOF_BYTES: usize = 32;

/// Separates these proofs from all others that may be made with the same secret.
const CONTEXT: &[u8] = b"snowskin-rpc-2";

/// What a proof is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Role {
    /// The right to act for a tenant.
    Tenant = 1,
    /// The rights of an admin.
    Admin = 2,
    /// Membership of the cluster: a node, or another server of it.
    Cluster = 3,
}

/// The proof of `secret` for a connection with this challenge that acts for `tenant`.
#[must_use]
pub fn prove(
    secret: &[u8],
    role: Role,
    challenge: &[u8; CHALLENGE_BYTES],
    tenant: &str,
) -> [u8; PROOF_BYTES] {
    mac(secret, role, challenge, tenant).finalize().into_bytes().into()
}

/// Whether these bytes prove knowledge of `secret`. Never for a secret that is not set. Takes the same time
/// for every wrong proof.
#[must_use]
pub fn is_proved(
    secret: &Secret,
    proof: &[u8],
    role: Role,
    challenge: &[u8; CHALLENGE_BYTES],
    tenant: &str,
) -> bool {
    secret.is_set() && mac(secret.bytes(), role, challenge, tenant).verify_slice(proof).is_ok()
}

/// The next challenge. It need not be secret: only a proof must not be used twice.
pub(crate) fn next_challenge(challenge: &[u8; CHALLENGE_BYTES]) -> [u8; CHALLENGE_BYTES] {
    Sha256::new_with_prefix(CONTEXT).chain_update(challenge).finalize().into()
}

fn mac(secret: &[u8], role: Role, challenge: &[u8; CHALLENGE_BYTES], tenant: &str) -> Hmac<Sha256> {
    // HMAC accepts keys of any length.
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
        assert!(is_proved(&secret, &proof, Role::Tenant, &challenge, "alice"));
        assert!(!is_proved(&secret, &proof, Role::Admin, &challenge, "alice"));
        assert!(!is_proved(&secret, &proof, Role::Tenant, &next_challenge(&challenge), "alice"));
        assert!(!is_proved(&secret, &proof, Role::Tenant, &challenge, "bob"));
        assert!(!is_proved(&secret, &proof[..31], Role::Tenant, &challenge, "alice"));
        assert!(!is_proved(&secret, &[], Role::Tenant, &challenge, "alice"));
        assert!(!is_proved(&Secret::new(b"open sesamf"), &proof, Role::Tenant, &challenge, "alice"));
        // A secret that is not set cannot be proved.
        let none = prove(b"", Role::Admin, &challenge, "");
        assert!(!is_proved(&Secret::default(), &none, Role::Admin, &challenge, ""));
    }

    #[test]
    fn the_proof_is_hmac_sha256_as_rfc_2104_defines_it() {
        // printf 'snowskin-rpc-2\x02' + 32 zero bytes, `openssl dgst -sha256 -hmac secret`
        let proof = prove(b"secret", Role::Admin, &[0; 32], "");
        assert_eq!(proof[..4], [146, 136, 189, 172]);
    }
}
