//! Puts and gets in steps.
#![allow(unsafe_code, reason = "callers pass memory by its address, and promise that it stays mapped")]

use pyo3::prelude::*;

use super::memory::spans;
use super::{Given, INVALID_PARAMS, This, config, detached, store_of};

/// What a list of keys is answered with before `setup`.
const NOT_SET_UP: Vec<i32> = Vec::new();

fn is_set_up(slf: &This<'_>) -> bool {
    store_of(slf).is_set_up()
}

pub(super) fn get_start(slf: &This<'_>, given: &Given<'_, '_>) -> PyResult<Vec<i32>> {
    let keys = given.keys(0)?;
    Ok(if is_set_up(slf) { detached(slf, |store| store.get_session_start(&keys)) } else { NOT_SET_UP })
}

pub(super) fn get_ranges(slf: &This<'_>, given: &Given<'_, '_>) -> PyResult<Vec<i64>> {
    let (keys, offsets) = (given.keys(0)?, given.uint_lists(3)?);
    let parts = spans(keys.len(), &given.uint_lists(1)?, &given.uint_lists(2)?);
    if !is_set_up(slf) {
        return Ok(Vec::new());
    }
    let Some(parts) = parts else { return Ok(vec![i64::from(INVALID_PARAMS); keys.len()]) };
    // SAFETY: the caller of the Python method promises that the memory is mapped and not used otherwise until
    // the method returns.
    Ok(detached(slf, |store| unsafe { store.get_session_ranges(&keys, &parts, &offsets) }))
}

pub(super) fn get_end(slf: &This<'_>, given: &Given<'_, '_>) -> PyResult<i32> {
    let keys = given.keys(0)?;
    Ok(if is_set_up(slf) { detached(slf, |store| store.get_session_end(&keys)) } else { -1 })
}

pub(super) fn put_start(slf: &This<'_>, given: &Given<'_, '_>) -> PyResult<Vec<i32>> {
    let (keys, sizes, config) = (given.keys(0)?, given.uints(1)?, config(given, 2)?);
    if !is_set_up(slf) {
        return Ok(NOT_SET_UP);
    }
    Ok(detached(slf, |store| store.put_session_start(&keys, &sizes, &config)))
}

pub(super) fn put_ranges(slf: &This<'_>, given: &Given<'_, '_>) -> PyResult<Vec<i64>> {
    let (keys, offsets) = (given.keys(0)?, given.uint_lists(3)?);
    let parts = spans(keys.len(), &given.uint_lists(1)?, &given.uint_lists(2)?);
    if !is_set_up(slf) {
        return Ok(Vec::new());
    }
    let Some(parts) = parts else { return Ok(vec![i64::from(INVALID_PARAMS); keys.len()]) };
    // SAFETY: as in `get_ranges`, for memory that is read.
    Ok(detached(slf, |store| unsafe { store.put_session_ranges(&keys, &parts, &offsets) }))
}

pub(super) fn put_end(slf: &This<'_>, given: &Given<'_, '_>) -> PyResult<Vec<i32>> {
    let keys = given.keys(0)?;
    Ok(if is_set_up(slf) { detached(slf, |store| store.put_session_end(&keys)) } else { NOT_SET_UP })
}

pub(super) fn put_revoke(slf: &This<'_>, given: &Given<'_, '_>) -> PyResult<Vec<i32>> {
    let keys = given.keys(0)?;
    Ok(if is_set_up(slf) { detached(slf, |store| store.put_session_revoke(&keys)) } else { NOT_SET_UP })
}
