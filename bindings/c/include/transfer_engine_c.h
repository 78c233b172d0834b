/*
 * transfer_engine_c.h - Mooncake's C interface to the Transfer Engine, served by Snowskin.
 *
 * Source and binary compatible with the header of this name in Mooncake (kvcache-ai/Mooncake): the same
 * names, constants, layouts and numbers. Link with -ltransfer_engine, or use pkg-config transfer_engine.
 *
 * Rules that hold for every function:
 *   - No argument of type "char *" is used after the function has returned.
 *   - NULL, where an object is needed, is an error, never a crash.
 *   - Functions return 0 for success. Those that take a batch return a positive number for an error, all
 *     others a negative one (the tables below).
 *   - Every function except destroyTransferEngine may be called by any number of threads at the same time.
 *   - Why a call failed is written to standard error; MC_LOG_LEVEL (ERROR, WARNING, INFO, TRACE) chooses how
 *     much is.
 *
 *   negative  -1 invalid argument, -2 too many requests, -3 address not registered, -4 in use,
 *             -7 address overlaps registered memory, -200 peer or metadata not reachable, -302 memory refused
 *   positive   1 invalid argument (also: unknown or stale batch), 2 too many requests, 3 address not
 *              registered, 4 batch busy, 7 address overlaps, 8 no transport, 200 metadata, 302 memory refused
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef TRANSFER_ENGINE_C
#define TRANSFER_ENGINE_C

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Types that callers test with #ifdef, hence macros. */
#define segment_handle_t int32_t
#define segment_id_t int32_t
#define batch_id_t uint64_t

/* The engine's own memory as a segment. */
#define LOCAL_SEGMENT (0)
/* What allocateBatchID returns when it fails. */
#define INVALID_BATCH UINT64_MAX

/* Copies remote bytes to local memory. */
#define OPCODE_READ (0)
/* Copies local bytes to remote memory. */
#define OPCODE_WRITE (1)

/* States of a request. This library reports WAITING, PENDING, COMPLETED and FAILED: everything that has ended
 * and did not arrive completely is FAILED, whatever the reason. */
#define STATUS_WAITING (0)
#define STATUS_PENDING (1)
#define STATUS_INVALID (2)
#define STATUS_CANCELED (3)
#define STATUS_COMPLETED (4)
#define STATUS_TIMEOUT (5)
#define STATUS_FAILED (6)

/* One copy between local memory and a segment. */
struct transfer_request {
    int opcode;             /* OPCODE_READ or OPCODE_WRITE */
    void *source;           /* first local byte, for both directions */
    segment_id_t target_id; /* from openSegment */
    uint64_t target_offset; /* first remote byte: an address in the process of the segment's owner */
    uint64_t length;        /* bytes; 0 completes at once */
};
typedef struct transfer_request transfer_request_t;

/* The state of one request. */
struct transfer_status {
    int status;
    uint64_t transferred_bytes;
};
typedef struct transfer_status transfer_status_t;

/* A message to the owner of a segment: two texts, each ended by a NUL. */
struct notify_msg {
    char *name;
    char *msg;
};
typedef struct notify_msg notify_msg_t;

/* Memory to register. */
struct buffer_entry {
    void *addr;
    size_t length;
};
typedef struct buffer_entry buffer_entry_t;

/* The load of one rail. */
struct nic_load_stat {
    char device_name[64];
    uint64_t inflight_bytes;
    double ewma_bandwidth_bps; /* bits per second */
};
typedef struct nic_load_stat nic_load_stat_t;

/* Used by no function; declared for programs that name it. */
struct segment_desc {
    int type;
    union {
        struct {
            void *addr;
            uint64_t size;
            const char *location;
        } rdma;
        struct {
            const char *file_path;
            const char *subsystem_name;
            const char *proto;
            const char *ip;
            uint64_t port;
        } nvmeof;
    } desc_;
};
typedef struct segment_desc segment_desc_t;

typedef void *transfer_engine_t;
typedef void *transport_t;

/* ------------------------------------------------------------------------------------------------------------
 * Life
 * --------------------------------------------------------------------------------------------------------- */

/* Starts an engine; NULL if it does not start.
 *   metadata_conn_string  "P2PHANDSHAKE", or http://, https://, redis://, etcd:// with a server
 *   local_server_name     host, or host:port, under which peers reach this process
 *   ip_or_host_name       not used; may be NULL
 *   rpc_port              the port for handshakes, only if MC_LEGACY_RPC_PORT_BINDING is set
 *   auto_discover         not used: fabrics are always discovered */
transfer_engine_t createTransferEngine(const char *metadata_conn_string, const char *local_server_name,
                                       const char *ip_or_host_name, uint64_t rpc_port, int auto_discover);

/* Stops an engine. Transfers are cancelled, and nothing touches registered memory any more. NULL is ignored.
 * No other call may be under way, and the handle is invalid from then on. */
void destroyTransferEngine(transfer_engine_t engine);

/* Writes host:port, under which peers open this engine's memory, and a NUL; -1 if they do not fit. */
int getLocalIpAndPort(transfer_engine_t engine, char *buf_out, size_t buf_len);

