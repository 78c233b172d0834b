//! Posting, with the promise that it needs.

use te_core::Error;

use super::verbs::{QpHandle, Sge, Verbs, WorkRequest};

/// Posts work requests, as [`Verbs::post`].
///
/// Requests marked `inline` have the CPU read their pieces during the call. A request is marked only when
/// each of its pieces lies in a region of this process that is registered at this moment.
pub(crate) fn post<V: Verbs>(
    verbs: &mut V,
    qp: QpHandle,
    requests: &[WorkRequest],
    sges: &[Sge],
) -> (usize, Option<Error>) {
    // SAFETY: only pieces of mapped regions go inline (`Cut::mapped`); every piece lies in a region that the
    // slice's count (`Region::pins`) keeps registered, and `register`'s caller keeps registered memory
    // mapped and unborrowed.
    unsafe { verbs.post(qp, requests, sges) }
}
