"""Chapter 02: the page's pass and argument, the change of a token, reads, pictures, panel, exercise; and
that no printed line hangs on a rounding."""

import importlib.util
import json
import math
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvcourse as kv
from kvcourse import checks, paths
from kvcourse.bench.chapter_code import tagged_code
from kvcourse.figures import chapter_02 as figures
from kvcourse.widgets import chapter_02 as widgets

NOTEBOOK = paths.chapters_dir() / "02_why_keys_and_values_never_change.ipynb"
TEXT = "Mr. Darcy had a letter for her sister, but she would not take it."
T = 17
# The two changes that the page draws: token, replacement, mask.
DRAWN = [(5, " door", figures.CAUSAL), (16, "?", figures.BIDIRECTIONAL)]


@pytest.fixture(scope="module")
def ids(tokenizer):
    return tokenizer.encode(TEXT)


@pytest.fixture(scope="module")
def chapter():
    return tagged_code(NOTEBOOK, "keys-and-values") | {"kv": kv}


@pytest.fixture(scope="module")
def keys_and_values(chapter):
    function = chapter["keys_and_values"]
    function.__globals__["kv"] = kv  # the page imports it in another cell
    return function


def passed(model, ids, mask):
    tap = kv.Tap(model.config, mask=figures.mask_of(mask, len(ids)))
    model(ids, tap)
    return tap


def replaced(ids, j, token):
    return [*ids[:j], token, *ids[j + 1 :]]


# --- the page's definitions are the package's ------------------------------------------


@pytest.mark.parametrize("mask", figures.MASKS)
@pytest.mark.parametrize("count", [1, 2, 37, 150])
def test_the_pages_keys_and_values_are_the_taps(model, keys_and_values, mask, count):
    ids = np.random.default_rng(count).integers(model.config.vocab_size, size=count).tolist()
    tap = passed(model, ids, mask)
    keys, values = keys_and_values(ids, model.params, model.config, figures.mask_of(mask, count))
    assert keys.dtype == values.dtype == np.float32
    # Keys are of size 10, and both sides add the same numbers in another order, in float32 (eps 1.2e-7).
    np.testing.assert_allclose(keys, tap.keys, atol=1e-4, rtol=0)
    np.testing.assert_allclose(values, tap.values, atol=1e-4, rtol=0)


def test_the_pages_argument_is_the_packages():
    code = tagged_code(NOTEBOOK, "depends-on")
    for mask in figures.MASKS:
        for count in (1, 2, 9):
            square = figures.mask_of(mask, count)
            np.testing.assert_array_equal(code["depends_on"](square, 6), figures.depends_on(square, 6))


def test_the_pages_torch_pass_is_the_models(tokenizer):
    import torch

    draft = kv.load_model("austen-gpt2-draft")
    names = {
        "c": draft.config,
        "F": torch.nn.functional,
        "linear": lambda x, p, n: x @ p[f"{n}.weight"] + p[f"{n}.bias"],
    }
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    (source,) = ("".join(c["source"]) for c in cells if "torch-forward" in c["metadata"].get("tags", []))
    exec("def torch_norm" + source.split("def torch_norm")[1], names)
    ids = tokenizer.encode(TEXT)
    params = {name: torch.tensor(array) for name, array in draft.params.items()}
    mask = torch.tensor(figures.mask_of(figures.LEAKING, T))
    got = names["torch_logits"](params, torch.tensor([ids]), mask)[0].numpy()
    want = draft(ids, kv.Tap(draft.config, mask=mask.numpy()))
    # Logits of size 10, the same numbers added in another order.
    np.testing.assert_allclose(got, want, atol=1e-4, rtol=0)


# --- the argument ----------------------------------------------------------------------


def test_depends_on_by_hand():
    square = figures.mask_of(figures.LEAKING, 4)
    zero, one, two = figures.depends_on(square, 3).astype(int).tolist()
    assert zero == [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]
    assert one == [[1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1], [1, 1, 1, 1]]
    assert two == [[1, 1, 1, 0], [1, 1, 1, 1], [1, 1, 1, 1], [1, 1, 1, 1]]


