"""A program for the sandbox, sent there as source text: runs one command in a folder that is passed
in and out as an archive.

Reads from standard input, as JSON: archive (of the folder, a tar in base64), add (more archives,
each with the directory in which it is unpacked), command (a text for the shell, a list of words, or
None), directory (below the folder), variables, seconds, characters, test (True if the command tests
the folder's contents, and so must not be influenced by them), read (the path of a file whose
content is wanted, or None), bytes (its largest size), keep (False if the folder is not needed
afterwards). Prints, as JSON: archive (of the folder afterwards), output (of the command; if longer
than `characters`, the first and the last half), code (its exit status; None if its time was over;
negative for a signal), content (in base64; None if there is no such file), size (of that file).
"""

from __future__ import annotations

import base64
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
from contextlib import suppress
from pathlib import Path
from typing import Any

FOLDER, OUTPUT, HOME = (
    Path("folder"),
    Path("output"),
    Path("home"),
)  # beside this program, in the home that the sandbox gives it
MOVE_LAST = "import sys\nsys.path.remove({!r})\nsys.path.append({!r})\n"


def main() -> None:
    request = json.load(sys.stdin)
    unpack(request["archive"], FOLDER)
    for archive, directory in request["add"]:
        unpack(archive, FOLDER / directory)
    code: int | None = 0
    output = ""
    if request["command"] is not None:
        code = run(request)
        output = read_output(request["characters"])
    content, size = read_file(request["read"], request["bytes"])
    reply = {"output": output, "code": code, "content": content, "size": size}
    json.dump({**reply, "archive": pack() if request["keep"] else ""}, sys.stdout)


def unpack(archive: str, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(fileobj=io.BytesIO(base64.b64decode(archive))) as tar:
        # Python 3.14's default filter would drop files that commands may create.
        if hasattr(tarfile, "tar_filter"):
            tar.extractall(folder, filter="tar")
        else:  # before 3.11.4
            tar.extractall(folder, (within(folder, member) for member in tar))


def within(folder: Path, member: tarfile.TarInfo) -> tarfile.TarInfo:
    """Returns a member of an archive without a leading slash, just before it is unpacked.

    Raises: TarError if it would be outside of the folder.
    """
    member.name = member.name.lstrip("/")
    if not (folder / member.name).resolve().is_relative_to(folder.resolve()):
        raise tarfile.TarError(f"{member.name!r} would be outside of the folder")
    return member


def run(request: dict[str, Any]) -> int | None:
    """Returns the exit status. The output goes to a file, so that the sandbox's limit on files
    bounds it."""
    environment: dict[str, Any] = {
        **os.environ,
        "HOME": str(FOLDER.resolve()),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    if request["test"]:
        environment |= isolated_environment()
    environment["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    command = request["command"]
    words = [shutil.which("bash") or "sh", "-c", command] if isinstance(command, str) else command
    with OUTPUT.open("wb") as output:
        try:
            process = subprocess.Popen(
                words,
                cwd=FOLDER / request["directory"],
                env=environment | request["variables"],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:  # no such program or directory, as a shell reports it
            output.write(f"{error.filename}: {error.strerror}\n".encode())
            return 127
    try:
        return process.wait(request["seconds"])
    except subprocess.TimeoutExpired:
        return None
    finally:
        with suppress(ProcessLookupError):  # background processes would continue to write
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def isolated_environment() -> dict[str, str]:
    """Returns variables with which a command reads no settings from the folder, and Python imports
    a module from it only if there is no other of that name."""
    HOME.mkdir()
    home = str(HOME.resolve())
    folder = str(FOLDER.resolve())
    (HOME / "sitecustomize.py").write_text(MOVE_LAST.format(home, folder))
    return {"HOME": home, "PYTHONPATH": home, "PYTHONSAFEPATH": "1", "PYTHONNOUSERSITE": "1"}


def read_output(characters: int) -> str:
    with OUTPUT.open("rb") as output:
        size = OUTPUT.stat().st_size
        half = characters // 2
        if size <= characters:
            return output.read().decode(errors="replace")
        first = output.read(half).decode(errors="replace")
        output.seek(size - half)
        last = output.read().decode(errors="replace")
    return (
        f"{first}\n[output truncated: {size} bytes, the first and the last {half} are"
        f" shown]\n{last}"
    )


def read_file(path: str | None, most: int) -> tuple[str | None, int]:
    """Returns the content of a regular file of at most so many bytes, in base64, and its size."""
    if path is None or not (file := FOLDER / path).is_file():
        return None, 0
    size = file.stat().st_size
    return (base64.b64encode(file.read_bytes()).decode() if size <= most else None), size


def pack() -> str:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz", compresslevel=1) as tar:
        tar.add(FOLDER, ".")
    return base64.b64encode(packed.getvalue()).decode()


if __name__ == "__main__":
    main()
