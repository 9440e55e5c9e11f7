"""Writes vectors.json: block hashes as vLLM and SGLang compute them, by the libraries that they use.
pip install cbor2 xxhash msgspec; python3 make.py"""

import hashlib
import json
import pickle

import cbor2
import msgspec
import xxhash

encoders = {
    "": lambda v: pickle.dumps(v, protocol=pickle.HIGHEST_PROTOCOL),
    "_cbor": lambda v: cbor2.dumps(v, canonical=True),
    "_msgpack": msgspec.msgpack.Encoder().encode,
}
sums = {"sha256": lambda b: hashlib.sha256(b).digest(), "xxhash": xxhash.xxh3_128_digest}


def vllm(algorithm, seed, block_size, tokens, extras):
    name, _, encoding = algorithm.partition("_")
    encode, digest = encoders["_" + encoding if encoding else ""], sums[name]
    none = parent = digest(encode(seed))
    blocks = []
    for i in range(len(tokens) // block_size):
        block = tokens[i * block_size:(i + 1) * block_size]
        extra = tuple(tuplify(k) for k in extras[i]) if i < len(extras) and extras[i] else None
        parent = digest(encode((parent, block if encoding == "msgpack" else tuple(block), extra)))
        blocks.append(parent)
    return none, blocks


def sglang(block_size, tokens):
    parent, blocks = b"", []
    for i in range(len(tokens) // block_size):
        h = hashlib.sha256(parent)
        for t in tokens[i * block_size:(i + 1) * block_size]:
            h.update(t.to_bytes(4, byteorder="little", signed=False))
        parent = h.digest()
        blocks.append(parent)
    return b"", blocks


def tuplify(k):
    if isinstance(k, list):
        return tuple(tuplify(x) for x in k)
    return bytes.fromhex(k[4:]) if isinstance(k, str) and k.startswith("hex:") else k


cases = [
    ("0", 4, list(range(1, 10)), []),
    ("0", 1, [0, 255, 256, 65535, 65536, 2**31 - 1, 2**31, 2**32 - 1], []),
    ("42", 2, [7, 128, 32, 127, 23, 24], []),
    ("vllm-none-hash", 16, [(i * 7919) % 151936 for i in range(64)], []),
    ("seed", 3, list(range(9)), [["sql", "pepper"], ["sql"], ["sql", ["image", -3], ["image", -128]]]),
    ("seed", 4, list(range(16)), [
        [["i", 0]], [["i", -1], ["j", -33]], [["i", -129], ["j", -32769], ["k", 70000], None],
        ["hex:" + "ab" * 32, "é" * 200, "hex:" + "cd" * 300, []]]),
]
out = []
for seed, block_size, tokens, extras in cases:
    for algorithm in [s + e for s in sums for e in encoders] + ["sglang"]:
        none, blocks = sglang(block_size, tokens) if algorithm == "sglang" else vllm(algorithm, seed, block_size, tokens, extras)
        out.append({"algorithm": algorithm, "seed": seed, "block_size": block_size, "tokens": tokens, "extras": extras,
                    "none": none.hex(), "blocks": [b.hex() for b in blocks]})
with open("vectors.json", "w") as f:
    f.write("[\n" + ",\n".join(json.dumps(v) for v in out) + "\n]\n")
