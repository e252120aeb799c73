"""Folder of a Hugging Face checkpoint: config.json and safetensors files.

Everything that can be checked without reading a tensor is checked here and raises ``ValueError`` before any
rank starts. Nothing in the folder is unpickled or executed, and no file outside of it is read. Imports no
torch.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from shardscope.core.architecture import Architecture
from shardscope.core.errors import find_similar, refuse
from shardscope.core.json_text import parse_json
from shardscope.families import hf_config
from shardscope.families.unknown import UnknownFamily
from shardscope.machine.user_folders import expand_home, list_entries
from shardscope.records.json_files import read_json
from shardscope.training.weights.safetensors_header import StoredTensor, read_header
from shardscope.training.weights.stored_names import HEAD, find_sources, is_unused

if TYPE_CHECKING:
    from shardscope.core.plan import Plan

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
ADAPTER_CONFIG = "adapter_config.json"
ONE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json", "model.pt", "model.pth")
MAX_INDEX_BYTES = 100_000_000
NOT_EXPORTED = ("torch_dtype", "auto_map")
"""Config keys that are not exported: the older name of dtype, and references to custom code files."""
READ_TYPES = ("F32", "BF16", "F16", "F64")
"""Types that weights may be stored in; they are cast to the plan's. Quantized weights are not unpacked."""


