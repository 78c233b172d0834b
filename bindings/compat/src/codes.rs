//! The numbers that Mooncake returns: one table for Python and C.
//!
//! There are three families. The store returns [`StoreCode`]s, 0 or negative. The engine's functions return
//! 0 or a negative number of [`engine`]; those that take a batch return 0 or a positive number of [`status`].
//! Numbers and names are those of Mooncake (`MS/include/types.h`, `TE/include/error.h`,
//! `TE/include/common/base/status.h`).

use store_client::{ErrorCode, StoreError};

/// A number of the store: 0 for success, negative for an error.
pub type StoreCode = i32;

/// Success, in all families.
pub const OK: i32 = 0;

/// Numbers of the store that this crate returns by itself.
pub mod store {
    /// What has no better code.
    pub const INTERNAL_ERROR: i32 = -1;
    /// The object is longer than the room for it.
    pub const BUFFER_OVERFLOW: i32 = -10;
    /// No room for the object.
    pub const NO_AVAILABLE_HANDLE: i32 = -200;
    /// An argument is invalid, or the store is not set up.
    pub const INVALID_PARAMS: i32 = -600;
    /// The object is being written.
    pub const REPLICA_IS_NOT_READY: i32 = -703;
    /// There is no such object.
    pub const OBJECT_NOT_FOUND: i32 = -704;
    /// The key is taken.
    pub const OBJECT_ALREADY_EXISTS: i32 = -705;
    /// A reader holds a lease.
    pub const OBJECT_HAS_LEASE: i32 = -706;
    /// The bytes could not be moved.
    pub const TRANSFER_FAIL: i32 = -800;
    /// The master did not answer.
    pub const RPC_FAIL: i32 = -900;
    /// The operation cannot be carried out now.
    pub const UNAVAILABLE_IN_CURRENT_STATUS: i32 = -1010;
    /// The operation does not exist in this release.
    pub const NOT_SUPPORTED: i32 = -1012;
    /// There is no such task.
    pub const TASK_NOT_FOUND: i32 = -1400;
}

/// Numbers of the engine's functions: 0 or negative.
pub mod engine {
    /// An argument is invalid, or whatever has no better code.
    pub const INVALID_ARGUMENT: i32 = -1;
    /// The batch has no room for as many requests.
    pub const TOO_MANY_REQUESTS: i32 = -2;
    /// No registered memory begins at the address.
    pub const ADDRESS_NOT_REGISTERED: i32 = -3;
    /// The batch, or the memory, is in use.
    pub const BATCH_BUSY: i32 = -4;
    /// The memory overlaps registered memory.
    pub const ADDRESS_OVERLAPPED: i32 = -7;
    /// The peer, or the metadata server, could not be reached.
    pub const METADATA: i32 = -200;
    /// The operating system or a fabric refused the memory.
    pub const MEMORY: i32 = -302;
    /// This release has no such operation.
    pub const NOT_IMPLEMENTED: i32 = -303;
}

/// Numbers of the engine's functions that take a batch: 0 or positive.
pub mod status {
    /// An argument is invalid, or the batch id is unknown or stale.
    pub const INVALID_ARGUMENT: i32 = 1;
    /// The batch has no room for as many requests.
    pub const TOO_MANY_REQUESTS: i32 = 2;
    /// Local memory of a request is not registered.
    pub const ADDRESS_NOT_REGISTERED: i32 = 3;
    /// The batch has not ended.
    pub const BATCH_BUSY: i32 = 4;
    /// The local memory overlaps registered memory.
    pub const ADDRESS_OVERLAPPED: i32 = 7;
    /// No fabric reaches the peer.
    pub const NOT_SUPPORTED_TRANSPORT: i32 = 8;
    /// The peer, or the metadata server, could not be reached.
    pub const METADATA: i32 = 200;
    /// The operating system or a fabric refused the memory.
    pub const MEMORY: i32 = 302;
    /// This release has no such operation.
    pub const NOT_IMPLEMENTED: i32 = 999;
}

/// Every code that Mooncake's store can return, with its name there (`MS/include/types.h`).
pub const MOONCAKE_STORE_CODES: &[(StoreCode, &str)] = &[
    (0, "OK"),
    (-1, "INTERNAL_ERROR"),
    (-10, "BUFFER_OVERFLOW"),
    (-100, "SHARD_INDEX_OUT_OF_RANGE"),
    (-101, "SEGMENT_NOT_FOUND"),
    (-102, "SEGMENT_ALREADY_EXISTS"),
    (-103, "CLIENT_NOT_FOUND"),
    (-200, "NO_AVAILABLE_HANDLE"),
    (-300, "INVALID_VERSION"),
    (-400, "INVALID_KEY"),
    (-500, "WRITE_FAIL"),
    (-600, "INVALID_PARAMS"),
    (-601, "ILLEGAL_CLIENT"),
    (-700, "INVALID_WRITE"),
    (-701, "INVALID_READ"),
    (-702, "INVALID_REPLICA"),
    (-703, "REPLICA_IS_NOT_READY"),
    (-704, "OBJECT_NOT_FOUND"),
    (-705, "OBJECT_ALREADY_EXISTS"),
    (-706, "OBJECT_HAS_LEASE"),
    (-707, "LEASE_EXPIRED"),
    (-708, "OBJECT_HAS_REPLICATION_TASK"),
    (-709, "OBJECT_NO_REPLICATION_TASK"),
    (-710, "REPLICA_NOT_FOUND"),
    (-711, "REPLICA_ALREADY_EXISTS"),
    (-712, "REPLICA_IS_GONE"),
    (-713, "REPLICA_NOT_IN_LOCAL_MEMORY"),
    (-714, "OBJECT_REPLICA_BUSY"),
    (-800, "TRANSFER_FAIL"),
    (-801, "CHECKSUM_MISMATCH"),
    (-900, "RPC_FAIL"),
    (-901, "RPC_TIMEOUT"),
    (-1010, "UNAVAILABLE_IN_CURRENT_STATUS"),
    (-1011, "UNAVAILABLE_IN_CURRENT_MODE"),
    (-1012, "NOT_SUPPORTED"),
    (-1100, "FILE_NOT_FOUND"),
    (-1203, "KEYS_ULTRA_LIMIT"),
    (-1400, "TASK_NOT_FOUND"),
    (-1401, "TASK_PENDING_LIMIT_EXCEEDED"),
    (-1402, "JOB_NOT_FOUND"),
    (-1700, "TENANT_QUOTA_EXCEEDED"),
    (-1701, "TENANT_NOT_REGISTERED"),
    (-1702, "TENANT_NOT_EMPTY"),
];

