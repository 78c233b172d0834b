//! Conversions between the library's types and ours. Safe code.

use te_core::{Error, ErrorKind, Op};

use super::abi::*;
use crate::sys::verbs::{
    AsyncEvent, GidKind, MrAccess, Path, PortInfo, QpStep, Sge, WcStatus, WorkCompletion, WorkRequest,
};

// Work requests point to the caller's pieces without a conversion.
const _: () = {
    use std::mem::offset_of;
    assert!(size_of::<Sge>() == size_of::<ibv_sge>() && align_of::<Sge>() == align_of::<ibv_sge>());
    assert!(offset_of!(Sge, addr) == offset_of!(ibv_sge, addr));
    assert!(offset_of!(Sge, len) == offset_of!(ibv_sge, length));
    assert!(offset_of!(Sge, local_key) == offset_of!(ibv_sge, lkey));
    assert!(MrAccess::LOCAL_WRITE.bits() == IBV_ACCESS_LOCAL_WRITE);
    assert!(MrAccess::REMOTE_WRITE.bits() == IBV_ACCESS_REMOTE_WRITE);
    assert!(MrAccess::REMOTE_READ.bits() == IBV_ACCESS_REMOTE_READ);
    assert!(MrAccess::RELAXED_ORDERING.bits() == IBV_ACCESS_RELAXED_ORDERING);
};

/// The error that a caller gets for a driver's `errno`.
pub(super) fn driver_error(errno: i32) -> Error {
    let unsupported = [libc::EOPNOTSUPP, libc::EPROTONOSUPPORT, libc::ENOSYS].contains(&errno);
    Error::with_code(if unsupported { ErrorKind::Unsupported } else { ErrorKind::System }, errno)
}

pub(super) fn last_errno() -> i32 {
    // 0: the call failed without setting `errno`.
    std::io::Error::last_os_error().raw_os_error().filter(|&errno| errno != 0).unwrap_or(libc::EIO)
}

/// Most calls return 0 or an errno. Some old drivers return -errno, or -1 and set `errno`.
pub(super) fn check(result: i32) -> Result<(), Error> {
    match result {
        0 => Ok(()),
        -1 => Err(driver_error(last_errno())),
        other => Err(driver_error(other.saturating_abs())),
    }
}

/// `enum ibv_wc_status` (IBA 11.6.2), grouped by what follows from it.
pub(super) fn status(status: u32) -> WcStatus {
    match status {
        IBV_WC_SUCCESS => WcStatus::Success,
        IBV_WC_LOC_LEN_ERR
        | IBV_WC_LOC_QP_OP_ERR
        | IBV_WC_LOC_EEC_OP_ERR
        | IBV_WC_LOC_PROT_ERR
        | IBV_WC_MW_BIND_ERR
        | IBV_WC_LOC_ACCESS_ERR
        | IBV_WC_LOC_RDD_VIOL_ERR
        | IBV_WC_INV_EECN_ERR
        | IBV_WC_INV_EEC_STATE_ERR => WcStatus::Local,
        IBV_WC_WR_FLUSH_ERR => WcStatus::Flushed,
        IBV_WC_REM_ACCESS_ERR => WcStatus::RemoteAccess,
        IBV_WC_REM_INV_REQ_ERR
        | IBV_WC_REM_OP_ERR
        | IBV_WC_REM_INV_RD_REQ_ERR
        | IBV_WC_REM_ABORT_ERR
        // The peer's response was malformed.
        | IBV_WC_BAD_RESP_ERR => WcStatus::RemoteOperation,
        IBV_WC_RETRY_EXC_ERR | IBV_WC_RESP_TIMEOUT_ERR => WcStatus::RetriesExceeded,
        IBV_WC_RNR_RETRY_EXC_ERR => WcStatus::NotReady,
        // FATAL, GENERAL, tag matching, and statuses that later releases add.
        _ => WcStatus::Other,
    }
}

pub(super) fn completion(wc: &ibv_wc) -> WorkCompletion {
    let code = if wc.status == IBV_WC_SUCCESS { 0 } else { (wc.status | wc.vendor_err << 8) as i32 };
    WorkCompletion { id: wc.wr_id, qp_number: wc.qp_num, status: status(wc.status), code }
}

/// An event that is not about a queue pair.
pub(super) fn event(event_type: u32) -> AsyncEvent {
    match event_type {
        IBV_EVENT_CQ_ERR => AsyncEvent::CqError,
        IBV_EVENT_DEVICE_FATAL => AsyncEvent::DeviceFatal,
        IBV_EVENT_PORT_ACTIVE => AsyncEvent::PortActive,
        IBV_EVENT_PORT_ERR => AsyncEvent::PortError,
        // Both change the port's address.
        IBV_EVENT_GID_CHANGE | IBV_EVENT_LID_CHANGE => AsyncEvent::GidChange,
        other => AsyncEvent::Other(other as i32),
    }
}

/// Whether an event reports that a queue pair is in error.
pub(super) fn is_qp_error(event_type: u32) -> bool {
    matches!(event_type, IBV_EVENT_QP_FATAL | IBV_EVENT_QP_REQ_ERR | IBV_EVENT_QP_ACCESS_ERR)
}

