"""``ss.Slurm``: the Slurm cluster and the job options with which a run is submitted."""

from __future__ import annotations

import math
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import wraps
from types import MappingProxyType
from typing import TYPE_CHECKING, NoReturn

from shardscope.core.errors import FieldError, Value, find_similar, refuse
from shardscope.core.fixes import refuse_unknown_keywords
from shardscope.core.other_names import find_by_other_name
from shardscope.records.json_values import is_int
from shardscope.records.redaction import redact
from shardscope.runs.backends.ray.target import Ray

if TYPE_CHECKING:
    from shardscope.core.cluster import Cluster

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.@+-]*")
NAMES = re.compile(rf"{NAME.pattern}(?:,{NAME.pattern})*")
CONSTRAINT = re.compile(r"[A-Za-z0-9_.&|,*()\[\]:-]+")
OPTION = re.compile(r"[a-z][a-z_-]*")
TIME = re.compile(r"(?:(\d{1,4})-)?(\d{1,5})(?::(\d{1,2}))?(?::(\d{1,2}))?")
"""Slurm's spelling (sbatch(1), --time): minutes, minutes:seconds, hours:minutes:seconds, days-hours..."""
DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*([mhd])[a-z]*", re.IGNORECASE)
"""Not Slurm's spelling, but a usual one: "90 min", "2h"."""
NO_LIMIT = frozenset({"UNLIMITED", "INFINITE"})
"""Slurm's words for no time limit (slurm 22.05, src/common/parse_time.c, time_str2secs)."""
MAX_MINUTES = 525_600
SIGNAL = re.compile(r"USR2@(\d{1,5})")
"""The signal before the time limit; only its time is the user's choice."""
SIGNAL_SECONDS = 90
"""Seconds between that signal and the limit: submitit's default."""
GPU_RESOURCE = re.compile(r"(?:^|,)\s*(?:gres[/:])?gpu\b")
"""A GPU in a list of generic resources."""
PLAIN_PATH = re.compile(r"[\w@%+=:,./-]+")
"""A path that a shell does not change."""
CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")
"""Characters that end a line or change a terminal."""
OWN_FIELDS = ("partition", "account", "qos", "time", "constraint")
SET_BY_LAUNCH = frozenset({
    *("array", "chdir", "error", "export", "gpus", "gpus-per-node", "gpus-per-task", "input", "job-name"),
    *("no-requeue", "nodes", "ntasks", "ntasks-per-core", "ntasks-per-gpu", "ntasks-per-node"),
    *("ntasks-per-socket", "open-mode", "output", "requeue", "wrap"),
    # What sbatch does and prints: the launch needs the id of one job of this cluster, at once.
    *("cluster", "clusters", "help", "parsable", "test-only", "usage", "version", "wait"),
})  # fmt: skip
"""Options of sbatch that the launch sets, from the plan and the run folder."""
ENVIRONMENT_OPTIONS = {
    "SBATCH_PARTITION": "partition",
    "SBATCH_ACCOUNT": "account",
    "SBATCH_QOS": "qos",
    "SBATCH_TIMELIMIT": "time",
    "SBATCH_CONSTRAINT": "constraint",
    "SBATCH_RESERVATION": "reservation",
    "SBATCH_WCKEY": "wckey",
    "SBATCH_MEM_PER_NODE": "mem",
    "SBATCH_MEM_PER_CPU": "mem-per-cpu",
    "SBATCH_MEM_PER_GPU": "mem-per-gpu",
}
"""Options that sbatch reads from the environment (sbatch(1)), and that neither the plan nor the run decides.
No allocation sets these variables for its jobs."""
MEMORY = frozenset({"mem", "mem-per-cpu", "mem-per-gpu"})
"""Options of which a job takes one."""
MAX_LINES = 1000


def _name_place_of_options(kind: type[Slurm]) -> type[Slurm]:
    """Decorate ``Slurm`` so that an option of sbatch that is no field is refused with its place."""
    initialize, fields = kind.__init__, list(kind.__dataclass_fields__)

    @wraps(initialize)
    def initialize_checked(self: Slurm, *args: object, **values: object) -> None:
        for name in values:
            similar = find_by_other_name(name, fields) or find_similar(name, fields)
            if name not in fields and OPTION.fullmatch(name) and similar is None:
                is_set = name.replace("_", "-") in SET_BY_LAUNCH
                fix = "leave it out: the plan's cluster and the launch set it"
                allowed = f"{', '.join(fields)}; other options of sbatch are in extra"
                refuse("Slurm key", name, allowed, fix if is_set else f"extra={{{name!r}: ...}}")
        initialize(self, *args, **values)  # type: ignore[arg-type]

    kind.__init__ = initialize_checked  # type: ignore[method-assign]
    return kind


