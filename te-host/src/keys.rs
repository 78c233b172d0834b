//! Keys: bytes that nobody can guess, and comparing them without telling how far a guess was right.

use te_core::{Access, Error, ErrorKind};
use te_fabric::OpenError;

/// Bytes that nobody can guess.
///
/// # Errors
/// `System` when the system has no randomness to give.
pub fn random<const N: usize>() -> Result<[u8; N], Error> {
    let mut bytes = [0; N];
    let refused = |error: getrandom::Error| {
        Error::with_code(ErrorKind::System, error.raw_os_error().unwrap_or(libc::EIO))
    };
    getrandom::fill(&mut bytes).map_err(refused)?;
    Ok(bytes)
}

/// A random number that is not 0: what peers know an engine by, on every fabric.
///
/// # Errors
/// As [`random`].
pub fn identity() -> Result<u64, Error> {
    loop {
        let identity = u64::from_ne_bytes(random()?);
        if identity != 0 {
            return Ok(identity);
        }
    }
}

/// The error of opening a transport for which [`random`] failed.
pub(crate) fn no_random_numbers(error: Error) -> OpenError {
    OpenError::step("get random numbers")(std::io::Error::from_raw_os_error(error.code))
}

/// Whether two secrets are the same, in a time that tells no more than whether their lengths are.
#[must_use]
pub fn same_bytes(a: &[u8], b: &[u8]) -> bool {
    a.len() == b.len()
        && std::hint::black_box(a.iter().zip(b).fold(0, |differs, (a, b)| differs | (a ^ b))) == 0
}

/// The rights of an access that peers have, as exports and messages carry them.
pub(crate) const fn remote_bits(access: Access) -> u8 {
    access.intersection(REMOTE).bits()
}

/// The rights in an export: remote ones only, at least one.
pub(crate) fn remote_access(bits: u8) -> Result<Access, Error> {
    let access = Access::from_bits(bits).filter(|access| access.is_remote() && REMOTE.contains(*access));
    access.ok_or(ErrorKind::InvalidArgument.into())
}

const REMOTE: Access = Access::REMOTE_READ.union(Access::REMOTE_WRITE);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_are_the_same_only_when_every_byte_is() {
        assert!(same_bytes(b"", b"") && same_bytes(b"secret", b"secret"));
        assert!(!same_bytes(b"secret", b"secreT") && !same_bytes(b"secret", b"secre"));
    }

    #[test]
    fn an_export_grants_remote_rights_and_no_others() {
        for bits in 0..=u8::MAX {
            let granted = remote_access(bits).ok();
            assert_eq!(granted.is_some(), matches!(bits, 4 | 8 | 12), "{bits}");
            assert!(granted.is_none_or(|access| remote_bits(access) == bits));
        }
        assert_eq!(remote_bits(Access::all()), 12);
        assert!(identity().is_ok_and(|identity| identity != 0));
    }
}
