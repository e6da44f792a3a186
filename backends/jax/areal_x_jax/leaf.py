"""A parameter of the decoder: its name here and at Hugging Face, and the kinds of its axes."""

from __future__ import annotations

from dataclasses import dataclass

# Of parameters that layers of several shapes have (areal_x_jax.varied_layers): stacks of other shapes
# than the first have names of their own.
PREFIXES = ("full_", "doubled_")


def local_name(name: str) -> str:
    """Returns the name under which a layer's functions find a parameter."""
    for prefix in PREFIXES:
        name = name.removeprefix(prefix)
    return name


@dataclass(frozen=True)
class Leaf:
    """A parameter. name: Hugging Face's, {expert} standing for a number. axes: the kind of each
    axis as stored, without the stack's. stack: the layers that have it (see
    `Architecture.layers_in`). outputs_first: True for kernels of all experts in one tensor whose file
    has outputs before inputs."""

    name: str
    axes: tuple[str, ...]
    stack: str = "layers"
    outputs_first: bool = False

    @property
    def module(self) -> str:
        """The last part of its module's name, "q_proj"."""
        return self.name.split(".")[-2]

    @property
    def order(self) -> tuple[int, ...] | None:
        """The order of its axes, but for that of an expert's number, in a file; None if it is this
        one."""
        if not self.axes:
            return None
        if "{expert}" not in self.name and self.axes[0] == "experts":
            if "rank" not in self.axes:
                return (0, 2, 1) if self.outputs_first else None
            # Of adapters, PEFT joins the experts' rows of A, and their columns of B (hf.adapters).
            return (0, 2, 1) if self.axes[2] == "rank" else (2, 1, 0)
        kept = "vocab", "input_vocab", "vision_positions", "vision_axes", "vision_pooled", "one"
        as_stored = self.axes[0] in kept
        return None if len(self.axes) == 1 or as_stored else (1, 0)


def mlp(prefix: str, module: str, width: str, biases: bool) -> dict[str, Leaf]:
    axes = {"gate": ("hidden", width), "up": ("hidden", width), "down": (width, "hidden")}
    found = {
        f"{prefix}{name}": Leaf(f"{module}.{name}_proj.weight", own) for name, own in axes.items()
    }
    if biases:
        found |= {
            f"{prefix}{name}_bias": Leaf(f"{module}.{name}_proj.bias", own[1:])
            for name, own in axes.items()
        }
    return found