@_name_place_of_options
@refuse_unknown_keywords
@dataclass(frozen=True, kw_only=True)
class Slurm:
    """A Slurm cluster as the target of ``ss.launch(plan, task, on=ss.Slurm(...))``.

    Everything is optional: without ``partition`` the cluster's default one is used. Raises ``ValueError``
    with the field, the value, what is allowed and the nearest fix.
    """

    partition: str | None = None
    """Partition, or several separated by commas: the job runs in that in which it can start first. None:
    SBATCH_PARTITION of the environment, or the cluster's default."""
    account: str | None = None
    """Account that is charged; None: SBATCH_ACCOUNT of the environment, or your default account."""
    qos: str | None = None
    """Quality of service; None: SBATCH_QOS of the environment, or Slurm's default."""
    time: int | str | None = None
    """Time limit in minutes, or as Slurm writes it ("2:00:00", "1-12", "UNLIMITED"); None: SBATCH_TIMELIMIT
    of the environment, or the partition's default."""
    constraint: str | None = None
    """Node features, as sbatch's ``--constraint`` takes them; None: SBATCH_CONSTRAINT of the environment."""
    setup: Sequence[str] = ()
    """Lines of shell before Python starts: ``module load cuda``. All nodes get their environment."""
    python: str | None = None
    """Command that starts Python on the nodes; None: the Python of this process."""
    extra: Mapping[str, str | int | bool] = field(default_factory=dict, hash=False)
    """Any other options of sbatch by name, such as ``{"mem": "64G", "exclusive": True}``."""

    def __post_init__(self) -> None:
        names = "one name without blanks, several with commas between them, or None"
        _check_text("partition", self.partition, NAMES, names, "main")
        for name in ("account", "qos"):
            _check_text(name, getattr(self, name), NAME, "one name without blanks, or None", "main")
        _check_text("constraint", self.constraint, CONSTRAINT, "node features, or None", "a100")
        if self.time is not None:
            parse_minutes(self.time)
        if isinstance(self.setup, str) or not isinstance(self.setup, Sequence) or len(self.setup) > MAX_LINES:
            fix = Value([self.setup]) if isinstance(self.setup, str) else Value(["module load cuda"])
            refuse("Slurm.setup", self.setup, "a list of shell lines", fix)
        for line in self.setup:
            _check_line("setup", line)
        object.__setattr__(self, "setup", tuple(self.setup))
        if self.python is not None:
            _check_line("python", self.python)
            if not PLAIN_PATH.fullmatch(self.python) and os.path.isfile(self.python):  # noqa: PTH113 - raises nothing
                allowed = "a command as a shell reads it; this path has characters that are quoted there"
                refuse("Slurm.python", self.python, allowed, Value(shlex.quote(self.python)))
        self._check_extra()

    @staticmethod
    def inventory(
        partition: str | None = None, gpu: str | None = None, *, only_idle: bool = False
    ) -> Cluster:
        """Return a partition (None: SBATCH_PARTITION, the first of several, or the default one) as a cluster
        of its nodes.

        Of nodes with different GPUs only those with the most frequent type and number count. ``gpu`` is the
        catalogue's name of the GPU type, needed where Slurm's name of it is ambiguous: "a100"
        has 40 or 80 GB. Nodes in use are included, those that are down or drained are not; with
        ``only_idle``, only nodes on which a job that needs the whole node could start now. Raises
        ``ValueError`` if the partition does not exist, no node of it counts, or the type is ambiguous, and
        ``OSError`` if Slurm does not answer.
        """
        # Imported lazily: it imports this module.
        from shardscope.runs.backends.slurm_submission import read_inventory

        return read_inventory(partition, gpu, only_idle=only_idle)

    def _check_extra(self) -> None:
        allowed = "a mapping of sbatch's options to text, numbers or True"
        if not isinstance(self.extra, Mapping):
            refuse("Slurm.extra", self.extra, allowed, Value({"mem": "64G"}))
        for name, value in self.extra.items():
            if not isinstance(name, str) or not OPTION.fullmatch(name):
                stripped = str(name).strip().lstrip("-").partition("=")[0]
                fix = repr(stripped if OPTION.fullmatch(stripped) else "mem")
                refuse("Slurm.extra", name, "names of sbatch's long options, without dashes before", fix)
            option = name.replace("_", "-")
            if option in OWN_FIELDS:
                refuse("Slurm.extra", name, "options without a field of their own", f"Slurm({name}=...)")
            if option in SET_BY_LAUNCH:
                fix = f"leave {name} out"
                refuse("Slurm.extra", name, "options that neither the plan nor the run decides", fix)
            if option == "gres" and (not isinstance(value, str) or GPU_RESOURCE.search(value)):
                allowed = "resources other than GPUs, which are the plan's"
                refuse("Slurm.extra['gres']", value, allowed, f"leave {name} out")
            if option == "signal" and not (isinstance(value, str) and SIGNAL.fullmatch(value)):
                allowed = "USR2@<seconds before the time limit>, the time to save a checkpoint"
                refuse("Slurm.extra['signal']", value, allowed, Value("USR2@300"))
            if option == "cpus-per-gpu" and not re.fullmatch(r"[1-9]\d*", str(value)):
                refuse(f"Slurm.extra[{name!r}]", value, "a whole number from 1 on", Value(8))
            if value is True or is_int(value):
                continue
            if not isinstance(value, str):
                # sbatch's lists have commas.
                text = ",".join(map(str, value)) if isinstance(value, list | tuple | set) else str(value)
                nearest = f"leave {name} out" if value is False or value is None else Value(text)
                refuse(f"Slurm.extra[{name!r}]", value, "text, a whole number or True", nearest)
            _check_line(f"extra[{name!r}]", value)
        object.__setattr__(self, "extra", MappingProxyType(dict(self.extra)))

    def __reduce__(self) -> tuple[object, ...]:
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return _restore, ({**fields, "extra": dict(self.extra)},)  # pickle refuses a read-only mapping


