"""Copies an example out of the package, with the examples that it builds on.

    python -m areal_x.example                        # lists them
    python -m areal_x.example arithmetic             # writes ./examples/arithmetic and ./examples/tiny
    python -m areal_x.example arithmetic my-folder

Commands are then run in that folder, as gin files import `examples.arithmetic.task` from there.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from areal_x.errors import UserError, nearest
from areal_x.runtime.command import command_of, in_this_form

# The forms in which a Python or gin file names another example.
USES = re.compile(
    r"^\s*(?:from|import) examples\.(\w+)|^include ['\"]examples/(\w+)/", re.MULTILINE
)
SUFFIXES = (".py", ".gin", ".mjs", ".json", ".txt", ".yaml")
LEFT_OUT = ("package-lock.json",)
IN_PYTHON = "task"  # the module of an example that is run without a gin file
# setup.py puts the folder into built packages under this name; a checkout has it beside the package.
PACKAGED = Path(__file__).parent / "_examples"
CHECKOUT = Path(__file__).parents[1] / "examples"


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0, or 1 after one sentence about a mistake."""
    parser = argparse.ArgumentParser(
        prog=command_of("example"),
        description=in_this_form(str(__doc__), "example"),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", metavar="NAME", nargs="?", help="without it, the list of examples")
    parser.add_argument(
        "folder", metavar="FOLDER", nargs="?", type=Path, default=Path(), help="default: this one"
    )
    options = parser.parse_args(arguments)
    try:
        if options.name is None:
            print(listing())
        else:
            print(copy_example(options.name, options.folder))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def listing() -> str:
    """Returns a line per example: its name and its description."""
    return "\n".join(f"{name:18} {summary(source() / name)}" for name in names())


def copy_example(name: str, folder: Path) -> str:
    """Copies an example and the ones it uses to `folder`/examples; returns what to run next.

    A file that is there already with the same content is left alone. Nothing is written if there is
    no such example or if a file there differs.

    Raises: UserError saying which.
    """
    root, known = source(), names()
    if name not in known:
        raise UserError(
            f"there is no example {name!r}{nearest(name, known) or ': choose ' + ', '.join(known)}"
        )
    contents = {
        folder / "examples" / file.relative_to(root): file.read_bytes()
        for file in [root / "__init__.py", *(f for n in needed(name) for f in files(root / n))]
    }
    for target, content in contents.items():
        if target.exists() and target.read_bytes() != content:
            raise UserError(
                f"{target} exists and differs from the example, and is not overwritten: choose"
                f" another folder, as {command_of('example')} {name} FOLDER"
            )
    for target, content in contents.items():
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
    stems = ", ".join(file.stem for file in files(root / name) if file.suffix == ".gin")
    command = (
        f"{command_of('train')} examples/{name}/FILE.gin, where FILE is one of {stems}"
        if stems
        else f"python -m examples.{name}.{IN_PYTHON}"
    )
    return "\n".join(
        [
            *(f"wrote {folder / 'examples' / part}" for part in needed(name)),
            f"next{'' if folder == Path() else f', in {folder}'}: {command}",
        ]
    )


def needed(name: str) -> list[str]:
    """Returns the example and the ones whose files it imports or includes, directly or not."""
    root, found = source(), [name]
    for part in found:
        for file in files(root / part):
            for use in USES.finditer(file.read_text(encoding="utf-8")):
                other = use[1] or use[2]
                if other not in found:
                    found.append(other)
    return found


def source() -> Path:
    """Returns the folder of the examples: the package's own or, in a checkout, the repository's.

    Raises: UserError if there is none.
    """
    for folder in (PACKAGED, CHECKOUT):
        if (folder / "__init__.py").is_file():
            return folder
    raise UserError(f"this installation has no examples at {PACKAGED}: install its wheel again")


def names() -> list[str]:
    """Returns the examples that can be run: by a gin file, or one that is built in Python. Other folders
    are shared code."""
    found = {file.parent.name for file in source().glob("*/*.gin")}
    return sorted(found | {file.parent.name for file in source().glob(f"*/{IN_PYTHON}.py")})


def summary(folder: Path) -> str:
    """Returns the docstring of the example's package, as one line."""
    text = ast.get_docstring(ast.parse((folder / "__init__.py").read_text(encoding="utf-8")))
    return " ".join((text or "").split())


def files(folder: Path) -> list[Path]:
    """Returns the files of one example, without what running it leaves there."""
    return sorted(f for f in folder.iterdir() if f.suffix in SUFFIXES and f.name not in LEFT_OUT)


if __name__ == "__main__":
    sys.exit(main())
