# `make run` and `make test` set up everything that they need in .venv; other targets build on that.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
AGENT := cartpole-policy-gradient
STAMP := $(VENV)/.installed

.PHONY: run test lint unit native integration peers emulation bench clean

run: $(STAMP)
	$(BIN)/rvbundle build recipes/$(AGENT)/recipe.toml
	cd dist && ../$(BIN)/rvbundle run $(AGENT)-1.0.0.rvb -- --episodes 50

test: lint unit native integration

$(STAMP): pyproject.toml $(wildcard runtime/native/*.c runtime/native/*.h runtime/native/*.py)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	touch $@

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

unit: $(STAMP)
	$(BIN)/python -m pytest tests/unit

native: $(STAMP)
	$(BIN)/python -m pytest tests/native

integration: $(STAMP)
	$(BIN)/python -m pytest tests/bad tests/integration tests/emulation

# Others' test suites, inside an image and outside: takes an hour.
peers: $(STAMP)
	$(BIN)/python -m pytest -s tests/peers

# Self-running files on riscv64 boards in QEMU, with Debian's kernel and busybox. Took 40 minutes on two
# cores that others used too, half of them to build the files; 20 minutes of processor time.
emulation: $(STAMP)
	$(BIN)/python -m pytest -s tests/machine

bench: $(STAMP)
	$(BIN)/python tests/benchmarks/bench.py

clean:
	rm -rf $(VENV) build runtime/rvbundle_runtime/native dist/*.rvb dist/*.run .mypy_cache .ruff_cache .pytest_cache
