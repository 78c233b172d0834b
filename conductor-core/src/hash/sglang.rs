//! The hashes of `SGLang`'s radix cache.
