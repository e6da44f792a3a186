"""YAML as a person would write it."""

from __future__ import annotations

from typing import Any

import yaml


class Dumper(yaml.SafeDumper):  # type: ignore[misc]
    """Writes text of several lines as a block, and equal parts again."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_text(self, text: str) -> yaml.ScalarNode:
        style = "|" if "\n" in text else None
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=style)


Dumper.add_representer(str, Dumper.represent_text)


def to_yaml(value: Any) -> str:
    return str(yaml.dump(value, Dumper=Dumper, sort_keys=False, width=1000))