pub(super) fn mtu_bytes(code: u32) -> u32 {
    if (1..=5).contains(&code) { 128 << code } else { 0 }
}

fn mtu_code(bytes: u32) -> Option<u32> {
    (1..=5).find(|&code| mtu_bytes(code) == bytes)
}

pub(super) fn gid_kind(kind: u32) -> Option<GidKind> {
    match kind {
        IBV_GID_TYPE_IB => Some(GidKind::Infiniband),
        IBV_GID_TYPE_ROCE_V1 => Some(GidKind::RoceV1),
        IBV_GID_TYPE_ROCE_V2 => Some(GidKind::RoceV2),
        _ => None,
    }
}

pub(super) fn port(attr: &ibv_port_attr) -> PortInfo {
    let width = match attr.active_width {
        1 => 1,
        2 => 4,
        4 => 8,
        8 => 12,
        16 => 2,
        _ => 0,
    };
    // IBA 14.2.5.6: SDR, DDR, QDR, FDR10, FDR, EDR, HDR, NDR; megabits per second for a width of 1.
    let mbit_per_s = match attr.active_speed {
        1 => 2_500,
        2 => 5_000,
        4 | 8 => 10_000,
        16 => 14_062,
        32 => 25_000,
        64 => 50_000,
        128 => 100_000,
        _ => 0,
    };
    PortInfo {
        active: attr.state == IBV_PORT_ACTIVE,
        infiniband: attr.link_layer != IBV_LINK_LAYER_ETHERNET,
        mtu_bytes: mtu_bytes(attr.active_mtu),
        lid: attr.lid,
        gids: u32::try_from(attr.gid_tbl_len).unwrap_or(0),
        bits_per_s: width * mbit_per_s * 1_000_000,
    }
}

/// The calls of `ibv_modify_qp(3)` for a state change, in order, with their masks.
///
/// # Errors
/// `EINVAL` for an MTU that does not exist.
pub(super) fn steps(
    step: QpStep,
    port: u8,
    infiniband: bool,
) -> Result<([Option<ibv_qp_attr>; 2], [i32; 2]), Error> {
    let attr = ibv_qp_attr::default();
    Ok(match step {
        QpStep::Init(access) => {
            let access = access.difference(MrAccess::RELAXED_ORDERING).bits();
            let init =
                ibv_qp_attr { qp_state: IBV_QPS_INIT, qp_access_flags: access, port_num: port, ..attr };
            let mask = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS;
            ([Some(init), None], [mask, 0])
        }
        QpStep::Connect(path) => connect(&path, port, infiniband)?,
        QpStep::Error => {
            let error = ibv_qp_attr { qp_state: IBV_QPS_ERR, ..attr };
            ([Some(error), None], [IBV_QP_STATE, 0])
        }
    })
}

fn connect(path: &Path, port: u8, infiniband: bool) -> Result<([Option<ibv_qp_attr>; 2], [i32; 2]), Error> {
    /// How long a peer is to wait when we are not ready (IBA table 46): 0.64 ms. One-sided work hardly ever
    /// uses it.
    const RNR_TIMER: u8 = 12;
    /// The most routers between the peers.
    const HOP_LIMIT: u8 = 64;
    let mtu = mtu_code(path.mtu_bytes).ok_or(driver_error(libc::EINVAL))?;
    let sgid_index = u8::try_from(path.gid_index).map_err(|_| driver_error(libc::EINVAL))?;
    let grh = ibv_global_route {
        dgid: path.peer_gid,
        flow_label: 0,
        sgid_index,
        hop_limit: HOP_LIMIT,
        traffic_class: path.traffic_class,
    };
    let ah_attr = ibv_ah_attr {
        grh,
        dlid: path.peer_lid,
        sl: path.service_level,
        // RoCE addresses by GID alone; InfiniBand within a subnet needs only the LID.
        is_global: u8::from(!infiniband || path.peer_lid == 0),
        port_num: port,
        ..ibv_ah_attr::default()
    };
    let to_receive = ibv_qp_attr {
        qp_state: IBV_QPS_RTR,
        path_mtu: mtu,
        dest_qp_num: path.peer_qp,
        rq_psn: path.peer_psn,
        max_dest_rd_atomic: path.reads_from_peer,
        min_rnr_timer: RNR_TIMER,
        ah_attr,
        ..ibv_qp_attr::default()
    };
    let to_send = ibv_qp_attr {
        qp_state: IBV_QPS_RTS,
        sq_psn: path.psn,
        timeout: path.timeout_exponent,
        retry_cnt: path.retries,
        rnr_retry: path.rnr_retries,
        max_rd_atomic: path.reads_to_peer,
        ..ibv_qp_attr::default()
    };
    let receive_mask = IBV_QP_STATE
        | IBV_QP_AV
        | IBV_QP_PATH_MTU
        | IBV_QP_DEST_QPN
        | IBV_QP_RQ_PSN
        | IBV_QP_MAX_DEST_RD_ATOMIC
        | IBV_QP_MIN_RNR_TIMER;
    let send_mask = IBV_QP_STATE
        | IBV_QP_TIMEOUT
        | IBV_QP_RETRY_CNT
        | IBV_QP_RNR_RETRY
        | IBV_QP_SQ_PSN
        | IBV_QP_MAX_QP_RD_ATOMIC;
    Ok(([Some(to_receive), Some(to_send)], [receive_mask, send_mask]))
}

