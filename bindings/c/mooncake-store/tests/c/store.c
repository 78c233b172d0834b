/* Every function of store_c.h against a master: argv[1] is its address. */
#include <stdio.h>
#include <string.h>
#include <store_c.h>

#include "check.h"

static void null_store(void) {
    char text[8];
    void *buffer = text;
    const char *key = "k";
    size_t size = 1;
    int result = 7;
    int64_t bytes = 7;
    mooncake_store_destroy(NULL);
    CHECK(mooncake_store_setup(NULL, "h", "m", 0, 0, NULL, NULL, NULL) == -1);
    CHECK(mooncake_store_init_all(NULL, "tcp", "", 0) == -1 && mooncake_store_health_check(NULL) == -1);
    CHECK(mooncake_store_put(NULL, key, text, 1, NULL) == -1);
    CHECK(mooncake_store_put_from(NULL, key, text, 1, NULL) == -1);
    CHECK(mooncake_store_batch_put_from(NULL, &key, &buffer, &size, 1, NULL, &result) == -1);
    CHECK(mooncake_store_get_into(NULL, key, text, 1) == -1);
    CHECK(mooncake_store_batch_get_into(NULL, &key, &buffer, &size, 1, &bytes) == -1);
    CHECK(mooncake_store_is_exist(NULL, key) == -1);
    CHECK(mooncake_store_batch_is_exist(NULL, &key, 1, &result) == -1);
    CHECK(mooncake_store_get_size(NULL, key) == -1 && mooncake_store_get_hostname(NULL, text, 8) == -1);
    CHECK(mooncake_store_remove(NULL, key, 0) == -1 && mooncake_store_remove_by_regex(NULL, key, 0) == -1);
    CHECK(mooncake_store_remove_all(NULL, 0) == -1);
    CHECK(mooncake_store_register_buffer(NULL, text, 8) == -1 && mooncake_store_unregister_buffer(NULL, text) == -1);
    CHECK(result == 7 && bytes == 7);
}

static void null_arguments(mooncake_store_t store) {
    char text[8] = "abc", small[4];
    void *buffer = text, *nothing = NULL;
    const char *key = "k", *no_key = NULL;
    size_t size = 3;
    int result = 7;
    int64_t bytes = 7;
    CHECK(mooncake_store_put(store, NULL, text, 3, NULL) == -1 && mooncake_store_put(store, key, NULL, 3, NULL) == -1);
    CHECK(mooncake_store_put_from(store, NULL, text, 3, NULL) == -1);
    CHECK(mooncake_store_put_from(store, key, NULL, 3, NULL) == -1);
    CHECK(mooncake_store_put_from(store, key, NULL, 0, NULL) == 0);
    CHECK(mooncake_store_get_into(store, NULL, text, 3) == -1 && mooncake_store_get_into(store, key, NULL, 3) == -1);
    CHECK(mooncake_store_batch_put_from(store, NULL, &buffer, &size, 1, NULL, &result) == -1);
    CHECK(mooncake_store_batch_put_from(store, &no_key, &buffer, &size, 1, NULL, &result) == -1);
    CHECK(mooncake_store_batch_put_from(store, &key, NULL, &size, 1, NULL, &result) == -1);
    CHECK(mooncake_store_batch_put_from(store, &key, &nothing, &size, 1, NULL, &result) == -1);
    CHECK(mooncake_store_batch_put_from(store, &key, &buffer, NULL, 1, NULL, &result) == -1);
    CHECK(mooncake_store_batch_put_from(store, &key, &buffer, &size, 1, NULL, NULL) == -1);
    CHECK(mooncake_store_batch_put_from(store, &key, &buffer, &size, SIZE_MAX, NULL, &result) == -1);
    CHECK(mooncake_store_batch_put_from(store, &key, &buffer, &size, 0, NULL, &result) == 0);
    CHECK(mooncake_store_batch_get_into(store, &key, &buffer, &size, 1, NULL) == -1);
    CHECK(mooncake_store_batch_get_into(store, &no_key, &buffer, &size, 1, &bytes) == -1);
    CHECK(mooncake_store_batch_is_exist(store, NULL, 1, &result) == -1);
    CHECK(mooncake_store_batch_is_exist(store, &no_key, 1, &result) == -1);
    CHECK(mooncake_store_batch_is_exist(store, &key, 1, NULL) == -1);
    CHECK(mooncake_store_is_exist(store, NULL) == -1 && mooncake_store_get_size(store, NULL) == -1);
    CHECK(mooncake_store_get_hostname(store, NULL, 8) == -1 && mooncake_store_get_hostname(store, text, 0) == -1);
    CHECK(mooncake_store_get_hostname(store, small, sizeof small) == -1);
    CHECK(mooncake_store_remove(store, NULL, 1) == -1 && mooncake_store_remove_by_regex(store, NULL, 1) == -1);
    CHECK(mooncake_store_remove_by_regex(store, "(", 1) == -600);
    CHECK(mooncake_store_register_buffer(store, NULL, 8) == -1 && mooncake_store_register_buffer(store, text, 0) == -1);
    CHECK(mooncake_store_unregister_buffer(store, NULL) == -600);
    CHECK(result == 7 && bytes == 7);
}

