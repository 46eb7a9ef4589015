# Everything here needs only Python 3.11 or newer, pip and make; what else it takes is installed into
# .venv on first use. `make` alone lists the commands.

# Tried in this order; `make test PYTHON=/path/to/python3.12` asks for one.
PYTHON ?= python3 python3.13 python3.12 python3.11
VENV   ?= .venv
# TF-Agents and Reverb stopped at Python 3.11 and NumPy 1.26, so that they have an environment of their own.
REVERB_PYTHON ?= python3.11
REVERB_VENV   ?= .venv-reverb
# LeRobot 0.4.4, the last one for Python 3.11, wants other versions of datasets, PyAV and the Hub's client.
LEROBOT_PYTHON ?= python3.11
LEROBOT_VENV   ?= .venv-lerobot
PY     := $(VENV)/bin/python
# Without --no-compile pip compiles 22,000 modules, of which the commands import some thousand: Python compiles those.
INSTALL := -m pip --disable-pip-version-check install --quiet --no-compile
# Passed on to what a command runs: make test ARGS="-k store -x"
ARGS   ?=
# Processes that run the tests; slow ones often wait for a program of theirs.
JOBS   ?= 2
SLOW_JOBS ?= 3
# Tests start hundreds of processes: what Python compiles is kept, whatever the environment says.
unexport PYTHONDONTWRITEBYTECODE

