"""One of two processes that share a cache through Maru's own handler: flow.py writer|reader HOST:PORT.

The writer stores, says so, waits for a line, and stores more over the connections that it has. The reader finds everything.
"""

import sys
import time

from maru import MaruConfig, MaruHandler

CHUNK = 64 * 1024
KEYS = 16
PATIENCE = 30.0  # seconds for the server to come back


def value(key: str) -> bytes:
    return (key.encode() * CHUNK)[:CHUNK]


def store(handler: MaruHandler, key: str) -> bool:
    handle = handler.alloc(size=CHUNK)
    handle.buf[:CHUNK] = value(key)
    try:
        return handler.store(key=key, handle=handle)
    except ConnectionError:  # refused; the handler has freed the page
        return False


def find(handler: MaruHandler, key: str) -> None:
    found = handler.retrieve(key=key)
    assert found is not None, f"{key} was not found"
    assert bytes(found.view[:CHUNK]) == value(key), f"{key} holds other bytes"


def main(role: str, door: str) -> None:
    config = MaruConfig(server_url=f"tcp://{door}", instance_id=None, pool_size=4 << 20, chunk_size_bytes=CHUNK)
    with MaruHandler(config) as handler:
        if role == "reader":
            for i in range(KEYS):
                find(handler, f"flow-{i}")
            print("found", flush=True)
            sys.stdin.readline()
            return
        for i in range(KEYS):
            assert store(handler, f"flow-{i}"), f"flow-{i} was not stored"
        print("stored", flush=True)
        sys.stdin.readline()
        deadline = time.monotonic() + PATIENCE
        while not handler.healthcheck():
            assert time.monotonic() < deadline, "the server does not come back"
        # At first stores are refused: for all that the server can tell they were queued before, and given up since.
        while not store(handler, "flow-more-0"):
            assert time.monotonic() < deadline, "stores are refused for ever"
            time.sleep(0.1)
        for i in range(KEYS):
            find(handler, f"flow-{i}")
            assert i == 0 or store(handler, f"flow-more-{i}"), f"flow-more-{i} was not stored"
            find(handler, f"flow-more-{i}")
        print("stored more", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
