//! Objects at addresses.
#![allow(unsafe_code, reason = "callers pass memory by its address, and promise that it stays mapped")]

use pyo3::prelude::*;

use snowskin_compat::store::{Fill, ReplicateConfig as Config, Span};

use super::super::convert::Nested;
use super::{Given, INVALID_PARAMS, This, config, detached};

/// The spans of each object; `None`: the lists do not fit together.
pub(super) fn spans(keys: usize, addresses: &[Vec<u64>], sizes: &[Vec<u64>]) -> Option<Vec<Vec<Span>>> {
    if addresses.len() != keys || sizes.len() != keys {
        log::error!(
            "{keys} keys, {} lists of addresses, {} of sizes: one of each",
            addresses.len(),
            sizes.len()
        );
        return None;
    }
    let of_one = |(addresses, sizes): (&Vec<u64>, &Vec<u64>)| {
        let spans = addresses.iter().zip(sizes).map(|(&addr, &len)| Span { addr, len }).collect();
        (addresses.len() == sizes.len()).then_some(spans)
    };
    addresses.iter().zip(sizes).map(of_one).collect()
}

/// One address and one size for each key.
fn singles(keys: usize, addresses: &[u64], sizes: &[u64]) -> Option<Vec<Vec<Span>>> {
    if addresses.len() != keys || sizes.len() != keys {
        log::error!(
            "{keys} keys, {} addresses, {} sizes: one of each is needed",
            addresses.len(),
            sizes.len()
        );
        return None;
    }
    Some(addresses.iter().zip(sizes).map(|(&addr, &len)| vec![Span { addr, len }]).collect())
}

/// Stores or replaces objects, and answers for each key.
fn write_spans<K: AsRef<[u8]> + Sync>(
    slf: &This<'_>,
    keys: &[K],
    parts: Option<Vec<Vec<Span>>>,
    config: &Config,
    upsert: bool,
) -> Vec<i32> {
    let Some(parts) = parts else { return vec![INVALID_PARAMS; keys.len()] };
    // SAFETY: the caller of the Python method promises that the memory is mapped and not written until the
    // method returns.
    detached(slf, |store| unsafe {
        if upsert { store.batch_upsert(keys, &parts, config) } else { store.batch_put(keys, &parts, config) }
    })
}

/// As [`write_spans`], for the Python half of the tensor methods.
pub(super) fn write(
    slf: &This<'_>,
    keys: &[String],
    addresses: &[Vec<u64>],
    sizes: &[Vec<u64>],
    config: &Config,
    upsert: bool,
) -> Vec<i32> {
    write_spans(slf, keys, spans(keys.len(), addresses, sizes), config, upsert)
}

pub(super) fn register_buffer(slf: &This<'_>, given: &Given<'_, '_>) -> PyResult<i32> {
    let (address, size) = (given.uint(0)?, given.uint(1)?);
    // SAFETY: the caller of the Python method promises that the memory stays mapped until it is unregistered.
    Ok(detached(slf, |store| unsafe { store.register(address, size) }))
}

pub(super) fn unregister_buffer(slf: &This<'_>, given: &Given<'_, '_>) -> PyResult<i32> {
    let address = given.uint(0)?;
    Ok(detached(slf, |store| store.unregister(address)))
}

fn write_from(slf: &This<'_>, given: &Given<'_, '_>, upsert: bool) -> PyResult<i32> {
    let (key, span) = (given.key(0)?, Span { addr: given.uint(1)?, len: given.uint(2)? });
    let config = config(given, 3)?;
    let codes = write_spans(slf, &[key], Some(vec![vec![span]]), &config, upsert);
    Ok(codes.first().copied().unwrap_or(INVALID_PARAMS))
}

pub(super) fn put_from(slf: &This<'_>, given: &Given<'_, '_>) -> PyResult<i32> {
    write_from(slf, given, false)
}

pub(super) fn upsert_from(slf: &This<'_>, given: &Given<'_, '_>) -> PyResult<i32> {
    write_from(slf, given, true)
}

