//! Many requests at a time, of a recovery or of a tool.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::slots::locked;
use crate::disk::packs::fault::BucketFault;

/// Requests in flight.
const REQUESTS_MAX: usize = 16;

/// Does something for each of many, several at a time. Returns the results in their order, or the first
/// fault.
pub(super) fn each<T: Sync, R: Send>(
    all: &[T],
    act: impl Fn(&T) -> Result<R, BucketFault> + Sync,
    mut progress: impl FnMut(usize) -> ControlFlow<()> + Send,
) -> Result<Vec<R>, BucketFault> {
    let mut state: (Result<BTreeMap<usize, R>, BucketFault>, _) = (Ok(BTreeMap::new()), &mut progress);
    let next = AtomicUsize::new(0);
    let shared = Mutex::new(&mut state);
    std::thread::scope(|scope| {
        let work = || {
            loop {
                let at = next.fetch_add(1, Ordering::Relaxed);
                let Some(one) = all.get(at) else { return };
                let result = act(one);
                let mut shared = locked(&shared);
                let (done, progress) = &mut **shared;
                let Ok(results) = done else { return };
                let fault = match result {
                    Ok(result) => {
                        results.insert(at, result);
                        progress(results.len()).is_break().then_some(BucketFault::Closed)
                    }
                    Err(fault) => Some(fault),
                };
                if let Some(fault) = fault {
                    *done = Err(fault);
                    next.store(all.len(), Ordering::Relaxed);
                }
            }
        };
        for _ in 1..REQUESTS_MAX.min(all.len()) {
            let thread = std::thread::Builder::new().name("snowskin-examine".into());
            // Without further threads this one does it all.
            if thread.spawn_scoped(scope, work).is_err() {
                break;
            }
        }
        work();
    });
    state.0.map(|results| results.into_values().collect())
}
