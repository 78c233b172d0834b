//! The state machine, case by case. Random faults are in `tests/streams`.

use alloc::vec;
use alloc::vec::Vec;
use core::time::Duration;

use te_core::Instant;

use super::*;
