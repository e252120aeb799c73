"""Tokens of a fine-tune's examples: written into the run folder by rank 0, mapped as batches by all ranks.

Streamed examples are tokenized by each rank while it trains.
"""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

from shardscope.core.errors import refuse
from shardscope.core.number_format import format_count
from shardscope.core.recipe import Recipe
from shardscope.training.data.batches import Batches, Share, split_rows
from shardscope.training.examples.batches import ExampleBatches
from shardscope.training.examples.encoding import Encoder
from shardscope.training.examples.folder_files import describe_unread_files
from shardscope.training.examples.packed_windows import (
    PackedBatches,
    Packing,
    describe_packing,
    pack_table,
)
from shardscope.training.examples.source_record import save_counts, save_shared_count
from shardscope.training.examples.streamed_batches import StreamedBatches, StreamedExamples, StreamReader
from shardscope.training.examples.token_table import (
    MAX_NAMED_ROWS,
    RowCounts,
    TokenTable,
    build_table,
    check_examples,
    count_rows,
    count_shared_examples,
    describe_counts,
    iterate_encoded,
    name_rows,
)
from shardscope.training.preferences.pairs import PairBatches
from shardscope.training.preferences.settings import SIDES, Objective
from shardscope.training.tasks.finetune_rows import FinetuneRows

TOKENS, VALIDATION_TOKENS = "tokens", "validation-tokens"
"""Subfolders of a run with the tokens of its examples."""


def write_tokens(rows: FinetuneRows, encoder: Encoder, recipe: Recipe, folder: Path) -> None:
    """Tokenize all examples that are not streamed into subfolders of the run ``folder``, and pack them."""
    tables = _write_tables(rows, encoder, recipe.seq_len, folder)
    if recipe.packing:
        for subfolder, table in tables.items():
            packing = pack_table(table, recipe.seq_len)
            packing.save(folder / subfolder)
            print(describe_packing(table, packing, recipe.seq_len), flush=True)


def _write_tables(rows: FinetuneRows, encoder: Encoder, seq_len: int, folder: Path) -> dict[str, TokenTable]:
    """Write the tokens of training and validation, and log how many examples both have."""
    training_indices, validation_indices, validation_field = None, None, "validation"
    if isinstance(rows.validation, float):
        validation_field = "data"
        training_indices, validation_indices = split_rows(len(rows.open()), rows.validation, rows.seed)
    for sentence in filter(None, map(describe_unread_files, (rows.data, rows.validation))):
        print(sentence, flush=True)
    tables: dict[str, TokenTable] = {}
    if not rows.streaming:
        tables[TOKENS] = _write_table(rows, "data", training_indices, encoder, seq_len, folder / TOKENS)
    if rows.validation is None:
        return tables
    tables[VALIDATION_TOKENS] = _write_table(
        rows, validation_field, validation_indices, encoder, seq_len, folder / VALIDATION_TOKENS
    )
    if rows.streaming:
        return tables
    num_sides = SIDES if rows.objective == "dpo" else 1
    num_examples = len(tables[VALIDATION_TOKENS]) // num_sides
    print(f"the validation loss is that of {format_count(num_examples, 'example')}", flush=True)
    if num_shared := count_shared_examples(tables[TOKENS], tables[VALIDATION_TOKENS], num_sides):
        save_shared_count(folder / VALIDATION_TOKENS, num_shared)
        print(
            f"warning: {num_shared:,} validation examples are also trained on, which lowers the "
            "validation loss",
            flush=True,
        )
    return tables


def _write_table(
    rows: FinetuneRows, name: str, indices: list[int] | None, encoder: Encoder, seq_len: int, folder: Path
) -> TokenTable:
    """Tokenize rows of the source in the field ``name`` into ``folder``, and log how many there are."""
    opened, counts, field = rows.open(name), RowCounts(), rows.name_field(name)
    encoded = iterate_encoded(
        field,
        opened,
        rows.recognize_format(opened, name),
        encoder,
        seq_len=seq_len,
        bad_rows=rows.bad_rows,
        counts=counts,
        indices=indices,
    )
    table = build_table(encoded)
    # Rows drawn for validation may all be bad ones, while those for training are not.
    is_share = indices is not None and folder.name == VALIDATION_TOKENS
    if is_share and rows.bad_rows != "refuse" and not counts.num_examples:
        _refuse_share(rows, counts, len(opened))
    check_examples(field, counts, seq_len, rows.bad_rows, rows.max_seq_len)
    table.save(folder)
    save_counts(folder, counts)
    for line in describe_counts(counts, seq_len):
        print(line, flush=True)
    return table


def _refuse_share(rows: FinetuneRows, counts: RowCounts, num_rows: int) -> NoReturn:
    """Raise ``ValueError`` for a validation share of ``num_rows`` rows that has no example."""
    reasons = name_rows([*counts.bad_rows, *counts.rows_without_loss][:MAX_NAMED_ROWS])
    allowed = (
        f"a share that has an example: it draws {count_rows(counts.num_rows)} of {num_rows:,}, and none of "
        f"them can be learned ({reasons})"
    )
    refuse(rows.name_field("validation"), rows.validation, allowed, "a larger share, or another data source")


def load_batches(
    folder: Path,
    objective: Objective,
    recipe: Recipe,
    share: Share,
    padding_id: int,
    *,
    in_order: bool = False,
) -> Batches:
    """Return the batches of one rank from the tokens in ``folder``, which are mapped into memory."""
    table, seq_len = TokenTable.load(folder), recipe.seq_len
    if objective == "dpo":
        pair_share = share.copy()
        pair_share["rows"] //= SIDES
        return PairBatches(
            table=table,
            seq_len=seq_len,
            padding_id=padding_id,
            pairs_per_micro_batch=recipe.micro_batch_size // SIDES,
            in_order=in_order,
            **pair_share,
        )
    if recipe.packing:
        packing = Packing.load(folder)
        return PackedBatches(
            table=table, packing=packing, seq_len=seq_len, padding_id=padding_id, in_order=in_order, **share
        )
    return ExampleBatches(table=table, seq_len=seq_len, padding_id=padding_id, in_order=in_order, **share)


def continue_stream(
    rows: FinetuneRows,
    encoder: Encoder,
    recipe: Recipe,
    share: Share,
    padding_id: int,
    *,
    positions: object,
    num_samples_done: int,
) -> StreamedBatches:
    """Return the batches of one rank's share of the stream, from where a resumed run stopped.

    ``positions`` are those of all ranks in the checkpoint; without them ``num_samples_done`` samples are
    skipped.
    """
    rank = share["rank"]
    examples = StreamedExamples(
        field=rows.name_field("data"),
        source=rows.data,
        format=rows.recognize_format(rows.open()),
        encoder=encoder,
        seq_len=recipe.seq_len,
        bad_rows=rows.bad_rows,
        packs=recipe.packing,
        seed=rows.seed,
        rank=rank,
        num_ranks=share["num_ranks"],
        max_seq_len=rows.max_seq_len,
    )
    reader = StreamReader(examples)
    own = positions[rank] if isinstance(positions, list) and rank < len(positions) else None
    reader.resume(own, num_samples_done)
    return StreamedBatches(reader=reader, seq_len=recipe.seq_len, padding_id=padding_id, **share)
