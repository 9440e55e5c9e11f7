"""The process group that torch.distributed calls.

What reaches which method, as tried with torch 1.13.1 and 2.15.0. Calls of Python's torch.distributed find methods by their
names; calls of C++ (DistributedDataParallel, functional collectives) only those that torch's class for Python subclasses
(PyProcessGroup.hpp) passes on.

    call                             1.13                           2.15
    init_process_group               creator(opts, pg_options)      the same, and the result is the group: _set_group_name,
                                                                    _set_group_desc, group_name, _device_types are asked
    get_rank, get_world_size         rank(), size()                 the same; C++ asks getRank, getSize
    all_reduce                       allreduce                      the same
    all_reduce_coalesced             allreduce_coalesced            the same
    broadcast, reduce                broadcast, reduce              the same
    all_gather, all_gather_object    allgather                      the same
    all_gather_into_tensor           _allgather_base                all_gather_single
    all_gather_coalesced             allgather_coalesced            the same
    reduce_scatter                   reduce_scatter                 the same
    reduce_scatter_tensor            _reduce_scatter_base           reduce_scatter_single
    all_to_all, all_to_all_single    alltoall, alltoall_base        alltoall, all_to_all_single
    gather, scatter                  gather, scatter                the same
    barrier                          barrier(opts=)                 the same
    send, recv, isend, irecv         send, recv                     the same
    recv without a source            recv_anysource; _source_rank   the same
    batch_isend_irecv                _start_coalescing(),           _get_backend(device).supports_coalescing, then send and
                                     send, recv,                    recv; if that is true _start_coalescing(device) and
                                     _end_coalescing(works)         _end_coalescing(device), whose work is waited for
    _coalescing_manager              does not exist for collectives allreduce_coalesced, all_gather_single_coalesced and
                                                                    reduce_scatter_single_coalesced
    DistributedDataParallel, C++     allgather, broadcast,          the same, with a PyWorkHolder that keeps the work
                                     allreduce, Work.get_future     alive; 1.13 does not keep it, so that this class must
    functional collectives, C++      do not exist                   getGroupName, and *_single, *_coalesced from above
    new_group                        another group by the creator   the same; a barrier on the store comes after it in 1.13
                                                                    only
    destroy_process_group            nothing is called (_torch1.py) shutdown()

2.15 says in opts.asyncOp whether anybody waits, and lets users call methods with single tensors: pg.allreduce(t, op),
pg.broadcast(t, 0). 1.13's init_process_group ends with a barrier on the store that counts processes (_torch1.py).
"""

# mypy: disable-error-code="override, assignment"
# (torch's stubs have one generation's signatures, and these are for both)

from __future__ import annotations

import collections
import contextlib
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Union

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroup as TorchProcessGroup

from ..errors import ClosedError, InvalidArgumentError, LarderError
from . import _native, _torch1
from ._cuda import Lane
from ._native import NOWHERE, Call, Kind, Region
from ._options import BackendOptions
from ._work import Completer, Finish, Gathered, Work

# The library's numbers of dtypes (pg/reduce). What is not here can be moved, as bytes, and not reduced.
_DTYPES: dict[torch.dtype, int] = {
    getattr(torch, name): number
    for number, name in enumerate(
        [
            "float32", "float64", "float16", "bfloat16", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
            "bool", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu",
        ],
        start=1,
    )
    if hasattr(torch, name)
}  # fmt: skip
_BYTES = 9  # uint8

def _plain(op: Any) -> Any:
    """An operation without what torch's ReduceOp has besides it."""
    return getattr(op, "op", op)


# The library's numbers of operations (pg/reduce), by torch's names, and by its operations.
_OPS = {"SUM": 0, "PRODUCT": 1, "MIN": 2, "MAX": 3, "AVG": 4, "BAND": 5, "BOR": 6, "BXOR": 7}
_OP_NUMBERS = {_plain(getattr(dist.ReduceOp, name)): number for name, number in _OPS.items() if hasattr(dist.ReduceOp, name)}

# How many works that have ended are kept for torch 1: C++ asks a work for its future at once or never, and keeps nothing of a
# Python work itself.
_KEPT = 16 if _torch1.PRESENT else 0

Tensors = Sequence[torch.Tensor]
Parts = Union[int, list[tuple[int, int]]]  # of one tensor: so many equal ones, or ranges of bytes


