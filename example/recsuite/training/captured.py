"""A training step as a CUDA graph: one launch instead of some hundred.

A step of a small batch takes a GPU less time than Python takes to launch its kernels. A graph replays the
launches of one step, with the same kernels and the same arguments. So a captured step has the bits of an
eager one, and three things must not change: shapes, addresses, and numbers that the host passes to a kernel.

    shapes       batches are made on the device, with lists of one length, see `device_batches`
    addresses    tables, weights and optimizer states are changed in place by all of this library
    numbers      learning rates, and the step count of Adam: written into the graph before each replay

FBGEMM's backward and torch's fused optimizers take these numbers by value. So the step is captured with
numbers that occur nowhere else, and the arguments that hold them are found in the graph. Source: "Updating
Instantiated Graphs", CUDA Programming Guide.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch.utils._pytree import tree_map
from typing_extensions import override

from recsuite.config.config import Config
from recsuite.config.sections import UVM
from recsuite.errors import require
from recsuite.runtime.process import RuntimeContext
from recsuite.sharding.recommender import ModelInput
from recsuite.training.device_batches import DeviceBatches, DeviceInput, StepInputs
from recsuite.training.state import ShardedModel, kernels_of

# Eager steps before the capture: libraries allocate and choose kernels in them.
WARM_UP_STEPS = 3
# Captures of a pass. Another one costs as much as several eager steps.
MOST_CAPTURES = 3
# Steps that repeat a graph at least, or none is made: then it costs more than it saves.
FEWEST_STEPS = 10
# The first marker of each format. Odd, so that no address has its bytes, and no rate or count of a training.
MARKERS = {"<f": 0x3D9A7B31, "<d": 0x3FB353BDC2D8A5E7, "<q": 0x12345601}
# Optimizers of FBGEMM whose kernel takes the number of the step.
COUNTING = (EmbOptimType.ADAM, EmbOptimType.PARTIAL_ROWWISE_ADAM)

# The function of a script that makes a step, from a batch.
StepFunction = Callable[[ModelInput], Any]


@dataclass(frozen=True)
class Number:
    """Number that the host passes to kernels of a step.

    name: for messages; kind: its format as an argument, of `struct`; read: returns its value in the next
    step; write: sets it for the capture.
    """

    name: str
    kind: str
    read: Callable[[], float]
    write: Callable[[Any], None]


class StepGraph(Protocol):
    """Recording of a step that can be repeated."""

    def capture(self, run: Callable[[], Any], numbers: Sequence[Number]) -> None:
        """Record a call of `run`, without effect on any tensor that existed before.

        Raises:
            RuntimeError: when it cannot be recorded.
        """

    def replay(self) -> Any:
        """Repeat the recorded work with the numbers of this step; return what `run` returned."""

    def close(self) -> None:
        """Free the recording."""


class TrainingStep:
    """Function of a step that is captured where that is possible, see `Training.step`.

    why_not: the reason why no step can be captured, or None; is_required: a reason is an error.
    """

    def __init__(
        self,
        function: StepFunction,
        model: ShardedModel,
        context: RuntimeContext,
        why_not: str | None,
        is_required: bool,
        make_graph: Callable[[], StepGraph] | None = None,
    ) -> None:
        self.function, self.model, self.context = function, model, context
        self.is_required, self.make_graph = is_required, make_graph or CudaGraph
        self.graph: StepGraph | None = None
        self.is_eager = self.has_captured = False
        self._eager_steps = self._captures = 0
        # Eager steps of batches whose lists have more values than their budget.
        self.above_budget = 0
        self._steps_left = FEWEST_STEPS
        self._said: set[str] = set()
        # Of the graph.
        self._source: DeviceBatches | None = None
        self._inputs: StepInputs
        self._copied: StepInputs
        self._fixed: list[dict[str, Any]] = []
        if (reason := why_not or why_no_capture(model)) is not None:
            self._give_up(reason)

    def __call__(self, batch: ModelInput) -> Any:
        """Make a step. Tensors of a captured one's result are copies, without a gradient."""
        if self.is_eager or not isinstance(batch, DeviceInput):
            return self.function(batch)
        if batch.is_above_budget:
            self.above_budget += 1
            if self.above_budget == 1:
                self.context.say("a step is not captured where its lists are above their budget of values")
            return self.function(batch)
        if batch.is_made:
            # The script may have changed what it read.
            self._stay_eager("the script reads a batch before its step")
            return self.function(batch)
        if self._eager_steps < WARM_UP_STEPS:
            self._eager_steps += 1
            result = self.function(batch)
            if self.model.is_pending:
                self._give_up("the function of the step does not end with model.step()")
            return result
        if self.graph is not None and (
            self._source is not batch.source or self._fixed != fixed_settings(self.model)
        ):
            # A stream has grown, or a script has changed a setting.
            self.close()
        if self.graph is None:
            if self._steps_left < FEWEST_STEPS and not self.is_required:
                self._stay_eager(f"fewer than {FEWEST_STEPS} steps could repeat it")
                return self.function(batch)
            self._captures += 1
            if self._captures > MOST_CAPTURES:
                self._give_up("a setting of the dense optimizer or of a module changes from step to step")
                return self.function(batch)
            try:
                self._capture(batch)
            except (RuntimeError, NotImplementedError, ImportError) as error:
                self._give_up(f"the capture failed: {_first_of(error)}")
                return self.function(batch)
        assert self.graph is not None
        self._inputs.copy_(batch.inputs, self._copied)
        self._copied = batch.inputs
        result, self.model.loss = self.graph.replay()
        # Copied, because the next replay writes to the same memory.
        return tree_map(
            lambda part: part.detach().clone() if isinstance(part, torch.Tensor) else part, result
        )

    def _capture(self, batch: DeviceInput) -> None:
        self._inputs, self._copied, model = batch.inputs.clone(), batch.inputs, self.model
        self._source, inputs = batch.source, self._inputs

        def run() -> tuple[Any, torch.Tensor | None]:
            return self.function(DeviceInput(batch.source, inputs)), model.loss

        numbers = numbers_of(model)
        before = [number.read() for number in numbers]
        self._fixed, graph = fixed_settings(model), self.make_graph()
        groups = model.dense_optimizer.param_groups
        settings = [dict(group) for group in groups]
        for group in groups:
            if "capturable" in group:
                group["capturable"] = True
        try:
            graph.capture(run, numbers)
        except BaseException:
            graph.close()
            raise
        finally:
            for number, value in zip(numbers, before, strict=True):
                number.write(value)
            for group, setting in zip(groups, settings, strict=True):
                group.update(setting)
            # What a recording leaves in these was never computed.
            model.loss, model.is_pending = None, False
            model.dense_optimizer.zero_grad()
        self.graph = graph
        if not self.has_captured:
            self.context.say("steps are captured: each is one CUDA graph")
        self.has_captured = True

    def _stay_eager(self, reason: str) -> None:
        """Say once why some steps are eager; refuse it if that is required."""
        if self.is_required:
            self._give_up(reason)
        if reason not in self._said:
            self.context.say(f"a step is not captured where {reason}")
        self._said.add(reason)

    def begin_pass(self, num_steps: int, keeps: bool = False) -> None:
        """Capture anew in the next pass: what Python reads in a step may change from pass to pass.

        num_steps: that can repeat a graph; keeps: a graph stays, as in windows of the same columns.
        """
        self._steps_left = num_steps
        if not keeps:
            self.close()
            self._captures = 0

    def _give_up(self, reason: str) -> None:
        check_capture(self.is_required, reason)
        self.is_eager = True
        # A CPU has no graphs, and needs no line about them.
        if self.context.device.type == "cuda":
            self.context.say(f"steps are not captured, because {reason}")

    def close(self) -> None:
        """Free the graph. To be called before the process group ends: a graph may hold its kernels."""
        if self.graph is not None:
            self.graph.close()
            # Columns are large.
            self.graph = self._source = None


