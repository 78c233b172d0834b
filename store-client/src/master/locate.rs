//! Where the bytes of objects are.

use store_core::message::{Get, LeaseWanted, Replica};
use store_core::{ErrorCode, Key};

use super::MasterClient;
use crate::client::chunks;
use crate::error::StoreError;

/// A readable object, and its replicas.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Located {
    /// Length of the object, bytes.
    pub len: u64,
    /// Number of the put that stored the object.
    pub generation: u64,
    /// The readable replicas.
    pub replicas: Vec<Replica>,
}

impl MasterClient<'_> {
    /// Looks objects up, as [`look_up`](Self::look_up), and says where they are. `None` is a miss.
    ///
    /// # Errors
    /// No answer from the master. For an item: an invalid key.
    pub fn batch_locate(
        &mut self,
        keys: &[&[u8]],
    ) -> Result<Vec<Result<Option<Located>, ErrorCode>>, StoreError> {
        let mut results = Vec::with_capacity(keys.len());
        for keys in chunks(keys, |key| key.len()) {
            let (_, answers) = self.rpc.call::<Get>(&LeaseWanted::Quick, keys.iter().map(|key| Key(key)))?;
            results.extend(answers.map(|answer| match answer {
                Ok(object) => Ok(Some(Located {
                    len: object.len,
                    generation: object.generation,
                    replicas: object.replicas.to_vec(),
                })),
                Err(ErrorCode::ObjectNotFound | ErrorCode::ReplicaIsNotReady) => Ok(None),
                Err(code) => Err(code),
            }));
        }
        Ok(results)
    }
}
