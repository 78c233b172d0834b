//! A batch on its way, as its submitter sees it.

use std::marker::PhantomData;
use std::time::Duration;

use te_core::{Buffer, Registered, Status};

use crate::error::TransferError;
use crate::request::{BatchReport, RequestStatus};

/// A batch that was submitted. `B` is what it gives back at its end: `()` for raw requests, the
/// [`Registered`] buffer for the owned API.
///
/// Dropping it cancels what is still on its way. A buffer inside is freed when that has drained; if it cannot drain, it is
/// leaked and counted, never freed under a fabric that may still write it.
#[must_use = "dropping a transfer cancels it"]
pub struct Transfer<B = ()> {
    _payload: PhantomData<B>,
}

impl<B> Transfer<B> {
    /// How far it is. Does not wait.
    #[must_use]
    pub fn status(&self) -> Status {
        Status::Failed
    }

    /// Everything that is known about it now. Does not wait.
    #[must_use]
    pub fn report(&self) -> BatchReport {
        BatchReport {
            status: Status::Failed,
            bytes: 0,
            requests_failed: 0,
            error: None,
            fence_needed: false,
            quarantined: false,
        }
    }

    /// What is known about request `index`; `None` when there is no such request.
    #[must_use]
    pub fn request(&self, _index: usize) -> Option<RequestStatus> {
        None
    }

    /// Waits until it has ended, at most `timeout` (`None`: as long as it takes, which its own deadline bounds).
    ///
    /// # Errors
    /// `Ended` when it ended other than `Completed`; `Request` or `Segment` when it was refused; `WaitTimedOut`: it goes on.
    pub fn wait(&self, _timeout: Option<Duration>) -> Result<BatchReport, TransferError> {
        Err(TransferError::Closed)
    }

    /// Starts its end. It still ends exactly once, `Canceled` or with whatever end was faster; `wait` tells.
    pub fn cancel(&self) {}
}

impl<B: Buffer> Transfer<Registered<B>> {
    /// Waits until it has ended and gives the buffer back. `None` in place of the buffer: it is quarantined, something may
    /// still write it, and it stays with the engine.
    pub fn join(self) -> (Result<BatchReport, TransferError>, Option<Registered<B>>) {
        (Err(TransferError::Closed), None)
    }
}
