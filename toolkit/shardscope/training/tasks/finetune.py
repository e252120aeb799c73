"""``Finetune``: further training of a Hugging Face checkpoint on text."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from shardscope.core.errors import check_choice, refuse, warn_user
from shardscope.core.fixes import refuse_unknown_keywords
from shardscope.core.number_format import format_count
from shardscope.frameworks.registry import check_config
from shardscope.records.json_files import read_json
from shardscope.training.checkpoints.folders import POSITION_FILE
from shardscope.training.data.tokenizer import SHIPPED_TEXT
from shardscope.training.data.weights_tokenizer import WeightsTokenizer, describe_unused_rows
from shardscope.training.data.windows import check_text_length
from shardscope.training.examples.batches import find_padding_id
from shardscope.training.examples.conversation import Prompt, encode_prompts, find_end_ids, read_prompts
from shardscope.training.examples.encoding import LOSS_ON, Encoder, LossOn
from shardscope.training.examples.folder_files import describe_unread_files
from shardscope.training.examples.formats import ExampleError, recognize_format
from shardscope.training.examples.preview import Preview, preview_examples
from shardscope.training.examples.rows import describe_source, is_text
from shardscope.training.examples.source_record import COUNTS, describe_examples, describe_file
from shardscope.training.examples.token_table import BAD_ROWS, BadRows
from shardscope.training.preferences.settings import (
    DEFAULT_BETA,
    Objective,
    check_pair_plan,
    describe_reference,
)
from shardscope.training.tasks.choices import (
    TEXT_STEPS,
    Choices,
    recommend,
    recommend_epochs,
)
from shardscope.training.tasks.finetune_checks import (
    check_length,
    check_objective,
    check_row_lengths,
    check_rows,
    check_samples,
    check_streaming,
    check_validation,
    resolve_data,
)
from shardscope.training.tasks.finetune_rows import FinetuneRows
from shardscope.training.tasks.finetune_tokens import (
    TOKENS,
    VALIDATION_TOKENS,
    continue_stream,
    load_batches,
    write_tokens,
)
from shardscope.training.tasks.plan_forecast import describe_forecast
from shardscope.training.tasks.recommended_rate import recommend_rate
from shardscope.training.tasks.text_task import TextTask
from shardscope.training.weights.base_sample import hash_base
from shardscope.training.weights.hub_folder import find_hub_name
from shardscope.training.weights.weights_folder import WeightsFolder, write_base_name
from shardscope.training.weights.weights_source import resolve_weights

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

    from shardscope.core.plan import Plan
    from shardscope.training.data.batches import Batches
    from shardscope.training.data.tokenizer import TokenIds
    from shardscope.training.engine import Engine, TrainingContext
    from shardscope.training.samples import SampleGenerations
    from shardscope.training.validation import Validation


@refuse_unknown_keywords
@dataclass(frozen=True, kw_only=True)
class Finetune(TextTask):
    """Fine-tuning task: ``shardscope.launch(plan, Finetune("folder", "data.jsonl"))``.

    The plan's architecture is ``Architecture.from_hf("folder")``; other settings of its config.json (rotary
    angles, epsilons, the activation) are kept. Dropout is the recipe's, and routers are trained without noise
    or an auxiliary loss; an exported config.json has the folder's original values again. With LoRA the
    folder is the frozen base. Of a multimodal checkpoint (Gemma 3 4B, Ministral 3) the language model alone
    is trained and exported. Every rank reads only what it keeps. Raises ``ValueError`` naming the field,
    its value, what is allowed and the nearest fix, also for files that are truncated, missing, outside of the
    folder or not safetensors.
    """

    weights: Path = field(kw_only=False)
    """Folder of a Hugging Face checkpoint: config.json, tokenizer, and model.safetensors or several such
    files with an index, in fp32, bf16 or fp16. Or "org/name" of the Hub, or "smollm2-135m-instruct" (see
    :func:`shardscope.example_model`): its folder in the cache, into which it is downloaded when the task is
    made. Nothing in it is unpickled. The field is the folder afterwards."""
    learning_rate: float | None = None
    """Peak learning rate; None: 2e-5, or 2e-4 for adapters, 1e-4 from 30 billion parameters; on examples,
    3e-5 and 1e-3 for models below 400 million. More for batches of over 262,144 tokens. See
    :meth:`choices`."""
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
    """What happens to a malformed row and to one without a token that bears loss: "refuse" the data, "skip"
    the row, or "skip_truncated", which skips only rows whose completion ``seq_len`` cuts off. Skipped rows
    are counted in the log."""
    objective: Objective = "sft"
    """What is learned: "sft", the answers of the data (supervised fine-tuning); or "dpo", to prefer the
    chosen answer of each pair to the rejected one (direct preference optimization, Rafailov et al. 2023). A
    pair is two sequences of the batch sizes. The frozen reference is the initial model; with adapters, the
    model without them."""
    dpo_beta: float = DEFAULT_BETA
    """With "dpo", how strongly the model is held to the reference (beta in the paper), above 0 to 10."""

    streaming: bool = False
    """Whether rows are read one after another while training, for data larger than memory or disk: nothing
    is tokenized beforehand, each rank reads its share, and rows are shuffled in blocks of 1,000. ``data`` is
    then a file, a folder or a name on the Hub, and ``num_steps`` the length."""

    num_steps: int | None = None
    """Total number of optimizer steps, including those before a ``resume``; 1 to 10,000,000. None: those of
    ``num_epochs``, or 50 for plain text if that is None, too."""
    num_epochs: float | None = None
    """Passes over the examples, instead of ``num_steps``. None: 3, or more, up to 15, where these would be
    fewer than 200 steps; unless ``num_steps`` is set."""
    validation: object = None
    """Data to compute a validation loss on: a fraction of the rows, above 0 and below 0.5, which are drawn by
    ``seed`` and not trained on (of plain text, the last part), or another data source of the same kind."""
    validate_every: int | None = None
    """Steps between validations; None: a tenth of the run. The initial and the last weights have one, too."""
    early_stopping: int | None = None
    """Number of validations without a lower loss after which the run stops. The checkpoint with the lowest
    loss is kept as ``checkpoints/best``, and ``export`` writes its weights. None: all steps are trained, and
    the last weights exported."""
    samples: Sequence[str] | int = ()
    """Prompts that the model answers before, during and after training, for ``run.samples()``: at most 16
    texts, each as a user's message, or the number of prompts to take from the first rows of the validation
    data (without, of the data). Generation is greedy, and takes a forward for each token."""
    sample_every: int | None = None
    """Steps between generations; None: those of ``validate_every``, or a tenth of the run, as far as they
    take at most a quarter of the time, and after half of the steps. The initial and the last weights have
    one, too."""
    max_new_tokens: int = 64
    """Maximum number of tokens of an answer to a prompt; both together have at most ``seq_len``."""

    recorded_texts: ClassVar[frozenset[str]] = TextTask.recorded_texts | {
        "data",
        "columns",
        "loss_on",
        "bad_rows",
        "objective",
        "validation",
        "samples",
    }
    preload: ClassVar[tuple[str, ...]] = (
        *TextTask.preload,
        "safetensors.torch",
        "transformers.models.auto.tokenization_auto",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        # Resolved here: ranks download nothing, and the kernel may change its working directory.
        object.__setattr__(self, "weights", resolve_weights(self.weights, self._field("weights")))
        check_choice(self._field("loss_on"), self.loss_on, LOSS_ON)
        check_choice(self._field("bad_rows"), self.bad_rows, BAD_ROWS)
        if self.data is not None:
            object.__setattr__(self, "data", resolve_data(self._field("data"), self.data))
        check_objective(self)
        check_streaming(self)
        object.__setattr__(self, "validation", check_validation(self))
        object.__setattr__(self, "samples", check_samples(self))
        check_length(self)

    @property
    def loses_weights(self) -> bool:
        """See :class:`TextTask`."""
        return super().loses_weights and self.early_stopping is None

    @property
    def planned_steps(self) -> int | None:
        """See :class:`TextTask`."""
        # Not a default of the field: dataclasses.replace() with other data would keep it.
        is_default = self.num_steps is None and self.num_epochs is None
        return TEXT_STEPS if is_default and self.plain_text is not None else self.num_steps

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

    def preview(
        self, n: int = 5, *, seq_len: int | None = None, plan: Plan | None = None, packing: bool = False
    ) -> Preview:
        """Return how the model will read the data: the first ``n`` examples token by token, and lengths.

        ``seq_len`` is the length to which examples are cut; None: that of ``plan``, without a plan uncut.
        With a plan there are memory, time and cost; with ``packing``, or a plan that packs, the first
        windows. Raises ``ValueError`` naming the field for malformed data, and for plain text, which has no
        examples.
        """
        if self.plain_text is not None:
            allowed = "examples; a text file is read as one long text, every token of which bears loss"
            refuse(self._field("data"), str(self.plain_text), allowed, "a .jsonl file of rows")
        rows, tokenizer = self._rows.open(), WeightsTokenizer(self.folder).load()
        preview = preview_examples(
            self._field("data"),
            describe_source(self.data),
            rows,
            self._rows.recognize_format(rows),
            tokenizer,
            num_shown=n,
            seq_len=plan.recipe.seq_len if seq_len is None and plan is not None else seq_len,
            loss_on=self.loss_on,
            bad_rows=self.bad_rows,
            packing=packing or (plan is not None and plan.recipe.packing),
            max_seq_len=self.folder.architecture.max_position_embeddings,
        )
        cost = describe_reference(plan, len(rows)) if self.objective == "dpo" else ""
        num_shared = self._rows.count_shared(rows)
        preview = replace(
            preview,
            is_streamed=self.streaming,
            cost=cost,
            num_shared_rows=num_shared,
            unread_files=describe_unread_files(self.data),
            vocabulary_warning=describe_unused_rows(len(tokenizer), self.folder.architecture.vocab_size),
        )
        if plan is None:
            return preview
        return replace(preview, forecast=describe_forecast(self, plan, preview))

    def count_shared_rows(self) -> int | None:
        """Return how many rows for validation are trained on as well; None if that is not counted."""
        return self._rows.count_shared(self._rows.open())

    def match_objective(self) -> Finetune:
        """Return this task with the objective of its data: "dpo" for preference pairs, "sft" for others.

        Raises ``ValueError`` naming the field for data of no known format.
        """
        if self.plain_text is not None:
            return replace(self, objective="sft")
        rows = self._rows.open()
        format = recognize_format(self._field("data"), rows.column_names, self.columns, rows=rows)
        return replace(self, objective="dpo" if format.name == "preference" else "sft")

    @property
    def _rows(self) -> FinetuneRows:
        return FinetuneRows(
            task=type(self).__name__,
            data=self.data,
            validation=self.validation,
            columns=self.columns,
            objective=self.objective,
            bad_rows=self.bad_rows,
            streaming=self.streaming,
            seed=self.seed,
            max_seq_len=self.folder.architecture.max_position_embeddings,
        )

    def choices(self, plan: Plan) -> Choices:
        """Return the recommended settings of this task and of the recipe of ``plan``, each with its reason.

        They depend on the model, the GPUs and the lengths of the examples, which are read as by
        :meth:`preview`. Fields of this task that are None resolve to them; ``choices.plan`` is the plan with
        the recommended recipe. Raises ``ValueError`` for malformed data.
        """
        preview = None if self.plain_text is not None else self.preview(seq_len=plan.recipe.seq_len)
        return recommend(self, plan, preview)

    def prepare_data(
        self, ctx: TrainingContext, resumed: Path | None
    ) -> tuple[Batches, int, Validation | None]:
        """See :class:`TextTask`."""
        from shardscope.training.validation import Validation

        position = {} if resumed is None else read_json(resumed / POSITION_FILE) or {}
        batches, for_validation = (
            self._read_examples(ctx, position) if self.plain_text is None else self._split_text(ctx)
        )
        num_steps = self.planned_steps
        if num_steps is None:
            recommended = recommend_epochs(batches.steps_per_epoch).value
            num_epochs = recommended if self.num_epochs is None else self.num_epochs
            num_steps = max(1, math.ceil(num_epochs * batches.steps_per_epoch))
        if self.objective == "dpo" and not ctx.plan.recipe.has_adapters:
            batches, for_validation = self._add_reference(ctx, batches, for_validation, resumed)
        if for_validation is None:
            return batches, num_steps, None
        every = self.validate_every or max(1, num_steps // 10)
        state = position.get("validation")
        state = state if isinstance(state, dict) else {}
        validation = Validation.resume(for_validation, every, self.early_stopping, state, resumed)
        return batches, num_steps, validation

    def _add_reference(
        self, ctx: TrainingContext, batches: Batches, for_validation: Batches | None, resumed: Path | None
    ) -> tuple[Batches, Batches | None]:
        """Return the batches of pairs with the log-probabilities under the initial weights."""
        from shardscope.training.preferences.reference import add_stored_reference

        field = self._field("resume")
        batches = add_stored_reference(ctx.engine, batches, ctx.folder / TOKENS, resumed, field)
        if for_validation is not None:
            folder = ctx.folder / VALIDATION_TOKENS
            for_validation = add_stored_reference(ctx.engine, for_validation, folder, resumed, field)
        return batches, for_validation

    def prepare_samples(
        self, ctx: TrainingContext, num_steps: int, validation: Validation | None
    ) -> SampleGenerations | None:
        """See :class:`TextTask`."""
        if not self.samples:
            return None
        import torch
        import torch.distributed as dist

        from shardscope.training.samples import SampleGenerations

        tokenizer, seq_len = WeightsTokenizer(self.folder).load(), ctx.plan.recipe.seq_len
        # Rank 0 reads the data for all.
        broadcast: list[tuple[Prompt, ...] | None] = [None]
        if ctx.rank == 0:
            prompts = self._encode_prompts(tokenizer, seq_len)
            if notice := self._describe_missing_prompts(prompts, seq_len):
                print(notice, flush=True)
            broadcast = [prompts]
        dist.broadcast_object_list(broadcast, src=0, device=torch.device("cpu"))
        assert broadcast[0] is not None, "rank 0 sent them"
        every = num_steps // 10 if validation is None else validation.every
        return SampleGenerations(
            prompts=broadcast[0],
            every=self.sample_every or max(1, every),
            max_new_tokens=min(self.max_new_tokens, seq_len - 1),
            end_ids=frozenset(find_end_ids(tokenizer, self.folder.eos_token_id)),
            tokenizer=tokenizer,
            is_limited=self.sample_every is None,
        )

    def _encode_prompts(self, tokenizer: PreTrainedTokenizerBase, seq_len: int) -> tuple[Prompt, ...]:
        """Return the prompts. Raises ``ValueError`` for one that leaves no room for an answer."""
        field = self._field("samples")
        if not isinstance(self.samples, int):
            return encode_prompts(field, tokenizer, self.samples, seq_len)
        name, indices = self._rows.find_prompt_rows()
        rows = self._rows.open(name)
        prompts = read_prompts(
            tokenizer,
            rows,
            self._rows.recognize_format(rows, name),
            range(len(rows)) if indices is None else indices,
            max_tokens=seq_len - 1,
        )
        try:
            first = tuple(islice(prompts, self.samples))
        except ValueError as error:
            allowed = f"a list of prompts: no conversation of the data can be encoded ({error})"
            fix = error.fix if isinstance(error, ExampleError) else {"samples": ()}
            refuse(field, self.samples, allowed, fix)
        if not first:
            allowed = f"a list of prompts: no row has one shorter than {seq_len:,} tokens, the plan's seq_len"
            refuse(field, self.samples, allowed, {"samples": ()})
        return first

    def _describe_missing_prompts(self, prompts: Sequence[Prompt], seq_len: int) -> str:
        """Return that there are fewer ``prompts`` than requested; empty if there are not."""
        if not isinstance(self.samples, int) or len(prompts) == self.samples:
            return ""
        source = "data" if self.validation is None else "validation data"
        return (
            f"{self._field('samples')} is {self.samples}, and {len(prompts)} will be answered: the rows that "
            f"were read of the {source} have no more different prompts shorter than {seq_len:,} tokens. "
            "Nearest fix: a list of prompts, samples=[...]"
        )

    def _read_examples(
        self, ctx: TrainingContext, position: Mapping[str, object]
    ) -> tuple[Batches, Batches | None]:
        """Return batches for training and validation; ``position`` is the resumed checkpoint's.

        Rank 0 tokenizes the examples into the run folder, which all ranks map; where nodes share none, the
        first rank of each does. Streamed ones are tokenized by each rank while it trains.
        """
        import torch.distributed as dist

        from shardscope.training.checkpoints.temporary_folder import writes_folder

        recipe, share = ctx.plan.recipe, self.share_of_rank(ctx)
        tokenizer = WeightsTokenizer(self.folder).load()
        encoder, padding_id = Encoder(tokenizer, self.loss_on), find_padding_id(tokenizer)
        if writes_folder():
            write_tokens(self._rows, encoder, recipe, ctx.folder)
        dist.barrier()
        training: Batches
        if self.streaming:
            training = continue_stream(
                self._rows,
                encoder,
                recipe,
                share,
                padding_id,
                positions=position.get("stream"),
                num_samples_done=ctx.engine.num_steps_done * share["rows"],
            )
        else:
            training = load_batches(ctx.folder / TOKENS, self.objective, recipe, share, padding_id)
        if self.validation is None:
            return training, None
        folder = ctx.folder / VALIDATION_TOKENS
        return training, load_batches(folder, self.objective, recipe, share, padding_id, in_order=True)

    def _split_text(self, ctx: TrainingContext) -> tuple[Batches, Batches | None]:
        """Return windows for training and validation."""
        from shardscope.training.data.windows import read_tokens, split_windows

        windows = self.read_text(ctx)
        if self.validation is None:
            return windows, None
        if isinstance(self.validation, Path):
            tokens = read_tokens(self.validation, self.encode(), self._field("validation"))
            return windows, replace(windows, tokens=tokens, in_order=True)
        assert isinstance(self.validation, float)
        return split_windows(self._field("validation"), windows, self.validation)

    def describe_data(self, folder: Path) -> dict[str, object]:
        """See :class:`TextTask`."""
        is_examples = self.plain_text is None
        if self.streaming:
            # Without a hash, which would read all of it.
            record: dict[str, object] = {"name": describe_source(self.data), "streamed": True}
        elif is_examples:
            record = describe_examples(self.data, folder / TOKENS)
        else:
            record = super().describe_data(folder)
        if isinstance(self.validation, float):
            counts = read_json(folder / VALIDATION_TOKENS / COUNTS) or {}
            record["validation"] = {"name": f"{100 * self.validation:.3g} % of the rows", **counts}
        elif self.validation is not None and is_examples:
            record["validation"] = describe_examples(self.validation, folder / VALIDATION_TOKENS)
        elif isinstance(self.validation, Path):
            record["validation"] = describe_file(self.validation)
        return record

    @property
    def folder(self) -> WeightsFolder:
        """The weights folder; its files are read again on each access."""
        return WeightsFolder(self.weights, self._field("weights"))

    def begin(self, engine: Engine, plan: Plan) -> Callable[[], torch.nn.Module]:
        """See :class:`TextTask`."""
        from shardscope.training.model.model import build_from_config
        from shardscope.training.weights.stored_weights import StoredWeights

        folder = self.folder
        if self.objective == "dpo":
            from shardscope.training.preferences.dpo import Dpo

            engine.objective = Dpo(self.dpo_beta)
        # The engine reads them when it builds the model, and only what this rank keeps.
        engine.weights = StoredWeights(folder, plan.architecture)
        config = folder.config
        files = {file for file, _ in folder.tensors.values()}
        print(
            f"initial weights from {folder.path}: {len(folder.tensors):,} tensors in "
            f"{format_count(len(files), 'file')}",
            flush=True,
        )
        if folder.multimodal_type is not None:
            family = plan.architecture.model_type
            print(
                f"{folder.path.name} is a multimodal {folder.multimodal_type}: its language model alone "
                f"({family}) is trained and exported",
                flush=True,
            )
        return lambda: build_from_config(config, plan.architecture, plan.recipe.dropout)

    def peak_rate(self, plan: Plan) -> float:
        """See :class:`TextTask`."""
        if self.learning_rate is not None:
            return self.learning_rate
        is_examples = self.plain_text is None
        return recommend_rate(plan, on_examples=is_examples, objective=self.objective).value

    def encode(self) -> Callable[[str], TokenIds]:
        """Return the encode function of the folder's tokenizer."""
        return WeightsTokenizer(self.folder).encode

    def complete_export(self, folder: Path, plan: Plan) -> None:
        """See :class:`TextTask`. config.json gets the original values of settings disabled for training.

        adapter_config.json gets the name of a base of the Hub, by which peft opens both, unless the base is
        multimodal.
        """
        WeightsTokenizer(self.folder).save(folder)
        if not plan.recipe.has_adapters:
            self.folder.write_config(folder)
        elif (name := find_hub_name(self.weights)) is not None and self.folder.multimodal_type is None:
            # By a multimodal base's name peft would open all of it, whose modules have other names.
            write_base_name(folder, name)

    def frozen_base(self) -> dict[str, object]:
        """See :class:`TextTask`."""
        return {"weights": str(self.weights), "sample": hash_base(self.folder)}

    def _list_texts(self) -> dict[str, Path]:
        files = {"data": self.data, "validation": self.validation}
        return {name: file for name, file in files.items() if isinstance(file, Path) and is_text(file)}

    def check_model(self, plan: Plan) -> None:
        """See :class:`TextTask`."""
        folder = self.folder
        folder.check_plan(plan)
        if self.objective == "dpo":
            check_pair_plan(plan)
        if self.plain_text is None:
            check_rows(self, self._rows)
        check_config(plan, folder.config)
        WeightsTokenizer(folder).check(plan.architecture.vocab_size)

    def check_launch(self, plan: Plan, folder: Path, name: str | None) -> None:
        """See :class:`TextTask`. Also if ``seq_len`` leaves rows of the data nothing to learn, or a prompt of
        ``samples`` no answer."""
        super().check_launch(plan, folder, name)
        if self.loses_weights:
            warn_user(f"The trained weights are lost when the run ends: {self._field('export')} is False.")
        if self.plain_text is None:
            check_row_lengths(self, self._rows, plan.recipe.seq_len)
        if self.samples:
            # Ranks would raise it when they have built the model.
            prompts = self._encode_prompts(WeightsTokenizer(self.folder).load(), plan.recipe.seq_len)
            if notice := self._describe_missing_prompts(prompts, plan.recipe.seq_len):
                warn_user(f"{notice}.")

    def _check_text_length(self, field: str, path: Path, plan: Plan) -> None:
        fraction = self.validation if field == "data" and isinstance(self.validation, float) else None
        check_text_length(path, self.encode(), self._field(field), plan.recipe.seq_len, fraction)
