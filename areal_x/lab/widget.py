"""The token view as an anywidget, for Jupyter, JupyterLab, VS Code, marimo and Colab."""

from __future__ import annotations

import anywidget
import traitlets

from areal_x.lab.token_view import script


class TokenView(anywidget.AnyWidget):  # type: ignore[misc]  # which mypy does not read
    """Shows a trajectory's tokens; see `areal_x.token_view`, which makes it."""

    _esm = script()

    trajectory = traitlets.Dict().tag(sync=True)
    """What `areal_x.lab.token_view.trajectory_data` returns; setting it shows another one."""

    colour = traitlets.Unicode("logprob").tag(sync=True)
    """What tokens are coloured by; set by the buttons, or from Python."""
