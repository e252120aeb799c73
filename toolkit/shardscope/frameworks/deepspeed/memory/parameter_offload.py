"""Trace of the module calls of one step, as ZeRO-3's hooks record it.

``DeepSpeedZeRoOffload`` (deepspeed/runtime/zero/parameter_offload.py, DeepSpeed 0.19) hooks every module,
even one without direct parameters (``_register_deepspeed_module``): each call fetches its parameters before
forward and before backward, releases them after, and lets the coordinator prefetch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from shardscope.families.parameter_names import (
    list_attention_inputs,
    list_mlp_inputs,
    list_parameter_names,
)
from shardscope.families.parameter_shapes import find_first_layer
from shardscope.families.registry import find_family
from shardscope.frameworks.deepspeed.memory.partition_parameters import split_norms
from shardscope.memory.state.lora import Adapters
from shardscope.memory.state.stages import EMBEDDING_GROUPS, list_outer_tensors, list_rank_shapes

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shardscope.core.architecture import Architecture


# ---- Call trees of modules


class ModuleCall(NamedTuple):
    """Forward call of one module."""

    params: tuple[int, ...] = ()
    """Elements of the module's direct parameters, in registration order."""
    submodules: tuple[ModuleCall, ...] = ()
    """Calls of its submodules, in order."""
    trained: bool = True
    """Whether its parameters get gradients."""
    saved_views: tuple[int, ...] = ()
    """Indices into ``params`` of the tensors that autograd saves transposed views of: their all-gathered
    memory stays allocated as long as the view, even after the release."""
    has_backward: bool = True
    """Whether gradients pass through it."""
    is_feed_forward: bool = False
    """Whether it is one of the feed-forward's large matrices."""
    in_attention: bool = False
    has_vector_pairs: bool = False
    """Whether each matrix in ``params`` is followed by a vector, whose gradient comes after that matrix's."""
    is_leaf: bool = False
    """Whether it is all-gathered and released as one with its submodules (``DEFAULT_LEAF_MODULE_CLASSES``,
    deepspeed/runtime/zero/leaf_module_config.py); its gradients are reduced when all of them exist."""

    @property
    def is_experts(self) -> bool:
        """Return whether it is the module of all routed experts, with an activation between its matmuls."""
        return self.is_feed_forward and bool(self.submodules)


NO_PARAMS = ModuleCall()
"""Call of a module without parameters: an activation, a dropout or rotary embeddings."""


def _mark_attention(call: ModuleCall) -> ModuleCall:
    """Return a call of attention's, of which an adapted projection has the adapter as submodules."""
    return call._replace(in_attention=True, submodules=tuple(map(_mark_attention, call.submodules)))


@lru_cache(maxsize=512)
def build_layer_call(arch: Architecture, adapters: Adapters | None, moe: bool, is_first: bool) -> ModuleCall:
    """Return the call tree of one decoder layer.

    With frozen embeddings no gradient reaches the modules of the first layer (``is_first``) before its first
    adapter.
    """
    modules: dict[str, list[int]] = {}
    for shape in list_rank_shapes(arch, moe, 1, 1):
        modules.setdefault(shape.name.rpartition(".")[0], []).append(
            shape.copies * shape.rows * shape.columns
        )
    names = list_parameter_names(arch)
    build_call = _module_call_builder(arch, adapters, moe, modules, is_first)
    # Calls are built in forward order: the builder tracks where the first adapter is.
    norms = [path for path in modules if "." not in path and path != names.attention]
    norms_before, norms_between, norms_behind = split_norms(arch, norms)
    before = [build_call(path) for path in norms_before]
    in_attention = [path for path in modules if path.startswith(f"{names.attention}.")]
    # Norms of query and key are registered after the output projection, and called before it.
    in_attention.sort(key=lambda path: path == f"{names.attention}.{names.output}")
    attention = [_mark_attention(build_call(path)) for path in in_attention]
    attention_params = tuple(modules.get(names.attention, ()))
    between = [build_call(path) for path in norms_between]
    feed_forward = [path for path in modules if path.startswith("mlp.")]
    if moe and find_family(arch).is_zero3_leaf:
        leaf = _build_leaf(arch, adapters, [modules[path] for path in feed_forward])
        behind = [build_call(path) for path in norms_behind]
        return ModuleCall((), (*before, ModuleCall((), tuple(attention)), *between, leaf, *behind))
    shared = [path for path in feed_forward if path.startswith(f"{names.shared_experts}.")]
    mlp = [build_call(path) for path in feed_forward if path not in shared]
    dropout = [NO_PARAMS] * find_family(arch).has_dropout_modules
    if not moe:
        # The activation function.
        mlp.insert(1, NO_PARAMS)
    elif shared:
        gate, *up_and_down = (build_call(path) for path in shared)
        # DeepSeek calls its shared experts after the routed ones; Qwen's are modelled in the same order.
        mlp.insert(2, ModuleCall((), (gate, NO_PARAMS, *up_and_down)))
    behind = [build_call(path) for path in norms_behind]
    attention_call = ModuleCall(attention_params, (*attention, *dropout), adapters is None)
    mlp_call = ModuleCall((), (*mlp, *dropout))
    return ModuleCall((), (*before, attention_call, *between, mlp_call, *behind))


