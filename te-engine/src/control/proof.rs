//! Proofs that both ends of a connection know the secret of the cluster, without sending it.
//!
//! ```text
//!   requester                                   owner
//!     Challenge ─────────────────────────────►
//!     ◄──────────────── Challenge{32 random bytes}     valid for one proof
//!     Proven{nonce, request, proof} ─────────►
//!     ◄────────────────── Proven{answer, proof}
//! ```
//!
//! A proof is HMAC-SHA256 with the secret as its key over `snowskin-control-2`, a byte for the side (1
//! requester, 2 owner), the challenge, the requester's nonce and the bytes that it authenticates. So a
//! request or an answer cannot be changed, replayed, or made without the secret. Nothing is encrypted.

use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;
use te_core::Secret;

/// Length of challenges, nonces and proofs, bytes.
pub(super) const PROOF_BYTES: usize = 32;
const CONTEXT: &[u8] = b"snowskin-control-2";

pub(super) type Word = [u8; PROOF_BYTES];

/// The side whose bytes a proof authenticates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Side {
    Requester = 1,
    Owner = 2,
}

/// The proof that `side` knows the secret and sent `bytes`.
pub(super) fn prove(secret: &Secret, side: Side, challenge: &Word, nonce: &Word, bytes: &[u8]) -> Word {
    mac(secret, side, challenge, nonce, bytes).finalize().into_bytes().into()
}

/// Whether `proof` is the proof of these arguments. Takes the same time for every wrong proof.
pub(super) fn is_proved(
    proof: &Word,
    secret: &Secret,
    side: Side,
    challenge: &Word,
    nonce: &Word,
    bytes: &[u8],
) -> bool {
    secret.is_set() && mac(secret, side, challenge, nonce, bytes).verify_slice(proof).is_ok()
}

fn mac(secret: &Secret, side: Side, challenge: &Word, nonce: &Word, bytes: &[u8]) -> Hmac<Sha256> {
    let mac = Hmac::<Sha256>::new_from_slice(secret.bytes());
    let mut mac = mac.unwrap_or_else(|_| unreachable!("HMAC takes keys of any length"));
    for part in [CONTEXT, &[side as u8], challenge, nonce, bytes] {
        mac.update(part);
    }
    mac
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_proof_is_good_for_one_secret_side_challenge_nonce_and_text() {
        let (secret, challenge, nonce) = (Secret::from("correct horse"), [1; 32], [2; 32]);
        let proof = prove(&secret, Side::Requester, &challenge, &nonce, b"text");
        assert!(is_proved(&proof, &secret, Side::Requester, &challenge, &nonce, b"text"));
        let other = Secret::from("correct horsf");
        assert!(!is_proved(&proof, &other, Side::Requester, &challenge, &nonce, b"text"));
        assert!(!is_proved(&proof, &secret, Side::Owner, &challenge, &nonce, b"text"));
        assert!(!is_proved(&proof, &secret, Side::Requester, &[3; 32], &nonce, b"text"));
        assert!(!is_proved(&proof, &secret, Side::Requester, &challenge, &[3; 32], b"text"));
        assert!(!is_proved(&proof, &secret, Side::Requester, &challenge, &nonce, b"texu"));
        let none = Secret::default();
        let proof = prove(&none, Side::Requester, &challenge, &nonce, b"text");
        assert!(
            !is_proved(&proof, &none, Side::Requester, &challenge, &nonce, b"text"),
            "a secret that is not set proves nothing"
        );
    }
}
