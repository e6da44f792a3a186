"""The trainer's contract under its public address; it lives in areal_x.protocols."""

from areal_x.protocols.backends import (
    Backend,
    Devices,
    create_trainer,
    find_backend,
    load_backend,
)
from areal_x.protocols.recorded_experts import recorded_experts
from areal_x.protocols.trainer import Scorer, Trainer, Wait, is_max_reduced
from areal_x.protocols.trainer_config import (
    CriticConfig,
    LoRAConfig,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    TrainerConfig,
)

__all__ = [
    "Backend",
    "CriticConfig",
    "Devices",
    "LoRAConfig",
    "MeshConfig",
    "ModelConfig",
    "OptimizerConfig",
    "Scorer",
    "Trainer",
    "TrainerConfig",
    "Wait",
    "create_trainer",
    "find_backend",
    "is_max_reduced",
    "load_backend",
    "recorded_experts",
]