def _build_leaf(arch: Architecture, adapters: Adapters | None, feed_forward: list[list[int]]) -> ModuleCall:
    """Return the call of a feed-forward that is a ZeRO-3 leaf, without hooks inside."""
    if find_family(arch).registers_router_last:
        # The router is registered after the experts, and so all-gathered after them.
        feed_forward = [*feed_forward[1:], *feed_forward[:1]]
    params = tuple(size for sizes in feed_forward for size in sizes)
    # The routed experts' first matrices are the largest tensor; their last ones follow.
    largest = max(range(len(params)), key=params.__getitem__)
    return ModuleCall(
        params, (), adapters is None, (largest, largest + 1), is_feed_forward=True, is_leaf=True
    )


def _module_call_builder(
    arch: Architecture, adapters: Adapters | None, moe: bool, modules: dict[str, list[int]], is_first: bool
) -> Callable[[str], ModuleCall]:
    """Return a function that builds the call of a module from its path, to be used in forward order.

    It tracks the first adapter, which gradients start from; attention and a parallel feed-forward that reads
    the same input have one each.
    """
    targets = adapters.targets if adapters else ()
    # GPT-2 has two projections of one name, c_proj: in order, each path of a name has the next shape.
    linears: dict[str, list[tuple[int, int]]] = {}
    for linear, shape in arch.layer_linears(find_first_layer(arch, moe)):
        linears.setdefault(linear, []).append(shape)
    # In the first layer, the projections whose input needs no gradient: no adapter has been met before it.
    names, reads_frozen = list_parameter_names(arch), set(list_attention_inputs(arch))
    in_attention = {path.rpartition(".")[2] for path in modules if path.startswith(f"{names.attention}.")}
    if arch.parallel_residual or in_attention.isdisjoint(targets):
        reads_frozen.update(list_mlp_inputs(arch))
    # By branch: whether no adapter was met yet.
    before_adapters = dict.fromkeys((False, True), adapters is not None and is_first)

    def build_call(path: str) -> ModuleCall:
        is_parallel_branch = arch.parallel_residual and path.startswith("mlp.")
        has_backward = not before_adapters[is_parallel_branch]
        params, name = tuple(modules[path]), path.rpartition(".")[2]
        reaches_input = has_backward and not (is_first and adapters is not None and name in reads_frozen)
        is_feed_forward = path.startswith("mlp.") and name not in ("gate", "router", "shared_expert_gate")
        if name == "experts":
            # gpt-oss stores its experts in the layout of the matmul; all others use a transposed view.
            has_biases = find_family(arch).has_clamped_experts
            return ModuleCall(
                params,
                (NO_PARAMS,),
                adapters is None,
                saved_views=() if has_biases else (0, 1),
                has_backward=has_backward,
                is_feed_forward=is_feed_forward,
                has_vector_pairs=has_biases,
            )
        # Falcon multiplies by a transposed view itself; other families use DeepSpeed's own linear function.
        saved_views = (0,) if find_family(arch).projections == "matmul" and name in linears else ()
        if adapters is None or name not in targets:
            return ModuleCall(
                params,
                (),
                adapters is None,
                saved_views,
                reaches_input,
                is_feed_forward,
                has_vector_pairs=has_vector_pair(arch, params),
            )
        output_size, input_size = linears[name].pop(0)
        before_adapters[is_parallel_branch] = False
        lora_a, lora_b = (adapters.rank * size for size in (input_size, output_size))
        base = ModuleCall(params, (), False, saved_views, reaches_input, is_feed_forward)
        return ModuleCall((), (base, NO_PARAMS, ModuleCall((lora_a,)), ModuleCall((lora_b,))))

    return build_call


