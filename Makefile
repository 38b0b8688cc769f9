# make quickstart: environment, data, about three minutes of training on a laptop CPU, and text
# make test:       every component against its slow definition
# make clean:      removes the environment and what quickstart made; your own data and runs stay

PYTHON ?= python3
PY = .venv/bin/python

quickstart: .venv/ready
	$(PY) data/prepare.py shakespeare
	$(PY) train.py config/shakespeare.py
	$(PY) sample.py --out_dir=out/shakespeare --num_samples=2 --max_new_tokens=300

test: .venv/ready
	$(PY) -m pytest -q test_all.py

.venv/ready: requirements.txt
	@$(PYTHON) -c "import sys; sys.exit(None if sys.version_info >= (3, 10) else f'error: Python 3.10 or newer is needed, this is {sys.version.split()[0]}; name another one: make PYTHON=python3.12')"
	$(PYTHON) -m venv .venv
	$(PY) -m pip install -q -r requirements.txt
	touch $@

clean:
	rm -rf .venv out/shakespeare data/shakespeare __pycache__ data/__pycache__ .pytest_cache

.PHONY: quickstart test clean
