// Package enginehash names blocks of prompts as vLLM and SGLang do, for whoever wants to know whether an engine's names are what
// they should be, or asks for blocks by these names.
//
// vLLM hashes (name before, tokens, extra keys) of each block, which it has encoded before with one of three encodings: pickle,
// CBOR and msgpack (vllm/utils/hashing.py, vllm/v1/core/kv_cache_utils.py). The encodings here write what Python's do, and no more
// than is needed for that; testdata/make.py has Python write samples. The first block's name before is the hash of a seed: the
// value of PYTHONHASHSEED, or a fixed text in releases since August 2026; before, it was chance.
//
// SGLang hashes the name before and the tokens as they are (python/sglang/srt/mem_cache/hicache_storage.py).
package enginehash
