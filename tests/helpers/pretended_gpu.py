"""A pretended GPU: a tensor that says it is on cuda:0, and whose values a CPU computes.

After `PretendedGpu().install()`, train.py and the other scripts run in this process as if it had
one GPU, with real numbers. `faults` has a line for each of these, with the place in the project:

* an operation on tensors of both devices; only single numbers may be on the host,
* a wait of the host for the GPU in an update after the second,
* a tensor that is used on another stream than the one that wrote it, without waiting for that one.

`operations` has, for each update, how many operations the host starts on the GPU; views are not
counted.

It does not imitate kernels, memory or speed, and does not support DDP or torch.compile. PyTorch's
own autocast does nothing here, because C++ code sees tensors on the device "meta". Calls from
Python of the functions in LOWER and FLOAT imitate it.
"""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map

import train

ROOT = Path(__file__).parents[2]
GPU = torch.device("cuda", 0)
COPIES = torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default
# CUDA accepts indices on the host
INDEXED = "aten::index", "aten::index_put_", "aten::_index_put_impl_"
# What autocast computes in its own type, and what it computes in float32.
LOWER = "linear conv1d conv2d conv3d matmul __matmul__ mm bmm addmm scaled_dot_product_attention"
FLOAT = "cross_entropy nll_loss binary_cross_entropy_with_logits softmax log_softmax"
FLOAT += " layer_norm group_norm exp log pow sum prod norm"


class OnGpu(Tensor):
    """A tensor of the pretended GPU; `held` has its values."""

    held: Tensor
    device = property(lambda self: GPU)
    is_cuda = property(lambda self: True)
    is_meta = property(lambda self: False)

    @staticmethod
    def __new__(cls, held: Tensor) -> "OnGpu":
        layout = held.shape, held.stride(), held.storage_offset()
        made = Tensor._make_wrapper_subclass(cls, *layout, dtype=held.dtype, device="meta")
        made.held = held
        return made

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if name == "to":  # C++ would copy from "meta"
            args = tuple(None if _is_gpu(each) else each for each in args)
            kwargs = {key: value for key, value in kwargs.items() if not _is_gpu(value)}
            if args[1:2] in ((), (None,)) and not kwargs and torch.dtype not in map(type, args):
                return args[0]
        with torch._C.DisableTorchFunctionSubclass():
            if torch.is_autocast_enabled("cuda"):
                if name in LOWER.split():
                    args, kwargs = tree_map(_cast(torch.get_autocast_dtype("cuda")), (args, kwargs))
                elif name in FLOAT.split():
                    args, kwargs = tree_map(_cast(torch.float32), (args, kwargs))
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return PretendedGpu.installed.run(func, args, kwargs or {})

    def record_stream(self, stream: "Stream") -> None:
        """Memory is not reused here."""

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def __repr__(self) -> str:
        return repr(self.cpu())

    def __reduce_ex__(self, protocol):
        # a file has no tensor of the pretended kind
        return self.detach().cpu().__reduce_ex__(protocol)


def _is_gpu(each: Any) -> bool:
    return isinstance(each, torch.device) and each == GPU


def _cast(dtype: torch.dtype) -> Callable[[Any], Any]:
    floats = torch.float32, torch.float16, torch.bfloat16
    return lambda each: each.to(dtype) if isinstance(each, OnGpu) and each.dtype in floats else each


class Event:
    """`seen` has, for each stream, the last operation that is complete after the event."""

    def __init__(self, *_given, **_options):
        self.seen: dict[Stream, int] = {}

    def record(self, stream: "Stream | None" = None) -> None:
        self.seen = dict((stream or torch.cuda.current_stream()).seen)

    def wait(self, stream: "Stream | None" = None) -> None:
        (stream or torch.cuda.current_stream()).wait_event(self)

    def synchronize(self) -> None:
        PretendedGpu.installed.wait("Event.synchronize", self.seen)

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: "Event") -> float:
        return 1.0