pub(super) fn put_from_with_metadata(slf: &This<'_>, given: &Given<'_, '_>) -> PyResult<i32> {
    let key = given.key(0)?;
    let data = Span { addr: given.uint(1)?, len: given.uint(3)? };
    let metadata = Span { addr: given.uint(2)?, len: given.uint(4)? };
    let config = config(given, 5)?;
    // The metadata comes first in the object.
    let codes = write_spans(slf, &[key], Some(vec![vec![metadata, data]]), &config, false);
    Ok(codes.first().copied().unwrap_or(INVALID_PARAMS))
}

fn batch_write_from(slf: &This<'_>, given: &Given<'_, '_>, upsert: bool) -> PyResult<Vec<i32>> {
    let (keys, config) = (given.keys(0)?, config(given, 3)?);
    let parts = singles(keys.len(), &given.uints(1)?, &given.uints(2)?);
    Ok(write_spans(slf, &keys, parts, &config, upsert))
}

pub(super) fn batch_put_from(slf: &This<'_>, given: &Given<'_, '_>) -> PyResult<Vec<i32>> {
    batch_write_from(slf, given, false)
}

pub(super) fn batch_upsert_from(slf: &This<'_>, given: &Given<'_, '_>) -> PyResult<Vec<i32>> {
    batch_write_from(slf, given, true)
}

pub(super) fn batch_put_from_multi_buffers(slf: &This<'_>, given: &Given<'_, '_>) -> PyResult<Vec<i32>> {
    let (keys, config) = (given.keys(0)?, config(given, 3)?);
    let parts = spans(keys.len(), &given.uint_lists(1)?, &given.uint_lists(2)?);
    if !super::store_of(slf).is_set_up() {
        return Ok(Vec::new());
    }
    Ok(write_spans(slf, &keys, parts, &config, false))
}

/// Reads objects, and answers for each key.
fn read_spans<K: AsRef<[u8]> + Sync>(slf: &This<'_>, keys: &[K], parts: Option<Vec<Vec<Span>>>) -> Vec<i64> {
    let Some(parts) = parts else { return vec![i64::from(INVALID_PARAMS); keys.len()] };
    // SAFETY: the caller of the Python method promises that the memory is mapped and not used otherwise until
    // the method returns.
    detached(slf, |store| unsafe { store.batch_get_into(keys, &parts, Fill::Any) })
}

pub(super) fn get_into(slf: &This<'_>, given: &Given<'_, '_>) -> PyResult<i64> {
    let (key, span) = (given.key(0)?, Span { addr: given.uint(1)?, len: given.uint(2)? });
    let answers = read_spans(slf, &[key], Some(vec![vec![span]]));
    Ok(answers.first().copied().unwrap_or(i64::from(INVALID_PARAMS)))
}

pub(super) fn batch_get_into(slf: &This<'_>, given: &Given<'_, '_>) -> PyResult<Vec<i64>> {
    let keys = given.keys(0)?;
    let parts = singles(keys.len(), &given.uints(1)?, &given.uints(2)?);
    Ok(read_spans(slf, &keys, parts))
}

pub(super) fn batch_get_into_multi_buffers(slf: &This<'_>, given: &Given<'_, '_>) -> PyResult<Vec<i64>> {
    let (keys, _same_node) = (given.keys(0)?, given.bool_or(3, false)?);
    let parts = spans(keys.len(), &given.uint_lists(1)?, &given.uint_lists(2)?);
    // An object that does not have as many bytes as its places have room for is an error of the transfer
    // here.
    let Some(parts) = parts else { return Ok(vec![i64::from(INVALID_PARAMS); keys.len()]) };
    // SAFETY: as in `read_spans`.
    Ok(detached(slf, |store| unsafe { store.batch_get_into(&keys, &parts, Fill::Exact) }))
}

pub(super) fn get_into_ranges(slf: &This<'_>, given: &Given<'_, '_>) -> PyResult<Vec<Vec<Vec<i64>>>> {
    let (addresses, keys) = (given.uints(0)?, given.key_lists(1)?);
    let (places, offsets): (Vec<Nested>, Vec<Nested>) =
        (given.uint_list_lists(2)?, given.uint_list_lists(3)?);
    let sizes = given.uint_list_lists(4)?;
    // SAFETY: as in `read_spans`.
    Ok(detached(slf, |store| unsafe { store.get_into_ranges(&addresses, &keys, &places, &offsets, &sizes) }))
}