def has_vector_pair(arch: Architecture, params: tuple[int, ...]) -> bool:
    """Return whether ``params`` of one module are a weight and a bias, whose gradient comes last.

    DeepSpeed replaces ``torch.nn.functional.linear`` (``LinearFunctionForZeroStage3``), and so the weight's
    gradient comes first; GPT-2's Conv1D and Falcon's own matmul add their biases last, and in backward first.
    """
    return len(params) == 2 and find_family(arch).projections == "linear"


# ---- Events of the hooks


class TracedModule(NamedTuple):
    """Module call whose parameters are numbered."""

    params: tuple[int, ...]
    submodules: tuple[TracedModule, ...]
    call: ModuleCall
    all_params: tuple[int, ...] = ()
    """Parameters of the module and all its submodules; empty if these are just ``params``."""


HookEvent = tuple[Literal["fetch", "recompute", "gradients", "release"], TracedModule]
"""``recompute`` is the fetch of a forward that activation checkpointing runs in backward."""


def trace_forward(module: TracedModule) -> Iterator[HookEvent]:
    """Yield the forward events of a module and its submodules, in order."""
    yield "fetch", module
    for submodule in module.submodules:
        yield from trace_forward(submodule)
    if module.params:
        yield "release", module


def trace_backward(module: TracedModule) -> Iterator[HookEvent]:
    """Yield the backward events, in reverse order; a module with several matmuls starts with the last."""
    if not module.call.has_backward:
        return
    yield "fetch", module
    params = module.params
    # The gradient of a module's first matmul comes after the backward of its submodules.
    first_matmul = params[:1] if module.submodules else ()
    if params:
        others = params[len(first_matmul) :]
        order = others if module.call.is_leaf else others[::-1]
        if module.call.has_vector_pairs:
            pairs = range(len(params) - 2, -1, -2)
            order, first_matmul = tuple(index for pair in pairs for index in params[pair : pair + 2]), ()
        yield "gradients", module._replace(params=order)
    for submodule in reversed(module.submodules):
        yield from trace_backward(submodule)
    if first_matmul:
        yield "gradients", module._replace(params=first_matmul)
    if params and not module.call.is_leaf:
        yield "release", module


def insert_recomputation(layer: TracedModule, events: list[HookEvent]) -> list[HookEvent]:
    """Insert the layer's recomputation before the first gradients of its backward ``events``."""
    first_gradients = next((i for i, (kind, _) in enumerate(events) if kind == "gradients"), len(events))
    in_backward = [module for _, module in events[:first_gradients]]
    recomputation: list[HookEvent] = []
    for submodule in layer.submodules:
        for kind, module in trace_forward(submodule):
            if kind == "fetch":
                recomputation.append(("recompute", module))
            # A module whose backward has begun stays active, and so is not released.
            elif not any(module is active for active in in_backward):
                recomputation.append((kind, module))
    return [*events[:first_gradients], *recomputation, *events[first_gradients:]]


# ---- Trace of a whole model

_TIED = -1
"""Placeholder size of a tied head, which is the embedding's tensor."""


