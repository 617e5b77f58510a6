"""Solutions of chapter 15."""


def held_slots(seq_len, num_sinks, window, slack):
    """Sinks in the slots of their own numbers; the others go round in window + slack slots after them."""
    sinks = {position: position for position in range(min(num_sinks, seq_len))}
    newest = range(max(seq_len - window, num_sinks), seq_len)
    return sinks | {p: num_sinks + (p - num_sinks) % (window + slack) for p in newest}


# Break it: the rule must spare the first tokens. With the four that are safe for most models,
#
#     def may_be_freed(position, newest, window, num_sinks=4):
#         return num_sinks <= position <= newest - window
