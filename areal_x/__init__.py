"""AReaL-X: asynchronous reinforcement learning of language models, written once for JAX and
PyTorch.

This is the public surface: a name below is imported, with the module that defines it, when it is
first used. Importing the package itself loads no third-party package. Names of the extras are in
`areal_x.agents`, `areal_x.sandbox` and `areal_x.simulation`. The whole system is the ring in
`areal_x.experiment`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from areal_x.runtime.lazy import lazy_names

if TYPE_CHECKING:
    from areal_x.algorithms.algorithm import Algorithm as Algorithm
    from areal_x.algorithms.arrays import importance_ratio as importance_ratio
    from areal_x.algorithms.arrays import masked as masked
    from areal_x.algorithms.recipes import cispo as cispo
    from areal_x.algorithms.recipes import dapo as dapo
    from areal_x.algorithms.recipes import decoupled_ppo as decoupled_ppo
    from areal_x.algorithms.recipes import distill as distill
    from areal_x.algorithms.recipes import dpo as dpo
    from areal_x.algorithms.recipes import dppo as dppo
    from areal_x.algorithms.recipes import dr_grpo as dr_grpo
    from areal_x.algorithms.recipes import gmpo as gmpo
    from areal_x.algorithms.recipes import grpo as grpo
    from areal_x.algorithms.recipes import gspo as gspo
    from areal_x.algorithms.recipes import icepop as icepop
    from areal_x.algorithms.recipes import ipo as ipo
    from areal_x.algorithms.recipes import kpop as kpop
    from areal_x.algorithms.recipes import lite_ppo as lite_ppo
    from areal_x.algorithms.recipes import m2po as m2po
    from areal_x.algorithms.recipes import maxrl as maxrl
    from areal_x.algorithms.recipes import multi_distill as multi_distill
    from areal_x.algorithms.recipes import opo as opo
    from areal_x.algorithms.recipes import ppo as ppo
    from areal_x.algorithms.recipes import reinforce_pp as reinforce_pp
    from areal_x.algorithms.recipes import remax as remax
    from areal_x.algorithms.recipes import reward_model as reward_model
    from areal_x.algorithms.recipes import rloo as rloo
    from areal_x.algorithms.recipes import sapo as sapo
    from areal_x.algorithms.recipes import self_distill as self_distill
    from areal_x.algorithms.recipes import sft as sft
    from areal_x.algorithms.recipes import turn_ppo as turn_ppo
    from areal_x.algorithms.weighting import sequence_mean as sequence_mean
    from areal_x.algorithms.weighting import token_mean as token_mean
    from areal_x.batching.gradients import token_gradients as token_gradients
    from areal_x.batching.packing import pack as pack
    from areal_x.engines.embedded import EmbeddedConfig as EmbeddedConfig
    from areal_x.engines.embedded import EmbeddedEngine as EmbeddedEngine
    from areal_x.engines.vllm.config import VLLMConfig as VLLMConfig
    from areal_x.errors import ConfigError as ConfigError
    from areal_x.errors import UserError as UserError
    from areal_x.errors import at_least as at_least
    from areal_x.errors import one_of as one_of
    from areal_x.errors import positive as positive
    from areal_x.errors import within as within
    from areal_x.experiment import Experiment as Experiment
    from areal_x.hf.image_reader import image_urls as image_urls
    from areal_x.hf.image_reader import load_image_reader as load_image_reader
    from areal_x.hf.model_dir import write_model as write_model
    from areal_x.hf.tokenizer import load_tokenizer as load_tokenizer
    from areal_x.lab.token_view import token_view as token_view
    from areal_x.monitor.plot import plot as plot
    from areal_x.monitor.timeline_plot import plot_timeline as plot_timeline
    from areal_x.monitor.trackers import TrackingConfig as TrackingConfig
    from areal_x.monitor.trajectories import show_trajectory as show_trajectory
    from areal_x.monitor.trajectories import show_turn as show_turn
    from areal_x.monitor.trajectories import trained as trained
    from areal_x.protocols.backends import Backend as Backend
    from areal_x.protocols.backends import create_trainer as create_trainer
    from areal_x.protocols.engine import Completion as Completion
    from areal_x.protocols.engine import Engine as Engine
    from areal_x.protocols.engine import Request as Request
    from areal_x.protocols.engine import SamplingParams as SamplingParams
    from areal_x.protocols.speculation import Speculation as Speculation
    from areal_x.protocols.trainer import Trainer as Trainer
    from areal_x.protocols.trainer_config import CriticConfig as CriticConfig
    from areal_x.protocols.trainer_config import LoRAConfig as LoRAConfig
    from areal_x.protocols.trainer_config import MeshConfig as MeshConfig
    from areal_x.protocols.trainer_config import ModelConfig as ModelConfig
    from areal_x.protocols.trainer_config import OptimizerConfig as OptimizerConfig
    from areal_x.protocols.trainer_config import TrainerConfig as TrainerConfig
    from areal_x.protocols.workflow import EpisodeResult as EpisodeResult
    from areal_x.protocols.workflow import Generator as Generator
    from areal_x.protocols.workflow import Workflow as Workflow
    from areal_x.rollout.episode import episode_of as episode_of
    from areal_x.rollout.queue import TrajectoryQueue as TrajectoryQueue
    from areal_x.rollout.rollout import Rollout as Rollout
    from areal_x.rollout.runner import Runner as Runner
    from areal_x.run.forking import fork_run as fork_run
    from areal_x.run.journal import Journal as Journal
    from areal_x.run.journal import JournalConfig as JournalConfig
    from areal_x.tasks.datasets import Record as Record
    from areal_x.tasks.datasets import load_dataset as load_dataset
    from areal_x.tasks.stream import TaskStream as TaskStream
    from areal_x.types import NOT_THE_POLICY as NOT_THE_POLICY
    from areal_x.types import Batch as Batch
    from areal_x.types import Episode as Episode
    from areal_x.types import Failed as Failed
    from areal_x.types import Group as Group
    from areal_x.types import Images as Images
    from areal_x.types import Loss as Loss
    from areal_x.types import Message as Message
    from areal_x.types import Policy as Policy
    from areal_x.types import Scored as Scored
    from areal_x.types import Task as Task
    from areal_x.types import TimedOut as TimedOut
    from areal_x.types import Trajectory as Trajectory
    from areal_x.types import Turn as Turn
    from areal_x.workflows.learned_reward import LearnedReward as LearnedReward
    from areal_x.workflows.single_turn import RewardedWorkflow as RewardedWorkflow
    from areal_x.workflows.single_turn import SingleTurn as SingleTurn
    from areal_x.workflows.single_turn import encode as encode
    from areal_x.workflows.single_turn import text_of as text_of
    from areal_x.workflows.supervised import Demonstrations as Demonstrations
    from areal_x.workflows.supervised import PreferencePairs as PreferencePairs

_NAMES = {
    "areal_x.types": (
        "Batch Episode Failed Group Images Loss Message NOT_THE_POLICY Policy Scored Task TimedOut "
        "Trajectory Turn"
    ),
    "areal_x.errors": "ConfigError UserError at_least one_of positive within",
    "areal_x.experiment": "Experiment",
    "areal_x.protocols.trainer_config": (
        "CriticConfig LoRAConfig MeshConfig ModelConfig OptimizerConfig TrainerConfig"
    ),
    "areal_x.protocols.trainer": "Trainer",
    "areal_x.protocols.backends": "Backend create_trainer",
    "areal_x.protocols.workflow": "EpisodeResult Generator Workflow",
    "areal_x.protocols.engine": "Completion Engine Request SamplingParams",
    "areal_x.protocols.speculation": "Speculation",
    "areal_x.engines.embedded": "EmbeddedConfig EmbeddedEngine",
    "areal_x.engines.vllm.config": "VLLMConfig",
    "areal_x.workflows.single_turn": "RewardedWorkflow SingleTurn encode text_of",
    "areal_x.workflows.supervised": "Demonstrations PreferencePairs",
    "areal_x.workflows.learned_reward": "LearnedReward",
    "areal_x.algorithms.algorithm": "Algorithm",
    "areal_x.algorithms.arrays": "importance_ratio masked",
    "areal_x.algorithms.weighting": "sequence_mean token_mean",
    "areal_x.algorithms.recipes": (
        "cispo dapo decoupled_ppo distill dpo dppo dr_grpo gmpo grpo gspo icepop ipo kpop "
        "lite_ppo m2po maxrl multi_distill opo ppo reinforce_pp remax reward_model rloo sapo self_distill "
        "sft turn_ppo"
    ),
    "areal_x.batching.gradients": "token_gradients",
    "areal_x.batching.packing": "pack",
    "areal_x.rollout.episode": "episode_of",
    "areal_x.rollout.queue": "TrajectoryQueue",
    "areal_x.rollout.rollout": "Rollout",
    "areal_x.rollout.runner": "Runner",
    "areal_x.run.forking": "fork_run",
    "areal_x.run.journal": "Journal JournalConfig",
    "areal_x.tasks.datasets": "Record load_dataset",
    "areal_x.tasks.stream": "TaskStream",
    "areal_x.hf.model_dir": "write_model",
    "areal_x.hf.image_reader": "load_image_reader image_urls",
    "areal_x.hf.tokenizer": "load_tokenizer",
    "areal_x.lab.token_view": "token_view",
    "areal_x.monitor.plot": "plot",
    "areal_x.monitor.timeline_plot": "plot_timeline",
    "areal_x.monitor.trackers": "TrackingConfig",
    "areal_x.monitor.trajectories": "show_trajectory show_turn trained",
}

__version__ = "0.1.0"
if not TYPE_CHECKING:  # to a type checker, every name would exist
    __getattr__, __dir__ = lazy_names(__name__, _NAMES)
