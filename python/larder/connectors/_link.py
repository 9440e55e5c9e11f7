"""What the connectors have in common: a pool that may be gone, behind an engine that must not notice.

A :class:`Link` is a client that answers in time or not at all: what it is asked for has a bound, and while the pool does not answer
only one question in :attr:`Settings.retry_interval` is put to it; all others are misses at once. A :class:`Writer` carries stores out
behind the engine's back, and refuses those that it has no room for: what is not stored is computed again some day.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeVar

import larder

logger = logging.getLogger("larder.connectors")

T = TypeVar("T")

# Options of an engine's extra configuration that are ours begin with this.
OPTION = "larder."

# Stores that a Writer holds besides their bytes: each is a batch of an engine's step, of which few come in a second.
MAX_STORES = 1024

# Longest key of a pool, in bytes.
MAX_KEY = 1024

# Seconds between two lines of the log that say the same.
QUIET = 10.0

# Seconds that a link waits for what is under way when it is closed; a pool that does not answer is not waited for.
GOODBYE = 2.0


@dataclasses.dataclass
class Settings:
    """The options of a connector. In an engine's extra configuration their names begin with ``larder.``, as in ``larder.masters``."""

    masters: list[str]  # of the pool: host:port or unix:/path, as a list or with commas in between
    tenant: str = "default"
    token: str = ""  # what nodes demand of those who reach their memory by transfer
    namespace: str = ""  # of keys: engines with different ones share nothing
    lookup_timeout: float = 0.2  # seconds that an engine's scheduler waits for what is held; beyond it is a miss
    load_timeout: float = 2.0  # seconds for the values of one request
    store_timeout: float = 10.0  # seconds for a batch of values, behind the engine's back
    connect_timeout: float = 5.0  # seconds that an engine's start waits for the pool; it goes on without, and the pool may come later
    retry_interval: float = 1.0  # seconds between questions to a pool that does not answer
    queue_bytes: int = 1 << 30  # values that wait for being stored, in bytes; more are not stored
    page_size: int = 0  # of this and what follows: see larder.Client, which chooses where it is 0 or empty
    region_size: int = 0
    replicas: int = 0
    checksums: bool = False
    tier: str = ""
    write_through: str = ""
    near: list[str] = dataclasses.field(default_factory=list)

    # What larder.Client takes by the same names.
    CLIENT: ClassVar = ("tenant", "token", "page_size", "region_size", "replicas", "checksums", "tier", "write_through", "near")

    @classmethod
    def of(cls, extra: Mapping[str, Any] | None) -> Settings:
        """The options in an engine's extra configuration. Raises ValueError for what is wrong there."""
        fields = {field.name: field for field in dataclasses.fields(cls)}
        given: dict[str, Any] = {}
        for name, value in (extra or {}).items():
            if not name.startswith(OPTION):
                continue  # the engine's own, or another plugin's
            field = fields.get(name[len(OPTION) :])
            if field is None:
                raise ValueError(f"{name} is no option: there are {', '.join(OPTION + n for n in fields)}")
            given[field.name] = _parsed(name, field.type, value)
        if not given.get("masters"):
            raise ValueError(f"{OPTION}masters is missing: name the pool's masters, as in 10.0.0.5:7400")
        return cls(**given)


def _parsed(name: str, kind: Any, value: Any) -> Any:
    if kind == "list[str]":
        return value.split(",") if isinstance(value, str) else [str(v) for v in value]
    if kind == "str":
        return str(value)
    if kind == "bool":
        if str(value).lower() not in ("true", "false"):
            raise ValueError(f"{name} is true or false, not {value!r}")
        return str(value).lower() == "true"
    try:
        number = float(value) if kind == "float" else int(value)
    except (TypeError, ValueError):
        raise ValueError(f"{name} is a number, not {value!r}") from None
    if number <= 0:
        raise ValueError(f"{name} is more than 0, not {value!r}")
    return number


def scope(engine: str, namespace: str, *what: Any) -> str:
    """The beginning of keys that name values of one kind: all that what depends on, such as the model, is in it as a hash."""
    digest = hashlib.blake2b(repr((namespace, what)).encode(), digest_size=16).hexdigest()
    return f"{engine}/{digest}/"


def key_of(scope: str, name: str) -> bytes:
    """The key of what an engine calls name: with a hash of it where it is too long for one."""
    key = (scope + name).encode()
    return key if len(key) <= MAX_KEY else scope.encode() + hashlib.blake2b(name.encode()).hexdigest().encode()


