"""Hugging Face's config.json from a file, a folder, a dict or the Hub, read by the family's record."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from shardscope.core.architecture import Architecture
from shardscope.core.errors import Value, find_similar, get_first_line, refuse, warn_user
from shardscope.core.json_text import parse_json
from shardscope.families.common import HfConfig
from shardscope.families.family import Family
from shardscope.families.registry import FAMILIES
from shardscope.machine.hub import HubProblem, find_hub_problem
from shardscope.machine.user_folders import expand_home

MAX_BYTES = 1_000_000
"""Maximum size of a config.json; real ones have a few kilobytes."""

_OTHER_HEADS = re.compile(
    r"For(Sequence|Token)Classification|ForQuestionAnswering|ForMultipleChoice|ForMaskedLM|RewardModel"
)
"""Parts of class names in ``architectures`` of models that predict no next token."""

_UNFUSED_ACTIVATIONS: Mapping[str, str | None] = {
    "gelu_new": "gelu_pytorch_tanh",
    "gelu_fast": "gelu_pytorch_tanh",
    "gelu_accurate": "gelu_pytorch_tanh",
    "gelu_python_tanh": "gelu_pytorch_tanh",
    "gelu_python": "gelu",
    "gelu_10": None,
    "quick_gelu": None,
    "xielu": None,
}
"""Activations of transformers' ``ACT2FN`` that run, and save tensors, operator by operator; and the name of
the same function in one kernel."""

RUN_MODELS = ("export", "merged")
"""Folders of a run with its model."""
_WITHOUT_FORMULAS = (
    "from_hf(config, rehearse_only=True): nothing is predicted, but plan.rehearse() counts the memory of any "
    "causal language model of transformers that has attention heads, and DDP, FSDP2 and DeepSpeed train it"
)
"""Suggested fix for a ``model_type`` without formulas."""
_TEXT_PARTS = ("text_config", "llm_config", "language_config", "thinker_config")
"""Keys of the language model's config in a config.json of several models."""
_SHARED_KEYS = ("tie_word_embeddings", "dtype", "torch_dtype", "quantization_config")
"""Keys of a multimodal config that are its language model's as well, where that has none of its own."""
_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
"""Keys of a multimodal config that its text generation uses, also where the language model has its own."""


def read_architecture(config: str | Path | Mapping[str, object], rehearse_only: bool = False) -> Architecture:
    """Return the architecture; see :meth:`shardscope.core.architecture.Architecture.from_hf`."""
    if isinstance(config, Mapping):
        return build_architecture(config, None, rehearse_only)
    if not isinstance(config, str | Path) or not str(config).strip() or "\0" in str(config):
        allowed = "a path to config.json, its folder, a dict, or a Hub id"
        refuse("config", config, allowed, "Architecture.from_hf('folder/config.json')")
    path = expand_home(config)
    if os.path.exists(path):  # noqa: PTH110 - raises nothing for a long text
        file = path / "config.json" if path.is_dir() else path
        return _build_from_file(file, _derive_name(file.absolute()), rehearse_only)
    if isinstance(config, str) and re.fullmatch(r"[\w.-]+/[\w.-]+", config, re.A) and path.suffix != ".json":
        return _build_from_file(_find_on_hub(config), config, rehearse_only)
    allowed = "an existing file or folder, or a Hub id 'org/name'"
    return refuse("config", str(config), allowed, "check the spelling of the path")


def _build_from_file(file: Path, name: str, rehearse_only: bool) -> Architecture:
    """Return the architecture of a checkpoint's config.json; of a multimodal one, its language model's."""
    data = read_config_file(file)
    _check_head(data)
    return build_architecture(select_language_model(data), name, rehearse_only)


def select_language_model(data: Mapping[str, object]) -> Mapping[str, object]:
    """Return the config of the language model in a multimodal config; ``data`` itself if that is no family's.

    ``tie_word_embeddings`` is the language model's own, if it has both: Mistral3Config's default is True,
    also over a language model with a head (transformers 5.24, configuration_mistral3.py).
    """
    part, whole = _find_text_part(data), data.get("model_type")
    if part is None or part[1] not in FAMILIES or not isinstance(whole, str) or whole in FAMILIES:
        return data
    text = data[part[0]]
    assert isinstance(text, Mapping)
    shared = {key: data[key] for key in _SHARED_KEYS if key in data}
    return {**shared, **text, **{key: data[key] for key in _TOKEN_IDS if data.get(key) is not None}}


