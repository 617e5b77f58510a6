"""Weights from files, checked by hash: bundled, fetched once, a local folder, or random.

Which models there are, and every file's SHA-256, stands in `data/models/files.json`. A fetched
model comes file by file from its address, or is converted here from a download (`smollm2`).
A name is looked for in the clone (bundled), then in `KVCOURSE_SHARED`, then in the
reader's own folder; a damaged copy is passed over for a whole one. Nothing is ever
written into the clone.
"""

import json
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from kvcourse import fetch as fetching
from kvcourse import ggml_blocks, paths, smollm2
from kvcourse.hub_config import from_huggingface

WEIGHTS = "model.safetensors"


@dataclass(frozen=True)
class KnownFile:
    """One file of a known model; `size` in bytes. `url` is None for one that is bundled or made here."""

    name: str
    sha256: str
    size: int
    url: str | None = None


@dataclass(frozen=True)
class KnownModel:
    """A model the course knows by name. `folder` is where it lies, or None when not fetched yet;
    `converted` says that its files are made on this machine, from a download."""

    name: str
    bundled: bool
    files: tuple[KnownFile, ...]
    folder: Path | None
    converted: bool = False

    @property
    def size(self):
        """Bytes of all its files."""
        return sum(file.size for file in self.files)


@cache
def _described():
    with open(paths.data_dir() / "models" / "files.json", encoding="utf-8") as file:
        return json.load(file)


@cache
def _known_files():
    entries = _described()["models"]
    return {name: tuple(KnownFile(**f) for f in files) for name, files in entries.items()}


def _is_converted(name):
    return name in _described()["converted"]


def _is_bundled(name):
    return _known_files()[name][0].url is None and not _is_converted(name)


def available():
    """{name: KnownModel} of every model the course knows by name, with where it lies now."""
    found = {}
    for name, files in _known_files().items():
        folder = next(_folders(name), None)
        found[name] = KnownModel(name, _is_bundled(name), files, folder, _is_converted(name))
    return found


def verify(name, skip=()):
    """Check a known model's files, but those in `skip`, against their SHA-256; return the first whole folder.

    Raises DamagedFile, in one line with the remedy, for a missing or damaged file.
    """
    model = _known(name)
    damage = None
    for folder in _folders(name):
        try:
            for file in model.files:
                if file.name not in skip:
                    fetching.verify(folder / file.name, file.sha256, _remedy(model))
            return folder
        except fetching.DamagedFile as error:
            damage = damage or error
    raise damage or fetching.DamagedFile(f"{name} is not on this machine: {_remedy(model)}")


def fetch(name):
    """Download into the reader's folder what is missing or damaged there; return the folder.

    A bundled model, or a whole copy in KVCOURSE_SHARED, is taken as it is. Raises
    DownloadFailed, and DamagedFile for a damaged bundled model.
    """
    model = _known(name)
    try:
        return verify(name)
    except fetching.DamagedFile:
        if model.bundled:
            raise
    folder = paths.user_dir() / "models" / name
    if model.converted:
        smollm2.install(folder)
        return verify(name)
    for file in model.files:
        fetching.download(file.url, folder / file.name, file.sha256, file.size)
    return folder


def load(name):
    """(ModelConfig, params) of a known name or a folder in Hugging Face layout; params float32.

    A pathlib.Path is a folder even where it has the name of a known model. Raises
    ValueError for an unknown name, or weights or a config that this course does not
    compute; DamagedFile for files that are not whole.
    """
    folder, label = _folder_of(name)
    described = _read_json(folder / "config.json")
    kind = described.get("model_type") if isinstance(described, dict) else "gpt2"  # refused just below
    if kind not in ("gpt2", "llama"):
        raise ValueError(
            f"{label}: model_type {kind!r} is not supported: this course loads 'gpt2' and 'llama' folders, "
            f"and sizes others with kv.read_config"
        )
    config = from_huggingface(described, label)
    if kind == "llama":
        _refuse_other_llamas(described, label)
        return config, _without_spare_head(read_params(folder), config)
    return config, _gpt2_params(folder)


def _refuse_other_llamas(described, label):
    """ValueError for settings that change what a Llama computes, and that this course leaves out."""
    settings = {"hidden_act": (described.get("hidden_act", "silu"), "silu")}
    for key in ("rope_scaling", "rope_parameters"):  # transformers 4 and 5
        rope = described.get(key) or {}
        if not isinstance(rope, dict):
            raise ValueError(f"{label}: {key} is {rope!r:.40}: it must hold an object of settings")
        kind = rope.get("rope_type", rope.get("type", "default"))
        settings[f"rope_type of {key}"] = "default" if kind == "llama3" else kind, "default"
        settings[f"partial_rotary_factor of {key}"] = rope.get("partial_rotary_factor", 1.0), 1.0
    for key, (found, wanted) in settings.items():
        if found != wanted:
            raise ValueError(f"{label}: {key} is {found!r}: this course computes Llamas with {wanted!r} only")


def _without_spare_head(params, config):
    """Some files store the tied matrix a second time, as lm_head.weight."""
    return {
        name: p for name, p in params.items() if not (config.tied_embeddings and name == "lm_head.weight")
    }


def tokenizer_folder(name):
    """The folder that holds the tokenizer files of a known name, or the folder given.

    The large file of weights is not hashed for it.
    """
    return _folder_of(name, skip=(WEIGHTS,))[0]


