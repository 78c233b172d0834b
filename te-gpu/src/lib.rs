//! Memory of GPUs: where it is, and how its bytes get to page-locked host memory and back.
//!
//! TODO
#![deny(unsafe_code)]
#![cfg_attr(
    not(any(feature = "cuda", feature = "hip")),
    allow(dead_code, reason = "without a feature there is no way to make a `Gpu`")
)]

mod affinity;
mod after;
mod calibrate;
mod config;
mod flight;
mod gpu;
mod kernel;
pub mod plan;
mod slots;
mod sys;

pub use after::{After, Over};
pub use config::{Config, SettingError};
pub use gpu::{Block, DmaBuf, Gpu};
pub use sys::buffer::{DeviceBuffer, HandleTypes};
pub use sys::device::DeviceInfo;
pub use sys::load::NoGpu;
pub use sys::order::{ForeignEvent, Gate};
