//! The paper's measurements that the simulation is compared with.
//!
//! Source: Qin et al., "Mooncake: Trading More Storage for Less Computation", FAST'25, whose figures are
//! vector graphics: the numbers are the coordinates of their paths. Curves are thinned to some twenty
//! points.

/// A curve: pairs of x and y.
pub type Curve = &'static [(f64, f64)];

/// One column of figure 14: where the time of a request goes, seconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Breakdown {
    /// Tokens of the prompt.
    pub tokens: u32,
    /// Tokens of the prompt whose KV is reused.
    pub reused: u32,
    /// Placement.
    pub schedule: f64,
    /// Prefill.
    pub prefill: f64,
    /// Transfer of the KV to the decode node.
    pub transfer: f64,
    /// Load of the KV into the GPUs of the decode node.
    pub load: f64,
    /// 128 decode steps of a single sequence.
    pub decode_128: f64,
}

/// Figure 14: latency by length of the prompt, without a cached prefix and with one of 95 %.
pub const FIGURE_14: [Breakdown; 10] = [
    Breakdown {
        tokens: 8_192,
        reused: 0,
        schedule: 0.0507,
        prefill: 1.0021,
        transfer: 0.0298,
        load: 0.029,
        decode_128: 3.3936,
    },
    Breakdown {
        tokens: 16_384,
        reused: 0,
        schedule: 0.0483,
        prefill: 2.0557,
        transfer: 0.0612,
        load: 0.0556,
        decode_128: 3.4323,
    },
    Breakdown {
        tokens: 32_768,
        reused: 0,
        schedule: 0.0532,
        prefill: 4.4794,
        transfer: 0.124,
        load: 0.1079,
        decode_128: 3.5209,
    },
    Breakdown {
        tokens: 65_536,
        reused: 0,
        schedule: 0.0387,
        prefill: 10.5868,
        transfer: 0.2489,
        load: 0.2135,
        decode_128: 3.6594,
    },
    Breakdown {
        tokens: 131_072,
        reused: 0,
        schedule: 0.0411,
        prefill: 27.5122,
        transfer: 0.4946,
        load: 0.4205,
        decode_128: 3.9389,
    },
    Breakdown {
        tokens: 8_192,
        reused: 7_782,
        schedule: 0.0604,
        prefill: 0.1352,
        transfer: 0.0297,
        load: 0.029,
        decode_128: 3.401,
    },
    Breakdown {
        tokens: 16_384,
        reused: 15_564,
        schedule: 0.0777,
        prefill: 0.226,
        transfer: 0.0611,
        load: 0.0555,
        decode_128: 3.4399,
    },
    Breakdown {
        tokens: 32_768,
        reused: 31_129,
        schedule: 0.086,
        prefill: 0.4066,
        transfer: 0.1238,
        load: 0.1081,
        decode_128: 3.523,
    },
    Breakdown {
        tokens: 65_536,
        reused: 62_259,
        schedule: 0.029,
        prefill: 0.881,
        transfer: 0.2489,
        load: 0.2134,
        decode_128: 3.66,
    },
    Breakdown {
        tokens: 131_072,
        reused: 124_518,
        schedule: 0.0607,
        prefill: 2.3284,
        transfer: 0.4946,
        load: 0.4207,
        decode_128: 3.9468,
    },
];

/// Figure 15, synthetic trace, by the number of prefill nodes out of 16: (nodes, effective requests %, mean
/// TTFT s, mean TBT ms).
pub const FIGURE_15: [(u32, f64, f64, f64); 7] = [
    (5, 77.7, 5.74, 31.5),
    (6, 97.2, 1.71, 31.8),
    (7, 99.1, 1.3, 32.9),
    (8, 99.0, 1.19, 35.0),
    (9, 99.2, 1.12, 38.2),
    (10, 98.4, 1.11, 44.2),
    (11, 86.1, 1.14, 58.3),
];

/// Figure 8: prefill time per request, seconds of one node's GPUs: (system, conversation, synthetic).
pub const FIGURE_8: [(&str, f64, f64); 4] = [
    ("Mooncake", 1.062, 0.733),
    ("vLLM", 1.661, 2.021),
    ("vLLM Prefix Caching", 1.522, 1.896),
    ("vLLM Chunked Prefill", 2.021, 2.435),
];

