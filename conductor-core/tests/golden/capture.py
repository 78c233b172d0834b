#!/usr/bin/env python3
"""Captures golden vectors from the publishers and hash functions of released wheels.

For each release it downloads the wheel, imports the few modules that publish events and hash blocks, with
stubs in place of everything else, publishes the events below through the release's own ZMQ publisher, and
writes the frames that arrive to RELEASE.txt beside this script. Nothing of the releases' code is kept.

    python3 -m venv env && env/bin/pip install pyzmq msgspec cbor2 xxhash pybind11
    env/bin/python capture.py [--work DIR] [RELEASE ...]

A wheel has some 350 MB; it is deleted before the next one is fetched. The page hashes of SGLang are C++ and
need a compiler and the headers of OpenSSL.

Lines of the files:

    tokens T,T,...                            the tokens of every chain
    root ALGORITHM SEED HEX                   the hash before the first block
    chain ALGORITHM SEED CASE LOOKAHEAD HEX,HEX,...
                                              the hashes of a prompt's blocks of 16 tokens (vLLM)
    pages CASE SALT EXTRA_KEY NUMBER,...      the published numbers of pages of 16 tokens (SGLang)
    frame NAME TOPIC SEQUENCE PAYLOAD         the three frames of a message, in hexadecimal
    replay NAME FRAME FRAME ...               frames of an answer to a request for a replay
    expect EVENT                              what the frame above says, one line per event; t=@A:B are the
                                              tokens A to B of the line of tokens
    load PAYLOAD                              a report of load
"""

import argparse
import importlib.abc
import importlib.machinery
import os
import pathlib
import shutil
import subprocess
import sys
import sysconfig
import time
import types
import zipfile

RELEASES = [
    "vllm-0.22", "vllm-0.23", "vllm-0.24", "vllm-0.26", "vllm-0.28", "vllm-0.29", "vllm-0.30", "vllm-0.31",
    "vllm-0.32", "vllm-0.33",
    "sglang-0.5.10", "sglang-0.5.17", "sglang-0.5.18", "sglang-0.5.20", "sglang-0.5.23",
]
# Every length of an integer, in pickle, CBOR and msgpack.
TOKENS = [0, 1, 23, 24, 31, 32, 127, 128, 255, 256, 32767, 32768, 65535, 65536, 128000, 151643,
          2**31 - 1, 2**31, 2**32 - 1] + [(i * 7919 + 13) % 151936 for i in range(29)]
BLOCK = 16
LORA = ("sql-adapter", "/adapters/sql")
SALT = "tenant-é"
TIME = 1764000000.25
REAL = {
    "vllm": ["vllm.distributed.kv_events", "vllm.v1.core.kv_cache_utils", "vllm.utils.hashing"],
    "sglang": ["sglang.srt.disaggregation.kv_events", "sglang.srt.mem_cache.utils",
               "sglang.srt.managers.scheduler_components.load_publisher"],
}


class Any(type):
    """A class of which everything can be asked: attributes, items, unions, calls."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Any(name, (), {})

    def __getitem__(cls, _):
        return cls

    def __or__(cls, _):
        return cls

    __ror__ = __or__

    def __call__(cls, *args, **kwargs):
        # As a decorator it changes nothing.
        return args[0] if len(args) == 1 and callable(args[0]) else Any("value", (), {})


class Stub(types.ModuleType):
    __path__ = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Any(name, (), {})


class Stubs(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the modules of REAL in their files, and a stub for every other that is missing."""

    def __init__(self, root, engine):
        self.root, self.engine = root, engine

    def find_spec(self, name, path=None, target=None):
        top = name.split(".")[0]
        if name in REAL[self.engine]:
            return importlib.machinery.PathFinder.find_spec(
                name, [str(self.root.joinpath(*name.split(".")[:-1]))])
        if top == self.engine or top in ("torch", "numpy", "pydantic", "requests", "fastapi", "orjson"):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return Stub(spec.name)

    def exec_module(self, module):
        if module.__name__ == "vllm.envs":
            module.VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES = True


def numbers(values):
    return ",".join(str(value & (2**64 - 1)) for value in values)


def tokens_of(tokens):
    """Tokens, as a part of the line of tokens where they are one."""
    for start in range(0, len(TOKENS), BLOCK):
        if tokens and list(tokens) == TOKENS[start:start + len(tokens)]:
            return f"@{start}:{start + len(tokens)}"
    return numbers(tokens)


