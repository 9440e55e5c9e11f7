"""Larder behind serving engines, through the engines' own interfaces:

* :mod:`larder.connectors.vllm`: a KV connector of vLLM.
* :mod:`larder.connectors.sglang`: a storage backend of SGLang's HiCache.
* :mod:`larder.connectors.lmcache`: a storage plugin of LMCache.

The engines import these modules by their names; each needs its engine installed. A pool that is gone or slow is a miss to an
engine, after a bounded wait, and a line in the log: see :mod:`larder.connectors._link`.
"""
