"""Checkpoints on disk: ROOT/OWNER/RUN/KIND/NAME, each whole or not there.

A checkpoint is `checkpoint.json` and the directory `state`, in the form of `Trainer.save`: adapters
in PEFT's form or a Hugging Face model, with the optimizer's moments. Owners are digests of keys; the
parts of a path that clients choose are checked against patterns, so that none leads elsewhere.
"""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from areal_x.errors import UserError
from areal_x.tinker.models import ABOUT, write_whole
from areal_x.tinker.snapshots import flush_tree

KINDS = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}
SCHEME = "tinker://"
RUN = re.compile(r"[0-9a-f]{32}:train:[0-9]{1,9}")
NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")
OF_RUN = "run.json"
TTL_SECONDS = 3600, 10 * 366 * 24 * 3600


@dataclass(frozen=True)
class Ref:
    """The address of a checkpoint, tinker://RUN/KIND/NAME."""

    run: str
    kind: str
    name: str

    def __post_init__(self) -> None:
        if not (RUN.fullmatch(self.run) and self.kind in KINDS and NAME.fullmatch(self.name)):
            raise UserError(
                f"{SCHEME}{self.run}/{self.kind}/{self.name} is no checkpoint's address: names have up"
                " to 128 letters, digits, dots, hyphens and underscores, and no dot at first"
            )

    def __str__(self) -> str:
        return f"{SCHEME}{self.run}/{self.kind}/{self.name}"

    @property
    def id(self) -> str:
        return f"{self.kind}/{self.name}"

    @staticmethod
    def parse(path: str) -> Ref:
        """Raises: UserError."""
        parts = path.removeprefix(SCHEME).split("/")
        if not path.startswith(SCHEME) or len(parts) != 3:
            raise UserError(f"{path!r} is no checkpoint's address: {SCHEME}RUN/weights/NAME is one")
        return Ref(*parts)


@dataclass(frozen=True)
class About:
    """What is known of a checkpoint besides its weights."""

    rank: int
    attention: bool
    mlp: bool
    created: float
    expires: float | None = None
    user_metadata: Mapping[str, str] | None = None
    public: bool = False
    """Whether other keys of this server may read it."""

    request: str | None = None
    """The request that saved it, so that its repetition after a restart is not a second one."""


