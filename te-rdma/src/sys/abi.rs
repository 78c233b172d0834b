//! The part of libibverbs' ABI that this fabric uses: structures and constants of `infiniband/verbs.h`, under
//! their C names.
//!
//! Checked in and reviewed by hand. `cargo xtask bindgen` compiles the same names against the installed
//! headers and rewrites `layout.rs`, whose assertions check every size, offset and value below at compile
//! time; CI runs it with `--check`. It reads this file line by line: one field or constant per line, and
//! `// C: …` where C spells a field differently.
//!
//! Enumerations are plain integers: a driver may return values that this file does not list.
#![allow(non_camel_case_types, reason = "the names of verbs.h, so that they can be searched for")]
#![allow(dead_code, reason = "whole structures are described, not only the fields that are used")]

use std::ffi::{c_char, c_int, c_uint, c_void};

// Limits and flags.

pub(crate) const IBV_ACCESS_LOCAL_WRITE: u32 = 1;
pub(crate) const IBV_ACCESS_REMOTE_WRITE: u32 = 1 << 1;
pub(crate) const IBV_ACCESS_REMOTE_READ: u32 = 1 << 2;
pub(crate) const IBV_ACCESS_RELAXED_ORDERING: u32 = 1 << 20;

pub(crate) const IBV_GID_TYPE_IB: u32 = 0;
pub(crate) const IBV_GID_TYPE_ROCE_V1: u32 = 1;
pub(crate) const IBV_GID_TYPE_ROCE_V2: u32 = 2;

pub(crate) const IBV_PORT_ACTIVE: u32 = 4;
pub(crate) const IBV_LINK_LAYER_INFINIBAND: u8 = 1;
pub(crate) const IBV_LINK_LAYER_ETHERNET: u8 = 2;
pub(crate) const IBV_TRANSPORT_IB: c_int = 0;

pub(crate) const IBV_QPT_RC: u32 = 2;
pub(crate) const IBV_QPS_INIT: u32 = 1;
pub(crate) const IBV_QPS_RTR: u32 = 2;
pub(crate) const IBV_QPS_RTS: u32 = 3;
pub(crate) const IBV_QPS_ERR: u32 = 6;

pub(crate) const IBV_QP_STATE: c_int = 1;
pub(crate) const IBV_QP_ACCESS_FLAGS: c_int = 1 << 3;
pub(crate) const IBV_QP_PKEY_INDEX: c_int = 1 << 4;
pub(crate) const IBV_QP_PORT: c_int = 1 << 5;
pub(crate) const IBV_QP_AV: c_int = 1 << 7;
pub(crate) const IBV_QP_PATH_MTU: c_int = 1 << 8;
pub(crate) const IBV_QP_TIMEOUT: c_int = 1 << 9;
pub(crate) const IBV_QP_RETRY_CNT: c_int = 1 << 10;
pub(crate) const IBV_QP_RNR_RETRY: c_int = 1 << 11;
pub(crate) const IBV_QP_RQ_PSN: c_int = 1 << 12;
pub(crate) const IBV_QP_MAX_QP_RD_ATOMIC: c_int = 1 << 13;
pub(crate) const IBV_QP_MIN_RNR_TIMER: c_int = 1 << 15;
pub(crate) const IBV_QP_SQ_PSN: c_int = 1 << 16;
pub(crate) const IBV_QP_MAX_DEST_RD_ATOMIC: c_int = 1 << 17;
pub(crate) const IBV_QP_DEST_QPN: c_int = 1 << 20;

pub(crate) const IBV_WR_RDMA_WRITE: u32 = 0;
pub(crate) const IBV_WR_RDMA_READ: u32 = 4;
pub(crate) const IBV_SEND_SIGNALED: u32 = 1 << 1;
pub(crate) const IBV_SEND_INLINE: u32 = 1 << 3;

