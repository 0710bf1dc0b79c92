# The images of Quire, one target each: frontend, scheduler, worker (CPU), worker-cuda.
# From the repository's root:
#   docker build --target frontend --tag quire-frontend:0.1.0 .
#   docker build --target scheduler --tag quire-scheduler:0.1.0 .
#   docker build --target worker --tag quire-worker:0.1.0 .
#   docker build --target worker-cuda --tag quire-worker:0.1.0-cuda .
# torch: PyPI's build for x86-64 runs on CPUs too, but brings several GB of CUDA libraries. For a small CPU image name
# the package index of torch's CPU builds: --build-arg PIP_EXTRA_INDEX_URL=...
# DL3008 is ignored below: Debian packages should have the latest security fixes.
ARG PYTHON=3.12
# Any image of Debian with Python 3.11 or newer as `python`, with venv: tests/deploy/images makes one. By digest, so that a
# build can be repeated: --build-arg BASE=python@sha256:...
ARG BASE=python:${PYTHON}-slim-bookworm
# Base of the final images: anything with the same Python at the same path. It needs no shell and no package manager.
# The GPU image is based on BASE, whose gcc Triton needs.
ARG RUNTIME=${BASE}

# ---------------------------------------------------------------- build stages
FROM ${BASE} AS tools
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
# For strip.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends binutils \
    && rm -rf /var/lib/apt/lists/*
RUN groupadd --gid 10001 quire \
    && useradd --uid 10001 --gid quire --no-create-home --shell /usr/sbin/nologin quire \
    && mkdir /var/cache/quire
WORKDIR /src
# Requirements of pyproject.toml, here and below, before any source: these layers are cached until a requirement changes.
COPY pyproject.toml LICENSE ./
COPY shared/version.py shared/
RUN --mount=type=cache,target=/root/.cache/pip \
    python -m venv /opt/build && /opt/build/bin/pip install '.[build]'

# Code shared by frontends and schedulers, with the protocol modules.
FROM tools AS sources
COPY protos protos
COPY shared shared
COPY quire quire
RUN /opt/build/bin/python -m quire.protos.generate
# For `quire --version`; empty: unknown.
ARG QUIRE_COMMIT=
RUN printf '%s' "${QUIRE_COMMIT}" > shared/commit.txt

# The worker's code, with the CPU kernels (for GPUs, too: the host looks for n-grams).
FROM tools AS worker-wheel
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
COPY setup.py ./
COPY protos protos
COPY shared shared
COPY kernels kernels
COPY quire quire
COPY services/worker services/worker
# x86-64-v3 (AVX2 and FMA) runs on every server CPU of the last ten years; x86-64-v4 adds AVX-512.
ARG CPU_ARCH=x86-64-v3
ARG QUIRE_COMMIT=
RUN QUIRE_COMMIT="${QUIRE_COMMIT}" KERNELS_ARCH="${CPU_ARCH}" /opt/build/bin/pip wheel --no-deps --no-build-isolation --wheel-dir /wheel .

# Runtime of a service without a GPU: user and settings file, no code yet.
FROM ${RUNTIME} AS runtime
COPY --from=tools /etc/passwd /etc/group /etc/
COPY k8s/base/quire.yaml /etc/quire/quire.yaml
ENV PATH=/opt/quire/bin:${PATH} \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    GLIBC_TUNABLES=glibc.malloc.arena_max=1:glibc.malloc.tcache_max=128 \
    QUIRE_CONFIG=/etc/quire/quire.yaml
USER 10001:10001
STOPSIGNAL SIGTERM
ENTRYPOINT ["quire"]

# ---------------------------------------------------------------- frontend
# Serves clients. No torch, no model weights; contains the bundled model's tokenizer.
FROM tools AS build-frontend
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
RUN --mount=type=cache,target=/root/.cache/pip \
    python -m venv --without-pip /opt/quire && /opt/build/bin/pip --python /opt/quire install '.[frontend]'
COPY --from=sources /src /src
COPY services/frontend services/frontend
RUN --mount=type=cache,target=/root/.cache/pip \
    /opt/build/bin/pip --python /opt/quire install --no-deps --force-reinstall . \
    && find /opt/quire -type d -name tests -prune -exec rm -r {} +
# Debug information is most of some libraries. numpy's wheel contains rewritten libraries, which are not stripped.
RUN find /opt/quire -name '*.so' -not -path '*/numpy*' -exec strip --strip-unneeded {} +
WORKDIR /
RUN find /opt/quire/lib/python*/site-packages/quire/tiny -name '*.safetensors' -delete \
    && ln -s "$(/opt/quire/bin/python -c 'from quire import bundled; print(bundled.FOLDER)')" /opt/quire/quire-tiny

