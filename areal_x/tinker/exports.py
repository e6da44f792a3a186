"""Weights to take away: Hugging Face and PEFT directories, as a tar file or file by file, encrypted
in the age format if the client asks for it.

Addresses of files carry a signature in place of a key, as those of object stores do: anybody may
fetch them without headers until they expire. The signature is of the key, the checkpoint, the file
and the time, so it opens nothing else.
"""

from __future__ import annotations

import hashlib
import hmac
import io
import json
import secrets
import tarfile
from base64 import b64encode
from collections.abc import Iterator, Sequence
from pathlib import Path

from areal_x.errors import UserError
from areal_x.hf import model_dir
from areal_x.tinker.checkpoints import Ref

LINK_SECONDS = 3600
ARCHIVE = "archive.tar"  # in place of a file's name: all files of the checkpoint
MOST_RECIPIENTS = 10
SUFFIX = ".age"
PIECE = 1 << 20


def publish(directory: Path, base_model: str) -> None:
    """Turns a state of `Trainer.save` into a directory for others: without the optimizer, and with
    adapters that name their base as its users do."""
    for file in files_of(directory):
        if is_private(file.name):
            file.unlink()
    config = directory / "adapter_config.json"
    if config.is_file():
        content = json.loads(config.read_text()) | {"base_model_name_or_path": base_model}
        config.write_text(json.dumps(content, indent=2))


def is_private(name: str) -> bool:
    """True for files of the optimizer's and the trainer's state."""
    return name.startswith(Path(model_dir.MOMENTS).stem) or name == model_dir.STATE


def files_of(directory: Path) -> list[Path]:
    return sorted(x for x in directory.rglob("*") if x.is_file())


# ---- addresses


def signature(key: str, ref: Ref, name: str, expires: int) -> str:
    text = json.dumps([str(ref), name, expires])
    return hmac.new(key.encode(), text.encode(), hashlib.sha256).hexdigest()


def archive(directory: Path) -> Iterator[bytes]:
    """Yields a tar file of a checkpoint for samplers: its published files."""
    for file in files_of(directory):
        if is_private(file.name):
            continue
        header = tarfile.TarInfo(file.relative_to(directory).as_posix())
        header.size, header.mode = file.stat().st_size, 0o644
        yield header.tobuf(tarfile.PAX_FORMAT)
        yield from pieces(file)
        yield b"\0" * (-header.size % tarfile.BLOCKSIZE)
    yield b"\0" * (2 * tarfile.BLOCKSIZE)


def pieces(file: Path) -> Iterator[bytes]:
    with file.open("rb") as opened:
        while piece := opened.read(PIECE):
            yield piece


# ---- age, https://age-encryption.org/v1

LETTERS = "qpzry9x8gf2tvdw0s3jn54khce6mua7l"  # of bech32
GENERATOR = (0x3B6A57B2, 0x26508E6D, 0x1EA119FA, 0x3D4233DD, 0x2A1462B3)
CHUNK = 64 << 10


def recipients_of(texts: Sequence[str]) -> list[bytes]:
    """Returns the X25519 keys of age recipients ("age1…"). Raises: UserError."""
    if len(texts) > MOST_RECIPIENTS:
        raise UserError(f"there are at most {MOST_RECIPIENTS} recipients, not {len(texts)}")
    if texts:
        try:
            import cryptography  # noqa: F401
        except ImportError as error:
            raise UserError(
                "encrypted weights need the package cryptography where the server runs:"
                " pip install cryptography"
            ) from error
    return [_bech32(text) for text in texts]


def _bech32(text: str) -> bytes:
    prefix, _, data = text.lower().rpartition("1")
    values = [LETTERS.find(x) for x in data]
    check = 1
    expanded = [ord(x) >> 5 for x in prefix] + [0] + [ord(x) & 31 for x in prefix]
    for value in expanded + values:
        top = check >> 25
        check = (check & 0x1FFFFFF) << 5 ^ value
        for bit, number in enumerate(GENERATOR):
            check ^= number if top >> bit & 1 else 0
    number = 0
    for value in values[:-6]:
        number = number << 5 | max(value, 0)
    size = 5 * len(values[:-6])
    if prefix != "age" or -1 in values or check != 1 or size // 8 != 32:
        raise UserError(f"{text!r} is no age recipient: age1… of an X25519 key (no SSH keys here)")
    return (number >> size % 8).to_bytes(32, "big")


def encrypt_files(directory: Path, recipients: Sequence[bytes]) -> None:
    """Replaces each file by an encrypted one with the suffix .age."""
    for file in files_of(directory):
        encrypted = file.with_name(file.name + SUFFIX)
        with file.open("rb") as given, encrypted.open("wb") as out:
            encrypt(given, out, recipients)
        file.unlink()


def encrypt(given: io.BufferedIOBase, out: io.BufferedIOBase, recipients: Sequence[bytes]) -> None:
    """Encrypts to X25519 recipients: a file key wrapped for each, then chunks of 64 KiB."""
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    def derive(secret: bytes, salt: bytes, info: bytes) -> bytes:
        return HKDF(hashes.SHA256(), 32, salt, info).derive(secret)

    def text(data: bytes) -> bytes:
        return b64encode(data).rstrip(b"=")

    key = secrets.token_bytes(16)
    header = b"age-encryption.org/v1\n"
    for recipient in recipients:
        own = X25519PrivateKey.generate()
        share = own.public_key().public_bytes_raw()
        shared = own.exchange(X25519PublicKey.from_public_bytes(recipient))
        wrapping = derive(shared, share + recipient, b"age-encryption.org/v1/X25519")
        wrapped = ChaCha20Poly1305(wrapping).encrypt(bytes(12), key, None)
        header += b"-> X25519 " + text(share) + b"\n" + text(wrapped) + b"\n"
    header += b"---"
    mac = hmac.new(derive(key, b"", b"header"), header, hashlib.sha256).digest()
    nonce = secrets.token_bytes(16)
    out.write(header + b" " + text(mac) + b"\n" + nonce)
    cipher = ChaCha20Poly1305(derive(key, nonce, b"payload"))
    number, chunk = 0, given.read(CHUNK)
    while True:
        following = given.read(CHUNK)
        last = not following
        out.write(cipher.encrypt(number.to_bytes(11, "big") + bytes([last]), chunk, None))
        if last:
            return
        number, chunk = number + 1, following