pub(crate) const IBV_WC_SUCCESS: u32 = 0;
pub(crate) const IBV_WC_LOC_LEN_ERR: u32 = 1;
pub(crate) const IBV_WC_LOC_QP_OP_ERR: u32 = 2;
pub(crate) const IBV_WC_LOC_EEC_OP_ERR: u32 = 3;
pub(crate) const IBV_WC_LOC_PROT_ERR: u32 = 4;
pub(crate) const IBV_WC_WR_FLUSH_ERR: u32 = 5;
pub(crate) const IBV_WC_MW_BIND_ERR: u32 = 6;
pub(crate) const IBV_WC_BAD_RESP_ERR: u32 = 7;
pub(crate) const IBV_WC_LOC_ACCESS_ERR: u32 = 8;
pub(crate) const IBV_WC_REM_INV_REQ_ERR: u32 = 9;
pub(crate) const IBV_WC_REM_ACCESS_ERR: u32 = 10;
pub(crate) const IBV_WC_REM_OP_ERR: u32 = 11;
pub(crate) const IBV_WC_RETRY_EXC_ERR: u32 = 12;
pub(crate) const IBV_WC_RNR_RETRY_EXC_ERR: u32 = 13;
pub(crate) const IBV_WC_LOC_RDD_VIOL_ERR: u32 = 14;
pub(crate) const IBV_WC_REM_INV_RD_REQ_ERR: u32 = 15;
pub(crate) const IBV_WC_REM_ABORT_ERR: u32 = 16;
pub(crate) const IBV_WC_INV_EECN_ERR: u32 = 17;
pub(crate) const IBV_WC_INV_EEC_STATE_ERR: u32 = 18;
pub(crate) const IBV_WC_FATAL_ERR: u32 = 19;
pub(crate) const IBV_WC_RESP_TIMEOUT_ERR: u32 = 20;
pub(crate) const IBV_WC_GENERAL_ERR: u32 = 21;
pub(crate) const IBV_WC_TM_ERR: u32 = 22;
pub(crate) const IBV_WC_TM_RNDV_INCOMPLETE: u32 = 23;

pub(crate) const IBV_EVENT_CQ_ERR: u32 = 0;
pub(crate) const IBV_EVENT_QP_FATAL: u32 = 1;
pub(crate) const IBV_EVENT_QP_REQ_ERR: u32 = 2;
pub(crate) const IBV_EVENT_QP_ACCESS_ERR: u32 = 3;
pub(crate) const IBV_EVENT_DEVICE_FATAL: u32 = 8;
pub(crate) const IBV_EVENT_PORT_ACTIVE: u32 = 9;
pub(crate) const IBV_EVENT_PORT_ERR: u32 = 10;
pub(crate) const IBV_EVENT_LID_CHANGE: u32 = 11;
pub(crate) const IBV_EVENT_GID_CHANGE: u32 = 18;

// Devices and ports.

