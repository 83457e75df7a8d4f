"""Model argument → the files it means: a folder, a GGUF file, a hub id, or the embedded model. No torch."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from oneloop.config import DEFAULT_MODEL
from oneloop.errors import ConfigError, ModelError
from oneloop.formats.expected import expected_tensors, stored_tensors
from oneloop.formats.generation import GenerationDefaults, hf_generation_defaults
from oneloop.formats.gguf import GgufFile, read_gguf
from oneloop.formats.gguf_spec import gguf_model_spec
from oneloop.formats.hf_config import hf_model_spec
from oneloop.formats.json_file import read_json_object
from oneloop.formats.json_values import JsonValues
from oneloop.formats.kv_scales import kv_scale_names, read_kv_scales
from oneloop.formats.quantization.config import chosen_quantization
from oneloop.formats.quantization.gguf import FORMS, GgufQuantization
from oneloop.loader.checkpoint import read_checkpoint
from oneloop.loader.embedded import GENERATION, fetch_embedded
from oneloop.loader.gguf_tensors import check_gguf, weight_types
from oneloop.loader.progress import Progress, no_progress

if TYPE_CHECKING:
    from collections.abc import Mapping

    from oneloop.config import QuantizationName
    from oneloop.formats.model_spec import ModelSpec
    from oneloop.formats.safetensors import SafetensorsTensor

LoadFormat = Literal["auto", "safetensors", "gguf", "dummy"]

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_HUB_UNWANTED = ("consolidated*.safetensors", "original/*", "*/*.safetensors")
"""Second copies of the weights in their maker's own layout."""
_EMBEDDED = f"the model that needs no hub is called {DEFAULT_MODEL}"
_MAX_CONFIG_BYTES = 4 << 20
_HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "tokenizer.model", "additional_chat_templates/*")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """A model's files and its shape, before any weight is read."""

    kind: Literal["gguf", "folder"]
    path: Path
    """The GGUF file, or the folder with config.json."""
    spec: ModelSpec
    generation: GenerationDefaults
    """Sampling defaults and end tokens of the model's generation_config.json. Empty for GGUF, but for the embedded
    model's."""
    gguf: GgufFile | None = None
    """The header that was read, so that tokenizer and loader need not read it again."""
    tensors: Mapping[str, SafetensorsTensor] | None = None
    """Where a folder's weights lie, in the order of the files; None where they were not asked for."""


def resolve_model(
    model: str,
    *,
    revision: str | None = None,
    load_format: LoadFormat = "auto",
    quantization: QuantizationName | None = None,
    progress: Progress = no_progress,
) -> ModelSource:
    """Find the files, fetching them where `model` is a hub id or the embedded model's name.

    revision: commit, tag or branch of a hub model, the same for all its files. load_format: dummy fetches
    no weight files and looks at none; else their headers hold every tensor of the model in its shape. quantization: as
    --quantization. ModelError says what is missing or malformed and what to do; ConfigError that the files are of
    another load_format or quantization.
    """
    path = Path(model).expanduser()
    # By its own name whatever lies in the working directory; ./smollm2 is a folder of that name.
    is_embedded = model == DEFAULT_MODEL or (model.lower() == DEFAULT_MODEL and not path.exists())
    if revision is not None and (is_embedded or path.exists()):
        raise ConfigError("revision", f"is of hub models, and {model} is none; leave --revision away")
    if is_embedded:
        embedded = fetch_embedded(progress=progress)
        return replace(_file_source(embedded, load_format, quantization), generation=GENERATION)
    if path.is_dir():
        return _folder_source(path, load_format, quantization)
    if path.is_file():
        return _file_source(path, load_format, quantization)
    if (
        path.is_absolute()
        or model.startswith((".", "~"))
        or path.suffix == ".gguf"
        or not _HUB_ID.fullmatch(model)
    ):
        raise ModelError(model, f"no such file or folder (and no hub id); {_EMBEDDED}")
    weights = load_format != "dummy"
    return _folder_source(_fetch_from_hub(model, revision, weights=weights), load_format, quantization)


@dataclass(frozen=True, slots=True, kw_only=True)
class TextFiles:
    """What is needed of a model to write its prompts and read its answers, whatever its architecture."""

    path: Path
    """The GGUF file, or a folder with a tokenizer."""
    generation: GenerationDefaults
    gguf: GgufFile | None = None
    vocab_size: int | None = None
    """Rows of the output head, where the files say so."""
    max_model_len: int | None = None
    """The longest context, where the files say so."""


