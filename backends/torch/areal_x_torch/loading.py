"""From a directory to a model: built without its tensors, so that it can be sharded before it is
loaded, each process reading its own part, as fp32 master weights. Models that the trainer would
compute wrongly are refused here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401 - lets numpy read bfloat16
import numpy as np
import torch
from torch import Tensor, nn
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging

from areal_x.errors import UserError
from areal_x.hf import model_dir
from areal_x.hf.image_format import VISION_MODELS, takes_images
from areal_x.hf.model_parts import with_parts
from areal_x_torch import compatibility
from areal_x_torch.dtensors import Joined, ShardedView, Stored, local, own_part
from areal_x_torch.experts import CORRECTION, is_experts
from areal_x_torch.model import (
    ADAPTER,
    SCORE,
    as_saved,
    decoder,
    from_numpy,
    has_vision,
    head_layer,
    named_tensors,
)


def frozen(directory: Path, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """Returns a language model for inference only, as `freeze` leaves it."""
    model = freeze(build(directory, "policy"), dtype)
    materialize(model, device)
    fill(model, directory)
    return model


def build(directory: Path, head: str) -> PreTrainedModel:
    """Returns the model of a directory with its parameters on the meta device and buffers that no
    file holds, such as rotary frequencies, on the host: it can be changed and sharded before it
    takes memory. `materialize` and `fill` complete it.

    head: "policy" for a causal language model, else a sequence classifier with one label.

    Raises: UserError if the tensors do not fit the config, or the backend does not train such a
    model.
    """
    model_dir.check_head(directory, head)
    config = model_dir.read_config(directory)
    check_kind(directory, config)
    kind, name, changes = AutoModelForCausalLM, "a causal language model", {}
    if "vision_config" in config:
        kind, name = (
            AutoModelForImageTextToText if head == "policy" else value_model_class(directory),
            "a vision-language model",
        )
    elif head != "policy":
        kind, name, changes = (
            AutoModelForSequenceClassification,
            "a sequence classifier",
            {"num_labels": 1},
        )
    promised = {
        tensor: _TensorOnDisk(shape) for tensor, shape in model_dir.shapes(directory).items()
    }
    with quiet():
        try:
            described = AutoConfig.from_pretrained(
                directory, local_files_only=True, trust_remote_code=False, **changes
            )
            with torch.device("meta"):
                architecture = (
                    kind
                    if issubclass(kind, PreTrainedModel)
                    else type(kind.from_config(described, trust_remote_code=False))
                )
            if promised:
                model, found = architecture.from_pretrained(
                    None,
                    config=described,
                    state_dict=promised,
                    dtype=torch.float32,
                    trust_remote_code=False,
                    ignore_mismatched_sizes=True,  # they are listed below, by name
                    output_loading_info=True,
                )
            else:  # still on the hub: `from_pretrained` would draw weights, in the host's memory
                with torch.device("meta"):
                    # Without dropout, as `from_pretrained` returns a model.
                    model = architecture._from_config(described, dtype=torch.float32).eval()
                found = dict.fromkeys(("missing_keys", "unexpected_keys", "mismatched_keys"), ())
        except Exception as error:  # each configuration and model raises its own type
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise UserError(f"transformers cannot load {directory} as {name}: {reason}") from error
    missing, left_over = set(found["missing_keys"]), set(found["unexpected_keys"])
    if head != "policy":  # a language model's head is not used
        left_over = {name for name in left_over if not name.startswith("lm_head.")}
    complaints = _complaints(
        missing - {SCORE}, left_over, [name for name, *_ in found["mismatched_keys"]]
    )
    if complaints:
        raise UserError(f"the tensors of {directory} do not fit its config ({complaints})")
    _tie_what_is_the_same(model, directory)
    if SCORE in missing:
        model.score.to("meta")
    # transformers gives the padding token's embedding no gradient. Here padding never counts, so the
    # token is like any other.
    model.get_input_embeddings().padding_idx = None
    # What corrects a router's choice is no parameter, though ERNIE 4.5 has it as one: it would decay,
    # and be sharded and rounded to the compute precision with the others.
    for name, parameter in list(model.named_parameters()):
        place, _, own = name.rpartition(".")
        if own == CORRECTION:
            module = model.get_submodule(place)
            delattr(module, own)
            module.register_buffer(own, parameter.detach())
    if has_vision(model) and not takes_images(model.config):
        freeze_beside(model)
    # SigLIP's own pooling of an image, which Gemma 3 does not read, and what hears.
    for name, parameter in model.named_parameters():
        pools = ".vision_tower." in name and ".head." in name
        if pools or ".audio_tower." in name or ".embed_audio." in name:
            parameter.requires_grad_(False)
    compatibility.prepare(model, directory)
    return model


def freeze_beside(model: PreTrainedModel) -> None:
    """Leaves untrained what only images go through, as a tower of which there are none to learn
    from would decay."""
    own = {id(p) for part in (decoder(model), head_layer(model)) for p in part.parameters()}
    for parameter in model.parameters():
        if id(parameter) not in own:
            parameter.requires_grad_(False)


def check_kind(directory: Path, config: Mapping[str, Any]) -> None:
    """Checks, from the config alone, that this is a language model of a kind that the backend can
    try to load.

    Raises: UserError naming the part that it does not train.
    """
    model_type = config.get("model_type")
    kind = f"{directory} is a {model_type}{with_parts(config)}"
    if "vision_config" in config and model_type not in VISION_MODELS:
        kinds = f"of models with images, the torch backend trains {', '.join(VISION_MODELS)}"
        raise UserError(f"{kind}; {kinds}: use one of these, or a model of text")
    if config.get("is_encoder_decoder"):
        raise UserError(
            f"{kind}, and the torch backend trains models with a decoder only: use a causal language"
            " model"
        )
    known = model_type in CONFIG_MAPPING  # else transformers says so
    if known and model_type not in {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *VISION_MODELS}:
        raise UserError(
            f"{kind}, for which transformers has no causal language model: use a model that"
            " generates text"
        )


def value_model_class(directory: Path) -> type[PreTrainedModel]:
    """Returns the class of a vision-language model with a score in place of its head, which
    transformers has for text models only.

    Raises: UserError for a Llama 4, which has a whole language model inside with the head.
    """
    config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    if config.model_type == "llama4":
        raise UserError(
            f"{directory} is a llama4, whose language model torch does not take apart for a critic or a"
            " reward model: use train.backend = 'jax', or another model"
        )
    writes: type[PreTrainedModel] = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)]

    class Scores(writes):
        _tied_weights_keys = None

        def __init__(self, config: PreTrainedConfig) -> None:
            super().__init__(config)
            del self.lm_head
            self.score = nn.Linear(config.get_text_config().hidden_size, 1, bias=False)

    # transformers looks up the tensor names of a class's files by its name and module.
    Scores.__name__, Scores.__module__ = writes.__name__, writes.__module__
    return Scores


class _TensorOnDisk:
    """What transformers takes for a tensor that is still in its file: it returns one on the meta
    device, and nothing is read."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape

    def __getitem__(self, _: Any) -> _TensorOnDisk:
        return self

    def to(self, device: Any, dtype: torch.dtype) -> Tensor:
        return torch.empty(self.shape, dtype=dtype, device="meta")


