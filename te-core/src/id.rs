//! Ids and tokens: an index and a generation, never a pointer.

use core::fmt;

macro_rules! generational_id {
    ($(#[$doc:meta])* $name:ident, $letter:literal) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub struct $name {
            /// The index of the slot.
            pub index: u32,
            /// The generation of the slot: it changes when the slot is used again.
            pub generation: u32,
        }

        impl $name {
            /// The id of slot `index` in its `generation`.
            #[must_use]
            pub const fn new(index: u32, generation: u32) -> Self {
                Self { index, generation }
            }

            /// Both halves in one word: the generation in the upper half, the index in the lower half.
            #[must_use]
            pub const fn to_bits(self) -> u64 {
                (self.generation as u64) << 32 | self.index as u64
            }

            /// The inverse of [`Self::to_bits`].
            #[must_use]
            pub const fn from_bits(bits: u64) -> Self {
                Self { index: bits as u32, generation: (bits >> 32) as u32 }
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!($letter, "{}.{}"), self.index, self.generation)
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Debug::fmt(self, f)
            }
        }
    };
}

generational_id!(
    /// A region of local memory that is registered. The caller of `register` chooses the id.
    RegionId, "r"
);
generational_id!(
    /// A peer's region that is attached here. The caller of `attach` chooses the id.
    RemoteRegionId, "s"
);

/// The caller's name for one slice or fence, which its completion carries. Unique among the slices and fences
/// in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Token(pub u64);

impl Token {
    /// The bit that marks tokens of fences, for callers that number slices and fences separately. The slices
    /// of a [`BatchTable`](crate::BatchTable) never have it.
    const FENCE: u64 = 1 << 63;

    /// The token of fence `number`.
    #[must_use]
    pub const fn of_fence(number: u32) -> Self {
        Self(Self::FENCE | number as u64)
    }

    /// The number that was given to [`of_fence`](Self::of_fence); `None` when this is not the token of a
    /// fence.
    #[inline]
    #[must_use]
    pub const fn fence_number(self) -> Option<u32> {
        if self.0 & Self::FENCE == 0 { None } else { Some(self.0 as u32) }
    }
}
