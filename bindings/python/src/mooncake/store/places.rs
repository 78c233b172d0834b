//! Where objects are: replicas, tasks that copy and move them, segments.

use std::path::Path;
use std::time::Duration;

use pyo3::prelude::*;
use pyo3::types::PyDict;

use snowskin_compat::store::Replica;

use super::super::values::{QueryTaskResponse, ReplicaDescriptor};
use super::{Given, This, detached};

/// What `ret` and functions of segments return when they fail.
const FAILED: i32 = -1;
/// A task that does not exist.
const NO_TASK: (u64, u64) = (0, 0);

fn descriptors(replicas: Vec<Replica>) -> Vec<ReplicaDescriptor> {
    replicas.into_iter().map(ReplicaDescriptor::of).collect()
}

pub(super) fn get_replica_desc(slf: &This<'_>, given: &Given<'_, '_>) -> PyResult<Vec<ReplicaDescriptor>> {
    let key = given.key(0)?;
    Ok(detached(slf, |store| store.replicas(key.as_ref())).map(descriptors).unwrap_or_default())
}

pub(super) fn batch_get_replica_desc<'py>(
    slf: &This<'py>,
    given: &Given<'_, 'py>,
) -> PyResult<Bound<'py, PyDict>> {
    let (keys, names) = (given.keys(0)?, given.objects(0)?);
    let answers = detached(slf, |store| store.batch_replicas(&keys));
    let found = PyDict::new(slf.py());
    for (name, replicas) in names.into_iter().zip(answers) {
        if let Ok(replicas) = replicas {
            found.set_item(name, descriptors(replicas))?;
        }
    }
    Ok(found)
}

fn ordered(answer: Result<(u64, u64), i32>) -> ((u64, u64), i32) {
    answer.map_or_else(|code| (NO_TASK, code), |task| (task, 0))
}

pub(super) fn create_copy_task(slf: &This<'_>, given: &Given<'_, '_>) -> PyResult<((u64, u64), i32)> {
    let (key, targets) = (given.key(0)?, given.texts(1)?);
    Ok(ordered(detached(slf, |store| store.copy_task(key.as_ref(), &targets))))
}

pub(super) fn create_move_task(slf: &This<'_>, given: &Given<'_, '_>) -> PyResult<((u64, u64), i32)> {
    let (key, source, target) = (given.key(0)?, given.text(1)?, given.text(2)?);
    Ok(ordered(detached(slf, |store| store.move_task(key.as_ref(), &source, &target))))
}

pub(super) fn query_task(
    slf: &This<'_>,
    given: &Given<'_, '_>,
) -> PyResult<(Option<QueryTaskResponse>, i32)> {
    let value = given.required(0)?;
    let id = given.uints(0)?;
    let [first, second] = id[..] else { return Err(given.refuse(0, value, "a tuple of two numbers")) };
    let answer = detached(slf, |store| store.query_task((first, second)));
    Ok(answer.map_or_else(|code| (None, code), |task| (Some(task.into()), 0)))
}

/// A dictionary of what mounting returns.
fn mounted<'py>(py: Python<'py>, ret: i32, ids: Vec<String>) -> PyResult<Bound<'py, PyDict>> {
    let answer = PyDict::new(py);
    answer.set_item("ret", ret)?;
    answer.set_item("segment_ids", ids)?;
    Ok(answer)
}

pub(super) fn mount_segment<'py>(slf: &This<'py>, given: &Given<'_, 'py>) -> PyResult<Bound<'py, PyDict>> {
    let (path, size, offset) = (given.text(0)?, given.uint(1)?, given.uint_or(2, 0)?);
    // Checked, and not needed.
    let _ = (given.text_or(3, "tcp")?, given.text_or(4, "")?);
    let answer = detached(slf, |store| store.mount(Path::new(&path), offset, size));
    match answer {
        Ok(ids) => mounted(slf.py(), 0, ids),
        Err(code) => mounted(slf.py(), code, Vec::new()),
    }
}

pub(super) fn allocate_and_mount_segment<'py>(
    slf: &This<'py>,
    given: &Given<'_, 'py>,
) -> PyResult<Bound<'py, PyDict>> {
    let (size, protocol, location) = (given.uint(0)?, given.text_or(1, "tcp")?, given.text_or(2, "")?);
    let answer = detached(slf, |store| store.allocate_and_mount(size, &protocol, &location));
    let (answer, size) = match answer {
        Ok((ids, size)) => (mounted(slf.py(), 0, ids)?, size),
        Err(code) => (mounted(slf.py(), code, Vec::new())?, 0),
    };
    answer.set_item("allocated_size", size)?;
    Ok(answer)
}

fn unmounted(slf: &This<'_>, given: &Given<'_, '_>) -> PyResult<i32> {
    let (ids, grace) = (given.texts(0)?, Duration::from_secs(given.uint_or(1, 0)?));
    Ok(detached(slf, |store| store.unmount(&ids, grace)))
}

pub(super) fn unmount_segment(slf: &This<'_>, given: &Given<'_, '_>) -> PyResult<i32> {
    unmounted(slf, given)
}

pub(super) fn unmount_and_free_segment(slf: &This<'_>, given: &Given<'_, '_>) -> PyResult<i32> {
    unmounted(slf, given)
}

pub(super) fn unmount_local_disk_segment(slf: &This<'_>, given: &Given<'_, '_>) -> PyResult<i32> {
    // There is no disk whose contents could be withdrawn.
    let _grace = given.uint_or(0, 0)?;
    Ok(detached(slf, |store| if store.is_set_up() { 0 } else { FAILED }))
}

pub(super) fn alloc_from_mem_pool(slf: &This<'_>, given: &Given<'_, '_>) -> PyResult<u64> {
    let size = given.uint(0)?;
    Ok(detached(slf, |store| store.alloc_from_pool(size)))
}
