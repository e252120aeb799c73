"""``Finetune``: further training of a Hugging Face checkpoint on text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from shardscope.core.errors import check_choice, refuse
from shardscope.frameworks.registry import check_config
from shardscope.training.data.tokenizer import SHIPPED_TEXT
from shardscope.training.data.weights_tokenizer import WeightsTokenizer
from shardscope.training.examples.batches import ExampleBatches, find_padding_id
from shardscope.training.examples.encoding import LOSS_ON, Encoder, LossOn
from shardscope.training.examples.formats import Format, recognize_format
from shardscope.training.examples.preview import Preview, preview_examples
from shardscope.training.examples.rows import Rows, describe_source, is_text, open_rows, resolve_source
from shardscope.training.examples.token_table import (
    BAD_ROWS,
    BadRows,
    RowCounts,
    TokenTable,
    build_table,
    check_examples,
    check_row,
    describe_counts,
    iterate_encoded,
)
from shardscope.training.tasks.text_task import TextTask, resolve_text
from shardscope.training.weights.base_sample import hash_base
from shardscope.training.weights.weights_folder import WeightsFolder

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

    from shardscope.core.plan import Plan
    from shardscope.training.data.batches import Batches
    from shardscope.training.data.tokenizer import TokenIds
    from shardscope.training.engine import Engine, TrainingContext

TOKENS = "tokens"
"""Subfolder of a run with the tokens of its examples."""
MAX_CHECKED_ROWS = 1000
"""Rows whose format is checked before a launch; the others are checked when they are tokenized."""

FULL_RATE = 2e-5
"""Learning rate of Llama 2's supervised fine-tuning (Touvron et al. 2023, arXiv:2307.09288, section 3.1)."""
ADAPTER_RATE = 2e-4
"""Learning rate of QLoRA for 7B and 13B (Dettmers et al. 2023, arXiv:2305.14314, table 9)."""


