/* The store of snowskin.h against a master: argv[1] is its address. */
#include <snowskin.h>
#include <string.h>

#include "check.h"

static snowskin_error *error;

/* The call failed with this code, and says why. */
#define FAILS(expected, call)                                                                       \
    do {                                                                                            \
        error = NULL;                                                                               \
        CHECK((call) == (expected));                                                                \
        CHECK(snowskin_error_code(error) == (expected) && strlen(snowskin_error_message(error)) > 10); \
        snowskin_error_free(error);                                                                 \
    } while (0)

static void nulls(void) {
    char text[8];
    size_t length = 7;
    void *value = NULL;
    bool stored = true;
    snowskin_store_close(NULL);
    snowskin_error_free(NULL);
    snowskin_free(NULL);
    CHECK(snowskin_error_code(NULL) == SNOWSKIN_OK && strcmp(snowskin_error_message(NULL), "") == 0);
    FAILS(SNOWSKIN_INVALID_ARGUMENT, snowskin_store_connect(NULL, NULL, &error));
    FAILS(SNOWSKIN_INVALID_ARGUMENT, snowskin_store_put(NULL, "k", 1, "v", 1, NULL, &stored, &error));
    FAILS(SNOWSKIN_INVALID_ARGUMENT, snowskin_store_get(NULL, "k", 1, text, 8, &length, &error));
    FAILS(SNOWSKIN_INVALID_ARGUMENT, snowskin_store_get_new(NULL, "k", 1, &value, &length, &error));
    FAILS(SNOWSKIN_INVALID_ARGUMENT, snowskin_store_put_many(NULL, NULL, 1, NULL, &error));
    FAILS(SNOWSKIN_INVALID_ARGUMENT, snowskin_store_get_many(NULL, NULL, 1, &error));
    FAILS(SNOWSKIN_INVALID_ARGUMENT, snowskin_store_exists(NULL, NULL, 1, &stored, &error));
    FAILS(SNOWSKIN_INVALID_ARGUMENT, snowskin_store_remove(NULL, "k", 1, false, &error));
    FAILS(SNOWSKIN_INVALID_ARGUMENT, snowskin_store_register(NULL, text, 8, &error));
    FAILS(SNOWSKIN_INVALID_ARGUMENT, snowskin_store_unregister(NULL, text, &error));
    CHECK(snowskin_store_put(NULL, "k", 1, "v", 1, NULL, NULL, NULL) == SNOWSKIN_INVALID_ARGUMENT);
    CHECK(length == 7 && value == NULL && stored);
}

