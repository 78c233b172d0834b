/*
 * The calls of NIXL's Mooncake plugin, in their order (src/plugins/mooncake/mooncake_backend.cpp): two agents
 * register memory, exchange their names, and move it; requests are posted again into the batch that they were
 * prepared with; a failed request is released.
 */
#include <string.h>
#include <transfer_engine_c.h>

#include "check.h"

enum { LENGTH = 1 << 20, PARTS = 16, REQUESTS_PER_BATCH = 1024 };

struct agent {
    transfer_engine_t engine;
    char name[64];
    char *memory;
};

/* What the plugin keeps of a request: its batch, and how many tasks were added to it. */
struct request {
    batch_id_t batch;
    size_t tasks;
};

static struct agent start(void) {
    struct agent agent;
    agent.engine = createTransferEngine("P2PHANDSHAKE", "127.0.0.1", "", 0, 1);
    CHECK(agent.engine != NULL);
    CHECK(getLocalIpAndPort(agent.engine, agent.name, sizeof agent.name) == 0);
    agent.memory = malloc(LENGTH);
    CHECK(agent.memory != NULL);
    CHECK(registerLocalMemory(agent.engine, agent.memory, LENGTH, "*", 1) == 0);
    return agent;
}

static void stop(struct agent *agent) {
    CHECK(unregisterLocalMemory(agent->engine, agent->memory) == 0);
    destroyTransferEngine(agent->engine);
    free(agent->memory);
}

/* Posts PARTS copies. With a message, the peer is notified when they have arrived. */
static void post(struct agent *here, struct request *request, segment_id_t peer, int opcode, uint64_t remote,
                 notify_msg_t *message) {
    transfer_request_t copies[PARTS];
    size_t part_length = LENGTH / PARTS;
    for (size_t part = 0; part < PARTS; part++) {
        copies[part].opcode = opcode;
        copies[part].source = here->memory + part * part_length;
        copies[part].target_id = peer;
        copies[part].target_offset = remote + part * part_length;
        copies[part].length = part_length;
    }
    if (message != NULL)
        CHECK(submitTransferWithNotify(here->engine, request->batch, copies, PARTS, *message) == 0);
    else
        CHECK(submitTransfer(here->engine, request->batch, copies, PARTS) == 0);
    request->tasks += PARTS;
}

/* 1 when all tasks are over and none has failed, 0 while one is under way, -1 when one has failed: the plugin
 * takes every state other than WAITING, PENDING and FAILED for success. */
static int check(struct agent *here, struct request *request) {
    int in_progress = 0;
    for (size_t task = 0; task < request->tasks; task++) {
        transfer_status_t status;
        if (getTransferStatus(here->engine, request->batch, task, &status) != 0) return -1;
        if (status.status == STATUS_FAILED) return -1;
        if (status.status == STATUS_WAITING || status.status == STATUS_PENDING) in_progress = 1;
    }
    return in_progress ? 0 : 1;
}

static int wait_for(struct agent *here, struct request *request) {
    int state;
    while ((state = check(here, request)) == 0) {
    }
    return state;
}

static void release(struct agent *here, struct request *request) {
    CHECK(freeBatchID(here->engine, request->batch) == 0);
    CHECK(freeBatchID(here->engine, request->batch) != 0);
    request->batch = INVALID_BATCH;
}

int main(void) {
    struct agent here = start(), there = start();
    segment_id_t peer = openSegment(here.engine, there.name);
    CHECK(peer > 0 && openSegment(here.engine, there.name) == peer);
    CHECK(openSegment(here.engine, "127.0.0.1:1") < 0);

    /* A WRITE with a notification. */
    struct request request = {allocateBatchID(here.engine, REQUESTS_PER_BATCH), 0};
    CHECK(request.batch != INVALID_BATCH);
    memset(here.memory, 'w', LENGTH);
    char name[] = "agent-1", message[] = "the pages of request 7";
    notify_msg_t notice = {name, message};
    post(&here, &request, peer, OPCODE_WRITE, (uint64_t)(uintptr_t)there.memory, &notice);
    CHECK(wait_for(&here, &request) == 1);
    CHECK(there.memory[0] == 'w' && there.memory[LENGTH - 1] == 'w');
    int count = -1;
    notify_msg_t *received = getNotifsFromEngine(there.engine, &count);
    CHECK(count == 1 && strcmp(received[0].name, name) == 0 && strcmp(received[0].msg, message) == 0);
    CHECK(freeNotifsMsgBuf(received, count) == 0);
    CHECK(getNotifsFromEngine(there.engine, &count) == NULL && count == 0);
    CHECK(freeNotifsMsgBuf(NULL, 0) == 0);

    /* The same request is posted again, and later a READ. */
    memset(here.memory, 'x', LENGTH);
    post(&here, &request, peer, OPCODE_WRITE, (uint64_t)(uintptr_t)there.memory, NULL);
    CHECK(wait_for(&here, &request) == 1 && there.memory[LENGTH / 2] == 'x');
    memset(there.memory, 'r', LENGTH);
    post(&here, &request, peer, OPCODE_READ, (uint64_t)(uintptr_t)there.memory, NULL);
    CHECK(wait_for(&here, &request) == 1 && here.memory[0] == 'r' && here.memory[LENGTH - 1] == 'r');
    CHECK(request.tasks == 3 * PARTS);
    release(&here, &request);

    /* A notification without a transfer. */
    CHECK(genNotifyInEngine(here.engine, (uint64_t)peer, notice) == 0);
    received = getNotifsFromEngine(there.engine, &count);
    CHECK(count == 1);
    CHECK(freeNotifsMsgBuf(received, count) == 0);

    /* Memory that the peer does not export: FAILED, no notification, and the batch is freed. */
    struct request bad = {allocateBatchID(here.engine, REQUESTS_PER_BATCH), 0};
    post(&here, &bad, peer, OPCODE_WRITE, 4096, &notice);
    CHECK(wait_for(&here, &bad) == -1);
    release(&here, &bad);
    CHECK(getNotifsFromEngine(there.engine, &count) == NULL && count == 0);

    /* A peer that is gone: FAILED, and the batch is freed. */
    struct request late = {allocateBatchID(here.engine, REQUESTS_PER_BATCH), 0};
    uint64_t remote = (uint64_t)(uintptr_t)there.memory;
    stop(&there);
    transfer_request_t copy = {OPCODE_WRITE, here.memory, peer, remote, LENGTH};
    if (submitTransfer(here.engine, late.batch, &copy, 1) == 0) {
        late.tasks = 1;
        CHECK(wait_for(&here, &late) == -1);
    }
    release(&here, &late);
    CHECK(closeSegment(here.engine, peer) == 0);
    stop(&here);
    puts("ok");
    return 0;
}
