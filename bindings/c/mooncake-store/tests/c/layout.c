/* Sizes and offsets, as callers compiled against Mooncake's header have them. Compiles as C99, C11 and C++17. */
#include <store_c.h>

#define HOLDS(name, condition) typedef char name[(condition) ? 1 : -1]

HOLDS(config_size, sizeof(mooncake_replicate_config_t) == 32);
HOLDS(config_replicas, offsetof(struct mooncake_replicate_config, replica_num) == 0);
HOLDS(config_soft, offsetof(struct mooncake_replicate_config, with_soft_pin) == 8);
HOLDS(config_hard, offsetof(struct mooncake_replicate_config, with_hard_pin) == 12);
HOLDS(config_segments, offsetof(struct mooncake_replicate_config, preferred_segments) == 16);
HOLDS(config_count, offsetof(struct mooncake_replicate_config, preferred_segments_count) == 24);
HOLDS(handle, sizeof(mooncake_store_t) == sizeof(void *));

int main(void) { return 0; }
