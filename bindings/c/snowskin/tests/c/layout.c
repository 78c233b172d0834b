/* Sizes and offsets, as the library has them. Compiles as C99, C11 and C++17. */
#include <snowskin.h>

#define HOLDS(name, condition) typedef char name[(condition) ? 1 : -1]

HOLDS(store_options_size, sizeof(snowskin_store_options) == 56);
HOLDS(put_options_size, sizeof(snowskin_put_options) == 24);
HOLDS(put_item_size, sizeof(snowskin_put_item) == 40);
HOLDS(put_item_code, offsetof(snowskin_put_item, code) == 32);
HOLDS(put_item_stored, offsetof(snowskin_put_item, stored) == 36);
HOLDS(get_item_size, sizeof(snowskin_get_item) == 48);
HOLDS(get_item_length, offsetof(snowskin_get_item, length) == 32);
HOLDS(get_item_code, offsetof(snowskin_get_item, code) == 40);
HOLDS(bytes_size, sizeof(snowskin_bytes) == 16);
HOLDS(node_options_size, sizeof(snowskin_node_options) == 64);
HOLDS(node_options_memory, offsetof(snowskin_node_options, memory) == 48);
HOLDS(engine_options_size, sizeof(snowskin_engine_options) == 40);
HOLDS(engine_options_port, offsetof(snowskin_engine_options, port) == 32);
HOLDS(copy_size, sizeof(snowskin_copy) == 40);
HOLDS(copy_peer, offsetof(snowskin_copy, peer) == 8);
HOLDS(copy_remote, offsetof(snowskin_copy, remote) == 24);
HOLDS(code_size, sizeof(snowskin_code) == 4 && sizeof(bool) == 1);

int main(void) {
    snowskin_store_options store = SNOWSKIN_STORE_OPTIONS_INIT;
    snowskin_put_options put = SNOWSKIN_PUT_OPTIONS_INIT;
    snowskin_engine_options engine = SNOWSKIN_ENGINE_OPTIONS_INIT;
    snowskin_node_options node = SNOWSKIN_NODE_OPTIONS_INIT;
    return node.size == 64 && store.size == 56 && put.size == 24 && engine.size == 40 ? 0 : 1;
}
