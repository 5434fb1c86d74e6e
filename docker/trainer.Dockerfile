# The trainer, for a reward server at TRAINER_REWARD__URL.
#   docker build -f docker/trainer.Dockerfile -t mar-grpo/trainer .
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
COPY docker/requirements/programs/trainer.txt /tmp/requirements.txt
RUN python3 -m venv /opt/venv \
    && grep '^torch==' /tmp/requirements.txt > /tmp/torch.txt \
    && /opt/venv/bin/python -m pip install --no-cache-dir --disable-pip-version-check --no-deps \
        --extra-index-url "${TORCH_INDEX}" -r /tmp/torch.txt \
    && /opt/venv/bin/python -m pip install --no-cache-dir --disable-pip-version-check -r /tmp/requirements.txt \
    && /opt/venv/bin/python -m pip uninstall --yes pip

# --- what runs: that and the code
FROM ${BASE_IMAGE}
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="mar-grpo trainer" \
      org.opencontainers.image.description="MAR-GRPO trainer for masked autoregressive image models" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
RUN useradd --system --uid 10001 --user-group --no-create-home --home-dir /tmp app \
    && install -d -o app -g app /runs /weights
COPY --from=packages /opt/venv /opt/venv
# the folders for what libraries keep lie in /tmp, since the root file system is read-only
ENV PATH=/opt/venv/bin:$PATH \
    PYTHONPATH=/app \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    HF_HOME=/weights \
    MPLCONFIGDIR=/tmp/matplotlib \
    TRAINER_REPORT__RUN_DIR=/runs/run
WORKDIR /app
COPY reward_server reward_server
COPY trainer trainer
COPY configs configs
USER 10001:10001
# SIGTERM: it saves a checkpoint before it ends
ENTRYPOINT ["python", "trainer/run.py"]
CMD ["--config", "configs/train/small.yaml", "--resume", "auto"]
# a run that ends is no illness and one that hangs on the server says so: there is nothing to probe
HEALTHCHECK NONE