@pytest.mark.parametrize("mask", [figures.CAUSAL, figures.BIDIRECTIONAL])
def test_claims_c06_c07_exactly_the_predicted_cells_change(model, ids, keys_and_values, tokenizer, mask):
    square = figures.mask_of(mask, T)
    predicted = figures.depends_on(square, model.config.num_layers)
    before = keys_and_values(ids, model.params, model.config, square)
    (token,) = tokenizer.encode(" door")
    for j in range(T):
        after = keys_and_values(replaced(ids, j, token), model.params, model.config, square)
        for b, a in zip(before, after, strict=True):
            changed = figures.lengths(b, a)
            np.testing.assert_array_equal(changed != 0, predicted[:, :, j])
            # Far above rounding (1e-5), so that no processor can round a change to zero.
            assert changed[predicted[:, :, j]].min() > 0.1


def test_claim_c05_appending_stays_below_what_the_page_prints(model, ids, keys_and_values):
    whole = keys_and_values(ids, model.params, model.config, figures.mask_of(figures.CAUSAL, T))
    bits = []
    for t in range(1, T):
        part = keys_and_values(ids[:t], model.params, model.config, figures.mask_of(figures.CAUSAL, t))
        differences = [np.abs(w[:, :, :t] - p).max() for p, w in zip(part, whole, strict=True)]
        assert max(differences) < 2e-5  # the page says below 1e-4
        bits.append(max(differences) == 0)
    assert not all(bits)
    assert 6.96 < np.abs(whole[0]).max() < 7.04  # printed as 7.0


def test_lengths_see_the_smallest_difference():
    before = np.ones((1, 1, 2, 3), dtype=np.float32)
    after = before.copy()
    after[0, 0, 1, 2] = np.nextafter(np.float32(1), np.float32(2))
    changed = figures.lengths(before, after)
    assert changed.shape == (1, 2) and changed[0, 0] == 0.0 and changed[0, 1] == 2.0**-23


# --- no printed line hangs on a rounding -----------------------------------------------


@pytest.mark.parametrize("j, text, mask", DRAWN)
def test_the_drawn_levels_keep_away_from_the_next_digit(
    model, ids, tokenizer, keys_and_values, j, text, mask
):
    (token,) = tokenizer.encode(text)
    square = figures.mask_of(mask, T)
    texts = ids, replaced(ids, j, token)
    page = [keys_and_values(t, model.params, model.config, square)[0] for t in texts]
    other = [passed(model, t, mask).keys for t in texts]  # the same, rounded in another order
    lengths, again = figures.lengths(*page), figures.lengths(*other)
    tenths = 10 * np.log10(lengths[lengths > 0])
    margin = np.abs(tenths % 1 - 0.5).min()
    noise = np.abs(tenths - 10 * np.log10(again[again > 0])).max()
    assert margin > 10 * noise


def test_the_printed_changes_keep_away_from_the_next_digit(model, ids, tokenizer, keys_and_values):
    (token,) = tokenizer.encode(" door")
    square = figures.mask_of(figures.CAUSAL, T)
    before, _ = keys_and_values(ids, model.params, model.config, square)
    after, _ = keys_and_values(replaced(ids, 5, token), model.params, model.config, square)
    at = 10 * figures.lengths(before, after)[:, 5]  # printed with one digit
    assert np.abs(at % 1 - 0.5).min() > 1e-3


def test_the_leaking_sentences_rest_on_changes_above_rounding(model, ids, tokenizer):
    panel = widgets.change_panel(model, tokenizer, ids, [" door", " day"])
    panel.set(j=5, replacement=" day", mask=figures.LEAKING)
    levels = [level for row in panel.data["levels"] for level in row if level is not None]
    assert min(levels) > -4  # a key's length is about 10, so rounding is at 10 to the power of −5
    assert panel.data["levels"][5][0] < -2.4 and panel.data["levels"][5][5] > 0.75
    panel.set(j=14)
    assert panel.data["levels"][5][8] is None and -4.3 < panel.data["levels"][5][9] < -3.3


