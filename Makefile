# make test          the environment and the test suite, on two processes
# make test-kernels  Triton's interpreter and the torch.compile matrix
# make test-processors  the rooms of numerics as an older processor computes them
# make test-lowest   the suite at the lowest versions that pyproject.toml allows
# make test-versions  the suite at the newest and at the lowest versions, and on Python 3.13
# make test-nightly  loading and training with transformers' main branch, or TRANSFORMERS=…: what broke
# make test-consumers   the blocks of docs/use.md and of GenAI with the packages that they need
# make test-neighbours  one process with llm-compressor, peft, sentence-transformers, optimum, timm and diffusers
# make test-wheel    the wheel in an empty environment, with the README's first command
# make test-slow     minutes, not seconds
# make lint          ruff, mypy over the library, and the site with every link checked
# make docs          the site in build/site; for its search: python -m http.server --directory build/site
# make quickstart    both roads to ReLU on scikit-learn's digits: two minutes, once its environment is there
# make report        tables, figures and model cards from the committed records
# make clean         remove the environment

VENV ?= .venv
PYTHON ?= python3
UV = $(VENV)-uv/bin/uv
RUN = $(VENV)/bin/python
WORKERS ?= 2
TRANSFORMERS ?= git+https://github.com/huggingface/transformers
# One torch thread a worker: two workers with two threads each would fight for two cores. Bytecode is kept, whatever the
# environment says: pytest rewrites each test's assertions, which takes longer than all else of a collection.
PYTEST = PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(RUN) -m pytest -n $(WORKERS)

APART := test-lowest test-python313 test-consumers test-neighbours
.PHONY: test $(APART) test-versions test-nightly test-kernels test-processors test-wheel test-slow lint docs quickstart report clean

test: $(VENV)/ready
	$(PYTEST)

test-kernels: $(VENV)/ready
	$(PYTEST) -m "kernels and not slow and not gpu"

# torch's own kernels, oneDNN's and MKL's, as on processors with AVX2, and without any vector extension that can be chosen.
NUMERIC := tests/activation tests/graph tests/refit tests/export/test_plain_gelu.py
test-processors: $(VENV)/ready
	ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2 $(PYTEST) $(NUMERIC)
	ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 MKL_ENABLE_INSTRUCTIONS=SSE4_2 $(PYTEST) $(NUMERIC)

# Each has an environment of its own: other versions of what the others have.
$(APART) test-nightly: RUN = $(VENV)-$(@:test-%=%)/bin/python
test-consumers test-neighbours: TESTS = -m $(@:test-%=%) tests/test_docs.py tests/test_neighbours.py
$(APART): test-%: $(VENV)-%/ready
	$(PYTEST) $(TESTS)

test-nightly: $(VENV)-nightly/ready
	$(UV) pip install --quiet --python $(RUN) --upgrade $(TRANSFORMERS)
	$(PYTEST) --tb=no tests/families tests/models tests/training

test-wheel: $(VENV)/ready
	$(PYTEST) -m wheel tests/test_package.py

test-versions: test test-lowest test-python313

test-slow: $(VENV)/ready
	$(PYTEST) -m "slow and not gpu"

lint: $(VENV)/ready docs
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy hf_lgelu

# Links to the pages, laid as they lie here: mkdocs wants all of them in one folder.
docs: $(VENV)/docs
	mkdir -p build/pages
	ln -sfn ../../README.md ../../CHANGELOG.md ../../CONTRIBUTING.md ../../LICENSE ../../docs ../../model_cards build/pages
	PATH="$(abspath $(VENV)/bin):$$PATH" NO_MKDOCS_2_WARNING=1 mkdocs build --strict

quickstart: $(VENV)/quickstart
	$(RUN) scripts/quickstart.py --output_dir runs/quickstart

report: $(VENV)/ready
	$(RUN) scripts/report.py --runs model_cards/records --downstream model_cards/downstream \
	    --output_dir model_cards/report --pages . \
	    --cards model_cards

# A half-made environment has no "ready" and is made anew.
$(VENV)/ready: pyproject.toml
	@echo "Installing hf_lgelu and all that its tests need into $(VENV): some 7 GB, minutes by your network."
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet --editable '.[dev]'
	touch $@

# What the quickstart needs and no more; pip shows its progress.
$(VENV)/quickstart: pyproject.toml
	@echo "Installing PyTorch and what the quickstart needs into $(VENV): minutes, by your network; the quickstart itself takes two."
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --editable '.[quickstart]'
	touch $@

# uv finds this version of Python, or fetches it.
EXTRAS = dev
$(VENV)-lowest/ready: OPTIONS = --resolution lowest-direct
$(VENV)-lowest/ready: PYTHON = 3.11
$(VENV)-python313/ready: PYTHON = 3.13
$(VENV)-consumers/ready: EXTRAS = dev,consumers
$(VENV)-neighbours/ready: EXTRAS = dev,neighbours
$(VENV)-neighbours/ready: OPTIONS = --prerelease disallow
$(VENV)-%/ready: pyproject.toml | $(UV)
	$(UV) venv --quiet --clear --python $(PYTHON) $(@D)
	$(UV) pip install --quiet --python $(@D) $(OPTIONS) --editable '.[$(EXTRAS)]'
	touch $@

$(UV):
	python3 -m venv $(VENV)-uv
	$(VENV)-uv/bin/pip install --quiet uv

$(VENV)/docs: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet --editable '.[docs]'
	touch $@

clean:
	rm -rf $(VENV) $(VENV)-*
