"""The final answer in a text that may say more: what stands between <answer> and </answer>."""

from __future__ import annotations

OPENED, CLOSED = "<answer>", "</answer>"


def tagged_answer(text: str) -> str:
    """Returns the text of the last <answer>…</answer>, or the whole text without one.

    In one pass: the regular expression `<answer>(.*?)</answer>` would scan the rest of the text again
    for each unclosed tag.
    """
    found, at = text, 0
    while (start := text.find(OPENED, at)) >= 0 and (end := text.find(CLOSED, start)) >= 0:
        begins = text.rfind(OPENED, start, end)  # a tag before it was not closed
        found, at = text[begins + len(OPENED) : end], end
    return found
