# `make` shows what there is. Everything runs in the environment that `make setup` makes.

VENV ?= .venv
PY = "$(VENV)/bin/python"
# Hundreds of processes import torch: bytecode is kept, even where the user keeps none.
RUN = PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(PY)
NBVAL = --nbval-lax --nbval-current-env --nbval-cell-timeout=120
export VENV PYTHON TORCH_INDEX

.DEFAULT_GOAL := help
.PHONY: help setup course test check lint notebooks exercises tour doctor gpu bench clean

help: ## show this list
	@echo "The course:  make course    (opens the first lesson; NB=02 opens another)"
	@echo "The proof:   make test      (every test, notebook and solution)"
	@echo
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  make \1	\2/p' Makefile
	@echo
	@echo "PYTHON=/path/to/python names the Python to use; VENV=folder puts the environment elsewhere;"
	@echo "TORCH_INDEX=address names an index with another build of torch (the CPU build is smaller)."

setup: ## make the environment in .venv, or mend it
	@sh tools/setup.sh

course: doctor ## look at this machine, then open JupyterLab on a lesson
	@$(PY) -m tools.course $(NB)

test: setup ## run every test, and every notebook and solution through nbval
	$(RUN) -m pytest $(NBVAL) tests notebooks solutions

check: lint ## the quick gate: lint, types, and the tests that are not slow
	$(RUN) -m pytest -m "not slow" tests

lint: setup ## ruff, mypy, and whether all that is generated is up to date
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(PY) -m tools.constraints --check
	$(PY) -m tools.exercises --check --strict

notebooks: setup ## run and normalise all notebooks and solutions, or one lesson's: NB=02
	$(RUN) -m tools.notebooks $(NB)

exercises: setup ## generate the exercises from the solutions; FORCE=1 overwrites edited ones
	$(PY) -m tools.exercises $(NB) $(if $(FORCE),--force)

tour: setup ## the course in one minute, without a browser
	$(PY) -m pdt tour

doctor: setup ## what this machine can run, and what each missing thing costs
	@$(PY) -m pdt doctor

gpu: ## run what is marked gpu, with PYTHON (python3); installs nothing
	"$(or $(PYTHON),python3)" -m tools.gpu

bench: setup ## run every benchmark, or one: NAME=bench_ranks
	@for script in benchmarks/$(or $(NAME),[a-z]*).py; do \
	    echo "== $$script"; $(PY) "$$script" || exit 1; done

clean: ## remove caches and what runs left behind; .venv stays
	rm -rf build runs .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path "./.venv*" -prune -exec rm -rf {} +
