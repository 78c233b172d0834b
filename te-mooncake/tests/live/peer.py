# A Mooncake engine that a test commands: one JSON list per line on standard input, one JSON value per line on
# standard output. Memory is one buffer; bytes are compared by their CRC-32.
import ctypes
import json
import os
import random
import sys
import zlib

os.environ["MC_FORCE_TCP"] = "1"
# What the engine prints itself must not mix with the answers.
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)

from mooncake.engine import TransferEngine, TransferNotify, TransferOpcode  # noqa: E402

host, metadata, size = sys.argv[1], sys.argv[2], int(sys.argv[3])
engine = TransferEngine()
if engine.initialize(host, metadata, "tcp", "") != 0:
    sys.exit("the engine does not start")
buffer = ctypes.create_string_buffer(size)
base = ctypes.addressof(buffer)
name = f"{host}:{engine.get_rpc_port()}" if metadata == "P2PHANDSHAKE" else host


def registered(register):
    return engine.register_memory(base, size) if register else engine.unregister_memory(base)


def paint(seed, offset, length):
    ctypes.memmove(base + offset, random.Random(seed).randbytes(length), length)
    return digest(offset, length)


def digest(offset, length):
    return zlib.crc32((ctypes.c_char * length).from_address(base + offset))


def transfer(op, target, local, remote, length):
    call = engine.transfer_sync_write if op == "write" else engine.transfer_sync_read
    return call(target, base + local, remote, length)


def batch(op, target, locals_, remotes, lengths):
    call = engine.batch_transfer_sync_write if op == "write" else engine.batch_transfer_sync_read
    return call(target, [base + local for local in locals_], remotes, lengths)


def notifying(target, remote, length, key, message):
    return engine.transfer_sync(target, base, remote, length, TransferOpcode.Write, TransferNotify(key, message))


calls = {
    "register": registered,
    "paint": paint,
    "digest": digest,
    "transfer": transfer,
    "batch": batch,
    "notifying": notifying,
    "notifies": lambda: [[notify.name, notify.msg] for notify in engine.get_notifies()],
    "probe": engine.send_probe,
    "first": engine.get_first_buffer_address,
}
registered(True)
print(json.dumps([name, base]), file=answers, flush=True)
for line in sys.stdin:
    call, *arguments = json.loads(line)
    try:
        answer = calls[call](*arguments)
    except RuntimeError as error:
        answer = f"RuntimeError: {error}"
    print(json.dumps(answer), file=answers, flush=True)
os._exit(0)
