"""kvcourse: the code of an interactive course on the KV cache.

Names are looked up on first use, so that `import kvcourse` stays fast: nothing
here imports torch, plotly or ipywidgets until a name that needs them is used.
"""

import sys
from importlib import import_module
from types import ModuleType

__version__ = "0.1.0"

_HOME = {  # public name -> module that defines it
    "BatchView": "caches",
    "CacheFull": "caches",
    "ConcatenatingCache": "caches",
    "ContiguousCache": "caches",
    "GrowingCache": "caches",
    "HeavyHitterCache": "caches",
    "KVCache": "caches",
    "LatentCache": "caches",
    "ModelConfig": "config",
    "PagedCache": "caches",
    "PagedPool": "caches",
    "QuantizedCache": "caches",
    "SlidingCache": "caches",
    "Tap": "tap",
    "catalogue": "config",
    "check": "checks",
    "fetch_model": "loading",
    "generate": "generate",
    "greedy": "generate",
    "load_model": "loading",
    "load_tokenizer": "loading",
    "predict": "widgets",
    "random_model": "loading",
    "read_config": "hub_config",
    "reveal": "widgets",
    "sampled": "generate",
}
_MODULES = {
    "arguments", "bench", "caches", "chat", "checks", "config", "diagnosis", "engine", "evaluation",
    "fetch", "figures", "ggml_blocks", "gguf_convert", "hub_config", "kernels", "loading", "measure",
    "models", "needle", "ops", "paging", "paths", "progress", "sizing", "smollm2", "streams", "tap",
    "tokenizer", "torch_models", "weights", "widgets",
}  # fmt: skip

__all__ = sorted([*_HOME, *_MODULES])


def __getattr__(name):
    if name in _HOME:
        value = getattr(import_module(f"kvcourse.{_HOME[name]}"), name)
    elif name in _MODULES:
        value = import_module(f"kvcourse.{name}")
    else:
        raise AttributeError(f"module 'kvcourse' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__():
    return __all__


class _Package(ModuleType):
    """Keeps `kv.generate` the function: whoever imports the module of that name first, Python then
    puts the module here, in the function's place."""

    def __setattr__(self, name, value):
        if name in _HOME and isinstance(value, ModuleType):
            value = getattr(value, name)
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
