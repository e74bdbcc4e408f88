# echelon for one user that is not root: docker build --build-arg TORCH_INDEX=URL -t echelon . && docker run --rm echelon --version
# TORCH_INDEX is a package index with builds of torch for CPUs, or for your CUDA. Without it torch comes from pip's usual index; PyPI's
# build for Linux has CUDA with it, some gigabytes.
FROM python:3.11-slim-bookworm
ARG TORCH_INDEX=""
ARG TORCH="torch==2.13.0"
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY src ./src
# hadolint ignore=DL3013
RUN pip install --no-cache-dir ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "$TORCH" && pip install --no-cache-dir . && rm -rf /src
RUN useradd --create-home --uid 1000 echelon
USER 1000
WORKDIR /home/echelon
ENTRYPOINT ["echelon"]
CMD ["--help"]
