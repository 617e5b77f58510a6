"""The figures of a model card are those of the training.json beside it.

After a training run, `python tests/unit/test_model_cards.py` writes them into the cards again.
"""

import json

import pytest

import kvcourse as kv
from kvcourse import paths

MODELS = ("austen-gpt2", "austen-gpt2-draft")
START, END = "<!-- from training.json: python tests/unit/test_model_cards.py -->\n", "<!-- end -->"
POINTS = 8  # rows of the learning curve that a card shows


def folder(name):
    return paths.data_dir() / "models" / name


def record(name):
    return json.loads((folder(name) / "training.json").read_text(encoding="utf-8"))


def curve_shown(curve):
    """At most POINTS + 1 points of the curve: evenly spaced, the last one always."""
    stride = -(-len(curve) // POINTS)
    return [point for number, point in enumerate(curve, 1) if number % stride == 0 or number == len(curve)]


def figures(run):
    """The part of a card between START and END: one table of the run and one of its learning curve."""
    rows = [
        ("parameters", f"{run['parameters']:,}"),
        ("steps", f"{run['steps']:,}"),
        ("seconds", f"{run['seconds']:,}"),
        ("machine", run["machine"]),
        ("held-out bits per character", f"{run['held_out_bits_per_character']:.4f}"),
    ]
    lines = ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows), ""]
    lines += [
        "| step | seconds | training loss (nats per token) | held-out bits per character |",
        "|---|---|---|---|",
    ]
    for point in curve_shown(run["learning_curve"]):
        lines.append(
            f"| {point['step']:,} | {point['seconds']:,.0f} | {point['train_loss']:.2f} "
            f"| {point['bits_per_character']:.3f} |"
        )
    return "\n".join(lines) + "\n"


def split(name):
    """The card's text before, between and after the two marks."""
    card = (folder(name) / "README.md").read_text(encoding="utf-8")
    before, _, rest = card.partition(START)
    between, _, after = rest.partition(END)
    return before, between, after


@pytest.mark.parametrize("name", MODELS)
def test_card_figures_are_those_of_the_run(name):
    assert split(name)[1] == figures(record(name))


@pytest.mark.parametrize("name", MODELS)
def test_the_record_fits_the_weights(name):
    params = kv.load_model(name).params
    # The output matrix is the token embedding, and counts once.
    assert record(name)["parameters"] == sum(array.size for array in params.values())


@pytest.mark.parametrize("name", MODELS)
def test_card_names_the_shape(name):
    card, config = (folder(name) / "README.md").read_text(encoding="utf-8"), kv.load_model(name).config
    for part in (
        f"{config.num_layers} layers",
        f"{config.num_heads} heads of {config.head_dim}",
        f"width {config.hidden_size:,}",
        f"inner width {config.intermediate_size:,}",
        f"{config.max_seq_len:,} positions",
        f"vocabulary of {config.vocab_size:,}",
    ):
        assert part in card


def test_the_text_table_fits_the_held_out_file():
    card = (folder("austen-gpt2") / "README.md").read_text(encoding="utf-8")
    text = (paths.data_dir() / "texts" / "austen-held-out.txt").read_text(encoding="utf-8")
    assert f"{len(text):,} characters with the line breaks" in card
    # 15 chapters joined by 14 line breaks; each begins with <|endoftext|>, which the file leaves out.
    assert f"| held out | 15 | {len(text) - 14:,} |" in card


def refresh():
    """Write the figures of each training.json into its card."""
    for name in MODELS:
        before, _, after = split(name)
        (folder(name) / "README.md").write_text(
            before + START + figures(record(name)) + END + after, encoding="utf-8"
        )


if __name__ == "__main__":
    refresh()