def test_the_leak_reaches_six_rows_of_logits_back(model, ids, tokenizer):
    (token,) = tokenizer.encode(" door")
    mask = figures.mask_of(figures.LEAKING, T)
    before, after = (model(text, kv.Tap(model.config, mask=mask)) for text in (ids, replaced(ids, 7, token)))
    change = np.abs(after - before).max(axis=1)
    # 6e-5, far above one rounding of a logit of size 10 (1e-6): no processor rounds it to zero.
    assert change[0] == 0 and change[1] > 2e-5


# --- the panel ---------------------------------------------------------------------------

REPLACEMENTS = [" door", " day", " world", " love", " Emma", " not", ",", "?"]


@pytest.fixture(scope="module")
def panel(model, tokenizer, ids):
    return widgets.change_panel(model, tokenizer, ids, REPLACEMENTS)


def test_the_sentence_of_each_mask(panel):
    said = panel.set(j=4, replacement=" day", mask=figures.CAUSAL, which=figures.KEYS)
    assert (
        said
        == "Changing token 4 changes keys at positions 4–16 in layers 1–5, and only position 4 in layer 0."
    )
    said = panel.set(mask=figures.BIDIRECTIONAL, which=figures.VALUES)
    assert (
        said
        == "Changing token 4 changes values at positions 0–16 in layers 1–5, and only position 4 in layer 0."
    )
    said = panel.set(mask=figures.LEAKING, which=figures.KEYS)
    for part in ("positions 3–16 in layer 1", "positions 2–16 in layer 2", "at positions 0–16 in layers 4–5"):
        assert part in said
    said = panel.set(j=16, mask=figures.CAUSAL)
    assert said == "Changing token 16 changes keys only at position 16 in layers 0–5."


def test_the_same_token_changes_nothing(panel):
    assert "no keys change in any layer" in panel.set(
        j=13, replacement=" not", mask=figures.BIDIRECTIONAL, which=figures.KEYS
    )


def test_every_control_at_its_ends_and_quickly(panel):
    times = []
    for mask in figures.MASKS:
        for which in (figures.KEYS, figures.VALUES):
            for j in (0, T - 1):
                for replacement in (REPLACEMENTS[0], REPLACEMENTS[-2]):
                    start = time.process_time()
                    said = panel.set(j=j, replacement=replacement, mask=mask, which=which)
                    times.append(time.process_time() - start)  # of this process alone: others may be busy
                    assert said.startswith((f"Changing token {j} changes {which}", f"Token {j} is the same"))
    # The course's limit for a repaint. NumPy's threads count as well, so the fastest is taken.
    assert min(times) < 0.1


def test_the_panels_heat_map_is_the_change_of_the_passes(panel, model, ids, tokenizer):
    panel.set(j=3, replacement=" love", mask=figures.LEAKING, which=figures.VALUES)
    (token,) = tokenizer.encode(" love")
    before, after = (
        passed(model, ids, figures.LEAKING),
        passed(model, replaced(ids, 3, token), figures.LEAKING),
    )
    lengths = figures.lengths(before.values, after.values)
    for row, levels in zip(lengths, panel.data["levels"], strict=True):
        assert [None if x == 0 else round(math.log10(x), 1) for x in row] == levels
    assert panel.data["pieces"][3] == " love"


def test_a_replacement_of_two_tokens_is_refused(model, tokenizer, ids):
    with pytest.raises(ValueError, match="' ball' is 2 tokens: give texts of one token"):
        widgets.change_panel(model, tokenizer, ids, [" ball"])


# --- pictures ----------------------------------------------------------------------------

DATA = {
    "levels": [[None, 0.5, None], [-9.0, -2.0, 9.0]],
    "pieces": [" a", "\n", " "],
    "j": 1,
    "which": "keys",
}