class TracedModel(NamedTuple):
    """Model whose modules run, with the tensor sizes outside of decoder layers, in elements."""

    architecture: Architecture
    adapters: Adapters | None
    dense_layers: int
    moe_layers: int
    embeddings: tuple[int, ...]
    final_norm: tuple[int, ...]
    head: tuple[int, ...]
    """Head tensors; empty if the head is tied to the embedding."""


def build_traced_model(
    arch: Architecture, adapters: Adapters | None, dense_layers: int, moe_layers: int
) -> TracedModel:
    """Return the model with its tensors outside of decoder layers, none of them sharded by AutoTP."""
    outer = list_outer_tensors(arch, 1, True, True)
    embeddings, final_norm, head = (
        tuple(rows * columns for group, rows, columns in outer if group in groups)
        for groups in (EMBEDDING_GROUPS, ("norm",), ("lm_head",))
    )
    return TracedModel(arch, adapters, dense_layers, moe_layers, embeddings, final_norm, head)


class FetchTrace(NamedTuple):
    """The parameters that each fetch of a step uses, in order."""

    queue: list[tuple[int, int]]
    """(fetch, parameter) of every use."""
    params: NDArray[np.int64]
    """The parameters of ``queue``."""
    elements_before: NDArray[np.int64]
    """Elements of all earlier entries of ``queue``; one more for its end."""
    uses: list[list[int]]
    """Fetches that use each parameter."""
    recursive_uses: list[list[int]]
    """Fetches that use each parameter directly or in a submodule."""
    traversed: list[int]
    """Elements used before each fetch. For the reuse distance DeepSpeed counts parameters as it releases
    them: a leaf recursively, other modules without submodules, so that these do not count leaves."""
    traversed_recursively: list[int]


def _record_fetches(modules: list[TracedModule], sizes: list[int]) -> FetchTrace:
    queue = [(step, index) for step, module in enumerate(modules) for index in sorted(module.params)]
    params = np.array([index for _, index in queue], np.int64)
    elements_before = np.concatenate(([0], np.cumsum(np.array(sizes, np.int64)[params])))
    traversed, traversed_recursively = [0], [0]
    uses: list[list[int]] = [[] for _ in sizes]
    recursive_uses: list[list[int]] = [[] for _ in sizes]
    for step, module in enumerate(modules):
        all_params = module.all_params or module.params
        for index in module.params:
            uses[index].append(step)
        direct = 0 if module.call.is_leaf else sum(sizes[index] for index in module.params)
        traversed.append(traversed[-1] + direct)
        recursive = sum(sizes[index] for index in all_params)
        traversed_recursively.append(traversed_recursively[-1] + recursive)
        for index in all_params:
            recursive_uses[index].append(step)
    return FetchTrace(queue, params, elements_before, uses, recursive_uses, traversed, traversed_recursively)


@lru_cache(maxsize=64)
def trace_modules(model: TracedModel, recompute_interval: int) -> ModuleTrace:
    """Return the trace of one step of ``model``; shared, so its lists must not be changed."""
    return ModuleTrace(model, recompute_interval)