def _derive_name(file: Path) -> str:
    """Return a model name for ``file``: its folder's, its run's, or the Hub id if it is in the cache."""
    if file.name != "config.json":
        return file.stem
    folder = file.parent
    if folder.parent.name == "snapshots" and folder.parent.parent.name.startswith("models--"):
        return folder.parent.parent.name.removeprefix("models--").replace("--", "/")
    # The folders of a run's model have the same name in each run.
    is_of_run = folder.name in RUN_MODELS and (folder.parent / "run.json").is_file()
    return folder.parent.name if is_of_run else folder.name


def read_config_file(file: Path) -> Mapping[str, object]:
    """Return the JSON object in ``file``. Raises ``ValueError`` (with the line) for anything else."""
    try:
        status = file.stat()
        if not stat.S_ISREG(status.st_mode):  # a FIFO would block, a device never ends
            refuse("config", str(file), "a regular file", "the path of a config.json")
        # Before reading: a path by mistake may be that of a file of weights, gigabytes long.
        if status.st_size > MAX_BYTES:
            refuse(
                "config",
                str(file),
                f"a file of at most {MAX_BYTES:,} bytes, not {status.st_size:,}",
                "the path of a config.json",
            )
        with file.open("rb") as stream:
            # -sig: Windows editors add a byte order mark.
            text = stream.read(MAX_BYTES + 1).decode("utf-8-sig")
    except FileNotFoundError:
        refuse("config", str(file), "a folder that contains a config.json", "the path of the file itself")
    except OSError as error:
        raise ValueError(f"config {file} cannot be read: {error.strerror or error}.") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"config {file} is not UTF-8 at byte {error.start}; save it as UTF-8.") from error
    try:
        data = parse_json(f"config {file}", text)
    except RecursionError as error:
        raise ValueError(f"config {file} is nested too deeply to be a config.json.") from error
    if not isinstance(data, dict):
        refuse("config", str(file), "a file that contains one JSON object", "the path of a config.json")
    return data


def build_architecture(
    data: Mapping[str, object], name: str | None, rehearse_only: bool = False
) -> Architecture:
    """Return the architecture of a config; ``name`` None: the config's own name, or else its model_type.

    Raises ``ValueError`` for an unknown ``model_type``, unless ``rehearse_only``, and for invalid keys.
    """
    _check_head(data)
    family = data.get("model_type")
    display_name = name or data.get("_name_or_path") or family
    if not isinstance(family, str) or family not in FAMILIES:
        if rehearse_only and isinstance(family, str):
            from shardscope.families.unknown import UnknownFamily, is_causal_language_model

            if not is_causal_language_model(family):
                _refuse_other_model(data, family)
            return UnknownFamily.from_config(data, str(display_name))
        _refuse_family(data, family)
    if not isinstance(display_name, str):
        refuse("config.json _name_or_path", display_name, "text", Value(family))
    fields = {"name": display_name, "model_type": family, **FAMILIES[family].read(HfConfig(data))}
    architecture = Architecture.from_dict(fields)
    _warn_of_activation(data, FAMILIES[family])
    _warn_of_packed_weights(data)
    return architecture


def _warn_of_packed_weights(data: Mapping[str, object]) -> None:
    """Warn that plans count the weights of a quantized checkpoint unpacked."""
    packed = data.get("quantization_config")
    if not isinstance(packed, Mapping):
        return
    warn_user(
        f"config.json quantization_config has quant_method {packed.get('quant_method')!r}, but plans count "
        "all weights unpacked, in Recipe.precision. Nearest fix: Recipe(method='qlora') for a frozen 4-bit "
        "base; otherwise the model's weights in bf16, which training needs."
    )


def _warn_of_activation(data: Mapping[str, object], family: Family) -> None:
    """Warn of an activation that saves other tensors than the family's, for which the formulas are."""
    name = data.get(family.activation_key)
    # gpt-oss clamps its gate and reads no activation from the config.
    if not isinstance(name, str) or family.has_clamped_experts:
        return
    is_unfused = name in _UNFUSED_ACTIVATIONS
    if is_unfused == (family.activation in _UNFUSED_ACTIVATIONS):
        return
    predicted = f"memory is predicted for {family.activation!r}, the default of {family.model_type!r}"
    if is_unfused:
        fused = _UNFUSED_ACTIVATIONS[name]
        same = f"{fused!r}, the same function in one kernel; or " if fused else ""
        problem = f"runs operator by operator and saves a tensor for each, but {predicted}, and is too low"
        fix = f" Nearest fix: {same}Recipe.recompute='full', with which one layer at a time has them."
    else:
        problem, fix = f"saves fewer tensors, but {predicted}, and is too high", ""
    warn_user(f"config.json {family.activation_key} is {name!r}, which {problem}.{fix}")


