/*
 * What must be an error and not a crash: NULL for every pointer, ids that do not exist, numbers that are out
 * of range.
 */
#include <string.h>
#include <transfer_engine_c.h>

#include "check.h"

static void null_engine(void) {
    char text[8], name[] = "n";
    int count = 7;
    size_t loads = 1;
    nic_load_stat_t load;
    transfer_status_t status = {77, 77};
    transfer_request_t request = {OPCODE_READ, text, 0, 1, 1};
    notify_msg_t message = {name, name};
    CHECK(createTransferEngine(NULL, name, NULL, 0, 0) == NULL);
    CHECK(createTransferEngine("P2PHANDSHAKE", NULL, NULL, 0, 0) == NULL);
    CHECK(createTransferEngine("ftp://host", "127.0.0.1", NULL, 0, 0) == NULL);
    destroyTransferEngine(NULL);
    enableGracefulShutdown(NULL);
    CHECK(discoverTopology(NULL) == -1 && getLocalIpAndPort(NULL, text, sizeof text) == -1);
    CHECK(installTransport(NULL, "tcp", NULL) == NULL && uninstallTransport(NULL, "tcp") == -1);
    CHECK(openSegment(NULL, name) < 0 && openSegmentNoCache(NULL, name) < 0 && closeSegment(NULL, 0) == -1);
    CHECK(warmupEfaSegment(NULL, name) == -1 && removeLocalSegment(NULL, name) == -1);
    CHECK(syncSegmentCache(NULL) == -1);
    CHECK(registerLocalMemory(NULL, text, 1, "*", 1) == -1 && unregisterLocalMemory(NULL, text) == -1);
    CHECK(registerLocalMemoryBatch(NULL, NULL, 0, "*") == -1 && unregisterLocalMemoryBatch(NULL, NULL, 0) == -1);
    CHECK(allocateBatchID(NULL, 1) == INVALID_BATCH && freeBatchID(NULL, 1) == 1);
    CHECK(submitTransfer(NULL, 1, &request, 1) == 1 && submitTransferWithNotify(NULL, 1, &request, 1, message) == 1);
    CHECK(getTransferStatus(NULL, 1, 0, &status) == 1 && status.status == 77);
    CHECK(getNotifsFromEngine(NULL, &count) == NULL && count == 0);
    CHECK(genNotifyInEngine(NULL, 0, message) == -1);
    CHECK(getNicLoadStats(NULL, &load, &loads) == -1 && showLinks(NULL, text, sizeof text, 0) == -1);
    CHECK(freeNotifsMsgBuf(NULL, 0) == 0 && freeNotifsMsgBuf(NULL, 5) == 0 && freeNotifsMsgBuf(NULL, -1) == 0);
}

static void null_arguments(transfer_engine_t engine) {
    char text[256], small[4], name[] = "n";
    size_t loads = 0;
    nic_load_stat_t load[32];
    notify_msg_t nothing = {NULL, NULL}, half = {name, NULL};
    void *matrix[] = {NULL};
    CHECK(getLocalIpAndPort(engine, NULL, 64) == -1 && getLocalIpAndPort(engine, text, 0) == -1);
    CHECK(getLocalIpAndPort(engine, small, sizeof small) == -1 && small[0] == 0);
    CHECK(getLocalIpAndPort(engine, text, sizeof text) == 0 && strchr(text, ':') != NULL);
    CHECK(installTransport(engine, NULL, NULL) == NULL && installTransport(engine, "smoke", NULL) == NULL);
    CHECK(installTransport(engine, "tcp", NULL) != NULL && installTransport(engine, "rdma", matrix) != NULL);
    char bad[] = "{", good[] = "{\"cpu:0\": [[\"mlx5_0\"], []]}";
    matrix[0] = bad;
    CHECK(installTransport(engine, "rdma", matrix) == NULL);
    matrix[0] = good;
    CHECK(installTransport(engine, "rdma", matrix) != NULL);
    CHECK(uninstallTransport(engine, NULL) == -1 && uninstallTransport(engine, "tcp") == 0);
    CHECK(discoverTopology(engine) == 0 && syncSegmentCache(engine) == 0);
    CHECK(openSegment(engine, NULL) < 0 && openSegment(engine, "") < 0 && openSegment(engine, "///") < 0);
    CHECK(openSegment(engine, "\xff\xfe") < 0 && openSegmentNoCache(engine, NULL) < 0);
    CHECK(closeSegment(engine, -1) == -1 && closeSegment(engine, 99) == -1 && closeSegment(engine, 0) == 0);
    CHECK(removeLocalSegment(engine, NULL) == -1 && removeLocalSegment(engine, name) == 0);
    CHECK(warmupEfaSegment(engine, NULL) == -1 && warmupEfaSegment(engine, name) == 0);
    CHECK(registerLocalMemoryBatch(engine, NULL, 3, "*") == -1);
    CHECK(registerLocalMemoryBatch(engine, NULL, 0, "*") == 0 && unregisterLocalMemoryBatch(engine, NULL, 0) == 0);
    CHECK(unregisterLocalMemoryBatch(engine, NULL, 3) == -1);
    CHECK(getNotifsFromEngine(engine, NULL) == NULL);
    CHECK(genNotifyInEngine(engine, 0, nothing) == -1 && genNotifyInEngine(engine, 0, half) == -1);
    CHECK(genNotifyInEngine(engine, UINT64_MAX, half) == -1 && genNotifyInEngine(engine, 99, half) == -1);
    CHECK(getNicLoadStats(engine, NULL, &loads) == -1 && getNicLoadStats(engine, load, NULL) == -1);
    CHECK(getNicLoadStats(engine, load, &loads) == 0 && loads >= 1 && loads <= 32);
    CHECK(getNicLoadStats(engine, load, &loads) == 0 && strlen(load[0].device_name) > 0);
    CHECK(showLinks(engine, NULL, 9, 0) == -1 && showLinks(engine, small, sizeof small, 1) == -1);
    char links[4096];
    CHECK(showLinks(engine, links, sizeof links, 1) == 0 && links[0] == '{');
    CHECK(showLinks(engine, links, sizeof links, 0) == 0 && strstr(links, "rail") != NULL);
}

