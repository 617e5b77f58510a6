"""Typical wrong answers of chapter 09."""

import math


def _both(weight_bytes, context, row, round_=math.ceil):
    return round_(weight_bytes / row), round_(weight_bytes / (context * row))


def _row(config, bytes_per_number):
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * bytes_per_number


def _in_numbers(config, weight_bytes, context, bytes_per_number=2):
    return _both(weight_bytes, context, _row(config, 1))


def _always_two_bytes(config, weight_bytes, context, bytes_per_number=2):
    return _both(weight_bytes, context, _row(config, 2))


def _always_four_bytes(config, weight_bytes, context, bytes_per_number=2):
    return _both(weight_bytes, context, _row(config, 4))


def _query_heads(config, weight_bytes, context, bytes_per_number=2):
    row = 2 * config.num_layers * config.num_heads * config.head_dim * bytes_per_number
    return _both(weight_bytes, context, row)


def _one_layer(config, weight_bytes, context, bytes_per_number=2):
    return _both(weight_bytes, context, _row(config, bytes_per_number) // config.num_layers)


def _one_head(config, weight_bytes, context, bytes_per_number=2):
    return _both(weight_bytes, context, _row(config, bytes_per_number) // config.num_kv_heads)


def _keys_alone(config, weight_bytes, context, bytes_per_number=2):
    return _both(weight_bytes, context, _row(config, bytes_per_number) // 2)


def _read_and_written(config, weight_bytes, context, bytes_per_number=2):
    return _both(weight_bytes, context, 2 * _row(config, bytes_per_number))


def _divided_head_dim(config, weight_bytes, context, bytes_per_number=2):
    head_dim = config.hidden_size // config.num_heads
    row = 2 * config.num_layers * config.num_kv_heads * head_dim * bytes_per_number
    return _both(weight_bytes, context, row)


def _of_seven_milliseconds(config, weight_bytes, context, bytes_per_number=2):
    return _both(7e-3 * 3.35e12, context, _row(config, bytes_per_number))


def _rounds_down(config, weight_bytes, context, bytes_per_number=2):
    return _both(weight_bytes, context, _row(config, bytes_per_number), math.floor)


def _rounds_on_the_way(config, weight_bytes, context, bytes_per_number=2):
    row = _row(config, bytes_per_number)
    return math.ceil(weight_bytes / row), math.ceil((weight_bytes // row) / context)


def _adds_one(config, weight_bytes, context, bytes_per_number=2):
    return _both(weight_bytes, context, _row(config, bytes_per_number), lambda value: math.floor(value) + 1)


def _does_not_round(config, weight_bytes, context, bytes_per_number=2):
    return _both(weight_bytes, context, _row(config, bytes_per_number), float)


def _other_way_round(config, weight_bytes, context, bytes_per_number=2):
    return _both(weight_bytes, context, _row(config, bytes_per_number))[::-1]


def _batch_of_one_token(config, weight_bytes, context, bytes_per_number=2):
    tokens, _ = _both(weight_bytes, context, _row(config, bytes_per_number))
    return tokens, tokens


def _tokens_alone(config, weight_bytes, context, bytes_per_number=2):
    return _both(weight_bytes, context, _row(config, bytes_per_number))[0]


WRONG = {
    "09.doubling_context": [
        (_in_numbers, "the bytes per number are missing"),
        (_always_two_bytes, "2 bytes per number, whatever"),
        (_always_four_bytes, "4 bytes per number, whatever"),
        (_query_heads, "you count the query heads"),
        (_one_layer, "the number of layers is missing"),
        (_one_head, "their number is missing"),
        (_keys_alone, "the factor 2 is missing"),
        (_read_and_written, "you count a row twice"),
        (_divided_head_dim, "take config.head_dim"),
        (_of_seven_milliseconds, "where the 7 ms of the book's step double"),
        (_rounds_down, "still a little smaller than the weights: round up"),
        (_rounds_on_the_way, "the requests are rounded down on the way"),
        (_adds_one, "do not add one where the division comes out even"),
        (_does_not_round, "half a token cannot be cached"),
        (_other_way_round, "tokens first, then requests"),
        (_batch_of_one_token, "the tokens are right"),
        (_tokens_alone, "return two numbers"),
    ],
}