def stored(hashes, parent, tokens, block, tier, lora=None, salt=None, extra=None, group=None):
    """The line that a stored event is to be read as. The extra keys are those of one block, in hexadecimal."""
    return (f"stored h={numbers(hashes)} p={'-' if parent is None else numbers([parent])} "
            f"t={tokens_of(tokens)} b={block} lora={lora or '-'} salt={salt or '-'} "
            f"extra={','.join(extra or []) or '-'} tier={tier} group={'-' if group is None else group}")


def removed(hashes, tier, group=None):
    return f"removed h={numbers(hashes)} tier={tier} group={'-' if group is None else group}"


class Listener:
    """Receives what a publisher sends, and asks it for a replay."""

    def __init__(self, context, endpoint, replay):
        import zmq
        self.sub = context.socket(zmq.SUB)
        self.sub.setsockopt(zmq.SUBSCRIBE, b"")
        self.sub.connect(endpoint)
        self.ask = context.socket(zmq.DEALER)
        self.ask.connect(replay)
        for socket in (self.sub, self.ask):
            socket.setsockopt(zmq.RCVTIMEO, 5000)
        time.sleep(0.3)

    def frames(self):
        return self.sub.recv_multipart()

    def replay(self, sequence):
        self.ask.send_multipart([b"", sequence.to_bytes(8, "big")])
        while True:
            frames = self.ask.recv_multipart()
            yield frames
            if frames[-2] == b"\xff" * 8:
                return


def publish(module, batches, rank_name, out):
    """Publishes the batches and writes the frames that arrive, each with what it says."""
    import zmq
    endpoint, replay = "inproc://events", "inproc://replay"
    publisher = module.ZmqEventPublisher(3, endpoint=endpoint, replay_endpoint=replay, topic="kv@golden")
    listener = Listener(zmq.Context.instance(), endpoint + "_dp3", replay + "_dp3")
    for name, events, expected in batches:
        publisher.publish(module.KVEventBatch(ts=TIME, events=events))
        topic, sequence, payload = listener.frames()
        out.append(f"frame {name} {topic.hex()} {sequence.hex()} {payload.hex()}")
        out.extend(f"expect {line}" for line in expected)
    for frames in listener.replay(len(batches) - 2):
        out.append("replay tail " + " ".join(frame.hex() or "-" for frame in frames))
    publisher.shutdown()
    # A batch without a rank never leaves the publisher; its encoder writes what older ones sent.
    import msgspec
    bare = module.KVEventBatch(ts=TIME, events=[module.AllBlocksCleared()])
    out.append(f"frame no-rank - - {msgspec.msgpack.encode(bare).hex()}")
    out.append("expect cleared")
    assert getattr(bare, rank_name) is None


def vllm(version, out):
    import vllm.distributed.kv_events as events
    import vllm.utils.hashing as hashing
    import vllm.v1.core.kv_cache_utils as utils
    names = ["sha256", "sha256_cbor", "xxhash", "xxhash_cbor"]
    digests = {}
    out.append(f"tokens {numbers(TOKENS)}")
    for name in names:
        function = getattr(hashing, name)
        for seed in ["0", "vllm-none-hash", None]:
            os.environ.pop("PYTHONHASHSEED", None)
            if seed is not None:
                os.environ["PYTHONHASHSEED"] = seed
            utils.init_none_hash(function)
            root = utils.NONE_HASH
            if seed is None:
                utils.init_none_hash(function)
                known = root == utils.NONE_HASH
                out.append(f"root {name} - {root.hex() if known else 'random'}")
                continue
            out.append(f"root {name} {seed} {root.hex()}")
            if seed != "0":
                continue
            arguments = utils.get_request_block_hasher.__code__.co_varnames
            lookaheads = [0, 1] if "num_hash_lookahead_tokens" in arguments else [0]
            for case in ["plain", "lora", "salt", "both", "media"]:
                for lookahead in lookaheads:
                    if case == "media" and lookahead:
                        continue  # the rewind of images is in another module
                    hashes = vllm_chain(utils, function, case, lookahead)
                    digests[name, seed, case, lookahead] = hashes
                    out.append(f"chain {name} {seed} {case} {lookahead} {','.join(h.hex() for h in hashes)}")
    publish(events, list(vllm_batches(events, utils, digests["sha256", "0", "plain", 0])),
            "data_parallel_rank", out)


