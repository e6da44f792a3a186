"""The images of sequences that are sampled: the tower's features of them, and what a prefill reads of those.

    images ──Tower: each once──▶ features, on the host ──images_of_chunk──▶ ChunkImages ──▶ prefill

The tower runs once for the attempts of a group, in whichever lanes and at whichever times they begin, and
again after new weights. Features are kept on the host: a chunk takes those of its tokens, so that
prompts with any number of images of any size share one prefill program.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from areal_x.errors import UserError
from areal_x.hf.image_positions import check_count, count_patches, image_tokens, mrope_positions
from areal_x.protocols.sampler import SlotRequest
from areal_x.types import Images
from areal_x_jax.architecture import Architecture
from areal_x_jax.images import image_places, patch_layout
from areal_x_jax.parameters import Params
from areal_x_jax.vision import PatchLayout, encode

KEPT = 16  # prompts whose features are kept, as later attempts of their groups need them


class ChunkImages(NamedTuple):
    """What a prefill reads of the images of a chunk's tokens.

    shown: tokens that stand for images. embeddings: theirs. deepstack: what is added to the outputs of
    each of the first layers there. positions: of all tokens in time, height and width; None for a model
    with one position per token. blocks: the number in its sequence of each token's image, whose tokens see
    each other, from 1 on; 0 for other tokens, None where attention is causal.
    """

    shown: Bool[Array, " tokens"]
    embeddings: Float[Array, "tokens hidden"]
    deepstack: Float[Array, "layers tokens hidden"] | None
    positions: Int[Array, "3 tokens"] | None
    blocks: Int[Array, " tokens"] | None


class Features(NamedTuple):
    """The tower's features of a sequence's images, see `vision.encode`."""

    embeddings: Float[np.ndarray, "image_tokens hidden"]
    deepstack: Float[np.ndarray, "layers image_tokens hidden"] | None


@dataclass(frozen=True)
class PromptImages:
    """The images of a sequence of `length` tokens."""

    features: Features

    places: Int[np.ndarray, " length"]
    """Index of each token's embedding; −1 for text."""

    positions: Int[np.ndarray, "3 length"] | None
    """In time, height and width; None if positions are those of text."""

    spans: Sequence[tuple[int, int]] = ()
    """Where the tokens begin and end of each image whose tokens see each other."""

    @property
    def shift(self) -> int:
        """Position of what follows, minus its place in the sequence."""
        return 0 if self.positions is None else int(self.positions[0, -1]) - len(self.places) + 1

    @property
    def blocks(self) -> Int[np.ndarray, " length"]:
        """See `ChunkImages`."""
        found = np.zeros(len(self.places), np.int32)
        for number, (start, stop) in enumerate(self.spans, 1):
            found[start:stop] = number
        return found

    def before_image(self, stop: int) -> int:
        """Returns where to end before token `stop` so that none of `spans` is cut."""
        return next((first for first, end in self.spans if first < stop < end), stop)

    def end_of_image(self, start: int) -> int:
        """Returns the end of the one of `spans` that begins at a token."""
        return next(end for first, end in self.spans if first == start)


