"""``Finetune``: further training of a Hugging Face checkpoint on text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from shardscope.frameworks.registry import check_config
from shardscope.training.data.weights_tokenizer import WeightsTokenizer
from shardscope.training.tasks.text_task import TextTask
from shardscope.training.weights.base_sample import hash_base
from shardscope.training.weights.weights_folder import WeightsFolder

if TYPE_CHECKING:
    import torch

    from shardscope.core.plan import Plan
    from shardscope.training.data.tokenizer import TokenIds
    from shardscope.training.engine import Engine

FULL_RATE = 2e-5
"""Learning rate of Llama 2's supervised fine-tuning (Touvron et al. 2023, arXiv:2307.09288, section 3.1)."""
ADAPTER_RATE = 2e-4
"""Learning rate of QLoRA for 7B and 13B (Dettmers et al. 2023, arXiv:2305.14314, table 9)."""


@dataclass(frozen=True, kw_only=True)
class Finetune(TextTask):
    """Fine-tuning task: ``shardscope.launch(plan, Finetune(weights="folder"))``.

    The plan's architecture is ``Architecture.from_hf("folder")``; other settings of its config.json (rotary
    angles, epsilons, the activation) are kept. Dropout is the recipe's, and routers are trained without noise
    or an auxiliary loss; an exported config.json has the folder's original values again. With LoRA the
    folder is the frozen base. Every rank reads only what it keeps. Raises ``ValueError`` naming the field,
    its value, what is allowed and the nearest fix, also for files that are truncated, missing, outside of the
    folder or not safetensors.
    """

    weights: Path
    """Folder of a Hugging Face checkpoint: config.json, tokenizer, and model.safetensors or several such
    files with an index, in fp32, bf16 or fp16. Nothing in it is unpickled, and nothing is downloaded."""
    learning_rate: float | None = None
    """Peak learning rate; None: 2e-5, or 2e-4 for adapters."""
    text: Path | None = None
    """UTF-8 text file, tokenized with the folder's tokenizer; None: *Moby-Dick*, which ships with
    Shardscope."""

    preload: ClassVar[tuple[str, ...]] = (
        *TextTask.preload,
        "safetensors.torch",
        "transformers.models.auto.tokenization_auto",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        # Resolved, because the kernel may change its working directory before the launch.
        object.__setattr__(self, "weights", WeightsFolder.open(self.weights, self._field("weights")).path)

    @property
    def folder(self) -> WeightsFolder:
        """The weights folder; its files are read again on each access."""
        return WeightsFolder(self.weights, self._field("weights"))

    def begin(self, engine: Engine, plan: Plan) -> Callable[[], torch.nn.Module]:
        """See :class:`TextTask`."""
        from shardscope.training.model.model import build_from_config
        from shardscope.training.weights.stored_weights import StoredWeights

        folder = self.folder
        # The engine reads them when it builds the model, and only what this rank keeps.
        engine.weights = StoredWeights(folder, plan.architecture)
        config = folder.config
        files = {file for file, _ in folder.tensors.values()}
        print(
            f"initial weights from {folder.path}: {len(folder.tensors):,} tensors in {len(files):,} files",
            flush=True,
        )
        return lambda: build_from_config(config, plan.architecture, plan.recipe.dropout)

    def peak_rate(self, plan: Plan) -> float:
        """See :class:`TextTask`."""
        if self.learning_rate is not None:
            return self.learning_rate
        return ADAPTER_RATE if plan.recipe.has_adapters else FULL_RATE

    def encode(self) -> Callable[[str], TokenIds]:
        """Return the encode function of the folder's tokenizer."""
        return WeightsTokenizer(self.folder).encode

    def complete_export(self, folder: Path, plan: Plan) -> None:
        """See :class:`TextTask`. config.json gets the original values of settings disabled for training."""
        WeightsTokenizer(self.folder).save(folder)
        if not plan.recipe.has_adapters:
            self.folder.write_config(folder)

    def frozen_base(self) -> dict[str, object]:
        """See :class:`TextTask`."""
        return {"weights": str(self.weights), "sample": hash_base(self.folder)}

    def check_model(self, plan: Plan) -> None:
        """See :class:`TextTask`."""
        folder = self.folder
        folder.check_plan(plan)
        check_config(plan, folder.config)
        WeightsTokenizer(folder).check(plan.architecture.vocab_size)