def check_capture(is_required: bool, reason: str | None) -> None:
    """Refuse --capture on for a reason, unless it is None."""
    require(
        not is_required or reason is None,
        f"--capture on: steps cannot be captured, because {reason}; give auto or off",
    )


def why_eager(config: Config, device: torch.device, why_on_host: str) -> str | None:
    """Return the reason why no model has captured steps with these flags, or None.

    why_on_host: the reason why batches are made there, "" if they are not.
    """
    if device.type != "cuda":
        return "there is no GPU"
    if why_on_host:
        return f"batches are made on the host: {why_on_host}"
    if config.tables.storage == UVM:
        return f"--storage is {UVM}"
    try:
        import cuda.bindings  # noqa: F401
    except ImportError:
        return "cuda-bindings is not installed"
    return None


def why_no_capture(model: ShardedModel) -> str | None:
    """Return the reason why steps of a model cannot be captured, or None."""
    optimizer = model.dense_optimizer
    if not all(group.get("fused") for group in optimizer.param_groups):
        # Others compute numbers from the rate on the host, such as one minus the rate times the decay.
        return f"the optimizer of the dense part, {type(optimizer._optimizer).__name__}, is not fused"
    return None


def fixed_settings(model: ShardedModel) -> list[dict[str, Any]]:
    """Return what a captured step repeats, of each group of the dense optimizer and of the modules."""
    changing = ("params", "lr", "scheduled_lr", "initial_lr")
    groups = [
        {name: value for name, value in group.items() if name not in changing}
        for group in model.dense_optimizer.param_groups
    ]
    modes = [module.training for module in model.head.modules()]
    return [*groups, {"modes": modes, "learns": [value.requires_grad for value in model.head.parameters()]}]