def test_zero_is_bare_and_the_smallest_change_is_not():
    (cells,) = figures.change_figure(DATA).data
    assert cells.z[0][0] is None and cells.z[0][2] is None
    assert cells.z[1][0] > 0 and cells.z[1][0] < cells.z[1][1] < cells.z[0][1] < cells.z[1][2]
    assert "exactly as before" in cells.text[0][0] and "layer 1, position 1: key changed" in cells.text[1][1]
    assert cells.colorbar.ticktext[0] == "0.00001" and cells.colorbar.ticktext[-1] == "100"
    assert len(cells.colorbar.ticktext) == len(cells.colorbar.tickvals) == 8


def test_tokens_without_letters_get_a_sign():
    assert figures.change_figure(DATA).layout.xaxis.ticktext == ("0<br>a", "1<br><br>⏎", "2<br>␣")


@given(st.lists(st.lists(st.sampled_from([None, 0.5]), min_size=4, max_size=4), min_size=1, max_size=5))
def test_the_sentence_names_first_and_last_of_every_layer(levels):
    data = {"levels": levels, "pieces": list("abcd"), "j": 1, "which": "keys"}
    said = figures.change_text(data)
    for row in levels:
        found = [i for i, level in enumerate(row) if level is not None]
        if len(found) > 1:
            assert f"positions {found[0]}–{found[-1]}" in said
            assert (f"({len(found)} of them)" in said) or len(found) == found[-1] - found[0] + 1
        elif found:
            assert f"position {found[0]}" in said
    if not any(level is not None for row in levels for level in row):
        assert "no keys change in any layer" in said


def test_reads_of_a_text_of_three():
    reads = {"Q": [1, 1, 1], "K": [3, 2, 1], "V": [3, 2, 1]}
    assert figures.reads_text(reads) == (
        "Every query is read once; each key, and each value as often, 1 to 3 times, "
        "the earlier the more often."
    )
    drawn = figures.reads_figure(reads, prompt=2)
    assert [list(bar.y) for bar in drawn.data] == [reads["Q"], reads["K"], reads["V"]]
    assert len({bar.marker.color for bar in drawn.data}) == 3
    assert [bar.text[0] for bar in drawn.data] == ["Q", "K", "V"]  # the color is not the only sign


# --- the exercise ------------------------------------------------------------------------

NAME = "02.first_changed_position"


def test_the_solution_passes_and_a_stub_is_not_done():
    path = paths.chapters_dir() / "solutions" / "02_why_keys_and_values_never_change.py"
    spec = importlib.util.spec_from_file_location("solution_02", path)
    solution = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(solution)
    assert checks.verdict(NAME, solution.first_changed_position).status == checks.RIGHT
    assert checks.verdict(NAME, lambda layer, j, causal: ...).status == checks.NOT_DONE


MISTAKES = [
    (lambda layer, j, causal: j, "saw token 4 in layer 0 already"),
    (lambda layer, j, causal: j if causal else 0, "before layer 0 no position has looked at another one"),
    (lambda layer, j, causal: 0 if layer else j, "so it cannot notice token 4"),
    (lambda layer, j, causal: j + 1, "position 4 itself changes as well"),
    (lambda layer, j, causal: max(0, j - layer), "leaks one position per layer"),
    (lambda layer, j, causal: 0, "made from its own token and position"),
    (lambda layer, j, causal: j if causal or not layer else j + 1, "expected 0, got 5. Ask which tokens"),
    (lambda layer, j, causal: True, "expected the position 4"),
    (
        lambda layer, j, causal: j if causal or not layer else layer + 1,
        "Ask which tokens position 0 has seen",
    ),
]


@pytest.mark.parametrize("wrong, words", MISTAKES, ids=[words for _, words in MISTAKES])
def test_the_check_names_the_mistake(wrong, words):
    verdict = checks.verdict(NAME, wrong)
    assert verdict.status == checks.WRONG and words in verdict.message, verdict.message
