"""Configs and models: the product's own classes beside those of transformers.

A model that transformers lacks is written in transformers' form in a package here and registered
with its Auto classes, so that everything else treats it like any other.
"""

from __future__ import annotations

import difflib
import functools
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from analyzers.checkpoint import parse_json
from analyzers.errors import InputError
from analyzers.fields import blamed, zero_sizes

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel

    from analyzers.headers import GenericConfig

MAX_CONFIG_BYTES = 10_000_000
LANGUAGE_MODELS = (
    "CAUSAL_LM",
    "IMAGE_TEXT_TO_TEXT",
    "MULTIMODAL_LM",
    "SEQ_TO_SEQ_CAUSAL_LM",
    "SPEECH_SEQ_2_SEQ",
)
"""Of transformers' mappings from a config to a class, those of language models."""
FLOAT32_NAMES = ("A_log", "dt_bias", "e_score_correction_bias")
"""Parts of names of what is always float32: decay rates and the router's correction bias."""


def float32_names(model: torch.nn.Module) -> set[str]:
    """Parts of the names of what must stay float32, as the class and the field have it."""
    kept: set[str] = set(FLOAT32_NAMES)
    for attribute in ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict"):
        kept |= set(getattr(model, attribute, None) or ())
    return kept


def is_named(part: str, name: str) -> bool:
    """Whether `part` is one or more whole words of a dotted name."""
    return f".{part}." in f".{name}."


def load_config(folder: str | Path, *, trust_remote_code: bool = False) -> PreTrainedConfig:
    """The config of a model folder, as the class of its `model_type`.

    Raises InputError as `find_config` does, and for a type that nothing here builds.
    """
    from analyzers.headers import GenericConfig

    config = find_config(folder, trust_remote_code=trust_remote_code)
    if isinstance(config, GenericConfig):
        raise InputError(
            Path(folder) / "config.json",
            field="model_type",
            fault=config.reason,
            fix="or give a transformers release that has it, or a class under analyzers/models/",
        )
    return config


def find_config(
    folder: str | Path, *, trust_remote_code: bool = False
) -> PreTrainedConfig | GenericConfig:
    """The config of a model folder, as the class of its `model_type` or, where nothing here builds
    that, as it stands in the file, with the reason.

    Code in the folder is imported only with `trust_remote_code`. Raises InputError when there is no
    folder, no config, broken JSON, or a value that the class refuses.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from analyzers.headers import GenericConfig
    from analyzers.headers.keys import check_sizes

    folder = Path(folder)
    data = read_config(folder)
    check_sizes(data, folder / "config.json")
    register_own_models()
    model_type = data.get("model_type", "unknown")
    if not isinstance(model_type, str) or not model_type:
        fix = "use a transformers model folder, whose config names its type"
        raise InputError(folder / "config.json", field="model_type", fault="is no name", fix=fix)
    if model_type not in CONFIG_MAPPING:
        reason = _no_class(folder, data, trust_remote_code)
        if reason is not None:
            return GenericConfig(data, str(folder), reason)
    config = _of_class(folder, data, model_type)
    config.name_or_path = str(folder)
    return config


def _of_class(folder: Path, data: dict[str, Any], model_type: str) -> PreTrainedConfig:
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # advice to authors of configs
            if model_type in CONFIG_MAPPING:
                cls = CONFIG_MAPPING[model_type]
                # As from_pretrained does: infinity is written as {"__float__": "Infinity"}.
                return cls.from_dict(cls._decode_special_floats(data))
            return AutoConfig.from_pretrained(folder, trust_remote_code=True, local_files_only=True)
    # Config classes raise anything, from TypeError to their own errors, and own code may exit.
    except (Exception, SystemExit) as e:
        fault = f"is refused by the class of '{model_type}': {_in_a_line(e)}"
        raise InputError(folder / "config.json", fault=fault, fix="correct the value") from e


def _in_a_line(error: BaseException) -> str:
    """What an error says; the name of its type alone says little, a missing key alone nothing."""
    text = " ".join(str(error).split())[:300]
    bare = not text or isinstance(error, (KeyError, SystemExit))
    return f"{type(error).__name__}: {text}".removesuffix(": ") if bare else text


def _no_class(folder: Path, data: dict[str, Any], trust_remote_code: bool) -> str | None:
    """Why nothing builds a model of a type that transformers lacks; None when its own code may."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    model_type = data.get("model_type")
    if model_type is None:
        return "config.json names no model_type"
    near = difflib.get_close_matches(model_type, list(CONFIG_MAPPING), n=1, cutoff=0.85)
    reason = f"no class for '{model_type:.60}' in transformers {transformers.__version__}"
    reason += f" (did you mean '{near[0]}'?)" if near else ""
    own = data.get("auto_map")
    own = own if isinstance(own, dict) else {}
    names = [str(own.get(name)) for name in ("AutoConfig", "AutoModelForCausalLM")]
    files = [f"{name.rpartition('.')[0]}.py" for name in names]
    # Code of another repository (`owner/name--file.Class`) is no file here: nothing is downloaded.
    missing = [file for file in files if not (folder / file).is_file() or "/" in file]
    if "AutoConfig" not in own:
        return reason
    if missing:
        return f"{reason}, and the folder lacks the code that its config names"
    if not trust_remote_code:
        untrusted = "the folder's own code was not trusted (--trust-remote-code would build it)"
        return f"{reason}; {untrusted}"
    return None


