"""Monitoring of a script's ``Accelerator`` while the script runs unchanged.

Wrappers around methods of Accelerate's classes inspect and log the results. They raise if a result
contradicts the plan, so the traceback contains the script's own line.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any

import accelerate
import torch
import torch.distributed as dist
import torch.utils.checkpoint
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer

from shardscope.core.number_format import count
from shardscope.frameworks.accelerate import script_differences
from shardscope.frameworks.accelerate.carried import TITLE
from shardscope.frameworks.accelerate.plugins import accelerated, contradicts
from shardscope.frameworks.formats.accelerate_config import MIXED
from shardscope.records.files import RESERVED
from shardscope.training.accounting import tensors

SHORT_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


class Watch:
    """Monitor of one script on one rank."""

    def __init__(self, ctx: Any, name: str) -> None:
        self.ctx, self.plan, self.name = ctx, ctx.plan, name
        self.framework = accelerated(ctx.plan)
        self.accelerator: Any = None
        self.record: dict[str, Any] = {}
        """The entry ``engine`` of ``run.what_it_was()``."""
        self.num_steps = 0
        """Completed optimizer steps."""
        self._models: list[Any] = []
        self._accumulates = False
        self._recomputes = False
        self._losses: list[torch.Tensor] = []
        self._pending: tuple[int, torch.Tensor, dict[str, Any]] | None = None
        self._last_step: float | None = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Wrap the methods of Accelerate's classes inside the context."""
        from accelerate.utils.deepspeed import DeepSpeedOptimizerWrapper

        kept = [
            _wrap(Accelerator, "__init__", self._made),
            _wrap(Accelerator, "prepare", self._prepared),
            _wrap(Accelerator, "prepare_model", self._prepared_model),
            _wrap(Accelerator, "accumulate", self._accumulated),
            _wrap(Accelerator, "backward", self._went_back),
            _wrap(Accelerator, "log", self._logged),
            _wrap(AcceleratedOptimizer, "step", self._stepped),
            _wrap(DeepSpeedOptimizerWrapper, "step", self._stepped),
            # ``torch.utils.checkpoint`` calls the first without reentrant backward, the second with it.
            _wrap(torch.utils.checkpoint, "_checkpoint_without_reentrant_generator", self._recomputed),
            _wrap(torch.utils.checkpoint.CheckpointFunction, "forward", self._recomputed),
        ]
        try:
            yield
        finally:
            for undo in kept:
                undo()

    def finish(self) -> None:
        """Log the last step of an ended script. Raises ``RuntimeError`` if it created no Accelerator."""
        self._flush()
        if self.accelerator is None:
            raise RuntimeError(
                f"{self.name} ended and never made an Accelerator(): nothing of it ran as the plan says. "
                "A script without Accelerate has no place here; a function f(ctx) has."
            )

    # ---- what the wrappers call

    def _made(self, original: Callable[..., Any], accelerator: Any, *given: Any, **named: Any) -> None:
        original(accelerator, *given, **named)
        self.accelerator = accelerator
        self.framework.told(self.plan, accelerator)
        self._check_state(accelerator)
        kind = accelerator.distributed_type.name
        words = f"{kind} over {count(accelerator.num_processes, 'rank')}; no model was prepared to train"
        self._record(words, {})

    def _prepared(self, original: Callable[..., Any], accelerator: Any, *given: Any, **named: Any) -> Any:
        result = original(accelerator, *given, **named)
        # A tuple of most frameworks, a list of FSDP2.
        prepared = result if isinstance(result, tuple | list) else (result,)
        for one in prepared:
            if isinstance(one, torch.nn.Module):
                self._look(one)
        return result

    def _prepared_model(
        self, original: Callable[..., Any], accelerator: Any, *given: Any, **named: Any
    ) -> Any:
        model = original(accelerator, *given, **named)
        if not (named.get("evaluation_mode") or given[2:3] == (True,)):
            self._look(model)
        return model

    def _accumulated(self, original: Callable[..., Any], *given: Any) -> Any:
        self._accumulates = True
        return original(*given)

    def _went_back(self, original: Callable[..., Any], accelerator: Any, loss: Any, **named: Any) -> None:
        if not self._accumulates and accelerator.gradient_accumulation_steps > 1:
            self._leave_out_accumulation(accelerator)
        original(accelerator, loss, **named)
        if isinstance(loss, torch.Tensor):
            self._losses.append(loss.detach().float().mean())

    def _stepped(self, original: Callable[..., Any], optimizer: Any, *given: Any, **named: Any) -> Any:
        is_whole = bool(optimizer.gradient_state.sync_gradients)
        if is_whole and self.num_steps == 0 and self._models:
            gradients = sum(tensors.gradient_bytes(model) for model in self._models)
            # DeepSpeed has taken its step by now, in backward.
            self._add(**({"gradient_bytes": gradients} if gradients else {}))
            self._add(micro_batches_per_step=len(self._losses))
        result = original(optimizer, *given, **named)
        if is_whole:
            self._step_is_over(optimizer)
        return result

    def _recomputed(self, original: Callable[..., Any], *given: Any, **named: Any) -> Any:
        self._recomputes = True
        return original(*given, **named)

    def _logged(
        self, original: Callable[..., Any], accelerator: Any, values: Any, *given: Any, **named: Any
    ) -> Any:
        step = named.get("step", given[0] if given else None)
        if accelerator.is_main_process and isinstance(values, Mapping):
            own = {_free(str(name)): value for name, value in values.items() if _is_one_value(value)}
            if own:
                self.ctx.log(step=self.num_steps if step is None else int(step), **own)
        return original(accelerator, values, *given, **named)

    # ---- what was found

    def _check_state(self, accelerator: Any) -> None:
        kind, allowed = accelerator.distributed_type.name, self.framework.distributed_types(self.plan)
        title = self.plan.layout.title
        if kind not in allowed:
            raise contradicts(
                f"{title}, which {TITLE} calls {' or '.join(allowed)}",
                kind,
                "leave plugins out of Accelerator(...): the plan brings its own",
            )
        if accelerator.num_processes != self.plan.world_size:
            raise contradicts(f"{self.plan.world_size} ranks", f"{accelerator.num_processes} processes")
        if accelerator.device.type != self.ctx.device.type:
            raise contradicts(self.ctx.device.type, accelerator.device.type, "leave cpu=True out")
        precision = self.plan.recipe.precision
        # DeepSpeed has one bf16, whose weights are in bf16 beside fp32 copies: the plan's file says it.
        if kind != "DEEPSPEED" and accelerator.mixed_precision != MIXED[precision]:
            raise contradicts(
                f"precision={precision!r}",
                f"mixed_precision={accelerator.mixed_precision!r}",
                "leave mixed_precision out of Accelerator(...), or plan another precision",
            )

    def _look(self, model: Any) -> None:
        """Record what a prepared model is; models without trainable weights are ignored."""
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if not trained or any(model is known for known in self._models):
            return
        self._check_types(trained)
        found = self.framework.read_back(self.plan, self.accelerator, model)
        self._models.append(model)
        if len(self._models) > 1:
            self._add(num_models=len(self._models))
            return
        words = found.pop("words")
        num_parameters = _num_parameters(model.parameters())
        precision = MIXED[self.plan.recipe.precision]
        self._record(
            f"{words} ({self._backend()}, {self.ctx.device.type})"
            + (f", {precision} mixed precision" if precision != "no" else ""),
            {
                "num_parameters": num_parameters,
                "num_trained_tensors": len(trained),
                "num_trained_parameters": _num_parameters(trained),
                "parameter_dtypes": sorted({_name(parameter.dtype) for parameter in model.parameters()}),
                "parameter_bytes": tensors.module_bytes(model),
                "differs": [],
                **found,
            },
        )
        planned = self.plan.architecture.num_parameters
        if num_parameters != planned and not self.plan.recipe.has_adapters:
            self._differ(f"a model of {num_parameters:,} parameters, the plan's has {planned:,}")
        self._differ(
            script_differences.of_trained(self.plan.recipe, _num_parameters(trained), num_parameters)
        )
        self._look_at_the_batch(model)

    def _look_at_the_batch(self, model: Any) -> None:
        """Compare the batch of the first training call; Megatron's plugin builds its own batches."""

        def seen(model: Any, given: tuple[Any, ...], named: dict[str, Any]) -> None:
            if not torch.is_grad_enabled():
                return
            hook.remove()
            shape = script_differences.tokens_in(given, named)
            if shape is not None:
                self._add(batch_shape=list(shape))
                self._differ(script_differences.of_batch(self.plan.recipe, shape, cut=self.plan.degrees.cp))

        hook = model.register_forward_pre_hook(seen, with_kwargs=True)

    def _check_types(self, trained: list[Any]) -> None:
        """Raise ``RuntimeError`` if trained weights have another dtype than the plan's."""
        precision = self.plan.recipe.precision
        if self.accelerator.distributed_type.name in ("DEEPSPEED", "MEGATRON_LM"):
            return
        wanted = torch.bfloat16 if precision == "bf16" else torch.float32
        others = {parameter.dtype for parameter in trained if parameter.is_floating_point()} - {wanted}
        if others:
            shown = " and ".join(sorted(map(_name, others)))
            raise contradicts(
                f"precision={precision!r}, whose trained weights are {_name(wanted)}",
                f"a model with weights in {shown}",
                "precision='bf16'" if others == {torch.bfloat16} else f"load it with dtype={wanted}",
            )

    def _leave_out_accumulation(self, accelerator: Any) -> None:
        """Set accumulation to 1 for a script that steps after every micro-batch.

        Accelerate would otherwise divide its losses by the planned number of micro-batches.
        """
        planned = accelerator.gradient_accumulation_steps
        if accelerator.distributed_type.name == "DEEPSPEED":
            raise RuntimeError(
                f"the plan takes {planned} micro-batches to a step, DeepSpeed divides by that, and the "
                "script steps after every one: with accelerator.accumulate(model): around it, or plan "
                f"global_batch_size={self.plan.recipe.global_batch_size // planned}"
            )
        accelerator.gradient_accumulation_steps = 1
        self._add(gradient_accumulation_steps=1)
        self._differ(
            f"a step after every micro-batch, the plan's takes {planned}: with "
            "accelerator.accumulate(model): around it does"
        )

    def _step_is_over(self, optimizer: Any) -> None:
        now = time.perf_counter()
        self._flush()
        more: dict[str, Any] = {**self.ctx.memory_metrics()}
        if self._last_step is not None:
            more["seconds_per_step"] = now - self._last_step
        if self._losses:
            # Read when the next step is over: the host need not wait for the device here.
            self._pending = (self.num_steps, torch.stack(self._losses).mean(), more)
            self._losses.clear()
        self.num_steps += 1
        self._last_step = now
        if self.num_steps == 1:
            inner = getattr(optimizer, "optimizer", optimizer)
            self._add(optimizer=type(inner).__name__, recomputes=self._recomputes)
            if isinstance(inner, torch.optim.Optimizer):
                self._add(optimizer_bytes=tensors.optimizer_bytes(inner))
            # ZeRO's own is around the one that the script made.
            own = getattr(inner, "optimizer", inner)
            if isinstance(own, torch.optim.Optimizer):
                self._differ(script_differences.of_optimizer(self.plan.recipe, own))
            if self.accelerator.distributed_type.name != "MEGATRON_LM":  # It has a checkpoint of its own.
                self._differ(script_differences.of_recomputation(self.plan.recipe, self._recomputes))

    def _flush(self) -> None:
        if self._pending is not None:
            step, loss, more = self._pending
            self._pending = None
            self.ctx.log(step=step, loss=loss.item(), **more)

    def _record(self, words: str, found: Mapping[str, Any]) -> None:
        accelerator = self.accelerator
        self.record = {
            "sentence": f"{self.name} through {TITLE} {accelerate.__version__} is {words}",
            "framework": self.plan.layout.framework,
            "through": "accelerate",
            "script": self.name,
            "distributed_type": accelerator.distributed_type.name,
            "device": str(accelerator.device),
            "backend": self._backend(),
            "world_size": accelerator.num_processes,
            "mixed_precision": accelerator.mixed_precision,
            "gradient_accumulation_steps": accelerator.gradient_accumulation_steps,
            **found,
        }
        self.ctx.record("engine", self.record)

    def _add(self, **found: Any) -> None:
        self.record |= found
        self.ctx.record("engine", self.record)

    def _differ(self, words: str | None) -> None:
        """Report a choice of the script that differs from the plan, without an error."""
        if words is None:
            return
        self.record["sentence"] += f"; it has {words}"
        self._add(differs=[*self.record.get("differs", ()), words])
        if self.ctx.rank == 0:
            print(f"{self.name} has {words}", flush=True)

    def _backend(self) -> str:
        if not dist.is_initialized() or dist.group.WORLD is None:
            return "none"
        return str(dist.group.WORLD._get_backend(self.ctx.device).name())


def _wrap(owner: Any, name: str, around: Callable[..., Any]) -> Callable[[], None]:
    """Replace a method by ``around(original, *arguments)``, and return a function that undoes it."""
    original = owner.__dict__[name]

    @wraps(original)
    def method(*given: Any, **named: Any) -> Any:
        return around(original, *given, **named)

    setattr(owner, name, method)
    return lambda: setattr(owner, name, original)


def _num_parameters(parameters: Any) -> int:
    """Count the whole model's parameters: ZeRO-3 keeps a partitioned tensor's size in ``ds_numel``."""
    return sum(int(getattr(parameter, "ds_numel", parameter.numel())) for parameter in parameters)


def _name(kind: torch.dtype) -> str:
    return SHORT_NAMES.get(kind, str(kind).removeprefix("torch."))


def _free(name: str) -> str:
    return f"script_{name}" if name in RESERVED else name


def _is_one_value(value: Any) -> bool:
    if value is None or isinstance(value, str | bool | int | float):
        return True
    return getattr(value, "ndim", None) == 0 or getattr(value, "numel", lambda: 0)() == 1
