# The CPU deployment: the package with its bundled Triton; mount a directory with a YAML and its models at /work.
#   docker build -t specbuild . && docker run --rm --shm-size 1g -v "$PWD:/work" -p 8000-8002:8000-8002 specbuild serve configs/demo.yaml --address 0.0.0.0
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
HEALTHCHECK --interval=30s --timeout=5s --start-period=60s \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/v2/health/ready', timeout=3)"]
ENTRYPOINT ["specbuild"]
CMD ["--help"]
