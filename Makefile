# Every target sets up what it needs: a virtual environment of its own in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Tests at a time: one for each of two cores.
WORKERS ?= 2
# Training runs share the cores out themselves.
export TOKENIZERS_PARALLELISM ?= false
# Each of many processes would compile PyTorch's modules again, which takes most of their start.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-all fuzz lint format docs tour bench bench-gpu constraints clean

demo: $(VENV)/.run  ## train six variants side by side and report (about 6 minutes on 2 cores)
	$(BIN)/softmax-rnn compare softmax norm gate linear_elu linear_relu linear_cosine --preset demo --out runs/demo

test: $(VENV)/.dev  ## the tests that need no compiler and no processes, one case of each that does, half of long sweeps
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m 'not slow'

test-all: $(VENV)/.dev  ## all tests
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

SECONDS ?= 120
fuzz: $(VENV)/.dev  ## property tests with fresh examples: make fuzz SECONDS=600, and SEED=1 to repeat
	$(BIN)/python -m pytest -m hypothesis --fuzz $(SECONDS) $(SEED:%=--hypothesis-seed=%)

lint: $(VENV)/.dev  ## style, format, types and the layers of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: $(VENV)/.dev  ## the site, in build/site, and its search and slider in a browser, if there is one
	$(BIN)/python -m sphinx -q -W --keep-going docs build/site
	SITE=build/site $(BIN)/python -m pytest tests/test_site.py

tour: $(VENV)/.dev  ## run docs/tour.py, and write docs/tour.ipynb with its outputs
	cd docs && ../$(BIN)/python -c "import jupytext, nbclient; book = jupytext.read('tour.py'); \
		nbclient.NotebookClient(book, record_timing=False, coalesce_streams=True).execute(); \
		jupytext.write(book, 'tour.ipynb')"

format: $(VENV)/.dev  ## mend style and format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.dev  ## speed and memory on the CPU, and docs/performance.md (about 20 minutes on 2 cores)
	$(BIN)/python -m benchmarks.op
	$(BIN)/python -m benchmarks.forgetting
	$(BIN)/python -m benchmarks.recurrence
	$(BIN)/python -m benchmarks.choice
	$(BIN)/python -m benchmarks.step
	$(BIN)/python -m benchmarks.decode
	$(BIN)/python -m benchmarks.prepare
	$(BIN)/python -m benchmarks.packing
	$(BIN)/python -m benchmarks.prefix
	$(BIN)/python docs/performance.py

bench-gpu: $(VENV)/.dev  ## the same on a GPU; benchmarks.gpu_session: the most important
	$(BIN)/python -m benchmarks.op --device cuda
	$(BIN)/python -m benchmarks.recurrence --device cuda
	$(BIN)/python -m benchmarks.step --device cuda
	$(BIN)/python -m benchmarks.decode --device cuda
	$(BIN)/python docs/performance.py

constraints: $(VENV)/.dev  ## write down the versions installed now
	$(BIN)/pip freeze --exclude-editable | sed 's/+cpu$$//' > constraints.txt

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "softmax-rnn needs Python 3.11 or newer; name one with make PYTHON=..."; exit 1; }
	$(PYTHON) -m venv $(VENV)

# Without compiling: most modules are never imported.
$(VENV)/.run: $(VENV)/bin/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt -e '.[report]'
	touch $@

$(VENV)/.dev: $(VENV)/bin/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@ $(VENV)/.run

clean:
	rm -rf $(VENV) build dist src/*.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
