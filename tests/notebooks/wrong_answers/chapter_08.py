"""Typical wrong answers of chapter 08."""


def _tokens(factor=2, layers=True, heads="num_kv_heads", dim=None, size=None, scale=1):
    """The product with its parts exchanged."""

    def answer(config, bytes_per_number):
        width = config.head_dim if dim is None else dim(config)
        kept = getattr(config, heads) if heads else 1
        depth = config.num_layers if layers else 1
        return factor * depth * kept * width * (bytes_per_number if size is None else size) * scale

    return answer


def _divided(config):
    return config.hidden_size // config.num_heads


def _audits(**changes):
    right = {
        "A": (39.0625, "1K is 1,024"),
        "B": (4.509, "1,000 MiB to the GiB"),
        "C": (0.1567, "as it stands"),
    }
    return lambda: {claim: changes.get(claim, answer) for claim, answer in right.items()}


WRONG = {
    "08.kv_bytes_per_token": [
        (_tokens(heads="num_heads"), "32 are the query heads: take num_kv_heads"),
        (_tokens(factor=1), "the factor 2 is missing"),
        (_tokens(factor=3), "queries are not kept"),
        (_tokens(dim=_divided), "hidden_size / num_heads is 80, the heads have 128 numbers"),
        (_tokens(heads=None, dim=lambda config: config.hidden_size), "2 · layers · hidden_size holds only"),
        (_tokens(layers=False), "num_layers is missing"),
        (_tokens(heads=None), "num_kv_heads is missing"),
        (_tokens(size=2), "2 bytes are written into it"),
        (_tokens(size=1), "these are numbers, not bytes"),
        (_tokens(scale=1 / 1024), "give bytes, not KiB"),
        (
            lambda config, size: 2 * config.num_layers * config.num_kv_heads * config.head_dim * int(size),
            "do not round it",
        ),
        (_tokens(heads="num_heads", factor=1), "the factor 2 is missing: a key and a value; "),
        (lambda config, size: "many", "return a number of bytes"),
        (lambda config, size: 12345, "expected 73,728 bytes"),
    ],
    "08.audits": [
        (_audits(A=(40.0, "1K is 1,024")), "A: 40.0 is the figure with “1K is 1,024”"),
        (
            _audits(A=(41.943, "1K is 1,024")),
            "A: 41.943 is the figure with “GB and GiB exchanged”",
        ),
        (_audits(A=(39.06, "as it stands")), "A: “as it stands” gives 39.1 GiB, the source prints 40"),
        (_audits(B=(4.84, "1,000 MiB to the GiB")), "B: 4.84 is the figure with “GB and GiB"),
        (_audits(B=(4617, "1,000 MiB to the GiB")), "B: 4,617 is in MiB or MB"),
        (_audits(B=(4.51, "1K is 1,024")), "B: there is no K in this claim"),
        (_audits(B=(4.51, "query heads counted")), "“query heads counted” gives 4.51 GiB"),
        (
            _audits(C=(0.146, "as it stands")),
            "C: 0.146 is the figure with “GB and GiB exchanged”",
        ),
        (_audits(C=(0.157, "GB and GiB exchanged")), "C: “GB and GiB exchanged” gives 0.146 GB"),
        (_audits(C=(0.1475, "as it stands")), "C: 0.1475 counts 1 byte a number"),
        (_audits(C=(0.157, "right")), "the reading 'right' (str) is none of"),
        (_audits(A=39.06), "A: give a pair"),
        (lambda: {"A": (39.06, "1K is 1,024")}, "return a dict with the keys A, B and C"),
        (_audits(A=(39, "1K is 1,024")), "A: 39 has too few digits: give one more than the source"),
        (_audits(B=(4.5, "1,000 MiB to the GiB")), "B: 4.5 has too few digits"),
        (_audits(C=(0.16, "as it stands")), "C: 0.16 has too few digits"),
        (_audits(A=(8.0, "1K is 1,024")), "A: expected another figure than 8.0 GiB"),
    ],
}
