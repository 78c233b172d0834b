//! Publishers, one or two at a time. Random histories are in `tests/streams`.