def build_on_meta(config: PreTrainedConfig, *, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """The model of a config with every parameter on the meta device: shapes, no memory.

    `dtype` defaults to the config's. Raises InputError when no class builds the config, or when it
    is not a language model.
    """
    import torch
    from transformers import initialization

    register_own_models()
    where = Path(config.name_or_path or "") / "config.json"
    name = config.model_type
    try:
        cls = model_class(config)
        if cls is not None:
            name = cls.__name__
            # As the Auto classes do: a text-only class of a multimodal config takes its text part.
            if cls.config_class is (getattr(config, "sub_configs", None) or {}).get("text_config"):
                config = config.get_text_config()
            kwargs = {} if dtype is None else {"dtype": dtype}
            with torch.device("meta"), initialization.no_init_weights():
                model = cls._from_config(config, **kwargs)
            model.tie_weights()  # part of the initialisation that is left out
            _check_not_empty(model, where, config)
            return model
    except InputError:
        raise
    # Model classes raise anything on values that do not go together, and own code may exit.
    except (Exception, SystemExit) as e:
        field, fault = blamed(_as_written(where, config), e) or (None, _in_a_line(e))
        fault = f"{fault}: {name} cannot be built" if field else f"{name} cannot be built: {fault}"
        raise InputError(where, field=field, fault=fault, fix="correct the config") from e
    raise InputError(
        where,
        field="model_type",
        fault=f"'{name:.60}' is known, but not as a language model",
        fix="give a model with a language-model head",
    )


def _check_not_empty(model: PreTrainedModel, where: Path, config: PreTrainedConfig) -> None:
    """Raises InputError for a weight without elements that a size of zero makes."""
    empty = next((name for name, p in model.named_parameters() if not p.numel()), None)
    field = zero_sizes(_as_written(where, config)) if empty else None
    if field:
        fault = f"is 0, which leaves nothing of {empty}"
        raise InputError(where, field=field, fault=fault, fix="correct the config")


def _as_written(where: Path, config: PreTrainedConfig) -> dict[str, Any]:
    """A config with the names of its file, where it has one."""
    return read_config(where.parent) if where.is_file() else config.to_dict()


def model_class(config: PreTrainedConfig) -> type[PreTrainedModel] | None:
    """The language-model class that builds `config`: the one that it names, or the first."""
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    # A config of the folder's own class is there only because its code was trusted.
    if type(config).__module__.startswith("transformers_modules."):
        own: dict[str, str] = getattr(config, "auto_map", None) or {}
        if "AutoModelForCausalLM" not in own:
            return None
        folder = config.name_or_path or ""
        reference = own["AutoModelForCausalLM"]
        return get_class_from_dynamic_module(reference, folder, local_files_only=True)
    found = candidates(type(config))
    named = config.architectures or []
    return next((c for c in found if c.__name__ in named), found[0] if found else None)


def candidates(config_class: type) -> list[type[PreTrainedModel]]:
    """The classes of transformers that are language models with such a config, the most usual
    first; without any, the plain model of what reads tokens (an embedding model, say)."""
    from transformers.models.auto import modeling_auto

    mappings = [getattr(modeling_auto, f"MODEL_FOR_{name}_MAPPING") for name in LANGUAGE_MODELS]
    found = [cls for mapping in mappings for cls in _mapped(mapping, config_class)]
    if not found and hasattr(config_class, "vocab_size"):
        found = _mapped(modeling_auto.MODEL_MAPPING, config_class)
    return list(dict.fromkeys(found))


def class_names(model_type: str) -> list[str]:
    """The names of transformers' language-model classes for a model type; imports none of them."""
    from transformers.models.auto import modeling_auto

    found: list[str] = []
    for name in LANGUAGE_MODELS:
        named = getattr(modeling_auto, f"MODEL_FOR_{name}_MAPPING_NAMES").get(model_type, ())
        found += [named] if isinstance(named, str) else named
    return list(dict.fromkeys(found))


def _mapped(mapping: Any, config_class: type) -> list[type[PreTrainedModel]]:
    if config_class not in mapping:
        return []
    try:
        classes = mapping[config_class]
    except ValueError:  # transformers names a class here and there that it does not have
        return []
    return list(classes) if isinstance(classes, (list, tuple)) else [classes]


def read_config(folder: Path) -> dict[str, Any]:
    """`config.json` as plain data. Raises InputError when it is not there or not a JSON object."""
    path = folder / "config.json"
    if not folder.is_dir():
        fault = "is a file" if folder.exists() else "no such folder"
        raise InputError(folder, fault=fault, fix="give the folder of a model")
    if not path.is_file():
        fix = "give a folder with a transformers config.json"
        raise InputError(folder, fault="has no config.json", fix=fix)
    if path.stat().st_size > MAX_CONFIG_BYTES:
        raise InputError(path, fault=f"is larger than {MAX_CONFIG_BYTES} bytes")
    return parse_json(path.read_bytes(), path)


@functools.cache
def register_own_models() -> None:
    """Registers the classes of this package with transformers' Auto classes, once."""
    from analyzers.models import kimi_k2, kimi_k3

    kimi_k2.register()
    kimi_k3.register()
