/*
 * The calls of TensorRT-LLM's Mooncake agent, in their order (transferAgent.cpp): one batch per transfer, all
 * buffers of a descriptor list in one submit, base64 texts as notifications, and a sender and a receiver that
 * find each other by such a text.
 */
#include <string.h>
#include <transfer_engine_c.h>

#include "check.h"

enum { BUFFERS = 4, LENGTH = 64 << 10 };

struct agent {
    transfer_engine_t engine;
    char name[64];
    char *buffers[BUFFERS];
};

static struct agent start(void) {
    struct agent agent;
    agent.engine = createTransferEngine("P2PHANDSHAKE", "127.0.0.1", "", 0, 1);
    CHECK(agent.engine != NULL);
    CHECK(getLocalIpAndPort(agent.engine, agent.name, sizeof agent.name) == 0);
    for (int i = 0; i < BUFFERS; i++) {
        agent.buffers[i] = malloc(LENGTH);
        CHECK(agent.buffers[i] != NULL);
        CHECK(registerLocalMemory(agent.engine, agent.buffers[i], LENGTH, "*", 1) == 0);
    }
    return agent;
}

static void stop(struct agent *agent) {
    for (int i = 0; i < BUFFERS; i++) {
        CHECK(unregisterLocalMemory(agent->engine, agent->buffers[i]) == 0);
        CHECK(unregisterLocalMemory(agent->engine, agent->buffers[i]) == -3);
        free(agent->buffers[i]);
    }
    destroyTransferEngine(agent->engine);
}

/* Waits for the batch, as the agent does: until COMPLETED or FAILED. Frees it. */
static int wait_for(struct agent *agent, batch_id_t batch, size_t tasks) {
    int ok = 1;
    for (size_t task = 0; task < tasks; task++) {
        transfer_status_t status;
        do {
            CHECK(getTransferStatus(agent->engine, batch, task, &status) == 0);
        } while (status.status != STATUS_COMPLETED && status.status != STATUS_FAILED);
        ok = ok && status.status == STATUS_COMPLETED && status.transferred_bytes == LENGTH;
    }
    CHECK(freeBatchID(agent->engine, batch) == 0);
    return ok;
}

/* Takes one notification, as the agent's poll does, and copies its text out. */
static void receive(struct agent *agent, char *text, size_t length) {
    int count = 0;
    notify_msg_t *received;
    while ((received = getNotifsFromEngine(agent->engine, &count)) == NULL) CHECK(freeNotifsMsgBuf(NULL, 0) == 0);
    CHECK(count == 1 && strlen(received[0].msg) < length);
    strcpy(text, received[0].msg);
    CHECK(freeNotifsMsgBuf(received, count) == 0);
}

int main(void) {
    struct agent sender = start(), receiver = start();

    /* The receiver connects and says hello; the text is what base64 makes of a name and a NUL. */
    segment_id_t to_sender = openSegment(receiver.engine, sender.name);
    CHECK(to_sender >= 0);
    char from[] = "receiver", hello[] = "cmVjZWl2ZXIACg==", text[256];
    notify_msg_t message = {from, hello};
    CHECK(genNotifyInEngine(receiver.engine, (uint64_t)to_sender, message) == 0);
    receive(&sender, text, sizeof text);
    CHECK(strcmp(text, hello) == 0);

    /* The sender writes all buffers, with a notification at the end. */
    segment_id_t to_receiver = openSegment(sender.engine, receiver.name);
    CHECK(to_receiver >= 0);
    for (int round = 0; round < 50; round++) {
        transfer_request_t copies[BUFFERS];
        for (int i = 0; i < BUFFERS; i++) {
            memset(sender.buffers[i], 'a' + (round + i) % 26, LENGTH);
            copies[i].opcode = OPCODE_WRITE;
            copies[i].source = sender.buffers[i];
            copies[i].target_id = to_receiver;
            copies[i].target_offset = (uint64_t)(uintptr_t)receiver.buffers[i];
            copies[i].length = LENGTH;
        }
        batch_id_t batch = allocateBatchID(sender.engine, BUFFERS);
        CHECK(batch != INVALID_BATCH);
        char sync_from[] = "sender", done[] = "ZG9uZQA=";
        notify_msg_t sync = {sync_from, done};
        CHECK(submitTransferWithNotify(sender.engine, batch, copies, BUFFERS, sync) == 0);
        CHECK(wait_for(&sender, batch, BUFFERS));
        receive(&receiver, text, sizeof text);
        CHECK(strcmp(text, done) == 0);
        for (int i = 0; i < BUFFERS; i++)
            CHECK(memcmp(sender.buffers[i], receiver.buffers[i], LENGTH) == 0);
    }
    /* A notification needs requests. */
    char none[] = "";
    notify_msg_t empty = {none, none};
    batch_id_t batch = allocateBatchID(sender.engine, 1);
    CHECK(submitTransferWithNotify(sender.engine, batch, NULL, 0, empty) == 1);
    CHECK(freeBatchID(sender.engine, batch) == 0);
    CHECK(closeSegment(sender.engine, to_receiver) == 0);
    CHECK(closeSegment(receiver.engine, to_sender) == 0);
    stop(&sender);
    stop(&receiver);
    puts("ok");
    return 0;
}
