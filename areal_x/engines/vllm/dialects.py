"""What vLLM servers of each supported release can do, and what follows where one cannot.

The endpoints that runs use grew from vLLM 0.23 to 0.32. A server's release is read from its route
/version, or from the package's metadata where the run starts it; what it lacks is done in another
way, or refused by name before anything is started. Sources: the wheels of these releases.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from packaging.version import InvalidVersion, Version

from areal_x.errors import ConfigError, UserError

if TYPE_CHECKING:
    from areal_x.engines.vllm.config import VLLMConfig

Release = tuple[int, int]
OLDEST: Release = (0, 23)  # that vllm-ascend is made for
NEWEST: Release = (0, 32)
SUPPORTED = f"{OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"


@dataclass(frozen=True)
class Ability:
    """Something that servers can do from one release on."""

    since: Release
    does: str
    """Continues "it" or "a server"."""

    sign: str
    """A word in vLLM's own code that stands there since this release: a route, an argument or a
    field."""

    module: str
    """Part of vLLM that has the sign: a file or a folder below `vllm/`."""

    without: str
    """What follows without it, in one clause."""


TOKEN_VERSIONS = Ability(
    (0, 32),
    "reports the version of each token",
    "weight_versions",
    "entrypoints/scale_out/token_in_token_out",
    "a swap ends the requests in flight, which go on under the new weights from their tokens so far;"
    " only with servers that the run starts",
)
END_OF_TRANSFER = Ability(
    (0, 32),
    "forgets an earlier transfer",
    "/shutdown_weight_transfer_engine",
    "entrypoints/rl/online",
    "weights are passed by files (vllm.transport = 'files'), or to NPUs by 'hccl'",
)
OWN_SEEDS = Ability(
    (0, 32),
    "gives each engine of a data-parallel server a seed of its own",
    "data_parallel_index: int = 0",
    "utils",
    "they would sample the same tokens: a server has one engine (vllm.data = 1)",
)
SCALE_OUT = Ability(
    (0, 30),
    "needs an argument for its endpoints of tokens",
    "enable_scale_out",
    "entrypoints",
    "they are there without one",
)
HEADLESS = Ability(
    (0, 29),
    "computes on several hosts in the way that runs start it",
    "make_arg_parser",
    "entrypoints/launchers",
    "a server has one host (vllm.hosts = 1)",
)
NORMALISATION = Ability(
    (0, 28),
    "normalises the pixels of images on its device",
    "mm_device_do_normalize",
    "config",
    "they arrive normalised, as they are sent",
)
KEPT_TOKENS = Ability(
    (0, 28),
    "can report which tokens truncated sampling kept",
    "class SamplingMaskLists",
    "v1",
    "top_p, top_k and min_p cannot be trained on",
)
ABORT_ALL = Ability(
    (0, 26),
    "ends all requests in flight by one call",
    "/abort_requests",
    "entrypoints/rl/online",
    "it is paused for the moment that this takes",
)
OWN_LOADING = Ability(
    (0, 25),
    "leaves the loading of weights to the transfer",
    "def start_weight_update",
    "distributed/weight_transfer",
    "updates are begun as those of a kernel's own format, of which vLLM prepares nothing",
)
DERENDER = Ability(
    (0, 24),
    "parses the messages in tokens",
    "/v1/chat/completions/derender",
    "entrypoints/scale_out/derender",
    "it cannot parse chats (agents parse them themselves)",
)
ABILITIES = (
    TOKEN_VERSIONS,
    END_OF_TRANSFER,
    OWN_SEEDS,
    SCALE_OUT,
    HEADLESS,
    NORMALISATION,
    KEPT_TOKENS,
    ABORT_ALL,
    OWN_LOADING,
    DERENDER,
)


@dataclass(frozen=True)
class Dialect:
    """What the servers of one release can do."""

    release: Release

    def has(self, ability: Ability) -> bool:
        return self.release >= ability.since

    @property
    def name(self) -> str:
        return f"vLLM {self.release[0]}.{self.release[1]}"

    def reason(self, ability: Ability) -> str:
        """Returns why something that needs an ability is refused, as a clause."""
        return (
            f"{self.name} is older than {ability.since[0]}.{ability.since[1]}, the first that"
            f" {ability.does}"
        )


LATEST = Dialect(NEWEST)


def of(version: str, whose: str) -> Dialect:
    """Returns the dialect of a server by vLLM's version; a later release counts as the newest known
    one. whose: names the server, for the error.

    Raises: UserError for a release that is too old, and for what is no version.
    """
    try:
        release = Version(version).release
    except InvalidVersion as error:
        raise UserError(
            f"{whose} gives {version!r} as its version: vLLM {SUPPORTED} are supported"
        ) from error
    found = (release[0], release[1] if len(release) > 1 else 0)
    if found < OLDEST:
        raise UserError(f"{whose} is vLLM {version}: {SUPPORTED} are supported")
    return Dialect(min(found, NEWEST))


def check_started(config: VLLMConfig, dialect: Dialect) -> None:
    """Raises: ConfigError for settings that the servers which the run starts do not support."""
    anywhere = ("files", "hccl")
    for name, value, refused, ability, wanted in (
        (
            "transport",
            config.transport,
            config.transport not in anywhere,
            END_OF_TRANSFER,
            "'files'",
        ),
        ("hosts", config.hosts, config.hosts > 1, HEADLESS, "1"),
        ("data", config.data, config.data > 1, OWN_SEEDS, "1"),
    ):
        if refused and not dialect.has(ability):
            raise ConfigError(f"vllm.{name}", value, f"{wanted} here: {dialect.reason(ability)}")


def check_given(url: str, dialect: Dialect) -> None:
    """Raises: UserError for a server that the run did not start, whose restart it might not notice,
    unless it reports versions itself."""
    if not dialect.has(TOKEN_VERSIONS):
        raise UserError(
            f"the vLLM server at {url} cannot be given by its address, as nothing would tell tokens"
            f" of other weights after a restart ({dialect.reason(TOKEN_VERSIONS)}): leave it out of"
            " vllm.urls and let the run start servers"
        )