def resolve_texts(model: str, *, revision: str | None = None, progress: Progress = no_progress) -> TextFiles:
    """As resolve_model(), for what there is of the model beside its weights, which are not fetched.

    A folder needs a tokenizer alone; where it has a config.json, its sizes are taken from there.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        return _folder_texts(path)
    if path.exists() or model.lower() == DEFAULT_MODEL or not _HUB_ID.fullmatch(model):
        source = resolve_model(model, revision=revision, load_format="dummy", progress=progress)
        return TextFiles(
            path=source.path,
            generation=source.generation,
            gguf=source.gguf,
            vocab_size=source.spec.vocab_size,
            max_model_len=source.spec.max_position,
        )
    return _folder_texts(_fetch_from_hub(model, revision, weights=False))


def _folder_texts(path: Path) -> TextFiles:
    file = path / "config.json"
    if not file.is_file():
        return TextFiles(path=path, generation=GenerationDefaults())
    config = read_json_object(file, max_bytes=_MAX_CONFIG_BYTES)
    inner = config.get("text_config")
    sizes = JsonValues(str(file), inner if isinstance(inner, dict) else config)
    return TextFiles(
        path=path,
        generation=hf_generation_defaults(path),
        vocab_size=_optional_size(sizes, "vocab_size", 1 << 24),
        max_model_len=_optional_size(sizes, "max_position_embeddings", 1 << 26),
    )


def _optional_size(config: JsonValues, key: str, at_most: int) -> int | None:
    return config.integer(key, 1, at_most) if key in config else None


def _file_source(path: Path, load_format: LoadFormat, quantization: QuantizationName | None) -> ModelSource:
    if path.suffix in (".bin", ".pt", ".pth", ".ckpt"):
        raise ModelError(str(path), "pickled weights are never loaded; convert the model to safetensors")
    if path.suffix == ".safetensors" or path.name == "config.json":
        raise ModelError(str(path), f"give the folder it is in: {path.parent}")
    file = read_gguf(path)
    spec = _quantized(gguf_model_spec(file), quantization, path)
    check_format(load_format, "gguf", path)
    if load_format != "dummy":
        check_gguf(file, expected_tensors(spec))
    if spec.quantization is None:
        types = weight_types(file, spec)
        if not FORMS.keys().isdisjoint(types.values()):
            spec = replace(spec, quantization=GgufQuantization(types))
    return ModelSource(kind="gguf", path=path, spec=spec, generation=GenerationDefaults(), gguf=file)


def _folder_source(path: Path, load_format: LoadFormat, quantization: QuantizationName | None) -> ModelSource:
    if not (path / "config.json").is_file():
        single = sorted(path.glob("*.gguf"))
        if single:
            raise ModelError(
                str(path), f"holds GGUF files and no config.json; name one of them, e.g. {single[0]}"
            )
        raise ModelError(str(path), "holds no config.json: not a Hugging Face model folder")
    spec = _quantized(hf_model_spec(path), quantization, path)
    check_format(load_format, "safetensors", path)
    tensors = None
    if load_format != "dummy":
        tensors = read_checkpoint(path, stored_tensors(spec), kv_scale_names(spec.num_layers))
        spec = replace(spec, kv_scales=read_kv_scales(tensors, spec.num_layers))
    return ModelSource(
        kind="folder", path=path, spec=spec, generation=hf_generation_defaults(path), tensors=tensors
    )


def _quantized(spec: ModelSpec, wanted: QuantizationName | None, path: Path) -> ModelSpec:
    assert not isinstance(spec.quantization, GgufQuantization)
    return replace(spec, quantization=chosen_quantization(spec.quantization, wanted, str(path)))


def check_format(load_format: LoadFormat, found: LoadFormat, path: Path) -> None:
    """ConfigError where a model of the other format is asked for."""
    if load_format not in ("auto", "dummy", found):
        raise ConfigError("load_format", f"is {load_format}, but {path} is a {found} model")


def _fetch_from_hub(model: str, revision: str | None, *, weights: bool) -> Path:
    """Snapshot of a hub model: one revision for all its files; only data files, never code."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    patterns = [pattern for pattern in _HUB_FILES if weights or pattern != "*.safetensors"]
    try:
        return Path(
            snapshot_download(
                model, revision=revision, allow_patterns=patterns, ignore_patterns=list(_HUB_UNWANTED)
            )
        )
    except LocalEntryNotFoundError as error:
        raise ModelError(
            model,
            f"is no file or folder here, and the hub cannot be reached; give a local folder or GGUF file; {_EMBEDDED}",
        ) from error
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise ModelError(
            model, f"is no file or folder here, and the hub did not give it: {error}; {_EMBEDDED}"
        ) from error