class ModuleTrace:
    """Hook events of one step over a model's modules, with numbered parameters.

    Every ``recompute_interval``-th layer, starting with the first, is recomputed in backward; 0 recomputes
    none.
    """

    def __init__(self, model: TracedModel, recompute_interval: int) -> None:
        self.recompute_interval = recompute_interval
        self.sizes: list[int] = []
        """Elements of each parameter, by number."""
        self.tied_head = 0 if model.head else model.embeddings[0]
        """Elements of an embedding that is tied to the head; 0 if untied."""
        self.trains_all = model.adapters is None
        self.forward, self.backward = self._trace_step(*self._number_modules(model))
        """Events in parts: one for each end of the model and one for each layer."""
        self.trained = [self.trains_all] * len(self.sizes)
        """Whether each parameter gets a gradient."""
        for events in self.backward:
            for _, module in events:
                for index in module.params:
                    self.trained[index] = module.call.trained

    @property
    def num_layers(self) -> int:
        """Number of decoder layers."""
        return len(self.forward) - 2

    @cached_property
    def fetches(self) -> FetchTrace:
        """Return the fetches of the step, as DeepSpeed records them in its first one."""
        parts = (*self.forward, *self.backward)
        modules = [module for events in parts for kind, module in events if kind in ("fetch", "recompute")]
        return _record_fetches(modules, self.sizes)

    def is_recomputed(self, layer: int) -> bool:
        """Return whether ``layer`` is recomputed in backward."""
        return self.recompute_interval > 0 and layer % self.recompute_interval == 0

    def _number_modules(self, model: TracedModel) -> tuple[list[TracedModule], ...]:
        """Return the wrapper modules, the modules before the layers, the layers and those after them."""
        arch, adapters, trained = model.architecture, model.adapters, model.adapters is None
        kinds = [False] * model.dense_layers + [True] * model.moe_layers
        layer_calls = [build_layer_call(arch, adapters, moe, not index) for index, moe in enumerate(kinds)]
        input_calls = [ModuleCall((size,), (), trained, has_backward=trained) for size in model.embeddings]
        if find_family(arch).has_embedding_dropout:
            input_calls.append(NO_PARAMS._replace(has_backward=trained))
        if arch.position_embedding == "rope":
            # The rotary embedding.
            input_calls.append(NO_PARAMS._replace(has_backward=False))
        output_calls = [
            ModuleCall(model.final_norm, (), trained),
            ModuleCall(
                model.head or (_TIED,),
                (),
                trained,
                has_vector_pairs=has_vector_pair(model.architecture, model.head),
            ),
        ]
        # The model and its base model; peft adds two.
        wrapper_calls = [NO_PARAMS] * (2 if trained else 4)
        wrappers, inputs, layers, outputs = (
            [self._number_params(call) for call in calls]
            for calls in (wrapper_calls, input_calls, layer_calls, output_calls)
        )
        head = outputs[-1].params
        every = tuple(range(len(self.sizes)))
        # The last wrapper is the base model, without the head; a tied head is its embedding.
        without_head = tuple(index for index in every if index not in head or not index)
        outer = [module._replace(all_params=every) for module in wrappers[:-1]]
        return [*outer, wrappers[-1]._replace(all_params=without_head)], inputs, layers, outputs

    def _number_params(self, call: ModuleCall) -> TracedModule:
        params = []
        for size in call.params:
            # The embedding's tensor is number 0.
            params.append(0 if size == _TIED else len(self.sizes))
            if size != _TIED:
                self.sizes.append(size)
        submodules = tuple(self._number_params(inner) for inner in call.submodules)
        below = (index for inner in submodules for index in inner.all_params or inner.params)
        return TracedModule(tuple(params), submodules, call, (*params, *below))

    def _trace_step(
        self,
        wrappers: list[TracedModule],
        inputs: list[TracedModule],
        layers: list[TracedModule],
        outputs: list[TracedModule],
    ) -> tuple[list[list[HookEvent]], list[list[HookEvent]]]:
        """Return the events of forward and of backward, in one part per layer and one per end."""
        norm, head = outputs
        first: list[HookEvent] = [("fetch", module) for module in wrappers]
        first += [event for module in inputs for event in trace_forward(module)]
        forward = [first, *(list(trace_forward(layer)) for layer in layers)]
        forward.append([event for module in outputs for event in trace_forward(module)])
        # The head is outside of the base model, the last wrapper.
        loss: list[HookEvent] = [("fetch", module) for module in wrappers[:-1]]
        loss += [*trace_backward(head), ("fetch", wrappers[-1]), *trace_backward(norm)]
        backward = [loss]
        for index, layer in reversed(list(enumerate(layers))):
            events = list(trace_backward(layer))
            backward.append(insert_recomputation(layer, events) if self.is_recomputed(index) else events)
        # No backward hook fires for the embedding: its parameters stay all-gathered until backward has ended.
        last = [
            event for module in reversed(inputs) for event in trace_backward(module) if event[0] != "release"
        ]
        return forward, [*backward, last]