@dataclass(frozen=True, kw_only=True)
class Finetune(TextTask):
    """Fine-tuning task: ``shardscope.launch(plan, Finetune("folder", "data.jsonl"))``.

    The plan's architecture is ``Architecture.from_hf("folder")``; other settings of its config.json (rotary
    angles, epsilons, the activation) are kept. Dropout is the recipe's, and routers are trained without noise
    or an auxiliary loss; an exported config.json has the folder's original values again. With LoRA the
    folder is the frozen base. Every rank reads only what it keeps. Raises ``ValueError`` naming the field,
    its value, what is allowed and the nearest fix, also for files that are truncated, missing, outside of the
    folder or not safetensors.
    """

    weights: Path = field(kw_only=False)
    """Folder of a Hugging Face checkpoint: config.json, tokenizer, and model.safetensors or several such
    files with an index, in fp32, bf16 or fp16. Nothing in it is unpickled, and nothing is downloaded."""
    learning_rate: float | None = None
    """Peak learning rate; None: 2e-5, or 2e-4 for adapters."""
    data: object = field(default=None, kw_only=False)
    """Data to train on: a JSONL, JSON, CSV, TSV or Parquet file, a folder of them, a data set's name on the
    Hub, a ``datasets.Dataset``, a pandas frame or a list of dicts, whose format is recognized (text, prompt
    and completion, Alpaca, messages); or a .txt file, read as one long text. None: *Moby-Dick*, which ships
    with Shardscope. See :meth:`preview`."""
    columns: Mapping[str, str] | None = None
    """Role -> column where names alone do not tell, such as {"prompt": "q", "completion": "a"}."""
    loss_on: LossOn = "completions"
    """Tokens that bear loss: "completions" (every turn of the assistant), "last" (its last turn) or "all"."""
    bad_rows: BadRows = "refuse"
    """What happens to a malformed row: "refuse" the data, or "skip" the row, counted in the log."""

    recorded_texts: ClassVar[frozenset[str]] = frozenset({"data", "columns", "loss_on", "bad_rows"})
    preload: ClassVar[tuple[str, ...]] = (
        *TextTask.preload,
        "safetensors.torch",
        "transformers.models.auto.tokenization_auto",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        # Resolved, because the kernel may change its working directory before the launch.
        object.__setattr__(self, "weights", WeightsFolder.open(self.weights, self._field("weights")).path)
        check_choice(self._field("loss_on"), self.loss_on, LOSS_ON)
        check_choice(self._field("bad_rows"), self.bad_rows, BAD_ROWS)
        if self.data is not None:
            data = resolve_source(self._field("data"), self.data)
            object.__setattr__(
                self, "data", resolve_text(self._field("data"), data) if is_text(data) else data
            )

    @property
    def plain_text(self) -> Path | None:
        """See :class:`TextTask`."""
        if self.data is None:
            return SHIPPED_TEXT
        return self.data if isinstance(self.data, Path) and is_text(self.data) else None

    @property
    def data_name(self) -> str:
        """See :class:`TextTask`."""
        return super().data_name or describe_source(self.data)

    def preview(self, n: int = 5, *, seq_len: int | None = None) -> Preview:
        """Return how the model will read the data: the first ``n`` examples token by token, and lengths.

        ``seq_len`` is the length to which examples are cut (the plan's ``recipe.seq_len``); None: uncut.
        Raises ``ValueError`` naming the field for malformed data, and for plain text, which has no examples.
        """
        if self.plain_text is not None:
            allowed = "examples; a text file is read as one long text, every token of which bears loss"
            refuse(self._field("data"), str(self.plain_text), allowed, "a .jsonl file of rows")
        name, rows = self._field("data"), self._open_rows()
        return preview_examples(
            name,
            describe_source(self.data),
            rows,
            self._recognize_format(rows),
            WeightsTokenizer(self.folder).load(),
            num_shown=n,
            seq_len=seq_len,
            loss_on=self.loss_on,
            bad_rows=self.bad_rows,
        )

    def _open_rows(self) -> Rows:
        return open_rows(self._field("data"), self.data)

    def _recognize_format(self, rows: Rows) -> Format:
        format = recognize_format(self._field("data"), rows.column_names, self.columns)
        if format.name == "preference":
            prompt = format.columns.get("prompt", format.columns["chosen"])
            fix = {"columns": {"prompt": prompt, "completion": format.columns["chosen"]}}
            allowed = "rows with one answer; preference pairs need DPO, which is not implemented yet"
            refuse(self._field("data"), f"data of the format {format.title}", allowed, fix)
        return format

    def read_data(self, ctx: TrainingContext) -> Batches:
        """See :class:`TextTask`. Rank 0 tokenizes the examples into the run folder, which all ranks map."""
        if self.plain_text is not None:
            return super().read_data(ctx)
        import torch.distributed as dist

        folder = ctx.folder / TOKENS
        tokenizer = WeightsTokenizer(self.folder).load()
        if ctx.rank == 0:
            self._write_tokens(folder, tokenizer, ctx.plan.recipe.seq_len)
        dist.barrier()
        return ExampleBatches(
            table=TokenTable.load(folder),
            seq_len=ctx.plan.recipe.seq_len,
            padding_id=find_padding_id(tokenizer),
            **self.share_of_rank(ctx),
        )

    def _write_tokens(self, folder: Path, tokenizer: PreTrainedTokenizerBase, seq_len: int) -> None:
        rows, counts, name = self._open_rows(), RowCounts(), self._field("data")
        encoded = iterate_encoded(
            name,
            rows,
            self._recognize_format(rows),
            Encoder(tokenizer, self.loss_on),
            seq_len=seq_len,
            bad_rows=self.bad_rows,
            counts=counts,
        )
        table = build_table(encoded)
        check_examples(name, counts, seq_len)
        table.save(folder)
        for line in describe_counts(counts, seq_len):
            print(line, flush=True)

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

    def _check_rows(self) -> None:
        """Raise ``ValueError`` for data of no known format, and for a malformed row among the first ones."""
        rows = self._open_rows()
        format = self._recognize_format(rows)
        if self.bad_rows == "refuse":
            for index in range(min(len(rows), MAX_CHECKED_ROWS)):
                check_row(self._field("data"), format, index, rows[index])

    def frozen_base(self) -> dict[str, object]:
        """See :class:`TextTask`."""
        return {"weights": str(self.weights), "sample": hash_base(self.folder)}

    def check_model(self, plan: Plan) -> None:
        """See :class:`TextTask`."""
        folder = self.folder
        folder.check_plan(plan)
        if self.plain_text is None:
            self._check_rows()
        check_config(plan, folder.config)
        WeightsTokenizer(folder).check(plan.architecture.vocab_size)
