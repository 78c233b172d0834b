/* Sizes, offsets and constants, as callers compiled against Mooncake's header have them. Compiles as C99, C11
 * and C++17. */
#include <transfer_engine_c.h>

#define HOLDS(name, condition) typedef char name[(condition) ? 1 : -1]

#ifndef segment_handle_t
#error "segment_handle_t is a macro"
#endif
#ifndef segment_id_t
#error "segment_id_t is a macro"
#endif
#ifndef batch_id_t
#error "batch_id_t is a macro"
#endif

HOLDS(request_size, sizeof(transfer_request_t) == 40);
HOLDS(request_opcode, offsetof(struct transfer_request, opcode) == 0);
HOLDS(request_source, offsetof(struct transfer_request, source) == 8);
HOLDS(request_target, offsetof(struct transfer_request, target_id) == 16);
HOLDS(request_offset, offsetof(struct transfer_request, target_offset) == 24);
HOLDS(request_length, offsetof(struct transfer_request, length) == 32);
HOLDS(status_size, sizeof(transfer_status_t) == 16);
HOLDS(status_bytes, offsetof(struct transfer_status, transferred_bytes) == 8);
HOLDS(notify_size, sizeof(notify_msg_t) == 16);
HOLDS(notify_msg_at, offsetof(struct notify_msg, msg) == 8);
HOLDS(buffer_size, sizeof(buffer_entry_t) == 16);
HOLDS(buffer_length, offsetof(struct buffer_entry, length) == 8);
HOLDS(load_size, sizeof(nic_load_stat_t) == 80);
HOLDS(load_bytes, offsetof(struct nic_load_stat, inflight_bytes) == 64);
HOLDS(load_bps, offsetof(struct nic_load_stat, ewma_bandwidth_bps) == 72);
HOLDS(desc_size, sizeof(segment_desc_t) == 48);
HOLDS(segment_is_32_bits, sizeof(segment_id_t) == 4 && sizeof(segment_handle_t) == 4);
HOLDS(segments_are_signed, (segment_id_t)-1 < 0);
HOLDS(batch_is_64_bits, sizeof(batch_id_t) == 8 && (batch_id_t)-1 > 0);
HOLDS(constants, LOCAL_SEGMENT == 0 && INVALID_BATCH == UINT64_MAX && OPCODE_READ == 0 && OPCODE_WRITE == 1);
HOLDS(states, STATUS_WAITING == 0 && STATUS_PENDING == 1 && STATUS_INVALID == 2 && STATUS_CANCELED == 3);
HOLDS(ends, STATUS_COMPLETED == 4 && STATUS_TIMEOUT == 5 && STATUS_FAILED == 6);

int main(void) { return 0; }