static void one(snowskin_store *store) {
    char buffer[16];
    size_t length = 0;
    void *value = NULL;
    bool stored = false;
    CHECK(snowskin_store_put(store, "a\0b", 3, "hello", 5, NULL, &stored, &error) == SNOWSKIN_OK && stored);
    CHECK(snowskin_store_put(store, "a\0b", 3, "other", 5, NULL, &stored, NULL) == SNOWSKIN_OK && !stored);
    CHECK(snowskin_store_get(store, "a\0b", 3, buffer, sizeof buffer, &length, &error) == SNOWSKIN_OK);
    CHECK(length == 5 && memcmp(buffer, "hello", 5) == 0);
    FAILS(SNOWSKIN_BUFFER_TOO_SHORT, snowskin_store_get(store, "a\0b", 3, buffer, 4, &length, &error));
    FAILS(SNOWSKIN_NOT_FOUND, snowskin_store_get(store, "a", 1, buffer, 16, &length, &error));
    FAILS(SNOWSKIN_INVALID_ARGUMENT, snowskin_store_get(store, "a", 1, NULL, 16, &length, &error));
    FAILS(SNOWSKIN_INVALID_ARGUMENT, snowskin_store_get(store, "a", 1, buffer, SIZE_MAX, &length, &error));
    FAILS(SNOWSKIN_INVALID_ARGUMENT, snowskin_store_get(store, "a", 1, buffer, 16, NULL, &error));
    FAILS(SNOWSKIN_INVALID_ARGUMENT, snowskin_store_put(store, NULL, 0, "v", 1, NULL, NULL, &error));
    FAILS(SNOWSKIN_INVALID_ARGUMENT, snowskin_store_put(store, "e", 1, NULL, 0, NULL, NULL, &error));
    CHECK(snowskin_store_get_new(store, "a\0b", 3, &value, &length, &error) == SNOWSKIN_OK);
    CHECK(length == 5 && memcmp(value, "hello", 5) == 0);
    snowskin_free(value);
    FAILS(SNOWSKIN_NOT_FOUND, snowskin_store_get_new(store, "zz", 2, &value, &length, &error));

    snowskin_put_options options = SNOWSKIN_PUT_OPTIONS_INIT;
    options.replace = 1;
    options.pin = SNOWSKIN_PIN_SOFT;
    CHECK(snowskin_store_put(store, "a\0b", 3, "again", 5, &options, &stored, &error) == SNOWSKIN_OK && stored);
    options.pin = 9;
    FAILS(SNOWSKIN_INVALID_ARGUMENT, snowskin_store_put(store, "x", 1, "v", 1, &options, NULL, &error));
    options.pin = 0;
    options.replicas = 9;
    FAILS(SNOWSKIN_INVALID_ARGUMENT, snowskin_store_put(store, "x", 1, "v", 1, &options, NULL, &error));
    options.size = 3;
    FAILS(SNOWSKIN_INVALID_ARGUMENT, snowskin_store_put(store, "x", 1, "v", 1, &options, NULL, &error));
    CHECK(snowskin_store_remove(store, "a\0b", 3, false, &error) == SNOWSKIN_OK);
    FAILS(SNOWSKIN_NOT_FOUND, snowskin_store_remove(store, "a\0b", 3, true, &error));
}

static void many(snowskin_store *store) {
    enum { COUNT = 16, LENGTH = 40000 };
    static char source[COUNT * LENGTH], sink[COUNT * LENGTH];
    char keys[COUNT][16];
    snowskin_put_item puts[COUNT];
    snowskin_get_item gets[COUNT];
    snowskin_bytes names[COUNT];
    bool found[COUNT];
    CHECK(snowskin_store_register(store, source, sizeof source, &error) == SNOWSKIN_OK);
    FAILS(SNOWSKIN_INVALID_ARGUMENT, snowskin_store_register(store, source + 5, 1, &error));
    FAILS(SNOWSKIN_INVALID_ARGUMENT, snowskin_store_register(store, NULL, 1, &error));
    CHECK(snowskin_store_register(store, sink, sizeof sink / 2, &error) == SNOWSKIN_OK);
    memset(puts, 0, sizeof puts);
    memset(gets, 0, sizeof gets);
    for (int i = 0; i < COUNT; i++) {
        memset(source + i * LENGTH, 'a' + i, LENGTH);
        puts[i].key = gets[i].key = names[i].bytes = keys[i];
        puts[i].key_length = gets[i].key_length = names[i].length = (size_t)sprintf(keys[i], "block/%d", i);
        puts[i].value = source + i * LENGTH;
        puts[i].value_length = LENGTH;
        gets[i].buffer = sink + i * LENGTH;
        gets[i].room = LENGTH;
    }
    puts[3].value_length = 0;
    CHECK(snowskin_store_put_many(store, puts, COUNT, NULL, &error) == SNOWSKIN_OK);
    for (int i = 0; i < COUNT; i++)
        CHECK(puts[i].code == (i == 3 ? SNOWSKIN_INVALID_ARGUMENT : SNOWSKIN_OK) && puts[i].stored == (i != 3));
    CHECK(snowskin_store_exists(store, names, COUNT, found, &error) == SNOWSKIN_OK);
    for (int i = 0; i < COUNT; i++) CHECK(found[i] == (i != 3));
    gets[5].room = 10;
    CHECK(snowskin_store_get_many(store, gets, COUNT, &error) == SNOWSKIN_OK);
    for (int i = 0; i < COUNT; i++) {
        snowskin_code expected = i == 3 ? SNOWSKIN_NOT_FOUND : i == 5 ? SNOWSKIN_BUFFER_TOO_SHORT : SNOWSKIN_OK;
        CHECK(gets[i].code == expected && gets[i].length == (expected == SNOWSKIN_OK ? LENGTH : 0));
        if (expected == SNOWSKIN_OK) CHECK(memcmp(source + i * LENGTH, sink + i * LENGTH, LENGTH) == 0);
    }
    CHECK(snowskin_store_put_many(store, NULL, 0, NULL, &error) == SNOWSKIN_OK);
    FAILS(SNOWSKIN_INVALID_ARGUMENT, snowskin_store_put_many(store, NULL, 1, NULL, &error));
    FAILS(SNOWSKIN_INVALID_ARGUMENT, snowskin_store_get_many(store, gets, SIZE_MAX, &error));
    CHECK(snowskin_store_unregister(store, source, &error) == SNOWSKIN_OK);
    FAILS(SNOWSKIN_NOT_FOUND, snowskin_store_unregister(store, source, &error));
}

