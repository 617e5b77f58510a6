"""Solutions of chapter 01."""


def positions_processed(prompt, new, cached):
    """Without a cache step i passes prompt + i positions; with one, each token that is read passes once."""
    if new == 0:
        return 0
    if cached:
        return prompt + new - 1  # the last new token is chosen and never read
    return prompt * new + new * (new - 1) // 2
