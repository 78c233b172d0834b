//! Reading and writing exports; the documentation of [`multi`](super) has their format.

use alloc::vec::Vec;

use crate::{Error, ErrorKind, RAILS_MAX};

/// The children's exports in an export, by name, and the cost of each at the owner's end, in tenths; without
/// costs all are equal.
pub(super) type Exports<'a> = (heapless::Vec<(&'a [u8], &'a [u8]), RAILS_MAX>, &'a [u8]);

/// An export that a [`MultiTransport`](crate::MultiTransport) attaches, of the exports of its rails, each
/// under the name of its rail: for a peer that has no `MultiTransport`. `None`: there are none or more than
/// [`RAILS_MAX`], a name has more than 255 bytes, or an export more than 65,535.
#[must_use]
pub fn joined_exports(exports: &[(&str, &[u8])]) -> Option<Vec<u8>> {
    if !(1..=RAILS_MAX).contains(&exports.len()) {
        return None;
    }
    let mut joined = Vec::from([u8::try_from(exports.len()).ok()?]);
    for (name, export) in exports {
        joined.push(u8::try_from(name.len()).ok()?);
        joined.extend_from_slice(name.as_bytes());
        joined.extend_from_slice(&u16::try_from(export.len()).ok()?.to_le_bytes());
        joined.extend_from_slice(export);
    }
    Some(joined)
}

/// Parses what `export` wrote; the module's documentation has the format.
pub(super) fn parse(blob: &[u8]) -> Result<Exports<'_>, Error> {
    let bad = Error::new(ErrorKind::InvalidArgument);
    let (&count, mut rest) = blob.split_first().ok_or(bad)?;
    let mut exports = heapless::Vec::new();
    for _ in 0..count {
        let mut take = |len: usize| {
            let (head, tail) = rest.split_at_checked(len).ok_or(bad)?;
            rest = tail;
            Ok::<_, Error>(head)
        };
        let name_len = usize::from(take(1)?[0]);
        let name = take(name_len)?;
        let len = take(2)?;
        let export = take(usize::from(u16::from_le_bytes([len[0], len[1]])))?;
        exports.push((name, export)).map_err(|_| bad)?;
    }
    let are_costs = rest.len() == exports.len() && !rest.contains(&0);
    if rest.is_empty() || are_costs { Ok((exports, rest)) } else { Err(bad) }
}