class Checkpoints:
    """The checkpoints of one owner."""

    def __init__(self, directory: Path, base_model: str) -> None:
        self.directory = directory
        self.base_model = base_model

    def place(self, ref: Ref) -> Path:
        return self.directory / ref.run / ref.kind / ref.name

    def begin_run(self, run: str, **about: Any) -> None:
        place = self.directory / run
        place.mkdir(parents=True, exist_ok=True)
        if not (place / OF_RUN).exists():
            write_json(place / OF_RUN, {**about, "created": time.time()})

    def save(
        self, ref: Ref, about: About, write_state: Callable[[Path], None], overwrite: bool
    ) -> None:
        """Saves a checkpoint, and brings it to the disk. Raises: UserError for a name that is
        taken."""
        place = self.place(ref)
        there = self.find(ref)
        if there is not None and there.request == about.request is not None:
            return  # by this request, before a restart
        if there is not None and not overwrite:
            raise UserError(f"there is a checkpoint {ref}: choose another name, or overwrite it")

        def write(directory: Path) -> None:
            write_state(directory / "state")
            (directory / ABOUT).write_text(json.dumps(asdict(about)))
            flush_tree(directory)

        place.parent.mkdir(parents=True, exist_ok=True)
        write_whole(place, write)

    def find(self, ref: Ref) -> About | None:
        """Returns None for one that is not there, or has expired, which is then deleted."""
        heal(self.place(ref))
        try:
            about = About(**json.loads((self.place(ref) / ABOUT).read_text()))
        except FileNotFoundError:
            return None
        if about.expires is not None and about.expires < time.time():
            self.delete(ref)
            return None
        return about

    def get(self, ref: Ref) -> About:
        """Raises: UserError."""
        about = self.find(ref)
        if about is None:
            raise UserError(f"there is no checkpoint {ref}")
        return about

    def delete(self, ref: Ref) -> None:
        place = self.place(ref)
        if place.is_dir():
            gone = place.with_name(f".{place.name}.gone")
            shutil.rmtree(gone, ignore_errors=True)
            place.rename(gone)
            shutil.rmtree(gone, ignore_errors=True)

    def set_ttl(self, ref: Ref, seconds: int | None) -> None:
        """Sets in how many seconds a checkpoint expires. Raises: UserError."""
        self._change(ref, expires=expiry(seconds))

    def set_public(self, ref: Ref, public: bool) -> None:
        """Sets whether other keys may read a checkpoint. Raises: UserError."""
        self._change(ref, public=public)

    def _change(self, ref: Ref, **fields: Any) -> None:
        write_json(self.place(ref) / ABOUT, asdict(self.get(ref)) | fields)

    def runs(self) -> list[str]:
        """Returns the runs, the newest first."""
        found = [x.parent.name for x in self.directory.glob(f"*/{OF_RUN}")]
        return sorted(found, key=lambda run: -self.about_run(run)["created"])

    def about_run(self, run: str) -> dict[str, Any]:
        """Raises: UserError."""
        try:
            if not RUN.fullmatch(run):
                raise FileNotFoundError
            found: dict[str, Any] = json.loads((self.directory / run / OF_RUN).read_text())
        except FileNotFoundError as error:
            raise UserError(f"there is no training run {run}") from error
        return found

    def of_run(self, run: str) -> Iterator[tuple[Ref, About]]:
        """Yields a run's checkpoints, the oldest first. Raises: UserError."""
        self.about_run(run)
        refs = [
            Ref(run, kind, place.name)
            for kind in KINDS
            for place in (self.directory / run / kind).glob("*")
            if NAME.fullmatch(place.name)
        ]
        found = [(ref, about) for ref in refs if (about := self.find(ref)) is not None]
        yield from sorted(found, key=lambda x: x[1].created)

    def listed(self, ref: Ref, about: About) -> dict[str, Any]:
        """Returns a checkpoint as the API describes it."""
        files = (self.place(ref) / "state").rglob("*")
        return {
            "checkpoint_id": ref.id,
            "checkpoint_type": KINDS[ref.kind],
            "time": at(about.created),
            "tinker_path": str(ref),
            "size_bytes": sum(file.stat().st_size for file in files if file.is_file()),
            "public": about.public,
            "user_metadata": about.user_metadata,
            "expires_at": None if about.expires is None else at(about.expires),
        }

    def listed_run(self, run: str) -> dict[str, Any]:
        """Returns a run as the API describes it. Raises: UserError."""
        about, found = self.about_run(run), list(self.of_run(run))
        last = {ref.kind: self.listed(ref, x) for ref, x in found}
        return {
            "training_run_id": run,
            "base_model": self.base_model,
            "model_owner": self.directory.name,
            "is_lora": about["rank"] > 0,
            "lora_rank": about["rank"] or None,
            "last_request_time": at(max([about["created"], *(x.created for _, x in found)])),
            "last_checkpoint": last.get("weights"),
            "last_sampler_checkpoint": last.get("sampler_weights"),
            "user_metadata": about.get("user_metadata"),
        }


def expiry(seconds: int | None) -> float | None:
    """Returns the time in so many seconds. Raises: UserError outside an hour to ten years."""
    if seconds is None:
        return None
    if not TTL_SECONDS[0] <= seconds <= TTL_SECONDS[1]:
        raise UserError(f"ttl_seconds = {seconds} is not between an hour and ten years")
    return time.time() + seconds


def at(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def write_json(file: Path, content: Mapping[str, Any]) -> None:
    """Writes a file, whole or not at all."""
    beside = file.with_name(f".{file.name}")
    beside.write_text(json.dumps(content))
    beside.rename(file)


def heal(directory: Path) -> None:
    """Brings back what a kill left in the middle of replacing a directory (`write_whole`)."""
    old = directory.with_name(f".{directory.name}.old")
    if old.is_dir() and not directory.is_dir():
        old.rename(directory)
