//! HTTP.
mod numbers;
