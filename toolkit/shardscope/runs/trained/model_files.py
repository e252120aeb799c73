"""Folders of a run's trained model and of its base, checked before any process opens them. Imports no torch.

A run folder may come from anybody. Weights and adapters are only opened as safetensors, and of peft's
``adapter_config.json`` only plain values are read: some of its keys name modules that peft would import.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from shardscope.core.errors import check_choice, check_flag, check_integer, check_number, refuse
from shardscope.records.folder import FINAL
from shardscope.records.json_files import read_json
from shardscope.training.checkpoints.choice import find_newest_checkpoint
from shardscope.training.data.weights_tokenizer import WeightsTokenizer
from shardscope.training.weights.base_sample import hash_base
from shardscope.training.weights.safetensors_header import read_header
from shardscope.training.weights.weights_folder import ADAPTER_CONFIG, WeightsFolder

if TYPE_CHECKING:
    from shardscope.runs.run import Run

ADAPTER_WEIGHTS = "adapter_model.safetensors"
LORA_A = ".lora_A.weight"
"""End of the names of the first factors, of shape (rank, input width)."""
MAX_RANK = 65_536
UNSUPPORTED_KEYS = (
    "modules_to_save",
    "rank_pattern",
    "alpha_pattern",
    "layers_to_transform",
    "target_parameters",
)
"""Keys of peft's config that add to LoRA on whole projections; Shardscope's exports leave them empty."""


@dataclass(frozen=True, kw_only=True)
class Adapters:
    """LoRA adapters in peft's format."""

    folder: str
    rank: int
    alpha: float
    targets: list[str]
    """Names of the adapted projections, without dots."""
    use_rslora: bool = False
    use_dora: bool = False