class Tower:
    """Encodes images for the lanes of a group of devices, the same ones once. Safe to use from several
    threads."""

    def __init__(self, arch: Architecture, group: Mesh) -> None:
        assert arch.vision is not None
        whole = NamedSharding(group, PartitionSpec()) if group.size > 1 else None
        # The compiler divides the plain implementation over devices by itself.
        implementation = "auto" if group.size == 1 else "blocked"
        self.arch = arch.vision
        self._encode = jax.jit(partial(encoded, arch, implementation), out_shardings=whole)
        self._params: Params = {}
        self._found: OrderedDict[int, tuple[Images, Features]] = OrderedDict()  # by id
        self._lock = Lock()

    def load(self, params: Params) -> None:
        """Takes a model's weights; features that others gave are forgotten."""
        with self._lock:
            self._params = params["vision"]
            self._found.clear()

    def prompt_images(self, request: SlotRequest) -> PromptImages | None:
        """Returns the images of a sequence; None if it has none.

        Raises: UserError if its image tokens do not match its images, nothing follows the last of them,
        or they are another model's.
        """
        length, form = len(request.tokens), self.arch.form
        # What was generated is text, whatever its id.
        sampled = np.arange(length) >= length - request.generated
        if request.images is None or not len(request.images.grids):
            check_count(request.tokens, [], form.token, form.merge, sampled)
            return None
        if request.generated == 0 and request.tokens[-1] == form.token:
            raise UserError(
                "a prompt ends in an image: text must follow it, as chat templates write it"
            )
        grids = [(t, h, w) for t, h, w in request.images.grids.tolist()]
        form.check(request.images.patches.shape[1], request.images.grids)
        positions, spans = None, []
        if form.directed:
            given = request.tokens, grids, form.token, form.merge, sampled
            positions = mrope_positions(*given)
        else:
            spans = form.spans(request.tokens, grids, sampled)
        of_image = image_tokens(request.tokens, form.token, sampled)
        places = image_places(of_image[None])[0]
        whole = spans if form.whole else ()
        return PromptImages(self._features(request.images), places, positions, whole)

    def _features(self, images: Images) -> Features:
        with self._lock:
            if id(images) not in self._found:
                self._found[id(images)] = images, self._computed(images)
            self._found.move_to_end(id(images))
            while len(self._found) > KEPT:
                self._found.popitem(last=False)
            return self._found[id(images)][1]

    def _computed(self, images: Images) -> Features:
        grids = [(t, h, w) for t, h, w in images.grids.tolist()]
        layout = patch_layout(grids, self.arch)
        patches = np.zeros((1, len(layout.rows), self.arch.in_features), np.float32)
        patches[0, : len(images.patches)] = images.patches
        of_row = PatchLayout(*(None if x is None else x[None] for x in layout))
        embeddings, deepstack = jax.device_get(self._encode(self._params, patches, of_row))
        count = count_patches(grids) // self.arch.merge**2
        return Features(
            embeddings[0, :count], None if deepstack is None else deepstack[:, 0, :count]
        )


def encoded(
    arch: Architecture,
    implementation: str,
    params: Params,
    patches: Float[Array, "1 capacity in_features"],
    layout: PatchLayout,
) -> tuple[Float[Array, "1 tokens hidden"], Float[Array, "layers 1 tokens hidden"] | None]:
    """Returns `vision.encode` of one row, with the features of deepstack layers in one array."""
    embeddings, deepstack = encode(arch, params, patches, layout, implementation=implementation)
    return embeddings, jnp.stack(deepstack) if deepstack else None


def images_of_chunk(
    pieces: Sequence[tuple[PromptImages | None, int, int]], size: int
) -> ChunkImages | None:
    """Returns the images of a chunk of `size` tokens; None if no piece is of a sequence with images.
    pieces: of each the images of its sequence, its first token there, and how many tokens it has."""
    first = next((images for images, _, _ in pieces if images is not None), None)
    if first is None:
        return None
    like, deeper = first.features
    embeddings = np.zeros((size, like.shape[1]), like.dtype)
    deepstack = None
    if deeper is not None:
        deepstack = np.zeros((len(deeper), size, deeper.shape[2]), deeper.dtype)
    shown, blocks = np.zeros(size, bool), np.zeros(size, np.int32)
    positions = np.zeros((3, size), np.int32)
    at = 0
    for images, past, length in pieces:
        here, own = slice(at, at + length), slice(past, past + length)
        at += length
        positions[:, here] = past + np.arange(length)
        if images is None:
            continue
        if images.positions is not None:
            positions[:, here] = images.positions[:, own]
        places, blocks[here] = images.places[own], images.blocks[own]
        seen = np.flatnonzero(places >= 0)
        shown[at - length + seen] = True
        embeddings[at - length + seen] = images.features.embeddings[places[seen]]
        if deepstack is not None:
            assert images.features.deepstack is not None
            deepstack[:, at - length + seen] = images.features.deepstack[:, places[seen]]
    return ChunkImages(
        shown,
        embeddings,
        deepstack,
        positions if first.positions is not None else None,
        blocks if first.spans else None,
    )


def with_images(
    x: Float[Array, "tokens hidden"], images: ChunkImages | None, layer: int | None = None
) -> Float[Array, "tokens hidden"]:
    """Returns embedded tokens with those of images in their places, or the outputs of a layer with what
    is added there."""
    if images is None:
        return x
    here = images.shown[:, None]
    if layer is None:
        return jnp.where(here, jnp.asarray(images.embeddings, x.dtype), x)
    if images.deepstack is None or layer >= len(images.deepstack):
        return x
    return x + jnp.where(here, jnp.asarray(images.deepstack[layer], x.dtype), 0)