def _check_head(data: Mapping[str, object]) -> None:
    """Raise ``ValueError`` for a classifier or reward model, whose head is not ``lm_head``."""
    names = data.get("architectures")
    for name in names if isinstance(names, list | tuple) else ():
        if isinstance(name, str) and _OTHER_HEADS.search(name):
            refuse(
                "config.json architectures",
                names,
                "a causal language model (...ForCausalLM): other heads have no formulas",
                "remove the key to plan the same layers with a language model's head",
            )


def _refuse_family(data: Mapping[str, object], family: object) -> NoReturn:
    known = ", ".join(FAMILIES)
    if part := _find_text_part(data):
        key, model_type = part
        condition = ", rehearse_only=True), if transformers has a causal language model of that model_type"
        fix = f"its language model alone, from_hf(config[{key!r}]"
        fix += ")" if model_type in FAMILIES else condition
        if model_type not in FAMILIES and _is_built_by_transformers(family):
            fix = f"its language model alone by {_WITHOUT_FORMULAS}"
        refuse("config.json model_type", family, f"a language model, not a wrapper: {known}", fix)
    if same := _find_family_of_class(data):
        fix = f"from_hf({{**config, 'model_type': {same!r}}}), whose class its architectures name"
        refuse("config.json model_type", family, f"known architectures: {known}", fix)
    # Derived families begin like their origin, and typing errors are rarely
    # at the start: "mamba" is no "llama".
    start = str(family).lower()[:2]
    similar = find_similar(family, [name for name in FAMILIES if name.startswith(start)])
    # transformers has a class of its own for other layers: qwen3_5_text is no qwen3_moe.
    is_derived = similar is not None and not _is_built_by_transformers(family)
    same_layers = f"{similar!r} if its layers are the same; or " if is_derived else ""
    fix = f"{same_layers}{_WITHOUT_FORMULAS}"
    refuse("config.json model_type", family, f"known architectures: {known}", fix)


def _is_built_by_transformers(family: object) -> bool:
    """Return whether the installed transformers has a causal language model of this ``model_type``."""
    from shardscope.families.unknown import list_causal_language_models

    return family in list_causal_language_models()


def _find_family_of_class(data: Mapping[str, object]) -> str | None:
    """Return the family whose class ``architectures`` names, as Kimi K2's DeepseekV3ForCausalLM; None: none.

    Such a model has code of its own on the Hub only for its ``model_type``, which transformers does not know,
    so that it cannot be rehearsed by that name either.
    """
    names = data.get("architectures")
    for name in names if isinstance(names, list | tuple) else ():
        for family in FAMILIES:
            if name == f"{family.removesuffix('_text').title().replace('_', '')}ForCausalLM":
                return family
    return None


def _refuse_other_model(data: Mapping[str, object], family: str) -> NoReturn:
    from shardscope.families.unknown import is_causal_language_model

    fix = "the config.json of a causal language model"
    if part := _find_text_part(data):
        key, model_type = part
        if model_type is not None and is_causal_language_model(model_type):
            fix = f"its language model alone, from_hf(config[{key!r}], rehearse_only=True)"
            fix += "; Finetune needs a checkpoint of that alone"
    allowed = "a model_type for which the installed transformers has a causal language model"
    refuse("config.json model_type", family, allowed, fix)


def _find_text_part(data: Mapping[str, object]) -> tuple[str, str | None] | None:
    """Return the key and ``model_type`` of the language model in a multimodal config; None: it has none."""
    for key in _TEXT_PARTS:
        part = data.get(key)
        if isinstance(part, Mapping):
            model_type = part.get("model_type")
            return key, model_type if isinstance(model_type, str) else None
    return None


def _find_on_hub(hub_id: str) -> Path:
    """Return the path of a repository's config.json in the Hub's cache; download it if it is not there.

    Raises ``ValueError`` if that fails or huggingface_hub is not installed.
    """
    try:
        from huggingface_hub import hf_hub_download, try_to_load_from_cache
    except ImportError as error:
        fix = 'pip install "shardscope[train]", or pass the path of a config.json'
        raise ValueError(
            f"Reading {hub_id!r} from the Hub requires huggingface_hub. Nearest fix: {fix}."
        ) from error
    cause = None
    try:
        cached = try_to_load_from_cache(hub_id, "config.json")
        problem = None if isinstance(cached, str) else find_hub_problem(hub_id, "config.json", "model")
        if problem is None:
            return Path(cached if isinstance(cached, str) else hf_hub_download(hub_id, "config.json"))
    except Exception as error:  # The Hub's client has a separate class for each cause.
        reason = get_first_line(error)
        problem, cause = HubProblem(reason.rstrip("."), "check the name and the network"), error
    raise ValueError(
        f"config.json of {hub_id!r} could not be downloaded from the Hub: {problem.reason}. "
        f"Nearest fix: {problem.fix}, or pass the path of its config.json."
    ) from cause
