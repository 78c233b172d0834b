/* The Transfer Engine of snowskin.h: two engines of one process. */
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
    snowskin_peer *peer = NULL;
    snowskin_transfer *transfer = NULL;
    snowskin_copy copy;
    memset(&copy, 0, sizeof copy);
    snowskin_engine_stop(NULL);
    snowskin_peer_close(NULL);
    snowskin_transfer_cancel(NULL);
    snowskin_transfer_free(NULL);
    snowskin_notification_free(NULL);
    CHECK(snowskin_engine_name(NULL) == NULL && snowskin_engine_take_notification(NULL) == NULL);
    CHECK(strcmp(snowskin_notification_name(NULL), "") == 0);
    CHECK(snowskin_notification_message(NULL, &length) != NULL && length == 0);
    CHECK(snowskin_transfer_poll(NULL) == SNOWSKIN_INVALID_ARGUMENT);
    FAILS(SNOWSKIN_INVALID_ARGUMENT, snowskin_engine_start(NULL, NULL, &error));
    FAILS(SNOWSKIN_INVALID_ARGUMENT, snowskin_engine_register(NULL, text, 8, 0, &error));
    FAILS(SNOWSKIN_INVALID_ARGUMENT, snowskin_engine_unregister(NULL, text, &error));
    FAILS(SNOWSKIN_INVALID_ARGUMENT, snowskin_engine_open(NULL, "127.0.0.1:1", &peer, &error));
    FAILS(SNOWSKIN_INVALID_ARGUMENT, snowskin_peer_refresh(NULL, &error));
    FAILS(SNOWSKIN_INVALID_ARGUMENT, snowskin_peer_notify(NULL, "n", "m", 1, &error));
    FAILS(SNOWSKIN_INVALID_ARGUMENT, snowskin_engine_submit(NULL, &copy, 1, 0, &transfer, &error));
    FAILS(SNOWSKIN_INVALID_ARGUMENT, snowskin_transfer_wait(NULL, 0, &error));
    CHECK(peer == NULL && transfer == NULL);
}

