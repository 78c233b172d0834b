/*
 * snowskin.h - Snowskin's own C interface: the store, and the Transfer Engine.
 *
 *   - Handles are opaque. Nothing is global: every object belongs to the handle that made it.
 *   - Functions that can fail return a snowskin_code, 0 for success, and take a "snowskin_error **" last, which
 *     may be NULL. On failure it receives a description, to be freed with snowskin_error_free; on success it is
 *     not touched.
 *   - Outputs are not changed on failure, unless it is said.
 *   - Texts that are passed end with a NUL and are UTF-8; keys and messages are bytes with a length. None is
 *     used after the function has returned.
 *   - Structures of options begin with their size, so that later releases can add fields: initialise them with
 *     their _INIT macro.
 *   - Functions may be called by any number of threads at the same time, except those that free the object
 *     that another call uses.
 *
 * Link with -lsnowskin, or use pkg-config snowskin. docs/c.md has complete programs.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef SNOWSKIN_H
#define SNOWSKIN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ------------------------------------------------------------------------------------------------------------
 * Versions and errors
 * --------------------------------------------------------------------------------------------------------- */

/* The version of this interface. It grows with incompatible changes; the name of the shared library with it. */
#define SNOWSKIN_ABI 0u

/* The version of the interface, and of the release, that the loaded library has. */
uint32_t snowskin_abi(void);
const char *snowskin_version(void);

typedef int32_t snowskin_code;
enum {
    SNOWSKIN_OK = 0,
    SNOWSKIN_INVALID_ARGUMENT = 1,  /* an argument is NULL or out of its limits */
    SNOWSKIN_NOT_FOUND = 2,         /* no such object, segment or registered memory */
    SNOWSKIN_NO_SPACE = 3,          /* the store has no room for now: try again later */
    SNOWSKIN_LEASED = 4,            /* a reader may still be copying the object: try again later */
    SNOWSKIN_UNREACHABLE = 5,       /* the master, or the peer, does not answer */
    SNOWSKIN_TIMED_OUT = 6,         /* the time ran out; the transfer has ended */
    SNOWSKIN_OUTCOME_UNKNOWN = 7,   /* the bytes may have arrived, or may still arrive at the peer */
    SNOWSKIN_CLOSED = 8,            /* the object was closed, or was cut off: make a new one */
    SNOWSKIN_FORKED = 9,            /* this process is a fork of the one that made the object */
    SNOWSKIN_BUSY = 10,             /* in use: wait, and try again */
    SNOWSKIN_DENIED = 11,           /* a secret is wrong or missing, or the tenant is unknown */
    SNOWSKIN_UNSUPPORTED = 12,      /* this release, or the peer's, has no such operation */
    SNOWSKIN_INTERNAL = 13,         /* a bug: report it */
    SNOWSKIN_BUFFER_TOO_SHORT = 14, /* the object is longer than the buffer */
    SNOWSKIN_PENDING = 15,          /* not over yet; not an error */
    SNOWSKIN_CANCELED = 16          /* the caller cancelled it */
};

/* The name of a code, such as "NO_SPACE"; "UNKNOWN" for other numbers. */
const char *snowskin_code_name(snowskin_code code);

typedef struct snowskin_error snowskin_error;

/* What went wrong: a code, and a sentence with the values and what to do. NULL gives SNOWSKIN_OK and "". The
 * sentence is valid until the error is freed. */
snowskin_code snowskin_error_code(const snowskin_error *error);
const char *snowskin_error_message(const snowskin_error *error);
void snowskin_error_free(snowskin_error *error);

/* Frees memory that a function of this header allocated. NULL is ignored. */
void snowskin_free(void *memory);

/* ------------------------------------------------------------------------------------------------------------
 * The store
 * --------------------------------------------------------------------------------------------------------- */

typedef struct snowskin_store snowskin_store;

typedef struct snowskin_store_options {
    size_t size;
    const char *master;         /* host:port, or unix:/path; NULL: 127.0.0.1:50051 */
    const char *host;           /* the host under which nodes reach this process; NULL: 127.0.0.1 */
    const char *fabrics;        /* "auto", or names with commas, such as "shm,tcp"; NULL: auto */
    const char *tenant;         /* NULL: the default tenant */
    const char *tenant_secret;  /* NULL: none */
    const char *cluster_secret; /* NULL: none */
} snowskin_store_options;
#define SNOWSKIN_STORE_OPTIONS_INIT {sizeof(snowskin_store_options), NULL, NULL, NULL, NULL, NULL, NULL}

/* Connects to the master. NULL options: all defaults. */
snowskin_code snowskin_store_connect(const snowskin_store_options *options, snowskin_store **store,
                                     snowskin_error **error);

/* Waits for calls that are under way, disconnects, and frees the store. NULL is ignored. */
void snowskin_store_close(snowskin_store *store);

/* Retention of an object: evicted like any other, evicted last, never evicted. */
enum { SNOWSKIN_PIN_NONE = 0, SNOWSKIN_PIN_SOFT = 1, SNOWSKIN_PIN_HARD = 2 };

