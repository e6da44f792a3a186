"""The documentation's site: what `make docs` builds with a broken link as an error, checked here without building it."""

from __future__ import annotations

import re
import runpy
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
SITE = runpy.run_path(str(ROOT / "docs" / "build_site.py"))
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")


def pages_of(nav: list[dict[str, Any]] | list[str] | str) -> Iterator[str]:
    for entry in nav if isinstance(nav, list) else [nav]:
        if isinstance(entry, str):
            yield entry
        else:
            for inner in entry.values():
                yield from pages_of(inner)


NAVIGATION = list(pages_of(tomllib.loads((ROOT / "zensical.toml").read_text())["project"]["nav"]))


def test_the_navigation_lists_every_guide_and_reference_page_once() -> None:
    guides = [SITE["page_of"](guide) for guide in SITE["GUIDES"]]
    references = [f"api/{package}.md" for package in SITE["PACKAGES"]]
    notebooks = [SITE["page_of"](f"colab/{file.name}") for file in (ROOT / "colab").glob("*.ipynb")]
    assert sorted(NAVIGATION) == sorted([*guides, *references, *notebooks])


@pytest.mark.parametrize("guide", [*SITE["GUIDES"], "CONTRIBUTING.md", "AGENTS.md"])
def test_what_a_guide_links_to_is_in_the_repository(guide: str) -> None:
    targets = [target for target in LINK.findall((ROOT / guide).read_text()) if "://" not in target]
    assert [target for target in targets if not (ROOT / guide).parent.joinpath(target).exists()] == []


@pytest.mark.parametrize("package", SITE["PACKAGES"])
def test_the_reference_names_every_public_name(package: str) -> None:
    page = SITE["reference"](package)
    directives = re.findall(r"^::: (\S+)$", page, re.MULTILINE)
    assert len(directives) == len(set(directives)) > 0
    assert all(directive.startswith("areal_x.") for directive in directives)


def test_links_out_of_the_guides_lead_to_pages_of_their_own() -> None:
    page_of = SITE["page_of"]
    assert page_of("README.md") == "index.md"
    assert page_of("docs/agents.md") == "docs/agents.md"
    assert page_of("examples/arithmetic") == "examples/arithmetic/index.md"
    assert page_of("examples/arithmetic/grpo.gin") == "examples/arithmetic/grpo.md"
    assert "````python\n# " in SITE["text_of"](ROOT / "examples/arithmetic/grpo.gin", "a recipe")