#[repr(C)]
pub(crate) struct ibv_device {
    pub(crate) _ops: [*mut c_void; 2],
    pub(crate) node_type: c_int,
    pub(crate) transport_type: c_int,
    pub(crate) name: [c_char; 64],
    pub(crate) dev_name: [c_char; 64],
    pub(crate) dev_path: [c_char; 256],
    pub(crate) ibdev_path: [c_char; 256],
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct ibv_device_attr {
    pub(crate) fw_ver: [c_char; 64],
    pub(crate) node_guid: u64,
    pub(crate) sys_image_guid: u64,
    pub(crate) max_mr_size: u64,
    pub(crate) page_size_cap: u64,
    pub(crate) vendor_id: u32,
    pub(crate) vendor_part_id: u32,
    pub(crate) hw_ver: u32,
    pub(crate) max_qp: c_int,
    pub(crate) max_qp_wr: c_int,
    pub(crate) device_cap_flags: c_uint,
    pub(crate) max_sge: c_int,
    pub(crate) max_sge_rd: c_int,
    pub(crate) max_cq: c_int,
    pub(crate) max_cqe: c_int,
    pub(crate) max_mr: c_int,
    pub(crate) max_pd: c_int,
    pub(crate) max_qp_rd_atom: c_int,
    pub(crate) max_ee_rd_atom: c_int,
    pub(crate) max_res_rd_atom: c_int,
    pub(crate) max_qp_init_rd_atom: c_int,
    pub(crate) max_ee_init_rd_atom: c_int,
    pub(crate) atomic_cap: c_uint,
    pub(crate) max_ee: c_int,
    pub(crate) max_rdd: c_int,
    pub(crate) max_mw: c_int,
    pub(crate) max_raw_ipv6_qp: c_int,
    pub(crate) max_raw_ethy_qp: c_int,
    pub(crate) max_mcast_grp: c_int,
    pub(crate) max_mcast_qp_attach: c_int,
    pub(crate) max_total_mcast_qp_attach: c_int,
    pub(crate) max_ah: c_int,
    pub(crate) max_fmr: c_int,
    pub(crate) max_map_per_fmr: c_int,
    pub(crate) max_srq: c_int,
    pub(crate) max_srq_wr: c_int,
    pub(crate) max_srq_sge: c_int,
    pub(crate) max_pkeys: u16,
    pub(crate) local_ca_ack_delay: u8,
    pub(crate) phys_port_cnt: u8,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct ibv_port_attr {
    pub(crate) state: c_uint,
    pub(crate) max_mtu: c_uint,
    pub(crate) active_mtu: c_uint,
    pub(crate) gid_tbl_len: c_int,
    pub(crate) port_cap_flags: u32,
    pub(crate) max_msg_sz: u32,
    pub(crate) bad_pkey_cntr: u32,
    pub(crate) qkey_viol_cntr: u32,
    pub(crate) pkey_tbl_len: u16,
    pub(crate) lid: u16,
    pub(crate) sm_lid: u16,
    pub(crate) lmc: u8,
    pub(crate) max_vl_num: u8,
    pub(crate) sm_sl: u8,
    pub(crate) subnet_timeout: u8,
    pub(crate) init_type_reply: u8,
    pub(crate) active_width: u8,
    pub(crate) active_speed: u8,
    pub(crate) phys_state: u8,
    pub(crate) link_layer: u8,
    pub(crate) flags: u8,
    pub(crate) port_cap_flags2: u16,
}

/// Its first member is 8-byte aligned in C, because a GID is a union with two 64-bit halves.
#[repr(C, align(8))]
#[derive(Clone, Copy, Default)]
pub(crate) struct ibv_gid_entry {
    pub(crate) gid: [u8; 16],
    pub(crate) gid_index: u32,
    pub(crate) port_num: u32,
    pub(crate) gid_type: u32,
    pub(crate) ndev_ifindex: u32,
}

/// The functions that verbs.h calls inline; the rest are placeholders.
#[repr(C)]
pub(crate) struct ibv_context_ops {
    pub(crate) _compat_query_device: *mut c_void,
    pub(crate) _compat_query_port: *mut c_void,
    pub(crate) _compat_alloc_pd: *mut c_void,
    pub(crate) _compat_dealloc_pd: *mut c_void,
    pub(crate) _compat_reg_mr: *mut c_void,
    pub(crate) _compat_rereg_mr: *mut c_void,
    pub(crate) _compat_dereg_mr: *mut c_void,
    pub(crate) alloc_mw: *mut c_void,
    pub(crate) bind_mw: *mut c_void,
    pub(crate) dealloc_mw: *mut c_void,
    pub(crate) _compat_create_cq: *mut c_void,
    pub(crate) poll_cq: Option<unsafe extern "C" fn(*mut ibv_cq, c_int, *mut ibv_wc) -> c_int>,
    pub(crate) req_notify_cq: Option<unsafe extern "C" fn(*mut ibv_cq, c_int) -> c_int>,
    pub(crate) _compat_cq_event: *mut c_void,
    pub(crate) _compat_resize_cq: *mut c_void,
    pub(crate) _compat_destroy_cq: *mut c_void,
    pub(crate) _compat_create_srq: *mut c_void,
    pub(crate) _compat_modify_srq: *mut c_void,
    pub(crate) _compat_query_srq: *mut c_void,
    pub(crate) _compat_destroy_srq: *mut c_void,
    pub(crate) post_srq_recv: *mut c_void,
    pub(crate) _compat_create_qp: *mut c_void,
    pub(crate) _compat_query_qp: *mut c_void,
    pub(crate) _compat_modify_qp: *mut c_void,
    pub(crate) _compat_destroy_qp: *mut c_void,
    pub(crate) post_send: Option<PostSend>,
    pub(crate) post_recv: *mut c_void,
    pub(crate) _compat_create_ah: *mut c_void,
    pub(crate) _compat_destroy_ah: *mut c_void,
    pub(crate) _compat_attach_mcast: *mut c_void,
    pub(crate) _compat_detach_mcast: *mut c_void,
    pub(crate) _compat_async_event: *mut c_void,
}

pub(crate) type PostSend =
    unsafe extern "C" fn(*mut ibv_qp, *mut ibv_send_wr, *mut *mut ibv_send_wr) -> c_int;

#[repr(C)]
pub(crate) struct ibv_context {
    pub(crate) device: *mut ibv_device,
    pub(crate) ops: ibv_context_ops,
    pub(crate) cmd_fd: c_int,
    pub(crate) async_fd: c_int,
    pub(crate) num_comp_vectors: c_int,
    pub(crate) mutex: libc::pthread_mutex_t,
    pub(crate) abi_compat: *mut c_void,
}

#[repr(C)]
pub(crate) struct ibv_pd {
    pub(crate) context: *mut ibv_context,
    pub(crate) handle: u32,
}

#[repr(C)]
pub(crate) struct ibv_mr {
    pub(crate) context: *mut ibv_context,
    pub(crate) pd: *mut ibv_pd,
    pub(crate) addr: *mut c_void,
    pub(crate) length: usize,
    pub(crate) handle: u32,
    pub(crate) lkey: u32,
    pub(crate) rkey: u32,
}

// Completions and events.

#[repr(C)]
pub(crate) struct ibv_comp_channel {
    pub(crate) context: *mut ibv_context,
    pub(crate) fd: c_int,
    pub(crate) refcnt: c_int,
}

#[repr(C)]
pub(crate) struct ibv_cq {
    pub(crate) context: *mut ibv_context,
    pub(crate) channel: *mut ibv_comp_channel,
    pub(crate) cq_context: *mut c_void,
    pub(crate) handle: u32,
    pub(crate) cqe: c_int,
    pub(crate) mutex: libc::pthread_mutex_t,
    pub(crate) cond: libc::pthread_cond_t,
    pub(crate) comp_events_completed: u32,
    pub(crate) async_events_completed: u32,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct ibv_wc {
    pub(crate) wr_id: u64,
    pub(crate) status: c_uint,
    pub(crate) opcode: c_uint,
    pub(crate) vendor_err: u32,
    pub(crate) byte_len: u32,
    pub(crate) imm_data: u32,
    pub(crate) qp_num: u32,
    pub(crate) src_qp: u32,
    pub(crate) wc_flags: c_uint,
    pub(crate) pkey_index: u16,
    pub(crate) slid: u16,
    pub(crate) sl: u8,
    pub(crate) dlid_path_bits: u8,
}

/// `element` is a pointer to the queue pair, completion queue, … or a port's number.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct ibv_async_event {
    pub(crate) element: *mut c_void,
    pub(crate) event_type: c_uint,
}

// Queue pairs.

#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct ibv_qp_cap {
    pub(crate) max_send_wr: u32,
    pub(crate) max_recv_wr: u32,
    pub(crate) max_send_sge: u32,
    pub(crate) max_recv_sge: u32,
    pub(crate) max_inline_data: u32,
}

#[repr(C)]
pub(crate) struct ibv_qp_init_attr {
    pub(crate) qp_context: *mut c_void,
    pub(crate) send_cq: *mut ibv_cq,
    pub(crate) recv_cq: *mut ibv_cq,
    pub(crate) srq: *mut c_void,
    pub(crate) cap: ibv_qp_cap,
    pub(crate) qp_type: c_uint,
    pub(crate) sq_sig_all: c_int,
}

#[repr(C)]
pub(crate) struct ibv_qp {
    pub(crate) context: *mut ibv_context,
    pub(crate) qp_context: *mut c_void,
    pub(crate) pd: *mut ibv_pd,
    pub(crate) send_cq: *mut ibv_cq,
    pub(crate) recv_cq: *mut ibv_cq,
    pub(crate) srq: *mut c_void,
    pub(crate) handle: u32,
    pub(crate) qp_num: u32,
    pub(crate) state: c_uint,
    pub(crate) qp_type: c_uint,
    pub(crate) mutex: libc::pthread_mutex_t,
    pub(crate) cond: libc::pthread_cond_t,
    pub(crate) events_completed: u32,
}

#[repr(C, align(8))]
#[derive(Clone, Copy, Default)]
pub(crate) struct ibv_global_route {
    pub(crate) dgid: [u8; 16],
    pub(crate) flow_label: u32,
    pub(crate) sgid_index: u8,
    pub(crate) hop_limit: u8,
    pub(crate) traffic_class: u8,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct ibv_ah_attr {
    pub(crate) grh: ibv_global_route,
    pub(crate) dlid: u16,
    pub(crate) sl: u8,
    pub(crate) src_path_bits: u8,
    pub(crate) static_rate: u8,
    pub(crate) is_global: u8,
    pub(crate) port_num: u8,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct ibv_qp_attr {
    pub(crate) qp_state: c_uint,
    pub(crate) cur_qp_state: c_uint,
    pub(crate) path_mtu: c_uint,
    pub(crate) path_mig_state: c_uint,
    pub(crate) qkey: u32,
    pub(crate) rq_psn: u32,
    pub(crate) sq_psn: u32,
    pub(crate) dest_qp_num: u32,
    pub(crate) qp_access_flags: c_uint,
    pub(crate) cap: ibv_qp_cap,
    pub(crate) ah_attr: ibv_ah_attr,
    pub(crate) alt_ah_attr: ibv_ah_attr,
    pub(crate) pkey_index: u16,
    pub(crate) alt_pkey_index: u16,
    pub(crate) en_sqd_async_notify: u8,
    pub(crate) sq_draining: u8,
    pub(crate) max_rd_atomic: u8,
    pub(crate) max_dest_rd_atomic: u8,
    pub(crate) min_rnr_timer: u8,
    pub(crate) port_num: u8,
    pub(crate) timeout: u8,
    pub(crate) retry_cnt: u8,
    pub(crate) rnr_retry: u8,
    pub(crate) alt_port_num: u8,
    pub(crate) alt_timeout: u8,
    pub(crate) rate_limit: u32,
}

// Work requests.

#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct ibv_sge {
    pub(crate) addr: u64,
    pub(crate) length: u32,
    pub(crate) lkey: u32,
}

/// The unions are reduced to what READs and WRITEs use; `_rest` keeps their sizes.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct ibv_send_wr {
    pub(crate) wr_id: u64,
    pub(crate) next: *mut ibv_send_wr,
    pub(crate) sg_list: *mut ibv_sge,
    pub(crate) num_sge: c_int,
    pub(crate) opcode: c_uint,
    pub(crate) send_flags: c_uint,
    pub(crate) imm_data: u32,
    pub(crate) remote_addr: u64,  // C: wr.rdma.remote_addr
    pub(crate) rkey: u32,         // C: wr.rdma.rkey
    pub(crate) _atomic: [u32; 5], // C: -
    pub(crate) remote_srqn: u32,  // C: qp_type.xrc.remote_srqn
    pub(crate) _rest: [u64; 6],   // C: bind_mw
}
