"""Uploads a run's model to a Hugging Face hub.

    python -m areal_x.push runs/arithmetic-grpo-1 me/adder
    python -m areal_x.push runs/arithmetic-grpo-1/exports/50 me/adder --revision step-50 --private

The first argument is a run, whose newest checkpoint is used, a checkpoint, an export of
train.export_every, or any directory with a model. Of a checkpoint the model is uploaded, with adapters
merged and without the optimizer's state; `--adapter` uploads the adapters alone. The repository is
created if it does not exist. HF_TOKEN or `hf auth login` gives the key.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from areal_x import export
from areal_x.errors import UserError, sentence
from areal_x.hf import model_dir
from areal_x.runtime.command import command_of, in_this_form

NOT_UPLOADED = [model_dir.MOMENTS, model_dir.STATE]


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0, or 1 after one sentence about a mistake."""
    parser = argparse.ArgumentParser(
        prog=command_of("push"),
        description=in_this_form(str(__doc__), "push"),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("source", metavar="RUN", type=Path)
    parser.add_argument("repository", metavar="OWNER/NAME")
    parser.add_argument("--revision", help="branch to upload to, created if it does not exist")
    parser.add_argument("--private", action="store_true", help="create a private repository")
    parser.add_argument("--adapter", action="store_true", help="upload the adapters alone")
    options = parser.parse_args(arguments)
    try:
        address = push(
            options.source, options.repository, options.revision, options.private, options.adapter
        )
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"uploaded: {address}")
    return 0


def push(
    source: Path,
    repository: str,
    revision: str | None = None,
    private: bool = False,
    adapter: bool = False,
) -> str:
    """Uploads a model and returns its address.

    Raises: UserError for a source without a model, and for whatever the hub refuses.
    """
    if repository.count("/") != 1:
        raise UserError(f"{repository!r} is not a repository: name it as OWNER/NAME")
    if (source / "config.json").is_file() and not (source / model_dir.STATE).is_file():
        if adapter:
            raise UserError(f"{source} is a model, whose adapters were merged: name a checkpoint")
        return _upload(source, repository, revision, private)
    found = export.find(source)
    if adapter:
        if not model_dir.is_adapter(found):
            raise UserError(f"{found} has no adapters: leave out --adapter")
        return _upload(found, repository, revision, private)
    with tempfile.TemporaryDirectory(prefix="areal-x-push-") as folder:
        plain = Path(folder) / "model"
        export.export(found, plain)
        return _upload(plain, repository, revision, private)


def _upload(folder: Path, repository: str, revision: str | None, private: bool) -> str:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    api = HfApi()
    try:
        api.create_repo(repository, private=private, exist_ok=True)
        if revision is not None:
            api.create_branch(repository, branch=revision, exist_ok=True)
        api.upload_folder(
            repo_id=repository,
            folder_path=folder,
            revision=revision,
            commit_message="Upload a model trained with AReaL-X",
            ignore_patterns=NOT_UPLOADED,
        )
    except (HfHubHTTPError, OSError, ValueError) as error:
        text = " ".join(sentence(error).split())
        raise UserError(f"{repository} was not uploaded: {text}") from error
    return f"{api.endpoint}/{repository}"


if __name__ == "__main__":
    sys.exit(main())
