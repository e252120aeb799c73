"""Folder of a Hugging Face checkpoint: config.json and safetensors files.

Everything that can be checked without reading a tensor is checked here and raises ``ValueError`` before any
rank starts. Nothing in the folder is unpickled or executed, and no file outside of it is read. Imports no
torch.
"""

from __future__ import annotations

import json
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardscope.core.architecture import Architecture
from shardscope.core.errors import refuse
from shardscope.core.json_text import parse_json
from shardscope.families import hf_config
from shardscope.training.weights.safetensors_header import StoredTensor, read_header
from shardscope.training.weights.stored_names import is_unused, sources

if TYPE_CHECKING:
    from shardscope.core.plan import Plan

CONFIG = "config.json"
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
    def of(cls, value: object, field: str) -> WeightsFolder:
        """Return the folder at the path ``value``. Raises ``ValueError`` if it holds no model's weights."""
        allowed = f"a folder with {CONFIG} and {ONE_FILE}, or {INDEX} and its files"
        if not isinstance(value, str | Path) or not str(value).strip() or "\0" in str(value):
            refuse(field, value, allowed, "the folder's path")
        path = Path(value).expanduser().absolute()
        if not path.is_dir():
            fix = "the folder's path"
            if isinstance(value, str) and value.count("/") == 1 and not value.startswith((".", "/", "~")):
                fix = f"the folder that huggingface_hub.snapshot_download({value!r}) gives"
            refuse(field, str(value), f"{allowed}: there is no such folder", fix)
        found = cls(path.resolve(), field)
        found._check_listing(allowed)
        return found

    def _check_listing(self, allowed: str) -> None:
        if (self.path / "adapter_config.json").exists() and not (self.path / CONFIG).exists():
            refuse(self.field, str(self.path), f"{allowed}: these are adapters", "peft's merge_and_unload()")
        if not (self.path / CONFIG).exists():
            refuse(self.field, str(self.path), f"{allowed}: it has no {CONFIG}", "the model's own folder")
        if (self.path / ONE_FILE).is_symlink() or any((self.path / n).exists() for n in (ONE_FILE, INDEX)):
            return
        if any((self.path / name).exists() for name in PICKLES):
            allowed += ": this one has pickles, which run code when they are opened"
            fix = "model.save_pretrained(folder) by transformers, where these weights are trusted"
            refuse(self.field, str(self.path), allowed, fix)
        refuse(self.field, str(self.path), f"{allowed}: it has no weights", "the model's own folder")

    # ---- Contents

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """Content of config.json, the only config file that is read. Raises ``ValueError``."""
        said = hf_config.read_config_file(self.file(CONFIG))
        if "configuration_files" in said:
            # transformers would read another, unchecked file instead of this one.
            refuse(
                f"{self.field}/{CONFIG} configuration_files",
                said["configuration_files"],
                f"none: {CONFIG} alone says what the model is",
                f"the config of this version as {CONFIG}, without that key",
            )
        return said

    def write_config(self, exported: Path) -> None:
        """Replace the config.json of ``exported``, an export of this model's weights, by this folder's.

        ``dtype`` and ``architectures`` are kept from the exported config: they describe the exported files.
        """
        file = exported / CONFIG
        made = json.loads(file.read_text(encoding="utf-8"))
        kept = {name: value for name, value in self.config.items() if name not in NOT_EXPORTED}
        said = kept | {name: made[name] for name in ("architectures", "dtype")}
        aside = exported / f".{CONFIG}.partial"
        aside.write_text(json.dumps(said, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        aside.replace(file)

    @cached_property
    def architecture(self) -> Architecture:
        """Architecture in config.json. Raises ``ValueError`` as ``Architecture.from_hf`` does."""
        return Architecture.from_hf(self.file(CONFIG))

    @cached_property
    def tensors(self) -> dict[str, tuple[Path, StoredTensor]]:
        """File, type and shape of every stored tensor, by name. Only headers are read.

        Raises ``ValueError`` for a truncated or invalid safetensors file, and for an index that names
        anything but complete files in this folder.
        """
        if (self.path / ONE_FILE).exists() or (self.path / ONE_FILE).is_symlink():
            return {name: (file, one) for _, file, name, one in self._read([ONE_FILE])}
        places = self._index()
        found = {}
        for shard, file, name, tensor in self._read(dict.fromkeys(places.values())):
            if places.get(name) != shard:
                allowed = f"the tensors that {INDEX} places in it, {places.get(name, 'nowhere')} for this one"
                refuse(f"{self.field}/{shard}", name, allowed, "the files of one version of the model")
            found[name] = (file, tensor)
        lost = [name for name in places if name not in found]
        if lost:
            allowed = f"what {places[lost[0]]} has{_more(lost)}"
            refuse(f"{self.field}/{INDEX}", lost[0], allowed, "the files of one version of the model")
        return found

    def _read(self, shards: Iterable[str]) -> Iterator[tuple[str, Path, str, StoredTensor]]:
        for shard in shards:
            file = self.file(shard)
            header = read_header(file, f"{self.field}/{shard}")
            yield from ((shard, file, name, tensor) for name, tensor in header.items())

    def _index(self) -> dict[str, str]:
        """Read the index and return the file name of every tensor, by tensor name."""
        field, file = f"{self.field}/{INDEX}", self.file(INDEX)
        size = file.stat().st_size
        if not stat.S_ISREG(file.stat().st_mode) or size > MAX_INDEX_BYTES:
            refuse(field, size, f"a file of at most {MAX_INDEX_BYTES:,} bytes", "the model's own index")
        try:
            said = parse_json("index", file.read_bytes().decode("utf-8"))
        except (ValueError, RecursionError) as error:
            refuse(field, f"no JSON: {error}", "a JSON object with weight_map", "the model's own index")
        places: Any = said.get("weight_map") if isinstance(said, dict) else None
        if not isinstance(places, dict) or not places or not all(type(v) is str for v in places.values()):
            refuse(
                field, type(places).__name__, "weight_map: files by tensors' names", "the model's own index"
            )
        return places

    def file(self, name: str) -> Path:
        """Return the resolved path of the file ``name`` in this folder.

        In the Hub's cache, snapshots link to files in the model's ``blobs`` folder, which are allowed too.
        Raises ``ValueError`` for a missing file and for a path or link that leaves the folder.
        """
        field = f"{self.field}/{name}"
        parts = Path(name).parts
        if not parts or Path(name).is_absolute() or ".." in parts or "\0" in name:
            refuse(
                self.field, name, "names of files in the folder itself: nothing else is read", "its own files"
            )
        try:
            found = (self.path / name).resolve(strict=True)
        except (OSError, RuntimeError) as error:
            what = "a link to nothing" if (self.path / name).is_symlink() else "not there"
            why = f"a file in {self.path}: it is {what} ({type(error).__name__})"
            refuse(self.field, name, why, "download the model anew, all of its files")
        if not self.holds(found):
            refuse(field, str(found), f"a file in {self.path}: it is a link out of it", "a copy of the file")
        return found

    def holds(self, file: Path) -> bool:
        """Return whether ``file``, a resolved absolute path, belongs to the model."""
        model = self.path.parent.parent
        is_snapshot = self.path.parent.name == "snapshots" and model.name.startswith("models--")
        homes = (self.path, model / "blobs") if is_snapshot else (self.path,)
        return any(file.is_relative_to(home) for home in homes)

    # ---- Comparison with a plan

    def check(self, plan: Plan) -> None:
        """Raise ``ValueError`` if the folder does not hold all weights of ``plan``'s architecture."""
        if self.config.get("quantization_config") is not None:
            refuse(
                f"{self.field}/{CONFIG} quantization_config",
                self.config["quantization_config"],
                "none: packed weights are not unpacked here",
                "the model's weights in bf16; Recipe.quantization packs a frozen base",
            )
        self._check_architecture(plan.architecture)
        self._check_tensors(plan.architecture)

    def _check_architecture(self, planned: Architecture) -> None:
        own = self.architecture
        for one in fields(own):
            here, there = getattr(planned, one.name, None), getattr(own, one.name)
            if one.name != "name" and here != there:
                allowed = f"{there!r}, as {self.path.name}/{CONFIG} says"
                fix = f"architecture=Architecture.from_hf({str(self.path)!r})"
                refuse(f"Architecture.{one.name}", here, allowed, fix)

    def _check_tensors(self, arch: Architecture) -> None:
        stored = {name: tensor for name, (_, tensor) in self.tensors.items()}
        wanted = dict(piece for source in sources(arch, stored).values() for piece in source.pieces())
        missing = [name for name in wanted if name not in stored]
        if missing:
            allowed = f"every tensor of {arch.name}; the files lack {len(missing):,}{_more(missing)}"
            refuse(self.field, f"without {missing[0]}", allowed, "the files of the whole model")
        extra = [name for name in stored if name not in wanted and not is_unused(arch, name)]
        if extra:
            allowed = f"tensors of {arch.name}: {len(extra):,} have no place in it{_more(extra)}"
            refuse(self.field, extra[0], allowed, f"the files of a {arch.model_type} and nothing else")
        for name, shape in wanted.items():
            dtype, found, _ = stored[name]
            if found != tuple(shape):
                allowed = f"{tuple(shape)}, as the plan's architecture has it"
                refuse(
                    f"{self.field}: shape of {name}",
                    found,
                    allowed,
                    "the model that its config.json describes",
                )
            if dtype not in READ_TYPES:
                allowed = f"{', '.join(READ_TYPES)}: packed weights are not unpacked here"
                refuse(f"{self.field}: dtype of {name}", dtype, allowed, "the model's weights in bf16")


def _more(names: list[str]) -> str:
    """Return up to three further names in parentheses, for an error message."""
    return f" (then {', '.join(names[1:4])}{', ...' if len(names) > 4 else ''})" if len(names) > 1 else ""
