"""Solutions of chapter 09."""


def doubling_context(config, weight_bytes, context, bytes_per_number=2):
    """Both are the weights' bytes divided by what one more of a kind brings, rounded up in whole numbers."""
    row = 2 * config.num_layers * config.num_kv_heads * config.head_dim * bytes_per_number
    return -(-weight_bytes // row), -(-weight_bytes // (context * row))


# Break it: give every timed prompt a first token of its own, and print what was computed.
#
#     def measured(server, prompts):
#         once = {"repeats": 1, "warmup": 0}
#         timings = [kv.measure.time_call(lambda p=p: server.first_token(p), **once) for p in prompts]
#         return min(timing.min for timing in timings), server.computed
#
# with `prompts = [[call, *passage[1:1000]] for call in range(6)]`: `server.computed` is then six times 1,000.