/// Mooncake's number for a code of the store. Codes that Mooncake does not have become the code that its own
/// store returns in the same situation (python.md 1.4), so that callers who compare numbers find those that
/// they know: every lack of room is -200, a refused key -600.
#[must_use]
pub const fn of_code(code: ErrorCode) -> StoreCode {
    match code {
        code if code.is_no_room() => store::NO_AVAILABLE_HANDLE,
        ErrorCode::MetadataFull | ErrorCode::TooManyPuts => store::NO_AVAILABLE_HANDLE,
        // Mooncake's store refuses an empty key with INVALID_PARAMS.
        ErrorCode::InvalidKey
        | ErrorCode::InvalidPattern
        | ErrorCode::IncarnationTooHigh
        | ErrorCode::TooManySegments
        | ErrorCode::TooManyConnections => store::INVALID_PARAMS,
        ErrorCode::PutIsOver => store::INVALID_PARAMS,
        ErrorCode::KeyNotFound => store::OBJECT_NOT_FOUND,
        ErrorCode::Forked | ErrorCode::Expelled | ErrorCode::NotLeader => {
            store::UNAVAILABLE_IN_CURRENT_STATUS
        }
        ErrorCode::PermissionDenied => ErrorCode::TenantNotRegistered.code(),
        code => code.code(),
    }
}

/// Mooncake's number for an error of the store.
///
/// ```
/// use snowskin_compat::codes;
/// use store_client::{ErrorCode, StoreError};
/// assert_eq!(codes::of_store_error(&StoreError::Refused(ErrorCode::NoSegment)), codes::store::NO_AVAILABLE_HANDLE);
/// ```
#[must_use]
pub fn of_store_error(error: &StoreError) -> StoreCode {
    match error {
        // Mooncake's client returns INVALID_PARAMS when an object is longer than the caller's buffer.
        StoreError::TooLong { .. } => store::INVALID_PARAMS,
        // Mooncake's client does not distinguish a master that is slow from one that is gone.
        StoreError::Rpc(_) if error.code() == ErrorCode::RpcTimeout => store::RPC_FAIL,
        StoreError::Held => store::TRANSFER_FAIL,
        error => of_code(error.code()),
    }
}

/// Mooncake's name of a number of the store.
#[must_use]
pub fn name_of(code: StoreCode) -> Option<&'static str> {
    MOONCAKE_STORE_CODES.iter().find(|(number, _)| *number == code).map(|(_, name)| *name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_of_the_store_becomes_one_that_mooncake_has() {
        for &code in ErrorCode::ALL {
            let number = of_code(code);
            assert!(name_of(number).is_some() && number < 0, "{code:?} became {number}");
        }
    }

    #[test]
    fn every_reason_for_no_room_is_the_code_that_callers_take_as_back_pressure() {
        let reasons = ErrorCode::ALL.iter().filter(|code| code.is_no_room());
        assert!(reasons.clone().count() >= 5);
        for &code in reasons {
            assert_eq!(of_code(code), -200, "{code:?}");
        }
    }

    #[test]
    fn codes_that_callers_compare_keep_their_numbers() {
        for (code, number) in [
            (ErrorCode::ObjectNotFound, -704),
            (ErrorCode::KeyNotFound, -704),
            (ErrorCode::ObjectAlreadyExists, -705),
            (ErrorCode::ObjectHasLease, -706),
            (ErrorCode::InvalidKey, -600),
            (ErrorCode::RpcFail, -900),
            (ErrorCode::TaskNotFound, -1400),
        ] {
            assert_eq!(of_code(code), number, "{code:?}");
        }
        assert_eq!(of_store_error(&StoreError::TooLong { room: 1 }), -600);
    }

    #[test]
    fn names_are_unique_and_in_the_order_of_their_numbers() {
        assert!(MOONCAKE_STORE_CODES.windows(2).all(|pair| pair[0].0 > pair[1].0));
        assert_eq!(name_of(-200), Some("NO_AVAILABLE_HANDLE"));
        assert_eq!(name_of(-201), None);
    }
}
