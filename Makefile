# make quickstart: environment, data, three to seven minutes of training on two CPU cores, and text
# make check:      after changing a line, in under a minute: lint, and every part against its slow definition
# make test:       all tests, on two cores; runs of train.py too, in one process and in several
# make lint:       ruff, with the settings in pyproject.toml
# make clean:      removes the environment and what quickstart made; your own data and runs stay

PYTHON ?= python3
PY = .venv/bin/python
PYTEST = $(PY) -m pytest -q -n 2 --maxschedchunk 1

quickstart: .venv/ready
	$(PY) data/prepare.py shakespeare
	$(PY) train.py config/shakespeare.py
	$(PY) sample.py --out_dir=out/shakespeare --num_samples=2 --max_new_tokens=300

check: lint
	$(PYTEST) -m "not slow"

test: .venv/ready
	$(PYTEST)

lint: .venv/ready
	$(PY) -m ruff check .

.venv/ready: requirements.txt
	@$(PYTHON) -c "import sys; sys.exit(None if sys.version_info >= (3, 10) else f'error: Python 3.10 or newer is needed, this is {sys.version.split()[0]}; name another one: make PYTHON=python3.12')"
	$(PYTHON) -m venv .venv
	$(PY) -m pip install -q -r requirements.txt
	touch $@

clean:
	rm -rf .venv out/shakespeare data/shakespeare __pycache__ */__pycache__ .pytest_cache .ruff_cache

.PHONY: quickstart check test lint clean