@dataclass(frozen=True, kw_only=True)
class ModelFiles:
    """Full weights, or a base and the adapters over it."""

    weights: str
    """Folder of a Hugging Face checkpoint with its tokenizer."""
    num_bytes: int
    """Size of the tensors in it."""
    adapters: Adapters | None = None

    def to_json(self) -> str:
        """Return this as the argument of a process."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> ModelFiles:
        """Return the inverse of :meth:`to_json`."""
        data = json.loads(text)
        adapters = data["adapters"]
        return cls(**{**data, "adapters": None if adapters is None else Adapters(**adapters)})

    @property
    def weights_folder(self) -> WeightsFolder:
        """The folder of the weights."""
        return WeightsFolder(Path(self.weights), "weights")


def find_model(run: Run, field: str) -> ModelFiles:
    """Return the folders of the trained model of ``run``.

    Raises ``ValueError``, which names the run ``field``, if there is none (yet), if its files are damaged, or
    if the base of its adapters is gone or has changed since they were trained.
    """
    folder = run.model
    if folder is None:
        refuse_without_model(run, field)
    if not (folder / ADAPTER_CONFIG).exists():
        return _check_weights(WeightsFolder.open(folder, f"{field} export"))
    adapters = _read_adapters(folder, f"{field} export")
    return replace(find_base(run, field), adapters=adapters)


def find_base(run: Run, field: str) -> ModelFiles:
    """Return the folder of the weights that ``run`` started from.

    Raises ``ValueError``, which names the run ``field``, if they were random, or are gone or changed.
    """
    base = run.recorded_base or {}
    path, sample = base.get("weights"), base.get("sample")
    if not isinstance(path, str) or not isinstance(sample, str):
        if "seed" in base:
            allowed = "a run that started from a model's folder: this one started from random weights"
            refuse(field, run.name, allowed, "Finetune(weights, data, export=True)")
        allowed = "a run that recorded its base: this one's version of Shardscope did not"
        refuse(field, run.name, allowed, "peft's merge_and_unload() over the base that it was trained on")
    field = f"{field} base"
    if not Path(path).is_dir():
        refuse(field, path, "the folder that the run started from: it is gone", "put it back at this path")
    folder = WeightsFolder.open(path, field)
    files = _check_weights(folder)
    if hash_base(folder) != sample:
        allowed = "the weights that the run started from: these have changed since"
        refuse(field, path, allowed, "put the original files back at this path")
    return files


def refuse_without_model(run: Run, field: str) -> NoReturn:
    """Raise ``ValueError``, which names the run ``field``, with the reason why there is no model (yet)."""
    status, fields = run.status, run.task_fields or {}
    if fields.get("export") is not True:
        allowed = "a run that exported its weights: this one was launched without export=True"
        refuse(field, run.name, allowed, "Finetune(weights, data, export=True)")
    if status not in FINAL:
        refuse(field, run.name, f"a finished run: this one is {status}", "run.wait() first")
    allowed = f"a finished run: this one is {status}, and weights are exported after the last step"
    # resume=True finds the checkpoints of runs that were launched with the same name only.
    has_checkpoint = find_newest_checkpoint(run.folder) is not None
    to_resume = f"launch it again with resume={str(run.folder)!r}, to its last step"
    anew = "launch it again: it has saved no checkpoint to resume from"
    refuse(field, run.name, allowed, to_resume if has_checkpoint else anew)


def _check_weights(folder: WeightsFolder) -> ModelFiles:
    """Return the weights of ``folder``. Raises ``ValueError`` for files that must not or cannot be opened."""
    if (folder.path / ADAPTER_CONFIG).exists():
        # transformers would open the model that the adapters name instead of this one.
        allowed = f"a folder of whole weights, without {ADAPTER_CONFIG}"
        refuse(folder.field, str(folder.path), allowed, f"the model's own folder, without {ADAPTER_CONFIG}")
    packed = folder.config.get("quantization_config")
    if packed is not None:
        fix = "the model's weights in bf16"
        refuse(f"{folder.field}/config.json quantization_config", packed, "none: packed weights", fix)
    # Here, so that a truncated file is an error message and no crash of the process. transformers would
    # allocate what config.json describes and the files lack.
    folder.check_tensors(folder.architecture)
    num_bytes = sum(tensor.num_bytes for _, tensor in folder.tensors.values())
    WeightsTokenizer(folder).check(folder.architecture.vocab_size)
    return ModelFiles(weights=str(folder.path), num_bytes=num_bytes)


def _read_adapters(folder: Path, field: str) -> Adapters:
    file = folder / ADAPTER_WEIGHTS
    if not file.is_file() or file.is_symlink():
        allowed = f"a folder with {ADAPTER_WEIGHTS}: nothing else is opened"
        refuse(field, str(folder), allowed, "the folder that the run exported")
    tensors = read_header(file, f"{field}/{ADAPTER_WEIGHTS}")
    config_field = f"{field}/{ADAPTER_CONFIG}"
    adapters = parse_adapter_config(folder, read_json(folder / ADAPTER_CONFIG) or {}, config_field)
    # peft allocates tensors of the rank that the config says before it reads those of the file.
    ranks = {tensor.shape[0] for name, tensor in tensors.items() if name.endswith(LORA_A) and tensor.shape}
    if ranks != {adapters.rank}:
        allowed = (
            f"the rank of the tensors in {ADAPTER_WEIGHTS}: {', '.join(map(str, sorted(ranks))) or 'none'}"
        )
        refuse(f"{config_field} r", adapters.rank, allowed, "the folder that the run exported")
    return adapters


def parse_adapter_config(folder: Path, config: Mapping[str, object], field: str) -> Adapters:
    """Return the LoRA settings of peft's ``config``. Raises ``ValueError`` for anything but plain LoRA."""
    check_choice(f"{field} peft_type", config.get("peft_type"), ("LORA",))
    check_choice(f"{field} bias", config.get("bias", "none"), ("none",))
    for key in UNSUPPORTED_KEYS:
        if config.get(key):
            refuse(f"{field} {key}", config[key], "none", "peft's own merge_and_unload()")
    targets = config.get("target_modules")
    if not isinstance(targets, list) or not targets or not all(isinstance(name, str) for name in targets):
        refuse(
            f"{field} target_modules",
            targets,
            "a list of projections' names",
            "peft's own merge_and_unload()",
        )
    return Adapters(
        folder=str(folder),
        rank=check_integer(f"{field} r", config.get("r"), low=1, high=MAX_RANK),
        alpha=check_number(f"{field} lora_alpha", config.get("lora_alpha"), low=0.0, high=1e6),
        targets=sorted(targets),
        use_rslora=check_flag(f"{field} use_rslora", config.get("use_rslora", False)),
        use_dora=check_flag(f"{field} use_dora", config.get("use_dora", False)),
    )
