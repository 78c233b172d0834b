//! Reading and writing the small fixed layouts that exports and messages have. All integers are little-endian.

use te_core::{Access, Error, ErrorKind};

/// Takes fields off the front of bytes that a peer wrote.
pub(crate) struct Fields<'a>(pub(crate) &'a [u8]);

impl Fields<'_> {
    pub(crate) fn bytes<const N: usize>(&mut self) -> Result<[u8; N], Error> {
        let (head, tail) = self.0.split_first_chunk().ok_or(Error::new(ErrorKind::InvalidArgument))?;
        self.0 = tail;
        Ok(*head)
    }

    pub(crate) fn u8(&mut self) -> Result<u8, Error> {
        self.bytes::<1>().map(|[byte]| byte)
    }

    pub(crate) fn u32(&mut self) -> Result<u32, Error> {
        self.bytes().map(u32::from_le_bytes)
    }

    pub(crate) fn u64(&mut self) -> Result<u64, Error> {
        self.bytes().map(u64::from_le_bytes)
    }

    /// Rights of a peer: remote ones only, at least one.
    pub(crate) fn remote_access(&mut self) -> Result<Access, Error> {
        let access = Access::from_bits(self.u8()?).ok_or(Error::new(ErrorKind::InvalidArgument))?;
        let ours = access.is_remote() && !access.intersects(Access::LOCAL);
        if ours { Ok(access) } else { Err(Error::new(ErrorKind::InvalidArgument)) }
    }

    /// Nothing is left.
    pub(crate) fn end(&self) -> Result<(), Error> {
        if self.0.is_empty() { Ok(()) } else { Err(Error::new(ErrorKind::InvalidArgument)) }
    }
}

/// Puts fields one after the other; gives the length.
pub(crate) fn put(out: &mut [u8; 128], fields: &[&[u8]]) -> usize {
    let mut at = 0;
    for field in fields {
        out[at..at + field.len()].copy_from_slice(field);
        at += field.len();
    }
    at
}

/// The rights of an access that peers have.
pub(crate) fn remote_bits(access: Access) -> u8 {
    access.intersection(Access::REMOTE_READ | Access::REMOTE_WRITE).bits()
}

/// Bytes that nobody can guess.
pub(crate) fn random<const N: usize>() -> Result<[u8; N], Error> {
    let mut bytes = [0; N];
    let refused = |error: getrandom::Error| {
        Error::with_code(ErrorKind::System, error.raw_os_error().unwrap_or(libc::EIO))
    };
    getrandom::fill(&mut bytes).map_err(refused)?;
    Ok(bytes)
}

/// A random number that is not 0.
pub(crate) fn identity() -> Result<u64, Error> {
    loop {
        let identity = u64::from_ne_bytes(random()?);
        if identity != 0 {
            return Ok(identity);
        }
    }
}

/// Whether two keys are the same, in a time that does not tell where they differ.
pub(crate) fn same_key(a: &[u8; 16], b: &[u8; 16]) -> bool {
    same_bytes(a, b)
}

/// Whether two secrets are the same, in a time that tells no more than whether their lengths are.
pub(crate) fn same_bytes(a: &[u8], b: &[u8]) -> bool {
    a.len() == b.len()
        && std::hint::black_box(a.iter().zip(b).fold(0, |differs, (a, b)| differs | (a ^ b))) == 0
}