def numbers_of(model: ShardedModel) -> list[Number]:
    """Return the numbers that change from step to step."""
    numbers = [
        Number(f"the rate of group {index} of the dense part", "<d", *_entry(group, "lr"))
        for index, group in enumerate(model.dense_optimizer.param_groups)
    ]
    for index, kernel in enumerate(kernels_of(model.optimizer)):
        rate, count = kernel.learning_rate_tensor, kernel.iter_cpu
        numbers.append(Number(f"the rate of tables {index}", "<f", rate.item, rate.fill_))
        if kernel.optimizer in COUNTING:
            numbers.append(Number(f"the step of tables {index}", "<q", *_count(count)))
    return numbers


# Reads and writes a number.
Access = tuple[Callable[[], float], Callable[[Any], Any]]


def _entry(group: dict[str, Any], name: str) -> Access:
    return lambda: group[name], lambda value: group.__setitem__(name, value)


def _count(steps: torch.Tensor) -> Access:
    # The forward adds one before it passes the number on.
    return lambda: int(steps.item()) + 1, lambda value: steps.fill_(value - 1)


def _first_of(error: BaseException) -> str:
    """Return the message of the first of several errors: ending a failed capture is another one."""
    while error.__context__ is not None:
        error = error.__context__
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def markers_of(numbers: Sequence[Number]) -> list[bytes]:
    """Return bytes for each number that stand for it during the capture; no two are equal."""
    # Steps of two keep the markers odd.
    return [
        (MARKERS[number.kind] + 2 * index).to_bytes(struct.calcsize(number.kind), "little")
        for index, number in enumerate(numbers)
    ]


class CudaGraph(StepGraph):
    """CUDA graph whose kernels get the numbers of each step."""

    def __init__(self) -> None:
        self.graph = torch.cuda.CUDAGraph(keep_graph=True)
        self.nodes: list[_Node] = []
        self.numbers: Sequence[Number] = ()
        self.result: Any = None

    @override
    def capture(self, run: Callable[[], Any], numbers: Sequence[Number]) -> None:
        from cuda.bindings import driver

        self.numbers, markers = numbers, markers_of(numbers)
        for number, marker in zip(numbers, markers, strict=True):
            (value,) = struct.unpack(number.kind, marker)
            number.write(value)
        # After a failed capture torch's generator would expect to be captured for ever.
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
        drawn = generator.clone_state()
        try:
            # Of this thread alone: another one may write a checkpoint meanwhile.
            with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
                self.result = run()
        except BaseException:
            generator.graphsafe_set_state(drawn)
            raise
        for number, marker in zip(numbers, markers, strict=True):
            if number.kind == "<q" and number.read() != int.from_bytes(marker, "little") + 1:
                # Each forward counts, and only the first one's number is marked.
                raise RuntimeError(
                    "the step looks rows up twice, and the optimizer of the tables counts steps"
                )
        self.graph.instantiate()
        self.handle = driver.CUgraphExec(self.graph.raw_cuda_graph_exec())
        self.nodes = _nodes_with(driver, markers, self.graph.raw_cuda_graph())
        taken = {index for node in self.nodes for index, _, _ in node.arguments_with_numbers}
        for index, number in enumerate(numbers):
            # A replay would repeat the number of the capture.
            if index not in taken:
                raise RuntimeError(f"no kernel of the step takes {number.name}")

    @override
    def replay(self) -> Any:
        values = [struct.pack(number.kind, number.read()) for number in self.numbers]
        for node in self.nodes:
            node.set(self.handle, values)
        self.graph.replay()
        return self.result

    @override
    def close(self) -> None:
        self.result, self.nodes = None, []
        self.graph.reset()


