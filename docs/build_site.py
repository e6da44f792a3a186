"""Builds the documentation's site: `make docs`, or

    python docs/build_site.py          # into site/, with a broken link as an error

The guides link to files outside this folder: examples, sources, the notebook, the benchmarks. So each
of those that is linked becomes a page as well, and the links are rewritten to these pages. The public
names become reference pages, which mkdocstrings fills from the docstrings.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = ROOT / "build" / "pages"
GUIDES = ("README.md", "benchmarks/README.md", *(f"docs/{f.name}" for f in (ROOT / "docs").glob("*.md")))
PACKAGES = ("areal_x", "areal_x.agents", "areal_x.sandbox", "areal_x.simulation")
IMAGES = (".png", ".svg")
LINK = re.compile(r"(\]\()([^)#\s]+)(#[^)]*)?(\))")
LANGUAGES = {".py": "python", ".gin": "python", ".mjs": "javascript", ".json": "json", ".toml": "toml", ".txt": "text"}


def main() -> int:
    write_pages()
    command = [sys.executable, "-m", "zensical", "build", "--clean", "--strict"]
    return subprocess.run(command, cwd=ROOT, check=False).returncode


def write_pages() -> None:
    shutil.rmtree(PAGES, ignore_errors=True)
    for guide in GUIDES:
        write(guide, (ROOT / guide).read_text(encoding="utf-8"))
    for image in (f for f in (ROOT / "docs").iterdir() if f.suffix in IMAGES):
        shutil.copyfile(image, PAGES / "docs" / image.name)
    for package in PACKAGES:
        (PAGES / "api").mkdir(exist_ok=True)
        (PAGES / "api" / f"{package}.md").write_text(reference(package), encoding="utf-8")


def write(path: str, text: str) -> None:
    """Writes the page of a file of the repository, and those of the files that it links to."""
    page = PAGES / page_of(path)
    page.parent.mkdir(parents=True, exist_ok=True)
    linked: list[str] = []

    def rewritten(link: re.Match[str]) -> str:
        target = link[2]
        found = os.path.normpath(Path(path).parent / target)
        if "://" in target or not (ROOT / found).exists():
            return link[0]  # another site's; or broken, which the build reports
        if found.endswith(IMAGES):
            return link[0]
        linked.append(found)
        return f"{link[1]}{os.path.relpath(page_of(found), Path(page_of(path)).parent)}{link[3] or ''}{link[4]}"

    page.write_text(LINK.sub(rewritten, text), encoding="utf-8")
    for other in linked:
        if not (PAGES / page_of(other)).exists() and other not in GUIDES:
            write(other, text_of(ROOT / other, other))


def page_of(path: str) -> str:
    """The page of a file or folder of the repository."""
    if path == "README.md":
        return "index.md"
    if path.endswith(".md"):
        return path
    return f"{path}/index.md" if (ROOT / path).is_dir() else str(Path(path).with_suffix(".md"))


def text_of(file: Path, title: str) -> str:
    """A page that shows a source file, a notebook, or all files of a folder."""
    if file.suffix == ".md":
        return file.read_text(encoding="utf-8")
    if file.suffix == ".ipynb":
        cells = json.loads(file.read_text(encoding="utf-8"))["cells"]
        sources = [(cell["cell_type"], "".join(cell["source"])) for cell in cells]
        return "\n\n".join(source if kind == "markdown" else code(source, "python") for kind, source in sources)
    if file.is_dir():
        files = sorted(f for f in file.iterdir() if f.suffix in LANGUAGES and f.name != "__init__.py")
        return f"# {title}\n\n" + "\n\n".join(f"## {f.name}\n\n{shown(f)}" for f in files)
    return f"# {title}\n\n{shown(file)}"


def shown(file: Path) -> str:
    return code(file.read_text(encoding="utf-8"), LANGUAGES[file.suffix])


def code(text: str, language: str) -> str:
    return f"````{language}\n{text.rstrip()}\n````"


def reference(package: str) -> str:
    """The reference page of a package's public names, by the module that defines them."""
    offering = import_module(package)
    table = getattr(offering, "_NAMES", None) or {package: " ".join(offering.__all__)}
    parts = [f"# {package}", (offering.__doc__ or "").strip()]
    for module, names in table.items():
        parts += [f"## {module}", *(f"::: {module}.{name}" for name in names.split())]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    sys.exit(main())
