//! A simulated serving cluster, driven by traces of requests, under the Conductor's own decisions.
#![deny(unsafe_code)]

/// Prefill time of a prompt without cached prefix: (tokens, seconds). Source: FAST'25 paper, Figure 14.
pub const FIGURE_14_NO_PREFIX: [(u32, f64); 5] =
    [(8_192, 1.0021), (16_384, 2.0557), (32_768, 4.4794), (65_536, 10.5868), (131_072, 27.5122)];