FROM runtime AS frontend
LABEL org.opencontainers.image.title="quire-frontend" \
      org.opencontainers.image.description="Quire: gRPC and OpenAI HTTP edge of an LLM inference cluster" \
      org.opencontainers.image.version="0.1.0" \
      org.opencontainers.image.licenses="Apache-2.0"
COPY --from=build-frontend /opt/quire /opt/quire
# Fails where RUNTIME has another Python, or lacks a library.
RUN ["python", "-c", "import quire.services.frontend.main"]
# gRPC; OpenAI HTTP, /health and /metrics
EXPOSE 50051 8000
HEALTHCHECK --interval=5s --timeout=4s --start-period=60s --retries=6 \
    CMD ["quire", "health", "--grpc-port", "50051"]
CMD ["frontend"]

# ---------------------------------------------------------------- scheduler
# Plans every step. No torch, no tokenizer, no model.
FROM tools AS build-scheduler
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
RUN --mount=type=cache,target=/root/.cache/pip \
    python -m venv --without-pip /opt/quire && /opt/build/bin/pip --python /opt/quire install '.[scheduler]'
COPY --from=sources /src /src
COPY services/scheduler services/scheduler
RUN --mount=type=cache,target=/root/.cache/pip \
    /opt/build/bin/pip --python /opt/quire install --no-deps --force-reinstall . \
    && find /opt/quire -type d -name tests -prune -exec rm -r {} +
RUN find /opt/quire -name '*.so' -not -path '*/numpy*' -exec strip --strip-unneeded {} +
WORKDIR /
RUN rm -r /opt/quire/lib/python*/site-packages/quire/tiny

FROM runtime AS scheduler
LABEL org.opencontainers.image.title="quire-scheduler" \
      org.opencontainers.image.description="Quire: schedules the steps of an LLM inference cluster and owns its KV blocks" \
      org.opencontainers.image.version="0.1.0" \
      org.opencontainers.image.licenses="Apache-2.0"
COPY --from=build-scheduler /opt/quire /opt/quire
RUN ["python", "-c", "import quire.services.scheduler.main"]
# gRPC; /metrics
EXPOSE 50052 9102
HEALTHCHECK --interval=5s --timeout=4s --start-period=60s --retries=6 \
    CMD ["quire", "health", "--grpc-port", "50052"]
CMD ["scheduler"]

# ---------------------------------------------------------------- worker-cuda
# Nothing of the extra `cuda` is compiled here: its packages bring CUDA's libraries and ptxas, Triton's and CuTe's kernels are
# compiled where they run. So there is no image of CUDA below, but the driver has to know CUDA 13 (580 or newer).
FROM tools AS build-worker-cuda
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
RUN --mount=type=cache,target=/root/.cache/pip \
    python -m venv --without-pip /opt/quire && /opt/build/bin/pip --python /opt/quire install '.[worker,cuda]'
