"""Solutions of chapter 08."""

import kvcourse as kv


def kv_bytes_per_token(config, bytes_per_number):
    """Key and value, in every layer, for every KV head, head_dim numbers each."""
    rows = 2 * config.num_layers * config.num_kv_heads
    return rows * config.head_dim * bytes_per_number


def audits():
    """Each figure as the words have it, and the reading that gives the printed one."""
    models = kv.catalogue()
    a = kv.sizing.kv_bytes(models["llama-3.1-70b"], 128_000)
    b = 256 * kv.sizing.kv_bytes(models["gpt2"], 513)
    c = kv.sizing.kv_bytes(models["qwen2.5-3b"], 8000, "q8_0")
    return {
        "A": (round(a / 1024**3, 2), "1K is 1,024"),
        "B": (round(b / 1024**3, 3), "1,000 MiB to the GiB"),
        "C": (round(c / 1000**3, 4), "as it stands"),
    }


# Break it: ask for the heads that are kept and for their own width, not for the width of the model:
#
#     def by_width(config):
#         return 2 * config.num_layers * config.num_kv_heads * config.head_dim * 4
