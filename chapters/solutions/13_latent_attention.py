"""Solutions of chapter 13."""


def absorb_output(up_values, out):
    """One product over v for each head: (heads, rank, v) @ (heads, v, d)."""
    heads, v, _ = up_values.shape
    return up_values.swapaxes(1, 2) @ out.reshape(heads, v, -1)  # (heads, rank, d)


# Break it: the scale is that of the keys which the latent stands for, whatever the row's width:
#
#     cache = Latents(rank, scale=c.head_dim**-0.5)
