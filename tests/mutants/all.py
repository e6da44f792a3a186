"""Every planted bug."""

from __future__ import annotations

from tests.mutants import (
    of_algorithms,
    of_benchmarks,
    of_clients,
    of_code,
    of_containers,
    of_ends,
    of_gateway_workers,
    of_images_and_meshes,
    of_kept,
    of_models,
    of_networks,
    of_notebooks,
    of_runs,
    of_servers,
    of_speculation,
    of_stages,
    of_teachers,
    of_templates,
    of_tinker,
    of_trainers,
)

MUTANTS = [
    *of_algorithms.MUTANTS,
    *of_benchmarks.MUTANTS,
    *of_code.MUTANTS,
    *of_containers.MUTANTS,
    *of_trainers.MUTANTS,
    *of_runs.MUTANTS,
    *of_ends.MUTANTS,
    *of_gateway_workers.MUTANTS,
    *of_kept.MUTANTS,
    *of_models.MUTANTS,
    *of_images_and_meshes.MUTANTS,
    *of_servers.MUTANTS,
    *of_speculation.MUTANTS,
    *of_stages.MUTANTS,
    *of_notebooks.MUTANTS,
    *of_networks.MUTANTS,
    *of_clients.MUTANTS,
    *of_tinker.MUTANTS,
    *of_templates.MUTANTS,
    *of_teachers.MUTANTS,
]