def random_params(shapes, seed=0):
    """Seeded random float32 weights: matrices of scale 0.02, norm weights 1, biases 0."""
    random = np.random.default_rng(seed)
    params = {}
    for name, shape in shapes.items():
        if len(shape) > 1:
            params[name] = random.standard_normal(shape, dtype=np.float32)
            params[name] *= 0.02
        else:
            params[name] = np.full(shape, 1 if name.endswith(".weight") else 0, np.float32)
    return params


def _folder_of(name, skip=()):
    """(folder, label): hashes are checked for a known name; a reader's own folder is taken as it is."""
    if isinstance(name, str) and name in _known_files():
        return verify(name, skip), name
    folder = Path(os.path.expanduser(name))  # unlike Path.expanduser, it takes an unknown user's ~ as it is
    if not folder.is_dir():
        raise ValueError(
            f"no model {str(name)!r}: use one of {', '.join(_known_files())}, "
            f"or a folder in Hugging Face layout"
        )
    return folder, folder.name


def read_params(folder, leave_out=()):
    """{name: float32 array} of a folder's weights, whether in one file or, as large models are, in several.

    ggml's blocks (see gguf_convert) are decoded, 16-bit numbers widened.

    leave_out  endings of names that are not read
    """
    params = {}
    for path in _weight_files(folder):
        params |= _read_file(path, tuple(leave_out))
    return params


def _weight_files(folder):
    """model.safetensors, or the files that its index lists. Raises DamagedFile for a missing one."""
    index = folder / f"{WEIGHTS}.index.json"
    if (folder / WEIGHTS).is_file() or not index.is_file():
        files = [folder / WEIGHTS]
    else:
        listed = _read_json(index)
        parts = listed.get("weight_map") if isinstance(listed, dict) else None
        if not isinstance(parts, dict) or not all(isinstance(part, str) for part in parts.values()):
            raise fetching.DamagedFile(f"{index} lists no files in weight_map: copy or download it again")
        files = [folder / part for part in sorted(set(parts.values()))]
    for path in files:
        if not path.is_file():
            raise fetching.DamagedFile(
                f"{path} is missing: a model folder holds config.json and model.safetensors"
            )
    return files


def _read_file(path, leave_out):
    from safetensors import SafetensorError, safe_open

    params = {}
    try:
        with safe_open(path, framework="np") as file:
            for stored in file.keys():
                if stored.endswith(leave_out):
                    continue
                name, _, kind = stored.rpartition(".")
                if kind in ggml_blocks.DECODERS:
                    params[name] = ggml_blocks.DECODERS[kind](file.get_tensor(stored))
                else:
                    params[stored] = _read_float32(path, file, stored)
    except (SafetensorError, OSError) as error:
        raise fetching.DamagedFile(f"{path} cannot be read ({error}): copy or download it again") from None
    return params


def _gpt2_params(folder):
    # The causal masks that old files carry are no weights, the code computes them.
    stored = read_params(folder, leave_out=(".attn.bias", ".attn.masked_bias"))
    # Hugging Face stores some GPT-2s with this prefix and some without.
    params = {name.removeprefix("transformer."): array for name, array in stored.items()}
    head = params.pop("lm_head.weight", None)
    if head is not None and not np.array_equal(head, params.get("wte.weight", head)):
        raise ValueError(
            f"{folder / WEIGHTS}: lm_head.weight differs from wte.weight: "
            f"only GPT-2s that use one matrix for both load here"
        )
    return params


def _read_float32(path, file, name):
    stored_as = file.get_slice(name).get_dtype()
    if stored_as == "BF16":  # NumPy has none: PyTorch widens it
        from safetensors import safe_open

        with safe_open(path, framework="pt") as with_torch:
            return with_torch.get_tensor(name).float().numpy()
    if stored_as not in ("F16", "F32", "F64"):  # float8 and integers need their scales
        raise ValueError(
            f"{path}: {name} is stored as {stored_as}: save the weights as float32 first, "
            f"in transformers with model.float().save_pretrained(folder)"
        )
    return file.get_tensor(name).astype(np.float32, copy=False)


def _read_json(path):
    if not path.is_file():
        raise fetching.DamagedFile(
            f"{path} is missing: a model folder holds config.json and model.safetensors"
        )
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise fetching.DamagedFile(f"{path} is not JSON ({error}): copy or download it again") from None


def _known(name):
    models = available()
    if name not in models:
        raise ValueError(f"no model {name!r}: the course knows {', '.join(models)}")
    return models[name]


def _folders(name):
    """Where the files of a known model lie, in the order they are looked for; hashes are not compared."""
    files = _known_files()[name]
    if _is_bundled(name):
        yield paths.data_dir() / "models" / name
        return
    shared = paths.shared_dir()
    for place in [*([shared / "models", shared] if shared else []), paths.user_dir() / "models"]:
        # Unlike Path.is_file, os.path.isfile takes a folder that may not be entered for one without files.
        if all(os.path.isfile(place / name / file.name) for file in files):
            yield place / name


def _remedy(model):
    if model.bundled:
        return f"restore it with `git checkout -- data/models/{model.name}`"
    return f"run `kvcourse weights fetch {model.name}`, or set KVCOURSE_SHARED to a folder that has it"
