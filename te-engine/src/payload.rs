//! [`Payload`]: what a transfer holds for its submitter, and how it is freed when the transfer is dropped.
#![allow(unsafe_code, reason = "puts registered buffers together again once they are unregistered")]

use te_core::{Buffer, MemSpan, RegionId, Registered};

/// What a [`Transfer`](crate::Transfer) returns at its end: `()`, or a [`Registered`] buffer. Sealed.
pub trait Payload: sealed::Sealed {
    /// The buffer that the engine has to free when the transfer is dropped.
    #[doc(hidden)]
    fn abandon(self) -> Option<Abandoned>;
}

/// The buffer of a dropped transfer. The engine frees it once it is unregistered; if this value is dropped,
/// the buffer leaks.
pub struct Abandoned {
    pub(crate) region: RegionId,
    /// Distinguishes it from buffers of other engines, whose ids may be the same.
    pub(crate) span: MemSpan,
    free: Box<dyn FnOnce() + Send>,
}

impl Abandoned {
    pub(crate) fn bytes(&self) -> u64 {
        self.span.len() as u64
    }

    /// # Safety
    /// The engine owned `span` as `region`, and `unregister` returned `Ok` for it.
    pub(crate) unsafe fn free(self) -> Freed {
        Freed(self.free)
    }
}

/// A buffer whose registration has ended. Its `Drop` is a user's code, so it runs when no lock is held.
pub(crate) struct Freed(Box<dyn FnOnce() + Send>);

impl Freed {
    pub(crate) fn drop(self) {
        (self.0)();
    }
}

impl Payload for () {
    fn abandon(self) -> Option<Abandoned> {
        None
    }
}

impl<B: Buffer> Payload for Registered<B> {
    fn abandon(self) -> Option<Abandoned> {
        let (region, span) = (self.region(), self.span());
        // SAFETY: runs only after `Abandoned::free`, whose caller promises that the region is unregistered.
        let free = Box::new(move || drop(unsafe { self.into_inner() }));
        Some(Abandoned { region, span, free })
    }
}

mod sealed {
    pub trait Sealed {}
    impl Sealed for () {}
    impl<B: te_core::Buffer> Sealed for te_core::Registered<B> {}
}