def vllm_chain(utils, function, case, lookahead):
    lora, salt = case in ("lora", "both"), case in ("salt", "both")
    media = []
    if case == "media":
        position = lambda offset, length: types.SimpleNamespace(offset=offset, length=length)
        # Two in the first block, one that reaches from the second into the third.
        media = [types.SimpleNamespace(identifier=f"image-{offset}", mm_position=position(offset, length))
                 for offset, length in [(2, 4), (8, 5), (28, 9)]]
    request = types.SimpleNamespace(
        block_hashes=[], num_tokens=len(TOKENS), all_token_ids=TOKENS, mm_features=media, prompt_embeds=None,
        lora_request=types.SimpleNamespace(lora_name=LORA[0], lora_path=LORA[1]) if lora else None,
        cache_salt=SALT if salt else None)
    if not lookahead:
        return utils.get_request_block_hasher(BLOCK, function)(request)
    return utils.get_request_block_hasher(BLOCK, function, lookahead)(request)


def vllm_batches(events, utils, digests):
    fields = events.BlockStored.__struct_fields__
    hashes = [utils.maybe_convert_block_hash(digest) for digest in digests]
    low = [int.from_bytes(digest[-8:], "big") for digest in digests]
    assert hashes == low
    make = lambda **given: events.BlockStored(**{**dict(
        block_hashes=hashes, parent_block_hash=None, token_ids=TOKENS, block_size=BLOCK, lora_id=None,
        medium="GPU", lora_name=None), **given})
    gone = lambda hashes, medium, **given: events.BlockRemoved(block_hashes=hashes, medium=medium, **given)
    yield "plain", [make()], [stored(low, None, TOKENS, BLOCK, "gpu")]
    yield "child", [make(block_hashes=hashes[1:2], parent_block_hash=hashes[0], token_ids=TOKENS[16:32])], [
        stored(low[1:2], low[0], TOKENS[16:32], BLOCK, "gpu")]
    yield "lora-salt", [make(lora_id=1, lora_name=LORA[0],
                             extra_keys=[(LORA[0], SALT), (LORA[0],), (LORA[0],)])], [
        stored(low, None, TOKENS, BLOCK, "gpu", LORA[0], SALT)]
    yield "no-extra-keys", [make(extra_keys=[None, None, None])], [stored(low, None, TOKENS, BLOCK, "gpu")]
    yield "media-keys", [make(extra_keys=[(("image-2", 2), SALT), None, (("image-28", -4), b"\1\2")])], [
        # ["image-2", 2], nothing, ["image-28", -4] and the bytes 1 2
        stored(low, None, TOKENS, BLOCK, "gpu", None, SALT,
               ["92a7696d6167652d3202", "", "92a8696d6167652d3238fcc4020102"])]
    yield "digests", [make(block_hashes=digests[1:], parent_block_hash=digests[0], token_ids=TOKENS[16:]),
                      gone(digests[:1], "GPU")], [
        stored(low[1:], low[0], TOKENS[16:], BLOCK, "gpu"), removed(low[:1], "gpu")]
    yield "offloaded", [make(token_ids=[], block_size=0, medium="CPU"), gone(hashes[:2], "CPU")], [
        stored(low, None, [], 0, "cpu"), removed(low[:2], "cpu")]
    yield "unknown-medium", [make(medium="TAPE"), gone(hashes, "TAPE"), make()], [
        "skipped unknown_medium=2", stored(low, None, TOKENS, BLOCK, "gpu")]
    yield "no-medium", [make(medium=None), gone(hashes, None)], [
        stored(low, None, TOKENS, BLOCK, "gpu"), removed(low, "gpu")]
    yield "groups", [
        make(group_idx=0, kv_cache_spec_kind="full_attention"),
        make(group_idx=1, kv_cache_spec_kind="sliding_window", kv_cache_spec_sliding_window=128),
        make(group_idx=2, kv_cache_spec_kind="mla_attention"),
        make(group_idx=3, kv_cache_spec_kind="sink_full_attention"),
        make(group_idx=4, kv_cache_spec_kind="mamba"),
        gone(hashes[2:], "GPU", group_idx=0), gone(hashes[2:], "GPU", group_idx=1)], [
        "skipped other_group=3", stored(low, None, TOKENS, BLOCK, "gpu", group=0),
        stored(low, None, TOKENS, BLOCK, "gpu", group=2), stored(low, None, TOKENS, BLOCK, "gpu", group=3),
        removed(low[2:], "gpu", 0)]
    later = {"session_id": "session-1", "ownership": "tier-1",
             "lookahead_token_ids": [[16], [32], [48]]}
    given = {name: value for name, value in later.items() if name in fields}
    if given:
        yield "later-fields", [make(**given)], [stored(low, None, TOKENS, BLOCK, "gpu")]
    if "locality" in fields:
        media = ["FS", "OBJ", "STORAGE"]
        tiers = ["disk", "store", "disk"]
        yield "storage", [make(medium=medium, locality="LOCAL") for medium in media], [
            stored(low, None, TOKENS, BLOCK, tier) for tier in tiers]
        yield "remote", [make(medium="STORAGE", locality="REMOTE"),
                         gone(hashes, "STORAGE", locality="REMOTE")], [
            stored(low, None, TOKENS, BLOCK, "store"), removed(low, "store")]
    many = [(i * 0x9E3779B97F4A7C15) % 2**64 for i in range(1, 19)]
    prompt = [(i * 7919) % 151936 for i in range(18 * BLOCK)]
    yield "many", [make(block_hashes=many, token_ids=prompt)], [stored(many, None, prompt, BLOCK, "gpu")]
    yield "cleared", [events.AllBlocksCleared()], ["cleared"]
    yield "mixed", [gone(hashes[1:], "GPU"), events.AllBlocksCleared(), make()], [
        removed(low[1:], "gpu"), "cleared", stored(low, None, TOKENS, BLOCK, "gpu")]


