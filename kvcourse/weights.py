"""Weights from files, checked by hash: bundled, fetched once, a local folder, or random.

Which models there are, and every file's SHA-256, stands in `data/models/files.json`.
A name is looked for in the clone (bundled), then in `KVCOURSE_SHARED`, then in the
reader's own folder. Nothing is ever written into the clone.
"""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from kvcourse import config as configs
from kvcourse import fetch as fetching
from kvcourse import paths


@dataclass(frozen=True)
class KnownFile:
    """One file of a known model. `url` is None for a bundled file; `size` in bytes."""

    name: str
    sha256: str
    size: int
    url: str | None = None


@dataclass(frozen=True)
class KnownModel:
    """A model the course knows by name. `folder` is where it lies, or None when not fetched yet."""

    name: str
    bundled: bool
    files: tuple[KnownFile, ...]
    folder: Path | None

    @property
    def size(self):
        """Bytes of all its files."""
        return sum(file.size for file in self.files)


@cache
def _known_files():
    with open(paths.data_dir() / "models" / "files.json", encoding="utf-8") as file:
        entries = json.load(file)["models"]
    return {name: tuple(KnownFile(**f) for f in files) for name, files in entries.items()}


def available():
    """{name: KnownModel} of every model the course knows by name, with where it lies now."""
    found = {}
    for name, files in _known_files().items():
        bundled = files[0].url is None
        places = [paths.data_dir() / "models"] if bundled else _fetched_places()
        folders = (place / name for place in places)
        whole = (f for f in folders if bundled or all((f / file.name).is_file() for file in files))
        found[name] = KnownModel(name, bundled, files, next(whole, None))
    return found


def verify(name):
    """Check every file of a known model against its recorded SHA-256; return its folder.

    Raises DamagedFile, in one line with the remedy, for a missing or damaged file.
    """
    model = _known(name)
    if model.folder is None:
        raise fetching.DamagedFile(f"{name} is not on this machine: {_remedy(model)}")
    for file in model.files:
        fetching.verify(model.folder / file.name, file.sha256, _remedy(model))
    return model.folder


def fetch(name):
    """Download a model's files into the reader's folder, unless they are there; return the folder."""
    model = _known(name)
    if model.folder is None:
        folder = paths.user_dir() / "models" / name
        for file in model.files:
            fetching.download(file.url, folder / file.name, file.sha256, file.size)
    return verify(name)


def load(name):
    """(ModelConfig, params) of a known name or a folder in Hugging Face layout; params float32.

    Raises ValueError for an unknown name, DamagedFile for files that are not whole.
    """
    folder, label = _folder_of(name)
    described = _read_json(folder / "config.json")
    return configs.from_huggingface(described, label), _read_params(folder / "model.safetensors")


def tokenizer_folder(name):
    """The folder that holds the tokenizer files of a known name, or the folder given."""
    return _folder_of(name)[0]


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


def _folder_of(name):
    """(folder, label): hashes are checked for a known name; a reader's own folder is taken as it is."""
    if str(name) in _known_files():
        return verify(str(name)), str(name)
    folder = Path(name).expanduser()
    if not folder.is_dir():
        raise ValueError(
            f"no model {str(name)!r}: use one of {', '.join(_known_files())}, "
            f"or a folder in Hugging Face layout"
        )
    return folder, folder.name


def _read_params(path):
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    if not path.is_file():
        raise fetching.DamagedFile(
            f"{path} is missing: a model folder holds config.json and model.safetensors"
        )
    try:
        stored = load_file(path)
    except (SafetensorError, OSError) as error:
        raise fetching.DamagedFile(f"{path} cannot be read ({error}): copy or download it again") from None
    # Hugging Face stores some GPT-2s with this prefix and some without; the causal
    # masks (`attn.bias`) that old files carry are no weights, the code computes them.
    short = {name.removeprefix("transformer."): array for name, array in stored.items()}
    kept = {n: a for n, a in short.items() if not n.endswith((".attn.bias", ".attn.masked_bias"))}
    return {name: array.astype(np.float32) for name, array in kept.items()}


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


def _fetched_places():
    shared = paths.shared_dir()
    return ([shared / "models", shared] if shared else []) + [paths.user_dir() / "models"]


def _remedy(model):
    if model.bundled:
        return f"restore it with `git checkout -- data/models/{model.name}`"
    return f"run `kvcourse weights fetch {model.name}`, or set KVCOURSE_SHARED to a folder that has it"