typedef struct snowskin_put_options {
    size_t size;
    uint32_t replicas; /* 0 counts as 1; at most 8; at least one is made */
    uint32_t pin;      /* SNOWSKIN_PIN_... */
    uint32_t ttl_ms;   /* the object is removed this long after it was stored; 0: never */
    uint32_t replace;  /* not 0: an object that exists is replaced */
} snowskin_put_options;
#define SNOWSKIN_PUT_OPTIONS_INIT {sizeof(snowskin_put_options), 0, 0, 0, 0}

/* Stores an object. *stored, which may be NULL, tells whether it was stored: false means that the key exists,
 * and that the object stays as it is. NULL options: all defaults. */
snowskin_code snowskin_store_put(snowskin_store *store, const void *key, size_t key_length, const void *value,
                                 size_t value_length, const snowskin_put_options *options, bool *stored,
                                 snowskin_error **error);

/* Reads an object into a buffer of room bytes, and sets *length. SNOWSKIN_NOT_FOUND: there is no such object.
 * After an error the buffer may have been written. */
snowskin_code snowskin_store_get(snowskin_store *store, const void *key, size_t key_length, void *buffer,
                                 size_t room, size_t *length, snowskin_error **error);

/* Reads an object into memory that it allocates, to be freed with snowskin_free. */
snowskin_code snowskin_store_get_new(snowskin_store *store, const void *key, size_t key_length, void **value,
                                     size_t *length, snowskin_error **error);

/* One object of a batch. code and stored (or length) are set for every item whenever the function returns
 * SNOWSKIN_OK: items fail one by one, and a key that is not found is the code SNOWSKIN_NOT_FOUND. */
typedef struct snowskin_put_item {
    const void *key;
    size_t key_length;
    const void *value;
    size_t value_length;
    snowskin_code code;
    bool stored;
} snowskin_put_item;

typedef struct snowskin_get_item {
    const void *key;
    size_t key_length;
    void *buffer;
    size_t room;
    size_t length;
    snowskin_code code;
} snowskin_get_item;

snowskin_code snowskin_store_put_many(snowskin_store *store, snowskin_put_item *items, size_t count,
                                      const snowskin_put_options *options, snowskin_error **error);
snowskin_code snowskin_store_get_many(snowskin_store *store, snowskin_get_item *items, size_t count,
                                      snowskin_error **error);

typedef struct snowskin_bytes {
    const void *bytes;
    size_t length;
} snowskin_bytes;

/* Writes to results, for each key, whether there is such an object. */
snowskin_code snowskin_store_exists(snowskin_store *store, const snowskin_bytes *keys, size_t count,
                                    bool *results, snowskin_error **error);

/* Removes an object. Without force, one that a reader has leased stays: SNOWSKIN_LEASED. */
snowskin_code snowskin_store_remove(snowskin_store *store, const void *key, size_t key_length, bool force,
                                    snowskin_error **error);

/* Registers memory, so that objects are moved from and into it without a copy. It stays mapped until it is
 * unregistered, or the store is closed. Here and where bytes are put or read, the address may be that of memory of
 * a GPU, which has to be ready: no work of a stream uses it meanwhile. */
snowskin_code snowskin_store_register(snowskin_store *store, void *memory, size_t length,
                                      snowskin_error **error);
/* Ends the registration of the memory that begins there. Waits for calls that use it, at most 5 s. After success
 * nothing touches it any more. SNOWSKIN_BUSY while something still does: keep it mapped, and try again. */
snowskin_code snowskin_store_unregister(snowskin_store *store, void *memory, snowskin_error **error);

/* ------------------------------------------------------------------------------------------------------------
 * Memory for the store
 * --------------------------------------------------------------------------------------------------------- */

typedef struct snowskin_node snowskin_node;

typedef struct snowskin_node_options {
    size_t size;
    const char *master;         /* host:port, or unix:/path; NULL: 127.0.0.1:50051 */
    const char *name;           /* unique in the cluster; NULL: the host and the port of the node's engine */
    const char *host;           /* the host under which clients reach this process; NULL: 127.0.0.1 */
    const char *fabrics;        /* "auto", or names with commas, such as "shm,tcp"; NULL: auto */
    const char *cluster_secret; /* NULL: none */
    uint64_t memory;            /* bytes; at least 1 */
    uint32_t wait_master_ms;    /* how long to wait for a master that does not answer; 0: not at all */
} snowskin_node_options;
#define SNOWSKIN_NODE_OPTIONS_INIT {sizeof(snowskin_node_options), NULL, NULL, NULL, NULL, NULL, 0, 0}

/* Contributes memory of this process to the store. Pages are allocated when they are first used. */
snowskin_code snowskin_node_start(const snowskin_node_options *options, snowskin_node **node,
                                  snowskin_error **error);

/* Withdraws the memory and frees the node. Objects without another replica are lost. NULL is ignored. */
void snowskin_node_stop(snowskin_node *node);