def sglang(version, out):
    import sglang.srt.disaggregation.kv_events as events
    out.append(f"tokens {numbers(TOKENS)}")
    for line in sglang_pages(events):
        out.append(line)
    publish(events, list(sglang_batches(events)), "attn_dp_rank", out)
    if version == "0.5.23":
        import msgspec
        import sglang.srt.managers.scheduler_components.load_publisher as loads
        values = [5, 2, 70000, 1000000, 1, 4096, 75000, 256, 123456789, 987654321]
        out.append("load " + msgspec.msgpack.encode(loads.LoadStat(*values)).hex())


def sglang_pages(events):
    """The numbers of pages, by the release's C++ and its seeds. Releases before 0.5.18 hash without a salt."""
    native = build_native(pathlib.Path(sys.modules[events.__name__].__file__).parents[1])
    if native is None:
        return
    import array
    import hashlib
    seed = getattr(events, "kv_event_namespace_seed", None)
    for case, salt, extra_key in [("plain", None, None), ("salt", SALT, None),
                                  ("dynamo", SALT, "adapter-1"), ("adapter", None, "adapter-1")]:
        if case in ("dynamo", "adapter") and seed is None:
            continue
        prior = hashlib.sha256(b"sglang-cache-salt-v1\0" + salt.encode()).digest() if salt else None
        pages = native.get_hash(array.array("I", TOKENS), len(TOKENS), 1, False, prior, BLOCK)
        values = [int.from_bytes(bytes.fromhex(page)[:8], "big", signed=True) for page in pages]
        if case in ("dynamo", "adapter"):
            namespace = seed(extra_key=extra_key, cache_salt=salt)
            values = [events.namespaced_block_hash(value, namespace_seed=namespace) for value in values]
        yield f"pages {case} {salt or '-'} {extra_key or '-'} {numbers(values)}"
    pairs = native.get_hash(array.array("I", TOKENS), len(TOKENS) - 1, 1, True, None, BLOCK)
    yield "pages pairs - - " + numbers(int(page[:16], 16) for page in pairs)


def build_native(srt):
    source = srt / "mem_cache" / "cpp_utils" / "hash_binding.cpp"
    if not source.exists():
        return None
    import pybind11
    library = pathlib.Path.cwd() / ("golden_hash" + sysconfig.get_config_var("EXT_SUFFIX"))
    subprocess.run(["g++", "-O1", "-std=c++17", "-shared", "-fPIC", "-DTORCH_EXTENSION_NAME=golden_hash",
                    "-I" + pybind11.get_include(), "-I" + sysconfig.get_path("include"), str(source),
                    "-o", str(library), "-lcrypto"], check=True)
    sys.path.insert(0, str(library.parent))
    import golden_hash
    library.unlink()
    return golden_hash


