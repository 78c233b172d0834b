/*
 * store_c.h - Mooncake's C interface to the store, served by Snowskin.
 *
 * Source and binary compatible with the header of this name in Mooncake (kvcache-ai/Mooncake): the same names,
 * layouts and numbers. The master is Snowskin's. Link with -lmooncake_store, use pkg-config mooncake_store, or
 * load libmooncake_store.so.
 *
 * Rules that hold for every function:
 *   - No argument of type "char *" is used after the function has returned.
 *   - NULL, where an object is needed, is an error (-1), never a crash.
 *   - Functions return 0 or a count for success, and a negative number for an error: -1 (NULL, or the master
 *     cannot be reached at setup), -200 no room, -600 invalid argument or not set up, -704 no such object, -706
 *     a reader has a lease, -800 the bytes could not be moved, -900 the master does not answer; all numbers:
 *     docs/c.md.
 *   - Every function except mooncake_store_destroy may be called by any number of threads at the same time.
 *   - Why a call failed is written to standard error; MC_LOG_LEVEL (ERROR, WARNING, INFO, TRACE) chooses how
 *     much is.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef MOONCAKE_STORE_C_H
#define MOONCAKE_STORE_C_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef void *mooncake_store_t;

/* How an object is stored. NULL in place of one: one replica, no pin. */
struct mooncake_replicate_config {
    size_t replica_num;              /* at least 1; at least one replica is made, and at most 8 */
    int with_soft_pin;               /* not 0: evicted last */
    int with_hard_pin;               /* not 0: never evicted */
    const char **preferred_segments; /* names of segments to try first; the first eight that exist count */
    size_t preferred_segments_count;
};
typedef struct mooncake_replicate_config mooncake_replicate_config_t;

/* ------------------------------------------------------------------------------------------------------------
 * Life
 * --------------------------------------------------------------------------------------------------------- */

/* A store that is not set up. */
mooncake_store_t mooncake_store_create(void);

/* Withdraws the contributed memory, disconnects, and frees the store. NULL is ignored. No other call may be
 * under way, and the handle is invalid from then on. */
void mooncake_store_destroy(mooncake_store_t store);

/* Connects to the master, and contributes global_segment_size bytes of memory (0: none). local_buffer_size is
 * the longest object that mooncake_store_put takes (0: no limit). NULL stands for "P2PHANDSHAKE", "tcp", "" and
 * "127.0.0.1:50051". */
int mooncake_store_setup(mooncake_store_t store, const char *local_hostname, const char *metadata_server,
                         uint64_t global_segment_size, uint64_t local_buffer_size, const char *protocol,
                         const char *device_name, const char *master_server_addr);

/* As mooncake_store_setup, for this host alone, with the master at 127.0.0.1:50051. */
int mooncake_store_init_all(mooncake_store_t store, const char *protocol, const char *device_name,
                            uint64_t mount_segment_size);

/* 0: the master answers; 1: not set up; 2: the master does not answer. */
int mooncake_store_health_check(mooncake_store_t store);

/* ------------------------------------------------------------------------------------------------------------
 * Puts: 0 also for a key that exists, whose object then stays
 * --------------------------------------------------------------------------------------------------------- */

int mooncake_store_put(mooncake_store_t store, const char *key, const void *value, size_t size,
                       const mooncake_replicate_config_t *config);

/* Moves the bytes without a copy where the buffer is registered. Without any byte nothing is stored. */
int mooncake_store_put_from(mooncake_store_t store, const char *key, void *buffer, size_t size,
                            const mooncake_replicate_config_t *config);

/* Stores count objects, and writes one number per object to results_out. */
int mooncake_store_batch_put_from(mooncake_store_t store, const char **keys, void **buffers,
                                  const size_t *sizes, size_t count, const mooncake_replicate_config_t *config,
                                  int *results_out);

/* ------------------------------------------------------------------------------------------------------------
 * Gets: the number of bytes; after an error the buffer may have been written
 * --------------------------------------------------------------------------------------------------------- */

int64_t mooncake_store_get_into(mooncake_store_t store, const char *key, void *buffer, size_t size);

/* Reads count objects, and writes the number of bytes, or a negative number, per object to results_out. */
int mooncake_store_batch_get_into(mooncake_store_t store, const char **keys, void **buffers,
                                  const size_t *sizes, size_t count, int64_t *results_out);

/* ------------------------------------------------------------------------------------------------------------
 * Questions
 * --------------------------------------------------------------------------------------------------------- */

/* 1 if the object is there, 0 if not. An object that is there is leased. */
int mooncake_store_is_exist(mooncake_store_t store, const char *key);

/* Writes 1, 0 or a negative number per key to results_out. */
int mooncake_store_batch_is_exist(mooncake_store_t store, const char **keys, size_t count, int *results_out);

/* The length of the object, bytes. */
int64_t mooncake_store_get_size(mooncake_store_t store, const char *key);

/* Writes the name of this process in the store, host:port, and a NUL; -1 if they do not fit. */
int mooncake_store_get_hostname(mooncake_store_t store, char *buf_out, size_t buf_len);

/* ------------------------------------------------------------------------------------------------------------
 * Removal: without force, objects that readers have leased stay
 * --------------------------------------------------------------------------------------------------------- */

int mooncake_store_remove(mooncake_store_t store, const char *key, int force);

/* The number of objects that were removed: those whose keys match the expression, or all. */
int64_t mooncake_store_remove_by_regex(mooncake_store_t store, const char *pattern, int force);
int64_t mooncake_store_remove_all(mooncake_store_t store, int force);

/* ------------------------------------------------------------------------------------------------------------
 * Buffers
 * --------------------------------------------------------------------------------------------------------- */

/* Registers memory, which stays mapped until it is unregistered, so that its bytes are moved without a copy. */
int mooncake_store_register_buffer(mooncake_store_t store, void *buffer, size_t size);
int mooncake_store_unregister_buffer(mooncake_store_t store, void *buffer);

#ifdef __cplusplus
}
#endif

#endif /* MOONCAKE_STORE_C_H */