class Stream:
    """`seen` has, for each stream, the last operation that is complete before the next one of this
    stream begins.
    """

    def __init__(self, *_given, **_options):
        self.seen: dict[Stream, int] = {}

    def wait_event(self, event: "Event | Stream") -> None:
        for stream, number in event.seen.items():
            self.seen[stream] = max(number, self.seen.get(stream, 0))

    wait_stream = wait_event

    def is_capturing(self) -> bool:
        return False

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        PretendedGpu.installed.wait("Stream.synchronize", self.seen)


class PretendedGpu(TorchDispatchMode):
    """The GPU, and what it has found."""

    installed: "PretendedGpu"

    def __init__(self):
        super().__init__()
        self.faults: list[str] = []
        self.operations: list[int] = []
        self.in_update, self.launched = False, 0
        self.stream = Stream()
        # they have no operations: what the host has waited for, and all
        self.host, self.all = Stream(), Stream()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return self.run(func, args, kwargs or {})

    def run(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """Compute an operation of PyTorch, on either device."""
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        ours = [each for each in tensors if isinstance(each, OnGpu)]
        device = kwargs.get("device")
        to_gpu = bool(ours) if device is None else torch.device(device).type in ("cuda", "meta")
        if not ours and not to_gpu:
            return func(*args, **kwargs)
        on_host = [each for each in tensors if not isinstance(each, OnGpu)]
        self.check(func, args, kwargs, to_gpu, on_host)
        if not func.is_view and "empty" not in func.name():
            self.launch(func, ours)
        given = kwargs | ({} if device is None else {"device": "cpu"})
        result = func(*tree_map(_held, args), **tree_map(_held, given))
        if not to_gpu:
            return result
        wrapped = tree_map(lambda each: OnGpu(each) if isinstance(each, Tensor) else each, result)
        if not func.is_view:
            # None: lists were changed in place
            for each in ours if result is None else tree_leaves(wrapped):
                if isinstance(each, OnGpu):
                    last = self.stream.seen.get(self.stream, 0)
                    each.held.untyped_storage().written = self.stream, last
        return return_and_correct_aliasing(func, args, kwargs, wrapped) if ours else wrapped

    def check(
        self, func: Any, args: tuple, kwargs: dict, to_gpu: bool, on_host: list[Tensor]
    ) -> None:
        """Find operations on both devices, and waits."""
        name = func.name()  # of the operation and its overload, such as aten::add.Tensor
        if func in COPIES:
            # a new copy on the host is pinned, if non_blocking
            pinned = all(each.is_pinned() for each in on_host)
            non_blocking = kwargs.get("non_blocking") or args[2:] == (True,)
            if (on_host or not to_gpu) and not (non_blocking and pinned):
                self.wait(f"{name}, a copy between host and GPU,", self.stream.seen)
            return
        wait = waits(func)
        if name.split(".")[0] in INDEXED:
            indices, values = [each for each in args[1] if each is not None], args[2:3]
            is_number = values and values[0].numel() == 1
            masks = not is_number and any(each.dtype == torch.bool for each in indices)
            wait = masks or any(not isinstance(each, OnGpu) for each in indices)
            on_host = [each for each in (args[0], *values) if not isinstance(each, OnGpu)]
        if any(each.dim() for each in on_host):
            self.find(f"{name} has tensors on the host and on the GPU")
        if wait:
            self.wait(name, self.stream.seen)

    def launch(self, func: Any, ours: list[OnGpu]) -> None:
        """Count an operation, and check that its tensors are ready on this stream."""
        self.launched += 1
        for tensor in ours:
            stream, number = getattr(tensor.held.untyped_storage(), "written", (self.stream, 0))
            if max(self.stream.seen.get(stream, 0), self.host.seen.get(stream, 0)) < number:
                self.find(f"{func.name()} uses what another stream writes, without waiting for it,")
        self.stream.seen[self.stream] = self.all.seen[self.stream] = self.launched

    def wait(self, what: str, seen: dict) -> None:
        """The host waits for the operations that are `seen`."""
        event = Event()
        event.seen = seen
        self.host.wait_event(event)
        if self.in_update and len(self.operations) >= 2:
            self.find(f"{what} makes the host wait for the GPU")

    def find(self, what: str) -> None:
        """Record a fault, with the line of the project that it comes from."""
        frame: Any = sys._getframe(1)
        while frame and (
            frame.f_code.co_filename == __file__ or not _is_ours(frame.f_code.co_filename)
        ):
            frame = frame.f_back
        place = "outside the project"
        if frame:
            file = Path(frame.f_code.co_filename).relative_to(ROOT)
            place = f"{file}:{frame.f_lineno} ({frame.f_code.co_qualname})"
        if (line := f"{what} at {place}") not in self.faults:
            self.faults.append(line)

    def update(self, run: Any, batches: Iterator[Any]) -> None:
        """One update of train.py."""
        before, self.in_update = self.launched, True
        try:
            self.train_update(run, batches)
        finally:
            self.in_update = False
        self.operations.append(self.launched - before)

    @contextmanager
    def using(self, stream: Stream) -> Iterator[None]:
        """`torch.cuda.stream`."""
        before, self.stream = self.stream, stream
        try:
            yield
        finally:
            self.stream = before

    def install(self) -> None:
        """Use this GPU from now on in this thread; nothing removes it."""
        PretendedGpu.installed = self
        # without a number, PyTorch would ask the driver for it
        os.environ["ACCELERATE_TORCH_DEVICE"] = str(GPU)
        self.train_update, train.train_update = train.train_update, self.update
        answers: dict[str, Any] = {
            "is_available": True,
            "device_count": 1,
            "current_device": 0,
            "is_bf16_supported": True,
            "get_device_name": "pretended GPU",
            "get_device_capability": (9, 0),
            "mem_get_info": (8 << 30, 8 << 30),
            "max_memory_allocated": 0,
            "reset_peak_memory_stats": None,
            "set_device": None,
            "_lazy_init": None,
            "current_device_index": 0,
            "set_device_index": None,
            "current_stream": self.stream,
        }
        for name, answer in answers.items():
            for module in (torch.cuda, torch.accelerator):
                setattr(module, name, lambda *_given, answer=answer, **_options: answer)
        torch.cuda.Stream, torch.cuda.Event, torch.cuda.stream = Stream, Event, self.using
        torch.cuda.current_stream = lambda *_given: self.stream
        torch.cuda.synchronize = lambda *_given: self.wait("torch.cuda.synchronize", self.all.seen)
        torch.cuda.default_generators = (torch.default_generator,)
        Tensor.pin_memory = _pin
        Tensor.is_pinned = lambda each, *_given: hasattr(each.untyped_storage(), "pinned")
        sys.modules["torch.optim.optimizer"]._foreach_supported_types.append(OnGpu)
        for name in ("tensor", "as_tensor", "asarray"):
            setattr(torch, name, _through_the_host(getattr(torch, name)))
        group = torch._C._group_tensors_by_device_and_dtype

        def grouped(*given):  # C++ sees "meta"
            groups, meta = group(*given).items(), torch.device("meta")
            return {({meta: GPU}.get(where, where), kind): each for (where, kind), each in groups}

        torch._C._group_tensors_by_device_and_dtype = grouped
        # so that an optimizer keeps its parameters
        torch.__future__.set_swap_module_params_on_conversion(True)
        self.__enter__()


def _held(each: Any) -> Any:
    return each.held if isinstance(each, OnGpu) else each


def _through_the_host(make: Callable) -> Callable:
    """torch.tensor, which would ask the driver."""
    return lambda *given, device=None, **options: make(*given, **options).to(device)


def _pin(tensor: Tensor, *_given) -> Tensor:
    if not tensor.is_pinned():
        tensor = tensor.clone()
        tensor.untyped_storage().pinned = True  # storages keep their attributes
    return tensor


@cache
def waits(func: Any) -> bool:
    """Whether a result, or its size, depends on values that the host has to read."""
    tags = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
    return not tags.isdisjoint(func.tags)


@cache
def _is_ours(file: str) -> bool:
    return file.startswith(f"{ROOT}/") and "/.venv/" not in file
