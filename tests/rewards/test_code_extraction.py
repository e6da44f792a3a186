"""The program in a text: the last fenced block of Python."""

from __future__ import annotations

import pytest

from areal_x.rewards.code.extraction import extract_program

CASES = {
    "no fence": ("print(1)", "print(1)"),
    "one block": ("Text\n```python\nprint(1)\n```\nText", "print(1)\n"),
    "the last of two": ("```python\n1\n```\n```python\n2\n```", "2\n"),
    "an example of output behind it": ("```python\n1\n```\nOutput:\n```\n3\n```", "1\n"),
    "no language": ("```\n1\n```\n```\n2\n```", "2\n"),
    "other names of the language": ("```py\n1\n```\n~~~Python3\n2\n~~~", "2\n"),
    "another language behind it": ("```\n1\n```\n```bash\nls\n```", "1\n"),
    "only another language": ("```cpp\nint x;\n```", ""),
    "cut off": ("```python\n1\n```\n```python\nx = 2\ny =", "x = 2\ny =\n"),
    "Windows line ends": ("```python\r\nif 1:\r\n    print(1)\r\n```\r\n", "if 1:\n    print(1)\n"),
    "indented": ("1. So:\n   ```python\n   if 1:\n       print(1)\n   ```", "if 1:\n    print(1)\n"),
    "a fence in a text of the program": ('````python\ns = """\n```\n"""\n````', 's = """\n```\n"""\n'),
    "thinking": ("<think>```python\n1\n```</think>Done.\n```python\n2\n```", "2\n"),
    "only in thinking": ("<think>\n```python\n1\n```\n</think>I am done.", "I am done."),
    "thinking that was cut off": ("<think>```python\n1\n```", ""),
    "words behind the language": ("```python title=x.py\n1\n```", "1\n"),
    "inline code is no fence": ("```x``` and\n```python\n1\n```", "1\n"),
    "empty": ("```python\n```", ""),
    "unicode": ("```python\ns = 'ß→𝄞'\n```", "s = 'ß→𝄞'\n"),
}


@pytest.mark.parametrize("case", CASES)
def test_the_last_block_of_python_is_the_program(case: str) -> None:
    text, program = CASES[case]
    assert extract_program(text) == program


def test_a_long_text_takes_linear_time() -> None:
    assert extract_program("```\n" * 20_001).strip("\n") == ""
    assert extract_program("`" * 100_000 + "\n").strip() == ""
    assert extract_program("```" + "a" * 100_000 + "`\n").startswith("```aa")