class ProcessGroup(TorchProcessGroup):
    """A process group of larder's. Use it through torch.distributed and larder.pg."""

    def __init__(
        self, group: _native.Group, rank: int, size: int, options: BackendOptions, backend: str, name: str, left: Callable[[], None],
        patience: Callable[[], float | None],
    ) -> None:  # fmt: skip
        super().__init__(rank, size)
        self.native = group
        self.options = options
        self.completer = Completer(name)
        self.closed = False
        self._left = left  # is called when it has been left
        self.patience = patience  # how long a message begun now may be waited for, in seconds
        self._backend = backend
        self._name = name
        self._desc = ""
        self._running: set[Work] = set()  # what nobody else may keep
        self._ended: collections.deque[Work] = collections.deque(maxlen=_KEPT)
        self._lock = threading.Lock()
        self._lanes: dict[torch.device, Lane] = {}
        self._done = Work.done(self)  # what was waited for as it was called, and is as it should be
        self._coalesced: list[Work] | None = None
        mirror = options.active_ranks
        self.active_ranks = mirror if mirror is not None else torch.zeros(group.capacity(), dtype=torch.int32)
        self.refresh()
        _open_groups.add(self)

    # Who and what it is.

    def rank(self) -> int:
        return self.native.rank

    def size(self) -> int:
        """One more than the highest active rank: it changes when ranks come and go."""
        return self.native.size()

    getRank = rank
    getSize = size

    def name(self) -> str:
        return self._backend

    getBackendName = name

    def _get_backend_name(self) -> str:
        return self._backend

    @property
    def group_name(self) -> str:
        return self._name

    @property
    def group_desc(self) -> str:
        return self._desc

    def getGroupName(self) -> str:
        return self._name

    def getGroupDesc(self) -> str:
        return self._desc

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, desc: str) -> None:
        self._desc = desc

    setGroupName = _set_group_name
    setGroupDesc = _set_group_desc

    @property
    def supports_coalescing(self) -> bool:
        return False

    @property
    def supports_splitting(self) -> bool:
        return False

    def _get_backend(self, device: torch.device) -> ProcessGroup:
        return self

    def _set_sequence_number_for_group(self) -> None:
        pass

    def _get_sequence_number_for_group(self) -> int:
        return self.native.epoch()

    # Its end.

    def shutdown(self) -> None:
        """Leave the group. What is under way fails with ClosedError."""
        with self._lock:
            if self.closed:
                return
            self.closed = True
        self.native.close()
        self.completer.close()
        for lane in self._lanes.values():
            lane.close()
        with self._lock:
            running, self._running = list(self._running), set()
        for work in running:
            with contextlib.suppress(LarderError):
                work._join(0.0)  # it has failed, and the library forgets it
        self._ended.clear()
        self._left()

    def abort(self) -> None:
        self.shutdown()

    # Operations.

    def allreduce(self, tensors: Tensors, opts: Any = None) -> Work:
        tensor = _one(tensors, "all_reduce")
        return self._reduction(Kind.ALL_REDUCE, tensor, opts)

    def reduce(self, tensors: Tensors, opts: Any, op: Any = None) -> Work:
        tensor = _one(tensors, "reduce")
        return self._reduction(Kind.REDUCE, tensor, op if isinstance(opts, int) else opts, root=_root(opts))

    def _reduction(self, kind: Kind, tensor: torch.Tensor, opts: Any, root: int = 0) -> Work:
        return self._start(kind, _dtype(tensor, reduce=True), [tensor], [tensor], op=_op(opts), root=root, whole=True, opts=opts)

    def broadcast(self, tensors: Tensors, opts: Any) -> Work:
        tensor = _one(tensors, "broadcast")
        root = _root(opts)
        if root == self.rank():
            return self._start(Kind.BROADCAST, _dtype(tensor), [tensor], [], root=root, whole=True, opts=opts)
        return self._start(Kind.BROADCAST, _dtype(tensor), [], [tensor], root=root, whole=True, opts=opts)

    def allgather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> Work:
        tensor, parts = _one(inputs, "all_gather"), _list(outputs, inputs, "all_gather")
        self._check_parts(parts, tensor, "all_gather")
        return self._start(Kind.ALL_GATHER, _dtype(tensor), [tensor], parts, opts=opts)

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Work:
        parts = self._split(output, input, "all_gather_into_tensor")
        return self._start(Kind.ALL_GATHER, _dtype(input), [input], [output], dst_parts=parts, opts=opts)

    _allgather_base = all_gather_single

    def reduce_scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any = None) -> Work:
        tensor, parts = _one(outputs, "reduce_scatter"), _list(inputs, outputs, "reduce_scatter")
        self._check_parts(parts, tensor, "reduce_scatter")
        return self._start(Kind.REDUCE_SCATTER, _dtype(tensor, reduce=True), parts, [tensor], op=_op(opts), opts=opts)

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Work:
        parts = self._split(input, output, "reduce_scatter_tensor")
        return self._start(
            Kind.REDUCE_SCATTER, _dtype(output, reduce=True), [input], [output], op=_op(opts), src_parts=parts, opts=opts
        )

    _reduce_scatter_base = reduce_scatter_single

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work:
        for tensors in (outputs, inputs):
            if len(tensors) != self.size():
                raise InvalidArgumentError(f"all_to_all: {len(tensors)} tensors for a group of {self.size()}: one for each rank")
        return self._start(Kind.ALL_TO_ALL, _dtype(inputs[0]), list(inputs), list(outputs), opts=opts)

    def all_to_all_single(
        self, output: torch.Tensor, input: torch.Tensor, output_splits: Sequence[int], input_splits: Sequence[int], opts: Any = None
    ) -> Work:
        dst = self._rows(output, output_splits, "output_split_sizes")
        src = self._rows(input, input_splits, "input_split_sizes")
        return self._start(Kind.ALL_TO_ALL, _dtype(input), [input], [output], src_parts=src, dst_parts=dst, opts=opts)

    alltoall_base = all_to_all_single

    def gather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any) -> Work:
        tensor, root = _one(inputs, "gather"), _root(opts)
        parts: list[torch.Tensor] = []
        if root == self.rank():
            parts = list(_list(outputs, inputs, "gather"))
            self._check_parts(parts, tensor, "gather")
        return self._start(Kind.GATHER, _dtype(tensor), [tensor], parts, root=root, opts=opts)

    def scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any) -> Work:
        tensor, root = _one(outputs, "scatter"), _root(opts)
        parts: list[torch.Tensor] = []
        if root == self.rank():
            parts = list(_list(inputs, outputs, "scatter"))
            self._check_parts(parts, tensor, "scatter")
        return self._start(Kind.SCATTER, _dtype(tensor), parts, [tensor], root=root, opts=opts)

    def barrier(self, opts: Any = None) -> Work:
        return self._start(Kind.BARRIER, _BYTES, [], [], opts=opts)

    def send(self, tensors: Tensors, rank: int, tag: int = 0) -> Work:
        return self._start(Kind.SEND, _BYTES, [_one(tensors, "send")], [], root=rank, tag=tag)

    def recv(self, tensors: Tensors, rank: int, tag: int = 0) -> Work:
        return self._start(Kind.RECV, _BYTES, [], [_one(tensors, "recv")], root=rank, tag=tag)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> Work:
        return self._start(Kind.RECV, _BYTES, [], [_one(tensors, "recv")], root=_native.ANY, tag=tag)

    recvAnysource = recv_anysource

    # Several at once.

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> Gathered:
        return Gathered([self.allreduce([t], opts) for t in tensors])

    def allgather_coalesced(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> Gathered:
        # Lists of torch's own convention: outputs[rank][i], of which each rank's i-th belongs to inputs[i].
        each = [[part[i] for part in outputs] for i in range(len(inputs))]
        return Gathered([self.allgather([parts], [t], opts) for parts, t in zip(each, inputs)])

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Gathered:
        return Gathered([self.all_gather_single(o, i, opts) for o, i in zip(outputs, inputs)])

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Gathered:
        return Gathered([self.reduce_scatter_single(o, i, opts) for o, i in zip(outputs, inputs)])

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _start_coalescing(self, device: torch.device | None = None) -> None:
        self._coalesced = []

    def _end_coalescing(self, what: Any = None) -> Gathered | None:
        works, self._coalesced = self._coalesced or [], None
        return None if isinstance(what, list) else Gathered(works)  # 1.13 gives its list of works, and wants nothing

    start_coalescing = _start_coalescing
    end_coalescing = _end_coalescing

    # How an operation gets to the library.

    def _start(
        self, kind: Kind, dtype: int, src: Tensors, dst: Tensors, *, op: int = 0, root: int = 0, tag: int = 0, whole: bool = False,
        src_parts: Parts = 0, dst_parts: Parts = 0, opts: Any = None,
    ) -> Work:  # fmt: skip
        """Start an operation. Parts are ranges of bytes of the one tensor that they stand for, or a number of equal ones; whole says
        that src and dst are not lists by rank. torch 2's options tell whether it waits at once; with 1.13 nobody knows."""
        if self.closed:
            raise ClosedError(f"the process group {self._name!r} was destroyed: make another one")
        device, contiguous = None, True
        for t in (*src, *dst):
            if t.layout is not torch.strided:
                raise InvalidArgumentError(f"{kind.name.lower()}: the tensor is {t.layout}: make it dense")
            if not t.is_cpu:
                device = t.device
            contiguous = contiguous and t.is_contiguous()

        def call(src: Tensors, dst: Tensors) -> Call:
            one, its_parts = _regions(src, src_parts, whole or kind in _ONE_SRC)
            to, parts = _regions(dst, dst_parts, whole or kind in _ONE_DST)
            return Call(kind, dtype, op, root, tag, one, to, its_parts, parts)

        if self._lanes and kind not in _SINGLE:
            for lane in self._lanes.values():
                if lane.device != device:
                    lane.drain()  # collectives run in the same order everywhere
        if device is not None:
            return self._running_work(self._lane(device).start(call, src, dst, kind in _SINGLE))
        finish: Finish | None = None
        operands, results = src, dst
        if not contiguous:
            operands, results, finish = _stage(src, dst)
        if self._coalesced is not None or getattr(opts, "asyncOp", True):
            pending = self.native.start(call(operands, results))
        else:
            begun = self.native.do(call(operands, results))
            if begun is None:
                if finish is not None:
                    finish()
                return self._done
            pending = begun
        work = Work(self, pending, list(dst) or list(src), finish, self.patience() if kind in _SINGLE else None)
        work.kept = (src, operands, results)
        self._running_work(work)
        if pending.interruption is not None:
            pending.leave()
            raise pending.interruption
        return work

    def _running_work(self, work: Work) -> Work:
        """Keep a work until it has ended."""
        with self._lock:
            self._running.add(work)
        if self._coalesced is not None:
            self._coalesced.append(work)
        self._sweep()
        return work

    def _lane(self, device: torch.device) -> Lane:
        if device not in self._lanes:
            self._lanes[device] = Lane(self, device)
        return self._lanes[device]

    def ended(self, work: Work) -> None:
        """A work of this group has ended."""
        with self._lock:
            self._running.discard(work)
            self._ended.append(work)
        work.kept = None
        if work._failed or work._error is not None:
            self.refresh()

    def _sweep(self) -> None:
        """Let go of works that have ended and that nobody has waited for: some at a time."""
        if len(self._running) > 16:
            with self._lock:
                some = list(self._running)[:8]
            for work in some:
                with contextlib.suppress(LarderError):
                    work._join(0.0)

    def refresh(self) -> None:
        """Have the mirror of the active ranks show what is in force now."""
        active = set(self.native.active())
        self.active_ranks.copy_(torch.tensor([int(r in active) for r in range(len(self.active_ranks))], dtype=torch.int32))

    # Checks.

    def _check_parts(self, parts: Tensors, like: torch.Tensor, name: str) -> None:
        size = self.size()
        if len(parts) != size:
            raise InvalidArgumentError(f"{name}: {len(parts)} tensors for a group of {size}: one for each rank")
        for i, part in enumerate(parts):
            if part.numel() != like.numel() or part.dtype != like.dtype or part.device.type != like.device.type:
                raise InvalidArgumentError(
                    f"{name}: the tensor for rank {i} has {part.numel()} elements of {part.dtype} on {part.device}, the others "
                    f"{like.numel()} of {like.dtype} on {like.device}"
                )

    def _split(self, whole: torch.Tensor, part: torch.Tensor, name: str) -> int:
        size = self.size()
        if whole.numel() != part.numel() * size or whole.dtype != part.dtype:
            raise InvalidArgumentError(
                f"{name}: {whole.numel()} elements of {whole.dtype} for {size} ranks with {part.numel()} of {part.dtype}: one is "
                "as long as all of the others together"
            )
        return size

    def _rows(self, tensor: torch.Tensor, splits: Sequence[int], name: str) -> Parts:
        size, rows = self.size(), tensor.shape[0] if tensor.dim() else 0
        if not splits:
            if rows % size:
                raise InvalidArgumentError(f"all_to_all_single: {rows} rows for {size} ranks: give {name}")
            return size
        if len(splits) != size or sum(splits) != rows or min(splits) < 0:
            raise InvalidArgumentError(f"all_to_all_single: {name} is {list(splits)}: {size} numbers that make {rows} rows together")
        row = tensor.numel() // rows * tensor.element_size() if rows else 0
        parts, at = [], 0
        for n in splits:
            parts.append((at * row, n * row))
            at += n
        return parts


# Kinds that are between two ranks, and that no other call has to wait for.
_SINGLE = {Kind.SEND, Kind.RECV}

# Kinds whose operand, or result, is one buffer at each rank.
_ONE_SRC = {Kind.ALL_GATHER, Kind.GATHER, Kind.BARRIER, *_SINGLE}
_ONE_DST = {Kind.REDUCE_SCATTER, Kind.SCATTER, Kind.BARRIER, *_SINGLE}

_open_groups: weakref.WeakSet[ProcessGroup] = weakref.WeakSet()


def open_groups() -> list[ProcessGroup]:
    """The groups of this process that were not destroyed."""
    return [g for g in _open_groups if not g.closed]


def _one(things: Any, name: str) -> Any:
    if isinstance(things, torch.Tensor):
        return things  # as torch 2's groups let users write it
    if len(things) != 1:
        raise InvalidArgumentError(f"{name}: {len(things)} tensors at one rank: give one, and make a rank of each device")
    return things[0]


def _dtype(tensor: torch.Tensor, reduce: bool = False) -> int:
    number = _DTYPES.get(tensor.dtype)
    if number is None and reduce:
        raise InvalidArgumentError(f"{tensor.dtype} cannot be reduced: use torch.view_as_real, or another dtype")
    return number or _BYTES


def _list(things: Any, single: Any, name: str) -> Any:
    """The list of tensors that belongs to a single one: the only one of several lists, unless the single one is no list."""
    return things if isinstance(single, torch.Tensor) else _one(things, name)


def _root(opts: Any) -> int:
    return opts if isinstance(opts, int) else int(opts.rootRank)


def _op(opts: Any) -> int:
    op = _plain(getattr(opts, "reduceOp", opts) if opts is not None else dist.ReduceOp.SUM)
    number = _OP_NUMBERS.get(op)
    if number is None:
        raise InvalidArgumentError(f"the reduction {op.name} is not supported: {', '.join(_OPS)} are")
    return number


def _region(t: torch.Tensor) -> Region:
    return t.data_ptr(), t.numel() * t.element_size()


def _regions(tensors: Tensors, parts: Parts, one: bool) -> tuple[Region, list[Region] | int]:
    """The memory of tensors: of one of them, or of one for each rank, or of parts of one for each rank."""
    if one or parts:
        region = _region(tensors[0]) if tensors else NOWHERE
        return region, parts if isinstance(parts, int) else [(region[0] + at, n) for at, n in parts]
    return NOWHERE, [_region(t) for t in tensors]


def _stage(src: Tensors, dst: Tensors) -> tuple[Tensors, Tensors, Finish | None]:
    """Operands and results, with contiguous copies of those that are not contiguous, and what copies results back."""
    staged: dict[int, torch.Tensor] = {}  # by id: what is both is copied once, and what is not written stays as it is
    with torch.inference_mode():  # as backends in C++ do, which write parameters, too
        for t in (*src, *dst):
            if id(t) not in staged:
                staged[id(t)] = t.contiguous()
    back = [(t, staged[id(t)]) for t in dst if staged[id(t)] is not t]

    def finish() -> None:
        with torch.inference_mode():
            for target, copy in back:
                target.copy_(copy)

    return [staged[id(t)] for t in src], [staged[id(t)] for t in dst], finish if back else None
