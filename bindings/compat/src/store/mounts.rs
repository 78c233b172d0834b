//! Memory that a store contributes beside that of its setup.
//!
//! Each mount is a node of its own, named `HOST:PORT+1`, `HOST:PORT+2`, ... Its name is the number by which
//! it is unmounted.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use store_client::{ClientConfig, Node};

use super::Store;
use super::setup::{SetupOptions, node, not_started};
use crate::codes::{self, StoreCode, store as code};
use crate::env::Env;

/// Longest time that an unmount leaves for objects to be moved.
const GRACE_MAX: Duration = Duration::from_secs(3600);

/// The mounts of a store that is set up.
pub(super) struct Mounts {
    options: SetupOptions,
    env: Env,
    client: ClientConfig,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    last: u64,
    nodes: BTreeMap<String, Node>,
    is_closed: bool,
}

impl Mounts {
    /// Further nodes are made from the same settings as the first one.
    pub(super) fn new(options: &SetupOptions, env: &Env, client: ClientConfig) -> Self {
        Self { options: options.clone(), env: env.clone(), client, state: Mutex::default() }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn mount(&self, base: &str, bytes: u64) -> Result<String, StoreCode> {
        let mut options = self.options.clone();
        options.global_segment_size = bytes;
        let name = {
            let mut state = self.lock();
            state.last += 1;
            format!("{base}+{}", state.last)
        };
        let node = node(&options, &self.env, &self.client, &name).map_err(|error| not_started(&error))?;
        let node = node.ok_or(code::INVALID_PARAMS)?;
        let mut state = self.lock();
        if state.is_closed {
            drop(state);
            node.stop();
            return Err(code::INVALID_PARAMS);
        }
        state.nodes.insert(name.clone(), node);
        Ok(name)
    }

    fn take(&self, name: &str) -> Option<Node> {
        self.lock().nodes.remove(name)
    }

    /// Unmounts everything.
    pub(super) fn close(&self) {
        let nodes = {
            let mut state = self.lock();
            state.is_closed = true;
            std::mem::take(&mut state.nodes)
        };
        nodes.into_values().for_each(Node::stop);
    }
}

impl Store {
    /// Contributes `bytes` of further memory: the numbers by which it is unmounted, and how much it is.
    ///
    /// # Errors
    /// -1 before the setup; -600 for no bytes; as [`setup`](Self::setup).
    pub fn allocate_and_mount(
        &self,
        bytes: u64,
        protocol: &str,
        location: &str,
    ) -> Result<(Vec<String>, u64), StoreCode> {
        let inner = self.inner().map_err(|_| code::INTERNAL_ERROR)?;
        let mounts = inner.mounts.as_ref().ok_or(code::NOT_SUPPORTED)?;
        log::debug!(
            "mounting {bytes} bytes; protocol `{protocol}` and location `{location}` are chosen here"
        );
        let name = mounts.mount(inner.name(), bytes)?;
        Ok((vec![name], bytes))
    }

    /// Contributes a part of a file that is mapped. This store contributes memory of its own alone, so the
    /// arguments are checked, and nothing is mounted.
    ///
    /// # Errors
    /// -1 for a file that cannot be opened, or does not have these bytes; -1012 otherwise.
    pub fn mount(&self, path: &Path, offset: u64, bytes: u64) -> Result<Vec<String>, StoreCode> {
        self.inner().map_err(|_| code::INTERNAL_ERROR)?;
        let opened = File::options().read(true).write(true).open(path);
        let shown = path.display();
        match opened.and_then(|file| file.metadata()).map(|meta| meta.len()) {
            Err(error) => log::error!("mount of {shown}: {error}"),
            Ok(len) if offset.checked_add(bytes).is_none_or(|end| end > len) => {
                log::error!("mount of {shown}: {bytes} bytes at {offset} of a file of {len}");
            }
            Ok(_) => {
                log::error!(
                    "mount of {shown}: this store contributes no files; allocate_and_mount_segment contributes memory"
                );
                return Err(code::NOT_SUPPORTED);
            }
        }
        Err(code::INTERNAL_ERROR)
    }

    /// Takes back what [`allocate_and_mount`](Self::allocate_and_mount) has contributed: 0, or -1 if one of
    /// the numbers is not known; the others are unmounted. With a `grace`, objects are moved to other memory
    /// first, for at most that time, and the call does not wait for it.
    pub fn unmount<N: AsRef<str>>(&self, names: &[N], grace: Duration) -> StoreCode {
        let Ok(inner) = self.inner() else { return code::INTERNAL_ERROR };
        let mut result = codes::OK;
        for name in names.iter().map(AsRef::as_ref) {
            match inner.mounts.as_ref().and_then(|mounts| mounts.take(name)) {
                Some(node) => stop(node, grace.min(GRACE_MAX)),
                None => {
                    log::error!("unmount: nothing is mounted as `{}`", name.escape_debug());
                    result = code::INTERNAL_ERROR;
                }
            }
        }
        result
    }
}

fn stop(node: Node, grace: Duration) {
    if grace.is_zero() {
        return node.stop();
    }
    let drain = move || {
        if let Err(error) = node.stop_drained(grace) {
            log::warn!("unmount: {error}");
        }
    };
    // Without a thread, the node is dropped with the closure, which unmounts it.
    if let Err(error) = std::thread::Builder::new().name("snowskin-unmount".into()).spawn(drain) {
        log::warn!("unmount without the grace: the system refused a thread: {error}");
    }
}