COPY --from=worker-wheel /wheel /wheel
RUN /opt/build/bin/pip --python /opt/quire install --no-deps --force-reinstall /wheel/*.whl \
    && find /opt/quire -type d -name tests -prune -exec rm -r {} +
WORKDIR /
RUN /opt/quire/bin/python -c 'from quire.kernels.cpu import built; (built.BUILD / built.LIBRARY).stat()' \
    && ln -s "$(/opt/quire/bin/python -c 'from quire import bundled; print(bundled.FOLDER)')" /opt/quire/quire-tiny \
    && /opt/quire/bin/python -c 'import quire.services.worker.service'

FROM ${BASE} AS worker-cuda
LABEL org.opencontainers.image.title="quire-worker" \
      org.opencontainers.image.description="Quire: executes steps on GPUs" \
      org.opencontainers.image.version="0.1.0" \
      org.opencontainers.image.licenses="Apache-2.0"
# gcc and Python's headers, which python images have: Triton compiles its launchers on first use.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && headers="$(python -c 'import sysconfig; print(sysconfig.get_path("include"))')" \
    && if [ ! -e "${headers}/Python.h" ]; then apt-get install --yes --no-install-recommends libpython3-dev; fi \
    && rm -rf /var/lib/apt/lists/* \
    && groupadd --gid 10001 quire \
    && useradd --uid 10001 --gid quire --no-create-home --shell /usr/sbin/nologin quire \
    && install --directory --owner=quire --group=quire /var/cache/quire
COPY --from=build-worker-cuda /opt/quire /opt/quire
COPY k8s/base/quire.yaml /etc/quire/quire.yaml
ENV PATH=/opt/quire/bin:${PATH} \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    HF_HUB_OFFLINE=1 \
    XDG_CACHE_HOME=/var/cache/quire \
    TRITON_CACHE_DIR=/var/cache/quire/triton \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    GLIBC_TUNABLES=glibc.malloc.arena_max=1:glibc.malloc.tcache_max=512 \
    QUIRE_CONFIG=/etc/quire/quire.yaml \
    QUIRE_WORKER_DEVICE=cuda
USER 10001:10001
# gRPC (health); /metrics
EXPOSE 50053 9103
STOPSIGNAL SIGTERM
# A large model may take half an hour to load.
HEALTHCHECK --interval=5s --timeout=4s --start-period=1800s --retries=6 \
    CMD ["quire", "health", "--grpc-port", "50053"]
ENTRYPOINT ["quire"]
CMD ["worker"]

# ---------------------------------------------------------------- worker
FROM tools AS build-worker
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
RUN --mount=type=cache,target=/root/.cache/pip \
    python -m venv --without-pip /opt/quire && /opt/build/bin/pip --python /opt/quire install '.[worker]'
COPY --from=worker-wheel /wheel /wheel
RUN /opt/build/bin/pip --python /opt/quire install --no-deps --force-reinstall /wheel/*.whl \
    && find /opt/quire -type d -name tests -prune -exec rm -r {} +
WORKDIR /
RUN /opt/quire/bin/python -c 'from quire.kernels.cpu import built; (built.BUILD / built.LIBRARY).stat()' \
    && ln -s "$(/opt/quire/bin/python -c 'from quire import bundled; print(bundled.FOLDER)')" /opt/quire/quire-tiny

FROM runtime AS worker
LABEL org.opencontainers.image.title="quire-worker" \
      org.opencontainers.image.description="Quire: executes steps on a CPU" \
      org.opencontainers.image.version="0.1.0" \
      org.opencontainers.image.licenses="Apache-2.0"
COPY --from=tools --chown=10001:10001 /var/cache/quire /var/cache/quire
COPY --from=build-worker /opt/quire /opt/quire
ENV HF_HUB_OFFLINE=1 \
    XDG_CACHE_HOME=/var/cache/quire \
    GLIBC_TUNABLES=glibc.malloc.arena_max=1:glibc.malloc.tcache_max=512
RUN ["python", "-c", "import quire.services.worker.service"]
# gRPC (health); /metrics
EXPOSE 50053 9103
HEALTHCHECK --interval=5s --timeout=4s --start-period=300s --retries=6 \
    CMD ["quire", "health", "--grpc-port", "50053"]
CMD ["worker"]