@dataclass(frozen=True)
class WeightsFolder:
    """A checked folder of weights."""

    path: Path
    """Absolute path, symbolic links resolved."""
    field: str
    """Name of the folder in error messages."""

    @classmethod
    def open(cls, value: object, field: str) -> WeightsFolder:
        """Return the folder at the path ``value``. Raises ``ValueError`` if it holds no model's weights."""
        allowed = f"a folder with {CONFIG} and {ONE_FILE}, or {INDEX} and its files"
        if not isinstance(value, str | Path) or not str(value).strip() or "\0" in str(value):
            refuse(field, value, allowed, "the folder's path")
        path = expand_home(value).absolute()
        if not os.path.isdir(path):  # noqa: PTH112 - raises nothing for a long text
            allowed += ": there is no such folder"
            nearby = [entry.name for entry in list_entries(path.parent) if entry.is_dir()]
            similar = find_similar(path.name, nearby)
            fix = str(path.parent / similar) if similar else "the folder's path"
            refuse(field, str(value), allowed, fix, problem="There is no such folder")
        folder = cls(path.resolve(), field)
        folder._check_listing(allowed)
        return folder

    def _check_listing(self, allowed: str) -> None:
        # Adapters alone have no config.json of their model.
        if (self.path / ADAPTER_CONFIG).exists() and not (self.path / CONFIG).exists():
            allowed += ": these are adapters"
            fix = "ss.merge(run), or peft's merge_and_unload() for adapters of another program"
            refuse(
                self.field, str(self.path), allowed, fix, problem="These are adapters, without their model"
            )
        if not (self.path / CONFIG).exists():
            allowed, problem = f"{allowed}: it has no {CONFIG}", f"This folder has no {CONFIG}"
            refuse(self.field, str(self.path), allowed, "the model's own folder", problem=problem)
        # A broken link counts as present: resolve_file then explains it.
        if (self.path / ONE_FILE).is_symlink() or any((self.path / n).exists() for n in (ONE_FILE, INDEX)):
            return
        if any((self.path / name).exists() for name in PICKLES):
            allowed += ": this one has pickles, which run code when they are opened"
            fix = "model.save_pretrained(folder) by transformers, where these weights are trusted"
            problem = "The weights are pickles, which run code when they are opened"
            refuse(self.field, str(self.path), allowed, fix, problem=problem)
        allowed, problem = f"{allowed}: it has no weights", "This folder has no weights"
        refuse(self.field, str(self.path), allowed, "the model's own folder", problem=problem)

    # ---- Contents

    @cached_property
    def whole_config(self) -> Mapping[str, object]:
        """Return the content of config.json, the only config file that is read. Raises ``ValueError``."""
        config = hf_config.read_config_file(self.resolve_file(CONFIG))
        if "configuration_files" in config:
            # transformers would read another, unchecked file instead of this one.
            refuse(
                f"{self.field}/{CONFIG} configuration_files",
                config["configuration_files"],
                f"none: {CONFIG} alone describes the model",
                f"the config of this version as {CONFIG}, without that key",
            )
        return config

    @property
    def config(self) -> Mapping[str, object]:
        """Return the config of the model that is trained: the language model of a multimodal checkpoint."""
        return hf_config.select_language_model(self.whole_config)

    @property
    def multimodal_type(self) -> str | None:
        """Return the ``model_type`` of a multimodal checkpoint; None for a language model."""
        whole = self.whole_config
        return None if self.config is whole else str(whole.get("model_type"))

    @property
    def eos_token_id(self) -> object:
        """The ids that end an answer, as generation_config.json or config.json has them; None if neither."""
        try:
            generation = read_json(self.resolve_file(GENERATION_CONFIG)) or {}
        except ValueError:
            generation = {}
        return generation.get("eos_token_id", self.config.get("eos_token_id"))

    def write_config(self, exported: Path) -> None:
        """Replace the configs of ``exported``, an export of this model's weights, by those of this folder.

        ``dtype`` and ``architectures`` are kept from the exported config: they describe the exported files.
        """
        # Copied, not saved by transformers, which refuses some that models are published with, such as a
        # temperature without do_sample. It has the ids that end an answer, often more than config.json.
        (exported / GENERATION_CONFIG).unlink(missing_ok=True)
        if (self.path / GENERATION_CONFIG).exists():
            shutil.copyfile(self.resolve_file(GENERATION_CONFIG), exported / GENERATION_CONFIG)
        config_file = exported / CONFIG
        exported_config = json.loads(config_file.read_text(encoding="utf-8"))
        # Of a multimodal model, only the language model is trained and exported.
        parts = (part for part in self.config.values() if isinstance(part, Mapping))
        is_part = self.config.get("model_type") != exported_config["model_type"]
        of_model = next(
            (part for part in parts if is_part and part.get("model_type") == exported_config["model_type"]),
            self.config,
        )
        original = {name: value for name, value in of_model.items() if name not in NOT_EXPORTED}
        config = original | {name: exported_config[name] for name in ("architectures", "dtype")}
        _replace_json(config_file, config)

    @cached_property
    def architecture(self) -> Architecture:
        """Architecture in config.json, also of a family without formulas.

        Raises ``ValueError`` as ``Architecture.from_hf`` does.
        """
        return Architecture.from_hf(self.resolve_file(CONFIG), rehearse_only=True)

    @cached_property
    def tensors(self) -> dict[str, tuple[Path, StoredTensor]]:
        """File, type and shape of every stored tensor, by name. Only headers are read.

        Raises ``ValueError`` for a truncated or invalid safetensors file, and for an index that names
        anything but complete files in this folder.
        """
        if (self.path / ONE_FILE).exists() or (self.path / ONE_FILE).is_symlink():
            return {name: (file, tensor) for _, file, name, tensor in self._read_shards([ONE_FILE])}
        # Index and headers must agree in both directions: files of two versions of a model would otherwise be
        # mixed without an error.
        weight_map = self._read_index()
        tensors = {}
        for shard, file, name, tensor in self._read_shards(dict.fromkeys(weight_map.values())):
            if weight_map.get(name) != shard:
                allowed = (
                    f"the tensors that {INDEX} lists for it; this one's file is "
                    f"{weight_map.get(name, 'not listed')}"
                )
                refuse(f"{self.field}/{shard}", name, allowed, "the files of one version of the model")
            tensors[name] = (file, tensor)
        missing = [name for name in weight_map if name not in tensors]
        if missing:
            allowed = f"what {weight_map[missing[0]]} has{_list_more(missing)}"
            refuse(f"{self.field}/{INDEX}", missing[0], allowed, "the files of one version of the model")
        return tensors

    def _read_shards(self, shards: Iterable[str]) -> Iterator[tuple[str, Path, str, StoredTensor]]:
        for shard in shards:
            file = self.resolve_file(shard)
            header = read_header(file, f"{self.field}/{shard}")
            yield from ((shard, file, name, tensor) for name, tensor in header.items())

    def _read_index(self) -> dict[str, str]:
        """Read the index and return the file name of every tensor, by tensor name."""
        field, file = f"{self.field}/{INDEX}", self.resolve_file(INDEX)
        size = file.stat().st_size
        if not stat.S_ISREG(file.stat().st_mode) or size > MAX_INDEX_BYTES:
            refuse(field, size, f"a file of at most {MAX_INDEX_BYTES:,} bytes", "the model's own index")
        try:
            index = parse_json("index", file.read_bytes().decode("utf-8"))
        except (ValueError, RecursionError) as error:
            refuse(field, f"not JSON: {error}", "a JSON object with weight_map", "the model's own index")
        weight_map = index.get("weight_map") if isinstance(index, dict) else None
        if (
            not isinstance(weight_map, dict)
            or not weight_map
            or not all(type(v) is str for v in weight_map.values())
        ):
            refuse(
                field,
                type(weight_map).__name__,
                "weight_map: files by tensors' names",
                "the model's own index",
            )
        return weight_map

    def resolve_file(self, name: str) -> Path:
        """Return the resolved path of the file ``name`` in this folder.

        In the Hub's cache, snapshots link to files in the model's ``blobs`` folder, which are allowed too.
        Raises ``ValueError`` for a missing file and for a path or link that leaves the folder.
        """
        # Names come from the index, which anyone may have written: check them before the file system does.
        field = f"{self.field}/{name}"
        parts = Path(name).parts
        if not parts or Path(name).is_absolute() or ".." in parts or "\0" in name:
            refuse(
                self.field, name, "names of files in the folder itself: nothing else is read", "its own files"
            )
        try:
            resolved = (self.path / name).resolve(strict=True)
        except (OSError, RuntimeError) as error:
            problem = "a broken link" if (self.path / name).is_symlink() else "not there"
            allowed = f"a file in {self.path}: it is {problem} ({type(error).__name__})"
            refuse(self.field, name, allowed, "download all of the model's files again")
        if not self.contains(resolved):
            refuse(
                field,
                str(resolved),
                f"a file in {self.path}: it links out of it",
                "a copy of the file",
            )
        return resolved

    def contains(self, file: Path) -> bool:
        """Return whether ``file``, a resolved absolute path, belongs to the model."""
        model = self.path.parent.parent
        is_snapshot = self.path.parent.name == "snapshots" and model.name.startswith("models--")
        homes = (self.path, model / "blobs") if is_snapshot else (self.path,)
        return any(file.is_relative_to(home) for home in homes)

    # ---- Comparison with a plan

    def check_plan(self, plan: Plan) -> None:
        """Raise ``ValueError`` if the folder does not hold all weights of ``plan``'s architecture."""
        if self.config.get("quantization_config") is not None:
            refuse(
                f"{self.field}/{CONFIG} quantization_config",
                self.config["quantization_config"],
                "none: packed weights are not unpacked here",
                "the model's weights in bf16; Recipe.quantization packs a frozen base",
            )
        self._check_architecture(plan.architecture)
        self.check_tensors(plan.architecture)

    def _check_architecture(self, planned: Architecture) -> None:
        # Name the first field that differs; the display name may be the user's own.
        stored = self.architecture
        for field in fields(stored):
            planned_value, stored_value = getattr(planned, field.name, None), getattr(stored, field.name)
            if field.name != "name" and planned_value != stored_value:
                allowed = f"{stored_value!r}, as {self.path.name}/{CONFIG} says"
                argument = ", rehearse_only=True" if isinstance(stored, UnknownFamily) else ""
                fix = f"architecture=Architecture.from_hf({str(self.path)!r}{argument})"
                refuse(f"Architecture.{field.name}", planned_value, allowed, fix)

    def check_tensors(self, arch: Architecture) -> None:
        """Raise ``ValueError`` unless the files hold exactly the tensors of ``arch``, in known types."""
        stored = {name: tensor for name, (_, tensor) in self.tensors.items()}
        expected = dict(
            piece for source in find_sources(arch, stored).values() for piece in source.list_stored()
        )
        # Names first, then shapes and types: a missing tensor explains most of what else is wrong.
        missing = [name for name in expected if name not in stored]
        if missing:
            allowed = f"every tensor of {arch.name}; the files lack {len(missing):,}{_list_more(missing)}"
            fix = "the files of the whole model"
            if self.multimodal_type is not None and len(missing) == 1 and missing[0].endswith(HEAD):
                fix += (
                    f", or 'tie_word_embeddings': true for the language model in {CONFIG}, if it has no head"
                )
            refuse(self.field, f"without {missing[0]}", allowed, fix)
        extra = [name for name in stored if name not in expected and not is_unused(arch, name, stored)]
        if extra:
            allowed = f"tensors of {arch.name}: {len(extra):,} are not part of it{_list_more(extra)}"
            refuse(self.field, extra[0], allowed, f"the files of a {arch.model_type} and nothing else")
        for name, shape in expected.items():
            dtype, stored_shape, _ = stored[name]
            if stored_shape != tuple(shape):
                allowed = f"{tuple(shape)}, as the plan's architecture has it"
                refuse(
                    f"{self.field}: shape of {name}",
                    stored_shape,
                    allowed,
                    "the model that its config.json describes",
                )
            if dtype not in READ_TYPES:
                allowed = f"{', '.join(READ_TYPES)}: packed weights are not unpacked here"
                refuse(f"{self.field}: dtype of {name}", dtype, allowed, "the model's weights in bf16")


def write_base_name(exported: Path, name: str) -> None:
    """Write the name of their base into the config of ``exported`` adapters, by which peft opens both."""
    file = exported / ADAPTER_CONFIG
    config = json.loads(file.read_text(encoding="utf-8"))
    _replace_json(file, {**config, "base_model_name_or_path": name})


def _replace_json(file: Path, record: Mapping[str, object]) -> None:
    """Replace ``file`` by a rename, so that an export never has half a config."""
    temporary = file.with_name(f".{file.name}.partial")
    temporary.write_text(json.dumps(record, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    temporary.replace(file)


def _list_more(names: list[str]) -> str:
    """Return up to three further names in parentheses, for an error message."""
    return f" (then {', '.join(names[1:4])}{', ...' if len(names) > 4 else ''})" if len(names) > 1 else ""
