"""Writes the samples of KV events: each as its publisher encodes it (msgspec for vLLM and SGLang, msgpack for the
envelope of RFC 1527). pip install msgspec msgpack; python3 make.py"""

from typing import Any, Optional, Union

import msgpack
import msgspec


def struct(name, fields, **options):
    return msgspec.defstruct(name, fields, **options)


def save(name, value, encoder=msgspec.msgpack.encode):
    with open(name + ".msgpack", "wb") as f:
        f.write(encoder(value))


# vLLM until 2026: arrays with a tag in front, and hashes that are integers, or digests.
A = dict(array_like=True, omit_defaults=True, gc=False)
Hash = Union[int, bytes]
Stored = struct("BlockStored", [
    ("block_hashes", list[Hash]), ("parent_block_hash", Optional[Hash]), ("token_ids", list[int]), ("block_size", int),
    ("lora_id", Optional[int]), ("medium", Optional[str], None), ("lora_name", Optional[str], None),
    ("extra_keys", Optional[list[Any]], None), ("group_idx", Optional[int], None), ("spec_kind", Optional[str], None),
    ("sliding_window", Optional[int], None)], tag=True, **A)
Removed = struct("BlockRemoved", [("block_hashes", list[Hash]), ("medium", Optional[str], None), ("group_idx", Optional[int], None)], tag=True, **A)
Cleared = struct("AllBlocksCleared", [], tag=True, **A)
Batch = struct("Batch", [("ts", float), ("events", list[Any]), ("data_parallel_rank", Optional[int], None)], **A)

digest = [bytes([i]) * 24 + (1000 + i).to_bytes(8, "big") for i in range(4)]
save("vllm_array_short", Batch(1.5, [
    Stored([11, 12], None, list(range(1, 9)), 4, None),
    Removed([11]),
    Cleared()]))
save("vllm_array_digests", Batch(2.5, [
    Stored(digest[:2], None, list(range(8)), 4, None, "GPU"),
    Stored(digest[2:3], digest[1], list(range(8, 12)), 4, None, "CPU", "sql", [["sql"]]),
    Removed(digest[2:3], "CPU")], 3))
save("vllm_array_full", Batch(3.5, [
    Stored([21, 22], None, list(range(8)), 4, 7, "GPU", "sql", [["sql", ["image-1", 0], "pepper"], None], 1, "sliding_window", 4096),
    Stored([23], 22, list(range(8, 12)), 4, 7, None, "sql", [["sql", ["image-2", 3]]], 1),
    Removed([21, 22, 23], "GPU", 1)], 0))

# vLLM since: maps with a tag, of which what has its default is left out.
B = dict(omit_defaults=True, gc=False)
StoredB = struct("BlockStored", [
    ("block_hashes", list[Hash]), ("parent_block_hash", Optional[Hash]), ("token_ids", list[int]), ("block_size", int),
    ("lora_id", Optional[int], None), ("medium", Optional[str], None), ("lora_name", Optional[str], None),
    ("extra_keys", Optional[list[Any]], None), ("group_idx", Optional[int], None),
    ("kv_cache_spec_kind", Optional[str], None), ("kv_cache_spec_sliding_window", Optional[int], None),
    ("locality", Optional[str], None), ("ownership", Optional[str], None), ("session_id", Optional[str], None),
    ("event_version", Optional[int], None), ("remaining_copy_counts", Optional[list[int]], None), ("more", Any, None)], tag=True, **B)
RemovedB = struct("BlockRemoved", [("block_hashes", list[Hash]), ("medium", Optional[str], None), ("remaining_copy_counts", Optional[list[int]], None)], tag=True, **B)
ClearedB = struct("AllBlocksCleared", [("medium", Optional[str], None)], tag=True, **B)
save("vllm_map", Batch(4.5, [
    StoredB([31, 32], None, list(range(8)), 4),
    StoredB([33], 32, list(range(8, 12)), 4, 1, "CPU_PINNED", "sql", [["sql", "salt?"]], 2, "full", 128, "local", "own", "s", 2, [1], {"x": [1, {}]}),
    RemovedB([33], "STORAGE", [0]),
    ClearedB("GPU"),
    ClearedB()], 1))

# SGLang: hashes are signed, and since 0.5.18 the salt stands where the adapter's name was.
Rank = struct("Rank", [("ts", float), ("events", list[Any]), ("attn_dp_rank", Optional[int], None)], **A)
StoredS = struct("BlockStored", [
    ("block_hashes", list[int]), ("parent_block_hash", Optional[int]), ("token_ids", list[int]), ("block_size", int),
    ("lora_id", Optional[int]), ("medium", Optional[str], None), ("extra", Any, None)], tag=True, **A)
save("sglang", Rank(5.5, [
    StoredS([-1, -2], None, [1, 2], 1, None),
    StoredS([2 ** 62], -2, [3], 1, None, "GPU", {"cache_salt": "pepper", "other": [1]}),
    Removed([-1])], 2))

# Batches that were a map once, and that hold what nobody knows or can read.
save("map_batch", {"ts": 6.5, "events": [["BlockRemoved", [1]]], "data_parallel_rank": 4, "later": 1})
save("bad_among_good", [7.5, [
    ["BlockStored", [1], None, [1, 2, 3], 2],
    ["BlockMoved", [1]],
    17,
    ["BlockRemoved", "x", 3],
    {"type": "BlockRemoved"},
    ["BlockRemoved", [5]],
    {"block_hashes": [6]}], None, "later"])

# Mooncake's masters.
envelope = {
    "event_type": "stored", "seq_hashes": [101, 102], "base_block_idx": 6, "parent_hash": 100, "token_ids": list(range(8)),
    "model_name": "m", "block_size": 4, "additional_salt": "pepper", "lora_name": "sql", "tenant_id": "t", "backend_id": "b",
    "medium": "DISK", "dp_rank": 5, "event_id": 77, "timestamp": 1700000000.25, "object_key": "k"}
save("rfc1527_stored", envelope, msgpack.packb)
save("rfc1527_batch", [8.5, [
    envelope,
    {"type": "removed", "block_hashes": [101], "medium": "cpu", "tenant_id": "t"},
    {"event_type": "cleared"}]], msgpack.packb)