static void objects(mooncake_store_t store) {
    enum { COUNT = 32, LENGTH = 4096 };
    static char source[COUNT * LENGTH], sink[COUNT * LENGTH];
    char names[COUNT][16], host[256];
    const char *keys[COUNT];
    void *from[COUNT], *into[COUNT];
    size_t sizes[COUNT];
    int codes[COUNT];
    int64_t bytes[COUNT];
    CHECK(mooncake_store_get_hostname(store, host, sizeof host) == 0 && strchr(host, ':') != NULL);
    CHECK(mooncake_store_put(store, "a", "hello", 5, NULL) == 0 && mooncake_store_put(store, "a", "other", 5, NULL) == 0);
    CHECK(mooncake_store_put(store, "a", "", 0, NULL) == -600 && mooncake_store_put(store, "", "x", 1, NULL) == -600);
    CHECK(mooncake_store_is_exist(store, "a") == 1 && mooncake_store_is_exist(store, "zz") == 0);
    CHECK(mooncake_store_get_size(store, "a") == 5 && mooncake_store_get_size(store, "zz") == -704);
    CHECK(mooncake_store_get_into(store, "a", sink, sizeof sink) == 5 && memcmp(sink, "hello", 5) == 0);
    CHECK(mooncake_store_get_into(store, "a", sink, 4) == -600 && mooncake_store_get_into(store, "zz", sink, 4) == -704);
    CHECK(mooncake_store_remove(store, "a", 0) == -706 && mooncake_store_remove(store, "a", 1) == 0);
    CHECK(mooncake_store_remove(store, "a", 1) == -704);

    const char *segments[] = {host, NULL, "nowhere:1"};
    mooncake_replicate_config_t config = {1, 1, 0, segments, 3};
    CHECK(mooncake_store_register_buffer(store, source, sizeof source) == 0);
    CHECK(mooncake_store_register_buffer(store, source, sizeof source) == -600);
    CHECK(mooncake_store_register_buffer(store, sink, sizeof sink) == 0);
    for (int i = 0; i < COUNT; i++) {
        snprintf(names[i], sizeof names[i], "block/%d", i);
        memset(source + i * LENGTH, 'a' + i % 26, LENGTH);
        keys[i] = names[i];
        from[i] = source + i * LENGTH;
        into[i] = sink + i * LENGTH;
        sizes[i] = LENGTH;
    }
    CHECK(mooncake_store_batch_put_from(store, keys, from, sizes, COUNT, &config, codes) == 0);
    for (int i = 0; i < COUNT; i++) CHECK(codes[i] == 0);
    CHECK(mooncake_store_batch_is_exist(store, keys, COUNT, codes) == 0);
    for (int i = 0; i < COUNT; i++) CHECK(codes[i] == 1);
    keys[7] = "zz";
    CHECK(mooncake_store_batch_get_into(store, keys, into, sizes, COUNT, bytes) == 0);
    for (int i = 0; i < COUNT; i++) CHECK(bytes[i] == (i == 7 ? -704 : LENGTH));
    CHECK(memcmp(source, sink, 7 * LENGTH) == 0 && memcmp(source + 8 * LENGTH, sink + 8 * LENGTH, 24 * LENGTH) == 0);
    config.replica_num = 0;
    CHECK(mooncake_store_put_from(store, "r0", source, 10, &config) == -600);
    CHECK(mooncake_store_remove_by_regex(store, "^block/1", 1) == 11);
    CHECK(mooncake_store_remove_all(store, 1) == COUNT - 11 && mooncake_store_remove_all(store, 1) == 0);
    CHECK(mooncake_store_unregister_buffer(store, source) == 0 && mooncake_store_unregister_buffer(store, source) == -600);
    CHECK(mooncake_store_unregister_buffer(store, sink) == 0);
}

int main(int count, char **arguments) {
    CHECK(count == 2);
    null_store();
    mooncake_store_t store = mooncake_store_create();
    CHECK(store != NULL && mooncake_store_health_check(store) == 1);
    CHECK(mooncake_store_put(store, "k", "v", 1, NULL) == -600 && mooncake_store_get_size(store, "k") == -600);
    CHECK(mooncake_store_setup(store, NULL, NULL, 0, 0, NULL, NULL, arguments[1]) == -600);
    CHECK(mooncake_store_setup(store, "127.0.0.1", NULL, 0, 0, NULL, NULL, "127.0.0.1:1") == -1);
    CHECK(mooncake_store_setup(store, "127.0.0.1", NULL, 32 << 20, 8 << 20, NULL, NULL, arguments[1]) == 0);
    CHECK(mooncake_store_health_check(store) == 0);
    null_arguments(store);
    objects(store);
    mooncake_store_destroy(store);
    puts("ok");
    return 0;
}
