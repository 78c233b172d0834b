//! The hashes of vLLM's prefix cache.
