//! That both ends of a connection know the cluster's secret, without saying it.
//!
//! ```text
//!   asker                                       owner
//!     Challenge ─────────────────────────────►
//!     ◄──────────────── Challenge{32 random bytes}     good for one proof
//!     Proven{nonce, request, proof} ─────────►
//!     ◄────────────────── Proven{answer, proof}
//! ```
//!
//! A proof is HMAC-SHA256 of the secret over `snowskin-control-2`, a byte for the side (1 asker, 2 owner), the challenge, the
//! asker's nonce and the bytes that it vouches for. So neither a request nor an answer can be changed, replayed, or made by
//! who does not know the secret. Nothing is encrypted.

use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;

use crate::secret::Secret;

/// Length of challenges, nonces and proofs, bytes.
pub(super) const PROOF_BYTES: usize = 32;
const CONTEXT: &[u8] = b"snowskin-control-2";

pub(super) type Word = [u8; PROOF_BYTES];

/// Whose words a proof vouches for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Side {
    Asker = 1,
    Owner = 2,
}

/// The proof that `side` knows the secret and says `bytes`.
pub(super) fn prove(secret: &Secret, side: Side, challenge: &Word, nonce: &Word, bytes: &[u8]) -> Word {
    mac(secret, side, challenge, nonce, bytes).finalize().into_bytes().into()
}

/// Whether `proof` is that. Takes as long for every wrong one.
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
    // HMAC takes keys of any length.
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
        let proof = prove(&secret, Side::Asker, &challenge, &nonce, b"text");
        assert!(is_proved(&proof, &secret, Side::Asker, &challenge, &nonce, b"text"));
        let other = Secret::from("correct horsf");
        assert!(!is_proved(&proof, &other, Side::Asker, &challenge, &nonce, b"text"));
        assert!(!is_proved(&proof, &secret, Side::Owner, &challenge, &nonce, b"text"));
        assert!(!is_proved(&proof, &secret, Side::Asker, &[3; 32], &nonce, b"text"));
        assert!(!is_proved(&proof, &secret, Side::Asker, &challenge, &[3; 32], b"text"));
        assert!(!is_proved(&proof, &secret, Side::Asker, &challenge, &nonce, b"texu"));
        let none = Secret::default();
        let proof = prove(&none, Side::Asker, &challenge, &nonce, b"text");
        assert!(
            !is_proved(&proof, &none, Side::Asker, &challenge, &nonce, b"text"),
            "no secret proves nothing"
        );
    }
}
