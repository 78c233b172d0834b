//! What peers are told about this engine: the descriptor, and where handshakes are answered.

use std::sync::{Arc, Mutex, PoisonError};

use crate::descriptor::{Buffer, Native, SegmentDescriptor};

/// The descriptor of this engine, which the service changes and the handshake port serves.
#[derive(Debug)]
pub(crate) struct Published(Mutex<State>);

#[derive(Debug)]
struct State {
    descriptor: SegmentDescriptor,
    /// The descriptor as JSON; made when it is needed.
    json: Option<Arc<[u8]>>,
}

impl Published {
    pub(crate) fn new(descriptor: SegmentDescriptor) -> Self {
        Self(Mutex::new(State { descriptor, json: None }))
    }

    /// The descriptor as JSON.
    pub(crate) fn json(&self) -> Arc<[u8]> {
        let mut state = self.lock();
        let State { descriptor, json } = &mut *state;
        json.get_or_insert_with(|| descriptor.to_json().into()).clone()
    }

    /// Lists another buffer.
    pub(crate) fn insert(&self, addr: u64, len: u64) {
        let mut state = self.lock();
        let name = state.descriptor.name.clone();
        state.descriptor.buffers.push(Buffer { addr, len, name });
        state.json = None;
    }

    /// Lists the buffer that begins at `addr` no longer.
    pub(crate) fn remove(&self, addr: u64) {
        let mut state = self.lock();
        state.descriptor.buffers.retain(|buffer| buffer.addr != addr);
        state.json = None;
    }

    /// States where this engine is reached over its own fabrics.
    pub(crate) fn set_native(&self, native: Native) {
        let mut state = self.lock();
        state.descriptor.native = Some(native);
        state.json = None;
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::header::Version;

    #[test]
    fn what_is_exported_is_listed_in_order_until_it_is_withdrawn() {
        let published = Published::new(SegmentDescriptor {
            name: "h:1".into(),
            data_host: None,
            data_port: 2,
            version: Version::V2,
            buffers: Vec::new(),
            native: None,
        });
        let listed = || SegmentDescriptor::parse(&published.json()).expect("our own");
        let addresses = || listed().buffers.iter().map(|buffer| buffer.addr).collect::<Vec<_>>();
        assert!(Arc::ptr_eq(&published.json(), &published.json()), "it is made once");
        published.insert(0x3000, 1);
        published.insert(0x1000, 1);
        assert_eq!((addresses(), listed().buffers[0].name.as_str()), (vec![0x3000, 0x1000], "h:1"));
        published.remove(0x3000);
        published.remove(0x3000);
        assert_eq!(addresses(), [0x1000]);
        published.set_native(Native { endpoint: "h:9".into(), incarnation: 7 });
        assert_eq!(listed().native.map(|native| native.incarnation), Some(7));
    }
}
