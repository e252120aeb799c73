"""``Finetune``: further training of a Hugging Face checkpoint on text."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, NoReturn

from shardscope.core.errors import Value, check_choice, check_flag, check_integer, check_number, refuse
from shardscope.frameworks.registry import check_config
from shardscope.records.json_files import read_json
from shardscope.training.checkpoints.folders import POSITION_FILE
from shardscope.training.data.batches import split_rows
from shardscope.training.data.tokenizer import SHIPPED_TEXT
from shardscope.training.data.weights_tokenizer import WeightsTokenizer
from shardscope.training.examples.batches import ExampleBatches, find_padding_id
from shardscope.training.examples.conversation import Prompt, encode_conversation, find_end_ids, read_prompts
from shardscope.training.examples.encoding import LOSS_ON, Encoder, LossOn
from shardscope.training.examples.formats import Format, recognize_format
from shardscope.training.examples.packed_windows import (
    PackedBatches,
    Packing,
    describe_packing,
    pack_table,
)
from shardscope.training.examples.preview import Preview, preview_examples
from shardscope.training.examples.rows import Rows, describe_source, is_text, open_rows, resolve_source
from shardscope.training.examples.shared_rows import count_shared_rows
from shardscope.training.examples.source_record import COUNTS, describe_examples, describe_file, save_counts
from shardscope.training.examples.streamed_batches import StreamedBatches, StreamedExamples, StreamReader
from shardscope.training.examples.streamed_rows import check_streamable, read_first_rows
from shardscope.training.examples.token_table import (
    BAD_ROWS,
    BadRows,
    RowCounts,
    TokenTable,
    build_table,
    check_examples,
    check_row,
    count_shared_examples,
    describe_counts,
    iterate_encoded,
)
from shardscope.training.preferences.pairs import PairBatches
from shardscope.training.preferences.settings import (
    DEFAULT_BETA,
    OBJECTIVES,
    SIDES,
    Objective,
    check_pair_plan,
    describe_reference,
)
from shardscope.training.tasks.choices import (
    TEXT_STEPS,
    Choices,
    recommend,
    recommend_epochs,
    recommend_rate,
)
from shardscope.training.tasks.text_task import MAX_STEPS, TextTask, resolve_text
from shardscope.training.weights.base_sample import hash_base
from shardscope.training.weights.weights_folder import WeightsFolder

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

    from shardscope.core.plan import Plan
    from shardscope.training.data.batches import Batches
    from shardscope.training.data.tokenizer import TokenIds
    from shardscope.training.engine import Engine, TrainingContext
    from shardscope.training.samples import SampleGenerations
    from shardscope.training.validation import Validation

TOKENS, VALIDATION_TOKENS = "tokens", "validation-tokens"
"""Subfolders of a run with the tokens of its examples."""
MAX_PROMPTS, MAX_PROMPT_LENGTH, MAX_NEW_TOKENS = 16, 10_000, 4096
"""Maximum number of sample prompts, of characters in each, and of tokens in an answer."""
MAX_CHECKED_ROWS = 1000
"""Rows whose format is checked before a launch; the others are checked when they are tokenized."""


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
    """Peak learning rate; None: 2e-5, or 2e-4 for adapters, 1e-4 from 30 billion parameters; on examples,
    1e-4 and 1e-3 for models below 400 million. More for batches of over 262,144 tokens. See
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
    """What happens to a malformed row: "refuse" the data, or "skip" the row, counted in the log."""
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
        # Resolved, because the kernel may change its working directory before the launch.
        object.__setattr__(self, "weights", WeightsFolder.open(self.weights, self._field("weights")).path)
        check_choice(self._field("loss_on"), self.loss_on, LOSS_ON)
        check_choice(self._field("bad_rows"), self.bad_rows, BAD_ROWS)
        if self.data is not None:
            self._resolve_source("data")
        self._check_objective()
        self._check_streaming()
        self._check_validation()
        self._check_samples()
        self._check_length()

    def _check_streaming(self) -> None:
        check_flag(self._field("streaming"), self.streaming)
        if not self.streaming:
            return
        if self.plain_text is not None:
            allowed = "False with a text file, which is read as one long text"
            refuse(self._field("streaming"), True, allowed, {"streaming": False})
        if self.objective == "dpo":
            allowed = 'False with objective="dpo": preference pairs are tokenized before training'
            refuse(self._field("streaming"), True, allowed, {"streaming": False})
        check_streamable(self._field("data"), self.data)
        if self.num_steps is None:
            allowed = "a number of steps with streaming=True: how many rows an epoch has is not known"
            refuse(self._field("num_steps"), None, allowed, {"num_steps": 1000})
        if isinstance(self.validation, float):
            allowed = "another data source, or None with streaming=True: its rows are not counted"
            refuse(self._field("validation"), self.validation, allowed, {"validation": None})

    def _resolve_source(self, name: str) -> None:
        source = resolve_source(self._field(name), getattr(self, name))
        object.__setattr__(self, name, resolve_text(self._field(name), source) if is_text(source) else source)

    def _check_objective(self) -> None:
        field = self._field("objective")
        check_choice(field, self.objective, OBJECTIVES)
        check_number(self._field("dpo_beta"), self.dpo_beta, low=1e-6, high=10.0)
        if self.objective != "dpo":
            return
        if self.data is None or is_text(self.data):
            kind = "Moby-Dick" if self.data is None else "a text file"
            refuse(field, "dpo", f'"sft" for {kind}, which has no preference pairs', {"objective": "sft"})
        if self.loss_on == "all":
            allowed = '"completions" or "last" with objective="dpo": the prompt is the same on both sides'
            refuse(self._field("loss_on"), "all", allowed, {"loss_on": "completions"})

    def _check_validation(self) -> None:
        for name in ("validate_every", "early_stopping"):
            number = getattr(self, name)
            if number is None:
                continue
            check_integer(self._field(name), number, low=1, high=MAX_STEPS)
            if self.validation is None:
                refuse(self._field(name), number, "None without validation data", {"validation": 0.1})
        if self.validation is None:
            return
        if isinstance(self.validation, int | float):
            if isinstance(self.validation, bool) or not 0 < self.validation < 0.5:
                allowed = "a fraction above 0 and below 0.5, a data source, or None"
                refuse(self._field("validation"), self.validation, allowed, {"validation": 0.1})
            return
        self._resolve_source("validation")
        if is_text(self.validation) != (self.plain_text is not None):
            kind = "examples" if self.plain_text is None else "a text file"
            allowed = f"{kind}, as the training data are, or a fraction of them"
            refuse(self._field("validation"), describe_source(self.validation), allowed, {"validation": 0.1})

    def _check_samples(self) -> None:
        field, prompts = self._field("samples"), self.samples
        check_integer(self._field("max_new_tokens"), self.max_new_tokens, low=1, high=MAX_NEW_TOKENS)
        if self.sample_every is not None:
            check_integer(self._field("sample_every"), self.sample_every, low=1, high=MAX_STEPS)
            if not prompts:
                refuse(self._field("sample_every"), self.sample_every, "None without samples", Value(None))
        if isinstance(prompts, int):
            check_integer(field, prompts, low=1, high=MAX_PROMPTS)
            if self.plain_text is not None:
                self._refuse_number_of_prompts("a text file")
        else:
            is_list = isinstance(prompts, Sequence) and not isinstance(prompts, str | bytes)
            texts = list(prompts) if is_list else []
            if not is_list or len(texts) > MAX_PROMPTS or not all(isinstance(text, str) for text in texts):
                value = f"{len(texts)} entries" if texts else prompts
                allowed = f"a list of at most {MAX_PROMPTS} texts, or their number"
                refuse(field, value, allowed, {"samples": ["Who are you?"]})
            for text in texts:
                if not text.strip() or len(text) > MAX_PROMPT_LENGTH:
                    shown = f"a text of {len(text):,} characters"
                    allowed = f"texts of 1 to {MAX_PROMPT_LENGTH:,} characters"
                    refuse(field, shown, allowed, {"samples": ["Who are you?"]})
            object.__setattr__(self, "samples", tuple(texts))

    def _refuse_number_of_prompts(self, data: str) -> NoReturn:
        allowed = f"a list of prompts: {data} has none to take"
        refuse(self._field("samples"), self.samples, allowed, {"samples": ["Who are you?"]})

    def _check_length(self) -> None:
        if self.num_epochs is None:
            return
        check_number(self._field("num_epochs"), self.num_epochs, low=0.01, high=1e6)
        if self.num_steps is not None:
            refuse(self._field("num_epochs"), self.num_epochs, "None with num_steps", {"num_steps": None})

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

    def preview(self, n: int = 5, *, seq_len: int | None = None, plan: Plan | None = None) -> Preview:
        """Return how the model will read the data: the first ``n`` examples token by token, and lengths.

        ``seq_len`` is the length to which examples are cut; None: that of ``plan``, without a plan uncut.
        With a plan, the cost of DPO's reference has its predicted time. Raises ``ValueError`` naming the
        field for malformed data, and for plain text, which has no examples.
        """
        if self.plain_text is not None:
            allowed = "examples; a text file is read as one long text, every token of which bears loss"
            refuse(self._field("data"), str(self.plain_text), allowed, "a .jsonl file of rows")
        name, rows = self._field("data"), self._open_rows()
        preview = preview_examples(
            name,
            describe_source(self.data),
            rows,
            self._recognize_format(rows),
            WeightsTokenizer(self.folder).load(),
            num_shown=n,
            seq_len=plan.recipe.seq_len if seq_len is None and plan is not None else seq_len,
            loss_on=self.loss_on,
            bad_rows=self.bad_rows,
        )
        cost = describe_reference(plan, len(rows)) if self.objective == "dpo" else ""
        return replace(
            preview, is_streamed=self.streaming, cost=cost, num_shared_rows=self._count_shared_rows(rows)
        )

    def _count_shared_rows(self, rows: Rows) -> int | None:
        """Return how many rows for validation are also trained on; None if they are not compared."""
        if self.validation is None or self.streaming:
            return 0 if self.validation is None else None
        format = self._recognize_format(rows)
        if isinstance(self.validation, float):
            for_training, for_validation = split_rows(len(rows), self.validation, self.seed)
            return count_shared_rows((rows, format, for_training), (rows, format, for_validation))
        others = self._open_rows("validation")
        other_format = self._recognize_format(others, "validation")
        return count_shared_rows((rows, format, range(len(rows))), (others, other_format, range(len(others))))

    def match_objective(self) -> Finetune:
        """Return this task with the objective of its data: "dpo" for preference pairs, "sft" for others.

        Raises ``ValueError`` naming the field for data of no known format.
        """
        if self.plain_text is not None:
            return replace(self, objective="sft")
        rows = self._open_rows()
        format = recognize_format(self._field("data"), rows.column_names, self.columns)
        return replace(self, objective="dpo" if format.name == "preference" else "sft")

    def choices(self, plan: Plan) -> Choices:
        """Return the recommended settings of this task and of the recipe of ``plan``, each with its reason.

        They depend on the model, the GPUs and the lengths of the examples, which are read as by
        :meth:`preview`. Fields of this task that are None resolve to them; ``choices.plan`` is the plan with
        the recommended recipe. Raises ``ValueError`` for malformed data.
        """
        preview = None if self.plain_text is not None else self.preview(seq_len=plan.recipe.seq_len)
        return recommend(self, plan, preview)

    def _open_rows(self, name: str = "data") -> Rows:
        """Return the rows of a source; of a streamed one, the first rows."""
        if self.streaming and name == "data":
            return read_first_rows(self._field(name), self.data)
        return open_rows(self._field(name), getattr(self, name))

    def _recognize_format(self, rows: Rows, name: str = "data") -> Format:
        field = self._field(name)
        format = recognize_format(field, rows.column_names, self.columns)
        if (format.name == "preference") != (self.objective == "dpo"):
            is_pair = format.name == "preference"
            kind = 'preference pairs (prompt, chosen, rejected) with objective="dpo"'
            allowed = 'rows with one answer with objective="sft"' if is_pair else kind
            value = f"data of the format {format.title}"
            refuse(field, value, allowed, {"objective": "dpo" if is_pair else "sft"})
        return format

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
        return batches, num_steps, Validation.resume(for_validation, every, self.early_stopping, state)

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
            broadcast = [self._encode_prompts(tokenizer, seq_len)]
        dist.broadcast_object_list(broadcast, src=0, device=torch.device("cpu"))
        prompts = broadcast[0]
        assert prompts is not None, "rank 0 sent them"
        every = num_steps // 10 if validation is None else validation.every
        return SampleGenerations(
            prompts=prompts,
            every=self.sample_every or max(1, every),
            max_new_tokens=min(self.max_new_tokens, seq_len - 1),
            end_ids=frozenset(find_end_ids(tokenizer, self.folder.eos_token_id)),
            tokenizer=tokenizer,
            is_limited=self.sample_every is None,
        )

    def _encode_prompts(self, tokenizer: PreTrainedTokenizerBase, seq_len: int) -> tuple[Prompt, ...]:
        """Return the prompts. Raises ``ValueError`` for one that leaves no room for an answer."""
        field = self._field("samples")
        if isinstance(self.samples, int):
            name, indices = self._find_prompt_rows()
            rows = self._open_rows(name)
            format = self._recognize_format(rows, name)
            encoded = read_prompts(
                tokenizer, rows, format, range(len(rows)) if indices is None else indices, seq_len - 1
            )
            prompts = tuple(islice(encoded, self.samples))
            if not prompts:
                allowed = (
                    f"a list of prompts: no row has one shorter than {seq_len:,} tokens, the plan's seq_len"
                )
                refuse(field, self.samples, allowed, Value(None))
            return prompts
        prompts = tuple(
            Prompt(text=text, ids=tuple(encode_conversation(tokenizer, [{"role": "user", "content": text}])))
            for text in self.samples
        )
        for prompt in prompts:
            if len(prompt.ids) >= seq_len:
                shown = f"a prompt of {len(prompt.ids):,} tokens ({prompt.text[:40]!r}...)"
                refuse(
                    field, shown, f"prompts shorter than the plan's seq_len={seq_len:,}", "a shorter prompt"
                )
        return prompts

    def _find_prompt_rows(self) -> tuple[str, list[int] | None]:
        """Return the field whose rows have the prompts, and the indices of these rows; None: all."""
        if isinstance(self.validation, float):
            return "data", split_rows(len(self._open_rows()), self.validation, self.seed)[1]
        return ("data" if self.validation is None else "validation"), None

    def _read_examples(
        self, ctx: TrainingContext, position: Mapping[str, object]
    ) -> tuple[Batches, Batches | None]:
        """Return batches for training and validation; ``position`` is the resumed checkpoint's.

        Rank 0 tokenizes the examples into the run folder, which all ranks map. Streamed ones are tokenized by
        each rank while it trains.
        """
        import torch.distributed as dist

        tokenizer, seq_len = WeightsTokenizer(self.folder).load(), ctx.plan.recipe.seq_len
        packs = ctx.plan.recipe.packing
        if ctx.rank == 0:
            self._write_tokens(ctx.folder, tokenizer, seq_len)
            for name in (TOKENS, VALIDATION_TOKENS) if packs else ():
                if (ctx.folder / name).exists():
                    self._pack_tokens(ctx.folder / name, seq_len)
        dist.barrier()
        padding_id, share = find_padding_id(tokenizer), self.share_of_rank(ctx)

        def load_batches(name: str) -> Batches:
            folder, in_order = ctx.folder / name, name == VALIDATION_TOKENS
            table = TokenTable.load(folder)
            if self.objective == "dpo":
                pair_share = share.copy()
                pair_share["rows"] //= SIDES
                return PairBatches(
                    table=table,
                    seq_len=seq_len,
                    padding_id=padding_id,
                    pairs_per_micro_batch=ctx.plan.recipe.micro_batch_size // SIDES,
                    in_order=in_order,
                    **pair_share,
                )
            if not packs:
                return ExampleBatches(
                    table=table, seq_len=seq_len, padding_id=padding_id, in_order=in_order, **share
                )
            packing = Packing.load(folder)
            return PackedBatches(
                table=table,
                packing=packing,
                seq_len=seq_len,
                padding_id=padding_id,
                in_order=in_order,
                **share,
            )

        training = self._read_stream(ctx, tokenizer, position) if self.streaming else load_batches(TOKENS)
        return training, None if self.validation is None else load_batches(VALIDATION_TOKENS)

    def _read_stream(
        self, ctx: TrainingContext, tokenizer: PreTrainedTokenizerBase, position: Mapping[str, object]
    ) -> StreamedBatches:
        """Return the batches of this rank's share of the stream, from where a resumed run stopped."""
        share, recipe = self.share_of_rank(ctx), ctx.plan.recipe
        examples = StreamedExamples(
            field=self._field("data"),
            source=self.data,
            format=self._recognize_format(self._open_rows()),
            encoder=Encoder(tokenizer, self.loss_on),
            seq_len=recipe.seq_len,
            bad_rows=self.bad_rows,
            packs=recipe.packing,
            seed=self.seed,
            rank=share["rank"],
            num_ranks=share["num_ranks"],
        )
        reader = StreamReader(examples)
        positions = position.get("stream")
        own = (
            positions[examples.rank]
            if isinstance(positions, list) and examples.rank < len(positions)
            else None
        )
        reader.resume(own, ctx.engine.num_steps_done * share["rows"])
        return StreamedBatches(
            reader=reader, seq_len=recipe.seq_len, padding_id=find_padding_id(tokenizer), **share
        )

    def _pack_tokens(self, folder: Path, seq_len: int) -> None:
        """Assign the examples whose tokens are in ``folder`` to windows, and log what that wins."""
        table = TokenTable.load(folder)
        packing = pack_table(table, seq_len)
        packing.save(folder)
        print(describe_packing(table, packing, seq_len), flush=True)

    def _split_text(self, ctx: TrainingContext) -> tuple[Batches, Batches | None]:
        """Return windows for training and validation."""
        from shardscope.training.data.windows import read_tokens

        windows = self.read_text(ctx)
        if self.validation is None:
            return windows, None
        if isinstance(self.validation, Path):
            tokens = read_tokens(self.validation, self.encode())
            return windows, replace(windows, tokens=tokens, in_order=True)
        assert isinstance(self.validation, float)
        if windows.num_samples < 2:
            refuse(
                self._field("validation"),
                self.validation,
                f"a text of at least two windows of {windows.seq_len:,} tokens, one of them for validation",
                {"validation": None},
            )
        num_validation = max(1, round(windows.num_samples * self.validation))
        cut = (windows.num_samples - num_validation) * windows.seq_len
        validation = replace(windows, tokens=windows.tokens[cut:], in_order=True)
        return replace(windows, tokens=windows.tokens[:cut]), validation

    def _write_tokens(self, folder: Path, tokenizer: PreTrainedTokenizerBase, seq_len: int) -> None:
        if self.streaming:
            if self.validation is not None:
                self._write_table(folder / VALIDATION_TOKENS, tokenizer, seq_len, "validation")
            return
        if isinstance(self.validation, float):
            num_rows = len(self._open_rows())
            for_training, for_validation = split_rows(num_rows, self.validation, self.seed)
            training = self._write_table(folder / TOKENS, tokenizer, seq_len, "data", for_training)
            validation = self._write_table(
                folder / VALIDATION_TOKENS, tokenizer, seq_len, "data", for_validation
            )
        else:
            training = self._write_table(folder / TOKENS, tokenizer, seq_len, "data")
            if self.validation is None:
                return
            validation = self._write_table(folder / VALIDATION_TOKENS, tokenizer, seq_len, "validation")
        num_sides = SIDES if self.objective == "dpo" else 1
        print(f"the validation loss is that of {len(validation) // num_sides:,} examples", flush=True)
        if num_shared := count_shared_examples(training, validation, num_sides):
            print(
                f"warning: {num_shared:,} validation examples are also trained on, which lowers the "
                "validation loss",
                flush=True,
            )

    def _write_table(
        self,
        folder: Path,
        tokenizer: PreTrainedTokenizerBase,
        seq_len: int,
        name: str,
        indices: list[int] | None = None,
    ) -> TokenTable:
        """Tokenize rows of the source in the field ``name`` into ``folder``, and log how many there are."""
        rows, counts, field = self._open_rows(name), RowCounts(), self._field(name)
        encoded = iterate_encoded(
            field,
            rows,
            self._recognize_format(rows, name),
            Encoder(tokenizer, self.loss_on),
            seq_len=seq_len,
            bad_rows=self.bad_rows,
            counts=counts,
            indices=indices,
        )
        table = build_table(encoded)
        check_examples(field, counts, seq_len)
        table.save(folder)
        save_counts(folder, counts)
        for line in describe_counts(counts, seq_len):
            print(line, flush=True)
        return table

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
            record["validation"] = {"name": f"{self.validation:.0%} of the rows", **counts}
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
            f"initial weights from {folder.path}: {len(folder.tensors):,} tensors in {len(files):,} files",
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
        """See :class:`TextTask`. config.json gets the original values of settings disabled for training."""
        WeightsTokenizer(self.folder).save(folder)
        if not plan.recipe.has_adapters:
            self.folder.write_config(folder)

    def _check_rows(self) -> None:
        """Raise ``ValueError`` for data of no known format, and for a malformed row among the first ones."""
        has_source = self.validation is not None and not isinstance(self.validation, float)
        for name in ("data", "validation") if has_source else ("data",):
            rows = self._open_rows(name)
            format = self._recognize_format(rows, name)
            if self.bad_rows == "refuse":
                for index in range(min(len(rows), MAX_CHECKED_ROWS)):
                    check_row(self._field(name), format, index, rows[index])
            if isinstance(self.samples, int) and format.name == "text":
                self._refuse_number_of_prompts("data of the format text")
            if isinstance(self.validation, float) and len(rows) < 2:
                allowed = "a data source, or None: one row cannot be split"
                refuse(self._field("validation"), self.validation, allowed, {"validation": None})

    def frozen_base(self) -> dict[str, object]:
        """See :class:`TextTask`."""
        return {"weights": str(self.weights), "sample": hash_base(self.folder)}

    def check_model(self, plan: Plan) -> None:
        """See :class:`TextTask`."""
        folder = self.folder
        folder.check_plan(plan)
        if self.objective == "dpo":
            check_pair_plan(plan)
        if self.plain_text is None:
            self._check_rows()
        check_config(plan, folder.config)
        WeightsTokenizer(folder).check(plan.architecture.vocab_size)
