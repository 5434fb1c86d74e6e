# The reward server's gateway: the HTTP API alone, in front of a Redis.
#   docker build -f docker/gateway.Dockerfile -t mar-grpo/gateway .
# Base of both stages, pinned by digest; any image with Python 3.11 or newer as python3 will do, such as one with CUDA.
ARG BASE_IMAGE=python:3.11-slim-bookworm@sha256:a36c24f9cbdf4fd0f52d67f0823eeac19c2028c637cecc392d97f980d4fec56b

# --- the packages, apart from the code: a changed line of code installs nothing again
FROM ${BASE_IMAGE} AS packages
# where pip finds packages, for a mirror: none of it stays in the image
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PIP_FIND_LINKS
ARG PIP_TRUSTED_HOST
COPY docker/requirements/programs/gateway.txt /tmp/requirements.txt
RUN python3 -m venv /opt/venv \
    && /opt/venv/bin/python -m pip install --no-cache-dir --disable-pip-version-check -r /tmp/requirements.txt \
    && /opt/venv/bin/python -m pip uninstall --yes pip setuptools

# --- what runs: that and the code
FROM ${BASE_IMAGE}
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="mar-grpo gateway" \
      org.opencontainers.image.description="HTTP API of the reward server" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
# a fixed user id, the same in all images: payload files are readable by their owner alone
RUN useradd --system --uid 10001 --user-group --no-create-home --home-dir /tmp app \
    && install -d -o app -g app -m 0700 /spool
COPY --from=packages /opt/venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH \
    PYTHONPATH=/app \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    REWARD_SERVER_HOST=0.0.0.0
WORKDIR /app
COPY docker/health.py docker/health.py
COPY reward_server reward_server
USER 10001:10001
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=30s --retries=3 CMD ["python", "docker/health.py", "gateway"]
ENTRYPOINT ["python", "-P", "-m", "reward_server"]
CMD ["gateway"]
