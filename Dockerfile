# Two images of one package; mount a directory with a YAML and its models at /work (`specbuild deploy` writes the rest).
#   docker build --target cpu -t specbuild:0.1.0-cpu .     # any machine, the bundled Triton
#   docker build --target gpu -t specbuild:0.1.0-gpu .     # builds and serves TensorRT engines
#   docker run --rm --shm-size 1g -v "$PWD:/work" -p 127.0.0.1:8000:8000 specbuild:0.1.0-cpu serve configs/demo.yaml --address 0.0.0.0

# TensorRT-LLM 1.0.0, its Triton backend and Python 3.12: the container whose engine format is known (compilers/trtllm_machine.py).
FROM nvcr.io/nvidia/tritonserver:25.10-trtllm-python-py3 AS gpu
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# sshd, by which the ranks of several nodes are started. Its version is the distribution's: old ones leave the archive, and builds would fail.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends openssh-server \
    && rm -rf /var/lib/apt/lists/* /etc/ssh/ssh_host_* \
    && useradd --create-home --uid 10001 --shell /bin/bash --password '*' specbuild
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY pipeline pipeline
COPY model_repo model_repo
# Into the container's own Python, which Triton's Python models run in, and beside what is there: every installed version is held, so that
# no dependency of ours replaces the torch or numpy that TensorRT-LLM was built with.
RUN pip list --format=freeze --exclude specbuild > /tmp/installed.txt \
    && PIP_CONSTRAINT="" pip install --no-cache-dir --break-system-packages --constraint /tmp/installed.txt . \
    && rm /tmp/installed.txt
USER 10001
WORKDIR /work
EXPOSE 8000 8001 8002
HEALTHCHECK --interval=30s --timeout=5s --start-period=1800s \
    CMD ["python3", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/v2/health/ready', timeout=3)"]
ENTRYPOINT ["specbuild"]
CMD ["--help"]

# The last stage is what `docker build` makes without --target.
FROM python:3.11.13-slim-bookworm AS cpu
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY pipeline pipeline
COPY model_repo model_repo
COPY scripts/constraints.txt scripts/constraints.txt
RUN pip install --no-cache-dir --constraint scripts/constraints.txt ".[cpu,serve]" \
    && useradd --create-home --uid 10001 specbuild
USER 10001
WORKDIR /work
EXPOSE 8000 8001 8002
HEALTHCHECK --interval=30s --timeout=5s --start-period=300s \
    CMD ["python3", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/v2/health/ready', timeout=3)"]
ENTRYPOINT ["specbuild"]
CMD ["--help"]
