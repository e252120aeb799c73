"""Monitoring of a script's ``Accelerator`` while the script runs unchanged.

Wrappers around methods of Accelerate's classes inspect and log the results. They raise if a result
contradicts the plan, so the traceback contains the script's own line.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, SupportsInt, TypeVar, cast

import accelerate
import torch
import torch.distributed as dist
import torch.utils.checkpoint
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer

from shardscope.core.number_format import format_count
from shardscope.frameworks.accelerate import script_differences
from shardscope.frameworks.accelerate.plugin_fields import TITLE
from shardscope.frameworks.accelerate.plugins import get_plugin, make_contradiction
from shardscope.frameworks.formats.accelerate_config import MIXED
from shardscope.records.json_files import RESERVED
from shardscope.training.accounting import tensors
from shardscope.training.engine import Context

SHORT_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}

P = ParamSpec("P")
R = TypeVar("R")


class Method(Protocol):
    """A method of Accelerate or torch, with its own arguments."""

    def __call__(self, *args: object, **kwargs: object) -> object: ...


class ScriptContext(Context, Protocol):
    """The part of a rank's context that a script's monitor needs."""

    def memory_metrics(self) -> Mapping[str, float]: ...


class Watch:
    """Monitor of one script on one rank."""

    def __init__(self, ctx: ScriptContext, name: str) -> None:
        self.ctx, self.plan, self.name = ctx, ctx.plan, name
        self.plugin = get_plugin(ctx.plan)
        self.accelerator: Accelerator | None = None
        self.record: dict[str, object] = {}
        """The entry ``engine`` of ``run.engine_reports()``."""
        self.differences: list[str] = []
        """Choices of the script that differ from the plan."""
        self.num_steps = 0
        """Completed optimizer steps."""
        self._models: list[torch.nn.Module] = []
        self._accumulates = False
        self._recomputes = False
        self._losses: list[torch.Tensor] = []
        self._pending: tuple[int, torch.Tensor, dict[str, float]] | None = None
        self._last_step: float | None = None

    @contextmanager
    def wrap_accelerate(self) -> Iterator[None]:
        """Wrap the methods of Accelerate's classes inside the context."""
        from accelerate.utils.deepspeed import DeepSpeedOptimizerWrapper

        restore = [
            _wrap_method(Accelerator, "__init__", self._on_init),
            _wrap_method(Accelerator, "prepare", self._on_prepare),
            _wrap_method(Accelerator, "prepare_model", self._on_prepare_model),
            _wrap_method(Accelerator, "accumulate", self._on_accumulate),
            _wrap_method(Accelerator, "backward", self._on_backward),
            _wrap_method(Accelerator, "log", self._on_log),
            _wrap_method(AcceleratedOptimizer, "step", self._on_step),
            _wrap_method(DeepSpeedOptimizerWrapper, "step", self._on_step),
            # ``torch.utils.checkpoint`` creates the first without reentrant backward (torch 2.10 to 2.14),
            # and calls the second with it.
            _wrap_method(torch.utils.checkpoint._checkpoint_hook, "__init__", self._on_recompute),
            _wrap_method(torch.utils.checkpoint.CheckpointFunction, "forward", self._on_recompute),
        ]
        try:
            yield
        finally:
            for undo in restore:
                undo()

    def finish(self) -> None:
        """Log the last step of an ended script, and report one without a model.

        Raises ``RuntimeError`` if it created no Accelerator.
        """
        self._log_pending_step()
        if self.accelerator is None:
            raise RuntimeError(
                f"{self.name} ended without creating an Accelerator(): nothing of it ran as planned. To run "
                "code without Accelerate, launch a function f(ctx)."
            )
        if not self._models:
            self._report_difference("prepared no model for training: nothing was trained as planned")

    # ---- Wrappers: each gets the wrapped method and its arguments

    def _on_init(
        self, original: Method, accelerator: Accelerator, /, *args: object, **kwargs: object
    ) -> None:
        original(accelerator, *args, **kwargs)
        self.accelerator = accelerator
        self.plugin.configure(self.plan, accelerator)
        self._check_state(accelerator)
        kind = accelerator.distributed_type.name
        num_ranks = format_count(accelerator.num_processes, "rank")
        self._start_record(f"{kind} over {num_ranks}; no model was prepared for training", {})

    def _on_prepare(
        self, original: Method, accelerator: Accelerator, /, *args: object, **kwargs: object
    ) -> object:
        result = original(accelerator, *args, **kwargs)
        # Checked after the call, when Accelerate has wrapped or sharded the model.
        # ``prepare`` returns a tuple with most frameworks, and a list with FSDP2.
        prepared = result if isinstance(result, tuple | list) else (result,)
        for value in prepared:
            if isinstance(value, torch.nn.Module):
                self._inspect_model(value)
        return result

    def _on_prepare_model(
        self, original: Method, accelerator: Accelerator, /, *args: object, **kwargs: object
    ) -> object:
        model = original(accelerator, *args, **kwargs)
        is_evaluated = kwargs.get("evaluation_mode") or args[2:3] == (True,)
        if not is_evaluated and isinstance(model, torch.nn.Module):
            self._inspect_model(model)
        return model

    def _on_accumulate(self, original: Method, /, *args: object) -> object:
        self._accumulates = True
        return original(*args)

    def _on_backward(
        self, original: Method, accelerator: Accelerator, /, loss: object, **kwargs: object
    ) -> None:
        # The script never called ``accumulate``, so it does not accumulate: each backward is a whole step.
        if not self._accumulates and accelerator.gradient_accumulation_steps > 1:
            self._disable_accumulation(accelerator)
        original(accelerator, loss, **kwargs)
        if isinstance(loss, torch.Tensor):
            self._losses.append(loss.detach().float().mean())

    def _on_step(
        self, original: Method, optimizer: AcceleratedOptimizer, /, *args: object, **kwargs: object
    ) -> object:
        # Accelerate's optimizer steps only in the last micro-batch (accelerate/optimizer.py), though scripts
        # call it in each. Gradients are counted before the first step, which may free them.
        is_last_micro_batch = bool(optimizer.gradient_state.sync_gradients)
        if is_last_micro_batch and self.num_steps == 0 and self._models:
            gradient_bytes = sum(tensors.count_gradient_bytes(model) for model in self._models)
            # DeepSpeed has none left: its engine takes the optimizer step in backward.
            if gradient_bytes:
                self._add_to_record(gradient_bytes=gradient_bytes)
            self._add_to_record(micro_batches_per_step=len(self._losses))
        result = original(optimizer, *args, **kwargs)
        if is_last_micro_batch:
            self._finish_step(optimizer)
        return result

    def _on_recompute(self, original: Method, /, *args: object, **kwargs: object) -> object:
        self._recomputes = True
        return original(*args, **kwargs)

    def _on_log(
        self, original: Method, accelerator: Accelerator, /, values: object, *args: object, **kwargs: object
    ) -> object:
        # Trackers take any whole number: an int, a numpy integer, a tensor of one element.
        step = cast("SupportsInt | None", kwargs.get("step", args[0] if args else None))
        if accelerator.is_main_process and isinstance(values, Mapping):
            metrics = {
                _rename_reserved(str(name)): value for name, value in values.items() if _is_scalar(value)
            }
            if metrics:
                self.ctx.log(step=self.num_steps if step is None else int(step), **metrics)
        return original(accelerator, values, *args, **kwargs)

    # ---- Checks and records of the results

    def _check_state(self, accelerator: Accelerator) -> None:
        """Raise ``RuntimeError`` if framework, ranks, device or precision contradict the plan."""
        kind, allowed = accelerator.distributed_type.name, self.plugin.list_distributed_types(self.plan)
        title = self.plan.layout.title
        if kind not in allowed:
            raise make_contradiction(
                f"{title}, which {TITLE} calls {' or '.join(allowed)}",
                kind,
                "remove plugins from Accelerator(...): the plan configures its own",
            )
        if accelerator.num_processes != self.plan.world_size:
            raise make_contradiction(
                f"{self.plan.world_size} ranks", f"{accelerator.num_processes} processes"
            )
        if accelerator.device.type != self.ctx.device.type:
            raise make_contradiction(
                f"the device {self.ctx.device.type}", accelerator.device.type, "remove cpu=True"
            )
        precision = self.plan.recipe.precision
        # DeepSpeed has one bf16 mode, bf16 weights with fp32 main weights, which its configuration file sets.
        if kind != "DEEPSPEED" and accelerator.mixed_precision != MIXED[precision]:
            raise make_contradiction(
                f"precision={precision!r}",
                f"mixed_precision={accelerator.mixed_precision!r}",
                "remove mixed_precision from Accelerator(...), or plan another precision",
            )

    def _inspect_model(self, model: torch.nn.Module) -> None:
        """Check and record a prepared model; models without trainable weights are ignored."""
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if not trained or any(model is known for known in self._models):
            return
        self._check_types(trained)
        sentence, record = self.plugin.describe_model(self.plan, self._get_accelerator(), model)
        # Known models are skipped above: ``prepare`` calls ``prepare_model``, and both are wrapped.
        self._models.append(model)
        # The record describes the first model; a script may train several (a GAN).
        if len(self._models) > 1:
            self._add_to_record(num_models=len(self._models))
            return
        num_parameters = _count_parameters(model.parameters())
        precision = MIXED[self.plan.recipe.precision]
        suffix = f", {precision} mixed precision" if precision != "no" else ""
        self._start_record(
            f"{sentence} ({self._get_backend()}, {self.ctx.device.type}){suffix}",
            {
                "num_parameters": num_parameters,
                "num_trained_tensors": len(trained),
                "num_trained_parameters": _count_parameters(trained),
                "parameter_dtypes": sorted({_shorten_dtype(tensor.dtype) for tensor in model.parameters()}),
                "parameter_bytes": tensors.count_parameter_bytes(model),
                "differs": self.differences,
                **record,
            },
        )
        # Adapters add parameters that the architecture does not count.
        planned = self.plan.architecture.num_parameters
        if num_parameters != planned and not self.plan.recipe.has_adapters:
            self._report_difference(f"a model of {num_parameters:,} parameters, the plan's has {planned:,}")
        self._report_difference(
            script_differences.compare_trained(self.plan.recipe, _count_parameters(trained), num_parameters)
        )
        self._inspect_first_batch(model)

    def _inspect_first_batch(self, model: torch.nn.Module) -> None:
        """Compare the batch of the first training call; Megatron's plugin builds its own batches."""

        def inspect_batch(
            model: torch.nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
        ) -> None:
            # An evaluation before training may have other shapes.
            if not torch.is_grad_enabled():
                return
            hook.remove()
            shape = script_differences.find_token_shape(args, kwargs)
            if shape is not None:
                self._add_to_record(batch_shape=list(shape))
                self._report_difference(
                    script_differences.compare_batch(self.plan.recipe, shape, num_slices=self.plan.degrees.cp)
                )

        hook = model.register_forward_pre_hook(inspect_batch, with_kwargs=True)

    def _check_types(self, trained: Sequence[torch.nn.Parameter]) -> None:
        """Raise ``RuntimeError`` if trained weights have another dtype than the plan's."""
        precision = self.plan.recipe.precision
        if self._get_accelerator().distributed_type.name in ("DEEPSPEED", "MEGATRON_LM"):
            return  # They cast the weights themselves.
        planned = torch.bfloat16 if precision == "bf16" else torch.float32
        others = {parameter.dtype for parameter in trained if parameter.is_floating_point()} - {planned}
        if others:
            dtypes = " and ".join(sorted(map(_shorten_dtype, others)))
            raise make_contradiction(
                f"precision={precision!r}, whose trained weights are {_shorten_dtype(planned)}",
                f"a model with weights in {dtypes}",
                "precision='bf16'" if others == {torch.bfloat16} else f"load it with dtype={planned}",
            )

    def _disable_accumulation(self, accelerator: Accelerator) -> None:
        """Set accumulation to 1 for a script that steps after every micro-batch.

        Accelerate would otherwise divide its losses by the planned number of micro-batches.
        """
        planned = accelerator.gradient_accumulation_steps
        if accelerator.distributed_type.name == "DEEPSPEED":
            raise RuntimeError(
                f"the plan has {planned} micro-batches per step, by which DeepSpeed divides the loss, but "
                "the script steps after every one: wrap each in accelerator.accumulate(model), or plan "
                f"global_batch_size={self.plan.recipe.global_batch_size // planned}"
            )
        accelerator.gradient_accumulation_steps = 1
        self._add_to_record(gradient_accumulation_steps=1)
        self._report_difference(
            f"a step after every micro-batch, the plan's takes {planned}: to accumulate, wrap each in "
            "accelerator.accumulate(model)"
        )

    def _finish_step(self, optimizer: AcceleratedOptimizer) -> None:
        """Queue the metrics of a completed step, and record the optimizer after the first one."""
        now = time.perf_counter()
        self._log_pending_step()
        # The first step has no duration: it includes compilation, allocation and loading.
        metrics = dict(self.ctx.memory_metrics())
        if self._last_step is not None:
            metrics["seconds_per_step"] = now - self._last_step
        if self._losses:
            # Read when the next step is over, so that the host does not wait for the device here.
            self._pending = (self.num_steps, torch.stack(self._losses).mean(), metrics)
            self._losses.clear()
        self.num_steps += 1
        self._last_step = now
        if self.num_steps == 1:
            self._inspect_optimizer(optimizer)

    def _inspect_optimizer(self, optimizer: AcceleratedOptimizer) -> None:
        wrapped = getattr(optimizer, "optimizer", optimizer)
        self._add_to_record(optimizer=type(wrapped).__name__, recomputes=self._recomputes)
        if isinstance(wrapped, torch.optim.Optimizer):
            self._add_to_record(optimizer_bytes=tensors.count_optimizer_bytes(wrapped))
        # ZeRO's optimizer wraps the one that the script created.
        created = getattr(wrapped, "optimizer", wrapped)
        if isinstance(created, torch.optim.Optimizer):
            self._report_difference(script_differences.compare_optimizer(self.plan.recipe, created))
        # Megatron-LM does not recompute through torch.utils.checkpoint.
        if self._get_accelerator().distributed_type.name != "MEGATRON_LM":
            self._report_difference(
                script_differences.compare_recomputation(self.plan.recipe, self._recomputes)
            )

    def _log_pending_step(self) -> None:
        if self._pending is not None:
            step, loss, metrics = self._pending
            self._pending = None
            self.ctx.log(step=step, loss=loss.item(), **metrics)

    def _start_record(self, sentence: str, entries: Mapping[str, object]) -> None:
        accelerator = self._get_accelerator()
        self.record = {
            "sentence": f"{self.name} through {TITLE} {accelerate.__version__} is {sentence}",
            "framework": self.plan.layout.framework,
            "through": "accelerate",
            "script": self.name,
            "distributed_type": accelerator.distributed_type.name,
            "device": str(accelerator.device),
            "backend": self._get_backend(),
            "world_size": accelerator.num_processes,
            "mixed_precision": accelerator.mixed_precision,
            "gradient_accumulation_steps": accelerator.gradient_accumulation_steps,
            **entries,
        }
        self.ctx.record("engine", self.record)

    def _add_to_record(self, **entries: object) -> None:
        self.record |= entries
        self.ctx.record("engine", self.record)

    def _report_difference(self, text: str | None) -> None:
        """Report a choice of the script that differs from the plan, without an error."""
        if text is None:
            return
        self.differences.append(text)
        self._add_to_record(
            sentence=f"{self.record['sentence']}; it has {text}", differs=list(self.differences)
        )
        if self.ctx.rank == 0:
            print(f"{self.name} has {text}", flush=True)

    def _get_accelerator(self) -> Accelerator:
        assert self.accelerator is not None, "the wrapped methods are those of an Accelerator"
        return self.accelerator

    def _get_backend(self) -> str:
        if not dist.is_initialized() or dist.group.WORLD is None:
            return "none"
        return str(dist.group.WORLD._get_backend(self.ctx.device).name())


