//! The scheduler in a small simulated cluster with drawn requests: what its rules are worth. All times are
//! simulated. The figures on published traces are those of `conductor-sim`.

mod figures;
mod world;