/// Figure 5: time to first token on the conversation trace, seconds: (placement, mean, median).
pub const FIGURE_5: [(&str, f64, f64); 4] =
    [("global", 3.07, 1.72), ("local", 3.58, 2.16), ("load balancing", 5.27, 3.56), ("random", 19.65, 13.73)];

/// Figure 1: share of the conversation trace's requests whose time between tokens is at most x ms, %:
/// (system, curve).
pub const FIGURE_1: [(&str, Curve); 4] = [
    (
        "Mooncake",
        &[
            (30.0, 0.0),
            (40.0, 0.4),
            (50.0, 3.3),
            (60.0, 14.6),
            (70.0, 33.2),
            (80.0, 65.0),
            (90.0, 82.7),
            (100.0, 96.6),
            (125.0, 99.4),
            (150.0, 99.8),
            (200.0, 100.0),
            (250.0, 100.0),
            (300.0, 100.0),
            (400.0, 100.0),
            (500.0, 100.0),
            (650.0, 100.0),
            (800.0, 100.0),
            (1000.0, 100.0),
            (1500.0, 100.0),
            (2000.0, 100.0),
        ],
    ),
    (
        "vLLM",
        &[
            (30.0, 0.0),
            (40.0, 0.3),
            (50.0, 3.3),
            (60.0, 8.5),
            (70.0, 11.7),
            (80.0, 13.4),
            (90.0, 14.6),
            (100.0, 16.1),
            (125.0, 20.5),
            (150.0, 25.7),
            (200.0, 38.8),
            (250.0, 51.4),
            (300.0, 62.7),
            (400.0, 78.4),
            (500.0, 86.4),
            (650.0, 93.2),
            (800.0, 96.0),
            (1000.0, 97.9),
            (1500.0, 99.2),
            (2000.0, 99.3),
        ],
    ),
    (
        "vLLM Prefix Caching",
        &[
            (30.0, 0.0),
            (40.0, 0.2),
            (50.0, 1.6),
            (60.0, 5.4),
            (70.0, 9.8),
            (80.0, 12.3),
            (90.0, 13.8),
            (100.0, 15.0),
            (125.0, 18.7),
            (150.0, 23.5),
            (200.0, 34.3),
            (250.0, 45.4),
            (300.0, 55.5),
            (400.0, 70.9),
            (500.0, 80.5),
            (650.0, 89.3),
            (800.0, 93.3),
            (1000.0, 96.3),
            (1500.0, 98.7),
            (2000.0, 99.0),
        ],
    ),
    (
        "vLLM Chunked Prefill",
        &[
            (30.0, 0.0),
            (40.0, 0.2),
            (50.0, 1.2),
            (60.0, 3.9),
            (70.0, 6.4),
            (80.0, 7.3),
            (90.0, 8.4),
            (100.0, 9.4),
            (125.0, 12.5),
            (150.0, 17.2),
            (200.0, 28.8),
            (250.0, 41.7),
            (300.0, 55.2),
            (400.0, 87.4),
            (500.0, 96.5),
            (650.0, 99.7),
            (800.0, 99.9),
            (1000.0, 99.9),
            (1500.0, 100.0),
            (2000.0, 100.0),
        ],
    ),
];

/// Figure 13: the synthetic trace by bandwidth of a node, Gbit/s: (bandwidth, mean TTFT s, theoretical
/// transfer s, measured transfer s).
pub const FIGURE_13: [(f64, f64, f64, f64); 7] = [
    (24.0, 5.094, 1.536, 3.649),
    (40.0, 2.401, 0.936, 1.134),
    (80.0, 1.73, 0.478, 0.51),
    (100.0, 1.596, 0.383, 0.403),
    (160.0, 1.406, 0.242, 0.251),
    (320.0, 1.246, 0.123, 0.125),
    (400.0, 1.252, 0.1, 0.102),
];

/// Figure 13: mean TTFT when every prompt is computed in full, seconds.
pub const FIGURE_13_RECOMPUTE: f64 = 2.618;
