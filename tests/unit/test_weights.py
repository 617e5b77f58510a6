"""Bundled models are whole; damaged, missing and foreign ones are refused in one line."""

import json
import shutil
import struct
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from kvcourse import config as configs
from kvcourse import fetch, loading, paths, weights
from kvcourse.models import gpt2

BUNDLED = ["austen-gpt2", "austen-gpt2-draft"]
MIB = 1 << 20


@pytest.mark.parametrize("name", BUNDLED)
def test_bundled_models_are_whole_and_small(name):
    folder = weights.verify(name)
    assert sum(path.stat().st_size for path in folder.iterdir() if path.is_file()) <= 16 * 1_000_000


@pytest.mark.parametrize(
    "name, least, most", [("austen-gpt2", 5.0e6, 7.5e6), ("austen-gpt2-draft", 0.4e6, 0.8e6)]
)
def test_bundled_shapes(name, least, most):
    config = loading.load_model(name).config
    assert least <= config.num_parameters <= most
    assert (config.max_seq_len, config.head_dim) == (1024, 64)


def test_every_weight_is_float32_in_memory():
    model = loading.load_model("austen-gpt2")
    assert {array.dtype for array in model.params.values()} == {np.dtype(np.float32)}
    assert sum(array.size for array in model.params.values()) == model.config.num_parameters


def test_files_json_lists_every_file_that_loading_reads():
    for model in weights.available().values():
        assert {"config.json", "model.safetensors"} <= {file.name for file in model.files}


def test_gpt2_is_known_and_not_bundled(monkeypatch, tmp_path):
    monkeypatch.setenv("KVCOURSE_HOME", str(tmp_path))
    monkeypatch.delenv("KVCOURSE_SHARED", raising=False)
    known = weights.available()["gpt2"]
    assert not known.bundled and known.folder is None
    with pytest.raises(
        fetch.DamagedFile, match="gpt2 is not on this machine: run `kvcourse weights fetch gpt2`"
    ):
        loading.load_model("gpt2")


def copied(tmp_path, name="austen-gpt2-draft"):
    folder = tmp_path / "copy"
    shutil.copytree(paths.data_dir() / "models" / name, folder)
    return folder


def test_a_local_folder_loads(tmp_path):
    ours, bundled = loading.load_model(copied(tmp_path)), loading.load_model("austen-gpt2-draft")
    assert np.array_equal(ours([1, 2, 3]), bundled([1, 2, 3]))


def test_a_shared_folder_serves_a_class(tmp_path, monkeypatch):
    """The files of a made-up fetched model are found in KVCOURSE_SHARED and checked."""
    folder = copied(tmp_path / "shared" / "models" / "x").rename(tmp_path / "shared" / "models" / "small")
    files = tuple(
        weights.KnownFile(n, fetch.sha256_of(folder / n), (folder / n).stat().st_size, "http://127.0.0.1:9/")
        for n in ("config.json", "model.safetensors")
    )
    monkeypatch.setattr(weights, "_known_files", lambda: {"small": files})
    monkeypatch.setenv("KVCOURSE_SHARED", str(tmp_path / "shared"))
    assert weights.available()["small"].folder == folder
    assert loading.load_model("small").config.name == "small"


@pytest.fixture
def small(tmp_path, monkeypatch):
    """A made-up fetched model, `small`, whose files can be had. Returns (shared copy, reader's copy)."""
    source = copied(tmp_path)
    files = tuple(
        weights.KnownFile(n, fetch.sha256_of(source / n), (source / n).stat().st_size, (source / n).as_uri())
        for n in ("config.json", "vocabulary.tiktoken", "encoding.json", "model.safetensors")
    )
    monkeypatch.setattr(weights, "_known_files", lambda: {"small": files})
    monkeypatch.setenv("KVCOURSE_SHARED", str(tmp_path / "shared"))
    monkeypatch.setenv("KVCOURSE_HOME", str(tmp_path / "home"))
    return tmp_path / "shared" / "models" / "small", tmp_path / "home" / "models" / "small"


def damaged(folder, source, file="model.safetensors"):
    shutil.copytree(source, folder)
    (folder / file).write_bytes(b"half")


def test_the_remedy_for_a_damaged_fetched_model_mends_it(small, tmp_path):
    damaged(small[1], tmp_path / "copy")
    with pytest.raises(fetch.DamagedFile, match="run `kvcourse weights fetch small`"):
        loading.load_model("small")
    assert weights.fetch("small") == small[1]
    assert loading.load_model("small").config.name == "small"


def test_a_damaged_shared_copy_is_passed_over(small, tmp_path):
    damaged(small[0], tmp_path / "copy")
    with pytest.raises(fetch.DamagedFile, match="shared.*model.safetensors is damaged"):
        loading.load_model("small")
    assert weights.fetch("small") == small[1] == weights.verify("small")
    assert loading.load_model("small").config.name == "small"


def test_a_whole_shared_copy_is_not_fetched_again(small, tmp_path):
    shutil.copytree(tmp_path / "copy", small[0])
    assert weights.fetch("small") == small[0]
    assert not small[1].exists()


