"""The other process of test_transfer: it has memory that others read and write."""

from __future__ import annotations

from multiprocessing.connection import Connection

import larder

PAGE = 64 << 10
PAGES = 16


def owner(pipe: Connection, transports: list[str]) -> None:
    """The other process: it registers a cache, and shows what is in it when it is asked for a range."""
    with larder.TransferEngine("owner", listen=["127.0.0.1:0"], transports=transports) as engine:
        cache = engine.allocate(PAGE * PAGES, name="cache")
        for i in range(PAGES):
            cache.memory[i * PAGE : (i + 1) * PAGE] = bytes([i]) * PAGE
        words = engine.register(bytearray(b"0123456789"), name="words")
        engine.register(b"fixed", name="fixed")
        pipe.send(engine.addresses)
        while True:
            try:
                command, *arguments = pipe.recv()
            except EOFError:
                return
            try:
                if command == "show":
                    buffer, start, length = arguments
                    memory = {"cache": cache, "words": words}[buffer].memory
                    pipe.send(bytes(memory[start : start + length]))
                elif command == "unregister":
                    words.unregister()
                    pipe.send("unregistered")
                elif command == "receive":
                    pipe.send(engine.receive(timeout=30))
            except Exception as e:
                pipe.send(e)