/* ------------------------------------------------------------------------------------------------------------
 * The Transfer Engine
 * --------------------------------------------------------------------------------------------------------- */

typedef struct snowskin_engine snowskin_engine;
typedef struct snowskin_peer snowskin_peer;
typedef struct snowskin_transfer snowskin_transfer;
typedef struct snowskin_notification snowskin_notification;

typedef struct snowskin_engine_options {
    size_t size;
    const char *host;           /* the host under which peers reach this process; NULL: 127.0.0.1 */
    const char *fabrics;        /* "auto", or names with commas, such as "shm,tcp"; NULL: auto */
    const char *cluster_secret; /* NULL: none */
    uint32_t port;              /* the control port; 0: any free one */
} snowskin_engine_options;
#define SNOWSKIN_ENGINE_OPTIONS_INIT {sizeof(snowskin_engine_options), NULL, NULL, NULL, 0}

/* Starts an engine. NULL options: all defaults. */
snowskin_code snowskin_engine_start(const snowskin_engine_options *options, snowskin_engine **engine,
                                    snowskin_error **error);

/* Stops and frees an engine. Its transfers and peers are freed before: for those that were not, it waits at most
 * 2 s. After it returned, nothing touches registered memory. NULL is ignored. */
void snowskin_engine_stop(snowskin_engine *engine);

/* host:port, under which peers open this engine's memory. Valid until the engine is stopped. NULL for NULL. */
const char *snowskin_engine_name(const snowskin_engine *engine);

/* What peers may do with registered memory: any sum of these. Local transfers may always use it. */
enum { SNOWSKIN_REMOTE_READ = 1, SNOWSKIN_REMOTE_WRITE = 2 };

/* Registers memory, which stays mapped until it is unregistered. */
snowskin_code snowskin_engine_register(snowskin_engine *engine, void *memory, size_t length, uint32_t remote,
                                       snowskin_error **error);
/* Ends the registration of the memory that begins there. After success nothing touches it any more.
 * SNOWSKIN_BUSY while a transfer uses it. */
snowskin_code snowskin_engine_unregister(snowskin_engine *engine, void *memory, snowskin_error **error);

/* Opens the memory of the engine called name. */
snowskin_code snowskin_engine_open(snowskin_engine *engine, const char *name, snowskin_peer **peer,
                                   snowskin_error **error);
/* Asks the peer again what it exports. SNOWSKIN_CLOSED: it has restarted; open it again. */
snowskin_code snowskin_peer_refresh(snowskin_peer *peer, snowskin_error **error);
void snowskin_peer_close(snowskin_peer *peer);

enum { SNOWSKIN_READ = 0, SNOWSKIN_WRITE = 1 };

/* One copy between registered local memory and memory of a peer. */
typedef struct snowskin_copy {
    uint32_t direction; /* SNOWSKIN_READ: remote to local; SNOWSKIN_WRITE: local to remote */
    const snowskin_peer *peer;
    void *local;
    uint64_t remote; /* an address in the peer's process */
    uint64_t length; /* bytes, at least 1 */
} snowskin_copy;

/* Begins copies, which end together. timeout_ms: they are cancelled when they take longer; 0: without limit. */
snowskin_code snowskin_engine_submit(snowskin_engine *engine, const snowskin_copy *copies, size_t count,
                                     uint32_t timeout_ms, snowskin_transfer **transfer, snowskin_error **error);

/* The state: SNOWSKIN_PENDING, SNOWSKIN_OK, or how it ended. Takes no lock and does not wait. */
snowskin_code snowskin_transfer_poll(const snowskin_transfer *transfer);

/* Waits until the transfer has ended, at most timeout_ms (UINT32_MAX: without limit), and returns its state:
 * SNOWSKIN_PENDING if it has not ended, which is not an error. */
snowskin_code snowskin_transfer_wait(snowskin_transfer *transfer, uint32_t timeout_ms, snowskin_error **error);

/* Begins to end a transfer: wait for its end. */
void snowskin_transfer_cancel(snowskin_transfer *transfer);

/* Frees a transfer. One that has not ended is cancelled, and waited for: afterwards nothing touches its local
 * memory. NULL is ignored. */
void snowskin_transfer_free(snowskin_transfer *transfer);

/* Sends a message to a peer. Returns when it is in the peer's queue. */
snowskin_code snowskin_peer_notify(snowskin_peer *peer, const char *name, const void *message, size_t length,
                                   snowskin_error **error);

/* Takes the oldest message that peers have sent; NULL if there is none. Its texts are valid until it is freed. */
snowskin_notification *snowskin_engine_take_notification(snowskin_engine *engine);
const char *snowskin_notification_name(const snowskin_notification *notification);
const void *snowskin_notification_message(const snowskin_notification *notification, size_t *length);
void snowskin_notification_free(snowskin_notification *notification);

#ifdef __cplusplus
}
#endif

#endif /* SNOWSKIN_H */
