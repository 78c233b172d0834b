//! What a transfer holds for its submitter, and what becomes of it when the transfer is dropped.
#![allow(unsafe_code, reason = "puts registered buffers together again once they are unregistered")]

use te_core::{Buffer, MemSpan, RegionId, Registered};

/// What a [`Transfer`](crate::Transfer) gives back: `()`, or a [`Registered`] buffer. Nobody else can implement it.
pub trait Payload: sealed::Sealed {
    /// What the engine has to free when the transfer is dropped.
    #[doc(hidden)]
    fn abandon(self) -> Option<Abandoned>;
}

/// A buffer whose owner is gone. The engine frees it once it is unregistered; dropped, it leaks.
pub struct Abandoned {
    pub(crate) region: RegionId,
    /// Tells it from other engines' buffers, whatever its id.
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
        // SAFETY: runs after `Abandoned::free` alone, whose caller promises that the region is unregistered.
        let free = Box::new(move || drop(unsafe { self.into_inner() }));
        Some(Abandoned { region, span, free })
    }
}

mod sealed {
    pub trait Sealed {}
    impl Sealed for () {}
    impl<B: te_core::Buffer> Sealed for te_core::Registered<B> {}
}