def test_a_tokenizer_does_without_hashing_the_weights(small, tmp_path):
    damaged(small[1], tmp_path / "copy")
    assert loading.load_tokenizer("small").n_vocab == 2048
    (small[1] / "encoding.json").write_bytes(b"{}")
    with pytest.raises(fetch.DamagedFile, match="encoding.json is damaged"):
        loading.load_tokenizer("small")


def test_a_path_is_a_folder_even_with_the_name_of_a_model(tmp_path, monkeypatch):
    copied(tmp_path).rename(tmp_path / "gpt2")
    monkeypatch.chdir(tmp_path)
    for name in (Path("./gpt2"), "./gpt2"):
        assert loading.load_model(name).config.num_layers == 2
        assert loading.load_tokenizer(name).n_vocab == 2048


@pytest.mark.parametrize("dtype, bytes_each", [("F8_E4M3", 1), ("I8", 1)])
def test_weights_stored_as_numpy_cannot_read_them(tmp_path, dtype, bytes_each):
    header = json.dumps({"wpe.weight": dict(dtype=dtype, shape=[2], data_offsets=[0, 2 * bytes_each])})
    folder = copied(tmp_path)
    raw = struct.pack("<Q", len(header)) + header.encode() + bytes(2 * bytes_each)
    (folder / "model.safetensors").write_bytes(raw)
    with pytest.raises(ValueError, match=f"safetensors: wpe.weight is stored as {dtype}: save .*float32"):
        loading.load_model(folder)


def test_an_output_matrix_of_its_own_is_refused(tmp_path):
    folder = copied(tmp_path)
    params = load_file(folder / "model.safetensors")
    head = params["transformer.wte.weight"]
    same = params | {"lm_head.weight": head}
    save_file(same, folder / "model.safetensors")
    loading.load_model(folder)
    save_file(same | {"lm_head.weight": head + 1}, folder / "model.safetensors")
    with pytest.raises(ValueError, match="lm_head.weight differs from wte.weight"):
        loading.load_model(folder)


def test_float32_weights_are_not_copied():
    """float16 files need a second array; float32 ones must come as they are read."""
    read = np.zeros(3, np.float32)
    file = SimpleNamespace(
        get_slice=lambda name: SimpleNamespace(get_dtype=lambda: "F32"), get_tensor=lambda name: read
    )
    assert weights._read_float32("path", file, "wpe.weight") is read


@pytest.mark.parametrize(
    "variable, ask",
    [
        ("KVCOURSE_SHARED", paths.shared_dir),
        ("KVCOURSE_HOME", paths.user_dir),
        ("KVCOURSE_PROGRESS", paths.progress_file),
    ],
)
def test_the_home_of_an_unknown_user(monkeypatch, variable, ask):
    monkeypatch.setenv(variable, "~nosuchuser/x")
    with pytest.raises(paths.BadSetting, match=f"{variable} is ~nosuchuser/x, but .* write the path in full"):
        ask()


def test_a_damaged_file_is_named_with_its_remedy(tmp_path, monkeypatch):
    shutil.copytree(paths.data_dir() / "models", tmp_path / "models")
    broken = tmp_path / "models" / "austen-gpt2-draft" / "model.safetensors"
    content = bytearray(broken.read_bytes())
    content[-1] ^= 1
    broken.write_bytes(content)
    monkeypatch.setattr(paths, "data_dir", lambda: tmp_path)
    with pytest.raises(fetch.DamagedFile, match="model.safetensors is damaged: .*git checkout") as caught:
        loading.load_model("austen-gpt2-draft")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "file, content, words",
    [
        ("config.json", None, "config.json is missing"),
        ("config.json", b"{", "is not JSON"),
        ("model.safetensors", None, "model.safetensors is missing"),
        ("model.safetensors", b"short", "cannot be read"),
    ],
)
def test_a_broken_local_folder(tmp_path, file, content, words):
    folder = copied(tmp_path)
    if content is None:
        (folder / file).unlink()
    else:
        (folder / file).write_bytes(content)
    with pytest.raises(fetch.DamagedFile, match=words) as caught:
        loading.load_model(folder)
    assert "\n" not in str(caught.value)


def test_weights_that_do_not_fit_the_config(tmp_path):
    folder = copied(tmp_path)
    described = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(described | {"vocab_size": 99}))
    with pytest.raises(ValueError, match="wte.weight has shape .* the config says"):
        loading.load_model(folder)
    (folder / "config.json").write_text(json.dumps(described | {"n_layer": 99}))
    with pytest.raises(ValueError, match="the weights lack h.2.ln_1.weight"):
        loading.load_model(folder)


def test_float64_weights_are_refused():
    config = configs.ModelConfig("tiny", "gpt2", 1, 1, 1, 4, 4, 8, 10, 16)
    params = weights.random_params(gpt2.param_shapes(config))
    params["wpe.weight"] = params["wpe.weight"].astype(np.float64)
    with pytest.raises(TypeError, match="wpe.weight is float64: convert it to float32"):
        gpt2.GPT2(config, params)


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(ValueError, match="no model 'nothing': use one of austen-gpt2"):
        loading.load_model("nothing")


def test_random_models_repeat_by_seed():
    small = dict(num_layers=1, vocab_size=100)
    one, same, other = (loading.random_model("gpt2", seed=s, **small)([1, 2]) for s in (1, 1, 2))
    assert np.array_equal(one, same) and not np.array_equal(one, other)
