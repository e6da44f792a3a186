# AReaL-X with a backend, as a user without privileges; docs/installation.md has the commands.
#
#   BASE      an image with Python 3.11 to 3.13, or one with apt, from which Python is installed
#   BACKENDS  "jax", "torch" or both
#   EXTRAS    of the core, separated by commas: "agents,math" on a CPU, "cuda" or "vllm" on NVIDIA GPUs
#   LOCKED    "yes" installs the versions of constraints.txt, which are those of the CPU builds; "no" the newest
ARG BASE=python:3.12-slim
FROM ${BASE} AS build
RUN command -v python3 && python3 -m venv --help > /dev/null \
    || (apt-get update && apt-get install -y --no-install-recommends python3 python3-venv && rm -rf /var/lib/apt/lists/*)
RUN python3 -m venv /opt/areal_x
ENV PATH=/opt/areal_x/bin:${PATH} PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
COPY . /source
WORKDIR /source
ARG BACKENDS=jax
ARG EXTRAS=agents,math
ARG LOCKED=yes
RUN projects=""; for backend in ${BACKENDS}; do projects="${projects} ./backends/${backend}"; done; \
    constraints=""; if [ "${LOCKED}" = yes ]; then constraints="--constraint constraints.txt"; fi; \
    pip install ${constraints} ".[${EXTRAS}]" ${projects}

FROM ${BASE}
RUN command -v python3 || (apt-get update && apt-get install -y --no-install-recommends python3 && rm -rf /var/lib/apt/lists/*)
RUN useradd --create-home --uid 10001 areal
COPY --from=build /opt/areal_x /opt/areal_x
ENV PATH=/opt/areal_x/bin:${PATH}
RUN mkdir -p /work/runs && cd /work && for name in $(areal-x example | cut -d' ' -f1); do areal-x example "${name}" > /dev/null; done \
    && chown -R areal /work
USER areal
WORKDIR /work
VOLUME /work/runs
ENTRYPOINT ["areal-x"]
CMD ["--help"]