/* Both exist for source compatibility: all fabrics of the host are in use from the start, and each transfer
 * takes the nearest that reaches the peer. installTransport returns a pointer that is not NULL for every
 * protocol that Mooncake knows, and NULL otherwise. args[0] may be a priority matrix in JSON; it is checked,
 * but is effective only as the file that MC_CUSTOM_TOPO_JSON names. */
int discoverTopology(transfer_engine_t engine);
transport_t installTransport(transfer_engine_t engine, const char *proto, void **args);
int uninstallTransport(transfer_engine_t engine, const char *proto);

/* Has no effect: an engine leaves nothing behind when its process exits. */
void enableGracefulShutdown(transfer_engine_t engine);

/* ------------------------------------------------------------------------------------------------------------
 * Memory
 * --------------------------------------------------------------------------------------------------------- */

/* Registers memory, which stays mapped until it is unregistered. Peers may read and write it unless
 * remote_accessible is 0. location: "*", "cpu:0", ...; may be NULL. */
int registerLocalMemory(transfer_engine_t engine, void *addr, size_t length, const char *location,
                        int remote_accessible);

/* Ends the registration of the memory that begins at addr. After 0 nothing touches it any more. */
int unregisterLocalMemory(transfer_engine_t engine, void *addr);

/* Registers all of the buffers, or none. */
int registerLocalMemoryBatch(transfer_engine_t engine, buffer_entry_t *buffer_list, size_t buffer_len,
                             const char *location);

/* Ends as many of the registrations as it can, and returns the first failure. */
int unregisterLocalMemoryBatch(transfer_engine_t engine, void **addr_list, size_t addr_len);

/* ------------------------------------------------------------------------------------------------------------
 * Segments
 * --------------------------------------------------------------------------------------------------------- */

/* Opens the memory that a peer exports; the id, or a negative number. The same name has the same id again,
 * even after its owner has restarted. openSegmentNoCache asks the owner again what it exports. */
segment_id_t openSegment(transfer_engine_t engine, const char *segment_name);
segment_id_t openSegmentNoCache(transfer_engine_t engine, const char *segment_name);

/* Closes a segment. Its id stays valid, and a later use opens it again. */
int closeSegment(transfer_engine_t engine, segment_id_t segment_id);

/* Asks the owners of all open segments what they export. */
int syncSegmentCache(transfer_engine_t engine);

/* Exist for source compatibility; 0. */
int removeLocalSegment(transfer_engine_t engine, const char *segment_name);
int warmupEfaSegment(transfer_engine_t engine, const char *segment_name);

/* ------------------------------------------------------------------------------------------------------------
 * Transfers
 * --------------------------------------------------------------------------------------------------------- */

/* Allocates a batch for at most batch_size requests, at most 2^20; INVALID_BATCH on failure. An id is never
 * used again: after freeBatchID every function refuses it. */
batch_id_t allocateBatchID(transfer_engine_t engine, size_t batch_size);

/* Adds requests to a batch and submits them; several calls may add to the same batch. Requests are numbered
 * in the order in which they were added. Local memory need not be registered, but stays mapped until
 * getTransferStatus has reported the end of its request. On an error no byte was moved. */
int submitTransfer(transfer_engine_t engine, batch_id_t batch_id, struct transfer_request *entries,
                   size_t count);

/* As submitTransfer. When all requests of this call have completed, the message is sent to the owner of the
 * first one's segment. Nothing is sent if one of them fails. count must not be 0. */
int submitTransferWithNotify(transfer_engine_t engine, batch_id_t batch_id, struct transfer_request *entries,
                             size_t count, notify_msg_t notify_msg);

/* Reads the state of a request. Takes no lock. *status is not changed unless 0 is returned. */
int getTransferStatus(transfer_engine_t engine, batch_id_t batch_id, size_t task_id,
                      struct transfer_status *status);

/* Frees a batch whose requests have ended, however they ended; 4 while one has not. */
int freeBatchID(transfer_engine_t engine, batch_id_t batch_id);

/* ------------------------------------------------------------------------------------------------------------
 * Notifications
 * --------------------------------------------------------------------------------------------------------- */

/* Sends a message to the owner of segment target_id. */
int genNotifyInEngine(transfer_engine_t engine, uint64_t target_id, notify_msg_t notify_msg);

/* Takes the messages that peers have sent: an array of *size messages, to be freed with freeNotifsMsgBuf;
 * NULL and 0 if there are none. A text is cut at its first NUL. */
notify_msg_t *getNotifsFromEngine(transfer_engine_t engine, int *size);

/* Frees what getNotifsFromEngine returned; (NULL, 0) is fine. Returns 0. */
int freeNotifsMsgBuf(notify_msg_t *msg, int size);

/* ------------------------------------------------------------------------------------------------------------
 * Reports
 * --------------------------------------------------------------------------------------------------------- */

/* Writes the loads of at most *count rails, and sets *count to the number of rails. */
int getNicLoadStats(transfer_engine_t engine, nic_load_stat_t *stats, size_t *count);

/* Writes rails and open segments as text, or as JSON if json is not 0, and a NUL; -1 if they do not fit. */
int showLinks(transfer_engine_t engine, char *buf_out, size_t buf_len, int json);

#ifdef __cplusplus
}
#endif

#endif /* TRANSFER_ENGINE_C */
