# A worker: one reward model, named by REWARD, with what its lock file docker/requirements/REWARD.txt holds.
#   docker build -f docker/worker.Dockerfile --build-arg REWARD=hpsv2 -t mar-grpo/worker-hpsv2 .
# Base of both stages, pinned by digest; any image with Python 3.11 or newer as python3 will do, such as one with CUDA.
ARG BASE_IMAGE=python:3.11-slim-bookworm@sha256:a36c24f9cbdf4fd0f52d67f0823eeac19c2028c637cecc392d97f980d4fec56b

# --- the packages, apart from the code: a changed line of code installs nothing again
FROM ${BASE_IMAGE} AS packages
# torch alone is from there: its CPU build, or, with a GPU, --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu130
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
# where pip finds packages, for a mirror: none of it stays in the image
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PIP_FIND_LINKS
ARG PIP_TRUSTED_HOST
ARG REWARD
COPY docker/requirements/${REWARD}.txt /tmp/requirements.txt
RUN python3 -m venv /opt/venv \
    && { grep '^torch==' /tmp/requirements.txt > /tmp/torch.txt || true; } \
    && /opt/venv/bin/python -m pip install --no-cache-dir --disable-pip-version-check --no-deps \
        --extra-index-url "${TORCH_INDEX}" -r /tmp/torch.txt \
    && /opt/venv/bin/python -m pip install --no-cache-dir --disable-pip-version-check -r /tmp/requirements.txt \
    && /opt/venv/bin/python -m pip uninstall --yes pip

# --- what runs: that and the code
FROM ${BASE_IMAGE}
ARG REWARD
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="mar-grpo worker-${REWARD}" \
      org.opencontainers.image.description="Worker of the reward server for the reward ${REWARD}" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
# a fixed user id, the same in all images: payload files are readable by their owner alone
RUN useradd --system --uid 10001 --user-group --no-create-home --home-dir /tmp app \
    && install -d -o app -g app -m 0700 /spool /weights
COPY --from=packages /opt/venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH \
    PYTHONPATH=/app \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    HF_HOME=/weights \
    REWARD_SERVER_REWARD=${REWARD}
WORKDIR /app
COPY docker/health.py docker/health.py
COPY reward_server reward_server
USER 10001:10001
# loading a large model takes minutes; it counts as healthy with its first sign of life
HEALTHCHECK --interval=10s --timeout=10s --start-period=600s --retries=3 CMD ["python", "docker/health.py", "worker"]
# SIGTERM: it finishes the batch in hand and gives the rest back, so stop it with a grace period longer than a batch
ENTRYPOINT ["python", "-P", "-m", "reward_server"]
CMD ["worker"]