def _wrap_method(
    owner: object, name: str, wrapper: Callable[Concatenate[Method, P], R]
) -> Callable[[], None]:
    """Replace a method by ``wrapper(original, *arguments)``, and return a function that undoes it."""
    original: Method = vars(owner)[name]

    @wraps(original)
    def call_wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        return wrapper(original, *args, **kwargs)

    setattr(owner, name, call_wrapper)
    return lambda: setattr(owner, name, original)


def _count_parameters(parameters: Iterable[torch.nn.Parameter]) -> int:
    """Count the whole model's parameters: ZeRO-3 keeps a partitioned tensor's size in ``ds_numel``."""
    return sum(int(getattr(parameter, "ds_numel", parameter.numel())) for parameter in parameters)


def _shorten_dtype(dtype: torch.dtype) -> str:
    return SHORT_NAMES.get(dtype, str(dtype).removeprefix("torch."))


def _rename_reserved(name: str) -> str:
    """Return the name of a script's metric: names that the run's own log uses get a prefix."""
    return f"script_{name}" if name in RESERVED else name


def _is_scalar(value: object) -> bool:
    if value is None or isinstance(value, str | bool | int | float):
        return True
    return getattr(value, "ndim", None) == 0 or getattr(value, "numel", lambda: 0)() == 1