# The import packages that exist so far.
PACKAGES := $(patsubst %/__init__.py,%,$(wildcard mouse_core/__init__.py adapters/*/__init__.py))

.NOTPARALLEL:
.DEFAULT_GOAL := help
.PHONY: help demo test test-slow test-long test-trainers test-reverb test-lerobot bench bench-scale bench-video lint format types docs docs-serve wheel-check release clean distclean

help:  ## list the commands
	@grep -E '^[a-z-]+:.*## ' $(firstword $(MAKEFILE_LIST)) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1|\2/' | \
	  awk -F'|' '{ printf "%-20s %s\n", $$1, $$2 }'

demo: $(VENV)/.installed-demo  ## record, store, load, train and play, then the same batches in PyTorch and in JAX
	$(PY) -m scripts.notebooks offline study $(ARGS)

test: $(VENV)/.installed-test  ## run the tests
	$(PY) -m pytest -n $(JOBS) --dist worksteal $(ARGS)

test-slow: $(VENV)/.installed-test  ## run the tests that take long
	$(PY) -m pytest -m 'slow and not long' -n $(SLOW_JOBS) --dist worksteal $(ARGS)

test-long: $(VENV)/.installed-test $(VENV)/.installed-trainers  ## run those that take longest: trainings to their end, kills at every step
	$(PY) -m pytest -m long -n $(JOBS) --dist worksteal $(ARGS)

test-trainers: $(VENV)/.installed-trainers  ## run the tests with other people's trainers, on several processes
	$(PY) -m pytest -m 'trainers and not long' tests/trainers tests/test_docs.py $(ARGS)

test-reverb: $(REVERB_VENV)/.installed  ## run the tests that need TF-Agents and a Reverb server, in an environment of theirs
	TF_CPP_MIN_LOG_LEVEL=3 $(REVERB_VENV)/bin/python -m pytest tests/reverb $(ARGS)

test-lerobot: $(LEROBOT_VENV)/.installed  ## run the tests that need LeRobot's own reader, in an environment of its own
	LD_LIBRARY_PATH=$(LEROBOT_VENV)/ffmpeg $(LEROBOT_VENV)/bin/python -m pytest -p no:cacheprovider tests/lerobot $(ARGS)

bench: $(VENV)/.installed-bench  ## measure against peers and write docs/benchmarks.md; ARGS=--quick takes six minutes
	$(PY) -m tests.bench $(ARGS)

bench-scale: $(VENV)/.installed-bench  ## the same on 100 million steps, which need 26 GB of disk
	$(PY) -m tests.bench --scale $(ARGS)

bench-video: $(VENV)/.installed-bench $(LEROBOT_VENV)/.installed  ## frames of videos beside LeRobot's reader and torchcodec
	$(PY) -m tests.bench.video out/bench-video --peers $(LEROBOT_VENV) $(ARGS)
	$(PY) -m tests.bench.video_folders out/bench-video --peers $(LEROBOT_VENV)

lint: $(VENV)/.installed-dev  ## check style and formatting
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

format: $(VENV)/.installed-dev  ## mend style and formatting
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

types: $(VENV)/.installed-test $(VENV)/.installed-dev  ## check the types of the packages, strictly
	$(PY) -m mypy $(PACKAGES)

docs: $(VENV)/.installed-docs  ## build the documentation into site/ and check its links
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict
	$(PY) scripts/check_links.py site

docs-serve: $(VENV)/.installed-docs  ## show the documentation in a browser, following edits
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs serve

wheel-check: $(VENV)/.installed-dev  ## build the wheel twice, use it in an empty environment, and with the oldest versions; ARGS=--extras
	$(PY) -m scripts.check_wheel $(ARGS)

release: $(VENV)/.installed-dev  ## build the wheel, the sdist and SHA256SUMS of this commit into dist/
	$(PY) -m scripts.release $(ARGS)

clean:  ## remove what was built
	rm -rf build dist site out .pytest_cache .mypy_cache .ruff_cache .hypothesis .jax_cache *.egg-info adapters/*.egg-info
	find mouse_core adapters tests examples scripts -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean  ## the same, and .venv
	rm -rf $(VENV) $(REVERB_VENV) $(LEROBOT_VENV)

# The first of the candidates that exists and is new enough makes the environment.
$(PY):
	@for python in $(PYTHON); do \
	  if "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	    echo "Making $(VENV) with $$python"; \
	    "$$python" -m venv $(VENV) && exit 0; \
	    rm -rf $(VENV); \
	    echo "$$python cannot make a virtual environment; on Debian and Ubuntu: apt install python3-venv" >&2; \
	    exit 1; \
	  fi; \
	done; \
	echo "Needs Python 3.11 or newer; found none of: $(PYTHON). Try: make PYTHON=/path/to/python3" >&2; exit 1

# One stamp for each extra, renewed when the requirements, the pins or the set of packages change. Of several, with commas
# between them, pip is asked once, which it takes 10 s to answer even if all is there.
comma := ,
$(VENV)/.installed-%: pyproject.toml constraints.txt $(addsuffix /__init__.py,$(PACKAGES)) | $(PY)
	@echo "Installing what 'make $(MAKECMDGOALS)' needs into $(VENV) (the first time takes some minutes)"
	$(PY) $(INSTALL) -c constraints.txt -e '.[$*]'
	@touch $@ $(addprefix $(VENV)/.installed-,$(subst $(comma), ,$*))

$(REVERB_VENV)/.installed: pyproject.toml tests/reverb/requirements.txt
	@echo "Installing TF-Agents and Reverb into $(REVERB_VENV): 2 GB, some minutes"
	$(REVERB_PYTHON) -m venv $(REVERB_VENV)
	$(REVERB_VENV)/bin/python $(INSTALL) -r tests/reverb/requirements.txt -e .
	$(REVERB_VENV)/bin/python $(INSTALL) --no-deps tf-agents==0.19.0
	$(REVERB_VENV)/bin/python $(INSTALL) --no-deps --no-build-isolation gym==0.23.0
	@touch $@

$(LEROBOT_VENV)/.installed: tests/lerobot/requirements.txt tests/lerobot/environment.py
	@echo "Installing LeRobot and torchcodec into $(LEROBOT_VENV): 1.6 GB, some minutes"
	$(LEROBOT_PYTHON) -m venv $(LEROBOT_VENV)
	$(LEROBOT_VENV)/bin/python $(INSTALL) -r tests/lerobot/requirements.txt
	$(LEROBOT_VENV)/bin/python $(INSTALL) --no-deps lerobot==0.4.4 torchvision==0.28.0
	$(LEROBOT_VENV)/bin/python tests/lerobot/environment.py $(CURDIR)/$(LEROBOT_VENV)/ffmpeg
	@touch $@
