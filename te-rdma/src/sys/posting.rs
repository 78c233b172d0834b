//! Posting: the one caller of [`Verbs::post`], and why its promise holds.

use te_core::Error;

use super::verbs::{QpHandle, Sge, Verbs, WorkRequest};

/// Posts work requests, as [`Verbs::post`].
///
/// The CPU reads the pieces of requests that are marked `inline` during the call. A request is marked only
/// when each of its pieces lies in a registered region of host memory.
pub(crate) fn post<V: Verbs>(
    verbs: &mut V,
    qp: QpHandle,
    requests: &[WorkRequest],
    sges: &[Sge],
) -> (usize, Option<Error>) {
    // SAFETY: only pieces of host memory go inline (`Cut::cpu_readable`); every piece lies in a region that
    // the pin of its slice keeps registered, and `register`'s caller keeps registered memory mapped and
    // unborrowed.
    unsafe { verbs.post(qp, requests, sges) }
}