static void memory(transfer_engine_t engine) {
    static char bytes[8192];
    buffer_entry_t two[] = {{bytes, 4096}, {bytes + 4096, 4096}}, overlap[] = {{bytes, 4096}, {bytes, 1}};
    void *addresses[] = {bytes, bytes + 4096, bytes + 1};
    CHECK(registerLocalMemory(engine, bytes, 4096, NULL, 1) == 0);
    CHECK(registerLocalMemory(engine, bytes, 4096, "*", 1) == -7);
    CHECK(registerLocalMemory(engine, bytes + 4095, 2, "*", 1) == -7);
    CHECK(registerLocalMemory(engine, bytes + 4096, 0, "*", 1) == -1);
    CHECK(registerLocalMemory(engine, NULL, 4096, "*", 1) == -1);
    CHECK(registerLocalMemory(engine, bytes, SIZE_MAX, "*", 1) == -1);
    CHECK(registerLocalMemory(engine, (void *)(uintptr_t)0x600000000000, 4096, "*", 1) == -1);
    CHECK(unregisterLocalMemory(engine, bytes + 1) == -3 && unregisterLocalMemory(engine, NULL) == -3);
    CHECK(unregisterLocalMemory(engine, bytes) == 0 && unregisterLocalMemory(engine, bytes) == -3);
    CHECK(registerLocalMemoryBatch(engine, overlap, 2, "*") == -7);
    CHECK(registerLocalMemoryBatch(engine, two, 2, "*") == 0);
    CHECK(unregisterLocalMemoryBatch(engine, addresses, 3) == -3);
    CHECK(unregisterLocalMemoryBatch(engine, addresses, 2) == -3);
}

static void batches(transfer_engine_t engine) {
    static char bytes[64];
    transfer_status_t status = {77, 77};
    transfer_request_t request = {OPCODE_WRITE, bytes, LOCAL_SEGMENT, (uint64_t)(uintptr_t)(bytes + 32), 32};
    CHECK(registerLocalMemory(engine, bytes, sizeof bytes, "*", 1) == 0);
    batch_id_t batch = allocateBatchID(engine, 2);
    CHECK(batch != INVALID_BATCH && batch != 0);
    CHECK(allocateBatchID(engine, SIZE_MAX) == INVALID_BATCH);
    CHECK(submitTransfer(engine, batch, NULL, 1) == 1 && submitTransfer(engine, batch, NULL, 0) == 0);
    request.opcode = 7;
    CHECK(submitTransfer(engine, batch, &request, 1) == 1);
    request.opcode = OPCODE_WRITE;
    request.target_id = -1;
    CHECK(submitTransfer(engine, batch, &request, 1) == 1);
    request.target_id = 99;
    CHECK(submitTransfer(engine, batch, &request, 1) == 1);
    request.target_id = LOCAL_SEGMENT;
    request.source = NULL;
    CHECK(submitTransfer(engine, batch, &request, 1) == 1);
    request.source = bytes;
    CHECK(getTransferStatus(engine, batch, 0, &status) == 1 && status.status == 77);
    memcpy(bytes, "to the other half", 18);
    CHECK(submitTransfer(engine, batch, &request, 1) == 0);
    do {
        CHECK(getTransferStatus(engine, batch, 0, &status) == 0);
    } while (status.status < STATUS_COMPLETED);
    CHECK(status.status == STATUS_COMPLETED && status.transferred_bytes == 32);
    CHECK(strcmp(bytes + 32, "to the other half") == 0);
    CHECK(getTransferStatus(engine, batch, 0, NULL) == 1);
    CHECK(getTransferStatus(engine, batch, 1, &status) == 1 && getTransferStatus(engine, batch, SIZE_MAX, &status) == 1);
    transfer_request_t two[] = {request, request};
    CHECK(submitTransfer(engine, batch, two, 2) == 2);
    CHECK(freeBatchID(engine, batch) == 0);
    /* A stale id. */
    CHECK(freeBatchID(engine, batch) == 1 && submitTransfer(engine, batch, &request, 1) == 1);
    CHECK(getTransferStatus(engine, batch, 0, &status) == 1);
    CHECK(allocateBatchID(engine, 1) != batch);
    CHECK(freeBatchID(engine, INVALID_BATCH) == 1 && freeBatchID(engine, 0) == 1 && freeBatchID(engine, 12345) == 1);
    CHECK(unregisterLocalMemory(engine, bytes) == 0);
}

int main(void) {
    null_engine();
    transfer_engine_t engine = createTransferEngine("P2PHANDSHAKE", "127.0.0.1:12345", NULL, 0, 0);
    CHECK(engine != NULL);
    null_arguments(engine);
    memory(engine);
    batches(engine);
    destroyTransferEngine(engine);
    puts("ok");
    return 0;
}