int main(void) {
    enum { LENGTH = 1 << 20 };
    static char from[LENGTH], to[LENGTH];
    snowskin_engine *here = NULL, *there = NULL;
    snowskin_peer *peer = NULL;
    snowskin_transfer *transfer = NULL;
    nulls();
    snowskin_engine_options options = SNOWSKIN_ENGINE_OPTIONS_INIT;
    options.port = 70000;
    FAILS(SNOWSKIN_INVALID_ARGUMENT, snowskin_engine_start(&options, &here, &error));
    options.port = 0;
    options.fabrics = "smoke";
    FAILS(SNOWSKIN_INVALID_ARGUMENT, snowskin_engine_start(&options, &here, &error));
    options.fabrics = "tcp";
    options.cluster_secret = "open sesame";
    CHECK(snowskin_engine_start(&options, &here, &error) == SNOWSKIN_OK);
    CHECK(snowskin_engine_start(&options, &there, &error) == SNOWSKIN_OK);
    CHECK(strchr(snowskin_engine_name(there), ':') != NULL);

    /* An engine with another secret is refused. */
    snowskin_engine *other = NULL;
    options.cluster_secret = "open barley";
    CHECK(snowskin_engine_start(&options, &other, &error) == SNOWSKIN_OK);
    FAILS(SNOWSKIN_DENIED, snowskin_engine_open(other, snowskin_engine_name(there), &peer, &error));
    snowskin_engine_stop(other);

    CHECK(snowskin_engine_register(here, from, LENGTH, 0, &error) == SNOWSKIN_OK);
    FAILS(SNOWSKIN_INVALID_ARGUMENT, snowskin_engine_register(here, from + 1, 1, 0, &error));
    FAILS(SNOWSKIN_INVALID_ARGUMENT, snowskin_engine_register(here, NULL, 1, 0, &error));
    FAILS(SNOWSKIN_INVALID_ARGUMENT, snowskin_engine_register(here, to, LENGTH, 4, &error));
    CHECK(snowskin_engine_register(there, to, LENGTH, SNOWSKIN_REMOTE_READ, &error) == SNOWSKIN_OK);
    FAILS(SNOWSKIN_UNREACHABLE, snowskin_engine_open(here, "127.0.0.1:1", &peer, &error));
    FAILS(SNOWSKIN_INVALID_ARGUMENT, snowskin_engine_open(here, "no port", &peer, &error));
    FAILS(SNOWSKIN_INVALID_ARGUMENT, snowskin_engine_open(here, NULL, &peer, &error));
    CHECK(snowskin_engine_open(here, snowskin_engine_name(there), &peer, &error) == SNOWSKIN_OK);

    /* The peer does not allow writes until it registers the memory for them. */
    snowskin_copy copy = {SNOWSKIN_WRITE, peer, from, (uint64_t)(uintptr_t)to, LENGTH};
    memset(from, 'w', LENGTH);
    CHECK(snowskin_engine_submit(here, &copy, 1, 5000, &transfer, &error) == SNOWSKIN_OK);
    FAILS(SNOWSKIN_INVALID_ARGUMENT, snowskin_transfer_wait(transfer, UINT32_MAX, &error));
    snowskin_transfer_free(transfer);
    CHECK(snowskin_engine_unregister(there, to, &error) == SNOWSKIN_OK);
    FAILS(SNOWSKIN_NOT_FOUND, snowskin_engine_unregister(there, to, &error));
    CHECK(snowskin_engine_register(there, to, LENGTH, SNOWSKIN_REMOTE_READ | SNOWSKIN_REMOTE_WRITE, &error) == SNOWSKIN_OK);
    CHECK(snowskin_peer_refresh(peer, &error) == SNOWSKIN_OK);
    CHECK(snowskin_engine_submit(here, &copy, 1, 5000, &transfer, &error) == SNOWSKIN_OK);
    snowskin_code state;
    while ((state = snowskin_transfer_poll(transfer)) == SNOWSKIN_PENDING) {
    }
    CHECK(state == SNOWSKIN_OK && to[0] == 'w' && to[LENGTH - 1] == 'w');
    CHECK(snowskin_transfer_wait(transfer, 0, &error) == SNOWSKIN_OK);
    snowskin_transfer_cancel(transfer);
    CHECK(snowskin_transfer_poll(transfer) == SNOWSKIN_OK);
    snowskin_transfer_free(transfer);

    snowskin_copy both[] = {{SNOWSKIN_READ, peer, from, copy.remote, 100}, {SNOWSKIN_READ, peer, from + 200, copy.remote, 100}};
    memset(to, 'r', LENGTH);
    CHECK(snowskin_engine_submit(here, both, 2, 0, &transfer, &error) == SNOWSKIN_OK);
    CHECK(snowskin_transfer_wait(transfer, UINT32_MAX, &error) == SNOWSKIN_OK);
    CHECK(from[99] == 'r' && from[100] == 'w' && from[200] == 'r');
    snowskin_transfer_free(transfer);
    both[1].direction = 7;
    FAILS(SNOWSKIN_INVALID_ARGUMENT, snowskin_engine_submit(here, both, 2, 0, &transfer, &error));
    both[1].direction = SNOWSKIN_READ;
    both[1].peer = NULL;
    FAILS(SNOWSKIN_INVALID_ARGUMENT, snowskin_engine_submit(here, both, 2, 0, &transfer, &error));
    FAILS(SNOWSKIN_INVALID_ARGUMENT, snowskin_engine_submit(here, NULL, 2, 0, &transfer, &error));
    FAILS(SNOWSKIN_INVALID_ARGUMENT, snowskin_engine_submit(here, both, 0, 0, &transfer, &error));

    CHECK(snowskin_engine_take_notification(there) == NULL);
    CHECK(snowskin_peer_notify(peer, "first", "a\0b", 3, &error) == SNOWSKIN_OK);
    CHECK(snowskin_peer_notify(peer, "second", NULL, 0, &error) == SNOWSKIN_OK);
    FAILS(SNOWSKIN_INVALID_ARGUMENT, snowskin_peer_notify(peer, NULL, "m", 1, &error));
    size_t length = 0;
    snowskin_notification *first = snowskin_engine_take_notification(there);
    CHECK(strcmp(snowskin_notification_name(first), "first") == 0);
    CHECK(memcmp(snowskin_notification_message(first, &length), "a\0b", 3) == 0 && length == 3);
    snowskin_notification_free(first);
    snowskin_notification *second = snowskin_engine_take_notification(there);
    CHECK(strcmp(snowskin_notification_name(second), "second") == 0);
    snowskin_notification_free(second);
    CHECK(snowskin_engine_take_notification(there) == NULL);

    snowskin_engine_stop(there);
    FAILS(SNOWSKIN_UNREACHABLE, snowskin_peer_refresh(peer, &error));
    snowskin_peer_close(peer);
    snowskin_engine_stop(here);
    puts("ok");
    return 0;
}