class _Node:
    """Kernel of a graph with numbers among its arguments.

    driver: the module of `cuda-bindings`, here and below; parameters: of the kernel, for the driver;
    arguments: the bytes of each; arguments_with_numbers: number, argument and offset in it.
    """

    def __init__(
        self,
        driver: Any,
        node: Any,
        parameters: Any,
        arguments: list[Any],
        arguments_with_numbers: list[tuple[int, int, int]],
    ) -> None:
        self.driver, self.node, self.parameters = driver, node, parameters
        self.arguments, self.arguments_with_numbers = arguments, arguments_with_numbers
        self._pointers = (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
        parameters.kernelParams = ctypes.addressof(self._pointers)
        self._last: list[bytes] = []

    def set(self, handle: Any, values: Sequence[bytes]) -> None:
        """Write the numbers, by their index, into the arguments for all later replays."""
        mine = [values[number] for number, _, _ in self.arguments_with_numbers]
        if mine == self._last:
            return
        for value, (_, argument, offset) in zip(mine, self.arguments_with_numbers, strict=True):
            ctypes.memmove(ctypes.addressof(self.arguments[argument]) + offset, value, len(value))
        _checked(self.driver.cuGraphExecKernelNodeSetParams(handle, self.node, self.parameters))
        self._last = mine


def _nodes_with(driver: Any, markers: Sequence[bytes], graph: int) -> list[_Node]:
    """Return the kernels of a graph that have markers among their arguments."""
    raw, with_numbers = driver.CUgraph(graph), []
    _, count = _checked(driver.cuGraphGetNodes(raw, 0))
    nodes, _ = _checked(driver.cuGraphGetNodes(raw, count))
    for node in nodes:
        (kind,) = _checked(driver.cuGraphNodeGetType(node))
        if kind != driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL:
            continue
        (parameters,) = _checked(driver.cuGraphKernelNodeGetParams(node))
        arguments = _arguments_of(driver, parameters)
        marked = [
            (number, index, offset)
            for number, marker in enumerate(markers)
            for index, argument in enumerate(arguments)
            for offset in range(0, len(argument.raw) - len(marker) + 1, len(marker))
            if argument.raw[offset : offset + len(marker)] == marker
        ]
        if marked:
            with_numbers.append(_Node(driver, node, parameters, arguments, marked))
    return with_numbers


def _arguments_of(driver: Any, parameters: Any) -> list[Any]:
    """Return copies of the arguments of a kernel, as buffers; none for a kernel that packs them itself."""
    address, sizes = int(parameters.kernelParams), list[int]()
    if not address:
        return []
    while True:
        # A kernel of a library has a handle of another kind.
        if int(parameters.func):
            status, _, size = driver.cuFuncGetParamInfo(parameters.func, len(sizes))
        else:
            status, _, size = driver.cuKernelGetParamInfo(parameters.kern, len(sizes))
        if int(status):
            break
        sizes.append(size)
    pointers = (ctypes.c_void_p * len(sizes)).from_address(address)
    return [
        ctypes.create_string_buffer(ctypes.string_at(pointer or 0, size), size)
        for pointer, size in zip(pointers, sizes, strict=True)
    ]


def _checked(returned: Any) -> Any:
    """Return the results of a call of the driver, without its status; raise if it failed."""
    status, *results = returned
    if int(status) != 0:
        raise RuntimeError(f"the CUDA driver refused to change a graph: {status}")
    return results
