"""The published batch sweep that chapters 10 and 11 check, with its hardware and source.

From "The KV cache and the systems around it" (a blog post; our copy gives no author, date or link).
"""

SOURCE = (
    "“The KV cache and the systems around it”: GPT-2 124M in PyTorch, float16, laptop RTX 3060 with 6 GB, "
    "512 tokens a sequence"
)
DEVICE = "rtx-3060-laptop"  # in the device table
CONTEXT = 512  # tokens in each sequence before the step
BATCHES = [1, 8, 32, 64, 128, 256]
STEP_MS = [3.2, 3.4, 6.7, 12.0, 23.7, 45.4]
TOKENS_S = [315, 2400, 4800, 5300, 5400, 5600]
KV_MIB = [18, 144, 577, 1154, 2308, 4617]  # the column "KV cache size"
