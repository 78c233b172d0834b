//! Keys: random bytes that cannot be guessed, and a comparison whose duration does not depend on them.

use te_core::{Access, Error, ErrorKind};
use te_fabric::OpenError;

/// Random bytes that cannot be guessed.
///
/// # Errors
/// `System` when the system returns no random numbers.
pub fn random<const N: usize>() -> Result<[u8; N], Error> {
    let mut bytes = [0; N];
    let refused = |error: getrandom::Error| {
        Error::with_code(ErrorKind::System, error.raw_os_error().unwrap_or(libc::EIO))
    };
    getrandom::fill(&mut bytes).map_err(refused)?;
    Ok(bytes)
}

/// A random number that is not 0: the identity of an engine on every fabric.
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

/// Whether two secrets are equal. The time that it takes reveals only whether their lengths are.
#[must_use]
pub fn same_bytes(a: &[u8], b: &[u8]) -> bool {
    a.len() == b.len()
        && std::hint::black_box(a.iter().zip(b).fold(0, |differs, (a, b)| differs | (a ^ b))) == 0
}

/// The remote rights of an access, as exports and messages contain them.
pub(crate) const fn remote_bits(access: Access) -> u8 {
    access.intersection(REMOTE).bits()
}

/// Parses the rights in an export: remote rights only, at least one.
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