def _restore(fields: dict[str, object]) -> Slurm:
    return Slurm(**fields)  # type: ignore[arg-type]


def read_environment(target: Slurm, environment: Mapping[str, str]) -> Slurm:
    """Return ``target`` with sbatch's variables of ``environment`` for what it leaves open.

    sbatch itself would let them override the job script. Raises ``ValueError`` that names the variable if its
    value is none of ``Slurm``.
    """
    extra = {name.replace("_", "-") for name in target.extra}
    for variable, option in ENVIRONMENT_OPTIONS.items():
        value = environment.get(variable)
        if not value:
            continue
        is_field = option in OWN_FIELDS
        is_set = getattr(target, option) is not None if is_field else option in extra
        if is_set or (option in MEMORY and extra & MEMORY):
            continue
        try:
            changes = {option: value} if is_field else {"extra": {**target.extra, option: value}}
            target = replace(target, **changes)
        except FieldError as error:
            wanted = f"{option}=..." if is_field else f"extra={{{option!r}: ...}}"
            fix = f"unset {variable}, or ss.Slurm({wanted})"
            refuse(f"the environment variable {variable}", redact(value), error.allowed, fix)
    return target


def check_target(value: object) -> Slurm | Ray | None:
    """Return ``launch(on=)``. Raises ``ValueError`` unless it is None, a Slurm or a Ray."""
    if value is not None and not isinstance(value, Slurm | Ray):
        _refuse_target(value)
    return value


def _refuse_target(value: object) -> NoReturn:
    kind = {Slurm: "slurm", Ray: "ray"}.get(value) if isinstance(value, type) else None
    if isinstance(value, str):
        kind = find_similar(value, ["slurm", "ray"])
    fix = f"ss.{kind.capitalize()}()" if kind is not None else Value(None)
    refuse("launch.on", value, "None (this machine), an ss.Slurm or an ss.Ray", fix)


def parse_minutes(value: object) -> int:
    """Return a time limit in minutes, rounded up; 0: no limit. Raises ``ValueError``."""
    allowed = 'minutes from 1 on, or text as "2:00:00", "1-12" or "UNLIMITED"'
    if is_int(value):
        if value < 1:
            refuse("Slurm.time", value, allowed, Value(60))
        return value
    if isinstance(value, str) and value.upper() in NO_LIMIT:
        return 0
    match = TIME.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        refuse("Slurm.time", value, allowed, Value(_guess_time(value)))
    days, *parts = (int(part or 0) for part in match.groups())
    if match[1] is not None or match[4] is not None:
        hours, minutes, seconds = parts
    else:
        hours, (minutes, seconds) = 0, parts[:2]
    total = -(-seconds // 60) + minutes + 60 * hours + 1440 * days
    if total < 1:
        refuse("Slurm.time", value, allowed, Value("1:00:00"))
    return total


def _guess_time(value: object) -> int | str:
    """Return the time limit that an unreadable one most likely means: 90.0, "2h", ``timedelta(hours=2)``."""
    minutes = 0.0
    if isinstance(value, timedelta):
        minutes = value / timedelta(minutes=1)
    elif isinstance(value, float):
        minutes = value
    elif isinstance(value, str) and (match := DURATION.fullmatch(value.strip())):
        minutes = float(match[1]) * {"m": 1, "h": 60, "d": 1440}[match[2].lower()]
    return math.ceil(minutes) if 0 < minutes < MAX_MINUTES else "1:00:00"


def _check_text(name: str, value: object, form: re.Pattern[str], allowed: str, example: str) -> None:
    if value is not None and (not isinstance(value, str) or not form.fullmatch(value)):
        text = ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
        first = form.search(re.sub(r"\s*,\s*", ",", text))
        refuse(f"Slurm.{name}", value, allowed, Value(first[0] if first else example))


def _check_line(name: str, value: object) -> None:
    """Raise ``ValueError`` for a value that is not one line of a job script, or contains a secret."""
    if not isinstance(value, str) or not value.strip() or CONTROL.search(value):
        if name == "setup":
            fix: str | Value = "a line each, in a list"
        elif isinstance(value, str) and value.strip():
            fix = Value(CONTROL.sub(" ", value).strip())
        else:
            fix = "leave it out"
        refuse(f"Slurm.{name}", value, "one line of text", fix)
    # Job scripts can be read by administrators and are kept by the controller.
    if redact(value) != value:
        fix = "set it in the notebook's environment, which Slurm passes on, or read it from a file of yours"
        refuse(f"Slurm.{name}", redact(value), "lines without passwords or tokens", fix)