int main(int count, char **arguments) {
    CHECK(count == 2);
    CHECK(snowskin_abi() == SNOWSKIN_ABI && strlen(snowskin_version()) > 0);
    CHECK(strcmp(snowskin_code_name(SNOWSKIN_NO_SPACE), "NO_SPACE") == 0);
    nulls();
    snowskin_store *store = NULL;
    snowskin_store_options options = SNOWSKIN_STORE_OPTIONS_INIT;
    options.master = "127.0.0.1:1";
    FAILS(SNOWSKIN_UNREACHABLE, snowskin_store_connect(&options, &store, &error));
    options.master = "no port";
    FAILS(SNOWSKIN_INVALID_ARGUMENT, snowskin_store_connect(&options, &store, &error));
    options.master = arguments[1];
    options.fabrics = "carrier pigeons";
    FAILS(SNOWSKIN_INVALID_ARGUMENT, snowskin_store_connect(&options, &store, &error));
    options.fabrics = "tcp,shm";
    options.tenant = "nobody";
    FAILS(SNOWSKIN_DENIED, snowskin_store_connect(&options, &store, &error));
    CHECK(store == NULL);
    options.tenant = NULL;
    error = NULL;
    CHECK(snowskin_store_connect(&options, &store, &error) == SNOWSKIN_OK && store != NULL && error == NULL);
    FAILS(SNOWSKIN_NO_SPACE, snowskin_store_put(store, "k", 1, "v", 1, NULL, NULL, &error));

    snowskin_node *node = NULL;
    snowskin_node_options memory = SNOWSKIN_NODE_OPTIONS_INIT;
    memory.master = arguments[1];
    FAILS(SNOWSKIN_INVALID_ARGUMENT, snowskin_node_start(&memory, &node, &error));
    memory.memory = 32 << 20;
    FAILS(SNOWSKIN_INVALID_ARGUMENT, snowskin_node_start(&memory, NULL, &error));
    memory.master = "127.0.0.1:1";
    FAILS(SNOWSKIN_UNREACHABLE, snowskin_node_start(&memory, &node, &error));
    memory.master = arguments[1];
    CHECK(snowskin_node_start(&memory, &node, &error) == SNOWSKIN_OK && node != NULL);
    one(store);
    many(store);
    snowskin_node_stop(node);
    snowskin_node_stop(NULL);
    FAILS(SNOWSKIN_NO_SPACE, snowskin_store_put(store, "k", 1, "v", 1, NULL, NULL, &error));
    snowskin_store_close(store);
    puts("ok");
    return 0;
}
