# distbench in a container. Not built by us yet (docs/install.md).
#   docker build -t distbench --build-arg TORCH_INDEX=<the index of torch's CPU wheels> .
#   docker build -t distbench --build-arg BASE=<an image with Python, torch and CUDA> .
ARG BASE=python:3.12-slim
FROM ${BASE}

# Taken only where the base has no torch. TORCH_INDEX: the index of torch's CPU wheels, as pytorch.org names it; empty: pip's own,
# whose torch brings gigabytes of CUDA libraries.
ARG TORCH=torch==2.13.0
ARG TORCH_INDEX=
# Bases whose Python is the distribution's own (Ubuntu 24.04) refuse pip without this; a container has no other use of it.
ARG PIP_BREAK_SYSTEM_PACKAGES=1

# git: the run file's header names the commit, and ab checks revisions out.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends git \
    && rm -rf /var/lib/apt/lists/*

RUN python3 -c "import torch" 2>/dev/null \
    || python3 -m pip install --no-cache-dir ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "$TORCH"

COPY pyproject.toml setup.py constraints.txt README.md LICENSE /src/
COPY distbench /src/distbench
COPY scenarios /src/scenarios
# The base's own torch stays, whichever it is.
RUN grep --invert-match '^torch==' /src/constraints.txt > /tmp/constraints.txt \
    && python3 -m pip install --no-cache-dir --constraint /tmp/constraints.txt /src

# Ubuntu 24.04 has a user of that number already.
RUN useradd --create-home --non-unique --uid 1000 bench && mkdir -p /work/results && chown -R bench /work
USER bench
WORKDIR /work
# A container has another host name each time, and results of one machine go into one folder.
# USER: torch asks for the user's name, and `docker run --user` may give a number without one.
ENV DISTBENCH_MACHINE=container USER=bench
ENTRYPOINT ["distbench"]
CMD ["--help"]