def sglang_batches(events):
    fields = events.BlockStored.__struct_fields__
    hashes = [-(2**63), -1, 1234567890123456789]
    make = lambda **given: events.BlockStored(**{**dict(
        block_hashes=hashes, parent_block_hash=None, token_ids=TOKENS, block_size=BLOCK, lora_id=None,
        medium="GPU"), **given})
    gone = lambda hashes, medium=None: events.BlockRemoved(block_hashes=hashes, medium=medium)
    yield "plain", [make()], [stored(hashes, None, TOKENS, BLOCK, "gpu")]
    yield "child", [make(block_hashes=hashes[1:2], parent_block_hash=hashes[0], token_ids=TOKENS[16:32])], [
        stored(hashes[1:2], hashes[0], TOKENS[16:32], BLOCK, "gpu")]
    yield "no-medium", [make(medium=None), gone(hashes)], [
        stored(hashes, None, TOKENS, BLOCK, "gpu"), removed(hashes, "gpu")]
    media = [("CPU_PINNED", "cpu"), ("CPU_TIER1", "cpu"), ("CPU_TIER2", "disk"), ("DISK", "disk"),
             ("EXTERNAL", "store")]
    yield "media", [make(medium=medium) for medium, _ in media] + [gone(hashes, m) for m, _ in media], [
        stored(hashes, None, TOKENS, BLOCK, tier) for _, tier in media] + [
        removed(hashes, tier) for _, tier in media]
    yield "unknown-medium", [make(medium="TAPE")], ["skipped unknown_medium=1"]
    pairs = [(TOKENS[i], TOKENS[i + 1]) for i in range(32)]
    yield "pairs", [make(block_hashes=hashes[:2], token_ids=pairs)], [
        stored(hashes[:2], None, TOKENS[:32], BLOCK, "gpu")]
    yield "short-page", [make(block_hashes=hashes[:1], token_ids=TOKENS[:5], block_size=5)], [
        stored(hashes[:1], None, TOKENS[:5], 5, "gpu")]
    if hasattr(events, "BlockStoredWithMetadata"):
        salted = events.BlockStoredWithMetadata(
            block_hashes=hashes, parent_block_hash=None, token_ids=TOKENS, block_size=BLOCK, lora_id=None,
            medium="GPU", metadata=events.BlockStoredMetadata(cache_salt=SALT))
        yield "salted", [salted], [stored(hashes, None, TOKENS, BLOCK, "gpu", None, SALT)]
    if "cache_salt" in fields:
        yield "salted", [make(cache_salt=SALT, session_id="session-1")], [
            stored(hashes, None, TOKENS, BLOCK, "gpu", None, SALT)]
    if "lora_name" in fields:
        yield "adapter", [make(lora_name=LORA[0])], [stored(hashes, None, TOKENS, BLOCK, "gpu", LORA[0])]
    yield "cleared", [events.AllBlocksCleared()], ["cleared"]
    yield "mixed", [gone(hashes[1:], "GPU"), events.AllBlocksCleared(), make()], [
        removed(hashes[1:], "gpu"), "cleared", stored(hashes, None, TOKENS, BLOCK, "gpu")]


def sources(release, work):
    """The sources of a release, from its wheel; with the full version."""
    engine, version = release.split("-")
    root = work / release
    if not root.exists():
        wheels = work / "wheels"
        spec = f"{engine}=={version}" + (".*" if engine == "vllm" else "")
        subprocess.run([sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-cache-dir",
                        "--only-binary=:all:", "-d", str(wheels), spec], check=True)
        with zipfile.ZipFile(next(wheels.glob("*.whl"))) as wheel:
            kept = (".py", ".cpp", "/METADATA")
            wheel.extractall(root, [name for name in wheel.namelist() if name.endswith(kept)])
        shutil.rmtree(wheels)
    metadata = next(root.glob(f"{engine}-*.dist-info/METADATA")).read_text()
    full = next(line.split(": ")[1] for line in metadata.splitlines() if line.startswith("Version: "))
    return root, full


def capture(root, engine, version):
    """Runs in a process of its own: releases share the names of their modules."""
    sys.path.insert(0, str(root))
    sys.meta_path.insert(0, Stubs(root, engine))
    out = [f"# {engine} {version}: frames and hashes of its unmodified publisher and hash functions.",
           "# Written by capture.py, which says what the lines mean. Not to be edited."]
    {"vllm": vllm, "sglang": sglang}[engine](version, out)
    print("\n".join(out))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--work", type=pathlib.Path, default=pathlib.Path("golden-work"))
    parser.add_argument("--capture", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("releases", nargs="*", default=RELEASES)
    args = parser.parse_args()
    if args.capture:
        root, engine, version = args.capture
        return capture(pathlib.Path(root), engine, version)
    for release in args.releases:
        root, version = sources(release, args.work)
        engine = release.split("-")[0]
        script = pathlib.Path(__file__).resolve()
        run = subprocess.run([sys.executable, str(script), "--capture", str(root.resolve()), engine, version],
                             check=True, capture_output=True, text=True, cwd=args.work)
        script.with_name(f"{release}.txt").write_text(run.stdout)
        print(f"{release}: {version}, {run.stdout.count(chr(10))} lines")


if __name__ == "__main__":
    main()
