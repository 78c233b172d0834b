//! A simulated serving cluster, driven by traces of requests, under the Conductor's own decisions.
#![deny(unsafe_code)]