class Link:
    """A client of the pool that never keeps an engine waiting. Its methods may be called by several threads at once."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._lock = threading.Lock()
        self._client: larder.Client | None = None
        self._closing = threading.Event()
        self._tried = threading.Event()  # the first attempt to connect has ended
        self._silent_until = 0.0  # by time.monotonic: no question before that
        self._lost = False
        self._said: dict[str, float] = {}  # when a line of the log was written
        self._wrong: larder.InvalidArgumentError | None = None  # what the client says of the options
        self._connecting = threading.Thread(target=self._connect, name="larder-connect", daemon=True)
        self._connecting.start()
        self._tried.wait(settings.connect_timeout + GOODBYE)
        if self._wrong is not None:
            raise ValueError(f"the options that begin with {OPTION}: {self._wrong}")

    def _connect(self) -> None:
        s = self.settings
        options = {name: getattr(s, name) for name in s.CLIENT}
        while not self._closing.is_set():
            try:
                client = larder.Client(s.masters, timeout=s.connect_timeout, **options)
            except larder.InvalidArgumentError as e:
                self._wrong = e
                self._tried.set()
                return
            except larder.LarderError as e:
                self.say("connect", "no pool at %s, going on without: %s", ",".join(s.masters), e)
                self._tried.set()
                self._closing.wait(s.retry_interval)
                continue
            with self._lock:
                self._client = client
            logger.info("connected to the pool at %s", ",".join(s.masters))
            self._tried.set()
            return

    def ask(self, what: str, question: Callable[[larder.Client, float], T], otherwise: T, timeout: float) -> T:
        """What question(client, timeout) answers; otherwise if there is no answer in time, which the log tells as what. Whoever is
        the first to get none keeps all others from asking for a while."""
        client = self._admitted()
        if client is None:
            return otherwise
        try:
            answer = question(client, timeout)
        except (larder.TimedOutError, ConnectionError, larder.ClosedError) as e:
            self._silence(what, e)
            return otherwise
        except (larder.LarderError, BufferError) as e:
            self.say(what, "cannot %s: %s", what, e)
            return otherwise
        self._heard()
        return answer

    def store(self, what: str, question: Callable[[larder.Client, float], T], otherwise: T) -> T:
        """As ask, for what nobody waits for. A store that has found no room in time does not keep others from asking."""
        client = self._admitted()
        if client is None:
            return otherwise
        try:
            return question(client, self.settings.store_timeout)
        except larder.LarderError as e:
            self.say(what, "cannot %s: %s", what, e)
            return otherwise

    def _admitted(self) -> larder.Client | None:
        now = time.monotonic()
        with self._lock:
            if now < self._silent_until or self._closing.is_set():
                return None
            if self._lost:  # one question finds out whether it answers again
                self._silent_until = now + self.settings.retry_interval
            return self._client

    def _silence(self, what: str, error: Exception) -> None:
        with self._lock:
            first, self._lost = not self._lost, True
            self._silent_until = time.monotonic() + self.settings.retry_interval
        if first:
            logger.warning("the pool does not answer, going on without: cannot %s: %s", what, error)

    def _heard(self) -> None:
        if not self._lost:
            return
        with self._lock:
            self._lost = False
            self._silent_until = 0.0
        logger.warning("the pool answers again")

    def say(self, what: str, text: str, *arguments: Any) -> None:
        """Write a line to the log, unless one of the same kind was written just now."""
        now = time.monotonic()
        with self._lock:
            if now - self._said.get(what, -QUIET) < QUIET:
                return
            self._said[what] = now
        logger.warning(text, *arguments)

    def close(self) -> None:
        """End the client, within a bounded time."""
        self._closing.set()
        self._connecting.join(self.settings.connect_timeout + GOODBYE)
        with self._lock:
            client, self._client = self._client, None
        if client is not None:
            with contextlib.suppress(larder.LarderError):
                client.close(timeout=0.01 if self._lost else GOODBYE)


class Writer:
    """Carries stores out, in a thread of its own, in the order in which they come."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._stores: deque[tuple[int, Callable[[], None], Callable[[], None]]] = deque()
        self._bytes = 0
        self._change = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="larder-store", daemon=True)
        self._thread.start()

    @property
    def bytes(self) -> int:
        """Of stores that wait, and of the one that is under way."""
        return self._bytes

    def offer(self, size: int, store: Callable[[], None], release: Callable[[], None]) -> bool:
        """Have store called later, and release in any case when the values of so many bytes are not needed any more. False if there
        is no room: release was called then."""
        with self._change:
            admitted = not self._closing and len(self._stores) < MAX_STORES and self._bytes + size <= self._link.settings.queue_bytes
            if admitted:
                self._stores.append((size, store, release))
                self._bytes += size
                self._change.notify_all()
        if not admitted:
            release()
            self._link.say("full", "%d bytes wait for being stored already: others are not stored", self._bytes)
        return admitted

    def flush(self, timeout: float) -> bool:
        """Wait until all is stored that was offered. False if it is not in time."""
        with self._change:
            return self._change.wait_for(lambda: self._bytes == 0 and not self._stores, timeout)

    def close(self) -> None:
        """Give up what waits, and let the store end that is under way, unless it takes too long."""
        with self._change:
            self._closing = True
            dropped = list(self._stores)
            self._stores.clear()
            self._bytes -= sum(size for size, _, _ in dropped)
            self._change.notify_all()
        for _, _, release in dropped:
            release()
        self._thread.join(self._link.settings.store_timeout + GOODBYE)

    def _run(self) -> None:
        while True:
            with self._change:
                self._change.wait_for(lambda: self._stores or self._closing)
                if not self._stores:
                    return
                size, store, release = self._stores.popleft()
            try:
                store()
            except Exception:  # a defect: other stores may go well
                logger.exception("a store has failed")
            finally:
                release()
                with self._change:
                    self._bytes -= size
                    self._change.notify_all()
