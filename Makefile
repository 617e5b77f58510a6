# kvcourse: `make lab` opens the course, `make test` tests it. Both need Python >= 3.11 with venv, and make.
#
#   PYTHON=python3.12 make lab    choose the interpreter that .venv is made with
#   make lab TORCH=cpu            on Linux: PyTorch's CPU build, a tenth of the download
#   make lab PORT=8889            another port
#   make test WORKERS=4           four tests at a time; each worker takes a core and up to 2 GiB (0: no workers)
#
# pip's own settings (PIP_INDEX_URL, PIP_FIND_LINKS, pip.conf ...) are honored.

PYTHON ?= python3
TORCH ?= default
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
PORT ?= 8888
UV ?= uv
WORKERS ?= 2

ifeq ($(OS),Windows_NT)
BIN = .venv/Scripts
else
BIN = .venv/bin
endif

# An interpreter that was asked for by name wins over the one an existing .venv was made with.
ifneq ($(origin PYTHON),file)
CHOSEN = --use-this-python
endif
INSTALL = command -v "$(PYTHON)" > /dev/null || \
  { echo "kvcourse: no interpreter $(PYTHON) on PATH: install Python >= 3.11 or choose one with PYTHON=..." >&2; exit 1; }; \
  "$(PYTHON)" install.py --torch $(TORCH) --torch-index $(TORCH_INDEX) $(CHOSEN)

.PHONY: help lab install test install-test lint unit chapters-test browser chapters lock clean

help:
	@echo "make lab       set up .venv and open the course in JupyterLab"
	@echo "make test      set up, then lint, unit tests, the notebooks, the browser tests"
	@echo "make chapters  run all notebooks again and store their outputs"
	@echo "make lint      ruff"
	@echo "make lock      resolve requirements.lock and requirements-test.lock again (needs uv)"
	@echo "make clean     remove caches; your work/ and .venv stay"

lab: install
	@$(BIN)/kvcourse lab --port $(PORT)

# install.py returns at once when nothing changed since the last set-up.
install:
	@$(INSTALL)

install-test:
	@$(INSTALL) --test

# One line after the other, so that -j changes nothing and the cheapest failure comes first. Without a network the
# tests that need the fetched model skip and say so. conftest.py says what the workers share out. One thread for each:
# two workers whose matrix products use two threads on two cores wait for each other most of the time.
PYTEST = $(BIN)/python -m pytest -q -rs -n $(WORKERS)
test: export OMP_NUM_THREADS = 1
test: export OPENBLAS_NUM_THREADS = 1
test: install-test
	$(BIN)/ruff check .
	-$(BIN)/kvcourse weights fetch smollm2-135m
	$(PYTEST) tests --ignore=tests/browser
	$(PYTEST) --nbval chapters
	$(PYTEST) tests/browser

lint: install-test
	$(BIN)/ruff check .

chapters: install-test
	$(BIN)/python tests/notebooks/make_chapters.py

# PyTorch brings its own CUDA packages where it needs them, so the locks name none of them. Triton is one of them,
# and has no part in the CPU build: the tests, which need it, lock the version that PyTorch's CUDA build asks for.
UV_COMPILE = $(UV) pip compile --quiet --universal --python-version 3.11 --no-annotate --no-header $(UPGRADE)
NOT_LOCKED = ^(nvidia-|cuda-)|sys_platform == 'emscripten'
lock:
	echo flit_core | $(UV_COMPILE) -o requirements.lock pyproject.toml - > /dev/null
	(echo "# All that the course needs to run. Made by 'make lock' from pyproject.toml; do not edit."; \
	  grep -v -E "$(NOT_LOCKED)|^(#|triton)" requirements.lock) > requirements.lock.new
	mv requirements.lock.new requirements.lock
	echo flit_core | $(UV_COMPILE) --extra test --extra kernels -c requirements.lock -o requirements-test.lock pyproject.toml - > /dev/null
	(echo "# What the tests need on top. Made by 'make lock' from pyproject.toml; do not edit."; \
	  echo "-r requirements.lock"; \
	  grep -v -E "$(NOT_LOCKED)|^#|^-r" requirements-test.lock | grep -v -x -F -f requirements.lock) > requirements-test.lock.new
	mv requirements-test.lock.new requirements-test.lock

clean:
	rm -rf .pytest_cache .ruff_cache .hypothesis build
	find . -name __pycache__ -not -path "./.venv/*" -prune -exec rm -rf {} +