/// One request of the chain. The caller sets `next`.
#[inline]
pub(super) fn send_wr(request: &WorkRequest, sges: &[Sge]) -> ibv_send_wr {
    let mut send_flags = 0;
    if request.signaled {
        send_flags |= IBV_SEND_SIGNALED;
    }
    if request.inline {
        send_flags |= IBV_SEND_INLINE;
    }
    ibv_send_wr {
        wr_id: request.id,
        next: std::ptr::null_mut(),
        // Drivers only read the pieces of a request, so the pointer is never written through.
        sg_list: sges.as_ptr().cast::<ibv_sge>().cast_mut(),
        num_sge: sges.len() as i32,
        opcode: match request.op {
            Op::Write => IBV_WR_RDMA_WRITE,
            Op::Read => IBV_WR_RDMA_READ,
        },
        send_flags,
        imm_data: 0,
        remote_addr: request.remote_addr,
        rkey: request.remote_key,
        _atomic: [0; 5],
        remote_srqn: 0,
        _rest: [0; 6],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_status_has_its_group() {
        use WcStatus::{
            Flushed, Local, NotReady, Other, RemoteAccess, RemoteOperation, RetriesExceeded, Success,
        };
        // In the order of `enum ibv_wc_status`.
        let groups = [
            Success,
            Local,
            Local,
            Local,
            Local,
            Flushed,
            Local,
            RemoteOperation,
            Local,
            RemoteOperation,
            RemoteAccess,
            RemoteOperation,
            RetriesExceeded,
            NotReady,
            Local,
            RemoteOperation,
            RemoteOperation,
            Local,
            Local,
            Other,
            RetriesExceeded,
            Other,
            Other,
            Other,
        ];
        for (number, group) in groups.into_iter().enumerate() {
            assert_eq!(status(number as u32), group, "{number}");
        }
        assert_eq!(groups.len() as u32, IBV_WC_TM_RNDV_INCOMPLETE + 1);
        assert_eq!(status(24), Other, "a status that a later release adds");
        assert_eq!(status(u32::MAX), Other);
    }

    #[test]
    fn a_completion_keeps_status_and_vendor_error_for_diagnosis() {
        let wc = ibv_wc { wr_id: 7, status: 10, vendor_err: 0x88, qp_num: 99, ..ibv_wc::default() };
        let expected =
            WorkCompletion { id: 7, qp_number: 99, status: WcStatus::RemoteAccess, code: 10 | 0x88 << 8 };
        assert_eq!(completion(&wc), expected);
        let good = ibv_wc { status: 0, vendor_err: 0x88, ..wc };
        assert_eq!((completion(&good).status, completion(&good).code), (WcStatus::Success, 0));
    }

    #[test]
    fn errors_of_every_style_give_their_errno() {
        assert_eq!(check(0), Ok(()));
        assert_eq!(check(libc::ENOMEM), Err(Error::with_code(ErrorKind::System, libc::ENOMEM)));
        assert_eq!(check(-libc::ENOMEM), Err(Error::with_code(ErrorKind::System, libc::ENOMEM)));
        assert_eq!(check(libc::EOPNOTSUPP).map_err(|e| e.kind), Err(ErrorKind::Unsupported));
        assert!(check(i32::MIN).is_err());
    }

    #[test]
    fn mtus_are_the_five_that_exist() {
        assert_eq!([1, 2, 3, 4, 5].map(mtu_bytes), [256, 512, 1024, 2048, 4096]);
        assert_eq!((mtu_bytes(0), mtu_bytes(6), mtu_code(1500)), (0, 0, None));
        assert_eq!(mtu_code(4096), Some(5));
    }

    #[test]
    fn a_ports_speed_is_width_times_rate() {
        let attr = ibv_port_attr {
            active_width: 2,
            active_speed: 32,
            state: 4,
            link_layer: 2,
            ..Default::default()
        };
        assert_eq!(port(&attr).bits_per_s, 100_000_000_000);
        assert!(port(&attr).active && !port(&attr).infiniband);
        assert_eq!(port(&ibv_port_attr { active_width: 99, ..attr }).bits_per_s, 0);
        assert!(!port(&ibv_port_attr { state: 3, ..attr }).active);
    }

    #[test]
    fn events_are_distinguished() {
        assert_eq!(event(8), AsyncEvent::DeviceFatal);
        assert_eq!(event(9), AsyncEvent::PortActive);
        assert_eq!(event(10), AsyncEvent::PortError);
        assert_eq!([event(11), event(18)], [AsyncEvent::GidChange; 2]);
        assert_eq!(event(0), AsyncEvent::CqError);
        assert_eq!(event(17), AsyncEvent::Other(17));
        assert_eq!([0, 1, 2, 3, 4].map(is_qp_error), [false, true, true, true, false]);
    }
}
