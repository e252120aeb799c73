"""Ranks of a file, folder or run: reading their files, and which file is which rank."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from shardscope.core.number_format import format_count
from shardscope.trace.categories import GPU_CATEGORIES, RUNTIME_CATEGORIES, STEP, WRAPPER_CATEGORIES
from shardscope.trace.files import list_trace_files, refuse_file
from shardscope.trace.loading.cache import map_rank, read_cache, read_rank_file, write_cache
from shardscope.trace.loading.merged_file import split_ranks
from shardscope.trace.loading.processes import WorkerPool, count_processes
from shardscope.trace.loading.rank_columns import RankColumns, get_rank
from shardscope.trace.loading.rank_file import DecodeChunks, decode_here, read_rank
from shardscope.trace.loading.splitting import is_cut_off

Progress = Callable[[float], object]
"""Called with the share of the files that was read, 0 to 1. An exception that it raises ends the load."""

_EPOCH_NS = 10**18  # the year 2001: times above it are wall clock
_UNNUMBERED = "file without a rank, numbered by order"
_KNOWN_CATEGORIES = GPU_CATEGORIES | RUNTIME_CATEGORIES | WRAPPER_CATEGORIES | {"cpu_op", "Operator"}
_MAX_LISTED = 8
_MAX_STEPS = 100_000
MAX_IN_MEMORY = 16
"""Maximum files whose columns are held in memory; with more, they are in mapped files."""
_LARGE_BYTES = 4 * 1024**2
"""Smallest file that is worth other processes; compressed, it has ten times as much JSON."""


def read_ranks(
    source: object, progress: Progress | None = None, *, cache: bool = True
) -> tuple[list[RankColumns], list[str]]:
    """Return the columns of each rank by rank, and notes about files that were left out.

    Files of a folder that are not traces are left out, and all recordings of a rank but the latest.
    ``cache``: use and write caches beside large files. Raises ``ValueError`` if no file is left, and for
    files of different jobs.
    """
    paths = list_trace_files(source)
    ranks, problems = _read_files(paths, progress or (lambda share: None), cache=cache)
    if not ranks:
        raise problems[0]
    notes = [f"left out: {problem}" for problem in problems[:_MAX_LISTED]]
    if len(problems) > _MAX_LISTED:
        notes.append(f"{len(problems) - _MAX_LISTED:,} more files left out")
    ranks = _choose_recordings([one for rank in ranks for one in split_ranks(rank)], notes)
    _check_same_job(ranks)
    _number_ranks(ranks)
    return sorted(ranks, key=get_rank), notes


def _read_files(
    paths: list[Path], progress: Progress, *, cache: bool
) -> tuple[list[RankColumns], list[ValueError]]:
    """Return the columns of each readable file, and the problems of the others."""
    texts: dict[str, str] = {}
    known = {
        path: _share_texts(rank, texts) for path in paths if cache and (rank := read_cache(path)) is not None
    }
    missing = [path for path in paths if path not in known]
    sizes = {path: path.stat().st_size if path.is_file() else 0 for path in missing}
    read = dict.fromkeys(missing, 0)

    def note_bytes(path: Path, num_bytes: int) -> None:
        read[path] = num_bytes
        progress(min(sum(read.values()) / max(sum(sizes.values()), 1), 1.0))

    # Processes take a third of a second to start: small files are read here.
    large = [path for path in missing if sizes[path] >= _LARGE_BYTES]
    num_processes = count_processes() if large else 1
    results: dict[Path, RankColumns | ValueError] = dict(known)
    is_mapped = len(paths) > MAX_IN_MEMORY
    if num_processes > 1 and len(large) > 1:
        with WorkerPool(min(num_processes, len(missing))) as pool:
            outcomes = pool.read_files(missing, note_bytes, write_caches=cache)
            shared = (_share_texts(outcome, texts) for outcome in outcomes)
            results |= dict(zip(missing, shared, strict=True))
    elif num_processes > 1:
        with WorkerPool(num_processes) as pool:
            for path in missing:
                outcome = _read_file(path, note_bytes, cache, is_mapped, pool.decode)
                results[path] = _share_texts(outcome, texts)
    else:
        for path in missing:
            results[path] = _share_texts(_read_file(path, note_bytes, cache, is_mapped), texts)
    progress(1.0)
    in_order = [results[path] for path in paths]
    ranks = [result for result in in_order if isinstance(result, RankColumns)]
    return ranks, [result for result in in_order if isinstance(result, ValueError)]


Outcome = TypeVar("Outcome", bound=RankColumns | ValueError)


def _share_texts(outcome: Outcome, known: dict[str, str]) -> Outcome:
    """Replace the names of a rank by equal ones of ranks before it.

    Every step has a name of its own, so that the names of hundreds of ranks would take more memory than all
    else that is kept of them.
    """
    if isinstance(outcome, RankColumns):
        texts = outcome.texts
        texts.names = [known.setdefault(name, name) for name in texts.names]
        texts.categories = [known.setdefault(name, name) for name in texts.categories]
    return outcome


def _read_file(
    path: Path,
    note_bytes: Callable[[Path, int], None],
    cache: bool,
    is_mapped: bool,
    decode: DecodeChunks = decode_here,
) -> RankColumns | ValueError:
    try:
        rank = read_rank(path, partial(note_bytes, path), decode)
    except ValueError as problem:
        return problem
    written = write_cache(path, rank) if cache else None
    if is_mapped:
        return (read_rank_file(written, path) if written else None) or map_rank(rank)
    return rank


def _choose_recordings(ranks: list[RankColumns], notes: list[str]) -> list[RankColumns]:
    """Return the latest recording of each rank: the profiler may write one file a cycle of its schedule.

    If some ranks have not written their last cycle, it is the latest one that all of them have.
    """
    recordings: dict[int, list[RankColumns]] = {}
    for rank in ranks:
        if rank.texts.document.rank is not None:
            recordings.setdefault(rank.texts.document.rank, []).append(rank)
    if all(len(candidates) == 1 for candidates in recordings.values()):
        return ranks
    # Once for each recording: it has thousands of names.
    steps = {id(rank): _list_steps(rank) for rank in ranks}
    common = set.intersection(*({steps[id(one)] for one in of_rank} for of_rank in recordings.values()))
    complete = [rank for rank in ranks if steps[id(rank)] and steps[id(rank)] in common]
    chosen_steps = steps[id(max(complete, key=_find_begin))] if complete else None
    left_out: set[int] = set()
    for number, candidates in recordings.items():
        if len(candidates) == 1:
            continue
        latest = max(candidates, key=_find_begin)
        chosen = max(
            (one for one in candidates if steps[id(one)] == chosen_steps), key=_find_begin, default=latest
        )
        others = [rank for rank in candidates if rank is not chosen]
        left_out |= {id(rank) for rank in others}
        names = ", ".join(rank.path.name for rank in others[:_MAX_LISTED])
        which = "the latest" if chosen is latest else "the latest whose steps all ranks recorded"
        notes.append(
            f"rank {number} has {len(candidates)} recordings: {chosen.path.name}, {which}, is shown; "
            f"left out: {names}"
        )
    return [rank for rank in ranks if id(rank) not in left_out]


def _list_steps(rank: RankColumns) -> frozenset[int]:
    """Return the numbers of the steps that are marked in a recording."""
    return frozenset(int(match[1][:9]) for name in rank.texts.names if (match := STEP.match(name)))


def _find_begin(rank: RankColumns) -> tuple[int, float]:
    """Return when a recording began and, for one without a clock, when its file was written."""
    start_ns = rank.slices["start_ns"]
    begin = int(start_ns.min()) if len(start_ns) else 0
    return (begin if begin > _EPOCH_NS else 0, rank.path.stat().st_mtime)


def _check_same_job(ranks: list[RankColumns]) -> None:
    """Raise ``ValueError`` with the names of files whose jobs differ in their number of ranks."""
    sizes: dict[int, RankColumns] = {}
    for rank in ranks:
        if rank.texts.document.world_size:
            sizes.setdefault(rank.texts.document.world_size, rank)
    if len(sizes) > 1:
        (first_size, first), (size, other) = list(sizes.items())[:2]
        refuse_file(
            other.path,
            f"is of a job with {format_count(size, 'rank')}, and {first.path.name} is of one with "
            f"{first_size:,}",
            "keep the files of one job in the folder, or load one file",
        )


def _number_ranks(ranks: list[RankColumns]) -> None:
    """Give files without a rank the free numbers in order of their names."""
    used = {rank.texts.document.rank for rank in ranks}
    free = iter(number for number in range(len(ranks)) if number not in used)
    for rank in ranks:
        if rank.texts.document.rank is None:
            rank.texts.document.rank = next(free)
            rank.texts.oddities[_UNNUMBERED] = 1


def list_oddities(ranks: list[RankColumns]) -> list[str]:
    """Return notes on events that were left out or corrected, with counts and ranks."""
    notes = []
    for what in dict.fromkeys(what for rank in ranks for what in rank.texts.oddities):
        of = [rank for rank in ranks if rank.texts.oddities.get(what)]
        total = sum(rank.texts.oddities[what] for rank in of)
        numbers = ", ".join(str(get_rank(rank)) for rank in of[:_MAX_LISTED])
        where = "" if len(of) == len(ranks) else f"rank {numbers}: "
        notes.append(f"{where}{total:,} {_inflect(what, total)}")
    if any(rank.texts.tracks for rank in ranks) and all(map(_is_of_another_tool, ranks)):
        notes.append("no category of torch.profiler in the file: all work is taken for the CPU's")
    return notes


def _is_of_another_tool(rank: RankColumns) -> bool:
    """Return whether neither a category nor a track says that torch.profiler, or a GPU, is in a file."""
    is_known = not _KNOWN_CATEGORIES.isdisjoint(rank.texts.categories)
    return not is_known and all(track.kind != "gpu" for track in rank.texts.tracks)


def list_cut_off(ranks: list[RankColumns]) -> frozenset[int]:
    """Return the ranks whose files end in the middle, so that events are missing."""
    return frozenset(
        get_rank(rank) for rank in ranks if rank.texts.document.is_cut_off or is_cut_off(rank.texts.oddities)
    )


def _inflect(what: str, number: int) -> str:
    """Return a note about several slices or one file with its noun, and verb, for this number of them."""
    if number == 1:
        return re.sub(r"\b(slice|event|block|track)s\b", r"\1", what, count=1)
    what = re.sub(r"^file that is a (\w+) gzip file", r"files that are \1 gzip files", what)
    return re.sub(r"^file that ends\b", "files that end", re.sub(r"^file without\b", "files without", what))


def list_missing_steps(ranks: list[RankColumns]) -> list[str]:
    """Return notes about steps that a rank did not record though others did, or that no rank recorded.

    This happens if the profiler of a rank stopped in the middle, or began later.
    """
    # By the steps themselves: most ranks recorded the same ones, which are held once.
    ranks_by_steps: dict[frozenset[int], list[int]] = {}
    for rank in ranks:
        ranks_by_steps.setdefault(_list_steps(rank), []).append(get_rank(rank))
    steps = frozenset[int]().union(*ranks_by_steps)
    missing = {
        tuple(sorted(steps - recorded)): numbers
        for recorded, numbers in ranks_by_steps.items()
        if steps - recorded
    }
    notes = [
        f"rank {_list_numbers(numbers)}: {_name_steps(absent)} not recorded, though other ranks did"
        for absent, numbers in list(missing.items())[:_MAX_LISTED]
    ]
    # Bounded, because the numbers come from the file.
    if steps and max(steps) - min(steps) < _MAX_STEPS:
        between = tuple(sorted(set(range(min(steps), max(steps))) - steps))
        if between:
            notes.append(f"{_name_steps(between)} between others not recorded")
    return notes


def _name_steps(numbers: Sequence[int]) -> str:
    return f"{'step' if len(numbers) == 1 else 'steps'} {_list_numbers(numbers)}"


def _list_numbers(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers[:_MAX_LISTED])) + (" ..." if len(numbers) > _MAX_LISTED else "")


def list_missing_ranks(ranks: list[RankColumns]) -> list[str]:
    """Return a note about ranks of the job that have no file, if there are any."""
    # range() is bounded because the world size comes from the file.
    world_size = max((rank.texts.document.world_size or 0 for rank in ranks), default=0)
    present = {get_rank(rank) for rank in ranks}
    missing = [number for number in range(min(world_size, 10**6)) if number not in present]
    if not missing:
        return []
    if len(present) == 1:
        return [f"one rank of {world_size:,}"]
    verb = "is" if len(missing) == 1 else "are"
    return [f"{len(missing):,} of {world_size:,} ranks {verb} not in the folder: {_list_numbers(missing)}"]
