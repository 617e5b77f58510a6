"""SmolLM2's chat template, written out: a conversation as the one text that the model continues.

Source: `tokenizer.chat_template` of the model's GGUF (ChatML). The template puts its own system line
in only when the conversation does not begin with one.
"""

SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
START, END = "<|im_start|>", "<|im_end|>"  # around every turn; END is where an answer stops


def prompt(messages):
    """[{"role": "user", "content": "…"}, …], or one question as str → the text that asks for an answer.

    Roles are "system" (first only), "user" and "assistant". Raises ValueError for no message at all,
    for another role and for a system message that is not the first.
    """
    turns = [f"{START}{m['role']}\n{m['content']}{END}\n" for m in _whole(messages)]
    return "".join(turns) + f"{START}assistant\n"


def encode(tokenizer, messages):
    """Token ids of `prompt(messages)`.

    Only the template's own marks become special tokens. One that somebody typed into a message is
    read as plain text, so that no message can end its turn and forge the next one. Raises ValueError
    as `prompt` does, and for the tokenizer of a model without these marks.
    """
    start, end = (_mark(tokenizer, mark) for mark in (START, END))
    line = tokenizer.encode_ordinary("\n")
    ids = []
    for m in _whole(messages):
        ids += [start, *tokenizer.encode_ordinary(f"{m['role']}\n{m['content']}"), end, *line]
    return [*ids, start, *tokenizer.encode_ordinary("assistant\n")]


def stop_token(tokenizer):
    """The id that ends an answer: give it to kv.generate as `stop`."""
    return _mark(tokenizer, END)


def _mark(tokenizer, mark):
    try:
        return tokenizer.encode_single_token(mark)
    except KeyError:
        raise ValueError(
            f"{tokenizer.name} has no token {mark}: only a chat model, such as smollm2-135m, takes messages"
        ) from None


def _whole(messages):
    """The messages, checked, with a system line in front."""
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    messages = list(messages)
    if not messages:
        raise ValueError("no messages: give at least one, such as the question as a text")
    for place, message in enumerate(messages):
        allowed = ("user", "assistant") if place else ("system", "user", "assistant")
        parts = message if isinstance(message, dict) else {}
        if parts.get("role") not in allowed or not isinstance(parts.get("content"), str):
            raise ValueError(
                f"message {place} is {message!r:.60}: it needs a role ({', '.join(allowed)}) and a content"
            )
    system = [] if messages[0]["role"] == "system" else [{"role": "system", "content": SYSTEM}]
    return [*system, *messages]
