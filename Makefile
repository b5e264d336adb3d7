# `make generate` and `make test` need nothing but Python 3.11 and the network: they set up .venv themselves, once.
#
# torch is installed first and alone, as constraints.txt pins it. On Linux the default package index serves its CUDA
# build, which runs on a CPU too but is large. For the CPU build point pip at an index that has it, by pip's usual
# variables (PIP_INDEX_URL, PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS) or pip.conf: 2.13.0+cpu then satisfies the pin and wins.

PYTHON ?= $(shell command -v python3.11 || echo python3)
BIN := .venv/bin
READY := .venv/.ready
DOCS_READY := .venv/.docs-ready
# A worker a core. What a process frees stays its own, up to 256 MiB: with memory that is cleared anew each time, a part of
# the tests took 114 s in the place of 82.
PYTEST := OMP_NUM_THREADS=1 MALLOC_MMAP_THRESHOLD_=33554432 MALLOC_TRIM_THRESHOLD_=268435456 \
	$(BIN)/python -m pytest -q -n auto --dist worksteal

# Taken as it stands, `$` included, and handed to the shell through the environment: no character needs quoting twice.
override PROMPT := $(value PROMPT)
export PROMPT

.DEFAULT_GOAL := help
.PHONY: help generate test test-rest long test-engines engine-signatures verify lint wheel pages docs docs-serve changelog clean

help: ## show this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1\t\2/p' Makefile | expand -t 16

generate: $(READY) ## answer a few prompts, or yours: PROMPT="..."; more options: ARGS="--max-tokens 200"
	@$(BIN)/attn-backends generate $${PROMPT:+--prompt "$$PROMPT"} $(ARGS) </dev/null

test: $(READY) ## run the tests; a part of them: ARGS="tests/engine/test_config.py -x"
	$(PYTEST) $(ARGS)

test-rest: $(READY) ## run the tests that `make test` leaves out, most of them of interpreted and emulated kernels
	$(PYTEST) --long -m rest $(ARGS)

long: $(READY) ## run all tests, with those that `make test` leaves out as they are more of the same
	$(PYTEST) --long $(ARGS)

engine-signatures: $(READY) ## make tests/engines/signatures.json anew, from the wheels of all versions that adapters serve
	$(BIN)/python tests/engines/signatures.py

test-engines: ## run the adapters inside the engines themselves, each in an environment of its own: ARGS=sglang
	.ci/engines $(ARGS)

verify: $(READY) ## random cases against float64, half a minute; a backend for longer: ARGS="TORCH --minutes 5"
ifdef ARGS
	$(BIN)/attn-backends verify $(ARGS)
else
	$(BIN)/attn-backends verify TORCH --device cpu --cases 80
	TRITON_INTERPRET=1 $(BIN)/attn-backends verify TRITON --device cpu --cases 4
endif

lint: $(READY) ## ruff and mypy, as .ci/run runs them
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict attn_backends registry.py tests/emulated

wheel: $(READY) ## build dist/*.whl and check what is in it
	rm -rf build dist
	$(BIN)/python -m build --wheel
	$(BIN)/python .ci/check_wheel.py dist/*.whl

pages: $(READY) ## make the generated pages of docs/ anew: measurements, what ran, the support matrix, the modules
	$(BIN)/python -m benchmarks correctness what_ran
	$(BIN)/python -m benchmarks docs measured
	$(BIN)/python -m benchmarks docs support
	$(BIN)/python -m benchmarks docs contract
	$(BIN)/python -m benchmarks docs modules

docs: $(DOCS_READY) ## build the site into site/; a page that is not found, or a link that leads nowhere, is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

docs-serve: $(DOCS_READY) ## show the site while pages are edited
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

changelog: $(READY) ## put the fragments of changelog.d/ into CHANGELOG.md; see what comes: ARGS=--draft
	$(BIN)/python changelog.d/collect.py $(ARGS)

clean: ## remove .venv and everything built
	rm -rf .venv build dist site *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis

$(READY): pyproject.toml setup.cfg constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install -c constraints.txt torch
	$(BIN)/python -m pip install -c constraints.txt -e ".[hf,dev]"
	@touch $@

$(DOCS_READY): $(READY)
	$(BIN)/python -m pip install -c constraints.txt -e ".[docs]"
	@touch $@

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo \
	  "$(PYTHON) is not Python 3.11 or newer. Install it (Debian: apt install python3.11 python3.11-venv)," \
	  "or name one: make PYTHON=/path/to/python3.11 ..." >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' || { echo \
	  "$(PYTHON) cannot make a virtual environment. On Debian: apt install python3-venv" >&2; exit 1; }
	$(PYTHON) -m venv .venv