def _tie_what_is_the_same(model: PreTrainedModel, directory: Path) -> None:
    """Ties a head that the config declares tied if the directory has both tensors and they are
    equal: transformers compares them, but not on the meta device."""
    for target, source in model.all_tied_weights_keys.items():
        pair = {name: model.get_parameter(name) for name in (target, source)}
        if pair[target] is not pair[source]:
            both = model_dir.read_tensors(directory, as_saved(model, pair).keys())
            if len({sha256(x.tobytes()).digest() for _, x in both}) == 1:
                place, _, name = target.rpartition(".")
                setattr(model.get_submodule(place), name, pair[source])


def freeze(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """Prepares a model for inference only. Weights of products, which autocast would cast at each
    use, are converted to `dtype` for good, so that its outputs equal, to the last bit, those of the
    same model in training."""
    model.requires_grad_(False)
    kept = {
        id(model.get_input_embeddings().weight),
        *(id(p) for name, p in model.named_parameters() if name == SCORE),
    }
    for layer in model.modules():
        if isinstance(layer, torch.nn.Linear) or is_experts(layer):
            for parameter in layer.parameters():
                if id(parameter) not in kept:
                    parameter.data = parameter.data.to(dtype)
    return model


def materialize(
    module: nn.Module, device: torch.device, parameters: torch.device | None = None
) -> None:
    """Puts what is on the meta device on this one, without values, and moves the rest there. Tied
    tensors stay tied.

    parameters: their device, if another.
    """

    def put(x: Tensor) -> Tensor:
        to = parameters if parameters is not None and isinstance(x, nn.Parameter) else device
        return torch.empty_like(x, device=to) if x.is_meta else x.to(to)

    swap = torch.__future__.get_swap_module_params_on_conversion()
    # Otherwise each tied place would get its own parameter.
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        module._apply(put)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(swap)


@torch.no_grad()
def fill(model: PreTrainedModel, directory: Path) -> None:
    """Reads the tensors of a directory, one at a time, into the model that `build` made of it; into
    a sharded one, its own part. A score that the directory lacks is 0."""
    targets = named_tensors(model)
    missing, into = {name for name in targets if not name.endswith(ADAPTER)}, _TensorWriter(targets)
    for file_name, x in model_dir.read_tensors(directory):
        name = file_name if file_name in targets else f"{model.base_model_prefix}.{file_name}"
        if name in targets:  # else transformers ignores it, which `build` has checked
            into.put(name, x)
            missing.discard(name)
    if SCORE in missing:
        model.score.weight.zero_()
    complaints = _complaints(missing - {SCORE}, ())
    if complaints:
        raise UserError(
            f"{directory} has some tensors under other names ({complaints}): save it anew with"
            " save_pretrained"
        )


@torch.no_grad()
def copy_tensors(
    targets: Mapping[str, Stored],
    tensors: Iterable[tuple[str, np.ndarray]],
    source: str,
    elsewhere: Container[str] = (),
) -> None:
    """Copies arrays into the tensors of their names, one at a time.

    elsewhere: names of tensors that only other processes have.
    Raises: UserError listing what is missing, left over or of another shape.
    """
    missing, left_over = set(targets), []
    into = _TensorWriter(targets)
    for name, x in tensors:
        if name not in targets:
            left_over += [] if name in elsewhere else [name]
        elif x.shape != targets[name].shape:
            raise UserError(
                f"{source}: {name} has shape {x.shape}, the model wants"
                f" {tuple(targets[name].shape)}"
            )
        else:
            into.put(name, x)
            missing.discard(name)
    complaints = _complaints(missing, left_over)
    if complaints:
        raise UserError(f"the tensors of {source} do not fit the model ({complaints})")


class _TensorWriter:
    """Copies whole arrays into tensors, one at a time: into a sharded tensor its own part only,
    nothing of the rest is converted or copied; into one that arrives as several views, once all of
    them are there."""

    def __init__(self, targets: Mapping[str, Stored]) -> None:
        self._targets = targets
        self._left = Counter(id(x.of) for x in targets.values() if isinstance(x, ShardedView))
        self._joined: dict[int, Tensor] = {}

    def put(self, name: str, x: np.ndarray) -> None:
        target, whole = self._targets[name], from_numpy(x)
        if isinstance(target, ShardedView):
            of = id(target.of)
            target.view(
                self._joined.setdefault(of, torch.empty(target.of.shape, dtype=target.of.dtype))
            ).copy_(whole)
            self._left[of] -= 1
            if self._left[of]:
                return
            target, whole = target.of, self._joined.pop(of)
        elif isinstance(target, Joined):
            target, whole = target.of, target.read(whole)
        local(target).copy_(own_part(whole, target))


@contextmanager
def quiet() -> Iterator[None]:
    """Suppresses the progress bars and reports that transformers prints while it loads."""
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def _complaints(
    missing: Iterable[str], left_over: Iterable[str], misshapen: Iterable[str] = ()
) -> str:
    kinds = {"missing": missing, "left over": left_over, "of another shape": misshapen}
    return "; ".join(f"{kind}: {_listed(sorted(names))}" for kind, names in kinds.items() if names)


def _listed(names: Sequence[str], most: int = 5) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
